//! Which experts a token takes, and with what weight.
//!
//! ```text
//! p[e] = exp(l[e] - max l) / sum                 sum: lane e mod 16 ascending, lanes by the tree
//! chosen: the k largest p, equal ones by ascending e
//! weight: p[e], or p[e] / (sum of the chosen p, largest first)
//! ```
//! Tokens are then sorted by expert (counting sort), so that an expert's rows follow each other in
//! the order of the tokens.

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

/// The (token, expert) pairs of some tokens, sorted by expert, then token.
pub(super) struct Routing {
    per_token: usize,
    /// The choices of the tokens, `[tokens][per_token]`.
    chosen: Vec<Choice>,
    /// First pair of each expert, `[experts + 1]`.
    firsts: Vec<u32>,
    /// Experts that have pairs, ascending.
    pub active: Vec<u32>,
    /// Of each pair: the row of the activations, counted from the operation's first.
    pub rows: Vec<u32>,
    /// Of each pair: the routing weight.
    pub weights: Vec<f32>,
}

impl Routing {
    /// Memory for `tokens_max` tokens.
    pub(super) fn new(tokens_max: usize, num_experts: usize, per_token: usize) -> Self {
        let pairs = tokens_max * per_token;
        Self {
            per_token,
            chosen: vec![(0, 0.0); pairs],
            firsts: vec![0; num_experts + 1],
            active: Vec::with_capacity(num_experts),
            rows: vec![0; pairs],
            weights: vec![0.0; pairs],
        }
    }

    /// Routes the tokens with these probabilities `[tokens][experts]`; the first of them is row
    /// `first_row`.
    pub(super) fn fill(&mut self, probabilities: &[f32], first_row: usize, normalise: bool) {
        let experts = self.firsts.len() - 1;
        let choices = self.chosen.chunks_exact_mut(self.per_token);
        self.firsts.fill(0);
        for (row, chosen) in probabilities.chunks_exact(experts).zip(choices) {
            choose(row, chosen);
            let sum: f32 = if normalise { chosen.iter().fold(0.0, |sum, c| sum + c.1) } else { 1.0 };
            for (expert, p) in chosen {
                *p /= sum;
                self.firsts[*expert as usize + 1] += 1;
            }
        }
        self.active.clear();
        for expert in 0..experts {
            if self.firsts[expert + 1] > 0 {
                self.active.push(expert as u32);
            }
            self.firsts[expert + 1] += self.firsts[expert];
        }
        let tokens = probabilities.len() / experts;
        for (pair, &(expert, weight)) in self.chosen[..tokens * self.per_token].iter().enumerate() {
            let place = &mut self.firsts[expert as usize];
            self.rows[*place as usize] = (first_row + pair / self.per_token) as u32;
            self.weights[*place as usize] = weight;
            *place += 1;
        }
        // Each entry has advanced to the next expert's first pair.
        self.firsts.copy_within(0..experts, 1);
        self.firsts[0] = 0;
    }

    /// The pairs of an expert.
    pub(super) fn pairs(&self, expert: u32) -> Range<usize> {
        self.firsts[expert as usize] as usize..self.firsts[expert as usize + 1] as usize
    }

    /// Pairs in all.
    pub(super) fn len(&self) -> usize {
        self.firsts[self.firsts.len() - 1] as usize
    }

    /// The pairs of an expert whose rows lie in `rows`.
    pub(super) fn pairs_within(&self, expert: u32, rows: &Range<usize>) -> Range<usize> {
        let pairs = self.pairs(expert);
        let listed = &self.rows[pairs.clone()];
        let before = |end: usize| pairs.start + listed.partition_point(|&r| (r as usize) < end);
        before(rows.start)..before(rows.end)
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

    #[test]
    fn pairs_are_sorted_by_expert_and_row() {
        let mut routing = Routing::new(3, 4, 2);
        let p = [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.2, 0.0, 0.0, 0.0, 0.25, 0.75];
        routing.fill(&p, 10, true);
        assert_eq!(routing.active, [0, 1, 2, 3]);
        assert_eq!(routing.len(), 6);
        assert_eq!(routing.rows, [11, 11, 10, 12, 10, 12]);
        assert_eq!((routing.pairs(2), routing.pairs_within(2, &(11..13))), (2..4, 3..4));
        assert_eq!(routing.weights[0], 0.5 / 0.8);
        assert_eq!(routing.weights[3], 0.25);
        routing.fill(&p[..4], 0, false);
        assert_eq!((routing.len(), routing.active.as_slice()), (2, [2, 3].as_slice()));
        assert_eq!(routing.weights[..2], [0.3, 0.4]);
    }
}
