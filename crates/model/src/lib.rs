//! Layers that know how they are cut over ranks, and the decoder made of them.
//!
//! | file | holds |
//! |---|---|
//! | [`loader`] | reads a rank's slices of a checkpoint into packed weights |
//! | [`layers`] | column-, row- and vocab-parallel linears, norms, attention, MLP: each states its shard rule |
//! | [`bytes`] | what a rank's weights take, from the config alone |
//! | [`decoder`] | the decoder-only transformer shared by the Llama, Qwen2 and Qwen3 families |
//!
//! **Invariants:** a layer sees a `Backend` and a `Collective`, never a socket; nothing branches
//! on the number of ranks (one rank's collective is the identity); no forward pass allocates.

pub mod bytes;
pub mod decoder;
pub mod layers;
pub mod loader;

pub use bytes::ShardBytes;
pub use decoder::{Decoder, ForwardInput, Workspace};
pub use loader::{Loader, Progress};

use lockstep_backend::BackendError;
use lockstep_core::ConfigError;
use lockstep_weights::WeightsError;

/// Why a model could not be built.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The checkpoint is missing something or is broken.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The model cannot be cut this way.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ModelError>;
