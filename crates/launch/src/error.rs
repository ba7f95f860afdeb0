//! Why processes cannot be started or watched.

use std::io;

/// Errors of this crate. Deaths of children are not errors but [`crate::Event`]s.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// `/proc/self/exe` cannot be opened.
    #[error("cannot open the running program (/proc/self/exe): {0}; lockstep needs /proc mounted")]
    Program(#[source] io::Error),
    /// fork or exec failed.
    #[error("cannot start {name}: {source}")]
    Spawn {
        /// The child's name.
        name: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A child's configuration is larger than a child accepts.
    #[error("the configuration of {name} has {got} bytes, at most {limit} are accepted")]
    ConfigTooLarge {
        /// The child's name.
        name: String,
        /// Its size in bytes.
        got: usize,
        /// [`crate::child::CONFIG_BYTES_MAX`].
        limit: usize,
    },
    /// A name that argv cannot carry.
    #[error("process name {name:?} contains a zero byte")]
    BadName {
        /// The name.
        name: String,
    },
    /// A system call that supervision is built on failed.
    #[error("{what} failed: {source}; lockstep needs Linux 5.4 or newer and free file descriptors")]
    System {
        /// The call.
        what: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The place where other hosts join cannot be listened at.
    #[error(
        "cannot listen for other hosts on {address}: {source}; --dist-init-addr (or --dist-address) of host 0 must be an address of this machine with a free port"
    )]
    Listen {
        /// Where.
        address: std::net::SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The supervising thread is gone, which takes all children with it.
    #[error("the supervisor has ended; no further process can be started")]
    SupervisorGone,
    /// A child was entered with something else than what a launcher sends.
    #[error("{0}")]
    BadEntry(String),
}

impl LaunchError {
    /// Wraps a failed call, for `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System { what, source: source.into() }
    }
}
