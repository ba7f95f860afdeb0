//! `clean_up_tokenization_spaces`: Hugging Face's removal of spaces before punctuation.
//!
//! Follows `clean_up_tokenization` of transformers (tokenization_utils_base.py): ten replacements, one
//! after the other over the whole text. Here they are ten streams in a row, so that the joined output
//! equals the replacement over the joined input. Only models whose tokenizer_config.json says `true`
//! get it; absent means off.

/// What is replaced by what, in transformers' order.
const RULES: [(&str, &str); 10] = [
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];

/// The ten replacements in a row. All patterns begin with a space and have none but possibly at their
/// end, so each stream holds at most one short suffix that begins with a space.
#[derive(Clone, Debug, Default)]
pub(crate) struct CleanupStream {
    held: [String; RULES.len()],
}

impl CleanupStream {
    /// Takes the next piece; appends what is decided to `out`.
    pub(crate) fn push(&mut self, text: &str, out: &mut String) {
        self.run(text, false, out);
    }

    /// The text is over: appends what was held back.
    pub(crate) fn flush(&mut self, out: &mut String) {
        self.run("", true, out);
    }

    fn run(&mut self, text: &str, is_end: bool, out: &mut String) {
        let mut piece = text.to_owned();
        for ((from, to), held) in RULES.iter().zip(&mut self.held) {
            held.push_str(&piece);
            #[cfg(test)]
            super::work::add(held.len());
            let keep = if is_end { 0 } else { open_suffix_len(held, from) };
            let rest = held.split_off(held.len() - keep);
            piece = held.replace(from, to);
            *held = rest;
        }
        out.push_str(&piece);
    }
}

/// Length of the longest proper prefix of `pattern` that `text` ends with, unless those bytes already
/// belong to a complete match (only `" ' "` ends as it begins).
fn open_suffix_len(text: &str, pattern: &str) -> usize {
    let longest = (1..pattern.len()).rev().find(|&len| text.ends_with(&pattern[..len])).unwrap_or(0);
    let Some(before) = text.len().checked_sub(longest) else { return 0 };
    // A leftmost, non-overlapping scan may have consumed the suffix's first byte already.
    let consumed_to = text.match_indices(pattern).last().map_or(0, |(at, m)| at + m.len());
    if consumed_to > before { 0 } else { longest }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_rng::Rng;

    #[test]
    fn equals_the_replacements_over_the_whole_text() {
        let alphabet = [' ', ' ', '.', '\'', 's', 'n', 't', 'm', 'v', 'e', 'é', ','];
        let mut rng = Rng::new(3);
        for _ in 0..50_000 {
            let text: String = (0..rng.below(16)).map(|_| alphabet[rng.below(alphabet.len())]).collect();
            let expected = RULES.iter().fold(text.clone(), |t, (from, to)| t.replace(from, to));
            let (mut stream, mut out) = (CleanupStream::default(), String::new());
            let mut chars = text.chars();
            loop {
                let piece: String = chars.by_ref().take(1 + rng.below(4)).collect();
                if piece.is_empty() {
                    break;
                }
                stream.push(&piece, &mut out);
            }
            stream.flush(&mut out);
            assert_eq!(out, expected, "text {text:?}");
        }
    }
}
