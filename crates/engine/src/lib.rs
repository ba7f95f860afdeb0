//! The rank process: main loop, model runner, memory plan and digest.
//!
//! | file | holds |
//! |---|---|
//! | [`rank_loop`] | the five steps every rank takes, generic over links, group and runner |
//! | [`control`] | what the loop needs of the control plane |
//! | [`links`] | that over ZeroMQ |
//! | [`runner`] | plan → forward → tokens on a device |
//! | [`pipeline`] | that on a thread beside the loop, where there are several stages |
//! | [`inputs`] | a plan's numbers as a forward pass takes them |
//! | [`recordings`] | decode steps that the device repeats |
//! | [`logits`] | logits → tokens, equal on all ranks |
//! | [`adjust`] | what is changed in logits before |
//! | [`histories`] | what sampling remembers of a request |
//! | [`logprobs`] | log-probabilities |
//! | [`masks`] | grammars, beside the forward pass |
//! | [`grammars`] | grammars, prepared beside the steps |
//! | [`gate`] | where requests wait for that |
//! | [`memory`] | how many KV pages fit, agreed over ranks |
//! | [`exchange`] | per-step message count and digest, and the tokens of a pipeline |
//! | [`flight`] | what the scheduler was told and decided, and its replay |
//! | [`timing`] | where the time of a request went, if it asks |
//! | [`offline`] | the loop inside one process, for benchmarks |
//! | [`start`] | from [`RankConfig`] to a running loop |
//!
//! **Invariant:** all ranks of a replica run the same steps on the same batches. What may differ
//! between ranks (time, arrival of messages, free memory) is decided once, by rank 0 or by a
//! minimum over the group, and agreed before anyone acts on it.

mod adjust;
pub mod config;
pub mod control;
pub mod exchange;
pub mod flight;
mod gate;
pub mod gpu;
mod grammars;
mod histories;
mod inputs;
pub mod links;
mod logits;
mod logprobs;
mod masks;
pub mod memory;
pub mod offline;
pub mod pipeline;
pub mod rank_loop;
mod recordings;
pub mod runner;
pub mod stage_times;
pub mod start;
mod timing;

pub use config::{Batching, DeviceConfig, DummySpec, PackedCacheMode, RankConfig};
pub use gpu::GpuPlan;
pub use rank_loop::RankLoop;

use lockstep_backend::BackendError;
use lockstep_comm::collective::CollectiveError;
use lockstep_core::ExitCode;
use lockstep_model::ModelError;
use lockstep_weights::WeightsError;

/// Why a rank ended.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's files.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The device.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Another rank died, or the group was told to stop.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The control plane.
    #[error(transparent)]
    Control(#[from] control::ControlError),
    /// Not enough memory, with numbers.
    #[error("{0}")]
    Memory(String),
    /// Ranks took different decisions: step, rank and the first field that differs.
    #[error("{0}")]
    Diverged(String),
    /// A bug.
    #[error("{0}; this is a bug in lockstep, please report it")]
    Internal(String),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, EngineError>;

impl EngineError {
    /// The exit code of a scheduler process that ends with this error.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            // A GPU that is not there, a model that the device does not take: other flags are needed.
            EngineError::Model(ModelError::Config(_))
            | EngineError::Backend(BackendError::Unsupported(_))
            | EngineError::Model(ModelError::Backend(BackendError::Unsupported(_))) => ExitCode::Flags,
            EngineError::Model(ModelError::Weights(_)) | EngineError::Weights(_) => ExitCode::ModelFiles,
            EngineError::Memory(_)
            | EngineError::Backend(BackendError::OutOfMemory { .. })
            | EngineError::Model(ModelError::Backend(BackendError::OutOfMemory { .. })) => ExitCode::Memory,
            _ => ExitCode::Internal,
        }
    }

    /// Whether another rank's end is the cause: this one is a consequence, not the first cause.
    pub fn is_consequence(&self) -> bool {
        self.collective().is_some_and(CollectiveError::is_consequence)
    }

    /// The rank of the replica that this one waited for in vain, where one is known.
    pub fn missing_rank(&self) -> Option<usize> {
        self.collective().and_then(CollectiveError::missing)
    }

    /// The error of a collective behind it.
    fn collective(&self) -> Option<&CollectiveError> {
        match self {
            EngineError::Collective(e) | EngineError::Backend(BackendError::Collective(e)) => Some(e),
            EngineError::Model(ModelError::Backend(BackendError::Collective(e))) => Some(e),
            _ => None,
        }
    }
}
