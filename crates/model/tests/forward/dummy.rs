//! Weights made up from a seed: any tp size makes the same model, of a sensible scale.

use crate::group::{Layout, first_difference, one_by_one, run_source};
use lockstep_core::{DType, ModelConfig, config::hf};
use lockstep_model::DummyWeights;
use lockstep_testkit::fixtures::random_models::TABLE;

fn config(fixture: &str) -> ModelConfig {
    let row = TABLE.iter().find(|row| row.name == fixture).unwrap();
    hf::parse(row.spec(1).config_json().to_string().as_bytes()).unwrap()
}

#[test]
fn values_do_not_depend_on_the_tp_size_and_logits_are_of_order_one() {
    for name in ["rand_kv2_tp4", "rand_phi3", "rand_gemma3", "rand_qwen3_moe"] {
        let prompts = [(0..40).map(|i| i * 29 % 320).collect::<Vec<u32>>()];
        let steps = one_by_one(&prompts, 100);
        let logits = |tp, seed| {
            let source = DummyWeights::new(config(name), DType::Bf16, seed);
            run_source(&source, Layout { tp, ..Layout::default() }, &prompts, &steps)
        };
        let one = logits(1, 7);
        for tp in [2, 8] {
            let difference = first_difference(&one, &logits(tp, 7));
            assert!(difference.is_none(), "{name} tp {tp}: {difference:?}");
        }
        assert!(first_difference(&one, &logits(1, 8)).is_some(), "{name}: the seed has no say");
        let values: Vec<f32> = one.iter().flatten().flatten().copied().collect();
        let rms = (values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32).sqrt();
        assert!((0.3..3.0).contains(&rms), "{name}: rms {rms}");
    }
}
