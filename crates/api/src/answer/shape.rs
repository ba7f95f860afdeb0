//! The JSON of answers, field by field as OpenAI writes it.

use super::logprobs::{LogprobsBody, TextOffset};
use super::parts::{Joined, JoinedCall};
use crate::parsers::Event as Part;
use crate::request::{Endpoint, LogprobsWish};
use crate::respond::to_json;
use crate::timing::TimingBody;
use lockstep_wire::{TextLogprobs, Usage};
use serde::Serialize;

/// What every chunk of one answer repeats.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    endpoint: Endpoint,
    id: String,
    created: u64,
    model: String,
    shape: Shape,
}

/// What the client asked its answer to hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// One more chunk with the token counts; concerns streams only.
    pub(crate) include_usage: bool,
    /// Log-probabilities.
    pub(crate) logprobs: LogprobsWish,
}

/// A choice of a whole answer.
pub(super) struct WholeChoice {
    pub(super) joined: Joined,
    pub(super) tokens: Vec<TextLogprobs>,
    pub(super) end: End,
}

/// How a choice ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    /// As OpenAI names it.
    pub(super) finish: &'static str,
    /// Where its time went, if the client asked.
    pub(super) timing: Option<TimingBody>,
}

#[derive(Serialize)]
struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// Absent, null, or the counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

#[derive(Serialize)]
struct UsageBody {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

/// A chat choice, whole (`message`) or in a chunk (`delta`).
#[derive(Serialize)]
struct ChatChoice<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Message<'a>>,
    logprobs: Option<LogprobsBody>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<TimingBody>,
}

#[derive(Default, Serialize)]
struct Message<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    /// Absent, null (a message that only calls), or the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody<'a>>,
}

/// A tool call, or in a chunk what is new of it.
#[derive(Serialize)]
struct CallBody<'a> {
    /// Its place in the answer; chunks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionBody<'a>,
}

#[derive(Serialize)]
struct FunctionBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> CallBody<'a> {
    /// A call with its id and name, in a chunk if it has an `index`.
    fn new(index: Option<usize>, id: &'a str, name: &'a str, arguments: &'a str) -> Self {
        let function = FunctionBody { name: Some(name), arguments };
        Self { index, id: Some(id), kind: Some("function"), function }
    }
}

impl<'a> Message<'a> {
    /// The message of a whole answer.
    fn whole(joined: &'a Joined) -> Self {
        let Joined { text, reasoning, calls } = joined;
        let call = |call: &'a JoinedCall| CallBody::new(None, &call.id, &call.name, &call.arguments);
        Self {
            role: Some("assistant"),
            reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
            content: Some((calls.is_empty() || !text.is_empty()).then_some(text)),
            tool_calls: calls.iter().map(call).collect(),
        }
    }

    /// The delta that carries a part.
    fn delta(part: &'a Part) -> Self {
        let mut delta = Self::default();
        match part {
            Part::TextDelta(text) => delta.content = Some(Some(text)),
            Part::ReasoningDelta(text) => delta.reasoning_content = Some(text),
            Part::ToolCallStart { index, id, name } => {
                delta.tool_calls.push(CallBody::new(Some(*index), id, name, ""));
            }
            Part::ToolCallArgumentsDelta { index, text } => {
                let function = FunctionBody { name: None, arguments: text };
                delta.tool_calls.push(CallBody { index: Some(*index), id: None, kind: None, function });
            }
        }
        delta
    }
}

/// A completions choice, whole or in a chunk.
#[derive(Serialize)]
struct TextChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<LogprobsBody>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<TimingBody>,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        let Usage { prompt_tokens, cached_tokens, completion_tokens } = usage;
        let total_tokens = prompt_tokens.saturating_add(completion_tokens);
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens },
        }
    }
}

impl Head {
    /// `id` is the whole identifier, `created` Unix seconds.
    pub(crate) fn new(endpoint: Endpoint, id: String, created: u64, model: String, shape: Shape) -> Self {
        Self { endpoint, id, created, model, shape }
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// The value of `logprobs` for tokens that follow those counted in `offset`; null unless asked for.
    pub(super) fn logprobs(&self, tokens: &[TextLogprobs], offset: &mut TextOffset) -> Option<LogprobsBody> {
        match self.shape.logprobs {
            LogprobsWish::None => None,
            LogprobsWish::Top(top) => Some(LogprobsBody::new(self.endpoint, top, tokens, offset)),
        }
    }

    /// The whole answer.
    pub(super) fn whole<'a>(&self, choices: &'a [WholeChoice], usage: Usage) -> String {
        let usage = Some(Some(usage.into()));
        let numbered = choices.iter().enumerate().map(|(i, choice)| {
            let logprobs = self.logprobs(&choice.tokens, &mut TextOffset::default());
            (i, choice, logprobs)
        });
        match self.endpoint {
            Endpoint::Chat => {
                let choice = |(index, choice, logprobs): (_, &'a WholeChoice, _)| ChatChoice {
                    index,
                    message: Some(Message::whole(&choice.joined)),
                    delta: None,
                    logprobs,
                    finish_reason: Some(choice.end.finish),
                    timing: choice.end.timing,
                };
                self.envelope("chat.completion", &numbered.map(choice).collect::<Vec<_>>(), usage)
            }
            Endpoint::Completions => {
                let choices = numbered.map(|(index, choice, logprobs)| TextChoice {
                    index,
                    text: &choice.joined.text,
                    logprobs,
                    finish_reason: Some(choice.end.finish),
                    timing: choice.end.timing,
                });
                self.envelope("text_completion", &choices.collect::<Vec<_>>(), usage)
            }
        }
    }

    /// The chunk that opens a choice; chat only.
    pub(super) fn role_chunk(&self, index: usize) -> Option<String> {
        let delta = Message { role: Some("assistant"), content: Some(Some("")), ..Message::default() };
        (self.endpoint == Endpoint::Chat).then(|| self.chat_chunk(index, delta, None, None))
    }

    /// A chunk with a part of the answer; completions have text only.
    pub(super) fn part_chunk(&self, index: usize, part: &Part, logprobs: Option<LogprobsBody>) -> String {
        match (self.endpoint, part) {
            (Endpoint::Completions, Part::TextDelta(text)) => {
                self.text_completion_chunk(index, text, None, logprobs)
            }
            _ => self.chat_chunk(index, Message::delta(part), None, logprobs),
        }
    }

    /// The last chunk of a choice; it carries no text.
    pub(super) fn finish_chunk(&self, index: usize, end: End, logprobs: Option<LogprobsBody>) -> String {
        match self.endpoint {
            Endpoint::Chat => self.chat_chunk(index, Message::default(), Some(end), logprobs),
            Endpoint::Completions => self.text_completion_chunk(index, "", Some(end), logprobs),
        }
    }

    /// The extra chunk with the token counts, if the client asked for it.
    pub(super) fn usage_chunk(&self, usage: Usage) -> Option<String> {
        let none: &[TextChoice<'_>] = &[];
        self.shape.include_usage.then(|| self.envelope(self.chunk_object(), none, Some(Some(usage.into()))))
    }

    fn chat_chunk(
        &self,
        index: usize,
        delta: Message<'_>,
        end: Option<End>,
        logprobs: Option<LogprobsBody>,
    ) -> String {
        let (finish_reason, timing) = (end.map(|end| end.finish), end.and_then(|end| end.timing));
        let choice = ChatChoice { index, message: None, delta: Some(delta), logprobs, finish_reason, timing };
        self.envelope(self.chunk_object(), &[choice], self.no_usage_yet())
    }

    fn text_completion_chunk(
        &self,
        index: usize,
        text: &str,
        end: Option<End>,
        logprobs: Option<LogprobsBody>,
    ) -> String {
        let (finish_reason, timing) = (end.map(|end| end.finish), end.and_then(|end| end.timing));
        let choice = TextChoice { index, text, logprobs, finish_reason, timing };
        self.envelope(self.chunk_object(), &[choice], self.no_usage_yet())
    }

    fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions => "text_completion",
        }
    }

    /// Null in the other chunks when counts were asked for, absent otherwise.
    fn no_usage_yet(&self) -> Option<Option<UsageBody>> {
        self.shape.include_usage.then_some(None)
    }

    fn envelope<C: Serialize>(
        &self,
        object: &'static str,
        choices: &[C],
        usage: Option<Option<UsageBody>>,
    ) -> String {
        let Self { id, created, model, .. } = self;
        to_json(&Envelope { id, object, created: *created, model, choices, usage })
    }
}
