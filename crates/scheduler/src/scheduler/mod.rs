//! The state machine: its state, and the messages it takes.
//!
//! **Invariants** (verified by [`Scheduler::check`]): a request is in the queue (waiting), in `running`, or
//! draining, and in one of them only; `running` is sorted by precedence; only running and draining requests
//! have pages; a page that a launched step uses is not freed before that step has completed.

mod admit;
mod check;
mod complete;
mod retract;
mod step;

use crate::config::{CachePolicy, SchedulerConfig};
use crate::digest::StepDigest;
use crate::entry::{Entries, Entry, Slot, State};
use crate::event::{Counters, Event};
use crate::queue::Queue;
use crate::request::Request;
use lockstep_core::{FinishReason, PageId, Refusal, RequestId, SamplingParams, StepId};
use lockstep_kvcache::{Hasher64, KvCache};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};

/// The scheduler of one rank. See the crate documentation for who calls what.
///
/// Serialized, it is a snapshot from which a copy takes the same decisions, steps in flight included; events
/// not yet taken are left out. Whoever restores one from a file calls [`Scheduler::check`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Scheduler {
    config: SchedulerConfig,
    context_max: usize,
    entries: Entries,
    queue: Queue,
    /// Prefilling and decoding requests, by precedence: the last one is retracted first.
    running: Vec<Slot>,
    kv: KvCache,
    /// Steps planned and not completed, oldest first.
    launched: VecDeque<Launched>,
    /// Records of completed steps, for reuse.
    #[serde(skip)]
    spare: Vec<Launched>,
    next_step: StepId,
    /// Submissions so far; the next request's arrival number.
    arrivals: u64,
    /// Waiting and running requests with a deadline, soonest first.
    deadlines: BTreeSet<(u64, Slot)>,
    growth: admit::GrowthEstimate,
    turns: step::Turns,
    /// Changes when a request starts or stops prefilling: prefix waits are decided anew.
    prefill_epoch: u64,
    #[serde(skip)]
    events: Vec<Event>,
    digest: StepDigest,
    /// Everything submitted, aborted and flushed so far.
    inputs_hash: Hasher64,
    tokens_hash: Hasher64,
    /// Totals kept up to date; the gauges are filled in by [`Scheduler::counters`].
    totals: Counters,
    #[serde(skip)]
    scratch: Scratch,
}

/// What must be remembered of a step until it completes.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Launched {
    step: StepId,
    rows: Vec<LaunchedRow>,
    /// Pages replaced by equal cached ones that this step still uses; freed when it completes.
    duplicates: Vec<PageId>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct LaunchedRow {
    slot: Slot,
    /// Position after its last token.
    end: usize,
    samples: bool,
}

/// Buffers that live only within one call and keep their memory.
#[derive(Debug, Default)]
struct Scratch {
    candidates: Vec<Slot>,
    /// Running requests that get a decode row.
    decoding: Vec<Slot>,
    /// Running requests whose prefill has not completed, in the order in which they get tokens.
    prefilling: Vec<Slot>,
    duplicates: Vec<PageId>,
}

impl Scheduler {
    /// A scheduler with an empty pool. Panics unless `config.validate()` is `Ok`.
    pub fn new(config: SchedulerConfig) -> Self {
        if let Err(error) = config.validate() {
            panic!("the scheduler's configuration was not validated: {error}");
        }
        let cache_prefixes = config.cache == CachePolicy::Radix;
        Self {
            context_max: config.context_max.min(config.num_pages * config.page_size),
            kv: KvCache::new(config.page_size, config.num_pages, cache_prefixes, config.track_freed),
            config,
            entries: Entries::default(),
            queue: Queue::default(),
            running: Vec::new(),
            launched: VecDeque::new(),
            spare: Vec::new(),
            next_step: 0,
            arrivals: 0,
            deadlines: BTreeSet::new(),
            growth: admit::GrowthEstimate::default(),
            turns: step::Turns::default(),
            prefill_epoch: 0,
            events: Vec::new(),
            digest: StepDigest::default(),
            inputs_hash: Hasher64::new(1),
            tokens_hash: Hasher64::new(2),
            totals: Counters::default(),
            scratch: Scratch::default(),
        }
    }

    /// The configuration it was built with.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The context limit in force, in tokens of prompt plus answer: the configured one or what the pool
    /// holds, if that is less. Every request within it can run alone, so it always gets done.
    pub fn context_max(&self) -> usize {
        self.context_max
    }

    /// Queues a request. All ranks must call it with the same arguments, in the same order. `now_ms` is
    /// rank 0's stamp; see [`advance`](Self::advance).
    ///
    /// An answer has at most `context_max - prompt` tokens; a larger `max_tokens` is clipped to that.
    ///
    /// Errors: an empty prompt, a prompt that leaves no room for one token in the context or the pool, an
    /// id in use, `allowed_token_ids` of which none may come first, a full queue (503). A refused request leaves no trace.
    pub fn submit(&mut self, request: Request, now_ms: u64) -> Result<(), Refusal> {
        self.advance(now_ms);
        self.hash_input(1, request.id);
        for &token in &request.prompt {
            self.inputs_hash.word(u64::from(token));
        }
        self.check_request(&request)?;
        let entry = Entry::new(request, self.arrivals, self.context_max);
        self.arrivals += 1;
        let (precedence, deadline_ms) = (entry.precedence(), entry.deadline_ms);
        let slot = self.entries.insert(entry);
        self.queue.push(slot, precedence, true);
        if let Some(deadline_ms) = deadline_ms {
            self.deadlines.insert((deadline_ms, slot));
        }
        Ok(())
    }

    fn check_request(&self, request: &Request) -> Result<(), Refusal> {
        let prompt_len = request.prompt.len();
        if prompt_len == 0 {
            return Err(Refusal::invalid(
                "the prompt has 0 tokens, but at least 1 is needed; send a longer prompt",
            ));
        }
        if prompt_len >= self.config.context_max {
            return Err(Refusal::context_length(prompt_len, self.config.context_max));
        }
        if prompt_len >= self.context_max {
            let (pages, page_size) = (self.config.num_pages, self.config.page_size);
            return Err(Refusal::invalid_param(
                "messages",
                format!(
                    "the prompt has {prompt_len} tokens, but the KV pool holds {} tokens ({pages} pages of \
                     {page_size}) and one must remain for the answer; shorten the prompt to at most {} tokens or \
                     start the server with more pages",
                    self.context_max,
                    self.context_max - 1
                ),
            )
            .with_code("context_length_exceeded"));
        }
        if self.entries.slot_of(request.id).is_some() {
            let message = format!("request {} is already known; ids must be unique", request.id);
            return Err(Refusal::internal(message));
        }
        self.check_first_token(&request.sampling)?;
        // What has a running place free waits only for the next step: it does not count as waiting.
        let (open, config) = (self.queue.len() + self.running.len(), &self.config);
        if open >= config.max_running.saturating_add(config.waiting_max) {
            return Err(Refusal::unavailable(format!(
                "the queue is full: {open} requests are open, {} may run and {} wait; try again later",
                config.max_running, config.waiting_max
            ))
            .with_code("queue_full"));
        }
        Ok(())
    }

    /// Constraints that leave no first token need no step to be found out. What a grammar allows is not known here.
    fn check_first_token(&self, sampling: &SamplingParams) -> Result<(), Refusal> {
        let Some(allowed) = &sampling.allowed_token_ids else { return Ok(()) };
        let is_early = sampling.min_tokens > 0 && sampling.grammar.is_none();
        let ends = |id| self.config.eos_tokens.contains(id) || sampling.stop_token_ids.contains(id);
        let is_bad = |id: &_| sampling.bad_words.iter().any(|word| word[..] == [*id]);
        if !allowed.iter().all(|id| is_bad(id) || (is_early && ends(id))) {
            return Ok(());
        }
        let count = allowed.len();
        let message = format!(
            "allowed_token_ids has {count} ids, but min_tokens or bad_words forbid each of them as the first token; \
             allow at least one more"
        );
        Err(Refusal::invalid_param("allowed_token_ids", message).with_code("no_token_left"))
    }

    /// Ends a request in whatever state it is, with one [`Event::Finished`]. Idempotent; unknown ids and
    /// requests that have ended already are ignored. Its pages are released at once or, when a launched step
    /// uses them, when that step completes.
    pub fn abort(&mut self, id: RequestId) {
        self.hash_input(2, id);
        if let Some(slot) = self.entries.slot_of(id) {
            self.abort_slot(slot);
        }
    }

    fn abort_slot(&mut self, slot: Slot) {
        let entry = &self.entries[slot];
        let event = Event::Finished { id: entry.id, finish: FinishReason::Abort, usage: entry.usage() };
        let (state, precedence) = (entry.state, entry.precedence());
        match state {
            State::Draining => return,
            State::Waiting => {
                self.queue.remove(precedence);
                self.remove(slot);
            }
            State::Running => self.end_running(slot),
        }
        self.events.push(event);
    }

    /// Tells the time, stamped by rank 0; requests whose deadline has come are aborted. Times may repeat; the
    /// scheduler uses them for nothing else.
    pub fn advance(&mut self, now_ms: u64) {
        while let Some(&(deadline_ms, slot)) = self.deadlines.first()
            && deadline_ms <= now_ms
        {
            self.hash_input(4, self.entries[slot].id);
            self.abort_slot(slot);
        }
    }

    /// Forgets all cached prefixes that no request holds.
    pub fn flush_cache(&mut self) {
        self.inputs_hash.word(3);
        self.kv.flush();
    }

    /// Moves all events since the last call to the end of `out`, oldest first.
    pub fn take_events(&mut self, out: &mut Vec<Event>) {
        out.append(&mut self.events);
    }

    /// Moves the pages freed since the last call to the end of `out` (only with `track_freed`). Poison them
    /// after planning a step and before launching it.
    pub fn take_freed_pages(&mut self, out: &mut Vec<PageId>) {
        self.kv.take_freed(out);
    }

    /// Whether any request waits, runs or drains.
    pub fn has_work(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Gauges and totals. O(1).
    pub fn counters(&self) -> Counters {
        let pages = self.kv.counts();
        let (waiting, running) = (self.queue.len(), self.running.len());
        Counters {
            waiting,
            running,
            draining: self.entries.len() - waiting - running,
            pages_free: pages.free,
            pages_cached: pages.cached,
            pages_held: pages.held,
            pages_total: pages.total,
            evicted_pages: self.kv.evicted_pages(),
            steps: self.next_step,
            steps_in_flight: self.launched.len(),
            ..self.totals
        }
    }

    /// Steps planned and not completed, oldest first, each with the number of tokens it samples.
    pub fn in_flight(&self) -> impl Iterator<Item = (StepId, usize)> {
        self.launched.iter().map(|l| (l.step, l.rows.iter().filter(|row| row.samples).count()))
    }

    /// The fingerprint of the last planned and all completed steps. O(1).
    pub fn digest(&self) -> StepDigest {
        self.digest
    }

    /// Whether the next step may hold a decode row of a running request. A pipeline's first stage launches a step long
    /// before the last one has sampled the tokens of those before it, so there a row waits for its input.
    fn may_decode(&self, slot: Slot) -> bool {
        let entry = &self.entries[slot];
        entry.can_decode() && (self.config.stages == 1 || entry.pending.is_none())
    }

    /// Takes a request that has been reported as ended out of `running`; its pages go at once or when
    /// the launched steps that use them have completed.
    fn end_running(&mut self, slot: Slot) {
        self.leave_running(slot);
        self.clear_deadline(slot);
        let entry = &mut self.entries[slot];
        if entry.launched > 0 {
            entry.state = State::Draining;
        } else {
            self.release(slot);
        }
    }

    /// Keeps what a request computed as cached prefix, gives its pages back and forgets it.
    fn release(&mut self, slot: Slot) {
        self.release_pages(slot);
        self.remove(slot);
    }

    /// Publishes what a request computed and empties its table. No launched step may use it.
    fn release_pages(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot];
        assert_eq!(entry.launched, 0, "invariant: pages of a launched step are not released");
        let duplicates = &mut self.scratch.duplicates;
        self.kv.publish(&entry.namespace, &entry.tokens[..entry.completed], &mut entry.table, duplicates);
        self.kv.free(duplicates);
        duplicates.clear();
        self.kv.release(&mut entry.table);
    }

    fn remove(&mut self, slot: Slot) {
        self.clear_deadline(slot);
        self.entries.remove(slot);
    }

    /// An ended request has no deadline.
    fn clear_deadline(&mut self, slot: Slot) {
        if let Some(deadline_ms) = self.entries[slot].deadline_ms.take() {
            self.deadlines.remove(&(deadline_ms, slot));
        }
    }

    fn enter_running(&mut self, slot: Slot) {
        self.entries[slot].state = State::Running;
        let at = self.running_position(slot).unwrap_or_else(|at| at);
        self.running.insert(at, slot);
        self.prefill_epoch += 1;
    }

    fn leave_running(&mut self, slot: Slot) {
        let at = self.running_position(slot).expect("invariant: a running request is in `running`");
        self.running.remove(at);
        self.prefill_epoch += 1;
    }

    /// Where a request is (`Ok`) or belongs (`Err`) in `running`.
    fn running_position(&self, slot: Slot) -> Result<usize, usize> {
        let precedence = self.entries[slot].precedence();
        self.running.binary_search_by_key(&precedence, |&other| self.entries[other].precedence())
    }

    fn hash_input(&mut self, kind: u64, id: RequestId) {
        self.inputs_hash.word(kind);
        self.inputs_hash.word(id.0);
    }
}
