//! PUSH/PULL: any number of senders, one receiver, per-sender order kept.

use super::socket::{Context, Kind, Socket};
use super::{Endpoint, LinkError, Result};
use lockstep_wire::{decode, encode};
use serde::{Serialize, de::DeserializeOwned};
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// The sending end of a link. One thread at a time (`Send`, not `Sync`).
#[derive(Debug)]
pub struct Sender<T> {
    socket: Socket,
    _message: PhantomData<fn(T)>,
}

impl<T: Serialize> Sender<T> {
    /// Connects to `endpoint`, which need not be bound yet: messages wait in the queue.
    /// At most `hwm` (>= 1) messages wait in this process.
    pub fn connect(context: &Context, endpoint: &Endpoint, hwm: i32) -> Result<Self> {
        let socket = Socket::new(context, Kind::Push, endpoint)?;
        socket.set_send_queue_len(hwm)?;
        socket.connect()?;
        Ok(Self { socket, _message: PhantomData })
    }

    /// Closing waits for nobody: what the receiver has not taken by then is thrown away. For a sender that is closed
    /// only when its receiver has left or is dead.
    pub fn without_linger(self) -> Result<Self> {
        self.socket.set_no_linger()?;
        Ok(self)
    }

    /// Queues `message` now; false when the queue is full.
    ///
    /// Errors when the message is larger than the wire limit.
    pub fn try_send(&self, message: &T) -> Result<bool> {
        self.socket.try_send(&self.encode(message)?)
    }

    /// Queues `message`, waiting for room at most `deadline` from now. The error
    /// ([`LinkError::Full`]) names the endpoint.
    pub fn send(&self, message: &T, deadline: Duration) -> Result<()> {
        self.socket.send(&self.encode(message)?, deadline)
    }

    fn encode(&self, message: &T) -> Result<Vec<u8>> {
        encode(message).map_err(|source| LinkError::Wire { endpoint: self.socket.endpoint().clone(), source })
    }
}

/// The receiving end of a link. One thread at a time (`Send`, not `Sync`).
#[derive(Debug)]
pub struct Receiver<T> {
    socket: Socket,
    _message: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Receiver<T> {
    /// Binds `endpoint`; an error if another process has it.
    pub fn bind(context: &Context, endpoint: &Endpoint) -> Result<Self> {
        let socket = Socket::new(context, Kind::Pull, endpoint)?;
        socket.bind()?;
        Ok(Self { socket, _message: PhantomData })
    }

    /// The next message, if one is there. A message that cannot be decoded is consumed and
    /// reported as [`LinkError::Wire`]; the link goes on.
    pub fn try_recv(&self) -> Result<Option<T>> {
        let decoded = self.socket.try_recv(decode)?;
        decoded
            .transpose()
            .map_err(|source| LinkError::Wire { endpoint: self.socket.endpoint().clone(), source })
    }

    /// The next message, or `None` when none came within `timeout` (`None`: wait for ever).
    pub fn recv(&self, timeout: Option<Duration>) -> Result<Option<T>> {
        let start = Instant::now();
        loop {
            if let Some(message) = self.try_recv()? {
                return Ok(Some(message));
            }
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            if !self.socket.wait_readable(left)? {
                return Ok(None);
            }
        }
    }

    /// See [`Socket::signal_fd`].
    pub(super) fn signal_fd(&self) -> Result<RawFd> {
        self.socket.signal_fd()
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        self.socket.endpoint()
    }
}
