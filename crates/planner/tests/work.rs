//! Bytes and multiplications of steps against numbers counted by hand.
#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_core::shard::Group;
use lockstep_core::{CodeLayout, DType, ModelConfig, ParallelInfo, StageLayers, WeightType};
use lockstep_planner::pipeline::Part;
use lockstep_planner::work::{Counts, Row, Work};
use lockstep_planner::{Device, DeviceKind, DeviceTable, Facts};

/// 2 layers, hidden 64, 4 query and 2 KV heads of 16, MLP 128, vocabulary 320, embedding tied.
fn config() -> ModelConfig {
    let text = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "max_position_embeddings": 2048, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    });
    lockstep_core::config::hf::parse(text.to_string().as_bytes()).unwrap()
}

fn part(config: &ModelConfig, tp_size: usize) -> Part {
    let stage = StageLayers::of_stages(config, 1, None).unwrap()[0];
    Part { p: ParallelInfo::tensor_parallel(0, tp_size), stage }
}

/// The counts of `config` where matrices but the embedding are `of`.
fn with_counts<T>(of: WeightType, tp_size: usize, check: impl FnOnce(&Counts<'_>) -> T) -> T {
    let config = config();
    let type_of = |group: Group, _: &str| match group {
        Group::Vocabulary => Some(DType::Bf16.into()),
        _ => Some(of),
    };
    let facts = Facts { config: &config, type_of: &type_of, source: String::new(), notes: Vec::new() };
    check(&Counts::new(&facts, DeviceKind::Cpu, part(&config, tp_size)))
}

/// Multiplications of a token in one layer: q and o 64 x 64, k and v 64 x 32, gate, up and down 64 x 128.
const LAYER: f64 = (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) as f64;
const HEAD: f64 = (320 * 64) as f64;
/// f32 norms: two a layer and the last.
const NORM_BYTES: f64 = (5 * 64 * 4) as f64;

#[test]
fn a_decode_step_by_hand() {
    with_counts(DType::Bf16.into(), 1, |counts| {
        let work = counts.step(&[Row::decode(100)]);
        assert_eq!(work.weight_bytes, 2.0 * (2.0 * LAYER + HEAD) + NORM_BYTES);
        // 99 cached positions of 2 layers, K and V of 2 heads of 16 f32.
        assert_eq!(work.kv_bytes, 99.0 * 2.0 * 2.0 * 2.0 * 16.0 * 4.0);
        // Scores and values of 4 heads of 16 over 100 positions in 2 layers.
        let attention = 2.0 * 100.0 * 2.0 * 4.0 * 16.0;
        assert_eq!(work.float_macs, 2.0 * LAYER + HEAD + attention);
        assert_eq!(work.code_macs, 0.0);
        // Weights are read once for all rows, a shared prefix too.
        let shared = Row { own_from: 60, ..Row::decode(100) };
        let three = counts.step(&[Row::decode(100), shared, shared]);
        assert_eq!(three.weight_bytes, work.weight_bytes);
        assert_eq!(three.kv_bytes, work.kv_bytes / 99.0 * (99.0 + 2.0 * 39.0));
        assert_eq!(three.float_macs, 3.0 * work.float_macs);
    });
}

#[test]
fn a_prompt_by_hand() {
    with_counts(DType::Bf16.into(), 1, |counts| {
        let steps = Row::prefill(0, 100, 64);
        let works: Vec<Work> = steps.iter().map(|row| counts.step(&[*row])).collect();
        // Token i sees i + 1 positions.
        let pairs = |from: u64, to: u64| (from..to).map(|i| i + 1).sum::<u64>() as f64;
        let attention = |pairs: f64| 2.0 * pairs * 2.0 * 4.0 * 16.0;
        assert_eq!(works[0].float_macs, 64.0 * 2.0 * LAYER + attention(pairs(0, 64)));
        assert_eq!(works[1].float_macs, 36.0 * 2.0 * LAYER + HEAD + attention(pairs(64, 100)));
        // The head is read where there are logits; the second step reads K and V of the first.
        assert_eq!(works[1].weight_bytes - works[0].weight_bytes, 2.0 * HEAD);
        assert_eq!((works[0].kv_bytes, works[1].kv_bytes), (0.0, 64.0 * 512.0));
    });
}

#[test]
fn codes_count_as_integers_and_ranks_have_half() {
    let q4 = CodeLayout::new(-8, 7, false, false);
    with_counts(WeightType::Coded(q4), 1, |counts| {
        let work = counts.step(&[Row { logits: true, ..Row::prefill(0, 10, 10)[0] }]);
        // The output projection stays floats: at tp 4 a rank has 16 of its inputs, half a group of codes.
        let output = (64 * 64) as f64;
        assert_eq!(work.code_macs, 10.0 * 2.0 * (LAYER - output));
        assert_eq!(work.float_macs, 10.0 * 2.0 * output + HEAD + 2.0 * 55.0 * 2.0 * 4.0 * 16.0);
    });
    let one = with_counts(DType::Bf16.into(), 1, |counts| counts.step(&[Row::decode(50)]));
    let two = with_counts(DType::Bf16.into(), 2, |counts| counts.step(&[Row::decode(50)]));
    assert_eq!(one.weight_bytes - NORM_BYTES, 2.0 * (two.weight_bytes - NORM_BYTES));
    assert_eq!((one.kv_bytes, one.float_macs), (2.0 * two.kv_bytes, 2.0 * two.float_macs));
}

#[test]
fn windows_end_what_is_seen_and_read() {
    let mut config = config();
    (config.sliding_window, config.sliding_layers) = (Some(8), vec![true; 2]);
    let facts = Facts {
        config: &config,
        type_of: &|_, _| Some(DType::Bf16.into()),
        source: String::new(),
        notes: Vec::new(),
    };
    let counts = Counts::new(&facts, DeviceKind::Cpu, part(&config, 1));
    let seen = |start: usize, tokens: usize| -> f64 {
        2.0 * (start..start + tokens).map(|p| (p + 1).min(8)).sum::<usize>() as f64
    };
    for (start, tokens) in [(0, 5), (0, 20), (5, 9), (8, 3), (100, 7)] {
        let work = counts.step(&[Row { start, tokens, own_from: 0, logits: false }]);
        let products = tokens as f64 * 2.0 * LAYER;
        assert_eq!(work.float_macs - products, 2.0 * seen(start, tokens) * 4.0 * 16.0, "{start} {tokens}");
        // The first token sees 7 before itself, in both layers: K and V of 2 heads of 16 f32.
        assert_eq!(work.kv_bytes, 2.0 * start.min(7) as f64 * 256.0, "{start} {tokens}");
    }
}

#[test]
fn the_longer_of_both_times_counts() {
    let device = Device {
        bandwidth_gbs: 10.0,
        tflops: 0.1,
        int8_tops: Some(0.4),
        ..DeviceTable::built_in().find("cpu").unwrap()
    };
    let work = Work { weight_bytes: 6e9, kv_bytes: 4e9, float_macs: 5e9, code_macs: 2e10 };
    // 10 GB at 10 GB/s; 10 GFLOP at 100 GFLOP/s and 40 GOP at 400 GOP/s.
    assert!((work.moving_s(&device, 1) - 1.0).abs() < 1e-12);
    assert!((work.computing_s(&device, 1) - 0.2).abs() < 1e-12);
    assert_eq!(work.roofline_s(&device, 1), work.moving_s(&device, 1));
    assert!((work.roofline_s(&device, 2) - 2.0).abs() < 1e-12, "half the machine");
    let plain = Device { int8_tops: None, ..device };
    assert!((work.computing_s(&plain, 1) - 0.5).abs() < 1e-12, "codes count as floats");
}
