//! Rows of matrices on their way from a file to the device, in bands of about a MiB.
//!
//! A band is read (which may mean unpacking or converting) into a buffer and packed from there. Small
//! matrices, such as a layer's experts, are packed together: one alone has too few bands to keep all
//! threads busy. **Invariants:** a row belongs to one band; bands of the same rows of a file meet at multiples
//! of [`BAND_ROWS_STEP`] rows of the matrix, so that what backends store together is cut seldom; buffers
//! are as many as bands are under way, whatever the size of the matrices. What comes out does not depend on the
//! order of bands.
//!
//! Made by the model's loader, used by [`crate::Backend::pack_bands`].

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, MutexGuard};

/// Rows of a matrix at multiples of which bands meet; what backends store together is no wider.
pub const BAND_ROWS_STEP: usize = 16;
/// Bytes of one band: large enough to stream, small enough that packing finds it in a cache.
const BAND_BYTES: usize = 1 << 20;

/// Threads that read ahead of a device, at most: beyond that the copy to it is what everything waits
/// for.
const READERS_MAX: usize = 8;

/// Threads that read ahead of a device.
pub(crate) fn readers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(READERS_MAX)
}

/// Puts rows of a part (by its index) into a buffer: row-major little-endian elements of the matrix's
/// type, nothing else. False when they cannot be read; the reader keeps the reason.
pub type ReadRows<'a> = dyn Fn(usize, Range<usize>, &mut Vec<u8>) -> bool + Sync + 'a;

/// Buffers that are not in use.
#[derive(Default)]
pub struct BandBuffers(Mutex<Vec<Vec<u8>>>);

impl BandBuffers {
    fn spare(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.0.lock().expect("invariant: nothing panics while it holds the spare buffers")
    }
}

/// Rows of one of the matrices that are packed together.
pub struct MatrixRows {
    /// Index of the matrix.
    pub matrix: usize,
    /// Its output rows.
    pub rows: Range<usize>,
    /// Bytes of each.
    pub row_bytes: usize,
}

/// Rows that have been read.
pub struct Band {
    /// Index of their matrix.
    pub matrix: usize,
    /// The first of them in it.
    pub first_row: usize,
    /// Row-major little-endian elements of the matrix's type.
    pub data: Vec<u8>,
}

/// [`MatrixRows`] cut into bands.
struct Part {
    matrix: usize,
    rows: Range<usize>,
    rows_per_band: usize,
    /// Bands of the parts before it.
    first_band: usize,
}

/// Rows of some matrices and how they are read.
pub struct Bands<'a> {
    parts: Vec<Part>,
    count: usize,
    read: &'a ReadRows<'a>,
    buffers: &'a BandBuffers,
    failed: AtomicBool,
}

impl<'a> Bands<'a> {
    /// All bands of `parts`, which share no row. `read` takes the index of a part and some of its rows.
    pub fn new(
        parts: impl IntoIterator<Item = MatrixRows>,
        read: &'a ReadRows<'a>,
        buffers: &'a BandBuffers,
    ) -> Self {
        let mut count = 0;
        let cut = |MatrixRows { matrix, rows, row_bytes }: MatrixRows| {
            let steps = BAND_BYTES / (row_bytes.max(1) * BAND_ROWS_STEP);
            let rows_per_band = steps.max(1) * BAND_ROWS_STEP;
            let first_band = count;
            if !rows.is_empty() {
                count += rows.end.div_ceil(rows_per_band) - rows.start / rows_per_band;
            }
            Part { matrix, rows, rows_per_band, first_band }
        };
        let parts = parts.into_iter().map(cut).collect();
        Self { parts, count, read, buffers, failed: AtomicBool::new(false) }
    }

    /// How many bands there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Reads band `index` and gives it to `pack`. Does nothing once a band could not be read.
    pub fn with_band(&self, index: usize, pack: impl FnOnce(&Band)) {
        if let Some(band) = self.take(index) {
            pack(&band);
            self.buffers.spare().push(band.data);
        }
    }

    /// Gives `pack` every band, on the calling thread, in any order, while up to `readers` (at least
    /// 1) threads read the next ones. For devices that pack on one thread.
    pub fn read_ahead(&self, readers: usize, mut pack: impl FnMut(&Band)) {
        let count = self.count;
        if count <= 1 {
            return (0..count).for_each(|index| self.with_band(index, &mut pack));
        }
        let next = AtomicUsize::new(0);
        let (sender, receiver) = sync_channel(readers);
        std::thread::scope(|scope| {
            for _ in 0..readers.min(count) {
                let (sender, next) = (sender.clone(), &next);
                scope.spawn(move || {
                    // Relaxed: the counter only deals out bands; the channel orders their contents.
                    let deal = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < count);
                    while let Some(band) = deal().and_then(|index| self.take(index)) {
                        if sender.send(band).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(sender);
            for band in receiver {
                pack(&band);
                self.buffers.spare().push(band.data);
            }
        });
    }

    /// Reads band `index`; `None` once a band could not be read.
    fn take(&self, index: usize) -> Option<Band> {
        // Relaxed: bands read after a failure do no harm.
        if self.failed.load(Ordering::Relaxed) {
            return None;
        }
        // The last that begins there or before: parts without rows come before the one that has the band.
        let number = self.parts.partition_point(|part| part.first_band <= index) - 1;
        let part = &self.parts[number];
        let from = (part.rows.start / part.rows_per_band + index - part.first_band) * part.rows_per_band;
        let rows = from.max(part.rows.start)..(from + part.rows_per_band).min(part.rows.end);
        let (matrix, first_row) = (part.matrix, rows.start);
        let mut data = self.buffers.spare().pop().unwrap_or_default();
        if (self.read)(number, rows, &mut data) {
            return Some(Band { matrix, first_row, data });
        }
        self.failed.store(true, Ordering::Relaxed);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW_BYTES: usize = 8 << 10;

    /// Rows whose bytes are the sum of their number and their part's.
    fn read(part: usize, rows: Range<usize>, out: &mut Vec<u8>) -> bool {
        out.clear();
        rows.for_each(|row| out.resize(out.len() + ROW_BYTES, (part + row) as u8));
        true
    }

    fn of_one(rows: Range<usize>) -> [MatrixRows; 1] {
        [MatrixRows { matrix: 0, rows, row_bytes: ROW_BYTES }]
    }

    #[test]
    fn every_row_arrives_once_and_bands_meet_at_whole_steps() {
        let buffers = BandBuffers::default();
        for rows in [0..0, 5..5, 3..4, 0..128, 7..1000, 130..390, 127..129] {
            for readers in [0, 1, 2, 5] {
                let bands = Bands::new(of_one(rows.clone()), &read, &buffers);
                let mut seen = vec![0; rows.len()];
                let mut pack = |band: &Band| {
                    let first = band.first_row;
                    assert!(first == rows.start || first.is_multiple_of(BAND_ROWS_STEP));
                    assert!(band.data.len() <= BAND_BYTES);
                    for (row, bytes) in band.data.chunks_exact(ROW_BYTES).enumerate() {
                        assert!(bytes.iter().all(|b| *b == (first + row) as u8));
                        seen[first + row - rows.start] += 1;
                    }
                };
                match readers {
                    0 => (0..bands.count()).for_each(|index| bands.with_band(index, &mut pack)),
                    _ => bands.read_ahead(readers, pack),
                }
                assert!(seen.iter().all(|n| *n == 1), "{rows:?} by {readers}: {seen:?}");
            }
        }
        assert!(buffers.spare().len() <= 2 * 5 + 1, "buffers come back");
    }

    #[test]
    fn parts_of_several_matrices_arrive_where_they_belong() {
        // (Matrix, rows): the second and the last part are empty, the third goes on with the first's matrix.
        let parts = [(0, 0..150), (0, 150..150), (0, 150..161), (1, 0..40), (2, 3..700), (2, 700..700)];
        let buffers = BandBuffers::default();
        for readers in [0, 1, 4] {
            let of = parts.clone().map(|(matrix, rows)| MatrixRows { matrix, rows, row_bytes: ROW_BYTES });
            let bands = Bands::new(of, &read, &buffers);
            assert_eq!(bands.count(), 2 + 1 + 1 + 6);
            let mut seen = [vec![0; 161], vec![0; 40], vec![0; 700]];
            let mut pack = |band: &Band| {
                for (row, bytes) in (band.first_row..).zip(band.data.chunks_exact(ROW_BYTES)) {
                    let holds = |(matrix, rows): &(usize, Range<usize>)| {
                        *matrix == band.matrix && rows.contains(&row)
                    };
                    let part = parts.iter().position(holds).expect("a row of a part");
                    assert_eq!(bytes[0], (part + row) as u8);
                    seen[band.matrix][row] += 1;
                }
            };
            match readers {
                0 => (0..bands.count()).for_each(|index| bands.with_band(index, &mut pack)),
                _ => bands.read_ahead(readers, pack),
            }
            let want = [vec![1; 161], vec![1; 40], [vec![0; 3], vec![1; 697]].concat()];
            assert_eq!(seen, want, "by {readers}");
        }
    }

    #[test]
    fn nothing_is_read_long_after_a_failure() {
        let buffers = BandBuffers::default();
        let reads = AtomicUsize::new(0);
        let fails = |part: usize, rows: Range<usize>, out: &mut Vec<u8>| {
            reads.fetch_add(1, Ordering::Relaxed);
            rows.start < 1280 && read(part, rows, out)
        };
        let bands = Bands::new(of_one(0..128_000), &fails, &buffers);
        bands.read_ahead(3, |band| assert!(band.first_row < 1280));
        assert!(reads.load(Ordering::Relaxed) <= 10 + 3);
    }
}
