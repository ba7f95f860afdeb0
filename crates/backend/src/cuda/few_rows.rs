//! Our own matrix products of few rows, which read the weights once and ask for the first of them before the
//! wait for the previous kernel (`gemv.cu`, `skinny.cu`).

use super::compile::Source;
use super::device::Device;
use super::gemm::{Operands, Shape};
use super::launch::{Args, Grid, Kernel};
use crate::Result;
use lockstep_core::DType;
use std::rc::Rc;

/// Rows up to which warps sum on their own.
const GEMV_ROWS_MAX: usize = 2;
/// Warps of its blocks, and bytes of a row of weights that a warp takes at once.
const GEMV_WARPS: usize = 8;
const PIECE_BYTES: usize = 512;
/// Pieces of rows that are short, and of those that two groups of warps would leave half idle.
const PIECES_OF_SHORT: usize = 4;
const PIECES_OF_NARROW: usize = 8;
/// Outputs up to which groups of warps take fewer rows, so that there is a block for each multiprocessor.
const NARROW_N_MAX: usize = 2048;
/// Rows of the kernel that feeds tensor cores from registers, and threads and rows of weights of its blocks.
const SKINNY_ROWS_MAX: usize = 8;
const SKINNY_THREADS: usize = 256;
const SKINNY_OUTPUTS: usize = 16;
/// Outputs up to which it is faster than cuBLASLt (measured on an H200), and elements of weights up to which
/// its early start makes up for more outputs; where nothing was timed.
const SKINNY_N_MAX: usize = 4096;
const SKINNY_WEIGHTS_MAX: usize = 8_000_000;

/// A kernel of `gemv.cu`, by its place in [`names`]: how many warps share rows of weights, and how many outputs they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GemvKind {
    place: usize,
    split: usize,
    outputs: usize,
}

/// Results of the type of weights, results of f32, and gated ones.
const WIDE: GemvKind = GemvKind { place: 0, split: 4, outputs: 4 };
const SHORT: GemvKind = GemvKind { place: 1, split: 2, outputs: 2 };
const NARROW: GemvKind = GemvKind { place: 2, split: 4, outputs: 2 };
const NARROW_LONG: GemvKind = GemvKind { place: 3, split: 8, outputs: 2 };
const WIDE_F32: GemvKind = GemvKind { place: 4, ..WIDE };
const SHORT_F32: GemvKind = GemvKind { place: 5, ..SHORT };
const WIDE_GATED: GemvKind = GemvKind { place: 6, split: 4, outputs: 2 };
const SHORT_GATED: GemvKind = GemvKind { place: 7, split: 2, outputs: 1 };

/// The kernels of so many rows.
macro_rules! names {
    ($rows:literal) => {
        [
            concat!("gemv_", $rows),
            concat!("gemv_", $rows, "_short"),
            concat!("gemv_", $rows, "_narrow"),
            concat!("gemv_", $rows, "_narrow_long"),
            concat!("gemv_", $rows, "_f32"),
            concat!("gemv_", $rows, "_f32_short"),
            concat!("gemv_", $rows, "_gated"),
            concat!("gemv_", $rows, "_gated_short"),
        ]
    };
}

/// By number of rows less 1.
pub(super) const GEMV_NAMES: [[&str; 8]; GEMV_ROWS_MAX] = [names!("1"), names!("2")];

impl GemvKind {
    /// What is fastest for a shape (measured on an H200).
    fn of(shape: &Shape, dtype: DType) -> Self {
        let pieces = (shape.k * dtype.size_bytes()).div_ceil(PIECE_BYTES);
        let is_narrow = shape.n <= NARROW_N_MAX;
        match (pieces <= PIECES_OF_SHORT, shape.gated, shape.out == dtype) {
            (false, true, _) => WIDE_GATED,
            (true, true, _) => SHORT_GATED,
            (false, false, false) => WIDE_F32,
            (true, false, false) => SHORT_F32,
            (true, false, true) => SHORT,
            (false, false, true) if is_narrow && pieces <= PIECES_OF_NARROW => NARROW,
            (false, false, true) if is_narrow => NARROW_LONG,
            (false, false, true) => WIDE,
        }
    }

    fn grid(self, outputs: usize) -> Grid {
        Grid::rows(outputs.div_ceil(GEMV_WARPS / self.split * self.outputs), 32 * GEMV_WARPS)
    }
}

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
    /// By number of rows less 1, then by [`GemvKind::place`].
    gemv: Vec<Vec<Kernel>>,
    /// Whole and gated; `None` in f32 mode.
    skinny: Option<[Kernel; 2]>,
}

impl FewRows {
    /// Loads or compiles them.
    pub fn new(device: &Rc<Device>, dtype: DType) -> Result<Self> {
        let gemv = Source::Gemv.load(device, dtype)?;
        let of_rows = |names: [&'static str; 8]| names.map(|name| gemv.kernel(name, 0)).into_iter().collect();
        let skinny = match dtype {
            DType::F32 => None,
            DType::Bf16 | DType::F16 => {
                let skinny = Source::Skinny.load(device, dtype)?;
                Some([skinny.kernel("skinny_plain", 0)?, skinny.kernel("skinny_gated", 0)?])
            }
        };
        Ok(Self { dtype, gemv: GEMV_NAMES.map(of_rows).into_iter().collect::<Result<_>>()?, skinny })
    }

    /// Queues `y = x w^T + bias` by a kernel that takes the shape, and its activation if it is gated. The bias is f32.
    /// Panics when the kernel does not.
    ///
    /// # Safety
    /// The operands are what `shape` says.
    pub unsafe fn run(&self, way: FewRowsWay, shape: &Shape, operands: &Operands) {
        assert!(way.takes(shape, self.dtype), "{way:?} takes {shape:?}");
        let &Shape { m, n, k, gated, .. } = shape;
        let outputs = if gated { n / 2 } else { n };
        let args = Args::default().address(operands.weights).address(operands.x);
        let args = args.optional(operands.bias.map(|bias| bias.exact));
        let args = args.address(operands.y).int(outputs).int(k);
        let (kernel, grid, args) = match (way, &self.skinny) {
            (FewRowsWay::Skinny, Some(skinny)) => {
                let grid = Grid::rows(n.div_ceil(SKINNY_OUTPUTS), SKINNY_THREADS);
                (&skinny[usize::from(gated)], grid, args.int(m))
            }
            _ => {
                let kind = GemvKind::of(shape, self.dtype);
                (&self.gemv[m - 1][kind.place], kind.grid(outputs), args)
            }
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(grid, args.int(operands.activation)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_take_what_they_are_written_for() {
        let shape = |m, n, out| Shape { m, n, k: 4096, out, bias: false, gated: false };
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

    #[test]
    fn short_and_narrow_matrices_take_kernels_of_their_own() {
        let kind = |n, k, gated, out| {
            let shape = Shape { m: 1, n, k, out, bias: false, gated };
            let kind = GemvKind::of(&shape, DType::Bf16);
            GEMV_NAMES[0][kind.place]
        };
        assert_eq!(kind(6144, 4096, false, DType::Bf16), "gemv_1");
        assert_eq!(kind(4096, 1024, false, DType::Bf16), "gemv_1_short");
        assert_eq!(kind(1024, 2048, false, DType::Bf16), "gemv_1_narrow");
        assert_eq!(kind(1024, 3072, false, DType::Bf16), "gemv_1_narrow_long");
        assert_eq!(kind(151_936, 4096, false, DType::F32), "gemv_1_f32");
        assert_eq!(kind(151_936, 1024, false, DType::F32), "gemv_1_f32_short");
        assert_eq!(kind(24_576, 4096, true, DType::Bf16), "gemv_1_gated");
        assert_eq!(kind(6144, 1024, true, DType::Bf16), "gemv_1_gated_short");
        let blocks = |kind: GemvKind, outputs| kind.grid(outputs).blocks[0];
        assert_eq!(
            [blocks(WIDE, 6144), blocks(WIDE_GATED, 12_288), blocks(NARROW_LONG, 1023)],
            [768, 3072, 512]
        );
    }
}
