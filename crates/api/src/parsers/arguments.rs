//! Arguments that stand between tags, name and value apart, for the readers of such formats (`xml`, `glm`).
//!
//! A value is written bare, so only the function's schema tells a text from a number. Values that are
//! texts come out as they come in; others when their tag closes.

use super::event::Sink;
use super::json::escape_control;
use super::{Function, python};
use serde_json::Value;

/// Longest name of a parameter, in bytes.
pub(super) const KEY_LEN_MAX: usize = 256;

/// Writes calls and their arguments as JSON.
#[derive(Debug)]
pub(super) struct Arguments {
    functions: Vec<Function>,
    /// Position of the call's function among those of the request.
    function: Option<usize>,
    count: usize,
}

/// How a format closes its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closing {
    pub(super) tag: &'static str,
    /// A line break right behind the opening and right before the closing tag is layout.
    pub(super) has_layout: bool,
}

impl Arguments {
    /// Of calls to the `functions` of the request.
    pub(super) fn new(functions: &[Function]) -> Self {
        Self { functions: functions.to_vec(), function: None, count: 0 }
    }

    /// A call begins.
    pub(super) fn begin(&mut self, name: String, sink: &mut Sink) {
        self.function = self.functions.iter().position(|f| f.name == name);
        self.count = 0;
        sink.start(name, None);
        sink.arguments("{");
    }

    /// The argument `key` begins; the reader of its value.
    pub(super) fn value_of(&mut self, key: &str, closing: Closing, sink: &mut Sink) -> ValueReader {
        sink.arguments(&format!("{}{}: ", self.separator(), Value::from(key)));
        self.count += 1;
        let is_text = self.function.is_none_or(|f| self.functions[f].takes_text(key));
        if is_text {
            sink.arguments("\"");
        }
        ValueReader { closing, is_text, is_at_start: true, held: String::new(), value: String::new() }
    }

    /// The call is complete.
    pub(super) fn end(&self, sink: &mut Sink) {
        sink.arguments("}");
    }

    /// The answer ended inside a name: what came of it.
    pub(super) fn cut_key(&self, key: &str, sink: &mut Sink) {
        let open = Value::from(key).to_string();
        sink.arguments(&format!("{}{}", self.separator(), open.trim_end_matches('"')));
    }

    fn separator(&self) -> &'static str {
        if self.count > 0 { ", " } else { "" }
    }
}

/// Reads one value, up to its closing tag.
#[derive(Debug)]
pub(super) struct ValueReader {
    closing: Closing,
    is_text: bool,
    is_at_start: bool,
    /// What may become the closing tag, with the line break before it.
    held: String,
    /// The value so far, unless it is text and told already.
    value: String,
}

impl ValueReader {
    /// Takes the next character: was it the end of the closing tag?
    pub(super) fn closes(&mut self, c: char, sink: &mut Sink) -> bool {
        let Closing { tag: closing, has_layout } = self.closing;
        if std::mem::replace(&mut self.is_at_start, false) && has_layout && c == '\n' {
            return false;
        }
        self.held.push(c);
        loop {
            let tag = self.held.strip_prefix('\n').filter(|_| has_layout).unwrap_or(&self.held);
            if tag == closing {
                self.held.clear();
                self.end(sink);
                return true;
            }
            if closing.starts_with(tag) {
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
    pub(super) fn release(&mut self, sink: &mut Sink) {
        for c in std::mem::take(&mut self.held).chars() {
            self.take(c, sink);
        }
        sink.arguments(&std::mem::take(&mut self.value));
    }
}
