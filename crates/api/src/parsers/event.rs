//! What the parsers tell, and how it is collected.

use super::json::NAME_LEN_MAX;

/// A piece of an answer. Joined per kind (and per call), the pieces are the whole answer; how the text
/// was cut on its way in shows nowhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Text for the user.
    TextDelta(String),
    /// Text of the model's reasoning.
    ReasoningDelta(String),
    /// A tool call begins. Its arguments follow, before any other call's.
    ToolCallStart {
        /// 0 for the first call of the answer, and so on.
        index: usize,
        /// Unique within the chat: the model's own id where its format has one, else `call_` and the
        /// request's seed.
        id: String,
        /// The function.
        name: String,
    },
    /// The next piece of a call's arguments: JSON text of an object once joined, unless the answer
    /// ended in the middle of the call.
    ToolCallArgumentsDelta {
        /// The call.
        index: usize,
        /// JSON text.
        text: String,
    },
}

/// Collects events; neighbours of one kind become one.
#[derive(Debug)]
pub(super) struct Sink {
    events: Vec<Event>,
    call_count: usize,
    id_seed: String,
}

impl Sink {
    /// `id_seed` makes the ids of this answer's calls unlike those of others.
    pub(super) fn new(id_seed: String) -> Self {
        Self { events: Vec::new(), call_count: 0, id_seed }
    }

    /// Calls so far.
    pub(super) fn call_count(&self) -> usize {
        self.call_count
    }

    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn text(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(Event::TextDelta(last)) => last.push_str(text),
            _ => self.events.push(Event::TextDelta(text.to_owned())),
        }
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(Event::ReasoningDelta(last)) => last.push_str(text),
            _ => self.events.push(Event::ReasoningDelta(text.to_owned())),
        }
    }

    /// A call begins; `id` is the model's own, if it gave one.
    pub(super) fn start(&mut self, name: String, id: Option<String>) {
        let index = self.call_count;
        let id = id.unwrap_or_else(|| format!("call_{}{index}", self.id_seed));
        self.call_count += 1;
        self.events.push(Event::ToolCallStart { index, id, name });
    }

    /// More arguments of the last call.
    pub(super) fn arguments(&mut self, text: &str) {
        let Some(index) = self.call_count.checked_sub(1) else { return };
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(Event::ToolCallArgumentsDelta { text: last, .. }) => last.push_str(text),
            _ => self.events.push(Event::ToolCallArgumentsDelta { index, text: text.to_owned() }),
        }
    }
}

/// Whether `name` can be a function's.
pub(super) fn is_function_name(name: &str) -> bool {
    let is_ok = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty() && name.len() <= NAME_LEN_MAX && name.chars().all(is_ok)
}
