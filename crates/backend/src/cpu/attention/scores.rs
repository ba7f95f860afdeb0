//! Scores of queries against the keys of a segment, in two loop orders with the same bits.
//!
//! Both form, for a query and a key, the sixteen sums over `d mod 16` in ascending `d` and add them
//! by the fixed tree. [`Direct`] keeps `d` in the lanes: nothing to prepare, best for the few queries
//! of decode. [`Turned`] turns the keys once so that lanes are positions: no shuffles per query and
//! keys shared by four queries, best for prefill.

use super::kernels::Segment;
use crate::cpu::simd::{Isa, Kernel, LANES, Simd, load_at};
use lockstep_core::limits::ATTENTION_SEGMENT;
use std::ops::Range;

/// Queries from which turning the keys pays.
const TURN_QUERIES_MIN: usize = 16;

/// Computes the scores of all queries; `turned` is working memory for `dim * 64` elements.
///
/// # Safety
/// The fields of `segment` are valid, `turned` is writable, and the machine supports `isa`.
pub(super) unsafe fn scores(isa: Isa, segment: Segment, turned: *mut f32) {
    // SAFETY: passed on to the caller; `C` is `dim / 16` where it is not 0.
    unsafe {
        match segment.dim {
            32 => sized::<2>(isa, segment, turned),
            64 => sized::<4>(isa, segment, turned),
            80 => sized::<5>(isa, segment, turned),
            96 => sized::<6>(isa, segment, turned),
            _ => sized::<0>(isa, segment, turned),
        }
    }
}

/// The same for a head size that is known at compile time (`C` = `dim / 16`), or any (`C` = 0).
///
/// # Safety
/// As [`scores`].
unsafe fn sized<const C: usize>(isa: Isa, segment: Segment, turned: *mut f32) {
    // SAFETY: passed on to the caller.
    unsafe {
        if segment.queries >= TURN_QUERIES_MIN && segment.dim.is_multiple_of(LANES) {
            isa.run(Turned::<C> { segment, turned });
        } else {
            isa.run(Direct::<C> { segment });
        }
    }
}

/// Lanes are elements of the head.
#[derive(Clone, Copy)]
struct Direct<const C: usize> {
    segment: Segment,
}

impl<const C: usize> Kernel for Direct<C> {
    type Output = ();

    /// # Safety
    /// As [`scores`]; `dim` is `16 * C` unless `C` is 0.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let s = &self.segment;
        for query in 0..s.queries {
            // SAFETY: `query < queries`, and 16 of the 64 keys from `from` on exist.
            unsafe {
                let span = *s.spans.add(query);
                for from in (span.first_lane()..span.to).step_by(LANES) {
                    let dots = self.sixteen::<S>(*s.q.add(query), s.k.add(from));
                    let out = s.weights.add(query * ATTENTION_SEGMENT + from);
                    S::store(out, s.score::<S>(dots));
                }
            }
        }
    }
}

impl<const C: usize> Direct<C> {
    /// One query times 16 keys.
    ///
    /// # Safety
    /// As the kernel.
    #[inline(always)]
    unsafe fn sixteen<S: Simd>(&self, q: *const f32, keys: *const *const f32) -> S::V {
        let dim = self.segment.dim;
        // SAFETY: `c < C` and `i < dim` keep every read inside the query and the keys.
        unsafe {
            let mut dots = [S::splat(0.0); LANES];
            if C == 0 {
                for p in 0..LANES {
                    let k = *keys.add(p);
                    for i in (0..dim).step_by(LANES) {
                        dots[p] = S::fma(load_at::<S>(q, i, dim), load_at::<S>(k, i, dim), dots[p]);
                    }
                }
            } else {
                let mut query = [S::splat(0.0); C];
                for c in 0..C {
                    query[c] = S::load(q.add(c * LANES));
                }
                for p in 0..LANES {
                    let k = *keys.add(p);
                    for c in 0..C {
                        dots[p] = S::fma(query[c], S::load(k.add(c * LANES)), dots[p]);
                    }
                }
            }
            S::sums(dots)
        }
    }
}

/// One level of the fixed tree: the subtree at `lane` plus the one `$half` further.
macro_rules! tree_level {
    ($name:ident, $below:ident, $half:literal) => {
        /// # Safety
        /// As `chain`.
        #[inline(always)]
        unsafe fn $name<S: Simd, const Q: usize>(
            &self,
            q: &[*const f32; Q],
            keys: *const f32,
            lane: usize,
        ) -> [[S::V; 2]; Q] {
            // SAFETY: passed on to the caller; `lane + $half` is below 16.
            unsafe {
                let mut sums = self.$below::<S, Q>(q, keys, lane);
                let right = self.$below::<S, Q>(q, keys, lane + $half);
                for i in 0..Q {
                    sums[i] = [S::add(sums[i][0], right[i][0]), S::add(sums[i][1], right[i][1])];
                }
                sums
            }
        }
    };
}

/// Lanes are positions; `dim` is a multiple of 16.
#[derive(Clone, Copy)]
struct Turned<const C: usize> {
    segment: Segment,
    /// `[dim][64]` keys.
    turned: *mut f32,
}

/// Positions computed at a time: two registers.
const PAIR: usize = 2 * LANES;

impl<const C: usize> Kernel for Turned<C> {
    type Output = ();

    /// # Safety
    /// As [`scores`]; `dim` is `16 * C`, or any multiple of 16 when `C` is 0.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let s = &self.segment;
        // SAFETY: queries are below `queries`; positions are cut at 64, where keys repeat.
        unsafe {
            let seen = s.seen.from / PAIR * PAIR..s.seen.to;
            self.turn::<S>(seen.clone());
            for from in seen.step_by(PAIR) {
                let mut query = 0;
                while query < s.queries {
                    query += match s.queries - query {
                        // Not of small heads: so many operations at once, all unrolled, overwhelm the registers.
                        4.. if C == 0 => self.pair::<S, 4>(query, from),
                        2.. => self.pair::<S, 2>(query, from),
                        _ => self.pair::<S, 1>(query, from),
                    };
                }
            }
        }
    }
}

impl<const C: usize> Turned<C> {
    /// Turns the keys of `places`, whose end is rounded up to a multiple of 32.
    ///
    /// # Safety
    /// As the kernel; `places` starts at a multiple of 32.
    #[inline(always)]
    unsafe fn turn<S: Simd>(&self, places: Range<usize>) {
        for from in (places.start..places.end.next_multiple_of(PAIR)).step_by(LANES) {
            for c in (0..self.segment.dim).step_by(LANES) {
                // SAFETY: key pointers up to 64 exist, `c + 16 <= dim`, and `turned` holds
                // `dim * 64` elements.
                unsafe {
                    let mut v = [S::splat(0.0); LANES];
                    for p in 0..LANES {
                        v[p] = S::load((*self.segment.k.add(from + p)).add(c));
                    }
                    let v = S::transpose(v);
                    for d in 0..LANES {
                        S::store(self.turned.add((c + d) * ATTENTION_SEGMENT + from), v[d]);
                    }
                }
            }
        }
    }

    /// `Q` queries from `query` on times 32 positions from `from` on; gives `Q`. With four, six loads (two of keys, and an
    /// element of each query, broadcast) feed eight products; with two, a core that loads no more than it multiplies waits.
    ///
    /// # Safety
    /// As the kernel; these queries exist.
    #[inline(always)]
    unsafe fn pair<S: Simd, const Q: usize>(&self, query: usize, from: usize) -> usize {
        // SAFETY: `turned` was filled for these positions; the queries have 64 scores each.
        unsafe {
            let mut q = [*self.segment.q.add(query); Q];
            for i in 1..Q {
                q[i] = *self.segment.q.add(query + i);
            }
            let keys = self.turned.add(from);
            let dots = self.tree1::<S, Q>(&q, keys, 0);
            for i in 0..Q {
                let out = self.segment.weights.add((query + i) * ATTENTION_SEGMENT + from);
                S::store(out, self.segment.score::<S>(dots[i][0]));
                S::store(out.add(LANES), self.segment.score::<S>(dots[i][1]));
            }
        }
        Q
    }

    /// The sum over `d = lane (mod 16)`.
    ///
    /// # Safety
    /// As the kernel; `keys` is a column of `turned`, `lane < 16`.
    #[inline(always)]
    unsafe fn chain<S: Simd, const Q: usize>(
        &self,
        q: &[*const f32; Q],
        keys: *const f32,
        lane: usize,
    ) -> [[S::V; 2]; Q] {
        let terms = if C == 0 { self.segment.dim / LANES } else { C };
        // SAFETY: `d < dim`.
        unsafe {
            let mut sums = [[S::splat(0.0); 2]; Q];
            for c in 0..terms {
                let d = c * LANES + lane;
                let key = keys.add(d * ATTENTION_SEGMENT);
                let k = [S::load(key), S::load(key.add(LANES))];
                for i in 0..Q {
                    let element = S::splat(*q[i].add(d));
                    sums[i] = [S::fma(element, k[0], sums[i][0]), S::fma(element, k[1], sums[i][1])];
                }
            }
            sums
        }
    }

    tree_level!(tree8, chain, 8);
    tree_level!(tree4, tree8, 4);
    tree_level!(tree2, tree4, 2);
    tree_level!(tree1, tree2, 1);
}
