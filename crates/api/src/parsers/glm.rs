//! GLM's calls, in tags:
//! `<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>`.
//!
//! White space between tags is layout, inside a value it counts. A name alone is no call yet: it could be a word
//! of a text about calls.

use super::Function;
use super::arguments::{Arguments, Closing, KEY_LEN_MAX, ValueReader};
use super::event::{Sink, is_function_name};
use super::section::{Markers, Section, Step};

/// Opens a section.
pub(super) const TOOL_CALL: &str = "<tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: Closing = Closing { tag: "</arg_value>", has_layout: false };
const TOOL_CALL_END: &str = "</tool_call>";

#[derive(Debug)]
enum State {
    /// The function's name, up to white space or a tag.
    Name(String),
    /// Between tags, before the call has started: what may come now.
    Head(String, Markers),
    /// Between tags.
    Tags(Markers),
    /// A parameter's name, and its closing tag as far as it came.
    Key(String, Markers),
    /// Between a parameter's name and its value.
    Behind(String, Markers),
    Value(ValueReader),
}

/// Reader of a section, from behind [`TOOL_CALL`].
#[derive(Debug)]
pub(super) struct GlmCalls {
    arguments: Arguments,
    state: State,
    has_call: bool,
}

impl GlmCalls {
    pub(super) fn new(functions: &[Function]) -> Self {
        Self { arguments: Arguments::new(functions), state: State::Name(String::new()), has_call: false }
    }

    fn tags() -> Markers {
        Markers::new(&[KEY, TOOL_CALL_END])
    }

    fn name_char(&mut self, mut name: String, c: char, sink: &mut Sink) -> Step {
        if c.is_whitespace() && name.is_empty() {
            self.state = State::Name(name);
            return Step::More;
        }
        if c.is_whitespace() || c == '<' {
            self.state = State::Head(name, Self::tags());
            return self.push(c, sink);
        }
        name.push(c);
        let is_name = is_function_name(&name);
        self.state = State::Name(name);
        if is_name { Step::More } else { Step::Fail }
    }

    fn head_char(&mut self, name: String, mut markers: Markers, c: char, sink: &mut Sink) -> Step {
        match Self::marker_char(&mut markers, c) {
            Ok(Some(tag)) if is_function_name(&name) => {
                self.has_call = true;
                self.arguments.begin(name, sink);
                match self.tag(tag, sink) {
                    Step::More => Step::Used,
                    step => step,
                }
            }
            Ok(None) => {
                self.state = State::Head(name, markers);
                Step::More
            }
            _ => Step::Fail,
        }
    }

    /// A tag between arguments.
    fn tag(&mut self, tag: &str, sink: &mut Sink) -> Step {
        if tag == TOOL_CALL_END {
            self.arguments.end(sink);
            return Step::Done;
        }
        self.state = State::Key(String::new(), Markers::new(&[KEY_END]));
        Step::More
    }

    fn key_char(&mut self, mut key: String, mut end: Markers, c: char) -> Step {
        if c == '<' || !end.is_fresh() {
            let Ok(tag) = end.push(c) else { return Step::Fail };
            self.state = match tag {
                Some(_) => State::Behind(key, Markers::new(&[VALUE])),
                None => State::Key(key, end),
            };
            return Step::More;
        }
        key.push(c);
        let is_key = key.len() <= KEY_LEN_MAX && c != '\n';
        self.state = State::Key(key, end);
        if is_key { Step::More } else { Step::Fail }
    }

    /// White space, then one of `markers`.
    fn marker_char(markers: &mut Markers, c: char) -> Result<Option<&'static str>, ()> {
        if c.is_whitespace() && markers.is_fresh() { Ok(None) } else { markers.push(c) }
    }
}

impl Section for GlmCalls {
    fn push(&mut self, c: char, sink: &mut Sink) -> Step {
        match std::mem::replace(&mut self.state, State::Tags(Self::tags())) {
            State::Name(name) => self.name_char(name, c, sink),
            State::Head(name, markers) => self.head_char(name, markers, c, sink),
            State::Tags(mut markers) => match Self::marker_char(&mut markers, c) {
                Ok(Some(tag)) => self.tag(tag, sink),
                Ok(None) => {
                    self.state = State::Tags(markers);
                    Step::More
                }
                Err(()) => Step::Fail,
            },
            State::Key(key, end) => self.key_char(key, end, c),
            State::Behind(key, mut markers) => match Self::marker_char(&mut markers, c) {
                Ok(Some(_)) => {
                    self.state = State::Value(self.arguments.value_of(key.trim(), VALUE_END, sink));
                    Step::Used
                }
                Ok(None) => {
                    self.state = State::Behind(key, markers);
                    Step::More
                }
                Err(()) => Step::Fail,
            },
            State::Value(mut value) => {
                if !value.closes(c, sink) {
                    self.state = State::Value(value);
                }
                Step::Used
            }
        }
    }

    fn is_between_calls(&self) -> bool {
        self.has_call
    }

    fn finish(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Key(key, _) | State::Behind(key, _) => self.arguments.cut_key(key.trim(), sink),
            State::Value(value) => value.release(sink),
            State::Name(_) | State::Head(..) | State::Tags(_) => {}
        }
    }
}
