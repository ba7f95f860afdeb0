//! Reads a rank's parts of stored matrices band by band, in the types that the rank keeps.
//!
//! Reading may mean dequantising, which takes longer than packing, so the backend reads bands on its
//! own threads. **Invariant:** memory beside the packed matrices is a few bands (two buffers for each
//! thread that reads), whatever the size of the matrices.

use crate::Result;
use crate::source::WeightSource;
use half::{bf16, f16};
use lockstep_backend::bands::{BandBuffers, MatrixRows};
use lockstep_backend::{Backend, Bands};
use lockstep_core::{DType, QuantizeFormat, WeightMode, WeightType};
use lockstep_weights::quantise;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// The part of a stored matrix that a rank keeps, the type it keeps, and where.
pub(crate) struct Slice<'a> {
    pub tensor: &'a str,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    pub weight_type: WeightType,
    /// Index of the packed matrix among those that are packed together, and the first of its rows.
    pub matrix: usize,
    pub first_row: usize,
}

impl Slice<'_> {
    fn row_bytes(&self) -> usize {
        self.weight_type.staged_bytes(self.columns.len())
    }

    /// Bytes of all its rows as they are read.
    pub fn bytes(&self) -> usize {
        self.rows.len() * self.row_bytes()
    }

    /// Bytes of all its rows in memory.
    pub fn packed_bytes(&self) -> usize {
        self.weight_type.packed_bytes(self.rows.len() * self.columns.len())
    }
}

/// Reads slices of one source.
pub(crate) struct BandReader<'a> {
    source: &'a dyn WeightSource,
    /// What floats become where the rank keeps codes.
    quantize: Option<QuantizeFormat>,
    bands: BandBuffers,
    /// Buffers for elements as stored, where the rank keeps another type; not in use.
    stored: Mutex<Vec<Vec<u8>>>,
}

impl<'a> BandReader<'a> {
    pub fn new(source: &'a dyn WeightSource, mode: WeightMode) -> Self {
        let quantize = match mode {
            WeightMode::Quantize(format) => Some(format),
            _ => None,
        };
        Self { source, quantize, bands: BandBuffers::default(), stored: Mutex::default() }
    }

    /// Packs `slices` into `linears`; gives the bytes read.
    ///
    /// Stops at an error of the source, which names the tensor.
    pub fn pack<B: Backend>(
        &self,
        backend: &B,
        linears: &mut [B::Linear],
        slices: &[Slice<'_>],
    ) -> Result<usize> {
        let (read_bytes, error) = (AtomicUsize::new(0), Mutex::new(None));
        let read = |index: usize, rows: Range<usize>, band: &mut Vec<u8>| {
            let slice: &Slice<'_> = &slices[index];
            let to_stored = |row: usize| slice.rows.start + row - slice.first_row;
            let result = self.read(slice, to_stored(rows.start)..to_stored(rows.end), band);
            if let Err(e) = result {
                error.lock().expect("invariant: nothing panics while it holds the error").get_or_insert(e);
                return false;
            }
            // Relaxed: read after all threads are done.
            read_bytes.fetch_add(band.len(), Ordering::Relaxed);
            true
        };
        let parts = slices.iter().map(|slice| MatrixRows {
            matrix: slice.matrix,
            rows: slice.first_row..slice.first_row + slice.rows.len(),
            row_bytes: slice.row_bytes(),
        });
        backend.pack_bands(linears, &Bands::new(parts, &read, &self.bands));
        match error.into_inner().expect("invariant: nothing panics while it holds the error") {
            Some(error) => Err(error),
            None => Ok(read_bytes.into_inner()),
        }
    }

    fn read(&self, slice: &Slice<'_>, rows: Range<usize>, band: &mut Vec<u8>) -> Result<()> {
        let (tensor, columns) = (slice.tensor, slice.columns.clone());
        match slice.weight_type {
            WeightType::Coded(layout) if self.source.codes_of(tensor).is_some() => {
                return self.source.read_codes(tensor, rows, columns, layout, band);
            }
            WeightType::Float(dtype) if self.source.dtype_of(tensor) == Some(dtype) => {
                self.source.read_rows(tensor, rows, columns, band)?;
                return Ok(());
            }
            _ => {}
        }
        let mut raw = self.stored().pop().unwrap_or_default();
        let stored = self.source.read_rows(tensor, rows, columns, &mut raw)?;
        match slice.weight_type {
            WeightType::Float(dtype) => convert(&raw, stored, dtype, band),
            WeightType::Coded(layout) => {
                let format = self.quantize.expect("invariant: floats become codes when somebody asks for it");
                quantise(format, (stored, &raw), layout, band);
            }
        }
        self.stored().push(raw);
        Ok(())
    }

    fn stored(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.stored.lock().expect("invariant: nothing panics while it holds the spare buffers")
    }
}

/// `raw` as elements of another type; narrowing rounds to nearest even.
fn convert(raw: &[u8], from: DType, to: DType, out: &mut Vec<u8>) {
    let f32_of = f32::from_le_bytes;
    let f16_of = |e| f16::from_le_bytes(e).to_f32();
    let bf16_of = |e| bf16::from_le_bytes(e).to_f32();
    let to_f16 = |v| f16::from_f32(v).to_le_bytes();
    let to_bf16 = |v| bf16::from_f32(v).to_le_bytes();
    match (from, to) {
        (DType::F32, DType::F16) => map_elements(raw, out, |e| to_f16(f32_of(e))),
        (DType::F32, DType::Bf16) => map_elements(raw, out, |e| to_bf16(f32_of(e))),
        (DType::F16, DType::F32) => map_elements(raw, out, |e| f16_of(e).to_le_bytes()),
        (DType::F16, DType::Bf16) => map_elements(raw, out, |e| to_bf16(f16_of(e))),
        (DType::Bf16, DType::F32) => map_elements(raw, out, |e| bf16_of(e).to_le_bytes()),
        (DType::Bf16, DType::F16) => map_elements(raw, out, |e| to_f16(bf16_of(e))),
        (DType::F32, DType::F32) | (DType::F16, DType::F16) | (DType::Bf16, DType::Bf16) => {
            raw.clone_into(out);
        }
    }
}

/// One loop for each pair of types, with nothing in it that keeps it from vector registers.
fn map_elements<const N: usize, const M: usize>(
    raw: &[u8],
    out: &mut Vec<u8>,
    f: impl Fn([u8; N]) -> [u8; M],
) {
    let (elements, rest) = raw.as_chunks::<N>();
    assert!(rest.is_empty(), "invariant: a source gives whole elements");
    out.resize(elements.len() * M, 0);
    for (place, element) in out.as_chunks_mut::<M>().0.iter_mut().zip(elements) {
        *place = f(*element);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelError;
    use crate::source::missing;
    use lockstep_backend::LinearSpec;
    use lockstep_backend::cpu::{CpuBackend, CpuOptions};
    use lockstep_core::ModelConfig;
    use std::collections::HashSet;

    /// A matrix of f32 whose elements are their row; rows from `broken` on cannot be read.
    struct Rows {
        broken: usize,
    }

    impl WeightSource for Rows {
        fn config(&self) -> &ModelConfig {
            unreachable!("not asked by the band reader")
        }
        fn dtype_of(&self, _: &str) -> Option<DType> {
            Some(DType::F32)
        }
        fn expect_shape(&self, _: &str, _: &[usize]) -> Result<()> {
            Ok(())
        }
        fn read_rows(&self, t: &str, r: Range<usize>, c: Range<usize>, out: &mut Vec<u8>) -> Result<DType> {
            if r.end > self.broken {
                return Err(missing(t, "nothing").into());
            }
            out.clear();
            for row in r {
                c.clone().for_each(|_| out.extend_from_slice(&(row as f32).to_le_bytes()));
            }
            Ok(DType::F32)
        }
        fn read_vector(&self, _: &str, _: Range<usize>) -> Result<Vec<f32>> {
            Ok(Vec::new())
        }
        fn release(&self, _: &str) {}
        fn unused_report(&self, _: &HashSet<String>) -> Option<String> {
            None
        }
    }

    const COLUMNS: usize = 1024;

    /// Packs `rows` as rows from `first_row` of a matrix and gives the first element of each row of it.
    fn pack(threads: usize, first_row: usize, rows: Range<usize>, dtype: DType) -> Vec<f32> {
        let mut backend = CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() }).unwrap();
        let out_features = first_row + rows.len();
        let spec = LinearSpec::single_leaf(out_features, COLUMNS, dtype);
        let mut linears = [backend.linear(spec).unwrap()];
        let (source, weight_type) = (Rows { broken: usize::MAX }, dtype.into());
        let slice =
            Slice { tensor: "x", rows: rows.clone(), columns: 0..COLUMNS, weight_type, matrix: 0, first_row };
        let bytes =
            BandReader::new(&source, WeightMode::AsStored).pack(&backend, &mut linears, &[slice]).unwrap();
        assert_eq!(bytes, rows.len() * COLUMNS * dtype.size_bytes());
        let [linear] = linears;
        let mut out = backend.tensor(out_features, COLUMNS).unwrap();
        let ids: Vec<u32> = (0..out_features as u32).collect();
        backend.embed(&linear, 0, &ids, &mut out);
        let all = backend.read(&out, out_features).unwrap().into_owned();
        assert!(all.chunks_exact(COLUMNS).all(|row| row.iter().all(|v| *v == row[0])));
        all.chunks_exact(COLUMNS).map(|row| row[0]).collect()
    }

    #[test]
    fn every_row_lands_in_its_place_whatever_the_threads_and_types() {
        for threads in [1, 3] {
            for (first_row, rows, dtype) in [
                (0, 3..4, DType::F32),
                (0, 7..1500, DType::F32),
                (37, 0..1500, DType::Bf16),
                (16, 5..900, DType::F16),
            ] {
                let rounded = |v: f32| match dtype {
                    DType::F32 => v,
                    DType::F16 => f16::from_f32(v).to_f32(),
                    DType::Bf16 => bf16::from_f32(v).to_f32(),
                };
                let zeros = std::iter::repeat_n(0.0, first_row);
                let want: Vec<f32> = zeros.chain(rows.clone().map(|row| rounded(row as f32))).collect();
                assert_eq!(pack(threads, first_row, rows, dtype), want, "{threads} threads, {dtype:?}");
            }
        }
    }

    #[test]
    fn the_first_error_ends_the_reading() {
        let backend = CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
        let dtype = DType::F32;
        let spec = LinearSpec::single_leaf(5000, COLUMNS, dtype);
        let mut linears = [backend.linear(spec).unwrap()];
        let source = Rows { broken: 2000 };
        let weight_type = dtype.into();
        let slice =
            Slice { tensor: "x", rows: 0..5000, columns: 0..COLUMNS, weight_type, matrix: 0, first_row: 0 };
        let error = BandReader::new(&source, WeightMode::AsStored)
            .pack(&backend, &mut linears, &[slice])
            .unwrap_err();
        assert!(matches!(error, ModelError::Weights(_)) && error.to_string().contains('x'), "{error}");
    }

    #[test]
    fn conversions_between_all_types() {
        let values = [0.0f32, -1.5, 0.333_333_34, 1e-30, 65_504.0, f32::INFINITY];
        let encode = |dtype: DType| -> Vec<u8> {
            let bytes = |v: &f32| match dtype {
                DType::F32 => v.to_le_bytes().to_vec(),
                DType::F16 => f16::from_f32(*v).to_le_bytes().to_vec(),
                DType::Bf16 => bf16::from_f32(*v).to_le_bytes().to_vec(),
            };
            values.iter().flat_map(bytes).collect()
        };
        let mut out = vec![7; 100];
        for to in [DType::F32, DType::F16, DType::Bf16] {
            convert(&encode(DType::F32), DType::F32, to, &mut out);
            assert_eq!(out, encode(to), "{to:?}");
        }
        // What a narrow type holds comes back from f32 unchanged.
        for from in [DType::F16, DType::Bf16] {
            let mut wide = Vec::new();
            convert(&encode(from), from, DType::F32, &mut wide);
            convert(&wide, DType::F32, from, &mut out);
            assert_eq!(out, encode(from), "{from:?}");
        }
    }
}
