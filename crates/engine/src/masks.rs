//! The grammars' masks of one step, computed beside its forward pass.
//!
//! The tokens before a step are known when it is launched, so its masks depend on nothing that the forward pass
//! computes. They are spread over a few threads of their own: with a large vocabulary one mask takes up to half
//! a millisecond. Every rank computes every mask.

use crate::grammars::GrammarSource;
use lockstep_backend::sampler::argmax;
use lockstep_core::{Grammar, TokenId};
use lockstep_grammar::Matcher;
use std::thread::Scope;

/// Threads that compute masks beside a forward pass, at most.
const MASK_THREADS_MAX: usize = 4;

/// The place of one request's matcher.
#[derive(Default)]
pub(crate) struct MatcherSlot {
    matcher: Option<Matcher>,
}

impl MatcherSlot {
    /// Which tokens the grammar allows next, as [`Matcher::words`]; `None` when no step has asked yet.
    pub(crate) fn words(&self) -> Option<&[u32]> {
        self.matcher.as_ref().map(Matcher::words)
    }

    /// The end token that the grammar allows next, if it may end here.
    pub(crate) fn end_token(&self, eos_tokens: &[TokenId]) -> Option<TokenId> {
        self.matcher.as_ref()?.end_token(eos_tokens)
    }

    /// The largest logit of an allowed token, as [`Matcher::best`].
    pub(crate) fn best(&self, logits: &[f32], first_id: usize) -> Option<(f32, usize)> {
        match &self.matcher {
            None => argmax(logits),
            Some(matcher) => matcher.best(logits, first_id),
        }
    }

    /// A token was chosen.
    pub(crate) fn push(&mut self, token: TokenId) {
        if let Some(matcher) = &mut self.matcher {
            matcher.push(&[token]);
        }
    }
}

/// A matcher whose mask a step wants.
pub(crate) struct MaskJob<'a> {
    /// Where it is.
    pub(crate) slot: &'a mut MatcherSlot,
    /// What it matches.
    pub(crate) grammar: &'a Grammar,
    /// The answer so far, for a matcher that has to be made.
    pub(crate) output: &'a [TokenId],
}

/// Computes all masks on threads of `scope`, in which the caller runs the forward pass meanwhile. Matchers that
/// do not exist yet (new requests, and retracted ones) are made first, on one thread, in order.
pub(crate) fn compute<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    source: &'scope GrammarSource,
    jobs: Vec<MaskJob<'scope>>,
) {
    if jobs.is_empty() {
        return;
    }
    let (mut ready, new): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.slot.matcher.is_some());
    if !new.is_empty() {
        scope.spawn(move || {
            for job in new {
                let mut matcher = source.matcher(job.grammar);
                matcher.push(job.output);
                matcher.compute_mask();
                job.slot.matcher = Some(matcher);
            }
        });
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let per_thread = ready.len().div_ceil(cores.clamp(1, MASK_THREADS_MAX)).max(1);
    while !ready.is_empty() {
        let part = ready.split_off(ready.len().saturating_sub(per_thread));
        scope.spawn(move || {
            for job in part {
                job.slot.matcher.as_mut().into_iter().for_each(Matcher::compute_mask);
            }
        });
    }
}
