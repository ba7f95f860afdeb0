//! Calls written as Python: `[get_weather(city="Bern", days=2), now()]` (Llama 3.2 and 4 and others).
//!
//! A call is told when its closing bracket is there: only then is it sure that its arguments are
//! literals, and they must be turned from Python into JSON anyway.

use super::event::{Sink, is_function_name};
use super::section::{Markers, Section, Step};
use super::{Function, python};

/// Opens a section in Llama 4's answers; others begin with the bare list.
pub(super) const PYTHON_START: &str = "<|python_start|>";
const PYTHON_END: &str = "<|python_end|>";

#[derive(Debug)]
enum State {
    Begin,
    /// A call must come.
    Item,
    Name(String),
    /// Inside the call's brackets.
    Body {
        name: String,
        body: String,
        brackets: python::Brackets,
    },
    /// After a call.
    After,
    /// After the list.
    Closing(Markers),
}

/// Reader of a section, from its `[` (bare) or from behind [`PYTHON_START`].
#[derive(Debug)]
pub(super) struct PythonicCalls {
    /// Calls must be to one of these; empty: to any function.
    known: Vec<String>,
    has_marker: bool,
    state: State,
    call_count: usize,
}

impl PythonicCalls {
    pub(super) fn new(functions: &[Function], has_marker: bool) -> Self {
        let known = functions.iter().map(|f| f.name.clone()).collect();
        Self { known, has_marker, state: State::Begin, call_count: 0 }
    }

    fn is_known(&self, name: &str) -> bool {
        is_function_name(name) && (self.known.is_empty() || self.known.iter().any(|k| k == name))
    }

    fn body_char(&mut self, c: char, sink: &mut Sink) -> Step {
        let State::Body { name, body, brackets } = &mut self.state else { return Step::Fail };
        if !brackets.closes(c) {
            body.push(c);
            return Step::More;
        }
        let Some(arguments) = python::keyword_arguments(body) else { return Step::Fail };
        sink.start(std::mem::take(name), None);
        sink.arguments(&arguments);
        self.call_count += 1;
        self.state = State::After;
        Step::Used
    }
}

impl Section for PythonicCalls {
    fn push(&mut self, c: char, sink: &mut Sink) -> Step {
        match &mut self.state {
            State::Body { .. } => return self.body_char(c, sink),
            State::Closing(markers) if !markers.is_fresh() || !c.is_whitespace() => {
                return match markers.push(c) {
                    Ok(Some(_)) => Step::Done,
                    Ok(None) => Step::More,
                    Err(()) => Step::Fail,
                };
            }
            State::Name(name) if c == '(' => {
                let name = std::mem::take(name);
                if !self.is_known(&name) {
                    return Step::Fail;
                }
                self.state = State::Body { name, body: String::new(), brackets: python::Brackets::new() };
            }
            State::Name(name) => {
                name.push(c);
                if !is_function_name(name) {
                    return Step::Fail;
                }
            }
            _ if c.is_whitespace() => {}
            State::Begin if c == '[' => self.state = State::Item,
            State::Item if c.is_alphabetic() || c == '_' => self.state = State::Name(c.to_string()),
            State::After if c == ',' => self.state = State::Item,
            State::After if c == ']' && self.has_marker => {
                self.state = State::Closing(Markers::new(&[PYTHON_END]));
            }
            State::After if c == ']' => return Step::Done,
            _ => return Step::Fail,
        }
        Step::More
    }

    fn is_between_calls(&self) -> bool {
        self.call_count > 0 && matches!(self.state, State::After | State::Item | State::Closing(_))
    }
}
