//! Request bodies that are not read to their end, and what becomes of their connections.
//!
//! An answer may be made before its request's body has come: a refusal by the head, a body that is too large. On
//! HTTP/1 the rest of the body stands between the connection and its next request. What is small and on its way is
//! read, and the connection goes on. Otherwise the answer is sent at once and says that the connection closes; what
//! still comes is read and thrown away for a while, since closing a socket with unread bytes resets it, and a client
//! that is still writing would lose its answer (RFC 9112, section 9.6).

use crate::respond::Answer;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, Request, header};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use lockstep_core::limits::HTTP_BODY_BYTES_MAX;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::timeout;

/// A body up to this length is waited for, so that its connection can go on ...
const AWAITED_BYTES_MAX: u64 = 64 << 10;
/// ... for so long.
const AWAITED_TIME: Duration = Duration::from_millis(50);
/// How much of an unread body is thrown away before the connection is closed, for how long, and for how long a client
/// may send nothing of it.
const DISCARDED_BYTES_MAX: usize = 8 * HTTP_BODY_BYTES_MAX;
const DISCARD_TIME: Duration = Duration::from_secs(5);
const DISCARD_SILENCE: Duration = Duration::from_secs(1);

/// The body of a request, as its handler reads it.
struct Watched {
    body: Option<Incoming>,
    rest: Arc<Rest>,
}

/// What a handler left of a body.
#[derive(Debug, Default)]
struct Rest(Mutex<Option<Incoming>>);

impl Rest {
    fn slot(&self) -> MutexGuard<'_, Option<Incoming>> {
        self.0.lock().expect("invariant: nothing panics while holding it")
    }
}

/// A request whose body is watched.
#[derive(Debug)]
pub(crate) struct Watch {
    rest: Arc<Rest>,
    /// The client sends the body only when it is told to go on.
    expects_continue: bool,
}

/// Has the body of `request` watched; [`Watch::settle`] must follow once its answer is made.
pub(crate) fn watch(request: Request<Incoming>) -> (Request<Body>, Watch) {
    let rest = Arc::new(Rest::default());
    let expects_continue = request.headers().contains_key(header::EXPECT);
    let watch = Watch { rest: rest.clone(), expects_continue };
    (request.map(|body| Body::new(Watched { body: Some(body), rest })), watch)
}

impl Watch {
    /// Deals with what the handler left of the body: `answer` says if the connection closes.
    pub(crate) async fn settle(self, answer: &mut Answer) {
        let Some(mut rest) = self.rest.slot().take() else { return };
        let is_small = rest.size_hint().upper().is_some_and(|bytes| bytes <= AWAITED_BYTES_MAX);
        if is_small && !self.expects_continue && timeout(AWAITED_TIME, read_out(&mut rest)).await == Ok(true)
        {
            return;
        }
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        if !self.expects_continue {
            // Beside the answer. The time limits only bound the courtesy.
            tokio::spawn(timeout(DISCARD_TIME, async move { read_out(&mut rest).await }));
        }
    }
}

/// Reads a body to its end; false when it breaks, falls silent or goes on for too long.
async fn read_out(body: &mut Incoming) -> bool {
    let mut left = DISCARDED_BYTES_MAX;
    loop {
        let next = std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx));
        match timeout(DISCARD_SILENCE, next).await {
            Ok(None) => return true,
            Ok(Some(Ok(frame))) => match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                Some(after) => left = after,
                None => return false,
            },
            Err(_) | Ok(Some(Err(_))) => return false,
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let rest = self.body.take().filter(|body| !body.is_end_stream());
        *self.rest.slot() = rest;
    }
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(cx);
        if let Poll::Ready(None) = polled {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}
