//! The sum over ranks: one fixed binary tree, whatever the algorithm that moved the data.
//!
//! `tree(first, n)` is the value itself for one rank, else
//! `tree(first, m) + tree(first + m, n - m)` with `m` the largest power of two below `n`. For 4 ranks
//! `(r0+r1)+(r2+r3)`; for 3 `(r0+r1)+r2`; for 6 `((r0+r1)+(r2+r3))+(r4+r5)`. At 2, 4 and 8 ranks it
//! continues the 8-leaf tree of a row-parallel linear, hence equal bits at those tp sizes.
//! All additions are in f32; half-width results are rounded once, to nearest even.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements summed at a time: the partial sums (1 KiB each, at most 6 deep for 64 ranks) stay in the
/// first-level cache.
const CHUNK: usize = 256;

/// An element of a tensor that ranks can sum.
pub(crate) trait Element: Copy {
    /// `to = from`, widened. Equal lengths.
    fn widen(from: &[Self], to: &mut [f32]);
    /// `to = a + b`, widened first. Equal lengths.
    fn add(a: &[Self], b: &[Self], to: &mut [f32]);
    /// Lets `fill` write f32 values and stores them, rounded, in `to`; at most [`CHUNK`] elements.
    fn store(to: &mut [Self], fill: impl FnOnce(&mut [f32]));
}

impl Element for f32 {
    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn add(a: &[f32], b: &[f32], to: &mut [f32]) {
        for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
            *to = a + b;
        }
    }

    fn store(to: &mut [f32], fill: impl FnOnce(&mut [f32])) {
        fill(to);
    }
}

/// The two half-width formats differ in name only.
macro_rules! half_element {
    ($half:ty) => {
        impl Element for $half {
            fn widen(from: &[$half], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }

            fn add(a: &[$half], b: &[$half], to: &mut [f32]) {
                a.convert_to_f32_slice(to);
                for (to, b) in to.iter_mut().zip(b) {
                    *to += b.to_f32();
                }
            }

            fn store(to: &mut [$half], fill: impl FnOnce(&mut [f32])) {
                let mut wide = [0f32; CHUNK];
                let wide = &mut wide[..to.len()];
                fill(wide);
                to.convert_from_f32_slice(wide);
            }
        }
    };
}
half_element!(f16);
half_element!(bf16);

/// `out[i] = tree over ranks of source(rank)[i]`. Bit-equal for equal sources on every rank.
///
/// # Safety
/// For each rank of `0..size`, `source(rank)` points to `out.len()` aligned elements that nobody
/// writes during the call and that do not overlap `out`.
pub(crate) unsafe fn tree_sum<T: Element>(source: &dyn Fn(usize) -> *const T, size: usize, out: &mut [T]) {
    for (index, out) in out.chunks_mut(CHUNK).enumerate() {
        let start = index * CHUNK;
        let len = out.len();
        let part = |rank: usize| {
            // SAFETY: `start + len` is at most the length the caller vouches for, unwritten meanwhile.
            unsafe { std::slice::from_raw_parts(source(rank).add(start), len) }
        };
        T::store(out, |sum| subtree(&part, 0, size, sum));
    }
}

/// The sum of ranks `first..first + n` into `to`.
fn subtree<'a, T: Element + 'a>(part: &dyn Fn(usize) -> &'a [T], first: usize, n: usize, to: &mut [f32]) {
    match n {
        1 => T::widen(part(first), to),
        2 => T::add(part(first), part(first + 1), to),
        _ => {
            let left = n.next_power_of_two() / 2;
            subtree(part, first, left, to);
            let mut right = [0f32; CHUNK];
            let right = &mut right[..to.len()];
            subtree(part, first + left, n - left, right);
            for (to, right) in to.iter_mut().zip(right) {
                *to += *right;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum_of<T: Element + Default>(parts: &[Vec<T>]) -> Vec<T> {
        let mut out = vec![T::default(); parts[0].len()];
        // SAFETY: every part has the length of `out` and stays unwritten.
        unsafe { tree_sum(&|rank| parts[rank].as_ptr(), parts.len(), &mut out) };
        out
    }

    #[test]
    fn the_tree_splits_at_the_largest_power_of_two() {
        // 1 + 2^-24 rounds to 1, so the grouping shows in the result.
        let tiny = 2f32.powi(-24);
        let parts = |values: &[f32]| values.iter().map(|v| vec![*v; 300]).collect::<Vec<_>>();
        assert_eq!(sum_of(&parts(&[1.0, tiny, tiny])), vec![(1.0 + tiny) + tiny; 300], "(r0+r1)+r2");
        assert_eq!(sum_of(&parts(&[1.0, tiny, tiny, tiny])), vec![1.0 + (tiny + tiny); 300]);
        let six = [1.0, 0.0, 0.0, 0.0, tiny, tiny];
        assert_eq!(sum_of(&parts(&six)), vec![1.0 + (tiny + tiny); 300], "((r0+r1)+(r2+r3))+(r4+r5)");
        assert_ne!(1.0 + (tiny + tiny), (1.0 + tiny) + tiny, "the cases can tell the groupings apart");
    }

    #[test]
    fn half_width_sums_are_rounded_once() {
        // In bf16 256 + 1 is 256, but (256 + 1) + (1 + 0) = 258 in f32, which bf16 holds.
        let parts: Vec<Vec<bf16>> =
            [256.0, 1.0, 1.0, 0.0].iter().map(|v| vec![bf16::from_f32(*v); 3]).collect();
        assert_eq!(sum_of(&parts), vec![bf16::from_f32(258.0); 3]);
        let parts: Vec<Vec<f16>> =
            [2048.0, 1.0, 1.0, 0.0].iter().map(|v| vec![f16::from_f32(*v); 3]).collect();
        assert_eq!(sum_of(&parts), vec![f16::from_f32(2050.0); 3]);
    }
}
