//! What a tiny model is made of: its shape, its random weights and its `config.json`.
//!
//! Tensor names follow the Hugging Face checkpoints of each family; the config is written in
//! `config`. Called by [`crate::fixtures`] and by tests that need a model of their own size.

mod config;

use crate::random::Random;
use crate::tensor::{FileDType, Tensor, Weights};

/// A model family; decides the architecture's name and which keys its config has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecFamily {
    /// Llama; biases only where the config says so.
    Llama,
    /// Llama with biases on q, k and v.
    Qwen2,
    /// Llama with a per-head norm on q and k.
    Qwen3,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// Llama with a window on every layer.
    Mistral,
    /// Llama whose files hold q|k|v and gate|up in one tensor each.
    Phi3,
    /// Norms on both sides of attention and MLP, caps, a window on every other layer.
    Gemma2,
    /// Gemma 2 with q/k norms instead of caps, and another rope on the window layers.
    Gemma3,
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
    /// Plain inside `max_position`; the factor matters only beyond.
    Dynamic(f64),
    /// YaRN: factor, original context in tokens, attention factor if the file gives one.
    Yarn(f64, usize, Option<f64>),
    /// LongRoPE: divisors for contexts up to the original one, divisors beyond, original context in
    /// tokens.
    LongRope(&'static [f64], &'static [f64], usize),
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSpec {
    /// Experts of a sparse layer.
    pub count: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// Inner width of one expert.
    pub inner: usize,
    /// The chosen probabilities are divided by their sum.
    pub normalised: bool,
    /// Every so many layers one is sparse.
    pub step: usize,
    /// Layers that are dense in any case.
    pub dense_layers: &'static [usize],
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
    /// Positions that a token of a window layer sees, itself included.
    pub window: Option<usize>,
    /// Qwen2 and Qwen3: the first window layer. Gemma 3: every so many layers one sees all.
    pub window_start: usize,
    /// Part of each head that rope turns.
    pub rotary_part: f64,
    /// Gemma 3: base of the rope frequencies of window layers.
    pub local_theta: f64,
    /// Gemma: the scores are divided by the root of this instead of the head's size.
    pub query_scalar: f64,
    /// Gemma 2: cap of the scores.
    pub score_cap: Option<f64>,
    /// Gemma: cap of the logits.
    pub logit_cap: Option<f64>,
    /// Qwen3-MoE: the experts.
    pub experts: Option<ExpertSpec>,
    /// Gemma 3: the text model lies inside one that also sees images.
    pub nested: bool,
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
            window: None,
            window_start: 0,
            rotary_part: 1.0,
            local_theta: 10_000.0,
            query_scalar: 32.0,
            score_cap: None,
            logit_cap: None,
            experts: None,
            nested: false,
        }
    }
}

/// Added to the mean square in every RMSNorm of the fixtures.
pub const RMS_NORM_EPS: f64 = 1e-6;

impl ModelSpec {
    /// Norms on both sides of attention and MLP, stored less 1; scaled embeddings; tanh gelu.
    pub fn is_gemma(&self) -> bool {
        matches!(self.family, SpecFamily::Gemma2 | SpecFamily::Gemma3)
    }

    /// Whether `layer` sees only the window.
    pub fn slides(&self, layer: usize) -> bool {
        self.window.is_some()
            && match self.family {
                SpecFamily::Qwen2 | SpecFamily::Qwen3 => layer >= self.window_start,
                SpecFamily::Gemma2 => layer.is_multiple_of(2),
                SpecFamily::Gemma3 => !(layer + 1).is_multiple_of(self.window_start),
                _ => true,
            }
    }

    /// The experts of `layer`, if it has any.
    pub fn experts_of(&self, layer: usize) -> Option<ExpertSpec> {
        let sparse = |e: &ExpertSpec| (layer + 1).is_multiple_of(e.step) && !e.dense_layers.contains(&layer);
        self.experts.filter(sparse)
    }

    /// Elements of each head that rope turns.
    pub fn rotary_dim(&self) -> usize {
        (self.head_dim as f64 * self.rotary_part) as usize
    }

    /// Names, shapes and distributions of all tensors.
    fn tensors(&self) -> Vec<TensorSpec> {
        // Gemma multiplies embeddings by sqrt(hidden); smaller ones leave the layers their say.
        let (norm, embedding_std) = if self.is_gemma() { (0.0, 0.1) } else { (1.0, 1.0) };
        let mut list = vec![
            TensorSpec::new("model.embed_tokens.weight", &[self.vocab, self.hidden], 0.0, embedding_std),
            TensorSpec::new("model.norm.weight", &[self.hidden], norm, 0.1),
        ];
        if !self.tied {
            list.push(TensorSpec::new("lm_head.weight", &[self.vocab, self.hidden], 0.0, 1.0));
        }
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: &[usize], mean: f64, std: f64| {
                list.push(TensorSpec::new(&format!("model.layers.{layer}.{name}"), shape, mean, std));
            };
            add("input_layernorm.weight", &[self.hidden], norm, 0.1);
            add("post_attention_layernorm.weight", &[self.hidden], norm, 0.1);
            if self.is_gemma() {
                add("pre_feedforward_layernorm.weight", &[self.hidden], norm, 0.1);
                add("post_feedforward_layernorm.weight", &[self.hidden], norm, 0.1);
            }
            self.attention_tensors(norm, &mut add);
            match self.experts_of(layer) {
                None => self.mlp_tensors("mlp", self.intermediate, &mut add),
                Some(experts) => {
                    add("mlp.gate.weight", &[experts.count, self.hidden], 0.0, self.std);
                    for e in 0..experts.count {
                        self.mlp_tensors(&format!("mlp.experts.{e}"), experts.inner, &mut add);
                    }
                }
            }
        }
        list
    }

    fn attention_tensors(&self, norm: f64, add: &mut Add<'_>) {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        if self.family == SpecFamily::Phi3 {
            add("self_attn.qkv_proj.weight", &[q + 2 * kv, self.hidden], 0.0, self.std);
        } else {
            for (name, rows) in [("q", q), ("k", kv), ("v", kv)] {
                add(&format!("self_attn.{name}_proj.weight"), &[rows, self.hidden], 0.0, self.std);
                if self.qkv_bias {
                    add(&format!("self_attn.{name}_proj.bias"), &[rows], 0.0, 1.0);
                }
            }
        }
        add("self_attn.o_proj.weight", &[self.hidden, q], 0.0, self.std);
        if self.o_bias {
            add("self_attn.o_proj.bias", &[self.hidden], 0.0, 2.0);
        }
        if self.qk_norm {
            add("self_attn.q_norm.weight", &[self.head_dim], norm, 0.3);
            add("self_attn.k_norm.weight", &[self.head_dim], norm, 0.3);
        }
    }

    fn mlp_tensors(&self, prefix: &str, inner: usize, add: &mut Add<'_>) {
        if self.family == SpecFamily::Phi3 {
            add(&format!("{prefix}.gate_up_proj.weight"), &[2 * inner, self.hidden], 0.0, self.std);
        } else {
            for name in ["gate", "up"] {
                add(&format!("{prefix}.{name}_proj.weight"), &[inner, self.hidden], 0.0, self.std);
                if self.mlp_bias {
                    add(&format!("{prefix}.{name}_proj.bias"), &[inner], 0.0, 1.0);
                }
            }
        }
        add(&format!("{prefix}.down_proj.weight"), &[self.hidden, inner], 0.0, self.std);
        if self.mlp_bias {
            add(&format!("{prefix}.down_proj.bias"), &[self.hidden], 0.0, 2.0);
        }
    }

    /// Normal random weights, each tensor from its own stream, rounded to the file's float type.
    pub fn weights(&self) -> Weights {
        self.tensors()
            .into_iter()
            .map(|TensorSpec { name, shape, mean, std }| {
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
            .map(|TensorSpec { name, shape, mean, std }| {
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
}

/// Takes the name inside a layer, the shape, the mean and the standard deviation of a tensor.
type Add<'a> = dyn FnMut(&str, &[usize], f64, f64) + 'a;

/// One tensor before its values are drawn.
struct TensorSpec {
    name: String,
    shape: Vec<usize>,
    mean: f64,
    std: f64,
}

impl TensorSpec {
    fn new(name: &str, shape: &[usize], mean: f64, std: f64) -> Self {
        Self { name: name.to_owned(), shape: shape.to_vec(), mean, std }
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
