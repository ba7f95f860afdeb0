//! The answer as a stream of frames, flushed one delta at a time.
//!
//! A delta that decides nothing (half a character, text that may become a stop string) makes no frame; its
//! tokens come with the next one. A failure makes an error frame and the stream ends there: an answer that
//! was cut must not look complete.

use super::{Choices, Frames, NewPart, NewTokens, PROBE_INTERVAL, Pending, Piece, half_close_patience};
use crate::engine::Event;
use crate::respond::Answer;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use lockstep_core::Refusal;
use lockstep_wire::Delta;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::Instant;

/// Silence after which something is sent, so that proxies keep the connection.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

struct FrameStream {
    pending: Pending,
    choices: Choices,
    has_begun: bool,
    /// What is out of each choice.
    sent: Vec<Sent>,
    /// The event that decided to answer with a stream.
    first: Option<(usize, Event)>,
    quiet_since: Instant,
}

/// What a client has of one choice.
#[derive(Debug, Default)]
struct Sent {
    is_opened: bool,
    /// Tokens that no frame has carried yet.
    held: NewTokens,
}

pub(super) async fn answer(mut pending: Pending) -> Answer {
    let connection = pending.hold.connection().clone();
    let choices = pending.choices();
    let first = tokio::select! {
        biased;
        event = pending.generation.next() => Some(event),
        () = half_close_patience(&connection) => None,
    };
    if let Some((_, Event::Refused(refusal))) = first {
        return pending.refused(refusal);
    }
    let content_type = pending.form.framing().content_type();
    let sent = choices.list.iter().map(|_| Sent::default()).collect();
    let stream = FrameStream { pending, choices, has_begun: false, sent, first, quiet_since: Instant::now() };
    let mut answer = Response::new(Body::from_stream(futures::stream::unfold(Some(stream), next_frames)));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would collect tokens before passing them on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    answer
}

/// The next bytes and the rest of the stream, which is `None` after the last.
async fn next_frames(
    stream: Option<FrameStream>,
) -> Option<(Result<Bytes, Infallible>, Option<FrameStream>)> {
    let mut stream = stream?;
    loop {
        let (frames, last) = match stream.next_event().await {
            None => (stream.pending.form.keep_alive().into(), false),
            Some((choice, Event::Delta(delta))) => stream.frames(choice, delta),
            Some((_, Event::Refused(refusal))) => (stream.error_frame(refusal), true),
        };
        if !frames.is_empty() {
            stream.quiet_since = Instant::now();
            return Some((Ok(Bytes::from(frames)), (!last).then_some(stream)));
        }
    }
}

impl FrameStream {
    /// The next event; `None` when a sign of life is due.
    async fn next_event(&mut self) -> Option<(usize, Event)> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        let connection = self.pending.hold.connection().clone();
        let probing = connection.is_half_closed();
        let silence = if probing { PROBE_INTERVAL } else { KEEP_ALIVE_INTERVAL };
        tokio::select! {
            biased;
            event = self.pending.generation.next() => Some(event),
            () = tokio::time::sleep_until(self.quiet_since + silence) => None,
            () = connection.half_closed(), if !probing => None,
        }
    }

    /// The frames that a delta makes, and whether they end the stream.
    fn frames(&mut self, choice: usize, delta: Delta) -> (String, bool) {
        let mut out = Frames::default();
        let mut piece = Piece::of(delta, self.pending.prompt_only);
        let (form, sent) = (&mut self.pending.form, &mut self.sent[choice]);
        sent.held.append(&mut piece.tokens);
        if !std::mem::replace(&mut self.has_begun, true) {
            form.begin(piece.usage, &mut out);
        }
        if !std::mem::replace(&mut sent.is_opened, true) {
            form.open(choice, &sent.held, &mut out);
        }
        for part in &self.choices.read(choice, &piece) {
            let tokens = std::mem::take(&mut sent.held);
            form.part(NewPart { choice, part, tokens, usage: piece.usage }, &mut out);
        }
        if let Some(finish) = &self.choices.list[choice].finish {
            form.finish(choice, finish, std::mem::take(&mut sent.held), &mut out);
        }
        let last = self.choices.are_complete();
        if last {
            form.end(self.choices.usage(), &mut out);
        }
        (out.take(), last)
    }

    fn error_frame(&mut self, refusal: Refusal) -> String {
        let Pending { form, errors, names, .. } = &mut self.pending;
        tracing::debug!(answer = form.id(), refusal.message, "stream ended by an error");
        let mut out = Frames::default();
        form.fail(&names.in_their_terms(refusal), *errors, &mut out);
        out.take()
    }
}
