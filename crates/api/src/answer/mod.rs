//! Answers: from the engine's events to HTTP, whole or as server-sent events.
//!
//! **When the response head is sent:** with the first event. A refusal is therefore always an
//! answer with its own status, also for `stream: true`; once text flows, a failure is an error
//! event. The one exception is a client that closed its sending half: it may be gone, which only
//! writing can tell, so after [`HALF_CLOSE_PATIENCE`] the head (200) goes out and probes follow
//! every [`PROBE_INTERVAL`] (an SSE comment, or a line feed, which JSON allows before a value).

mod logprobs;
mod parts;
mod shape;
mod stream;
mod whole;

pub(crate) use shape::{Head, Shape};

use crate::connection::{Connection, Hold};
use crate::engine::Generation;
use crate::request::{Endpoint, Parsing};
use crate::respond::{Answer, refuse};
use crate::timing::TimingBody;
use lockstep_core::{FinishReason, Refusal, RequestId};
use lockstep_wire::{Delta, TextLogprobs, Timing, Usage};
use parts::Reader;
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
    pub(crate) head: Head,
    /// Choices in a row that have the same prompt (`n`).
    pub(crate) per_prompt: usize,
    /// How the text is taken apart; `None`: it is not.
    pub(crate) parsing: Option<Parsing>,
    /// Show the echoed prompt only; see [`Piece::of`].
    pub(crate) echo_only: bool,
}

impl Pending {
    /// The state of an answer that has not begun.
    fn choices(&self) -> Choices {
        Choices {
            list: vec![Choice::default(); self.generation.choices()],
            open: self.generation.choices(),
            per_prompt: self.per_prompt.max(1),
            started: Instant::now(),
            timing: None,
        }
    }

    /// One per choice, at its beginning.
    fn readers(&self) -> impl Iterator<Item = Reader> {
        (0..self.generation.choices()).map(|i| Reader::new(self.parsing.as_ref(), self.head.id(), i))
    }
}

/// What a choice gains by a delta.
#[derive(Debug)]
struct Piece {
    id: RequestId,
    text: String,
    tokens: Vec<TextLogprobs>,
    finish: Option<FinishReason>,
    usage: Usage,
    timing: Option<Box<Timing>>,
}

impl Piece {
    /// The echoed prompt, if it is there, and the new text; `echo_only` leaves out what was generated.
    fn of(delta: Delta, echo_only: bool) -> Self {
        let Delta { id, text, finish, mut usage, logprobs, echo, timing, .. } = delta;
        let echo = echo.map_or_else(Default::default, |echo| (echo.text, echo.tokens));
        let mut piece = Self { id, text: echo.0, tokens: echo.1, finish, usage, timing };
        if echo_only {
            usage.completion_tokens = 0;
            let finish = finish.map(|f| if f == FinishReason::Abort { f } else { FinishReason::Length });
            return Self { finish, usage, ..piece };
        }
        piece.text.push_str(&text);
        piece.tokens.extend(logprobs.into_iter().flat_map(|list| *list));
        piece
    }
}

/// Answers with events when `stream`, else with one JSON document.
pub(crate) async fn answer(pending: Pending, stream: bool) -> Answer {
    if stream { stream::answer(pending).await } else { whole::answer(pending).await }
}

/// One choice of the answer so far.
#[derive(Clone, Debug, Default)]
struct Choice {
    usage: Usage,
    finish: Option<FinishReason>,
    /// Where its time went, if the client asked; from its end on.
    timing: Option<TimingBody>,
}

/// The choices of an answer and how many of them go on.
#[derive(Debug)]
struct Choices {
    list: Vec<Choice>,
    open: usize,
    per_prompt: usize,
    started: Instant,
    /// Of the choice that ended last.
    timing: Option<TimingBody>,
}

impl Choices {
    /// Takes in what a piece says about its choice. True when it was the answer's last.
    fn record(&mut self, choice: usize, piece: &Piece) -> bool {
        let state = &mut self.list[choice];
        state.usage = piece.usage;
        if piece.finish.is_some() && state.finish.is_none() {
            state.finish = piece.finish;
            self.open -= 1;
        }
        if let Some(finish) = piece.finish {
            let usage = piece.usage;
            let timing = piece.timing.as_deref();
            state.timing = timing.map(|timing| TimingBody::new(timing, usage, self.started.elapsed()));
            self.timing = state.timing;
            tracing::debug!(
                request = %piece.id,
                prompt_tokens = usage.prompt_tokens,
                completion_tokens = usage.completion_tokens,
                elapsed_ms = self.started.elapsed().as_millis() as u64,
                finish = finish.as_openai(),
                "request finished"
            );
        }
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

/// The engine's refusals name the field of chat requests; completions have another.
pub(crate) fn in_terms_of(endpoint: Endpoint, mut refusal: Refusal) -> Refusal {
    if refusal.code.as_deref() == Some("context_length_exceeded") {
        refusal.param = Some(endpoint.prompt_field().into());
    }
    refusal
}

/// The answer to a request that was refused after it was submitted.
fn refused(head: &Head, refusal: Refusal) -> Answer {
    tracing::debug!(answer = head.id(), refusal.status, refusal.message, "request refused");
    refuse(&in_terms_of(head.endpoint(), refusal))
}
