//! DeepSeek's calls. R1 and V3 write the name and a fenced JSON text behind the separator; V3.1 writes
//! the name before and the bare JSON text behind it.

use super::event::{Sink, is_function_name};
use super::json::{JsonScanner, NAME_LEN_MAX, Part, escape_control};
use super::section::{Markers, Section, Step};

/// Opens the section.
pub(super) const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```";

#[derive(Debug)]
enum State {
    /// Between calls.
    Between(Markers),
    /// From the beginning of a call to the `{` of its arguments.
    Head(String),
    Arguments(JsonScanner),
    /// Behind the arguments: the fence, if there was one, and the end of the call.
    Tail(Markers),
}

/// Reader of the section, from behind [`CALLS_BEGIN`].
#[derive(Debug)]
pub(super) struct DeepSeekCalls {
    state: State,
    call_count: usize,
}

impl DeepSeekCalls {
    pub(super) fn new() -> Self {
        Self { state: Self::between(), call_count: 0 }
    }

    fn between() -> State {
        State::Between(Markers::new(&[CALL_BEGIN, CALLS_END]))
    }

    fn head_char(&mut self, mut head: String, c: char, sink: &mut Sink) -> Step {
        if c != '{' {
            head.push(c);
            let is_long = head.len() > NAME_LEN_MAX + 128;
            self.state = State::Head(head);
            return if is_long { Step::Fail } else { Step::More };
        }
        let Some(name) = head.split_once(SEPARATOR).and_then(|(kind, rest)| call_name(kind, rest)) else {
            self.state = State::Head(head);
            return Step::Fail;
        };
        sink.start(name, None);
        self.argument_char(JsonScanner::new(), c, sink)
    }

    fn argument_char(&mut self, mut scanner: JsonScanner, c: char, sink: &mut Sink) -> Step {
        let Ok(part) = scanner.push(c) else { return Step::Fail };
        let mut text = String::new();
        escape_control(c, matches!(part, Part::Key | Part::Scalar), &mut text);
        sink.arguments(&text);
        self.state = if scanner.is_done() {
            self.call_count += 1;
            State::Tail(Markers::new(&[FENCE, CALL_END]))
        } else {
            State::Arguments(scanner)
        };
        Step::Used
    }
}

/// The name of a call from what stands before and behind the separator.
fn call_name(before: &str, behind: &str) -> Option<String> {
    let behind = behind.trim();
    let name = if behind.is_empty() {
        before.trim()
    } else {
        behind.strip_suffix("```json").unwrap_or(behind).trim()
    };
    is_function_name(name).then(|| name.to_owned())
}

impl Section for DeepSeekCalls {
    fn push(&mut self, c: char, sink: &mut Sink) -> Step {
        match std::mem::replace(&mut self.state, Self::between()) {
            State::Head(head) => self.head_char(head, c, sink),
            State::Arguments(scanner) => self.argument_char(scanner, c, sink),
            State::Between(markers) if markers.is_fresh() && c.is_whitespace() => Step::More,
            State::Between(mut markers) => {
                let found = markers.push(c);
                self.state = State::Between(markers);
                match found {
                    Err(()) => return Step::Fail,
                    Ok(Some(CALLS_END)) if self.call_count > 0 => return Step::Done,
                    Ok(Some(CALLS_END)) => return Step::Fail,
                    Ok(Some(_)) => self.state = State::Head(String::new()),
                    Ok(None) => {}
                }
                Step::More
            }
            State::Tail(mut markers) => {
                let skips = markers.is_fresh() && c.is_whitespace();
                let found = if skips { Ok(None) } else { markers.push(c) };
                self.state = match found {
                    Ok(Some(CALL_END)) => Self::between(),
                    _ => State::Tail(markers),
                };
                if found.is_err() { Step::Fail } else { Step::More }
            }
        }
    }

    fn is_between_calls(&self) -> bool {
        self.call_count > 0 && matches!(self.state, State::Between(_) | State::Tail(_))
    }
}
