//! What became of requests, and how long it took: counted where their events pass, in the registry.
//!
//! A request is one choice of an answer. Health checks' own requests are not counted. **Invariants:**
//! - Requests submitted are requests ended, over all [`End`]s, plus requests open.
//! - Counting costs no lock, allocation or look at the clock of its own: the registry's lock is held already, and all
//!   deltas of a message share one look.
//!
//! Read by `/metrics` ([`crate::metrics`]).

mod histogram;

pub(crate) use histogram::Histogram;

use crate::spans::{Course, Traced};
use lockstep_core::{FinishReason, RequestId};
use lockstep_wire::{Delta, Timing, Usage};
use std::time::Duration;
use tokio::time::Instant;

/// Upper bounds of times in seconds: 1, 2 and 5 of every power of ten.
#[rustfmt::skip]
const SECONDS: &[f64] = &[
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0,
];
/// Upper bounds of the time between two tokens in seconds: finer, around what people and devices differ in.
#[rustfmt::skip]
const TOKEN_SECONDS: &[f64] = &[
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
    10.0,
];
/// Upper bounds of token counts.
#[rustfmt::skip]
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
];

/// What is measured of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    /// From the submission to the first token.
    TimeToFirstToken,
    /// Between two tokens of a request.
    InterTokenLatency,
    /// From the submission to the end.
    EndToEnd,
    /// From rank 0's taking the request to the launch of its first step.
    Queue,
    /// From there to its first token.
    Prefill,
    /// From its first token to its end.
    Decode,
    /// Of requests that finished.
    PromptTokens,
    /// Of requests that finished.
    GeneratedTokens,
}

impl Measure {
    /// All of them, in the order in which they are exported.
    pub(crate) const ALL: [Self; 8] = [
        Self::TimeToFirstToken,
        Self::InterTokenLatency,
        Self::EndToEnd,
        Self::Queue,
        Self::Prefill,
        Self::Decode,
        Self::PromptTokens,
        Self::GeneratedTokens,
    ];

    const fn bounds(self) -> &'static [f64] {
        match self {
            Self::InterTokenLatency => TOKEN_SECONDS,
            Self::PromptTokens | Self::GeneratedTokens => TOKENS,
            _ => SECONDS,
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// An end token or a stop string.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
    /// Somebody asked for it, or its time was over.
    Abort,
    /// What it asks for left no token to choose.
    NoToken,
    /// A tokenizer or rank 0 refused it.
    Refused,
    /// The server ended it: the engine failed, or the grace of a drain was over.
    Failed,
    /// Its client left.
    Left,
}

impl End {
    /// All of them, in the order in which they are exported.
    pub(crate) const ALL: [Self; 7] =
        [Self::Stop, Self::Length, Self::Abort, Self::NoToken, Self::Refused, Self::Failed, Self::Left];

    /// The value of the label `reason`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::NoToken => "no_token",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Left => "left",
        }
    }

    /// Whether it came with a last delta.
    pub(crate) const fn is_finish(self) -> bool {
        matches!(self, Self::Stop | Self::Length | Self::Abort | Self::NoToken)
    }
}

impl From<FinishReason> for End {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Abort => Self::Abort,
            FinishReason::NoToken => Self::NoToken,
        }
    }
}

/// What is remembered of an open request.
#[derive(Debug)]
pub(crate) struct Life {
    submitted: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    /// From its first step to its first token, by rank 0's clock.
    prefill: Option<Duration>,
    traced: Option<Traced>,
}

impl Life {
    /// Of a request that is submitted now.
    pub(crate) fn new(now: Instant, traced: Option<Traced>) -> Self {
        Self { submitted: now, first_token: None, last_token: None, prefill: None, traced }
    }

    /// Tells the collector of traces, if there is one, how it went.
    pub(crate) fn trace(self, request: RequestId, end: End, usage: Usage, now: Instant) {
        let Self { submitted, first_token, prefill, traced, .. } = self;
        let Some(traced) = traced else { return };
        let first_token = first_token.map(|at| at - submitted);
        traced.ended(Course { request, end, usage, total: now - submitted, first_token, prefill });
    }
}

/// The figures since the server's start.
#[derive(Clone, Debug)]
pub(crate) struct Statistics {
    submitted: u64,
    restarts: u64,
    ended: [u64; End::ALL.len()],
    measured: [Histogram; Measure::ALL.len()],
}

impl Default for Statistics {
    fn default() -> Self {
        let measured = Measure::ALL.map(|measure| Histogram::new(measure.bounds()));
        Self { submitted: 0, restarts: 0, ended: [0; End::ALL.len()], measured }
    }
}

impl Statistics {
    /// One more request.
    pub(crate) fn submitted(&mut self) {
        self.submitted += 1;
    }

    /// The engine has failed, and another one is being started.
    pub(crate) fn restarted(&mut self) {
        self.restarts += 1;
    }

    /// A delta of an open request has come.
    pub(crate) fn delta(&mut self, life: &mut Life, delta: &Delta, now: Instant) {
        if delta.tokens.is_empty() {
            return;
        }
        match life.last_token.replace(now) {
            None => {
                life.first_token = Some(now);
                self.observe(Measure::TimeToFirstToken, now - life.submitted);
                if let Some(Timing { queue_us, prefill_us, .. }) = delta.timing.as_deref() {
                    self.observe(Measure::Queue, Duration::from_micros(*queue_us));
                    self.observe(Measure::Prefill, Duration::from_micros(*prefill_us));
                    life.prefill = Some(Duration::from_micros(*prefill_us));
                }
            }
            Some(last) => {
                let count = delta.tokens.len() as u64;
                let each = (now - last).as_secs_f64() / count as f64;
                self.measured[Measure::InterTokenLatency as usize].observe(each, count);
            }
        }
    }

    /// A request has ended. Its times and token counts are measured if it came to a finish.
    pub(crate) fn ended(&mut self, life: &Life, end: End, usage: Usage, now: Instant) {
        self.ended[end as usize] += 1;
        if !end.is_finish() {
            return;
        }
        self.observe(Measure::EndToEnd, now - life.submitted);
        if let Some(first) = life.first_token {
            self.observe(Measure::Decode, now - first);
        }
        let tokens = [
            (Measure::PromptTokens, usage.prompt_tokens),
            (Measure::GeneratedTokens, usage.completion_tokens),
        ];
        for (measure, count) in tokens {
            self.measured[measure as usize].observe(f64::from(count), 1);
        }
    }

    fn observe(&mut self, measure: Measure, time: Duration) {
        self.measured[measure as usize].observe(time.as_secs_f64(), 1);
    }

    /// Requests handed to the engine.
    pub(crate) fn requests(&self) -> u64 {
        self.submitted
    }

    /// Engines that failed and were followed by another.
    pub(crate) fn restarts(&self) -> u64 {
        self.restarts
    }

    /// Requests by how they ended.
    pub(crate) fn ends(&self) -> impl Iterator<Item = (End, u64)> {
        End::ALL.into_iter().map(|end| (end, self.ended[end as usize]))
    }

    /// A measure's values.
    pub(crate) fn histogram(&self, measure: Measure) -> &Histogram {
        &self.measured[measure as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::RequestId;

    fn delta(tokens: usize, timing: Option<Timing>) -> Delta {
        Delta {
            id: RequestId(1),
            text: String::new(),
            tokens: vec![7; tokens],
            finish: None,
            stop_string: None,
            usage: Usage::default(),
            logprobs: None,
            echo: None,
            timing: timing.map(Box::new),
        }
    }

    #[test]
    fn every_part_of_a_request_is_measured_once() {
        let mut statistics = Statistics::default();
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut life = Life::new(start, None);
        statistics.submitted();
        let timing = Timing { queue_us: 40_000, prefill_us: 50_000, ..Timing::default() };
        statistics.delta(&mut life, &delta(0, None), at(1));
        statistics.delta(&mut life, &delta(1, Some(timing)), at(100));
        statistics.delta(&mut life, &delta(1, None), at(120));
        statistics.delta(&mut life, &delta(3, None), at(180));
        let usage = Usage { prompt_tokens: 30, cached_tokens: 8, completion_tokens: 5 };
        statistics.ended(&life, FinishReason::Length.into(), usage, at(200));
        let close = |measure, count, sum: f64| {
            let histogram = statistics.histogram(measure);
            assert_eq!(histogram.count(), count, "{measure:?}");
            assert!((histogram.sum() - sum).abs() < 1e-9, "{measure:?}: {}", histogram.sum());
        };
        close(Measure::TimeToFirstToken, 1, 0.1);
        close(Measure::InterTokenLatency, 4, 0.08);
        close(Measure::Queue, 1, 0.04);
        close(Measure::Prefill, 1, 0.05);
        close(Measure::Decode, 1, 0.1);
        close(Measure::EndToEnd, 1, 0.2);
        close(Measure::PromptTokens, 1, 30.0);
        close(Measure::GeneratedTokens, 1, 5.0);
        statistics.ended(&Life::new(start, None), End::Left, usage, at(300));
        assert_eq!(statistics.histogram(Measure::EndToEnd).count(), 1, "it came to no finish");
        let ends: Vec<_> = statistics.ends().filter(|(_, count)| *count > 0).collect();
        assert_eq!(ends, [(End::Length, 1), (End::Left, 1)]);
    }
}
