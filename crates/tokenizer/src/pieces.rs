//! What each token contributes to the text: the decoder of a tokenizer, taken apart.
//!
//! A `tokenizers::Decoder` maps a whole list of tokens to text. To stream, the same map is needed one
//! token at a time, so the decoder is read once (through its own JSON form) into a [`Joining`] rule and
//! a table of pieces. Decoders that need more than the tokens before are refused at load.

use std::borrow::Cow;
use std::path::Path;
use tokenizers::{Decoder, DecoderWrapper, Tokenizer};

use crate::error::TokenizerError;
use lockstep_core::TokenId;

/// How neighbouring pieces become text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Joining {
    /// Pieces are bytes of one UTF-8 stream (`ByteLevel`).
    Bytes,
    /// Pieces are text, `<0xXX>` tokens are bytes (`ByteFallback`, `Fuse`); up to `strip_max` leading
    /// `strip` characters of the whole text are dropped (`Strip` after `Fuse`).
    Fallback {
        /// The character.
        strip: char,
        /// How many at most.
        strip_max: usize,
    },
    /// `replacement` becomes a space; in the first piece it is dropped when `drops_first`.
    Metaspace {
        /// Usually U+2581.
        replacement: char,
        /// The tokenizer prepended it to the text.
        drops_first: bool,
    },
    /// A space before each piece but the first, unless it begins with `prefix` (`WordPiece`).
    WordPiece {
        /// Usually `##`.
        prefix: String,
        /// Remove spaces before punctuation inside each piece.
        cleanup: bool,
    },
    /// No decoder: pieces joined with spaces, as `Tokenizer::decode` does.
    Spaced,
}

/// The pieces of a vocabulary, by token id.
#[derive(Debug)]
pub(crate) struct Pieces {
    pub(crate) joining: Joining,
    bytes: Vec<u8>,
    /// `ends[id]` is the end of the piece in `bytes`; its start is the end of the one before.
    ends: Vec<u32>,
    flags: Vec<u8>,
}

const EXISTS: u8 = 1;
const SPECIAL: u8 = 2;
const RAW_BYTE: u8 = 4;

/// One token's contribution.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    /// Text, or any bytes when joined as bytes.
    pub(crate) bytes: &'a [u8],
    /// Left out when special tokens are skipped.
    pub(crate) is_special: bool,
    /// A `<0xXX>` token: `bytes` is that byte.
    pub(crate) is_raw_byte: bool,
}

impl Pieces {
    /// Reads the vocabulary of `tokenizer`; `path` is for errors only.
    pub(crate) fn build(tokenizer: &Tokenizer, path: &Path) -> Result<Self, TokenizerError> {
        let (joining, token_steps) = read_decoder(tokenizer.get_decoder(), path)?;
        let added = tokenizer.get_added_vocabulary();
        let mut tokens: Vec<Option<String>> = Vec::new();
        for (token, id) in tokenizer.get_vocab(true) {
            let id = id as usize;
            if id >= VOCAB_MAX {
                return Err(TokenizerError::malformed(
                    path,
                    format!("token id {id} is above the limit {VOCAB_MAX}"),
                ));
            }
            tokens.resize(tokens.len().max(id + 1), None);
            tokens[id] = Some(token);
        }
        let mut pieces = Self { joining, bytes: Vec::new(), ends: Vec::new(), flags: Vec::new() };
        for token in tokens {
            let (mut flags, mut piece) = (0, Vec::new());
            if let Some(token) = token {
                flags = EXISTS | if added.is_special_token(&token) { SPECIAL } else { 0 };
                let (bytes, is_raw_byte) = pieces.piece_of(token, &token_steps, path)?;
                flags |= if is_raw_byte { RAW_BYTE } else { 0 };
                piece = bytes;
            }
            pieces.bytes.extend_from_slice(&piece);
            pieces
                .ends
                .push(u32::try_from(pieces.bytes.len()).map_err(|e| TokenizerError::malformed(path, e))?);
            pieces.flags.push(flags);
        }
        Ok(pieces)
    }

    /// One more than the highest id.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The piece of `id`; none for ids the tokenizer does not know (padding of the vocabulary).
    pub(crate) fn get(&self, id: TokenId) -> Option<Piece<'_>> {
        let id = id as usize;
        let flags = *self.flags.get(id)?;
        if flags & EXISTS == 0 {
            return None;
        }
        let start = if id == 0 { 0 } else { self.ends[id - 1] as usize };
        Some(Piece {
            bytes: &self.bytes[start..self.ends[id] as usize],
            is_special: flags & SPECIAL != 0,
            is_raw_byte: flags & RAW_BYTE != 0,
        })
    }

    /// The bytes that token `id` adds to a text in the middle of it; `None` for unknown ids.
    pub(crate) fn bytes_inside(&self, id: TokenId) -> Option<Cow<'_, [u8]>> {
        let bytes = self.get(id)?.bytes;
        let spaced = || Cow::Owned([b" ", bytes].concat());
        Some(match &self.joining {
            Joining::Bytes | Joining::Fallback { .. } => bytes.into(),
            Joining::Metaspace { replacement, .. } => {
                let text =
                    std::str::from_utf8(bytes).expect("invariant: pieces are text unless joined as bytes");
                Cow::Owned(text.replace(*replacement, " ").into_bytes())
            }
            Joining::WordPiece { prefix, .. } => match bytes.strip_prefix(prefix.as_bytes()) {
                Some(rest) => rest.into(),
                None => spaced(),
            },
            Joining::Spaced => spaced(),
        })
    }

    fn piece_of(
        &self,
        token: String,
        steps: &[DecoderWrapper],
        path: &Path,
    ) -> Result<(Vec<u8>, bool), TokenizerError> {
        match self.joining {
            Joining::Bytes => Ok((byte_level_bytes(&token), false)),
            Joining::Fallback { .. } => {
                let text = steps.iter().try_fold(token, |token, step| {
                    step.decode_chain(vec![token])
                        .map(|parts| parts.concat())
                        .map_err(|e| TokenizerError::malformed(path, e))
                })?;
                Ok(match fallback_byte(&text) {
                    Some(byte) => (vec![byte], true),
                    None => (text.into_bytes(), false),
                })
            }
            _ => Ok((token.into_bytes(), false)),
        }
    }
}

/// Highest token id that a real vocabulary can have.
const VOCAB_MAX: usize = 1 << 24;

/// The byte that a byte-level character stands for (GPT-2's printable byte alphabet).
fn byte_of_char(c: char) -> Option<u8> {
    match c as u32 {
        code @ (33..=126 | 161..=172 | 174..=255) => Some(code as u8),
        code @ 256..=288 => Some((code - 256) as u8),
        code @ 289..=322 => Some((code - 289 + 127) as u8),
        323 => Some(173),
        _ => None,
    }
}

/// Bytes of a byte-level token; a token with any other character (an added token) is its own UTF-8.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    token.chars().map(byte_of_char).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte of a `<0xXX>` token, by the rule of the `ByteFallback` decoder.
fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 || !hex.is_ascii() { None } else { u8::from_str_radix(hex, 16).ok() }
}

/// Splits a decoder into the joining rule and the steps that change single tokens before it.
fn read_decoder(
    decoder: Option<&DecoderWrapper>,
    path: &Path,
) -> Result<(Joining, Vec<DecoderWrapper>), TokenizerError> {
    let Some(decoder) = decoder else { return Ok((Joining::Spaced, Vec::new())) };
    let steps = match decoder {
        DecoderWrapper::Sequence(sequence) => sequence.get_decoders().to_vec(),
        single => vec![single.clone()],
    };
    let unsupported = || TokenizerError::Unsupported {
        path: path.into(),
        what: format!("the decoder {}", serde_json::to_string(decoder).unwrap_or_default()),
        supported:
            "ByteLevel, Metaspace, WordPiece, or a sequence of Replace, ByteFallback, Fuse and a leading \
                    Strip"
                .into(),
    };
    match &steps[..] {
        [DecoderWrapper::ByteLevel(_)] | [DecoderWrapper::ByteLevel(_), DecoderWrapper::Fuse(_)] => {
            Ok((Joining::Bytes, Vec::new()))
        }
        [DecoderWrapper::Metaspace(metaspace)] => {
            let drops_first =
                metaspace.get_prepend_scheme() != tokenizers::pre_tokenizers::metaspace::PrependScheme::Never;
            Ok((Joining::Metaspace { replacement: metaspace.get_replacement(), drops_first }, Vec::new()))
        }
        [DecoderWrapper::WordPiece(wordpiece)] => Ok((
            Joining::WordPiece { prefix: wordpiece.prefix.clone(), cleanup: wordpiece.cleanup },
            Vec::new(),
        )),
        _ => read_fallback_sequence(steps).ok_or_else(unsupported),
    }
}

/// `Replace*, ByteFallback?, Replace*, Fuse?, Strip(leading)?`: the decoders of converted
/// SentencePiece models (Llama 2, Mistral, Gemma, Phi-3).
fn read_fallback_sequence(steps: Vec<DecoderWrapper>) -> Option<(Joining, Vec<DecoderWrapper>)> {
    let (mut token_steps, mut is_fused) = (Vec::new(), false);
    let (mut strip, mut strip_max, mut falls_back) = (' ', 0, false);
    for step in steps {
        match step {
            DecoderWrapper::Replace(_) if !is_fused && !falls_back => token_steps.push(step),
            DecoderWrapper::ByteFallback(_) if !is_fused => falls_back = true,
            DecoderWrapper::Fuse(_) => is_fused = true,
            DecoderWrapper::Strip(s) if is_fused && s.stop == 0 && strip_max == 0 => {
                (strip, strip_max) = (s.content, s.start);
            }
            _ => return None,
        }
    }
    // Without ByteFallback a `<0xXX>` token is ordinary text, which `Fallback` would turn into bytes.
    falls_back.then_some((Joining::Fallback { strip, strip_max }, token_steps))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let mut seen = [false; 256];
        for code in 0..400 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of_char) {
                assert!(!std::mem::replace(&mut seen[byte as usize], true), "byte {byte} twice");
            }
        }
        assert!(seen.iter().all(|s| *s));
        assert_eq!(byte_level_bytes("Ġalpha"), b" alpha");
        assert_eq!(byte_level_bytes("Ċ"), b"\n");
        assert_eq!(byte_level_bytes("漢"), "漢".as_bytes());
    }

    #[test]
    fn fallback_tokens_are_recognised_exactly() {
        assert_eq!(fallback_byte("<0xE2>"), Some(0xE2));
        assert_eq!(fallback_byte("<0x0a>"), Some(0x0A));
        for text in ["<0xE>", "<0xGG>", "0xE2", "<0xE2> ", "<0xé>"] {
            assert_eq!(fallback_byte(text), None, "{text}");
        }
    }
}
