//! Memory of the CPU backend: anonymous mappings, zeroed, on huge pages where that pays.
//!
//! Decode reads every weight once a token; on 4 KiB pages that ran at 23 GB/s where 2 MiB pages
//! gave 33 GB/s on the same machine, so weights live in memory advised to use huge pages. Many
//! matrices are smaller than a huge page, so small regions share one mapping: a region per mapping
//! would round a 135M model from 212 up to 300 MB.
//!
//! **Invariants:** regions are zeroed and 64-byte aligned; memory is resident only once touched (that of a KV pool is [shortly
//! before](super::ahead) it is needed).

use crate::{BackendError, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;

/// Size and alignment of a huge page.
pub(super) const HUGE_PAGE: usize = 2 << 20;
/// Small regions are cut from mappings of this size (only touched pages become resident).
const CHUNK: usize = 64 << 20;
/// Alignment of a region: one cache line, one AVX-512 register.
const ALIGN: usize = 64;

/// An anonymous private mapping, aligned to a huge page.
struct Mapping {
    /// What `mmap` returned, and its whole length (alignment slack included).
    raw: NonNull<u8>,
    raw_bytes: usize,
    /// First huge-page boundary inside.
    start: NonNull<u8>,
}

// SAFETY: a mapping is plain memory that any thread may use; access is governed by `Region`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself never reads or writes it.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` zeroed bytes without touching them.
    fn new(bytes: usize, huge: bool, what: &str) -> Result<Self> {
        let raw_bytes = bytes.next_multiple_of(HUGE_PAGE) + HUGE_PAGE;
        // SAFETY: a new private anonymous mapping at an address the kernel chooses.
        let raw = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                raw_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let raw =
            raw.ok().and_then(|p| NonNull::new(p.cast::<u8>())).ok_or_else(|| BackendError::OutOfMemory {
                what: what.into(),
                bytes,
                hint: "use a smaller model, fewer --num-pages, or raise the process's memory limit".into(),
            })?;
        let offset = raw.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: the slack of one huge page keeps the aligned start inside the mapping.
        let start = unsafe { raw.add(offset) };
        let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the range lies inside the mapping made above. The advice may be refused (kernel
        // without transparent huge pages); the memory then works at ordinary speed.
        let _ = unsafe { madvise(start.as_ptr().cast(), raw_bytes - HUGE_PAGE, advice) };
        Ok(Self { raw, raw_bytes, start })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, and the last owner is going away.
        let _ = unsafe { munmap(self.raw.as_ptr().cast(), self.raw_bytes) };
    }
}

/// Owned zeroed memory inside a mapping.
pub(super) struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the memory mapped.
    _mapping: Arc<Mapping>,
}

// SAFETY: a region owns its bytes exclusively, like a boxed slice.
unsafe impl Send for Region {}
// SAFETY: shared references only read (the raw pointers it hands out carry their own contracts).
unsafe impl Sync for Region {}

impl Region {
    /// A region with a mapping of its own, for memory that is filled over time.
    pub(super) fn own(bytes: usize, huge: bool, what: &str) -> Result<Self> {
        let mapping = Arc::new(Mapping::new(bytes, huge, what)?);
        Ok(Self { start: mapping.start, bytes, _mapping: mapping })
    }

    /// Its length.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its start, aligned to 64 bytes.
    pub(super) fn as_ptr<T>(&self) -> *const T {
        self.start.as_ptr().cast()
    }

    /// Its start, aligned to 64 bytes.
    pub(super) fn as_mut_ptr<T>(&mut self) -> *mut T {
        self.start.as_ptr().cast()
    }

    /// The region as elements.
    pub(super) fn as_slice<T: bytemuck::Pod>(&self) -> &[T] {
        // SAFETY: mapped, initialised (zeroed) and exclusively owned for `bytes`; 64-byte aligned;
        // any bits are a valid `T: Pod`.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.bytes / size_of::<T>()) }
    }

    /// The region as elements.
    pub(super) fn as_mut_slice<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.bytes / size_of::<T>()) }
    }
}

impl AsRef<[u8]> for Region {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

/// Cuts regions out of shared huge-page mappings. A region's memory goes back to the system when
/// all regions of its mapping are gone (weights live as long as the process).
#[derive(Default)]
pub(super) struct Arena {
    open: RefCell<Option<(Arc<Mapping>, usize)>>,
}

impl Arena {
    /// `bytes` zeroed bytes for `what` (named in the error).
    pub(super) fn region(&self, bytes: usize, what: &str) -> Result<Region> {
        if bytes > CHUNK / 4 {
            return Region::own(bytes, true, what);
        }
        let mut open = self.open.borrow_mut();
        let need = bytes.next_multiple_of(ALIGN);
        if open.as_ref().is_none_or(|(_, used)| used + need > CHUNK) {
            *open = Some((Arc::new(Mapping::new(CHUNK, true, what)?), 0));
        }
        let (mapping, used) = open.as_mut().expect("invariant: opened above");
        // SAFETY: `used + need <= CHUNK`, the usable length of the mapping.
        let start = unsafe { mapping.start.add(*used) };
        *used += need;
        Ok(Region { start, bytes, _mapping: Arc::clone(mapping) })
    }
}
