//! How fast matrices of each type are read, against copying memory. Not run by default: figures of
//! a busy machine mean nothing. `cargo test --release -p lockstep-weights --test speed -- --ignored
//! --nocapture` prints them.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::{Folder, Gguf, llama_json};
use lockstep_testkit::gguf::{GgmlType, blocks};
use lockstep_testkit::random::Random;
use lockstep_testkit::safetensors::quantised::{self, Fp8Scales, GptqZeros, Groups};
use lockstep_testkit::safetensors::{StoredTensor, encode_stored};
use lockstep_weights::ModelFiles;
use serde_json::{Value, json};
use std::hint::black_box;
use std::time::Duration;

const ROWS: usize = 4096;
const COLS: usize = 4096;
const MODULE: &str = "model.layers.0.mlp.up_proj";
/// What the loader asks for at a time.
const BAND_ROWS: usize = (2 << 20) / (4 * COLS);

/// Time that this thread has had a processor, which other programs do not stretch.
fn busy() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

/// The shortest of several runs; each repeats, because the kernel counts in steps of milliseconds.
fn best(mut run: impl FnMut()) -> Duration {
    const REPEATS: u32 = 8;
    let time = |run: &mut dyn FnMut()| {
        let start = busy();
        (0..REPEATS).for_each(|_| run());
        (busy() - start) / REPEATS
    };
    (0..5).map(|_| time(&mut run)).min().unwrap()
}

fn report(name: &str, time: Duration, out_bytes: usize) {
    let elements = (ROWS * COLS) as f64;
    println!(
        "{name:>12}: {:6.2} GB/s written, {:5.2} ns per element",
        out_bytes as f64 / time.as_secs_f64() / 1e9,
        time.as_secs_f64() * 1e9 / elements
    );
}

fn measure(name: &str, files: &ModelFiles) {
    let weight = format!("{MODULE}.weight");
    let mut out = Vec::new();
    let mut written = 0;
    let time = best(|| {
        written = 0;
        for row in (0..ROWS).step_by(BAND_ROWS) {
            files.read_rows(&weight, row..ROWS.min(row + BAND_ROWS), 0..COLS, &mut out).unwrap();
            written += out.len();
        }
    });
    report(name, time, written);
}

/// A matrix made of copies of a few random blocks.
fn gguf(kind: GgmlType) -> ModelFiles {
    let mut random = Random::new(1);
    let row = blocks::random(kind, COLS / kind.block_elements(), &mut random);
    let matrix = row.repeat(ROWS);
    let gguf = Gguf::model("qwen2").tensor(
        "blk.0.ffn_up.weight",
        &[ROWS as u64, COLS as u64],
        kind.number(),
        matrix,
    );
    let folder = Folder::new();
    ModelFiles::open(&folder.write("speed.gguf", gguf.bytes())).unwrap()
}

fn checkpoint(quantization: Value, tensors: &[StoredTensor]) -> ModelFiles {
    let folder = Folder::new();
    let mut config = llama_json();
    config["quantization_config"] = quantization;
    folder.write("config.json", config.to_string());
    folder.write("model.safetensors", encode_stored(tensors));
    ModelFiles::open(folder.path()).unwrap()
}

#[test]
#[ignore = "prints figures"]
fn read_every_type() {
    let source = vec![1u8; 2 * ROWS * COLS];
    let mut band = vec![0u8; 2 * BAND_ROWS * COLS];
    let copy = best(|| {
        source.chunks(band.len()).for_each(|part| black_box(&mut band)[..part.len()].copy_from_slice(part))
    });
    report("memcpy", copy, source.len());
    for kind in GgmlType::ALL {
        measure(&format!("{kind:?}"), &gguf(kind));
    }
    let mut random = Random::new(2);
    let shape = (ROWS, COLS);
    let fp8 = quantised::fp8(MODULE, shape, Fp8Scales::Tiles(128, 128), &mut random).stored;
    let config = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
    measure("FP8 tiles", &checkpoint(config, &fp8));
    for (name, groups) in [("GPTQ", Groups::Even), ("GPTQ listed", Groups::Listed)] {
        let gptq = quantised::gptq(MODULE, shape, 128, (groups, GptqZeros::LessOne), &mut random).stored;
        let config = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
        measure(name, &checkpoint(config, &gptq));
    }
    let awq = quantised::awq(MODULE, shape, 128, &mut random).stored;
    let config = json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true});
    measure("AWQ", &checkpoint(config, &awq));
}
