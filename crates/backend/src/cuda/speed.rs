//! How fast a GPU is at what steps are made of, for `lockstep doctor`: about a second a GPU.

use super::{CudaBackend, CudaOptions};
use crate::{Backend, LinearSpec, Result};
use lockstep_core::DType;
use std::fmt;
use std::time::{Duration, Instant};

/// A matrix beyond any cache: 1 GiB of bf16.
const READ_SHAPE: (usize, usize) = (65_536, 8_192);
/// Rows, outputs and inputs of the product that shows arithmetic.
const PRODUCT: usize = 8_192;
/// Rounds of each, after one that warms up; the best counts.
const ROUNDS: usize = 10;

/// What [`measure`] found.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// Bytes per second at which a product of one row reads its weights, and operations per second of a square
    /// product of bf16; `None` when nothing was measured.
    pub measured: Option<(f64, f64)>,
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.measured {
            None => write!(f, "opens, kernels load"),
            Some((bytes, operations)) => write!(
                f,
                "reads weights at {:.2} TB/s, bf16 products of {PRODUCT} rows at {:.0} TFLOP/s",
                bytes / 1e12,
                operations / 1e12
            ),
        }
    }
}

/// Opens GPU `index` and loads the kernels, which are compiled the first time; unless `quick`, measures.
pub fn measure(index: usize, quick: bool) -> Result<Speed> {
    let mut backend = CudaBackend::new(CudaOptions { gpu: index, dtype: DType::Bf16 })?;
    if quick {
        return Ok(Speed { measured: None });
    }
    let read = product_time(&mut backend, 1, READ_SHAPE)?;
    let product = product_time(&mut backend, PRODUCT, (PRODUCT, PRODUCT))?;
    let bytes = (READ_SHAPE.0 * READ_SHAPE.1 * size_of::<u16>()) as f64;
    let operations = 2.0 * (PRODUCT as f64).powi(3);
    Ok(Speed { measured: Some((bytes / read.as_secs_f64(), operations / product.as_secs_f64())) })
}

/// Best time of `rows` rows through a matrix of `n` outputs and `k` inputs.
fn product_time(backend: &mut CudaBackend, rows: usize, (n, k): (usize, usize)) -> Result<Duration> {
    let mut weights = backend.linear(LinearSpec::single_leaf(n, k, DType::Bf16))?;
    // Numbers of every size: arithmetic on zeros draws less power and runs faster than a model's.
    let row: Vec<u8> = (0..k as u32).flat_map(|i| bf16_near_one(i).to_le_bytes()).collect();
    let rows_at_once = (16 << 20) / row.len();
    let band: Vec<u8> = row.repeat(rows_at_once);
    for first in (0..n).step_by(rows_at_once) {
        let count = rows_at_once.min(n - first);
        backend.pack_rows(&mut weights, first, &band[..count * row.len()]);
    }
    let mut x = backend.tensor(rows, k)?;
    let values: Vec<f32> = (0..rows * k).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect();
    backend.write(&mut x, &values)?;
    let mut y = backend.tensor(rows, n)?;
    let mut best = Duration::MAX;
    for round in 0..=ROUNDS {
        backend.wait()?;
        let started = Instant::now();
        backend.matmul(&weights, &x, None, rows, &mut y);
        backend.wait()?;
        if round > 0 {
            best = best.min(started.elapsed());
        }
    }
    Ok(best)
}

/// A bf16 of either sign, between 1/2 and 2 in size, that looks random over `index`.
fn bf16_near_one(index: u32) -> u16 {
    let mixed = index.wrapping_mul(0x9e37_79b9).rotate_left(15).wrapping_mul(0x85eb_ca6b);
    0x3f00 ^ ((mixed >> 16) as u16 & 0x80ff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_weights_have_both_signs_and_a_size_near_one() {
        let values: Vec<f32> = (0..1000).map(|i| f32::from_bits(u32::from(bf16_near_one(i)) << 16)).collect();
        assert!(values.iter().all(|value| (0.5..2.0).contains(&value.abs())));
        assert!((300..700).contains(&values.iter().filter(|value| **value < 0.0).count()));
    }
}
