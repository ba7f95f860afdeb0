//! A safe layer over the shim: connections to every other rank, and buffers that own their memory.

use super::ffi;
use super::transport_types::{Outcome, Pair};
use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::IpAddr;
use std::ptr::NonNull;
use std::time::Duration;

/// Room for Gloo's words about a failure.
const ERROR_BYTES: usize = 512;
/// Room for an address as Gloo writes it (a `sockaddr_storage` and a number).
const ADDRESS_BYTES_MAX: usize = 512;
/// Longest wait in one piece; whoever may wait longer asks again.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Listening sockets, then connections, to every other rank of a mesh.
#[derive(Debug)]
pub(super) struct Transport(NonNull<c_void>);

// SAFETY: Gloo's context and pairs lock themselves; nothing in them belongs to a thread.
unsafe impl Send for Transport {}
// SAFETY: as above.
unsafe impl Sync for Transport {}

impl Drop for Transport {
    fn drop(&mut self) {
        // SAFETY: came from `lockstep_gloo_open`, closed once; buffers keep what they need of it alive.
        unsafe { ffi::lockstep_gloo_close(self.0.as_ptr()) };
    }
}

impl Transport {
    /// Listens on `address`, which must be one of this host's.
    pub(super) fn open(rank: usize, size: usize, address: IpAddr, timeout: Duration) -> Result<Self, String> {
        let name = CString::new(address.to_string()).expect("invariant: an address has no zero byte");
        let timeout_ms = timeout.as_millis() as i64;
        let mut opened = std::ptr::null_mut();
        said(|text, room| {
            // SAFETY: `name` is a C string and `text` has `room` bytes.
            opened = unsafe {
                ffi::lockstep_gloo_open(rank as c_int, size as c_int, name.as_ptr(), timeout_ms, text, room)
            };
            c_int::from(opened.is_null())
        })?;
        Ok(Self(NonNull::new(opened).expect("invariant: null is a failure")))
    }

    /// Where `peer` reaches this rank.
    pub(super) fn address(&self, peer: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; ADDRESS_BYTES_MAX];
        let mut len = 0;
        said(|text, room| {
            let out = bytes.as_mut_ptr();
            // SAFETY: the mesh is open, `out` and `text` have the given room.
            unsafe {
                ffi::lockstep_gloo_address(
                    self.0.as_ptr(),
                    peer as c_int,
                    out,
                    ADDRESS_BYTES_MAX,
                    &mut len,
                    text,
                    room,
                )
            }
        })?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Joins the connection with `peer`, reached at `address` of its own [`Self::address`] for this rank.
    pub(super) fn connect(&self, peer: usize, address: &[u8]) -> Result<(), String> {
        said(|text, room| {
            let (bytes, len) = (address.as_ptr(), address.len());
            // SAFETY: the mesh is open, `bytes` and `text` have the given lengths.
            unsafe { ffi::lockstep_gloo_connect(self.0.as_ptr(), peer as c_int, bytes, len, text, room) }
        })
    }

    /// A zeroed buffer of `bytes`.
    pub(super) fn buffer(&self, bytes: usize) -> Result<Buffer, String> {
        let memory: Box<[UnsafeCell<Line>]> =
            (0..bytes.div_ceil(size_of::<Line>())).map(|_| UnsafeCell::new(Line([0; 64]))).collect();
        let mut raw = std::ptr::null_mut();
        said(|text, room| {
            // SAFETY: the mesh is open; the memory has at least `bytes` and lives as long as the buffer.
            raw = unsafe {
                let data = memory.as_ptr().cast_mut().cast();
                ffi::lockstep_gloo_buffer(self.0.as_ptr(), data, bytes, text, room)
            };
            c_int::from(raw.is_null())
        })?;
        Ok(Buffer { raw: NonNull::new(raw).expect("invariant: null is a failure"), memory })
    }
}

/// Memory that one operation at a time sends from or receives into.
#[derive(Debug)]
pub(super) struct Buffer {
    raw: NonNull<c_void>,
    /// In cells, because Gloo's thread writes it.
    memory: Box<[UnsafeCell<Line>]>,
}

/// Keeps payloads aligned for every element type.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: Gloo's buffers lock themselves; the memory is reached through raw pointers only, by the rules of its user.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: came from `lockstep_gloo_buffer`, freed once and before the memory; an operation that is still
        // pending loses its buffer, which Gloo checks before it touches it.
        unsafe { ffi::lockstep_gloo_buffer_free(self.raw.as_ptr()) };
    }
}

impl Buffer {
    /// Its memory. May be written when no operation is pending, and read when none receives.
    pub(super) fn data(&self) -> *mut u8 {
        self.memory.as_ptr().cast_mut().cast()
    }

    /// Begins an operation with the first `bytes`; a receipt may be shorter. It is complete after [`Self::wait`].
    pub(super) fn start(&self, pair: Pair, bytes: usize) -> Result<(), String> {
        assert!(bytes <= self.memory.len() * size_of::<Line>(), "invariant: callers keep to the buffer");
        said(|text, room| {
            // SAFETY: the buffer lives and has `bytes`; the memory outlives it.
            unsafe {
                match pair {
                    Pair::Send(peer, slot) => {
                        ffi::lockstep_gloo_send(self.raw.as_ptr(), peer as c_int, slot, bytes, text, room)
                    }
                    Pair::Recv(peer, slot) => {
                        ffi::lockstep_gloo_recv(self.raw.as_ptr(), peer as c_int, slot, bytes, text, room)
                    }
                }
            }
        })
    }

    /// Waits for its operation, at most `patience`.
    pub(super) fn wait(&self, is_send: bool, patience: Duration) -> Outcome {
        let timeout_ms = patience.min(WAIT_MAX).as_millis() as i64;
        let mut outcome = 0;
        let words = said(|text, room| {
            // SAFETY: the buffer lives, `text` has `room` bytes.
            outcome = unsafe {
                ffi::lockstep_gloo_wait(self.raw.as_ptr(), c_int::from(is_send), timeout_ms, text, room)
            };
            outcome
        });
        match (outcome, words) {
            (0, _) => Outcome::Done,
            (2, _) => Outcome::Aborted,
            (3, _) => Outcome::Expired,
            (_, words) => Outcome::Failed(words.err().unwrap_or_default()),
        }
    }

    /// Ends the wait for its operation, from another thread.
    pub(super) fn abort(&self) {
        // SAFETY: the buffer lives.
        unsafe { ffi::lockstep_gloo_abort(self.raw.as_ptr()) };
    }
}

/// Calls `f` with room for a sentence; that sentence when it returns nonzero.
fn said(f: impl FnOnce(*mut c_char, usize) -> c_int) -> Result<(), String> {
    let mut text = [0 as c_char; ERROR_BYTES];
    if f(text.as_mut_ptr(), ERROR_BYTES) == 0 {
        return Ok(());
    }
    text[ERROR_BYTES - 1] = 0;
    // SAFETY: zeroed, written by `snprintf`, and ended above in any case.
    let words = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
    // Gloo puts source file and line first, in brackets.
    Err(words.split_once("] ").map_or(&*words, |(_, words)| words).to_owned())
}
