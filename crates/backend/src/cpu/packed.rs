//! Weight matrices as the kernels read them.
//!
//! A matrix `[out, in]` is cut into tiles of 16 output rows, each stored as `[in][16]`: the lanes of
//! a vector are outputs, so one fused multiply-add chain per output walks the inputs in ascending
//! order, in GEMV and GEMM alike, and a tile is one sequential stream of memory. The last tile's
//! missing outputs are zero. Floats keep their storage type and are widened in registers; codes lie as
//! [`super::codes`] says.

use super::codes;
use super::memory::{Arena, Region};
use super::pool::ThreadPool;
use super::simd::{Isa, Kernel, LANES, Simd};
use crate::bands::BAND_ROWS_STEP;
use crate::{Bands, LinearSpec, PACKED_CHUNK_BYTES, PackedBytes, ReadPacked, Result};
use half::{bf16, f16};
use lockstep_core::limits::K_LEAVES;
use lockstep_core::{CODE_GROUP, DType, WeightType};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Version of the layout, the same on every instruction set: it changes with what this file, `codes::pack` and whatever
/// turns floats and blocks into codes write.
pub(super) const VERSION: u32 = 1;

/// Bytes below which packing runs on the caller alone.
const PACK_PARALLEL_BYTES: usize = 256 << 10;
const _: () = assert!(BAND_ROWS_STEP.is_multiple_of(LANES), "bands meet at whole tiles");

/// A packed weight matrix.
pub struct PackedLinear {
    spec: LinearSpec,
    /// Shared once it is packed.
    region: Arc<Region>,
}

impl PackedLinear {
    /// Zeroed memory for the matrix. Panics when the leaves of `spec` are not what
    /// [`LinearSpec::leaves`] documents, or are more than [`K_LEAVES`].
    pub(super) fn new(arena: &Arena, spec: LinearSpec) -> Result<Self> {
        let leaves = spec.leaves.len() - 1;
        assert!(leaves.is_power_of_two() && leaves <= K_LEAVES, "{leaves} leaves: a power of two up to 8");
        assert!(spec.leaves.is_sorted() && spec.leaves[0] == 0, "leaf boundaries ascend from 0");
        assert_eq!(spec.leaves[leaves], spec.in_features, "the last leaf ends with the input");
        let whole = |bound: &usize| {
            matches!(spec.weight_type, WeightType::Float(_)) || bound.is_multiple_of(CODE_GROUP)
        };
        assert!(spec.leaves.iter().all(whole), "leaves of codes are whole groups");
        let bytes =
            spec.out_features.div_ceil(LANES) * LANES * spec.weight_type.packed_bytes(spec.in_features);
        let region = Arc::new(arena.region(bytes, "weights")?);
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
        LANES * self.spec.weight_type.packed_bytes(self.spec.in_features)
    }

    /// Pointer to input `k` of tile `tile`; what follows is `[in - k][16]` elements, or the groups from `k`'s on.
    pub(super) fn tile(&self, tile: usize, k: usize) -> *const u8 {
        let offset = tile * self.tile_bytes() + LANES * self.spec.weight_type.packed_bytes(k);
        assert!(offset <= self.region.bytes(), "tile lies inside the matrix");
        // SAFETY: inside the region by the assertion.
        unsafe { self.region.as_ptr::<u8>().add(offset) }
    }

    /// Packs output rows `first_row..`; see [`crate::Backend::pack_rows`]. Panics when `data` is not
    /// whole rows or they do not fit.
    pub(super) fn pack_rows(&mut self, isa: Isa, pool: &ThreadPool, first_row: usize, data: &[u8]) {
        let packer = self.packer(isa);
        let Some(band) = packer.band(first_row, data) else { return };
        let first_tile = first_row / LANES;
        let tiles = (first_row + band.rows).div_ceil(LANES) - first_tile;
        let chunks = if data.len() < PACK_PARALLEL_BYTES { 1 } else { tiles.min(4 * pool.threads()) };
        pool.run(chunks, &|chunk, _| {
            for tile in first_tile + chunk * tiles / chunks..first_tile + (chunk + 1) * tiles / chunks {
                // SAFETY: a tile belongs to one chunk.
                unsafe { packer.pack_tile(&band, tile) };
            }
        });
    }

    /// Reads and packs `bands` of `linears`, each by one thread from its file to its tiles, so that it is
    /// packed out of that core's cache and no thread waits for another. Panics when a band is not whole
    /// rows or they do not fit.
    pub(super) fn pack_bands(linears: &mut [Self], isa: Isa, pool: &ThreadPool, bands: &Bands<'_>) {
        let packers: Vec<_> = linears.iter_mut().map(|linear| linear.packer(isa)).collect();
        pool.run(bands.count(), &|index, _| {
            bands.with_band(index, |read| {
                let packer = &packers[read.matrix];
                let Some(band) = packer.band(read.first_row, &read.data) else { return };
                for tile in band.first_row / LANES..(band.first_row + band.rows).div_ceil(LANES) {
                    // SAFETY: a row belongs to one band.
                    unsafe { packer.pack_tile(&band, tile) };
                }
            });
        });
    }

    /// The matrix's bytes; from now on it cannot be packed or filled.
    pub(super) fn share(&self) -> PackedBytes {
        Arc::clone(&self.region) as PackedBytes
    }

    /// Fills the matrices piece by piece, on all threads. Stops at the first piece that cannot be had.
    pub(super) fn fill(linears: &mut [Self], pool: &ThreadPool, read: &ReadPacked<'_>) {
        let mut pieces = Vec::new();
        for (matrix, linear) in linears.iter_mut().enumerate() {
            let (bytes, start) = (linear.bytes(), linear.alone().as_mut_ptr::<u8>());
            for at in (0..bytes).step_by(PACKED_CHUNK_BYTES) {
                // SAFETY: inside the region.
                let target = Packed(unsafe { start.add(at) });
                pieces.push((matrix, at, target, PACKED_CHUNK_BYTES.min(bytes - at)));
            }
        }
        let failed = AtomicBool::new(false);
        pool.run(pieces.len(), &|index, _| {
            let (matrix, at, target, len) = &pieces[index];
            // Relaxed: pieces read after a failure do no harm.
            if failed.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: pieces do not overlap, each belongs to one chunk of work, and the matrices are held alone.
            let piece = unsafe { std::slice::from_raw_parts_mut(target.0, *len) };
            if !read(*matrix, *at, piece) {
                failed.store(true, Ordering::Relaxed);
            }
        });
    }

    fn packer(&mut self, isa: Isa) -> Packer<'_> {
        let packed = Packed(self.alone().as_mut_ptr());
        Packer { isa, spec: &self.spec, packed }
    }

    /// The memory, to be written. Panics when it is shared.
    fn alone(&mut self) -> &mut Region {
        Arc::get_mut(&mut self.region).expect("a matrix is packed before it is shared")
    }

    /// Copies output row `row` widened to f32 into `out` (embedding lookup).
    pub(super) fn unpack_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.spec.out_features && out.len() == self.spec.in_features, "row of the matrix");
        let (tile, lane) = (self.tile(row / LANES, 0), row % LANES);
        let dtype = match self.spec.weight_type {
            WeightType::Float(dtype) => dtype,
            WeightType::Coded(layout) => {
                // SAFETY: a whole tile of the matrix.
                let tile = unsafe { std::slice::from_raw_parts(tile, self.tile_bytes()) };
                return codes::unpack_row(layout, tile, lane, out);
            }
        };
        for (k, value) in out.iter_mut().enumerate() {
            let index = k * LANES + lane;
            // SAFETY: `index` is inside the tile, which holds `in_features * 16` elements of the
            // matrix's type, aligned to 64 bytes.
            *value = unsafe {
                match dtype {
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

// SAFETY: a row is written by one thread, as `Packer::pack_tile` demands.
unsafe impl Sync for Packed {}

/// Writes tiles of one matrix, which it holds for itself.
struct Packer<'a> {
    isa: Isa,
    spec: &'a LinearSpec,
    packed: Packed,
}

/// Rows on their way into a matrix; they lie inside it.
struct Band<'a> {
    first_row: usize,
    rows: usize,
    data: &'a [u8],
}

impl Packer<'_> {
    /// Bytes of a row that comes in.
    fn row_bytes(&self) -> usize {
        self.spec.weight_type.staged_bytes(self.spec.in_features)
    }

    /// The rows from `first_row` that `data` holds, if any.
    fn band<'d>(&self, first_row: usize, data: &'d [u8]) -> Option<Band<'d>> {
        let row_bytes = self.row_bytes();
        if row_bytes == 0 || data.is_empty() {
            return None;
        }
        let rows = data.len() / row_bytes;
        assert_eq!(rows * row_bytes, data.len(), "a band is whole rows of {row_bytes} bytes");
        assert!(first_row + rows <= self.spec.out_features, "the band lies inside the matrix");
        Some(Band { first_row, rows, data })
    }

    /// Interleaves the band's rows of one tile.
    ///
    /// # Safety
    /// The tile holds rows of the band, and nobody else touches these rows meanwhile.
    unsafe fn pack_tile(&self, band: &Band<'_>, tile: usize) {
        let row_bytes = self.row_bytes();
        let rows = (tile * LANES).max(band.first_row)..((tile + 1) * LANES).min(band.first_row + band.rows);
        let data = &band.data[(rows.start - band.first_row) * row_bytes..][..rows.len() * row_bytes];
        let tile_bytes = LANES * self.spec.weight_type.packed_bytes(self.spec.in_features);
        // SAFETY: the region holds every tile of the matrix, and the band lies inside it.
        let target = unsafe { self.packed.0.add(tile * tile_bytes) };
        let two_bytes = match self.spec.weight_type {
            WeightType::Float(dtype) => dtype.size_bytes() == 2,
            WeightType::Coded(layout) => {
                for (row, staged) in rows.zip(data.chunks_exact(row_bytes)) {
                    // SAFETY: a row of the tile, held alone by the caller's promise.
                    unsafe { codes::pack_row(layout, staged, target, row % LANES) };
                }
                return;
            }
        };
        if rows.len() == LANES && row_bytes.is_multiple_of(size_of::<u32>()) {
            let tile =
                WholeTile { rows: data.as_ptr(), words: row_bytes / size_of::<u32>(), two_bytes, target };
            // SAFETY: `data` is 16 rows, so all of the target is held alone by the caller's promise; the
            // machine supports the backend's instruction set.
            return unsafe { self.isa.run(tile) };
        }
        // SAFETY: the target is a tile whose rows in `data` are held alone by the caller's promise.
        unsafe {
            match two_bytes {
                true => pack_lanes::<2>(data, row_bytes, rows.start % LANES, target),
                false => pack_lanes::<4>(data, row_bytes, rows.start % LANES, target),
            }
        }
    }
}

/// Interleaves whole rows as lanes `first_lane..` of a tile. `E` is the element size.
///
/// # Safety
/// `target` is valid for 16 rows, `data` holds at most the lanes from `first_lane` on, and nobody
/// else touches these lanes.
unsafe fn pack_lanes<const E: usize>(data: &[u8], row_bytes: usize, first_lane: usize, target: *mut u8) {
    for (row, bytes) in data.chunks_exact(row_bytes).enumerate() {
        for (k, element) in bytes.as_chunks::<E>().0.iter().enumerate() {
            // SAFETY: `k` is an input and `first_lane + row` a lane of the tile; arrays of bytes need
            // no alignment.
            unsafe { target.cast::<[u8; E]>().add(k * LANES + first_lane + row).write(*element) };
        }
    }
}

/// Interleaves 16 whole rows of 32-bit words, each one element or two of 16 bits: squares of 16 x 16
/// words turn in registers, then pairs come apart. Only bits move, so that every instruction set
/// writes the same.
#[derive(Clone, Copy)]
struct WholeTile {
    rows: *const u8,
    /// Of a row.
    words: usize,
    two_bytes: bool,
    target: *mut u8,
}

impl Kernel for WholeTile {
    type Output = ();

    /// # Safety
    /// `rows` is valid for reading and `target` for writing 16 rows of `words` words.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for from in (0..self.words).step_by(LANES) {
            let count = LANES.min(self.words - from);
            // SAFETY: words `from..from + count` of 16 rows are inside by the caller's promise; each
            // becomes 64 bytes of the tile, in the order of words. Rows need no alignment.
            unsafe {
                let mut square = [S::splat(0.0); LANES];
                for row in 0..LANES {
                    let words = self.rows.add((row * self.words + from) * size_of::<u32>()).cast::<f32>();
                    square[row] = if count == LANES { S::load(words) } else { S::load_partial(words, count) };
                }
                let square = S::transpose(square);
                for k in 0..count {
                    let target = self.target.add((from + k) * LANES * size_of::<u32>());
                    if self.two_bytes {
                        let mut words = [0u32; LANES];
                        S::store(words.as_mut_ptr().cast(), square[k]);
                        let (mut low, mut high) = ([0u16; LANES], [0u16; LANES]);
                        for lane in 0..LANES {
                            low[lane] = words[lane] as u16;
                            high[lane] = (words[lane] >> 16) as u16;
                        }
                        target.cast::<[u16; LANES]>().write(low);
                        target.cast::<[u16; LANES]>().add(1).write(high);
                    } else {
                        S::store(target.cast(), square[k]);
                    }
                }
            }
        }
    }
}
