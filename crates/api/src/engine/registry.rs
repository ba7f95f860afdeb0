//! Who waits for which request: the table between the dispatcher and the handlers.
//!
//! **Invariants:** a request is in the table exactly while the engine may still send for it and
//! nobody has aborted it; taking it out and deciding its end is one step under one lock, so it is
//! aborted at most once and never after its finish. The lock is never held across an await.

use super::events::EventSender;
use super::{Event, Outbound};
use crate::statistics::{End, Life, Statistics};
use lockstep_core::{FinishReason, Refusal, RequestId};
use lockstep_wire::{Delta, EngineInfo, TextAnswer, ToApi, ToTokenizer, Usage};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::mpsc::OwnedPermit;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

/// An open request.
#[derive(Debug)]
pub(super) struct Entry {
    /// Where its events go.
    pub(super) sender: EventSender,
    /// Its index among the choices of the answer.
    pub(super) choice: usize,
    /// The tokenizer that took it.
    pub(super) tokenizer: usize,
    /// The reserved place of its abort.
    pub(super) abort: OwnedPermit<Outbound>,
    /// Token counts as last reported.
    pub(super) usage: Usage,
    /// It wants to be told where its time went.
    pub(super) asks_timing: bool,
    /// What is measured of it; of a health check's nothing.
    pub(super) life: Option<Life>,
}

impl Entry {
    /// Sends the abort behind the request itself.
    fn abort(self, id: RequestId) {
        self.abort.send(Outbound::Tokenizer(self.tokenizer, ToTokenizer::Abort(id)));
    }
}

/// The answer to a query, from rank 0 or a tokenizer.
#[derive(Debug)]
pub(super) enum Reply {
    Info(Box<EngineInfo>),
    /// Pages that a flush freed.
    Flushed(usize),
    /// A tokenizer's.
    Text(Result<TextAnswer, Refusal>),
    /// The recordings' files by rank, or why there are none.
    Flight(Result<Vec<String>, String>),
}

#[derive(Debug, Default)]
struct Table {
    requests: HashMap<RequestId, Entry>,
    /// The requests of the answers with a name; several answers may have the same.
    names: HashMap<String, Vec<RequestId>>,
    queries: BTreeMap<u64, oneshot::Sender<Reply>>,
    /// Why new requests are refused.
    refusing: Option<Refusal>,
    /// Nothing more will come from the engine.
    closed: bool,
    /// Which process does not answer.
    suspicion: Option<String>,
    statistics: Statistics,
}

impl Table {
    /// Takes a request out, which has ended so.
    fn take(&mut self, id: RequestId, end: End) -> Option<Entry> {
        let mut entry = self.requests.remove(&id)?;
        self.count(id, &mut entry, end, Instant::now());
        Some(entry)
    }

    /// Measures a request that has ended, and tells of it where traces are collected.
    fn count(&mut self, id: RequestId, entry: &mut Entry, end: End, now: Instant) {
        if let Some(life) = entry.life.take() {
            self.statistics.ended(&life, end, entry.usage, now);
            life.trace(id, end, entry.usage, now);
        }
    }
}

#[derive(Debug)]
pub(super) struct Registry {
    table: Mutex<Table>,
    /// Generations alive and questions open; drain waits for zero.
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
        entries.iter().filter(|(_, entry)| entry.life.is_some()).for_each(|_| table.statistics.submitted());
        table.requests.extend(entries);
        for (permit, message) in sends {
            permit.send(message);
        }
        self.answers.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Lets the requests of an answer be aborted by a name, until [`Self::leave`].
    pub(super) fn name(&self, name: &str, ids: &[RequestId]) {
        self.table().names.entry(name.into()).or_default().extend_from_slice(ids);
    }

    /// Ends the requests of the answers called `name`, or all; how many there were. Their clients get the
    /// end with what has come so far.
    pub(super) fn abort(&self, name: Option<&str>) -> usize {
        let aborted: Vec<_> = {
            let mut table = self.table();
            let mut ids: Vec<RequestId> = match name {
                Some(name) => table.names.get(name).cloned().unwrap_or_default(),
                None => table.requests.keys().copied().collect(),
            };
            ids.sort_unstable();
            ids.iter().filter_map(|id| Some((*id, table.take(*id, End::Abort)?))).collect()
        };
        let count = aborted.len();
        for (id, entry) in aborted {
            // Errors only when the answer was dropped meanwhile: then nobody waits.
            entry.sender.send(entry.choice, Event::Delta(abort_delta(id, entry.usage)));
            entry.abort(id);
        }
        count
    }

    /// An answer is no longer wanted or complete; requests still open are aborted.
    pub(super) fn leave(&self, ids: &[RequestId], names: &[String]) {
        let left: Vec<_> = {
            let mut table = self.table();
            for name in names {
                let Some(named) = table.names.get_mut(name) else { continue };
                named.retain(|id| !ids.contains(id));
                if named.is_empty() {
                    table.names.remove(name);
                }
            }
            ids.iter().filter_map(|id| Some((*id, table.take(*id, End::Left)?))).collect()
        };
        if let Some((first, _)) = left.first() {
            tracing::info!(request = %first, requests = left.len(), "answer no longer wanted (the client left), aborting");
        }
        for (id, entry) in left {
            entry.abort(id);
        }
        self.answers.send_modify(|count| *count -= 1);
    }

    /// Opens a query. Ones that are `work` are refused like requests: while the server drains, and when as many
    /// queries are open as requests may be.
    pub(super) fn expect_reply(
        &self,
        query: u64,
        is_work: bool,
    ) -> Result<oneshot::Receiver<Reply>, Refusal> {
        let (sender, receiver) = oneshot::channel();
        let mut table = self.table();
        match &table.refusing {
            Some(refusal) if table.closed || is_work => return Err(refusal.clone()),
            _ if is_work && table.queries.len() >= self.requests_open_max => {
                return Err(queue_full(self.requests_open_max));
            }
            _ => {}
        }
        table.queries.insert(query, sender);
        if is_work {
            self.answers.send_modify(|count| *count += 1);
        }
        Ok(receiver)
    }

    /// Closes a query that [`Self::expect_reply`] opened, answered or not.
    pub(super) fn forget_query(&self, query: u64, is_work: bool) {
        self.table().queries.remove(&query);
        if is_work {
            self.answers.send_modify(|count| *count -= 1);
        }
    }

    pub(super) fn refusing(&self) -> Option<Refusal> {
        self.table().refusing.clone()
    }

    pub(super) fn set_suspicion(&self, suspicion: Option<String>) {
        self.table().suspicion = suspicion;
    }

    pub(super) fn suspicion(&self) -> Option<String> {
        self.table().suspicion.clone()
    }

    pub(super) fn requests_open(&self) -> usize {
        self.table().requests.len()
    }

    pub(super) fn restarted(&self) {
        self.table().statistics.restarted();
    }

    pub(super) fn statistics(&self) -> Statistics {
        self.table().statistics.clone()
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
            let mut requests = std::mem::take(&mut table.requests);
            let now = Instant::now();
            requests.iter_mut().for_each(|(id, entry)| table.count(*id, entry, End::Failed, now));
            requests
        };
        let count = requests.len();
        for (id, entry) in requests {
            entry.sender.send(entry.choice, Event::Refused(refusal.clone()));
            entry.abort(id);
        }
        count
    }

    pub(super) fn resume(&self) {
        let mut table = self.table();
        (table.refusing, table.closed) = (None, false);
    }

    pub(super) async fn idle(&self) {
        let mut answers = self.answers.subscribe();
        // Errors only without a sender, and `self` owns it.
        let _ = answers.wait_for(|count| *count == 0).await;
    }

    fn deliver_delta(&self, mut delta: Delta, now: Instant) {
        let mut table = self.table();
        let Table { requests, statistics, .. } = &mut *table;
        let id = delta.id;
        let Some(entry) = requests.get_mut(&id) else { return };
        entry.usage = delta.usage;
        if let Some(life) = &mut entry.life {
            statistics.delta(life, &delta, now);
        }
        delta.timing = delta.timing.filter(|_| entry.asks_timing);
        let Some(finish) = delta.finish else {
            return entry.sender.send(entry.choice, Event::Delta(delta));
        };
        let Some(mut entry) = requests.remove(&id) else { return };
        table.count(id, &mut entry, finish.into(), now);
        drop(table);
        if finish == FinishReason::NoToken {
            let refusal = no_token_left(delta.usage.completion_tokens);
            // Before its first token an answer is nothing but the refusal.
            if !(delta.text.is_empty() && delta.tokens.is_empty()) {
                entry.sender.send(entry.choice, Event::Delta(Delta { finish: None, ..delta }));
            }
            return entry.sender.send(entry.choice, Event::Refused(refusal));
        }
        let runs_on = delta.stop_string.is_some();
        entry.sender.send(entry.choice, Event::Delta(delta));
        if runs_on {
            entry.abort(id);
        }
    }

    fn deliver_refusal(&self, id: RequestId, refusal: Refusal) {
        // Out of the lock, like every end.
        let refused = self.table().take(id, End::Refused);
        if let Some(entry) = refused {
            tracing::debug!(request = %id, refusal.status, refusal.message, "request refused by the engine");
            entry.sender.send(entry.choice, Event::Refused(refusal));
        }
    }

    fn deliver_reply(&self, query: u64, reply: Reply) {
        if let Some(sender) = self.table().queries.remove(&query) {
            // Errors only when nobody waits any more.
            let _ = sender.send(reply);
        }
    }
}

/// The answer to a request that forbids every token, after so many.
fn no_token_left(tokens: u32) -> Refusal {
    let message = format!(
        "no token is left to choose after {tokens} tokens of the answer: what the request asks of it (a form, \
         allowed_token_ids, bad_words, min_tokens) forbids every token of the model; relax one of them"
    );
    Refusal::invalid(message).with_code("no_token_left")
}

/// The end of a request that somebody aborted.
fn abort_delta(id: RequestId, usage: Usage) -> Delta {
    Delta {
        id,
        text: String::new(),
        tokens: Vec::new(),
        finish: Some(FinishReason::Abort),
        stop_string: None,
        usage,
        logprobs: None,
        echo: None,
        timing: None,
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
            ToApi::Deltas(deltas) => {
                let now = Instant::now();
                deltas.into_iter().for_each(|delta| self.registry.deliver_delta(delta, now));
            }
            ToApi::Refused { id, refusal } => self.registry.deliver_refusal(id, refusal),
            ToApi::EngineInfo(info) => self.registry.deliver_reply(info.query, Reply::Info(info)),
            ToApi::CacheFlushed { query, pages } => {
                self.registry.deliver_reply(query, Reply::Flushed(pages));
            }
            ToApi::TextAnswered { query, result } => {
                self.registry.deliver_reply(query, Reply::Text(result));
            }
            ToApi::FlightWritten { query, result } => {
                self.registry.deliver_reply(query, Reply::Flight(result));
            }
            ToApi::Loading { .. } | ToApi::Ready(_) => {
                tracing::warn!("start-up message after start-up ignored")
            }
        }
    }
}
