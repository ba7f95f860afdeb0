//! The abort word: one sentence that ends every wait of a rank group.
//!
//! States: 0 running, 1 somebody writes the cause, 2 the cause is complete. Waiting ranks leave on
//! anything but 0, so a writer that dies between 1 and 2 costs the cause and nothing else.

use super::layout::{ABORT_CAUSE, ABORT_LEN, ABORT_STATE};
use super::region::SharedRegion;
use super::wait::wake;
use crate::collective::{CollectiveError, Result};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Bytes of a cause; longer ones are cut.
pub const ABORT_CAUSE_BYTES_MAX: usize = 512;

const RUNNING: u32 = 0;
const WRITING: u32 = 1;
const COMPLETE: u32 = 2;

/// The right to end a rank group: held by the launcher and by every rank.
#[derive(Clone, Debug)]
pub struct AbortHandle {
    region: Arc<SharedRegion>,
}

impl AbortHandle {
    /// A handle for a process that is not a rank.
    pub fn new(fd: impl AsFd) -> Result<Self> {
        Ok(Self::of(Arc::new(SharedRegion::map(fd)?)))
    }

    /// A handle on memory this process has already mapped.
    pub fn of(region: Arc<SharedRegion>) -> Self {
        Self { region }
    }

    /// Ends every operation of the group, now and later, with `cause`. The first caller's cause
    /// stays; false for all others.
    pub fn abort(&self, cause: &str) -> bool {
        let state = self.region.word(ABORT_STATE);
        if state.compare_exchange(RUNNING, WRITING, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return false;
        }
        let cause = &cause.as_bytes()[..cause.floor_char_boundary(ABORT_CAUSE_BYTES_MAX)];
        let to = self.region.bytes(ABORT_CAUSE, ABORT_CAUSE_BYTES_MAX);
        // SAFETY: at most ABORT_CAUSE_BYTES_MAX bytes at `to`; the exchange above makes this the only
        // writer ever, and readers wait for COMPLETE.
        unsafe { std::ptr::copy_nonoverlapping(cause.as_ptr(), to, cause.len()) };
        self.region.word(ABORT_LEN).store(cause.len() as u32, Ordering::Relaxed);
        // Releases the cause to whoever acquires COMPLETE.
        state.store(COMPLETE, Ordering::SeqCst);
        // A rank between its last look at the state and its futex call misses this; its sleep is
        // sliced (`wait::SLEEP_SLICE`), so it looks again soon.
        for (word, sleepers) in self.region.waiting_places() {
            wake(word, sleepers);
        }
        true
    }

    /// The error with which rank `rank` leaves `operation`, once the group is aborted.
    pub fn error(&self, rank: usize, operation: &'static str) -> Option<CollectiveError> {
        self.cause().map(|cause| CollectiveError::Aborted { rank, operation, cause })
    }

    /// The cause, once the group is aborted.
    pub fn cause(&self) -> Option<String> {
        let state = self.region.word(ABORT_STATE);
        let start = Instant::now();
        loop {
            match state.load(Ordering::Acquire) {
                RUNNING => return None,
                COMPLETE => break,
                // The writer needs nanoseconds; if it was killed there, nobody will finish.
                _ if start.elapsed() > Duration::from_millis(20) => {
                    return Some("unknown (its writer died while recording it)".into());
                }
                _ => std::thread::yield_now(),
            }
        }
        let len = (self.region.word(ABORT_LEN).load(Ordering::Relaxed) as usize).min(ABORT_CAUSE_BYTES_MAX);
        let from = self.region.bytes(ABORT_CAUSE, ABORT_CAUSE_BYTES_MAX);
        let mut cause = vec![0u8; len];
        // SAFETY: `len` is clamped to the area, which nobody writes after COMPLETE.
        unsafe { std::ptr::copy_nonoverlapping(from, cause.as_mut_ptr(), len) };
        Some(String::from_utf8_lossy(&cause).into_owned())
    }
}
