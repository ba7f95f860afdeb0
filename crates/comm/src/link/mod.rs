//! ZeroMQ links between the processes of one server, typed by the message they carry.
//!
//! | type | pattern | used for |
//! |---|---|---|
//! | [`Sender`] / [`Receiver`] | PUSH / PULL, many senders to one receiver | everything but the broadcast |
//! | [`AsyncReceiver`] | PULL inside a tokio runtime | the api process |
//! | [`BroadcastSender`] / [`BroadcastReceiver`] | XPUB / SUB | rank 0 to the other ranks of its replica, also on other hosts |
//!
//! **Invariants**
//! - Nothing is dropped silently: a full queue is visible to the sender (`try_send` is false,
//!   `send` waits), a lost broadcast is a [`LinkError::Gap`], bytes that are no message are a
//!   [`LinkError::Wire`].
//! - Nothing is left behind: the names are *abstract* Unix sockets (first byte NUL, shown as `@`),
//!   which live in the kernel and vanish with the process, `kill -9` included, and do not depend
//!   on a temporary directory. The prefix is 128 random bits, so two servers never meet.
//! - Only the server's own user connects: the kernel's credentials of every peer are checked by
//!   the binding side (abstract names have no file permissions).
//! - What leaves the host (the broadcast to ranks of other hosts) goes over TCP with CURVE: encrypted, and only for
//!   those who know the publisher's public key, which is never sent ([`curve`]).
//! - libzmq never reports a dead peer; the launcher watches processes instead.
//!
//! A receiver has no limit on what it queues (`RCVHWM` 0) and a sender has one (`SNDHWM`). With a
//! bounded receive queue libzmq 4.3.5 loses the tail of what a sender wrote just before it exits:
//! `stream_engine_base_t::in_event_internal` gives up the connection without reading the rest
//! (229-273 of 200,000 messages in our measurement). Back-pressure across processes therefore comes
//! from the protocol (admission limits), not from the socket.
//!
//! Reading order: [`Endpoint`], `socket` (the safe layer over the C interface), `queue`,
//! `asynchronous`, `broadcast`, [`curve`]. Follows mini-SGLang `utils/mp.py`; differs: typed, acknowledged
//! subscriptions, sequence numbers, deadlines.

mod asynchronous;
mod broadcast;
pub mod curve;
mod ffi;
mod queue;
mod socket;

pub use asynchronous::AsyncReceiver;
pub use broadcast::{BroadcastReceiver, BroadcastSender};
pub use queue::{Receiver, Sender};
pub use socket::Context;

use lockstep_wire::WireError;
use serde::{Deserialize, Serialize};

/// Result of this module.
pub type Result<T> = std::result::Result<T, LinkError>;

/// Why a link failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// libzmq refused an operation.
    #[error("cannot {operation} link {endpoint}: {reason}")]
    Socket {
        /// What was tried.
        operation: &'static str,
        /// The link.
        endpoint: Endpoint,
        /// libzmq's own words.
        reason: String,
    },
    /// The queue stayed full until the deadline.
    #[error(
        "link {endpoint} took no message for {waited_ms} ms; its receiver is stopped, dead or far behind"
    )]
    Full {
        /// The link.
        endpoint: Endpoint,
        /// How long the sender waited.
        waited_ms: u64,
    },
    /// A message cannot be encoded, or bytes arrived that are not a message of this link.
    #[error("link {endpoint}: {source}")]
    Wire {
        /// The link.
        endpoint: Endpoint,
        /// What is wrong with it.
        source: WireError,
    },
    /// Broadcasts were lost or repeated.
    #[error(
        "link {endpoint}: broadcast {got} arrived where {expected} was due; this rank can no longer follow rank 0"
    )]
    Gap {
        /// The link.
        endpoint: Endpoint,
        /// Sequence number that was due.
        expected: u64,
        /// Sequence number that came.
        got: u64,
    },
    /// There is no CURVE in this binary's libzmq.
    #[error(
        "cannot {operation} CURVE keys: {reason}; build lockstep with `--features gloo` (Debian: libsodium-dev)"
    )]
    Curve {
        /// What was tried.
        operation: &'static str,
        /// libzmq's own words.
        reason: String,
    },
    /// Not every rank subscribed to the broadcast in time, or one has left.
    #[error(
        "link {endpoint}: {subscribed} of {expected} ranks are subscribed to the broadcast ({when}); a missing rank is dead or still loading"
    )]
    Subscribers {
        /// The link.
        endpoint: Endpoint,
        /// Subscribed now.
        subscribed: usize,
        /// Ranks that must be.
        expected: usize,
        /// At which moment this was found.
        when: &'static str,
    },
}

/// The name of a link; travels to child processes as text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Endpoint(pub String);

impl Endpoint {
    /// The abstract name of link `name` among those that share `prefix_hex` (see
    /// [`random_prefix`]). Binding a name longer than 107 bytes fails.
    pub fn private(prefix_hex: &str, name: &str) -> Self {
        Self(format!("ipc://@lockstep-{prefix_hex}-{name}"))
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// 128 fresh random bits as 32 hex digits, drawn once per server. Not deterministic.
pub fn random_prefix() -> String {
    let mut bits = [0u8; 16];
    crate::random::fill(&mut bits);
    bits.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests;
