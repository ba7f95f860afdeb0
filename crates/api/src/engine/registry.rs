//! Who waits for which request: the table between the dispatcher and the handlers.
//!
//! **Invariants:** a request is in the table exactly while the engine may still send for it and
//! nobody has aborted it; taking it out and deciding its end is one step under one lock, so it is
//! aborted at most once and never after its finish. A request that moves to another replica gets another id, and
//! the old one is aborted. The lock is never held across an await.

use super::events::EventSender;
use super::replicas::{ReplicaStatus, Replicas, Replication, queue_full};
use super::{Event, Outbound};
use crate::statistics::{End, Life, Statistics};
use lockstep_core::{FinishReason, Refusal, RequestId};
use lockstep_wire::{Delta, EngineInfo, GenerateRequest, Ready, TextAnswer, ToApi, ToTokenizer, Usage};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::mpsc::{OwnedPermit, UnboundedSender};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

/// An open request.
#[derive(Debug)]
pub(super) struct Entry {
    /// As the answer knows it.
    pub(super) id: RequestId,
    /// Where its events go.
    pub(super) sender: EventSender,
    /// Its index among the choices of the answer.
    pub(super) choice: usize,
    /// The tokenizer that took it.
    pub(super) tokenizer: usize,
    /// The replica that answers it.
    pub(super) replica: usize,
    /// The request itself, until it has begun, where another replica could take it over.
    pub(super) request: Option<Box<GenerateRequest>>,
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
        let abort = ToTokenizer::Abort { id, replica: self.replica };
        self.abort.send(Outbound::Tokenizer(self.tokenizer, abort));
    }
}

/// A request on its way into the table and to its tokenizer.
#[derive(Debug)]
pub(super) struct Opening {
    /// Whose replica is not known yet.
    pub(super) entry: Entry,
    /// The same.
    pub(super) request: Box<GenerateRequest>,
    pub(super) send: OwnedPermit<Outbound>,
}

/// How a request that moves is sent again.
pub(super) struct Resending<'a> {
    /// A new id: nothing that the old replica still says of the request is taken for the new one's.
    pub(super) fresh_id: &'a dyn Fn() -> RequestId,
    /// Places for a request and for its abort.
    pub(super) places: &'a dyn Fn() -> Result<(OwnedPermit<Outbound>, OwnedPermit<Outbound>), Refusal>,
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

#[derive(Debug)]
struct Table {
    /// By the id that the engine knows.
    requests: HashMap<RequestId, Entry>,
    /// The ids by which the engine knows requests that were moved, by those that the answers know.
    moved: HashMap<RequestId, RequestId>,
    replicas: Replicas,
    /// The requests of the answers with a name; several answers may have the same.
    names: HashMap<String, Vec<RequestId>>,
    queries: BTreeMap<u64, Query>,
    /// Why new requests are refused.
    refusing: Option<Refusal>,
    /// Nothing more will come from the engine.
    closed: bool,
    /// Which process does not answer, and the replicas it concerns; none: the whole server.
    suspicion: Option<(String, Vec<usize>)>,
    statistics: Statistics,
}

/// An open question.
#[derive(Debug)]
struct Query {
    sender: oneshot::Sender<Reply>,
    /// The replica that was asked, if it was one.
    replica: Option<usize>,
}

impl Table {
    /// Takes the request out that the engine knows by `id`, which goes on elsewhere or is measured later.
    fn remove(&mut self, id: RequestId) -> Option<Entry> {
        let entry = self.requests.remove(&id)?;
        self.replicas.release(entry.replica, 1);
        Some(entry)
    }

    /// The same of one that has ended so.
    fn take(&mut self, id: RequestId, end: End) -> Option<Entry> {
        let mut entry = self.remove(id)?;
        self.count(id, &mut entry, end, Instant::now());
        Some(entry)
    }

    /// Takes out a request of an answer, with the id that the engine knows.
    fn take_of_answer(&mut self, id: RequestId, end: End) -> Option<(RequestId, Entry)> {
        let id = self.moved.get(&id).copied().unwrap_or(id);
        Some((id, self.take(id, end)?))
    }

    fn take_all(&mut self, end: End) -> HashMap<RequestId, Entry> {
        let mut all = std::mem::take(&mut self.requests);
        let now = Instant::now();
        for (id, entry) in &mut all {
            self.replicas.release(entry.replica, 1);
            self.count(*id, entry, end, now);
        }
        all
    }

    /// Measures a request that has ended, and tells of it where traces are collected.
    fn count(&mut self, id: RequestId, entry: &mut Entry, end: End, now: Instant) {
        if let Some(life) = entry.life.take() {
            self.statistics.ended(&life, end, entry.usage, now);
            life.trace(id, end, entry.usage, now);
        }
    }

    /// Sends a request, which has not begun, to another replica; what is left when it is refused there.
    fn resend(
        &mut self,
        (old, mut entry): (RequestId, Entry),
        mut request: Box<GenerateRequest>,
        resending: &Resending<'_>,
    ) -> Option<(Entry, Refusal)> {
        let (send, abort) = match (resending.places)() {
            Ok(places) => places,
            Err(refusal) => return Some((entry, refusal)),
        };
        let replica = match self.replicas.take(&request.prompt, request.cache_salt.as_deref(), 1) {
            Ok(replica) => replica,
            Err(refusal) => return Some((entry, refusal)),
        };
        let id = (resending.fresh_id)();
        (request.id, request.replica) = (id, replica);
        let tokenizer = entry.tokenizer;
        self.moved.insert(entry.id, id);
        let from = std::mem::replace(&mut entry.replica, replica);
        let old_abort = std::mem::replace(&mut entry.abort, abort);
        old_abort.send(Outbound::Tokenizer(tokenizer, ToTokenizer::Abort { id: old, replica: from }));
        entry.request = Some(request.clone());
        self.requests.insert(id, entry);
        send.send(Outbound::Tokenizer(tokenizer, ToTokenizer::Generate(request)));
        None
    }
}

#[derive(Debug)]
pub(super) struct Registry {
    table: Mutex<Table>,
    /// Where children that start later say that they are ready.
    ready: UnboundedSender<Ready>,
    /// Generations alive and questions open; drain waits for zero.
    answers: watch::Sender<usize>,
    pub(super) requests_open_max: usize,
    pub(super) replicas: usize,
}

impl Registry {
    pub(super) fn new(replication: Replication, ready: UnboundedSender<Ready>) -> Self {
        let table = Table {
            requests: HashMap::new(),
            moved: HashMap::new(),
            replicas: Replicas::new(replication),
            names: HashMap::new(),
            queries: BTreeMap::new(),
            refusing: None,
            closed: false,
            suspicion: None,
            statistics: Statistics::default(),
        };
        Self {
            table: Mutex::new(table),
            ready,
            answers: watch::Sender::new(0),
            requests_open_max: replication.total_open_max(),
            replicas: replication.replicas,
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("invariant: nothing panics while holding the table")
    }

    /// Opens the requests of one answer, all or none, and sends them; each `n` in a row have the same prompt and
    /// go to one replica. All under the lock: from the moment an entry can be taken out and aborted, its request is
    /// on the way.
    pub(super) fn open(&self, openings: Vec<Opening>, n: usize) -> Result<(), Refusal> {
        let mut table = self.table();
        if let Some(refusal) = &table.refusing {
            return Err(refusal.clone());
        }
        let mut taken = Vec::new();
        for group in openings.chunks(n.max(1)) {
            let GenerateRequest { prompt, cache_salt, .. } = &*group[0].request;
            match table.replicas.take(prompt, cache_salt.as_deref(), group.len()) {
                Ok(replica) => taken.push((replica, group.len())),
                Err(refusal) => {
                    taken.iter().for_each(|(replica, count)| table.replicas.release(*replica, *count));
                    return Err(refusal);
                }
            }
        }
        let replicas = taken.into_iter().flat_map(|(replica, count)| std::iter::repeat_n(replica, count));
        for (Opening { mut entry, mut request, send }, replica) in openings.into_iter().zip(replicas) {
            (entry.replica, request.replica) = (replica, replica);
            entry.request = (self.replicas > 1).then(|| request.clone());
            let tokenizer = entry.tokenizer;
            entry.life.iter().for_each(|_| table.statistics.submitted());
            table.requests.insert(request.id, entry);
            send.send(Outbound::Tokenizer(tokenizer, ToTokenizer::Generate(request)));
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
            ids.iter().filter_map(|id| table.take_of_answer(*id, End::Abort)).collect()
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
            let left = ids.iter().filter_map(|id| table.take_of_answer(*id, End::Left)).collect();
            for id in ids {
                table.moved.remove(id);
            }
            left
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
        replica: Option<usize>,
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
        table.queries.insert(query, Query { sender, replica });
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
        let table = self.table();
        table.refusing.clone().or_else(|| table.replicas.refusing())
    }

    pub(super) fn set_suspicion(&self, suspicion: Option<(String, Vec<usize>)>) {
        let mut table = self.table();
        let suspects = suspicion.as_ref().map(|(_, replicas)| &replicas[..]).unwrap_or_default();
        table.replicas.set_suspects(suspects);
        table.suspicion = suspicion;
    }

    /// Which process does not answer, where that keeps requests from being answered.
    pub(super) fn suspicion(&self) -> Option<String> {
        let table = self.table();
        let (text, replicas) = table.suspicion.as_ref()?;
        (replicas.is_empty() || !table.replicas.any_serving()).then(|| text.clone())
    }

    /// Changes what is known of the replicas.
    pub(super) fn with_replicas<T>(&self, change: impl FnOnce(&mut Replicas) -> T) -> T {
        change(&mut self.table().replicas)
    }

    pub(super) fn replica_status(&self) -> Vec<ReplicaStatus> {
        self.table().replicas.status()
    }

    /// A replica has gone: requests that have not begun move to others, the others end with `refusal`; how many
    /// moved and how many ended.
    pub(super) fn lose(
        &self,
        replica: usize,
        refusal: &Refusal,
        resending: &Resending<'_>,
    ) -> (usize, usize) {
        let (mut moved, mut ended) = (0, Vec::new());
        {
            let mut table = self.table();
            table.replicas.lose(replica, refusal.clone());
            table.queries.retain(|_, query| query.replica != Some(replica));
            let mut ids: Vec<RequestId> =
                table.requests.iter().filter(|(_, e)| e.replica == replica).map(|(id, _)| *id).collect();
            ids.sort_unstable();
            for id in ids {
                let Some(mut entry) = table.remove(id) else { continue };
                let left = match entry.request.take() {
                    Some(request) => table.resend((id, entry), request, resending),
                    None => Some((entry, refusal.clone())),
                };
                match left {
                    Some((mut entry, refusal)) => {
                        table.count(id, &mut entry, End::Failed, Instant::now());
                        ended.push((id, entry, refusal));
                    }
                    None => {
                        table.replicas.note_moved(replica);
                        moved += 1;
                    }
                }
            }
        }
        let count = ended.len();
        for (id, entry, refusal) in ended {
            entry.sender.send(entry.choice, Event::Refused(refusal));
            entry.abort(id);
        }
        (moved, count)
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
            table.take_all(End::Failed)
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
        table.replicas.renew();
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
        entry.request = None;
        if let Some(life) = &mut entry.life {
            statistics.delta(life, &delta, now);
        }
        delta.timing = delta.timing.filter(|_| entry.asks_timing);
        let Some(finish) = delta.finish else {
            return entry.sender.send(entry.choice, Event::Delta(delta));
        };
        let Some(entry) = table.take(id, finish.into()) else { return };
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
        if let Some(Query { sender, .. }) = self.table().queries.remove(&query) {
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
    /// after an abort) are ignored; so is the progress of a replica that loads while others serve.
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
            ToApi::Loading { .. } => {}
            ToApi::Ready(ready) => {
                let role = ready.role;
                if self.registry.ready.send(*ready).is_err() {
                    tracing::warn!("{role:?} says that it is ready, but nobody waits for it");
                }
            }
        }
    }
}
