//! Why a model is not there.

use std::io;
use std::path::PathBuf;

/// Errors of finding and fetching models; each a sentence that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// Neither a name nor something on disk.
    #[error(
        "model {got:?} is neither a file, nor a folder, nor a repository of the hub (org/name or \
         org/name:file.gguf), nor a known name; known names: {known}"
    )]
    Unknown {
        /// What was asked for.
        got: String,
        /// The catalogue.
        known: String,
    },
    /// What stands there cannot be read as a file.
    #[error(transparent)]
    File(#[from] lockstep_core::FileError),
    /// A file that is no model.
    #[error(
        "{path} is not a GGUF file; --model takes a GGUF file, a folder, org/name of the hub or one of: {known}",
        path = path.display()
    )]
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
    /// The disk became full on the way.
    #[error(
        "the disk is full, cannot {what} {path}; free some space and run the command again (it continues \
         where it stopped), or choose another folder with --cache-dir",
        path = path.display()
    )]
    DiskFull {
        /// The attempted action.
        what: &'static str,
        /// On what.
        path: PathBuf,
    },
    /// The bytes are not the expected ones.
    #[error(
        "{from} gave a file with {kind} {got}, expected {expected}; it was removed, nothing was installed; \
         run the command again, and if that repeats, report it to whoever runs the source"
    )]
    WrongHash {
        /// The source.
        from: String,
        /// Which hash.
        kind: &'static str,
        /// Of what was received.
        got: String,
        /// Of the catalogue, or the hub's list.
        expected: String,
    },
    /// Known to be wrong before all of it was fetched.
    #[error(
        "{from} has a file of {got} bytes, expected {expected}; it is not the published file, so use \
         another source"
    )]
    WrongSize {
        /// The source.
        from: String,
        /// Announced or received.
        got: u64,
        /// Of the catalogue, or the hub's list.
        expected: u64,
    },
    /// No source of a catalogue model could be reached.
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
    /// The hub could not be reached, or broke off.
    #[error(
        "cannot fetch {id}: {reason}; go online (HF_ENDPOINT names a mirror) and run `lockstep pull {id}` \
         again (it continues where it stopped), or give --model a folder that holds the model"
    )]
    HubUnavailable {
        /// The model.
        id: String,
        /// What happened.
        reason: String,
    },
    /// `HF_HUB_OFFLINE` forbids asking.
    #[error(
        "{id} is neither in the cache of lockstep nor, whole, in that of Hugging Face, and HF_HUB_OFFLINE is \
         set; unset it, or run `lockstep pull {id}` where the network may be used"
    )]
    Offline {
        /// The model.
        id: String,
    },
    /// Gated, or the token may not read it.
    #[error(
        "{page} is not open to you (status {status}); accept its terms there with your account, and set \
         HF_TOKEN to a token of that account that may read it"
    )]
    NoAccess {
        /// Its page.
        page: String,
        /// 401 without a token, 403 with one.
        status: u16,
    },
    /// The token is not valid.
    #[error(
        "{endpoint} does not accept the token in HF_TOKEN; set a valid one, or unset it for a public model"
    )]
    BadToken {
        /// The hub.
        endpoint: String,
    },
    /// Does not exist, as far as the hub says.
    #[error(
        "{endpoint} has no model {repository}, or it is private (status {status}); check the spelling, or set \
         HF_TOKEN to a token that may read it; write a folder as ./{repository}"
    )]
    NoRepository {
        /// The hub.
        endpoint: String,
        /// `org/name`.
        repository: String,
        /// 401 without a token, 404 with one.
        status: u16,
    },
    /// The repository exists, the revision does not.
    #[error("{repository} has no revision {revision}; give a branch, a tag or a full commit after the @")]
    NoRevision {
        /// `org/name`.
        repository: String,
        /// What was asked for.
        revision: String,
    },
    /// The repository is no model that can be served.
    #[error("cannot serve {id}: {reason}")]
    Layout {
        /// The model.
        id: String,
        /// What it lacks, and what to do.
        reason: String,
    },
    /// The hub's list of files is not usable.
    #[error(
        "{url} gave a list of files that cannot be used: {reason}; nothing was fetched, so use another source"
    )]
    BadListing {
        /// Where it came from.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl PullError {
    /// For `map_err` on files of the cache.
    pub(super) fn cache<'a>(
        what: &'static str,
        path: &'a std::path::Path,
    ) -> impl FnOnce(io::Error) -> Self + use<'a> {
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { what, path: path.to_owned() }
            }
            _ => Self::Cache { what, path: path.to_owned(), source },
        }
    }
}

/// How one source failed.
#[derive(Debug)]
pub enum SourceError {
    /// Another source may do better; a clause for the user.
    Unavailable(String),
    /// The hub answered that it will not give it.
    Refused(Refusal),
    /// No other source would help.
    Final(PullError),
}

impl SourceError {
    /// The clause for the user, when another source may do better.
    pub fn reason(self) -> Result<String, PullError> {
        match self {
            SourceError::Unavailable(reason) => Ok(reason),
            SourceError::Refused(refusal) => Ok(refusal.to_string()),
            SourceError::Final(error) => Err(error),
        }
    }
}

impl From<PullError> for SourceError {
    fn from(error: PullError) -> Self {
        SourceError::Final(error)
    }
}

/// A status that another attempt would not change.
#[derive(Debug, thiserror::Error)]
#[error("{url} answered with status {status}")]
pub struct Refusal {
    /// What was asked for.
    pub url: String,
    /// The HTTP status.
    pub status: u16,
    /// The hub's `X-Error-Code`, empty if none.
    pub code: String,
    /// The hub's `X-Error-Message`, empty if none.
    pub message: String,
}
