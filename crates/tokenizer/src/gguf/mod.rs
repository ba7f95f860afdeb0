//! A tokenizer from the metadata of a GGUF file, token for token equal to the Hugging Face one.
//!
//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`) is built from tokens, merges and the named
//! pre-tokenizer ([`pretokenizer`]); SentencePiece BPE (`llama`) from tokens and scores ([`spm`]).
//! Other kinds are refused by name. Vocabularies are read once, at load.
//!
//! **Difference kept on purpose:** GGUF marks every `<|...|>` token as control, also those that the
//! original marks as ordinary added tokens (`<|fim_prefix|>` of Qwen2.5). Encoding is the same; when
//! special tokens are skipped, such a token is left out of the text.

pub(crate) mod open;
pub(crate) mod pretokenizer;
mod spm;
#[cfg(test)]
mod tests;

use crate::chat::TemplateSources;
use crate::error::TokenizerError;
use lockstep_core::TokenId;
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

/// The token types of the format's description that matter here.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
/// Padding rows of the embedding; the original tokenizer does not know them.
const UNUSED: i64 = 5;
/// Most tokens a vocabulary may have.
const TOKENS_MAX: usize = 1 << 22;

/// The text-related metadata of a GGUF file.
#[derive(Clone, Debug, Default)]
pub(crate) struct GgufVocab {
    /// For messages only.
    pub(crate) path: PathBuf,
    /// `gpt2`, `llama`, ...
    pub(crate) model: String,
    /// Name of the pre-tokenizer.
    pub(crate) pre: Option<String>,
    pub(crate) tokens: Vec<String>,
    /// Empty, or one per token.
    pub(crate) token_types: Vec<i64>,
    /// Empty, or one per token.
    pub(crate) scores: Vec<f32>,
    /// Two pieces with a space between.
    pub(crate) merges: Vec<String>,
    pub(crate) bos: Option<TokenId>,
    pub(crate) eos: Option<TokenId>,
    /// All tokens that end an answer (end of text, of turn, of message), in the file's order.
    pub(crate) ends: Vec<TokenId>,
    pub(crate) unk: Option<TokenId>,
    pub(crate) pad: Option<TokenId>,
    pub(crate) add_bos: Option<bool>,
    pub(crate) add_eos: Option<bool>,
    pub(crate) add_space_prefix: Option<bool>,
    pub(crate) templates: TemplateSources,
}

impl GgufVocab {
    /// Builds the tokenizer.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        self.check()?;
        let mut tokenizer = match self.model.as_str() {
            "gpt2" => self.byte_level_bpe()?,
            "llama" => spm::build(self)?,
            other => {
                return Err(self.unsupported(
                    format!("tokenizer.ggml.model {other:?}"),
                    "gpt2 (byte-level BPE) and llama (SentencePiece BPE)",
                ));
            }
        };
        let added = (0..self.tokens.len()).filter_map(|id| self.added_token(id));
        tokenizer.add_tokens(added).map_err(|e| self.malformed(e))?;
        if let Some(template) = self.special_token_template()? {
            tokenizer.with_post_processor(Some(template));
        }
        Ok(tokenizer)
    }

    /// `bos_token` → its text, and so on, as chat templates see them.
    pub(crate) fn special_tokens(&self) -> BTreeMap<String, String> {
        [("bos_token", self.bos), ("eos_token", self.eos), ("unk_token", self.unk), ("pad_token", self.pad)]
            .into_iter()
            .filter_map(|(name, id)| Some((name.to_owned(), self.tokens.get(id? as usize)?.clone())))
            .collect()
    }

    fn check(&self) -> Result<(), TokenizerError> {
        let count = self.tokens.len();
        if count == 0 || count > TOKENS_MAX {
            return Err(self.malformed(format!(
                "tokenizer.ggml.tokens has {count} tokens, 1..={TOKENS_MAX} are accepted"
            )));
        }
        for (key, len) in [("token_type", self.token_types.len()), ("scores", self.scores.len())] {
            if len != 0 && len != count {
                return Err(
                    self.malformed(format!("tokenizer.ggml.{key} has {len} entries for {count} tokens"))
                );
            }
        }
        let specials = [self.bos, self.eos, self.unk, self.pad];
        if let Some(id) =
            specials.into_iter().flatten().chain(self.ends.iter().copied()).find(|id| *id as usize >= count)
        {
            return Err(self.malformed(format!("special token id {id} is outside the {count} tokens")));
        }
        Ok(())
    }

    /// The tokens that are cut out of the text before anything else looks at it.
    fn added_token(&self, id: usize) -> Option<AddedToken> {
        let kind = *self.token_types.get(id)?;
        let is_special = kind == CONTROL;
        (is_special || kind == USER_DEFINED)
            .then(|| AddedToken::from(self.tokens[id].clone(), is_special).normalized(false))
    }

    fn byte_level_bpe(&self) -> Result<Tokenizer, TokenizerError> {
        let name = self.pre.as_deref().unwrap_or(pretokenizer::DEFAULT);
        let Some(rules) = pretokenizer::rules(name) else {
            return Err(self.unsupported(
                format!("the pre-tokenizer tokenizer.ggml.pre {name:?}"),
                &pretokenizer::NAMES.join(", "),
            ));
        };
        let vocab = self.vocabulary();
        let merges = self.checked_merges()?;
        let model = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(rules.ignores_merges)
            .build()
            .map_err(|e| self.malformed(e))?;
        let mut tokenizer = Tokenizer::new(model);
        if rules.normalises_nfc {
            tokenizer.with_normalizer(Some(NFC)).map_err(|e| self.malformed(e))?;
        }
        let pre_tokenizer = pretokenizer::build(&rules).map_err(|e| self.malformed(e))?;
        tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        Ok(tokenizer)
    }

    /// Token text → id, without unused tokens. Of tokens with the same text the first keeps it.
    fn vocabulary(&self) -> Vocab {
        let mut vocab = Vocab::default();
        for (id, token) in self.used_tokens() {
            vocab.entry(token.clone()).or_insert(id as TokenId);
        }
        vocab
    }

    fn used_tokens(&self) -> impl Iterator<Item = (usize, &String)> {
        self.tokens.iter().enumerate().filter(|(id, _)| self.token_types.get(*id) != Some(&UNUSED))
    }

    /// The merges as pairs. Refuses any whose parts or result is not a token: the library would panic.
    fn checked_merges(&self) -> Result<Vec<(String, String)>, TokenizerError> {
        let known: HashSet<&str> = self.used_tokens().map(|(_, token)| token.as_str()).collect();
        self.merges
            .iter()
            .enumerate()
            .map(|(rank, merge)| {
                let (left, right) = merge.split_once(' ').ok_or_else(|| {
                    self.malformed(format!("merge {rank} is {merge:?}, not two pieces with a space"))
                })?;
                let joined = format!("{left}{right}");
                match [left, right, &joined].into_iter().find(|piece| !known.contains(piece)) {
                    Some(piece) => Err(self
                        .malformed(format!("merge {rank} ({merge:?}) needs {piece:?}, which is no token"))),
                    None => Ok((left.to_owned(), right.to_owned())),
                }
            })
            .collect()
    }

    /// Puts the beginning-of-text token before a prompt, if the file (or its pre-tokenizer's
    /// convention) says so.
    fn special_token_template(&self) -> Result<Option<TemplateProcessing>, TokenizerError> {
        let by_convention = match self.model.as_str() {
            "llama" => true,
            _ => self.pre.as_deref().and_then(pretokenizer::rules).is_some_and(|rules| rules.adds_bos),
        };
        let bos = self.bos.filter(|_| self.add_bos.unwrap_or(by_convention));
        let eos = self.eos.filter(|_| self.add_eos.unwrap_or(false));
        if bos.is_none() && eos.is_none() {
            return Ok(None);
        }
        let name = |id: Option<TokenId>| id.map(|id| (self.tokens[id as usize].clone(), id));
        let (bos, eos) = (name(bos), name(eos));
        let mut single = Vec::new();
        single.extend(bos.as_ref().map(|_| "BOS".to_owned()));
        single.push("$A".into());
        single.extend(eos.as_ref().map(|_| "EOS".to_owned()));
        let special = |alias: &str, token: Option<(String, TokenId)>| {
            token.map(|(text, id)| {
                tokenizers::processors::template::SpecialToken::new(alias.into(), vec![id], vec![text])
            })
        };
        let tokens: Vec<_> = [special("BOS", bos), special("EOS", eos)]
            .into_iter()
            .flatten()
            .collect::<Result<_, _>>()
            .map_err(|e| self.malformed(e))?;
        TemplateProcessing::builder()
            .try_single(single)
            .map_err(|e| self.malformed(e))?
            .special_tokens(tokens)
            .build()
            .map(Some)
            .map_err(|e| self.malformed(e))
    }

    fn malformed(&self, reason: impl std::fmt::Display) -> TokenizerError {
        TokenizerError::malformed(&self.path, reason)
    }

    fn unsupported(&self, what: String, supported: &str) -> TokenizerError {
        TokenizerError::Unsupported { path: self.path.clone(), what, supported: supported.into() }
    }
}
