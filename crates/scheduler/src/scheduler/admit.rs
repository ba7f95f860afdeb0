//! From waiting to running.
//!
//! A request is admitted when its tokens fit beside what the running ones are expected to need. Pages for
//! all its present tokens are taken at once, so a prefill that has begun never waits for pages.

use super::Scheduler;
use super::step::Draft;
use crate::config::{QueueOrder, SchedulerConfig};
use crate::entry::{Entry, Slot};
use lockstep_kvcache::common_len;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// Waiting requests that one step looks at and passes over, at most.
const PASSED_OVER_MAX: usize = 64;

/// What one more step costs, in prefill tokens, however few it holds: weights are read once per step. Between
/// what CPUs (about 5) and GPUs (about 150) need; keeps requests from waiting for a page of chat template.
const STEP_COST: usize = 32;

/// How many tokens running requests are expected to generate still: a share of what they may.
///
/// The share adapts as in SGLang's `new_token_ratio`, in integers so that ranks cannot differ: it shrinks a
/// little with every decode step and grows with every retraction.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct GrowthEstimate {
    /// Share in units of 1/[`GrowthEstimate::ONE`].
    share: usize,
}

impl Default for GrowthEstimate {
    fn default() -> Self {
        Self { share: Self::ONE / 2 }
    }
}

impl GrowthEstimate {
    const ONE: usize = 1024;
    const SHARE_MIN: usize = Self::ONE / 10;
    const RETRACTION_STEP: usize = Self::ONE / 4;
    /// More tokens than this are not expected of anybody.
    const TOKENS_MAX: usize = 512;

    pub fn decode_step_planned(&mut self) {
        self.share = (self.share - 1).max(Self::SHARE_MIN);
    }

    pub fn retracted(&mut self) {
        self.share = (self.share + Self::RETRACTION_STEP).min(Self::ONE);
    }

    /// Pages to keep for the growth of one request.
    fn pages(&self, entry: &Entry, config: &SchedulerConfig) -> usize {
        let tokens = (entry.len_max - entry.tokens.len()).min(Self::TOKENS_MAX);
        (tokens * self.share * config.reserve_percent).div_ceil(Self::ONE * 100 * config.page_size)
    }
}

/// Whether a waiting request may start now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Admit,
    /// A running request is computing a prefix of it.
    AwaitPrefix,
    /// Too few pages are available.
    NoPages,
}

impl Scheduler {
    /// Admits requests while `room` tokens of prefill, pages and places are left, and plans their
    /// first chunks. A request that does not fit is passed over, within the bound of `queue`.
    pub(super) fn admit(&mut self, draft: &mut Draft<'_>, mut room: usize) {
        if room == 0 || self.queue.len() == 0 || self.running.len() >= self.config.max_running {
            return;
        }
        let mut candidates = std::mem::take(&mut self.scratch.candidates);
        self.list_candidates(&mut candidates);
        let (mut reserved, mut passed_over) = (self.reserved_pages(), 0);
        for slot in candidates.drain(..) {
            if room == 0 || self.running.len() >= self.config.max_running || passed_over == PASSED_OVER_MAX {
                break;
            }
            if self.judge(slot, reserved) != Verdict::Admit {
                passed_over += 1;
                continue;
            }
            self.start(slot);
            self.scratch.prefilling.push(slot);
            reserved += self.growth.pages(&self.entries[slot], &self.config);
            room -= self.push_prefill(draft, slot, room);
            if self.queue.aged().is_some() {
                break;
            }
        }
        candidates.clear();
        self.scratch.candidates = candidates;
    }

    /// Whom to consider, in order.
    fn list_candidates(&mut self, candidates: &mut Vec<Slot>) {
        candidates.clear();
        if let Some(slot) = self.queue.aged() {
            candidates.push(slot);
            return;
        }
        let places = self.config.max_running - self.running.len();
        candidates.extend(self.queue.iter().take(PASSED_OVER_MAX + places));
        if self.config.queue_order == QueueOrder::LongestPrefix {
            candidates.iter().for_each(|&slot| self.refresh_hit(slot));
            let entries = &self.entries;
            candidates.sort_unstable_by_key(|&slot| {
                let entry = &entries[slot];
                let is_new = entry.cached_tokens.is_none();
                (Reverse(entry.priority), is_new, Reverse(entry.hit_pages), entry.arrival)
            });
        }
    }

    /// Pages kept back for the running requests.
    fn reserved_pages(&self) -> usize {
        self.running.iter().map(|&slot| self.growth.pages(&self.entries[slot], &self.config)).sum()
    }

    fn judge(&mut self, slot: Slot, reserved: usize) -> Verdict {
        self.refresh_hit(slot);
        let entry = &self.entries[slot];
        let pages = entry.tokens.len().div_ceil(self.config.page_size);
        // The only running request needs no reserve: alone, it fits.
        let reserve = match self.running.is_empty() {
            true => 0,
            false => reserved + self.growth.pages(entry, &self.config),
        };
        if pages - entry.hit_pages.min(pages) + reserve > self.kv.available() {
            return Verdict::NoPages;
        }
        if self.queue.aged() != Some(slot) && self.awaits_prefix(slot) {
            return Verdict::AwaitPrefix;
        }
        // Exact: the hit may have shrunk, and locking its unlocked pages makes them unavailable.
        let probe = self.kv.probe(&self.entries[slot].namespace, self.entries[slot].cacheable());
        self.entries[slot].hit_pages = probe.pages;
        if pages - probe.pages + probe.unlocked_pages + reserve > self.kv.available() {
            return Verdict::NoPages;
        }
        Verdict::Admit
    }

    /// Looks the prefix up again if the tree has grown since the last time.
    fn refresh_hit(&mut self, slot: Slot) {
        let epoch = self.kv.epoch();
        let entry = &mut self.entries[slot];
        if entry.hit_epoch != Some(epoch) {
            entry.hit_pages = self.kv.probe(&entry.namespace, entry.cacheable()).pages;
            entry.hit_epoch = Some(epoch);
        }
    }

    /// Whether a waiting request should let a running one compute their common prefix.
    ///
    /// Requests are judged only while the step has room, so every running prefill has been planned to its
    /// end: waiting costs the step missed, [`STEP_COST`]; computing costs what the cache lacks of the prefix.
    /// Only running requests own prefixes and those never wait, so waits cannot form a circle; an owner that
    /// is aborted is no owner any more, and the next step decides anew.
    fn awaits_prefix(&mut self, slot: Slot) -> bool {
        let key = Some((self.prefill_epoch, self.kv.epoch()));
        let entry = &self.entries[slot];
        if entry.wait_key == key {
            return entry.awaits_prefix;
        }
        let awaits = self.kv.caches_prefixes() && self.finds_owner(entry);
        if awaits && !entry.awaits_prefix {
            self.totals.prefix_waits += 1;
        }
        let entry = &mut self.entries[slot];
        (entry.wait_key, entry.awaits_prefix) = (key, awaits);
        awaits
    }

    fn finds_owner(&self, entry: &Entry) -> bool {
        let page_size = self.config.page_size;
        let cached = entry.hit_pages * page_size;
        let usable = entry.cacheable();
        let usable = &usable[..usable.len() - 1];
        if usable.len() < cached + STEP_COST {
            return false;
        }
        self.scratch.prefilling.iter().map(|&slot| &self.entries[slot]).any(|owner| {
            // The logits of a whole prompt take many small steps: too long to wait for.
            if owner.wants_prompt_logits() {
                return false;
            }
            let common = || common_len(&owner.tokens[..owner.prefill_end], usable);
            owner.namespace == entry.namespace && common() / page_size * page_size >= cached + STEP_COST
        })
    }

    /// Takes the cached prefix and all pages of the present tokens.
    fn start(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot];
        self.queue.admit(entry.precedence());
        // `cacheable`, written out because the table is borrowed too.
        let shared_len = entry.cacheable().len();
        let cached = self.kv.attach(&entry.namespace, &entry.tokens[..shared_len], &mut entry.table);
        let pages = entry.tokens.len().div_ceil(self.config.page_size);
        assert!(
            self.kv.grow(&mut entry.table, pages),
            "invariant: judge() made sure that the pages are available"
        );
        entry.computed = cached;
        entry.completed = cached;
        entry.prefill_end = entry.tokens.len();
        entry.history_due = entry.sampling.needs_history();
        if entry.cached_tokens.is_none() {
            entry.cached_tokens = Some(cached);
            self.totals.prompt_tokens += entry.prompt_len as u64;
            self.totals.hit_tokens += cached as u64;
        }
        self.enter_running(slot);
    }
}
