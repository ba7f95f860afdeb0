//! What the transport and its stand-in have in common.

/// One direction of a pair.
#[cfg_attr(not(feature = "gloo"), expect(dead_code, reason = "the stand-in reads nothing"))]
#[derive(Clone, Copy, Debug)]
pub(super) enum Pair {
    /// To that rank of the mesh, through that slot.
    Send(usize, u64),
    /// From that rank of the mesh, through that slot.
    Recv(usize, u64),
}

/// How a wait ended.
#[cfg_attr(not(feature = "gloo"), expect(dead_code, reason = "the stand-in never waits"))]
#[derive(Debug)]
pub(super) enum Outcome {
    /// The operation is complete.
    Done,
    /// [`abort`](super::transport::Buffer::abort) ended it.
    Aborted,
    /// Time is over.
    Expired,
    /// The connection failed, in Gloo's words.
    Failed(String),
}
