//! A safe layer over libzmq's sockets: bytes in, bytes out, time-outs, no message types yet.

use super::curve::{self, CurvePublic, CurveSecret};
use super::{Endpoint, LinkError, Result, ffi};
use lockstep_core::limits::WIRE_MESSAGE_BYTES_MAX;
use std::ffi::{CStr, CString, c_int, c_long, c_void};
use std::marker::PhantomData;
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a closing sender may go on delivering what it had accepted. Receivers do not linger: all
/// they could have left is a subscription, and a dead publisher would make them wait for it.
const LINGER_MS: c_int = 2_000;
/// Pause between attempts to reach an endpoint nobody has bound yet; doubles up to the maximum.
const RECONNECT_MS: c_int = 5;
const RECONNECT_MS_MAX: c_int = 100;

/// The libzmq context of a process (one I/O thread). Cloning shares it; the last clone to go waits
/// until every socket has delivered what it had accepted, at most two seconds. `process::exit` does
/// not drop it: a process that sends a last message must drop its senders and context before.
#[derive(Clone, Debug)]
pub struct Context(Arc<RawContext>);

#[derive(Debug)]
struct RawContext(NonNull<c_void>);

// SAFETY: zmq.h: "A ØMQ context is thread safe and may be shared among as many application threads
// as necessary".
unsafe impl Send for RawContext {}
// SAFETY: as above.
unsafe impl Sync for RawContext {}

impl Drop for RawContext {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `zmq_ctx_new` and is dropped once; every socket holds an
        // `Arc` of this context and closes itself first.
        while unsafe { ffi::zmq_ctx_term(self.0.as_ptr()) } != 0 && errno() == libc::EINTR {}
    }
}

impl Context {
    /// A new context. Panics when the process is out of file descriptors or memory.
    pub fn new() -> Self {
        // SAFETY: takes no arguments.
        let raw = NonNull::new(unsafe { ffi::zmq_ctx_new() });
        Self(Arc::new(RawContext(raw.expect("out of file descriptors or memory for the ZeroMQ context"))))
    }
}

impl Default for Context {
    fn default() -> Self {
        Self::new()
    }
}

/// Which pattern a socket speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Push,
    Pull,
    Xpub,
    Sub,
}

/// One socket. It may move to another thread but not be used by two at once: libzmq's sockets are
/// not thread-safe, so the type is `Send` and not `Sync`.
#[derive(Debug)]
pub(super) struct Socket {
    raw: NonNull<c_void>,
    endpoint: Endpoint,
    // Held so that the context outlives the socket; declared after nothing that needs it.
    _context: Context,
    // `Cell` is Send and not Sync, as the socket must be.
    _not_sync: PhantomData<std::cell::Cell<()>>,
}

// SAFETY: zmq_socket(3): a socket may be migrated between threads as long as the hand-over has a
// full fence, which moving a value between threads in Rust implies.
unsafe impl Send for Socket {}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: `raw` came from `zmq_socket` and is closed once. The only failure is ENOTSOCK.
        unsafe { ffi::zmq_close(self.raw.as_ptr()) };
    }
}

impl Socket {
    /// A socket with the options every link has; not yet bound or connected. Queued messages have no
    /// limit in either direction until [`Socket::set_send_queue_len`].
    pub(super) fn new(context: &Context, kind: Kind, endpoint: &Endpoint) -> Result<Self> {
        let number = match kind {
            Kind::Push => ffi::PUSH,
            Kind::Pull => ffi::PULL,
            Kind::Xpub => ffi::XPUB,
            Kind::Sub => ffi::SUB,
        };
        // SAFETY: the context is alive, `context` holds it.
        let Some(raw) = NonNull::new(unsafe { ffi::zmq_socket(context.0.0.as_ptr(), number) }) else {
            return Err(failure("open", endpoint));
        };
        let socket =
            Self { raw, endpoint: endpoint.clone(), _context: context.clone(), _not_sync: PhantomData };
        socket.set(ffi::LINGER, if matches!(kind, Kind::Push | Kind::Xpub) { LINGER_MS } else { 0 })?;
        socket.set(ffi::RECONNECT_IVL, RECONNECT_MS)?;
        socket.set(ffi::RECONNECT_IVL_MAX, RECONNECT_MS_MAX)?;
        socket.set(ffi::RCVHWM, 0)?;
        socket.set(ffi::SNDHWM, 0)?;
        socket.set_message_bytes_max(WIRE_MESSAGE_BYTES_MAX)?;
        match kind {
            Kind::Xpub => {
                // Wait instead of dropping; report every rank that joins or leaves, although all have
                // the same subscription (VERBOSE alone reports only the last one to leave).
                socket.set(ffi::XPUB_NODROP, 1)?;
                socket.set(ffi::XPUB_VERBOSER, 1)?;
            }
            Kind::Sub => socket.set_bytes(ffi::SUBSCRIBE, b"")?,
            Kind::Push | Kind::Pull => {}
        }
        Ok(socket)
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Bounds the messages queued for each connected peer; at least one.
    pub(super) fn set_send_queue_len(&self, messages: i32) -> Result<()> {
        // Zero would mean "no limit" to libzmq.
        self.set(ffi::SNDHWM, messages.max(1))
    }

    /// Closing waits for nothing: what the peer has not taken is thrown away.
    pub(super) fn set_no_linger(&self) -> Result<()> {
        self.set(ffi::LINGER, 0)
    }

    /// A peer that announces a larger message is disconnected before anything is allocated.
    pub(super) fn set_message_bytes_max(&self, bytes: usize) -> Result<()> {
        self.set(ffi::MAXMSGSIZE, bytes as i64)
    }

    /// Binds the endpoint for peers of this process's own user only.
    pub(super) fn bind(&self) -> Result<()> {
        let uid: libc::uid_t = rustix::process::geteuid().as_raw();
        self.set(ffi::IPC_FILTER_UID, uid)?;
        let name = self.name("bind")?;
        // SAFETY: the socket is open and the name is a C string.
        self.check("bind", unsafe { ffi::zmq_bind(self.raw.as_ptr(), name.as_ptr()) })
    }

    /// Takes connections of a TCP socket that listens already, instead of binding; only from those who know the
    /// public key of `secret`.
    pub(super) fn bind_secure(&self, listener: OwnedFd, secret: &CurveSecret) -> Result<()> {
        self.set(ffi::CURVE_SERVER, 1)?;
        self.set_text(ffi::CURVE_SECRETKEY, secret.text())?;
        let name = self.name("bind")?;
        // libzmq closes it with the socket.
        self.set(ffi::USE_FD, listener.into_raw_fd())?;
        // SAFETY: the socket is open and the name is a C string.
        self.check("bind", unsafe { ffi::zmq_bind(self.raw.as_ptr(), name.as_ptr()) })
    }

    /// Connects to whoever has the secret key of `server`.
    pub(super) fn connect_secure(&self, server: &CurvePublic) -> Result<()> {
        let (public, secret) = curve::fresh()?;
        self.set_text(ffi::CURVE_SERVERKEY, server.text())?;
        self.set_text(ffi::CURVE_PUBLICKEY, public.text())?;
        self.set_text(ffi::CURVE_SECRETKEY, secret.text())?;
        self.connect()
    }

    /// Connects; succeeds before anybody has bound the endpoint.
    pub(super) fn connect(&self) -> Result<()> {
        let name = self.name("connect")?;
        // SAFETY: the socket is open and the name is a C string.
        self.check("connect", unsafe { ffi::zmq_connect(self.raw.as_ptr(), name.as_ptr()) })
    }

    /// Hands over one message now; false when the queue of a peer is full.
    pub(super) fn try_send(&self, bytes: &[u8]) -> Result<bool> {
        self.send_with(bytes, ffi::DONTWAIT)
    }

    /// Hands over one message, waiting at most `patience` for room.
    pub(super) fn send(&self, bytes: &[u8], patience: Duration) -> Result<()> {
        if self.try_send(bytes)? {
            return Ok(());
        }
        // Not poll(): libzmq reports an XPUB socket as writable even when NODROP refuses.
        let start = Instant::now();
        while let Some(left) = patience.checked_sub(start.elapsed()) {
            self.set(ffi::SNDTIMEO, millis(left) as c_int)?;
            if self.send_with(bytes, 0)? {
                return Ok(());
            }
        }
        Err(LinkError::Full { endpoint: self.endpoint.clone(), waited_ms: patience.as_millis() as u64 })
    }

    /// False on EAGAIN; an interrupted call is repeated (with its full time-out: signals are rare
    /// and the caller's loop measures the whole wait).
    fn send_with(&self, bytes: &[u8], flags: c_int) -> Result<bool> {
        loop {
            // SAFETY: the socket is open; libzmq copies `len` bytes from a valid slice.
            let rc = unsafe { ffi::zmq_send(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len(), flags) };
            match (rc, errno()) {
                (0.., _) => return Ok(true),
                (_, libc::EAGAIN) => return Ok(false),
                (_, libc::EINTR) => {}
                _ => return Err(failure("send on", &self.endpoint)),
            }
        }
    }

    /// Takes one message if there is one and gives its bytes to `read`.
    pub(super) fn try_recv<R>(&self, read: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        let mut message = Frame::new();
        loop {
            // SAFETY: the socket is open and the frame initialised.
            let rc = unsafe { ffi::zmq_msg_recv(&mut message.0, self.raw.as_ptr(), ffi::DONTWAIT) };
            match (rc, errno()) {
                (0.., _) => return Ok(Some(read(message.bytes()))),
                (_, libc::EAGAIN) => return Ok(None),
                (_, libc::EINTR) => {}
                _ => return Err(failure("receive on", &self.endpoint)),
            }
        }
    }

    /// Waits until a message may be there: true, or false after `patience` (`None`: for ever).
    pub(super) fn wait_readable(&self, patience: Option<Duration>) -> Result<bool> {
        let start = Instant::now();
        loop {
            let timeout_ms = match patience {
                None => -1,
                Some(patience) => millis(patience.saturating_sub(start.elapsed())),
            };
            let mut item =
                ffi::PollItem { socket: self.raw.as_ptr(), fd: 0, events: ffi::POLLIN, revents: 0 };
            // SAFETY: one initialised item with an open socket.
            let rc = unsafe { ffi::zmq_poll(&mut item, 1, timeout_ms) };
            match (rc, errno()) {
                (1.., _) => return Ok(true),
                (0, _) => return Ok(false),
                (_, libc::EINTR) => {}
                _ => return Err(failure("wait on", &self.endpoint)),
            }
        }
    }

    /// The descriptor that signals "look again" (edge-triggered, readable even for writes). It
    /// belongs to the socket and closes with it.
    pub(super) fn signal_fd(&self) -> Result<RawFd> {
        let mut fd: c_int = -1;
        let mut len = size_of::<c_int>();
        // SAFETY: the socket is open; `fd` has room for the `len` bytes of a C int.
        let rc = unsafe { ffi::zmq_getsockopt(self.raw.as_ptr(), ffi::FD, (&raw mut fd).cast(), &mut len) };
        self.check("inspect", rc).map(|()| fd)
    }

    fn name(&self, operation: &'static str) -> Result<CString> {
        CString::new(self.endpoint.0.as_str()).map_err(|e| LinkError::Socket {
            operation,
            endpoint: self.endpoint.clone(),
            reason: e.to_string(),
        })
    }

    fn set<T: Copy>(&self, option: c_int, value: T) -> Result<()> {
        // SAFETY: the socket is open; libzmq reads the bytes of a plain number (callers pass i32,
        // i64 and u32 only) and checks their count against the option.
        let rc = unsafe {
            ffi::zmq_setsockopt(self.raw.as_ptr(), option, (&raw const value).cast(), size_of::<T>())
        };
        self.check("configure", rc)
    }

    /// A key as text: libzmq wants the zero byte at its end, too.
    fn set_text(&self, option: c_int, text: &CStr) -> Result<()> {
        self.set_bytes(option, text.to_bytes_with_nul())
    }

    fn set_bytes(&self, option: c_int, value: &[u8]) -> Result<()> {
        // SAFETY: the socket is open and the slice valid for its length.
        let rc =
            unsafe { ffi::zmq_setsockopt(self.raw.as_ptr(), option, value.as_ptr().cast(), value.len()) };
        self.check("configure", rc)
    }

    fn check(&self, operation: &'static str, rc: c_int) -> Result<()> {
        if rc == 0 { Ok(()) } else { Err(failure(operation, &self.endpoint)) }
    }
}

/// A received message; frees libzmq's buffer when dropped.
struct Frame(ffi::Message);

impl Frame {
    fn new() -> Self {
        let mut frame = Self(ffi::Message([0; 64]));
        // SAFETY: points to 64 writable bytes of the right alignment; cannot fail. An empty message
        // holds no pointer into itself, so the value may move.
        unsafe { ffi::zmq_msg_init(&mut frame.0) };
        frame
    }

    fn bytes(&mut self) -> &[u8] {
        // SAFETY: the message is initialised; data and size describe its buffer, which lives until
        // the message is closed, that is, longer than this borrow.
        unsafe {
            let (data, len) = (ffi::zmq_msg_data(&mut self.0), ffi::zmq_msg_size(&self.0));
            if data.is_null() { &[] } else { std::slice::from_raw_parts(data.cast(), len) }
        }
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        // SAFETY: initialised by `new`, closed once.
        unsafe { ffi::zmq_msg_close(&mut self.0) };
    }
}

/// Milliseconds for libzmq, rounded up so that a short wait is not a busy loop.
fn millis(duration: Duration) -> c_long {
    duration.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as c_long
}

fn errno() -> c_int {
    // SAFETY: reads a thread-local number.
    unsafe { ffi::zmq_errno() }
}

/// The error of the call that just failed on this thread.
fn failure(operation: &'static str, endpoint: &Endpoint) -> LinkError {
    LinkError::Socket { operation, endpoint: endpoint.clone(), reason: reason() }
}

/// libzmq's words about the call that just failed on this thread.
pub(super) fn reason() -> String {
    // SAFETY: `zmq_strerror` returns a static C string for every number.
    let reason = unsafe { CStr::from_ptr(ffi::zmq_strerror(errno())) };
    reason.to_string_lossy().into_owned()
}
