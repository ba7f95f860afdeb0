//! The inner loops of attention; the formulas are in the parent module.

use crate::cpu::exp::exp;
use crate::cpu::simd::{Isa, Kernel, LANES, Simd, load_at, store_at};
use lockstep_core::limits::ATTENTION_SEGMENT;

/// Scaled scores of one query against 16 keys. `C` is `dim / 16` when that is known at compile
/// time (the query then stays in registers), else 0.
#[derive(Clone, Copy)]
pub(super) struct Scores<const C: usize> {
    /// `[dim]`.
    pub q: *const f32,
    /// 16 pointers to keys `[dim]`.
    pub k: *const *const f32,
    /// 16 scores.
    pub out: *mut f32,
    pub dim: usize,
    pub scale: f32,
}

impl<const C: usize> Kernel for Scores<C> {
    type Output = ();

    /// # Safety
    /// The pointers are valid for what the fields describe; `dim` is `16 * C` unless `C` is 0.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: `c < C` and `i < dim` keep every read inside the query and the keys.
        unsafe {
            let mut dots = [S::splat(0.0); LANES];
            if C == 0 {
                for p in 0..LANES {
                    let k = *self.k.add(p);
                    for i in (0..self.dim).step_by(LANES) {
                        dots[p] =
                            S::fma(load_at::<S>(self.q, i, self.dim), load_at::<S>(k, i, self.dim), dots[p]);
                    }
                }
            } else {
                let mut q = [S::splat(0.0); C];
                for c in 0..C {
                    q[c] = S::load(self.q.add(c * LANES));
                }
                for p in 0..LANES {
                    let k = *self.k.add(p);
                    for c in 0..C {
                        dots[p] = S::fma(q[c], S::load(k.add(c * LANES)), dots[p]);
                    }
                }
            }
            S::store(self.out, S::mul(S::sums(dots), S::splat(self.scale)));
        }
    }
}

/// One segment's step of the online softmax of one query: scores become weights, and what was
/// summed so far is rescaled to the new maximum.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    /// 64 scores, of which `count` exist; then weights (zero up to the next multiple of 16).
    pub weights: *mut f32,
    pub count: usize,
    pub max: *mut f32,
    pub total: *mut f32,
    /// `[padded]`.
    pub sums: *mut f32,
    /// A multiple of 16.
    pub padded: usize,
}

impl Softmax {
    /// The scores from `from` on; places after `count` are -inf, whose weight is exactly 0.
    ///
    /// # Safety
    /// As the kernel; `from < count`, a multiple of 16.
    #[inline(always)]
    unsafe fn scores<S: Simd>(&self, from: usize) -> S::V {
        // SAFETY: 16 of the 64 places from `from` on exist.
        unsafe {
            S::keep_first(S::load(self.weights.add(from)), self.count - from, S::splat(f32::NEG_INFINITY))
        }
    }
}

impl Kernel for Softmax {
    type Output = ();

    /// # Safety
    /// The pointers are valid for what the fields describe; `count` is 1..=64.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: lanes are cut at 64 weights and `padded` sums.
        unsafe {
            let mut largest = S::splat(f32::NEG_INFINITY);
            for from in (0..self.count).step_by(LANES) {
                largest = S::max(largest, self.scores::<S>(from));
            }
            let old = *self.max;
            let segment = S::largest(largest);
            let new = if old > segment { old } else { segment };
            let new_lanes = S::splat(new);
            let mut total = S::splat(0.0);
            for from in (0..self.count).step_by(LANES) {
                let weight = exp::<S>(S::sub(self.scores::<S>(from), new_lanes));
                S::store(self.weights.add(from), weight);
                total = S::add(total, weight);
            }
            let rescale = exp::<S>(S::sub(S::splat(old), new_lanes));
            // Lane by lane the same product, so one lane of it is the scalar.
            let scaled = S::fma(S::splat(*self.total), rescale, S::splat(S::sum(total)));
            S::store_partial(self.total, scaled, 1);
            *self.max = new;
            for i in (0..self.padded).step_by(LANES) {
                S::store(self.sums.add(i), S::mul(S::load(self.sums.add(i)), rescale));
            }
        }
    }
}

/// Adds weighted values to the sums of `M` queries.
#[derive(Clone, Copy)]
pub(super) struct WeightedSum<const M: usize> {
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

impl<const M: usize> WeightedSum<M> {
    /// Runs for `queries` queries (1..=6), in the shape that holds them.
    ///
    /// # Safety
    /// As the kernel, for `queries` queries.
    pub(super) unsafe fn run_for(self, isa: Isa, queries: usize) {
        // SAFETY: passed on to the caller.
        unsafe {
            match queries {
                1 => isa.run(self.rows::<1>()),
                2 => isa.run(self.rows::<2>()),
                3 => isa.run(self.rows::<3>()),
                4 => isa.run(self.rows::<4>()),
                5 => isa.run(self.rows::<5>()),
                6 => isa.run(self.rows::<6>()),
                _ => unreachable!("shapes hold up to 6 queries"),
            }
        }
    }

    fn rows<const N: usize>(self) -> WeightedSum<N> {
        let Self { weights, values, from, to, sums, dim } = self;
        WeightedSum { weights, values, from, to, sums, dim }
    }

    /// The lanes `first..first + T * 16` of all queries; with `PART`, only `dim - first` of them
    /// exist.
    ///
    /// # Safety
    /// As the kernel.
    #[inline(always)]
    unsafe fn lanes<S: Simd, const T: usize, const PART: bool>(&self, first: usize) {
        let padded = self.dim.next_multiple_of(LANES);
        // SAFETY: `first + T * 16` is at most `padded`, and values are read up to `dim`.
        unsafe {
            let mut acc = [[S::splat(0.0); T]; M];
            for m in 0..M {
                for t in 0..T {
                    acc[m][t] = S::load(self.sums.add(m * padded + first + t * LANES));
                }
            }
            for p in self.from..self.to {
                let value = (*self.values.add(p)).add(first);
                let mut v = [S::splat(0.0); T];
                for t in 0..T {
                    let at = value.add(t * LANES);
                    v[t] = if PART { S::load_partial(at, self.dim - first) } else { S::load(at) };
                }
                for m in 0..M {
                    let weight = S::splat(*self.weights.add(m * ATTENTION_SEGMENT + p));
                    for t in 0..T {
                        acc[m][t] = S::fma(weight, v[t], acc[m][t]);
                    }
                }
            }
            for m in 0..M {
                for t in 0..T {
                    S::store(self.sums.add(m * padded + first + t * LANES), acc[m][t]);
                }
            }
        }
    }
}

impl<const M: usize> Kernel for WeightedSum<M> {
    type Output = ();

    /// # Safety
    /// `M` queries have weights and sums; positions `from..to` have weights and values.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let tiles = self.dim / LANES;
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
            if tile * LANES < self.dim {
                self.lanes::<S, 1, true>(tile * LANES);
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
