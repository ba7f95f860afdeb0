//! Weights made up from a seed, for planning and benchmarks with only a `config.json`.
//!
//! **Invariant:** an element depends on the seed, its tensor's name and its place in the whole
//! tensor, never on the rank or the tp size that asks. Scales keep activations and logits near 1.

use crate::Result;
use crate::rules::ModelRules;
use crate::source::{WeightSource, missing};
use half::f16;
use lockstep_core::random::splitmix64;
use lockstep_core::shard::{Group, Piece, WeightRule};
use lockstep_core::{DType, ModelConfig};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// A checkpoint without files.
pub struct DummyWeights {
    config: ModelConfig,
    dtype: DType,
    seed: u64,
    tensors: HashMap<String, DummyTensor>,
}

/// One made-up tensor: uniform in `mean - width .. mean + width`.
struct DummyTensor {
    shape: Vec<usize>,
    mean: f32,
    width: f32,
}

impl DummyWeights {
    /// Every tensor that the rules of `config` name, matrices as `dtype`.
    pub fn new(config: ModelConfig, dtype: DType, seed: u64) -> Self {
        let rules = ModelRules::new(&config);
        let tensor = |rule: &WeightRule, piece: &Piece| {
            let (mean, deviation) = distribution(&config, rule);
            let width = deviation * 3f32.sqrt(); // of a uniform distribution
            (piece.tensor.clone(), DummyTensor { shape: rule.stored_shape(piece), mean, width })
        };
        let tensors =
            rules.iter().flat_map(|rule| rule.pieces.iter().map(move |piece| tensor(rule, piece))).collect();
        Self { config, dtype, seed, tensors }
    }

    fn find(&self, tensor: &str) -> Result<&DummyTensor> {
        let found = self.tensors.get(tensor);
        Ok(found.ok_or_else(|| missing(tensor, "the rules that dummy weights follow"))?)
    }

    /// The stream that a tensor's elements come from: FNV-1a of its name, mixed with the seed.
    fn stream(&self, tensor: &str) -> u64 {
        let hash = tensor
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
        mix(hash ^ mix(self.seed))
    }
}

/// Mean and standard deviation of a weight.
///
/// A matrix divides by the root of its inputs, so that outputs are as large as inputs; what is
/// added to the residual stream divides by the root of the number of additions as well.
fn distribution(config: &ModelConfig, rule: &WeightRule) -> (f32, f32) {
    let inputs = rule.columns.map_or(1, |columns| columns.global_len) as f32;
    match (rule.group, rule.columns) {
        (Group::Norms, _) => (if config.norm_offset { 0.0 } else { 1.0 }, 0.05),
        (Group::Biases, _) => (0.0, 0.05),
        (_, Some(columns)) if columns.cut => (0.0, (inputs * 2.0 * config.num_layers as f32).powf(-0.5)),
        _ => (0.0, inputs.powf(-0.5)),
    }
}

/// The first number of the stream of `seed`.
fn mix(mut seed: u64) -> u64 {
    splitmix64(&mut seed)
}

/// The numbers of one row of a tensor: two hashes of its place, from which its elements follow.
///
/// The steps are those of murmur3's 32-bit finaliser with the second hash stirred in: whole rows are
/// made in vector registers, because a model has billions of elements.
struct RowStream {
    start: u32,
    salt: u32,
}

impl RowStream {
    fn new(stream: u64, row: usize) -> Self {
        let hash = mix(stream ^ row as u64);
        Self { start: hash as u32, salt: (hash >> 32) as u32 }
    }

    /// A number in -1..1 with 24 random bits.
    fn element(&self, column: usize) -> f32 {
        let mut x = self.start.wrapping_add((column as u32).wrapping_mul(0x9e37_79b9));
        x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b) ^ self.salt;
        x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
        x ^= x >> 16;
        (x as i32 >> 8) as f32 / (1 << 23) as f32
    }
}

/// `value` as bfloat16, to nearest even; finite values only, so that it needs no branch.
fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

impl WeightSource for DummyWeights {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn dtype_of(&self, tensor: &str) -> Option<DType> {
        self.tensors.contains_key(tensor).then_some(self.dtype)
    }

    fn expect_shape(&self, tensor: &str, shape: &[usize]) -> Result<()> {
        let found = self.find(tensor)?;
        assert_eq!(found.shape, shape, "invariant: the rules agree on the shape of {tensor}");
        Ok(())
    }

    fn read_rows(
        &self,
        tensor: &str,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<DType> {
        let found = self.find(tensor)?;
        let stream = self.stream(tensor);
        let row_bytes = cols.len() * self.dtype.size_bytes();
        out.clear();
        out.resize(rows.len() * row_bytes, 0);
        for (row, bytes) in rows.zip(out.chunks_exact_mut(row_bytes.max(1))) {
            let stream = RowStream::new(stream, row);
            let values = cols.clone().map(|column| found.mean + found.width * stream.element(column));
            match self.dtype {
                DType::F32 => {
                    let places = bytes.chunks_exact_mut(4);
                    places.zip(values).for_each(|(place, v)| place.copy_from_slice(&v.to_le_bytes()));
                }
                DType::Bf16 => {
                    let places = bytes.chunks_exact_mut(2);
                    places
                        .zip(values)
                        .for_each(|(place, v)| place.copy_from_slice(&to_bf16(v).to_le_bytes()));
                }
                DType::F16 => {
                    let places = bytes.chunks_exact_mut(2);
                    places
                        .zip(values)
                        .for_each(|(place, v)| place.copy_from_slice(&f16::from_f32(v).to_le_bytes()));
                }
            }
        }
        Ok(self.dtype)
    }

    fn read_vector(&self, tensor: &str, range: Range<usize>) -> Result<Vec<f32>> {
        let (found, stream) = (self.find(tensor)?, RowStream::new(self.stream(tensor), 0));
        Ok(range.map(|i| found.mean + found.width * stream.element(i)).collect())
    }

    fn release(&self, _tensor: &str) {}

    fn unused_report(&self, _used: &HashSet<String>) -> Option<String> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn elements_are_uniform_and_rows_differ() {
        let mut sum = [0.0, 0.0, 0.0];
        let (rows, cols) = (100, 1000);
        for row in 0..rows {
            let (one, next) = (RowStream::new(5, row), RowStream::new(5, row + 1));
            for column in 0..cols {
                let v = f64::from(one.element(column));
                assert!((-1.0..1.0).contains(&v));
                let neighbours = f64::from(next.element(column)) + f64::from(one.element(column + 1));
                sum = [sum[0] + v, sum[1] + v * v, sum[2] + v * neighbours];
            }
        }
        let n = (rows * cols) as f64;
        // Standard errors: 0.0018 of the mean, 0.0009 of the variance 1/3, 0.0015 of the correlation.
        assert!((sum[0] / n).abs() < 0.01, "mean {}", sum[0] / n);
        assert!((sum[1] / n - 1.0 / 3.0).abs() < 0.01, "variance {}", sum[1] / n);
        assert!((sum[2] / n).abs() < 0.01, "correlation {}", sum[2] / n);
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        for i in 0..10_000 {
            let v = RowStream::new(1, 0).element(i);
            assert_eq!(to_bf16(v), bf16::from_f32(v).to_bits());
        }
        assert_eq!(to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
    }
}
