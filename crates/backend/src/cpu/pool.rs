//! The threads of one rank: a fixed team that runs one operation at a time.
//!
//! An operation is cut into numbered chunks, and whoever is free claims the next one from an atomic
//! ticket. The calling thread is thread 0 and claims too, so a helper that is late (parked, or its
//! core taken by another rank) costs no wait: the operation ends when every chunk has been run.
//! Which thread ran a chunk never changes a result.
//!
//! Helpers spin for [`SPIN`] after an operation and then park on a futex, so the short serial gaps
//! of a forward pass cost no system call and an idle server costs no CPU. In steady state an
//! operation takes no lock and allocates nothing.
//!
//! **Invariant (ticket protocol):** the job description is written only while no chunk is
//! outstanding, and read only by the holder of a chunk. The ticket carries chunk count and next
//! chunk in one word, so a late helper that draws a ticket either gets a chunk of the current job
//! or sees that none is left.

use rustix::thread::futex;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a helper spins for the next operation (and the caller for the last chunk) before it
/// parks. Longer than the serial gaps between operations of a forward pass, far shorter than the
/// gap between requests.
const SPIN: Duration = Duration::from_micros(40);
/// Polls between two looks at the clock.
const POLLS_PER_LOOK: u32 = 16;

/// A chunk runner: `(chunk, thread)`.
type Job<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Aligned so that words written by different threads do not share a cache line.
#[repr(align(128))]
struct Line<T>(T);

/// What the threads share.
struct Shared {
    /// The current job; see the ticket protocol.
    job: UnsafeCell<*const Job<'static>>,
    /// Chunk count in the upper half, next chunk in the lower half.
    ticket: Line<AtomicU64>,
    /// Chunks finished of the current job; futex word of the caller.
    done: Line<AtomicU32>,
    /// Whether the caller is parked on `done`.
    caller_parked: AtomicBool,
    /// Jobs published; futex word of the helpers.
    epoch: Line<AtomicU32>,
    /// Helpers parked on `epoch`.
    helpers_parked: AtomicU32,
    stop: AtomicBool,
}

// SAFETY: `job` is the only part that is not Sync; the ticket protocol orders its writes (caller,
// before the release store of `ticket`) before its reads (chunk holders, after their acquire of
// `ticket`) and its next write after all chunks are counted in `done`.
unsafe impl Sync for Shared {}
// SAFETY: the job pointer is only followed under the ticket protocol, wherever `Shared` lives.
unsafe impl Send for Shared {}

/// A fixed team of threads. Not `Sync`: one thread at a time publishes operations, and a running
/// chunk cannot start another one.
pub(super) struct ThreadPool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    _one_caller: PhantomData<Cell<()>>,
}

impl ThreadPool {
    /// A team of `threads` (at least 1), counting the caller. They run on the cores that the caller may use.
    pub(super) fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(std::ptr::null::<fn(usize, usize)>() as *const Job<'static>),
            ticket: Line(AtomicU64::new(0)),
            done: Line(AtomicU32::new(0)),
            caller_parked: AtomicBool::new(false),
            epoch: Line(AtomicU32::new(0)),
            helpers_parked: AtomicU32::new(0),
            stop: AtomicBool::new(false),
        });
        let helpers = (1..threads)
            .map(|thread| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("cpu-{thread}"))
                    .spawn(move || shared.help(thread))
                    .expect("invariant: the system can start the few threads asked for")
            })
            .collect();
        Self { shared, helpers, _one_caller: PhantomData }
    }

    /// Threads of the team, the caller included.
    pub(super) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `job(chunk, thread)` for every chunk in `0..chunks`, each once, and returns when all
    /// are done. One chunk runs on the caller without waking anybody.
    pub(super) fn run(&self, chunks: usize, job: &Job<'_>) {
        if chunks <= 1 || self.helpers.is_empty() {
            for chunk in 0..chunks {
                job(chunk, 0);
            }
            return;
        }
        let shared = &*self.shared;
        let count = u32::try_from(chunks).expect("invariant: operations have fewer than 2^32 chunks");
        // SAFETY: no chunk is outstanding (the previous `run` waited for all), so nobody reads the
        // job. The lifetime is erased: `run` returns only after every chunk has finished.
        unsafe { *shared.job.get() = std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) };
        shared.done.0.store(0, Ordering::Relaxed);
        shared.ticket.0.store(u64::from(count) << 32, Ordering::Release);
        // SeqCst on both words: either the helper sees the new epoch or we see the helper parked.
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        if shared.helpers_parked.load(Ordering::SeqCst) > 0 {
            wake(&shared.epoch.0, count - 1);
        }
        shared.work(0);
        shared.wait_done(count);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        wake(&self.shared.epoch.0, u32::MAX >> 1);
        for helper in self.helpers.drain(..) {
            // A helper cannot have panicked: a panic in a chunk aborts the process.
            let _ = helper.join();
        }
    }
}

impl Shared {
    /// Claims and runs chunks until none is left.
    fn work(&self, thread: usize) {
        loop {
            let ticket = self.ticket.0.fetch_add(1, Ordering::AcqRel);
            let (count, chunk) = ((ticket >> 32) as u32, ticket as u32);
            if chunk >= count {
                return;
            }
            let guard = AbortOnPanic;
            // SAFETY: this thread holds a chunk of the current job, so the job outlives the call
            // and is not being rewritten.
            unsafe { (**self.job.get())(chunk as usize, thread) };
            std::mem::forget(guard);
            // SeqCst pairs with `wait_done`: either the caller sees the count or we see it parked.
            if self.done.0.fetch_add(1, Ordering::SeqCst) + 1 == count
                && self.caller_parked.load(Ordering::SeqCst)
            {
                wake(&self.done.0, 1);
            }
        }
    }

    /// The life of a helper.
    fn help(&self, thread: usize) {
        loop {
            // The epoch first: the team's end sets `stop` before the epoch moves, so whoever sees the last epoch sees it.
            // The other way round a helper could park on the last epoch, which nobody ends.
            let seen = self.epoch.0.load(Ordering::SeqCst);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            self.work(thread);
            if spin_until(|| self.epoch.0.load(Ordering::Acquire) != seen) {
                continue;
            }
            self.helpers_parked.fetch_add(1, Ordering::SeqCst);
            // The kernel re-checks the word, so a job or stop published meanwhile is not missed.
            wait(&self.epoch.0, seen);
            self.helpers_parked.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Returns when `count` chunks are done.
    fn wait_done(&self, count: u32) {
        let done = || self.done.0.load(Ordering::Acquire);
        while !spin_until(|| done() == count) {
            // A helper holds the last chunk but has no core: give it ours.
            self.caller_parked.store(true, Ordering::SeqCst);
            let seen = self.done.0.load(Ordering::SeqCst);
            if seen != count {
                wait(&self.done.0, seen);
            }
            self.caller_parked.store(false, Ordering::SeqCst);
        }
    }
}

/// Ends the process when a chunk panics: the other threads would wait for it for ever.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        // Only reached by unwinding; the panic message has been printed.
        std::process::abort();
    }
}

/// Polls for at most [`SPIN`]; whether the condition came true.
fn spin_until(condition: impl Fn() -> bool) -> bool {
    let mut started = None;
    loop {
        for _ in 0..POLLS_PER_LOOK {
            if condition() {
                return true;
            }
            std::hint::spin_loop();
        }
        if started.get_or_insert_with(Instant::now).elapsed() > SPIN {
            return condition();
        }
    }
}

fn wait(word: &AtomicU32, value: u32) {
    // An error means that the word has changed or a signal came; every caller re-checks.
    let _ = futex::wait(word, futex::Flags::PRIVATE, value, None);
}

fn wake(word: &AtomicU32, waiters: u32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, waiters.max(1));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn a_team_ends_whatever_its_helpers_are_doing() {
        for round in 0..3_000 {
            let pool = ThreadPool::new(2);
            // Without it helpers may not have begun; with it they are between work and sleep.
            if round % 2 == 0 {
                pool.run(4, &|_, _| std::hint::black_box(()));
            }
        }
    }

    #[test]
    fn every_chunk_runs_exactly_once_in_every_operation() {
        for threads in 1..=4 {
            let pool = ThreadPool::new(threads);
            assert_eq!(pool.threads(), threads);
            for round in 0..2000usize {
                let chunks = round % 37;
                let runs: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(chunks, &|chunk, thread| {
                    assert!(thread < threads);
                    runs[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    runs.iter().all(|r| r.load(Ordering::Relaxed) == 1),
                    "threads {threads} round {round}"
                );
            }
        }
    }

    #[test]
    fn parked_helpers_and_a_parked_caller_are_woken() {
        let pool = ThreadPool::new(2);
        for _ in 0..20 {
            // Each chunk outlasts the spin, so the helper parks between operations and the caller
            // parks on the last chunk.
            std::thread::park_timeout(SPIN * 3);
            let sum = AtomicUsize::new(0);
            pool.run(3, &|chunk, _| {
                let until = Instant::now() + SPIN * 3;
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                sum.fetch_add(chunk, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 3);
        }
    }
}
