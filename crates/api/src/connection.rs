//! One connection: clients that close only their sending half, and clients that keep the server waiting.
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
//!
//! The stream also notes when it last heard of its client ([`Activity`]), so that whoever serves it can end
//! connections that keep the server waiting ([`Connection::overdue`]).

use crate::config::Patience;
use crate::delivery::Delivery;
use crate::transport::Transport;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

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
    activity: Mutex<Activity>,
    /// HTTP/2 answers that are not sent yet, and some that are.
    deliveries: Mutex<Vec<Weak<Delivery>>>,
    turned_away: Option<usize>,
}

/// What the server waits for, and since when.
#[derive(Debug)]
struct Activity {
    /// Requests whose head is complete and whose answer is not.
    serving: usize,
    /// Since when nothing was asked and, on HTTP/1, nothing came: HTTP/2's pings are no reason to keep a connection.
    quiet_since: Instant,
    /// When the first byte of an incomplete request head came. On HTTP/2 that is not told apart from idleness.
    head_since: Option<Instant>,
    /// Since when the client has taken no byte of what waits for it.
    stalled_since: Option<Instant>,
    is_http_2: bool,
}

/// A way in which a client keeps the server waiting for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overdue {
    /// It asks nothing more.
    Idle,
    /// It has begun a request head and does not end it.
    Head,
    /// It does not take its answer.
    Stalled,
}

/// Counts a request as being served.
#[derive(Debug)]
pub(crate) struct Serving(Connection);

/// Keeps a half-closed connection alive while an answer is in the making.
#[derive(Debug)]
pub(crate) struct Hold(Connection);

impl Connection {
    /// `turned_away` holds the limit on connections of a server that has no place for this one.
    pub(crate) fn new(is_http_2: bool, turned_away: Option<usize>) -> Self {
        let activity = Activity {
            serving: 0,
            quiet_since: Instant::now(),
            head_since: None,
            stalled_since: None,
            is_http_2,
        };
        Self(Arc::new(Shared {
            holds: AtomicUsize::new(0),
            half_closed: watch::Sender::new(false),
            reader: Mutex::default(),
            activity: Mutex::new(activity),
            deliveries: Mutex::default(),
            turned_away,
        }))
    }

    /// The limit on connections, if this one is beyond it: all that is left to say is that.
    pub(crate) fn turned_away(&self) -> Option<usize> {
        self.0.turned_away
    }

    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.0.activity.lock().expect("invariant: nothing panics while holding it")
    }

    /// A request head is complete; its answer is being made and sent until the guard is dropped.
    pub(crate) fn serve(&self) -> Serving {
        let mut activity = self.activity();
        activity.serving += 1;
        activity.head_since = None;
        drop(activity);
        Serving(self.clone())
    }

    pub(crate) fn is_http_2(&self) -> bool {
        self.activity().is_http_2
    }

    /// Gives `delivery` up when the client does not take it ([`Self::overdue`]).
    pub(crate) fn watch(&self, delivery: &Arc<Delivery>) {
        let mut deliveries = self.deliveries();
        deliveries.retain(|delivery| delivery.strong_count() > 0);
        deliveries.push(Arc::downgrade(delivery));
    }

    fn deliveries(&self) -> MutexGuard<'_, Vec<Weak<Delivery>>> {
        self.0.deliveries.lock().expect("invariant: nothing panics while holding it")
    }

    /// Gives up the HTTP/2 answers of which the client has taken nothing for so long. True once it has left them for
    /// as long again and waits for no others: only closing the connection frees what is left of them.
    fn give_up_untaken(&self, patience: Duration) -> bool {
        let now = Instant::now();
        let deliveries: Vec<_> = self.deliveries().iter().filter_map(Weak::upgrade).collect();
        let mut left = 0;
        for delivery in &deliveries {
            let untaken = delivery.untaken_for(now);
            if untaken >= patience {
                delivery.give_up();
            }
            left += usize::from(untaken >= patience.saturating_mul(2));
        }
        left > 0 && left == self.activity().serving
    }

    /// Waits until the client is overdue, and says how. Never while it waits for an answer and takes it. Meanwhile
    /// gives up single answers that it does not take.
    ///
    /// Looks again after the shortest patience: nothing that begins meanwhile can be overdue earlier. So a
    /// connection costs one timer however many bytes pass.
    pub(crate) async fn overdue(&self, patience: &Patience) -> Overdue {
        loop {
            if self.give_up_untaken(patience.write) {
                return Overdue::Stalled;
            }
            let now = Instant::now();
            let (since, limit, what) = {
                let activity = self.activity();
                match (activity.stalled_since, activity.head_since) {
                    (Some(since), _) => (since, patience.write, Overdue::Stalled),
                    (None, Some(since)) => (since, patience.head, Overdue::Head),
                    (None, None) if activity.serving == 0 => {
                        (activity.quiet_since, patience.idle, Overdue::Idle)
                    }
                    (None, None) => (now, Duration::MAX, Overdue::Idle),
                }
            };
            let left = limit.saturating_sub(now.duration_since(since));
            if left.is_zero() {
                return what;
            }
            tokio::time::sleep(left.min(patience.shortest())).await;
        }
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

impl Drop for Serving {
    fn drop(&mut self) {
        let mut activity = self.0.activity();
        activity.serving -= 1;
        activity.quiet_since = Instant::now();
    }
}

impl Activity {
    /// Bytes came.
    fn heard(&mut self) {
        if self.serving == 0 && !self.is_http_2 {
            self.quiet_since = Instant::now();
            self.head_since.get_or_insert(self.quiet_since);
        }
    }

    /// The client took bytes, or did not.
    fn wrote<T>(&mut self, result: &Poll<io::Result<T>>) {
        match result {
            Poll::Ready(_) => self.stalled_since = None,
            Poll::Pending => {
                self.stalled_since.get_or_insert_with(Instant::now);
            }
        }
    }
}

/// A [`Transport`] whose end of file is hidden while an answer is held.
pub(crate) struct ClientStream {
    transport: Transport,
    connection: Connection,
    /// Runs from the end of file; hidden until it elapses, and longer while an answer is held.
    grace: Option<Pin<Box<Sleep>>>,
}

impl ClientStream {
    /// The stream of `connection`.
    pub(crate) fn new(transport: Transport, connection: Connection) -> Self {
        Self { transport, connection, grace: None }
    }

    /// See [`Transport::reset_on_drop`].
    pub(crate) fn reset_on_drop(&self) {
        self.transport.reset_on_drop();
    }

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
            let result = self.transport.poll_read(cx, buf);
            let is_empty = buf.filled().len() == before;
            if !is_empty {
                self.connection.activity().heard();
            }
            let end_of_file = matches!(result, Poll::Ready(Ok(()))) && is_empty;
            if !end_of_file || buf.remaining() == 0 {
                return result;
            }
        }
        self.poll_end_of_file(cx)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = self.transport.write_half().poll_write(cx, buf);
        self.connection.activity().wrote(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = self.transport.write_half().poll_write_vectored(cx, bufs);
        self.connection.activity().wrote(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.transport.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = self.transport.write_half().poll_flush(cx);
        self.connection.activity().wrote(&result);
        result
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.transport.write_half().poll_shutdown(cx)
    }
}
