//! The answer as server-sent events, by the letter: `data: <one line of JSON>` and an empty line
//! per event, `data: [DONE]` last, comments while nothing happens.
//!
//! Per choice: (chat) one chunk with the role, chunks with text, reasoning and tool calls as they are
//! decided, one chunk with `finish_reason`. A delta that decides nothing makes no chunk; its
//! log-probabilities come with the next one. A failure makes an error event in OpenAI's nested form, and the
//! stream ends there, without `[DONE]`: an answer that was cut must not look complete.

use super::logprobs::TextOffset;
use super::parts::Reader;
use super::shape::End;
use super::{Choices, PROBE_INTERVAL, Pending, Piece, half_close_patience, in_terms_of, refused};
use crate::engine::Event;
use crate::respond::{Answer, error_json};
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use lockstep_wire::{Delta, TextLogprobs};
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::Instant;

/// Silence after which a comment is sent, so that proxies keep the connection.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

struct EventStream {
    pending: Pending,
    choices: Choices,
    /// What is out of each choice.
    sent: Vec<Sent>,
    /// The event that decided to answer with a stream.
    first: Option<(usize, Event)>,
    quiet_since: Instant,
}

/// What a client has of one choice.
struct Sent {
    reader: Reader,
    /// The role chunk.
    is_opened: bool,
    /// Tokens whose log-probabilities no chunk has carried yet.
    held: Vec<TextLogprobs>,
    offset: TextOffset,
}

impl Sent {
    /// Nothing is out yet.
    fn nothing(reader: Reader) -> Self {
        Self { reader, is_opened: false, held: Vec::new(), offset: TextOffset::default() }
    }
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
        return refused(&pending.head, refusal);
    }
    let sent = pending.readers().map(Sent::nothing).collect();
    let stream = EventStream { pending, choices, sent, first, quiet_since: Instant::now() };
    let mut answer = Response::new(Body::from_stream(futures::stream::unfold(Some(stream), next_frames)));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would collect tokens before passing them on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    answer
}

/// The next bytes and the rest of the stream, which is `None` after the last.
async fn next_frames(
    stream: Option<EventStream>,
) -> Option<(Result<Bytes, Infallible>, Option<EventStream>)> {
    let mut stream = stream?;
    loop {
        let (frames, last) = match stream.next_event().await {
            None => (": keep-alive\n\n".into(), false),
            Some((choice, Event::Delta(delta))) => stream.frames(choice, delta),
            Some((_, Event::Refused(refusal))) => (stream.error_frame(refusal), true),
        };
        if !frames.is_empty() {
            stream.quiet_since = Instant::now();
            return Some((Ok(Bytes::from(frames)), (!last).then_some(stream)));
        }
    }
}

impl EventStream {
    /// The next event; `None` when a comment is due.
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

    /// The events that a delta makes, and whether they end the stream.
    fn frames(&mut self, index: usize, delta: Delta) -> (String, bool) {
        let head = &self.pending.head;
        let mut piece = Piece::of(delta, self.pending.echo_only);
        let sent = &mut self.sent[index];
        sent.held.append(&mut piece.tokens);
        let mut frames = String::new();
        if !sent.is_opened {
            sent.is_opened = true;
            head.role_chunk(index).iter().for_each(|chunk| push_frame(&mut frames, chunk));
        }
        let parts = sent.reader.read(&piece.text, piece.finish.is_some());
        for (i, part) in parts.iter().enumerate() {
            let held = std::mem::take(&mut sent.held);
            let logprobs = (i == 0).then(|| head.logprobs(&held, &mut sent.offset)).flatten();
            push_frame(&mut frames, &head.part_chunk(index, part, logprobs));
        }
        let last = self.choices.record(index, &piece);
        if let Some(finish) = piece.finish {
            let held = std::mem::take(&mut sent.held);
            let logprobs = (!held.is_empty()).then(|| head.logprobs(&held, &mut sent.offset)).flatten();
            let finish = sent.reader.finish_reason(finish);
            let end = End { finish, timing: self.choices.list[index].timing };
            push_frame(&mut frames, &head.finish_chunk(index, end, logprobs));
        }
        if last {
            let usage = self.pending.head.usage_chunk(self.choices.usage());
            usage.iter().for_each(|chunk| push_frame(&mut frames, chunk));
            push_frame(&mut frames, "[DONE]");
        }
        (frames, last)
    }

    fn error_frame(&self, refusal: lockstep_core::Refusal) -> String {
        let head = &self.pending.head;
        tracing::debug!(answer = head.id(), refusal.message, "stream ended by an error");
        let mut frame = String::new();
        push_frame(&mut frame, &error_json(&in_terms_of(head.endpoint(), refusal)));
        frame
    }
}

fn push_frame(frames: &mut String, data: &str) {
    frames.push_str("data: ");
    frames.push_str(data);
    frames.push_str("\n\n");
}
