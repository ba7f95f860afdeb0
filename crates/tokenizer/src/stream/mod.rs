//! Tokens to text, one request at a time, as they are generated.
//!
//! **Invariant:** the joined text of a request equals the full decode of its ids (by the Hugging Face
//! `tokenizers` library), cut before the stop string that completes first. It never splits a
//! character, keeps leading spaces, and leaves out special tokens by id, never by text. Cost is linear
//! in the tokens, also for tokens that decode to nothing.
//!
//! One documented difference, for byte-fallback vocabularies only: when `<0xXX>` tokens form valid
//! characters *followed* by an invalid byte, the library turns the whole run into U+FFFD, while here
//! the characters that were already sent stay. A text that ends inside a character shows U+FFFD.
//!
//! Called by the detokenizer worker. Bytes flow through [`utf8`] (whole characters), the decoder's own
//! rule, [`cleanup`] (only if the model asks for it) and [`stop`].

mod cleanup;
mod stop;
#[cfg(test)]
mod tests;
mod utf8;
#[cfg(test)]
mod work;

use crate::pieces::{Joining, Piece, Pieces};
use cleanup::CleanupStream;
use lockstep_core::TokenId;
use lockstep_wire::TextParams;
use stop::StopMatcher;
use utf8::{Replacement, Utf8Stream};

/// The text side of one running request.
#[derive(Clone, Debug)]
pub struct RequestDecoder {
    skip_special_tokens: bool,
    is_first: bool,
    strip_left: usize,
    utf8: Utf8Stream,
    cleanup: Option<CleanupStream>,
    stop: StopMatcher,
    /// Tokens to come whose text completes no stop string.
    unchecked_tokens: u32,
    /// Whether the newest token's text may complete one.
    checks_stop: bool,
    is_stopped: bool,
}

impl RequestDecoder {
    pub(crate) fn new(pieces: &Pieces, cleans_up: bool, params: &TextParams) -> Self {
        let strip_left = if let Joining::Fallback { strip_max, .. } = pieces.joining { strip_max } else { 0 };
        Self {
            skip_special_tokens: params.skip_special_tokens,
            is_first: true,
            strip_left,
            utf8: Utf8Stream::default(),
            cleanup: cleans_up.then(CleanupStream::default),
            stop: StopMatcher::new(&params.stop, params.keeps_stop),
            unchecked_tokens: params.min_tokens,
            checks_stop: params.min_tokens == 0,
            is_stopped: false,
        }
    }

    /// The text to come continues another one: its first token is no beginning.
    pub(crate) fn continue_text(&mut self) {
        self.is_first = false;
        self.strip_left = 0;
    }

    /// Takes one token and appends the text it decides to `out`. True once a stop string completed;
    /// `out` then ends right before it, and later tokens are ignored.
    pub(crate) fn push(&mut self, pieces: &Pieces, token: TokenId, out: &mut String) -> bool {
        if self.is_stopped {
            return true;
        }
        self.checks_stop = self.unchecked_tokens == 0;
        self.unchecked_tokens = self.unchecked_tokens.saturating_sub(1);
        let Some(piece) = pieces.get(token) else { return false };
        if piece.is_special && self.skip_special_tokens {
            return false;
        }
        let mut text = String::new();
        self.decode_piece(&pieces.joining, piece, &mut text);
        self.is_first = false;
        self.release(&text, out)
    }

    /// The request is over: appends everything held back. True when that completed a stop string.
    pub(crate) fn finish(&mut self, pieces: &Pieces, out: &mut String) -> bool {
        if self.is_stopped {
            return true;
        }
        let mut text = String::new();
        self.utf8.flush(replacement_of(&pieces.joining), &mut text);
        if self.release(&text, out) {
            return true;
        }
        if let Some(cleanup) = &mut self.cleanup {
            let mut rest = String::new();
            cleanup.flush(&mut rest);
            self.is_stopped = self.stop.push(&rest, self.checks_stop, out);
        }
        if !self.is_stopped {
            self.stop.flush(out);
        }
        self.is_stopped
    }

    /// The number of the stop string that completed, in the order of the request's list.
    pub fn stop_string(&self) -> Option<u32> {
        self.stop.completed()
    }

    /// Whether a stop string has completed.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// The decoder's own rule.
    fn decode_piece(&mut self, joining: &Joining, piece: Piece<'_>, text: &mut String) {
        if let Joining::Bytes = joining {
            return self.utf8.push(piece.bytes, Replacement::PerPart, text);
        }
        if piece.is_raw_byte {
            self.utf8.push(piece.bytes, Replacement::PerByte, text);
            return self.strip_leading(joining, text);
        }
        let token =
            std::str::from_utf8(piece.bytes).expect("invariant: pieces are text unless joined as bytes");
        match joining {
            Joining::Bytes | Joining::Fallback { .. } => {
                self.utf8.flush(Replacement::PerByte, text);
                text.push_str(token);
                self.strip_leading(joining, text);
            }
            Joining::Metaspace { replacement, drops_first } => {
                let drops = self.is_first && *drops_first;
                text.extend(token.chars().filter_map(|c| match c == *replacement {
                    true if drops => None,
                    true => Some(' '),
                    false => Some(c),
                }));
            }
            Joining::WordPiece { prefix, cleanup } => {
                let joined = match token.strip_prefix(prefix.as_str()) {
                    _ if self.is_first => token.to_owned(),
                    Some(rest) => rest.to_owned(),
                    None => format!(" {token}"),
                };
                text.push_str(&if *cleanup {
                    tokenizers::decoders::wordpiece::cleanup(&joined)
                } else {
                    joined
                });
            }
            Joining::Spaced => {
                if !self.is_first {
                    text.push(' ');
                }
                text.push_str(token);
            }
        }
    }

    /// Drops leading strip characters of the whole text, as far as they have not been seen yet.
    fn strip_leading(&mut self, joining: &Joining, text: &mut String) {
        let Joining::Fallback { strip, .. } = joining else { return };
        while self.strip_left > 0 && text.starts_with(*strip) {
            text.remove(0);
            self.strip_left -= 1;
        }
        if !text.is_empty() {
            self.strip_left = 0;
        }
    }

    fn release(&mut self, text: &str, out: &mut String) -> bool {
        if text.is_empty() {
            return false;
        }
        self.is_stopped = match &mut self.cleanup {
            None => self.stop.push(text, self.checks_stop, out),
            Some(cleanup) => {
                let mut clean = String::new();
                cleanup.push(text, &mut clean);
                self.stop.push(&clean, self.checks_stop, out)
            }
        };
        self.is_stopped
    }
}

fn replacement_of(joining: &Joining) -> Replacement {
    if *joining == Joining::Bytes { Replacement::PerPart } else { Replacement::PerByte }
}
