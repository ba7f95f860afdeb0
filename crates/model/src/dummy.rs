//! Weights made up from a seed, for planning and benchmarks with only a `config.json`.
//!
//! **Invariant:** an element depends on the seed, its tensor's name and its place in the whole
//! tensor, never on the rank or the tp size that asks. Scales keep activations and logits near 1.

use crate::Result;
use crate::rules::ModelRules;
use crate::source::{WeightSource, missing};
use half::{bf16, f16};
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

/// The finaliser of splitmix64 (Steele et al. 2014).
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl DummyTensor {
    /// Element `index` of the stream: 24 random bits as a number in -1..1, scaled.
    fn element(&self, stream: u64, index: usize) -> f32 {
        let bits = mix(stream ^ index as u64) >> 40;
        self.mean + self.width * (bits as f32 / (1 << 23) as f32 - 1.0)
    }
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
        let (stream, width) = (self.stream(tensor), found.shape[1]);
        out.clear();
        for row in rows {
            let elements = cols.clone().map(|col| found.element(stream, row * width + col));
            match self.dtype {
                DType::F32 => elements.for_each(|v| out.extend_from_slice(&v.to_le_bytes())),
                DType::F16 => elements.for_each(|v| out.extend_from_slice(&f16::from_f32(v).to_le_bytes())),
                DType::Bf16 => {
                    elements.for_each(|v| out.extend_from_slice(&bf16::from_f32(v).to_le_bytes()));
                }
            }
        }
        Ok(self.dtype)
    }

    fn read_vector(&self, tensor: &str, range: Range<usize>) -> Result<Vec<f32>> {
        let (found, stream) = (self.find(tensor)?, self.stream(tensor));
        Ok(range.map(|i| found.element(stream, i)).collect())
    }

    fn release(&self, _tensor: &str) {}

    fn unused_report(&self, _used: &HashSet<String>) -> Option<String> {
        None
    }
}
