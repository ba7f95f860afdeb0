//! The fake model, and what each request must come to when it is computed alone.
//!
//! The KV of a position is a hash of all tokens up to it; a sampled token is a hash of the KV of *all*
//! positions before it, of its output index and of the request's seed. So a lost, repeated or changed token, a
//! wrong page, a stale page or a wrong output index changes the answer. The end tokens are not masked below
//! `min_tokens`: the scheduler's own rule must hold.
//!
//! The rules of ending are written here a second time on purpose, from `docs/scheduling.md`, not from
//! the scheduler.

use lockstep_core::{FinishReason, SamplingParams, TokenId};
use lockstep_kvcache::Hasher64;
use lockstep_wire::SubmitRequest;

/// The model's end token.
pub const EOS: TokenId = 7;
/// Sampled tokens are below this.
const VOCAB_SIZE: u64 = 40;

/// KV of a position, from the KV before it (0 at the start) and its token.
pub fn kv_of(previous: u64, token: TokenId) -> u64 {
    let mut hash = Hasher64::new(previous);
    hash.word(u64::from(token));
    hash.finish()
}

/// What attention makes of one more position.
pub fn attend(so_far: Hasher64, kv: u64) -> Hasher64 {
    let mut hash = so_far;
    hash.word(kv);
    hash
}

/// The next token after attention over all positions.
pub fn sample(attention: Hasher64, output_index: u32, sampling: &SamplingParams) -> TokenId {
    let mut hash = attention;
    hash.word(u64::from(output_index));
    hash.word(sampling.seed);
    (hash.finish() % VOCAB_SIZE) as TokenId
}

/// One request computed alone.
#[derive(Debug)]
pub struct Expected {
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Prompt and answer.
    pub tokens: Vec<TokenId>,
    /// KV of every position of `tokens`.
    pub kv: Vec<u64>,
    /// How it ends if nobody aborts it; `None`: it must be refused, whatever else is there.
    pub finish: Option<FinishReason>,
    /// How it is sampled.
    pub sampling: SamplingParams,
}

impl Expected {
    /// Computes `request` in a context of `context_max` tokens.
    pub fn of(request: &SubmitRequest, context_max: usize) -> Self {
        let mut alone = Self {
            prompt_len: request.prompt.len(),
            tokens: request.prompt.clone(),
            kv: Vec::new(),
            finish: None,
            sampling: request.sampling.clone(),
        };
        if alone.prompt_len == 0 || alone.prompt_len >= context_max {
            return alone;
        }
        let mut attention = Hasher64::default();
        for at in 0..alone.prompt_len {
            attention = alone.compute(at, attention);
        }
        while alone.finish.is_none() {
            let index = alone.tokens.len() - alone.prompt_len;
            let token = sample(attention, index as u32, &alone.sampling);
            alone.tokens.push(token);
            attention = alone.compute(alone.tokens.len() - 1, attention);
            alone.finish = alone.ending(token, index, context_max);
        }
        alone
    }

    fn compute(&mut self, at: usize, attention: Hasher64) -> Hasher64 {
        let kv = kv_of(self.kv.last().copied().unwrap_or(0), self.tokens[at]);
        self.kv.push(kv);
        attend(attention, kv)
    }

    fn ending(&self, token: TokenId, index: usize, context_max: usize) -> Option<FinishReason> {
        let sampling = &self.sampling;
        let is_end = (token == EOS && !sampling.ignore_eos) || sampling.stop_token_ids.contains(&token);
        if is_end && index >= sampling.min_tokens as usize {
            return Some(FinishReason::Stop);
        }
        let is_full = sampling.max_tokens.is_some_and(|max| index + 1 >= max as usize)
            || self.tokens.len() >= context_max;
        is_full.then_some(FinishReason::Length)
    }

    /// The answer, end token included.
    pub fn answer(&self) -> &[TokenId] {
        &self.tokens[self.prompt_len..]
    }
}
