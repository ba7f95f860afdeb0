//! The KV pool of one rank, and rope with the store into it.
//!
//! K and V are kept apart, each `[layer][page][kv_head][slot][head_dim]` f32, so a head's tokens of a
//! page are contiguous and attention walks the page table without a copy. The system gives memory
//! page by page as slots are first written, or [shortly before](super::ahead). In a pool on huge pages a layer starts at
//! one, else the first tokens would take two of them in most layers.
//!
//! ```text
//! rope of the first r elements of a head, half-split pairs (products and sums rounded each):
//!     lo = q[i] * cos - q[i + r/2] * sin
//!     hi = q[i + r/2] * cos + q[i] * sin
//! ```
//! Elements from `r` on (partial rotary) pass through.

use super::ahead::{Ahead, PoolPlaces};
use super::memory::{HUGE_PAGE, Region};
use super::pointwise::{RmsNorm, for_rows};
use super::pool::ThreadPool;
use super::simd::{Isa, Kernel, LANES, Simd, load_at, store_at};
use super::tensor::RowsOut;
use crate::{KvLayout, QkvShape, Result};
use lockstep_core::config::RopeFrequencies;
use lockstep_core::{DType, PageId};

/// The pool over the rank's layers.
pub struct CpuKvCache {
    /// Ends before the memory goes.
    ahead: Option<Ahead>,
    layout: KvLayout,
    /// Elements from a layer of K, or V, to the next.
    layer_stride: usize,
    k: Region,
    v: Region,
}

impl CpuKvCache {
    /// Reserves the pool. Of a large one the [beginning](super::ahead) becomes resident at once, the rest as it is written or
    /// shortly before. Huge pages are asked for once a layer's pool is several of them, so that small pools stay small.
    pub(super) fn new(layout: KvLayout) -> Result<Self> {
        assert_eq!(layout.dtype, DType::F32, "type of K and V");
        let layer_bytes = layout.pool_bytes() / 2 / layout.local_layers.max(1);
        let huge = layer_bytes >= 4 * HUGE_PAGE;
        let layer_stride = if huge { layer_bytes.next_multiple_of(HUGE_PAGE) } else { layer_bytes };
        let region = || Region::own(layer_stride * layout.local_layers, huge, "the KV pool");
        let (k, v) = (region()?, region()?);
        let ahead = Ahead::start(PoolPlaces {
            starts: [k.as_ptr::<u8>() as usize, v.as_ptr::<u8>() as usize],
            layers: layout.local_layers,
            layer_stride,
            pages: layout.num_pages,
            page_bytes: layout.page_bytes() / 2 / layout.local_layers.max(1),
            page_size: layout.page_size,
        });
        Ok(Self { ahead, layout, layer_stride: layer_stride / size_of::<f32>(), k, v })
    }

    /// Its shape.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// All of K and V as `[layer][page][kv_head][slot][head_dim]`, to inspect or fill in tests; layers of a pool on huge pages
    /// have room between them.
    pub fn parts_mut(&mut self) -> (&mut [f32], &mut [f32]) {
        (self.k.as_mut_slice(), self.v.as_mut_slice())
    }

    /// Fills the slots of `pages` with NaN in every layer; see [`crate::Backend::poison`].
    pub(super) fn poison(&mut self, pages: &[PageId]) {
        let l = self.layout;
        let page_len = l.local_kv_heads * l.page_size * l.head_dim;
        for layer in 0..l.local_layers {
            for &page in pages {
                let first = self.index(layer, page as usize, 0, 0);
                for part in [&mut self.k, &mut self.v] {
                    part.as_mut_slice::<f32>()[first..first + page_len].fill(f32::NAN);
                }
            }
        }
    }

    /// Index of the first element of a slot. Panics when it is not in the pool.
    fn index(&self, layer: usize, page: usize, head: usize, offset: usize) -> usize {
        let l = &self.layout;
        assert!(
            layer < l.local_layers && page < l.num_pages && head < l.local_kv_heads && offset < l.page_size,
            "layer {layer}, page {page}, head {head}, offset {offset} lie inside the pool"
        );
        layer * self.layer_stride + ((page * l.local_kv_heads + head) * l.page_size + offset) * l.head_dim
    }

    /// K and V of the first slot of a page, for one layer and head; `page_size * head_dim` elements
    /// follow. Panics when the page is not in the pool.
    pub(super) fn page(&self, layer: usize, page: PageId, head: usize) -> (*const f32, *const f32) {
        let index = self.index(layer, page as usize, head, 0);
        (&raw const self.k.as_slice()[index], &raw const self.v.as_slice()[index])
    }
}

/// cos and sin of every position, `[max_position][rotary_dim / 2]` each.
pub struct CpuRopeTable {
    half: usize,
    max_position: usize,
    region: Region,
}

impl CpuRopeTable {
    /// See [`crate::Backend::rope_table`].
    pub(super) fn new(pool: &ThreadPool, frequencies: &RopeFrequencies, max_position: usize) -> Result<Self> {
        let (half, factor) = (frequencies.inverse.len(), frequencies.attention_factor);
        let bytes = 2 * half * max_position * size_of::<f32>();
        let mut region = Region::own(bytes, bytes >= HUGE_PAGE, "the rope table")?;
        let rows = RowsOut::new(region.as_mut_slice(), 2 * half);
        for_rows(pool, max_position, 16 * half, &|position| {
            // SAFETY: each position has its own row.
            let row = unsafe { rows.part(position, 0, 2 * half) };
            let (cos, sin) = row.split_at_mut(half);
            for (i, frequency) in frequencies.inverse.iter().enumerate() {
                let angle = position as f64 * frequency;
                (cos[i], sin[i]) = ((angle.cos() * factor) as f32, (angle.sin() * factor) as f32);
            }
        });
        Ok(Self { half, max_position, region })
    }

    /// cos and sin of a position. Panics when it is beyond the table.
    fn row(&self, position: u32) -> (&[f32], &[f32]) {
        let position = position as usize;
        assert!(position < self.max_position, "position {position} is inside the rope table");
        self.region.as_slice()[position * 2 * self.half..(position + 1) * 2 * self.half].split_at(self.half)
    }
}

/// Rotates one head, writing to `out` (which may be the head itself).
#[derive(Clone, Copy)]
struct Rotate {
    x: *const f32,
    out: *mut f32,
    cos: *const f32,
    sin: *const f32,
    half: usize,
}

impl Kernel for Rotate {
    type Output = ();

    /// # Safety
    /// `x` and `out` are valid for `2 * half` elements, `cos` and `sin` for `half`; `out` may equal
    /// `x` but not overlap it otherwise.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for i in (0..self.half).step_by(LANES) {
            // SAFETY: `i < half`; both halves of `x` are read before the same lanes of `out` are
            // written.
            unsafe {
                let (cos, sin) = (load_at::<S>(self.cos, i, self.half), load_at::<S>(self.sin, i, self.half));
                let lo = load_at::<S>(self.x, i, self.half);
                let hi = load_at::<S>(self.x.add(self.half), i, self.half);
                store_at::<S>(self.out, i, self.half, S::sub(S::mul(lo, cos), S::mul(hi, sin)));
                store_at::<S>(
                    self.out.add(self.half),
                    i,
                    self.half,
                    S::add(S::mul(hi, cos), S::mul(lo, sin)),
                );
            }
        }
    }
}

/// One call of `rope_and_store`; fields as in [`crate::RopeAndStore`].
pub(super) struct StoreTokens<'a> {
    pub layer: usize,
    pub shape: QkvShape,
    pub qk_norm: Option<(&'a [f32], &'a [f32])>,
    pub rope: &'a CpuRopeTable,
    pub positions: &'a [u32],
    pub slots: &'a [u32],
}

/// The pool while tokens are stored from several threads.
struct PoolWriter {
    k: *mut f32,
    v: *mut f32,
}

// SAFETY: distinct tokens have distinct slots, so threads write disjoint elements.
unsafe impl Sync for PoolWriter {}

impl StoreTokens<'_> {
    /// Norm, rope and store of every token.
    pub(super) fn run(&self, isa: Isa, pool: &ThreadPool, qkv: RowsOut<'_>, cache: &mut CpuKvCache) {
        let (shape, layout) = (&self.shape, cache.layout);
        let width = (shape.local_heads + 2 * shape.local_kv_heads) * shape.head_dim;
        assert_eq!(qkv.cols, width, "qkv has the columns of its heads");
        assert_eq!(self.positions.len(), self.slots.len(), "a position and a slot for each token");
        assert_eq!(
            (layout.head_dim, layout.local_kv_heads),
            (shape.head_dim, shape.local_kv_heads),
            "the cache is made for these heads"
        );
        assert!(2 * self.rope.half <= shape.head_dim, "the rope table is no wider than a head");
        if let (0, Some(ahead), Some(slot)) = (self.layer, &cache.ahead, self.slots.iter().max()) {
            ahead.reached(*slot as usize / layout.page_size);
        }
        let writer = PoolWriter { k: cache.k.as_mut_ptr(), v: cache.v.as_mut_ptr() };
        let (cache, writer) = (&*cache, &writer);
        for_rows(pool, self.positions.len(), width, &|token| {
            // SAFETY: each token has its own row.
            let row = unsafe { qkv.part(token, 0, width) };
            self.token(isa, token, row, cache, writer);
        });
    }

    /// One token: `row` is its q|k|v.
    fn token(&self, isa: Isa, token: usize, row: &mut [f32], cache: &CpuKvCache, writer: &PoolWriter) {
        let shape = &self.shape;
        let (slot, dim, layout) = (self.slots[token] as usize, shape.head_dim, &cache.layout);
        let (page, offset) = (slot / layout.page_size, slot % layout.page_size);
        let (q, kv) = row.split_at_mut(shape.local_heads * dim);
        let (k, v) = kv.split_at_mut(shape.local_kv_heads * dim);
        for head in q.chunks_exact_mut(dim) {
            let out = head.as_mut_ptr();
            self.norm_and_rotate(isa, token, head, self.qk_norm.map(|n| n.0), out);
        }
        for (head, (k, v)) in k.chunks_exact_mut(dim).zip(v.chunks_exact(dim)).enumerate() {
            let index = cache.index(self.layer, page, head, offset);
            // SAFETY: the slot lies inside the pool (checked by `index`) and belongs to this token.
            let (out_k, out_v) = unsafe { (writer.k.add(index), writer.v.add(index)) };
            self.norm_and_rotate(isa, token, k, self.qk_norm.map(|n| n.1), out_k);
            // SAFETY: as above; the pool and the activations are different memory.
            unsafe { std::ptr::copy_nonoverlapping(v.as_ptr(), out_v, dim) };
        }
    }

    /// Norm (in place) and rotation of one head into `out`, valid for `head_dim` elements.
    fn norm_and_rotate(&self, isa: Isa, token: usize, head: &mut [f32], norm: Option<&[f32]>, out: *mut f32) {
        let x = head.as_mut_ptr();
        if let Some(weight) = norm {
            assert_eq!(weight.len(), head.len(), "a norm weight for every element of a head");
            let norm =
                RmsNorm { x, weight: weight.as_ptr(), out: x, len: head.len(), eps: self.shape.norm_eps };
            // SAFETY: `head` and `weight` are `len` elements long; in place.
            unsafe { isa.run(norm) };
        }
        let (cos, sin) = self.rope.row(self.positions[token]);
        let rotate = Rotate { x, out, cos: cos.as_ptr(), sin: sin.as_ptr(), half: cos.len() };
        // SAFETY: `head` and `out` hold at least `2 * half` elements; `out` is the head itself or a
        // slot of the pool.
        unsafe { isa.run(rotate) };
        let turned = 2 * cos.len();
        // SAFETY: both are valid for `head_dim` elements; `copy` allows that they are the same.
        unsafe { std::ptr::copy(x.add(turned), out.add(turned), head.len() - turned) };
    }
}
