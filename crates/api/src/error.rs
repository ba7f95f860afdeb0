//! Failures of the api itself. A bad request is never one of these: it is a
//! [`Refusal`](lockstep_core::Refusal) and becomes an answer.

/// Why the api had to stop.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// A control-plane link to a child failed.
    #[error("the control-plane link to {peer} failed: {cause}; the server cannot go on without it")]
    Link {
        /// The other end, e.g. `tokenizer 0`.
        peer: String,
        /// What the link reported.
        cause: String,
    },
}
