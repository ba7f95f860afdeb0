//! What the text of a choice means: text, reasoning and tool calls, for streams and whole answers alike.

use crate::parsers::{AnswerParser, Event as Part};
use crate::request::Parsing;

/// Takes one choice's text apart.
#[derive(Debug)]
pub(super) struct Reader {
    /// `None`: everything is text.
    parser: Option<AnswerParser>,
    one_call: bool,
    is_reasoning: bool,
}

impl Reader {
    /// The reader of choice `index`. `serial` makes the ids of its calls unlike those of other answers.
    pub(super) fn new(parsing: Option<&Parsing>, serial: &str, index: usize) -> Self {
        let parser = parsing.map(|Parsing { setup, .. }| {
            let mut setup = setup.clone();
            setup.id_seed = format!("{serial}{index}x");
            AnswerParser::new(setup)
        });
        let one_call = parsing.is_some_and(|parsing| parsing.one_call);
        Self { parser, one_call, is_reasoning: false }
    }

    /// What is decided by now; everything once `is_last`.
    pub(super) fn read(&mut self, text: &str, is_last: bool) -> Vec<Part> {
        let Some(parser) = &mut self.parser else {
            return if text.is_empty() { Vec::new() } else { vec![Part::TextDelta(text.to_owned())] };
        };
        let mut parts = parser.push(text);
        self.is_reasoning = parser.is_reasoning();
        if is_last {
            parts.extend(parser.finish());
        }
        if self.one_call {
            parts.retain(|part| call_of(part).is_none_or(|index| index == 0));
        }
        parts
    }

    /// Whether what was read ends inside reasoning.
    pub(super) fn is_reasoning(&self) -> bool {
        self.is_reasoning
    }

    /// Whether a call was read.
    pub(super) fn has_calls(&self) -> bool {
        self.parser.as_ref().is_some_and(AnswerParser::has_calls)
    }
}

/// The call that a part belongs to.
fn call_of(part: &Part) -> Option<usize> {
    match part {
        Part::ToolCallStart { index, .. } | Part::ToolCallArgumentsDelta { index, .. } => Some(*index),
        Part::TextDelta(_) | Part::ReasoningDelta(_) => None,
    }
}

/// Parts of one kind in a row, joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    Text(String),
    Reasoning(String),
    Call(JoinedCall),
}

/// One tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JoinedCall {
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON text of an object, unless the answer ended inside the call.
    pub(crate) arguments: String,
}

/// The parts of a choice, in the order in which the model wrote them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Joined {
    pub(crate) sections: Vec<Section>,
}

impl Joined {
    /// Takes in one more part. True when a section begins with it, which ends the one before.
    pub(crate) fn add(&mut self, part: &Part) -> bool {
        match (self.sections.last_mut(), part) {
            (Some(Section::Text(all)), Part::TextDelta(text))
            | (Some(Section::Reasoning(all)), Part::ReasoningDelta(text)) => all.push_str(text),
            (Some(Section::Call(call)), Part::ToolCallArgumentsDelta { text, .. }) => {
                call.arguments.push_str(text);
            }
            // A call's arguments come before anything else, so they never begin a section.
            (_, Part::ToolCallArgumentsDelta { .. }) => {}
            _ => {
                self.sections.extend(Section::beginning(part));
                return true;
            }
        }
        false
    }

    /// All text, joined.
    pub(crate) fn text(&self) -> String {
        self.sections
            .iter()
            .filter_map(|section| if let Section::Text(t) = section { Some(t.as_str()) } else { None })
            .collect()
    }

    /// All reasoning, joined.
    pub(crate) fn reasoning(&self) -> String {
        self.sections
            .iter()
            .filter_map(|section| if let Section::Reasoning(t) = section { Some(t.as_str()) } else { None })
            .collect()
    }

    /// The calls.
    pub(crate) fn calls(&self) -> impl Iterator<Item = &JoinedCall> {
        self.sections
            .iter()
            .filter_map(|section| if let Section::Call(call) = section { Some(call) } else { None })
    }
}

impl Section {
    /// The section that `part` begins.
    fn beginning(part: &Part) -> Option<Self> {
        Some(match part {
            Part::TextDelta(text) => Self::Text(text.clone()),
            Part::ReasoningDelta(text) => Self::Reasoning(text.clone()),
            Part::ToolCallStart { id, name, .. } => {
                Self::Call(JoinedCall { id: id.clone(), name: name.clone(), arguments: String::new() })
            }
            Part::ToolCallArgumentsDelta { .. } => return None,
        })
    }
}
