//! The flight recorder: what one rank's scheduler was told and what it decided, and its replay.
//!
//! The recorder keeps the inputs from the very first step, because decisions can be reproduced only from a known
//! state, and copying a scheduler with its prefix tree every so often would cost more than all records (a lock on the
//! tree cannot even be copied, on purpose). A record is a few dozen bytes a step plus 4 bytes a token; at
//! [`BYTES_MAX`] the recorder stops and says so, which on a CPU takes hours. Equal on all ranks.
//!
//! Off unless `--flight-dir` is given, since prompts are in it. It is written to a file when the loop ends with an error or by a panic. [`replay`] needs no model.
//!
//! Format: [`MAGIC`], the configuration, then records; all numbers little-endian.

use lockstep_core::TokenId;
use lockstep_scheduler::{
    CachePolicy, QueueOrder, Request, Scheduler, SchedulerConfig, StepDigest, StepOrder, StepPlan,
};
use lockstep_wire::{SubmitRequest, ToScheduler};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// First bytes of a recording; the last one is the format's version.
const MAGIC: [u8; 8] = *b"LOCKFLT\x01";
/// A recording grows to this and no further.
pub const BYTES_MAX: usize = 64 << 20;

const STEP: u8 = 1;
const MESSAGE: u8 = 2;
const PLAN: u8 = 3;
const TOKENS: u8 = 4;

/// Why a recording cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum FlightError {
    /// The file.
    #[error("{path}: {error}")]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// Not a recording of this version, or cut off.
    #[error("not a whole recording of this version of lockstep: {0}")]
    Damaged(String),
}

/// What a replay came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayReport {
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
        let Self { steps, messages, tokens, difference } = self;
        write!(f, "replayed {steps} steps, {messages} messages, {tokens} tokens: ")?;
        match difference {
            None => write!(f, "every decision is reproduced"),
            Some(difference) => write!(f, "{difference}"),
        }
    }
}

/// The recorder of one rank; see the module documentation.
pub struct FlightRecorder {
    bytes: Vec<u8>,
    is_full: bool,
    /// Where a panic writes it.
    file: Option<PathBuf>,
}

impl FlightRecorder {
    /// Records a scheduler with this configuration from its first step. `request_timeout_ms` is what
    /// [`request_of`] is given.
    pub fn new(config: &SchedulerConfig, request_timeout_ms: Option<u64>) -> Self {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(request_timeout_ms.unwrap_or(u64::MAX).to_le_bytes());
        config_words(config).iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend((config.eos_tokens.len() as u64).to_le_bytes());
        config.eos_tokens.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
        Self { bytes, is_full: false, file: None }
    }

    /// Names the file for [`write`](Self::write); a panic of this thread writes it too.
    pub fn set_file(&mut self, file: PathBuf) {
        self.file = Some(file);
    }

    /// Records nothing from now on and forgets what it has.
    pub fn turn_off(&mut self) {
        *self = Self { bytes: Vec::new(), is_full: true, file: None };
    }

    /// The recording so far.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether the recording ended early because it reached [`BYTES_MAX`].
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Writes the recording to its file, if it has one; returns the file.
    pub fn write(&self) -> std::io::Result<Option<&Path>> {
        let Some(file) = &self.file else { return Ok(None) };
        // Prompts are in it: nobody else's to read.
        let mut out = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(file)?;
        out.write_all(&self.bytes)?;
        Ok(Some(file))
    }

    /// A step of the loop begins at this time.
    pub fn step(&mut self, stamp_ms: u64) {
        self.record(&[&[STEP], &stamp_ms.to_le_bytes()]);
    }

    /// The scheduler is about to be given this message.
    pub fn message(&mut self, message: &ToScheduler) {
        let changes_nothing = matches!(message, ToScheduler::Info { .. } | ToScheduler::Shutdown);
        if changes_nothing || self.is_full {
            return;
        }
        match lockstep_wire::encode(message) {
            Ok(encoded) => self.record(&[&[MESSAGE], &(encoded.len() as u32).to_le_bytes(), &encoded]),
            // It was decoded from a message within the limit, so this cannot be; a gap must not go unnoticed.
            Err(_) => self.is_full = true,
        }
    }

    /// The scheduler was asked for a plan; its digest afterwards.
    pub fn plan(&mut self, planned: bool, digest: StepDigest) {
        let mut words = [0; 32];
        for (slot, word) in words.as_chunks_mut::<8>().0.iter_mut().zip(digest.to_words()) {
            *slot = word.to_le_bytes();
        }
        self.record(&[&[PLAN, u8::from(planned)], &words]);
    }

    /// The oldest step completed with these tokens.
    pub fn tokens(&mut self, tokens: &[TokenId]) {
        let encoded = tokens.iter().flat_map(|token| token.to_le_bytes());
        self.record(&[&[TOKENS], &(tokens.len() as u32).to_le_bytes()]);
        if !self.is_full {
            self.bytes.extend(encoded);
        }
    }

    fn record(&mut self, parts: &[&[u8]]) {
        let added: usize = parts.iter().map(|part| part.len()).sum();
        self.is_full |= self.bytes.len() + added > BYTES_MAX;
        if !self.is_full {
            parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
        }
    }
}

impl Drop for FlightRecorder {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Ok(Some(file)) = self.write()
        {
            tracing::error!(
                "the flight recorder is in {}; see it again with `lockstep replay`",
                file.display()
            );
        }
    }
}

/// What the scheduler is told of a request submitted at `stamp_ms`, which ends `timeout_ms` later at the latest.
pub fn request_of(submitted: SubmitRequest, stamp_ms: u64, timeout_ms: Option<u64>) -> Request {
    Request {
        id: submitted.id,
        prompt: submitted.prompt,
        sampling: submitted.sampling,
        cache_salt: submitted.cache_salt,
        priority: submitted.priority,
        deadline_ms: timeout_ms.map(|timeout| stamp_ms.saturating_add(timeout)),
    }
}

/// Runs a scheduler on a recording and compares every decision.
pub fn replay(file: &Path) -> Result<ReplayReport, FlightError> {
    let bytes = std::fs::read(file).map_err(|error| FlightError::File { path: file.to_owned(), error })?;
    replay_bytes(&bytes)
}

/// [`replay`] of a recording in memory.
pub fn replay_bytes(bytes: &[u8]) -> Result<ReplayReport, FlightError> {
    let mut reader = Reader { rest: bytes };
    if reader.take::<8>()? != MAGIC {
        return Err(FlightError::Damaged("its first bytes are others".into()));
    }
    let request_timeout_ms = Some(reader.word()?).filter(|&timeout| timeout != u64::MAX);
    let config = read_config(&mut reader)?;
    config.validate().map_err(|e| FlightError::Damaged(e.to_string()))?;
    let mut replay = Replay {
        scheduler: Scheduler::new(config),
        plan: StepPlan::new(),
        in_flight: Default::default(),
        now_ms: 0,
        request_timeout_ms,
        report: ReplayReport { steps: 0, messages: 0, tokens: 0, difference: None },
    };
    let mut events = Vec::new();
    while !reader.rest.is_empty() && replay.report.difference.is_none() {
        replay.record(&mut reader)?;
        replay.scheduler.take_events(&mut events);
        events.clear();
    }
    Ok(replay.report)
}

struct Replay {
    scheduler: Scheduler,
    plan: StepPlan,
    /// Planned and not completed: number and tokens expected.
    in_flight: std::collections::VecDeque<(u64, usize)>,
    now_ms: u64,
    request_timeout_ms: Option<u64>,
    report: ReplayReport,
}

impl Replay {
    fn record(&mut self, reader: &mut Reader<'_>) -> Result<(), FlightError> {
        match reader.take::<1>()?[0] {
            STEP => {
                self.now_ms = reader.word()?;
                self.scheduler.advance(self.now_ms);
            }
            MESSAGE => {
                let len = reader.count()?;
                let message = lockstep_wire::decode(reader.slice(len)?);
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

    fn apply(&mut self, message: ToScheduler) {
        self.report.messages += 1;
        match message {
            // A refusal leaves no trace but in the digest.
            ToScheduler::Submit(submitted) => {
                let request = request_of(*submitted, self.now_ms, self.request_timeout_ms);
                drop(self.scheduler.submit(request, self.now_ms));
            }
            ToScheduler::Abort(id) => self.scheduler.abort(id),
            ToScheduler::FlushCache => self.scheduler.flush_cache(),
            ToScheduler::Info { .. } | ToScheduler::Shutdown => {}
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
        let cut = || FlightError::Damaged(format!("it ends {len} bytes before a record does"));
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
}

fn config_words(config: &SchedulerConfig) -> [u64; 12] {
    [
        config.page_size as u64,
        config.num_pages as u64,
        config.max_running as u64,
        config.token_budget as u64,
        config.context_max as u64,
        u64::from(config.cache == CachePolicy::Radix),
        u64::from(config.mixed),
        u64::from(config.overlap),
        config.waiting_max as u64,
        u64::from(config.queue_order == QueueOrder::LongestPrefix),
        u64::from(config.step_order == StepOrder::DecodeFirst),
        config.reserve_percent as u64,
    ]
}

fn read_config(reader: &mut Reader<'_>) -> Result<SchedulerConfig, FlightError> {
    let mut size = || reader.word().map(|word| word as usize);
    let config = SchedulerConfig {
        page_size: size()?,
        num_pages: size()?,
        max_running: size()?,
        token_budget: size()?,
        context_max: size()?,
        cache: if size()? == 1 { CachePolicy::Radix } else { CachePolicy::None },
        mixed: size()? == 1,
        overlap: size()? == 1,
        waiting_max: size()?,
        queue_order: if size()? == 1 { QueueOrder::LongestPrefix } else { QueueOrder::Fcfs },
        step_order: if size()? == 1 { StepOrder::DecodeFirst } else { StepOrder::PrefillFirst },
        reserve_percent: size()?,
        // Nobody takes the freed pages of a replay: it has no device.
        track_freed: false,
        eos_tokens: Vec::new(),
    };
    let count = reader.word()? as usize;
    let bytes = reader.slice(count.saturating_mul(4))?;
    let eos_tokens = bytes.as_chunks::<4>().0.iter().map(|t| TokenId::from_le_bytes(*t)).collect();
    Ok(SchedulerConfig { eos_tokens, ..config })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::{RequestId, SamplingParams};
    use lockstep_wire::TextParams;

    /// Three requests on a pool that holds one and a half of them, so that the recording has retractions.
    fn recording() -> Vec<u8> {
        let config =
            SchedulerConfig { page_size: 2, num_pages: 12, reserve_percent: 0, ..Default::default() };
        let mut recorder = FlightRecorder::new(&config, Some(1000));
        let (mut scheduler, mut plan, mut in_flight) = (Scheduler::new(config), StepPlan::new(), Vec::new());
        recorder.step(5);
        for id in 0..3 {
            let submitted = SubmitRequest {
                id: RequestId(id),
                prompt: vec![1, 2, id as TokenId],
                sampling: SamplingParams { max_tokens: Some(12), ..SamplingParams::default() },
                text: TextParams::default(),
                cache_salt: None,
                priority: 0,
            };
            recorder.message(&ToScheduler::Submit(Box::new(submitted.clone())));
            scheduler.submit(request_of(submitted, 5, Some(1000)), 5).unwrap();
        }
        while scheduler.has_work() {
            let planned = scheduler.plan_into(&mut plan);
            recorder.plan(planned, scheduler.digest());
            in_flight.extend(planned.then(|| (plan.step, plan.sample_count())));
            while in_flight.len() > usize::from(planned) {
                let (step, count) = in_flight.remove(0);
                recorder.tokens(&vec![9; count]);
                scheduler.complete(step, &vec![9; count]);
            }
        }
        assert!(scheduler.counters().retractions > 0);
        recorder.bytes().to_vec()
    }

    #[test]
    fn a_replay_reproduces_every_decision() {
        let report = replay_bytes(&recording()).unwrap();
        assert_eq!((report.messages, report.tokens, &report.difference), (3, 36, &None), "{report}");
        assert!(report.steps > 12, "{report}");
    }

    #[test]
    fn a_changed_decision_is_found_and_damage_is_refused() {
        let good = recording();
        let mut other = good.clone();
        // The last plan record: PLAN, planned, four words, then tokens; change its token hash.
        let at = other.windows(2).rposition(|pair| pair == [PLAN, 1]).unwrap();
        other[at + 2 + 24] ^= 1;
        assert!(replay_bytes(&other).unwrap().difference.unwrap().contains("token_hash"));
        for len in [0, 4, 8, 50, good.len() - 1] {
            assert!(matches!(replay_bytes(&good[..len]), Err(FlightError::Damaged(_))), "{len} bytes");
        }
    }
}
