//! The JSON of answers, field by field as OpenAI writes it.

use super::logprobs::{LogprobsBody, PromptLogprobs, TextOffset};
use crate::answer::{Finish, Form, Frames, Joined, JoinedCall, Label, NewPart, NewTokens, WholeChoice};
use crate::parsers::Event as Part;
use crate::request::{Call, Endpoint, LogprobsWish};
use crate::respond::to_json;
use crate::timing::TimingBody;
use lockstep_core::TokenId;
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
    prompt_logprobs: LogprobsWish,
    token_ids: bool,
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
    /// Of a chat, which has one prompt.
    #[serde(flatten)]
    prompt: PromptBody<'a>,
}

/// What was asked for of a prompt, beside the choices of a chat, in each choice of a completion.
#[derive(Default, Serialize)]
struct PromptBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
}

/// What a choice says of its tokens.
#[derive(Default)]
struct TokensBody<'a> {
    logprobs: Option<LogprobsBody>,
    token_ids: Option<&'a [TokenId]>,
    prompt: PromptBody<'a>,
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
    token_ids: Option<&'a [TokenId]>,
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
    token_ids: Option<&'a [TokenId]>,
    #[serde(flatten)]
    prompt: PromptBody<'a>,
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
            prompt_logprobs: call.prompt_logprobs,
            token_ids: call.token_ids,
            offsets: Vec::new(),
        }
    }

    /// What was asked for of the prompt of `tokens`, where they say anything of it.
    fn prompt<'a>(&self, tokens: &'a NewTokens) -> PromptBody<'a> {
        let Some(prompt) = &tokens.prompt else { return PromptBody::default() };
        let prompt_logprobs = match self.prompt_logprobs {
            LogprobsWish::None => None,
            LogprobsWish::Top(top) => Some(PromptLogprobs::new(&prompt.logprobs, top)),
        };
        PromptBody { prompt_logprobs, prompt_token_ids: self.token_ids.then_some(&prompt.ids) }
    }

    /// What is shown of tokens that follow those counted in `offset`.
    fn tokens_behind<'a>(&self, tokens: &'a NewTokens, offset: &mut TextOffset) -> TokensBody<'a> {
        let logprobs = match self.logprobs {
            LogprobsWish::None => None,
            LogprobsWish::Top(top) => Some(LogprobsBody::new(self.endpoint, top, &tokens.logprobs, offset)),
        };
        TokensBody { logprobs, token_ids: self.token_ids.then_some(&tokens.ids), prompt: self.prompt(tokens) }
    }

    /// What is shown of all tokens of a choice.
    fn tokens<'a>(&self, tokens: &'a NewTokens) -> TokensBody<'a> {
        self.tokens_behind(tokens, &mut TextOffset::default())
    }

    /// What is shown of the next tokens of a choice in a stream; log-probabilities are null where there are none.
    fn next_tokens<'a>(&mut self, choice: usize, tokens: &'a NewTokens) -> TokensBody<'a> {
        if self.offsets.len() <= choice {
            self.offsets.resize(choice + 1, TextOffset::default());
        }
        let mut offset = self.offsets[choice];
        let mut shown = self.tokens_behind(tokens, &mut offset);
        self.offsets[choice] = offset;
        shown.logprobs = shown.logprobs.filter(|_| !tokens.logprobs.is_empty());
        shown
    }

    fn chat_chunk(
        &self,
        index: usize,
        delta: Message<'_>,
        finish: Option<&Finish>,
        tokens: TokensBody<'_>,
    ) -> String {
        let (finish_reason, timing) = told_of(finish);
        let TokensBody { logprobs, token_ids, prompt } = tokens;
        // The chunk with the role has told of it.
        let prompt = if delta.role.is_some() { prompt } else { PromptBody::default() };
        let delta = Some(delta);
        let choice = ChatChoice { index, message: None, delta, logprobs, finish_reason, token_ids, timing };
        self.envelope(self.chunk_object(), &[choice], self.no_usage_yet(), prompt)
    }

    fn text_completion_chunk(
        &self,
        index: usize,
        text: &str,
        finish: Option<&Finish>,
        tokens: TokensBody<'_>,
    ) -> String {
        let (finish_reason, timing) = told_of(finish);
        let TokensBody { logprobs, token_ids, prompt } = tokens;
        let choice = TextChoice { index, text, logprobs, finish_reason, token_ids, prompt, timing };
        self.envelope(self.chunk_object(), &[choice], self.no_usage_yet(), PromptBody::default())
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
        prompt: PromptBody<'_>,
    ) -> String {
        let Self { id, created, model, .. } = self;
        to_json(&Envelope { id, object, created: *created, model, choices, usage, prompt })
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

    /// The chunk with the role, and what is told of the prompt; chat only.
    fn open(&mut self, choice: usize, first: &NewTokens, out: &mut Frames) {
        if self.endpoint == Endpoint::Chat {
            let delta = Message { role: Some("assistant"), content: Some(Some("")), ..Message::default() };
            let tokens = TokensBody { prompt: self.prompt(first), ..TokensBody::default() };
            out.data(&self.chat_chunk(choice, delta, None, tokens));
        }
    }

    /// Completions have text only.
    fn part(&mut self, new: NewPart<'_>, out: &mut Frames) {
        let NewPart { choice, part, tokens, usage: _ } = new;
        let tokens = self.next_tokens(choice, &tokens);
        out.data(&match (self.endpoint, part) {
            (Endpoint::Completions, Part::TextDelta(text)) => {
                self.text_completion_chunk(choice, text, None, tokens)
            }
            _ => self.chat_chunk(choice, Message::delta(part), None, tokens),
        });
    }

    /// The last chunk of a choice; it carries no text.
    fn finish(&mut self, choice: usize, finish: &Finish, rest: NewTokens, out: &mut Frames) {
        let tokens = self.next_tokens(choice, &rest);
        let finish = Some(finish);
        out.data(&match self.endpoint {
            Endpoint::Chat => self.chat_chunk(choice, Message::default(), finish, tokens),
            Endpoint::Completions => self.text_completion_chunk(choice, "", finish, tokens),
        });
    }

    /// The extra chunk with the token counts, if the client asked for it, and the end.
    fn end(&mut self, usage: Usage, out: &mut Frames) {
        if self.include_usage {
            let none: &[TextChoice<'_>] = &[];
            let usage = Some(Some(usage.into()));
            out.data(&self.envelope(self.chunk_object(), none, usage, PromptBody::default()));
        }
        out.data("[DONE]");
    }

    fn whole(&mut self, choices: &[WholeChoice], usage: Usage) -> String {
        let usage = Some(Some(usage.into()));
        let texts = |WholeChoice { joined, .. }: &WholeChoice| Texts {
            text: joined.text(),
            reasoning: joined.reasoning(),
        };
        let texts: Vec<Texts> = choices.iter().map(texts).collect();
        let numbered = choices.iter().zip(&texts).enumerate();
        match self.endpoint {
            Endpoint::Chat => {
                let prompt = choices.first().map(|choice| self.prompt(&choice.tokens)).unwrap_or_default();
                let choices = numbered.map(|(index, (choice, texts))| {
                    let TokensBody { logprobs, token_ids, .. } = self.tokens(&choice.tokens);
                    let message = Some(Message::whole(&choice.joined, texts));
                    let (finish_reason, timing) = told_of(Some(&choice.finish));
                    ChatChoice { index, message, delta: None, logprobs, finish_reason, token_ids, timing }
                });
                self.envelope("chat.completion", &choices.collect::<Vec<_>>(), usage, prompt)
            }
            Endpoint::Completions => {
                let choices = numbered.map(|(index, (choice, texts))| {
                    let TokensBody { logprobs, token_ids, prompt } = self.tokens(&choice.tokens);
                    let (finish_reason, timing) = told_of(Some(&choice.finish));
                    let text = &texts.text;
                    TextChoice { index, text, logprobs, finish_reason, token_ids, prompt, timing }
                });
                let choices: Vec<_> = choices.collect();
                self.envelope("text_completion", &choices, usage, PromptBody::default())
            }
        }
    }
}
