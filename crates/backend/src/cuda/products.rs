//! Which way a matrix product takes: our own kernels ([`FewRows`]) or one of cuBLASLt's algorithms ([`Gemm`]).
//!
//! Timing a shape costs milliseconds, and similar numbers of rows are fastest by the same way: up to
//! [`TIMED_ROWS_MAX`] rows only powers of two are timed, for all shapes up to them.
//!
//! **Invariant:** the way of a shape is decided once, at its first product: by what an earlier start timed, else by
//! timing if that is on ([`Products::tune`]), else by rule. So a step is repeatable, and stays so across
//! starts as long as GPU, driver, libraries, kernels and cache are the same; two ways differ in the last bits. Ranks
//! decide by themselves, which changes no sum over ranks: each has its own shard anyway.

use super::device::Device;
use super::driver::Address;
use super::few_rows::{FewRows, FewRowsWay};
use super::gemm::{ALGORITHMS_MAX, Algorithm, Gemm, Operands, Shape};
use super::product_times::{Stopwatch, TimedWays};
use super::tensor::{CudaLinear, CudaTensor, CudaVector};
use crate::{BackendError, Result};
use lockstep_core::DType;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Rows up to which products are timed: those of recorded decode steps. Longer steps are of any length.
const TIMED_ROWS_MAX: usize = 256;
/// Algorithms of cuBLASLt that are timed: its first is nearly always within 3 % of the best (measured on an H200).
const TIMED_ALGORITHMS: usize = 4;
/// Ways that are timed more often than the others, which have lost by then.
const FINALISTS: usize = 3;
/// Further runs of each finalist, and of one that takes long.
const RUNS: usize = 4;
const RUNS_OF_LONG: usize = 1;
const LONG_US: f32 = 100.0;
/// What our own kernels gain in a step by starting before the kernel before them has ended, and asking for weights
/// meanwhile: a stopwatch does not see it.
const EARLY_START_US: f32 = 0.8;
/// What the activation of a gated product takes as a kernel of its own, which the library's products leave to it.
const ACTIVATION_US: f32 = 1.5;

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
    shapes: usize,
    /// What timing them has taken.
    spent: Duration,
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
                    let (shapes, spent) = (0, Duration::ZERO);
                    self.tuning = Some(Tuning { stopwatch, shapes, spent, prompt_rows });
                }
                Err(BackendError::OutOfMemory { bytes, .. }) => tracing::warn!(
                    "matrix products are not timed, which may cost some speed: that takes {bytes} bytes of GPU memory"
                ),
                Err(error) => return Err(error),
            }
        } else if let Some(tuning) = self.tuning.take().filter(|tuning| tuning.shapes > 0) {
            let seconds = tuning.spent.as_secs_f64();
            tracing::info!("{} shapes of matrix products were timed in {seconds:.2} s", tuning.shapes);
            self.timed.store();
        }
        Ok(())
    }

    /// Queues `out = x w^T + bias` for the first `rows` rows. Panics when sizes or types differ.
    pub fn matmul(
        &mut self,
        matrix: (&CudaLinear, Option<&CudaVector>),
        x: &CudaTensor,
        rows: usize,
        out: &CudaTensor,
    ) -> Result<()> {
        let (shape, operands) = self.describe(matrix, None, x, rows, out);
        if rows == 0 {
            return Ok(());
        }
        let way = self.way(shape, matrix, None, x, out)?;
        // SAFETY: `describe` has checked the sizes.
        unsafe { self.run_by(&way, shape, operands) }
    }

    /// [`Self::matmul`] of a gate|up matrix, into `gate_up`; or, where a kernel of ours is fastest, with its activation
    /// into `out` at once. Says whether that was so.
    pub fn gated_matmul(
        &mut self,
        activation: usize,
        matrix: (&CudaLinear, Option<&CudaVector>),
        x: &CudaTensor,
        rows: usize,
        (gate_up, out): (&CudaTensor, &CudaTensor),
    ) -> Result<bool> {
        let (shape, mut operands) = self.describe(matrix, Some(activation), x, rows, gate_up);
        if rows == 0 {
            return Ok(true);
        }
        let way = self.way(shape, matrix, Some(activation), x, gate_up)?;
        let ours = matches!(way, Way::FewRows(_));
        if ours {
            operands.y = out.rows(rows, shape.n / 2, self.dtype);
        }
        // SAFETY: `describe` has checked the sizes, `rows` those of the result.
        unsafe { self.run_by(&way, shape, operands)? };
        Ok(ours)
    }

    /// The way of a shape: the one that was decided on, or is now.
    fn way(
        &mut self,
        shape: Shape,
        matrix: (&CudaLinear, Option<&CudaVector>),
        activation: Option<usize>,
        x: &CudaTensor,
        out: &CudaTensor,
    ) -> Result<Way> {
        match self.decided.get(&shape) {
            Some(way) => Ok(*way),
            None => self.decide(matrix, activation, x, shape.m, out),
        }
    }

    /// The way of products of `rows` rows, for good.
    fn decide(
        &mut self,
        matrix: (&CudaLinear, Option<&CudaVector>),
        activation: Option<usize>,
        x: &CudaTensor,
        rows: usize,
        out: &CudaTensor,
    ) -> Result<Way> {
        let rows_max = x.rows_max.min(out.rows_max);
        let like = timed_rows(rows, rows_max);
        let prompt_rows = self.tuning.as_ref().map(|tuning| tuning.prompt_rows);
        let prompt = prompt_rows.filter(|n| *n <= rows_max).map(|n| timed_rows(n, rows_max));
        for rows in [Some(like).filter(|n| *n <= TIMED_ROWS_MAX), prompt].into_iter().flatten() {
            // Rows beyond the step's hold nothing that anyone needs.
            let (shape, operands) = self.describe(matrix, activation, x, rows, out);
            // SAFETY: `describe` has checked the sizes; a gated product with its activation has half the results.
            unsafe { self.time_if_tuning(shape, operands)? };
        }
        let (shape, _) = self.describe(matrix, activation, x, rows, out);
        let way = match self.timed.get(&Shape { m: like, ..shape }) {
            Some(way) if like == rows => way,
            Some(way) => self.likewise(way, shape)?,
            None => self.usual(shape)?,
        };
        self.decided.insert(shape, way);
        Ok(way)
    }

    /// The way of a shape whose timed like is fastest by `way`: the same if it is one of the shape's own.
    fn likewise(&mut self, way: Way, shape: Shape) -> Result<Way> {
        match way {
            Way::FewRows(ours) if ours.takes(&shape, self.dtype) => Ok(way),
            Way::FewRows(_) => self.usual(shape),
            Way::Library(algorithm) => {
                let own = self.gemm.algorithms(shape, ALGORITHMS_MAX)?;
                Ok(Way::Library(if own.contains(&algorithm) { algorithm } else { own[0] }))
            }
        }
    }

    /// The way of a shape of which nothing was timed.
    fn usual(&mut self, shape: Shape) -> Result<Way> {
        match FewRowsWay::usual(&shape, self.dtype) {
            Some(way) => Ok(Way::FewRows(way)),
            None => Ok(Way::Library(self.gemm.algorithms(shape, 1)?[0])),
        }
    }

    /// Shape and operands of `out = x w^T + bias`, which is gated if there is an activation. Panics when sizes or types
    /// differ.
    pub fn describe(
        &self,
        (w, bias): (&CudaLinear, Option<&CudaVector>),
        activation: Option<usize>,
        x: &CudaTensor,
        rows: usize,
        out: &CudaTensor,
    ) -> (Shape, Operands) {
        let (n, k) = (w.spec.out_features, w.spec.in_features);
        let bias = bias.map(|bias| Bias { exact: bias.exact(n), rounded: bias.rounded.address() });
        let (x, y) = (x.rows(rows, k, self.dtype), out.rows(rows, n, out.dtype));
        let gated = activation.is_some();
        let shape = Shape { m: rows, n, k, out: out.dtype, bias: bias.is_some(), gated };
        (shape, Operands { weights: w.buffer.address(), x, bias, y, activation: activation.unwrap_or(0) })
    }

    /// The ways that are timed for a shape, ours first.
    pub fn ways(&mut self, shape: Shape) -> Result<Vec<Way>> {
        let ours = FewRowsWay::ALL.into_iter().filter(|way| way.takes(&shape, self.dtype));
        let library = self.gemm.algorithms(shape, TIMED_ALGORITHMS)?.into_iter().map(Way::Library);
        Ok(ours.map(Way::FewRows).chain(library).collect())
    }

    /// Queues one product by one of [`Self::ways`]. Of a gated one, our ways do the activation too.
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

    /// Times a shape if that is on and was not done before.
    ///
    /// # Safety
    /// As [`Self::run_by`].
    unsafe fn time_if_tuning(&mut self, shape: Shape, operands: Operands) -> Result<()> {
        if self.timed.get(&shape).is_some() || self.device.is_recording() {
            return Ok(());
        }
        let Some(mut tuning) = self.tuning.take() else { return Ok(()) };
        let started = Instant::now();
        // SAFETY: the caller's promise.
        let result = unsafe { self.time(&tuning.stopwatch, shape, operands) };
        tuning.shapes += 1;
        tuning.spent += started.elapsed();
        self.tuning = Some(tuning);
        result
    }

    /// Finds the fastest way, by the stopwatch.
    ///
    /// # Safety
    /// As [`Self::run_by`].
    unsafe fn time(&mut self, stopwatch: &Stopwatch, shape: Shape, operands: Operands) -> Result<()> {
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
        let as_in_steps = |(us, way): &(f32, Way)| match way {
            Way::FewRows(_) => us - EARLY_START_US,
            Way::Library(_) if shape.gated => us + ACTIVATION_US,
            Way::Library(_) => *us,
        };
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
        Ok(())
    }
}

/// Rows that are timed for products of `rows` rows of matrices of `rows_max`: up to [`TIMED_ROWS_MAX`] the next power of
/// two, because a tile that holds those rows holds fewer as well.
fn timed_rows(rows: usize, rows_max: usize) -> usize {
    if rows <= TIMED_ROWS_MAX { rows.next_power_of_two().min(rows_max) } else { rows }
}

/// A bias in both forms: ours is added before rounding.
#[derive(Clone, Copy)]
pub(super) struct Bias {
    /// f32.
    pub exact: Address,
    /// Of the type of y.
    pub rounded: Address,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_timed_for_all_rows_up_to_them() {
        let timed = [1, 2, 3, 4, 6, 24, 129, 256, 257, 8192].map(|rows| timed_rows(rows, 8192));
        assert_eq!(timed, [1, 2, 4, 4, 8, 32, 256, 256, 257, 8192]);
        assert_eq!((timed_rows(90, 100), timed_rows(100, 100)), (100, 100));
        let of_decode_steps: std::collections::HashSet<_> = (1..=256).map(|n| timed_rows(n, 8192)).collect();
        assert_eq!(of_decode_steps.len(), 9);
    }
}
