//! Which experts a token takes, and with what weight.
//!
//! ```text
//! p[e] = exp(l[e] - max l) / sum                 sum: lane e mod 16 ascending, lanes by the tree
//! chosen: the k largest p, equal ones by ascending e
//! weight: p[e], or p[e] / (sum of the chosen p, largest first)
//! ```
//! Tokens are then sorted by expert (counting sort), so that an expert's rows follow each other in
//! the order of the tokens. An expert's pairs of a band of tokens are a segment; where experts are codes, segments start
//! at whole blocks of rounded rows, and the slots between them stay empty.

use crate::cpu::codes::BLOCK_ROWS;
use crate::cpu::exp::exp;
use crate::cpu::simd::{Kernel, LANES, Simd, load_at, store_at};
use std::ops::Range;

/// Softmax of one row of logits.
#[derive(Clone, Copy)]
pub(super) struct RouterSoftmax {
    pub logits: *const f32,
    pub out: *mut f32,
    pub len: usize,
}

impl RouterSoftmax {
    /// Logits `i..i + 16`, -inf beyond the end.
    ///
    /// # Safety
    /// As the kernel; `i < len`.
    #[inline(always)]
    unsafe fn logits<S: Simd>(&self, i: usize) -> S::V {
        // SAFETY: `i < len`.
        unsafe {
            let logits = load_at::<S>(self.logits, i, self.len);
            S::keep_first(logits, self.len - i, S::splat(f32::NEG_INFINITY))
        }
    }
}

impl Kernel for RouterSoftmax {
    type Output = ();

    /// # Safety
    /// Both are valid for `len` elements and do not overlap.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: `i < len` throughout.
        unsafe {
            let mut largest = S::splat(f32::NEG_INFINITY);
            for i in (0..self.len).step_by(LANES) {
                largest = S::max(largest, self.logits::<S>(i));
            }
            let max = S::splat(S::largest(largest));
            let mut sum = S::splat(0.0);
            for i in (0..self.len).step_by(LANES) {
                let weight = exp::<S>(S::sub(self.logits::<S>(i), max));
                sum = S::add(sum, weight);
                store_at::<S>(self.out, i, self.len, weight);
            }
            let total = S::splat(S::sum(sum));
            for i in (0..self.len).step_by(LANES) {
                let weight = S::div(load_at::<S>(self.out, i, self.len), total);
                store_at::<S>(self.out, i, self.len, weight);
            }
        }
    }
}

/// An expert of a token and its probability.
type Choice = (u32, f32);

/// Fills `chosen` with the experts of largest probability, largest first, equal ones by ascending
/// expert. Numbers that are not comparable (NaN) keep the order of the experts.
fn choose(probabilities: &[f32], chosen: &mut [Choice]) {
    let mut len = 0;
    for (expert, &p) in probabilities.iter().enumerate() {
        if len == chosen.len() {
            if p > chosen[len - 1].1 {
                len -= 1;
            } else {
                continue;
            }
        }
        let place = chosen[..len].iter().position(|c| p > c.1).unwrap_or(len);
        chosen.copy_within(place..len, place + 1);
        chosen[place] = (expert as u32, p);
        len += 1;
    }
}

/// [`Routing::places`] of a slot without a pair.
pub(super) const EMPTY: u32 = u32::MAX;

/// The (token, expert) pairs of some tokens in slots, by expert, then token.
pub(super) struct Routing {
    per_token: usize,
    /// Tokens of a band.
    band_rows: usize,
    /// Bands of a slab.
    bands: usize,
    /// The choices of the tokens, `[tokens][per_token]`.
    chosen: Vec<Choice>,
    /// `[experts][bands]`: the first slot of each segment, and its pairs.
    segments: Vec<(u32, u32)>,
    /// Experts that have pairs, ascending.
    pub active: Vec<u32>,
    /// Of each slot: the row of the activations, counted from the operation's first; of an empty one that of some pair.
    pub rows: Vec<u32>,
    /// Of each slot: the row within its band, or [`EMPTY`].
    pub places: Vec<u32>,
    /// Of each slot: the routing weight.
    pub weights: Vec<f32>,
    /// Slots in use, empty ones included.
    len: usize,
}

impl Routing {
    /// Memory for `tokens_max` tokens in bands of `band_rows`.
    pub(super) fn new(tokens_max: usize, band_rows: usize, num_experts: usize, per_token: usize) -> Self {
        let bands = tokens_max.div_ceil(band_rows).max(1);
        let slots = Self::slots(tokens_max, band_rows, num_experts, per_token);
        Self {
            per_token,
            band_rows,
            bands,
            chosen: vec![(0, 0.0); tokens_max * per_token],
            segments: vec![(0, 0); num_experts * bands],
            active: Vec::with_capacity(num_experts),
            rows: vec![0; slots],
            places: vec![EMPTY; slots],
            weights: vec![0.0; slots],
            len: 0,
        }
    }

    /// Slots that tokens may need, in segments that start at whole blocks.
    pub(super) fn slots(tokens_max: usize, band_rows: usize, num_experts: usize, per_token: usize) -> usize {
        let pairs = tokens_max * per_token;
        let segments = (num_experts * tokens_max.div_ceil(band_rows)).min(pairs);
        pairs + segments * (BLOCK_ROWS - 1)
    }

    /// Routes the tokens with these probabilities `[tokens][experts]`; the first of them is row
    /// `first_row`. Segments start at multiples of `align` slots, 1 or [`BLOCK_ROWS`].
    pub(super) fn fill(&mut self, probabilities: &[f32], first_row: usize, normalise: bool, align: usize) {
        let experts = self.segments.len() / self.bands;
        let choices = self.chosen.chunks_exact_mut(self.per_token);
        self.segments.fill((0, 0));
        for (token, (row, chosen)) in probabilities.chunks_exact(experts).zip(choices).enumerate() {
            choose(row, chosen);
            let sum: f32 = if normalise { chosen.iter().fold(0.0, |sum, c| sum + c.1) } else { 1.0 };
            for (expert, p) in chosen {
                *p /= sum;
                self.segments[*expert as usize * self.bands + token / self.band_rows].1 += 1;
            }
        }
        self.active.clear();
        self.len = 0;
        for (expert, segments) in self.segments.chunks_exact_mut(self.bands).enumerate() {
            if segments.iter().any(|segment| segment.1 > 0) {
                self.active.push(expert as u32);
            }
            for segment in segments.iter_mut().filter(|segment| segment.1 > 0) {
                let start = self.len.next_multiple_of(align);
                self.places[self.len..start].fill(EMPTY);
                self.rows[self.len..start].fill(first_row as u32);
                segment.0 = start as u32;
                self.len = start + segment.1 as usize;
                segment.1 = 0;
            }
        }
        let tokens = probabilities.len() / experts;
        for (pair, &(expert, weight)) in self.chosen[..tokens * self.per_token].iter().enumerate() {
            let token = pair / self.per_token;
            let (start, count) = &mut self.segments[expert as usize * self.bands + token / self.band_rows];
            let slot = (*start + *count) as usize;
            self.rows[slot] = (first_row + token) as u32;
            self.places[slot] = (token % self.band_rows) as u32;
            self.weights[slot] = weight;
            *count += 1;
        }
    }

    /// The slots of an active expert: its pairs and what lies between its segments.
    pub(super) fn slots_of(&self, expert: u32) -> Range<usize> {
        let segments = &self.segments[expert as usize * self.bands..][..self.bands];
        let mut used = segments.iter().filter(|segment| segment.1 > 0);
        let first = used.next().expect("invariant: an active expert has pairs");
        let last = used.next_back().unwrap_or(first);
        first.0 as usize..(last.0 + last.1) as usize
    }

    /// Slots in all.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The pairs of an expert whose tokens are of band `band`.
    pub(super) fn segment(&self, expert: u32, band: usize) -> Range<usize> {
        let (start, count) = self.segments[expert as usize * self.bands + band];
        start as usize..(start + count) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_chosen_and_ties_go_to_the_lower_expert() {
        let mut chosen = [(9, 0.0); 3];
        choose(&[0.1, 0.4, 0.4, 0.05, 0.4, 0.5], &mut chosen);
        assert_eq!(chosen, [(5, 0.5), (1, 0.4), (2, 0.4)]);
        choose(&[f32::NAN; 4], &mut chosen);
        assert_eq!(chosen.map(|c| c.0), [0, 1, 2]);
    }

    const P: [f32; 12] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.2, 0.0, 0.0, 0.0, 0.25, 0.75];

    #[test]
    fn pairs_are_sorted_by_expert_and_row() {
        let mut routing = Routing::new(3, 2, 4, 2);
        routing.fill(&P, 10, true, 1);
        assert_eq!(routing.active, [0, 1, 2, 3]);
        assert_eq!(routing.len(), 6);
        assert_eq!(routing.rows[..6], [11, 11, 10, 12, 10, 12]);
        assert_eq!(routing.places[..6], [1, 1, 0, 0, 0, 0]);
        assert_eq!(routing.slots_of(2), 2..4);
        assert_eq!(
            (routing.segment(2, 0), routing.segment(2, 1), routing.segment(0, 1).len()),
            (2..3, 3..4, 0)
        );
        assert_eq!(routing.weights[0], 0.5 / 0.8);
        assert_eq!(routing.weights[3], 0.25);
        routing.fill(&P[..4], 0, false, 1);
        assert_eq!((routing.len(), routing.active.as_slice()), (2, [2, 3].as_slice()));
        assert_eq!(routing.weights[..2], [0.3, 0.4]);
    }

    #[test]
    fn segments_start_at_whole_blocks_and_fit_whatever_is_chosen() {
        let mut routing = Routing::new(3, 2, 4, 2);
        routing.fill(&P, 10, true, BLOCK_ROWS);
        let starts: Vec<usize> = [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]
            .map(|(expert, band)| routing.segment(expert, band))
            .map(|segment| {
                assert_eq!(segment.len(), 1);
                segment.start
            })
            .into();
        assert_eq!(starts, [0, 8, 16, 24, 32, 40]);
        assert_eq!((routing.slots_of(2), routing.len()), (16..25, 41));
        assert!(routing.len() <= Routing::slots(3, 2, 4, 2));
        assert_eq!(routing.places.iter().take(41).filter(|place| **place != EMPTY).count(), 6);
        assert!(routing.rows[..41].iter().all(|row| (10..13).contains(row)), "rows that exist");
    }
}
