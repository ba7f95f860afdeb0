//! Gated activations, scale, soft cap.

use super::reference;
use super::{Random, assert_same, backends, empty, tensor};
use crate::Backend;
use crate::cpu::simd::{Kernel, LANES, Simd};
use crate::cpu::{Isa, tanh};
use lockstep_core::config::Activation;

/// `tanh` of 16 lanes.
#[derive(Clone, Copy)]
struct Tanh([f32; LANES]);

impl Kernel for Tanh {
    type Output = [f32; LANES];

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Self::Output {
        let mut out = [0.0; LANES];
        // SAFETY: both arrays have 16 elements.
        unsafe { S::store(out.as_mut_ptr(), tanh::tanh::<S>(S::load(self.0.as_ptr()))) };
        out
    }
}

#[test]
fn tanh_is_within_two_ulp_odd_and_the_same_everywhere() {
    let mut random = Random(61);
    let mut worst = 0.0f64;
    for round in 0..20_000 {
        let scale = [12.0, 1.0, 0.7, 0.01][round % 4];
        let mut x: [f32; LANES] = std::array::from_fn(|_| random.value() * scale);
        (x[1], x[3]) = (-x[0], if round % 2 == 0 { 0.625 } else { 0.625f32.next_down() });
        // SAFETY: portable code runs everywhere.
        let want = unsafe { Isa::Portable.run(Tanh(x)) };
        for isa in Isa::available() {
            // SAFETY: the instruction set is available.
            assert_same(&unsafe { isa.run(Tanh(x)) }, &want, &format!("{isa:?} {x:?}"));
        }
        assert_eq!(want[1].to_bits(), (-want[0]).to_bits(), "tanh({})", x[0]);
        for (x, got) in x.into_iter().zip(want) {
            assert_eq!(got.to_bits(), reference::tanh(x).to_bits(), "tanh({x})");
            let exact = f64::from(x).tanh();
            let ulp = f64::from((exact.abs() as f32).next_up()) - f64::from(exact.abs() as f32);
            worst = worst.max((f64::from(got) - exact).abs() / ulp);
        }
    }
    assert!(worst < 2.0, "worst error {worst} ulp");
}

#[test]
fn tanh_at_the_ends() {
    let mut x = [0.0; LANES];
    let ends = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30, -1e30, 1e-30, f32::MIN_POSITIVE];
    x[..ends.len()].copy_from_slice(&ends);
    for isa in Isa::available() {
        // SAFETY: the instruction set is available.
        let y = unsafe { isa.run(Tanh(x)) };
        assert_eq!(y[..4], [0.0, 0.0, 1.0, -1.0], "{isa:?}");
        assert!(y[4].is_nan(), "{isa:?}");
        assert_eq!(y[5..9], [1.0, -1.0, 1e-30, f32::MIN_POSITIVE], "{isa:?}");
    }
}

#[test]
fn gated_activations_are_bit_equal_to_the_reference_and_accurate() {
    let mut random = Random(41);
    for mut backend in backends() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            for (rows, n) in [(1, 1), (2, 17), (70, 96), (33, 1536)] {
                let mut x: Vec<f32> = random.values(rows * 2 * n).iter().map(|v| v * 12.0).collect();
                (x[0], x[rows * n]) = (-200.0, 0.0);
                let input = tensor(&backend, &x, 2 * n);
                let mut out = empty(&backend, rows, n);
                backend.gated_activation(activation, &input, rows, &mut out);
                let row = |x: &[f32]| -> Vec<f32> {
                    (0..n).map(|k| reference::gated(activation, x[k], x[n + k])).collect()
                };
                let want: Vec<f32> = x.chunks(2 * n).flat_map(row).collect();
                assert_same(out.rows(rows), &want, &format!("{} {activation:?}", backend.describe()));
                for (x, got) in x.chunks(2 * n).zip(out.rows(rows).chunks(n)) {
                    for k in 0..n {
                        let exact = reference::gated_f64(activation, x[k].into(), x[n + k].into());
                        let error = (f64::from(got[k]) - exact).abs();
                        assert!(error < 1e-6 * (1.0 + exact.abs()), "got {}, want {exact}", got[k]);
                    }
                }
            }
        }
    }
}

#[test]
fn scale_and_softcap_change_every_element_of_their_rows_only() {
    let mut random = Random(53);
    for mut backend in backends() {
        for (rows, cols) in [(1, 1), (3, 15), (70, 256), (2, 4096)] {
            let x: Vec<f32> = random.values(rows * cols).iter().map(|v| v * 90.0).collect();
            let mut scaled = tensor(&backend, &x, cols);
            backend.scale(&mut scaled, 45.254_834, rows);
            let want: Vec<f32> = x.iter().map(|v| v * 45.254_834).collect();
            assert_same(scaled.rows(rows), &want, "scaled");
            assert!(scaled.rows(rows + 1)[rows * cols..].iter().all(|v| v.is_nan()), "wrote beyond the rows");
            let mut capped = tensor(&backend, &x, cols);
            backend.softcap(&mut capped, 30.0, rows);
            let want: Vec<f32> = x.iter().map(|&v| reference::softcap(v, 30.0)).collect();
            assert_same(capped.rows(rows), &want, "capped");
            for (&x, &got) in x.iter().zip(capped.rows(rows)) {
                let exact = 30.0 * (f64::from(x) / 30.0).tanh();
                assert!((f64::from(got) - exact).abs() < 1e-5, "softcap({x}): got {got}, want {exact}");
            }
        }
    }
}
