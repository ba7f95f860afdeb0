//! Why model files cannot be used. Every message names the path, what was expected and found, and
//! what to do; the launcher ends with exit code 3 on any of them.

use crate::storage::StorageKind;
use lockstep_core::{ConfigError, FileError};
use std::io;
use std::path::{Path, PathBuf};

/// The error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file that cannot be read, or something else in its place.
    #[error(transparent)]
    File(#[from] FileError),
    /// The system refused to map a file or to list a folder.
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Io {
        /// What was opened.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The path holds nothing that can be loaded.
    #[error("{} {reason}", path.display())]
    NotAModel {
        /// What the user named.
        path: PathBuf,
        /// What it is instead, and what to do.
        reason: String,
    },
    /// A weight file that the checkpoint's index names is not there.
    #[error("{} is missing, although {named_by} names it; download the model again", path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
        /// File name of the index.
        named_by: String,
    },
    /// The bytes contradict the format, mostly after an interrupted download.
    #[error(
        "{}: {what}: expected {expected}, found {found}; the file is incomplete or damaged, \
         download it again",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        what: String,
        /// What the format or the rest of the file asks for.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The model description is not understood.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file that describes the model.
        path: PathBuf,
        /// Key, value and what is accepted.
        source: ConfigError,
    },
    /// A tensor that the model needs is in none of its files.
    #[error(
        "tensor {name} is missing; searched {searched}; the checkpoint is incomplete or its config describes \
         another model, download it again"
    )]
    MissingTensor {
        /// Hugging Face name.
        name: String,
        /// The files that were searched.
        searched: String,
    },
    /// A tensor does not have the shape that the config implies.
    #[error(
        "tensor {name} in {} has shape {found:?}, but the config asks for {expected:?}; config and weights \
         do not belong together, download both again", path.display()
    )]
    WrongShape {
        /// Hugging Face name.
        name: String,
        /// The file that holds it.
        path: PathBuf,
        /// Shape implied by the config.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a type that cannot be read yet.
    #[error(
        "tensor {name} in {} is stored as {kind}, which is not supported; supported are {}; use another \
         conversion of the model", path.display(), StorageKind::supported_names()
    )]
    UnsupportedType {
        /// Hugging Face name.
        name: String,
        /// The file that holds it.
        path: PathBuf,
        /// The stored type.
        kind: StorageKind,
    },
    /// A caller asked for elements that the tensor does not have (a bug of the caller).
    #[error("tensor {name} has shape {shape:?}, but {asked} was asked for")]
    OutOfRange {
        /// Hugging Face name.
        name: String,
        /// Rows, columns or elements that were asked for.
        asked: String,
        /// What there is.
        shape: Vec<usize>,
    },
}

impl WeightsError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn config(path: &Path, source: ConfigError) -> Self {
        Self::Config { path: path.to_owned(), source }
    }
}

/// What is wrong with some bytes, before anyone said which file they come from.
///
/// Parsers work on byte slices and return this, so that they can be tested without files.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    what: String,
    expected: String,
    found: String,
}

impl Fault {
    pub fn new(what: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self { what: what.into(), expected: expected.into(), found: found.into() }
    }

    /// The same fault with the path of the file.
    pub fn at(self, path: &Path) -> WeightsError {
        WeightsError::Damaged {
            path: path.to_owned(),
            what: self.what,
            expected: self.expected,
            found: self.found,
        }
    }
}
