//! Stop strings over a text that arrives in pieces.
//!
//! One Knuth-Morris-Pratt automaton per stop string (Knuth, Morris and Pratt 1977, "Fast pattern
//! matching in strings"): its state is the length of the longest prefix of the stop string that the
//! text ends with, which is exactly what must be held back.

use std::cmp::Reverse;

/// Finds the first stop string that completes.
///
/// **Invariants:** text is released in order and at most once; what is released can no longer be part
/// of a match; the result does not depend on how the text was cut into pieces. The match that
/// *completes* first wins (waiting for one that began earlier could wait for ever); when several
/// complete at the same byte, the longest wins, so the text ends before the earliest of them. Cost is
/// amortised O(1) per byte and stop string.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopMatcher {
    automata: Vec<Automaton>,
    held: String,
    /// The stop string that completes is part of the text.
    keeps_stop: bool,
    completed: Option<u32>,
}

#[derive(Clone, Debug)]
struct Automaton {
    /// Its stop string's place in the request's list.
    number: u32,
    stop: Box<[u8]>,
    /// `failure[k]`: longest proper prefix of `stop[..=k]` that is also its suffix.
    failure: Box<[u32]>,
    matched: usize,
}

impl StopMatcher {
    /// Empty stop strings are ignored (the api refuses them).
    pub(crate) fn new(stops: &[String], keeps_stop: bool) -> Self {
        let numbered = (0..).zip(stops).filter(|(_, stop)| !stop.is_empty());
        let automata = numbered.map(|(number, stop)| Automaton::new(number, stop.as_bytes())).collect();
        Self { automata, held: String::new(), keeps_stop, completed: None }
    }

    /// The number of the stop string that completed (of equal ones the first), if one did.
    pub(crate) fn completed(&self) -> Option<u32> {
        self.completed
    }

    /// Takes the next piece and appends what may be shown to `out`; only if `checks` can a stop string complete in it
    /// (it may begin in one before). True when a stop string
    /// completed: `out` then ends right before it (or behind it, if it is kept) and the rest of the text is dropped.
    pub(crate) fn push(&mut self, text: &str, checks: bool, out: &mut String) -> bool {
        #[cfg(test)]
        super::work::add(text.len() * self.automata.len().max(1) + self.held.len());
        if self.automata.is_empty() {
            out.push_str(text);
            return false;
        }
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            let complete = self.automata.iter_mut().filter_map(|a| Some((a.step(byte)?, a.number)));
            // Every automaton takes the byte.
            let complete = complete.max_by_key(|&(len, number)| (len, Reverse(number)));
            if let Some((stop_len, number)) = complete.filter(|_| checks) {
                self.completed = Some(number);
                self.held.push_str(&text[..=index]);
                let hidden = if self.keeps_stop { 0 } else { stop_len };
                self.held.truncate(self.held.len() - hidden);
                out.push_str(&self.held);
                self.held.clear();
                return true;
            }
        }
        self.held.push_str(text);
        let keep = self.automata.iter().map(Automaton::held).max().unwrap_or(0);
        let released = self.held.len() - keep;
        out.extend(self.held.drain(..released));
        false
    }

    /// The text is over: gives out what was held back.
    pub(crate) fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

impl Automaton {
    fn new(number: u32, stop: &[u8]) -> Self {
        let mut failure = vec![0_u32; stop.len()];
        let mut length = 0;
        for i in 1..stop.len() {
            while length > 0 && stop[i] != stop[length] {
                length = failure[length - 1] as usize;
            }
            length += usize::from(stop[i] == stop[length]);
            failure[i] = length as u32;
        }
        Self { number, stop: stop.into(), failure: failure.into(), matched: 0 }
    }

    /// Bytes at the text's end that may become its stop string.
    fn held(&self) -> usize {
        let is_complete = self.matched == self.stop.len();
        if is_complete { self.failure[self.matched - 1] as usize } else { self.matched }
    }

    /// Consumes one byte; the stop string's length when it is complete.
    fn step(&mut self, byte: u8) -> Option<usize> {
        // Complete, but not where it counted: what it ends with may begin another.
        if self.matched == self.stop.len() {
            self.matched = self.failure[self.matched - 1] as usize;
        }
        while self.matched > 0 && self.stop[self.matched] != byte {
            self.matched = self.failure[self.matched - 1] as usize;
        }
        self.matched += usize::from(self.stop[self.matched] == byte);
        (self.matched == self.stop.len()).then_some(self.stop.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_rng::Rng;

    /// The specification: grow the text character by character and look at its end.
    fn naive(text: &str, from: usize, stops: &[String], keeps_stop: bool) -> (String, Option<String>) {
        for (index, c) in text.char_indices().filter(|(index, _)| *index >= from) {
            let seen = &text[..index + c.len_utf8()];
            if let Some(stop) = stops.iter().filter(|s| seen.ends_with(s.as_str())).max_by_key(|s| s.len()) {
                let hidden = if keeps_stop { 0 } else { stop.len() };
                return (seen[..seen.len() - hidden].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    fn random_text(rng: &mut Rng, len_max: usize) -> String {
        (0..rng.below(len_max + 1)).map(|_| ['a', 'b', 'é', '漢'][rng.below(4)]).collect()
    }

    #[test]
    fn equals_the_specification_for_any_cut() {
        let mut rng = Rng::new(11);
        for round in 0..100_000 {
            let stops: Vec<String> =
                (0..1 + rng.below(3)).map(|_| random_text(&mut rng, 4)).filter(|s| !s.is_empty()).collect();
            let text = random_text(&mut rng, 14);
            let keeps_stop = rng.below(2) == 0;
            let cut = rng.below(2) * rng.below(text.chars().count() + 1);
            let unchecked = text.char_indices().nth(cut).map_or(text.len(), |(at, _)| at);
            let (expected, expected_stop) = naive(&text, unchecked, &stops, keeps_stop);
            let mut matcher = StopMatcher::new(&stops, keeps_stop);
            let (mut out, mut stopped) = (String::new(), false);
            if unchecked > 0 {
                assert!(!matcher.push(&text[..unchecked], false, &mut out));
            }
            let mut chars = text[unchecked..].chars();
            loop {
                let piece: String = chars.by_ref().take(1 + rng.below(3)).collect();
                if piece.is_empty() || stopped {
                    break;
                }
                stopped = matcher.push(&piece, true, &mut out);
                assert!(expected.starts_with(&out), "round {round}: released too much");
            }
            if !stopped {
                matcher.flush(&mut out);
            }
            let stop = matcher.completed().map(|number| stops[number as usize].clone());
            assert_eq!((stopped, stop.is_some()), (expected_stop.is_some(), stopped));
            assert_eq!((out, stop), (expected, expected_stop), "round {round}: {text:?} stops {stops:?}");
        }
    }

    #[test]
    fn holds_back_only_what_can_still_become_a_stop_string() {
        let (mut matcher, mut out) = (StopMatcher::new(&["</s>".into()], false), String::new());
        assert!(!matcher.push("a < b </", true, &mut out));
        assert_eq!(out, "a < b ");
        assert!(!matcher.push("i>", true, &mut out));
        assert_eq!(out, "a < b </i>");
    }

    #[test]
    fn an_adversarial_stop_string_stays_linear() {
        let (mut matcher, mut out) =
            (StopMatcher::new(&[format!("{}b", "a".repeat(1000))], false), String::new());
        for _ in 0..200_000 {
            assert!(!matcher.push("a", true, &mut out));
        }
        assert_eq!(out.len(), 200_000 - 1000);
    }
}
