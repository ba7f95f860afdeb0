//! The paged KV pool on the device, and attention over it.
//!
//! A step's tokens are dealt to two kernels: rows of a few tokens go token by token, contexts cut so that
//! every multiprocessor has the same work; longer rows go in tiles of 128 tokens (16-bit types). Which
//! kernel a token takes depends on how many its row has, and where a context is cut on what else is in the
//! step, so a result may differ in its last bits; `docs/architecture.md`, "Numbers".
//!
//! **Invariant:** the launches of a step whose rows have one token each depend on how many there are, not on
//! their contexts, and every address in them stays while the lists have room: a captured step can be
//! replayed for longer contexts.

mod kernels;

pub(super) use kernels::DecodePlan;

use super::device::Device;
use super::driver::Address;
use super::launch::{Args, Grid, Kernel};
use super::memory::{Buffer, List, Staging};
use super::tensor::{CudaTensor, VECTOR};
use crate::{Attention, AttentionBatch, AttentionRow, BackendError, KvLayout, QkvShape, Result};
use kernels::{
    AttentionKernels, DECODE_ROWS, DECODE_THREADS, DecodeKernel, FEW_TOKENS, GROUPS, HEAD_DIM_MAX, TILE,
    TokenKernels, fitting,
};
use lockstep_core::PageId;
use std::rc::Rc;

/// Rows of fewer tokens go token by token.
const TILE_TOKENS_MIN: usize = 8;
/// Blocks per multiprocessor that splitting aims at, in f32 mode.
const BLOCKS_PER_SM: usize = 4;
/// Tokens that one launch of the decode kernel takes.
const DECODE_TOKENS_MAX: usize = 512;
/// Words of `Token` and of `Tile` in the kernels' sources.
const TOKEN_WORDS: usize = 4;
const TILE_WORDS: usize = 4;

/// K and V of all layers of this rank: `[layer][slot][kv_head][head_dim]` each.
pub struct CudaKvCache {
    k: Buffer,
    v: Buffer,
    layout: KvLayout,
    kernels: AttentionKernels,
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

    /// The page behind those of the layout, for rows that pad a step.
    pub(super) fn padding_page(&self) -> PageId {
        self.layout.num_pages as PageId
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

/// Elements of K (or V) of a layer, the padding page included.
fn layer_elements(layout: &KvLayout) -> usize {
    (layout.num_pages + 1) * layout.page_size * layout.local_kv_heads * layout.head_dim
}

/// Where the tokens of the current step are, on the device, and room for splits.
pub(super) struct AttentionStep {
    device: Rc<Device>,
    /// The step that the lists below are for.
    rows: Vec<AttentionRow>,
    /// `Token` of `attention.cuh`.
    tokens: Vec<u32>,
    /// `Tile` of `attention_tile.cu`.
    tiles: Vec<u32>,
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
        // Splitting stops at BLOCKS_PER_SM blocks, rounded up once, of up to 8 heads of 256 elements. Of the
        // decode kernel, up to 4 blocks leave two parts of up to 16 heads each, but of smaller heads.
        let blocks = 2 * BLOCKS_PER_SM * device.sm_count;
        let heads = blocks * DECODE_ROWS[DECODE_ROWS.len() - 1];
        let room = |bytes| Buffer::zeroed(device, bytes, "the splits of attention");
        Ok(Self {
            device: Rc::clone(device),
            rows: Vec::new(),
            tokens: Vec::new(),
            tiles: Vec::new(),
            token_list: List::default(),
            tile_list: List::default(),
            page_list: List::default(),
            partial: room(heads / 2 * HEAD_DIM_MAX * size_of::<f32>())?,
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
    }

    /// Brings what a step's attention will need to the device.
    pub(super) fn stage(
        &mut self,
        staging: &mut Staging,
        batch: &AttentionBatch<'_>,
        tiled: bool,
    ) -> Result<()> {
        self.deal(batch, tiled);
        let device = Rc::clone(&self.device);
        self.page_list.set(&device, staging, batch.pages)?;
        if !self.tiles.is_empty() {
            self.tile_list.set(&device, staging, &self.tiles)?;
        }
        if !self.tokens.is_empty() {
            self.token_list.set(&device, staging, &self.tokens)?;
        }
        Ok(())
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
            let list = [q, k, v, tiles, pages, to];
            let args = list.into_iter().fold(Args::default(), Args::address).words(&heads);
            // SAFETY: tokens lie inside the tensors by the checks of `rows`; pages are the scheduler's.
            unsafe { kernel.launch(self.tiles.len() / TILE_WORDS, shape.local_heads, args) };
        }
        if self.tokens.is_empty() {
            return Ok(());
        }
        let tokens = self.token_list.set(&device, staging, &self.tokens)?;
        let places = [q, k, v, tokens, pages, to];
        match &cache.kernels.token {
            TokenKernels::Exact(kernels) => self.launch_exact(kernels, shape, places, &heads),
            TokenKernels::Decode { usual, few } => {
                let is_few = self.tokens.len() / TOKEN_WORDS <= FEW_TOKENS;
                self.launch_decode(if is_few { few } else { usual }, shape, places, &heads);
            }
        }
        Ok(())
    }

    /// `places` as the kernels take them, and the room for parts.
    fn arguments(&self, places: [Address; 6]) -> Args {
        let parts = [self.partial.address(), self.partial_ml.address(), self.finished.address()];
        places.into_iter().chain(parts).fold(Args::default(), Args::address)
    }

    fn launch_exact(&self, kernels: &[Kernel], shape: &QkvShape, places: [Address; 6], heads: &[u32]) {
        let count = self.tokens.len() / TOKEN_WORDS;
        let group = shape.local_heads / shape.local_kv_heads;
        let (index, together) = fitting(&GROUPS[..kernels.len()], group);
        let units = shape.local_kv_heads * group.div_ceil(together);
        let grid = Grid { blocks: [splits(count * units, self.device.sm_count), units, count], threads: 128 };
        // SAFETY: tokens lie inside the tensors by the checks of `rows`; pages are the scheduler's; `splits`
        // keeps the parts of up to 8 heads below what was allocated.
        unsafe { kernels[index].launch(grid, self.arguments(places).words(heads)) };
    }

    fn launch_decode(&self, kernels: &[DecodeKernel], shape: &QkvShape, places: [Address; 6], heads: &[u32]) {
        let (index, _) = fitting(&DECODE_ROWS[..kernels.len()], shape.local_heads / shape.local_kv_heads);
        let DecodeKernel { kernel, blocks } = &kernels[index];
        let count = self.tokens.len() / TOKEN_WORDS;
        for first in (0..count).step_by(DECODE_TOKENS_MAX) {
            let [q, k, v, tokens, pages, to] = places;
            let tokens = tokens + (first * TOKEN_WORDS * size_of::<u32>()) as u64;
            let args = self.arguments([q, k, v, tokens, pages, to]).words(heads);
            let args = args.int((count - first).min(DECODE_TOKENS_MAX));
            let grid = Grid { blocks: [*blocks, 1, 1], threads: DECODE_THREADS };
            // SAFETY: as above; two parts of a block fit the room for them.
            unsafe { kernel.launch(grid, args) };
        }
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
                let position = row.start_position + i;
                tokens.extend([row.first_token + i, position, row.first_page, row.start_position]);
            }
            continue;
        }
        for first in (0..row.token_count).step_by(TILE) {
            let count = (row.token_count - first).min(TILE as u32);
            tiles.extend([row.first_token + first, count, row.start_position + first, row.first_page]);
        }
    }
}

/// Parts that each of `units` (tokens times heads) is cut into, so that every multiprocessor has work.
fn splits(units: usize, sm_count: usize) -> usize {
    (BLOCKS_PER_SM * sm_count).div_ceil(units.max(1))
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
            tokens.as_chunks::<TOKEN_WORDS>().0.iter().for_each(|t| seen[t[0] as usize] += 1);
            for tile in tiles.as_chunks::<TILE_WORDS>().0 {
                assert!(tile[1] <= TILE as u32);
                (tile[0]..tile[0] + tile[1]).for_each(|t| seen[t as usize] += 1);
            }
            assert!(seen.iter().all(|n| *n == 1), "{seen:?}");
            assert_eq!(tiles.is_empty(), !tiled);
        }
        deal(&rows, true, &mut tokens, &mut tiles);
        assert_eq!(tiles.as_chunks::<TILE_WORDS>().0[1], [129, 2, 192, 10]);
        assert_eq!(tokens.as_chunks::<TOKEN_WORDS>().0[1..3], [[131, 0, 1310, 0], [132, 1, 1310, 0]]);
    }

    #[test]
    fn splits_fit_their_room() {
        for sm_count in [1, 16, 132] {
            for units in 1..3000 {
                let splits = splits(units, sm_count);
                assert!(splits == 1 || splits * units <= 2 * BLOCKS_PER_SM * sm_count);
            }
        }
    }
}
