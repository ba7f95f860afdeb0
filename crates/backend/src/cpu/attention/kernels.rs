//! The inner loops of attention; the formulas are in the parent module.

use crate::cpu::exp::exp;
use crate::cpu::simd::{Isa, Kernel, LANES, Simd, load_at, store_at};
use crate::cpu::tanh::softcap;
use lockstep_core::limits::ATTENTION_SEGMENT;
use std::ops::Range;

/// The places of a segment that a query sees: `from..to`, empty when `from == to`.
#[derive(Clone, Copy, Default)]
pub(super) struct Span {
    pub from: usize,
    pub to: usize,
}

impl Span {
    /// The part of the absolute `positions` in the segment that starts at `first`.
    pub(super) fn new(positions: &Range<usize>, first: usize) -> Self {
        let place = |position: usize| position.saturating_sub(first).min(ATTENTION_SEGMENT);
        Self { from: place(positions.start), to: place(positions.end) }
    }

    /// `from` rounded down to whole vectors.
    #[inline(always)]
    pub(super) fn first_lane(self) -> usize {
        self.from / LANES * LANES
    }
}

/// The queries of a task against one segment of positions.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    pub queries: usize,
    /// `[queries]` pointers to queries `[dim]`.
    pub q: *const *const f32,
    /// `[queries]`: which places of the segment each sees.
    pub spans: *const Span,
    /// The places that some query sees.
    pub seen: Span,
    /// [`ATTENTION_SEGMENT`] pointers to keys `[dim]`; places that no query sees repeat another.
    pub k: *const *const f32,
    /// `[queries][64]` scores, then weights.
    pub weights: *mut f32,
    pub dim: usize,
    pub scale: f32,
    /// Soft cap of the scores, or 0 for none.
    pub cap: f32,
}

impl Segment {
    /// The scores of 16 dot products.
    ///
    /// # Safety
    /// The machine supports `S`.
    #[inline(always)]
    pub(super) unsafe fn score<S: Simd>(&self, dots: S::V) -> S::V {
        // SAFETY: register operations only; the caller promises the instruction set.
        unsafe {
            let scores = S::mul(dots, S::splat(self.scale));
            if self.cap > 0.0 { softcap::<S>(scores, self.cap) } else { scores }
        }
    }

    /// The scores of `query` from `from` on; places outside its span are -inf, whose weight is
    /// exactly 0.
    ///
    /// # Safety
    /// The fields are valid, `query < queries`, `from` is a multiple of 16 below the span's end.
    #[inline(always)]
    unsafe fn visible_scores<S: Simd>(&self, query: usize, from: usize) -> S::V {
        // SAFETY: 16 of the 64 places from `from` on exist.
        unsafe {
            let (span, outside) = (*self.spans.add(query), S::splat(f32::NEG_INFINITY));
            let scores = S::load(self.weights.add(query * ATTENTION_SEGMENT + from));
            let scores = S::keep_first(scores, span.to - from, outside);
            S::keep_first(outside, span.from.saturating_sub(from), scores)
        }
    }
}

/// One segment's step of the online softmax of every query: scores become weights (zero outside the
/// query's span, in whole vectors), and what was summed so far is rescaled to the new maximum.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    pub segment: Segment,
    /// `[queries]` maxima and totals so far.
    pub max: *mut f32,
    pub total: *mut f32,
    /// `[queries][dim rounded up to 16]` weighted values so far.
    pub sums: *mut f32,
}

impl Kernel for Softmax {
    type Output = ();

    /// # Safety
    /// The pointers are valid for what the fields describe.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for query in 0..self.segment.queries {
            // SAFETY: `query < queries`.
            unsafe {
                let span = *self.segment.spans.add(query);
                if span.from < span.to {
                    self.one::<S>(query, span);
                }
            }
        }
    }
}

impl Softmax {
    /// # Safety
    /// As the kernel; `query < queries` and sees the places of `span`, at least one.
    #[inline(always)]
    unsafe fn one<S: Simd>(&self, query: usize, span: Span) {
        let padded = self.segment.dim.next_multiple_of(LANES);
        // SAFETY: lanes are cut at 64 weights and `padded` sums.
        unsafe {
            let (max, total) = (self.max.add(query), self.total.add(query));
            let weights = self.segment.weights.add(query * ATTENTION_SEGMENT);
            let sums = self.sums.add(query * padded);
            let mut largest = S::splat(f32::NEG_INFINITY);
            for from in (span.first_lane()..span.to).step_by(LANES) {
                largest = S::max(largest, self.segment.visible_scores::<S>(query, from));
            }
            let (old, segment) = (*max, S::largest(largest));
            let new = if old > segment { old } else { segment };
            let new_lanes = S::splat(new);
            let mut sum = S::splat(0.0);
            for from in (span.first_lane()..span.to).step_by(LANES) {
                let score = self.segment.visible_scores::<S>(query, from);
                let weight = exp::<S>(S::sub(score, new_lanes));
                S::store(weights.add(from), weight);
                sum = S::add(sum, weight);
            }
            let rescale = exp::<S>(S::sub(S::splat(old), new_lanes));
            // The same product in every lane; one lane of it is the scalar.
            let scaled = S::fma(S::splat(*total), rescale, S::splat(S::sum(sum)));
            S::store_partial(total, scaled, 1);
            *max = new;
            for i in (0..padded).step_by(LANES) {
                S::store(sums.add(i), S::mul(S::load(sums.add(i)), rescale));
            }
        }
    }
}

/// Adds weighted values to the sums of some neighbouring queries.
#[derive(Clone, Copy)]
pub(super) struct WeightedSum {
    /// Weights of the first query, [`ATTENTION_SEGMENT`] each.
    pub weights: *const f32,
    /// Pointers to the values `[dim]` of the segment's positions.
    pub values: *const *const f32,
    /// Positions of the segment.
    pub from: usize,
    pub to: usize,
    /// Sums of the first query, `dim` rounded up to 16 each.
    pub sums: *mut f32,
    pub dim: usize,
}

impl WeightedSum {
    /// Runs for `queries` queries (1..=6).
    ///
    /// # Safety
    /// `queries` queries have weights and sums, positions `from..to` have weights and values, and
    /// the machine supports `isa`.
    pub(super) unsafe fn run(self, isa: Isa, queries: usize) {
        // SAFETY: passed on to the caller.
        unsafe {
            match queries {
                1 => isa.run(SumRows::<1>(self)),
                2 => isa.run(SumRows::<2>(self)),
                3 => isa.run(SumRows::<3>(self)),
                4 => isa.run(SumRows::<4>(self)),
                5 => isa.run(SumRows::<5>(self)),
                6 => isa.run(SumRows::<6>(self)),
                _ => unreachable!("shapes hold 1 to 6 queries, not {queries}"),
            }
        }
    }
}

/// [`WeightedSum`] of `M` queries in registers.
#[derive(Clone, Copy)]
struct SumRows<const M: usize>(WeightedSum);

impl<const M: usize> SumRows<M> {
    /// The lanes `first..first + T * 16` of all queries; with `PART`, only `dim - first` of them
    /// exist.
    ///
    /// # Safety
    /// As the kernel.
    #[inline(always)]
    unsafe fn lanes<S: Simd, const T: usize, const PART: bool>(&self, first: usize) {
        let op = &self.0;
        let padded = op.dim.next_multiple_of(LANES);
        // SAFETY: `first + T * 16` is at most `padded`, and values are read up to `dim`.
        unsafe {
            let mut acc = [[S::splat(0.0); T]; M];
            for m in 0..M {
                for t in 0..T {
                    acc[m][t] = S::load(op.sums.add(m * padded + first + t * LANES));
                }
            }
            for p in op.from..op.to {
                let value = (*op.values.add(p)).add(first);
                let mut v = [S::splat(0.0); T];
                for t in 0..T {
                    let at = value.add(t * LANES);
                    v[t] = if PART { S::load_partial(at, op.dim - first) } else { S::load(at) };
                }
                for m in 0..M {
                    let weight = S::splat(*op.weights.add(m * ATTENTION_SEGMENT + p));
                    for t in 0..T {
                        acc[m][t] = S::fma(weight, v[t], acc[m][t]);
                    }
                }
            }
            for m in 0..M {
                for t in 0..T {
                    S::store(op.sums.add(m * padded + first + t * LANES), acc[m][t]);
                }
            }
        }
    }
}

impl<const M: usize> Kernel for SumRows<M> {
    type Output = ();

    /// # Safety
    /// As [`WeightedSum::run`], for `M` queries.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let op = &self.0;
        let tiles = op.dim / LANES;
        let mut tile = 0;
        // SAFETY: the lanes given to `lanes` lie inside the head.
        unsafe {
            if S::ACCUMULATORS >= 24 {
                while tile + 4 <= tiles {
                    self.lanes::<S, 4, false>(tile * LANES);
                    tile += 4;
                }
            }
            while tile + 2 <= tiles {
                self.lanes::<S, 2, false>(tile * LANES);
                tile += 2;
            }
            if tile < tiles {
                self.lanes::<S, 1, false>(tile * LANES);
                tile += 1;
            }
            if tile * LANES < op.dim {
                self.lanes::<S, 1, true>(tile * LANES);
            }
        }
    }
}

/// Adds the state of the next split to that of the splits before.
#[derive(Clone, Copy)]
pub(super) struct Join {
    pub queries: usize,
    /// `dim` rounded up to 16.
    pub padded: usize,
    /// `[queries]` maxima and totals, `[queries][padded]` sums of the splits before.
    pub max: *mut f32,
    pub total: *mut f32,
    pub sums: *mut f32,
    /// The same of the next split.
    pub next_max: *const f32,
    pub next_total: *const f32,
    pub next_sums: *const f32,
}

impl Kernel for Join {
    type Output = ();

    /// # Safety
    /// The pointers are valid for what the fields describe, and the states do not overlap.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for query in 0..self.queries {
            // SAFETY: `query < queries` and `i < padded`.
            unsafe {
                let (max, total) = (self.max.add(query), self.total.add(query));
                let (next_max, next_total) = (*self.next_max.add(query), *self.next_total.add(query));
                let (sums, next) =
                    (self.sums.add(query * self.padded), self.next_sums.add(query * self.padded));
                // A split in which the query sees nothing leaves no trace, so that it makes no
                // difference whether the split was walked for another query.
                if next_max == f32::NEG_INFINITY {
                    continue;
                }
                if *max == f32::NEG_INFINITY {
                    (*max, *total) = (next_max, next_total);
                    std::ptr::copy_nonoverlapping(next, sums, self.padded);
                    continue;
                }
                let new = if *max > next_max { *max } else { next_max };
                let a = exp::<S>(S::splat(*max - new));
                let b = exp::<S>(S::splat(next_max - new));
                // The same in every lane; one lane of it is the scalar.
                let joined = S::fma(S::splat(*total), a, S::mul(S::splat(next_total), b));
                S::store_partial(total, joined, 1);
                *max = new;
                for i in (0..self.padded).step_by(LANES) {
                    let right = S::mul(S::load(next.add(i)), b);
                    S::store(sums.add(i), S::fma(S::load(sums.add(i)), a, right));
                }
            }
        }
    }
}

/// `out = sums / total` of one query.
#[derive(Clone, Copy)]
pub(super) struct Normalise {
    pub sums: *const f32,
    pub total: f32,
    pub out: *mut f32,
    pub len: usize,
}

impl Kernel for Normalise {
    type Output = ();

    /// # Safety
    /// Both are valid for `len` elements and do not overlap.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for i in (0..self.len).step_by(LANES) {
            // SAFETY: `i < len`.
            unsafe {
                let v = S::div(load_at::<S>(self.sums, i, self.len), S::splat(self.total));
                store_at::<S>(self.out, i, self.len, v);
            }
        }
    }
}
