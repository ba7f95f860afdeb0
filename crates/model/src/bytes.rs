//! What a rank's weights take, from the rules alone; a test holds it against what loading really
//! packs.

use crate::rules::ModelRules;
use lockstep_core::shard::Group;
use lockstep_core::{DType, ModelConfig, ParallelInfo, WeightType};

/// Bytes of one rank's weights by part. Padding rows of the vocabulary are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardBytes {
    /// Embedding and, unless tied, head.
    pub vocabulary: usize,
    /// q, k, v and output projections.
    pub attention: usize,
    /// Dense gate, up and down projections.
    pub mlp: usize,
    /// The experts' gate, up and down projections.
    pub experts: usize,
    /// The matrices that choose experts.
    pub router: usize,
    /// All biases, f32.
    pub biases: usize,
    /// All norms, f32.
    pub norms: usize,
    /// The part of all these that other ranks hold too: norms, routers, biases added after a sum,
    /// and KV heads where there are more ranks than heads.
    pub replicated: usize,
}

impl ShardBytes {
    /// For matrices of `dtype`. Panics when the tp size is illegal (`shard::check_tp_size`).
    pub fn new(config: &ModelConfig, p: ParallelInfo, dtype: DType) -> Self {
        Self::of(&ModelRules::new(config), p, |_, _| Some(dtype.into()))
    }

    /// For matrices kept as `type_of` says ([`weight_types`](crate::weight_types)). Panics when the tp size is illegal.
    pub fn of(
        rules: &ModelRules,
        p: ParallelInfo,
        type_of: impl Fn(Group, &str) -> Option<WeightType>,
    ) -> Self {
        let mut bytes = Self::default();
        for rule in rules.iter() {
            let weight_type = rule.weight_type(p, &rules.exact_tp_sizes, &type_of);
            *bytes.part_mut(rule.group) += weight_type.packed_bytes(rule.local_elements(p));
            if p.tp_size > 1 {
                bytes.replicated += weight_type.packed_bytes(rule.replicated_elements(p));
            }
        }
        bytes
    }

    /// All parts.
    pub fn total(&self) -> usize {
        let matrices = self.vocabulary + self.attention + self.mlp + self.experts + self.router;
        matrices + self.biases + self.norms
    }

    fn part_mut(&mut self, group: Group) -> &mut usize {
        match group {
            Group::Vocabulary => &mut self.vocabulary,
            Group::Attention => &mut self.attention,
            Group::Mlp => &mut self.mlp,
            Group::Experts => &mut self.experts,
            Group::Router => &mut self.router,
            Group::Biases => &mut self.biases,
            Group::Norms => &mut self.norms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::shard;

    fn rank(tp_rank: usize, tp_size: usize) -> ParallelInfo {
        ParallelInfo::tensor_parallel(tp_rank, tp_size)
    }

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
        let of = |tp| ShardBytes::new(&config, rank(tp - 1, tp), DType::Bf16);
        assert_eq!(
            of(1),
            ShardBytes {
                vocabulary: 3_114_270_720,
                attention: 8_053_063_680,
                mlp: 54_358_179_840,
                biases: 1_835_008,
                norms: 2_641_920,
                ..ShardBytes::default()
            }
        );
        assert_eq!(of(1).total(), 65_529_991_168);
        for tp in [2, 4, 8] {
            assert_eq!((of(tp).norms, of(tp).replicated), (of(1).norms, of(1).norms));
            assert_eq!(of(tp).mlp * tp, of(1).mlp);
            assert_eq!((of(tp).total() - of(tp).norms) * tp, of(1).total() - of(1).norms);
        }
        assert_eq!(config.kv_bytes_per_token(8), 512 << 10);
    }

    /// The parts of Qwen3-30B-A3B, by hand: 48 layers, hidden 2048, 32 query and 4 KV heads of 128,
    /// 128 experts of width 768, vocabulary 151,936, untied.
    #[test]
    fn experts_and_replicated_kv_heads() {
        let text = br#"{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "head_dim": 128,
            "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
            "num_hidden_layers": 48, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "norm_topk_prob": true}"#;
        let config = lockstep_core::config::hf::parse(text).unwrap();
        let whole = ShardBytes::new(&config, rank(0, 1), DType::Bf16);
        assert_eq!(whole.experts, 2 * 48 * 128 * 3 * 2048 * 768);
        assert_eq!(whole.router, 2 * 48 * 128 * 2048);
        assert_eq!((whole.mlp, whole.replicated), (0, 0));
        assert_eq!(whole.norms, 4 * (48 * (2 * 2048 + 2 * 128) + 2048));
        // Tp 8 with 4 KV heads: two ranks hold each head, so k and v count as replicated.
        let eighth = ShardBytes::new(&config, rank(5, 8), DType::Bf16);
        assert_eq!(eighth.experts * 8, whole.experts);
        let kv = 2 * 48 * 2 * 128 * 2048;
        assert_eq!(eighth.replicated, whole.router + whole.norms + kv);
        let legal: Vec<i64> = (1..=64).filter(|&t| shard::check_tp_size(&config, t).is_ok()).collect();
        assert_eq!(legal, [1, 2, 4, 8, 16, 32]);
    }
}
