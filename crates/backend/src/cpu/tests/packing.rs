//! What is packed is what was given, bit for bit, however it comes in.

use super::{Random, backends};
use crate::bands::{BandBuffers, Bands, MatrixRows};
use crate::cpu::PackedLinear;
use crate::{Backend, LinearSpec};
use lockstep_core::DType;
use std::ops::Range;

/// Any bits, so NaN of both kinds among them.
fn random_bytes(random: &mut Random, len: usize) -> Vec<u8> {
    (0..len).map(|_| random.next() as u8).collect()
}

/// The bytes of the packed matrix by definition: `[tile][input][lane]`.
fn interleaved(spec: &LinearSpec, rows: &[u8]) -> Vec<u8> {
    let size = spec.weight_type.packed_bytes(1);
    let mut packed = vec![0; spec.out_features.div_ceil(16) * 16 * spec.in_features * size];
    for (i, element) in rows.chunks_exact(size).enumerate() {
        let (row, input) = (i / spec.in_features, i % spec.in_features);
        let place = ((row / 16 * spec.in_features + input) * 16 + row % 16) * size;
        packed[place..place + size].copy_from_slice(element);
    }
    packed
}

fn bytes_of(linear: &PackedLinear) -> &[u8] {
    // SAFETY: the matrix is that many initialised bytes, borrowed as long as it.
    unsafe { std::slice::from_raw_parts(linear.tile(0, 0), linear.bytes()) }
}

#[test]
fn rows_and_bands_of_any_shape_keep_their_bits() {
    let seed = 23;
    let mut random = Random(seed);
    for backend in backends() {
        for case in 0..12 {
            let (out_features, in_features) = (1 + random.below(150), 1 + random.below(90));
            let dtype = random.pick(&[DType::F32, DType::F16, DType::Bf16]);
            let spec = LinearSpec::single_leaf(out_features, in_features, dtype);
            let row_bytes = in_features * dtype.size_bytes();
            let rows = random_bytes(&mut random, out_features * row_bytes);
            let want = interleaved(&spec, &rows);
            let what = format!("seed {seed} case {case} {} {spec:?}", backend.describe());
            // Cut where a fused matrix might be: anywhere.
            let cut = random.below(out_features + 1);

            let mut by_rows = backend.linear(spec.clone()).unwrap();
            backend.pack_rows(&mut by_rows, cut, &rows[cut * row_bytes..]);
            backend.pack_rows(&mut by_rows, 0, &rows[..cut * row_bytes]);
            assert!(bytes_of(&by_rows) == want, "{what} by rows, cut at {cut}");

            let read = |_: usize, part: Range<usize>, out: &mut Vec<u8>| {
                out.clear();
                out.extend_from_slice(&rows[part.start * row_bytes..part.end * row_bytes]);
                true
            };
            let buffers = BandBuffers::default();
            let mut by_bands = [backend.linear(spec.clone()).unwrap(), backend.linear(spec.clone()).unwrap()];
            // Two matrices at once, in bands of 32 rows, by a width that is not the matrix's own.
            let parts = [(0, 0..cut), (0, cut..out_features), (1, cut..out_features), (1, 0..cut)];
            let parts = parts.map(|(matrix, rows)| MatrixRows { matrix, rows, row_bytes: 32 << 10 });
            backend.pack_bands(&mut by_bands, &Bands::new(parts, &read, &buffers));
            assert!(by_bands.iter().all(|m| bytes_of(m) == want), "{what} by bands, cut at {cut}");
        }
    }
}
