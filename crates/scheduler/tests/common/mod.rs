//! Drives a scheduler against a fake model whose KV memory remembers what was written.
//!
//! The fake model's next token is a hash of the whole history, and each KV slot holds the hash of the history
//! up to it. So a lost, repeated or changed token, a wrong page, a freed page that is still mapped or a wrong
//! output index shows as a wrong value at once. A step runs only when it completes, with freed pages poisoned
//! as soon as they are free: the latest legal moment.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses a part of it; tests may unwrap

use lockstep_core::{FinishReason, PageId, RequestId, SamplingParams, TokenId};
use lockstep_kvcache::Hasher64;
use lockstep_scheduler::{Event, PlanRow, Request, RowInput, Scheduler, SchedulerConfig, StepPlan, Usage};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Deterministic random numbers for tests.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 += 1;
        let mut hash = Hasher64::default();
        hash.word(self.0);
        (hash.finish() % n as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The end token of the fake model; about one sampled token in fifty.
pub const EOS: TokenId = 7;
const VOCAB_SIZE: u64 = 50;

fn extend_history(history: u64, token: TokenId) -> u64 {
    let mut hash = Hasher64::new(history);
    hash.word(u64::from(token));
    hash.finish()
}

fn next_token(history: u64, output_index: u32, sampling: &SamplingParams) -> TokenId {
    let mut hash = Hasher64::new(history);
    hash.word(u64::from(output_index));
    hash.word(sampling.seed);
    let token = (hash.finish() % VOCAB_SIZE) as TokenId;
    let is_end = token == EOS || sampling.stop_token_ids.contains(&token);
    if is_end && output_index < sampling.min_tokens { token + 1000 } else { token }
}

/// What one request must come to, computed alone.
#[derive(Debug)]
pub struct Expected {
    pub prompt_len: usize,
    /// Prompt and answer.
    pub tokens: Vec<TokenId>,
    /// Hash of the history up to and including each token.
    histories: Vec<u64>,
    pub finish: FinishReason,
}

impl Expected {
    fn new(request: &Request, context_max: usize) -> Self {
        let (sampling, mut tokens) = (&request.sampling, request.prompt.clone());
        let prompt_len = tokens.len();
        let mut histories: Vec<u64> = Vec::new();
        for &token in &tokens {
            histories.push(extend_history(histories.last().copied().unwrap_or(0), token));
        }
        let finish = loop {
            let index = tokens.len() - prompt_len;
            let history = *histories.last().unwrap();
            let token = next_token(history, index as u32, sampling);
            tokens.push(token);
            histories.push(extend_history(history, token));
            if (token == EOS && !sampling.ignore_eos) || sampling.stop_token_ids.contains(&token) {
                break FinishReason::Stop;
            }
            if sampling.max_tokens == Some(index as u32 + 1) || tokens.len() == context_max {
                break FinishReason::Length;
            }
        };
        Self { prompt_len, tokens, histories, finish }
    }

    pub fn answer(&self) -> &[TokenId] {
        &self.tokens[self.prompt_len..]
    }
}

/// What a client has received.
#[derive(Debug, Default)]
pub struct Output {
    pub tokens: Vec<TokenId>,
    pub finish: Option<FinishReason>,
    pub usage: Usage,
    pub first_token_step: Option<u64>,
    pub finish_step: u64,
}

pub struct Harness {
    pub scheduler: Scheduler,
    /// A second rank: fed the same calls, compared after each.
    mirror: Option<Scheduler>,
    page_size: usize,
    /// Per slot of the pool: position and history.
    kv: Vec<Option<(u32, u64)>>,
    launched: VecDeque<StepPlan>,
    /// Samples of the last completed step.
    last_samples: (u64, Vec<TokenId>),
    pub expected: BTreeMap<RequestId, Expected>,
    pub outputs: BTreeMap<RequestId, Output>,
    pub aborted: BTreeSet<RequestId>,
    pub steps: u64,
    /// Called on every plan.
    pub last_plan: StepPlan,
    next_id: u64,
    pub check_every: u64,
}

impl Harness {
    pub fn new(mut config: SchedulerConfig, with_mirror: bool) -> Self {
        config.track_freed = true;
        config.eos_tokens = vec![EOS];
        config.validate().unwrap();
        Self {
            kv: vec![None; config.num_pages * config.page_size],
            page_size: config.page_size,
            mirror: with_mirror.then(|| Scheduler::new(config.clone())),
            scheduler: Scheduler::new(config),
            launched: VecDeque::new(),
            last_samples: (u64::MAX, Vec::new()),
            expected: BTreeMap::new(),
            outputs: BTreeMap::new(),
            aborted: BTreeSet::new(),
            steps: 0,
            last_plan: StepPlan::new(),
            next_id: 0,
            check_every: 1,
        }
    }

    /// Submits and remembers the right answer; the id, or `None` when refused.
    pub fn submit(&mut self, prompt: Vec<TokenId>, sampling: SamplingParams) -> Option<RequestId> {
        self.submit_request(Request::new(RequestId(0), prompt, sampling), 0)
    }

    pub fn submit_request(&mut self, mut request: Request, now_ms: u64) -> Option<RequestId> {
        request.id = RequestId(self.next_id);
        let id = request.id;
        self.next_id += 1;
        if let Some(mirror) = &mut self.mirror {
            let _ = mirror.submit(request.clone(), now_ms);
        }
        let accepted = self.scheduler.submit(request.clone(), now_ms).is_ok();
        if accepted {
            self.expected.insert(id, Expected::new(&request, self.scheduler.context_max()));
            self.outputs.insert(id, Output::default());
            // It may be aborted by its deadline from now on.
            self.aborted.extend(request.deadline_ms.map(|_| id));
        }
        self.after_call();
        accepted.then_some(id)
    }

    pub fn abort(&mut self, id: RequestId) {
        if self.outputs.get(&id).is_some_and(|o| o.finish.is_none()) {
            self.aborted.insert(id);
        }
        self.both(|s| s.abort(id));
    }

    pub fn both(&mut self, call: impl Fn(&mut Scheduler)) {
        call(&mut self.scheduler);
        self.mirror.as_mut().map(call);
        self.after_call();
    }

    /// Plans and launches one step if possible.
    pub fn plan(&mut self) -> bool {
        let mut plan = std::mem::take(&mut self.last_plan);
        let planned = self.scheduler.plan_into(&mut plan);
        if let Some(mirror) = &mut self.mirror {
            assert_eq!(mirror.plan(), planned.then(|| plan.clone()), "ranks plan alike");
        }
        if planned {
            assert_eq!(plan.step, self.steps, "steps count without gap");
            self.steps += 1;
            self.check_plan(&plan);
            self.launched.push_back(plan.clone());
        } else {
            assert!(plan.rows.is_empty());
        }
        self.last_plan = plan;
        self.after_call();
        planned
    }

    /// Runs and completes the oldest launched step if there is one.
    pub fn complete(&mut self) -> bool {
        let Some(plan) = self.launched.pop_front() else { return false };
        let samples = self.run(&plan);
        self.both(|s| s.complete(plan.step, &samples));
        self.last_samples = (plan.step, samples);
        true
    }

    pub fn in_flight(&self) -> usize {
        self.launched.len()
    }

    /// One turn of the engine's loop: plan, then complete the oldest step if nothing more may be or was planned.
    pub fn turn(&mut self) -> bool {
        let planned = self.plan();
        let keep = match planned {
            true => self.scheduler.config().steps_in_flight_max() - 1,
            false => self.launched.len().saturating_sub(1),
        };
        let mut completed = false;
        while self.launched.len() > keep {
            completed |= self.complete();
        }
        planned || completed
    }

    /// Turns until no request is left; panics after `steps_max` steps or when a turn does nothing.
    pub fn drain(&mut self, steps_max: u64) {
        let start = self.steps;
        while self.scheduler.has_work() {
            assert!(self.turn(), "there is work but nothing runs: {:?}", self.scheduler.counters());
            assert!(
                self.steps - start <= steps_max,
                "not done in {steps_max} steps: {:?}",
                self.scheduler.counters()
            );
        }
        self.check_idle();
    }

    /// All requests answered, all pages free or cached.
    pub fn check_idle(&self) {
        self.scheduler.check().unwrap();
        let counters = self.scheduler.counters();
        assert_eq!(
            (counters.pages_held, counters.waiting, counters.running, counters.draining),
            (0, 0, 0, 0)
        );
        for (id, output) in &self.outputs {
            let expected = &self.expected[id];
            match output.finish.unwrap_or_else(|| panic!("{id} never finished")) {
                FinishReason::Abort => assert!(self.aborted.contains(id), "{id}"),
                finish => {
                    assert_eq!(output.tokens, expected.answer(), "{id}");
                    assert_eq!(finish, expected.finish, "{id}");
                }
            }
        }
    }

    fn check_plan(&self, plan: &StepPlan) {
        let config = self.scheduler.config();
        assert!(
            plan.token_ids.len() <= config.step_tokens_max() && plan.rows.len() <= config.step_rows_max()
        );
        let (mut tokens, mut pages, mut ids) = (0, 0, BTreeSet::new());
        let mut uses: BTreeMap<PageId, usize> = BTreeMap::new();
        for row in &plan.rows {
            assert!(ids.insert(row.id) && row.token_count > 0, "one row per request, none empty");
            assert_eq!((row.first_token, row.first_page), (tokens, pages));
            tokens += row.token_count;
            pages += row.page_count;
            let end = (row.start_position + row.token_count) as usize;
            assert_eq!(row.page_count as usize, end.div_ceil(self.page_size));
            table(plan, row).iter().for_each(|&page| *uses.entry(page).or_default() += 1);
        }
        assert_eq!((tokens as usize, pages as usize), (plan.token_ids.len(), plan.pages.len()));
        for row in &plan.rows {
            for &page in &table(plan, row)[row.start_position as usize / self.page_size..] {
                assert_eq!(uses[&page], 1, "page {page} is written by {} while another row maps it", row.id);
            }
        }
    }

    /// The forward pass: reads, checks and writes KV, returns the samples.
    fn run(&mut self, plan: &StepPlan) -> Vec<TokenId> {
        let mut samples = Vec::new();
        for row in &plan.rows {
            let expected = &self.expected[&row.id];
            let pages = table(plan, row);
            let slot = |position: usize| {
                pages[position / self.page_size] as usize * self.page_size + position % self.page_size
            };
            let (start, count) = (row.start_position as usize, row.token_count as usize);
            for position in 0..start {
                let want = expected.histories.get(position).map(|&h| (position as u32, h));
                let got = self.kv[slot(position)];
                assert_eq!(
                    got, want,
                    "KV of {} at {position} in step {} (page table {pages:?})",
                    row.id, plan.step
                );
            }
            let mut history = if start == 0 { 0 } else { self.kv[slot(start - 1)].unwrap().1 };
            for position in start..start + count {
                let token = match row.input {
                    RowInput::Known => plan.token_ids[row.first_token as usize + position - start],
                    RowInput::SampledBy { step, sample_index } => {
                        assert_eq!(self.scheduler.config().stages, 1, "the first stage knows its tokens");
                        assert_eq!((step, count), (self.last_samples.0, 1), "input of {}", row.id);
                        self.last_samples.1[sample_index as usize]
                    }
                };
                assert_eq!(Some(&token), expected.tokens.get(position), "input of {} at {position}", row.id);
                history = extend_history(history, token);
                self.kv[slot(position)] = Some((position as u32, history));
            }
            if row.samples {
                assert_eq!(row.output_index as usize, start + count - expected.prompt_len);
                samples.push(next_token(history, row.output_index, &row.sampling));
            }
        }
        samples
    }

    /// Poisons freed pages, takes events, compares ranks, checks integrity.
    fn after_call(&mut self) {
        let mut freed = Vec::new();
        self.scheduler.take_freed_pages(&mut freed);
        for page in freed {
            let first = page as usize * self.page_size;
            self.kv[first..first + self.page_size].fill(None);
        }
        let (mut events, mut mirrored) = (Vec::new(), Vec::new());
        self.scheduler.take_events(&mut events);
        if let Some(mirror) = &mut self.mirror {
            mirror.take_events(&mut mirrored);
            assert_eq!(events, mirrored, "ranks report alike");
            assert_eq!(self.scheduler.digest(), mirror.digest());
        }
        events.into_iter().for_each(|event| self.take(event));
        if self.check_every == 1 || self.steps.is_multiple_of(self.check_every) {
            self.scheduler.check().unwrap();
        }
    }

    fn take(&mut self, event: Event) {
        let (id, finish, usage) = match event {
            Event::Token { id, finish, usage, .. } => (id, finish, usage),
            Event::Finished { id, finish, usage } => (id, Some(finish), usage),
        };
        let (expected, output) = (&self.expected[&id], self.outputs.get_mut(&id).unwrap());
        assert_eq!(output.finish, None, "{id} has ended already, but got {event:?}");
        if let Event::Token { token, is_eos, .. } = event {
            assert_eq!(expected.answer().get(output.tokens.len()), Some(&token), "{id}");
            assert_eq!(is_eos, finish == Some(FinishReason::Stop));
            output.tokens.push(token);
            output.first_token_step.get_or_insert(self.steps);
        } else {
            assert_eq!(finish, Some(FinishReason::Abort));
        }
        assert_eq!(usage.completion_tokens as usize, output.tokens.len());
        assert_eq!(usage.prompt_tokens as usize, expected.prompt_len);
        assert!(usage.cached_tokens < usage.prompt_tokens);
        assert!((usage.cached_tokens as usize).is_multiple_of(self.page_size));
        if output.tokens.len() > 1 {
            assert_eq!(
                usage.cached_tokens, output.usage.cached_tokens,
                "not counted again after a retraction"
            );
        }
        (output.finish, output.usage, output.finish_step) = (finish, usage, self.steps);
    }
}

fn table<'a>(plan: &'a StepPlan, row: &PlanRow) -> &'a [PageId] {
    &plan.pages[row.first_page as usize..][..row.page_count as usize]
}

/// Greedy, never stops by itself.
pub fn endless(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::default() }
}

/// A prompt of `len` tokens that shares no prefix with one of another `tag`.
pub fn prompt(tag: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| 10_000 + tag * 1000 + i).collect()
}
