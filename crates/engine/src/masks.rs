//! The grammars' masks of one step, computed beside its forward pass.
//!
//! The tokens before a step are known when it is launched, so its masks depend on nothing that the forward pass
//! computes. They are spread over a few threads of their own: with a large vocabulary one mask takes up to half
//! a millisecond. Every rank computes every mask.

use lockstep_core::{Grammar, TokenId};
use lockstep_grammar::{GrammarError, Grammars, Matcher};
use lockstep_wire::Vocabulary;
use std::thread::{JoinHandle, Scope};

/// Threads that compute masks beside a forward pass, at most.
const MASK_THREADS_MAX: usize = 4;

/// Where matchers come from: built on a thread of its own from the vocabulary, once, since that takes half a
/// second for a large one.
#[derive(Default)]
pub(crate) enum GrammarSource {
    /// No vocabulary has come.
    #[default]
    Empty,
    /// Being built.
    Building(JoinHandle<Result<Grammars, GrammarError>>),
    /// Ready.
    Ready(Box<Grammars>),
    /// Every grammar ends its answer at once; the reason has been logged.
    Failed,
}

impl GrammarSource {
    /// Starts building, unless a vocabulary came before: tokenizers all send the same.
    pub(crate) fn begin(&mut self, vocabulary: Vocabulary, vocab_size: usize, eos_tokens: Vec<TokenId>) {
        if !matches!(self, GrammarSource::Empty) {
            return;
        }
        let build = move || Grammars::new(&vocabulary, vocab_size, &eos_tokens);
        *self = match std::thread::Builder::new().name("grammars".into()).spawn(build) {
            Ok(handle) => GrammarSource::Building(handle),
            Err(error) => Self::failed(&error.to_string()),
        };
    }

    /// A matcher for `grammar`; waits for a vocabulary that is being built.
    fn matcher(&mut self, grammar: &Grammar) -> Matcher {
        if matches!(self, GrammarSource::Building(_))
            && let GrammarSource::Building(handle) = std::mem::take(self)
        {
            *self = match handle.join() {
                Ok(Ok(grammars)) => GrammarSource::Ready(Box::new(grammars)),
                Ok(Err(error)) => Self::failed(&error.to_string()),
                Err(_) => Self::failed("the thread that prepares it panicked"),
            };
        }
        match self {
            GrammarSource::Ready(grammars) => grammars.matcher(grammar),
            _ => Matcher::failed("the vocabulary is not usable for grammars"),
        }
    }

    fn failed(reason: &str) -> Self {
        tracing::error!("the vocabulary cannot be prepared for structured output: {reason}");
        GrammarSource::Failed
    }
}

/// The place of one request's matcher.
#[derive(Default)]
pub(crate) struct MatcherSlot {
    matcher: Option<Matcher>,
}

impl MatcherSlot {
    /// Makes impossible what the grammar does not allow next.
    pub(crate) fn apply(&self, logits: &mut [f32], eos_tokens: &[TokenId]) {
        if let Some(matcher) = &self.matcher {
            matcher.apply(logits, eos_tokens);
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
    source: &'scope mut GrammarSource,
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
