//! Who holds which page of the KV pool, and which prefixes are cached.
//!
//! Pure bookkeeping: no KV data, no clock, no I/O, no hash-map order. Same calls give the same page numbers
//! on every rank; that is how ranks agree on page tables without talking.
//!
//! **Invariant:** every page is in exactly one place: free, private to one [`PageTable`], or in one
//! node of the [`RadixCache`]. free + cached + held = total, where *held* pages are private or
//! locked by a table and *cached* ones are in the tree without a lock. [`KvCache::check`] verifies it.
//!
//! Called by the scheduler only, which exists on every rank. Reading order: [`pool`], [`table`], [`radix`],
//! [`cache`] (what the scheduler uses). Explained in `docs/kvcache.md`.

pub mod cache;
pub mod hash;
pub mod pool;
pub mod radix;
pub mod table;
#[cfg(test)]
mod test_random;

pub use cache::{KvCache, KvCounts};
pub use hash::Hasher64;
pub use pool::{PagePool, PageState};
pub use radix::{Inserted, Namespace, PrefixLock, Probe, RadixCache, common_len};
pub use table::PageTable;
