//! What a rank's weights take, from the config alone.
//!
//! Uses the same shard functions as the layers; a test holds it against what loading really packs.

use lockstep_core::shard::{self, HeadShard, VocabShard};
use lockstep_core::{DType, ModelConfig, ParallelInfo};

/// Bytes of one rank's weights by part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardBytes {
    /// Embedding and, unless tied, head; padding rows left out.
    pub vocabulary: usize,
    /// q, k, v and output projections.
    pub attention: usize,
    /// gate, up and down projections.
    pub mlp: usize,
    /// All biases, f32.
    pub biases: usize,
    /// All norms, f32; replicated on every rank.
    pub norms: usize,
}

impl ShardBytes {
    /// For matrices of `dtype`. Panics when the tp size is illegal (`shard::check_tp_size`).
    pub fn new(config: &ModelConfig, p: ParallelInfo, dtype: DType) -> Self {
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        let (dim, hidden, layers) = (config.head_dim, config.hidden_size, config.num_layers);
        let (q, kv) = (heads.query_heads.len() * dim, heads.kv_heads.len() * dim);
        let inner = shard::even(config.intermediate_size, p.tp_rank, p.tp_size).len();
        let vocab = VocabShard::new(config.vocab_size, p.tp_rank, p.tp_size).real.len();
        let vocab_matrices = if config.tie_word_embeddings { 1 } else { 2 };
        let bias = |on: bool, len: usize| if on { len } else { 0 };
        let biases = bias(config.qkv_bias, q + 2 * kv)
            + bias(config.o_bias, hidden)
            + bias(config.mlp_bias, 2 * inner + hidden);
        let norms = layers * (2 * hidden + bias(config.qk_norm, 2 * dim)) + hidden;
        let matrix = |elements: usize| elements * dtype.size_bytes();
        Self {
            vocabulary: matrix(vocab_matrices * vocab * hidden),
            attention: matrix(layers * (2 * q + 2 * kv) * hidden),
            mlp: matrix(layers * 3 * inner * hidden),
            biases: layers * biases * size_of::<f32>(),
            norms: norms * size_of::<f32>(),
        }
    }

    /// All parts.
    pub fn total(&self) -> usize {
        self.vocabulary + self.attention + self.mlp + self.biases + self.norms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of `docs/sharding.md`.
    #[test]
    fn worked_example() {
        let text = br#"{"architectures": ["Qwen2ForCausalLM"], "hidden_size": 5120, "num_attention_heads": 40,
            "num_key_value_heads": 8, "intermediate_size": 27648, "num_hidden_layers": 64, "vocab_size": 152064,
            "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
            "tie_word_embeddings": false, "use_sliding_window": false}"#;
        let config = lockstep_core::config::hf::parse(text).unwrap();
        let legal: Vec<i64> = (1..=64).filter(|&t| shard::check_tp_size(&config, t).is_ok()).collect();
        assert_eq!(legal, [1, 2, 4, 8]);
        let rank = |tp| ShardBytes::new(&config, ParallelInfo::tensor_parallel(tp - 1, tp), DType::Bf16);
        assert_eq!(
            rank(1),
            ShardBytes {
                vocabulary: 3_114_270_720,
                attention: 8_053_063_680,
                mlp: 54_358_179_840,
                biases: 1_835_008,
                norms: 2_641_920,
            }
        );
        assert_eq!(rank(1).total(), 65_529_991_168);
        for tp in [2, 4, 8] {
            assert_eq!(rank(tp).norms, rank(1).norms);
            assert_eq!(rank(tp).mlp * tp, rank(1).mlp);
            assert_eq!((rank(tp).total() - rank(tp).norms) * tp, rank(1).total() - rank(1).norms);
        }
        assert_eq!(config.kv_bytes_per_token(8), 512 << 10);
    }
}
