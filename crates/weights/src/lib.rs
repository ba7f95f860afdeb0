//! Model files behind one interface: Hugging Face folders (safetensors) and GGUF files.
//!
//! Whatever the storage, a tensor is seen under its Hugging Face name as rows of f32, f16 or bf16:
//! ggml's blocks, FP8 with scales, and the 4-bit matrices of GPTQ and AWQ are unpacked to bf16 as
//! they are read, on every rank and at every tp size, so that what a model computes with never
//! depends on tp ([`ModelFiles::conversions`] says what was unpacked). bf16 rather than f32, as for
//! the checkpoints that were quantised: its rounding is finer than any of these formats, and a
//! rank holds half the bytes. A device that multiplies with small integers asks for blocks as codes with
//! scales instead ([`ModelFiles::read_codes`]).
//!
//! **Invariants:** files are mapped and only the asked slices are read; a rank's resident pages of
//! the mappings stay below about 12 MiB (and one packed matrix for GPTQ and AWQ); a slice has the
//! bits of the slice of the whole; malformed input gives an error with path, expectation and
//! finding, never a panic and never an allocation of a size that the file merely claims.
//!
//! Called by every rank (its own slices, from any number of threads), by the tokenizer process (GGUF
//! vocabularies) and by the launcher (the config, to check flags before anything is spawned).
//!
//! Reading order: [`ModelFiles`] (`files`, `read`), `tensor`, `locate`, `hf`, [`gguf`], `storage`,
//! `dequant`, `scaled` (FP8), `grouped` (GPTQ and AWQ).

mod dequant;
mod error;
mod files;
mod generation;
pub mod gguf;
mod grouped;
mod hf;
mod identity;
mod locate;
mod mapped;
mod read;
mod scaled;
mod storage;
mod tensor;

pub use error::WeightsError;
pub use files::{ModelFiles, unread_keys_report};
pub use generation::GenerationDefaults;
pub use hf::{ConfigFile, read_config};
pub use locate::holds_weights;
pub use read::quantise;
pub use storage::{StorageKind, TensorInfo};
