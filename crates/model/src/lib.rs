//! Layers that know how they are cut over ranks, and the decoder made of them.
//!
//! | file | holds |
//! |---|---|
//! | [`families`] | how each family names and joins its tensors |
//! | [`layers`] | column-, row- and vocab-parallel linears, norms, attention, MLP, experts: each states its rules |
//! | [`rules`] | the layers' rules put together: every weight and how it is cut |
//! | [`source`], [`dummy`] | where weights come from: files, or a seed |
//! | [`loader`], `bands` | reads a rank's slices into packed weights, each exactly once; reading runs ahead of packing |
//! | [`packed_cache`] | packed weights on disk, for the next start |
//! | [`bytes`] | what a rank's weights take, from the rules alone |
//! | [`decoder`] | the decoder-only transformer that all families share |
//!
//! **Invariants:** a layer sees a `Backend` and a `Collective`, never a socket; nothing branches
//! on the number of ranks (one rank's collective is the identity); no forward pass allocates.

mod bands;
pub mod bytes;
pub mod decoder;
pub mod dummy;
pub mod families;
pub mod layers;
pub mod loader;
pub mod packed_cache;
pub mod rules;
pub mod source;

pub use bytes::ShardBytes;
pub use decoder::{Decoder, Observer, Workspace};
pub use dummy::DummyWeights;
pub use loader::{Loader, Progress};
pub use packed_cache::{CacheKey, PackedCache};
pub use rules::ModelRules;
pub use source::{WeightSource, has_codes, weight_types};

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
    /// A layer asked for a parameter that another has (a bug of a rule).
    #[error("tensor {tensor} fills two parameters; this is a bug in the rules of the model's family")]
    FilledTwice {
        /// Hugging Face name.
        tensor: String,
    },
    /// No layer asked for a parameter that the rules name (a bug of a layer).
    #[error("{count} parameters were never filled: {tensors}; this is a bug in the layers of the model")]
    NotFilled {
        /// How many.
        count: usize,
        /// The first few, by Hugging Face name.
        tensors: String,
    },
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ModelError>;
