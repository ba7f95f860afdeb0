//! What the rows of a step change in their logits, from their parameters and what is remembered of them.
//!
//! Host and device choose after the same changes, which [`LogitChanges`] describes. Rows that only follow a grammar or
//! have penalties borrow what is remembered; the rest (lists of allowed tokens, bans) is put together here, in memory
//! that later steps use again.

use crate::histories::Histories;
use crate::logits::is_early;
use crate::{EngineError, Result};
use lockstep_backend::{LogitChanges, Penalties};
use lockstep_core::TokenId;
use lockstep_scheduler::PlanRow;
use std::ops::Range;

/// The changes of some rows of one step.
#[derive(Default)]
pub(crate) struct Adjustments {
    /// Bits of allowed tokens, of rows that list them.
    words: Vec<u32>,
    banned: Vec<TokenId>,
    places: Vec<Places>,
}

/// Where one row's entries are.
struct Places {
    /// Number of the row among those that the step chooses for.
    at: usize,
    words: Range<usize>,
    banned: Range<usize>,
}

impl Adjustments {
    /// Forgets all rows.
    pub(crate) fn clear(&mut self) {
        self.words.clear();
        self.banned.clear();
        self.places.clear();
    }

    /// Puts together what row number `at` of the step changes.
    pub(crate) fn add(
        &mut self,
        at: usize,
        row: &PlanRow,
        histories: &Histories,
        end_tokens: &[TokenId],
    ) -> Result<()> {
        let params = &*row.sampling;
        let (words, banned) = (self.words.len(), self.banned.len());
        if let Some(allowed) = &params.allowed_token_ids {
            let end = allowed.iter().map(|id| *id as usize / 32 + 1).max().unwrap_or(0);
            self.words.resize(words + end, 0);
            allowed.iter().for_each(|id| self.words[words + *id as usize / 32] |= 1 << (id % 32));
            if let Some(grammar) = grammar_words(row, histories)? {
                let also = grammar.iter().copied().chain(std::iter::repeat(0));
                self.words[words..].iter_mut().zip(also).for_each(|(word, other)| *word &= other);
            }
        }
        // A grammar says where the answer ends, so `min_tokens` does not.
        if is_early(row) && params.grammar.is_none() {
            self.banned.extend(end_tokens.iter().chain(&params.stop_token_ids));
        }
        if !params.bad_words.is_empty() {
            self.banned.extend(histories.of(row)?.banned_by(&params.bad_words));
        }
        let places = Places { at, words: words..self.words.len(), banned: banned..self.banned.len() };
        self.places.push(places);
        Ok(())
    }

    /// The changes of the rows that were added: `row` gives the row of a number.
    pub(crate) fn list<'a>(
        &'a self,
        row: impl Fn(usize) -> &'a PlanRow,
        histories: &'a Histories,
    ) -> Result<Vec<(usize, LogitChanges<'a>)>> {
        let changes = |places: &Places| {
            let row = row(places.at);
            let params = &*row.sampling;
            let allowed = match params.allowed_token_ids {
                Some(_) => Some(&self.words[places.words.clone()]),
                None => grammar_words(row, histories)?,
            };
            let penalties = || {
                Ok::<_, EngineError>(Penalties {
                    repetition: params.repetition_penalty,
                    frequency: params.frequency_penalty,
                    presence: params.presence_penalty,
                    seen: histories.of(row)?.seen(),
                })
            };
            let changes = LogitChanges {
                allowed,
                bias: &params.logit_bias,
                penalties: params.has_penalties().then(penalties).transpose()?,
                banned: &self.banned[places.banned.clone()],
            };
            Ok((places.at, changes))
        };
        self.places.iter().map(changes).collect()
    }
}

/// The mask of a row with a grammar.
fn grammar_words<'a>(row: &PlanRow, histories: &'a Histories) -> Result<Option<&'a [u32]>> {
    match row.sampling.grammar {
        None => Ok(None),
        Some(_) => Ok(histories.of(row)?.matcher().words()),
    }
}
