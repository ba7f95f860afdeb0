//! Reads GGUF model files, versions 2 and 3, little endian.
//!
//! Follows the format's public description (ggml `docs/gguf.md`) and llama.cpp's conventions for
//! names and keys. Reading order: `header` (bytes to keys and tensors), [`metadata`] (typed
//! access), `split` (files in parts), `config` with `keys` and `rope` (the model's description),
//! `names` (GGUF to Hugging Face names), `open` (all of it together).
//!
//! **Invariant:** nothing is copied but keys and tensor names, and nothing is allocated in
//! proportion to a number that the file merely claims.

pub(crate) mod config;
pub(crate) mod header;
mod keys;
pub mod metadata;
pub(crate) mod names;
pub(crate) mod open;
mod rope;
pub(crate) mod split;

pub use metadata::Metadata;
