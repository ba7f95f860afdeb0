//! Who waits for which request: the table between the dispatcher and the handlers.
//!
//! **Invariants:** a request is in the table exactly while the engine may still send for it and
//! nobody has aborted it; taking it out and deciding its end is one step under one lock, so it is
//! aborted at most once and never after its finish. The lock is never held across an await.

use super::{Event, Outbound};
use lockstep_core::{Refusal, RequestId};
use lockstep_wire::{Delta, EngineInfo, ToApi, ToTokenizer};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::mpsc::{OwnedPermit, UnboundedSender};
use tokio::sync::{oneshot, watch};

/// An open request.
#[derive(Debug)]
pub(super) struct Entry {
    /// Where its events go.
    pub(super) sender: UnboundedSender<(usize, Event)>,
    /// Its index among the choices of the answer.
    pub(super) choice: usize,
    /// The tokenizer that took it.
    pub(super) tokenizer: usize,
    /// The reserved place of its abort.
    pub(super) abort: OwnedPermit<Outbound>,
}

impl Entry {
    /// Sends the abort behind the request itself.
    fn abort(self, id: RequestId) {
        self.abort.send(Outbound::Tokenizer(self.tokenizer, ToTokenizer::Abort(id)));
    }
}

/// Rank 0's answer to a query.
#[derive(Debug)]
pub(super) enum Reply {
    Info(Box<EngineInfo>),
    /// The recordings' files by rank, or why there are none.
    Flight(Result<Vec<String>, String>),
}

#[derive(Debug, Default)]
struct Table {
    requests: HashMap<RequestId, Entry>,
    queries: BTreeMap<u64, oneshot::Sender<Reply>>,
    /// Why new requests are refused.
    refusing: Option<Refusal>,
    /// Nothing more will come from the engine.
    closed: bool,
}

#[derive(Debug)]
pub(super) struct Registry {
    table: Mutex<Table>,
    /// Generations alive; drain waits for zero.
    answers: watch::Sender<usize>,
    pub(super) requests_open_max: usize,
}

/// The 503 of a full server.
pub(super) fn queue_full(requests_open_max: usize) -> Refusal {
    Refusal::unavailable(format!(
        "the server has {requests_open_max} requests open, its limit; try again later"
    ))
    .with_code("queue_full")
}

impl Registry {
    pub(super) fn new(requests_open_max: usize) -> Self {
        Self { table: Mutex::default(), answers: watch::Sender::new(0), requests_open_max }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("invariant: nothing panics while holding the table")
    }

    /// Opens the requests of one answer, all or none, and sends them. Both under the lock: from the
    /// moment an entry can be taken out and aborted, its request is on the way.
    pub(super) fn open(
        &self,
        entries: Vec<(RequestId, Entry)>,
        sends: Vec<(OwnedPermit<Outbound>, Outbound)>,
    ) -> Result<(), Refusal> {
        let mut table = self.table();
        if let Some(refusal) = &table.refusing {
            return Err(refusal.clone());
        }
        if table.requests.len() + entries.len() > self.requests_open_max {
            return Err(queue_full(self.requests_open_max));
        }
        table.requests.extend(entries);
        for (permit, message) in sends {
            permit.send(message);
        }
        self.answers.send_modify(|count| *count += 1);
        Ok(())
    }

    /// An answer is no longer wanted or complete; requests still open are aborted.
    pub(super) fn leave(&self, ids: &[RequestId]) {
        let left: Vec<_> = {
            let mut table = self.table();
            ids.iter().filter_map(|id| Some((*id, table.requests.remove(id)?))).collect()
        };
        if let Some((first, _)) = left.first() {
            tracing::info!(request = %first, requests = left.len(), "answer no longer wanted (the client left), aborting");
        }
        for (id, entry) in left {
            entry.abort(id);
        }
        self.answers.send_modify(|count| *count -= 1);
    }

    pub(super) fn expect_reply(&self, query: u64) -> Result<oneshot::Receiver<Reply>, Refusal> {
        let (sender, receiver) = oneshot::channel();
        let mut table = self.table();
        match &table.refusing {
            Some(refusal) if table.closed => Err(refusal.clone()),
            _ => {
                table.queries.insert(query, sender);
                Ok(receiver)
            }
        }
    }

    pub(super) fn forget_query(&self, query: u64) {
        self.table().queries.remove(&query);
    }

    pub(super) fn refusing(&self) -> Option<Refusal> {
        self.table().refusing.clone()
    }

    pub(super) fn requests_open(&self) -> usize {
        self.table().requests.len()
    }

    pub(super) fn stop_admission(&self, refusal: Refusal) {
        self.table().refusing.get_or_insert(refusal);
    }

    pub(super) fn close(&self, refusal: Refusal) -> usize {
        let requests = {
            let mut table = self.table();
            table.refusing = Some(refusal.clone());
            table.closed = true;
            table.queries.clear();
            std::mem::take(&mut table.requests)
        };
        let count = requests.len();
        for (id, entry) in requests {
            // Errors only when the answer was dropped meanwhile: then nobody waits.
            let _ = entry.sender.send((entry.choice, Event::Refused(refusal.clone())));
            entry.abort(id);
        }
        count
    }

    pub(super) async fn idle(&self) {
        let mut answers = self.answers.subscribe();
        // Errors only without a sender, and `self` owns it.
        let _ = answers.wait_for(|count| *count == 0).await;
    }

    fn deliver_delta(&self, delta: Delta) {
        let mut table = self.table();
        let id = delta.id;
        if delta.finish.is_none() {
            if let Some(entry) = table.requests.get(&id) {
                let _ = entry.sender.send((entry.choice, Event::Delta(delta)));
            }
            return;
        }
        let Some(entry) = table.requests.remove(&id) else { return };
        drop(table);
        let runs_on = delta.stop_string.is_some();
        let _ = entry.sender.send((entry.choice, Event::Delta(delta)));
        if runs_on {
            entry.abort(id);
        }
    }

    fn deliver_refusal(&self, id: RequestId, refusal: Refusal) {
        if let Some(entry) = self.table().requests.remove(&id) {
            let _ = entry.sender.send((entry.choice, Event::Refused(refusal)));
        }
    }

    fn deliver_reply(&self, query: u64, reply: Reply) {
        if let Some(sender) = self.table().queries.remove(&query) {
            // Errors only when nobody waits any more.
            let _ = sender.send(reply);
        }
    }
}

/// Takes what the engine sends to the api.
#[derive(Clone, Debug)]
pub struct EngineInbound {
    pub(super) registry: Arc<Registry>,
}

impl EngineInbound {
    /// Hands one message to whoever waits for it. Messages for requests that ended (late deltas
    /// after an abort) are ignored; so are start-up messages, which the launcher has consumed.
    pub fn deliver(&self, message: ToApi) {
        match message {
            ToApi::Deltas(deltas) => deltas.into_iter().for_each(|delta| self.registry.deliver_delta(delta)),
            ToApi::Refused { id, refusal } => self.registry.deliver_refusal(id, refusal),
            ToApi::EngineInfo(info) => self.registry.deliver_reply(info.query, Reply::Info(info)),
            ToApi::FlightWritten { query, result } => {
                self.registry.deliver_reply(query, Reply::Flight(result));
            }
            ToApi::Loading { .. } | ToApi::Ready(_) => {
                tracing::warn!("start-up message after start-up ignored")
            }
        }
    }
}
