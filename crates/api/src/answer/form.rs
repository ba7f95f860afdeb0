//! The seam between the machinery of answers and the dialects: the machinery decides *when* a client is
//! told *what*, a [`Form`] only says how that is written.
//!
//! **Order of calls, stream:** `begin` once, with the first text or end of any choice; per choice `open`, then
//! any number of `part`s, then `finish`, after which nothing follows for that choice; `end` once, after the
//! last `finish`. `fail` may come at any time, also before `begin`, and is the last call. Choices interleave.
//! **Whole:** `whole`, once.

use super::parts::Joined;
use crate::errors::ErrorForm;
use crate::parsers::Event as Part;
use crate::timing::TimingBody;
use lockstep_core::{FinishReason, Refusal, TokenId};
use lockstep_wire::{TextLogprobs, Usage};
use std::sync::Arc;

/// What names an answer.
#[derive(Clone, Debug)]
pub(crate) struct Label {
    /// Unlike any other answer's: letters and digits.
    pub(crate) serial: String,
    /// Unix seconds of the request.
    pub(crate) created: u64,
    /// The served name.
    pub(crate) model: String,
}

/// A prompt's tokens.
#[derive(Debug, Default)]
pub(crate) struct PromptTokens {
    pub(crate) ids: Vec<TokenId>,
    /// One per token if the request asked for them, else none.
    pub(crate) logprobs: Vec<TextLogprobs>,
}

/// Tokens of a choice that the client has not been told of.
#[derive(Debug, Default)]
pub(crate) struct NewTokens {
    /// The prompt's, if the request asked for them: once, in front of everything. In a whole answer every choice
    /// of a prompt has them.
    pub(crate) prompt: Option<Arc<PromptTokens>>,
    /// Generated ones.
    pub(crate) ids: Vec<TokenId>,
    /// Their log-probabilities if the request asked for them, behind those of an echoed prompt.
    pub(crate) logprobs: Vec<TextLogprobs>,
}

impl NewTokens {
    /// Moves `later` behind these.
    pub(super) fn append(&mut self, later: &mut Self) {
        self.prompt = self.prompt.take().or(later.prompt.take());
        self.ids.append(&mut later.ids);
        self.logprobs.append(&mut later.logprobs);
    }
}

/// A part of a choice, new in a stream.
#[derive(Debug)]
pub(crate) struct NewPart<'a> {
    pub(crate) choice: usize,
    pub(crate) part: &'a Part,
    /// All that came since the last part: those of this part, and of text held back meanwhile.
    pub(crate) tokens: NewTokens,
    /// Token counts of the choice so far.
    pub(crate) usage: Usage,
}

/// How a choice ended.
#[derive(Clone, Debug)]
pub(crate) struct Finish {
    pub(crate) reason: FinishReason,
    /// The answer holds a tool call.
    pub(crate) has_calls: bool,
    /// The stop string that ended it, if one did.
    pub(crate) stop: Option<String>,
    /// Token counts of the choice.
    pub(crate) usage: Usage,
    /// Generated tokens before the end of reasoning.
    pub(crate) reasoning_tokens: u32,
    /// Where its time went, if the client asked.
    pub(crate) timing: Option<TimingBody>,
}

impl Finish {
    /// OpenAI's `finish_reason`.
    pub(crate) fn as_openai(&self) -> &'static str {
        match self.reason {
            FinishReason::Stop if self.has_calls => "tool_calls",
            reason => reason.as_openai(),
        }
    }
}

/// A choice of a whole answer.
#[derive(Debug)]
pub(crate) struct WholeChoice {
    pub(crate) joined: Joined,
    pub(crate) tokens: NewTokens,
    pub(crate) finish: Finish,
}

/// How one answer is written; one per answer, so it may keep what it has said.
pub(crate) trait Form: Send + std::fmt::Debug {
    /// The answer's identifier, as the client sees it.
    fn id(&self) -> &str;

    /// How a stream is cut into frames.
    fn framing(&self) -> Framing {
        Framing::Events
    }

    /// What is sent while nothing happens; clients must ignore it.
    fn keep_alive(&self) -> &'static str {
        self.framing().keep_alive()
    }

    /// The stream begins; `usage` holds the counts of the first choice's prompt.
    fn begin(&mut self, _usage: Usage, _out: &mut Frames) {}

    /// A choice begins; its first tokens, which come again with its first part, say what is reported of its prompt.
    fn open(&mut self, _choice: usize, _first: &NewTokens, _out: &mut Frames) {}

    /// A choice goes on.
    fn part(&mut self, new: NewPart<'_>, out: &mut Frames);

    /// A choice ends, with the tokens that no part carried.
    fn finish(&mut self, choice: usize, finish: &Finish, rest: NewTokens, out: &mut Frames);

    /// The stream is complete. `usage` adds up the choices, and counts each prompt once.
    fn end(&mut self, usage: Usage, out: &mut Frames);

    /// The stream is cut by `refusal`, and must not look complete.
    fn fail(&mut self, refusal: &Refusal, errors: ErrorForm, out: &mut Frames) {
        match self.framing() {
            Framing::Events => out.data(&errors.json(refusal)),
            Framing::Lines => out.line(&errors.json(refusal)),
        }
    }

    /// The whole answer, a JSON document; `usage` as for [`end`](Self::end).
    fn whole(&mut self, choices: &[WholeChoice], usage: Usage) -> String;
}

/// How a stream is cut into frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Server-sent events.
    Events,
    /// One JSON value per line.
    Lines,
}

impl Framing {
    pub(super) fn content_type(self) -> &'static str {
        match self {
            Framing::Events => "text/event-stream; charset=utf-8",
            Framing::Lines => "application/x-ndjson",
        }
    }

    /// A comment; between lines white space, since clients parse every line, and JSON allows it in front.
    fn keep_alive(self) -> &'static str {
        match self {
            Framing::Events => ": keep-alive\n\n",
            Framing::Lines => " ",
        }
    }
}

/// Frames of a stream on their way out. JSON texts must be one line each, as `to_json` writes them.
#[derive(Debug, Default)]
pub(crate) struct Frames(String);

impl Frames {
    /// An event without a name.
    pub(crate) fn data(&mut self, json: &str) {
        self.push(&["data: ", json, "\n\n"]);
    }

    /// An event with a name.
    pub(crate) fn event(&mut self, name: &str, json: &str) {
        self.push(&["event: ", name, "\ndata: ", json, "\n\n"]);
    }

    /// A line of its own.
    pub(crate) fn line(&mut self, json: &str) {
        self.push(&[json, "\n"]);
    }

    fn push(&mut self, texts: &[&str]) {
        texts.iter().for_each(|text| self.0.push_str(text));
    }

    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.0)
    }
}
