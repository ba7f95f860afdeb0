//! The JSON of answers, field by field as OpenAI writes it.

use super::logprobs::{LogprobsBody, TextOffset};
use crate::answer::{Finish, Form, Frames, Joined, JoinedCall, Label, NewPart, NewTokens, WholeChoice};
use crate::parsers::Event as Part;
use crate::request::{Call, Endpoint, LogprobsWish};
use crate::respond::to_json;
use crate::timing::TimingBody;
use lockstep_wire::Usage;
use serde::Serialize;

/// One answer of either endpoint.
#[derive(Debug)]
pub(super) struct Head {
    endpoint: Endpoint,
    id: String,
    created: u64,
    model: String,
    /// One more chunk with the token counts; concerns streams only.
    include_usage: bool,
    logprobs: LogprobsWish,
    /// Where the next token of each choice begins; streams only.
    offsets: Vec<TextOffset>,
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

/// The texts of a whole message.
struct Texts {
    text: String,
    reasoning: String,
}

impl<'a> Message<'a> {
    /// The message of a whole answer; `texts` are those of `joined`.
    fn whole(joined: &'a Joined, texts: &'a Texts) -> Self {
        let Texts { text, reasoning } = texts;
        let call = |call: &'a JoinedCall| CallBody::new(None, &call.id, &call.name, &call.arguments);
        let tool_calls: Vec<_> = joined.calls().map(call).collect();
        Self {
            role: Some("assistant"),
            reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
            content: Some((tool_calls.is_empty() || !text.is_empty()).then_some(text)),
            tool_calls,
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
    /// The form of the answer to `call`.
    pub(super) fn new(endpoint: Endpoint, label: Label, call: &Call) -> Self {
        let Label { serial, created, model } = label;
        let prefix = match endpoint {
            Endpoint::Chat => "chatcmpl",
            Endpoint::Completions => "cmpl",
        };
        Self {
            endpoint,
            id: format!("{prefix}-{serial}"),
            created,
            model,
            include_usage: call.include_usage,
            logprobs: call.logprobs,
            offsets: Vec::new(),
        }
    }

    /// The value of `logprobs` for tokens that follow those counted in `offset`; null unless asked for.
    fn logprobs(&self, tokens: &NewTokens, offset: &mut TextOffset) -> Option<LogprobsBody> {
        match self.logprobs {
            LogprobsWish::None => None,
            LogprobsWish::Top(top) => Some(LogprobsBody::new(self.endpoint, top, &tokens.logprobs, offset)),
        }
    }

    /// [`Self::logprobs`] for the next tokens of a choice in a stream; null where there are none.
    fn next_logprobs(&mut self, choice: usize, tokens: &NewTokens) -> Option<LogprobsBody> {
        if tokens.logprobs.is_empty() {
            return None;
        }
        if self.offsets.len() <= choice {
            self.offsets.resize(choice + 1, TextOffset::default());
        }
        let mut offset = self.offsets[choice];
        let logprobs = self.logprobs(tokens, &mut offset);
        self.offsets[choice] = offset;
        logprobs
    }

    fn chat_chunk(
        &self,
        index: usize,
        delta: Message<'_>,
        finish: Option<&Finish>,
        logprobs: Option<LogprobsBody>,
    ) -> String {
        let (finish_reason, timing) = told_of(finish);
        let choice = ChatChoice { index, message: None, delta: Some(delta), logprobs, finish_reason, timing };
        self.envelope(self.chunk_object(), &[choice], self.no_usage_yet())
    }

    fn text_completion_chunk(
        &self,
        index: usize,
        text: &str,
        finish: Option<&Finish>,
        logprobs: Option<LogprobsBody>,
    ) -> String {
        let (finish_reason, timing) = told_of(finish);
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
        self.include_usage.then_some(None)
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

/// What a chunk says about the end of its choice.
fn told_of(finish: Option<&Finish>) -> (Option<&'static str>, Option<TimingBody>) {
    (finish.map(Finish::as_openai), finish.and_then(|finish| finish.timing))
}

impl Form for Head {
    fn id(&self) -> &str {
        &self.id
    }

    /// The chunk with the role; chat only.
    fn open(&mut self, choice: usize, out: &mut Frames) {
        if self.endpoint == Endpoint::Chat {
            let delta = Message { role: Some("assistant"), content: Some(Some("")), ..Message::default() };
            out.data(&self.chat_chunk(choice, delta, None, None));
        }
    }

    /// Completions have text only.
    fn part(&mut self, new: NewPart<'_>, out: &mut Frames) {
        let NewPart { choice, part, tokens, usage: _ } = new;
        let logprobs = self.next_logprobs(choice, &tokens);
        out.data(&match (self.endpoint, part) {
            (Endpoint::Completions, Part::TextDelta(text)) => {
                self.text_completion_chunk(choice, text, None, logprobs)
            }
            _ => self.chat_chunk(choice, Message::delta(part), None, logprobs),
        });
    }

    /// The last chunk of a choice; it carries no text.
    fn finish(&mut self, choice: usize, finish: &Finish, rest: NewTokens, out: &mut Frames) {
        let logprobs = self.next_logprobs(choice, &rest);
        let finish = Some(finish);
        out.data(&match self.endpoint {
            Endpoint::Chat => self.chat_chunk(choice, Message::default(), finish, logprobs),
            Endpoint::Completions => self.text_completion_chunk(choice, "", finish, logprobs),
        });
    }

    /// The extra chunk with the token counts, if the client asked for it, and the end.
    fn end(&mut self, usage: Usage, out: &mut Frames) {
        if self.include_usage {
            let none: &[TextChoice<'_>] = &[];
            out.data(&self.envelope(self.chunk_object(), none, Some(Some(usage.into()))));
        }
        out.data("[DONE]");
    }

    fn whole(&mut self, choices: &[WholeChoice], usage: Usage) -> String {
        let usage = Some(Some(usage.into()));
        let logprobs = |choice: &WholeChoice| self.logprobs(&choice.tokens, &mut TextOffset::default());
        let texts = |WholeChoice { joined, .. }: &WholeChoice| Texts {
            text: joined.text(),
            reasoning: joined.reasoning(),
        };
        let texts: Vec<Texts> = choices.iter().map(texts).collect();
        let numbered = choices.iter().zip(&texts).enumerate();
        match self.endpoint {
            Endpoint::Chat => {
                let choices = numbered.map(|(index, (choice, texts))| ChatChoice {
                    index,
                    message: Some(Message::whole(&choice.joined, texts)),
                    delta: None,
                    logprobs: logprobs(choice),
                    finish_reason: Some(choice.finish.as_openai()),
                    timing: choice.finish.timing,
                });
                self.envelope("chat.completion", &choices.collect::<Vec<_>>(), usage)
            }
            Endpoint::Completions => {
                let choices = numbered.map(|(index, (choice, texts))| TextChoice {
                    index,
                    text: &texts.text,
                    logprobs: logprobs(choice),
                    finish_reason: Some(choice.finish.as_openai()),
                    timing: choice.finish.timing,
                });
                self.envelope("text_completion", &choices.collect::<Vec<_>>(), usage)
            }
        }
    }
}
