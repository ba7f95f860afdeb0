//! The same model as a Hugging Face folder and as a GGUF file, for every family: equal configs and
//! equal tensors, however differently the two say it.
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::Folder;
use lockstep_core::{ModelConfig, RopeConfig};
use lockstep_testkit::gguf::model;
use lockstep_testkit::safetensors;
use lockstep_testkit::spec::{ExpertSpec, ModelSpec, RopeSpec, SpecFamily};
use lockstep_weights::ModelFiles;

fn spec(family: SpecFamily) -> ModelSpec {
    ModelSpec {
        family,
        vocab: 40,
        hidden: 32,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        intermediate: 24,
        ..ModelSpec::default()
    }
}

/// The two forms of a model.
fn both(spec: &ModelSpec) -> (ModelFiles, ModelFiles) {
    let weights = spec.weights();
    let folder = Folder::new();
    folder.write("config.json", spec.config_json().to_string());
    folder.write("model.safetensors", safetensors::encode(&weights, spec.dtype));
    let gguf = folder.write("other/model.gguf", model::from_spec(spec, &weights).encode());
    (ModelFiles::open(folder.path()).unwrap(), ModelFiles::open(&gguf).unwrap())
}

fn assert_close(what: &str, a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-6 * a.abs().max(b.abs()), "{what}: {a} and {b}");
}

fn assert_same_rope(what: &str, c: &ModelConfig, (a, b): (&RopeConfig, &RopeConfig)) {
    for context in [16, c.max_position] {
        let [a, b] = [a, b].map(|rope| rope.frequencies(c.rotary_dim, context));
        assert_close(what, a.attention_factor, b.attention_factor);
        assert_eq!(a.inverse.len(), b.inverse.len(), "{what}");
        a.inverse.iter().zip(&b.inverse).for_each(|(a, b)| assert_close(what, *a, *b));
    }
}

/// Everything but rope and what GGUF says in its own way.
fn assert_same_config(what: &str, hf: &ModelConfig, gguf: &ModelConfig) {
    for layer in 0..hf.num_layers {
        assert_same_rope(what, hf, (hf.rope_of(layer), gguf.rope_of(layer)));
    }
    assert_close(what, f64::from(hf.attention_scale), f64::from(gguf.attention_scale));
    let normalised = ModelConfig {
        architecture: hf.architecture.clone(),
        rope: hf.rope.clone(),
        local_rope: hf.local_rope.clone(),
        attention_scale: hf.attention_scale,
        norm_offset: hf.norm_offset,
        family: hf.family,
        ..gguf.clone()
    };
    assert_eq!(*hf, normalised, "{what}");
    assert!(!gguf.norm_offset);
}

fn assert_same_tensors(what: &str, spec: &ModelSpec, hf: &ModelFiles, gguf: &ModelFiles) {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for name in hf.tensor_names() {
        let info = gguf.expect_shape(name, &hf.tensor(name).unwrap().shape).unwrap();
        if info.shape.len() == 1 {
            let added = if spec.is_gemma() && name.ends_with("norm.weight") { 1.0 } else { 0.0 };
            let expected: Vec<f32> =
                hf.read_vector(name, 0..info.cols()).unwrap().into_iter().map(|v| v + added).collect();
            assert_eq!(gguf.read_vector(name, 0..info.cols()).unwrap(), expected, "{what}: {name}");
        } else {
            for cols in [0..info.cols(), 3..info.cols() - 1] {
                hf.read_rows(name, 1..info.rows(), cols.clone(), &mut a).unwrap();
                gguf.read_rows(name, 1..info.rows(), cols, &mut b).unwrap();
                assert!(a == b, "{what}: {name}");
            }
        }
    }
    let used = hf.tensor_names().map(str::to_owned).collect();
    assert_eq!(gguf.unused_report(&used), None, "{what}");
}

#[test]
fn every_family_is_the_same_model_in_both_forms() {
    static SHORT: [f64; 3] = [1.0, 1.5, 2.0];
    static LONG: [f64; 3] = [1.0, 4.0, 9.0];
    let experts =
        ExpertSpec { count: 5, per_token: 2, inner: 16, normalised: false, step: 2, dense_layers: &[] };
    let gemma = |family, window_start| ModelSpec {
        tied: true,
        layers: 4,
        window: Some(16),
        window_start,
        logit_cap: Some(30.0),
        query_scalar: 24.0,
        ..spec(family)
    };
    for (what, spec) in [
        ("llama", ModelSpec { qkv_bias: true, o_bias: true, mlp_bias: true, ..spec(SpecFamily::Llama) }),
        (
            "llama3",
            ModelSpec { rope: RopeSpec::Llama3(8.0, 1.0, 4.0, 64), tied: true, ..spec(SpecFamily::Llama) },
        ),
        ("linear", ModelSpec { rope: RopeSpec::Linear(4.0), ..spec(SpecFamily::Llama) }),
        ("mistral", spec(SpecFamily::Mistral)),
        ("qwen2", ModelSpec { qkv_bias: true, ..spec(SpecFamily::Qwen2) }),
        (
            "yarn",
            ModelSpec { qkv_bias: true, rope: RopeSpec::Yarn(4.0, 64, None), ..spec(SpecFamily::Qwen2) },
        ),
        (
            "yarn given",
            ModelSpec { qk_norm: true, rope: RopeSpec::Yarn(4.0, 64, Some(1.0)), ..spec(SpecFamily::Qwen3) },
        ),
        ("qwen3", ModelSpec { qk_norm: true, head_dim: 16, ..spec(SpecFamily::Qwen3) }),
        (
            "qwen3moe",
            ModelSpec { qk_norm: true, layers: 4, experts: Some(experts), ..spec(SpecFamily::Qwen3Moe) },
        ),
        ("phi3", ModelSpec { window: Some(100), ..spec(SpecFamily::Phi3) }),
        (
            "phi3 long",
            ModelSpec {
                rotary_part: 0.75,
                rope: RopeSpec::LongRope(&SHORT, &LONG, 32),
                ..spec(SpecFamily::Phi3)
            },
        ),
        ("gemma2", ModelSpec { score_cap: Some(50.0), ..gemma(SpecFamily::Gemma2, 0) }),
        ("gemma3", ModelSpec { qk_norm: true, rope: RopeSpec::Linear(8.0), ..gemma(SpecFamily::Gemma3, 3) }),
    ] {
        let (hf, gguf) = both(&spec);
        assert_same_config(what, hf.config(), gguf.config());
        assert_same_tensors(what, &spec, &hf, &gguf);
    }
}
