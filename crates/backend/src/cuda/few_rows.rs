//! Matrix products of few rows, by kernels that stream the weights once and start before the wait for the
//! previous kernel (`gemv.cu`, `skinny.cu`).

use super::compile::Source;
use super::driver::Device;
use super::gemm::{Operands, Shape};
use super::launch::{Args, Grid, Kernel};
use crate::Result;
use lockstep_core::DType;
use std::rc::Rc;

/// Rows up to which a warp sums whole products.
const GEMV_ROWS_MAX: usize = 2;
/// Warps of its blocks, and outputs of a warp.
const GEMV_WARPS: usize = 8;
const GEMV_OUTPUTS: usize = 2;
/// Rows of the kernel on tensor cores, and threads and outputs of its blocks.
const SKINNY_ROWS_MAX: usize = 8;
const SKINNY_THREADS: usize = 256;
const SKINNY_OUTPUTS: usize = 16;
/// Outputs up to which it is faster than cuBLASLt (measured on an H200), and elements of weights up to which
/// its early start makes up for more outputs.
const SKINNY_N_MAX: usize = 4096;
const SKINNY_WEIGHTS_MAX: usize = 8_000_000;

/// The kernels.
pub(super) struct FewRows {
    dtype: DType,
    /// By number of rows less 1.
    gemv: [Kernel; GEMV_ROWS_MAX],
    /// The same with f32 results.
    gemv_f32: [Kernel; GEMV_ROWS_MAX],
    /// `None` in f32 mode.
    skinny: Option<Kernel>,
}

impl FewRows {
    /// Loads or compiles them.
    pub fn new(device: &Rc<Device>, dtype: DType) -> Result<Self> {
        let gemv = Source::Gemv.load(device, dtype)?;
        let skinny = match dtype {
            DType::F32 => None,
            DType::Bf16 | DType::F16 => Some(Source::Skinny.load(device, dtype)?.kernel("skinny", 0)?),
        };
        Ok(Self {
            dtype,
            gemv: [gemv.kernel("gemv_1", 0)?, gemv.kernel("gemv_2", 0)?],
            gemv_f32: [gemv.kernel("gemv_1_f32", 0)?, gemv.kernel("gemv_2_f32", 0)?],
            skinny,
        })
    }

    /// Queues `y = x w^T + bias` where one of these kernels is the fastest; false when none is, and nothing
    /// is queued. The bias is f32.
    ///
    /// # Safety
    /// The operands are what `shape` says.
    pub unsafe fn run(&self, shape: &Shape, operands: &Operands) -> bool {
        let &Shape { m, n, k, out, .. } = shape;
        let args = Args::default().address(operands.weights).address(operands.x).optional(operands.bias);
        let args = args.address(operands.y).int(n).int(k);
        if let Some(kernel) = &self.skinny
            && (2..=SKINNY_ROWS_MAX).contains(&m)
            && out == self.dtype
        {
            if n > SKINNY_N_MAX && n * k > SKINNY_WEIGHTS_MAX {
                return false;
            }
            // SAFETY: the caller's promise.
            unsafe { kernel.launch(Grid::rows(n.div_ceil(SKINNY_OUTPUTS), SKINNY_THREADS), args.int(m)) };
            return true;
        }
        if (1..=GEMV_ROWS_MAX).contains(&m) {
            let kernels = if out == self.dtype { &self.gemv } else { &self.gemv_f32 };
            let grid = Grid::rows(n.div_ceil(GEMV_WARPS * GEMV_OUTPUTS), 32 * GEMV_WARPS);
            // SAFETY: as above.
            unsafe { kernels[m - 1].launch(grid, args) };
            return true;
        }
        false
    }
}
