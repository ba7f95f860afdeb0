//! Changed inputs without knowledge of their language: what libFuzzer does, for a fixed number of tries in a test.
//!
//! Deterministic: a corpus and a seed give the same inputs everywhere.

use lockstep_core::random::splitmix64;

/// Longest input.
const BYTES_MAX: usize = 1 << 16;
/// Numbers at whose edges code goes wrong.
const EDGES: [u64; 10] =
    [0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, i64::MAX as u64, u64::MAX];

/// Makes inputs out of others.
pub struct Mutator<'a> {
    corpus: &'a [Vec<u8>],
    words: &'a [&'a str],
    state: u64,
}

impl<'a> Mutator<'a> {
    /// Panics when the corpus is empty.
    pub fn new(corpus: &'a [Vec<u8>], words: &'a [&'a str], seed: u64) -> Self {
        assert!(!corpus.is_empty(), "a corpus to begin with");
        Self { corpus, words, state: seed }
    }

    /// The next input: one of the corpus, changed one to eight times.
    pub fn next_input(&mut self) -> Vec<u8> {
        let mut input = self.pick().to_vec();
        for _ in 0..=self.below(8) {
            self.change(&mut input);
        }
        input.truncate(BYTES_MAX);
        input
    }

    fn pick(&mut self) -> &'a [u8] {
        &self.corpus[self.below(self.corpus.len())]
    }

    /// Below `n`, which is not 0.
    fn below(&mut self, n: usize) -> usize {
        (splitmix64(&mut self.state) % n as u64) as usize
    }

    /// A part of something that has `len` bytes.
    fn part(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.below(len + 1);
        let longest = (len - start).min(1 << self.below(9));
        start..start + self.below(longest + 1)
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let part = self.part(input.len());
        match self.below(9) {
            0 => drop(input.drain(part)),
            1 => {
                let copy = input[part].to_vec();
                self.insert(input, &copy);
            }
            2 => {
                let other = self.pick();
                let piece = other[self.part(other.len())].to_vec();
                self.insert(input, &piece);
            }
            3 if !self.words.is_empty() => {
                let word = self.words[self.below(self.words.len())];
                self.insert(input, word.as_bytes());
            }
            4 if !self.words.is_empty() => {
                let word = self.words[self.below(self.words.len())];
                input.splice(part, word.bytes());
            }
            5 => {
                let edge = EDGES[self.below(EDGES.len())].wrapping_add(self.below(3) as u64).wrapping_sub(1);
                let width = 1 << self.below(4);
                self.overwrite(input, &edge.to_le_bytes()[..width]);
            }
            6 => {
                let byte = self.below(256) as u8;
                self.overwrite(input, &[byte]);
            }
            7 => input[part].iter_mut().for_each(|byte| *byte = byte.wrapping_add(1)),
            _ => {
                if let Some(at) = input.len().checked_sub(1).map(|last| self.below(last + 1)) {
                    input[at] ^= 1 << self.below(8);
                }
            }
        }
    }

    fn insert(&mut self, input: &mut Vec<u8>, piece: &[u8]) {
        let at = self.below(input.len() + 1);
        input.splice(at..at, piece.iter().copied());
    }

    fn overwrite(&mut self, input: &mut [u8], piece: &[u8]) {
        let at = self.below(input.len() + 1);
        input[at..].iter_mut().zip(piece).for_each(|(byte, new)| *byte = *new);
    }
}
