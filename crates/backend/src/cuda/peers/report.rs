//! The words by which the host and kernels that wait for other ranks speak to each other.
//!
//! In pinned memory, which the GPU reads and writes at the same address. Kernels write their part once, the flag last;
//! the host writes [`STOP`] only.

use super::super::device::Device;
use super::super::driver::Address;
use super::super::memory::allocate_pinned;
use crate::Result;
use lockstep_comm::CollectiveError;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

// Numbers of the words, as in `peers.cu`.
const STOP: usize = 0;
const IS_FAILED: usize = 1;
const MISSING: usize = 2;
const OPERATION: usize = 3;
const BYTES: usize = 4;
const KIND: usize = 5;
const WAITED_MS: usize = 6;
const WORDS: usize = 16;

/// What the numbers in the word [`KIND`] mean.
const KINDS: [&str; 4] =
    ["one-shot all-reduce", "two-shot all-reduce", "all-gather", "a transfer from the stage before"];

/// How long kernels get to say what they wait for: they look at the word [`STOP`] every few milliseconds.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Where kernels say that a rank is missing, and are told to stop waiting.
pub(in crate::cuda) struct Report {
    words: &'static [AtomicU32; WORDS],
    rank: usize,
    first: usize,
}

impl Report {
    /// The report of rank `rank` of a replica, whose kernels count ranks from `first` on, that of its TP group. Its memory is never given back: kernels may write to it until the process ends.
    pub fn new(device: &Device, rank: usize, first: usize) -> Result<Self> {
        let bytes = WORDS * size_of::<u32>();
        let start = allocate_pinned(device, bytes)?;
        // SAFETY: as many bytes were just allocated, aligned to a page, and are never given back; words that the GPU
        // writes too are only looked at as atomics from here on.
        let words = unsafe {
            start.write_bytes(0, bytes);
            &*start.cast::<[AtomicU32; WORDS]>()
        };
        Ok(Self { words, rank, first })
    }

    /// Where the GPU finds it.
    pub fn address(&self) -> Address {
        self.words.as_ptr() as Address
    }

    /// Which rank a kernel has given up on, if one has.
    pub fn failure(&self) -> Option<CollectiveError> {
        let word = |index: usize, ordering| self.words[index].load(ordering) as usize;
        if word(IS_FAILED, Ordering::Acquire) == 0 {
            return None;
        }
        let word = |index: usize| word(index, Ordering::Relaxed);
        Some(CollectiveError::DeviceTimeout {
            rank: self.rank,
            // Ranks before the first have numbers that wrap.
            missing: (self.first as u32).wrapping_add(word(MISSING) as u32) as usize,
            operation: KINDS.get(word(KIND)).copied().unwrap_or("an exchange"),
            sequence: word(OPERATION) as u64,
            bytes: word(BYTES),
            waited_ms: word(WAITED_MS) as u64,
        })
    }

    /// Tells waiting kernels to stop, and gives what they waited for, if any did.
    pub fn stop(&self) -> Option<CollectiveError> {
        self.words[STOP].store(1, Ordering::Release);
        let since = Instant::now();
        while since.elapsed() < LAST_WORDS {
            if let Some(failure) = self.failure() {
                return Some(failure);
            }
            std::thread::yield_now();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_rank_operation_and_bytes() {
        let words: &'static [AtomicU32; WORDS] = Box::leak(Box::default());
        let report = Report { words, rank: 5, first: 4 };
        assert!(report.failure().is_none());
        for (index, value) in [(MISSING, 3), (OPERATION, 77), (BYTES, 8192), (KIND, 1), (WAITED_MS, 30_000)] {
            words[index].store(value, Ordering::Relaxed);
        }
        words[IS_FAILED].store(1, Ordering::Release);
        let text = report.stop().unwrap().to_string();
        assert!(
            text.contains("rank 5 waited 30000 ms in two-shot all-reduce of 8192 bytes (operation 77"),
            "{text}"
        );
        assert!(text.contains("for rank 7"), "{text}");
        assert_eq!(words[STOP].load(Ordering::Relaxed), 1);
        words[MISSING].store(2u32.wrapping_sub(4), Ordering::Relaxed);
        words[KIND].store(3, Ordering::Relaxed);
        let text = report.failure().unwrap().to_string();
        assert!(
            text.contains("in a transfer from the stage before") && text.contains("for rank 2;"),
            "{text}"
        );
    }
}
