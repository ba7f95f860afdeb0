//! Why a model is not there.

use std::io;
use std::path::PathBuf;

/// Errors of finding and fetching models; each a sentence that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// Neither a catalogue name nor something on disk.
    #[error("model {got:?} is neither a file, nor a folder, nor a known name; known names: {known}")]
    Unknown {
        /// What was asked for.
        got: String,
        /// The catalogue.
        known: String,
    },
    /// A file that is no model.
    #[error("{path} is not a GGUF file; --model takes a GGUF file, a folder or one of: {known}", path = path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// The catalogue.
        known: String,
    },
    /// The cache cannot be used.
    #[error("cannot {what} {path}: {source}; choose another folder with --cache-dir", path = path.display())]
    Cache {
        /// The attempted action.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The disk is too small.
    #[error(
        "{path} has {free_bytes} bytes free, the model needs {needed_bytes} more; free some space or \
         choose another folder with --cache-dir",
        path = path.display()
    )]
    NoSpace {
        /// The folder.
        path: PathBuf,
        /// What is left to fetch, and room to unpack it.
        needed_bytes: u64,
        /// What the file system has.
        free_bytes: u64,
    },
    /// The bytes are not those of the catalogue.
    #[error(
        "{from} gave a file with sha256 {got}, expected {expected}; it was removed, nothing was installed"
    )]
    WrongHash {
        /// The source.
        from: String,
        /// Of what was received.
        got: String,
        /// Of the catalogue.
        expected: String,
    },
    /// Known to be wrong before all of it was fetched.
    #[error("{from} has a file of {got} bytes, expected {expected}; it is not the file of the catalogue")]
    WrongSize {
        /// The source.
        from: String,
        /// Announced or received.
        got: u64,
        /// Of the catalogue.
        expected: u64,
    },
    /// No source could be reached.
    #[error(
        "cannot fetch {name}: {reasons}; go online and run `lockstep pull {name}` again (it continues \
         where it stopped), or copy the file to {path}",
        path = path.display()
    )]
    Unavailable {
        /// The model.
        name: String,
        /// Why each source failed.
        reasons: String,
        /// Where it would have been put.
        path: PathBuf,
    },
}

impl PullError {
    /// For `map_err` on files of the cache.
    pub(super) fn cache<'a>(
        what: &'static str,
        path: &'a std::path::Path,
    ) -> impl FnOnce(io::Error) -> Self + use<'a> {
        move |source| Self::Cache { what, path: path.to_owned(), source }
    }
}

/// How one source failed.
#[derive(Debug)]
pub enum SourceError {
    /// Another source may do better; a clause for the user.
    Unavailable(String),
    /// No other source would help.
    Final(PullError),
}

impl From<PullError> for SourceError {
    fn from(error: PullError) -> Self {
        SourceError::Final(error)
    }
}
