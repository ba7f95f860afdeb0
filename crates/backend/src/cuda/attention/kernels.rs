//! The attention kernels for one head size, and how they use an architecture's shared memory.

use super::super::compile::Source;
use super::super::device::{Device, shared_bytes};
use super::super::launch::{Args, Grid, Kernel};
use crate::Result;
use lockstep_core::DType;
use std::rc::Rc;

/// Largest head that the kernels take.
pub(super) const HEAD_DIM_MAX: usize = 256;
/// Query heads of one KV head that a block takes together.
pub(super) const GROUPS: [usize; 4] = [1, 2, 4, 8];
/// Tokens of a tile.
pub(super) const TILE: usize = 128;
/// Query heads of one KV head that a block of the decode kernel takes together.
pub(super) const DECODE_ROWS: [usize; 3] = [4, 8, 16];
/// Warps of its blocks, and positions that each takes at a time.
const DECODE_WARPS: usize = 4;
const DECODE_KEYS: usize = 16;
/// Tokens of a launch up to which it takes less of a multiprocessor's shared memory: products of so few rows start before it has
/// ended, and their loads in flight need first-level cache (measured on an H200: they then took twice as long).
pub(super) const FEW_TOKENS: usize = 8;
/// Blocks of a multiprocessor then.
const RESIDENT_OF_FEW: usize = 2;
/// Threads of its blocks.
pub(super) const DECODE_THREADS: usize = 32 * DECODE_WARPS;
/// Positions of shared memory that a tile holds at once, and padding of its rows in elements.
const TILE_KEYS: usize = 64;
const TILE_PADDING: usize = 8;
/// Places of `attention_hopper.cu`, which hold K and V of as many positions as a tile has tokens; the
/// alignment of the first.
const HOPPER_STAGES: usize = 3;
const HOPPER_ALIGNMENT: usize = 1024;
/// Its threads: a warpgroup that copies and two that compute.
const HOPPER_THREADS: usize = 384;

/// The kernels for one head size.
pub(super) struct AttentionKernels {
    pub token: TokenKernels,
    /// `None` in f32 mode.
    pub tile: Option<TileKernel>,
}

/// The kernel that takes tiles.
pub(super) enum TileKernel {
    /// `attention_tile.cu`.
    Portable(Kernel),
    /// `attention_hopper.cu`.
    Hopper(Kernel),
}

impl TileKernel {
    fn source(device: &Device, dim: usize) -> Source {
        if device.architecture() == "sm_90a" && dim < HEAD_DIM_MAX {
            Source::AttentionHopper(dim)
        } else {
            Source::AttentionTile(dim)
        }
    }

    fn load(device: &Rc<Device>, dim: usize, dtype: DType) -> Result<Self> {
        let (name, source) = ("attention_tile", Self::source(device, dim));
        let module = source.load(device, dtype)?;
        if let Source::AttentionHopper(_) = source {
            // The queries take as much as K of a place.
            let shared = (1 + 2 * HOPPER_STAGES) * TILE * dim * dtype.size_bytes() + HOPPER_ALIGNMENT;
            return Ok(Self::Hopper(module.kernel(name, shared as u32)?));
        }
        let shared = 2 * TILE_KEYS * (dim + TILE_PADDING) * dtype.size_bytes();
        Ok(Self::Portable(module.kernel(name, shared as u32)?))
    }

    /// Queues attention of `tiles` tiles.
    ///
    /// # Safety
    /// `args` are the kernel's, and valid for that many tiles and `heads` query heads.
    pub unsafe fn launch(&self, tiles: usize, heads: usize, args: Args) {
        let (kernel, blocks, threads) = match self {
            Self::Portable(kernel) => (kernel, [tiles, heads, 2], 128),
            Self::Hopper(kernel) => (kernel, [heads, tiles, 1], HOPPER_THREADS),
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(Grid { blocks, threads }, args) };
    }
}

/// The kernels that take tokens one by one.
pub(super) enum TokenKernels {
    /// f32, by [`GROUPS`].
    Exact(Vec<Kernel>),
    /// 16-bit types.
    Decode {
        /// By [`DECODE_ROWS`].
        usual: Vec<DecodeKernel>,
        /// The same for [`FEW_TOKENS`] tokens and fewer.
        few: Vec<DecodeKernel>,
    },
}

/// `attention_decode.cu` for so many rows, and the blocks of it that the GPU holds at once, which every launch has: of fewer,
/// launched early, a multiprocessor may get more than its share.
pub(super) struct DecodeKernel {
    pub kernel: Kernel,
    pub blocks: usize,
}

impl AttentionKernels {
    pub fn load(device: &Rc<Device>, head_dim: usize, dtype: DType) -> Result<Self> {
        let dim = if head_dim <= 64 {
            64
        } else if head_dim <= 128 {
            128
        } else {
            256
        };
        if dtype == DType::F32 {
            let names = ["attention_token_1", "attention_token_2", "attention_token_4", "attention_token_8"];
            let module = Source::AttentionToken(dim).load(device, dtype)?;
            let usable = if dim == HEAD_DIM_MAX { &names[..3] } else { &names };
            let token = usable.iter().map(|name| module.kernel(name, 0)).collect::<Result<_>>()?;
            return Ok(Self { token: TokenKernels::Exact(token), tile: None });
        }
        let names = ["attention_decode_4", "attention_decode_8", "attention_decode_16"];
        let sources = [(Source::AttentionDecode(dim), dtype), (TileKernel::source(device, dim), dtype)];
        Source::compile_missing(&sources, &device.architecture());
        let usable = if dim == HEAD_DIM_MAX { &names[..2] } else { &names };
        let plan = DecodePlan::new(&device.architecture(), dim);
        let load = |resident_max: usize| {
            // How a kernel divides shared memory and cache holds for the whole module, so each takes its own.
            let module = Source::AttentionDecode(dim).load(device, dtype)?;
            let kernels = usable.iter().zip(DECODE_ROWS).map(|(name, rows)| {
                let resident = plan.resident(rows).min(resident_max);
                let kernel = module.kernel(name, plan.shared_bytes(rows) as u32)?;
                let kernel = kernel.with_shared_percent(plan.shared_percent(rows, resident))?;
                Ok(DecodeKernel { kernel, blocks: resident * device.sm_count })
            });
            kernels.collect::<Result<Vec<_>>>()
        };
        Ok(Self {
            token: TokenKernels::Decode { usual: load(usize::MAX)?, few: load(RESIDENT_OF_FEW)? },
            tile: Some(TileKernel::load(device, dim, dtype)?),
        })
    }
}

/// The first of `sizes` that holds `group`, else the last; its index and itself.
pub(super) fn fitting(sizes: &[usize], group: usize) -> (usize, usize) {
    let index = sizes.iter().position(|size| *size >= group).unwrap_or(sizes.len() - 1);
    (index, sizes[index])
}

/// How the decode kernel uses the shared memory of an architecture.
pub(in crate::cuda) struct DecodePlan {
    dim: usize,
    /// Places of a warp's ring.
    pub stages: usize,
    /// Shared memory of a multiprocessor.
    shared_bytes: usize,
}

impl DecodePlan {
    /// For heads of up to `dim` elements on `architecture`, in NVRTC's name.
    pub fn new(architecture: &str, dim: usize) -> Self {
        let shared_bytes = shared_bytes(architecture);
        let stages = match dim {
            64 => 3,
            128 => 2,
            _ => (shared_bytes / (75 << 10)).max(1),
        };
        Self { dim, stages, shared_bytes }
    }

    /// Dynamic shared memory of a block: the rings of K and V, and as many places for queries.
    fn shared_bytes(&self, rows: usize) -> usize {
        let ring = DECODE_WARPS * DECODE_KEYS * 2 * self.dim;
        self.stages * (ring + rows * (self.dim + TILE_PADDING)) * size_of::<u16>()
    }

    /// Shared memory of a block with what the kernel declares itself, and what the system takes.
    fn block_bytes(&self, rows: usize) -> usize {
        self.shared_bytes(rows) + 3072 + 1024
    }

    /// Blocks of a multiprocessor at once.
    fn resident(&self, rows: usize) -> usize {
        let by_registers = match self.dim {
            64 => 4,
            128 => 3,
            _ => 1,
        };
        (self.shared_bytes / self.block_bytes(rows)).clamp(1, by_registers)
    }

    /// Hundredths of shared memory that `resident` blocks take.
    fn shared_percent(&self, rows: usize, resident: usize) -> usize {
        (100 * resident * self.block_bytes(rows)).div_ceil(self.shared_bytes).min(100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two parts a block fit what `AttentionStep` takes for 8 blocks a multiprocessor of 8 heads of 256.
    #[test]
    fn parts_fit_their_room() {
        for dim in [64, 128, 256] {
            for architecture in ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"] {
                let plan = DecodePlan::new(architecture, dim);
                for rows in DECODE_ROWS.into_iter().filter(|rows| rows * dim < 16 * HEAD_DIM_MAX) {
                    let parts = 2 * plan.resident(rows) * rows;
                    assert!(parts <= 8 * 16 && parts * dim <= 8 * 8 * HEAD_DIM_MAX);
                    // A block may have 1 KiB less than a multiprocessor.
                    assert!(plan.shared_bytes(rows) + 3072 <= plan.shared_bytes - 1024);
                }
            }
        }
        let resident = |dim, rows| DecodePlan::new("sm_90a", dim).resident(rows);
        assert_eq!([resident(64, 4), resident(128, 8), resident(128, 16), resident(256, 4)], [4, 3, 2, 1]);
        let percent = |resident| DecodePlan::new("sm_90a", 128).shared_percent(4, resident);
        assert_eq!([percent(1), percent(2), percent(3)], [31, 62, 93]);
    }

    #[test]
    fn groups_take_the_smallest_kernel_that_holds_them() {
        assert_eq!([1, 4, 5, 16, 40].map(|group| fitting(&DECODE_ROWS, group).1), [4, 4, 8, 16, 16]);
        assert_eq!([1, 3, 9].map(|group| fitting(&GROUPS[..3], group)), [(0, 1), (2, 4), (2, 4)]);
    }
}
