//! Every operation on the GPU against the CPU backend, on random shapes.
//!
//! Both get the same inputs, rounded to the GPU's type first, so that what differs is the operation. The
//! error of a case is `|got - want| / |want|` over its whole output (Euclidean norms); outputs are filled
//! with NaN before they are written, and a NaN in the result fails the case. Each operation is stated
//! once, generic over the backend ([`Probe`]).

mod cases;
mod choose;
mod decode;
mod peers;

pub use peers::run_shared;

use super::products::Way;
use super::{CudaBackend, CudaLinear, CudaOptions, CudaTensor, CudaVector};
use crate::cpu::{CpuBackend, CpuOptions, CpuTensor};
use crate::{Backend, Result};
use half::{bf16, f16};
use lockstep_core::DType;
use lockstep_core::random::splitmix64;

/// What one operation came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The operation.
    pub operation: &'static str,
    /// Cases run.
    pub cases: usize,
    /// Largest error of a case.
    pub error_max: f64,
    /// What it may be.
    pub bound: f64,
    /// The shape of the worst case.
    pub worst: String,
}

impl Outcome {
    /// Whether every case stayed within the bound.
    pub fn passed(&self) -> bool {
        self.error_max <= self.bound
    }
}

/// Runs `cases` random cases of every operation; `on_outcome` hears of each as it ends.
///
/// Errors when the GPU cannot be used or fails; a wrong result is an [`Outcome`].
pub fn run(
    options: CudaOptions,
    seed: u64,
    cases: usize,
    on_outcome: &mut dyn FnMut(&Outcome),
) -> Result<Vec<Outcome>> {
    let mut gpu = CudaBackend::new(options)?;
    let mut cpu = CpuBackend::new(CpuOptions::default())?;
    let mut outcomes = Vec::new();
    for operation in cases::ALL {
        let mut outcome = Outcome {
            operation: operation.name,
            cases,
            error_max: 0.0,
            bound: operation.bound(options.dtype),
            worst: String::new(),
        };
        for case in 0..cases {
            let random = Random { state: seed ^ (case as u64) << 32, dtype: options.dtype };
            let (want, shape) = (operation.on_cpu)(&mut cpu, random.clone())?;
            let (got, _) = (operation.on_gpu)(&mut gpu, random)?;
            gpu.wait()?;
            let error = difference(&got, &want);
            if error > outcome.error_max || outcome.worst.is_empty() {
                (outcome.error_max, outcome.worst) = (error, format!("case {case}: {shape}"));
            }
        }
        on_outcome(&outcome);
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

/// `|got - want| / |want|`; infinite where a result is not a number.
fn difference(got: &[f32], want: &[f32]) -> f64 {
    if got.len() != want.len() || got.iter().any(|v| !v.is_finite()) {
        return f64::INFINITY;
    }
    let sum = |terms: &mut dyn Iterator<Item = f64>| terms.map(|t| t * t).sum::<f64>().sqrt();
    let apart = sum(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w)));
    let size = sum(&mut want.iter().map(|w| f64::from(*w)));
    if size == 0.0 { apart } else { apart / size }
}

/// Both backends draw the same shapes and values from the same seed.
#[derive(Clone)]
pub(crate) struct Random {
    state: u64,
    /// Values are rounded to this type.
    dtype: DType,
}

impl Random {
    fn next(&mut self) -> u64 {
        splitmix64(&mut self.state)
    }

    /// `0..end`.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Uniform in -1..1, rounded.
    fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }

    fn value(&mut self) -> f32 {
        let value = (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        match self.dtype {
            DType::F32 => value,
            DType::F16 => f16::from_f32(value).to_f32(),
            DType::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }
}

/// A backend whose tensors can be written.
pub(crate) trait Probe: Backend {
    /// Replaces the first rows.
    fn put(&mut self, tensor: &mut Self::Tensor, values: &[f32]) -> Result<()>;

    /// The largest of the first `cols` logits of each row and its column, as the device finds them; `None` on CPUs,
    /// where the sampler looks for it.
    fn best(&mut self, _x: &Self::Tensor, _rows: usize, _cols: usize) -> Result<Option<Vec<(f32, u32)>>> {
        Ok(None)
    }

    /// [`Backend::matmul`] of a matrix, rows and bias by one of the device's ways, chosen by `number`; CPUs have one.
    fn matmul_by(
        &mut self,
        _number: usize,
        (w, x, bias): (&Self::Linear, &Self::Tensor, Option<&Self::Vector>),
        rows: usize,
        out: &mut Self::Tensor,
    ) -> Result<()> {
        self.matmul(w, x, bias, rows, out);
        Ok(())
    }

    /// Activations with these rows.
    fn filled(&mut self, values: &[f32], cols: usize) -> Result<Self::Tensor> {
        let mut tensor = self.tensor((values.len() / cols).max(1), cols)?;
        self.put(&mut tensor, values)?;
        Ok(tensor)
    }

    /// An output to be written: NaN.
    fn empty(&mut self, rows: usize, cols: usize) -> Result<Self::Tensor> {
        self.filled(&vec![f32::NAN; rows.max(1) * cols], cols)
    }

    /// The same, f32 on every device.
    fn empty_f32(&mut self, rows: usize, cols: usize) -> Result<Self::Tensor> {
        let mut tensor = self.tensor_f32(rows.max(1), cols)?;
        self.put(&mut tensor, &vec![f32::NAN; rows.max(1) * cols])?;
        Ok(tensor)
    }
}

impl Probe for CpuBackend {
    fn put(&mut self, tensor: &mut CpuTensor, values: &[f32]) -> Result<()> {
        let rows = values.len() / tensor.cols();
        tensor.rows_mut(rows).copy_from_slice(values);
        Ok(())
    }
}

impl Probe for CudaBackend {
    fn put(&mut self, tensor: &mut CudaTensor, values: &[f32]) -> Result<()> {
        self.write(tensor, values)
    }

    fn best(&mut self, x: &CudaTensor, rows: usize, cols: usize) -> Result<Option<Vec<(f32, u32)>>> {
        self.best_logits(x, rows, cols).map(Some)
    }

    fn matmul_by(
        &mut self,
        number: usize,
        (w, x, bias): (&CudaLinear, &CudaTensor, Option<&CudaVector>),
        rows: usize,
        out: &mut CudaTensor,
    ) -> Result<()> {
        let (shape, operands) = self.products.describe((w, bias), None, x, rows, out);
        let ways = self.products.ways(shape)?;
        // Of the library's algorithms the first, which it takes for the fastest.
        let ours = ways.iter().take_while(|way| matches!(way, Way::FewRows(_))).count();
        // SAFETY: `describe` has checked the sizes.
        unsafe { self.products.run_by(&ways[number % (ours + 1)], shape, operands) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_relative_and_nan_fails() {
        assert_eq!(difference(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert!((difference(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-12);
        assert_eq!(difference(&[f32::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(difference(&[], &[1.0]), f64::INFINITY);
    }

    /// The cases themselves are sound: the CPU agrees with itself, and no output is NaN.
    #[test]
    fn every_case_runs_on_the_cpu() {
        for operation in cases::ALL {
            for case in 0..3u64 {
                let random = Random { state: 5 ^ case << 32, dtype: DType::Bf16 };
                let mut cpu = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
                let (once, shape) = (operation.on_cpu)(&mut cpu, random.clone()).unwrap();
                let (again, _) = (operation.on_cpu)(&mut cpu, random).unwrap();
                assert_eq!(difference(&once, &again), 0.0, "{} {shape}", operation.name);
            }
        }
    }
}
