//! Model files behind one interface: Hugging Face folders (safetensors) and GGUF files.
//!
//! **Invariants:** files are mapped and only the asked slices are read; a rank's resident pages of
//! the mappings stay below about 12 MiB; malformed input gives an error with path, expectation
//! and finding, never a panic and never an allocation of a size that the file merely claims.
//!
//! Called by every rank (its own slices), by the tokenizer process (GGUF vocabularies) and by the
//! launcher (the config, to check flags before anything is spawned).
//!
//! Reading order: [`ModelFiles`] (`files`, `read`), `locate`, `hf`, [`gguf`], `storage`, `dequant`.

mod dequant;
mod error;
mod files;
mod generation;
pub mod gguf;
mod grouped;
mod hf;
mod locate;
mod mapped;
mod read;
mod scaled;
mod storage;
mod tensor;

pub use error::WeightsError;
pub use files::ModelFiles;
pub use generation::GenerationDefaults;
pub use storage::{StorageKind, TensorInfo};
