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

    /// Of a grammar that cannot be had: it allows end tokens only.
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
                tracing::warn!("a grammar failed and ends its answer: {error}");
                None
            }
        };
    }

    /// Makes impossible what the computed mask does not allow; everything but `eos_tokens` when the grammar has
    /// failed. Needs a [`compute_mask`](Self::compute_mask) since the last [`push`](Self::push).
    pub fn apply(&self, logits: &mut [f32], eos_tokens: &[TokenId]) {
        let Some(mask) = &self.mask else {
            return keep_only(logits, eos_tokens);
        };
        let words = mask.as_slice();
        let covered = logits.len().min(words.len() * 32);
        logits[covered..].fill(f32::NEG_INFINITY);
        for (part, &word) in logits.chunks_mut(32).zip(words) {
            // Most words of most masks allow nothing at all.
            match word {
                0 => part.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                bits => {
                    part.iter_mut().enumerate().filter(|(bit, _)| bits >> bit & 1 == 0).for_each(|(_, l)| {
                        *l = f32::NEG_INFINITY;
                    })
                }
            }
        }
    }

    /// These tokens were chosen.
    pub fn push(&mut self, tokens: &[TokenId]) {
        self.mask = None;
        if !self.inner.is_stopped()
            && let Err(error) = self.inner.consume_tokens(tokens)
        {
            tracing::warn!("a grammar failed and ends its answer: {error}");
        }
    }
}

fn keep_only(logits: &mut [f32], tokens: &[TokenId]) {
    for (id, logit) in logits.iter_mut().enumerate() {
        if !tokens.contains(&(id as TokenId)) {
            *logit = f32::NEG_INFINITY;
        }
    }
}
