//! One server on several hosts: how their launchers find each other, agree and hear of each other's end.
//!
//! The launcher of host 0 keeps a [`Room`], the others each a [`Head`] to it: one TCP connection per host, between
//! processes that know the shared secret ([`lockstep_comm::trusted`]). What is secret never goes through it; the keys
//! of a run are derived on every host.
//!
//! **Invariants**
//! - Every host starts the same ranks of the same server: who joins says what it was started with ([`Fact`]), and the
//!   first difference refuses it, in one sentence, on both sides.
//! - A host that is gone is found: a launcher that dies closes its connection, one that is cut off or stopped is
//!   silent for longer than the limit. Either counts as a death among those of host 0's children, so the first cause
//!   is named, whichever host it is on. A host that loses host 0 ends its own children.
//! - Nothing waits without a limit, and no thread of the room belongs to the api's event loop.
//!
//! ```text
//! host r → 0   Join ......................... Died, Failed, Ended, DrainNoted, Signal, Beat
//! host 0 → r   Welcome | Refused ... Start, Serving, Abort, End, Draining, Goodbye, Beat
//! ```
//!
//! Reading order: `messages`, `room` (host 0), `head` (the others).

mod head;
mod messages;
mod room;

pub use head::{Head, HeadSpec};
pub use messages::{Fact, StartOrder, ToHost};
pub use room::{Room, RoomSpec};

/// Messages, for [`crate::fuzzing`].
pub(crate) mod fuzzing {
    pub(crate) use super::messages::{FromHost, Join, disagreement};
}

#[cfg(test)]
mod tests;

use std::time::Duration;

/// How long `limit` of silence lets a launcher wait between two signs of life.
fn beat_interval(limit: Duration) -> Duration {
    (limit / 4).min(Duration::from_secs(1))
}
