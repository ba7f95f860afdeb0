//! Prepares grammars on a thread of its own, so that no step waits for one.
//!
//! The thread builds what the vocabulary needs once, then compiles one grammar per order. How many orders it has
//! carried out is exchanged between ranks, and a request takes part in steps only once its grammar is prepared on
//! all of them ([`crate::gate`]).

use lockstep_core::{Grammar, TokenId};
use lockstep_grammar::{GrammarError, Grammars, Matcher};
use lockstep_wire::Vocabulary;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

/// Where a rank's matchers come from.
#[derive(Default)]
pub(crate) struct GrammarSource {
    /// To the thread, which ends with this end of the channel. `None` before a vocabulary has come.
    orders: Option<Sender<Grammar>>,
    shared: Arc<Shared>,
}

/// What the thread gives.
#[derive(Default)]
struct Shared {
    /// Empty until the vocabulary is prepared, and for ever if that fails: then no grammar allows any token.
    grammars: OnceLock<Grammars>,
    /// Orders carried out.
    prepared: AtomicU64,
}

impl GrammarSource {
    /// Starts the thread, unless a vocabulary came before: tokenizers all send the same.
    pub(crate) fn begin(&mut self, vocabulary: Vocabulary, vocab_size: usize, eos_tokens: Vec<TokenId>) {
        if self.orders.is_some() {
            return;
        }
        let (orders, inbox) = channel();
        let shared = Arc::clone(&self.shared);
        let build = move || Grammars::new(&vocabulary, vocab_size, &eos_tokens);
        let thread = std::thread::Builder::new().name("grammars".into());
        match thread.spawn(move || shared.serve(build, &inbox)) {
            Ok(_) => self.orders = Some(orders),
            Err(error) => unusable(&error.to_string()),
        }
    }

    /// Orders `grammar` to be prepared.
    pub(crate) fn prepare(&mut self, grammar: Grammar) {
        let is_ordered = self.orders.as_ref().is_some_and(|orders| orders.send(grammar).is_ok());
        if !is_ordered {
            // There is nothing to prepare: its matcher is one that fails.
            self.shared.prepared.fetch_add(1, Ordering::Release);
        }
    }

    /// Orders carried out so far.
    pub(crate) fn prepared(&self) -> u64 {
        self.count().get()
    }

    /// Their number, for another thread.
    pub(crate) fn count(&self) -> PreparedCount {
        PreparedCount(Arc::clone(&self.shared))
    }

    /// A matcher for `grammar`, at once if it is prepared and has not been given up since; otherwise the caller
    /// compiles it, which a budget bounds.
    pub(crate) fn matcher(&self, grammar: &Grammar) -> Matcher {
        match self.shared.grammars.get() {
            Some(grammars) => grammars.matcher(grammar),
            None => Matcher::failed("the vocabulary is not usable for grammars"),
        }
    }
}

/// How many orders have been carried out, as it grows.
pub(crate) struct PreparedCount(Arc<Shared>);

impl PreparedCount {
    /// So far.
    pub(crate) fn get(&self) -> u64 {
        self.0.prepared.load(Ordering::Acquire)
    }
}

impl Shared {
    /// The thread: until the orders end.
    fn serve(&self, build: impl FnOnce() -> Result<Grammars, GrammarError>, orders: &Receiver<Grammar>) {
        match catch_unwind(AssertUnwindSafe(build)) {
            Ok(Ok(grammars)) => drop(self.grammars.set(grammars)),
            Ok(Err(error)) => unusable(&error.to_string()),
            Err(_) => unusable("the library that prepares it panicked"),
        }
        for grammar in orders {
            if let Some(grammars) = self.grammars.get() {
                grammars.prepare(&grammar);
            }
            self.prepared.fetch_add(1, Ordering::Release);
        }
    }
}

fn unusable(reason: &str) {
    tracing::error!("the vocabulary cannot be prepared for structured output: {reason}");
}

#[cfg(test)]
mod tests {
    use super::*;

    const EOS: TokenId = 256;

    fn allowed(mut matcher: Matcher) -> Vec<TokenId> {
        matcher.compute_mask();
        let word = |id: TokenId| matcher.words().get(id as usize / 32).copied().unwrap_or(0);
        (0..257).filter(|id| word(*id) >> (id % 32) & 1 == 1).collect()
    }

    #[test]
    fn orders_are_counted_when_carried_out_and_bad_ones_too() {
        let mut source = GrammarSource::default();
        let good = Grammar::Choice(vec!["a".into()]);
        source.prepare(good.clone());
        assert_eq!(source.prepared(), 1, "no vocabulary: nothing to wait for");
        assert!(allowed(source.matcher(&good)).is_empty());
        let mut vocabulary = Vocabulary::default();
        (0..=u8::MAX).for_each(|byte| vocabulary.push(&[byte], false));
        vocabulary.push(b"<|eos|>", true);
        source.begin(vocabulary.clone(), 257, vec![EOS]);
        source.begin(vocabulary, 257, vec![EOS]);
        source.prepare(Grammar::Regex("(".into()));
        source.prepare(good.clone());
        while source.prepared() < 3 {
            std::thread::yield_now();
        }
        assert_eq!(allowed(source.matcher(&good)), [u32::from(b'a')]);
        assert!(allowed(source.matcher(&Grammar::Regex("(".into()))).is_empty());
    }
}
