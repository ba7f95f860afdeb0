//! Qwen3-Coder's calls, in tags:
//! `<tool_call><function=f><parameter=city>Bern</parameter></function></tool_call>`.

use super::Function;
use super::arguments::{Arguments, Closing, KEY_LEN_MAX, ValueReader};
use super::event::{Sink, is_function_name};
use super::section::{Markers, Section, Step};

/// Opens a section.
pub(super) const TOOL_CALL: &str = "<tool_call>";
/// Opens a section in answers that leave the outer tag out.
pub(super) const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: Closing = Closing { tag: "</parameter>", has_layout: true };
const TOOL_CALL_END: &str = "</tool_call>";

#[derive(Debug)]
enum State {
    /// Between tags: what may come now.
    Tags(Markers),
    /// A function's name, up to `>`.
    Name(String),
    /// A parameter's name, up to `>`.
    Key(String),
    Value(ValueReader),
}

/// Reader of a section, from behind its opening tag.
#[derive(Debug)]
pub(super) struct XmlCalls {
    arguments: Arguments,
    has_outer: bool,
    state: State,
    has_call: bool,
}

impl XmlCalls {
    /// `opener` is [`TOOL_CALL`] or [`FUNCTION`].
    pub(super) fn new(functions: &[Function], opener: &str) -> Self {
        let has_outer = opener == TOOL_CALL;
        let state =
            if has_outer { State::Tags(Markers::new(&[FUNCTION])) } else { State::Name(String::new()) };
        Self { arguments: Arguments::new(functions), has_outer, state, has_call: false }
    }

    fn tag(&mut self, tag: &str, sink: &mut Sink) -> Step {
        match tag {
            FUNCTION => self.state = State::Name(String::new()),
            PARAMETER => self.state = State::Key(String::new()),
            FUNCTION_END => {
                self.arguments.end(sink);
                if !self.has_outer {
                    return Step::Done;
                }
                self.state = State::Tags(Markers::new(&[FUNCTION, TOOL_CALL_END]));
                return Step::Used;
            }
            _ => return Step::Done,
        }
        Step::More
    }

    fn name_char(&mut self, mut name: String, c: char, sink: &mut Sink) -> Step {
        if c != '>' {
            name.push(c);
            let is_name = is_function_name(&name);
            self.state = State::Name(name);
            return if is_name { Step::More } else { Step::Fail };
        }
        if !is_function_name(&name) {
            return Step::Fail;
        }
        self.has_call = true;
        self.arguments.begin(name, sink);
        self.state = Self::in_function();
        Step::Used
    }

    fn in_function() -> State {
        State::Tags(Markers::new(&[PARAMETER, FUNCTION_END]))
    }

    fn key_char(&mut self, mut key: String, c: char, sink: &mut Sink) -> Step {
        if c != '>' {
            key.push(c);
            let is_key = key.len() <= KEY_LEN_MAX && c != '<' && c != '\n';
            self.state = State::Key(key);
            return if is_key { Step::More } else { Step::Fail };
        }
        self.state = State::Value(self.arguments.value_of(&key, PARAMETER_END, sink));
        Step::Used
    }
}

impl Section for XmlCalls {
    fn push(&mut self, c: char, sink: &mut Sink) -> Step {
        match std::mem::replace(&mut self.state, Self::in_function()) {
            State::Tags(markers) if markers.is_fresh() && c.is_whitespace() => {
                self.state = State::Tags(markers);
                Step::More
            }
            State::Tags(mut markers) => match markers.push(c) {
                Ok(Some(tag)) => self.tag(tag, sink),
                Ok(None) => {
                    self.state = State::Tags(markers);
                    Step::More
                }
                Err(()) => Step::Fail,
            },
            State::Name(name) => self.name_char(name, c, sink),
            State::Key(key) => self.key_char(key, c, sink),
            State::Value(mut value) => {
                if !value.closes(c, sink) {
                    self.state = State::Value(value);
                }
                Step::Used
            }
        }
    }

    fn is_between_calls(&self) -> bool {
        self.has_call && matches!(self.state, State::Tags(_) | State::Key(_) | State::Value(_))
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Key(key) => self.arguments.cut_key(key, sink),
            State::Value(value) => value.release(sink),
            State::Tags(_) | State::Name(_) => {}
        }
    }
}
