//! Rows of a matrix on their way from a file to the device, in bands of about a MiB.
//!
//! A band is read (which may mean unpacking or converting) into a buffer and packed from there.
//! **Invariants:** a row belongs to one band; bands meet at multiples of [`BAND_ROWS_STEP`] rows of
//! the matrix, so that threads may pack different bands at once; buffers are as many as bands are
//! under way, whatever the size of the matrix. What comes out does not depend on the order of bands.
//!
//! Made by the model's loader, used by [`crate::Backend::pack_bands`].

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, MutexGuard};

/// Rows of the matrix at multiples of which bands meet; what backends store together is no wider.
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

/// Puts rows of the matrix into a buffer: row-major little-endian elements of the matrix's type,
/// nothing else. False when they cannot be read; the reader keeps the reason.
pub type ReadRows<'a> = dyn Fn(Range<usize>, &mut Vec<u8>) -> bool + Sync + 'a;

/// Buffers that are not in use.
#[derive(Default)]
pub struct BandBuffers(Mutex<Vec<Vec<u8>>>);

impl BandBuffers {
    fn spare(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.0.lock().expect("invariant: nothing panics while it holds the spare buffers")
    }
}

/// Rows of one matrix and how they are read.
pub struct Bands<'a> {
    rows: Range<usize>,
    rows_per_band: usize,
    read: &'a ReadRows<'a>,
    buffers: &'a BandBuffers,
    failed: AtomicBool,
}

impl<'a> Bands<'a> {
    /// Output rows `rows` of a matrix, of `row_bytes` bytes each.
    pub fn new(
        rows: Range<usize>,
        row_bytes: usize,
        read: &'a ReadRows<'a>,
        buffers: &'a BandBuffers,
    ) -> Self {
        let steps = BAND_BYTES / (row_bytes.max(1) * BAND_ROWS_STEP);
        let rows_per_band = steps.max(1) * BAND_ROWS_STEP;
        Self { rows, rows_per_band, read, buffers, failed: AtomicBool::new(false) }
    }

    /// The rows of all bands.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// How many bands there are.
    pub fn count(&self) -> usize {
        match self.rows.is_empty() {
            true => 0,
            false => self.rows.end.div_ceil(self.rows_per_band) - self.rows.start / self.rows_per_band,
        }
    }

    /// Reads band `index` and gives `pack` its first row and its elements. Does nothing once a band
    /// could not be read.
    pub fn with_band(&self, index: usize, pack: impl FnOnce(usize, &[u8])) {
        if let Some((first_row, buffer)) = self.take(index) {
            pack(first_row, &buffer);
            self.buffers.spare().push(buffer);
        }
    }

    /// Gives `pack` every band, on the calling thread, in any order, while up to `readers` (at least
    /// 1) threads read the next ones. For devices that pack on one thread.
    pub fn read_ahead(&self, readers: usize, mut pack: impl FnMut(usize, &[u8])) {
        let count = self.count();
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
            for (first_row, buffer) in receiver {
                pack(first_row, &buffer);
                self.buffers.spare().push(buffer);
            }
        });
    }

    /// Reads band `index`; `None` once a band could not be read.
    fn take(&self, index: usize) -> Option<(usize, Vec<u8>)> {
        // Relaxed: bands read after a failure do no harm.
        if self.failed.load(Ordering::Relaxed) {
            return None;
        }
        let from = (self.rows.start / self.rows_per_band + index) * self.rows_per_band;
        let rows = from.max(self.rows.start)..(from + self.rows_per_band).min(self.rows.end);
        let first_row = rows.start;
        let mut buffer = self.buffers.spare().pop().unwrap_or_default();
        if (self.read)(rows, &mut buffer) {
            return Some((first_row, buffer));
        }
        self.failed.store(true, Ordering::Relaxed);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW_BYTES: usize = 8 << 10;

    /// Rows whose bytes are their number.
    fn read(rows: Range<usize>, out: &mut Vec<u8>) -> bool {
        out.clear();
        rows.for_each(|row| out.resize(out.len() + ROW_BYTES, row as u8));
        true
    }

    #[test]
    fn every_row_arrives_once_and_bands_meet_at_whole_steps() {
        let buffers = BandBuffers::default();
        for rows in [0..0, 5..5, 3..4, 0..128, 7..1000, 130..390, 127..129] {
            for readers in [0, 1, 2, 5] {
                let bands = Bands::new(rows.clone(), ROW_BYTES, &read, &buffers);
                let mut seen = vec![0; rows.len()];
                let mut pack = |first: usize, data: &[u8]| {
                    assert!(first == rows.start || first.is_multiple_of(BAND_ROWS_STEP));
                    assert!(data.len() <= BAND_BYTES);
                    for (row, bytes) in data.chunks_exact(ROW_BYTES).enumerate() {
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
    fn nothing_is_read_long_after_a_failure() {
        let buffers = BandBuffers::default();
        let reads = AtomicUsize::new(0);
        let fails = |rows: Range<usize>, out: &mut Vec<u8>| {
            reads.fetch_add(1, Ordering::Relaxed);
            rows.start < 1280 && read(rows, out)
        };
        let bands = Bands::new(0..128_000, ROW_BYTES, &fails, &buffers);
        bands.read_ahead(3, |first, _| assert!(first < 1280));
        assert!(reads.load(Ordering::Relaxed) <= 10 + 3);
    }
}
