//! Why a model's text side could not be loaded, or why a worker had to stop.

use std::path::{Path, PathBuf};

/// Errors of this crate. Each is one sentence: what, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file of the model is not there.
    #[error("{path} is missing; --model needs a folder with tokenizer.json or a .gguf file (run `lockstep pull` again)", path = .path.display())]
    Missing {
        /// The file that was looked for.
        path: PathBuf,
    },
    /// A file of the model that cannot be read, is too large, or is something else.
    #[error(transparent)]
    File(#[from] lockstep_core::FileError),
    /// A folder of the model cannot be listed.
    #[error("{path} cannot be listed: {source}; check its permissions", path = .path.display())]
    Read {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is cut off, or not what its name says.
    #[error("{path} cannot be understood: {reason}; fetch the file again, it may have been cut off", path = .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The files are well-formed but ask for something this engine does not do.
    #[error("the tokenizer of {path} uses {what}, supported are {supported}; convert the model to one of these", path = .path.display())]
    Unsupported {
        /// The model.
        path: PathBuf,
        /// The unknown thing, by name.
        what: String,
        /// What is known.
        supported: String,
    },
    /// A GGUF file cannot be used.
    #[error(transparent)]
    Weights(#[from] lockstep_weights::WeightsError),
    /// A control-plane link failed.
    #[error(transparent)]
    Link(#[from] lockstep_comm::link::LinkError),
    /// A thread of the shared worker could not be started.
    #[error("a thread of the text worker cannot be started: {0}; raise the limit on processes")]
    Thread(std::io::Error),
    /// A thread of the shared worker panicked.
    #[error("the {0} thread of the text worker panicked; this is a bug, please report it with the log")]
    Panicked(&'static str),
}

impl TokenizerError {
    /// A [`TokenizerError::Malformed`] with any displayable reason.
    pub(crate) fn malformed(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Malformed { path: path.into(), reason: reason.to_string() }
    }
}
