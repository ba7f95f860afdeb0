//! The flight recorder: what one rank's scheduler was told and what it decided lately, and its replay.
//!
//! Decisions can be reproduced only from a known state, so the ring has two segments: each starts with a snapshot
//! of the scheduler (its prefix tree included) and goes on with what it was told and decided since. When the newer
//! one is full it becomes the older one, so a recording always holds at least the last `segment_bytes` of records,
//! a few dozen bytes a step plus 4 bytes a token. Equal on all ranks.
//!
//! It is written to a file when the loop ends with an error or by a panic and on request, if `--flight-dir` names a
//! place (prompts are in it). [`replay()`] needs no model.
//!
//! Format: [`MAGIC`], the request time-out, then records that begin with a snapshot; all numbers little-endian.

mod replay;

pub use replay::{ReplayReport, replay, replay_bytes};

use lockstep_core::{StepId, TokenId};
use lockstep_scheduler::{Request, Scheduler, StepDigest};
use lockstep_wire::{RankInfo, SubmitRequest, ToScheduler};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// First bytes of a recording; the last one is the format's version.
const MAGIC: [u8; 8] = *b"LOCKFLT\x05";
/// Records of one segment: on a busy server about a minute, and a snapshot a minute costs nothing.
pub const SEGMENT_BYTES: usize = 8 << 20;

const SNAPSHOT: u8 = 0;
const STEP: u8 = 1;
const MESSAGE: u8 = 2;
const PLAN: u8 = 3;
const TOKENS: u8 = 4;

/// Why a recording cannot be written or replayed.
#[derive(Debug, thiserror::Error)]
pub enum FlightError {
    /// A file that cannot be written.
    #[error("{path}: {error}")]
    File {
        /// Which.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// A recording that cannot be read, or something else in its place.
    #[error(transparent)]
    Unreadable(#[from] lockstep_core::FileError),
    /// Not a recording of this version, or cut off.
    #[error("not a whole recording of this version of lockstep: {0}")]
    Damaged(String),
    /// Asked for one without a place to write it.
    #[error("this server writes no recordings; start it with --flight-dir DIR")]
    NoFolder,
}

/// The file of the recording of `rank`, in process `pid`, that ends before `step`.
fn file_path(folder: &Path, pid: u32, rank: usize, step: StepId) -> PathBuf {
    folder.join(format!("lockstep-{pid}-rank{rank}-step{step}.flight"))
}

/// The recorder of one rank; see the module documentation.
pub struct FlightRecorder {
    request_timeout_ms: Option<u64>,
    segment_bytes: usize,
    older: Vec<u8>,
    newer: Vec<u8>,
    /// Set when something could not be recorded: decisions after a gap cannot be reproduced.
    has_gap: bool,
    /// Where recordings go, and the rank they are of.
    files: Option<(PathBuf, usize)>,
    /// The step that is planned next, to name files.
    next_step: StepId,
}

impl FlightRecorder {
    /// A recorder that keeps at least the last `segment_bytes` of records; the first [`step`](Self::step) starts
    /// it. `request_timeout_ms` is what [`request_of`] is given.
    pub fn new(request_timeout_ms: Option<u64>, segment_bytes: usize) -> Self {
        Self {
            request_timeout_ms,
            segment_bytes,
            older: Vec::new(),
            newer: Vec::new(),
            has_gap: false,
            files: None,
            next_step: 0,
        }
    }

    /// Names the folder for [`write`](Self::write) and the global rank in file names; a panic of this thread
    /// writes there too.
    pub fn set_folder(&mut self, folder: PathBuf, rank: usize) {
        self.files = Some((folder, rank));
    }

    /// Where [`write`](Self::write), called at the same step on every rank, puts the recordings of `ranks`.
    pub fn paths(&self, ranks: &[RankInfo]) -> Vec<String> {
        let Some((folder, _)) = &self.files else { return Vec::new() };
        let path = |rank: &RankInfo| file_path(folder, rank.pid, rank.rank, self.next_step);
        ranks.iter().map(|rank| path(rank).display().to_string()).collect()
    }

    /// The recording so far; empty before the first step.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.request_timeout_ms.unwrap_or(u64::MAX).to_le_bytes());
        bytes.extend_from_slice(&self.older);
        bytes.extend_from_slice(&self.newer);
        bytes
    }

    /// Writes the recording to its folder; returns the file.
    pub fn write(&self) -> Result<PathBuf, FlightError> {
        let (folder, rank) = self.files.as_ref().ok_or(FlightError::NoFolder)?;
        let path = file_path(folder, std::process::id(), *rank, self.next_step);
        // Prompts are in it: nobody else's to read.
        let open = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
        match open.and_then(|mut file| file.write_all(&self.bytes())) {
            Ok(()) => Ok(path),
            Err(error) => Err(FlightError::File { path, error }),
        }
    }

    /// A step of the loop begins at this time; `scheduler` is as the last step left it.
    pub fn step(&mut self, stamp_ms: u64, scheduler: &Scheduler) {
        self.next_step = scheduler.counters().steps;
        if self.newer.is_empty() || self.newer.len() > self.segment_bytes || self.has_gap {
            self.start_segment(scheduler);
        }
        self.record(&[&[STEP], &stamp_ms.to_le_bytes()]);
    }

    fn start_segment(&mut self, scheduler: &Scheduler) {
        std::mem::swap(&mut self.older, &mut self.newer);
        if self.has_gap {
            // What came before the gap cannot be joined with what follows.
            self.older.clear();
        }
        let mut segment = std::mem::take(&mut self.newer);
        segment.clear();
        segment.push(SNAPSHOT);
        segment.extend(0_u32.to_le_bytes());
        let before = segment.len();
        // A scheduler's parts are numbers, strings and lists, which always serialize.
        self.newer = postcard::to_extend(scheduler, segment).expect("invariant: a scheduler serializes");
        let len = self.newer.len() - before;
        self.newer[1..before].copy_from_slice(&(len as u32).to_le_bytes());
        self.has_gap = false;
    }

    /// The scheduler is about to be given this message.
    pub fn message(&mut self, message: &ToScheduler) {
        if !changes_scheduler(message) {
            return;
        }
        match lockstep_wire::encode(message) {
            Ok(encoded) => self.record(&[&[MESSAGE], &(encoded.len() as u32).to_le_bytes(), &encoded]),
            // It was decoded from a message within the limit, so this cannot be; a gap must not go unnoticed.
            Err(_) => self.has_gap = true,
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
        self.record(&[&[TOKENS], &(tokens.len() as u32).to_le_bytes()]);
        if !self.has_gap {
            self.newer.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        }
    }

    fn record(&mut self, parts: &[&[u8]]) {
        if !self.has_gap {
            parts.iter().for_each(|part| self.newer.extend_from_slice(part));
        }
    }
}

impl Drop for FlightRecorder {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Ok(file) = self.write()
        {
            tracing::error!(
                "the flight recorder is in {}; see it again with `lockstep replay`",
                file.display()
            );
        }
    }
}

/// Whether a message reaches the scheduler at all.
fn changes_scheduler(message: &ToScheduler) -> bool {
    match message {
        ToScheduler::Submit(_) | ToScheduler::Abort(_) | ToScheduler::FlushCache { .. } => true,
        ToScheduler::Info { .. }
        | ToScheduler::WriteFlight { .. }
        | ToScheduler::Vocabulary(_)
        | ToScheduler::Prepare(_)
        | ToScheduler::Shutdown => false,
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

#[cfg(test)]
mod tests;
