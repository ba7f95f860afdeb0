//! What a step wants of its logits, where the device chooses tokens itself.

use crate::changes::LogitChanges;
use lockstep_core::{SamplingParams, TokenId};

/// Set in an input id that is not known on the host yet: the other bits are the place of the token among
/// those that [`Backend::choose`](crate::Backend::choose) chose last.
pub const CHOSEN_BIT: TokenId = 1 << 31;

/// The choice of one token for each of the first rows of a tensor of logits.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// How each row chooses.
    pub rows: &'a [RowChoice],
    /// What is changed before, of rows that change anything, by ascending row.
    pub changes: &'a [(usize, LogitChanges<'a>)],
    /// The token of this rank's first column.
    pub first_id: usize,
    /// Columns of this rank's logits, padding included; equal on all ranks, which hold ascending ids.
    pub local_vocab: usize,
    /// Of these, columns that are tokens.
    pub local_real: usize,
    /// Tokens of the model.
    pub vocab_size: usize,
}

/// How one row chooses its token: what is left of its [`SamplingParams`] when its logits are changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowChoice {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Share of the probability that is kept; 1 keeps all.
    pub top_p: f32,
    /// Tokens below this share of the most likely one's probability are left out.
    pub min_p: f32,
    /// Tokens kept; 0 keeps all.
    pub top_k: u32,
    /// Key of the random number.
    pub seed: u64,
    /// Which of several answers this is.
    pub choice: u32,
    /// Tokens of the answer before this one.
    pub output_index: u32,
}

impl RowChoice {
    /// For the token at `output_index` of an answer.
    pub fn new(params: &SamplingParams, output_index: u32) -> Self {
        Self {
            temperature: if params.is_greedy() { 0.0 } else { params.temperature },
            top_p: params.top_p,
            min_p: params.min_p,
            top_k: params.top_k,
            seed: params.seed,
            choice: params.choice,
            output_index,
        }
    }

    /// Whether the most likely token is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}
