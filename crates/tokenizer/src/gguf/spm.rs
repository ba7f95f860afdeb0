//! SentencePiece BPE vocabularies (`tokenizer.ggml.model` = `llama`: Llama 2, Mistral, TinyLlama).
//!
//! SentencePiece merges the neighbouring pair whose result has the highest score. Hugging Face's
//! converted tokenizers do the same with explicit merges, generated from the scores; this follows
//! transformers convert_slow_tokenizer.py (`generate_merges`, `LlamaConverter`): legacy behaviour, a
//! space put before each stretch of text between special tokens.

use super::GgufVocab;
use crate::error::TokenizerError;
use std::collections::HashMap;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as DecoderSequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::utils::Sequence as NormalizerSequence;
use tokenizers::{NormalizerWrapper, Tokenizer};

/// U+2581, which stands for a space in SentencePiece vocabularies.
const META_SPACE: &str = "\u{2581}";
const NORMAL: i64 = 1;

/// Builds the tokenizer, without its special tokens.
pub(super) fn build(vocab: &GgufVocab) -> Result<Tokenizer, TokenizerError> {
    if vocab.scores.is_empty() {
        return Err(
            vocab.malformed("tokenizer.ggml.scores is missing, which a SentencePiece vocabulary needs")
        );
    }
    let unknown = vocab.unk.map(|id| vocab.tokens[id as usize].clone());
    let mut model = BPE::builder()
        .vocab_and_merges(vocab.vocabulary(), merges(vocab))
        .fuse_unk(true)
        .byte_fallback(true)
        // Without a pre-tokenizer the "words" are whole texts: remembering them helps nobody.
        .cache_capacity(0);
    if let Some(unknown) = unknown {
        model = model.unk_token(unknown);
    }
    let mut tokenizer = Tokenizer::new(model.build().map_err(|e| vocab.malformed(e))?);
    let prefix = vocab.add_space_prefix.unwrap_or(true);
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if prefix {
        steps.push(Prepend::new(META_SPACE.into()).into());
    }
    steps.push(Replace::new(" ", META_SPACE).map_err(|e| vocab.malformed(e))?.into());
    tokenizer.with_normalizer(Some(NormalizerSequence::new(steps))).map_err(|e| vocab.malformed(e))?;
    let mut decoders = vec![
        Replace::new(META_SPACE, " ").map_err(|e| vocab.malformed(e))?.into(),
        ByteFallback::default().into(),
        Fuse::default().into(),
    ];
    if prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_decoder(Some(DecoderSequence::new(decoders)));
    Ok(tokenizer)
}

/// All ways to join two tokens into a third, best score of the result first; ties by the order in
/// which `generate_merges` leaves them (longer left part, then longer right part, then as listed).
fn merges(vocab: &GgufVocab) -> Vec<(String, String)> {
    let is_normal = |id: usize| vocab.token_types.get(id).is_none_or(|kind| *kind == NORMAL);
    let ids: HashMap<&str, usize> = vocab.tokens.iter().enumerate().map(|(id, t)| (t.as_str(), id)).collect();
    let mut found: Vec<(f32, &str, &str)> = Vec::new();
    for (id, token) in vocab.tokens.iter().enumerate().filter(|(id, _)| is_normal(*id)) {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let mut local: Vec<(usize, usize, &str, &str)> =
            cuts.filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?, left, right))).collect();
        local.sort_unstable();
        found.extend(local.into_iter().map(|(_, _, left, right)| (vocab.scores[id], left, right)));
    }
    found.sort_by(|a, b| {
        let key = |m: &(f32, &str, &str)| (m.1.chars().count(), m.2.chars().count());
        b.0.total_cmp(&a.0).then_with(|| key(b).cmp(&key(a)))
    });
    found.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect()
}
