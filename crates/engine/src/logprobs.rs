//! Log-probabilities of tokens, from the model's own logits.
//!
//! `logprob(t) = l_t - max(l) - ln(sum over v of exp(l_v - max(l)))`, in f64, summed in vocabulary order, given
//! out as f32: bit-equal at any batch size and tp size. Nothing that changes sampling (penalties, bias, masks,
//! temperature, filters) enters, so the values of a request do not depend on its sampling parameters.

use lockstep_backend::sampler::argmax;
use lockstep_core::TokenId;
use lockstep_wire::TokenLogprobs;

/// Stands for the logarithm of 0, which JSON cannot spell.
const LOGPROB_MIN: f32 = -9999.0;

/// The softmax of one row of logits.
pub(crate) struct Distribution<'a> {
    logits: &'a [f32],
    max: f64,
    log_sum: f64,
}

impl<'a> Distribution<'a> {
    /// Of the logits of the whole real vocabulary.
    pub(crate) fn of(logits: &'a [f32]) -> Self {
        let max = argmax(logits).map_or(0.0, |(max, _)| f64::from(max));
        let sum: f64 = logits.iter().map(|&l| (f64::from(l) - max).exp()).sum();
        Self { logits, max, log_sum: sum.ln() }
    }

    /// The log-probability of `token`, at least [`LOGPROB_MIN`].
    pub(crate) fn logprob(&self, token: TokenId) -> f32 {
        let logit = self.logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let logprob = (f64::from(logit) - self.max - self.log_sum) as f32;
        // Not `max`: it would keep LOGPROB_MIN from hiding a NaN, which JSON cannot spell either.
        if logprob >= LOGPROB_MIN { logprob } else { LOGPROB_MIN }
    }

    /// `token` beside the `count` most likely tokens.
    pub(crate) fn report(&self, token: TokenId, count: u32) -> TokenLogprobs {
        let top = self.top(count as usize).into_iter().map(|id| (id, self.logprob(id))).collect();
        TokenLogprobs { token, logprob: self.logprob(token), rank: self.rank(token), top }
    }

    /// The place of `token` in the order of [`top`](Self::top), from 1. A token that can never be chosen is last.
    fn rank(&self, token: TokenId) -> u32 {
        let own = self.logits.get(token as usize).copied().filter(|logit| !logit.is_nan());
        let own = own.unwrap_or(f32::NEG_INFINITY);
        let (before, behind) = self.logits.split_at(self.logits.len().min(token as usize));
        let ahead = before.iter().filter(|&&logit| logit >= own).count()
            + behind.iter().filter(|&&logit| logit > own).count();
        ahead as u32 + 1
    }

    /// The `count` most likely tokens, best first, the smaller id first on ties.
    fn top(&self, count: usize) -> Vec<TokenId> {
        let mut best: Vec<(f32, TokenId)> = Vec::with_capacity(count + 1);
        for (id, &logit) in self.logits.iter().enumerate() {
            let is_full = best.len() == count;
            // Ids ascend, so an equal logit that comes later stays behind.
            if logit.is_nan() || (is_full && best.last().is_none_or(|(least, _)| logit <= *least)) {
                continue;
            }
            let at = best.partition_point(|(other, _)| *other >= logit);
            best.insert(at, (logit, id as TokenId));
            best.truncate(count);
        }
        best.into_iter().map(|(_, id)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_softmax() {
        let logits = [1.0f32, 3.0, f32::NEG_INFINITY, 3.0, -2.0];
        let d = Distribution::of(&logits);
        let z: f64 = [1.0f64, 3.0, 3.0, -2.0].iter().map(|l| l.exp()).sum();
        for (id, l) in [(0, 1.0f64), (1, 3.0), (3, 3.0), (4, -2.0)] {
            let want = (l - z.ln()) as f32;
            assert!((d.logprob(id) - want).abs() < 1e-6, "{id}: {} vs {want}", d.logprob(id));
        }
        assert_eq!(d.logprob(2), LOGPROB_MIN);
        assert_eq!(d.logprob(99), LOGPROB_MIN);
        let ids = |count| d.report(4, count).top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        assert!(ids(0).is_empty());
        assert_eq!(ids(2), [1, 3], "ties: the smaller id first");
        assert_eq!(ids(3), [1, 3, 0]);
        assert_eq!(ids(9), [1, 3, 0, 4, 2]);
        assert_eq!(d.report(4, 1).token, 4);
        let ranks: Vec<u32> = (0..5).map(|id| d.report(id, 0).rank).collect();
        assert_eq!(ranks, [3, 1, 5, 2, 4], "as in the order of the most likely");
    }

    #[test]
    fn rows_without_a_finite_logit_do_not_break_json() {
        for logits in [vec![f32::NEG_INFINITY; 3], vec![f32::NAN; 3], vec![f32::INFINITY, 0.0, 1.0]] {
            let d = Distribution::of(&logits);
            assert!((0..3).all(|id| d.logprob(id).is_finite()), "{logits:?}");
        }
    }
}
