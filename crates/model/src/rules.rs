//! Every weight of a model and how it is cut: the layers' rules put together.
//!
//! **Invariant:** this is the only list. [`Decoder::load`](crate::Decoder::load) loads from it, the
//! every command holds a checkpoint's headers against it before anything is read ([`ModelRules::check`]), the loader
//! checks that all of it was filled once, [`ShardBytes`](crate::ShardBytes) adds it up, dummy
//! weights follow it, and a test holds the table of `docs/sharding.md` against it.

use crate::Result;
use crate::families;
use crate::layers::attention::AttentionRules;
use crate::layers::feed_forward::FeedForwardRules;
use crate::layers::{norm, vocab};
use crate::source::WeightSource;
use lockstep_core::shard::{self, WeightRule};
use lockstep_core::{ModelConfig, StageLayers};

/// The rules of one decoder layer.
#[derive(Clone, Debug)]
pub struct LayerRules {
    /// Norm before attention.
    pub input_norm: WeightRule,
    /// Attention.
    pub attention: AttentionRules,
    /// Norm on the attention output, in families with sandwich norms.
    pub attention_output_norm: Option<WeightRule>,
    /// Norm before the MLP.
    pub mlp_input_norm: WeightRule,
    /// MLP or experts.
    pub feed_forward: FeedForwardRules,
    /// Norm on the MLP output, in families with sandwich norms.
    pub mlp_output_norm: Option<WeightRule>,
}

/// The rules of a whole model, or of one pipeline stage.
#[derive(Clone, Debug)]
pub struct ModelRules {
    /// Input embedding, on the first stage; the head too when the model is tied and the stage is also the last one.
    pub embedding: Option<WeightRule>,
    /// The stage's decoder layers in order.
    pub layers: Vec<LayerRules>,
    /// Norm before the head, on the last stage.
    pub final_norm: Option<WeightRule>,
    /// Output head, on the last stage, where it is not the embedding that is there anyway: both ends of a pipeline read a
    /// tied one.
    pub head: Option<WeightRule>,
    /// The tp sizes that owe each other equal bits, for [`WeightRule::weight_type`].
    pub exact_tp_sizes: Vec<usize>,
}

impl ModelRules {
    /// The rules of all of `config`.
    pub fn new(config: &ModelConfig) -> Self {
        Self::of_stage(config, StageLayers::whole(config.num_layers))
    }

    /// The rules of what one stage has of `config`.
    pub fn of_stage(config: &ModelConfig, stage: StageLayers) -> Self {
        let head = match config.tie_word_embeddings {
            true => (!stage.embeds()).then_some(vocab::EMBEDDING),
            false => Some(vocab::HEAD),
        };
        let ends = stage.has_logits();
        Self {
            embedding: stage.embeds().then(|| vocab::rule(config, vocab::EMBEDDING)),
            layers: stage.range().map(|layer| LayerRules::new(config, layer)).collect(),
            final_norm: ends.then(|| norm::rule("model.norm", config.hidden_size)),
            head: head.filter(|_| ends).map(|name| vocab::rule(config, name)),
            exact_tp_sizes: shard::exact_tp_sizes(config),
        }
    }

    /// The matrix that makes logits, if this stage does.
    pub fn output_head(&self) -> Option<&WeightRule> {
        let ends = self.final_norm.is_some();
        self.head.as_ref().or(self.embedding.as_ref()).filter(|_| ends)
    }

    /// Every rule, in loading order.
    pub fn iter(&self) -> impl Iterator<Item = &WeightRule> {
        let layers = self.layers.iter().flat_map(LayerRules::iter);
        self.embedding.iter().chain(layers).chain(&self.final_norm).chain(&self.head)
    }

    /// Fails unless `source` has every tensor of these rules, in a type that can be read and the shape they state; the
    /// error names the first that it has not. Reads headers only.
    pub fn check(&self, source: &dyn WeightSource) -> Result<()> {
        self.iter().try_for_each(|rule| check_rule(rule, source))
    }

    /// One sentence about what `source` holds beside the tensors of these rules; `None` when there is nothing.
    pub fn unused_report(&self, source: &dyn WeightSource) -> Option<String> {
        let pieces = self.iter().flat_map(|rule| &rule.pieces);
        source.unused_report(&pieces.map(|piece| piece.tensor.clone()).collect())
    }
}

/// Fails unless `source` has the tensors of one rule, as [`ModelRules::check`] does for all.
pub(crate) fn check_rule(rule: &WeightRule, source: &dyn WeightSource) -> Result<()> {
    rule.pieces.iter().try_for_each(|piece| source.expect_shape(&piece.tensor, &rule.stored_shape(piece)))
}

impl LayerRules {
    fn new(config: &ModelConfig, layer: usize) -> Self {
        let (layout, norms) = (families::layout(config), families::norms(config));
        let prefix = format!("model.layers.{layer}");
        let norm = |name: &str| norm::rule(&format!("{prefix}.{name}"), config.hidden_size);
        Self {
            input_norm: norm(norms.input),
            attention: AttentionRules::new(config, layout, &format!("{prefix}.self_attn")),
            attention_output_norm: norms.attention_output.map(norm),
            mlp_input_norm: norm(norms.mlp_input),
            feed_forward: FeedForwardRules::new(config, layout, &format!("{prefix}.mlp"), layer),
            mlp_output_norm: norms.mlp_output.map(norm),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &WeightRule> {
        std::iter::once(&self.input_norm)
            .chain(self.attention.iter())
            .chain(&self.attention_output_norm)
            .chain([&self.mlp_input_norm])
            .chain(self.feed_forward.iter())
            .chain(&self.mlp_output_norm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> ModelConfig {
        lockstep_core::config::hf::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn stages_together_have_what_one_has_and_both_ends_a_tied_head() {
        for tied in [false, true] {
            let model = config(&format!(
                r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 8,
                "num_key_value_heads": 4, "intermediate_size": 128, "num_hidden_layers": 5, "vocab_size": 33,
                "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64,
                "tie_word_embeddings": {tied}}}"#
            ));
            let names = |rules: &ModelRules| -> Vec<String> {
                rules.iter().flat_map(|rule| &rule.pieces).map(|piece| piece.tensor.clone()).collect()
            };
            let stages = StageLayers::of_stages(&model, 3, None).unwrap();
            let stages: Vec<ModelRules> =
                stages.iter().map(|stage| ModelRules::of_stage(&model, *stage)).collect();
            let mut together: Vec<String> = stages.iter().flat_map(names).collect();
            if tied {
                assert_eq!(together.pop().as_deref(), Some("model.embed_tokens.weight"));
            }
            assert_eq!(together, names(&ModelRules::new(&model)));
            let heads: Vec<bool> = stages.iter().map(|stage| stage.output_head().is_some()).collect();
            assert_eq!(heads, [false, false, true]);
        }
    }

    /// The refusal of illegal tp sizes speaks of heads and widths; it must mean what the rules mean.
    #[test]
    fn a_tp_size_is_legal_when_every_rule_can_be_cut() {
        let sizes = |architecture: &str, heads: usize, kv: usize, inner: usize, expert: usize| {
            config(&format!(
                r#"{{"architectures": ["{architecture}"], "hidden_size": 240, "head_dim": 8,
                "num_attention_heads": {heads}, "num_key_value_heads": {kv}, "intermediate_size": {inner},
                "num_hidden_layers": 2, "vocab_size": 321, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
                "max_position_embeddings": 64, "num_experts": {expert}, "num_experts_per_tok": {expert},
                "moe_intermediate_size": {expert}}}"#
            ))
        };
        let mut configs = Vec::new();
        for (heads, kv) in [(4, 2), (6, 2), (12, 4), (40, 8), (24, 24), (5, 1)] {
            for inner in [96, 60, 7] {
                configs.push(sizes("LlamaForCausalLM", heads, kv, inner, 0));
                configs.push(sizes("Phi3ForCausalLM", heads, kv, inner, 0));
                configs.push(sizes("Qwen3MoeForCausalLM", heads, kv, inner, 12));
            }
        }
        for config in configs {
            let rules = ModelRules::new(&config);
            for tp_size in 1..=lockstep_core::limits::TP_SIZE_MAX {
                let by_rules = rules.iter().all(|rule| rule.is_legal(tp_size));
                let by_config = shard::check_tp_size(&config, tp_size as i64).is_ok();
                assert_eq!(by_rules, by_config, "tp {tp_size}, {config:?}");
            }
        }
    }
}
