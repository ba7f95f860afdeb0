//! Weight matrices as the kernels read them.
//!
//! A matrix `[out, in]` is cut into tiles of 16 output rows, each stored as `[in][16]`: the lanes of
//! a vector are outputs, so one fused multiply-add chain per output walks the inputs in ascending
//! order, in GEMV and GEMM alike, and a tile is one sequential stream of memory. The last tile's
//! missing outputs are zero. Elements keep their storage type and are widened in registers.

use super::memory::{Arena, Region};
use super::pool::ThreadPool;
use super::simd::LANES;
use crate::{LinearSpec, Result};
use half::{bf16, f16};
use lockstep_core::DType;
use lockstep_core::limits::K_LEAVES;

/// Inputs that `pack` turns at a time: two cache lines of each of 16 rows of 16-bit elements.
const PACK_INPUTS: usize = 64;
/// Bytes below which packing runs on the caller alone.
const PACK_PARALLEL_BYTES: usize = 256 << 10;

/// A packed weight matrix.
pub struct PackedLinear {
    spec: LinearSpec,
    region: Region,
}

impl PackedLinear {
    /// Zeroed memory for the matrix. Panics when the leaves of `spec` are not what
    /// [`LinearSpec::leaves`] documents, or are more than [`K_LEAVES`].
    pub(super) fn new(arena: &Arena, spec: LinearSpec) -> Result<Self> {
        let leaves = spec.leaves.len() - 1;
        assert!(leaves.is_power_of_two() && leaves <= K_LEAVES, "{leaves} leaves: a power of two up to 8");
        assert!(spec.leaves.is_sorted() && spec.leaves[0] == 0, "leaf boundaries ascend from 0");
        assert_eq!(spec.leaves[leaves], spec.in_features, "the last leaf ends with the input");
        let bytes = spec.out_features.div_ceil(LANES) * LANES * spec.in_features * spec.dtype.size_bytes();
        let region = arena.region(bytes, "weights")?;
        Ok(Self { spec, region })
    }

    /// What was packed.
    pub fn spec(&self) -> &LinearSpec {
        &self.spec
    }

    /// Bytes of the packed matrix.
    pub(super) fn bytes(&self) -> usize {
        self.region.bytes()
    }

    /// Tiles of 16 outputs.
    pub(super) fn tiles(&self) -> usize {
        self.spec.out_features.div_ceil(LANES)
    }

    /// Bytes of a tile.
    pub(super) fn tile_bytes(&self) -> usize {
        LANES * self.spec.in_features * self.spec.dtype.size_bytes()
    }

    /// Pointer to input `k` of tile `tile`; what follows is `[in - k][16]` elements.
    pub(super) fn tile(&self, tile: usize, k: usize) -> *const u8 {
        let offset = tile * self.tile_bytes() + k * LANES * self.spec.dtype.size_bytes();
        assert!(offset <= self.region.bytes(), "tile lies inside the matrix");
        // SAFETY: inside the region by the assertion.
        unsafe { self.region.as_ptr::<u8>().add(offset) }
    }

    /// Packs output rows `first_row..`; see [`crate::Backend::pack_rows`]. Panics when `data` is not
    /// whole rows or they do not fit.
    pub(super) fn pack_rows(&mut self, pool: &ThreadPool, first_row: usize, data: &[u8]) {
        let row_bytes = self.spec.in_features * self.spec.dtype.size_bytes();
        if row_bytes == 0 || data.is_empty() {
            return;
        }
        let rows = data.len() / row_bytes;
        assert_eq!(rows * row_bytes, data.len(), "a band is whole rows of {row_bytes} bytes");
        assert!(first_row + rows <= self.spec.out_features, "the band lies inside the matrix");
        let band = Band { first_row, rows, row_bytes, data, packed: Packed(self.region.as_mut_ptr()) };
        let (first_tile, end_tile) = (first_row / LANES, (first_row + rows).div_ceil(LANES));
        let tiles = end_tile - first_tile;
        let chunks = if data.len() < PACK_PARALLEL_BYTES { 1 } else { tiles.min(4 * pool.threads()) };
        let two_bytes = self.spec.dtype.size_bytes() == 2;
        pool.run(chunks, &|chunk, _| {
            for tile in first_tile + chunk * tiles / chunks..first_tile + (chunk + 1) * tiles / chunks {
                // SAFETY: a tile belongs to one chunk, and the region holds every tile.
                unsafe { if two_bytes { band.pack_tile::<2>(tile) } else { band.pack_tile::<4>(tile) } }
            }
        });
    }

    /// Copies output row `row` widened to f32 into `out` (embedding lookup).
    pub(super) fn unpack_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.spec.out_features && out.len() == self.spec.in_features, "row of the matrix");
        let (tile, lane) = (self.tile(row / LANES, 0), row % LANES);
        for (k, value) in out.iter_mut().enumerate() {
            let index = k * LANES + lane;
            // SAFETY: `index` is inside the tile, which holds `in_features * 16` elements of the
            // matrix's type, aligned to 64 bytes.
            *value = unsafe {
                match self.spec.dtype {
                    DType::F32 => *tile.cast::<f32>().add(index),
                    DType::F16 => (*tile.cast::<f16>().add(index)).to_f32(),
                    DType::Bf16 => (*tile.cast::<bf16>().add(index)).to_f32(),
                }
            };
        }
    }
}

/// The packed memory, written tile by tile.
struct Packed(*mut u8);

// SAFETY: `pack_rows` gives each tile to one chunk.
unsafe impl Sync for Packed {}

/// Rows on their way into a matrix.
struct Band<'a> {
    first_row: usize,
    rows: usize,
    row_bytes: usize,
    data: &'a [u8],
    packed: Packed,
}

impl Band<'_> {
    /// Interleaves the band's rows of one tile. `E` is the element size.
    ///
    /// # Safety
    /// `packed` holds the whole tile and nobody else touches it meanwhile.
    unsafe fn pack_tile<const E: usize>(&self, tile: usize) {
        let inputs = self.row_bytes / E;
        let first = (tile * LANES).max(self.first_row);
        let end = ((tile + 1) * LANES).min(self.first_row + self.rows);
        // SAFETY: the tile starts there by the caller's promise.
        let target = unsafe { self.packed.0.add(tile * LANES * self.row_bytes) };
        for from in (0..inputs).step_by(PACK_INPUTS) {
            let to = inputs.min(from + PACK_INPUTS);
            for row in first..end {
                let (elements, _) = self.data[(row - self.first_row) * self.row_bytes..].as_chunks::<E>();
                for (k, element) in elements[from..to].iter().enumerate() {
                    let index = (from + k) * LANES + row % LANES;
                    // SAFETY: `index < inputs * 16`, the elements of the tile; arrays of bytes
                    // need no alignment.
                    unsafe { target.cast::<[u8; E]>().add(index).write(*element) };
                }
            }
        }
    }
}
