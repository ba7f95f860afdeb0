//! Taking the results of a step: tokens, ends of requests, pages that became shareable.

use super::{LaunchedRow, Scheduler};
use crate::entry::{Slot, State};
use crate::event::Event;
use lockstep_core::{FinishReason, NO_TOKEN, StepId, TokenId};

impl Scheduler {
    /// Takes the tokens of the oldest launched step: one per row that samples, in row order. [`NO_TOKEN`] ends its
    /// request with [`FinishReason::NoToken`].
    ///
    /// A row of a request that has ended meanwhile (aborted, or, with overlap, ended one step earlier) is
    /// thrown away: its token is not reported and its pages are released now.
    ///
    /// Panics when `step` is not the oldest launched step or the number of tokens is wrong: a bug of the
    /// caller.
    pub fn complete(&mut self, step: StepId, tokens: &[TokenId]) {
        let mut launched = self.launched.pop_front().expect("complete() without a launched step");
        assert_eq!(launched.step, step, "steps complete in the order in which they were planned");
        let expected = launched.rows.iter().filter(|row| row.samples).count();
        assert_eq!(tokens.len(), expected, "step {step} has {expected} rows that sample");
        self.tokens_hash.word(step);
        let mut tokens = tokens.iter().copied();
        for row in launched.rows.drain(..) {
            let token = if row.samples { tokens.next() } else { None };
            if let Some(token) = token {
                self.tokens_hash.word(u64::from(token));
            }
            self.complete_row(step, row, token);
        }
        self.kv.free(&launched.duplicates);
        launched.duplicates.clear();
        self.spare.push(launched);
        self.digest.token_hash = self.tokens_hash.finish();
    }

    fn complete_row(&mut self, step: StepId, row: LaunchedRow, token: Option<TokenId>) {
        let slot = row.slot;
        let entry = &mut self.entries[slot];
        entry.launched -= 1;
        if entry.state == State::Draining {
            // Worth keeping as a prefix as far as the tokens are known.
            entry.completed = row.end.min(entry.tokens.len());
            if entry.launched == 0 {
                self.release(slot);
            }
            return;
        }
        let was_prefilling = entry.is_prefilling();
        entry.completed = row.end;
        if entry.pending.is_some_and(|(pending, _)| pending == step) {
            entry.pending = None;
        }
        if was_prefilling {
            self.publish_prefill(slot);
        }
        if let Some(token) = token {
            self.append_token(slot, token);
        }
    }

    /// Makes the full pages of a prefill shareable as soon as they are computed. Pages of generated tokens
    /// follow when the request ends, so that decode steps do not touch the tree.
    fn publish_prefill(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot];
        let duplicates = &mut self.scratch.duplicates;
        self.kv.publish(&entry.namespace, &entry.tokens[..entry.completed], &mut entry.table, duplicates);
        // Later steps that are already launched were planned with the old table, at the latest the last one.
        match self.launched.back_mut() {
            Some(last) if entry.launched > 0 => last.duplicates.append(duplicates),
            _ => {
                self.kv.free(duplicates);
                duplicates.clear();
            }
        }
        if !entry.is_prefilling() {
            self.prefill_epoch += 1;
        }
    }

    fn append_token(&mut self, slot: Slot, token: TokenId) {
        let entry = &mut self.entries[slot];
        if token == NO_TOKEN {
            let finish = FinishReason::NoToken;
            self.events.push(Event::Finished { id: entry.id, finish, usage: entry.usage() });
            return self.end_running(slot);
        }
        entry.tokens.push(token);
        self.totals.generated_tokens += 1;
        let finish = entry.finish_reason(&self.config.eos_tokens);
        let is_eos = finish == Some(FinishReason::Stop);
        self.events.push(Event::Token { id: entry.id, token, is_eos, finish, usage: entry.usage() });
        if finish.is_some() {
            self.end_running(slot);
        }
    }
}
