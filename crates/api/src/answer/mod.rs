//! Answers: from the engine's events to HTTP, whole or as a stream, in the [`Form`] of a dialect.
//!
//! **When the response head is sent:** with the first event. A refusal is therefore always an
//! answer with its own status, also for `stream: true`; once text flows, a failure is an error
//! event. The one exception is a client that closed its sending half: it may be gone, which only
//! writing can tell, so after [`HALF_CLOSE_PATIENCE`] the head (200) goes out and probes follow
//! every [`PROBE_INTERVAL`] (the form's keep-alive, or a line feed, which JSON allows before a value).

mod form;
mod parts;
mod stream;
mod whole;

pub(crate) use form::{Finish, Form, Frames, Framing, Label, NewPart, NewTokens, PromptTokens, WholeChoice};
pub(crate) use parts::{Joined, JoinedCall, Section};

use crate::connection::{Connection, Hold};
use crate::engine::Generation;
use crate::errors::ErrorForm;
use crate::parsers::Event as Part;
use crate::request::{Names, Parsing};
use crate::respond::{Answer, refuse};
use crate::timing::TimingBody;
use lockstep_core::{FinishReason, Refusal, RequestId};
use lockstep_wire::{Delta, Echo, Timing, Usage};
use parts::Reader;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long after a half-close the head still waits: nearly every refusal arrives within it.
const HALF_CLOSE_PATIENCE: Duration = Duration::from_millis(200);
/// Time between probes of a client that may be gone.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);

/// A request's answer, from submission to its last byte.
pub(crate) struct Pending {
    pub(crate) generation: Generation,
    pub(crate) hold: Hold,
    /// How it is written.
    pub(crate) form: Box<dyn Form>,
    /// How a failure is written.
    pub(crate) errors: ErrorForm,
    /// What the client calls the fields of its request.
    pub(crate) names: Names,
    /// See [`Label::serial`].
    pub(crate) serial: String,
    /// Choices in a row that have the same prompt (`n`).
    pub(crate) per_prompt: usize,
    /// How the text is taken apart; `None`: it is not.
    pub(crate) parsing: Option<Parsing>,
    /// The request's stop strings.
    pub(crate) stop: Vec<String>,
    /// What was generated is left out.
    pub(crate) prompt_only: bool,
}

impl Pending {
    /// The choices of an answer that has not begun.
    fn choices(&self) -> Choices {
        let count = self.generation.choices();
        let reader = |index| Reader::new(self.parsing.as_ref(), &self.serial, index);
        Choices {
            list: (0..count).map(|index| Choice::new(reader(index))).collect(),
            open: count,
            per_prompt: self.per_prompt.max(1),
            stop: self.stop.clone(),
            started: Instant::now(),
            timing: None,
        }
    }

    /// The answer to a request that was refused after it was submitted.
    fn refused(&self, refusal: Refusal) -> Answer {
        tracing::debug!(answer = self.form.id(), refusal.status, refusal.message, "request refused");
        refuse(&self.names.in_their_terms(refusal))
    }
}

/// What a choice gains by a delta.
#[derive(Debug)]
struct Piece {
    id: RequestId,
    text: String,
    tokens: NewTokens,
    finish: Option<FinishReason>,
    /// The number of the stop string that ended the choice.
    stop: Option<u32>,
    usage: Usage,
    timing: Option<Box<Timing>>,
}

impl Piece {
    /// What is reported of the prompt, if it comes with `delta`, and what is new.
    fn of(delta: Delta, prompt_only: bool) -> Self {
        let Delta { id, text, tokens: ids, finish, stop_string, mut usage, logprobs, echo, timing } = delta;
        let Echo { text: echoed, ids: prompt, tokens: of_prompt } =
            echo.map(|echo| *echo).unwrap_or_default();
        let mut tokens = NewTokens::default();
        if !prompt.is_empty() {
            tokens.prompt = Some(Arc::new(PromptTokens { ids: prompt, logprobs: of_prompt.clone() }));
        }
        if echoed.is_some() {
            tokens.logprobs = of_prompt;
        }
        let echoed = echoed.unwrap_or_default();
        let mut piece = Self { id, text: echoed, tokens, finish, stop: stop_string, usage, timing };
        if prompt_only {
            usage.completion_tokens = 0;
            let finish = finish.map(|f| if f == FinishReason::Abort { f } else { FinishReason::Length });
            return Self { finish, stop: None, usage, ..piece };
        }
        piece.text.push_str(&text);
        piece.tokens.ids = ids;
        piece.tokens.logprobs.extend(logprobs.into_iter().flat_map(|list| *list));
        piece
    }
}

/// Answers with a stream when `stream`, else with one JSON document.
pub(crate) async fn answer(pending: Pending, stream: bool) -> Answer {
    if stream { stream::answer(pending).await } else { whole::answer(pending).await }
}

/// One choice of the answer so far.
#[derive(Debug)]
struct Choice {
    reader: Reader,
    usage: Usage,
    reasoning_tokens: u32,
    finish: Option<Finish>,
}

impl Choice {
    fn new(reader: Reader) -> Self {
        Self { reader, usage: Usage::default(), reasoning_tokens: 0, finish: None }
    }
}

/// The choices of an answer and how many of them go on.
#[derive(Debug)]
struct Choices {
    list: Vec<Choice>,
    open: usize,
    per_prompt: usize,
    stop: Vec<String>,
    started: Instant,
    /// Of the choice that ended last.
    timing: Option<TimingBody>,
}

impl Choices {
    /// Takes in what a piece says about its choice, and gives what is decided by now.
    fn read(&mut self, choice: usize, piece: &Piece) -> Vec<Part> {
        let state = &mut self.list[choice];
        let parts = state.reader.read(&piece.text, piece.finish.is_some());
        state.usage = piece.usage;
        if state.reader.is_reasoning() {
            state.reasoning_tokens = piece.usage.completion_tokens;
        }
        if let Some(reason) = piece.finish {
            self.end(choice, reason, piece);
        }
        parts
    }

    fn end(&mut self, choice: usize, reason: FinishReason, piece: &Piece) {
        let usage = piece.usage;
        let state = &mut self.list[choice];
        if state.finish.is_none() {
            self.open -= 1;
            let timing = piece.timing.as_deref();
            self.timing = timing.map(|timing| TimingBody::new(timing, usage, self.started.elapsed()));
            state.finish = Some(Finish {
                reason,
                has_calls: state.reader.has_calls(),
                stop: piece.stop.and_then(|number| self.stop.get(number as usize).cloned()),
                usage,
                reasoning_tokens: state.reasoning_tokens,
                timing: self.timing,
            });
        }
        tracing::debug!(
            request = %piece.id,
            prompt_tokens = usage.prompt_tokens,
            completion_tokens = usage.completion_tokens,
            elapsed_ms = self.started.elapsed().as_millis() as u64,
            finish = reason.as_openai(),
            "request finished"
        );
    }

    /// Whether every choice has ended.
    fn are_complete(&self) -> bool {
        self.open == 0
    }

    /// Token counts of the whole answer: generated tokens of all choices, and each prompt once, as its first
    /// choice met it.
    fn usage(&self) -> Usage {
        let mut sum = Usage::default();
        for (index, choice) in self.list.iter().enumerate() {
            let usage = choice.usage;
            if index % self.per_prompt == 0 {
                sum.prompt_tokens = sum.prompt_tokens.saturating_add(usage.prompt_tokens);
                sum.cached_tokens = sum.cached_tokens.saturating_add(usage.cached_tokens);
            }
            sum.completion_tokens = sum.completion_tokens.saturating_add(usage.completion_tokens);
        }
        sum
    }
}

/// Waits until the client has had its sending half closed for [`HALF_CLOSE_PATIENCE`].
async fn half_close_patience(connection: &Connection) {
    connection.half_closed().await;
    tokio::time::sleep(HALF_CLOSE_PATIENCE).await;
}
