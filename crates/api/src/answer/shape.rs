//! The JSON of answers, field by field as OpenAI writes it.

use super::logprobs::{LogprobsBody, TextOffset};
use crate::request::{Endpoint, LogprobsWish};
use crate::respond::to_json;
use lockstep_core::FinishReason;
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
    pub(super) text: String,
    pub(super) tokens: Vec<TextLogprobs>,
    pub(super) finish: FinishReason,
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
}

#[derive(Default, Serialize)]
struct Message<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

/// A completions choice, whole or in a chunk.
#[derive(Serialize)]
struct TextChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<LogprobsBody>,
    finish_reason: Option<&'static str>,
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
    pub(super) fn whole(&self, choices: &[WholeChoice], usage: Usage) -> String {
        let usage = Some(Some(usage.into()));
        let numbered = choices.iter().enumerate().map(|(i, choice)| {
            let logprobs = self.logprobs(&choice.tokens, &mut TextOffset::default());
            (i, choice.text.as_str(), choice.finish.as_openai(), logprobs)
        });
        match self.endpoint {
            Endpoint::Chat => {
                let choice = |(index, text, finish, logprobs)| ChatChoice {
                    index,
                    message: Some(Message { role: Some("assistant"), content: Some(text) }),
                    delta: None,
                    logprobs,
                    finish_reason: Some(finish),
                };
                self.envelope("chat.completion", &numbered.map(choice).collect::<Vec<_>>(), usage)
            }
            Endpoint::Completions => {
                let choice = |(index, text, finish, logprobs)| TextChoice {
                    index,
                    text,
                    logprobs,
                    finish_reason: Some(finish),
                };
                self.envelope("text_completion", &numbered.map(choice).collect::<Vec<_>>(), usage)
            }
        }
    }

    /// The chunk that opens a choice; chat only.
    pub(super) fn role_chunk(&self, index: usize) -> Option<String> {
        let delta = Message { role: Some("assistant"), content: Some("") };
        (self.endpoint == Endpoint::Chat).then(|| self.chat_chunk(index, delta, None, None))
    }

    /// A chunk with new text.
    pub(super) fn text_chunk(&self, index: usize, text: &str, logprobs: Option<LogprobsBody>) -> String {
        match self.endpoint {
            Endpoint::Chat => {
                self.chat_chunk(index, Message { role: None, content: Some(text) }, None, logprobs)
            }
            Endpoint::Completions => self.text_completion_chunk(index, text, None, logprobs),
        }
    }

    /// The last chunk of a choice; it carries no text.
    pub(super) fn finish_chunk(
        &self,
        index: usize,
        finish: FinishReason,
        logprobs: Option<LogprobsBody>,
    ) -> String {
        let finish = Some(finish.as_openai());
        match self.endpoint {
            Endpoint::Chat => self.chat_chunk(index, Message::default(), finish, logprobs),
            Endpoint::Completions => self.text_completion_chunk(index, "", finish, logprobs),
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
        finish_reason: Option<&'static str>,
        logprobs: Option<LogprobsBody>,
    ) -> String {
        let choice = ChatChoice { index, message: None, delta: Some(delta), logprobs, finish_reason };
        self.envelope(self.chunk_object(), &[choice], self.no_usage_yet())
    }

    fn text_completion_chunk(
        &self,
        index: usize,
        text: &str,
        finish_reason: Option<&'static str>,
        logprobs: Option<LogprobsBody>,
    ) -> String {
        let choice = TextChoice { index, text, logprobs, finish_reason };
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
