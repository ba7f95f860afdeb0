//! Qwen3-Coder's calls, in tags:
//! `<tool_call><function=f><parameter=city>Bern</parameter></function></tool_call>`.
//!
//! A value is written bare, so only the function's schema tells a text from a number. Values that are
//! texts come out as they come in; others when their tag closes.

use super::event::{Sink, is_function_name};
use super::json::escape_control;
use super::section::{Markers, Section, Step};
use super::{Function, python};
use serde_json::Value;

/// Opens a section.
pub(super) const TOOL_CALL: &str = "<tool_call>";
/// Opens a section in answers that leave the outer tag out.
pub(super) const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const TOOL_CALL_END: &str = "</tool_call>";
/// Longest parameter name, in bytes.
const KEY_LEN_MAX: usize = 256;

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
    functions: Vec<Function>,
    has_outer: bool,
    state: State,
    /// Position of the function among those of the request.
    function: Option<usize>,
    has_call: bool,
    parameter_count: usize,
}

impl XmlCalls {
    /// `opener` is [`TOOL_CALL`] or [`FUNCTION`].
    pub(super) fn new(functions: &[Function], opener: &str) -> Self {
        let has_outer = opener == TOOL_CALL;
        let state =
            if has_outer { State::Tags(Markers::new(&[FUNCTION])) } else { State::Name(String::new()) };
        let functions = functions.to_vec();
        Self { functions, has_outer, state, function: None, has_call: false, parameter_count: 0 }
    }

    fn tag(&mut self, tag: &str, sink: &mut Sink) -> Step {
        match tag {
            FUNCTION => self.state = State::Name(String::new()),
            PARAMETER => self.state = State::Key(String::new()),
            FUNCTION_END => {
                sink.arguments("}");
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
        self.function = self.functions.iter().position(|f| f.name == name);
        self.parameter_count = 0;
        self.has_call = true;
        sink.start(name, None);
        sink.arguments("{");
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
        sink.arguments(&format!("{}{}: ", self.separator(), Value::from(key.as_str())));
        self.parameter_count += 1;
        let is_text = self.function.is_none_or(|f| self.functions[f].takes_text(&key));
        if is_text {
            sink.arguments("\"");
        }
        self.state = State::Value(ValueReader::new(is_text));
        Step::Used
    }

    fn separator(&self) -> &'static str {
        if self.parameter_count > 0 { ", " } else { "" }
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
            State::Key(key) => {
                let key = std::mem::take(key);
                sink.arguments(&format!("{}\"{key}", self.separator()));
            }
            State::Value(value) => value.release(sink),
            State::Tags(_) | State::Name(_) => {}
        }
    }
}

/// One value, up to its closing tag. A line break right behind the opening and right before the closing
/// tag is layout.
#[derive(Debug)]
struct ValueReader {
    is_text: bool,
    is_at_start: bool,
    /// What may become the closing tag, with the line break before it.
    held: String,
    /// The value so far, unless it is text and told already.
    value: String,
}

impl ValueReader {
    fn new(is_text: bool) -> Self {
        Self { is_text, is_at_start: true, held: String::new(), value: String::new() }
    }

    /// Takes the next character: was it the end of the closing tag?
    fn closes(&mut self, c: char, sink: &mut Sink) -> bool {
        if std::mem::replace(&mut self.is_at_start, false) && c == '\n' {
            return false;
        }
        self.held.push(c);
        loop {
            let tag = self.held.strip_prefix('\n').unwrap_or(&self.held);
            if tag == PARAMETER_END {
                self.held.clear();
                self.end(sink);
                return true;
            }
            if PARAMETER_END.starts_with(tag) {
                return false;
            }
            let first = self.held.remove(0);
            self.take(first, sink);
        }
    }

    fn take(&mut self, c: char, sink: &mut Sink) {
        if !self.is_text {
            self.value.push(c);
            return;
        }
        let mut text = String::new();
        match c {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            c => escape_control(c, true, &mut text),
        }
        sink.arguments(&text);
    }

    fn end(&mut self, sink: &mut Sink) {
        if self.is_text {
            sink.arguments("\"");
            return;
        }
        let value = std::mem::take(&mut self.value);
        // JSON as it stands, else Python's spelling of it, else a text after all.
        match serde_json::from_str::<serde::de::IgnoredAny>(&value) {
            Ok(_) => sink.arguments(value.trim()),
            Err(_) => {
                let json = python::literal(&value).unwrap_or_else(|| Value::from(value).to_string());
                sink.arguments(&json);
            }
        }
    }

    /// The answer ended inside the value: what came of it.
    fn release(&mut self, sink: &mut Sink) {
        for c in std::mem::take(&mut self.held).chars() {
            self.take(c, sink);
        }
        sink.arguments(&std::mem::take(&mut self.value));
    }
}
