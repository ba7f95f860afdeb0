//! Norms, silu, exp and the row operations.

use super::reference;
use super::{Random, assert_same, backends, bits, empty, tensor};
use crate::cpu::simd::{Kernel, LANES, Simd};
use crate::cpu::{Isa, exp};
use crate::{Backend, ReduceAddNorm};
use lockstep_comm::collective::OneRank;

/// `exp` of 16 lanes.
#[derive(Clone, Copy)]
struct Exp([f32; LANES]);

impl Kernel for Exp {
    type Output = [f32; LANES];

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Self::Output {
        let mut out = [0.0; LANES];
        // SAFETY: both arrays have 16 elements.
        unsafe { S::store(out.as_mut_ptr(), exp::exp::<S>(S::load(self.0.as_ptr()))) };
        out
    }
}

/// All reductions and the partial forms, as bits.
#[derive(Clone, Copy)]
struct Lanes<'a>(&'a [[f32; LANES]; LANES], usize);

impl Kernel for Lanes<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Self::Output {
        let mut out = vec![0.0; (5 + LANES) * LANES];
        // SAFETY: every array has 16 elements and `n` is at most 16.
        unsafe {
            let mut v = [S::splat(0.0); LANES];
            for i in 0..LANES {
                v[i] = S::load(self.0[i].as_ptr());
                out[i] = S::sum(v[i]);
                out[LANES + i] = S::largest(v[i]);
            }
            S::store(out[2 * LANES..].as_mut_ptr(), S::sums(v));
            S::store_partial(out[3 * LANES..].as_mut_ptr(), v[0], self.1);
            let partial = S::load_partial(self.0[1].as_ptr(), self.1);
            S::store(out[4 * LANES..].as_mut_ptr(), S::keep_first(v[2], self.1, partial));
            let turned = S::transpose(v);
            for i in 0..LANES {
                S::store(out[(5 + i) * LANES..].as_mut_ptr(), turned[i]);
            }
        }
        out
    }
}

#[test]
fn lane_operations_give_the_same_bits_on_every_instruction_set() {
    let mut random = Random(23);
    for round in 0..200 {
        let lanes: [[f32; LANES]; LANES] = std::array::from_fn(|_| std::array::from_fn(|_| random.value()));
        let n = round % (LANES + 1);
        let mut want = vec![0.0; 5 * LANES];
        want.extend((0..LANES * LANES).map(|i| lanes[i % LANES][i / LANES]));
        for i in 0..LANES {
            want[i] = reference::tree(lanes[i]);
            want[LANES + i] = lanes[i].iter().copied().fold(f32::MIN, f32::max);
            want[2 * LANES + i] = want[i];
            want[3 * LANES + i] = if i < n { lanes[0][i] } else { 0.0 };
            want[4 * LANES + i] = if i < n { lanes[2][i] } else { 0.0 };
        }
        for isa in Isa::available() {
            // SAFETY: the instruction set is available.
            assert_same(&unsafe { isa.run(Lanes(&lanes, n)) }, &want, &format!("{isa:?} round {round}"));
        }
    }
}

#[test]
fn exp_is_within_two_ulp_and_the_same_everywhere() {
    let mut random = Random(29);
    let mut worst = 0.0f64;
    for round in 0..20_000 {
        let x: [f32; LANES] = std::array::from_fn(|_| match round % 3 {
            0 => random.value() * 86.0,
            1 => random.value() * 2.0,
            _ => -random.value().abs() * 20.0,
        });
        // SAFETY: portable code runs everywhere.
        let want = unsafe { Isa::Portable.run(Exp(x)) };
        for isa in Isa::available() {
            // SAFETY: the instruction set is available.
            assert_eq!(bits(&unsafe { isa.run(Exp(x)) }), bits(&want), "{isa:?} {x:?}");
        }
        for (x, got) in x.into_iter().zip(want) {
            assert_eq!(got.to_bits(), reference::exp(x).to_bits(), "exp({x})");
            let exact = f64::from(x).exp();
            let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
            worst = worst.max((f64::from(got) - exact).abs() / ulp);
        }
    }
    assert!(worst < 2.0, "worst error {worst} ulp");
}

#[test]
fn exp_at_the_ends() {
    let mut x = [0.0; LANES];
    let ends = [0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -86.5, -1e30, 88.7, 89.5, 1e30, -85.9];
    x[..ends.len()].copy_from_slice(&ends);
    for isa in Isa::available() {
        // SAFETY: the instruction set is available.
        let y = unsafe { isa.run(Exp(x)) };
        assert_eq!((y[0], y[1], y[2], y[3]), (1.0, 1.0, 0.0, f32::INFINITY), "{isa:?}");
        assert!(y[4].is_nan() && y[5] == 0.0 && y[6] == 0.0, "{isa:?}");
        assert!(
            (y[7] / 3.3e38 - 1.0).abs() < 0.02 && y[8] == f32::INFINITY && y[9] == f32::INFINITY,
            "{isa:?}"
        );
        assert!(y[10] > 0.0 && y[10].is_normal(), "{isa:?}");
    }
}

#[test]
fn rms_norm_is_bit_equal_to_the_reference() {
    let mut random = Random(31);
    for mut backend in backends() {
        for (rows, cols) in [(1, 1), (3, 15), (70, 16), (5, 33), (40, 576), (2, 4096)] {
            let (x, weight) = (random.values(rows * cols), random.values(cols));
            let input = tensor(&backend, &x, cols);
            let mut out = empty(&backend, rows, cols);
            let vector = backend.vector(&weight).unwrap();
            backend.rms_norm(&input, &vector, 1e-5, rows, &mut out);
            let want: Vec<f32> = x.chunks(cols).flat_map(|x| reference::rms_norm(x, &weight, 1e-5)).collect();
            assert_same(out.rows(rows), &want, &format!("{} {rows}x{cols}", backend.describe()));
            for (x, got) in x.chunks(cols).zip(out.rows(rows).chunks(cols)) {
                let square: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / cols as f64;
                for k in 0..cols {
                    let exact = f64::from(x[k]) / (square + 1e-5).sqrt() * f64::from(weight[k]);
                    assert!((f64::from(got[k]) - exact).abs() < 1e-5, "got {}, want {exact}", got[k]);
                }
            }
        }
    }
}

#[test]
fn reduce_add_norm_adds_bias_once_and_keeps_the_residual() {
    let mut random = Random(37);
    for mut backend in backends() {
        for (rows, cols) in [(1, 16), (9, 45), (40, 960)] {
            let (x, start) = (random.values(rows * cols), random.values(rows * cols));
            let (bias, weight) = (random.values(cols), random.values(cols));
            let (b, w) = (backend.vector(&bias).unwrap(), backend.vector(&weight).unwrap());
            for bias_used in [None, Some(&b)] {
                let mut partial = tensor(&backend, &x, cols);
                let mut residual = tensor(&backend, &start, cols);
                let mut out = empty(&backend, rows, cols);
                let args =
                    ReduceAddNorm { bias: bias_used, post_norm: None, norm_weight: &w, norm_eps: 1e-6 };
                backend
                    .reduce_add_norm(&OneRank, args, &mut partial, (&mut residual, &mut out), rows)
                    .unwrap();
                let sum = |i: usize| if bias_used.is_some() { x[i] + bias[i % cols] } else { x[i] };
                let stream: Vec<f32> = (0..rows * cols).map(|i| start[i] + sum(i)).collect();
                assert_same(residual.rows(rows), &stream, "residual");
                let normed: Vec<f32> =
                    stream.chunks(cols).flat_map(|r| reference::rms_norm(r, &weight, 1e-6)).collect();
                assert_same(out.rows(rows), &normed, "out");
            }
        }
    }
}

#[test]
fn sandwich_norm_applies_to_the_reduced_sum_with_its_bias() {
    let mut random = Random(47);
    for mut backend in backends() {
        for (rows, cols) in [(1, 16), (9, 45), (40, 960)] {
            let (x, start) = (random.values(rows * cols), random.values(rows * cols));
            let vectors: [Vec<f32>; 3] = std::array::from_fn(|_| random.values(cols));
            let [bias, post, weight] = &vectors;
            let [b, p, w] = vectors.each_ref().map(|v| backend.vector(v).unwrap());
            for bias_used in [None, Some(&b)] {
                let mut partial = tensor(&backend, &x, cols);
                let mut residual = tensor(&backend, &start, cols);
                let mut out = empty(&backend, rows, cols);
                let args =
                    ReduceAddNorm { bias: bias_used, post_norm: Some(&p), norm_weight: &w, norm_eps: 1e-6 };
                backend
                    .reduce_add_norm(&OneRank, args, &mut partial, (&mut residual, &mut out), rows)
                    .unwrap();
                let sum = |i: usize| if bias_used.is_some() { x[i] + bias[i % cols] } else { x[i] };
                let sums: Vec<f32> = (0..rows * cols).map(sum).collect();
                let posted = sums.chunks(cols).flat_map(|r| reference::rms_norm(r, post, 1e-6));
                let stream: Vec<f32> = start.iter().zip(posted).map(|(r, s)| r + s).collect();
                assert_same(residual.rows(rows), &stream, "residual");
                let normed: Vec<f32> =
                    stream.chunks(cols).flat_map(|r| reference::rms_norm(r, weight, 1e-6)).collect();
                assert_same(out.rows(rows), &normed, "out");
            }
        }
    }
}

#[test]
fn gather_and_all_reduce_of_one_rank_copy_exactly() {
    let mut random = Random(43);
    for mut backend in backends().take(1) {
        let x = random.values(6 * 19);
        let mut input = tensor(&backend, &x, 19);
        backend.all_reduce(&OneRank, &mut input, 6).unwrap();
        let mut out = empty(&backend, 3, 19);
        backend.gather_rows(&input, &[5, 0, 5], &mut out);
        let want = [&x[5 * 19..], &x[..19], &x[5 * 19..]].concat();
        assert_same(&backend.read(&out, 3).unwrap(), &want, "gathered");
    }
}
