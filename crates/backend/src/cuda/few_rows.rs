//! Our own matrix products of few rows, which read the weights once and ask for the first of them before the
//! wait for the previous kernel (`gemv.cu`, `skinny.cu`).

use super::compile::Source;
use super::device::Device;
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
/// Rows of the kernel that feeds tensor cores from registers, and threads and outputs of its blocks.
const SKINNY_ROWS_MAX: usize = 8;
const SKINNY_THREADS: usize = 256;
const SKINNY_OUTPUTS: usize = 16;
/// Outputs up to which it is faster than cuBLASLt (measured on an H200), and elements of weights up to which
/// its early start makes up for more outputs; where nothing was timed.
const SKINNY_N_MAX: usize = 4096;
const SKINNY_WEIGHTS_MAX: usize = 8_000_000;

/// One of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FewRowsWay {
    /// `gemv.cu`.
    Gemv,
    /// `skinny.cu`.
    Skinny,
}

impl FewRowsWay {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Gemv, Self::Skinny];

    /// Whether it takes such products of matrices of `dtype`.
    pub fn takes(self, shape: &Shape, dtype: DType) -> bool {
        match self {
            Self::Gemv => (1..=GEMV_ROWS_MAX).contains(&shape.m),
            Self::Skinny => {
                dtype != DType::F32 && shape.out == dtype && (2..=SKINNY_ROWS_MAX).contains(&shape.m)
            }
        }
    }

    /// What such a product takes where nothing was timed; `None` for cuBLASLt.
    pub fn usual(shape: &Shape, dtype: DType) -> Option<Self> {
        let is_small = shape.n <= SKINNY_N_MAX || shape.n * shape.k <= SKINNY_WEIGHTS_MAX;
        if Self::Skinny.takes(shape, dtype) {
            return is_small.then_some(Self::Skinny);
        }
        Self::Gemv.takes(shape, dtype).then_some(Self::Gemv)
    }
}

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

    /// Queues `y = x w^T + bias` by a kernel that takes the shape. The bias is f32. Panics when it does not.
    ///
    /// # Safety
    /// The operands are what `shape` says.
    pub unsafe fn run(&self, way: FewRowsWay, shape: &Shape, operands: &Operands) {
        assert!(way.takes(shape, self.dtype), "{way:?} takes {shape:?}");
        let &Shape { m, n, k, out, .. } = shape;
        let args = Args::default().address(operands.weights).address(operands.x);
        let args = args.optional(operands.bias.map(|bias| bias.exact));
        let args = args.address(operands.y).int(n).int(k);
        let (kernel, grid, args) = match (way, &self.skinny) {
            (FewRowsWay::Skinny, Some(skinny)) => {
                (skinny, Grid::rows(n.div_ceil(SKINNY_OUTPUTS), SKINNY_THREADS), args.int(m))
            }
            _ => {
                let kernels = if out == self.dtype { &self.gemv } else { &self.gemv_f32 };
                let grid = Grid::rows(n.div_ceil(GEMV_WARPS * GEMV_OUTPUTS), 32 * GEMV_WARPS);
                (&kernels[m - 1], grid, args)
            }
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(grid, args) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_take_what_they_are_written_for() {
        let shape = |m, n, out| Shape { m, n, k: 4096, out, bias: false };
        let takes = |shape: &Shape| FewRowsWay::ALL.map(|way| way.takes(shape, DType::Bf16));
        let some = |ways: &[FewRowsWay]| FewRowsWay::ALL.map(|way| ways.contains(&way));
        use FewRowsWay::{Gemv, Skinny};
        assert_eq!(takes(&shape(0, 4096, DType::Bf16)), some(&[]));
        assert_eq!(takes(&shape(1, 4096, DType::Bf16)), some(&[Gemv]));
        assert_eq!(takes(&shape(2, 4096, DType::Bf16)), some(&[Gemv, Skinny]));
        assert_eq!(takes(&shape(2, 4096, DType::F32)), some(&[Gemv]));
        assert_eq!(takes(&shape(8, 4096, DType::Bf16)), some(&[Skinny]));
        assert_eq!(takes(&shape(9, 4096, DType::Bf16)), some(&[]));
        assert!(!Skinny.takes(&shape(8, 4096, DType::F32), DType::F32));
        assert_eq!(FewRowsWay::usual(&shape(8, 4096, DType::Bf16), DType::Bf16), Some(FewRowsWay::Skinny));
        assert_eq!(FewRowsWay::usual(&shape(8, 12_288, DType::Bf16), DType::Bf16), None);
        assert_eq!(FewRowsWay::usual(&shape(1, 12_288, DType::F32), DType::F32), Some(FewRowsWay::Gemv));
    }
}
