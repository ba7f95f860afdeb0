//! Two runs side by side.

use crate::Result;
use crate::forward::{Layers, Logits, Unsound, no_number, part};
use crate::place::{Bound, Promise};
use lockstep_core::TokenId;
use serde::Serialize;

/// The first place where two runs differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Number of the prompt.
    pub prompt: usize,
    /// Position in it, generated tokens included.
    pub position: usize,
    /// By how much the reference preferred its best token to the second there.
    pub margin: f64,
    /// What differs there, in words.
    pub what: String,
}

/// What was held side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compared {
    /// Logits of the same positions.
    Logits,
    /// Generated tokens.
    Texts,
}

/// What came of two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The runs, in words.
    pub what: String,
    /// What of them.
    pub compared: Compared,
    /// What was required.
    pub promise: Promise,
    /// Whether it was kept.
    pub passed: bool,
    /// Positions compared.
    pub positions: usize,
    /// Largest |difference| of a logit.
    pub max_error: f64,
    /// What it may be.
    pub max_bound: f64,
    /// Root mean square of the differences.
    pub rms_error: f64,
    /// What it may be, where it is bounded.
    pub rms_bound: Option<f64>,
    /// Largest |logit| of the reference.
    pub largest_logit: f64,
    /// Positions, or texts, that keep to the bound.
    pub within: usize,
    /// Positions at which both prefer the same token.
    pub top1_equal: usize,
    /// Where they first differ, if they do.
    pub first_difference: Option<Difference>,
    /// Why nothing could be compared.
    pub error: Option<String>,
}

impl Comparison {
    fn failed(what: &str, compared: Compared, promise: Promise, error: String) -> Self {
        Self { error: Some(error), ..Self::empty(what, compared, promise) }
    }

    fn empty(what: &str, compared: Compared, promise: Promise) -> Self {
        Self {
            what: what.into(),
            compared,
            promise,
            passed: false,
            positions: 0,
            max_error: 0.0,
            max_bound: 0.0,
            rms_error: 0.0,
            rms_bound: None,
            largest_logit: 0.0,
            within: 0,
            top1_equal: 0,
            first_difference: None,
            error: None,
        }
    }

    /// One position of the reference against the same of the other run.
    fn add_position(&mut self, sums: &mut Sums, prompt: usize, position: usize, rows: (&[f32], &[f32])) {
        let (a, b) = rows;
        let errors = || a.iter().zip(b).map(|(x, y)| (f64::from(*x) - f64::from(*y)).abs());
        let error = errors().fold(0.0, f64::max);
        sums.squares += errors().map(|e| e * e).sum::<f64>();
        sums.reference_squares += a.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        sums.values += a.len();
        self.positions += 1;
        self.max_error = self.max_error.max(error);
        let ((best_a, margin), (best_b, _)) = (best(a), best(b));
        self.top1_equal += usize::from(best_a == best_b);
        let same_bits = a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
        let keeps = match self.promise {
            Promise::BitEqual => same_bits,
            Promise::Close(_) => error <= self.max_bound && (best_a == best_b || margin <= self.max_bound),
        };
        self.within += usize::from(keeps);
        if !same_bits && self.first_difference.is_none() {
            let what = format!("logits differ by up to {error:.3e}, best token {best_a} against {best_b}");
            self.first_difference = Some(Difference { prompt, position, margin, what });
        }
    }

    /// The verdict, once all positions are in.
    fn conclude(&mut self, sums: &Sums) {
        let mean = |squares: f64| (squares / sums.values.max(1) as f64).sqrt();
        self.rms_error = mean(sums.squares);
        self.rms_bound = match self.promise {
            Promise::BitEqual => None,
            Promise::Close(bound) if bound.of_positions < 1.0 => None,
            Promise::Close(bound) => Some(bound.share * mean(sums.reference_squares)),
        };
        self.passed = enough(self.promise, self.within, self.positions)
            && self.rms_bound.is_none_or(|bound| self.rms_error <= bound);
    }
}

/// What errors are made of.
#[derive(Default)]
struct Sums {
    squares: f64,
    reference_squares: f64,
    values: usize,
}

/// Whether as many of `all` keep to the bound as must.
fn enough(promise: Promise, within: usize, all: usize) -> bool {
    match promise {
        Promise::BitEqual => within == all,
        Promise::Close(Bound { of_positions, .. }) => within as f64 >= of_positions * all as f64,
    }
}

/// The largest error that a promise allows.
fn max_bound(promise: Promise, largest_logit: f64) -> f64 {
    match promise {
        Promise::BitEqual => 0.0,
        Promise::Close(bound) => bound.share * largest_logit,
    }
}

/// The best token and by how much it leads.
fn best(logits: &[f32]) -> (usize, f64) {
    let (mut first, mut second) = ((0, f32::NEG_INFINITY), f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        if logit > first.1 {
            (second, first) = (first.1, (id, logit));
        } else if logit > second {
            second = logit;
        }
    }
    (first.0, f64::from(first.1) - f64::from(second))
}

/// Compares logits position by position.
pub fn logits(what: &str, promise: Promise, reference: &Logits, other: &Result<Logits>) -> Comparison {
    let failed = |error: String| Comparison::failed(what, Compared::Logits, promise, error);
    let other = match other {
        Ok(other) => other,
        Err(error) => return failed(error.to_string()),
    };
    let mut found = Comparison::empty(what, Compared::Logits, promise);
    let mut sums = Sums::default();
    found.largest_logit = largest(reference);
    found.max_bound = max_bound(promise, found.largest_logit);
    for (prompt, (left, right)) in reference.iter().zip(other).enumerate() {
        if left.len() != right.len() {
            return failed(format!("prompt {prompt}: other positions were computed"));
        }
        for ((position, a), (_, b)) in left.iter().zip(right) {
            if a.len() != b.len() {
                return failed(format!("a vocabulary of {} tokens against one of {}", b.len(), a.len()));
            }
            for (row, whose) in [(b, ""), (a, " of the reference")] {
                if let Some(id) = no_number(row) {
                    let place = format!("prompt {prompt}, position {position}");
                    return failed(format!("{place}: the logit of token {id}{whose} is {}", row[id]));
                }
            }
            found.add_position(&mut sums, prompt, *position, (a, b));
        }
    }
    found.conclude(&sums);
    found
}

/// The finding that some value of a run at `place` is no number; `None` when all are.
pub fn soundness(place: &str, found: &Result<Option<Unsound>>) -> Option<Comparison> {
    let error = match found {
        Ok(None) => return None,
        Ok(Some(first)) => first.words(),
        Err(error) => error.to_string(),
    };
    let what = format!("{place}, every value a number");
    Some(Comparison::failed(&what, Compared::Logits, Promise::BitEqual, error))
}

fn largest(logits: &Logits) -> f64 {
    let values = logits.iter().flatten().flat_map(|(_, row)| row);
    values.fold(0.0, |max, logit| max.max(f64::from(logit.abs())))
}

/// Compares generated tokens; `base` are the reference's logits over prompts and texts, for margins.
pub fn texts(
    what: &str,
    promise: Promise,
    prompts: &[Vec<TokenId>],
    base: &Logits,
    reference: &[Vec<TokenId>],
    other: &Result<Vec<Vec<TokenId>>>,
) -> Comparison {
    let other = match other {
        Ok(other) => other,
        Err(error) => return Comparison::failed(what, Compared::Texts, promise, error.to_string()),
    };
    let mut found = Comparison::empty(what, Compared::Texts, promise);
    found.largest_logit = largest(base);
    found.max_bound = max_bound(promise, found.largest_logit);
    for (prompt, (a, b)) in reference.iter().zip(other).enumerate() {
        found.positions += a.len();
        let same = a.iter().zip(b).take_while(|(x, y)| x == y).count();
        found.top1_equal += same;
        if same == a.len() && a.len() == b.len() {
            found.within += 1;
            continue;
        }
        // The token at `position` was chosen by the logits of the position before it.
        let position = prompts[prompt].len() + same;
        let known = base[prompt].iter().find(|(at, _)| at + 1 == position);
        let margin = known.map_or(f64::NAN, |(_, row)| best(row).1);
        // Without the logits there nothing excuses a difference.
        found.within += usize::from(promise != Promise::BitEqual && margin <= found.max_bound);
        let token =
            |text: &[TokenId]| text.get(same).map_or("nothing".to_owned(), |id| format!("token {id}"));
        let what = format!("{} was {}", token(b), token(a));
        found.first_difference.get_or_insert(Difference { prompt, position, margin, what });
    }
    found.passed = enough(promise, found.within, reference.len());
    found
}

/// The first residual stream that differs more than was promised, in words. What is no number differs from everything.
pub fn first_layer(place: &str, promise: Promise, left: &Layers, right: &Layers) -> String {
    let depth = left.first().map_or(0, Vec::len);
    for layer in 0..depth {
        for (prompt, (a, b)) in left.iter().zip(right).enumerate() {
            let (a, b) = (&a[layer], &b[layer]);
            let largest = a.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            let part = part(layer);
            for (stream, whose) in [(b, place), (a, "the reference")] {
                if let Some(at) = no_number(stream) {
                    let value = stream[at];
                    return format!(
                        "{whose} has {value} first after {part}: prompt {prompt}, element {at} of the residual stream"
                    );
                }
            }
            let error = a.iter().zip(b).fold(0.0_f32, |max, (x, y)| max.max((x - y).abs()));
            let differs = match promise {
                Promise::BitEqual => a.iter().zip(b).any(|(x, y)| x.to_bits() != y.to_bits()),
                Promise::Close(bound) => f64::from(error) > bound.share * f64::from(largest),
            };
            if differs {
                let at = a.iter().zip(b).position(|(x, y)| x.to_bits() != y.to_bits()).unwrap_or(0);
                return format!(
                    "{place} first differs after {part}: prompt {prompt}, element {at} of the residual stream, by up to \
                     {error:.3e} where values reach {largest:.3e}"
                );
            }
        }
    }
    format!(
        "{place}: no residual stream differs; the difference is in the final norm, the head or the gather"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(share: f64, of_positions: f64) -> Promise {
        Promise::Close(Bound { share, of_positions })
    }

    /// One prompt of two positions: token 1 leads by 1, then token 2 by 0.01.
    fn reference() -> Logits {
        vec![vec![(0, vec![0.0, 4.0, 3.0]), (1, vec![0.0, 3.99, 4.0])]]
    }

    fn changed(change: impl Fn(&mut Logits)) -> Result<Logits> {
        let mut logits = reference();
        change(&mut logits);
        Ok(logits)
    }

    #[test]
    fn closeness_bounds_errors_and_excuses_near_ties_only() {
        let of = |share, other: &Result<Logits>| logits("", close(share, 1.0), &reference(), other);
        // The bound is a share of the largest logit, 4.
        let off = changed(|l| l[0][0].1[0] = 0.03);
        assert!(of(0.01, &off).passed && !of(0.005, &off).passed);
        assert_eq!(of(0.01, &off).first_difference.map(|d| d.position), Some(0));
        let tie = changed(|l| l[0][1].1[1] = 4.01);
        let found = of(0.01, &tie);
        assert!(found.passed && found.top1_equal == 1, "led by 0.01 only: {found:?}");
        assert!(!of(0.001, &tie).passed);
        assert!(!logits("", Promise::BitEqual, &reference(), &off).passed);
        // All logits off by most of the bound: no single one is outside, their mean square is.
        let all = changed(|l| l[0].iter_mut().flat_map(|(_, row)| row).for_each(|x| *x += 0.035));
        let found = of(0.01, &all);
        assert!(found.within == 2 && found.rms_bound.is_some_and(|bound| found.rms_error > bound));
        assert!(!found.passed);
        let nan = changed(|l| l[0][0].1[2] = f32::NAN);
        assert!(of(1.0, &nan).error.is_some_and(|e| e.contains("token 2 is NaN")));
        // The same bits, and still nothing that may be called equal.
        let unsound = nan.as_ref().unwrap();
        for promise in [Promise::BitEqual, close(1.0, 0.5)] {
            let found = logits("", promise, unsound, &nan);
            assert!(!found.passed && found.error.is_some_and(|e| e.contains("token 2")));
            let found = logits("", promise, unsound, &changed(|_| ()));
            assert!(found.error.is_some_and(|e| e.contains("token 2 of the reference is NaN")));
        }
    }

    #[test]
    fn values_that_are_no_numbers_are_a_finding_of_their_own() {
        assert_eq!(soundness("cpu tp 1", &Ok(None)), None);
        let of = |layer| {
            let first = Unsound { layer, prompt: 0, position: 1, element: 7, value: f32::INFINITY };
            soundness("cpu tp 1", &Ok(Some(first))).unwrap()
        };
        let found = of(Some(2));
        assert!(!found.passed && found.what == "cpu tp 1, every value a number");
        let words = "inf first after layer 1: prompt 0, position 1, element 7 of the residual stream";
        assert_eq!(found.error.unwrap(), words);
        assert!(of(Some(0)).error.unwrap().starts_with("inf first after the embedding"));
        assert!(of(None).error.unwrap().ends_with("the head: prompt 0, position 1, the logit of token 7"));
        assert!(!soundness("", &Err(crate::VerifyError::Ended)).unwrap().passed);
    }

    #[test]
    fn where_half_is_enough_one_of_two_positions_may_be_far_off() {
        let far = changed(|l| l[0][0].1[0] = 9.0);
        assert!(logits("", close(0.01, 0.5), &reference(), &far).passed);
        assert!(!logits("", close(0.01, 1.0), &reference(), &far).passed);
        let both = changed(|l| l[0].iter_mut().for_each(|(_, row)| row[0] = 9.0));
        assert!(!logits("", close(0.01, 0.5), &reference(), &both).passed);
    }

    #[test]
    fn a_text_may_part_where_the_two_best_are_close() {
        let of = |promise, text: &[TokenId]| {
            texts("", promise, &[vec![7]], &reference(), &[vec![1, 2]], &Ok(vec![text.to_vec()]))
        };
        assert!(of(Promise::BitEqual, &[1, 2]).passed && !of(Promise::BitEqual, &[1, 1]).passed);
        assert!(of(close(0.01, 1.0), &[1, 1]).passed, "led by 0.01 of 4");
        assert!(!of(close(0.01, 1.0), &[2, 2]).passed, "led by 1 of 4");
    }

    #[test]
    fn the_first_layer_that_parts_is_named() {
        let layers: Layers = vec![vec![vec![1.0, 2.0], vec![1.0, 2.0], vec![1.0, 2.0]]];
        let mut other = layers.clone();
        other[0][2][1] = 2.1;
        assert!(first_layer("cuda", close(0.01, 1.0), &layers, &other).contains("after layer 1"));
        assert!(first_layer("cuda", close(0.1, 1.0), &layers, &other).contains("no residual stream differs"));
        other[0][0][0] = f32::NAN;
        for (left, right, whose) in
            [(&layers, &other, "cuda"), (&other, &layers, "the reference"), (&other, &other, "cuda")]
        {
            for promise in [Promise::BitEqual, close(0.1, 1.0)] {
                let words = first_layer("cuda", promise, left, right);
                assert!(words.starts_with(&format!("{whose} has NaN first after the embedding")), "{words}");
            }
        }
    }
}
