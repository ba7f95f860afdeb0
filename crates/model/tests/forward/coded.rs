//! Weights kept as codes: the same bits however it runs, and close to the same weights as floats.

use crate::group::{Layout, Logits, first_difference, interleaved, one_by_one, run_source};
use lockstep_core::{DType, ModelConfig, QuantizeFormat, WeightMode, config::hf};
use lockstep_model::DummyWeights;

/// A Llama model whose columns are whole groups at tp 1 to 8, and one whose output projection tp 8 would cut
/// through a group, so that it stays floats.
fn config(head_dim: usize) -> ModelConfig {
    let text = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "head_dim": {head_dim},
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512, "num_hidden_layers": 2,
        "vocab_size": 321, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16"}}"#
    );
    hf::parse(text.as_bytes()).unwrap()
}

/// A mixture whose experts, too, are whole groups at tp 1 to 8, or with a down projection that tp 8 would cut.
/// Of its 7 experts a token takes `taken`.
fn mixture(inner: usize, taken: usize) -> ModelConfig {
    let text = format!(
        r#"{{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 128, "head_dim": 32,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 256, "num_hidden_layers": 2,
        "vocab_size": 321, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128,
        "num_experts": 7, "num_experts_per_tok": {taken}, "moe_intermediate_size": {inner}, "norm_topk_prob": true,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16"}}"#
    );
    hf::parse(text.as_bytes()).unwrap()
}

fn prompts() -> Vec<Vec<u32>> {
    let prompt = |len: u32, salt: u32| (0..len).map(|i| (i * 29 + salt * 7 + 3) % 321).collect();
    vec![prompt(70, 0), prompt(1, 1), prompt(17, 2)]
}

fn logits(config: &ModelConfig, layout: Layout, steps: &[Vec<crate::group::Row>]) -> Logits {
    let source = DummyWeights::new(config.clone(), DType::Bf16, 5);
    run_source(&source, layout, &prompts(), steps)
}

#[test]
fn logits_do_not_depend_on_how_they_are_computed() {
    let prompts = prompts();
    let (whole, mixed) = (one_by_one(&prompts, usize::MAX >> 1), interleaved(&prompts));
    for (config, format) in [
        (config(32), QuantizeFormat::Q8_0),
        (config(32), QuantizeFormat::Q4_0),
        (config(32), QuantizeFormat::Q4K),
        (config(16), QuantizeFormat::Q8_0),
        (mixture(256, 3), QuantizeFormat::Q4K),
        (mixture(128, 3), QuantizeFormat::Q8_0),
    ] {
        let base = Layout { weights: WeightMode::Quantize(format), ..Layout::default() };
        let want = logits(&config, base, &whole);
        for layout in [
            Layout { threads: 3, page_size: 3, ..base },
            Layout { tp: 2, ..base },
            Layout { tp: 4, page_size: 1, ..base },
            Layout { tp: 8, ..base },
        ] {
            for steps in [&whole, &mixed, &one_by_one(&prompts, 7)] {
                let difference = first_difference(&want, &logits(&config, layout, steps));
                assert!(difference.is_none(), "{config:?}, {layout:?}: {difference:?}");
            }
        }
    }
}

#[test]
fn codes_of_8_bits_are_close_to_the_floats_they_were_made_from() {
    let whole = one_by_one(&prompts(), usize::MAX >> 1);
    // All experts, since one that is taken instead of another is another model, not an error of rounding.
    for config in [config(32), mixture(256, 7)] {
        let of = |weights| logits(&config, Layout { weights, ..Layout::default() }, &whole);
        let floats: Vec<f32> = of(WeightMode::Exact).into_iter().flatten().flatten().collect();
        let error = |format| {
            let codes = of(WeightMode::Quantize(format)).into_iter().flatten().flatten();
            let squares = codes.zip(&floats).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            (squares / floats.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()).sqrt()
        };
        let errors = [QuantizeFormat::Q8_0, QuantizeFormat::Q4K, QuantizeFormat::Q4_0].map(error);
        // Activations are rounded to 8 bits in all of them; 4 bits are 16 times as coarse.
        assert!(errors[0] > 0.0 && errors[0] < 0.03, "{errors:?}");
        assert!(errors[1] > 2.0 * errors[0] && errors[1] < 0.5, "{errors:?}");
        assert!(errors[2] > 2.0 * errors[0] && errors[2] < 0.5, "{errors:?}");
    }
}
