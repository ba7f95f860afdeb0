//! Reading slices of tensors.

use crate::dequant;
use crate::error::WeightsError;
use crate::files::ModelFiles;
use crate::grouped::{Grouped, GroupedBytes, Membership};
use crate::storage::{StorageKind, TensorInfo};
use crate::tensor::{Form, RowOrder, Tensor};
use lockstep_core::{CODE_GROUP, CodeLayout, DType, QuantizeFormat, WeightType};
use std::ops::Range;

/// Elements that are quantised at a time, whole groups.
const QUANTISE_CHUNK: usize = 64 * CODE_GROUP;
/// Stored bytes that are read between two looks at the resident pages.
const PIECE_BYTES: usize = 4 << 20;

impl ModelFiles {
    /// Reads rows `rows` x columns `cols` of a matrix into `out`, which is cleared first.
    ///
    /// `out` gets `rows.len() * cols.len()` little-endian elements, row after row, of the returned
    /// type: f32, f16 and bf16 as stored, everything quantised as bf16, rounded once to nearest even
    /// from the f32 value that its format defines. Leading dimensions of a tensor with more than two
    /// are flattened into rows. `cols` need not start or end on blocks: a slice has the same bits as
    /// the slice of the whole. Rows of query and key projections come in Hugging Face order from
    /// either format.
    ///
    /// May be called by several threads at once, each with its own `out`; they share nothing but
    /// the count of resident pages.
    ///
    /// Memory: `out` plus at most about 12 MiB of mapped pages for all threads together. The 4-bit
    /// matrices of GPTQ and AWQ are stored with input features outside, so that any rows touch pages
    /// of the whole matrix: there the bound is 12 MiB plus the packed matrices being read. A caller
    /// that copies `out` onwards should ask for a few MiB of rows at a time.
    ///
    /// Errors: the tensor is missing, of a type that cannot be read, a vector, or the ranges leave
    /// its shape; a GPTQ matrix names a group that it does not have.
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
        check_part(name, info, &rows, &cols)?;
        out.clear();
        if cols.is_empty() || rows.is_empty() {
            return Ok(dtype);
        }
        out.reserve_exact(rows.len() * cols.len() * dtype.size_bytes());
        match &tensor.form {
            Form::Rows(order) => {
                let part = RowPart::new(info, cols);
                let stored = self.stored(&tensor.data);
                self.by_pieces(info, rows, |rows| part.append(*order, stored, rows, Unpack::Floats, out));
            }
            Form::Scaled(scales) => {
                let stored = (self.stored(&tensor.data), self.stored(&scales.data));
                self.by_pieces(info, rows, |rows| scales.append(info, stored, (rows, cols.clone()), out));
            }
            Form::Grouped(grouped) => self.read_grouped(tensor, grouped, (rows, cols), out)?,
        }
        Ok(dtype)
    }

    /// As [`read_rows`](Self::read_rows), but leaves the elements as codes: rows of groups in `layout`, each as
    /// [`CodeLayout::staged_group_bytes`] says.
    ///
    /// Errors: as there. Panics when the tensor has no codes ([`codes_of`](Self::codes_of)), `layout` does not hold them, or
    /// `cols` is not whole groups.
    pub fn read_codes(
        &self,
        name: &str,
        (rows, cols): (Range<usize>, Range<usize>),
        layout: CodeLayout,
        out: &mut Vec<u8>,
    ) -> Result<(), WeightsError> {
        let tensor = self.find(name)?;
        let info = &tensor.info;
        check_part(name, info, &rows, &cols)?;
        let Form::Rows(order) = &tensor.form else { unreachable!("{name} has no codes") };
        out.clear();
        out.reserve_exact(WeightType::Coded(layout).staged_bytes(rows.len() * cols.len()));
        let part = RowPart::new(info, cols);
        let stored = self.stored(&tensor.data);
        self.by_pieces(info, rows, |rows| part.append(*order, stored, rows, Unpack::Codes(layout), out));
        Ok(())
    }

    /// Calls `read` for a few MiB of rows at a time, so that resident pages stay few.
    fn by_pieces(&self, info: &TensorInfo, rows: Range<usize>, mut read: impl FnMut(Range<usize>)) {
        let rows_per_piece = (PIECE_BYTES / info.row_bytes().max(1)).max(1);
        for start in rows.clone().step_by(rows_per_piece) {
            let end = rows.end.min(start + rows_per_piece);
            read(start..end);
            self.touch((end - start) * info.row_bytes());
        }
    }

    fn read_grouped(
        &self,
        tensor: &Tensor,
        grouped: &Grouped,
        (rows, cols): (Range<usize>, Range<usize>),
        out: &mut Vec<u8>,
    ) -> Result<(), WeightsError> {
        let bytes = GroupedBytes {
            words: self.stored(&tensor.data),
            zeros: self.stored(&grouped.zeros),
            scales: self.stored(&grouped.scales),
            listed: match &grouped.membership {
                Membership::Even(_) => None,
                Membership::Listed(piece) => Some(self.stored(piece)),
            },
        };
        let read_bytes = rows.len() * tensor.info.row_bytes();
        out.resize(rows.len() * cols.len() * DType::Bf16.size_bytes(), 0);
        grouped
            .read(&tensor.info, &bytes, (rows, cols), out)
            .map_err(|fault| fault.at(self.file_of(tensor).path()))?;
        self.touch(read_bytes);
        Ok(())
    }

    /// Reads elements `range` of a vector (a norm or a bias) as f32, exactly.
    ///
    /// Biases of query and key projections come in Hugging Face order from either format. May be
    /// called by several threads at once.
    ///
    /// Errors: the tensor is missing, of a type that cannot be read, a matrix, or the range leaves
    /// its shape.
    pub fn read_vector(&self, name: &str, range: Range<usize>) -> Result<Vec<f32>, WeightsError> {
        let tensor = self.find(name)?;
        let (kind, _) = self.readable(name, tensor)?;
        let info = &tensor.info;
        let order = match tensor.form {
            Form::Rows(order) if info.shape.len() == 1 => Some(order),
            _ => None,
        };
        let Some(order) = order.filter(|_| range.start <= range.end && range.end <= info.cols()) else {
            let asked = format!("the vector part {range:?}");
            return Err(WeightsError::OutOfRange { name: name.into(), asked, shape: info.shape.clone() });
        };
        let mut values = vec![0.0; info.cols()];
        dequant::to_f32(kind, self.stored(&tensor.data), &mut values);
        self.touch(tensor.data.bytes.len());
        Ok(match order {
            RowOrder::AsStored => values[range].to_vec(),
            order => range.map(|i| values[order.stored_row(i)]).collect(),
        })
    }
}

/// Quantises little-endian elements of `dtype`, whole groups, and gives them in `layout`, group after group as
/// [`CodeLayout::staged_group_bytes`] says.
///
/// Panics when the elements are not whole groups, or `layout` does not hold the format's codes.
pub fn quantise(
    format: QuantizeFormat,
    (dtype, elements): (DType, &[u8]),
    layout: CodeLayout,
    out: &mut Vec<u8>,
) {
    let kind = match dtype {
        DType::F32 => StorageKind::F32,
        DType::F16 => StorageKind::F16,
        DType::Bf16 => StorageKind::Bf16,
    };
    out.clear();
    let mut values = [0.0; QUANTISE_CHUNK];
    for elements in elements.chunks(QUANTISE_CHUNK * dtype.size_bytes()) {
        let values = &mut values[..elements.len() / dtype.size_bytes()];
        dequant::to_f32(kind, elements, values);
        dequant::codes::append_quantised(format, values, layout, out);
    }
}

/// Fails unless `rows` and `cols` are part of a matrix.
fn check_part(
    name: &str,
    info: &TensorInfo,
    rows: &Range<usize>,
    cols: &Range<usize>,
) -> Result<(), WeightsError> {
    let inside = |range: &Range<usize>, len: usize| range.start <= range.end && range.end <= len;
    if info.shape.len() < 2 || !inside(rows, info.rows()) || !inside(cols, info.cols()) {
        let asked = format!("the matrix part rows {rows:?}, columns {cols:?}");
        return Err(WeightsError::OutOfRange { name: name.into(), asked, shape: info.shape.clone() });
    }
    Ok(())
}

/// What blocks become.
#[derive(Clone, Copy)]
enum Unpack {
    /// Plain elements as they are, blocks as bf16.
    Floats,
    /// Groups of codes.
    Codes(CodeLayout),
}

/// One column range of every row.
struct RowPart {
    kind: StorageKind,
    /// Bytes of a whole row.
    row_bytes: usize,
    /// Bytes within a row that hold the columns; whole blocks.
    bytes: Range<usize>,
    /// Where the columns lie among the elements of `bytes`.
    cut: Range<usize>,
    /// The columns are all elements of the row, so that neighbouring rows are one run.
    whole: bool,
}

impl RowPart {
    fn new(info: &TensorInfo, cols: Range<usize>) -> Self {
        let kind = info.stored;
        let (len, bytes) = (kind.block_len(), kind.block_bytes());
        let (first, last) = (cols.start / len, cols.end.div_ceil(len));
        Self {
            kind,
            row_bytes: info.row_bytes(),
            bytes: first * bytes..last * bytes,
            cut: cols.start - first * len..cols.end - first * len,
            whole: cols.len() == info.cols(),
        }
    }

    /// Copies or unpacks `rows` from the tensor's bytes `stored`.
    fn append(&self, order: RowOrder, stored: &[u8], rows: Range<usize>, unpack: Unpack, out: &mut Vec<u8>) {
        if self.whole && order == RowOrder::AsStored {
            let run = &stored[rows.start * self.row_bytes..rows.end * self.row_bytes];
            return self.append_run(run, 0..rows.len() * self.cut.len(), unpack, out);
        }
        for row in rows {
            let row = &stored[order.stored_row(row) * self.row_bytes..];
            self.append_run(&row[self.bytes.clone()], self.cut.clone(), unpack, out);
        }
    }

    fn append_run(&self, bytes: &[u8], cut: Range<usize>, unpack: Unpack, out: &mut Vec<u8>) {
        match unpack {
            Unpack::Codes(layout) => dequant::codes::append(self.kind, bytes, cut, layout, out),
            Unpack::Floats if self.kind.is_quantised() => {
                dequant::append_bf16(self.kind, bytes, cut, out);
            }
            Unpack::Floats => out.extend_from_slice(bytes),
        }
    }
}
