//! What a tiny model is made of: its shape, its random weights and its `config.json`.
//!
//! Tensor names follow the Hugging Face checkpoints of Llama, Qwen2 and Qwen3. Called by
//! [`crate::fixtures`] and by tests that need a model of their own size.

use crate::random::Random;
use crate::tensor::{FileDType, Tensor, Weights};
use serde_json::{Value, json};

/// A model family; decides the architecture's name and which keys its config has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecFamily {
    /// Llama; biases only where the config says so.
    Llama,
    /// Llama with biases on q, k and v.
    Qwen2,
    /// Llama with a per-head norm on q and k.
    Qwen3,
}

/// Position scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeSpec {
    /// None.
    Default,
    /// All frequencies divided by the factor.
    Linear(f64),
    /// Llama 3.1's bands: factor, low_freq_factor, high_freq_factor, original context in tokens.
    Llama3(f64, f64, f64, usize),
}

/// Where a `config.json` keeps the rope values and the float type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigSpelling {
    /// `rope_theta`, `rope_scaling`, `torch_dtype`.
    Transformers4,
    /// `rope_parameters`, `dtype`.
    Transformers5,
}

/// A model, up to its weights' random values. All counts are global.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Seed of the weights.
    pub seed: u64,
    /// Architecture.
    pub family: SpecFamily,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Inner width of the MLP.
    pub intermediate: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the attention output.
    pub o_bias: bool,
    /// Biases on gate, up, down.
    pub mlp_bias: bool,
    /// RMSNorm on each head of q and k.
    pub qk_norm: bool,
    /// The head is the embedding matrix.
    pub tied: bool,
    /// Standard deviation of the projections.
    pub std: f64,
    /// Base of the rope frequencies.
    pub rope_theta: f64,
    /// Scaling of the rope frequencies.
    pub rope: RopeSpec,
    /// `max_position_embeddings`.
    pub max_position: usize,
    /// Float type of the file.
    pub dtype: FileDType,
    /// Spelling of the config.
    pub spelling: ConfigSpelling,
}

impl Default for ModelSpec {
    /// Two layers, hidden 128, 4 query and 2 KV heads of 32, vocabulary 320.
    fn default() -> Self {
        Self {
            seed: 1,
            family: SpecFamily::Llama,
            vocab: 320,
            hidden: 128,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            intermediate: 96,
            layers: 2,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            tied: false,
            std: 0.35,
            rope_theta: 10_000.0,
            rope: RopeSpec::Default,
            max_position: 512,
            dtype: FileDType::F32,
            spelling: ConfigSpelling::Transformers4,
        }
    }
}

/// Added to the mean square in every RMSNorm of the fixtures.
pub const RMS_NORM_EPS: f64 = 1e-6;

impl ModelSpec {
    /// Names, shapes and distributions `(mean, standard deviation)` of all tensors.
    fn tensors(&self) -> Vec<(String, Vec<usize>, f64, f64)> {
        let (hidden, inter) = (self.hidden, self.intermediate);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut list = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab, hidden], 0.0, 1.0),
            ("model.norm.weight".to_owned(), vec![hidden], 1.0, 0.1),
        ];
        if !self.tied {
            list.push(("lm_head.weight".to_owned(), vec![self.vocab, hidden], 0.0, 1.0));
        }
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: &[usize], mean: f64, std: f64| {
                list.push((format!("model.layers.{layer}.{name}"), shape.to_vec(), mean, std));
            };
            add("input_layernorm.weight", &[hidden], 1.0, 0.1);
            add("post_attention_layernorm.weight", &[hidden], 1.0, 0.1);
            for (name, rows) in [("q", q), ("k", kv), ("v", kv)] {
                add(&format!("self_attn.{name}_proj.weight"), &[rows, hidden], 0.0, self.std);
                if self.qkv_bias {
                    add(&format!("self_attn.{name}_proj.bias"), &[rows], 0.0, 1.0);
                }
            }
            add("self_attn.o_proj.weight", &[hidden, q], 0.0, self.std);
            if self.o_bias {
                add("self_attn.o_proj.bias", &[hidden], 0.0, 2.0);
            }
            if self.qk_norm {
                add("self_attn.q_norm.weight", &[self.head_dim], 1.0, 0.3);
                add("self_attn.k_norm.weight", &[self.head_dim], 1.0, 0.3);
            }
            for name in ["gate", "up"] {
                add(&format!("mlp.{name}_proj.weight"), &[inter, hidden], 0.0, self.std);
                if self.mlp_bias {
                    add(&format!("mlp.{name}_proj.bias"), &[inter], 0.0, 1.0);
                }
            }
            add("mlp.down_proj.weight", &[hidden, inter], 0.0, self.std);
            if self.mlp_bias {
                add("mlp.down_proj.bias", &[hidden], 0.0, 2.0);
            }
        }
        list
    }

    /// Normal random weights, each tensor from its own stream, rounded to the file's float type.
    pub fn weights(&self) -> Weights {
        self.tensors()
            .into_iter()
            .map(|(name, shape, mean, std)| {
                let mut random = Random::named(self.seed, &name);
                let next = || self.dtype.round((mean + std * random.normal()) as f32);
                let tensor = Tensor::from_fn(&shape, next);
                (name, tensor)
            })
            .collect()
    }

    /// Weights for models of many MiB, whose values matter less than the time to make them: every
    /// tensor repeats one tile of 65,521 normals from an offset of its own, scaled so that
    /// activations stay finite.
    pub fn weights_tiled(&self) -> Weights {
        let mut random = Random::new(self.seed);
        let tile: Vec<f64> = (0..65_521).map(|_| random.normal()).collect();
        self.tensors()
            .into_iter()
            .map(|(name, shape, mean, std)| {
                let mut at = Random::named(self.seed, &name).below(tile.len() as u64) as usize;
                let std = if shape.len() == 2 { std / (shape[1] as f64 / 128.0).sqrt() } else { std };
                let next = || {
                    at = (at + 1) % tile.len();
                    self.dtype.round((mean + std * tile[at]) as f32)
                };
                let tensor = Tensor::from_fn(&shape, next);
                (name, tensor)
            })
            .collect()
    }

    /// The `config.json`.
    pub fn config_json(&self) -> Value {
        let (architecture, model_type) = match self.family {
            SpecFamily::Llama => ("LlamaForCausalLM", "llama"),
            SpecFamily::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            SpecFamily::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
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
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": 256,
            "eos_token_id": 257,
        });
        if self.family != SpecFamily::Qwen2 {
            config["attention_bias"] = json!(self.o_bias);
        }
        if self.family == SpecFamily::Llama {
            config["mlp_bias"] = json!(self.mlp_bias);
        }
        self.add_rope_and_dtype(&mut config);
        config
    }

    fn add_rope_and_dtype(&self, config: &mut Value) {
        let mut rope = match self.rope {
            RopeSpec::Default => json!({"rope_type": "default"}),
            RopeSpec::Linear(factor) => json!({"rope_type": "linear", "factor": factor}),
            RopeSpec::Llama3(factor, low, high, original) => json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": original,
            }),
        };
        match self.spelling {
            ConfigSpelling::Transformers4 => {
                config["rope_theta"] = json!(self.rope_theta);
                if self.rope != RopeSpec::Default {
                    config["rope_scaling"] = rope;
                }
                config["torch_dtype"] = json!(self.dtype.torch_name());
            }
            ConfigSpelling::Transformers5 => {
                rope["rope_theta"] = json!(self.rope_theta);
                config["rope_parameters"] = rope;
                config["dtype"] = json!(self.dtype.torch_name());
                config["transformers_version"] = json!("5.0.0");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adding_a_tensor_leaves_the_others_alone() {
        let plain = ModelSpec::default().weights();
        let biased = ModelSpec { mlp_bias: true, ..ModelSpec::default() }.weights();
        assert!(biased.len() > plain.len());
        for (name, tensor) in &plain {
            assert_eq!(biased[name], *tensor, "{name}");
        }
    }

    #[test]
    fn values_are_rounded_to_the_float_type_of_the_file() {
        let spec = ModelSpec { dtype: FileDType::Bf16, ..ModelSpec::default() };
        for tensor in spec.weights().values() {
            assert!(tensor.data.iter().all(|v| v.to_bits() & 0xffff == 0));
        }
    }

    #[test]
    fn the_two_spellings_hold_the_same_rope_values() {
        let rope = RopeSpec::Llama3(8.0, 1.0, 4.0, 64);
        let old = ModelSpec { rope, ..ModelSpec::default() }.config_json();
        let spelling = ConfigSpelling::Transformers5;
        let new = ModelSpec { rope, spelling, ..ModelSpec::default() }.config_json();
        assert_eq!(old["rope_scaling"]["factor"], new["rope_parameters"]["factor"]);
        assert_eq!(old["rope_theta"], new["rope_parameters"]["rope_theta"]);
        assert!(new.get("rope_theta").is_none() && new.get("torch_dtype").is_none());
    }
}
