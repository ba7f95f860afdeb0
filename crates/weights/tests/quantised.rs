//! FP8, GPTQ and AWQ checkpoints against the testkit's f64 values; what is wrong with them is named.
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::{Folder, llama_json};
use lockstep_core::DType;
use lockstep_testkit::random::Random;
use lockstep_testkit::safetensors::quantised::{self, Fp8Scales, GptqZeros, Groups, QuantisedMatrix};
use lockstep_testkit::safetensors::{StoredTensor, encode_stored};
use lockstep_weights::{ModelFiles, StorageKind};
use serde_json::{Value, json};
use std::collections::HashSet;

const MODULE: &str = "model.layers.0.mlp.up_proj";
const WEIGHT: &str = "model.layers.0.mlp.up_proj.weight";

fn open(quantization: Value, tensors: &[StoredTensor]) -> Result<ModelFiles, String> {
    let folder = Folder::new();
    let mut config = llama_json();
    config["quantization_config"] = quantization;
    folder.write("config.json", config.to_string());
    folder.write("model.safetensors", encode_stored(tensors));
    // The mapping outlives the folder's names.
    ModelFiles::open(folder.path()).map_err(|e| e.to_string())
}

fn fp8_config(tile: Option<(usize, usize)>) -> Value {
    let tile = tile.map(|(rows, cols)| json!([rows, cols]));
    json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": tile})
}

fn gptq_config(group_size: i64, desc_act: bool, format: &str) -> Value {
    json!({"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": desc_act, "sym": false,
        "checkpoint_format": format})
}

fn awq_config(group_size: i64) -> Value {
    json!({"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": true, "version": "gemm"})
}

/// Checks the whole matrix and many slices of it, bit for bit.
fn check(what: &str, files: &ModelFiles, matrix: &QuantisedMatrix, (rows, cols): (usize, usize)) {
    files.expect_shape(WEIGHT, &[rows, cols]).unwrap();
    assert_eq!(files.dtype_of(WEIGHT), Some(DType::Bf16));
    let element = |row: usize, col: usize| {
        // The f32 product of the format, then bf16: each rounds once.
        half::bf16::from_f32(matrix.values[row * cols + col] as f32).to_le_bytes()
    };
    let bounds = |n: usize| [0, 1, n / 2 + 5, n - 9, n];
    let spans = |n: usize| {
        let pairs = bounds(n).into_iter().flat_map(move |a| bounds(n).map(|b| (a, b)));
        pairs.filter(|(a, b)| a <= b).collect::<Vec<_>>()
    };
    let mut out = Vec::new();
    for (r0, r1) in spans(rows) {
        for (c0, c1) in spans(cols) {
            assert_eq!(files.read_rows(WEIGHT, r0..r1, c0..c1, &mut out).unwrap(), DType::Bf16);
            let expected: Vec<u8> = (r0..r1)
                .flat_map(|r| (c0..c1).map(move |c| (r, c)))
                .flat_map(|(r, c)| element(r, c))
                .collect();
            assert!(out == expected, "{what}: rows {r0}..{r1}, columns {c0}..{c1} differ");
        }
    }
}

#[test]
fn fp8_with_every_kind_of_scale() {
    let mut random = Random::new(0xf8);
    let shape = (150, 300);
    for (scales, tile) in [
        (Fp8Scales::PerTensor, None),
        (Fp8Scales::PerRow, None),
        (Fp8Scales::Tiles(128, 128), Some((128, 128))),
        (Fp8Scales::Tiles(64, 32), Some((64, 32))),
    ] {
        let matrix = quantised::fp8(MODULE, shape, scales, &mut random);
        let files = open(fp8_config(tile), &matrix.stored).unwrap();
        check(&format!("{scales:?}"), &files, &matrix, shape);
        assert_eq!(files.tensor(WEIGHT).unwrap().stored, StorageKind::Fp8E4m3);
        assert_eq!(files.tensor_names().collect::<Vec<_>>(), [WEIGHT]);
        assert_eq!(files.conversions(true), ["1 tensor stored as F8_E4M3 is unpacked to bf16 while loading"]);
        files.release(WEIGHT);
    }
}

#[test]
fn gptq_in_both_formats_with_and_without_activation_order() {
    let mut random = Random::new(0x6970);
    let shape = (72, 128);
    for group_size in [32, 48, 128] {
        for (groups, desc_act) in [(Groups::Even, false), (Groups::Listed, true)] {
            for (zeros, format) in [
                (GptqZeros::Symmetric, "gptq"),
                (GptqZeros::LessOne, "gptq"),
                (GptqZeros::AsTheyAre, "gptq_v2"),
            ] {
                let matrix = quantised::gptq(MODULE, shape, group_size, (groups, zeros), &mut random);
                let size = if group_size == 128 { -1 } else { group_size as i64 };
                let files = open(gptq_config(size, desc_act, format), &matrix.stored).unwrap();
                check(&format!("{group_size} {groups:?} {zeros:?}"), &files, &matrix, shape);
                assert_eq!(files.unused_report(&HashSet::from([WEIGHT.to_owned()])), None);
                assert_eq!(files.source_label(), "safetensors gptq 4-bit, 1 file");
            }
        }
    }
}

#[test]
fn a_list_of_zeros_means_neighbours() {
    let mut random = Random::new(0x0);
    let shape = (16, 64);
    let matrix = quantised::gptq(MODULE, shape, 32, (Groups::Even, GptqZeros::LessOne), &mut random);
    for elements in [64, 0] {
        let name = format!("{MODULE}.g_idx");
        let list = StoredTensor { name, dtype: "I32", shape: vec![elements], bytes: vec![0; 4 * elements] };
        let tensors = changed(&matrix, |t| t.push(list.clone()));
        let files = open(gptq_config(32, false, "gptq"), &tensors).unwrap();
        check("a list of zeros", &files, &matrix, shape);
    }
}

#[test]
fn awq_in_its_interleaved_order() {
    let mut random = Random::new(0xa39);
    for (shape, group_size) in [((72, 128), 32), ((40, 96), 64), ((128, 64), 128)] {
        let matrix = quantised::awq(MODULE, shape, group_size, &mut random);
        let files = open(awq_config(group_size as i64), &matrix.stored).unwrap();
        check(&format!("{shape:?} {group_size}"), &files, &matrix, shape);
    }
}

fn bytes_of(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// What the programs that make such checkpoints packed (`data/make_quantised.py`), bit for bit as they read it.
#[test]
fn reads_what_the_packages_themselves_pack() {
    let golden: Value = serde_json::from_str(include_str!("data/quantised.json")).unwrap();
    let cases = golden["cases"].as_object().unwrap();
    assert_eq!(cases.len(), 6);
    for (what, case) in cases {
        let stored = |(name, tensor): (&String, &Value)| StoredTensor {
            name: format!("{MODULE}.{name}"),
            dtype: ["F8_E4M3", "F32", "F16", "BF16", "I32"]
                .into_iter()
                .find(|known| tensor["dtype"] == **known)
                .unwrap(),
            shape: serde_json::from_value(tensor["shape"].clone()).unwrap(),
            bytes: bytes_of(tensor["data"].as_str().unwrap()),
        };
        let tensors: Vec<StoredTensor> = case["tensors"].as_object().unwrap().iter().map(stored).collect();
        let files = open(case["config"].clone(), &tensors).unwrap();
        files.expect_shape(WEIGHT, &[32, 64]).unwrap();
        let mut out = Vec::new();
        assert_eq!(files.read_rows(WEIGHT, 0..32, 0..64, &mut out).unwrap(), DType::Bf16, "{what}");
        let values = bytes_of(case["f32"].as_str().unwrap());
        let expected = values.as_chunks::<4>().0.iter().map(|b| half::bf16::from_f32(f32::from_be_bytes(*b)));
        assert!(out == expected.flat_map(half::bf16::to_le_bytes).collect::<Vec<u8>>(), "{what}");
        assert_eq!(files.unused_report(&HashSet::from([WEIGHT.to_owned()])), None, "{what}");
    }
}

#[test]
fn other_tensors_of_a_quantised_checkpoint_stay_as_they_are() {
    let mut random = Random::new(1);
    let plain = |name: &str, dtype, shape: &[usize], bytes: Vec<u8>| StoredTensor {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        bytes,
    };
    let one = half::bf16::ONE.to_le_bytes().to_vec();
    let mut tensors = quantised::fp8(MODULE, (8, 16), Fp8Scales::PerTensor, &mut random).stored;
    tensors.extend([
        plain("lm_head.weight", "BF16", &[1, 1], one.clone()),
        plain("model.norm.weight", "BF16", &[1], one.clone()),
        plain(&format!("{MODULE}.input_scale"), "F32", &[], 1f32.to_le_bytes().to_vec()),
        plain("model.layers.0.self_attn.k_scale", "F32", &[1], 1f32.to_le_bytes().to_vec()),
        // Without a scale of its own an FP8 tensor that is no matrix cannot be read.
        plain("odd.weight", "F8_E4M3", &[2], vec![0; 2]),
    ]);
    let files = open(fp8_config(None), &tensors).unwrap();
    assert_eq!(files.dtype_of("lm_head.weight"), Some(DType::Bf16));
    assert_eq!(files.read_vector("model.norm.weight", 0..1).unwrap(), [1.0]);
    assert_eq!(files.dtype_of("odd.weight"), None);
    assert!(files.tensor("model.layers.0.self_attn.k_scale").is_none());
    let lines = files.conversions(true);
    assert!(lines.len() == 2 && lines[1].starts_with("2 scales of activations"), "{lines:?}");
    assert!(files.read_vector(WEIGHT, 0..1).is_err());
}

/// The tensors after `change`.
fn changed(matrix: &QuantisedMatrix, change: impl Fn(&mut Vec<StoredTensor>)) -> Vec<StoredTensor> {
    let mut tensors = matrix.stored.clone();
    change(&mut tensors);
    tensors
}

#[test]
fn what_does_not_fit_together_is_named() {
    let mut random = Random::new(2);
    let fp8 = quantised::fp8(MODULE, (16, 32), Fp8Scales::Tiles(8, 8), &mut random);
    let gptq = quantised::gptq(MODULE, (16, 64), 32, (Groups::Listed, GptqZeros::LessOne), &mut random);
    let awq = quantised::awq(MODULE, (16, 64), 32, &mut random);
    let tiles = || fp8_config(Some((8, 8)));
    let listed = || gptq_config(32, true, "gptq");
    for (config, tensors, parts) in [
        (tiles(), changed(&fp8, |t| t.truncate(1)), ["weight_scale_inv is missing", "model.safetensors"]),
        (fp8_config(Some((8, 16))), changed(&fp8, |_| ()), ["has shape [2, 4]", "asks for [2, 2]"]),
        (
            fp8_config(None),
            changed(&fp8, |t| t[1].name = format!("{WEIGHT}_scale")),
            ["has shape [2, 4]", "[1]"],
        ),
        (tiles(), changed(&fp8, |t| t[1].dtype = "I16"), ["type of tensor", "found I16"]),
        (listed(), changed(&gptq, |t| drop(t.remove(1))), ["qzeros is missing", "searched"]),
        (listed(), changed(&gptq, |t| drop(t.remove(2))), ["scales is missing", "searched"]),
        (listed(), changed(&gptq, |t| drop(t.remove(3))), ["g_idx is missing", "searched"]),
        (gptq_config(64, true, "gptq"), changed(&gptq, |_| ()), ["scales in", "asks for [1, 16]"]),
        (listed(), changed(&gptq, |t| t[0].dtype = "F32"), ["type of tensor", "expected I32, found F32"]),
        (listed(), changed(&gptq, |t| t[1].shape = vec![4, 1]), ["qzeros in", "asks for [2, 2]"]),
        (listed(), changed(&gptq, |t| t[3].shape = vec![8, 8]), ["g_idx in", "asks for [64]"]),
        (listed(), changed(&gptq, |t| t[0].shape = vec![128]), ["qweight", "two dimensions"]),
        (listed(), changed(&gptq, |t| t[0].shape = vec![32, 4]), ["multiples of 8", "256 and 4"]),
        (awq_config(64), changed(&awq, |_| ()), ["scales in", "asks for [1, 16]"]),
        (json!({"quant_method": "bitsandbytes"}), changed(&awq, |_| ()), ["bitsandbytes", "config.json"]),
        (
            listed(),
            changed(&gptq, |t| t.push(StoredTensor { name: WEIGHT.into(), ..t[2].clone() })),
            ["expected model.layers.0.mlp.up_proj.qweight alone", "found both"],
        ),
    ] {
        let message = open(config, &tensors).unwrap_err();
        for part in parts {
            assert!(message.contains(part), "{part:?} not in: {message}");
        }
    }
}

#[test]
fn a_group_that_does_not_exist_is_an_error_of_the_file() {
    let mut random = Random::new(3);
    let gptq = quantised::gptq(MODULE, (16, 64), 32, (Groups::Listed, GptqZeros::LessOne), &mut random);
    for wrong in [2i32, -1, i32::MAX] {
        let tensors = changed(&gptq, |t| t[3].bytes[4..8].copy_from_slice(&wrong.to_le_bytes()));
        let files = open(gptq_config(32, true, "gptq"), &tensors).unwrap();
        let message = files.read_rows(WEIGHT, 0..16, 0..64, &mut Vec::new()).unwrap_err().to_string();
        assert!(message.contains("input feature 1 (g_idx)"), "{message}");
        assert!(message.contains("expected 0..2") && message.contains(&wrong.to_string()), "{message}");
        // Columns that do not meet it can be read.
        files.read_rows(WEIGHT, 0..16, 2..64, &mut Vec::new()).unwrap();
    }
}

#[test]
fn threads_read_slices_of_one_matrix_at_once() {
    let mut random = Random::new(4);
    let shape = (64, 128);
    let matrix = quantised::gptq(MODULE, shape, 32, (Groups::Listed, GptqZeros::LessOne), &mut random);
    let files = open(gptq_config(32, true, "gptq"), &matrix.stored).unwrap();
    let mut whole = Vec::new();
    files.read_rows(WEIGHT, 0..64, 0..128, &mut whole).unwrap();
    std::thread::scope(|scope| {
        for band in 0..4 {
            let (files, whole) = (&files, &whole);
            scope.spawn(move || {
                let mut out = Vec::new();
                for _ in 0..50 {
                    files.read_rows(WEIGHT, 16 * band..16 * band + 16, 0..128, &mut out).unwrap();
                    assert!(out == whole[16 * band * 256..(16 * band + 16) * 256]);
                    files.release(WEIGHT);
                }
            });
        }
    });
}
