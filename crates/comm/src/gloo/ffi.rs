//! The C interface of `shim.cc`, which build.rs compiles with the feature `gloo`.

use std::ffi::{c_char, c_int, c_void};

// SAFETY: the signatures are those of shim.cc.
unsafe extern "C" {
    pub(super) fn lockstep_gloo_open(
        rank: c_int,
        size: c_int,
        address: *const c_char,
        timeout_ms: i64,
        text: *mut c_char,
        room: usize,
    ) -> *mut c_void;
    pub(super) fn lockstep_gloo_address(
        mesh: *mut c_void,
        peer: c_int,
        out: *mut u8,
        room_out: usize,
        len: *mut usize,
        text: *mut c_char,
        room: usize,
    ) -> c_int;
    pub(super) fn lockstep_gloo_connect(
        mesh: *mut c_void,
        peer: c_int,
        bytes: *const u8,
        len: usize,
        text: *mut c_char,
        room: usize,
    ) -> c_int;
    pub(super) fn lockstep_gloo_close(mesh: *mut c_void);
    pub(super) fn lockstep_gloo_buffer(
        mesh: *mut c_void,
        data: *mut c_void,
        bytes: usize,
        text: *mut c_char,
        room: usize,
    ) -> *mut c_void;
    pub(super) fn lockstep_gloo_buffer_free(buffer: *mut c_void);
    pub(super) fn lockstep_gloo_send(
        buffer: *mut c_void,
        peer: c_int,
        slot: u64,
        bytes: usize,
        text: *mut c_char,
        room: usize,
    ) -> c_int;
    pub(super) fn lockstep_gloo_recv(
        buffer: *mut c_void,
        peer: c_int,
        slot: u64,
        bytes: usize,
        text: *mut c_char,
        room: usize,
    ) -> c_int;
    pub(super) fn lockstep_gloo_wait(
        buffer: *mut c_void,
        is_send: c_int,
        timeout_ms: i64,
        text: *mut c_char,
        room: usize,
    ) -> c_int;
    pub(super) fn lockstep_gloo_abort(buffer: *mut c_void);
}
