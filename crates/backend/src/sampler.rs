//! Chooses the next token of each request on the host; the same on every rank by construction. `cuda` does
//! the same on the device and is compared with this.
//!
//! Random numbers are counter-based (Philox4x32-10, Salmon et al. 2011), keyed by (seed, choice,
//! position of the token in the answer). Nothing is drawn from a stream, so a seed gives the same
//! text at any batch size, any tp size and after a retraction. Logits are gathered in vocabulary
//! order; padding rows are never candidates; ties go to the smaller id.

use crate::choice::RowChoice;
use lockstep_core::TokenId;

/// Candidates sorted first when a nucleus is wanted; grown fourfold while it does not suffice.
const SORTED_FIRST: usize = 512;

/// Scratch of the sampler, reused over steps.
#[derive(Default)]
pub struct Sampler {
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    logit: f32,
    id: TokenId,
}

impl Candidate {
    /// Descending logit, then ascending id: a total order, so every rank sorts alike.
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// The largest of `logits` and its index; ties go to the smaller index, NaN never wins.
/// `None` when nothing is larger than negative infinity.
pub fn argmax(logits: &[f32]) -> Option<(f32, usize)> {
    let mut best = (f32::NEG_INFINITY, usize::MAX);
    for (i, &logit) in logits.iter().enumerate() {
        if logit > best.0 {
            best = (logit, i);
        }
    }
    (best.1 != usize::MAX).then_some(best)
}

impl Sampler {
    /// The token that `row` wants, from the logits of the whole real vocabulary; `None` when none of them is larger
    /// than negative infinity.
    ///
    /// Order of the filters follows vLLM and SGLang: temperature, top-k, top-p, min-p.
    /// Deterministic in all arguments.
    pub fn sample(&mut self, logits: &[f32], row: &RowChoice) -> Option<TokenId> {
        let (top, top_id) = argmax(logits)?;
        let top_id = top_id as TokenId;
        if row.is_greedy() || top == f32::INFINITY {
            return Some(top_id);
        }
        let uniform = uniform(row.seed, row.choice, row.output_index);
        let scale = 1.0 / f64::from(row.temperature);
        let weight = |logit: f32| (f64::from(logit - top) * scale).exp();
        if row.top_k == 0 && row.top_p >= 1.0 && row.min_p <= 0.0 {
            let drawn = draw(logits.iter().map(|&l| weight(l)), uniform);
            return Some(drawn.map_or(top_id, |id| id as TokenId));
        }
        let floor = f64::from(row.min_p);
        self.candidates.clear();
        let all = logits.iter().enumerate().map(|(id, &logit)| Candidate { logit, id: id as TokenId });
        if row.top_p >= 1.0 && row.min_p > 0.0 && row.top_k == 0 {
            self.candidates.extend(all.filter(|c| weight(c.logit) >= floor));
        } else {
            self.candidates.extend(all.filter(|c| c.logit > f32::NEG_INFINITY));
            self.keep_top_k(row.top_k as usize);
            self.keep_top_p(f64::from(row.top_p), weight);
            self.candidates.retain(|c| weight(c.logit) >= floor);
        }
        let chosen = draw(self.candidates.iter().map(|c| weight(c.logit)), uniform);
        Some(chosen.map_or(top_id, |i| self.candidates[i].id))
    }

    /// Keeps the `k` first in sampling order; 0 keeps all.
    fn keep_top_k(&mut self, k: usize) {
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, Candidate::order);
            self.candidates.truncate(k);
        }
    }

    /// Keeps the smallest leading set whose share reaches `p`, sorted; everything when `p >= 1`.
    fn keep_top_p(&mut self, p: f64, weight: impl Fn(f32) -> f64) {
        if p >= 1.0 {
            // Vocabulary order would depend on select_nth's internals after top-k: sort.
            self.candidates.sort_unstable_by(Candidate::order);
            return;
        }
        let total: f64 = self.candidates.iter().map(|c| weight(c.logit)).sum();
        let mut sorted = SORTED_FIRST.min(self.candidates.len());
        loop {
            if sorted < self.candidates.len() {
                self.candidates.select_nth_unstable_by(sorted - 1, Candidate::order);
            }
            self.candidates[..sorted].sort_unstable_by(Candidate::order);
            let mut mass = 0.0;
            let reached = self.candidates[..sorted].iter().position(|c| {
                mass += weight(c.logit);
                mass >= p * total
            });
            if let Some(last) = reached {
                return self.candidates.truncate(last + 1);
            }
            if sorted == self.candidates.len() {
                return;
            }
            sorted = (sorted * 4).min(self.candidates.len());
        }
    }
}

/// The index that `uniform` in [0, 1) falls on among the positive weights (the weight of a NaN is none); the last
/// of them if rounding overshoots.
fn draw(weights: impl Iterator<Item = f64> + Clone, uniform: f64) -> Option<usize> {
    let positive = weights.enumerate().filter(|(_, w)| *w > 0.0);
    let target = uniform * positive.clone().map(|(_, w)| w).sum::<f64>();
    let (mut sum, mut last) = (0.0, None);
    for (i, w) in positive {
        sum += w;
        last = Some(i);
        if sum > target {
            break;
        }
    }
    last
}

/// A uniform number in [0, 1) with 53 bits, from the key and the counter alone.
fn uniform(seed: u64, choice: u32, output_index: u32) -> f64 {
    let out = philox4x32([output_index, choice, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(out[1]) << 32 | u64::from(out[0])) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

/// Philox4x32 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::SamplingParams;

    impl Sampler {
        fn token(&mut self, logits: &[f32], params: &SamplingParams, output_index: u32) -> TokenId {
            self.sample(logits, &RowChoice::new(params, output_index)).expect("some token is possible")
        }
    }

    fn params(temperature: f32) -> SamplingParams {
        SamplingParams { temperature, ..SamplingParams::default() }
    }

    #[test]
    fn a_nan_is_never_drawn_and_changes_nothing() {
        let mut s = Sampler::default();
        let row = |output_index| RowChoice {
            temperature: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            top_k: 0,
            seed: 5,
            choice: 0,
            output_index,
        };
        let logits = [1.0, 2.0, f32::NEG_INFINITY, 0.5];
        let holed = [1.0, 2.0, f32::NAN, 0.5];
        let drawn: Vec<_> = (0..200).map(|i| s.sample(&holed, &row(i))).collect();
        assert!(drawn.iter().enumerate().all(|(i, token)| *token == s.sample(&logits, &row(i as u32))));
        assert!([0, 1, 3].iter().all(|token| drawn.contains(&Some(*token))), "{drawn:?}");
    }

    #[test]
    fn nothing_is_chosen_where_nothing_is_possible() {
        let mut s = Sampler::default();
        for temperature in [0.0, 1.0] {
            let row = RowChoice::new(&params(temperature), 0);
            assert_eq!(s.sample(&[f32::NEG_INFINITY, f32::NAN], &row), None);
            assert_eq!(s.sample(&[], &row), None);
            assert_eq!(s.sample(&[f32::NEG_INFINITY, -1e30], &row), Some(1));
        }
    }

    #[test]
    fn philox_gives_the_published_vectors() {
        // Random123 kat_vectors, philox4x32 10 rounds.
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox4x32([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn greedy_ignores_everything_else_and_ties_go_to_the_smaller_id() {
        let mut s = Sampler::default();
        let p = SamplingParams { top_p: 0.1, min_p: 0.9, ..params(0.0) };
        assert_eq!(s.token(&[1.0, 3.0, f32::NAN, 3.0], &p, 0), 1);
        assert_eq!(s.token(&[f32::NEG_INFINITY, -1.0], &SamplingParams { top_k: 1, ..params(2.0) }, 0), 1);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let mut s = Sampler::default();
        let logits = [0.0f32, 1.0, 2.0, f32::NEG_INFINITY];
        let mut counts = [0usize; 4];
        let draws = 40_000;
        for i in 0..draws {
            counts[s.token(&logits, &SamplingParams { seed: 7, ..params(1.0) }, i) as usize] += 1;
        }
        let z: f64 = [0.0f64, 1.0, 2.0].iter().map(|l| l.exp()).sum();
        for (i, l) in [0.0f64, 1.0, 2.0].iter().enumerate() {
            let want = l.exp() / z;
            let got = counts[i] as f64 / f64::from(draws);
            assert!((got - want).abs() < 0.01, "token {i}: {got} vs {want}");
        }
        assert_eq!(counts[3], 0);
    }

    #[test]
    fn filters_keep_exactly_the_tokens_they_promise() {
        let mut s = Sampler::default();
        let logits: Vec<f32> = (0..3000).map(|i| ((i * 7919) % 3000) as f32 * 0.004).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let allowed = |p: &SamplingParams| -> std::collections::BTreeSet<TokenId> {
            let mut s = Sampler::default();
            (0..4000).map(|i| s.token(&logits, p, i)).collect()
        };
        let top_k = SamplingParams { top_k: 5, ..params(5.0) };
        let want: std::collections::BTreeSet<_> = order[..5].iter().map(|&i| i as TokenId).collect();
        assert_eq!(allowed(&top_k), want);
        let mass: f64 = order.iter().map(|&i| f64::from(logits[i]).exp()).sum();
        let (mut sum, mut n) = (0.0, 0);
        while sum < 0.01 * mass {
            sum += f64::from(logits[order[n]]).exp();
            n += 1;
        }
        let top_p = SamplingParams { top_p: 0.01, ..params(1.0) };
        let want: std::collections::BTreeSet<_> = order[..n].iter().map(|&i| i as TokenId).collect();
        assert_eq!(allowed(&top_p), want);
        let min_p = SamplingParams { min_p: 0.99, ..params(1.0) };
        let top = logits[order[0]];
        let want: std::collections::BTreeSet<_> = (0..logits.len())
            .filter(|&i| f64::from(logits[i] - top).exp() >= f64::from(0.99f32))
            .map(|i| i as TokenId)
            .collect();
        assert_eq!(allowed(&min_p), want);
        // A nucleus larger than the first sorted batch grows it.
        let wide = SamplingParams { top_p: 0.999, ..params(50.0) };
        assert!(allowed(&wide).len() > SORTED_FIRST);
        assert_eq!(s.token(&logits, &SamplingParams { top_p: 1e-9, ..params(1.0) }, 3), order[0] as TokenId);
    }

    #[test]
    fn a_seed_fixes_the_token_at_a_position() {
        let mut s = Sampler::default();
        let logits: Vec<f32> = (0..500).map(|i| (i % 17) as f32 * 0.1).collect();
        let p = SamplingParams { seed: 99, top_p: 0.95, ..params(1.3) };
        let first: Vec<_> = (0..50).map(|i| s.token(&logits, &p, i)).collect();
        let again: Vec<_> = (0..50).rev().map(|i| Sampler::default().token(&logits, &p, i)).collect();
        assert!(first.iter().eq(again.iter().rev()));
        let other = SamplingParams { seed: 100, ..p.clone() };
        assert!((0..50).any(|i| s.token(&logits, &other, i) != first[i as usize]));
    }
}
