//! A [`Receiver`] inside a tokio runtime.

use super::{LinkError, Receiver, Result};
use serde::de::DeserializeOwned;
use std::os::fd::{AsRawFd, RawFd};
use tokio::io::{Interest, unix::AsyncFd};

/// The receiving end of a link for async code.
#[derive(Debug)]
pub struct AsyncReceiver<T> {
    // Declared first: it must leave the runtime before the socket closes the descriptor.
    signal: AsyncFd<SignalFd>,
    receiver: Receiver<T>,
}

/// libzmq's own descriptor; not closed here.
#[derive(Debug)]
struct SignalFd(RawFd);

impl AsRawFd for SignalFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

impl<T: DeserializeOwned> AsyncReceiver<T> {
    /// Registers `receiver` with the current tokio runtime. Panics outside of one.
    pub fn new(receiver: Receiver<T>) -> Result<Self> {
        let fd = SignalFd(receiver.signal_fd()?);
        // SAFETY: the descriptor stays open and the same for as long as the socket, and fields drop
        // in order: `signal` deregisters it before `receiver` closes the socket.
        let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
        let signal = registered.map_err(|e| Self::failure(&receiver, e.into()))?;
        Ok(Self { signal, receiver })
    }

    /// The next message. Cancel-safe: a message is taken only when it is returned.
    ///
    /// The descriptor says "something changed" once, on an edge, and not "a message is there". So
    /// the readiness is cleared *before* the socket is asked: whatever arrives after the question
    /// makes a new edge, and whatever arrived before it is found by the question, because
    /// a non-blocking receive handles all pending signals before it says "nothing".
    pub async fn recv(&mut self) -> Result<T> {
        // A long backlog must not starve the other tasks of the runtime.
        tokio::task::coop::consume_budget().await;
        loop {
            if let Some(message) = self.receiver.try_recv()? {
                return Ok(message);
            }
            let mut ready = self.signal.readable().await.map_err(|e| Self::failure(&self.receiver, e))?;
            ready.clear_ready();
        }
    }

    fn failure(receiver: &Receiver<T>, error: std::io::Error) -> LinkError {
        LinkError::Socket {
            operation: "watch",
            endpoint: receiver.endpoint().clone(),
            reason: error.to_string(),
        }
    }
}
