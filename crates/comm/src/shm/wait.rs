//! Waiting for a number in shared memory to change: poll, yield, sleep.
//!
//! Measured on a busy 2-core machine, 8 KiB all-reduce: polling 20,000 times before yielding had a
//! p99 of 4 ms (the peer could not run), 100 times 6 µs. So polling is short, and shorter when ranks
//! share cores.

use super::region::SharedRegion;
use crate::group::Patience;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Longest sleep between two looks at the abort word and the deadline.
const SLEEP_SLICE: Duration = Duration::from_millis(50);

/// Behaviour of one rank's waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShmOptions {
    /// How long a collective may wait for a rank. Must exceed the longest difference in arrival,
    /// which is the longest time a rank may be stopped by the host.
    pub deadline: Duration,
    /// There are fewer cores than busy ranks: give way at once instead of polling.
    pub ranks_share_cores: bool,
}

impl ShmOptions {
    /// Options for `size` ranks on this host: deadline 30 s.
    pub fn for_ranks(size: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self { deadline: Duration::from_secs(30), ranks_share_cores: cores < size }
    }
}

/// How long to do what before sleeping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manners {
    polls: u32,
    yielding: Duration,
}

impl Manners {
    pub(super) fn new(options: ShmOptions) -> Self {
        // A pause instruction takes 15-50 ns: 100 of them are 2-5 µs.
        if options.ranks_share_cores {
            Self { polls: 20, yielding: Duration::from_micros(30) }
        } else {
            Self { polls: 100, yielding: Duration::from_micros(150) }
        }
    }
}

/// Why a wait ended without the awaited number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Aborted,
    Expired { waited_ms: u64 },
}

/// Returns once `arrived` holds for the value of `word`. What the writer of that value wrote
/// before it is then visible here (Acquire). `alive` is called before every sleep, so that others see
/// this rank waiting and not stuck.
pub(super) fn wait_until(
    region: &SharedRegion,
    (word, sleepers): (&AtomicU32, &AtomicU32),
    arrived: impl Fn(u32) -> bool,
    manners: Manners,
    patience: Patience,
    alive: impl Fn(),
) -> Result<(), Ended> {
    for _ in 0..manners.polls {
        if arrived(word.load(Ordering::Acquire)) {
            return Ok(());
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    loop {
        if arrived(word.load(Ordering::Acquire)) {
            return Ok(());
        }
        if region.is_aborted() {
            return Err(Ended::Aborted);
        }
        let waited = start.elapsed();
        let slice = match patience {
            Patience::Idle => SLEEP_SLICE,
            Patience::Deadline(deadline) => match deadline.checked_sub(waited) {
                Some(left) => left.min(SLEEP_SLICE),
                None => return Err(Ended::Expired { waited_ms: waited.as_millis() as u64 }),
            },
        };
        if waited < manners.yielding {
            rustix::thread::sched_yield();
        } else {
            alive();
            sleep(word, sleepers, &arrived, slice);
        }
    }
}

/// Sleeps until `word` changes, at most `slice`.
///
/// No wake-up is lost: the sleeper announces itself and then reads the word; the writer writes the
/// word and then reads the announcement ([`wake`]). All four are SeqCst, so at least one of the two
/// sees the other (Dekker). If the writer is faster than the system call, the kernel finds another
/// value than `seen` and returns at once.
fn sleep(word: &AtomicU32, sleepers: &AtomicU32, arrived: impl Fn(u32) -> bool, slice: Duration) {
    sleepers.fetch_add(1, Ordering::SeqCst);
    let seen = word.load(Ordering::SeqCst);
    if !arrived(seen) {
        let timeout = futex::Timespec { tv_sec: slice.as_secs() as _, tv_nsec: slice.subsec_nanos() as _ };
        // Time-out, signal, changed value and wake-up all mean: look again. Not the PRIVATE flag,
        // since the sleeper and its waker are different processes.
        let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&timeout));
    }
    // A process killed in its sleep leaves the count raised; that costs system calls, nothing else.
    sleepers.fetch_sub(1, Ordering::SeqCst);
}

/// Stores `value` for others to see and wakes those that sleep on it.
pub(super) fn publish(word: &AtomicU32, sleepers: &AtomicU32, value: u32) {
    word.store(value, Ordering::SeqCst);
    wake(word, sleepers);
}

/// Wakes everybody who sleeps on `word`; no system call when nobody does.
pub(super) fn wake(word: &AtomicU32, sleepers: &AtomicU32) {
    if sleepers.load(Ordering::SeqCst) != 0 {
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
    }
}
