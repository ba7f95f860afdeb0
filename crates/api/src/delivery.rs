//! HTTP/2 answers on their way to the client.
//!
//! A client that does not take its answer stalls an HTTP/1 connection as a whole, which
//! [`Connection::overdue`] sees. On HTTP/2 every answer has a window of its own: the connection goes on, and hyper
//! just asks for no more of that answer. So an HTTP/2 answer notes since when nobody asked ([`Delivery`]), and
//! whoever watches the connection gives it up: the request is aborted, its stream is reset, the others go on.
//!
//! **Invariant:** beside what a request's events may hold, an answer that is not taken occupies hyper's buffer of its
//! stream and one frame of its own, which is passed on in parts of [`PART_BYTES_MAX`].

use crate::connection::Connection;
use crate::respond::Answer;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{ConnectInfo, Request};
use axum::middleware::Next;
use http_body::{Frame, SizeHint};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

/// Bytes that are handed to hyper at once: what it has taken is out of our hands until the client reads it.
const PART_BYTES_MAX: usize = 16 << 10;

/// The outermost layer: answers of HTTP/2 connections become deliveries.
pub(crate) async fn deliver(
    ConnectInfo(connection): ConnectInfo<Connection>,
    request: Request,
    next: Next,
) -> Answer {
    let answer = next.run(request).await;
    if !connection.is_http_2() {
        return answer;
    }
    answer.map(|body| {
        let delivery = Arc::new(Delivery::new(body));
        connection.watch(&delivery);
        Body::new(Delivered(delivery))
    })
}

/// What hyper sends.
struct Delivered(Arc<Delivery>);

/// An answer, as seen by hyper and by whoever watches its connection.
#[derive(Debug)]
pub(crate) struct Delivery(Mutex<State>);

#[derive(Debug)]
struct State {
    /// `None`: given up.
    body: Option<Body>,
    /// What of the last frame hyper has not been given yet.
    rest: Bytes,
    /// Since when the next part waits to be asked for; `None`: hyper waits for it.
    untaken_since: Option<Instant>,
}

impl Delivery {
    /// Of an answer whose head is about to be sent.
    pub(crate) fn new(body: Body) -> Self {
        let untaken_since = Some(Instant::now());
        Self(Mutex::new(State { body: Some(body), rest: Bytes::new(), untaken_since }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("invariant: no body panics while it is polled")
    }

    /// For how long nobody has asked for more.
    pub(crate) fn untaken_for(&self, now: Instant) -> Duration {
        self.state().untaken_since.map_or(Duration::ZERO, |since| now.duration_since(since))
    }

    /// Ends the answer; its stream is reset when hyper asks for more of it.
    pub(crate) fn give_up(&self) {
        let mut state = self.state();
        state.rest = Bytes::new();
        let body = state.body.take();
        drop(state);
        // Out of the lock: this aborts the request.
        drop(body);
    }
}

impl State {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(body) = &mut self.body else {
            let error = io::Error::new(io::ErrorKind::TimedOut, "the client took no more of its answer");
            return Poll::Ready(Some(Err(axum::Error::new(error))));
        };
        if self.rest.is_empty() {
            match std::task::ready!(Pin::new(body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                end => return Poll::Ready(end),
            }
        }
        let part = self.rest.split_to(self.rest.len().min(PART_BYTES_MAX));
        Poll::Ready(Some(Ok(Frame::data(part))))
    }
}

impl HttpBody for Delivered {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut state = self.0.state();
        let polled = state.poll_frame(cx);
        state.untaken_since = polled.is_ready().then(Instant::now);
        polled
    }

    fn is_end_stream(&self) -> bool {
        let state = self.0.state();
        state.rest.is_empty() && state.body.as_ref().is_some_and(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match &*self.0.state() {
            State { body: Some(body), rest, .. } if rest.is_empty() => body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}
