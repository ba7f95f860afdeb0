//! Reads a rank's slices of a checkpoint into packed weights.
//!
//! Rows arrive in bands of a few MiB, so that a rank needs little memory beyond its shard, and
//! only the rank's own rows and columns are read. Every name that a layer asks for is recorded;
//! what nobody asked for is reported once.

use crate::Result;
use half::{bf16, f16};
use lockstep_backend::{Backend, LinearSpec};
use lockstep_core::{DType, ModelConfig, ParallelInfo};
use lockstep_weights::ModelFiles;
use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;

/// Bytes of one band of rows: large enough to stream, small against any shard.
const BAND_BYTES: usize = 2 << 20;

/// Told how much of the model is loaded: parts done, parts in all (layers, embedding, head).
pub type Progress<'a> = &'a dyn Fn(usize, usize);

/// Loads one rank's part of one checkpoint.
pub struct Loader<'a, B: Backend> {
    files: &'a ModelFiles,
    backend: &'a B,
    parallel: ParallelInfo,
    dtype: Option<DType>,
    progress: Progress<'a>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    used: HashSet<String>,
    packed_bytes: u64,
    raw: Vec<u8>,
    converted: Vec<u8>,
}

/// A run of rows of one tensor inside a fused matrix.
pub struct Part {
    /// Name in the checkpoint.
    pub name: String,
    /// Global rows of the whole tensor, checked against the file.
    pub global_rows: usize,
    /// The rows of this rank.
    pub rows: Range<usize>,
}

/// A packed matrix made of parts, see [`Loader::linear`].
pub struct MatrixPlan {
    /// Parts in row order.
    pub parts: Vec<Part>,
    /// Rows to leave zero after the parts (vocabulary padding).
    pub padding_rows: usize,
    /// Global columns of every part, checked against the file.
    pub global_cols: usize,
    /// The columns of this rank.
    pub cols: Range<usize>,
    /// Order of the sum over `cols`, see [`LinearSpec::leaves`].
    pub leaves: Vec<usize>,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader for the rank at `parallel`. `dtype` converts every matrix (`--dtype`); by default
    /// a matrix keeps its file's type, or f32 where fused parts differ.
    pub fn new(
        files: &'a ModelFiles,
        backend: &'a B,
        parallel: ParallelInfo,
        dtype: Option<DType>,
        progress: Progress<'a>,
    ) -> Self {
        Self { files, backend, parallel, dtype, progress, state: RefCell::default() }
    }

    /// The model being loaded.
    pub fn config(&self) -> &'a ModelConfig {
        self.files.config()
    }

    /// Where this rank stands.
    pub fn parallel(&self) -> ParallelInfo {
        self.parallel
    }

    /// The device that packs.
    pub fn backend(&self) -> &'a B {
        self.backend
    }

    /// Tells the user that `done` of `total` parts are loaded.
    pub fn report(&self, done: usize, total: usize) {
        (self.progress)(done, total);
    }

    /// Bytes of packed weights so far.
    pub fn packed_bytes(&self) -> u64 {
        self.state.borrow().packed_bytes
    }

    /// One sentence about tensors of the file that no layer asked for.
    pub fn unused_report(&self) -> Option<String> {
        self.files.unused_report(&self.state.borrow().used)
    }

    /// A replicated or sliced vector: elements `range` of a tensor of `global_len`.
    pub fn vector(&self, name: &str, global_len: usize, range: Range<usize>) -> Result<B::Vector> {
        self.files.expect_shape(name, &[global_len])?;
        let values = self.files.read_vector(name, range)?;
        let mut state = self.state.borrow_mut();
        state.used.insert(name.to_owned());
        state.packed_bytes += (values.len() * size_of::<f32>()) as u64;
        Ok(self.backend.vector(&values)?)
    }

    /// Several slices of vectors joined into one (the bias of a fused matrix).
    pub fn fused_vector(&self, parts: &[Part]) -> Result<B::Vector> {
        let mut values = Vec::new();
        for part in parts {
            self.files.expect_shape(&part.name, &[part.global_rows])?;
            values.extend(self.files.read_vector(&part.name, part.rows.clone())?);
            self.state.borrow_mut().used.insert(part.name.clone());
        }
        self.state.borrow_mut().packed_bytes += (values.len() * size_of::<f32>()) as u64;
        Ok(self.backend.vector(&values)?)
    }

    /// Reads and packs a matrix, band by band.
    ///
    /// Errors name the tensor that is missing or has the wrong shape.
    pub fn linear(&self, plan: MatrixPlan) -> Result<B::Linear> {
        for part in &plan.parts {
            self.files.expect_shape(&part.name, &[part.global_rows, plan.global_cols])?;
        }
        let dtype = self.matrix_dtype(&plan.parts);
        let rows: usize = plan.parts.iter().map(|p| p.rows.len()).sum();
        let spec = LinearSpec {
            out_features: rows + plan.padding_rows,
            in_features: plan.cols.len(),
            dtype,
            leaves: plan.leaves.clone(),
        };
        let mut linear = self.backend.linear(spec)?;
        let mut first_row = 0;
        for part in &plan.parts {
            self.pack_part(&mut linear, part, &plan.cols, dtype, first_row)?;
            first_row += part.rows.len();
            self.files.release(&part.name);
            self.state.borrow_mut().used.insert(part.name.clone());
        }
        Ok(linear)
    }

    fn pack_part(
        &self,
        linear: &mut B::Linear,
        part: &Part,
        cols: &Range<usize>,
        dtype: DType,
        first_row: usize,
    ) -> Result<()> {
        let band_rows = (BAND_BYTES / (cols.len().max(1) * size_of::<f32>())).max(1);
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let mut row = part.rows.start;
        while row < part.rows.end {
            let end = part.rows.end.min(row + band_rows);
            let stored = self.files.read_rows(&part.name, row..end, cols.clone(), &mut state.raw)?;
            let band = convert(&state.raw, stored, dtype, &mut state.converted);
            self.backend.pack_rows(linear, first_row + row - part.rows.start, band);
            state.packed_bytes += band.len() as u64;
            row = end;
        }
        Ok(())
    }

    /// The common type of fused parts: theirs if they agree, else f32, which holds both.
    fn matrix_dtype(&self, parts: &[Part]) -> DType {
        if let Some(dtype) = self.dtype {
            return dtype;
        }
        let mut types = parts.iter().filter_map(|p| self.files.dtype_of(&p.name));
        let first = types.next().unwrap_or(DType::F32);
        if types.all(|t| t == first) { first } else { DType::F32 }
    }
}

/// `raw` as elements of `to`; narrowing rounds to nearest even.
fn convert<'b>(raw: &'b [u8], from: DType, to: DType, buffer: &'b mut Vec<u8>) -> &'b [u8] {
    if from == to {
        return raw;
    }
    buffer.clear();
    let widened = raw.chunks_exact(from.size_bytes()).map(|e| match from {
        DType::F32 => f32::from_le_bytes([e[0], e[1], e[2], e[3]]),
        DType::F16 => f16::from_le_bytes([e[0], e[1]]).to_f32(),
        DType::Bf16 => bf16::from_le_bytes([e[0], e[1]]).to_f32(),
    });
    match to {
        DType::F32 => widened.for_each(|v| buffer.extend_from_slice(&v.to_le_bytes())),
        DType::F16 => widened.for_each(|v| buffer.extend_from_slice(&f16::from_f32(v).to_le_bytes())),
        DType::Bf16 => widened.for_each(|v| buffer.extend_from_slice(&bf16::from_f32(v).to_le_bytes())),
    }
    buffer
}
