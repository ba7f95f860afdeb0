//! Failures of the api itself. A bad request is never one of these: it is a
//! [`Refusal`](lockstep_core::Refusal) and becomes an answer.

use std::io;

/// Why the api had to stop.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The listening socket failed.
    #[error("the HTTP listener failed: {0}; check the port and the limit on open files")]
    Listener(#[from] io::Error),
    /// A control-plane link to a child failed.
    #[error("the control-plane link to {peer} failed: {cause}; the server cannot go on without it")]
    Link {
        /// The other end, e.g. `tokenizer 0`.
        peer: String,
        /// What the link reported.
        cause: String,
    },
}
