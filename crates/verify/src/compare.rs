//! Two runs side by side.

use crate::Result;
use crate::forward::{Layers, Logits};
use lockstep_core::TokenId;
use serde::Serialize;

/// What two runs must have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// Every bit.
    BitEqual,
    /// Errors of at most [`CLOSE`] times the largest logit; the best token may differ only where the two best are
    /// closer than that.
    Close,
}

/// Bound of [`Promise::Close`], a share of the largest logit.
pub const CLOSE: f64 = 1e-4;

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

/// What came of two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The runs, in words.
    pub what: String,
    /// What was required.
    pub promise: Promise,
    /// Whether it was kept.
    pub passed: bool,
    /// Positions compared.
    pub positions: usize,
    /// Largest |difference| of a logit.
    pub max_error: f64,
    /// Root mean square of the differences.
    pub rms_error: f64,
    /// Largest |logit| of the reference.
    pub largest_logit: f64,
    /// Positions at which both prefer the same token.
    pub top1_equal: usize,
    /// Where they first differ, if they do.
    pub first_difference: Option<Difference>,
    /// Why nothing could be compared.
    pub error: Option<String>,
}

impl Comparison {
    fn failed(what: &str, promise: Promise, error: String) -> Self {
        Self { error: Some(error), ..Self::empty(what, promise, false) }
    }

    fn empty(what: &str, promise: Promise, passed: bool) -> Self {
        Self {
            what: what.into(),
            promise,
            passed,
            positions: 0,
            max_error: 0.0,
            rms_error: 0.0,
            largest_logit: 0.0,
            top1_equal: 0,
            first_difference: None,
            error: None,
        }
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
pub fn logits(what: &str, promise: Promise, reference: &Logits, other: Result<Logits>) -> Comparison {
    let other = match other {
        Ok(other) => other,
        Err(error) => return Comparison::failed(what, promise, error.to_string()),
    };
    let mut found = Comparison::empty(what, promise, true);
    let (mut squares, mut values, mut bits_equal, mut tops_close) = (0.0, 0_usize, true, true);
    found.largest_logit = largest(reference);
    for (prompt, (left, right)) in reference.iter().zip(&other).enumerate() {
        if left.len() != right.len() {
            return Comparison::failed(
                what,
                promise,
                format!("prompt {prompt}: other positions were computed"),
            );
        }
        for ((position, a), (_, b)) in left.iter().zip(right) {
            if a.len() != b.len() {
                let error = format!("a vocabulary of {} tokens against one of {}", b.len(), a.len());
                return Comparison::failed(what, promise, error);
            }
            if let Some(id) = b.iter().position(|logit| !logit.is_finite()) {
                let error =
                    format!("prompt {prompt}, position {position}: the logit of token {id} is not a number");
                return Comparison::failed(what, promise, error);
            }
            let errors = || a.iter().zip(b).map(|(x, y)| (f64::from(*x) - f64::from(*y)).abs());
            let error = errors().fold(0.0, f64::max);
            squares += errors().map(|e| e * e).sum::<f64>();
            values += a.len();
            found.positions += 1;
            found.max_error = found.max_error.max(error);
            let ((best_a, margin), (best_b, _)) = (best(a), best(b));
            found.top1_equal += usize::from(best_a == best_b);
            tops_close &= best_a == best_b || margin <= CLOSE * found.largest_logit;
            let same_bits = a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
            bits_equal &= same_bits;
            if !same_bits && found.first_difference.is_none() {
                let what =
                    format!("logits differ by up to {error:.3e}, best token {best_a} against {best_b}");
                found.first_difference = Some(Difference { prompt, position: *position, margin, what });
            }
        }
    }
    found.rms_error = (squares / values.max(1) as f64).sqrt();
    found.passed = match promise {
        Promise::BitEqual => bits_equal,
        Promise::Close => found.max_error <= CLOSE * found.largest_logit && tops_close,
    };
    found
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
    other: Result<Vec<Vec<TokenId>>>,
) -> Comparison {
    let other = match other {
        Ok(other) => other,
        Err(error) => return Comparison::failed(what, promise, error.to_string()),
    };
    let mut found = Comparison::empty(what, promise, true);
    found.largest_logit = largest(base);
    for (prompt, (a, b)) in reference.iter().zip(&other).enumerate() {
        found.positions += a.len();
        let same = a.iter().zip(b).take_while(|(x, y)| x == y).count();
        found.top1_equal += same;
        if same == a.len() && a.len() == b.len() {
            continue;
        }
        // The token at `position` was chosen by the logits of the position before it.
        let position = prompts[prompt].len() + same;
        let known = base[prompt].iter().find(|(at, _)| at + 1 == position);
        let margin = known.map_or(f64::NAN, |(_, row)| best(row).1);
        // Without the logits there nothing excuses a difference.
        found.passed &= promise == Promise::Close && margin <= CLOSE * found.largest_logit;
        let token =
            |text: &[TokenId]| text.get(same).map_or("nothing".to_owned(), |id| format!("token {id}"));
        let what = format!("{} was {}", token(b), token(a));
        found.first_difference.get_or_insert(Difference { prompt, position, margin, what });
    }
    found
}

/// The first residual stream that differs more than was promised, in words.
pub fn first_layer(tp: usize, promise: Promise, left: &Layers, right: &Layers) -> Option<String> {
    let depth = left.first().map_or(0, Vec::len);
    for layer in 0..depth {
        for (prompt, (a, b)) in left.iter().zip(right).enumerate() {
            let (a, b) = (&a[layer], &b[layer]);
            let largest = a.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            let error = a.iter().zip(b).fold(0.0_f32, |max, (x, y)| max.max((x - y).abs()));
            let differs = match promise {
                Promise::BitEqual => a.iter().zip(b).any(|(x, y)| x.to_bits() != y.to_bits()),
                Promise::Close => error.is_nan() || f64::from(error) > CLOSE * f64::from(largest),
            };
            if differs {
                let place = match layer {
                    0 => "the embedding".to_owned(),
                    _ => format!("layer {}", layer - 1),
                };
                let at = a.iter().zip(b).position(|(x, y)| x.to_bits() != y.to_bits()).unwrap_or(0);
                return Some(format!(
                    "tp {tp} first differs after {place}: prompt {prompt}, element {at} of the residual stream, by up to \
                     {error:.3e} where values reach {largest:.3e}"
                ));
            }
        }
    }
    Some(format!(
        "tp {tp}: no residual stream differs; the difference is in the final norm, the head or the gather"
    ))
}
