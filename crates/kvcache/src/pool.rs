//! The pages of the KV pool and the state of each.
//!
//! **Invariant:** a page changes state only along free → private → cached → free or private → free;
//! any other change is a bug of this crate and panics in release builds too, because going on would
//! mean two requests writing one page. Reuse is last in, first out: the same order on every rank.

use lockstep_core::PageId;
use serde::{Deserialize, Serialize};

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageState {
    /// Nobody's; its content is garbage.
    Free,
    /// In one page table and nowhere else.
    Private,
    /// In one node of the radix tree.
    Cached,
}

/// Allocator of page numbers `0..total`; every operation is O(1) per page.
#[derive(Debug, Serialize, Deserialize)]
pub struct PagePool {
    /// Stack; the top is handed out next.
    free: Vec<PageId>,
    states: Vec<PageState>,
    private: usize,
    cached: usize,
    /// Pages freed since the log was taken, for poisoning.
    #[serde(skip)]
    freed_log: Option<Vec<PageId>>,
}

impl PagePool {
    /// A pool of `num_pages` free pages. With `track_freed`, freed pages are recorded for
    /// [`take_freed`](Self::take_freed).
    pub fn new(num_pages: usize, track_freed: bool) -> Self {
        let count = PageId::try_from(num_pages).expect("num_pages fits a PageId");
        Self {
            free: (0..count).rev().collect(),
            states: vec![PageState::Free; num_pages],
            private: 0,
            cached: 0,
            freed_log: track_freed.then(Vec::new),
        }
    }

    /// All pages.
    pub fn total(&self) -> usize {
        self.states.len()
    }

    /// Pages that can be allocated.
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Pages in page tables only.
    pub fn private_count(&self) -> usize {
        self.private
    }

    /// Pages in the radix tree, locked or not.
    pub fn cached_count(&self) -> usize {
        self.cached
    }

    /// State of one page.
    pub fn state(&self, page: PageId) -> PageState {
        self.states[page as usize]
    }

    /// Takes one free page and makes it private; `None` when there is none.
    pub fn allocate(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.change(page, PageState::Free, PageState::Private);
        self.private += 1;
        Some(page)
    }

    /// Appends `count` private pages to `out`, or none at all (false) when fewer are free.
    pub fn allocate_many(&mut self, count: usize, out: &mut Vec<PageId>) -> bool {
        if count > self.free.len() {
            return false;
        }
        out.reserve(count);
        for _ in 0..count {
            out.push(self.allocate().expect("invariant: the count was checked"));
        }
        true
    }

    /// A private page joins the radix tree.
    pub fn make_cached(&mut self, page: PageId) {
        self.change(page, PageState::Private, PageState::Cached);
        self.private -= 1;
        self.cached += 1;
    }

    /// Frees a private page.
    pub fn free_private(&mut self, page: PageId) {
        self.change(page, PageState::Private, PageState::Free);
        self.private -= 1;
        self.put_back(page);
    }

    /// Frees a page that the radix tree gave up.
    pub fn free_cached(&mut self, page: PageId) {
        self.change(page, PageState::Cached, PageState::Free);
        self.cached -= 1;
        self.put_back(page);
    }

    /// Moves the pages freed since the last call to the end of `out`; nothing without `track_freed`. A page
    /// may already be allocated again: whoever poisons must do so before the next step writes.
    pub fn take_freed(&mut self, out: &mut Vec<PageId>) {
        if let Some(log) = &mut self.freed_log {
            out.append(log);
        }
    }

    /// Counts the states again and compares; O(total).
    pub fn check(&self) -> Result<(), String> {
        let count = |state| self.states.iter().filter(|&&s| s == state).count();
        let got = (count(PageState::Free), count(PageState::Private), count(PageState::Cached));
        let kept = (self.free.len(), self.private, self.cached);
        if got != kept {
            return Err(format!("pool: states say (free, private, cached) = {got:?}, counters say {kept:?}"));
        }
        let mut seen = vec![false; self.total()];
        for &page in &self.free {
            if self.state(page) != PageState::Free || std::mem::replace(&mut seen[page as usize], true) {
                return Err(format!("pool: page {page} is twice in the free list or not free"));
            }
        }
        Ok(())
    }

    fn put_back(&mut self, page: PageId) {
        self.free.push(page);
        if let Some(log) = &mut self.freed_log {
            log.push(page);
        }
    }

    fn change(&mut self, page: PageId, from: PageState, to: PageState) {
        let state = &mut self.states[page as usize];
        assert!(*state == from, "page {page} is {state:?} where {from:?} was expected (going to {to:?})");
        *state = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bulk_allocation_is_all_or_nothing() {
        let mut pool = PagePool::new(4, false);
        let mut pages = Vec::new();
        assert!(pool.allocate_many(3, &mut pages));
        assert_eq!(pages, [0, 1, 2]);
        assert!(!pool.allocate_many(2, &mut pages));
        assert_eq!((pages.len(), pool.free_count(), pool.private_count()), (3, 1, 3));
        pool.check().unwrap();
    }

    #[test]
    fn freed_pages_are_logged_once_and_reused_last_in_first_out() {
        let mut pool = PagePool::new(3, true);
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        pool.free_private(a);
        pool.make_cached(b);
        pool.free_cached(b);
        let mut freed = Vec::new();
        pool.take_freed(&mut freed);
        assert_eq!(freed, [a, b]);
        pool.take_freed(&mut freed);
        assert_eq!(freed.len(), 2);
        assert_eq!(pool.allocate(), Some(b));
    }

    #[test]
    #[should_panic(expected = "page 0 is Free where Private was expected")]
    fn a_second_free_is_caught() {
        let mut pool = PagePool::new(1, false);
        let page = pool.allocate().unwrap();
        pool.free_private(page);
        pool.free_private(page);
    }
}
