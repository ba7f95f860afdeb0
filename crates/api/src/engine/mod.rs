//! The api's view of the engine: requests go out, text comes back.
//!
//! [`EngineClient`] is what handlers hold. It knows no socket: messages leave through one bounded
//! channel ([`EngineLink::outbound`]) and arrive through [`EngineInbound::deliver`]. In the server
//! one dispatcher task ([`dispatch`]) joins both to the ZeroMQ sockets; in tests a fake engine
//! does.
//!
//! **Invariants**
//! - Every submitted request ends in exactly one of: a delta with `finish`, a refusal, a failure,
//!   or an abort because the client left.
//! - A request's abort goes to the tokenizer that took the request, for its replica, and is queued after it. Its
//!   place in the channel is reserved before the request is sent, so an abort can neither block
//!   nor get lost; the channel's capacity is thereby the bound on open requests.
//! - Memory per request: what a client does not read waits as text (`events`), so that `max_tokens` (or the
//!   context) bounds it.

pub mod dispatch;
mod events;
mod queries;
mod registry;
mod replicas;
pub mod router;

pub use registry::EngineInbound;
pub use replicas::Replication;
pub(crate) use replicas::{ReplicaState, ReplicaStatus, together};

use crate::spans::Traced;
use crate::statistics::{Life, Statistics};
use events::EventReceiver;
use lockstep_core::{Refusal, RequestId, SamplingParams};
use lockstep_wire::{
    Delta, GenerateRequest, Prompt, Ready, TextParams, ToScheduler, ToTokenizer, TokenizeParams, Usage,
};
use registry::{Entry, Opening, Registry, Resending};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc::{self, OwnedPermit, error::TrySendError};
use tokio::time::Instant;

/// Places in the outbound channel beyond those of requests: queries and shutdown messages.
const OUTBOUND_SPARE: usize = 64;

/// A message on its way out of the api.
#[derive(Clone, Debug, PartialEq)]
pub enum Outbound {
    /// For one tokenizer, by number.
    Tokenizer(usize, ToTokenizer),
    /// For the primary of a replica, by number.
    Scheduler(usize, ToScheduler),
}

/// The engine's side of an [`EngineClient`].
#[derive(Debug)]
pub struct EngineLink {
    /// What to send, in order. Ends when every client is dropped.
    pub outbound: mpsc::Receiver<Outbound>,
    /// Where received messages go.
    pub inbound: EngineInbound,
    /// Children that have become ready since; for whoever starts replicas again.
    pub ready: Option<mpsc::UnboundedReceiver<Ready>>,
}

impl EngineLink {
    /// Throws away what was on its way to an engine that has gone.
    pub fn forget_sent(&mut self) {
        while self.outbound.try_recv().is_ok() {}
    }
}

/// Submits requests to the engine and receives their text. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EngineClient {
    outbound: mpsc::Sender<Outbound>,
    tokenizers: usize,
    next_request: Arc<AtomicU64>,
    next_query: Arc<AtomicU64>,
    registry: Arc<Registry>,
}

/// A request before it has an id.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NewRequest {
    pub(crate) prompt: Prompt,
    pub(crate) tokenizing: TokenizeParams,
    pub(crate) sampling: SamplingParams,
    pub(crate) text: TextParams,
    pub(crate) cache_salt: Option<String>,
    pub(crate) priority: i32,
}

/// On whose behalf a request runs.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    /// A client, whose requests are measured, and traced if so decided.
    Client(Option<Traced>),
    /// A health check, whose are not: `/metrics` tells of what clients get.
    HealthCheck,
}

/// What happens to an open request.
#[derive(Debug)]
pub(crate) enum Event {
    /// New text, possibly the last.
    Delta(Delta),
    /// Refused by a tokenizer or rank 0, or ended by the server; nothing follows.
    Refused(Refusal),
}

impl EngineClient {
    /// A client for `tokenizers` tokenizer processes (at least 1) and one replica that keeps at most
    /// `requests_open_max` requests open, and the link that the engine's side drives.
    pub fn new(tokenizers: usize, requests_open_max: usize) -> (Self, EngineLink) {
        Self::with_replicas(tokenizers, Replication::single(requests_open_max))
    }

    /// The same for several replicas.
    pub fn with_replicas(tokenizers: usize, replication: Replication) -> (Self, EngineLink) {
        // A request and its abort; where requests can move, once more at the same time.
        let places = if replication.replicas > 1 { 4 } else { 2 };
        let (outbound, outbound_rx) = mpsc::channel(places * replication.total_open_max() + OUTBOUND_SPARE);
        let (ready_tx, ready) = mpsc::unbounded_channel();
        let registry = Arc::new(Registry::new(replication, ready_tx));
        let client = Self {
            outbound,
            tokenizers: tokenizers.max(1),
            next_request: Arc::new(AtomicU64::new(1)),
            next_query: Arc::new(AtomicU64::new(1)),
            registry: registry.clone(),
        };
        let inbound = EngineInbound { registry };
        (client, EngineLink { outbound: outbound_rx, inbound, ready: Some(ready) })
    }

    /// Submits the requests of one HTTP request; choice `i` of the answer is `requests[i]`. Each `n` in a row
    /// have the same prompt: they go to one replica through one tokenizer, so that they reach its scheduler in order
    /// and share the first one's prefill.
    ///
    /// Errors with a 503 when the server is draining, failed or full, and with a 400 when even an idle one could not
    /// take so many at once; then nothing was sent.
    pub(crate) fn submit(
        &self,
        requests: Vec<NewRequest>,
        n: usize,
        caller: Caller,
    ) -> Result<Generation, Refusal> {
        let of_one_prompt = n.min(requests.len());
        let of_replica = self.requests_open_max() / self.replicas();
        for (choices, max) in [(requests.len(), self.requests_open_max()), (of_one_prompt, of_replica)] {
            if choices > max {
                return Err(too_many_choices(choices, max));
            }
        }
        let (sender, events) = events::channel(requests.len());
        let mut openings = Vec::with_capacity(requests.len());
        let mut tokenizer = 0;
        let now = Instant::now();
        for (choice, request) in requests.into_iter().enumerate() {
            let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
            if choice % n.max(1) == 0 {
                tokenizer = (id.0 % self.tokenizers as u64) as usize;
            }
            let (send, abort) = (self.reserve()?, self.reserve()?);
            let entry = Entry {
                id,
                sender: sender.clone(),
                choice,
                tokenizer,
                // The registry chooses it.
                replica: 0,
                request: None,
                abort,
                usage: Usage::default(),
                asks_timing: request.text.timing,
                life: match &caller {
                    Caller::Client(traced) => Some(Life::new(now, traced.clone())),
                    Caller::HealthCheck => None,
                },
            };
            let NewRequest { prompt, tokenizing, sampling, text, cache_salt, priority } = request;
            let request =
                GenerateRequest { id, replica: 0, prompt, tokenizing, sampling, text, cache_salt, priority };
            openings.push(Opening { entry, request: Box::new(request), send });
        }
        let ids = openings.iter().map(|opening| opening.request.id).collect();
        self.registry.open(openings, n)?;
        Ok(Generation { events, ids, names: Vec::new(), registry: self.registry.clone() })
    }

    /// A place in the outbound channel.
    fn reserve(&self) -> Result<OwnedPermit<Outbound>, Refusal> {
        self.outbound.clone().try_reserve_owned().map_err(|e| match e {
            TrySendError::Full(_) => replicas::queue_full(self.registry.requests_open_max),
            TrySendError::Closed(_) => Refusal::unavailable("the engine is gone; the server is stopping"),
        })
    }

    /// Tells every tokenizer, then the primary of every replica, to finish and exit. For the launcher, after
    /// [`serve`](crate::serve) returned; a primary passes it on to the other ranks of its replica and to the
    /// detokenizer, which ends with the last one.
    pub async fn shutdown_children(&self) {
        for tokenizer in 0..self.tokenizers {
            // A closed channel means that the dispatcher is gone and with it the children's ears.
            let _ = self.outbound.send(Outbound::Tokenizer(tokenizer, ToTokenizer::Shutdown)).await;
        }
        for replica in 0..self.replicas() {
            let _ = self.outbound.send(Outbound::Scheduler(replica, ToScheduler::Shutdown)).await;
        }
    }

    /// Why requests are refused at the moment, if they are.
    pub(crate) fn refusing(&self) -> Option<Refusal> {
        self.registry.refusing()
    }

    /// The engine has gone and another one is being started: open requests end with `cause`, new ones are refused
    /// until [`Self::resume`].
    pub fn interrupt(&self, cause: &str) {
        let refusal = Refusal::unavailable(format!("the engine is restarted: {cause}; try again later"));
        self.registry.close(refusal.with_code("engine_restarting"));
        self.registry.restarted();
        self.set_suspicion(None);
    }

    /// Another engine is ready: requests are admitted again, unless the server drains.
    pub fn resume(&self) {
        self.registry.resume();
    }

    /// Replica `replica` has gone and another one is being started in its place, while others serve. Its requests
    /// that have no token yet move to other replicas, the others end with `cause`; how many moved and how many ended.
    pub fn lose_replica(&self, replica: usize, cause: &str) -> (usize, usize) {
        let message = format!("replica {replica} is restarted: {cause}; try again");
        let refusal = Refusal::unavailable(message).with_code("engine_restarting");
        let resending = Resending {
            fresh_id: &|| RequestId(self.next_request.fetch_add(1, Ordering::Relaxed)),
            places: &|| Ok((self.reserve()?, self.reserve()?)),
        };
        self.registry.lose(replica, &refusal, &resending)
    }

    /// A new replica `replica` is ready, and its primary reads the inbox called `inbox`: it gets requests again.
    pub async fn rejoin_replica(&self, replica: usize, inbox: &str) {
        for tokenizer in 0..self.tokenizers {
            let started = ToTokenizer::ReplicaStarted { replica, inbox: inbox.into() };
            // A closed channel means that the dispatcher is gone, which the launcher sees as well.
            let _ = self.outbound.send(Outbound::Tokenizer(tokenizer, started)).await;
        }
        self.registry.with_replicas(|replicas| replicas.rejoin(replica));
    }

    /// Stops sending requests to a replica, or goes on with it; those that it has go on. Panics when there is no
    /// such replica.
    pub(crate) fn set_draining(&self, replica: usize, is_draining: bool) -> ReplicaStatus {
        self.registry.with_replicas(|replicas| {
            replicas.set_draining(replica, is_draining);
            replicas.status().swap_remove(replica)
        })
    }

    /// What the replicas do.
    pub(crate) fn replica_status(&self) -> Vec<ReplicaStatus> {
        self.registry.replica_status()
    }

    /// How requests are spread over the replicas.
    pub(crate) fn policy(&self) -> router::DpPolicy {
        self.registry.with_replicas(|replicas| replicas.policy())
    }

    /// Number of replicas.
    pub(crate) fn replicas(&self) -> usize {
        self.registry.replicas
    }

    /// Some process does not answer, as far as can be seen: requests are still admitted, since it may answer again.
    /// Where that concerns certain replicas only, requests go to others; where it concerns all that serve, or the
    /// whole server (`replicas` is empty), `/health` and its like say so. `None`: all answer.
    pub fn set_suspicion(&self, suspicion: Option<(String, Vec<usize>)>) {
        self.registry.set_suspicion(suspicion);
    }

    /// Which process does not answer at the moment.
    pub(crate) fn suspicion(&self) -> Option<String> {
        self.registry.suspicion()
    }

    /// Ends the open requests of the answers that go by `name`, or all open requests; how many there were. To
    /// their clients they have finished, with [`FinishReason::Abort`](lockstep_core::FinishReason::Abort).
    pub(crate) fn abort(&self, name: Option<&str>) -> usize {
        self.registry.abort(name)
    }

    /// What became of requests, and how long it took.
    pub(crate) fn statistics(&self) -> Statistics {
        self.registry.statistics()
    }

    /// Requests without a last delta.
    pub(crate) fn requests_open(&self) -> usize {
        self.registry.requests_open()
    }

    /// The bound on [`Self::requests_open`].
    pub(crate) fn requests_open_max(&self) -> usize {
        self.registry.requests_open_max
    }

    /// Refuses requests from now on; open ones go on.
    pub(crate) fn stop_admission(&self, refusal: Refusal) {
        self.registry.stop_admission(refusal);
    }

    /// Refuses requests from now on and ends the open ones with the same refusal; returns how
    /// many there were.
    pub(crate) fn close(&self, refusal: Refusal) -> usize {
        self.registry.close(refusal)
    }

    /// Waits until no answer is in the making: every [`Generation`] is dropped.
    pub(crate) async fn idle(&self) {
        self.registry.idle().await;
    }
}

/// The 400 for an answer of more choices than the server ever has open: it would be refused for ever.
fn too_many_choices(choices: usize, requests_open_max: usize) -> Refusal {
    let message = format!(
        "n makes {choices} choices (per prompt, times the prompts), but this server runs and keeps waiting \
         {requests_open_max} requests at most (--max-running and --max-waiting); ask for fewer choices, or for some in \
         a further request"
    );
    Refusal::invalid_param("n", message)
}

/// The open requests behind one HTTP answer.
///
/// Dropping it before the end aborts what is still open: this is how a client that leaves frees
/// its slot and pages, since axum drops the handler or the response body with the connection.
#[derive(Debug)]
pub(crate) struct Generation {
    events: EventReceiver,
    ids: Vec<RequestId>,
    /// What it can be aborted by.
    names: Vec<String>,
    registry: Arc<Registry>,
}

impl Generation {
    /// The next event and the index of its choice. Must not be called after the last choice ended.
    /// Cancel-safe.
    pub(crate) async fn next(&mut self) -> (usize, Event) {
        let gone = || (0, Event::Refused(Refusal::internal("the request ended without a last delta")));
        self.events.recv().await.unwrap_or_else(gone)
    }

    /// Lets the answer, or one choice of it, be aborted by `name`; see [`EngineClient::abort`].
    pub(crate) fn go_by(&mut self, name: &str, choice: Option<usize>) {
        let ids = match choice {
            None => &self.ids[..],
            Some(choice) => self.ids.get(choice..=choice).unwrap_or_default(),
        };
        self.registry.name(name, ids);
        self.names.push(name.into());
    }

    /// Number of choices.
    pub(crate) fn choices(&self) -> usize {
        self.ids.len()
    }

    /// The ids of the requests, by choice.
    pub(crate) fn ids(&self) -> &[RequestId] {
        &self.ids
    }

    /// The id of the first request: it names the answer.
    pub(crate) fn id(&self) -> RequestId {
        self.ids[0]
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.registry.leave(&self.ids, &self.names);
    }
}
