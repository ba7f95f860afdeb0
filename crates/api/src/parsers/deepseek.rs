//! Calls in a section of special tokens: DeepSeek's and Kimi K2's.
//!
//! DeepSeek R1 and V3 write the name and a fenced JSON text behind the separator; V3.1 writes the name before and
//! the bare JSON text behind it, as Kimi K2 does with the call's id, `functions.name:0`, in place of the name.

use super::event::{Sink, is_function_name};
use super::json::{JsonScanner, NAME_LEN_MAX, Part, escape_control};
use super::section::{Markers, Section, Step};

/// The special tokens of a family.
#[derive(Debug)]
pub(super) struct Marks {
    /// Opens the section.
    pub(super) calls_begin: &'static str,
    /// Between calls: what begins one, what ends the section.
    between: [&'static str; 2],
    /// Behind arguments: a fence, what ends the call.
    tail: [&'static str; 2],
    separator: &'static str,
    /// The id of a call holds its name.
    has_ids: bool,
}

/// DeepSeek's.
pub(super) const DEEPSEEK: Marks = Marks {
    calls_begin: "<｜tool▁calls▁begin｜>",
    between: ["<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"],
    tail: [FENCE, "<｜tool▁call▁end｜>"],
    separator: "<｜tool▁sep｜>",
    has_ids: false,
};

/// Kimi K2's.
pub(super) const KIMI: Marks = Marks {
    calls_begin: "<|tool_calls_section_begin|>",
    between: ["<|tool_call_begin|>", "<|tool_calls_section_end|>"],
    tail: [FENCE, "<|tool_call_end|>"],
    separator: "<|tool_call_argument_begin|>",
    has_ids: true,
};

const FENCE: &str = "```";
/// What Kimi K2 writes before a name in an id.
const ID_PREFIX: &str = "functions.";

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

impl State {
    fn between(marks: &'static Marks) -> Self {
        Self::Between(Markers::new(&marks.between))
    }
}

/// Reader of the section, from behind the mark that opens it.
#[derive(Debug)]
pub(super) struct DeepSeekCalls {
    marks: &'static Marks,
    state: State,
    call_count: usize,
}

impl DeepSeekCalls {
    pub(super) fn new(marks: &'static Marks) -> Self {
        Self { marks, state: State::between(marks), call_count: 0 }
    }

    fn head_char(&mut self, mut head: String, c: char, sink: &mut Sink) -> Step {
        if c != '{' {
            head.push(c);
            let is_long = head.len() > NAME_LEN_MAX + 128;
            self.state = State::Head(head);
            return if is_long { Step::Fail } else { Step::More };
        }
        let parts = head.split_once(self.marks.separator);
        let call = parts.and_then(|(before, behind)| match self.marks.has_ids {
            true => named_by_id(before.trim()).filter(|_| behind.trim().is_empty()),
            false => call_name(before, behind).map(|name| (name, None)),
        });
        let Some((name, id)) = call else {
            self.state = State::Head(head);
            return Step::Fail;
        };
        sink.start(name, id);
        self.argument_char(JsonScanner::new(), c, sink)
    }

    fn argument_char(&mut self, mut scanner: JsonScanner, c: char, sink: &mut Sink) -> Step {
        let Ok(part) = scanner.push(c) else { return Step::Fail };
        let mut text = String::new();
        escape_control(c, matches!(part, Part::Key | Part::Scalar), &mut text);
        sink.arguments(&text);
        self.state = if scanner.is_done() {
            self.call_count += 1;
            State::Tail(Markers::new(&self.marks.tail))
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

/// The name in an id like `functions.get_weather:0`, and the id, which later turns must repeat.
fn named_by_id(id: &str) -> Option<(String, Option<String>)> {
    let (name, number) = id.strip_prefix(ID_PREFIX).unwrap_or(id).rsplit_once(':')?;
    let is_good = is_function_name(name) && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    is_good.then(|| (name.to_owned(), Some(id.to_owned())))
}

impl Section for DeepSeekCalls {
    fn push(&mut self, c: char, sink: &mut Sink) -> Step {
        match std::mem::replace(&mut self.state, State::between(self.marks)) {
            State::Head(head) => self.head_char(head, c, sink),
            State::Arguments(scanner) => self.argument_char(scanner, c, sink),
            State::Between(markers) if markers.is_fresh() && c.is_whitespace() => Step::More,
            State::Between(mut markers) => {
                let found = markers.push(c);
                self.state = State::Between(markers);
                match found {
                    Err(()) => return Step::Fail,
                    Ok(Some(mark)) if mark == self.marks.between[1] => {
                        return if self.call_count > 0 { Step::Done } else { Step::Fail };
                    }
                    Ok(Some(_)) => self.state = State::Head(String::new()),
                    Ok(None) => {}
                }
                Step::More
            }
            State::Tail(mut markers) => {
                let skips = markers.is_fresh() && c.is_whitespace();
                let found = if skips { Ok(None) } else { markers.push(c) };
                self.state = match found {
                    Ok(Some(mark)) if mark == self.marks.tail[1] => State::between(self.marks),
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
