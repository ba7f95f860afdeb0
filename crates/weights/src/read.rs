//! Reading slices of tensors.

use crate::dequant;
use crate::error::WeightsError;
use crate::files::{ModelFiles, RowOrder, Tensor};
use lockstep_core::DType;
use std::ops::Range;

/// Stored bytes that are read between two looks at the resident pages.
const PIECE_BYTES: usize = 4 << 20;

impl ModelFiles {
    /// Reads rows `rows` x columns `cols` of a matrix into `out`, which is cleared first.
    ///
    /// `out` gets `rows.len() * cols.len()` little-endian elements, row after row, of the returned
    /// type: f32, f16 and bf16 as stored, GGUF blocks as bf16 (nearest even). Leading dimensions of
    /// a tensor with more than two are flattened into rows. `cols` need not start or end on blocks.
    /// Rows of query and key projections come in Hugging Face order from either format.
    ///
    /// Memory: `out` plus at most about 12 MiB of mapped pages. A caller that copies `out` onwards
    /// should ask for a few MiB of rows at a time.
    ///
    /// Errors: the tensor is missing, of a type that cannot be read, a vector, or the ranges leave
    /// its shape.
    pub fn read_rows(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<DType, WeightsError> {
        let tensor = self.find(name)?;
        let (_, dtype) = self.readable(name, tensor)?;
        let info = &tensor.info;
        let inside = |range: &Range<usize>, len: usize| range.start <= range.end && range.end <= len;
        if info.shape.len() < 2 || !inside(&rows, info.rows()) || !inside(&cols, info.cols()) {
            let asked = format!("the matrix part rows {rows:?}, columns {cols:?}");
            return Err(WeightsError::OutOfRange { name: name.into(), asked, shape: info.shape.clone() });
        }
        out.clear();
        if cols.is_empty() {
            return Ok(dtype);
        }
        out.reserve_exact(rows.len() * cols.len() * dtype.size_bytes());
        let stored = &self.file_of(tensor).bytes()[tensor.bytes.clone()];
        let mut reader = RowReader::new(tensor, stored, cols);
        let rows_per_piece = (PIECE_BYTES / info.row_bytes().max(1)).max(1);
        for start in rows.clone().step_by(rows_per_piece) {
            let end = rows.end.min(start + rows_per_piece);
            for row in start..end {
                reader.append(row, out);
            }
            self.touch((end - start) * info.row_bytes());
        }
        Ok(dtype)
    }

    /// Reads elements `range` of a vector (a norm or a bias) as f32, exactly.
    ///
    /// Biases of query and key projections come in Hugging Face order from either format.
    ///
    /// Errors: the tensor is missing, of a type that cannot be read, a matrix, or the range leaves
    /// its shape.
    pub fn read_vector(&self, name: &str, range: Range<usize>) -> Result<Vec<f32>, WeightsError> {
        let tensor = self.find(name)?;
        let (kind, _) = self.readable(name, tensor)?;
        let info = &tensor.info;
        if info.shape.len() != 1 || range.start > range.end || range.end > info.cols() {
            let asked = format!("the vector part {range:?}");
            return Err(WeightsError::OutOfRange { name: name.into(), asked, shape: info.shape.clone() });
        }
        let mut values = vec![0.0; info.cols()];
        dequant::to_f32(kind, &self.file_of(tensor).bytes()[tensor.bytes.clone()], &mut values);
        self.touch(tensor.bytes.len());
        Ok(match tensor.order {
            RowOrder::AsStored => values[range].to_vec(),
            order => range.map(|i| values[order.stored_row(i)]).collect(),
        })
    }
}

/// Copies or unpacks one column range of one row after another.
struct RowReader<'a> {
    tensor: &'a Tensor,
    /// The tensor's bytes.
    stored: &'a [u8],
    /// Bytes within a row that hold the columns; whole blocks.
    row_part: Range<usize>,
    /// Where the columns lie among the unpacked elements of `row_part`.
    cut: Range<usize>,
    /// Unpacked elements of `row_part`; empty for plain floats.
    unpacked: Vec<f32>,
}

impl<'a> RowReader<'a> {
    fn new(tensor: &'a Tensor, stored: &'a [u8], cols: Range<usize>) -> Self {
        let kind = tensor.info.stored;
        let (len, bytes) = (kind.block_len(), kind.block_bytes());
        let (first, last) = (cols.start / len, cols.end.div_ceil(len).max(cols.start / len));
        let cut = cols.start - first * len..cols.end - first * len;
        let unpacked = if kind.is_quantised() { vec![0.0; (last - first) * len] } else { Vec::new() };
        Self { tensor, stored, row_part: first * bytes..last * bytes, cut, unpacked }
    }

    fn append(&mut self, row: usize, out: &mut Vec<u8>) {
        let info = &self.tensor.info;
        let start = self.tensor.order.stored_row(row) * info.row_bytes();
        let bytes = &self.stored[start + self.row_part.start..start + self.row_part.end];
        if info.stored.is_quantised() {
            dequant::to_f32(info.stored, bytes, &mut self.unpacked);
            dequant::append_bf16(&self.unpacked[self.cut.clone()], out);
        } else {
            out.extend_from_slice(bytes);
        }
    }
}
