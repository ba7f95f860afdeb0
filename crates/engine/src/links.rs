//! The control plane of the server: the rank loop's links over ZeroMQ.

use crate::control::{ControlError, Follower, Outgoing, Primary, Result, Wait};
use lockstep_comm::link::curve::{CurvePublic, CurveSecret};
use lockstep_comm::link::{
    BroadcastReceiver, BroadcastSender, Context, Endpoint, LinkError, Receiver, Sender,
};
use lockstep_comm::watch::{BEAT_INTERVAL, Mark};
use lockstep_wire::{Broadcast, ToApi, ToDetokenizer, ToScheduler};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages that may wait in a socket towards the detokenizer or the api; beyond it they wait in
/// this process, so that a slow receiver never stops a step. What can pile up is bounded by the
/// tokens that running requests may still generate.
const QUEUE_LEN_MAX: i32 = 4096;

/// Messages taken from the inbox in one step, so that a flood cannot hold up decoding.
const MESSAGES_PER_STEP_MAX: usize = 256;

/// How often an idle rank 0 offers again what a slow receiver did not take.
const BACKLOG_PAUSE: Duration = Duration::from_millis(10);

/// How long [`Wait::Briefly`] is.
const BRIEF_PAUSE: Duration = Duration::from_millis(2);

/// Names of a replica's links.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankLinks {
    /// Which replica it is, to the detokenizer that all of them share (`dp_rank`).
    pub replica: usize,
    /// Requests to rank 0.
    pub inbox: Endpoint,
    /// Rank 0 to the other ranks.
    pub broadcast: Endpoint,
    /// Tokens to the detokenizer.
    pub detokenizer: Endpoint,
    /// Refusals and readiness to the api.
    pub api: Endpoint,
    /// The broadcast between hosts.
    pub remote: Option<RemoteBroadcast>,
}

/// A rank's end of the broadcast between hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum RemoteBroadcast {
    /// Rank 0's.
    Publish {
        /// Where it listens.
        endpoint: Endpoint,
        /// What it proves itself with.
        secret: CurveSecret,
        /// The socket that listens there, which a process inherits.
        #[serde(skip)]
        listener: Option<Arc<OwnedFd>>,
    },
    /// That of a rank on another host than rank 0's.
    Follow {
        /// Where rank 0 listens.
        endpoint: Endpoint,
        /// What it proves itself by.
        server: CurvePublic,
    },
}

impl RankLinks {
    /// Gives rank 0 the socket that the launcher opened for its broadcast between hosts.
    pub fn set_listener(&mut self, socket: OwnedFd) {
        if let Some(RemoteBroadcast::Publish { listener, .. }) = &mut self.remote {
            *listener = Some(Arc::new(socket));
        }
    }
}

impl From<LinkError> for ControlError {
    fn from(error: LinkError) -> Self {
        Self(error.to_string())
    }
}

/// Rank 0's links.
pub struct ZmqPrimary {
    replica: usize,
    inbox: Receiver<ToScheduler>,
    /// `None` in a replica of one rank: nobody listens.
    bus: Option<BroadcastSender>,
    detokenizer: Outbox<ToDetokenizer>,
    api: Outbox<ToApi>,
    start: Instant,
    mark: Option<Mark>,
}

impl ZmqPrimary {
    /// Binds the inbox and the broadcast, connects the rest, tells the detokenizer of the start, and waits until
    /// all `followers` have subscribed, so that no broadcast can be lost.
    pub fn open(context: &Context, links: &RankLinks, followers: usize, patience: Duration) -> Result<Self> {
        let mut bus = None;
        if followers > 0 {
            let mut sender = BroadcastSender::bind(context, &links.broadcast, patience)?;
            if let Some(RemoteBroadcast::Publish { endpoint, secret, listener }) = &links.remote {
                let Some(listener) = listener.as_ref().and_then(|listener| listener.try_clone().ok()) else {
                    return Err(ControlError("the launcher gave no socket for ranks of other hosts".into()));
                };
                sender.add_remote(context, (endpoint, listener), secret)?;
            }
            sender.wait_for_subscribers(followers, patience)?;
            bus = Some(sender);
        }
        let replica = links.replica;
        let mut detokenizer = Outbox::connect(context, &links.detokenizer)?;
        detokenizer.push(ToDetokenizer::ReplicaStarted { replica })?;
        Ok(Self {
            replica,
            inbox: Receiver::bind(context, &links.inbox)?,
            bus,
            detokenizer,
            api: Outbox::connect(context, &links.api)?,
            start: Instant::now(),
            mark: None,
        })
    }

    /// Beats on the watch page while it waits for messages.
    pub fn watched(self, mark: Option<Mark>) -> Self {
        Self { mark, ..self }
    }

    fn flush(&mut self) -> Result<()> {
        self.detokenizer.flush()?;
        self.api.flush()
    }

    fn is_flushed(&self) -> bool {
        self.detokenizer.waiting.is_empty() && self.api.waiting.is_empty()
    }

    /// Tells the api something outside a step (readiness).
    pub fn tell_api(&mut self, message: ToApi) -> Result<()> {
        self.api.push(message)
    }

    /// Tells the detokenizer that nothing follows and gives both receivers `patience` to take what is queued.
    pub fn finish(mut self, patience: Duration) -> Result<()> {
        self.detokenizer.push(ToDetokenizer::Shutdown)?;
        self.detokenizer.drain(patience)?;
        self.api.drain(patience)
    }
}

impl Primary for ZmqPrimary {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn receive(&mut self, wait: Wait, into: &mut Vec<ToScheduler>) -> Result<()> {
        self.flush()?;
        if wait == Wait::Briefly {
            into.extend(self.inbox.recv(Some(BRIEF_PAUSE))?);
        }
        while wait == Wait::UntilMessage && into.is_empty() {
            // With results still waiting for a slow receiver, look after them from time to time.
            let pause = if self.is_flushed() { BEAT_INTERVAL } else { BACKLOG_PAUSE };
            into.extend(self.inbox.recv(Some(pause))?);
            if let Some(mark) = &self.mark {
                mark.beat();
            }
            self.flush()?;
        }
        while into.len() < MESSAGES_PER_STEP_MAX {
            let Some(message) = self.inbox.try_recv()? else { break };
            into.push(message);
        }
        Ok(())
    }

    fn publish(&mut self, stamp_ms: u64, message: &ToScheduler) -> Result<()> {
        match &mut self.bus {
            Some(bus) => Ok(bus.send(stamp_ms, message)?),
            None => Ok(()),
        }
    }

    fn deliver(&mut self, out: Outgoing) -> Result<()> {
        match out {
            Outgoing::Begin(requests) => {
                self.detokenizer.push(ToDetokenizer::Begin { replica: self.replica, requests })
            }
            Outgoing::Step(tokens) => self.detokenizer.push(ToDetokenizer::Step(tokens)),
            Outgoing::Refused(id, refusal) => self.api.push(ToApi::Refused { id, refusal }),
            Outgoing::Info(info) => self.api.push(ToApi::EngineInfo(info)),
            Outgoing::CacheFlushed(query, pages) => self.api.push(ToApi::CacheFlushed { query, pages }),
            Outgoing::FlightWritten(query, result) => self.api.push(ToApi::FlightWritten { query, result }),
        }
    }
}

/// A sender that never waits: what the socket does not take now waits here, in order.
struct Outbox<T> {
    sender: Sender<T>,
    waiting: VecDeque<T>,
}

impl<T: Serialize> Outbox<T> {
    fn connect(context: &Context, endpoint: &Endpoint) -> Result<Self> {
        Ok(Self { sender: Sender::connect(context, endpoint, QUEUE_LEN_MAX)?, waiting: VecDeque::new() })
    }

    fn push(&mut self, message: T) -> Result<()> {
        self.flush()?;
        if !self.waiting.is_empty() || !self.sender.try_send(&message)? {
            self.waiting.push_back(message);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        while let Some(message) = self.waiting.front() {
            if !self.sender.try_send(message)? {
                break;
            }
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Sends everything that waits, at most for `patience` a message.
    fn drain(&mut self, patience: Duration) -> Result<()> {
        while let Some(message) = self.waiting.pop_front() {
            self.sender.send(&message, patience)?;
        }
        Ok(())
    }
}

/// The links of ranks 1...
pub struct ZmqFollower {
    bus: BroadcastReceiver,
    patience: Duration,
}

impl ZmqFollower {
    /// Subscribes to rank 0's broadcast.
    pub fn open(context: &Context, links: &RankLinks, patience: Duration) -> Result<Self> {
        let bus = match &links.remote {
            Some(RemoteBroadcast::Follow { endpoint, server }) => {
                BroadcastReceiver::connect_remote(context, endpoint, server)?
            }
            _ => BroadcastReceiver::connect(context, &links.broadcast)?,
        };
        Ok(Self { bus, patience })
    }
}

impl Follower for ZmqFollower {
    fn take(&mut self) -> Result<Broadcast> {
        self.bus.recv(Some(self.patience))?.ok_or_else(|| {
            ControlError(format!(
                "rank 0 announced a broadcast that did not arrive within {} ms; it is stopped or dead",
                self.patience.as_millis()
            ))
        })
    }
}
