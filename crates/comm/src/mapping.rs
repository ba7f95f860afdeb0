//! Shared memory without a name, and the only place that turns offsets in it into addresses.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A step that failed, in the middle of a sentence, and what the system said.
pub(crate) type Failed = (&'static str, Errno);

/// Offsets of what every header begins with.
const MAGIC: usize = 0;
const VERSION: usize = 8;

/// The first bytes of a memfd, mapped into this process. Reached through atomics only, or through
/// raw pointers whose users have a protocol.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the value, not to a thread; it is only reached through atomics and
// through raw pointers whose users follow their protocol.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `map` mapped; nothing borrows from it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl Mapping {
    /// Makes `bytes` zeroed bytes, sealed against shrinking and growing: a file cut short would kill
    /// every process that touches it with SIGBUS. The descriptor is close-on-exec.
    pub(crate) fn create(name: &CStr, bytes: usize) -> Result<OwnedFd, Failed> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| ("cannot be created", e))?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|e| ("cannot be sized", e))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| ("cannot be sealed", e))?;
        Ok(fd)
    }

    /// Bytes of the file behind `fd`.
    pub(crate) fn file_bytes(fd: impl AsFd) -> Result<usize, Failed> {
        let stat = rustix::fs::fstat(fd).map_err(|e| ("cannot be inspected", e))?;
        Ok(usize::try_from(stat.st_size).unwrap_or(0))
    }

    /// Maps the first `bytes` bytes; the file must have as many. The descriptor may be closed afterwards.
    pub(crate) fn map(fd: impl AsFd, bytes: usize) -> Result<Self, Failed> {
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        };
        let base = base.map_err(|e| ("cannot be mapped", e))?;
        let base = NonNull::new(base.cast()).expect("invariant: the kernel never maps page 0 unasked");
        Ok(Self { base, bytes })
    }

    /// Says what the memory is and in which version; last of its header, whose other numbers it publishes.
    pub(crate) fn publish_header(&self, magic: u64, version: u32) {
        self.word(VERSION).store(version, Ordering::Relaxed);
        self.long(MAGIC).store(magic, Ordering::Release);
    }

    /// Whether [`publish_header`](Self::publish_header) said this; the error is what was found instead.
    pub(crate) fn check_header(&self, magic: u64, version: u32) -> Result<(), String> {
        let found_magic = self.long(MAGIC).load(Ordering::Acquire);
        let found_version = self.word(VERSION).load(Ordering::Relaxed);
        match (found_magic, found_version) == (magic, version) {
            true => Ok(()),
            false => Err(format!("magic {found_magic:#x}, version {found_version}")),
        }
    }

    /// The 32-bit number at `offset`.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes, "word inside the memory");
        // SAFETY: in bounds and aligned (checked, and the mapping starts on a page); mapped for as
        // long as `self`; every process uses atomics for it.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The 64-bit number at `offset`.
    pub(crate) fn long(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes, "number inside the memory");
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Address of `len` bytes at `offset`. Who may touch them when is the protocol's business.
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.bytes, "bytes inside the memory");
        // SAFETY: in bounds of the mapping (checked).
        unsafe { self.base.as_ptr().add(offset) }
    }
}
