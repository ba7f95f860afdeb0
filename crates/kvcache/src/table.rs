//! The pages of one request, in order of position.

use crate::hash::Hasher64;
use crate::radix::PrefixLock;
use lockstep_core::PageId;
use serde::{Deserialize, Serialize};

/// Page `i` holds the KV of positions `i*page_size..(i+1)*page_size`.
///
/// **Invariant:** the first [`shared_len`](Self::shared_len) pages are in the radix tree, on the path that
/// this table's lock holds; the others are private to this table.
///
/// A table must be given back with [`KvCache::release`](crate::KvCache::release); dropping a non-empty
/// one leaks its pages, which `check` reports.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PageTable {
    pub(crate) pages: Vec<PageId>,
    pub(crate) lock: Option<PrefixLock>,
    pub(crate) hash: Hasher64,
}

impl PageTable {
    /// A table without pages.
    pub fn new() -> Self {
        Self::default()
    }

    /// All pages in order.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there is no page.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// How many of the first pages belong to the radix tree and are locked by this table.
    pub fn shared_len(&self) -> usize {
        self.lock.as_ref().map_or(0, PrefixLock::pages)
    }

    /// The lock on the shared pages.
    pub fn lock(&self) -> Option<&PrefixLock> {
        self.lock.as_ref()
    }

    /// A hash of all page numbers in order, maintained in O(1) per added page: what the step digest
    /// compares instead of whole tables.
    pub fn fingerprint(&self) -> u64 {
        self.hash.finish()
    }

    /// Adds the hash of pages appended since `from`.
    pub(crate) fn hash_from(&mut self, from: usize) {
        for &page in &self.pages[from..] {
            self.hash.word(u64::from(page));
        }
    }

    /// Recomputes the hash after pages were replaced.
    pub(crate) fn rehash(&mut self) {
        self.hash = Hasher64::default();
        self.hash_from(0);
    }
}
