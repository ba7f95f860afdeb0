//! What the text of a choice means: text, reasoning and tool calls, for streams and whole answers alike.

use crate::parsers::{AnswerParser, Event as Part};
use crate::request::Parsing;
use lockstep_core::FinishReason;

/// Takes one choice's text apart.
#[derive(Debug)]
pub(super) struct Reader {
    /// `None`: everything is text.
    parser: Option<AnswerParser>,
    one_call: bool,
}

impl Reader {
    /// The reader of choice `index`. `answer_id` makes the ids of its calls unlike those of others.
    pub(super) fn new(parsing: Option<&Parsing>, answer_id: &str, index: usize) -> Self {
        let Some(Parsing { setup, one_call }) = parsing else {
            return Self { parser: None, one_call: false };
        };
        let mut setup = setup.clone();
        let answer_id = answer_id.rsplit('-').next().unwrap_or_default();
        setup.id_seed = format!("{answer_id}{index}x");
        Self { parser: Some(AnswerParser::new(setup)), one_call: *one_call }
    }

    /// What is decided by now; everything once `is_last`.
    pub(super) fn read(&mut self, text: &str, is_last: bool) -> Vec<Part> {
        let Some(parser) = &mut self.parser else {
            return if text.is_empty() { Vec::new() } else { vec![Part::TextDelta(text.to_owned())] };
        };
        let mut parts = parser.push(text);
        if is_last {
            parts.extend(parser.finish());
        }
        if self.one_call {
            parts.retain(|part| call_of(part).is_none_or(|index| index == 0));
        }
        parts
    }

    /// OpenAI's `finish_reason` for a choice that ended with `finish`.
    pub(super) fn finish_reason(&self, finish: FinishReason) -> &'static str {
        let has_calls = self.parser.as_ref().is_some_and(AnswerParser::has_calls);
        if has_calls && finish == FinishReason::Stop { "tool_calls" } else { finish.as_openai() }
    }
}

/// The call that a part belongs to.
fn call_of(part: &Part) -> Option<usize> {
    match part {
        Part::ToolCallStart { index, .. } | Part::ToolCallArgumentsDelta { index, .. } => Some(*index),
        Part::TextDelta(_) | Part::ReasoningDelta(_) => None,
    }
}

/// The parts of a choice, joined.
#[derive(Debug, Default)]
pub(super) struct Joined {
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<JoinedCall>,
}

/// One tool call of a whole answer.
#[derive(Debug)]
pub(super) struct JoinedCall {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: String,
}

impl Joined {
    pub(super) fn add(&mut self, part: Part) {
        match part {
            Part::TextDelta(text) => self.text.push_str(&text),
            Part::ReasoningDelta(text) => self.reasoning.push_str(&text),
            Part::ToolCallStart { id, name, .. } => {
                self.calls.push(JoinedCall { id, name, arguments: String::new() });
            }
            Part::ToolCallArgumentsDelta { index, text } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&text);
                }
            }
        }
    }
}
