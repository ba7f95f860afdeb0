//! What the text of a choice means: text, reasoning and tool calls, for streams and whole answers alike.

use crate::parsers::{AnswerParser, Event as Part};
use crate::request::Parsing;

/// Takes one choice's text apart.
#[derive(Debug)]
pub(super) struct Reader {
    /// `None`: everything is text.
    parser: Option<AnswerParser>,
    one_call: bool,
    hides_reasoning: bool,
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
        let hides_reasoning = parsing.is_some_and(|parsing| parsing.hides_reasoning);
        Self { parser, one_call, hides_reasoning, is_reasoning: false }
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
        if self.hides_reasoning {
            parts.retain(|part| !matches!(part, Part::ReasoningDelta(_)));
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
    /// Whether a section begins with `part`, which ends the one before.
    pub(crate) fn is_beginning(&self, part: &Part) -> bool {
        match (self.sections.last(), part) {
            // A call's arguments come before anything else.
            (_, Part::ToolCallArgumentsDelta { .. }) => false,
            (Some(Section::Text(_)), Part::TextDelta(_)) => false,
            (Some(Section::Reasoning(_)), Part::ReasoningDelta(_)) => false,
            _ => true,
        }
    }

    /// Takes in one more part.
    pub(crate) fn add(&mut self, part: &Part) {
        if self.is_beginning(part) {
            self.sections.extend(Section::begun_by(part));
        }
        match (self.sections.last_mut(), part) {
            (Some(Section::Text(all)), Part::TextDelta(text))
            | (Some(Section::Reasoning(all)), Part::ReasoningDelta(text)) => all.push_str(text),
            (Some(Section::Call(call)), Part::ToolCallArgumentsDelta { text, .. }) => {
                call.arguments.push_str(text);
            }
            _ => {}
        }
    }

    /// All text, joined.
    pub(crate) fn text(&self) -> String {
        let text =
            |section: &Section| if let Section::Text(text) = section { text.clone() } else { String::new() };
        self.sections.iter().map(text).collect()
    }

    /// All reasoning, joined.
    pub(crate) fn reasoning(&self) -> String {
        let text = |section: &Section| {
            if let Section::Reasoning(text) = section { text.clone() } else { String::new() }
        };
        self.sections.iter().map(text).collect()
    }

    /// The calls.
    pub(crate) fn calls(&self) -> impl Iterator<Item = &JoinedCall> {
        self.sections
            .iter()
            .filter_map(|section| if let Section::Call(call) = section { Some(call) } else { None })
    }
}

impl Section {
    /// The section that `part` begins, without its text; `None` for arguments, which begin none.
    pub(crate) fn begun_by(part: &Part) -> Option<Self> {
        Some(match part {
            Part::TextDelta(_) => Self::Text(String::new()),
            Part::ReasoningDelta(_) => Self::Reasoning(String::new()),
            Part::ToolCallStart { id, name, .. } => {
                Self::Call(JoinedCall { id: id.clone(), name: name.clone(), arguments: String::new() })
            }
            Part::ToolCallArgumentsDelta { .. } => return None,
        })
    }
}
