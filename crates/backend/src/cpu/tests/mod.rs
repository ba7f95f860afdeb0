//! Every operation against a plain reference, on every instruction set of the machine.

mod attention;
mod coded_moe;
mod codes;
mod elementwise;
mod matmul;
mod moe;
mod packing;
mod pointwise;
mod reference;

use super::{CpuBackend, CpuOptions, CpuTensor, Isa, PackedLinear};
use crate::Backend;
use lockstep_core::config::Activation;
use lockstep_core::random::splitmix64;

/// Deterministic inputs from a printed seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        splitmix64(&mut self.0)
    }

    /// `0..end`.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Uniform in -1..1.
    fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }
}

/// The product of all rows of `x` with a matrix on a backend; nothing is written beyond them.
fn multiply(backend: &mut CpuBackend, linear: &PackedLinear, x: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let rows = x.len() / linear.spec().in_features;
    let x = tensor(backend, x, linear.spec().in_features);
    let mut out = empty(backend, rows, linear.spec().out_features);
    let bias = bias.map(|b| backend.vector(b).unwrap());
    backend.matmul(linear, &x, bias.as_ref(), rows, &mut out);
    assert!(out.rows(rows + 1)[rows * out.cols()..].iter().all(|v| v.is_nan()), "wrote beyond the rows");
    out.rows(rows).to_vec()
}

/// A fused gate|up product and its activation in one operation have the bits of the two operations.
#[track_caller]
fn assert_gated(
    backend: &mut CpuBackend,
    linear: &PackedLinear,
    x: &[f32],
    bias: Option<&[f32]>,
    what: &str,
) {
    let (rows, outputs) = (x.len() / linear.spec().in_features, linear.spec().out_features);
    let product = multiply(backend, linear, x, bias);
    let product = tensor(backend, &product, outputs);
    let x = tensor(backend, x, linear.spec().in_features);
    let bias = bias.map(|b| backend.vector(b).unwrap());
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let mut want = empty(backend, rows, outputs / 2);
        backend.gated_activation(activation, &product, rows, &mut want);
        let (mut room, mut got) = (empty(backend, rows, outputs), empty(backend, rows, outputs / 2));
        let buffers = (&mut room, &mut got);
        backend.gated_matmul(activation, (linear, bias.as_ref()), &x, rows, buffers);
        let what = format!("{what}, {activation:?}, {}", backend.describe());
        assert_same(got.rows(rows), want.rows(rows), &what);
        assert!(
            got.rows(rows + 1)[rows * got.cols()..].iter().all(|v| v.is_nan()),
            "{what}: wrote beyond the rows"
        );
    }
}

fn backend(isa: Isa, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, isa: Some(isa), placement: None }).unwrap()
}

/// Every instruction set with one to three threads.
fn backends() -> impl Iterator<Item = CpuBackend> {
    Isa::available().into_iter().flat_map(|isa| (1..=3).map(move |threads| backend(isa, threads)))
}

/// Activations with these rows; more room than needed, the rest poisoned.
fn tensor(backend: &CpuBackend, data: &[f32], cols: usize) -> CpuTensor {
    let rows = data.len() / cols;
    let mut tensor = backend.tensor(rows + 2, cols).unwrap();
    tensor.rows_mut(rows + 2).fill(f32::NAN);
    tensor.rows_mut(rows).copy_from_slice(data);
    tensor
}

/// An output to be written: poisoned.
fn empty(backend: &CpuBackend, rows: usize, cols: usize) -> CpuTensor {
    tensor(backend, &vec![f32::NAN; rows * cols], cols)
}

/// Bits, so that -0 and 0 and different NaN differ.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[track_caller]
fn assert_same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    if let Some(i) = (0..got.len()).find(|&i| got[i].to_bits() != want[i].to_bits()) {
        panic!("{what}: element {i} of {}: got {:e}, want {:e}", got.len(), got[i], want[i]);
    }
}

#[test]
fn the_fastest_instruction_set_is_found_and_named() {
    let backend = CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
    assert_eq!(backend.describe(), format!("cpu {} x2", Isa::detect().name()));
    assert_eq!(Isa::available().last(), Some(&Isa::Portable));
}
