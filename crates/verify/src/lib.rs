//! `lockstep verify`: are the answers the same at every tp size, with every number of pipeline stages, on every device, and however a prompt comes through?
//!
//! | file | holds |
//! |---|---|
//! | [`subject`] | what is verified: where each rank's weights come from |
//! | [`place`] | where a run takes place, and what two places owe each other: bits, or errors within a bound |
//! | [`memory`] | whether that fits, before anything is loaded |
//! | [`group`] | a rank group as threads, loaded once, over the shared memory that rank processes use |
//! | [`forward`] | teacher-forced logits under different schedules, and the layers between |
//! | [`greedy`] | greedy text through the server's own scheduler, runner and sampler |
//! | [`compare`] | two runs side by side: errors, agreement, first difference, promise |
//! | `session` | which runs, in which order |
//! | [`report`] | the findings as text |
//!
//! **Invariants:** every run goes through the code that serves (loader, decoder, collectives, scheduler, sampler);
//! what is promised bit-equal in `docs/architecture.md`, "Numbers", is required bit-equal here; a run that fails is a
//! finding, not a crash; a value that is no number is a finding wherever it is, and what rests on it is never equal to
//! anything; one group is loaded at a time.

pub mod compare;
pub mod forward;
pub mod greedy;
pub mod group;
pub mod memory;
pub mod place;
pub mod report;
mod session;
pub mod subject;

pub use compare::Comparison;
pub use place::{Bound, Device, Place, Promise};
pub use session::verify;
pub use subject::{Subject, WholeSource};

use lockstep_backend::cuda::{CudaBackend, CudaOptions};
use lockstep_core::{ExitCode, TokenId};
use lockstep_engine::{EngineError, GpuPlan};
use lockstep_model::ModelError;
use serde::Serialize;

/// Why nothing could be verified, or one run failed.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// A model that cannot be loaded or cut.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] lockstep_backend::BackendError),
    /// The group failed.
    #[error(transparent)]
    Collective(#[from] lockstep_comm::collective::CollectiveError),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] lockstep_engine::EngineError),
    /// A rank thread panicked.
    #[error("rank {0} panicked")]
    Panicked(usize),
    /// A run of the same group failed before.
    #[error("not run: the rank group ended with the failure above")]
    Ended,
    /// What was asked for makes no sense.
    #[error("{0}")]
    Invalid(String),
}

impl VerifyError {
    /// What a command that ends by it should exit with: as a server would.
    pub fn exit_code(self) -> ExitCode {
        match self {
            Self::Model(error) => EngineError::from(error).exit_code(),
            Self::Backend(error) => EngineError::from(ModelError::from(error)).exit_code(),
            Self::Engine(error) => error.exit_code(),
            Self::Invalid(_) => ExitCode::Flags,
            Self::Collective(_) | Self::Panicked(_) | Self::Ended => ExitCode::Internal,
        }
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, VerifyError>;

/// What to verify.
#[derive(Clone, Debug)]
pub struct Options {
    /// Devices; the first, at the first tp size and the first number of stages, is the reference of the others.
    pub devices: Vec<Device>,
    /// Tp sizes on each device.
    pub tp_sizes: Vec<usize>,
    /// Numbers of pipeline stages at each tp size.
    pub pp_sizes: Vec<usize>,
    /// Prompts, each of at least one token.
    pub prompts: Vec<Vec<TokenId>>,
    /// Greedy tokens after each prompt.
    pub tokens: usize,
    /// Threads of each rank, on CPUs.
    pub threads: usize,
    /// Which GPUs the ranks use, where they use any.
    pub gpus: GpuPlan,
    /// Look for the first layer that differs.
    pub bisect: bool,
    /// What runs on CPUs may take of this machine's memory.
    pub memory_bytes: usize,
    /// How that came about, for the error when it is too little.
    pub memory_origin: String,
}

/// Everything that was found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// One per pair of runs, in the order they ran.
    pub comparisons: Vec<Comparison>,
    /// Where runs part, with `bisect`.
    pub first_layers: Vec<String>,
    /// What the model's files hold that is not read: a sentence each.
    pub notes: Vec<String>,
}

impl Report {
    /// Whether every promise was kept.
    pub fn passed(&self) -> bool {
        self.comparisons.iter().all(|c| c.passed)
    }
}

/// Errors with one sentence unless this machine has the last GPU of `ranks` ranks, and it computes in the type of `device`;
/// nothing is asked of a CPU.
pub fn check_device(device: Device, gpus: &GpuPlan, ranks: usize) -> Result<()> {
    match device {
        Device::Cpu { .. } => Ok(()),
        Device::Cuda { dtype } => {
            CudaBackend::new(CudaOptions { gpu: gpus.gpu_of(ranks - 1), dtype })?;
            Ok(())
        }
    }
}
