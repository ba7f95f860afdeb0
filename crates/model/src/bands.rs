//! Reads bands of matrix rows ahead of the packer, on several threads.
//!
//! Reading may mean dequantising, which takes longer than packing; packing needs the one thread
//! that owns the matrix. **Invariant:** at most `2 * readers + 1` bands exist at once, whatever the
//! size of the matrix, and the packed result does not depend on the order in which bands arrive.

use crate::Result;
use crate::source::WeightSource;
use half::{bf16, f16};
use lockstep_core::DType;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;

/// Bytes of one band of rows: large enough to stream, small against any shard.
const BAND_BYTES: usize = 2 << 20;

/// The part of a stored matrix that a rank keeps, and the type it keeps.
pub(crate) struct Slice<'a> {
    pub tensor: &'a str,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    pub dtype: DType,
}

/// Reads slices of one source.
pub(crate) struct BandReader<'a> {
    source: &'a dyn WeightSource,
    readers: usize,
    /// Buffers that are not in use.
    spare: Mutex<Vec<Buffers>>,
}

#[derive(Default)]
struct Buffers {
    /// As the source gave it.
    raw: Vec<u8>,
    /// In the type that the rank keeps.
    band: Vec<u8>,
}

impl<'a> BandReader<'a> {
    /// `readers` is at least 1.
    pub fn new(source: &'a dyn WeightSource, readers: usize) -> Self {
        Self { source, readers, spare: Mutex::default() }
    }

    /// Calls `pack` once for each band of `slice`, in any order, with the band's first row relative
    /// to the slice and its elements.
    ///
    /// Stops at the first error of the source.
    pub fn for_each(&self, slice: &Slice<'_>, mut pack: impl FnMut(usize, &[u8])) -> Result<()> {
        let band_rows = (BAND_BYTES / (slice.columns.len().max(1) * size_of::<f32>())).max(1);
        let bands = slice.rows.len().div_ceil(band_rows);
        let read = |index: usize| -> Result<(usize, Buffers)> {
            let first = index * band_rows;
            let rows = slice.rows.start + first..slice.rows.end.min(slice.rows.start + first + band_rows);
            Ok((first, self.read(slice, rows)?))
        };
        let mut pack_band = |(first, buffers): (usize, Buffers)| {
            pack(first, &buffers.band);
            self.spare().push(buffers);
        };
        if bands <= 1 {
            return if bands == 1 { read(0).map(pack_band) } else { Ok(()) };
        }
        let next = AtomicUsize::new(0);
        let readers = self.readers.min(bands);
        let (sender, receiver) = sync_channel(readers);
        std::thread::scope(|scope| {
            for _ in 0..readers {
                let (sender, next, read) = (sender.clone(), &next, &read);
                scope.spawn(move || {
                    // Relaxed: the counter only deals out bands; the channel orders their contents.
                    let deal = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < bands);
                    while let Some(index) = deal() {
                        if sender.send(read(index)).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(sender);
            // An error drops the receiver, which ends the readers at their next band.
            receiver.into_iter().try_for_each(|band| band.map(&mut pack_band))
        })
    }

    fn read(&self, slice: &Slice<'_>, rows: Range<usize>) -> Result<Buffers> {
        let mut buffers = self.spare().pop().unwrap_or_default();
        let stored = self.source.read_rows(slice.tensor, rows, slice.columns.clone(), &mut buffers.raw)?;
        if stored == slice.dtype {
            std::mem::swap(&mut buffers.raw, &mut buffers.band);
        } else {
            convert(&buffers.raw, stored, slice.dtype, &mut buffers.band);
        }
        Ok(buffers)
    }

    fn spare(&self) -> std::sync::MutexGuard<'_, Vec<Buffers>> {
        self.spare.lock().expect("invariant: nothing panics while it holds the spare buffers")
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

    fn slice(rows: Range<usize>, dtype: DType) -> Slice<'static> {
        Slice { tensor: "x", rows, columns: 0..1024, dtype }
    }

    #[test]
    fn every_row_arrives_once_whatever_the_readers_and_types() {
        let source = Rows { broken: usize::MAX };
        for readers in [1, 2, 5] {
            for (rows, dtype) in
                [(0..0, DType::F32), (3..4, DType::F32), (7..5000, DType::F32), (0..1500, DType::Bf16)]
            {
                let mut seen = vec![0; rows.len()];
                let row_bytes = 1024 * dtype.size_bytes();
                let start = rows.start;
                let pack = |first: usize, band: &[u8]| {
                    for (i, row) in band.chunks_exact(row_bytes).enumerate() {
                        let value = match dtype {
                            DType::F32 => f32::from_le_bytes([row[0], row[1], row[2], row[3]]),
                            _ => bf16::from_le_bytes([row[0], row[1]]).to_f32(),
                        };
                        let want = (start + first + i) as f32;
                        assert_eq!(
                            value,
                            if dtype == DType::F32 { want } else { bf16::from_f32(want).to_f32() }
                        );
                        seen[first + i] += 1;
                    }
                };
                BandReader::new(&source, readers).for_each(&slice(rows, dtype), pack).unwrap();
                assert!(seen.iter().all(|n| *n == 1));
            }
        }
    }

    #[test]
    fn the_first_error_ends_the_reading() {
        let source = Rows { broken: 2000 };
        let error =
            BandReader::new(&source, 3).for_each(&slice(0..50_000, DType::F32), |_, _| {}).unwrap_err();
        assert!(matches!(error, ModelError::Weights(_)), "{error}");
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
