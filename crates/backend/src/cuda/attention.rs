//! The paged KV pool on the device, and attention over it.
//!
//! A step's tokens are dealt to two kernels: rows of a few tokens go token by token, long contexts cut
//! into splits so that every multiprocessor has work; longer rows go in tiles of 64 tokens on tensor cores
//! (16-bit types). Which kernel a token takes depends on how many its row has, so a result may differ in its
//! last bits with the chunking; `docs/architecture.md`, "Numbers".

use super::compile::Source;
use super::driver::{Address, Device};
use super::launch::{Args, Grid, Kernel};
use super::memory::{Buffer, List, Staging};
use super::tensor::{CudaTensor, VECTOR};
use crate::{Attention, AttentionBatch, AttentionRow, BackendError, KvLayout, QkvShape, Result};
use lockstep_core::{DType, PageId};
use std::rc::Rc;

/// Largest head that the kernels take.
const HEAD_DIM_MAX: usize = 256;
/// Query heads of one KV head that a block takes together.
const GROUPS: [usize; 4] = [1, 2, 4, 8];
/// Tokens of a tile.
const TILE: usize = 64;
/// Positions of a split: at least this many, and a multiple of it.
const SPLIT_STEP: usize = 64;
/// Rows of fewer tokens go token by token.
const TILE_TOKENS_MIN: usize = 8;
/// Blocks per multiprocessor that splitting aims at.
const BLOCKS_PER_SM: usize = 4;
/// Positions of shared memory that a tile holds at once, and padding of its rows in elements.
const TILE_KEYS: usize = 64;
const TILE_PADDING: usize = 8;

/// K and V of all layers of this rank: `[layer][slot][kv_head][head_dim]` each.
pub struct CudaKvCache {
    k: Buffer,
    v: Buffer,
    layout: KvLayout,
    kernels: AttentionKernels,
}

/// The kernels for one head size.
struct AttentionKernels {
    /// By [`GROUPS`].
    token: Vec<Kernel>,
    /// `None` in f32 mode.
    tile: Option<Kernel>,
    /// Room of a head in the splits' results.
    dim: usize,
}

impl AttentionKernels {
    fn load(device: &Rc<Device>, head_dim: usize, dtype: DType) -> Result<Self> {
        let dim = if head_dim <= 64 {
            64
        } else if head_dim <= 128 {
            128
        } else {
            256
        };
        let names = ["attention_token_1", "attention_token_2", "attention_token_4", "attention_token_8"];
        let module = Source::AttentionToken(dim).load(device, dtype)?;
        let usable = if dim == HEAD_DIM_MAX { &names[..3] } else { &names };
        let token = usable.iter().map(|name| module.kernel(name, 0)).collect::<Result<Vec<_>>>()?;
        let tile = match dtype {
            DType::F32 => None,
            DType::Bf16 | DType::F16 => {
                let shared = 2 * TILE_KEYS * (dim + TILE_PADDING) * dtype.size_bytes();
                Some(
                    Source::AttentionTile(dim)
                        .load(device, dtype)?
                        .kernel("attention_tile", shared as u32)?,
                )
            }
        };
        Ok(Self { token, tile, dim })
    }

    /// The kernel for `group` query heads a KV head, and how many of them a block takes.
    fn for_group(&self, group: usize) -> (&Kernel, usize) {
        let last = self.token.len() - 1;
        let index = GROUPS[..last].iter().position(|g| *g >= group).unwrap_or(last);
        (&self.token[index], GROUPS[index])
    }
}

impl CudaKvCache {
    /// Errors when the layout is none that the kernels take.
    pub(super) fn new(device: &Rc<Device>, layout: KvLayout) -> Result<Self> {
        if !layout.page_size.is_power_of_two() {
            return Err(BackendError::Unsupported(format!(
                "--page-size {}, but --device cuda needs a power of two; use 16",
                layout.page_size
            )));
        }
        if !layout.head_dim.is_multiple_of(VECTOR) || layout.head_dim > HEAD_DIM_MAX {
            return Err(BackendError::Unsupported(format!(
                "heads of {} elements, but the CUDA kernels take multiples of {VECTOR} up to {HEAD_DIM_MAX}; use \
                 --device cpu",
                layout.head_dim
            )));
        }
        let elements = layout.local_layers * layer_elements(&layout);
        let pool = || Buffer::zeroed(device, elements * layout.dtype.size_bytes(), "the KV pool");
        let kernels = AttentionKernels::load(device, layout.head_dim, layout.dtype)?;
        Ok(Self { k: pool()?, v: pool()?, layout, kernels })
    }

    /// The layout it was made with.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// K and V of a layer. Panics when `shape` is not the pool's.
    pub(super) fn layer(&self, layer: usize, shape: &QkvShape) -> (Address, Address) {
        let layout = &self.layout;
        assert!(layer < layout.local_layers, "layer {layer} of {}", layout.local_layers);
        let (made, asked) =
            ((layout.local_kv_heads, layout.head_dim), (shape.local_kv_heads, shape.head_dim));
        assert_eq!(made, asked, "KV heads and head size of the pool");
        let offset = (layer * layer_elements(layout) * layout.dtype.size_bytes()) as u64;
        (self.k.address() + offset, self.v.address() + offset)
    }

    /// Fills pages of every layer with NaN.
    pub(super) fn poison(&self, kernel: &Kernel, pages: &[PageId]) {
        let layout = &self.layout;
        let page = layout.page_size * layout.local_kv_heads * layout.head_dim;
        for pool in [&self.k, &self.v] {
            for layer in 0..layout.local_layers {
                for &id in pages {
                    assert!((id as usize) < layout.num_pages, "page {id} of {}", layout.num_pages);
                    let first = layer * layer_elements(layout) + id as usize * page;
                    let args = Args::default().address(pool.address()).long(first).long(page);
                    // SAFETY: the page lies inside the pool by the assertion.
                    unsafe { kernel.launch(Grid::elements(page), args) };
                }
            }
        }
    }
}

/// Elements of K (or V) of a layer.
fn layer_elements(layout: &KvLayout) -> usize {
    layout.num_pages * layout.page_size * layout.local_kv_heads * layout.head_dim
}

/// Where the tokens of the current step are, on the device, and room for splits.
pub(super) struct AttentionStep {
    device: Rc<Device>,
    /// The step that the lists below are for.
    rows: Vec<AttentionRow>,
    /// `Token` of `attention_token.cu`, 3 words each.
    tokens: Vec<u32>,
    /// `Tile` of `attention_tile.cu`, 4 words each.
    tiles: Vec<u32>,
    /// Positions that the token with the most of them sees, without a window.
    context_max: usize,
    token_list: List<u32>,
    tile_list: List<u32>,
    page_list: List<PageId>,
    /// Results of splits; their maximum and sum; how many of a token's splits are finished.
    partial: Buffer,
    partial_ml: Buffer,
    finished: Buffer,
}

impl AttentionStep {
    pub(super) fn new(device: &Rc<Device>) -> Result<Self> {
        // Splitting stops at BLOCKS_PER_SM blocks, rounded up once.
        let blocks = 2 * BLOCKS_PER_SM * device.sm_count;
        let heads = blocks * GROUPS[GROUPS.len() - 1];
        let room = |bytes| Buffer::zeroed(device, bytes, "the splits of attention");
        Ok(Self {
            device: Rc::clone(device),
            rows: Vec::new(),
            tokens: Vec::new(),
            tiles: Vec::new(),
            context_max: 0,
            token_list: List::default(),
            tile_list: List::default(),
            page_list: List::default(),
            partial: room(heads * HEAD_DIM_MAX * size_of::<f32>())?,
            partial_ml: room(heads * 2 * size_of::<f32>())?,
            finished: room(blocks * size_of::<u32>())?,
        })
    }

    /// Deals the tokens of a step, unless it is the one they are dealt for already.
    fn deal(&mut self, batch: &AttentionBatch<'_>, tiled: bool) {
        if self.rows == batch.rows {
            return;
        }
        self.rows.clear();
        self.rows.extend_from_slice(batch.rows);
        deal(batch.rows, tiled, &mut self.tokens, &mut self.tiles);
        let alone = self.tokens.as_chunks::<3>().0;
        self.context_max = alone.iter().map(|token| token[1] as usize + 1).max().unwrap_or(0);
    }

    /// Queues attention of all tokens of a step. Panics when tensors or pool are of another shape.
    pub(super) fn run(
        &mut self,
        staging: &mut Staging,
        args: &Attention<'_>,
        qkv: &CudaTensor,
        cache: &CudaKvCache,
        out: &CudaTensor,
    ) -> Result<()> {
        let shape = &args.shape;
        let rows =
            args.batch.rows.iter().map(|r| (r.first_token + r.token_count) as usize).max().unwrap_or(0);
        let width = (shape.local_heads + 2 * shape.local_kv_heads) * shape.head_dim;
        let (k, v) = cache.layer(args.layer, shape);
        let (q, to) = (
            qkv.rows(rows, width, cache.layout.dtype),
            out.rows(rows, shape.local_heads * shape.head_dim, cache.layout.dtype),
        );
        self.deal(&args.batch, cache.kernels.tile.is_some());
        let device = Rc::clone(&self.device);
        let pages = self.page_list.set(&device, staging, args.batch.pages)?;
        let heads = head_words(args, cache.layout.page_size);
        if let Some(kernel) = cache.kernels.tile.as_ref().filter(|_| !self.tiles.is_empty()) {
            let tiles = self.tile_list.set(&device, staging, &self.tiles)?;
            let grid = Grid { blocks: [self.tiles.len() / 4, shape.local_heads, 1], threads: 128 };
            let list = [q, k, v, tiles, pages, to];
            let args = list.into_iter().fold(Args::default(), Args::address).words(&heads);
            // SAFETY: tokens lie inside the tensors by the checks of `rows`; pages are the scheduler's.
            unsafe { kernel.launch(grid, args) };
        }
        if self.tokens.is_empty() {
            return Ok(());
        }
        let tokens = self.token_list.set(&device, staging, &self.tokens)?;
        let count = self.tokens.len() / 3;
        let (kernel, group) = cache.kernels.for_group(shape.local_heads / shape.local_kv_heads);
        let chunks = (shape.local_heads / shape.local_kv_heads).div_ceil(group);
        let units = shape.local_kv_heads * chunks;
        let visible = args.window.map_or(self.context_max, |window| window.min(self.context_max));
        let per_split = positions_per_split(visible, count * units, device.sm_count);
        let grid = Grid { blocks: [visible.div_ceil(per_split), units, count], threads: 128 };
        let list = [
            q,
            k,
            v,
            tokens,
            pages,
            to,
            self.partial.address(),
            self.partial_ml.address(),
            self.finished.address(),
        ];
        let args = list.into_iter().fold(Args::default(), Args::address).words(&heads).int(per_split);
        debug_assert!(cache.kernels.dim <= HEAD_DIM_MAX, "a head's room in the splits");
        // SAFETY: as above; splits need room for `units * count * splits` results of up to 8 heads, which
        // `positions_per_split` keeps below what was allocated.
        unsafe { kernel.launch(grid, args) };
        Ok(())
    }
}

/// The words of `Heads` of `attention.cuh`, padded to an even number.
fn head_words(args: &Attention<'_>, page_size: usize) -> [u32; 8] {
    let shape = &args.shape;
    [
        shape.local_heads as u32,
        shape.local_kv_heads as u32,
        shape.head_dim as u32,
        page_size.trailing_zeros(),
        args.scale.to_bits(),
        args.softcap.unwrap_or(0.0).to_bits(),
        args.window.map_or(0, |window| u32::try_from(window).unwrap_or(u32::MAX)),
        0,
    ]
}

/// Tokens of rows that go token by token, and tiles of the others.
fn deal(rows: &[AttentionRow], tiled: bool, tokens: &mut Vec<u32>, tiles: &mut Vec<u32>) {
    tokens.clear();
    tiles.clear();
    for row in rows {
        if !tiled || (row.token_count as usize) < TILE_TOKENS_MIN {
            for i in 0..row.token_count {
                tokens.extend([row.first_token + i, row.start_position + i, row.first_page]);
            }
            continue;
        }
        for first in (0..row.token_count).step_by(TILE) {
            let count = (row.token_count - first).min(TILE as u32);
            tiles.extend([row.first_token + first, count, row.start_position + first, row.first_page]);
        }
    }
}

/// Positions of one split, so that `units` (tokens times heads) give every multiprocessor work.
fn positions_per_split(visible: usize, units: usize, sm_count: usize) -> usize {
    let wanted = (BLOCKS_PER_SM * sm_count / units.max(1)).max(1);
    visible.div_ceil(wanted).next_multiple_of(SPLIT_STEP).max(SPLIT_STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(first_token: u32, token_count: u32, start_position: u32) -> AttentionRow {
        AttentionRow { first_token, token_count, start_position, first_page: first_token * 10 }
    }

    #[test]
    fn every_token_is_dealt_once() {
        let rows = [row(0, 1, 7), row(1, 130, 64), row(131, 7, 0), row(138, 8, 3)];
        let (mut tokens, mut tiles) = (Vec::new(), Vec::new());
        for tiled in [true, false] {
            deal(&rows, tiled, &mut tokens, &mut tiles);
            let mut seen = [0; 146];
            tokens.as_chunks::<3>().0.iter().for_each(|t| seen[t[0] as usize] += 1);
            for tile in tiles.as_chunks::<4>().0 {
                assert!(tile[1] <= TILE as u32);
                (tile[0]..tile[0] + tile[1]).for_each(|t| seen[t as usize] += 1);
            }
            assert!(seen.iter().all(|n| *n == 1), "{seen:?}");
            assert_eq!(tiles.is_empty(), !tiled);
        }
        deal(&rows, true, &mut tokens, &mut tiles);
        assert_eq!(tiles.as_chunks::<4>().0[1], [65, 64, 128, 10]);
        assert_eq!(tokens.as_chunks::<3>().0[1], [131, 0, 1310]);
    }

    #[test]
    fn splits_fit_their_room() {
        for sm_count in [1, 16, 132] {
            for units in (1..3000).step_by(7) {
                for visible in [1, 63, 64, 65, 1000, 40_000, 131_072] {
                    let per_split = positions_per_split(visible, units, sm_count);
                    let splits = visible.div_ceil(per_split);
                    assert!(per_split.is_multiple_of(SPLIT_STEP) && splits >= 1);
                    assert!(splits == 1 || splits * units <= 2 * BLOCKS_PER_SM * sm_count);
                }
            }
        }
    }
}
