//! Every family's config in the spellings found in the wild, and what must be refused.

use super::*;
use crate::config::{Activation, RopeConfig, RopeScaling};
use serde_json::json;

fn llama() -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320,
        "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "max_position_embeddings": 512, "eos_token_id": [2, 3]})
}

fn with(patch: Value) -> Result<ModelConfig> {
    let mut config = llama();
    for (k, v) in patch.as_object().unwrap() {
        config[k] = v.clone();
    }
    parse(config.to_string().as_bytes())
}

fn of(architecture: &str, mut patch: Value) -> Result<ModelConfig> {
    patch["architectures"] = json!([architecture]);
    with(patch)
}

#[test]
fn reads_a_plain_llama() {
    let c = with(json!({})).unwrap();
    assert_eq!((c.head_dim, c.num_kv_heads, c.eos_tokens), (32, 2, vec![2, 3]));
    assert_eq!(c.rope, RopeConfig::plain(500000.0));
    assert!(!c.qkv_bias && !c.qk_norm && !c.tie_word_embeddings && c.sliding_window.is_none());
    assert_eq!((c.activation, c.rotary_dim), (Activation::Silu, 32));
}

#[test]
fn head_dim_given_null_or_absent() {
    assert_eq!(with(json!({"head_dim": 48})).unwrap().head_dim, 48);
    assert_eq!(with(json!({"head_dim": null})).unwrap().head_dim, 32);
    assert!(with(json!({"head_dim": 0})).is_err());
    assert!(with(json!({"hidden_size": 130})).unwrap_err().to_string().contains("hidden_size is 130"));
    assert_eq!(of("Qwen3ForCausalLM", json!({})).unwrap().head_dim, 128);
    assert_eq!(of("Qwen3MoeForCausalLM", moe(json!({}))).unwrap().head_dim, 32);
}

#[test]
fn counts_are_bounded_before_they_size_anything() {
    for (key, got, want) in [
        ("num_hidden_layers", json!(4_000_000_000u64), "1 to 4096"),
        ("num_hidden_layers", json!(u64::MAX), "1 to 4096"),
        ("num_attention_heads", json!(1 << 20), "1 to 4096"),
        ("num_key_value_heads", json!(1 << 20), "1 to 4096"),
        ("head_dim", json!(1 << 20), "1 to 4096"),
        ("hidden_size", json!(1 << 26), "1 to 1048576"),
        ("intermediate_size", json!(1u64 << 40), "1 to 1048576"),
        ("vocab_size", json!(1u64 << 40), "1 to 268435456"),
        ("max_position_embeddings", json!(1u64 << 40), "1 to 268435456"),
        ("num_hidden_layers", json!(-1), "a positive whole number"),
        ("num_hidden_layers", json!(2.5), "a positive whole number"),
    ] {
        let message =
            with(json!({key: got, "head_dim": if key == "head_dim" { got.clone() } else { json!(32) }}));
        let message = message.unwrap_err().to_string();
        assert!(message.contains(key) && message.contains(want), "{key} {got}: {message}");
    }
    for (patch, want) in [
        (json!({"num_experts": 1u64 << 40}), "num_experts is 1099511627776, expected 1 to 4096"),
        (json!({"num_experts": 4096, "num_hidden_layers": 64}), "at most 131072 over the 64 layers"),
        (json!({"moe_intermediate_size": 1u64 << 40}), "moe_intermediate_size"),
        (json!({"mlp_only_layers": [0, 1, 0]}), "a list of at most 2 layer numbers"),
        (json!({"mlp_only_layers": [2]}), "layer numbers below 2"),
    ] {
        let message = of("Qwen3MoeForCausalLM", moe(patch.clone())).unwrap_err().to_string();
        assert!(message.contains(want), "{patch}: {message}");
    }
}

#[test]
fn kv_heads_null_or_absent() {
    assert_eq!(with(json!({"num_key_value_heads": null})).unwrap().num_kv_heads, 4);
    assert_eq!(of("Qwen2ForCausalLM", json!({"num_key_value_heads": null})).unwrap().num_kv_heads, 4);
    let mut config = llama();
    config.as_object_mut().unwrap().remove("num_key_value_heads");
    assert_eq!(parse(config.to_string().as_bytes()).unwrap().num_kv_heads, 4);
    config["architectures"] = json!(["MistralForCausalLM"]);
    let message = parse(config.to_string().as_bytes()).unwrap_err().to_string();
    assert!(message.contains("num_key_value_heads"), "{message}");
}

#[test]
fn both_rope_spellings_read_the_same() {
    let l3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    let old = with(json!({"rope_scaling": l3})).unwrap();
    let mut new = l3.clone();
    new["rope_theta"] = json!(500000.0);
    assert_eq!(old.rope, with(json!({"rope_theta": null, "rope_parameters": new})).unwrap().rope);
}

#[test]
fn every_rope_type() {
    let scaling = |rope: Value| with(json!({"rope_scaling": rope})).unwrap().rope.scaling;
    assert_eq!(scaling(json!({"type": "dynamic", "factor": 2})), RopeScaling::Dynamic);
    assert_eq!(scaling(json!({"type": "linear", "factor": 2})), RopeScaling::Linear { factor: 2.0 });
    let yarn = |patch: Value| {
        let mut rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        rope.as_object_mut().unwrap().extend(patch.as_object().unwrap().clone());
        match scaling(rope) {
            RopeScaling::Yarn { attention_factor, beta_fast, truncate, .. } => {
                (attention_factor, beta_fast, truncate)
            }
            other => panic!("{other:?}"),
        }
    };
    let (strength, beta_fast, truncate) = yarn(json!({}));
    assert!((strength - 1.138_629_436_111_989).abs() < 1e-15 && beta_fast == 32.0 && truncate);
    assert_eq!(yarn(json!({"attention_factor": 1.0, "truncate": false})), (1.0, 32.0, false));
    assert_eq!(yarn(json!({"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 64})), (1.0, 64.0, true));
}

#[test]
fn phi_3_and_4() {
    let factors = |n: usize, v: f64| json!(vec![v; n]);
    // Phi-4-mini: longrope on three quarters of each head, the original context beside the rope values.
    let mini = of(
        "Phi3ForCausalLM",
        json!({"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64, "sliding_window": 100,
            "tie_word_embeddings": true, "rope_scaling": {"type": "longrope",
            "short_factor": factors(12, 1.0), "long_factor": factors(12, 3.0)}}),
    )
    .unwrap();
    assert_eq!((mini.rotary_dim, mini.head_dim, mini.tie_word_embeddings), (24, 32, true));
    assert_eq!((mini.window(0), mini.window(1)), (Some(100), Some(100)));
    let RopeScaling::LongRope { attention_factor, original_max_position, .. } = mini.rope.scaling else {
        panic!("{:?}", mini.rope)
    };
    // 512 / 64 = 8 times the context: sqrt(1 + ln 8 / ln 64) = sqrt(1.5).
    assert!((attention_factor - 1.5f64.sqrt()).abs() < 1e-15 && original_max_position == 64);
    let old = json!({"rope_scaling": {"type": "su", "short_factor": factors(16, 1.0),
        "long_factor": factors(16, 3.0)}});
    assert!(matches!(of("Phi3ForCausalLM", old).unwrap().rope.scaling, RopeScaling::LongRope { .. }));
    let short = json!({"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}});
    assert!(of("Phi3ForCausalLM", short).unwrap_err().to_string().contains("short_factor"));
}

#[test]
fn windows_of_each_family() {
    let mistral = |window: Value| of("MistralForCausalLM", json!({"sliding_window": window})).unwrap();
    assert_eq!(mistral(json!(null)).window(1), None);
    assert_eq!(mistral(json!(40)).window(1), Some(40));
    assert_eq!(of("MistralForCausalLM", json!({})).unwrap().window(0), Some(4096));
    let qwen2 = |patch: Value| of("Qwen2ForCausalLM", patch).unwrap();
    let off = qwen2(json!({"use_sliding_window": false, "sliding_window": 40, "max_window_layers": 0}));
    assert_eq!((off.window(0), off.window(1), off.sliding_window), (None, None, None));
    let on = qwen2(json!({"use_sliding_window": true, "sliding_window": 40, "max_window_layers": 1}));
    assert_eq!((on.window(0), on.window(1)), (None, Some(40)));
    let listed = qwen2(json!({"use_sliding_window": true, "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"]}));
    assert_eq!((listed.window(0), listed.window(1)), (Some(40), None));
    // Models whose window starts after their last layer have none.
    assert_eq!(qwen2(json!({"use_sliding_window": true, "max_window_layers": 28})).sliding_window, None);
}

#[test]
fn gemma_2() {
    let c = of(
        "Gemma2ForCausalLM",
        json!({"head_dim": 32, "query_pre_attn_scalar": 64, "sliding_window": 40,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu",
        "hidden_activation": "gelu_pytorch_tanh"}),
    )
    .unwrap();
    assert!(c.norm_offset && c.sandwich_norms && c.tie_word_embeddings && !c.qk_norm);
    assert_eq!((c.window(0), c.window(1)), (Some(40), None));
    assert_eq!((c.attention_softcap, c.logit_softcap), (Some(50.0), Some(30.0)));
    assert_eq!((c.attention_scale, c.activation), (0.125, Activation::GeluTanh));
    assert_eq!(c.embedding_scale, Some(128f32.sqrt()));
    let uncapped = json!({"attn_logit_softcapping": null, "final_logit_softcapping": null});
    let c = of("Gemma2ForCausalLM", uncapped).unwrap();
    assert_eq!((c.attention_softcap, c.logit_softcap), (None, None));
}

/// google/gemma-3-4b-it: a nested text_config that leaves out what equals its class defaults.
#[test]
fn gemma_3_nested_and_flat() {
    let text = json!({"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "text_config": {"hidden_size": 2560,
        "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}});
    let c = parse(text.to_string().as_bytes()).unwrap();
    assert_eq!((c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size), (8, 4, 256, 262_208));
    assert_eq!(c.eos_tokens, [1, 106]);
    assert_eq!((c.window(4), c.window(5), c.window(33)), (Some(1024), None, Some(1024)));
    assert_eq!(c.rope_of(5).scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!((c.rope_of(5).theta, c.rope_of(0)), (1e6, &RopeConfig::plain(10_000.0)));
    assert!(c.qk_norm && c.logit_softcap.is_none() && c.attention_scale == 0.0625);
    // The same in the spelling of transformers 5.
    let mut five = text.clone();
    let nested = five["text_config"].as_object_mut().unwrap();
    nested.remove("rope_scaling");
    nested.insert(
        "rope_parameters".into(),
        json!({
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    );
    assert_eq!(parse(five.to_string().as_bytes()).unwrap(), c);
}

fn moe(patch: Value) -> Value {
    let mut config = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32});
    config.as_object_mut().unwrap().extend(patch.as_object().unwrap().clone());
    config
}

#[test]
fn qwen3_moe() {
    let sparse = |patch: Value| of("Qwen3MoeForCausalLM", moe(patch)).unwrap().moe.unwrap();
    let all = sparse(json!({"norm_topk_prob": true}));
    assert_eq!((all.num_experts, all.experts_per_token, all.norm_topk_prob), (8, 2, true));
    assert_eq!(all.sparse_layers, [true, true]);
    assert_eq!(sparse(json!({"decoder_sparse_step": 2})).sparse_layers, [false, true]);
    assert_eq!(sparse(json!({"mlp_only_layers": [1]})).sparse_layers, [true, false]);
    assert!(!sparse(json!({})).norm_topk_prob);
    let message = of("Qwen3MoeForCausalLM", json!({})).unwrap_err().to_string();
    assert!(message.contains("num_experts"), "{message}");
}

/// The keys of well-known checkpoints, those that say nothing new included.
#[test]
fn files_as_found() {
    let read = |text: &str| parse(text.as_bytes()).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let llama = read(
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 128256}"#,
    );
    assert_eq!((llama.head_dim, llama.eos_tokens.len()), (128, 3));
    let qwen = read(
        r#"{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 27648, "max_position_embeddings": 32768, "max_window_layers": 64,
        "model_type": "qwen2", "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 152064}"#,
    );
    assert!(qwen.qkv_bias && !qwen.o_bias && qwen.sliding_window.is_none());
    let moe = read(
        r#"{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false,
        "vocab_size": 151936}"#,
    );
    assert_eq!(moe.moe.unwrap().sparse_layers, [true; 48]);
    let phi4_mini = read(&format!(
        r#"{{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "bos_token_id": 199999,
        "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": false,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": {{"long_factor": {0:?},
        "short_factor": {0:?}, "type": "longrope"}}, "rope_theta": 10000.0, "sliding_window": 262144,
        "tie_word_embeddings": true, "vocab_size": 200064}}"#,
        [1.5; 48]
    ));
    assert_eq!((phi4_mini.rotary_dim, phi4_mini.window(0)), (96, Some(262_144)));
    let gemma = read(
        r#"{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": 50.0,
        "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "intermediate_size": 36864,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 32,
        "num_hidden_layers": 46, "num_key_value_heads": 16, "pad_token_id": 0, "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
        "use_cache": true, "vocab_size": 256000}"#,
    );
    assert_eq!((gemma.attention_scale, gemma.window(45)), (1.0 / 12.0, None));
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    for (patch, word) in [
        (json!({"rope_theta": null}), "rope_theta"),
        (json!({"rope_scaling": {"rope_type": "su", "factor": 2}}), "su"),
        (json!({"rope_scaling": {"factor": 2}}), "rope_type"),
        (json!({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}), "mrope_section"),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "rope factor"),
        (
            json!({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2}}),
            "\"linear\", as rope_type",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}),
            "as in rope_parameters",
        ),
        (json!({"rope_parameters": {"rope_theta": 1000.0}}), "rope rope_theta is 1000.0, expected 500000"),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}),
            "high_freq_factor is 4.0, expected more than low_freq_factor 4",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 8, "beta_fast": 1}}),
            "more than beta_slow 1",
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 32},
                "original_max_position_embeddings": 64}),
            "original_max_position_embeddings is 32.0, expected 64",
        ),
        (
            json!({"rope_scaling": {"rope_type": "longrope", "factor": 2, "short_factor": vec![0; 16],
                "long_factor": vec![1; 16]}}),
            "rope short_factor is a list whose number 1 is 0, expected 16 positive numbers",
        ),
        (json!({"model_type": "qwen2"}), "model_type is \"qwen2\", expected \"llama\""),
        (json!({"model_type": "something_new"}), "something_new"),
        (json!({"architectures": "LlamaForCausalLM"}), "architectures"),
        (json!({"text_config": {}}), "text_config.hidden_size is null, expected 128"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}), "full_attention"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (json!({"quantization_config": {"quant_method": "bitsandbytes"}}), "bitsandbytes"),
        (json!({"architectures": ["MambaForCausalLM"]}), "MambaForCausalLM"),
        (json!({"vocab_size": "many"}), "vocab_size"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        (json!({"sliding_window": 40}), "sliding_window"),
        (json!({"num_experts": 4}), "num_experts"),
        (json!({"logits_scaling": 8.0}), "logits_scaling"),
        (json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping"),
        (json!({"architectures": ["Phi3ForCausalLM"], "lm_head_bias": true}), "lm_head_bias"),
        (json!({"architectures": ["MistralForCausalLM"], "attention_bias": true}), "attention_bias"),
        (json!({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}), "attn_logit"),
        (
            json!({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": true}),
            "bidirectional",
        ),
        (
            json!({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention", "x"]}),
            "linear_att",
        ),
    ] {
        let message = with(patch).unwrap_err().to_string();
        assert!(message.contains(word), "{word}: {message}");
    }
    assert!(parse(b"").unwrap_err().to_string().contains("not a JSON object"));
    assert!(parse(b"[]").unwrap_err().to_string().contains("a list"));
}

#[test]
fn quantization_is_read_beside_the_model() {
    let mut config = llama();
    assert_eq!(quantization(config.to_string().as_bytes()).unwrap(), None);
    config["quantization_config"] = json!({"quant_method": "awq", "bits": 4, "group_size": 128});
    let text = config.to_string();
    assert!(parse(text.as_bytes()).is_ok());
    assert_eq!(
        quantization(text.as_bytes()).unwrap(),
        Some(QuantizationConfig::Awq { bits: 4, group_size: Some(128) })
    );
}

#[test]
fn the_element_type_in_both_spellings() {
    let of = |config: Value| dtype(config.to_string().as_bytes());
    assert_eq!(of(json!({"torch_dtype": "bfloat16"})).unwrap(), Some(DType::Bf16));
    assert_eq!(of(json!({"dtype": "float16", "torch_dtype": null})).unwrap(), Some(DType::F16));
    assert_eq!(
        of(json!({"dtype": "float32", "text_config": {"dtype": "bfloat16"}})).unwrap(),
        Some(DType::Bf16)
    );
    assert_eq!(of(json!({})).unwrap(), None);
    assert!(of(json!({"dtype": "int8"})).unwrap_err().to_string().contains("\"int8\""));
    assert!(of(json!({"dtype": 16})).unwrap_err().to_string().contains("dtype is 16"));
}

#[test]
fn illegal_tp_sizes_say_what_works() {
    let c = with(json!({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192})).unwrap();
    let message = crate::shard::check_tp_size(&c, 3).unwrap_err().to_string();
    assert_eq!(
        message,
        "--tp 3 neither divides the model's 2 KV heads nor is a multiple of them (6 query heads); \
         tp sizes that work for this model: 1, 2, 6"
    );
    assert!(crate::shard::check_tp_size(&c, 0).is_err());
    assert!(crate::shard::check_tp_size(&c, 4).unwrap_err().to_string().contains("6 query heads"));
    let heads = json!({"num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 12});
    let c = of("Qwen3MoeForCausalLM", moe(heads)).unwrap();
    assert_eq!(
        crate::shard::check_tp_size(&c, 8).unwrap_err().to_string(),
        "--tp 8 does not divide the inner width 12 of the model's experts; \
         tp sizes that work for this model: 1, 2, 4"
    );
}

#[test]
fn keys_that_nobody_knows_are_noted() {
    let unread = |patch: Value| {
        let mut config = llama();
        let known = json!({"model_type": "llama", "attention_bias": false, "mlp_bias": false, "attention_dropout": 0.0,
            "pretraining_tp": 1, "use_cache": true, "torch_dtype": "bfloat16", "transformers_version": "4.50.0",
            "initializer_range": 0.02, "_name_or_path": "x", "rope_scaling": null, "bos_token_id": 1, "hidden_act": "silu",
            "tie_word_embeddings": false});
        for (key, value) in known.as_object().unwrap().iter().chain(patch.as_object().unwrap()) {
            config[key] = value.clone();
        }
        parse_noting(config.to_string().as_bytes()).unwrap().1
    };
    assert_eq!(unread(json!({})), Vec::<String>::new());
    assert_eq!(unread(json!({"newer_than_this": 1, "absent_after_all": null})), ["newer_than_this"]);
}

/// Keys that change the mathematics of other models, and keys that are newer than this reader.
#[test]
fn keys_that_would_change_the_answers_are_refused() {
    for (key, value) in [
        ("position_embedding_type", json!("alibi")),
        ("rotary_pct", json!(0.25)),
        ("use_parallel_residual", json!(true)),
        ("parallel_attn", json!(true)),
        ("norm_type", json!("layer_norm")),
        ("attn_scale", json!(0.5)),
        ("scale_embeddings", json!(true)),
        ("qkv_bias", json!(true)),
        ("bias", json!(true)),
        ("use_bias", json!(true)),
        ("is_encoder_decoder", json!(true)),
        ("is_causal", json!(false)),
        ("scoring_func", json!("sigmoid")),
        ("routed_scaling_factor", json!(2.5)),
        ("n_group", json!(8)),
        ("topk_method", json!("noaux_tc")),
        ("first_k_dense_replace", json!(3)),
        ("num_shared_experts", json!(1)),
        ("pruned_heads", json!({"0": [1]})),
        ("quantization", json!({"group_size": 64, "bits": 4})),
        // Invented: the words of their names say what they are about.
        ("per_layer_temperature", json!([1.0, 2.0])),
        ("attention_sink_tokens", json!(4)),
        ("gated_residual", json!("tanh")),
    ] {
        let message = of("Qwen3MoeForCausalLM", moe(json!({key: value}))).unwrap_err().to_string();
        assert!(message.contains(&format!("config key {key} asks for")), "{message}");
    }
    let neutral = json!({"position_embedding_type": "rope", "rotary_pct": 1.0, "use_parallel_residual": false,
        "norm_type": "RMSNorm", "attn_scale": 1, "bias": false, "is_causal": true, "scoring_func": "softmax",
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 0, "first_k_dense_replace": 0, "pruned_heads": {},
        "per_layer_temperature": null, "attention_sink_tokens": 0, "gated_residual": ""});
    assert!(of("Qwen3MoeForCausalLM", moe(neutral)).is_ok());
    assert!(of("Qwen2ForCausalLM", json!({"qkv_bias": true})).unwrap().qkv_bias);
    assert!(of("Qwen2ForCausalLM", json!({"qkv_bias": false})).unwrap_err().to_string().contains("qkv_bias"));
}

/// What transformers 4.3x wrote into the nested config of a model, generation settings and all.
#[test]
fn bookkeeping_of_a_full_dump_passes_in_silence() {
    let dump: Value = serde_json::from_str(
        r#"{"return_dict": true, "output_hidden_states": false, "torchscript": false, "use_bfloat16": false,
        "tf_legacy_loss": false, "pruned_heads": {}, "chunk_size_feed_forward": 0, "is_encoder_decoder": false,
        "is_decoder": false, "add_cross_attention": false, "tie_encoder_decoder": false, "max_length": 20,
        "min_length": 0, "do_sample": false, "early_stopping": false, "num_beams": 1, "num_beam_groups": 1,
        "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
        "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0, "num_return_sequences": 1, "output_scores": false,
        "return_dict_in_generate": false, "remove_invalid_values": false, "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0}, "attn_implementation": "sdpa", "use_flash_attn": true, "unsloth_fixed": true,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "is_llama_config": true,
        "rope_interleaved": false, "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02,
        "tokenizer_class": "X", "use_mrope": false}"#,
    )
    .unwrap();
    let mut config = llama();
    config.as_object_mut().unwrap().extend(dump.as_object().unwrap().clone());
    let (_, unread) = parse_noting(config.to_string().as_bytes()).unwrap();
    assert_eq!(unread, Vec::<String>::new());
}
