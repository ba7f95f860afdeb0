//! Sections of JSON call objects: one, several, or a list of them, up to a closing marker.
//!
//! Hermes and Qwen: `<tool_call>{...}</tool_call>`. Llama 3: `{...}; {...}`. Mistral: `[TOOL_CALLS][{...},
//! {...}]`. Phi-4-mini: `functools[{...}]`, and a list or an object
//! between `<|tool_call|>` and `<|/tool_call|>`.

use super::Function;
use super::event::Sink;
use super::json::{CallObject, CallStep};
use super::section::{Markers, Section, Step};

/// How call objects stand in a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// One after the other, perhaps with `;` or `,` between them.
    Objects,
    /// In a JSON list.
    List,
    /// Either, as the first bracket says.
    Any,
}

#[derive(Debug)]
enum State {
    /// Before the first object or the list's bracket.
    Begin,
    /// In a list, or after a separator: an object must come.
    Item,
    Object(Box<CallObject>),
    /// After an object.
    After,
    /// After everything: only the closing marker is left.
    Closing,
}

/// Reader of such a section, from behind its opening marker.
#[derive(Debug)]
pub(super) struct JsonCalls {
    shape: Shape,
    closing: Markers,
    has_closing: bool,
    /// A call must be to one of these; `None`: to any function.
    known: Option<Vec<String>>,
    /// The format has no marker, so an object without arguments is no call.
    is_bare: bool,
    state: State,
    in_call: bool,
    call_count: usize,
}

impl JsonCalls {
    /// `closing`: the markers that end the section; none for sections that just end.
    pub(super) fn new(shape: Shape, closing: &'static [&'static str]) -> Self {
        Self {
            shape,
            has_closing: !closing.is_empty(),
            closing: Markers::new(closing),
            known: None,
            is_bare: false,
            state: State::Begin,
            in_call: false,
            call_count: 0,
        }
    }

    /// For text without an opening marker: only calls with arguments, and to these functions if any are
    /// given.
    pub(super) fn bare(mut self, functions: &[Function]) -> Self {
        self.is_bare = true;
        let names = functions.iter().map(|f| f.name.clone());
        self.known = (!functions.is_empty()).then(|| names.collect());
        self
    }

    fn is_known(&self, name: &str) -> bool {
        self.known.as_ref().is_none_or(|known| known.iter().any(|k| k == name))
    }

    fn object_char(&mut self, mut object: Box<CallObject>, c: char, sink: &mut Sink) -> Step {
        let mut arguments = String::new();
        match object.push(c, &mut arguments) {
            CallStep::More => {}
            CallStep::Start(name) if self.is_known(&name) => {
                sink.start(name, None);
                self.in_call = true;
            }
            CallStep::End(Some((name, held))) if self.is_known(&name) => {
                sink.start(name, None);
                arguments = held;
                return self.ended(&arguments, sink);
            }
            CallStep::End(None) => return self.ended(&arguments, sink),
            _ => return Step::Fail,
        }
        sink.arguments(&arguments);
        self.state = State::Object(object);
        if self.in_call { Step::Used } else { Step::More }
    }

    fn ended(&mut self, arguments: &str, sink: &mut Sink) -> Step {
        sink.arguments(arguments);
        self.in_call = false;
        self.call_count += 1;
        self.state = State::After;
        Step::Used
    }

    fn structure(&mut self, c: char, sink: &mut Sink) -> Step {
        if self.shape == Shape::Any {
            self.shape = if c == '[' { Shape::List } else { Shape::Objects };
        }
        let in_list = self.shape == Shape::List;
        match (&self.state, c) {
            (State::Begin, '[') if in_list => self.state = State::Item,
            (State::Begin, '{') if !in_list => return self.begin_object(c, sink),
            (State::Item, '{') => return self.begin_object(c, sink),
            (State::After, '{') if !in_list => return self.begin_object(c, sink),
            (State::After, ',') => self.state = State::Item,
            (State::After, ';') if !in_list => self.state = State::Item,
            (State::After, ']') if in_list => {
                self.state = State::Closing;
                return if self.has_closing { Step::More } else { Step::Done };
            }
            (State::After, _) if in_list => return Step::Fail,
            (State::After | State::Closing, _) => return self.close_char(c),
            _ => return Step::Fail,
        }
        Step::More
    }

    fn begin_object(&mut self, c: char, sink: &mut Sink) -> Step {
        self.object_char(Box::new(CallObject::new(self.is_bare)), c, sink)
    }

    fn close_char(&mut self, c: char) -> Step {
        self.state = State::Closing;
        match self.closing.push(c) {
            Ok(Some(_)) => Step::Done,
            Ok(None) => Step::More,
            Err(()) => Step::Fail,
        }
    }
}

impl Section for JsonCalls {
    fn push(&mut self, c: char, sink: &mut Sink) -> Step {
        match std::mem::replace(&mut self.state, State::Closing) {
            State::Object(object) => self.object_char(object, c, sink),
            state => {
                self.state = state;
                if c.is_whitespace() && self.closing.is_fresh() {
                    Step::More
                } else {
                    self.structure(c, sink)
                }
            }
        }
    }

    fn is_between_calls(&self) -> bool {
        self.call_count > 0 && matches!(self.state, State::After | State::Closing | State::Item)
    }
}
