//! The broadcast of rank 0 to the other ranks of its replica: nothing lost, nothing reordered.
//!
//! A plain PUB socket drops what it cannot queue and what it sends before a subscriber has joined
//! (the first message 20 times of 20). Here the publisher counts acknowledged subscriptions before
//! its first message, waits when a queue is full (`NODROP`), and numbers messages, so that a fault
//! in any of this is a named error on the receiving rank instead of two ranks in different steps.

use super::curve::{CurvePublic, CurveSecret};
use super::socket::{Context, Kind, Socket};
use super::{Endpoint, LinkError, Result};
use lockstep_wire::{Broadcast, ToScheduler, decode, encode};
use serde::Serialize;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Messages that may wait for one rank before rank 0 has to wait.
const QUEUE_LEN_MAX: i32 = 1_000;

/// How long one look at the subscriptions may take while there are two sockets to look at.
const LOOK: Duration = Duration::from_millis(5);

/// Rank 0's end. **Used on rank 0 only.**
#[derive(Debug)]
pub struct BroadcastSender {
    socket: Socket,
    /// To ranks of other hosts.
    remote: Option<Socket>,
    sequence: u64,
    subscribed: usize,
    expected: Option<usize>,
    patience: Duration,
}

/// The wire form of [`Broadcast`] without owning the message (a prompt may be megabytes).
#[derive(Serialize)]
struct BroadcastRef<'a> {
    sequence: u64,
    stamp_ms: u64,
    message: &'a ToScheduler,
}

impl BroadcastSender {
    /// Binds `endpoint`. A later [`BroadcastSender::send`] waits at most `patience` for a slow rank.
    pub fn bind(context: &Context, endpoint: &Endpoint, patience: Duration) -> Result<Self> {
        let socket = Socket::new(context, Kind::Xpub, endpoint)?;
        socket.set_send_queue_len(QUEUE_LEN_MAX)?;
        socket.bind()?;
        Ok(Self { socket, remote: None, sequence: 0, subscribed: 0, expected: None, patience })
    }

    /// Sends to ranks of other hosts, too: over the TCP socket `listener`, which listens at `endpoint`, to those who
    /// know the public key of `secret`.
    pub fn add_remote(
        &mut self,
        context: &Context,
        (endpoint, listener): (&Endpoint, OwnedFd),
        secret: &CurveSecret,
    ) -> Result<()> {
        let socket = Socket::new(context, Kind::Xpub, endpoint)?;
        socket.set_send_queue_len(QUEUE_LEN_MAX)?;
        socket.bind_secure(listener, secret)?;
        self.remote = Some(socket);
        Ok(())
    }

    /// Returns when `ranks` subscriptions have arrived; must succeed once before the first
    /// [`BroadcastSender::send`]. Errors after `deadline` (from now) with the number that came.
    pub fn wait_for_subscribers(&mut self, ranks: usize, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            self.count_subscriptions()?;
            if self.subscribed >= ranks {
                self.expected = Some(ranks);
                return Ok(());
            }
            let left = deadline.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(self.missing(ranks, "at the end of the wait for them"));
            }
            let look = if self.remote.is_some() { left.min(LOOK) } else { left };
            for socket in self.sockets() {
                socket.wait_readable(Some(look))?;
            }
        }
    }

    /// Gives `message` to every rank, numbered and stamped. Waits while a rank's queue is full.
    ///
    /// Errors when a rank stays full too long, when one has left, or when the subscriptions were
    /// never waited for. No rank of this host has the message then, and its number is free again.
    pub fn send(&mut self, stamp_ms: u64, message: &ToScheduler) -> Result<()> {
        let expected = self.expected.ok_or_else(|| self.missing(0, "send without wait_for_subscribers"))?;
        self.count_subscriptions()?;
        if self.subscribed < expected {
            return Err(self.missing(expected, "before a message"));
        }
        let bytes = encode(&BroadcastRef { sequence: self.sequence, stamp_ms, message })
            .map_err(|source| LinkError::Wire { endpoint: self.socket.endpoint().clone(), source })?;
        for socket in self.sockets() {
            socket.send(&bytes, self.patience)?;
        }
        self.sequence += 1;
        Ok(())
    }

    /// Takes the notices of ranks that joined (first byte 1) or left (0).
    fn count_subscriptions(&mut self) -> Result<()> {
        let mut subscribed = self.subscribed;
        for socket in self.sockets() {
            while let Some(notice) = socket.try_recv(|bytes| bytes.first().copied())? {
                match notice {
                    Some(1) => subscribed += 1,
                    Some(0) => subscribed = subscribed.saturating_sub(1),
                    _ => {}
                }
            }
        }
        self.subscribed = subscribed;
        Ok(())
    }

    /// Remote ranks first: their socket is the one that can fail half-way.
    fn sockets(&self) -> impl Iterator<Item = &Socket> {
        self.remote.iter().chain([&self.socket])
    }

    fn missing(&self, expected: usize, when: &'static str) -> LinkError {
        let endpoint = self.socket.endpoint().clone();
        LinkError::Subscribers { endpoint, subscribed: self.subscribed, expected, when }
    }
}

/// The end of every other rank of the replica.
#[derive(Debug)]
pub struct BroadcastReceiver {
    socket: Socket,
    next_sequence: u64,
}

impl BroadcastReceiver {
    /// Subscribes to `endpoint`, which need not be bound yet.
    pub fn connect(context: &Context, endpoint: &Endpoint) -> Result<Self> {
        let socket = Socket::new(context, Kind::Sub, endpoint)?;
        socket.connect()?;
        Ok(Self { socket, next_sequence: 0 })
    }

    /// Subscribes to `endpoint` on another host, whose publisher has the secret key of `server`.
    pub fn connect_remote(context: &Context, endpoint: &Endpoint, server: &CurvePublic) -> Result<Self> {
        let socket = Socket::new(context, Kind::Sub, endpoint)?;
        socket.connect_secure(server)?;
        Ok(Self { socket, next_sequence: 0 })
    }

    /// The next broadcast, or `None` when none came within `timeout` (`None`: wait for ever).
    ///
    /// Errors with [`LinkError::Gap`] when it is not the one that was due.
    pub fn recv(&mut self, timeout: Option<Duration>) -> Result<Option<Broadcast>> {
        let start = Instant::now();
        loop {
            if let Some(broadcast) = self.try_recv()? {
                return Ok(Some(broadcast));
            }
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            if !self.socket.wait_readable(left)? {
                return Ok(None);
            }
        }
    }

    /// The next broadcast, if one is there. Errors as [`BroadcastReceiver::recv`].
    pub fn try_recv(&mut self) -> Result<Option<Broadcast>> {
        let decoded = self.socket.try_recv(decode::<Broadcast>)?.transpose();
        let broadcast =
            decoded.map_err(|source| LinkError::Wire { endpoint: self.socket.endpoint().clone(), source })?;
        if let Some(broadcast) = &broadcast {
            if broadcast.sequence != self.next_sequence {
                return Err(LinkError::Gap {
                    endpoint: self.socket.endpoint().clone(),
                    expected: self.next_sequence,
                    got: broadcast.sequence,
                });
            }
            self.next_sequence += 1;
        }
        Ok(broadcast)
    }
}
