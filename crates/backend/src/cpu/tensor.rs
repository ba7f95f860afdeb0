//! Activations, vectors and the raw views that kernels take of them.

use super::memory::{Arena, Region};
use crate::Result;

/// Row-major activations `[rows_max, cols]`, f32, without padding between rows.
pub struct CpuTensor {
    region: Region,
    rows_max: usize,
    cols: usize,
}

impl CpuTensor {
    pub(super) fn new(arena: &Arena, rows_max: usize, cols: usize) -> Result<Self> {
        let region = arena.region(rows_max * cols * size_of::<f32>(), "activations")?;
        Ok(Self { region, rows_max, cols })
    }

    /// Rows it can hold.
    pub fn rows_max(&self) -> usize {
        self.rows_max
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The first `rows` rows. Panics when there are fewer.
    pub fn rows(&self, rows: usize) -> &[f32] {
        &self.region.as_slice()[..rows * self.cols]
    }

    /// The first `rows` rows, to be written. Panics when there are fewer.
    pub fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        let cols = self.cols;
        &mut self.region.as_mut_slice()[..rows * cols]
    }

    /// A view of the first `rows` rows for kernels that read. Panics when there are fewer.
    pub(super) fn view(&self, rows: usize) -> RowsIn<'_> {
        RowsIn { data: self.rows(rows), cols: self.cols }
    }

    /// A view of the first `rows` rows for chunks that write. Panics when there are fewer.
    pub(super) fn view_mut(&mut self, rows: usize) -> RowsOut<'_> {
        let cols = self.cols;
        RowsOut::new(self.rows_mut(rows), cols)
    }
}

/// A vector of f32.
pub struct CpuVector(pub(super) Vec<f32>);

impl CpuVector {
    /// Its elements.
    pub fn values(&self) -> &[f32] {
        &self.0
    }
}

/// Rows that all threads may read.
#[derive(Clone, Copy)]
pub(super) struct RowsIn<'a> {
    pub data: &'a [f32],
    pub cols: usize,
}

impl<'a> RowsIn<'a> {
    /// Row `i`.
    pub(super) fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }
}

/// Rows whose disjoint parts are written by different threads.
#[derive(Clone, Copy)]
pub(super) struct RowsOut<'a> {
    start: *mut f32,
    len: usize,
    pub cols: usize,
    _borrow: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for an exclusive borrow of plain f32; `part` makes its users promise that
// threads touch disjoint parts.
unsafe impl Send for RowsOut<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowsOut<'_> {}

impl<'a> RowsOut<'a> {
    pub(super) fn new(data: &'a mut [f32], cols: usize) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), cols, _borrow: std::marker::PhantomData }
    }

    /// The rows from `first` on. Panics when there are fewer.
    pub(super) fn rows_from(self, first: usize) -> Self {
        let skip = first * self.cols;
        assert!(skip <= self.len, "row {first} lies inside the rows");
        // SAFETY: at most one past the end of the borrowed slice by the assertion.
        Self { start: unsafe { self.start.add(skip) }, len: self.len - skip, ..self }
    }

    /// Elements `from..from + len` of row `row`. Panics when they are outside.
    ///
    /// # Safety
    /// No other live slice, in any thread, overlaps this part.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part(&self, row: usize, from: usize, len: usize) -> &'a mut [f32] {
        let start = row * self.cols + from;
        assert!(from + len <= self.cols && start + len <= self.len, "part lies inside the rows");
        // SAFETY: inside the borrowed slice by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }

    /// Pointer to element `from` of row `row`, for kernels that write tiles over several rows.
    /// Panics when it is outside.
    pub(super) fn pointer(&self, row: usize, from: usize) -> *mut f32 {
        let start = row * self.cols + from;
        assert!(from < self.cols && start < self.len, "element lies inside the rows");
        // SAFETY: inside the borrowed slice by the assertion.
        unsafe { self.start.add(start) }
    }
}

/// Working memory of each thread, one equal part per thread.
pub(super) struct Scratch {
    region: Region,
    per_thread: usize,
}

impl Scratch {
    /// `per_thread` f32 for each of `threads` threads; resident once touched.
    pub(super) fn new(arena: &Arena, threads: usize, per_thread: usize) -> Result<Self> {
        let per_thread = per_thread.next_multiple_of(32);
        let region = arena.region(threads * per_thread * size_of::<f32>(), "workspace")?;
        Ok(Self { region, per_thread })
    }

    /// A view to hand to the chunks of one operation.
    pub(super) fn view(&mut self) -> RowsOut<'_> {
        let cols = self.per_thread;
        RowsOut::new(self.region.as_mut_slice(), cols)
    }
}
