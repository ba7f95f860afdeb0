//! Bytes that arrive in pieces, given out as soon as they form characters.

/// How an invalid byte sequence is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replacement {
    /// One U+FFFD for each maximal invalid part, as `String::from_utf8_lossy` does.
    PerPart,
    /// One U+FFFD for each byte, as the `ByteFallback` decoder does.
    PerByte,
}

/// Holds the at most three bytes of a character that is not complete yet.
///
/// **Invariant:** with [`Replacement::PerPart`] the joined output equals `String::from_utf8_lossy` of
/// the joined input, however it is cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct Utf8Stream {
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Appends `bytes` and writes what is decided to `out`; linear in `bytes`.
    pub(crate) fn push(&mut self, bytes: &[u8], replacement: Replacement, out: &mut String) {
        #[cfg(test)]
        super::work::add(self.pending.len() + bytes.len());
        if self.pending.is_empty() {
            let rest = decode(bytes, replacement, out);
            self.pending.extend_from_slice(rest);
            return;
        }
        let mut joined = std::mem::take(&mut self.pending);
        joined.extend_from_slice(bytes);
        let rest = decode(&joined, replacement, out);
        self.pending.extend_from_slice(rest);
    }

    /// No more bytes belong to the pending character: shows it as invalid.
    pub(crate) fn flush(&mut self, replacement: Replacement, out: &mut String) {
        if !self.pending.is_empty() {
            replace(self.pending.len(), replacement, out);
            self.pending.clear();
        }
    }
}

/// Decodes all but an incomplete character at the end, which is returned.
fn decode<'a>(bytes: &'a [u8], replacement: Replacement, out: &mut String) -> &'a [u8] {
    let mut rest = bytes;
    while !rest.is_empty() {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => {
                let (valid, tail) = rest.split_at(error.valid_up_to());
                out.push_str(std::str::from_utf8(valid).expect("invariant: valid_up_to ends valid text"));
                let Some(bad_len) = error.error_len() else { return tail };
                replace(bad_len, replacement, out);
                rest = &tail[bad_len..];
            }
        }
    }
    rest
}

fn replace(byte_len: usize, replacement: Replacement, out: &mut String) {
    let count = if replacement == Replacement::PerByte { byte_len } else { 1 };
    out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_rng::Rng;

    #[test]
    fn any_cut_of_any_bytes_equals_the_lossy_decode() {
        let alphabet: &[u8] = &[b'a', 0xC3, 0xA9, 0xE6, 0xBC, 0xA2, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xED, 0xA0];
        let mut rng = Rng::new(7);
        for _ in 0..20_000 {
            let bytes: Vec<u8> = (0..rng.below(12)).map(|_| alphabet[rng.below(alphabet.len())]).collect();
            let (mut stream, mut out) = (Utf8Stream::default(), String::new());
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (head, tail) = rest.split_at(1 + rng.below(rest.len()));
                stream.push(head, Replacement::PerPart, &mut out);
                rest = tail;
            }
            stream.flush(Replacement::PerPart, &mut out);
            assert_eq!(out, String::from_utf8_lossy(&bytes), "bytes {bytes:x?}");
        }
    }

    #[test]
    fn a_character_waits_for_its_last_byte() {
        let (mut stream, mut out) = (Utf8Stream::default(), String::new());
        for byte in [0xF0, 0x9F, 0x98] {
            stream.push(&[byte], Replacement::PerByte, &mut out);
            assert_eq!(out, "");
        }
        stream.push(&[0x80], Replacement::PerByte, &mut out);
        assert_eq!(out, "😀");
    }
}
