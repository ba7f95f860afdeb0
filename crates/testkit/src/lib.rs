//! Tiny models with known answers, a slow reference forward pass, and helpers that drive the real
//! binary: what the tests of every other crate stand on.
//!
//! **Invariants**
//! * No other Lockstep crate is used here, so that a mistake in one of them cannot hide in its own
//!   test data; the file formats are written again, plainly.
//! * Everything is deterministic: weights come from a seed, seeds are fixed in a table, and a test
//!   proves again that each fixture tells a right engine from the wrong ones it is meant for.
//!
//! Reading order: [`spec`] and [`tensor`] (what a model is), [`mod@reference`] (what it answers),
//! [`fixtures`] (the named models), [`folder`] with [`safetensors`], [`gguf`], [`tokenizer`] and
//! [`template`] (how they lie on disk), [`server`] with [`http`] and [`process`] (how the binary is
//! driven), [`temp`].
//!
//! The fixture kinds follow the project's list of cases collected from other engines; file formats
//! follow the safetensors and GGUF specifications and transformers' folder layout.

#![forbid(unsafe_code)]

pub mod fixtures;
pub mod folder;
pub mod gguf;
pub mod http;
pub mod process;
pub mod random;
pub mod reference;
pub mod safetensors;
pub mod server;
pub mod spec;
pub mod temp;
pub mod template;
pub mod tensor;
pub mod tokenizer;

pub use fixtures::{Expect, Fixture};
pub use folder::ModelFolder;
pub use reference::{Fault, Reference};
pub use server::{ServeCommand, Server};
pub use spec::ModelSpec;
pub use temp::TempDir;
pub use tensor::{FileDType, Tensor, Weights};
