//! Typed access to the keys of a GGUF file, straight from the mapping.
//!
//! The tokenizer crate reads vocabulary, merges and chat template from here. Nothing is copied: a
//! vocabulary of 150,000 tokens costs memory only where its user copies it.

use super::header::{Cursor, Entry, ValueKind};
use crate::mapped::MappedFile;
use lockstep_core::TokenId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The metadata of one open GGUF file.
///
/// A getter gives `None` when the key is absent or has another type; integers of every width and
/// sign are one type here.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: Arc<MappedFile>,
    entries: Arc<BTreeMap<String, Entry>>,
}

impl Metadata {
    pub(crate) fn new(file: Arc<MappedFile>, entries: BTreeMap<String, Entry>) -> Self {
        Self { file, entries: Arc::new(entries) }
    }

    /// All keys in order of name.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Whether the file has `key`, of whatever type.
    pub fn contains(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// A text.
    pub fn text(&self, key: &str) -> Option<&str> {
        let (entry, bytes) = self.single(key)?;
        if entry.kind != ValueKind::Text {
            return None;
        }
        Cursor::new(bytes).text(key).ok()
    }

    /// A whole number.
    pub fn integer(&self, key: &str) -> Option<i64> {
        let (entry, bytes) = self.single(key)?;
        integer(entry.kind, bytes)
    }

    /// A float, or a whole number as a float.
    pub fn number(&self, key: &str) -> Option<f64> {
        let (entry, bytes) = self.single(key)?;
        number(entry.kind, bytes)
    }

    /// A truth value.
    pub fn flag(&self, key: &str) -> Option<bool> {
        let (entry, bytes) = self.single(key)?;
        (entry.kind == ValueKind::Bool).then(|| bytes[0] != 0)
    }

    /// An array of texts.
    pub fn texts(&self, key: &str) -> Option<Texts<'_>> {
        let (count, kind, bytes) = self.array(key)?;
        (kind == ValueKind::Text).then(|| Texts { cursor: Cursor::new(bytes), left: count })
    }

    /// An array of whole numbers.
    pub fn integers(&self, key: &str) -> Option<impl ExactSizeIterator<Item = i64>> {
        let (_, kind, bytes) = self.array(key)?;
        let size = kind.size_bytes()?;
        if matches!(kind, ValueKind::F32 | ValueKind::F64 | ValueKind::Bool) {
            return None;
        }
        // An unsigned value that no i64 holds cannot be a token type or id: it reads as i64::MAX.
        Some(bytes.chunks_exact(size).map(move |b| integer(kind, b).unwrap_or(i64::MAX)))
    }

    /// An array of floats.
    pub fn numbers(&self, key: &str) -> Option<impl ExactSizeIterator<Item = f64>> {
        let (_, kind, bytes) = self.array(key)?;
        let size = kind.size_bytes()?;
        if kind == ValueKind::Bool {
            return None;
        }
        Some(bytes.chunks_exact(size).map(move |b| number(kind, b).unwrap_or(f64::NAN)))
    }

    /// An array of truth values.
    pub fn flags(&self, key: &str) -> Option<impl ExactSizeIterator<Item = bool>> {
        let (_, kind, bytes) = self.array(key)?;
        (kind == ValueKind::Bool).then(|| bytes.iter().map(|b| *b != 0))
    }

    /// The value in words, for messages: a number, a quoted text, or the length of an array.
    pub fn describe(&self, key: &str) -> String {
        let Some(entry) = self.entries.get(key) else { return "absent".into() };
        if let Some(count) = entry.count {
            return format!("an array of {count}");
        }
        if let Some(text) = self.text(key) {
            let head: String = text.chars().take(40).collect();
            return format!("{head:?}");
        }
        match (self.flag(key), self.integer(key), self.number(key)) {
            (Some(flag), _, _) => flag.to_string(),
            (_, Some(integer), _) => integer.to_string(),
            (_, _, Some(number)) => number.to_string(),
            _ => "a number beyond 2^63".into(),
        }
    }

    fn single(&self, key: &str) -> Option<(&Entry, &[u8])> {
        let entry = self.entries.get(key).filter(|e| e.count.is_none())?;
        Some((entry, &self.file.bytes()[entry.bytes.clone()]))
    }

    fn array(&self, key: &str) -> Option<(usize, ValueKind, &[u8])> {
        let entry = self.entries.get(key)?;
        Some((entry.count?, entry.kind, &self.file.bytes()[entry.bytes.clone()]))
    }
}

/// The keys of a tokenizer, under the names of the format's description.
impl Metadata {
    /// Kind of tokenizer: `gpt2` (byte-level BPE), `llama` (SentencePiece), `bert`, ...
    pub fn tokenizer_model(&self) -> Option<&str> {
        self.text("tokenizer.ggml.model")
    }

    /// Name of the pre-tokenizer's splitting rules, e.g. `qwen2`, `smollm`, `llama-bpe`.
    pub fn pre_tokenizer(&self) -> Option<&str> {
        self.text("tokenizer.ggml.pre")
    }

    /// The vocabulary in order of token id.
    pub fn tokens(&self) -> Option<Texts<'_>> {
        self.texts("tokenizer.ggml.tokens")
    }

    /// Type of each token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub fn token_types(&self) -> Option<impl ExactSizeIterator<Item = i64>> {
        self.integers("tokenizer.ggml.token_type")
    }

    /// Score of each token (SentencePiece).
    pub fn scores(&self) -> Option<impl ExactSizeIterator<Item = f64>> {
        self.numbers("tokenizer.ggml.scores")
    }

    /// BPE merges in order of rank, each two pieces with a space between.
    pub fn merges(&self) -> Option<Texts<'_>> {
        self.texts("tokenizer.ggml.merges")
    }

    /// The chat template (Jinja).
    pub fn chat_template(&self) -> Option<&str> {
        self.text("tokenizer.chat_template")
    }

    /// Beginning-of-text token.
    pub fn bos_token(&self) -> Option<TokenId> {
        self.token("tokenizer.ggml.bos_token_id")
    }

    /// End-of-text token.
    pub fn eos_token(&self) -> Option<TokenId> {
        self.token("tokenizer.ggml.eos_token_id")
    }

    /// Every token that ends an answer: end of text, of turn and of message; as listed, may repeat.
    pub fn end_tokens(&self) -> impl Iterator<Item = TokenId> {
        ["eos", "eot", "eom"].into_iter().filter_map(|n| self.token(&format!("tokenizer.ggml.{n}_token_id")))
    }

    /// Token for text that the vocabulary cannot express.
    pub fn unknown_token(&self) -> Option<TokenId> {
        self.token("tokenizer.ggml.unknown_token_id")
    }

    /// Padding token.
    pub fn padding_token(&self) -> Option<TokenId> {
        self.token("tokenizer.ggml.padding_token_id")
    }

    /// Whether a prompt starts with the beginning-of-text token, if the file says so.
    pub fn add_bos(&self) -> Option<bool> {
        self.flag("tokenizer.ggml.add_bos_token")
    }

    /// Whether a prompt ends with the end-of-text token, if the file says so.
    pub fn add_eos(&self) -> Option<bool> {
        self.flag("tokenizer.ggml.add_eos_token")
    }

    /// Whether a space is put before the text (SentencePiece), if the file says so.
    pub fn add_space_prefix(&self) -> Option<bool> {
        self.flag("tokenizer.ggml.add_space_prefix")
    }

    /// A token id; llama.cpp's -1 ("none") and its u32 form read as absent.
    fn token(&self, key: &str) -> Option<TokenId> {
        self.integer(key).and_then(|id| TokenId::try_from(id).ok()).filter(|id| *id != TokenId::MAX)
    }
}

/// Iterator over an array of texts.
pub struct Texts<'a> {
    cursor: Cursor<'a>,
    left: usize,
}

impl<'a> Iterator for Texts<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        self.left = self.left.checked_sub(1)?;
        Some(self.cursor.text("array of texts").expect("invariant: checked when the file was opened"))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Texts<'_> {}

/// The first `N` bytes; every caller passes at least `ValueKind::size_bytes` of them.
fn head<const N: usize>(bytes: &[u8]) -> [u8; N] {
    *bytes.first_chunk().expect("invariant: the header's parser took this value's size")
}

fn integer(kind: ValueKind, bytes: &[u8]) -> Option<i64> {
    Some(match kind {
        ValueKind::U8 => i64::from(bytes[0]),
        ValueKind::I8 => i64::from(bytes[0] as i8),
        ValueKind::U16 => i64::from(u16::from_le_bytes(head(bytes))),
        ValueKind::I16 => i64::from(i16::from_le_bytes(head(bytes))),
        ValueKind::U32 => i64::from(u32::from_le_bytes(head(bytes))),
        ValueKind::I32 => i64::from(i32::from_le_bytes(head(bytes))),
        ValueKind::U64 => i64::try_from(u64::from_le_bytes(head(bytes))).ok()?,
        ValueKind::I64 => i64::from_le_bytes(head(bytes)),
        ValueKind::F32 | ValueKind::F64 | ValueKind::Bool | ValueKind::Text => return None,
    })
}

fn number(kind: ValueKind, bytes: &[u8]) -> Option<f64> {
    match kind {
        ValueKind::F32 => Some(f64::from(f32::from_le_bytes(head(bytes)))),
        ValueKind::F64 => Some(f64::from_le_bytes(head(bytes))),
        _ => integer(kind, bytes).map(|i| i as f64),
    }
}
