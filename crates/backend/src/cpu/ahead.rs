//! Makes the KV pool's memory resident shortly before it is needed.
//!
//! The system clears a page of memory when it is first touched. On a virtual machine, whose own memory may be new to
//! its host as well, that ran at 0.4 GB/s: 4 % of the time of prompts that fill a fresh pool, and more of the first ones. So
//! the beginning of a pool is made resident when it is made, unless that is much, and a thread that only runs when a core
//! has nothing else to do touches what comes next; under full load nothing is gained and nothing lost.
//!
//! **Invariant:** contents are never changed, so that whoever uses the pool need not know.

use super::memory::HUGE_PAGE;
use rustix::mm::{Advice, madvise};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Tokens that memory is kept ready for: some prompts, or a step of many rows for a while.
const AHEAD_TOKENS: usize = 2048;
/// The most memory that is kept ready, of K and V of all layers, and that is made resident at once. Huge pages become
/// resident whole and none is shared by two layers, so on them the thread keeps ready at least one of K and one of V of each
/// layer, 4 MiB, however many layers there are: more than this from 33 on.
const AHEAD_BYTES_MAX: usize = 128 << 20;
/// Pools smaller than this are not worth a thread.
const POOL_BYTES_MIN: usize = 64 << 20;
/// What `madvise` takes multiples of. A huge page becomes resident whole.
const SYSTEM_PAGE: usize = 4096;

/// Where pages of a pool lie: `[page]` of each layer.
pub(super) struct PoolPlaces {
    /// Addresses of K and of V.
    pub starts: [usize; 2],
    pub layers: usize,
    /// Bytes from a layer of K, or V, to the next.
    pub layer_stride: usize,
    pub pages: usize,
    /// Bytes of a page in one layer, of K or V.
    pub page_bytes: usize,
    /// Tokens of a page.
    pub page_size: usize,
}

impl PoolPlaces {
    /// Whether each layer of K and V begins at a huge page, as in a pool on huge pages.
    fn is_on_huge_pages(&self) -> bool {
        self.layer_stride.is_multiple_of(HUGE_PAGE)
    }

    /// Pages that memory is kept ready for.
    fn ahead_pages(&self) -> usize {
        let tokens = AHEAD_TOKENS.div_ceil(self.page_size);
        let mut layer_bytes = AHEAD_BYTES_MAX / (2 * self.layers);
        if self.is_on_huge_pages() {
            layer_bytes = (layer_bytes / HUGE_PAGE).max(1) * HUGE_PAGE;
        }
        tokens.min(layer_bytes / self.page_bytes).clamp(1, self.pages)
    }

    /// Pages that are resident before the pool is used: none where the least that can be made resident is too much.
    fn first_pages(&self) -> usize {
        let is_too_much = self.is_on_huge_pages() && 2 * self.layers * HUGE_PAGE > AHEAD_BYTES_MAX;
        if is_too_much { 0 } else { self.ahead_pages() }
    }

    /// Addresses of pages of one layer, whole pages of the system.
    fn addresses(&self, start: usize, layer: usize, pages: &Range<usize>) -> Range<usize> {
        let at = |page: usize| start + layer * self.layer_stride + page * self.page_bytes;
        at(pages.start) / SYSTEM_PAGE * SYSTEM_PAGE..at(pages.end).next_multiple_of(SYSTEM_PAGE)
    }
}

/// The thread, and how far it should be.
pub(super) struct Ahead {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    pages: usize,
    ahead_pages: usize,
}

struct Shared {
    /// Pages that should be resident, from the first on: the pool hands them out in this order.
    wanted: AtomicUsize,
    stop: AtomicBool,
}

impl Ahead {
    /// Makes the first pages resident, where they are few, and starts the thread, if the pool is large enough. The memory must
    /// stay mapped until this is dropped.
    pub(super) fn start(places: PoolPlaces) -> Option<Self> {
        if 2 * places.layers * places.pages * places.page_bytes < POOL_BYTES_MIN {
            return None;
        }
        let (pages, ahead_pages, first_pages) = (places.pages, places.ahead_pages(), places.first_pages());
        let shared = Arc::new(Shared { wanted: AtomicUsize::new(ahead_pages), stop: AtomicBool::new(false) });
        if first_pages > 0 && !shared.populate_first(&places, first_pages) {
            return None;
        }
        let theirs = Arc::clone(&shared);
        let run = move || theirs.run(&places, first_pages);
        let thread = std::thread::Builder::new().name("kv-ahead".into()).spawn(run);
        // Without the thread memory becomes resident as it is written.
        let thread = thread.ok()?;
        Some(Self { shared, thread: Some(thread), pages, ahead_pages })
    }

    /// Tells that pages up to `page` are in use.
    pub(super) fn reached(&self, page: usize) {
        let wanted = (page + 1 + self.ahead_pages).min(self.pages);
        let before = self.shared.wanted.load(Ordering::Relaxed);
        let is_enough = if wanted == self.pages { 0 } else { self.ahead_pages / 2 };
        if wanted > before + is_enough {
            self.shared.wanted.store(wanted, Ordering::Relaxed);
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, nothing would depend on it.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The thread: the first `done` pages are resident.
    fn run(&self, places: &PoolPlaces, mut done: usize) {
        run_when_idle();
        while !self.stop.load(Ordering::Relaxed) {
            let wanted = self.wanted.load(Ordering::Relaxed);
            if done >= wanted {
                std::thread::park();
                continue;
            }
            if !places.starts.into_iter().all(|start| self.populate(places, start, &(done..wanted))) {
                return;
            }
            done = wanted;
        }
    }

    /// Makes the first pages resident, K and V side by side, since a host gives memory to one core as slowly as to each of
    /// two; whether the system can.
    fn populate_first(&self, places: &PoolPlaces, pages: usize) -> bool {
        let [k, v] = places.starts;
        std::thread::scope(|scope| {
            let k_too = || self.populate(places, k, &(0..pages));
            let beside = std::thread::Builder::new().spawn_scoped(scope, k_too);
            let is_v_here = self.populate(places, v, &(0..pages));
            // Where there can be no other thread, by this one.
            is_v_here && beside.map_or_else(|_| k_too(), |thread| thread.join().unwrap_or(false))
        })
    }

    /// Makes pages of K or V, which begins at `start`, resident in all layers; whether the system can.
    fn populate(&self, places: &PoolPlaces, start: usize, pages: &Range<usize>) -> bool {
        for layer in 0..places.layers {
            if self.stop.load(Ordering::Relaxed) {
                return true;
            }
            let range = places.addresses(start, layer, pages);
            let place = range.start as *mut std::ffi::c_void;
            // SAFETY: the pool is mapped as long as this runs, with room to the next page of the system behind it; populating
            // changes no content.
            if unsafe { madvise(place, range.len(), Advice::LinuxPopulateWrite) }.is_err() {
                return false;
            }
        }
        true
    }
}

/// Lets the calling thread run only on cores that would be idle, whatever it inherited.
fn run_when_idle() {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: concerns the calling thread; the parameters live as long as the call. A refusal leaves it as it is.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const none) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::memory::Region;

    /// Bytes between layers.
    const GAP: usize = 7000;

    fn places(regions: &[Region; 2], pages: usize) -> PoolPlaces {
        let starts = [regions[0].as_ptr::<u8>() as usize, regions[1].as_ptr::<u8>() as usize];
        let layer_stride = pages * 3000 + GAP;
        PoolPlaces { starts, layers: 3, layer_stride, pages, page_bytes: 3000, page_size: 16 }
    }

    fn regions(pages: usize) -> [Region; 2] {
        let bytes = 3 * (pages * 3000 + GAP);
        [(); 2].map(|()| Region::own(bytes, false, "a test's pool").expect("memory for a test"))
    }

    fn resident(region: &Region) -> usize {
        let pages = region.bytes().div_ceil(SYSTEM_PAGE);
        let mut states = vec![0_u8; pages];
        // SAFETY: the region is mapped, and `states` has a byte for each of its pages.
        let code = unsafe {
            libc::mincore(region.as_ptr::<u8>().cast_mut().cast(), region.bytes(), states.as_mut_ptr())
        };
        assert_eq!(code, 0, "mincore of a mapping");
        states.iter().filter(|state| **state & 1 == 1).count()
    }

    #[test]
    fn the_pages_asked_for_become_resident_and_no_others() {
        let mut regions = regions(100);
        regions[0].as_mut_slice::<u8>()[4100] = 7;
        let places = places(&regions, 100);
        let shared = Shared { wanted: AtomicUsize::new(0), stop: AtomicBool::new(false) };
        if !places.starts.into_iter().all(|start| shared.populate(&places, start, &(1..10))) {
            return println!("skipped: this system cannot populate memory");
        }
        // Bytes 3,000 to 30,000 of layers that are 307,000 bytes apart lie in system pages 0..8, 75..83 and 150..158. Without
        // the gap they would lie in 0..8, 73..81 and 147..154.
        assert_eq!(regions.each_ref().map(resident), [24, 24]);
        assert_eq!(regions[0].as_slice::<u8>()[4100], 7, "contents stay");
    }

    #[test]
    fn more_is_wanted_once_half_is_used_and_never_more_than_there_is() {
        let (wanted, stop) = (AtomicUsize::new(64), AtomicBool::new(false));
        let ahead =
            Ahead { shared: Arc::new(Shared { wanted, stop }), thread: None, pages: 100, ahead_pages: 64 };
        for (page, want) in [(0, 64), (31, 64), (32, 97), (33, 97), (36, 100), (99, 100)] {
            ahead.reached(page);
            assert_eq!(ahead.shared.wanted.load(Ordering::Relaxed), want, "after page {page}");
        }
    }

    #[test]
    fn what_is_resident_at_once_stays_below_the_limit_however_many_layers() {
        let places = |layers, layer_stride| PoolPlaces {
            starts: [0, 0],
            layers,
            layer_stride,
            pages: 2000,
            page_bytes: 3000,
            page_size: 1,
        };
        for layers in 1..100 {
            let (huge, small) = (places(layers, 4 * HUGE_PAGE), places(layers, 2000 * 3000));
            for (places, granule) in [(&huge, HUGE_PAGE), (&small, SYSTEM_PAGE)] {
                let whole = (places.first_pages() * places.page_bytes).next_multiple_of(granule);
                // A layer that begins inside a page of the system takes a part of one more.
                let most = AHEAD_BYTES_MAX + 2 * layers * SYSTEM_PAGE;
                assert!(2 * layers * whole <= most, "{layers} layers, {granule}: {whole} of each");
            }
            assert_eq!(huge.first_pages() == 0, layers > 32, "{layers} layers");
            assert!(huge.ahead_pages() * huge.page_bytes > HUGE_PAGE - huge.page_bytes, "{layers} layers");
            assert!(small.first_pages() > 0, "{layers} layers");
        }
    }

    #[test]
    fn a_small_pool_has_no_thread_and_a_large_one_ends_its_own() {
        let small = regions(100);
        assert!(Ahead::start(places(&small, 100)).is_none());
        let large = regions(4000);
        let ahead = Ahead::start(places(&large, 4000)).expect("a thread");
        ahead.reached(3999);
        drop(ahead);
    }
}
