//! Measures of the machine and of the kernels, for `lockstep bench hw` and the benches: what
//! memory and arithmetic can give, next to what the matrix product makes of it.
//!
//! Every measure repeats short runs and keeps the best, since other processes can only slow a run.

use super::memory::Region;
use super::pool::ThreadPool;
use super::simd::{Isa, Kernel, LANES, Simd};
use super::{CpuBackend, CpuOptions};
use crate::{Backend, LinearSpec, Result};
use lockstep_core::DType;
use std::time::{Duration, Instant};

/// Bytes a chunk of the bandwidth measure reads.
const READ_CHUNK: usize = 256 << 10;
/// Runs of a measure.
const RUNS: usize = 7;

/// Sums `len` elements (a multiple of 64), only to read them.
#[derive(Clone, Copy)]
struct Read {
    data: *const f32,
    len: usize,
}

impl Kernel for Read {
    type Output = f32;

    /// # Safety
    /// `data` is valid for `len` elements.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: `i + 64 <= len`.
        unsafe {
            let mut sums = [S::splat(0.0); 4];
            for i in (0..self.len).step_by(4 * LANES) {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    *sum = S::add(*sum, S::load(self.data.add(i + lane * LANES)));
                }
            }
            S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
        }
    }
}

/// `rounds` times 12 independent fused multiply-adds of 16 lanes.
#[derive(Clone, Copy)]
struct Fma {
    rounds: usize,
}

/// Accumulators of [`Fma`]: more than latency times throughput on any core, and they fit AVX2.
const FMA_CHAINS: usize = 12;

impl Kernel for Fma {
    type Output = f32;

    /// # Safety
    /// The machine supports `S`.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: register operations only.
        unsafe {
            let factor = S::splat(std::hint::black_box(0.999));
            let mut acc = [S::splat(1.0); FMA_CHAINS];
            for _ in 0..self.rounds {
                for a in &mut acc {
                    *a = S::fma(*a, factor, factor);
                }
            }
            let mut total = S::splat(0.0);
            for a in acc {
                total = S::add(total, a);
            }
            S::sum(total)
        }
    }
}

/// Reading speed of `threads` threads over `bytes` bytes in GB/s, on huge or ordinary pages.
pub fn bandwidth_gbs(threads: usize, bytes: usize, huge: bool) -> Result<f64> {
    let chunks = bytes.div_ceil(READ_CHUNK).max(1);
    let mut region = Region::own(chunks * READ_CHUNK, huge, "the bandwidth measure")?;
    region.as_mut_slice::<f32>().fill(1.0);
    let data = region.as_slice::<f32>();
    let (pool, isa) = (ThreadPool::new(threads.max(1), None), Isa::detect());
    let best = best_of(RUNS, || {
        pool.run(chunks, &|chunk, _| {
            let part = &data[chunk * READ_CHUNK / 4..(chunk + 1) * READ_CHUNK / 4];
            // SAFETY: the slice is valid for its length, a multiple of 64 elements.
            std::hint::black_box(unsafe { isa.run(Read { data: part.as_ptr(), len: part.len() }) });
        });
    });
    Ok((chunks * READ_CHUNK) as f64 / best.as_secs_f64() / 1e9)
}

/// Fused multiply-add speed of `threads` threads in GFLOP/s (two operations each).
pub fn fma_gflops(threads: usize) -> f64 {
    let (pool, isa) = (ThreadPool::new(threads.max(1), None), Isa::detect());
    let (chunks, rounds) = (threads.max(1) * 8, 40_000);
    let best = best_of(RUNS, || {
        pool.run(chunks, &|_, _| {
            // SAFETY: register operations of the detected instruction set.
            std::hint::black_box(unsafe { isa.run(Fma { rounds }) });
        });
    });
    (chunks * rounds * FMA_CHAINS * LANES * 2) as f64 / best.as_secs_f64() / 1e9
}

/// A matrix product to time.
#[derive(Clone, Copy, Debug)]
pub struct MatmulShape {
    /// Rows of activations.
    pub rows: usize,
    /// Inputs.
    pub in_features: usize,
    /// Outputs.
    pub out_features: usize,
    /// Weight type.
    pub dtype: DType,
    /// How many different matrices take turns, so that weights come from memory as in a model.
    pub matrices: usize,
}

impl MatmulShape {
    /// Bytes of weights one product reads.
    pub fn weight_bytes(&self) -> usize {
        self.in_features * self.out_features * self.dtype.size_bytes()
    }

    /// Floating point operations of one product.
    pub fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.in_features as f64 * self.out_features as f64
    }
}

/// Best time of one product on a backend made from `options`.
pub fn matmul_time(options: CpuOptions, shape: MatmulShape) -> Result<Duration> {
    let mut backend = CpuBackend::new(options)?;
    let spec = LinearSpec::single_leaf(shape.out_features, shape.in_features, shape.dtype);
    // Ones in any of the types, so that no time goes into denormals.
    let element: &[u8] = match shape.dtype {
        DType::F32 => &1f32.to_le_bytes(),
        DType::F16 => &half::f16::ONE.to_le_bytes(),
        DType::Bf16 => &half::bf16::ONE.to_le_bytes(),
    };
    let data = element.repeat(shape.in_features * shape.out_features);
    let mut matrices = Vec::new();
    for _ in 0..shape.matrices.max(1) {
        let mut linear = backend.linear(spec.clone())?;
        backend.pack_rows(&mut linear, 0, &data);
        matrices.push(linear);
    }
    let mut x = backend.tensor(shape.rows, shape.in_features)?;
    x.rows_mut(shape.rows).fill(0.5);
    let mut out = backend.tensor(shape.rows, shape.out_features)?;
    let best = best_of(RUNS, || {
        for linear in &matrices {
            backend.matmul(linear, &x, None, shape.rows, &mut out);
        }
    });
    Ok(best / matrices.len() as u32)
}

/// The shortest of `runs` runs, after one to warm up.
fn best_of(runs: usize, mut work: impl FnMut()) -> Duration {
    work();
    let times = (0..runs).map(|_| {
        let started = Instant::now();
        work();
        started.elapsed()
    });
    times.min().unwrap_or_default()
}
