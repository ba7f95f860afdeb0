//! Mistral's calls behind `[TOOL_CALLS]`: a JSON list (tokenizers up to v7), or `name[ARGS]{...}` and
//! `name[CALL_ID]id[ARGS]{...}` (from v11 on), where every call has its own marker.

use super::event::{Sink, is_function_name};
use super::json::{JsonScanner, NAME_LEN_MAX, Part, escape_control};
use super::json_calls::{JsonCalls, Shape};
use super::section::{Section, Step};

/// Opens a section.
pub(super) const TOOL_CALLS: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

#[derive(Debug)]
enum State {
    /// Nothing but white space yet.
    Begin,
    List(JsonCalls),
    /// Name, id and markers, up to the `{` of the arguments.
    Head(String),
    Arguments(JsonScanner),
}

/// Reader of a section, from behind [`TOOL_CALLS`].
#[derive(Debug)]
pub(super) struct MistralCalls {
    state: State,
}

impl MistralCalls {
    pub(super) fn new() -> Self {
        Self { state: State::Begin }
    }

    fn head_char(&mut self, c: char, sink: &mut Sink) -> Step {
        let State::Head(head) = &mut self.state else { return Step::Fail };
        if c != '{' {
            head.push(c);
            let may_go_on = c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '[' | ']');
            return if may_go_on && head.len() <= NAME_LEN_MAX + 64 { Step::More } else { Step::Fail };
        }
        let head = head.strip_suffix(ARGS).unwrap_or(head);
        let (name, id) = head.split_once(CALL_ID).map_or((head, None), |(name, id)| (name, Some(id)));
        if !is_function_name(name) || id.is_some_and(|id| !is_function_name(id)) {
            return Step::Fail;
        }
        sink.start(name.to_owned(), id.map(str::to_owned));
        self.state = State::Arguments(JsonScanner::new());
        self.push(c, sink)
    }
}

impl Section for MistralCalls {
    fn push(&mut self, c: char, sink: &mut Sink) -> Step {
        match &mut self.state {
            State::Begin if c.is_whitespace() => Step::More,
            State::Begin if c == '[' => {
                let mut list = JsonCalls::new(Shape::List, &[]);
                let step = list.push(c, sink);
                self.state = State::List(list);
                step
            }
            State::Begin => {
                self.state = State::Head(String::new());
                self.head_char(c, sink)
            }
            State::List(list) => list.push(c, sink),
            State::Head(_) => self.head_char(c, sink),
            State::Arguments(scanner) => {
                let Ok(part) = scanner.push(c) else { return Step::Fail };
                let mut text = String::new();
                escape_control(c, matches!(part, Part::Key | Part::Scalar), &mut text);
                sink.arguments(&text);
                if scanner.is_done() { Step::Done } else { Step::Used }
            }
        }
    }

    fn is_between_calls(&self) -> bool {
        matches!(&self.state, State::List(list) if list.is_between_calls())
    }
}
