//! GGUF files of every family: config from metadata, names, experts, rope.
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::{Folder, Gguf, f32_bytes};
use lockstep_core::config::rope::{longrope_attention_factor, yarn_attention_factor};
use lockstep_core::{Activation, DType, Family, ModelConfig, RopeConfig, RopeScaling};
use lockstep_weights::ModelFiles;
use std::collections::HashSet;

fn open(gguf: &Gguf) -> Result<ModelFiles, String> {
    let folder = Folder::new();
    // The mapping outlives the folder's names.
    ModelFiles::open(&folder.write("model.gguf", gguf.bytes())).map_err(|e| e.to_string())
}

fn config(gguf: &Gguf) -> ModelConfig {
    open(gguf).unwrap().config().clone()
}

fn gemma3() -> Gguf {
    Gguf::model("gemma3")
        .u32("gemma3.block_count", 7)
        .u32("gemma3.attention.key_length", 6)
        .u32("gemma3.attention.value_length", 6)
        .u32("gemma3.attention.sliding_window", 512)
        .f32("gemma3.rope.freq_base", 1e6)
        .text("gemma3.rope.scaling.type", "linear")
        .f32("gemma3.rope.scaling.factor", 8.0)
}

#[test]
fn gemma3_has_windows_two_ropes_and_norms_with_the_one_added() {
    let c = config(&gemma3());
    assert_eq!((c.family, c.activation), (Family::Gemma3, Activation::GeluTanh));
    assert!(c.sandwich_norms && c.qk_norm && !c.norm_offset && c.tie_word_embeddings);
    assert_eq!((c.embedding_scale, c.attention_scale), (Some(8f32.sqrt()), 6f32.powf(-0.5)));
    assert_eq!(c.sliding_layers, [true, true, true, true, true, false, true]);
    assert_eq!((c.window(0), c.window(5)), (Some(512), None));
    assert_eq!(c.rope, RopeConfig { theta: 1e6, scaling: RopeScaling::Linear { factor: 8.0 } });
    assert_eq!(c.local_rope, Some(RopeConfig::plain(10_000.0)));
    assert_eq!((c.attention_softcap, c.logit_softcap), (None, None));

    // Keys that newer converters write.
    let keyed = gemma3()
        .f32("gemma3.rope.freq_base_swa", 20_000.0)
        .f32("gemma3.final_logit_softcapping", 30.0)
        .f32("gemma3.attention.scale", 0.25)
        .u32("gemma3.attention.sliding_window_pattern", 2);
    let c = config(&keyed);
    assert_eq!(c.local_rope, Some(RopeConfig::plain(20_000.0)));
    assert_eq!((c.logit_softcap, c.attention_scale), (Some(30.0), 0.25));
    assert_eq!(c.sliding_layers, [true, false, true, false, true, false, true]);
    let bools = [7u32.to_le_bytes().as_slice(), &7u64.to_le_bytes(), &[1, 0, 0, 1, 1, 1, 0]].concat();
    let c = config(&gemma3().raw("gemma3.attention.sliding_window_pattern", 9, &bools));
    assert_eq!(c.sliding_layers, [true, false, false, true, true, true, false]);

    // Without a window every layer sees everything; the 27B model scales by its width per head.
    let c = config(&gemma3().without("gemma3.attention.sliding_window").u32("gemma3.block_count", 62));
    assert_eq!((c.sliding_window, c.window(0)), (None, None));
    assert_eq!(c.attention_scale, 4f32.powf(-0.5));
}

#[test]
fn gemma_norms_are_read_as_they_stand() {
    let gguf = gemma3()
        .tensor("output_norm.weight", &[2], 0, f32_bytes([1.5, 0.5]))
        .tensor("blk.0.post_ffw_norm.weight", &[2], 0, f32_bytes([2.0, 3.0]))
        .tensor("blk.0.ffn_norm.weight", &[2], 0, f32_bytes([4.0, 5.0]))
        .tensor("blk.0.post_attention_norm.weight", &[2], 0, f32_bytes([6.0, 7.0]));
    let files = open(&gguf).unwrap();
    let vector = |name: &str| files.read_vector(name, 0..2).unwrap();
    assert_eq!(vector("model.norm.weight"), [1.5, 0.5]);
    assert_eq!(vector("model.layers.0.post_feedforward_layernorm.weight"), [2.0, 3.0]);
    assert_eq!(vector("model.layers.0.pre_feedforward_layernorm.weight"), [4.0, 5.0]);
    assert_eq!(vector("model.layers.0.post_attention_layernorm.weight"), [6.0, 7.0]);
}

#[test]
fn gemma2_has_soft_caps_and_every_other_layer_a_window() {
    let gguf = Gguf::model("gemma2")
        .u32("gemma2.block_count", 3)
        .u32("gemma2.attention.sliding_window", 4096)
        .f32("gemma2.attn_logit_softcapping", 50.0)
        .f32("gemma2.final_logit_softcapping", 30.0);
    let c = config(&gguf);
    assert_eq!(
        (c.attention_softcap, c.logit_softcap, c.sliding_window),
        (Some(50.0), Some(30.0), Some(4096))
    );
    assert_eq!(c.sliding_layers, [true, false, true]);
    assert!(c.local_rope.is_none() && !c.qk_norm && c.sandwich_norms);
    let message = open(&gguf.without("gemma2.attn_logit_softcapping")).unwrap_err();
    assert!(message.contains("no gemma2.attn_logit_softcapping"), "{message}");
}

fn phi3() -> Gguf {
    Gguf::model("phi3")
        .u32("phi3.block_count", 2)
        .u32("phi3.context_length", 128)
        .u32("phi3.attention.head_count_kv", 2)
        .u32("phi3.rope.dimension_count", 2)
        .u32("phi3.rope.scaling.original_context_length", 32)
        .u32("phi3.attention.sliding_window", 0)
        .tensor("blk.0.attn_qkv.weight", &[24, 8], 0, vec![0; 24 * 8 * 4])
        .tensor("blk.0.ffn_up.weight", &[32, 8], 0, vec![0; 32 * 8 * 4])
}

#[test]
fn phi3_is_fused_and_may_turn_a_part_of_each_head() {
    let files = open(&phi3()).unwrap();
    let c = files.config();
    assert_eq!((c.head_dim, c.rotary_dim, c.sliding_window), (4, 2, None));
    assert_eq!(c.rope.scaling, RopeScaling::None);
    files.expect_shape("model.layers.0.self_attn.qkv_proj.weight", &[24, 8]).unwrap();
    files.expect_shape("model.layers.0.mlp.gate_up_proj.weight", &[32, 8]).unwrap();
    let c = config(&phi3().u32("phi3.attention.sliding_window", 47));
    assert_eq!((c.window(0), c.window(1)), (Some(47), Some(47)));
}

#[test]
fn phi3_long_rope_comes_from_tensors() {
    let factors = |name: &str, value: f32| (name.to_owned(), f32_bytes([value]));
    let with = |tensors: &[(String, Vec<u8>)]| {
        tensors.iter().fold(phi3(), |gguf, (name, bytes)| gguf.tensor(name, &[1], 0, bytes.clone()))
    };
    let (short, long) = (factors("rope_factors_short.weight", 1.5), factors("rope_factors_long.weight", 6.0));
    let gguf = with(&[short.clone(), long]);
    let files = open(&gguf).unwrap();
    let expected = |attention_factor: f64| RopeScaling::LongRope {
        short_factor: vec![1.5],
        long_factor: vec![6.0],
        original_max_position: 32,
        attention_factor,
    };
    assert_eq!(files.config().rope.scaling, expected(longrope_attention_factor(4.0, 32)));
    assert_eq!(
        files.unused_report(
            &files.tensor_names().filter(|n| !n.starts_with("rope")).map(str::to_owned).collect()
        ),
        None
    );
    let keyed = gguf.f32("phi3.rope.scaling.attn_factor", 1.25);
    assert_eq!(config(&keyed).rope.scaling, expected(1.25));
    let message = open(&with(&[short])).unwrap_err();
    assert!(message.contains("rope tensors asks for rope_factors_short.weight"), "{message}");
}

#[test]
fn yarn_comes_from_keys() {
    let yarn = Gguf::model("qwen2")
        .text("qwen2.rope.scaling.type", "yarn")
        .f32("qwen2.rope.scaling.factor", 4.0)
        .u32("qwen2.rope.scaling.original_context_length", 32);
    let expected = |attention_factor: f64, beta_fast: f64| RopeScaling::Yarn {
        factor: 4.0,
        original_max_position: 32,
        beta_fast,
        beta_slow: 1.0,
        attention_factor,
        truncate: true,
    };
    let own = yarn_attention_factor(4.0, None, None);
    assert_eq!(config(&yarn).rope.scaling, expected(own, 32.0));
    let keyed = yarn
        .clone()
        .f32("qwen2.rope.scaling.attn_factor", 0.5)
        .f32("qwen2.rope.scaling.yarn_beta_fast", 16.0)
        .f32("qwen2.rope.scaling.yarn_ext_factor", 1.0);
    assert_eq!(config(&keyed).rope.scaling, expected(0.5 * own, 16.0));
    for (gguf, word) in [
        (yarn.clone().without("qwen2.rope.scaling.factor"), "no qwen2.rope.scaling.factor"),
        (yarn.clone().f32("qwen2.rope.scaling.yarn_ext_factor", 0.5), "yarn_ext_factor"),
        (yarn.tensor("rope_freqs.weight", &[2], 0, f32_bytes([1.0, 1.0])), "rope_freqs.weight"),
        (Gguf::model("qwen2").f32("qwen2.rope.scaling.attn_factor", 1.1), "attn_factor"),
        (Gguf::model("qwen2").text("qwen2.rope.scaling.type", "longrope"), "longrope"),
    ] {
        let message = open(&gguf).unwrap_err();
        assert!(message.contains(word), "{message}");
    }
}

fn qwen3moe() -> Gguf {
    Gguf::model("qwen3moe")
        .u32("qwen3moe.block_count", 2)
        .u32("qwen3moe.expert_count", 3)
        .u32("qwen3moe.expert_used_count", 2)
        .u32("qwen3moe.expert_feed_forward_length", 4)
        .tensor("blk.1.ffn_gate_inp.weight", &[3, 8], 0, vec![0; 96])
}

#[test]
fn experts_of_a_layer_become_matrices_under_hugging_face_names() {
    let count_up = |n: usize| f32_bytes((0..n).map(|i| i as f32));
    let blocks: Vec<u8> =
        (0..2 * 34 * 3).map(|i| if i % 34 < 2 { [0x00, 0x3c][i % 34] } else { i as u8 }).collect();
    let gguf = qwen3moe()
        .tensor("blk.1.ffn_gate_exps.weight", &[3, 4, 8], 0, count_up(96))
        .tensor("blk.1.ffn_down_exps.weight", &[3, 8, 4], 0, count_up(96))
        .tensor("blk.1.ffn_up_exps.weight", &[3, 2, 32], 8, blocks.clone());
    let files = open(&gguf).unwrap();
    let moe = files.config().moe.clone().unwrap();
    assert_eq!((moe.num_experts, moe.experts_per_token, moe.expert_intermediate_size), (3, 2, 4));
    assert_eq!((moe.norm_topk_prob, moe.sparse_layers), (true, vec![false, true]));
    files.expect_shape("model.layers.1.mlp.gate.weight", &[3, 8]).unwrap();
    let name = |expert: usize, part: &str| format!("model.layers.1.mlp.experts.{expert}.{part}_proj.weight");
    let mut out = Vec::new();
    for expert in 0..3 {
        files.expect_shape(&name(expert, "down"), &[8, 4]).unwrap();
        assert_eq!(files.read_rows(&name(expert, "gate"), 1..3, 2..4, &mut out).unwrap(), DType::F32);
        let first = 32.0 * expert as f32;
        assert_eq!(out, f32_bytes([first + 10.0, first + 11.0, first + 18.0, first + 19.0]));
        files.read_rows(&name(expert, "up"), 1..2, 5..7, &mut out).unwrap();
        let quants = &blocks[(2 * expert + 1) * 34 + 2..];
        let expected = [quants[5], quants[6]].map(|q| half::bf16::from_f32(f32::from(q as i8)).to_le_bytes());
        assert_eq!(out, expected.concat());
    }
    assert!(files.tensor(&name(3, "up")).is_none());
    let unused = files.unused_report(&HashSet::new()).unwrap();
    assert!(!unused.contains("ffn_"), "{unused}");

    let flag = gguf.clone().raw("qwen3moe.expert_weights_norm", 7, &[0]);
    assert!(!config(&flag).moe.unwrap().norm_topk_prob);
    for (shape, expected) in [
        ([2, 4, 8].as_slice(), "expected 3 (expert_count), found 2"),
        (&[4, 8], "three dimensions, found [4, 8]"),
    ] {
        let bytes = vec![0; 4 * shape.iter().product::<u64>() as usize];
        let message = open(&qwen3moe().tensor("blk.1.ffn_up_exps.weight", shape, 0, bytes)).unwrap_err();
        assert!(message.contains("ffn_up_exps") && message.contains(expected), "{message}");
    }
    assert!(open(&qwen3moe().u32("qwen3moe.expert_count", 1 << 20)).unwrap_err().contains("at most 4096"));
    let mut other = qwen3moe().u32("qwen3moe.expert_gating_func", 2);
    assert!(open(&other).unwrap_err().contains("expert_gating_func"));
    other = qwen3moe().u32("qwen3moe.expert_used_count", 4);
    assert!(open(&other).unwrap_err().contains("num_experts_per_tok"));
}

#[test]
fn keys_that_nobody_knows_are_noted() {
    let gguf = Gguf::model("qwen3").u32("qwen3.newer_than_this", 4).u32("qwen3.attention.sink_tokens", 0);
    let files = open(&gguf).unwrap();
    let report = files.unread_keys_report().unwrap();
    assert!(report.ends_with(": qwen3.attention.sink_tokens, qwen3.newer_than_this"), "{report}");
}

#[test]
fn keys_of_other_families_are_refused() {
    for (gguf, word) in [
        (Gguf::model("llama").u32("llama.attention.sliding_window", 4096), "attention.sliding_window"),
        (Gguf::model("qwen3").f32("qwen3.final_logit_softcapping", 30.0), "final_logit_softcapping"),
        (Gguf::model("qwen3").u32("qwen3.expert_count", 8), "expert_count"),
        (qwen3moe().u32("qwen3moe.expert_shared_count", 1), "expert_shared_count"),
        (Gguf::model("llama").u32("llama.rope.dimension_count", 2), "rope.dimension_count"),
        (Gguf::model("qwen2").u32("qwen2.rope.dimension_count", 6), "rope.dimension_count"),
        (Gguf::model("llama").u32("llama.block_count", 1 << 20), "block_count"),
        (
            Gguf::model("qwen3").f32("qwen3.attention.layer_norm_rms_epsilon", 0.0),
            "layer_norm_rms_epsilon is 0",
        ),
        (Gguf::model("qwen3").u32("qwen3.leading_dense_block_count", 1), "leading_dense_block_count"),
        // Invented: a word of its name says what it is about.
        (
            Gguf::model("qwen3").u32("qwen3.attention.sink_tokens", 4),
            "qwen3.attention.sink_tokens asks for 4",
        ),
        (gemma3().f32("gemma3.attention.sliding_window", 0.5), "sliding_window"),
        (gemma3().text("gemma3.attention.sliding_window_pattern", "LG"), "sliding_window_pattern"),
        (
            Gguf::model("gemma"),
            "architecture gemma is not supported; choose a model of one of these: llama, qwen2",
        ),
        (Gguf::model("phi2"), "architecture phi2 is not supported"),
        (Gguf::model("qwen2moe"), "architecture qwen2moe is not supported"),
    ] {
        let message = open(&gguf).unwrap_err();
        assert!(message.contains(word), "{message}");
    }
}
