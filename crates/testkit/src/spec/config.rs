//! The `config.json` of a [`ModelSpec`], in either spelling.

use super::{ConfigSpelling, ModelSpec, RMS_NORM_EPS, RopeSpec, SpecFamily};
use serde_json::{Map, Value, json};

impl ModelSpec {
    /// The `config.json`.
    pub fn config_json(&self) -> Value {
        let (architecture, model_type) = match self.family {
            SpecFamily::Llama => ("LlamaForCausalLM", "llama"),
            SpecFamily::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            SpecFamily::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            SpecFamily::Qwen3Moe => ("Qwen3MoeForCausalLM", "qwen3_moe"),
            SpecFamily::Mistral => ("MistralForCausalLM", "mistral"),
            SpecFamily::Phi3 => ("Phi3ForCausalLM", "phi3"),
            SpecFamily::Gemma2 => ("Gemma2ForCausalLM", "gemma2"),
            SpecFamily::Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
        };
        let mut config = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "rms_norm_eps": RMS_NORM_EPS,
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 256,
            "eos_token_id": 257,
        });
        let act =
            if self.is_gemma() { ("hidden_activation", "gelu_pytorch_tanh") } else { ("hidden_act", "silu") };
        config[act.0] = json!(act.1);
        let object = config.as_object_mut().expect("invariant: json! made an object");
        object.extend(self.family_keys());
        self.add_rope_and_dtype(&mut config);
        if self.nested {
            config.as_object_mut().expect("invariant: still an object").remove("architectures");
            return json!({
                "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "eos_token_id": 257, "text_config": config,
            });
        }
        config
    }

    /// Keys that only some families have.
    fn family_keys(&self) -> Map<String, Value> {
        let keys = match self.family {
            SpecFamily::Llama => json!({"attention_bias": self.o_bias, "mlp_bias": self.mlp_bias}),
            SpecFamily::Qwen2 | SpecFamily::Qwen3 => json!({
                "use_sliding_window": self.window.is_some(), "sliding_window": self.window.unwrap_or(4096),
                "max_window_layers": self.window_start,
            }),
            SpecFamily::Qwen3Moe => {
                let experts = self.experts.expect("invariant: a mixture has experts");
                json!({
                    "num_experts": experts.count, "num_experts_per_tok": experts.per_token,
                    "moe_intermediate_size": experts.inner, "norm_topk_prob": experts.normalised,
                    "decoder_sparse_step": experts.step, "mlp_only_layers": experts.dense_layers,
                })
            }
            SpecFamily::Mistral => json!({"sliding_window": self.window}),
            SpecFamily::Phi3 => json!({
                "sliding_window": self.window, "partial_rotary_factor": self.rotary_part,
            }),
            SpecFamily::Gemma2 => json!({
                "sliding_window": self.window, "query_pre_attn_scalar": self.query_scalar,
                "attn_logit_softcapping": self.score_cap, "final_logit_softcapping": self.logit_cap,
            }),
            SpecFamily::Gemma3 => json!({
                "sliding_window": self.window, "query_pre_attn_scalar": self.query_scalar,
                "sliding_window_pattern": self.window_start, "final_logit_softcapping": self.logit_cap,
            }),
        };
        match keys {
            Value::Object(keys) => keys,
            _ => Map::new(),
        }
    }

    fn rope_object(&self) -> Value {
        match self.rope {
            RopeSpec::Default => json!({"rope_type": "default"}),
            RopeSpec::Linear(factor) => json!({"rope_type": "linear", "factor": factor}),
            RopeSpec::Dynamic(factor) => json!({"rope_type": "dynamic", "factor": factor}),
            RopeSpec::Llama3(factor, low, high, original) => json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": original,
            }),
            RopeSpec::Yarn(factor, original, attention_factor) => json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                "attention_factor": attention_factor,
            }),
            RopeSpec::LongRope(short, long, original) => json!({
                "rope_type": "longrope", "short_factor": short, "long_factor": long,
                "original_max_position_embeddings": original,
            }),
        }
    }

    fn add_rope_and_dtype(&self, config: &mut Value) {
        let mut rope = self.rope_object();
        let two_ropes = self.family == SpecFamily::Gemma3;
        match self.spelling {
            ConfigSpelling::Transformers4 => {
                config["rope_theta"] = json!(self.rope_theta);
                if two_ropes {
                    config["rope_local_base_freq"] = json!(self.local_theta);
                }
                if self.rope != RopeSpec::Default {
                    config["rope_scaling"] = rope;
                }
                config["torch_dtype"] = json!(self.dtype.torch_name());
            }
            ConfigSpelling::Transformers5 => {
                rope["rope_theta"] = json!(self.rope_theta);
                if two_ropes {
                    let local = json!({"rope_type": "default", "rope_theta": self.local_theta});
                    rope = json!({"full_attention": rope, "sliding_attention": local});
                }
                config["rope_parameters"] = rope;
                config["dtype"] = json!(self.dtype.torch_name());
                config["transformers_version"] = json!("5.0.0");
            }
        }
    }
}
