//! Bytes that the streams of this thread have looked at; for tests of what a text costs.

use std::cell::Cell;

thread_local! {
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

/// So many more bytes are looked at.
pub(super) fn add(bytes: usize) {
    BYTES.set(BYTES.get() + bytes as u64);
}

/// Bytes since the last call.
pub(super) fn take() -> u64 {
    BYTES.take()
}
