//! What the rank loop needs of the control plane; implemented over ZeroMQ by the server
//! ([`crate::links`]) and over simulated links by the simulator.

use lockstep_core::{Refusal, RequestId};
use lockstep_wire::{Begin, Broadcast, EngineInfo, ToScheduler, TokenOut};
use std::time::Duration;

/// Why the control plane failed; ends the rank.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ControlError(pub String);

/// Result of the control plane.
pub type Result<T> = std::result::Result<T, ControlError>;

/// Whether [`Primary::receive`] may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// There is work: take what is there.
    No,
    /// Nothing to do, but something is being prepared: sleep for a moment, or until a message arrives.
    Briefly,
    /// Nothing to do: sleep until a message arrives.
    UntilMessage,
}

/// The links of rank 0: the only rank that speaks to the outside.
pub trait Primary {
    /// Time since the group started, monotonic. Reaches schedulers only as a stamp in milliseconds.
    fn now(&self) -> Duration;
    /// Appends what has arrived, in order of arrival. With [`Wait::UntilMessage`] it returns at
    /// least one message.
    fn receive(&mut self, wait: Wait, into: &mut Vec<ToScheduler>) -> Result<()>;
    /// Sends one message to all other ranks, numbered and stamped; loses nothing, keeps order.
    fn publish(&mut self, stamp_ms: u64, message: &ToScheduler) -> Result<()>;
    /// Sends results outside. Must not wait for a slow receiver.
    fn deliver(&mut self, out: Outgoing) -> Result<()>;
}

/// The link of ranks 1..: broadcasts of rank 0.
pub trait Follower {
    /// The next broadcast; waits for it (rank 0 has already announced it).
    fn take(&mut self) -> Result<Broadcast>;
}

/// What rank 0 tells the outside.
#[derive(Clone, Debug, PartialEq)]
pub enum Outgoing {
    /// To the detokenizer: requests accepted, before any of their tokens.
    Begin(Vec<Begin>),
    /// To the detokenizer: what one step produced.
    Step(Vec<TokenOut>),
    /// To the api: a request that will get no tokens.
    Refused(RequestId, Refusal),
    /// To the api: answer to an info query.
    Info(Box<EngineInfo>),
    /// To the api: the flush of query `.0` freed `.1` pages.
    CacheFlushed(u64, usize),
    /// To the api: where the recordings of query `.0` are, by rank.
    FlightWritten(u64, std::result::Result<Vec<String>, String>),
}
