//! Our own matrix products of few rows, which read the weights once and ask for the first of them before the
//! wait for the previous kernel (`gemv.cu`, `skinny.cu`, `streamed.cu`).

use super::compile::Source;
use super::driver::Device;
use super::gemm::{Operands, Shape};
use super::launch::{Args, Grid, Kernel};
use super::memory::Buffer;
use super::ring::{self, RingTile, STREAMED};
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
/// Tiles of outputs whose parts the kernels count that stream weights through shared memory.
const STREAMED_TILES_MAX: usize = 8192;

/// One of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FewRowsWay {
    /// `gemv.cu`.
    Gemv,
    /// `skinny.cu`.
    Skinny,
    /// `streamed.cu`, by tile of [`STREAMED`].
    Streamed(usize),
}

impl FewRowsWay {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Gemv,
        Self::Skinny,
        Self::Streamed(0),
        Self::Streamed(1),
        Self::Streamed(2),
        Self::Streamed(3),
        Self::Streamed(4),
    ];

    /// Whether it takes such products of matrices of `dtype`.
    pub fn takes(self, shape: &Shape, dtype: DType) -> bool {
        let of_16_bits = dtype != DType::F32 && shape.out == dtype;
        match self {
            Self::Gemv => (1..=GEMV_ROWS_MAX).contains(&shape.m),
            Self::Skinny => of_16_bits && (2..=SKINNY_ROWS_MAX).contains(&shape.m),
            Self::Streamed(kind) => {
                let tile = STREAMED.tiles[kind];
                // A tile that holds twice as many rows costs more and gains nothing.
                let is_smaller = |other: &RingTile| (shape.m..tile.tokens).contains(&other.tokens);
                let fits = (2..=tile.tokens).contains(&shape.m) && !STREAMED.tiles.iter().any(is_smaller);
                of_16_bits && fits && shape.n.div_ceil(tile.rows) <= STREAMED_TILES_MAX
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
    tensor_cores: Option<TensorCores>,
}

/// The kernels on tensor cores.
struct TensorCores {
    skinny: Kernel,
    /// By tile of [`STREAMED`].
    streamed: Vec<Kernel>,
    /// Blocks of their launches, at most: all that are resident.
    blocks_max: usize,
    /// Two parts of a tile for each block, f32.
    parts: Buffer,
    /// How many parts of each tile are there; 0 between launches.
    finished: Buffer,
}

impl TensorCores {
    fn new(device: &Rc<Device>, dtype: DType) -> Result<Self> {
        let module = Source::Streamed.load(device, dtype)?;
        let names =
            ["streamed_64x16", "streamed_64x32", "streamed_128x32", "streamed_64x64", "streamed_128x64"];
        let plans = STREAMED.plans(&device.architecture());
        let streamed =
            names.into_iter().zip(plans).map(|(name, plan)| module.kernel(name, plan.shared_bytes));
        let part = STREAMED.tiles.map(|tile| tile.rows * tile.tokens).into_iter().max().unwrap_or(0);
        let room = |bytes| Buffer::zeroed(device, bytes, "parts of matrix products");
        Ok(Self {
            skinny: Source::Skinny.load(device, dtype)?.kernel("skinny", 0)?,
            streamed: streamed.collect::<Result<_>>()?,
            blocks_max: device.sm_count,
            parts: room(2 * device.sm_count * part * size_of::<f32>())?,
            finished: room(STREAMED_TILES_MAX * size_of::<u32>())?,
        })
    }
}

impl FewRows {
    /// Loads or compiles them.
    pub fn new(device: &Rc<Device>, dtype: DType) -> Result<Self> {
        let gemv = Source::Gemv.load(device, dtype)?;
        let tensor_cores = match dtype {
            DType::F32 => None,
            DType::Bf16 | DType::F16 => Some(TensorCores::new(device, dtype)?),
        };
        Ok(Self {
            dtype,
            gemv: [gemv.kernel("gemv_1", 0)?, gemv.kernel("gemv_2", 0)?],
            gemv_f32: [gemv.kernel("gemv_1_f32", 0)?, gemv.kernel("gemv_2_f32", 0)?],
            tensor_cores,
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
        let (kernel, grid, args) = match (way, &self.tensor_cores) {
            (FewRowsWay::Skinny, Some(cores)) => {
                (&cores.skinny, Grid::rows(n.div_ceil(SKINNY_OUTPUTS), SKINNY_THREADS), args.int(m))
            }
            (FewRowsWay::Streamed(kind), Some(cores)) => {
                let tile = STREAMED.tiles[kind];
                let units = n.div_ceil(tile.rows) * k.div_ceil(tile.depth);
                let args = args.int(m).address(cores.parts.address()).address(cores.finished.address());
                (&cores.streamed[kind], ring::grid(units.min(cores.blocks_max)), args)
            }
            _ => {
                let kernels = if out == self.dtype { &self.gemv } else { &self.gemv_f32 };
                let grid = Grid::rows(n.div_ceil(GEMV_WARPS * GEMV_OUTPUTS), 32 * GEMV_WARPS);
                (&kernels[m - 1], grid, args)
            }
        };
        // SAFETY: the caller's promise; parts and counters have room for all blocks and tiles, by `takes`.
        unsafe { kernel.launch(grid, args) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `streamed.cu`'s division of its units among blocks, and where parts are left.
    #[test]
    fn blocks_share_all_units_and_agree_on_parts() {
        for (units, steps, blocks) in
            [(1, 1, 1), (132, 12, 132), (3072, 32, 132), (4096, 64, 132), (35, 7, 6)]
        {
            let first = |block: u64| units * block / blocks;
            let block_of = |unit: u64| ((unit + 1) * blocks - 1) / units;
            let part = |block: u64, begin: u64| 2 * block + u64::from(begin > first(block));
            for tile in 0..units / steps {
                let (begin, end) = (tile * steps, (tile + 1) * steps);
                let mut parts = std::collections::HashSet::new();
                for unit in begin..end {
                    let block = block_of(unit);
                    assert!(first(block) <= unit && unit < first(block + 1), "{units} {blocks}: {unit}");
                    parts.insert(part(block, begin));
                }
                // As many as there are blocks, and none that another tile uses at the same time.
                assert_eq!(parts.len() as u64, block_of(end - 1) - block_of(begin) + 1);
                let next = (end < units).then(|| part(block_of(end), end));
                assert!(next.is_none_or(|next| !parts.contains(&next)), "{units} {blocks}: tile {tile}");
            }
        }
    }

    #[test]
    fn kernels_take_what_they_are_written_for() {
        let shape = |m, n, out| Shape { m, n, k: 4096, out, bias: false };
        let takes = |shape: &Shape| FewRowsWay::ALL.map(|way| way.takes(shape, DType::Bf16));
        let some = |ways: &[FewRowsWay]| FewRowsWay::ALL.map(|way| ways.contains(&way));
        use FewRowsWay::{Gemv, Skinny, Streamed};
        assert_eq!(takes(&shape(1, 4096, DType::Bf16)), some(&[Gemv]));
        assert_eq!(takes(&shape(2, 4096, DType::Bf16)), some(&[Gemv, Skinny, Streamed(0)]));
        assert_eq!(takes(&shape(16, 4096, DType::Bf16)), some(&[Streamed(0)]));
        assert_eq!(takes(&shape(17, 4096, DType::Bf16)), some(&[Streamed(1), Streamed(2)]));
        assert_eq!(takes(&shape(64, 4096, DType::Bf16)), some(&[Streamed(3), Streamed(4)]));
        assert_eq!(takes(&shape(64, 4096, DType::F32)), some(&[]));
        assert_eq!(takes(&shape(65, 4096, DType::Bf16)), some(&[]));
        assert!(!Streamed(0).takes(&shape(8, 4096, DType::F32), DType::F32));
        assert_eq!(FewRowsWay::usual(&shape(8, 4096, DType::Bf16), DType::Bf16), Some(FewRowsWay::Skinny));
        assert_eq!(FewRowsWay::usual(&shape(8, 12_288, DType::Bf16), DType::Bf16), None);
        assert_eq!(FewRowsWay::usual(&shape(1, 12_288, DType::F32), DType::F32), Some(FewRowsWay::Gemv));
    }
}
