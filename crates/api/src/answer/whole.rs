//! The answer as one JSON document.

use super::parts::{Joined, Reader};
use super::shape::{End, WholeChoice};
use super::{Choices, PROBE_INTERVAL, Pending, Piece, half_close_patience, in_terms_of, refused};
use crate::engine::Event;
use crate::respond::{Answer, error_json, json_body, json_text};
use crate::timing;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use lockstep_core::{FinishReason, Refusal};
use lockstep_wire::TextLogprobs;
use std::convert::Infallible;

/// Collects an answer; every await is cancel-safe, so collecting can pause for a probe.
struct Collector {
    pending: Pending,
    choices: Choices,
    parts: Vec<Parts>,
}

/// What has come of one choice.
struct Parts {
    reader: Reader,
    joined: Joined,
    tokens: Vec<TextLogprobs>,
}

pub(super) async fn answer(pending: Pending) -> Answer {
    let mut collector = Collector::new(pending);
    let connection = collector.pending.hold.connection().clone();
    let patience = half_close_patience(&connection);
    let collected = tokio::select! {
        biased;
        collected = collector.collect() => collected,
        () = patience => return json_body(StatusCode::OK, probing_body(collector)),
    };
    match collected {
        Ok(text) => {
            let mut answer = json_text(StatusCode::OK, text);
            if let Some(timing) = collector.choices.timing {
                answer.headers_mut().insert(timing::HEADER, timing.header());
            }
            answer
        }
        Err(refusal) => refused(&collector.pending.head, refusal),
    }
}

/// A body that writes a line feed per interval, then the answer.
fn probing_body(collector: Collector) -> Body {
    let next = |collector: Option<Collector>| async move {
        let mut collector = collector?;
        let endpoint = collector.pending.head.endpoint();
        let frame = match tokio::time::timeout(PROBE_INTERVAL, collector.collect()).await {
            Err(_) => return Some((Ok::<_, Infallible>(Bytes::from_static(b"\n")), Some(collector))),
            Ok(Ok(text)) => text,
            // The status is sent already; the body still says what happened.
            Ok(Err(refusal)) => error_json(&in_terms_of(endpoint, refusal)),
        };
        Some((Ok(Bytes::from(frame)), None))
    };
    Body::from_stream(futures::stream::unfold(Some(collector), next))
}

impl Collector {
    fn new(pending: Pending) -> Self {
        let empty = |reader| Parts { reader, joined: Joined::default(), tokens: Vec::new() };
        let parts = pending.readers().map(empty).collect();
        Self { choices: pending.choices(), pending, parts }
    }

    /// Waits for the end of every choice and returns the JSON document.
    async fn collect(&mut self) -> Result<String, Refusal> {
        loop {
            match self.pending.generation.next().await {
                (choice, Event::Delta(delta)) => {
                    let mut piece = Piece::of(delta, self.pending.echo_only);
                    let Parts { reader, joined, tokens } = &mut self.parts[choice];
                    let parts = reader.read(&piece.text, piece.finish.is_some());
                    parts.into_iter().for_each(|part| joined.add(part));
                    tokens.append(&mut piece.tokens);
                    if self.choices.record(choice, &piece) {
                        return Ok(self.document());
                    }
                }
                (_, Event::Refused(refusal)) => return Err(refusal),
            }
        }
    }

    fn document(&mut self) -> String {
        let parts = std::mem::take(&mut self.parts).into_iter();
        let whole = parts.zip(&self.choices.list).map(|(Parts { reader, joined, tokens }, choice)| {
            let finish = reader.finish_reason(choice.finish.unwrap_or(FinishReason::Abort));
            WholeChoice { joined, tokens, end: End { finish, timing: choice.timing } }
        });
        self.pending.head.whole(&whole.collect::<Vec<_>>(), self.choices.usage())
    }
}
