//! GGUF files: config from metadata, names, row order, block types.
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::{Folder, Gguf, f32_bytes};
use lockstep_core::{DType, Family, RopeScaling};
use lockstep_weights::{ModelFiles, StorageKind};
use std::collections::HashSet;

fn open(gguf: &Gguf) -> Result<ModelFiles, String> {
    let folder = Folder::new();
    // The mapping outlives the folder's names.
    ModelFiles::open(&folder.write("model.gguf", gguf.bytes())).map_err(|e| e.to_string())
}

#[test]
fn metadata_becomes_a_config() {
    let gguf = Gguf::model("qwen2")
        .tensor("blk.0.attn_q.bias", &[8], 0, f32_bytes([0.5; 8]))
        .u32("tokenizer.ggml.eot_token_id", 2)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eom_token_id", 3)
        .u32("general.file_type", 15);
    let files = open(&gguf).unwrap();
    let config = files.config();
    assert_eq!((config.family, config.hidden_size, config.intermediate_size), (Family::Qwen2, 8, 16));
    assert_eq!((config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim), (1, 2, 1, 4));
    assert_eq!((config.vocab_size, config.max_position, config.bos_token), (4, 64, Some(1)));
    assert_eq!((config.rope.theta, config.rms_norm_eps), (10_000.0, 1e-6));
    assert!(
        config.tie_word_embeddings
            && config.qkv_bias
            && !config.o_bias
            && !config.mlp_bias
            && !config.qk_norm
    );
    assert_eq!(files.eos_tokens(), [2, 3]);
    assert_eq!(files.source_label(), "gguf Q4_K_M");
    assert!(files.folder().is_none());
    let metadata = files.gguf().unwrap();
    assert_eq!(metadata.tokens().unwrap().collect::<Vec<_>>(), ["a", "é", "漢", "<end>"]);
    assert_eq!(metadata.tokens().unwrap().len(), 4);
    assert_eq!((metadata.add_bos(), metadata.chat_template()), (None, None));
    let report = files.unused_report(&HashSet::from(["model.embed_tokens.weight".to_owned()])).unwrap();
    assert!(report.ends_with(": model.layers.0.self_attn.q_proj.bias"), "{report}");

    let untied = open(&gguf.tensor("output.weight", &[4, 8], 0, vec![0; 128])).unwrap();
    assert!(!untied.config().tie_word_embeddings);
    let wide = open(&Gguf::model("qwen3").u32("qwen3.attention.key_length", 6)).unwrap();
    assert!(wide.config().head_dim == 6 && wide.config().qk_norm);
}

#[test]
fn every_width_of_value_is_read() {
    let array = |kind: u32, values: &[u8], count: u64| {
        [kind.to_le_bytes().as_slice(), &count.to_le_bytes(), values].concat()
    };
    let gguf = Gguf::model("llama")
        .raw("u8", 0, &[200])
        .raw("i8", 1, &[200])
        .raw("i16", 3, &(-300i16).to_le_bytes())
        .raw("u64", 10, &u64::MAX.to_le_bytes())
        .raw("i64", 11, &(-1i64).to_le_bytes())
        .raw("f64", 12, &0.1f64.to_le_bytes())
        .raw("yes", 7, &[1])
        .raw("types", 9, &array(5, &[1i32.to_le_bytes(), (-2i32).to_le_bytes()].concat(), 2))
        .raw("scores", 9, &array(6, &f32_bytes([0.5, -1.0]), 2))
        .raw("none", 9, &array(8, &[], 0));
    let files = open(&gguf).unwrap();
    let m = files.gguf().unwrap();
    assert_eq!((m.integer("u8"), m.integer("i8"), m.integer("i16")), (Some(200), Some(-56), Some(-300)));
    assert_eq!((m.integer("u64"), m.integer("i64"), m.number("f64")), (None, Some(-1), Some(0.1)));
    assert_eq!((m.flag("yes"), m.integer("yes"), m.text("yes")), (Some(true), None, None));
    assert_eq!(m.integers("types").unwrap().collect::<Vec<_>>(), [1, -2]);
    assert_eq!(m.numbers("scores").unwrap().collect::<Vec<_>>(), [0.5, -1.0]);
    assert_eq!(m.texts("none").unwrap().len(), 0);
    assert!(m.integers("scores").is_none() && m.texts("types").is_none() && m.integer("types").is_none());
    assert_eq!((m.describe("types"), m.describe("f64")), ("an array of 2".into(), "0.1".into()));
}

#[test]
fn rope_scaling_comes_from_keys_or_a_tensor() {
    let linear =
        Gguf::model("qwen2").text("qwen2.rope.scaling.type", "linear").f32("qwen2.rope.scaling.factor", 4.0);
    assert_eq!(open(&linear).unwrap().config().rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let old = Gguf::model("llama").f32("llama.rope.scale_linear", 2.0).without("llama.rope.freq_base");
    let rope = &open(&old).unwrap().config().rope.clone();
    assert_eq!((rope.theta, &rope.scaling), (10_000.0, &RopeScaling::Linear { factor: 2.0 }));
    let freqs = Gguf::model("llama").tensor("rope_freqs.weight", &[2], 0, f32_bytes([1.0, 8.0]));
    let files = open(&freqs).unwrap();
    assert_eq!(files.config().rope.scaling, RopeScaling::Divisors { divisors: vec![1.0, 8.0] });
    assert_eq!(files.unused_report(&HashSet::from(["model.embed_tokens.weight".to_owned()])), None);
    let wrong = Gguf::model("llama").tensor("rope_freqs.weight", &[3], 0, f32_bytes([1.0, 8.0, 9.0]));
    assert!(open(&wrong).unwrap_err().contains("expected 2 positive numbers"));
}

#[test]
fn what_is_not_understood_is_refused_by_key() {
    for (gguf, word) in [
        (Gguf::model("mamba"), "architecture mamba is not supported"),
        (Gguf::model("llama").without("llama.block_count"), "no llama.block_count"),
        (Gguf::model("llama").text("llama.block_count", "x"), "block_count is \"x\""),
        (Gguf::model("llama").u32("llama.expert_count", 8), "expert_count asks for 8"),
        (Gguf::model("llama").text("llama.rope.scaling.type", "su"), "\"su\""),
        (Gguf::model("llama").u32("llama.rope.dimension_count", 2), "rope.dimension_count asks for 2"),
        (Gguf::model("llama").f32("llama.logit_scale", 0.5), "logit_scale"),
        (Gguf::model("llama").u32("llama.attention.head_count_kv", 3), "num_key_value_heads is 3"),
        (Gguf::model("llama").u32("llama.embedding_length", 9), "embedding_length is 9"),
        (Gguf::model("llama").texts("tokenizer.ggml.tokens", &["a"; 5]), "5 tokens"),
        (Gguf::model("llama").u32("general.alignment", 24), "a power of two"),
        (Gguf::model("qwen2").tensor("blk.0.attn_q_norm.weight", &[4], 0, vec![0; 16]), "attn_q_norm"),
        (
            Gguf::model("llama").tensor("blk.0.attn_q.weight", &[6, 8], 0, vec![0; 192]),
            "multiple of the head size 4",
        ),
        (
            Gguf::model("llama").tensor("blk.0.ffn_up.weight", &[2, 48], 8, vec![0; 102]),
            "multiple of 32 elements",
        ),
    ] {
        let message = open(&gguf).unwrap_err();
        assert!(message.contains(word) && message.contains("model.gguf"), "{message}");
    }
}

#[test]
fn llama_queries_and_keys_come_back_in_hugging_face_order() {
    // What convert_hf_to_gguf.py does: per head [2, d/2] becomes [d/2, 2].
    let permuted = |heads: usize| -> Vec<f32> {
        (0..heads).flat_map(|h| [0, 2, 1, 3].map(|i| (h * 4 + i) as f32)).collect()
    };
    let wide = |rows: Vec<f32>| f32_bytes(rows.into_iter().flat_map(|r| [r; 8]));
    let with = |architecture: &str| {
        Gguf::model(architecture)
            .tensor("blk.0.attn_q.weight", &[8, 8], 0, wide(permuted(2)))
            .tensor("blk.0.attn_k.weight", &[4, 8], 0, wide(permuted(1)))
            .tensor("blk.0.attn_v.weight", &[4, 8], 0, wide(permuted(1)))
            .tensor("blk.0.attn_q.bias", &[8], 0, f32_bytes(permuted(2)))
    };
    let rows = |files: &ModelFiles, name: &str, rows| {
        let mut out = Vec::new();
        assert_eq!(files.read_rows(name, rows, 3..4, &mut out).unwrap(), DType::F32);
        out.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
    };
    let (q, k, v) = ("q_proj.weight", "k_proj.weight", "v_proj.weight");
    let name = |part: &str| format!("model.layers.0.self_attn.{part}");
    let llama = open(&with("llama")).unwrap();
    assert_eq!(rows(&llama, &name(q), 0..8), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    assert_eq!(rows(&llama, &name(q), 5..7), [5.0, 6.0]);
    assert_eq!(rows(&llama, &name(k), 0..4), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(rows(&llama, &name(v), 0..4), [0.0, 2.0, 1.0, 3.0]);
    assert_eq!(llama.read_vector(&name("q_proj.bias"), 5..8).unwrap(), [5.0, 6.0, 7.0]);
    let qwen = open(&with("qwen2")).unwrap();
    assert_eq!(rows(&qwen, &name(q), 0..4), [0.0, 2.0, 1.0, 3.0]);
    assert_eq!(qwen.read_vector(&name("q_proj.bias"), 0..4).unwrap(), [0.0, 2.0, 1.0, 3.0]);
}

#[test]
fn unreadable_block_types_are_refused_when_they_are_read() {
    let files =
        open(&Gguf::model("qwen2").tensor("blk.0.ffn_up.weight", &[1, 256], 23, vec![0; 136])).unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    assert_eq!(files.tensor(name).unwrap().stored, StorageKind::Unsupported("IQ4_XS"));
    let message = files.read_rows(name, 0..1, 0..256, &mut Vec::new()).unwrap_err().to_string();
    assert!(message.contains("stored as IQ4_XS") && message.contains("Q4_K"), "{message}");
}
