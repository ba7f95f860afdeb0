//! One request inside the scheduler, and the place where all of them live.

use crate::event::Usage;
use crate::request::Request;
use lockstep_core::{FinishReason, RequestId, SamplingParams, StepId, TokenId};
use lockstep_kvcache::{Namespace, PageTable};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

/// Place of a request in [`Entries`]; reused after the request is gone.
pub(crate) type Slot = u32;

/// Where a request is in its life; see the diagram in `docs/scheduling.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum State {
    /// In the queue, without pages. New, or put back by a retraction.
    Waiting,
    /// Prefilling or decoding; listed in `Scheduler::running`.
    Running,
    /// Ended and reported, but a launched step still uses its pages.
    Draining,
}

/// The order in which requests are served and in which they keep their pages: larger priority first,
/// then earlier arrival. Total, and fixed for a request's life.
pub(crate) type Precedence = (Reverse<i32>, u64);

/// Everything known of one request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub id: RequestId,
    /// Prompt, then generated tokens.
    pub tokens: Vec<TokenId>,
    pub prompt_len: usize,
    /// `tokens.len()` at which the request ends with [`FinishReason::Length`].
    pub len_max: usize,
    pub sampling: Arc<SamplingParams>,
    pub namespace: Namespace,
    pub priority: i32,
    /// Counts submissions; unique.
    pub arrival: u64,
    pub deadline_ms: Option<u64>,
    pub state: State,
    pub table: PageTable,
    /// Tokens whose KV exists once every launched step has completed.
    pub computed: usize,
    /// Tokens whose KV exists now: `computed` as of the last completed step.
    pub completed: usize,
    /// Tokens to compute before decoding starts: all that were known at the last admission.
    pub prefill_end: usize,
    /// The launched step that samples the token at `tokens.len()`, and its index among the samples.
    pub pending: Option<(StepId, u32)>,
    /// Launched steps that hold a row of this request.
    pub launched: u32,
    /// The last step that held a row of it.
    pub last_row: StepId,
    /// Its next row tells the runner all its tokens.
    pub history_due: bool,
    /// Cached prefix at the first admission.
    pub cached_tokens: Option<usize>,
    /// Times it was retracted.
    pub retractions: u32,
    /// Cached pages of the prefix as last seen while waiting.
    pub hit_pages: usize,
    /// `KvCache::epoch` at which `hit_pages` was true.
    pub hit_epoch: Option<u64>,
    /// Whether it waits for a prefix in flight, as decided at `wait_key`.
    pub awaits_prefix: bool,
    /// State of cache and prefilling requests at the last decision.
    pub wait_key: Option<(u64, u64)>,
}

impl Entry {
    /// A waiting request; `context_max` bounds prompt plus answer.
    pub fn new(request: Request, arrival: u64, context_max: usize) -> Self {
        let prompt_len = request.prompt.len();
        let room = context_max - prompt_len;
        let max_tokens = request.sampling.max_tokens.map_or(room, |max| (max as usize).clamp(1, room));
        Self {
            id: request.id,
            tokens: request.prompt,
            prompt_len,
            len_max: prompt_len + max_tokens,
            sampling: Arc::new(request.sampling),
            namespace: request.cache_salt.map(Into::into),
            priority: request.priority,
            arrival,
            deadline_ms: request.deadline_ms,
            state: State::Waiting,
            table: PageTable::new(),
            computed: 0,
            completed: 0,
            prefill_end: 0,
            pending: None,
            launched: 0,
            last_row: 0,
            history_due: false,
            cached_tokens: None,
            retractions: 0,
            hit_pages: 0,
            hit_epoch: None,
            awaits_prefix: false,
            wait_key: None,
        }
    }

    pub fn precedence(&self) -> Precedence {
        (Reverse(self.priority), self.arrival)
    }

    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_len as u32,
            cached_tokens: self.cached_tokens.unwrap_or(0) as u32,
            completion_tokens: (self.tokens.len() - self.prompt_len) as u32,
            retractions: self.retractions,
        }
    }

    /// Prompt tokens (and, after a retraction, generated ones) that no step computes yet.
    pub fn prefill_remaining(&self) -> usize {
        self.prefill_end.saturating_sub(self.computed)
    }

    /// Whether its prefill must compute the logits of every prompt token. After a retraction they are
    /// reported already once a token has been generated.
    pub fn wants_prompt_logits(&self) -> bool {
        self.sampling.prompt_logprobs.is_some() && self.tokens.len() == self.prompt_len
    }

    /// The tokens of which a cached prefix may be used: none when the logits of each are wanted.
    pub fn cacheable(&self) -> &[TokenId] {
        if self.wants_prompt_logits() { &self.tokens[..1] } else { &self.tokens }
    }

    /// Whether the prefill has not completed: its pages are not all published.
    pub fn is_prefilling(&self) -> bool {
        self.completed < self.prefill_end
    }

    /// Whether the next step may hold a decode row: the prefill is launched, the input token is known or
    /// being sampled, and another token fits. The last token of a request is never an input.
    pub fn can_decode(&self) -> bool {
        self.computed >= self.prefill_end && self.computed + 2 <= self.len_max
    }

    /// Why the request ends with the token just appended, if it does; `eos_tokens` are the model's.
    /// An end token is legal only from output index `min_tokens` on, as in the sampler's mask; a grammar alone says
    /// where its answer ends.
    pub fn finish_reason(&self, eos_tokens: &[TokenId]) -> Option<FinishReason> {
        let &token = self.tokens.last()?;
        let sampling = &self.sampling;
        let ends =
            (!sampling.ignore_eos && eos_tokens.contains(&token)) || sampling.stop_token_ids.contains(&token);
        let output_index = self.tokens.len() - self.prompt_len - 1;
        if ends && (sampling.grammar.is_some() || output_index >= sampling.min_tokens as usize) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() == self.len_max).then_some(FinishReason::Length)
    }
}

/// All requests the scheduler knows, by slot and by id. Never iterated in hash order: slots are reused last
/// in, first out, ids are in a B-tree.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Entries {
    slots: Vec<Option<Box<Entry>>>,
    vacant: Vec<Slot>,
    by_id: BTreeMap<RequestId, Slot>,
}

impl Entries {
    pub fn slot_of(&self, id: RequestId) -> Option<Slot> {
        self.by_id.get(&id).copied()
    }

    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn insert(&mut self, entry: Entry) -> Slot {
        let id = entry.id;
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as Slot
        });
        self.slots[slot as usize] = Some(Box::new(entry));
        let previous = self.by_id.insert(id, slot);
        assert!(previous.is_none(), "invariant: duplicate ids are refused");
        slot
    }

    pub fn remove(&mut self, slot: Slot) -> Box<Entry> {
        let entry = self.slots[slot as usize].take().expect("invariant: a slot in use holds a request");
        self.by_id.remove(&entry.id);
        self.vacant.push(slot);
        entry
    }

    /// All requests in order of id.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, &Entry)> + Clone {
        self.by_id.values().map(|&slot| (slot, &self[slot]))
    }
}

impl Index<Slot> for Entries {
    type Output = Entry;

    fn index(&self, slot: Slot) -> &Entry {
        self.slots[slot as usize].as_deref().expect("invariant: a slot in use holds a request")
    }
}

impl IndexMut<Slot> for Entries {
    fn index_mut(&mut self, slot: Slot) -> &mut Entry {
        self.slots[slot as usize].as_deref_mut().expect("invariant: a slot in use holds a request")
    }
}
