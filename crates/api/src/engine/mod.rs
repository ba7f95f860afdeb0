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
//! - A request's abort goes to the tokenizer that took the request and is queued after it. Its
//!   place in the channel is reserved before the request is sent, so an abort can neither block
//!   nor get lost; the channel's capacity is thereby the bound on open requests.
//! - Memory per request: what a client does not read waits as text (`events`), so that `max_tokens` (or the
//!   context) bounds it.

pub mod dispatch;
mod events;
mod queries;
mod registry;

pub use registry::EngineInbound;

use crate::spans::Traced;
use crate::statistics::{Life, Statistics};
use events::EventReceiver;
use lockstep_core::{Refusal, RequestId, SamplingParams};
use lockstep_wire::{
    Delta, GenerateRequest, Prompt, TextParams, ToScheduler, ToTokenizer, TokenizeParams, Usage,
};
use registry::{Entry, Registry};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc::{self, OwnedPermit, error::TrySendError};
use tokio::time::Instant;

/// Places in the outbound channel beyond two per request: queries and shutdown messages.
const OUTBOUND_SPARE: usize = 64;

/// A message on its way out of the api.
#[derive(Clone, Debug, PartialEq)]
pub enum Outbound {
    /// For one tokenizer, by number.
    Tokenizer(usize, ToTokenizer),
    /// For rank 0.
    Scheduler(ToScheduler),
}

/// The engine's side of an [`EngineClient`].
#[derive(Debug)]
pub struct EngineLink {
    /// What to send, in order. Ends when every client is dropped.
    pub outbound: mpsc::Receiver<Outbound>,
    /// Where received messages go.
    pub inbound: EngineInbound,
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
    /// A client for `tokenizers` tokenizer processes (at least 1) that keeps at most
    /// `requests_open_max` requests open, and the link that the engine's side drives.
    pub fn new(tokenizers: usize, requests_open_max: usize) -> (Self, EngineLink) {
        let (outbound, outbound_rx) = mpsc::channel(2 * requests_open_max + OUTBOUND_SPARE);
        let registry = Arc::new(Registry::new(requests_open_max));
        let client = Self {
            outbound,
            tokenizers: tokenizers.max(1),
            next_request: Arc::new(AtomicU64::new(1)),
            next_query: Arc::new(AtomicU64::new(1)),
            registry: registry.clone(),
        };
        (client, EngineLink { outbound: outbound_rx, inbound: EngineInbound { registry } })
    }

    /// Submits the requests of one HTTP request; choice `i` of the answer is `requests[i]`. Each `n` in a row
    /// have the same prompt: they go to one tokenizer, so that they reach the scheduler in order and share the
    /// first one's prefill.
    ///
    /// Errors with a 503 when the server is draining, failed or full, and with a 400 when even an idle one could not
    /// take so many at once; then nothing was sent.
    pub(crate) fn submit(
        &self,
        requests: Vec<NewRequest>,
        n: usize,
        caller: Caller,
    ) -> Result<Generation, Refusal> {
        if requests.len() > self.requests_open_max() {
            return Err(too_many_choices(requests.len(), self.requests_open_max()));
        }
        let (sender, events) = events::channel(requests.len());
        let mut entries = Vec::with_capacity(requests.len());
        let mut sends = Vec::with_capacity(requests.len());
        let mut tokenizer = 0;
        let now = Instant::now();
        for (choice, request) in requests.into_iter().enumerate() {
            let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
            if choice % n.max(1) == 0 {
                tokenizer = (id.0 % self.tokenizers as u64) as usize;
            }
            let (send, abort) = (self.reserve()?, self.reserve()?);
            let entry = Entry {
                sender: sender.clone(),
                choice,
                tokenizer,
                abort,
                usage: Usage::default(),
                asks_timing: request.text.timing,
                life: match &caller {
                    Caller::Client(traced) => Some(Life::new(now, traced.clone())),
                    Caller::HealthCheck => None,
                },
            };
            entries.push((id, entry));
            let NewRequest { prompt, tokenizing, sampling, text, cache_salt, priority } = request;
            let request = GenerateRequest { id, prompt, tokenizing, sampling, text, cache_salt, priority };
            let message = ToTokenizer::Generate(Box::new(request));
            sends.push((send, Outbound::Tokenizer(tokenizer, message)));
        }
        let ids = entries.iter().map(|(id, _)| *id).collect();
        self.registry.open(entries, sends)?;
        Ok(Generation { events, ids, names: Vec::new(), registry: self.registry.clone() })
    }

    /// A place in the outbound channel.
    fn reserve(&self) -> Result<OwnedPermit<Outbound>, Refusal> {
        self.outbound.clone().try_reserve_owned().map_err(|e| match e {
            TrySendError::Full(_) => registry::queue_full(self.registry.requests_open_max),
            TrySendError::Closed(_) => Refusal::unavailable("the engine is gone; the server is stopping"),
        })
    }

    /// Tells every tokenizer, then rank 0, to finish and exit. For the launcher, after
    /// [`serve`](crate::serve) returned; rank 0 passes it on to the other ranks and the
    /// detokenizer.
    pub async fn shutdown_children(&self) {
        for tokenizer in 0..self.tokenizers {
            // A closed channel means that the dispatcher is gone and with it the children's ears.
            let _ = self.outbound.send(Outbound::Tokenizer(tokenizer, ToTokenizer::Shutdown)).await;
        }
        let _ = self.outbound.send(Outbound::Scheduler(ToScheduler::Shutdown)).await;
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

    /// Some process does not answer, as far as can be seen: `/health` and its like say so, requests are still
    /// admitted, since it may answer again. `None`: all answer.
    pub fn set_suspicion(&self, suspicion: Option<String>) {
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
