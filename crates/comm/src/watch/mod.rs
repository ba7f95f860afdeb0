//! The watch page: where every process of a server stands, readable without disturbing anybody.
//!
//! One piece of shared memory for a server, made by the launcher and handed to all children. Every
//! *loop* (a rank, a tokenizer, a detokenizer, the api) has a [`Mark`] on it: when it last did
//! anything at all (its beat), its last token, and on [`Track`]s what it does now, since when,
//! and a ring of what it did lately. The launcher's watchdog, `/health/ready`, `/metrics` and
//! `/debug/trace` read it with a [`WatchPage`].
//!
//! **Invariants**
//! - A mark has one writer a track, and every number is one aligned word, so that none is read torn;
//!   two words read one after the other may belong to two moments.
//! - Marking costs a look at the clock (no system call on Linux's usual clocks) and a few stores to
//!   lines that nobody else writes: ranks do it in every collective of every step.
//! - A loop that waits for work or for a peer beats at least every [`BEAT_INTERVAL`]. Silence therefore
//!   means that it computes, is stopped or is stuck; which of these, the kernel knows.
//! - Nothing read here is used as a length or an index without a check, and no decision of a rank
//!   depends on it: a damaged page costs the view, not the server.
//!
//! ```text
//! header   4 KiB   magic, version, marks
//! marks            256 bytes each
//! rings            per mark and track RING_EVENTS events of 16 bytes; sparse, costs memory once used
//! ```

mod mark;
mod page;

pub use mark::{Activity, Mark, Track};
pub use page::{ACTIVITIES, Event, Position, Seen, WatchError, WatchPage};

use std::time::Duration;

/// Longest time between two beats of a loop that waits.
pub const BEAT_INTERVAL: Duration = Duration::from_millis(500);

/// Events of one ring.
const RING_EVENTS: usize = 8192;

/// Nanoseconds of the clock that all processes of a host share, which stands still while it sleeps.
pub fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests;
