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
    id_style: IdStyle,
}

/// How ids of calls are written where the model gives none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum IdStyle {
    /// `call_`, the seed and the call's number.
    #[default]
    Call,
    /// Nine letters and digits, which Mistral's chat templates ask of every call of earlier turns.
    Nine,
}

impl IdStyle {
    /// The id of call `index` of the answer with this seed.
    pub(super) fn id(self, seed: &str, index: usize) -> String {
        let whole = format!("{seed}{index}");
        match self {
            Self::Call => format!("call_{whole}"),
            Self::Nine => {
                let mut hash = fnv1a(whole.as_bytes());
                let digit = |_| {
                    let digit = char::from_digit((hash % 36) as u32, 36);
                    hash /= 36;
                    digit.expect("invariant: a remainder of 36 is a digit")
                };
                (0..9).map(digit).collect()
            }
        }
    }
}

/// FNV-1a (Fowler, Noll and Vo): spreads seeds that differ in a character over all ids.
fn fnv1a(bytes: &[u8]) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

impl Sink {
    /// `id_seed` makes the ids of this answer's calls unlike those of others.
    pub(super) fn new(id_seed: String, id_style: IdStyle) -> Self {
        Self { events: Vec::new(), call_count: 0, id_seed, id_style }
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
        let id = id.unwrap_or_else(|| self.id_style.id(&self.id_seed, index));
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
