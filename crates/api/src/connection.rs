//! One TCP connection: no delay, and clients that close only their sending half.
//!
//! A client may send its request and then shut down its sending side (`nc -N`, some proxies); it
//! still wants the answer. The kernel shows exactly the same end of file when a client has closed
//! everything, and only writing to it tells the two apart. So [`ClientStream`] keeps the end of
//! file from hyper, which would drop the request, as long as an answer is held ([`Hold`]), and the
//! answer, told by [`Connection::half_closed`], starts writing at once and keeps writing small
//! probes: a client that is gone answers with a reset, and the next write fails.
//!
//! A reset (RST) passes through and ends the connection at once.
//!
//! Known limit: hyper stops reading while bytes beyond the current request wait in its buffer. So
//! a client that pipelines and then leaves is noticed only when the server writes to it.

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Sleep;

/// How long an end of file stays hidden while no answer is held: enough for a complete request
/// that came just before it to be parsed and to take its hold.
const EOF_GRACE: Duration = Duration::from_millis(100);

/// What a handler can know about its connection. One per connection, shared.
#[derive(Clone, Debug)]
pub(crate) struct Connection(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Answers in the making.
    holds: AtomicUsize,
    /// Whether the client's sending half is closed.
    half_closed: watch::Sender<bool>,
    /// Woken when the last hold ends, so that hyper sees the end of file.
    reader: Mutex<Option<Waker>>,
}

/// Keeps a half-closed connection alive while an answer is in the making.
#[derive(Debug)]
pub(crate) struct Hold(Connection);

impl Connection {
    fn new() -> Self {
        let half_closed = watch::Sender::new(false);
        Self(Arc::new(Shared { holds: AtomicUsize::new(0), half_closed, reader: Mutex::default() }))
    }

    /// Starts an answer on this connection.
    pub(crate) fn hold(&self) -> Hold {
        self.0.holds.fetch_add(1, Ordering::Relaxed);
        Hold(self.clone())
    }

    /// Whether the client closed its sending half (or everything).
    pub(crate) fn is_half_closed(&self) -> bool {
        *self.0.half_closed.borrow()
    }

    /// Waits until the client closes its sending half (or everything).
    pub(crate) async fn half_closed(&self) {
        // Errors only without a sender, and `self` owns it.
        let _ = self.0.half_closed.subscribe().wait_for(|closed| *closed).await;
    }
}

impl Hold {
    /// The connection held.
    pub(crate) fn connection(&self) -> &Connection {
        &self.0
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let shared = &self.0.0;
        if shared.holds.fetch_sub(1, Ordering::Relaxed) == 1 {
            let waker = shared.reader.lock().expect("invariant: nothing panics while holding it").take();
            waker.into_iter().for_each(Waker::wake);
        }
    }
}

/// Accepts [`ClientStream`]s.
#[derive(Debug)]
pub(crate) struct ClientListener(pub(crate) TcpListener);

impl Listener for ClientListener {
    type Io = ClientStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (ClientStream, SocketAddr) {
        let (stream, peer) = Listener::accept(&mut self.0).await;
        // A streamed token must not wait for the acknowledgement of the one before it.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%peer, %error, "cannot set TCP_NODELAY");
        }
        (ClientStream { stream, connection: Connection::new(), grace: None }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl Connected<IncomingStream<'_, ClientListener>> for Connection {
    fn connect_info(stream: IncomingStream<'_, ClientListener>) -> Self {
        stream.io().connection.clone()
    }
}

/// A [`TcpStream`] whose end of file is hidden while an answer is held.
#[derive(Debug)]
pub(crate) struct ClientStream {
    stream: TcpStream,
    connection: Connection,
    /// Runs from the end of file; hidden until it elapses, and longer while an answer is held.
    grace: Option<Pin<Box<Sleep>>>,
}

impl ClientStream {
    /// Whether the end of file may be shown now; otherwise the task is woken when it may.
    fn poll_end_of_file(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connection.0.half_closed.send_replace(true);
        let grace = self.grace.get_or_insert_with(|| Box::pin(tokio::time::sleep(EOF_GRACE)));
        if grace.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        let shared = &self.connection.0;
        *shared.reader.lock().expect("invariant: nothing panics while holding it") = Some(cx.waker().clone());
        if shared.holds.load(Ordering::Relaxed) > 0 { Poll::Pending } else { Poll::Ready(Ok(())) }
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.grace.is_none() {
            let before = buf.filled().len();
            let result = Pin::new(&mut self.stream).poll_read(cx, buf);
            let end_of_file = matches!(result, Poll::Ready(Ok(()))) && buf.filled().len() == before;
            if !end_of_file || buf.remaining() == 0 {
                return result;
            }
        }
        self.poll_end_of_file(cx)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
