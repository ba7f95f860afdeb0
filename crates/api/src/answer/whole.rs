//! The answer as one JSON document.

use super::{Choices, Joined, NewTokens, PROBE_INTERVAL, Pending, Piece, WholeChoice, half_close_patience};
use crate::engine::Event;
use crate::respond::{Answer, json_body, json_text};
use crate::timing;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use lockstep_core::Refusal;
use std::convert::Infallible;

/// Collects an answer; every await is cancel-safe, so collecting can pause for a probe.
struct Collector {
    pending: Pending,
    choices: Choices,
    collected: Vec<Collected>,
}

/// What has come of one choice.
#[derive(Debug, Default)]
struct Collected {
    joined: Joined,
    tokens: NewTokens,
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
        Err(refusal) => collector.pending.refused(refusal),
    }
}

/// A body that writes a line feed per interval, then the answer.
fn probing_body(collector: Collector) -> Body {
    let next = |collector: Option<Collector>| async move {
        let mut collector = collector?;
        let frame = match tokio::time::timeout(PROBE_INTERVAL, collector.collect()).await {
            Err(_) => return Some((Ok::<_, Infallible>(Bytes::from_static(b"\n")), Some(collector))),
            Ok(Ok(text)) => text,
            // The status is sent already; the body still says what happened.
            Ok(Err(refusal)) => {
                collector.pending.errors.json(&collector.pending.names.in_their_terms(refusal))
            }
        };
        Some((Ok(Bytes::from(frame)), None))
    };
    Body::from_stream(futures::stream::unfold(Some(collector), next))
}

impl Collector {
    fn new(pending: Pending) -> Self {
        let choices = pending.choices();
        let collected = choices.list.iter().map(|_| Collected::default()).collect();
        Self { pending, choices, collected }
    }

    /// Waits for the end of every choice and returns the JSON document.
    async fn collect(&mut self) -> Result<String, Refusal> {
        loop {
            match self.pending.generation.next().await {
                (choice, Event::Delta(delta)) => {
                    let mut piece = Piece::of(delta, self.pending.prompt_only);
                    let Collected { joined, tokens } = &mut self.collected[choice];
                    for part in &self.choices.read(choice, &piece) {
                        joined.add(part);
                    }
                    tokens.append(&mut piece.tokens);
                    if self.choices.are_complete() {
                        return Ok(self.document());
                    }
                }
                (_, Event::Refused(refusal)) => return Err(refusal),
            }
        }
    }

    fn document(&mut self) -> String {
        let collected = std::mem::take(&mut self.collected).into_iter();
        let finishes = self.choices.list.iter().filter_map(|choice| choice.finish.clone());
        let whole = collected.zip(finishes);
        let mut whole: Vec<_> = whole
            .map(|(Collected { joined, tokens }, finish)| WholeChoice { joined, tokens, finish })
            .collect();
        // The first choice of a prompt reports it for all.
        for choices in whole.chunks_mut(self.choices.per_prompt) {
            let prompt = choices.first().and_then(|first| first.tokens.prompt.clone());
            choices.iter_mut().for_each(|choice| choice.tokens.prompt.clone_from(&prompt));
        }
        self.pending.form.whole(&whole, self.choices.usage())
    }
}
