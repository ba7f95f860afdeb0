//! The part of libzmq 4.3.5's C interface that Lockstep uses (`zmq.h`), declared by hand: 19
//! functions do not justify a bindings generator and its libclang.

use std::ffi::{c_char, c_int, c_long, c_short, c_void};

pub(super) const SUB: c_int = 2;
pub(super) const PULL: c_int = 7;
pub(super) const PUSH: c_int = 8;
pub(super) const XPUB: c_int = 9;

pub(super) const SUBSCRIBE: c_int = 6;
pub(super) const FD: c_int = 14;
pub(super) const LINGER: c_int = 17;
pub(super) const RECONNECT_IVL: c_int = 18;
pub(super) const RECONNECT_IVL_MAX: c_int = 21;
pub(super) const MAXMSGSIZE: c_int = 22;
pub(super) const SNDHWM: c_int = 23;
pub(super) const RCVHWM: c_int = 24;
pub(super) const SNDTIMEO: c_int = 28;
pub(super) const CURVE_SERVER: c_int = 47;
pub(super) const CURVE_PUBLICKEY: c_int = 48;
pub(super) const CURVE_SECRETKEY: c_int = 49;
pub(super) const CURVE_SERVERKEY: c_int = 50;
pub(super) const IPC_FILTER_UID: c_int = 59;
pub(super) const XPUB_NODROP: c_int = 69;
pub(super) const XPUB_VERBOSER: c_int = 78;
pub(super) const USE_FD: c_int = 89;

pub(super) const DONTWAIT: c_int = 1;
pub(super) const POLLIN: c_short = 1;

/// `zmq_msg_t`: 64 opaque bytes with the alignment of a pointer.
#[repr(C, align(8))]
pub(super) struct Message(pub(super) [u8; 64]);

/// `zmq_pollitem_t`.
#[repr(C)]
pub(super) struct PollItem {
    pub(super) socket: *mut c_void,
    pub(super) fd: c_int,
    pub(super) events: c_short,
    pub(super) revents: c_short,
}

// SAFETY: the signatures are those of libzmq 4.3.5's zmq.h, which build.rs compiles and links.
unsafe extern "C" {
    pub(super) fn zmq_ctx_new() -> *mut c_void;
    pub(super) fn zmq_ctx_term(context: *mut c_void) -> c_int;
    pub(super) fn zmq_socket(context: *mut c_void, kind: c_int) -> *mut c_void;
    pub(super) fn zmq_close(socket: *mut c_void) -> c_int;
    pub(super) fn zmq_setsockopt(
        socket: *mut c_void,
        option: c_int,
        value: *const c_void,
        len: usize,
    ) -> c_int;
    pub(super) fn zmq_getsockopt(
        socket: *mut c_void,
        option: c_int,
        value: *mut c_void,
        len: *mut usize,
    ) -> c_int;
    pub(super) fn zmq_bind(socket: *mut c_void, endpoint: *const c_char) -> c_int;
    pub(super) fn zmq_connect(socket: *mut c_void, endpoint: *const c_char) -> c_int;
    pub(super) fn zmq_send(socket: *mut c_void, bytes: *const c_void, len: usize, flags: c_int) -> c_int;
    pub(super) fn zmq_msg_init(message: *mut Message) -> c_int;
    pub(super) fn zmq_msg_recv(message: *mut Message, socket: *mut c_void, flags: c_int) -> c_int;
    pub(super) fn zmq_msg_data(message: *mut Message) -> *mut c_void;
    pub(super) fn zmq_msg_size(message: *const Message) -> usize;
    pub(super) fn zmq_msg_close(message: *mut Message) -> c_int;
    pub(super) fn zmq_poll(items: *mut PollItem, len: c_int, timeout_ms: c_long) -> c_int;
    pub(super) fn zmq_z85_encode(to: *mut c_char, data: *const u8, len: usize) -> *mut c_char;
    pub(super) fn zmq_curve_public(public: *mut c_char, secret: *const c_char) -> c_int;
    pub(super) fn zmq_curve_keypair(public: *mut c_char, secret: *mut c_char) -> c_int;
    pub(super) fn zmq_errno() -> c_int;
    pub(super) fn zmq_strerror(code: c_int) -> *const c_char;
}
