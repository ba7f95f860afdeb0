//! Random matrices of quantised checkpoints (FP8, GPTQ, AWQ): the tensors that a file holds and the
//! values that they mean, in f64.
//!
//! Written from the formats' own description, number by number, so that the engine's readers have
//! something independent to agree with. All matrices are `[out, in]`.

use super::StoredTensor;
use crate::random::Random;
use half::{bf16, f16};

/// A matrix, stored and in values.
#[derive(Clone, Debug)]
pub struct QuantisedMatrix {
    /// What the file holds.
    pub stored: Vec<StoredTensor>,
    /// Row-major `[out, in]`, exact.
    pub values: Vec<f64>,
}

/// How scales of an FP8 matrix are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Scales {
    /// One f32 `weight_scale`.
    PerTensor,
    /// An f32 `weight_scale` for each row, `[out, 1]`.
    PerRow,
    /// A bf16 `weight_scale_inv` for each tile of this many rows and columns.
    Tiles(usize, usize),
}

/// Which group an input feature belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Groups {
    /// Neighbours, no `g_idx` in the file.
    Even,
    /// Any, listed in `g_idx` ("desc_act").
    Listed,
}

/// GPTQ's ways to store zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GptqZeros {
    /// All 8, stored as 7 (symmetric, first format).
    Symmetric,
    /// Any, eight at a time less 0x11111111 (first format).
    LessOne,
    /// Any, stored as they are (second format).
    AsTheyAre,
}

/// An FP8 E4M3 matrix of random finite numbers.
pub fn fp8(
    module: &str,
    (rows, cols): (usize, usize),
    scales: Fp8Scales,
    random: &mut Random,
) -> QuantisedMatrix {
    let bytes: Vec<u8> = (0..rows * cols)
        .map(|_| match random.next_u64() as u8 {
            nan if nan % 128 == 127 => 0,
            other => other,
        })
        .collect();
    let (tile_rows, tile_cols) = match scales {
        Fp8Scales::PerTensor => (rows, cols),
        Fp8Scales::PerRow => (1, cols),
        Fp8Scales::Tiles(r, c) => (r, c),
    };
    let grid = (rows.div_ceil(tile_rows), cols.div_ceil(tile_cols));
    let tiled = matches!(scales, Fp8Scales::Tiles(..));
    let factors: Vec<f32> = (0..grid.0 * grid.1)
        .map(|_| {
            let factor = (0.01 + 0.05 * random.unit()) as f32;
            if tiled { bf16::from_f32(factor).to_f32() } else { factor }
        })
        .collect();
    let values = (0..rows * cols)
        .map(|i| {
            let tile = i / cols / tile_rows * grid.1 + i % cols / tile_cols;
            e4m3(bytes[i]) * f64::from(factors[tile])
        })
        .collect();
    let scale = match scales {
        Fp8Scales::PerTensor => ("weight_scale", vec![]),
        Fp8Scales::PerRow => ("weight_scale", vec![rows, 1]),
        Fp8Scales::Tiles(..) => ("weight_scale_inv", vec![grid.0, grid.1]),
    };
    let (dtype, scale_bytes) = if tiled {
        ("BF16", factors.iter().flat_map(|f| bf16::from_f32(*f).to_le_bytes()).collect())
    } else {
        ("F32", factors.iter().flat_map(|f| f.to_le_bytes()).collect())
    };
    let stored = vec![
        stored(module, "weight", "F8_E4M3", &[rows, cols], bytes),
        stored(module, scale.0, dtype, &scale.1, scale_bytes),
    ];
    QuantisedMatrix { stored, values }
}

/// A GPTQ 4-bit matrix of random numbers.
pub fn gptq(
    module: &str,
    (rows, cols): (usize, usize),
    group_size: usize,
    (groups, zeros): (Groups, GptqZeros),
    random: &mut Random,
) -> QuantisedMatrix {
    let mut numbers = Numbers::random((rows, cols), group_size, groups, random);
    if zeros == GptqZeros::Symmetric {
        numbers.zeros.fill(8);
    }
    let words = pack(cols, rows, Along::Outer, |input, output| numbers.q[output * cols + input]);
    let mut zero_words =
        pack(numbers.group_count, rows, Along::Inner, |group, output| numbers.zeros[group * rows + output]);
    if zeros != GptqZeros::AsTheyAre {
        for word in zero_words.as_chunks_mut::<4>().0 {
            *word = u32::from_le_bytes(*word).wrapping_sub(0x1111_1111).to_le_bytes();
        }
    }
    let mut tensors = vec![
        stored(module, "qweight", "I32", &[cols / 8, rows], words),
        stored(module, "qzeros", "I32", &[numbers.group_count, rows / 8], zero_words),
        numbers.stored_scales(module),
    ];
    if groups == Groups::Listed {
        let list = numbers.group_of.iter().flat_map(|g| (*g as i32).to_le_bytes()).collect();
        tensors.push(stored(module, "g_idx", "I32", &[cols], list));
    }
    QuantisedMatrix { stored: tensors, values: numbers.values() }
}

/// An AWQ 4-bit matrix of random numbers ("gemm" version).
pub fn awq(
    module: &str,
    (rows, cols): (usize, usize),
    group_size: usize,
    random: &mut Random,
) -> QuantisedMatrix {
    let numbers = Numbers::random((rows, cols), group_size, Groups::Even, random);
    let words = pack(cols, rows, Along::InnerInterleaved, |input, output| numbers.q[output * cols + input]);
    let zero_words = pack(numbers.group_count, rows, Along::InnerInterleaved, |group, output| {
        numbers.zeros[group * rows + output]
    });
    let stored = vec![
        stored(module, "qweight", "I32", &[cols, rows / 8], words),
        stored(module, "qzeros", "I32", &[numbers.group_count, rows / 8], zero_words),
        numbers.stored_scales(module),
    ];
    QuantisedMatrix { stored, values: numbers.values() }
}

/// 4-bit numbers with their scales and zeros.
struct Numbers {
    rows: usize,
    cols: usize,
    group_count: usize,
    /// `[out, in]`.
    q: Vec<u8>,
    /// `[groups, out]`.
    zeros: Vec<u8>,
    /// `[groups, out]`.
    scales: Vec<f16>,
    /// `[in]`.
    group_of: Vec<usize>,
}

impl Numbers {
    fn random((rows, cols): (usize, usize), group_size: usize, groups: Groups, random: &mut Random) -> Self {
        let group_count = cols.div_ceil(group_size);
        let mut four_bits = |count: usize| (0..count).map(|_| random.below(16) as u8).collect::<Vec<u8>>();
        let (q, zeros) = (four_bits(rows * cols), four_bits(group_count * rows));
        let scales = (0..group_count * rows).map(|_| f16::from_f64(0.02 * random.normal())).collect();
        let group_of = (0..cols)
            .map(|input| match groups {
                Groups::Even => input / group_size,
                Groups::Listed => random.below(group_count as u64) as usize,
            })
            .collect();
        Self { rows, cols, group_count, q, zeros, scales, group_of }
    }

    fn values(&self) -> Vec<f64> {
        let value = |i: usize| {
            let (output, input) = (i / self.cols, i % self.cols);
            let at = self.group_of[input] * self.rows + output;
            f64::from(self.scales[at]) * (f64::from(self.q[i]) - f64::from(self.zeros[at]))
        };
        (0..self.q.len()).map(value).collect()
    }

    fn stored_scales(&self, module: &str) -> StoredTensor {
        let bytes = self.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        stored(module, "scales", "F16", &[self.group_count, self.rows], bytes)
    }
}

/// Which eight numbers of an `[outer, inner]` matrix share a word.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Along {
    /// Neighbours in the outer dimension.
    Outer,
    /// Neighbours in the inner dimension.
    Inner,
    /// The same, in the order 0, 2, 4, 6, 1, 3, 5, 7.
    InnerInterleaved,
}

/// Packs the 4-bit numbers `number(outer, inner)` into words, the first of each eight lowest.
fn pack(outer: usize, inner: usize, along: Along, number: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    let (words_outer, words_inner) = match along {
        Along::Outer => (outer / 8, inner),
        Along::Inner | Along::InnerInterleaved => (outer, inner / 8),
    };
    let mut bytes = Vec::new();
    for o in 0..words_outer {
        for i in 0..words_inner {
            let word: u32 = (0..8)
                .map(|n| {
                    let number = match along {
                        Along::Outer => number(8 * o + n, i),
                        Along::Inner => number(o, 8 * i + n),
                        Along::InnerInterleaved => number(o, 8 * i + [0, 2, 4, 6, 1, 3, 5, 7][n]),
                    };
                    u32::from(number) << (4 * n)
                })
                .sum();
            bytes.extend(word.to_le_bytes());
        }
    }
    bytes
}

/// The value of a finite E4M3 number: sign, four exponent bits around 7, three of mantissa.
fn e4m3(bits: u8) -> f64 {
    let sign = if bits < 128 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits % 128 / 8), f64::from(bits % 8));
    let magnitude = match exponent {
        0 => mantissa / 512.0,
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    sign * magnitude
}

fn stored(module: &str, part: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> StoredTensor {
    StoredTensor { name: format!("{module}.{part}"), dtype, shape: shape.to_vec(), bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_where_the_formats_put_them() {
        let count_up = |outer: usize, inner: usize| (8 * outer + inner) as u8 % 16;
        // Eight rows of one column: 0, 8, 0, 8, ... from the lowest bits up.
        assert_eq!(pack(8, 1, Along::Outer, count_up), 0x8080_8080u32.to_le_bytes());
        assert_eq!(pack(1, 8, Along::Inner, count_up), 0x7654_3210u32.to_le_bytes());
        assert_eq!(pack(1, 8, Along::InnerInterleaved, count_up), 0x7531_6420u32.to_le_bytes());
        assert_eq!([0x7e, 0x01, 0x81, 0x38].map(e4m3), [448.0, 1.0 / 512.0, -1.0 / 512.0, 1.0]);
    }

    #[test]
    fn shapes_follow_the_formats() {
        let mut random = Random::new(1);
        let matrix = gptq("m", (16, 64), 32, (Groups::Listed, GptqZeros::LessOne), &mut random);
        let shapes: Vec<_> = matrix.stored.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
        let expected: [(&str, &[usize]); 4] =
            [("m.qweight", &[8, 16]), ("m.qzeros", &[2, 2]), ("m.scales", &[2, 16]), ("m.g_idx", &[64])];
        assert_eq!(shapes, expected);
        let matrix = fp8("m", (130, 200), Fp8Scales::Tiles(128, 128), &mut random);
        assert_eq!((matrix.stored[1].shape.as_slice(), matrix.values.len()), ([2, 2].as_slice(), 26_000));
    }
}
