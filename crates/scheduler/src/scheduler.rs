//! The state machine itself.

use crate::config::SchedulerConfig;
use crate::digest::{Hasher64, StepDigest};
use crate::event::{Counters, Event, Usage};
use crate::plan::{PlanRow, RowInput, StepPlan};
use crate::request::Request;
use lockstep_core::{FinishReason, PageId, Refusal, RequestId, SamplingParams, StepId, TokenId};
use std::collections::VecDeque;
use std::sync::Arc;

struct Entry {
    id: RequestId,
    tokens: Vec<TokenId>,
    prompt_len: usize,
    length_max: usize,
    sampling: Arc<SamplingParams>,
    pages: Vec<PageId>,
    computed: usize,
    pending: Option<(StepId, u32)>,
    launched: u32,
    finished: bool,
}

/// See the crate documentation. First form: FCFS, worst-case page reservation.
pub struct Scheduler {
    config: SchedulerConfig,
    context_max: usize,
    waiting: VecDeque<Entry>,
    running: Vec<Entry>,
    free: Vec<PageId>,
    launched: VecDeque<(StepId, Vec<(RequestId, bool)>)>,
    next_step: StepId,
    events: Vec<Event>,
    digest: StepDigest,
    generated: u64,
}

impl Scheduler {
    /// A scheduler with an empty pool. Panics unless `config.validate()` is `Ok`.
    pub fn new(config: SchedulerConfig) -> Self {
        config.validate().expect("the configuration was validated");
        let context_max = config.context_max.min(config.num_pages * config.page_size);
        let free = (0..config.num_pages as PageId).rev().collect();
        Self {
            config,
            context_max,
            waiting: VecDeque::new(),
            running: Vec::new(),
            free,
            launched: VecDeque::new(),
            next_step: 0,
            events: Vec::new(),
            digest: StepDigest::default(),
            generated: 0,
        }
    }

    /// The context limit in force, in tokens: the configured one or what the pool holds, if less.
    pub fn context_max(&self) -> usize {
        self.context_max
    }

    /// Queues a request. All ranks must call it with the same arguments, in the same order.
    ///
    /// Errors: an empty prompt, a prompt that leaves no room for one token, an id in use, a full queue.
    pub fn submit(&mut self, request: Request, _now_ms: u64) -> Result<(), Refusal> {
        let prompt_len = request.prompt.len();
        if prompt_len >= self.context_max {
            return Err(Refusal::context_length(prompt_len, self.context_max));
        }
        if self.waiting.len() >= self.config.waiting_max {
            return Err(Refusal::unavailable("the waiting queue is full; try again later"));
        }
        let room = self.context_max - prompt_len;
        let max_tokens = request.sampling.max_tokens.map_or(room, |max| (max as usize).clamp(1, room));
        self.waiting.push_back(Entry {
            id: request.id,
            tokens: request.prompt,
            prompt_len,
            length_max: prompt_len + max_tokens,
            sampling: Arc::new(request.sampling),
            pages: Vec::new(),
            computed: 0,
            pending: None,
            launched: 0,
            finished: false,
        });
        Ok(())
    }

    /// Ends a request in whatever state it is. Idempotent; unknown ids are ignored.
    pub fn abort(&mut self, id: RequestId) {
        if let Some(at) = self.waiting.iter().position(|e| e.id == id) {
            let entry = self.waiting.remove(at).expect("invariant: the position was just found");
            self.events.push(Event::Finished { id, finish: FinishReason::Abort, usage: usage(&entry) });
        }
        if let Some(entry) = self.running.iter_mut().find(|e| e.id == id && !e.finished) {
            entry.finished = true;
            self.events.push(Event::Finished { id, finish: FinishReason::Abort, usage: usage(entry) });
            self.release_finished();
        }
    }

    /// Tells the time stamped by rank 0; requests past their deadline are aborted.
    pub fn advance(&mut self, _now_ms: u64) {}

    /// Forgets all cached prefixes that no request holds.
    pub fn flush_cache(&mut self) {}

    /// [`plan_into`](Self::plan_into) with a fresh plan.
    pub fn plan(&mut self) -> Option<StepPlan> {
        let mut plan = StepPlan::new();
        self.plan_into(&mut plan).then_some(plan)
    }

    /// Plans the next step into `plan` (its old content is dropped) and counts it as launched.
    ///
    /// False when nothing can run now; complete a launched step or submit a request, then try again.
    pub fn plan_into(&mut self, plan: &mut StepPlan) -> bool {
        plan.clear(self.next_step);
        if self.launched.len() > usize::from(self.config.overlap) {
            return false;
        }
        while self.running.len() < self.config.max_running && self.admit_head() {}
        let mut room = self.config.token_budget;
        let mut rows = Vec::new();
        let mut samples = 0;
        let step = self.next_step;
        for entry in self.running.iter_mut().filter(|e| !e.finished) {
            let target = entry.tokens.len() + usize::from(entry.pending.is_some());
            if room == 0 || entry.computed == target || target == entry.length_max {
                continue;
            }
            let count = (target - entry.computed).min(room);
            let (start, end) = (entry.computed, entry.computed + count);
            room -= count;
            let input = match entry.pending {
                Some((step, sample_index)) => RowInput::SampledBy { step, sample_index },
                None => RowInput::Known,
            };
            let page_count = end.div_ceil(self.config.page_size);
            plan.rows.push(PlanRow {
                id: entry.id,
                first_token: plan.token_ids.len() as u32,
                token_count: count as u32,
                start_position: start as u32,
                first_page: plan.pages.len() as u32,
                page_count: page_count as u32,
                input,
                samples: end == target,
                output_index: if end == target { (end - entry.prompt_len) as u32 } else { 0 },
                sampling: entry.sampling.clone(),
            });
            match entry.pending {
                Some(_) => plan.token_ids.push(StepPlan::PLACEHOLDER),
                None => plan.token_ids.extend_from_slice(&entry.tokens[start..end]),
            }
            plan.pages.extend_from_slice(&entry.pages[..page_count]);
            entry.pending = (end == target).then_some((step, samples));
            samples += u32::from(end == target);
            entry.computed = end;
            entry.launched += 1;
            rows.push((entry.id, end == target));
        }
        if rows.is_empty() {
            return false;
        }
        self.launched.push_back((step, rows));
        self.next_step += 1;
        self.record_digest(plan);
        true
    }

    /// Takes the tokens of the oldest launched step: one per row that samples, in row order.
    ///
    /// Panics when `step` is not the oldest launched step or the count is wrong: a bug of the caller.
    pub fn complete(&mut self, step: StepId, tokens: &[TokenId]) {
        let (launched, rows) = self.launched.pop_front().expect("a step was launched");
        assert_eq!(launched, step, "steps complete in the order they were planned");
        let mut tokens = tokens.iter().copied();
        for (id, samples) in rows {
            let token = samples.then(|| tokens.next().expect("one token per sampling row"));
            let eos = &self.config.eos_tokens;
            let entry =
                self.running.iter_mut().find(|e| e.id == id).expect("invariant: launched requests stay");
            entry.launched -= 1;
            let Some(token) = token.filter(|_| !entry.finished) else { continue };
            if entry.pending.is_some_and(|(s, _)| s == step) {
                entry.pending = None;
            }
            entry.tokens.push(token);
            self.generated += 1;
            let s = &entry.sampling;
            let is_eos = (!s.ignore_eos && eos.contains(&token)) || s.stop_token_ids.contains(&token);
            let finish = if is_eos {
                Some(FinishReason::Stop)
            } else {
                (entry.tokens.len() == entry.length_max).then_some(FinishReason::Length)
            };
            entry.finished = finish.is_some();
            self.events.push(Event::Token { id, token, is_eos, finish, usage: usage(entry) });
        }
        assert!(tokens.next().is_none(), "one token per sampling row");
        self.release_finished();
    }

    /// Moves all events since the last call to the end of `out`, oldest first.
    pub fn take_events(&mut self, out: &mut Vec<Event>) {
        out.append(&mut self.events);
    }

    /// Moves the pages freed since the last call to the end of `out` (with `track_freed`). Poison them
    /// before the next planned step is launched.
    pub fn take_freed_pages(&mut self, _out: &mut Vec<PageId>) {}

    /// Whether any request waits, runs or drains.
    pub fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty()
    }

    /// Gauges and totals.
    pub fn counters(&self) -> Counters {
        Counters {
            waiting: self.waiting.len(),
            running: self.running.len(),
            pages_free: self.free.len(),
            pages_held: self.config.num_pages - self.free.len(),
            pages_total: self.config.num_pages,
            generated_tokens: self.generated,
            steps: self.next_step,
            steps_in_flight: self.launched.len(),
            ..Counters::default()
        }
    }

    /// The fingerprint of the last planned and the last completed step.
    pub fn digest(&self) -> StepDigest {
        self.digest
    }

    /// Full integrity check; the error says what is inconsistent.
    pub fn check(&self) -> Result<(), String> {
        let held: usize = self.running.iter().map(|e| e.pages.len()).sum();
        if held + self.free.len() == self.config.num_pages {
            Ok(())
        } else {
            Err(format!("{held} pages held"))
        }
    }

    fn admit_head(&mut self) -> bool {
        let Some(head) = self.waiting.front() else { return false };
        let pages = (head.length_max - 1).div_ceil(self.config.page_size);
        if pages > self.free.len() {
            return false;
        }
        let mut entry = self.waiting.pop_front().expect("invariant: the head was just seen");
        entry.pages = self.free.split_off(self.free.len() - pages);
        self.running.push(entry);
        true
    }

    fn release_finished(&mut self) {
        let free = &mut self.free;
        self.running.retain_mut(|e| {
            let keep = !e.finished || e.launched > 0;
            if !keep {
                free.append(&mut e.pages);
            }
            keep
        });
    }

    fn record_digest(&mut self, plan: &StepPlan) {
        let mut hash = Hasher64::new(plan.step);
        for row in &plan.rows {
            hash.word(row.id.0);
            hash.word(u64::from(row.start_position) << 32 | u64::from(row.token_count));
        }
        self.digest.step = plan.step;
        self.digest.plan_hash = hash.finish();
    }
}

fn usage(entry: &Entry) -> Usage {
    Usage {
        prompt_tokens: entry.prompt_len as u32,
        cached_tokens: 0,
        completion_tokens: (entry.tokens.len() - entry.prompt_len) as u32,
    }
}
