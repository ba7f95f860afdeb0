//! How far one answer has come in its grammar.

use crate::GrammarError;
use llguidance::TokenParser;
use llguidance::toktrie::SimpleVob;
use lockstep_core::TokenId;

/// The state of one request; `Send`, so that masks can be computed beside the forward pass.
pub struct Matcher {
    inner: llguidance::Matcher,
    mask: Option<SimpleVob>,
}

impl Matcher {
    pub(crate) fn new(parser: Result<TokenParser, GrammarError>) -> Self {
        Self { inner: llguidance::Matcher::new(parser.map_err(anyhow::Error::from)), mask: None }
    }

    /// Of a grammar that cannot be had: it allows no token.
    pub fn failed(reason: &str) -> Self {
        Self { inner: llguidance::Matcher::new(Err(anyhow::anyhow!("{reason}"))), mask: None }
    }

    /// A copy that shares nothing with this one.
    pub(crate) fn fresh(&self) -> Self {
        Self { inner: self.inner.deep_clone(), mask: None }
    }

    /// Computes the mask of the next token. Up to some 0.5 ms for a large vocabulary.
    pub fn compute_mask(&mut self) {
        self.mask = match self.inner.compute_mask_or_eos() {
            Ok(mask) => Some(mask),
            Err(error) => {
                tracing::warn!("a grammar leaves no token: {error}");
                None
            }
        };
    }

    /// Which of `eos_tokens` the computed mask allows: the first one, if the answer may end here.
    pub fn end_token(&self, eos_tokens: &[TokenId]) -> Option<TokenId> {
        let may_follow = |id: &TokenId| self.allowed(*id as usize) & 1 == 1;
        eos_tokens.iter().copied().find(may_follow)
    }

    /// The computed mask: a bit for each token, the lowest of a word first; tokens beyond its end are not allowed. Empty
    /// when the grammar has failed. Needs a [`compute_mask`](Self::compute_mask) since the last [`push`](Self::push).
    pub fn words(&self) -> &[u32] {
        self.mask.as_ref().map_or(&[], SimpleVob::as_slice)
    }

    /// The largest logit that the computed mask allows, and its index in `logits`, which begin at token `first_id` of the
    /// vocabulary; ties go to the smaller index, NaN never wins. `None` when nothing is left that is
    /// larger than negative infinity.
    pub fn best(&self, logits: &[f32], first_id: usize) -> Option<(f32, usize)> {
        let mut best = (f32::NEG_INFINITY, usize::MAX);
        for (index, part) in logits.chunks(32).enumerate() {
            let bits = self.allowed(first_id + 32 * index);
            if bits == 0 || largest(part, bits) <= best.0 {
                continue;
            }
            for (bit, &logit) in part.iter().enumerate() {
                if bits >> bit & 1 == 1 && logit > best.0 {
                    best = (logit, 32 * index + bit);
                }
            }
        }
        (best.1 != usize::MAX).then_some(best)
    }

    /// Which of the 32 tokens from `first` on are allowed, a bit each.
    fn allowed(&self, first: usize) -> u32 {
        let word = |at: usize| self.words().get(at).copied().unwrap_or(0);
        match first % 32 {
            0 => word(first / 32),
            shift => word(first / 32) >> shift | word(first / 32 + 1) << (32 - shift),
        }
    }

    /// These tokens were chosen.
    pub fn push(&mut self, tokens: &[TokenId]) {
        self.mask = None;
        if !self.inner.is_stopped()
            && let Err(error) = self.inner.consume_tokens(tokens)
        {
            tracing::warn!("a grammar failed, so no token may follow: {error}");
        }
    }
}

/// The largest of at most 32 logits whose bit is set; eight at a time, so that vector instructions can do it.
fn largest(logits: &[f32], bits: u32) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 8];
    for (part, eight) in logits.chunks(8).enumerate() {
        for (lane, &logit) in eight.iter().enumerate() {
            let logit = if bits & (1 << (8 * part + lane)) != 0 { logit } else { f32::NEG_INFINITY };
            lanes[lane] = if logit > lanes[lane] { logit } else { lanes[lane] };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}
