//! Memory that processes share: headers are checked before anything is believed, and what lies behind them may be
//! anything at any time.

use lockstep_comm::watch::{Track, WatchPage};
use lockstep_comm::{AbortHandle, SharedRegion};
use rustix::fs::MemfdFlags;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Bytes of the header of both kinds.
const HEADER_BYTES: usize = 4096;
/// Largest file; a watch page with one mark and the smallest rank group are below it.
const FILE_BYTES_MAX: u32 = 16 << 20;

/// The input is the file's size (4 bytes), its header, and what follows the header.
pub(crate) fn shared(input: &[u8]) {
    let Some((size, content)) = input.split_first_chunk() else { return };
    let fd = memory(u32::from_le_bytes(*size) % FILE_BYTES_MAX, content);
    if let Ok(page) = WatchPage::map(&fd) {
        for mark in (0..page.marks()).take(4) {
            page.read(mark);
            for track in Track::ALL {
                let mut events = Vec::new();
                let (end, lost) = page.events(mark, track, 0, &mut events);
                assert!(lost <= end && events.len() as u64 <= end, "{lost} of {end} were lost");
                page.events(mark, track, end / 2, &mut events);
            }
        }
        page.token_age(0..page.marks());
    }
    if let Ok(region) = SharedRegion::map(&fd) {
        let handle = AbortHandle::of(Arc::new(region));
        handle.cause();
        handle.abort("no reason");
        assert!(handle.cause().is_some(), "whoever aborts first gives the cause");
    }
}

fn memory(size: u32, content: &[u8]) -> OwnedFd {
    let fd = rustix::fs::memfd_create(c"lockstep-fuzz", MemfdFlags::CLOEXEC).expect("a descriptor");
    let content = &content[..content.len().min(size as usize)];
    let (header, rest) = content.split_at(content.len().min(HEADER_BYTES));
    rustix::io::pwrite(&fd, header, 0).expect("memory can be written");
    rustix::io::pwrite(&fd, rest, HEADER_BYTES as u64).expect("memory can be written");
    rustix::fs::ftruncate(&fd, size.into()).expect("memory can be sized");
    fd
}
