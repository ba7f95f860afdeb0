//! Which way a matrix product takes: our own kernels ([`FewRows`]) or one of cuBLASLt's algorithms ([`Gemm`]).
//!
//! **Invariant:** the way of a shape is decided once, at its first product: by what an earlier start timed, else by
//! timing all ways if that is on ([`Products::tune`]), else by rule. So a step is repeatable, and stays so across
//! starts as long as GPU, driver, libraries, kernels and cache are the same; two ways differ in the last bits. Ranks
//! decide by themselves, which changes no sum over ranks: each has its own shard anyway.

use super::driver::{Address, Device};
use super::few_rows::{FewRows, FewRowsWay};
use super::gemm::{ALGORITHMS_MAX, Algorithm, Gemm, Operands, Shape};
use super::product_times::{Stopwatch, TimedWays};
use super::tensor::{CudaLinear, CudaTensor, CudaVector};
use crate::{BackendError, Result};
use lockstep_core::DType;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

/// Rows up to which products are timed: those of recorded decode steps. Longer steps are of any length.
const TIMED_ROWS_MAX: usize = 256;
/// Ways that are timed more often than the others, which have lost by then.
const FINALISTS: usize = 4;
/// Further runs of each finalist, and of one that takes long.
const RUNS: usize = 4;
const RUNS_OF_LONG: usize = 1;
const LONG_US: f32 = 100.0;
/// What our own kernels gain in a step by starting before the kernel before them has ended, and asking for weights
/// meanwhile: a stopwatch does not see it.
const EARLY_START_US: f32 = 0.8;

/// One way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// A kernel of ours.
    FewRows(FewRowsWay),
    /// An algorithm of cuBLASLt.
    Library(Algorithm),
}

/// All ways, and those that were decided on.
pub(super) struct Products {
    device: Rc<Device>,
    dtype: DType,
    few_rows: FewRows,
    gemm: Gemm,
    decided: HashMap<Shape, Way>,
    timed: TimedWays,
    tuning: Option<Tuning>,
}

/// While products are timed.
struct Tuning {
    stopwatch: Stopwatch,
    started: Instant,
    shapes: usize,
    /// Rows of a step of prompts, which are timed too.
    prompt_rows: usize,
}

impl Products {
    /// For matrices of `dtype`. Errors when cuBLASLt is not installed.
    pub fn new(device: &Rc<Device>, dtype: DType) -> Result<Self> {
        let gemm = Gemm::new(device, dtype)?;
        Ok(Self {
            dtype,
            few_rows: FewRows::new(device, dtype)?,
            decided: HashMap::new(),
            timed: TimedWays::read(device, dtype, gemm.version()),
            tuning: None,
            gemm,
            device: Rc::clone(device),
        })
    }

    /// With a number, shapes that were never timed are timed from here on, and those of `prompt_rows` rows with each
    /// matrix that is met; without, no longer, and what was learnt is kept on disk. Never in f32, the test mode.
    pub fn tune(&mut self, prompt_rows: Option<usize>) -> Result<()> {
        if let Some(prompt_rows) = prompt_rows.filter(|_| self.dtype != DType::F32) {
            match Stopwatch::new(&self.device) {
                Ok(stopwatch) => {
                    let started = Instant::now();
                    self.tuning = Some(Tuning { stopwatch, started, shapes: 0, prompt_rows });
                }
                Err(BackendError::OutOfMemory { bytes, .. }) => tracing::warn!(
                    "matrix products are not timed, which may cost some speed: that takes {bytes} bytes of GPU memory"
                ),
                Err(error) => return Err(error),
            }
        } else if let Some(tuning) = self.tuning.take().filter(|tuning| tuning.shapes > 0) {
            let seconds = tuning.started.elapsed().as_secs_f64();
            tracing::info!("{} shapes of matrix products were timed within {seconds:.2} s", tuning.shapes);
            self.timed.store();
        }
        Ok(())
    }

    /// Queues `out = x w^T + bias` for the first `rows` rows. Panics when sizes or types differ.
    pub fn matmul(
        &mut self,
        (w, bias): (&CudaLinear, Option<&CudaVector>),
        x: &CudaTensor,
        rows: usize,
        out: &CudaTensor,
    ) -> Result<()> {
        let (shape, operands) = self.describe((w, bias), x, rows, out);
        if rows == 0 {
            return Ok(());
        }
        if let Some(way) = self.decided.get(&shape).copied() {
            // SAFETY: `describe` has checked the sizes.
            return unsafe { self.run_by(&way, shape, operands) };
        }
        let prompt_rows = self.tuning.as_ref().map(|tuning| tuning.prompt_rows);
        // Rows beyond the step's hold nothing that anyone needs.
        if let Some(prompt_rows) = prompt_rows.filter(|n| *n <= x.rows_max.min(out.rows_max)) {
            let (shape, operands) = self.describe((w, bias), x, prompt_rows, out);
            // SAFETY: as above.
            unsafe { self.decide(shape, operands, true)? };
        }
        // SAFETY: as above.
        unsafe {
            let way = self.decide(shape, operands, rows <= TIMED_ROWS_MAX)?;
            self.run_by(&way, shape, operands)
        }
    }

    /// Shape and operands of `out = x w^T + bias`. Panics when sizes or types differ.
    pub fn describe(
        &self,
        (w, bias): (&CudaLinear, Option<&CudaVector>),
        x: &CudaTensor,
        rows: usize,
        out: &CudaTensor,
    ) -> (Shape, Operands) {
        let (n, k) = (w.spec.out_features, w.spec.in_features);
        let bias = bias.map(|bias| Bias { exact: bias.exact(n), rounded: bias.rounded.address() });
        let (x, y) = (x.rows(rows, k, self.dtype), out.rows(rows, n, out.dtype));
        let shape = Shape { m: rows, n, k, out: out.dtype, bias: bias.is_some() };
        (shape, Operands { weights: w.buffer.address(), x, bias, y })
    }

    /// Every way that takes the shape, ours first.
    pub fn ways(&mut self, shape: Shape) -> Result<Vec<Way>> {
        let ours = FewRowsWay::ALL.into_iter().filter(|way| way.takes(&shape, self.dtype));
        let library = self.gemm.algorithms(shape, ALGORITHMS_MAX)?.into_iter().map(Way::Library);
        Ok(ours.map(Way::FewRows).chain(library).collect())
    }

    /// Queues one product by one of [`Self::ways`].
    ///
    /// # Safety
    /// The operands are valid for `shape` and do not overlap.
    pub unsafe fn run_by(&mut self, way: &Way, shape: Shape, operands: Operands) -> Result<()> {
        match way {
            // SAFETY: the caller's promise.
            Way::FewRows(way) => unsafe { self.few_rows.run(*way, &shape, &operands) },
            // SAFETY: the caller's promise.
            Way::Library(algorithm) => unsafe { self.gemm.run(shape, algorithm, operands)? },
        }
        Ok(())
    }

    /// The way of a shape, for good.
    ///
    /// # Safety
    /// As [`Self::run_by`].
    unsafe fn decide(&mut self, shape: Shape, operands: Operands, may_time: bool) -> Result<Way> {
        if let Some(way) = self.decided.get(&shape) {
            return Ok(*way);
        }
        let way = if let Some(way) = self.timed.get(&shape) {
            way
        } else if may_time
            && !self.device.is_recording()
            && let Some(mut tuning) = self.tuning.take()
        {
            // SAFETY: the caller's promise.
            let fastest = unsafe { self.time(&tuning.stopwatch, shape, operands) };
            tuning.shapes += 1;
            self.tuning = Some(tuning);
            fastest?
        } else if let Some(way) = FewRowsWay::usual(&shape, self.dtype) {
            Way::FewRows(way)
        } else {
            Way::Library(self.gemm.algorithms(shape, 1)?[0])
        };
        self.decided.insert(shape, way);
        Ok(way)
    }

    /// The fastest way, by the stopwatch.
    ///
    /// # Safety
    /// As [`Self::run_by`].
    unsafe fn time(&mut self, stopwatch: &Stopwatch, shape: Shape, operands: Operands) -> Result<Way> {
        // SAFETY: the caller's promise.
        let run = |products: &mut Self, way: &Way| unsafe { products.run_by(way, shape, operands) };
        let mut times: Vec<(f32, Way)> = Vec::new();
        for way in self.ways(shape)? {
            // The first run loads the kernel; an algorithm that the library lists may still be refused.
            if run(self, &way).is_err() {
                continue;
            }
            times.push((stopwatch.us(|| run(self, &way))?, way));
        }
        let as_in_steps =
            |(us, way): &(f32, Way)| us - if matches!(way, Way::FewRows(_)) { EARLY_START_US } else { 0.0 };
        times.sort_by(|a, b| as_in_steps(a).total_cmp(&as_in_steps(b)));
        for (us, way) in times.iter_mut().take(FINALISTS) {
            for _ in 0..if *us < LONG_US { RUNS } else { RUNS_OF_LONG } {
                *us = us.min(stopwatch.us(|| run(self, way))?);
            }
        }
        times.sort_by(|a, b| as_in_steps(a).total_cmp(&as_in_steps(b)));
        let Some((_, fastest)) = times.first().copied() else {
            let (operation, problem) = (format!("timing {shape:?}"), "no way runs".into());
            return Err(BackendError::Device { operation, problem });
        };
        self.timed.insert(shape, fastest, &times);
        Ok(fastest)
    }
}

/// A bias in both forms: ours is added before rounding.
#[derive(Clone, Copy)]
pub(super) struct Bias {
    /// f32.
    pub exact: Address,
    /// Of the type of y.
    pub rounded: Address,
}
