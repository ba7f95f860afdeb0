//! The dispatcher: one task that owns the sockets, because they are not `Sync`.
//!
//! It runs on the api's event loop for the life of the server. A full socket delays everything
//! behind it, which keeps the order of a request and its abort; incoming messages are still taken
//! meanwhile, so a stalled tokenizer never stalls the text of running requests.

use super::{EngineLink, Outbound};
use crate::ApiError;
use lockstep_comm::{AsyncReceiver, LinkError, Sender};
use lockstep_wire::{ToApi, ToScheduler, ToTokenizer};
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long to wait before a full socket is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The sockets of the api process. Implemented over ZeroMQ below and by fakes in tests.
pub trait EngineSockets: Send {
    /// Sends without waiting; `Ok(false)` when the tokenizer's queue is full.
    fn try_send_tokenizer(&mut self, tokenizer: usize, message: &ToTokenizer) -> Result<bool, ApiError>;
    /// Sends to a replica's primary without waiting; `Ok(false)` when its queue is full.
    fn try_send_scheduler(&mut self, replica: usize, message: &ToScheduler) -> Result<bool, ApiError>;
    /// The next message for the api. Must be cancel-safe.
    fn recv(&mut self) -> impl Future<Output = Result<ToApi, ApiError>> + Send;
}

/// Moves messages both ways until every [`EngineClient`](crate::EngineClient) is dropped.
///
/// Errors when a socket fails; the caller should then fail the server.
pub async fn run<S: EngineSockets>(mut link: EngineLink, sockets: S) -> Result<(), ApiError> {
    run_on(&mut link, sockets).await
}

/// The same for a link that will be used again, with the sockets of another engine. Cancel-safe but for one
/// message that no socket had room for.
pub async fn run_on<S: EngineSockets>(link: &mut EngineLink, mut sockets: S) -> Result<(), ApiError> {
    let EngineLink { outbound, inbound, ready: _ } = link;
    let mut unsent: Option<Outbound> = None;
    loop {
        if let Some(message) = &unsent
            && try_send(&mut sockets, message)?
        {
            unsent = None;
        }
        tokio::select! {
            message = outbound.recv(), if unsent.is_none() => match message {
                Some(message) => unsent = Some(message),
                None => return Ok(()),
            },
            () = tokio::time::sleep(RETRY_INTERVAL), if unsent.is_some() => {}
            message = sockets.recv() => inbound.deliver(message?),
        }
    }
}

fn try_send<S: EngineSockets>(sockets: &mut S, message: &Outbound) -> Result<bool, ApiError> {
    match message {
        Outbound::Tokenizer(tokenizer, message) => sockets.try_send_tokenizer(*tokenizer, message),
        Outbound::Scheduler(replica, message) => sockets.try_send_scheduler(*replica, message),
    }
}

/// The ways to the primaries, shared with whoever starts replicas again.
#[derive(Clone, Debug, Default)]
pub struct SchedulerSenders(Arc<Mutex<Vec<Sender<ToScheduler>>>>);

impl SchedulerSenders {
    /// One per replica, in order.
    pub fn new(senders: Vec<Sender<ToScheduler>>) -> Self {
        Self(Arc::new(Mutex::new(senders)))
    }

    /// What is for `replica` goes to a new primary from now on.
    pub fn replace(&self, replica: usize, sender: Sender<ToScheduler>) {
        self.senders()[replica] = sender;
    }

    fn senders(&self) -> std::sync::MutexGuard<'_, Vec<Sender<ToScheduler>>> {
        self.0.lock().expect("invariant: nothing panics while holding it")
    }
}

/// The sockets of a real server, in the api process.
#[derive(Debug)]
pub struct LinkSockets {
    /// One per tokenizer process, by number.
    pub tokenizers: Vec<Sender<ToTokenizer>>,
    /// To the primary of each replica; the launcher puts another one in place of one that died.
    pub schedulers: SchedulerSenders,
    /// What tokenizers, rank 0 and the detokenizer send to the api.
    pub inbox: AsyncReceiver<ToApi>,
}

impl EngineSockets for LinkSockets {
    fn try_send_tokenizer(&mut self, tokenizer: usize, message: &ToTokenizer) -> Result<bool, ApiError> {
        let socket = &self.tokenizers[tokenizer];
        socket.try_send(message).map_err(|e| link_error(format!("tokenizer {tokenizer}"), e))
    }

    fn try_send_scheduler(&mut self, replica: usize, message: &ToScheduler) -> Result<bool, ApiError> {
        let sent = self.schedulers.senders()[replica].try_send(message);
        sent.map_err(|e| link_error(format!("the primary of replica {replica}"), e))
    }

    async fn recv(&mut self) -> Result<ToApi, ApiError> {
        self.inbox.recv().await.map_err(|e| link_error("api inbox", e))
    }
}

fn link_error(peer: impl Into<String>, cause: LinkError) -> ApiError {
    ApiError::Link { peer: peer.into(), cause: cause.to_string() }
}
