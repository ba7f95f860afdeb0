//! A model's vocabulary as grammars see it.

use crate::matcher::Matcher;
use crate::{GrammarError, compile, factory, satisfiable};
use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use lockstep_core::{Grammar, TokenId};
use lockstep_wire::Vocabulary;
use std::sync::{Arc, Mutex, MutexGuard};

/// Fresh matchers kept for the next request with the same grammar, which then compiles nothing.
const KEPT_MAX: usize = 64;

/// Makes matchers for one vocabulary; shared between the thread that prepares grammars and the rank's loop.
/// Building it costs about half a second and tens of MB for 150,000 tokens, so it is done once, at the first
/// grammar, off the rank's loop.
pub struct Grammars {
    factory: ParserFactory,
    /// Most recently used last. Locked for look-ups and copies only, never while something is compiled.
    kept: Mutex<Vec<(Grammar, Matcher)>>,
}

/// Tells grammars that can be compiled and satisfied from others. Needs none of a model's vocabulary but its special tokens,
/// which grammars may name: how text is cut into tokens decides nothing here.
pub struct Checker {
    factory: ParserFactory,
}

impl Checker {
    /// For a model with these special tokens.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, GrammarError> {
        let special = vocabulary.tokens().filter(|(_, is_special)| *is_special);
        let mut words: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
        words.extend(special.map(|(bytes, _)| marked(bytes)));
        // The library wants an end token; which one does not matter here.
        words.push(marked(b"<|end of text|>"));
        Ok(Self { factory: factory(&env(&words, &[words.len() as TokenId - 1]))? })
    }

    /// Whether `grammar` can be compiled and some text satisfies it; a millisecond for ordinary ones.
    pub fn check(&self, grammar: &Grammar) -> Result<(), GrammarError> {
        compile(&self.factory, grammar).and_then(satisfiable::check)
    }
}

/// A special token is reached by its name only, never by the bytes of its spelling.
fn marked(bytes: &[u8]) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
}

fn env(words: &[Vec<u8>], eos_tokens: &[TokenId]) -> TokEnv {
    let last = words.len().saturating_sub(1) as TokenId;
    let info = TokRxInfo::new(words.len() as u32, eos_tokens.first().copied().unwrap_or(last));
    let trie = TokTrie::from(&info, words);
    let trie = if eos_tokens.len() > 1 { trie.with_eos_tokens(eos_tokens) } else { trie };
    Arc::new(ApproximateTokEnv::new(trie))
}

impl Grammars {
    /// For a model with `vocab_size` rows, of which `vocabulary` names the first ones, and these end tokens.
    pub fn new(
        vocabulary: &Vocabulary,
        vocab_size: usize,
        eos_tokens: &[TokenId],
    ) -> Result<Self, GrammarError> {
        let mut words = vec![Vec::new(); vocab_size];
        for (word, (bytes, is_special)) in words.iter_mut().zip(vocabulary.tokens()) {
            *word = if is_special { marked(bytes) } else { bytes.to_vec() };
        }
        Ok(Self { factory: factory(&env(&words, eos_tokens))?, kept: Mutex::default() })
    }

    /// Compiles `grammar`, if it is not kept already, and keeps it for [`matcher`](Self::matcher).
    pub fn prepare(&self, grammar: &Grammar) {
        if self.find(grammar).is_none() {
            self.keep(grammar, Matcher::new(compile(&self.factory, grammar)));
        }
    }

    /// The matcher of a new request: a copy of the kept one, else compiled now.
    pub fn matcher(&self, grammar: &Grammar) -> Matcher {
        if let Some(matcher) = self.find(grammar) {
            return matcher;
        }
        let matcher = Matcher::new(compile(&self.factory, grammar));
        self.keep(grammar, matcher.fresh());
        matcher
    }

    /// A copy of the kept matcher of `grammar`, which is the most recently used one from now on.
    fn find(&self, grammar: &Grammar) -> Option<Matcher> {
        let mut kept = self.kept();
        let at = kept.iter().position(|(other, _)| other == grammar)?;
        let found = kept.remove(at);
        let matcher = found.1.fresh();
        kept.push(found);
        Some(matcher)
    }

    fn keep(&self, grammar: &Grammar, matcher: Matcher) {
        let mut kept = self.kept();
        // A thread that compiled the same meanwhile does not count twice.
        kept.retain(|(other, _)| other != grammar);
        if kept.len() == KEPT_MAX {
            kept.remove(0);
        }
        kept.push((grammar.clone(), matcher));
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(Grammar, Matcher)>> {
        self.kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
