//! A model's vocabulary as grammars see it.

use crate::matcher::Matcher;
use crate::{GrammarError, compile, factory};
use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use lockstep_core::{Grammar, TokenId};
use lockstep_wire::Vocabulary;
use std::sync::Arc;

/// Fresh matchers kept for the next request with the same grammar, which then compiles nothing.
const KEPT_MAX: usize = 16;

/// Makes matchers for one vocabulary. Building it costs about half a second and tens of MB for 150,000 tokens, so
/// it is done once, at the first grammar, off the rank's loop.
pub struct Grammars {
    factory: ParserFactory,
    /// Most recently used last.
    kept: Vec<(Grammar, Matcher)>,
}

/// Tells grammars that can be compiled from others. Needs none of a model's vocabulary but its special tokens,
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

    /// Whether `grammar` can be compiled; a millisecond for ordinary ones.
    pub fn check(&self, grammar: &Grammar) -> Result<(), GrammarError> {
        compile(&self.factory, grammar).map(|_| ())
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
        Ok(Self { factory: factory(&env(&words, eos_tokens))?, kept: Vec::new() })
    }

    /// The matcher of a new request.
    pub fn matcher(&mut self, grammar: &Grammar) -> Matcher {
        if let Some(at) = self.kept.iter().position(|(other, _)| other == grammar) {
            let kept = self.kept.remove(at);
            let matcher = kept.1.fresh();
            self.kept.push(kept);
            return matcher;
        }
        let matcher = Matcher::new(compile(&self.factory, grammar));
        if self.kept.len() == KEPT_MAX {
            self.kept.remove(0);
        }
        self.kept.push((grammar.clone(), matcher.fresh()));
        matcher
    }
}
