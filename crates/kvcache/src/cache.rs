//! Pool and prefix tree behind one door: what the scheduler uses.
//!
//! Life of a table: [`KvCache::attach`] (take a cached prefix) → [`KvCache::grow`] (private pages) → steps
//! compute KV → [`KvCache::publish`] (full pages become shareable) → [`KvCache::release`].

use crate::pool::{PagePool, PageState};
use crate::radix::{Namespace, Probe, RadixCache};
use crate::table::PageTable;
use lockstep_core::{PageId, TokenId};
use serde::{Deserialize, Serialize};

/// Exact page accounting; the three parts add up to `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCounts {
    /// Pages without content.
    pub free: usize,
    /// Pages of cached prefixes that no table locks; taken when free ones run out.
    pub cached: usize,
    /// Pages that tables hold, privately or by a lock.
    pub held: usize,
    /// All pages.
    pub total: usize,
}

/// The pages of one rank's KV pool. The same calls give the same pages on every rank.
#[derive(Debug, Serialize, Deserialize)]
pub struct KvCache {
    page_size: usize,
    pool: PagePool,
    /// `None`: prefixes are not cached (`--cache none`).
    tree: Option<RadixCache>,
    evicted_pages: u64,
    /// Reused by evictions.
    #[serde(skip)]
    scratch: Vec<PageId>,
}

impl KvCache {
    /// `num_pages` free pages of `page_size` tokens. `cache_prefixes` keeps published pages in a radix tree;
    /// `track_freed` records freed pages for [`take_freed`](Self::take_freed).
    pub fn new(page_size: usize, num_pages: usize, cache_prefixes: bool, track_freed: bool) -> Self {
        Self {
            page_size,
            pool: PagePool::new(num_pages, track_freed),
            tree: cache_prefixes.then(|| RadixCache::new(page_size)),
            evicted_pages: 0,
            scratch: Vec::new(),
        }
    }

    /// Tokens in a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Whether published pages are kept for other requests.
    pub fn caches_prefixes(&self) -> bool {
        self.tree.is_some()
    }

    /// Pages that can be had: free ones and cached ones that no table locks. O(1).
    pub fn available(&self) -> usize {
        self.pool.free_count() + self.tree.as_ref().map_or(0, RadixCache::unlocked_pages)
    }

    /// Exact accounting. O(1).
    pub fn counts(&self) -> KvCounts {
        let cached = self.tree.as_ref().map_or(0, RadixCache::unlocked_pages);
        let (free, total) = (self.pool.free_count(), self.pool.total());
        KvCounts { free, cached, held: total - free - cached, total }
    }

    /// Pages evicted so far.
    pub fn evicted_pages(&self) -> u64 {
        self.evicted_pages
    }

    /// Changes whenever a prefix may have entered or left the tree: a cached [`probe`](Self::probe)
    /// result stays valid, up to locks, while it is equal.
    pub fn epoch(&self) -> u64 {
        self.tree.as_ref().map_or(0, RadixCache::epoch)
    }

    /// What [`attach`](Self::attach) would find for `prompt`; changes nothing. O(prompt).
    pub fn probe(&self, namespace: &Namespace, prompt: &[TokenId]) -> Probe {
        self.tree.as_ref().map_or(Probe::default(), |tree| tree.probe(namespace, prompt))
    }

    /// Locks the longest cached prefix of `prompt` (never all of it) and puts its pages into the empty
    /// `table`. Returns the prefix in tokens, a multiple of the page size, at most `prompt.len() - 1`.
    pub fn attach(&mut self, namespace: &Namespace, prompt: &[TokenId], table: &mut PageTable) -> usize {
        assert!(table.is_empty(), "a prefix is attached to an empty table");
        let Some(tree) = &mut self.tree else { return 0 };
        table.lock = tree.acquire(namespace, prompt, &mut table.pages);
        table.rehash();
        table.len() * self.page_size
    }

    /// Makes `table` at least `pages` long with private pages, evicting least recently used prefixes when
    /// free pages run out. False, and nothing changed, when too few are available.
    pub fn grow(&mut self, table: &mut PageTable, pages: usize) -> bool {
        let len = table.len();
        let Some(needed) = pages.checked_sub(len).filter(|&n| n > 0) else { return true };
        if needed > self.available() {
            return false;
        }
        self.evict(needed.saturating_sub(self.pool.free_count()));
        let done = self.pool.allocate_many(needed, &mut table.pages);
        assert!(done, "invariant: eviction frees what available() promised");
        table.hash_from(len);
        true
    }

    /// Makes the full pages of `tokens` shareable. Their KV must have been computed by completed steps, and
    /// `tokens` must start with what was published before. O(new tokens).
    ///
    /// Where the tree already has a page for the same tokens (two requests computed one prefix at
    /// once), the table is pointed at the tree's page, whose KV is the same, and its own page is moved to
    /// `duplicates`: the caller passes them to [`free`](Self::free) when no launched step uses them.
    pub fn publish(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
        table: &mut PageTable,
        duplicates: &mut Vec<PageId>,
    ) {
        let Some(tree) = &mut self.tree else { return };
        let full = tokens.len() / self.page_size;
        if full <= table.shared_len() {
            return;
        }
        let known_duplicates = duplicates.len();
        let (lock, pages) = (table.lock.take(), &mut table.pages[..full]);
        let inserted = tree.insert(lock, namespace, &tokens[..full * self.page_size], pages, duplicates);
        for &page in &pages[full - inserted.adopted_pages..] {
            self.pool.make_cached(page);
        }
        table.lock = Some(inserted.lock);
        if duplicates.len() > known_duplicates {
            table.rehash();
        }
    }

    /// Frees private pages that no table holds any more (the duplicates of [`publish`](Self::publish)).
    pub fn free(&mut self, pages: &[PageId]) {
        pages.iter().for_each(|&page| self.pool.free_private(page));
    }

    /// Empties `table`: unlocks its prefix and frees its private pages. No launched step may use it.
    pub fn release(&mut self, table: &mut PageTable) {
        let shared = table.shared_len();
        for &page in &table.pages[shared..] {
            self.pool.free_private(page);
        }
        if let (Some(lock), Some(tree)) = (table.lock.take(), &mut self.tree) {
            tree.release(lock);
        }
        table.pages.clear();
        table.rehash();
    }

    /// Frees every cached page that no table locks.
    pub fn flush(&mut self) {
        self.evict(self.counts().cached);
    }

    /// See [`PagePool::take_freed`].
    pub fn take_freed(&mut self, out: &mut Vec<PageId>) {
        self.pool.take_freed(out);
    }

    /// Verifies the invariants of the crate against all tables in existence and the pages that were handed
    /// out as duplicates and not freed yet. O(pool + tree + tables); the error names what is wrong.
    pub fn check<'a>(
        &self,
        tables: impl Iterator<Item = &'a PageTable> + Clone,
        duplicates: &[PageId],
    ) -> Result<(), String> {
        self.pool.check()?;
        let mut owner = vec![PageState::Free; self.pool.total()];
        if let Some(tree) = &self.tree {
            tree.check()?;
            tree.check_locks(tables.clone().filter_map(PageTable::lock))?;
            for page in tree.pages() {
                claim(&mut owner, page, PageState::Cached)?;
            }
        }
        for table in tables {
            let (shared, private) = table.pages.split_at(table.shared_len());
            if let (Some(tree), Some(lock)) = (&self.tree, table.lock()) {
                tree.check_path(lock, shared)?;
            }
            for &page in private {
                claim(&mut owner, page, PageState::Private)?;
            }
        }
        for &page in duplicates {
            claim(&mut owner, page, PageState::Private)?;
        }
        match (0..owner.len()).find(|&page| owner[page] != self.pool.state(page as PageId)) {
            None => Ok(()),
            Some(page) => Err(format!(
                "page {page} is {:?} by its owners but {:?} in the pool",
                owner[page],
                self.pool.state(page as PageId)
            )),
        }
    }

    fn evict(&mut self, pages: usize) {
        let Some(tree) = self.tree.as_mut().filter(|_| pages > 0) else { return };
        tree.evict(pages, &mut self.scratch);
        self.evicted_pages += self.scratch.len() as u64;
        for page in self.scratch.drain(..) {
            self.pool.free_cached(page);
        }
    }
}

/// Notes the owner of a page; an error when it has one already.
fn claim(owner: &mut [PageState], page: PageId, state: PageState) -> Result<(), String> {
    match std::mem::replace(&mut owner[page as usize], state) {
        PageState::Free => Ok(()),
        other => Err(format!("page {page} has two owners ({other:?} and {state:?})")),
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
