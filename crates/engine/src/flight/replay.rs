//! Runs a scheduler again on a recording, without a model, and compares every decision.

use super::{FlightError, MAGIC, MESSAGE, PLAN, SNAPSHOT, STEP, TOKENS, request_of};
use lockstep_core::limits::FLAG_FILE_BYTES_MAX;
use lockstep_core::{StepId, TokenId, files};
use lockstep_scheduler::{Scheduler, StepDigest, StepPlan};
use lockstep_wire::ToScheduler;
use std::collections::VecDeque;
use std::path::Path;

/// What a replay came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayReport {
    /// Number of the first step in the recording.
    pub first_step: StepId,
    /// Steps planned again.
    pub steps: u64,
    /// Messages applied again.
    pub messages: u64,
    /// Tokens completed again.
    pub tokens: u64,
    /// The first decision that differs from the recorded one, as a sentence; `None` when all are reproduced.
    pub difference: Option<String>,
}

impl std::fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { first_step, steps, messages, tokens, difference } = self;
        write!(f, "replayed {steps} steps from step {first_step}, {messages} messages, {tokens} tokens: ")?;
        match difference {
            None => write!(f, "every decision is reproduced"),
            Some(difference) => write!(f, "{difference}"),
        }
    }
}

/// Runs a scheduler on a recording and compares every decision.
pub fn replay(file: &Path) -> Result<ReplayReport, FlightError> {
    let bytes = files::read(file, FLAG_FILE_BYTES_MAX)?;
    replay_bytes(&bytes)
}

/// [`replay`] of a recording in memory.
pub fn replay_bytes(bytes: &[u8]) -> Result<ReplayReport, FlightError> {
    let mut reader = Reader { rest: bytes };
    if reader.take::<8>()? != MAGIC {
        return Err(FlightError::Damaged("its first bytes are others".into()));
    }
    let request_timeout_ms = Some(reader.word()?).filter(|&timeout| timeout != u64::MAX);
    if reader.take::<1>()?[0] != SNAPSHOT {
        return Err(FlightError::Damaged("it does not begin with a snapshot".into()));
    }
    let scheduler = restore(reader.counted()?)?;
    let mut replay = Replay {
        plan: StepPlan::new(),
        in_flight: scheduler.in_flight().collect(),
        now_ms: 0,
        request_timeout_ms,
        report: ReplayReport {
            first_step: scheduler.counters().steps,
            steps: 0,
            messages: 0,
            tokens: 0,
            difference: None,
        },
        scheduler,
    };
    let mut events = Vec::new();
    while !reader.rest.is_empty() && replay.report.difference.is_none() {
        replay.record(&mut reader)?;
        replay.scheduler.take_events(&mut events);
        events.clear();
    }
    Ok(replay.report)
}

/// A scheduler from its snapshot, checked: the file may come from anywhere.
fn restore(snapshot: &[u8]) -> Result<Scheduler, FlightError> {
    let damaged = |what: String| FlightError::Damaged(format!("its snapshot: {what}"));
    let scheduler: Scheduler = postcard::from_bytes(snapshot).map_err(|e| damaged(e.to_string()))?;
    scheduler.config().validate().map_err(|e| damaged(e.to_string()))?;
    scheduler.check().map_err(damaged)?;
    Ok(scheduler)
}

struct Replay {
    scheduler: Scheduler,
    plan: StepPlan,
    /// Planned and not completed: number and tokens expected.
    in_flight: VecDeque<(StepId, usize)>,
    now_ms: u64,
    request_timeout_ms: Option<u64>,
    report: ReplayReport,
}

impl Replay {
    fn record(&mut self, reader: &mut Reader<'_>) -> Result<(), FlightError> {
        match reader.take::<1>()?[0] {
            SNAPSHOT => self.compare_snapshot(reader.counted()?),
            STEP => {
                self.now_ms = reader.word()?;
                self.scheduler.advance(self.now_ms);
            }
            MESSAGE => {
                let message = lockstep_wire::decode(reader.counted()?);
                self.apply(message.map_err(|e| FlightError::Damaged(e.to_string()))?);
            }
            PLAN => {
                let planned = reader.take::<1>()?[0] == 1;
                let words = [reader.word()?, reader.word()?, reader.word()?, reader.word()?];
                self.plan(planned, StepDigest::from_words(words));
            }
            TOKENS => {
                let count = reader.count()?;
                let (tokens, _) = reader.slice(4 * count)?.as_chunks::<4>();
                let tokens: Vec<TokenId> = tokens.iter().map(|t| TokenId::from_le_bytes(*t)).collect();
                self.complete(&tokens);
            }
            other => return Err(FlightError::Damaged(format!("a record of kind {other}"))),
        }
        Ok(())
    }

    /// Where the newer segment begins, the whole state must be the recorded one.
    fn compare_snapshot(&mut self, recorded: &[u8]) {
        let mine = postcard::to_allocvec(&self.scheduler).expect("invariant: a scheduler serializes");
        if mine != recorded {
            let step = self.scheduler.counters().steps;
            self.report.difference =
                Some(format!("before step {step}: the scheduler's state is not the recorded one"));
        }
    }

    fn apply(&mut self, message: ToScheduler) {
        self.report.messages += 1;
        match message {
            // A refusal leaves no trace but in the digest.
            ToScheduler::Submit(submitted) => {
                let request = request_of(*submitted, self.now_ms, self.request_timeout_ms);
                drop(self.scheduler.submit(request, self.now_ms));
            }
            ToScheduler::Abort(id) => self.scheduler.abort(id),
            ToScheduler::FlushCache { .. } => self.scheduler.flush_cache(),
            ToScheduler::Info { .. }
            | ToScheduler::WriteFlight { .. }
            | ToScheduler::Vocabulary(_)
            | ToScheduler::Prepare(_)
            | ToScheduler::Shutdown => {}
        }
    }

    fn plan(&mut self, recorded: bool, digest: StepDigest) {
        let planned = self.scheduler.plan_into(&mut self.plan);
        let step = self.plan.step;
        if planned != recorded {
            let what = |planned| if planned { "a step" } else { "no step" };
            self.report.difference =
                Some(format!("step {step}: {} was planned, now {}", what(recorded), what(planned)));
        } else if let Some(field) = self.scheduler.digest().first_difference(&digest) {
            self.report.difference = Some(format!("step {step}: {field} is not the recorded one"));
        }
        if planned {
            self.report.steps += 1;
            self.in_flight.push_back((step, self.plan.sample_count()));
        }
    }

    fn complete(&mut self, tokens: &[TokenId]) {
        match self.in_flight.pop_front() {
            Some((step, count)) if count == tokens.len() => {
                self.report.tokens += count as u64;
                self.scheduler.complete(step, tokens);
            }
            other => {
                self.report.difference =
                    Some(format!("{} tokens are recorded for (step, rows) {other:?}", tokens.len()));
            }
        }
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn slice(&mut self, len: usize) -> Result<&'a [u8], FlightError> {
        let cut = || FlightError::Damaged(format!("a record of {len} bytes goes past its end"));
        let (taken, rest) = self.rest.split_at_checked(len).ok_or_else(cut)?;
        self.rest = rest;
        Ok(taken)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], FlightError> {
        Ok(self.slice(N)?.try_into().expect("invariant: a slice of N bytes"))
    }

    fn word(&mut self) -> Result<u64, FlightError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn count(&mut self) -> Result<usize, FlightError> {
        Ok(u32::from_le_bytes(self.take()?) as usize)
    }

    /// A length and that many bytes.
    fn counted(&mut self) -> Result<&'a [u8], FlightError> {
        let len = self.count()?;
        self.slice(len)
    }
}
