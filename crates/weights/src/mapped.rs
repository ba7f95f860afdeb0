//! A read-only file mapping whose resident pages stay few.
//!
//! **Invariant:** nothing is ever written through a mapping, so dropping its pages loses nothing:
//! they come back from the page cache or the disk at the next access.

use crate::error::WeightsError;
use lockstep_core::files;
use memmap2::{Mmap, UncheckedAdvice};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The kernel maps up to this many bytes around a fault ("fault-around"), so releases are widened
/// to it.
const FAULT_AROUND_BYTES: usize = 64 << 10;

/// One mapped model file.
///
/// As with every mapped file, a file that is truncated by someone else while it is read ends the
/// process with SIGBUS; model files are replaced by renaming, not by writing in place.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a regular file (symlinks are followed); reads nothing.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let file = files::open(path)?;
        // SAFETY: the mapping is read-only and private to this struct; the file may only be replaced
        // by rename while it is served (see the type's documentation), so its bytes stay put.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| WeightsError::io(path, source))?;
        Ok(Self { path: path.to_owned(), map })
    }

    /// The path as the user or the index named it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Lets the kernel drop the resident pages of `range` (and the few around it) from this process.
    ///
    /// A failure is ignored: it costs memory, never correctness.
    pub fn release(&self, range: Range<usize>) {
        let start = range.start / FAULT_AROUND_BYTES * FAULT_AROUND_BYTES;
        let end = range.end.next_multiple_of(FAULT_AROUND_BYTES).min(self.map.len());
        if start >= end {
            return;
        }
        // SAFETY: MADV_DONTNEED on a file mapping that is never written only unmaps pages; a later or
        // concurrent read faults the same bytes in again.
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
    }

    /// [`release`](Self::release) of everything.
    pub fn release_all(&self) {
        self.release(0..self.map.len());
    }
}
