//! Damaged files: every error names the file, nothing panics, nothing of a claimed size is allocated.
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::{Folder, Gguf, Random, f32_bytes, llama_json, safetensors, with_header};
use lockstep_testkit::safetensors::encode_stored;
use lockstep_testkit::safetensors::quantised::{self, Fp8Scales, GptqZeros, Groups};
use lockstep_weights::{ModelFiles, WeightsError};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Largest single allocation of this test binary so far, in bytes.
static LARGEST: AtomicUsize = AtomicUsize::new(0);
/// No test here has files above 64 KiB, so nothing needs more.
const LARGEST_MAX: usize = 1 << 20;

struct Counting;

// SAFETY: hands every request to the system allocator unchanged; the counter is atomic.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: same contract as this function's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: same contract as this function's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn assert_small_allocations() {
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest <= LARGEST_MAX, "an allocation of {largest} bytes");
}

#[test]
fn sound_gguf_files_of_another_kind_are_not_called_damaged() {
    let good = Gguf::model("llama").bytes();
    for (version, parts) in [
        (1u32.to_le_bytes(), ["is a GGUF file of version 1, and versions 2 and 3 are read", "convert"]),
        (4u32.to_le_bytes(), ["of version 4,", "download it again"]),
        (0u32.to_le_bytes(), ["of version 0,", "download it again"]),
        (3u32.to_be_bytes(), ["is a big-endian GGUF file (version 3)", "gguf_convert_endian.py"]),
    ] {
        let folder = Folder::new();
        let path = folder.write("other.gguf", [b"GGUF", &version[..], &good[8..]].concat());
        let message = ModelFiles::open(&path).unwrap_err().to_string();
        for part in [parts[0], parts[1], path.to_str().unwrap()] {
            assert!(message.contains(part) && !message.contains("damaged"), "{part:?} not in: {message}");
        }
    }
}

#[test]
fn broken_safetensors_name_file_and_sizes() {
    let good = safetensors(&[("a", "F32", &[2, 2], f32_bytes([1.0; 4])), ("b", "BF16", &[3], vec![0; 6])]);
    let len = good.len();
    let sized = |n: usize| format!("{n} bytes");
    let header = |text: &str| with_header(text, &[0; 8]);
    let entry = |shape: &str, from: usize, to: usize| {
        header(&format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}}}"#))
    };
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n".to_vec();
    for (bytes, parts) in [
        (good[..len - 1000.min(len - 100)].to_vec(), [sized(len - (len - 100)).as_str(), "expected"]),
        (good[..len - 3].to_vec(), [&sized(len), &sized(len - 3)]),
        ([good.as_slice(), &[0]].concat(), [&sized(len), &sized(len + 1)]),
        (good[..40].to_vec(), ["file length for the header", "40 bytes"]),
        (Vec::new(), ["at least 8 bytes", "found 0 bytes"]),
        (vec![0; 100], ["header of 0 bytes", "JSON"]),
        (pointer, ["git-lfs pointer", "12345"]),
        (b"\n<!DOCTYPE html>".to_vec(), ["web page", "expected"]),
        ([&[0xff; 8], &good[8..]].concat(), ["claimed header length", "18446744073709551615 bytes"]),
        (header("[1]"), ["a JSON object", "expected"]),
        (header(r#"{"a": {"dtype": "F32"}}"#), ["tensor a", "missing field"]),
        (entry("[3]", 0, 8), ["12 bytes for F32 [3]", "0..8"]),
        (entry("[2]", 8, 0), ["8 bytes for F32 [2]", "8..0"]),
        (entry("[2]", 4, 12), ["first data byte of tensor a", "found 4"]),
        (entry("[18446744073709551615,2]", 0, 8), ["fits memory", "18446744073709551615"]),
        (entry("[0,18446744073709551615,2]", 0, 0), ["fits memory", "18446744073709551615"]),
        (entry("[-1]", 0, 8), ["tensor a", "-1"]),
    ] {
        let folder = Folder::new();
        folder.write("config.json", llama_json().to_string());
        let path = folder.write("model.safetensors", bytes);
        let error = ModelFiles::open(folder.path()).unwrap_err();
        assert!(matches!(error, WeightsError::Damaged { .. }), "{error}");
        let message = error.to_string();
        for part in parts.iter().chain(&[path.to_str().unwrap(), "download it again"]) {
            assert!(message.contains(part), "{part:?} not in: {message}");
        }
    }
    assert_small_allocations();
}

#[test]
fn broken_gguf_names_file_and_sizes() {
    let good = Gguf::model("llama").bytes();
    let len = good.len();
    let patched = |at: usize, value: u64| {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    let overlapping = {
        let gguf = Gguf::model("llama").tensor("output_norm.weight", &[8], 0, vec![0; 32]);
        let mut bytes = gguf.bytes();
        let name = bytes.windows(18).position(|w| w == b"output_norm.weight").unwrap();
        bytes[name + 18 + 4 + 8 + 4] = 32; // the offset: inside the embedding
        bytes
    };
    let nested = Gguf::model("llama").raw("deep", 9, &[9u32.to_le_bytes().as_slice(), &[0; 12]].concat());
    let not_text = Gguf::model("llama").raw("bad", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]);
    for (bytes, part) in [
        (Vec::new(), "found 0 bytes"),
        (good[..10].to_vec(), "tensor count at byte 8: expected 8 bytes, found 2 bytes"),
        (good[..len - 1].to_vec(), "at least"),
        (patched(8, u64::MAX), "tensor count"),
        (patched(16, u64::MAX), "metadata key count"),
        (patched(24, u64::MAX), "expected 18446744073709551615 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 77\n".to_vec(), "77 bytes"),
        (b"GGML".to_vec(), "first four bytes: expected GGUF, found \"GGML\""),
        (overlapping, "start of tensor output_norm.weight"),
        (nested.bytes(), "an array of arrays"),
        (not_text.bytes(), "metadata key bad: expected UTF-8 text"),
        (Gguf::model("llama").tensor("token_embd.weight", &[1, 8], 0, vec![0; 32]).bytes(), "found two"),
        (Gguf::model("llama").tensor("x", &[0, 8], 0, vec![]).bytes(), "dimension 0"),
        (Gguf::model("llama").tensor("x", &[1 << 40, 1 << 40], 0, vec![]).bytes(), "2^60"),
        (
            Gguf::model("llama").tensor("x", &[1 << 40, 1 << 18], 0, vec![]).bytes(),
            "file length for tensor x",
        ),
        (Gguf::model("llama").tensor("x", &[8], 999, vec![0; 32]).bytes(), "type 999"),
    ] {
        let folder = Folder::new();
        let path = folder.write("broken.gguf", bytes);
        let error = ModelFiles::open(&path).unwrap_err();
        assert!(matches!(error, WeightsError::Damaged { .. }), "{error}");
        let message = error.to_string();
        for part in [part, path.to_str().unwrap(), "download it again"] {
            assert!(message.contains(part), "{part:?} not in: {message}");
        }
    }
    assert_small_allocations();
}

/// Changes some bytes, mostly near the start, sometimes to numbers that overflow, sometimes cuts.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let reach = if random.below(2) == 0 { bytes.len() } else { bytes.len().min(400) };
        let at = random.below(reach);
        match random.below(5) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => {
                let extremes = [u64::MAX, 1 << 63, i64::MAX as u64, 1 << 32, 0, bytes.len() as u64];
                let value = extremes[random.below(extremes.len())].to_le_bytes();
                let end = bytes.len().min(at + 8);
                bytes[at..end].copy_from_slice(&value[..end - at]);
            }
            3 => bytes[at] = b"0123456789[]{},:\""[random.below(17)],
            _ => {
                if random.below(8) == 0 {
                    bytes.truncate(at.max(1));
                }
            }
        }
    }
}

/// Reads everything that a file offers.
fn use_all(files: &ModelFiles) {
    let mut out = Vec::new();
    for name in files.tensor_names() {
        let info = files.tensor(name).unwrap();
        if info.shape.len() == 1 {
            let _ = files.read_vector(name, 0..info.cols());
        } else {
            let _ = files.read_rows(name, 0..info.rows(), 0..info.cols(), &mut out);
        }
        files.release(name);
    }
    if let Some(metadata) = files.gguf() {
        for key in metadata.keys() {
            metadata.describe(key);
            metadata.texts(key).into_iter().flatten().for_each(drop);
            metadata.integers(key).into_iter().flatten().for_each(drop);
            metadata.numbers(key).into_iter().flatten().for_each(drop);
        }
    }
}

/// Opens mutations of `good`; returns how many still opened.
fn survive(good: &[u8], seed: u64, rounds: usize, file: &str, target: &str) -> usize {
    let folder = Folder::new();
    folder.write("config.json", llama_json().to_string());
    survive_in(&folder, good, seed, rounds, (file, target))
}

/// [`survive`] in a folder that has its config.
fn survive_in(folder: &Folder, good: &[u8], seed: u64, rounds: usize, (file, target): (&str, &str)) -> usize {
    println!("seed {seed}");
    let mut random = Random(seed);
    let mut opened = 0;
    for _ in 0..rounds {
        let mut bytes = good.to_vec();
        mutate(&mut bytes, &mut random);
        // Writing over a file makes ext4 flush it to the disk; a new one stays in memory.
        let _ = std::fs::remove_file(folder.path().join(file));
        folder.write(file, bytes);
        if let Ok(files) = ModelFiles::open(&folder.path().join(target)) {
            use_all(&files);
            opened += 1;
        }
    }
    assert_small_allocations();
    opened
}

#[test]
fn mutated_gguf_never_panics_or_allocates_what_it_claims() {
    let gguf = Gguf::model("llama")
        .tensor("blk.0.attn_q.weight", &[8, 32], 8, vec![1; 8 * 34])
        .tensor("blk.0.attn_q.bias", &[8], 0, vec![2; 32])
        .tensor("blk.0.ffn_up.weight", &[2, 256], 14, vec![3; 420])
        .tensor("rope_freqs.weight", &[2], 0, f32_bytes([1.0, 8.0]))
        .texts("tokenizer.ggml.merges", &["a b", "c d"])
        .u32("general.alignment", 32);
    let opened = survive(&gguf.bytes(), 0x5eed, 3_000, "m.gguf", "m.gguf");
    // Both outcomes occur, or the mutations test nothing.
    assert!((150..2_850).contains(&opened), "{opened}");
}

#[test]
fn mutated_safetensors_never_panic_or_allocate_what_they_claim() {
    let good = safetensors(&[("a", "F32", &[2, 3], f32_bytes([1.0; 6])), ("b", "BF16", &[3], vec![0; 6])]);
    let opened = survive(&good, 0x5afe, 3_000, "model.safetensors", ".");
    assert!((75..2_925).contains(&opened), "{opened}");
}

#[test]
fn mutated_experts_never_panic_or_allocate_what_they_claim() {
    let gguf = Gguf::model("qwen3moe")
        .u32("qwen3moe.expert_count", 3)
        .u32("qwen3moe.expert_used_count", 2)
        .u32("qwen3moe.expert_feed_forward_length", 4)
        .tensor("blk.0.ffn_gate_exps.weight", &[3, 4, 8], 0, vec![1; 384])
        .tensor("blk.0.ffn_up_exps.weight", &[3, 2, 32], 20, vec![7; 3 * 2 * 18]);
    let opened = survive(&gguf.bytes(), 0xe9e7, 2_000, "m.gguf", "m.gguf");
    assert!((100..1_900).contains(&opened), "{opened}");
}

#[test]
fn mutated_quantised_checkpoints_never_panic_or_allocate_what_they_claim() {
    let mut random = lockstep_testkit::random::Random::new(5);
    let gptq = quantised::gptq("m", (16, 32), 16, (Groups::Listed, GptqZeros::LessOne), &mut random).stored;
    let awq = quantised::awq("m", (16, 32), 16, &mut random).stored;
    let fp8 = quantised::fp8("m", (16, 32), Fp8Scales::Tiles(8, 8), &mut random).stored;
    for (tensors, quantization) in [
        (gptq, serde_json::json!({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": true})),
        (awq, serde_json::json!({"quant_method": "awq", "bits": 4, "group_size": 16})),
        (fp8, serde_json::json!({"quant_method": "fp8", "weight_block_size": [8, 8]})),
    ] {
        let folder = Folder::new();
        let mut config = llama_json();
        config["quantization_config"] = quantization;
        folder.write("config.json", config.to_string());
        let good = encode_stored(&tensors);
        let opened = survive_in(&folder, &good, 0x9a11, 700, ("model.safetensors", "."));
        assert!((30..680).contains(&opened), "{opened}");
    }
}
