//! Which files of a Hugging Face folder make the model, and what is read from them.
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::{Folder, f32_bytes, llama_json, safetensors, with_header};
use lockstep_core::DType;
use lockstep_weights::{ModelFiles, StorageKind};
use std::collections::HashSet;
use std::path::Path;

const UP: &str = "model.layers.0.mlp.up_proj.weight";
const NORM: &str = "model.norm.weight";

/// A folder with a config and one weight file: `UP` is 3 x 4 bf16 with the bits 0..12.
fn single() -> Folder {
    let folder = Folder::new();
    folder.write("config.json", llama_json().to_string());
    let up = (0..12u16).flat_map(u16::to_le_bytes).collect();
    let norm = f32_bytes([1.0, -2.0, 3.5]);
    let file = safetensors(&[(UP, "BF16", &[3, 4], up), (NORM, "F32", &[3], norm)]);
    folder.write("model.safetensors", file);
    folder
}

fn error(path: &Path) -> String {
    ModelFiles::open(path).unwrap_err().to_string()
}

fn index(map: &[(&str, &str)]) -> String {
    let map: serde_json::Map<_, _> = map.iter().map(|(t, f)| ((*t).into(), (*f).into())).collect();
    serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string()
}

#[test]
fn reads_rows_columns_and_vectors_of_a_single_file() {
    let folder = single();
    let files = ModelFiles::open(folder.path()).unwrap();
    let mut out = vec![9; 3];
    assert_eq!(files.read_rows(UP, 1..3, 1..3, &mut out).unwrap(), DType::Bf16);
    assert_eq!(out, [5u16, 6, 9, 10].map(u16::to_le_bytes).concat());
    files.read_rows(UP, 2..2, 0..4, &mut out).unwrap();
    assert!(out.is_empty());
    assert_eq!(files.read_vector(NORM, 1..3).unwrap(), [-2.0, 3.5]);
    assert_eq!(files.dtype_of(NORM), Some(DType::F32));
    let info = files.expect_shape(UP, &[3, 4]).unwrap();
    assert_eq!((info.stored, info.elements(), info.stored_bytes()), (StorageKind::Bf16, 12, 24));
    assert_eq!(files.tensor_names().collect::<Vec<_>>(), [UP, NORM]);
    assert_eq!(files.source_label(), "safetensors bf16+f32, 1 file");
    assert_eq!(files.folder(), Some(folder.path()));
    assert!(files.gguf().is_none());
    files.release(UP);
    files.read_rows(UP, 0..1, 0..1, &mut out).unwrap();
    assert_eq!(out, [0, 0]);
}

#[test]
fn wrong_requests_name_tensor_file_and_shapes() {
    let folder = single();
    let files = ModelFiles::open(folder.path()).unwrap();
    let message = files.expect_shape(UP, &[4, 3]).unwrap_err().to_string();
    for part in [UP, "model.safetensors has shape [3, 4]", "asks for [4, 3]"] {
        assert!(message.contains(part), "{message}");
    }
    let message = files.expect_shape("model.layers.1.x", &[1]).unwrap_err().to_string();
    assert!(message.contains("model.layers.1.x is missing; searched"), "{message}");
    assert!(message.contains("model.safetensors"), "{message}");
    let mut out = Vec::new();
    for (rows, cols) in [(0..4, 0..4), (0..3, 0..5)] {
        let message = files.read_rows(UP, rows, cols, &mut out).unwrap_err().to_string();
        assert!(message.contains("shape [3, 4]"), "{message}");
    }
    assert!(files.read_rows(NORM, 0..1, 0..3, &mut out).is_err());
    assert!(files.read_vector(UP, 0..1).is_err());
    assert!(files.read_vector(NORM, 0..4).is_err());
}

#[test]
fn end_tokens_and_defaults_join_config_and_generation_config() {
    let folder = single();
    assert_eq!(ModelFiles::open(folder.path()).unwrap().eos_tokens(), [3]);
    folder.write(
        "generation_config.json",
        r#"{"eos_token_id": [7, 3, 2], "temperature": 0.6, "top_k": 20, "top_p": null, "do_sample": true, "x": {}}"#,
    );
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(files.eos_tokens(), [2, 3, 7]);
    let defaults = files.generation_defaults();
    assert_eq!((defaults.temperature, defaults.top_k, defaults.top_p), (Some(0.6), Some(20), None));
    assert_eq!(defaults.do_sample, Some(true));
    folder.write("generation_config.json", r#"{"eos_token_id": 9}"#);
    assert_eq!(ModelFiles::open(folder.path()).unwrap().eos_tokens(), [3, 9]);
    for (text, word) in [
        (r#"{"top_k": -1}"#, "top_k is -1"),
        ("", "expected a JSON object"),
        ("[]", "expected a JSON object"),
    ] {
        folder.write("generation_config.json", text);
        let message = error(folder.path());
        assert!(message.contains("generation_config.json") && message.contains(word), "{message}");
    }
}

#[test]
fn the_index_decides_which_files_and_tensors_belong() {
    let folder = single();
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let tensor = |name, value| safetensors(&[(name, "F32", &[1], f32_bytes([value]))]);
    folder.write("model-00001-of-00002.safetensors", tensor("a", 1.0));
    folder.write("model-00002-of-00002.safetensors", tensor("b", 2.0));
    folder.write("model-00001-of-00009.safetensors", tensor("a", 100.0));
    folder.write("consolidated.safetensors", tensor("b", 100.0));
    folder.write("model.safetensors", tensor("a", 100.0));
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    folder.write("model.safetensors.index.json", index(&[("a", one), ("b", two)]));
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(files.read_vector("a", 0..1).unwrap(), [1.0]);
    assert_eq!(files.read_vector("b", 0..1).unwrap(), [2.0]);
    assert_eq!(files.source_label(), "safetensors f32, 2 files");

    folder.write("model.safetensors.index.json", index(&[("a", one), ("c", two)]));
    let message = error(folder.path());
    assert!(message.contains(two) && message.contains("expected tensor c"), "{message}");
    folder.write("model.safetensors.index.json", index(&[("a", one), ("b", "gone.safetensors")]));
    let message = error(folder.path());
    assert!(message.contains("gone.safetensors is missing"), "{message}");
    for bad in ["../x.safetensors", "/etc/passwd", ""] {
        folder.write("model.safetensors.index.json", index(&[("a", bad)]));
        assert!(error(folder.path()).contains("file names inside the folder"));
    }
    for text in ["{}", r#"{"weight_map": {}}"#, "", r#"{"weight_map": {"a": 1}}"#] {
        folder.write("model.safetensors.index.json", text);
        assert!(error(folder.path()).contains("index.json"));
    }
}

#[test]
fn links_spaces_and_other_scripts_in_paths() {
    let folder = single();
    let odd = folder.path().join("Modell für 模型 1");
    std::fs::create_dir(&odd).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::os::unix::fs::symlink(Path::new("..").join(name), odd.join(name)).unwrap();
    }
    let files = ModelFiles::open(&odd).unwrap();
    assert_eq!(files.read_vector(NORM, 0..1).unwrap(), [1.0]);
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let message = error(&odd);
    assert!(message.contains("模型 1/model.safetensors"), "{message}");
}

#[test]
fn reading_needs_no_permission_to_write_and_leaves_no_trace() {
    use std::os::unix::fs::PermissionsExt;
    let folder = single();
    let permit = |mode: u32| {
        let set = |path: &Path, mode: u32| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        for name in ["config.json", "model.safetensors"] {
            set(&folder.path().join(name), mode & 0o444);
        }
        set(folder.path(), mode);
    };
    let listing = || {
        let entries = std::fs::read_dir(folder.path()).unwrap().map(|entry| {
            let entry = entry.unwrap();
            (entry.file_name(), entry.metadata().unwrap().modified().unwrap())
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort();
        entries
    };
    permit(0o555);
    let before = listing();
    let files = ModelFiles::open(folder.path()).unwrap();
    files.read_rows(UP, 0..3, 0..4, &mut Vec::new()).unwrap();
    files.release(UP);
    drop(files);
    assert_eq!(listing(), before);
    permit(0o755);
}

#[test]
fn a_link_that_leads_nowhere_is_named() {
    let folder = single();
    for name in ["config.json", "model.safetensors"] {
        std::fs::remove_file(folder.path().join(name)).unwrap();
        std::os::unix::fs::symlink("gone", folder.path().join(name)).unwrap();
        assert!(error(folder.path()).contains(name));
        std::fs::remove_file(folder.path().join(name)).unwrap();
        std::fs::write(folder.path().join(name), llama_json().to_string()).unwrap();
    }
}

#[test]
fn folders_without_safetensors_say_what_they_hold() {
    let folder = Folder::new();
    assert!(error(folder.path()).contains("holds no weights"));
    folder.write("pytorch_model.bin", b"x");
    assert!(error(folder.path()).contains("pytorch_model.bin"));
    folder.write("adapter_model.safetensors", b"x");
    assert!(error(folder.path()).contains("adapter_model.safetensors, but neither"));
    assert!(error(Path::new("/dev/null")).contains("/dev/null is a device, not a regular file"));
    assert!(error(&folder.path().join("absent")).contains("cannot read"));
    let one = folder.write("Tiny.GGUF", common::Gguf::model("qwen2").bytes());
    assert!(ModelFiles::open(folder.path()).unwrap().gguf().is_some());
    assert!(ModelFiles::open(&one).is_ok());
    folder.write("tiny2.gguf", b"x");
    assert!(error(folder.path()).contains("2 GGUF files (Tiny.GGUF, tiny2.gguf)"));
    assert!(error(&folder.path().join("adapter_model.safetensors")).contains("name the folder"));
    assert!(error(&folder.path().join("pytorch_model.bin")).contains("neither a folder nor a GGUF file"));
}

#[test]
fn config_errors_carry_the_path() {
    let folder = single();
    folder.write("config.json", "");
    let message = error(folder.path());
    assert!(message.contains("config.json: content: expected a JSON object, found 0 bytes"), "{message}");
    folder.write("config.json", "version https://git-lfs.github.com/spec/v1\nsize 812\n");
    let message = error(folder.path());
    assert!(message.contains("config.json") && message.contains("a git-lfs pointer"), "{message}");
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    assert!(error(folder.path()).contains("config.json"));
}

#[test]
fn foreign_types_are_refused_when_they_are_read() {
    let folder = single();
    let fp8 = ("q", "F8_E4M3", [2usize, 3].as_slice(), vec![0; 6]);
    folder.write("model.safetensors", safetensors(&[fp8, ("ids", "I64", &[2], vec![0; 16])]));
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(files.dtype_of("q"), None);
    let message = files.read_rows("q", 0..1, 0..1, &mut Vec::new()).unwrap_err().to_string();
    assert!(message.contains("tensor q in") && message.contains("F8_E4M3"), "{message}");
    assert!(files.read_vector("ids", 0..1).unwrap_err().to_string().contains("I64"));
    folder.write(
        "model.safetensors",
        with_header(r#"{"q":{"dtype":"F1","shape":[8],"data_offsets":[0,1]}}"#, &[0]),
    );
    assert!(error(folder.path()).contains("a dtype of the format, found F1"));
}

#[test]
fn unused_tensors_become_one_sentence() {
    let folder = single();
    let names = ["a", "b", "c", "d", "e", "f", "g", "model.layers.0.self_attn.rotary_emb.inv_freq"];
    let tensors: Vec<_> = names.iter().map(|n| (*n, "F32", [1].as_slice(), vec![0; 4])).collect();
    folder.write("model.safetensors", safetensors(&tensors));
    let files = ModelFiles::open(folder.path()).unwrap();
    let used = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<HashSet<String>>();
    assert_eq!(files.unused_report(&used(&names)), None);
    let report = files.unused_report(&used(&["a", "b", "c", "d", "e", "f"])).unwrap();
    assert!(report.starts_with("1 tensor in the files") && report.ends_with(": g"), "{report}");
    let report = files.unused_report(&used(&["g"])).unwrap();
    assert!(report.ends_with("a, b, c, d, e and 1 more"), "{report}");
}

#[test]
fn agrees_with_the_safetensors_crate() {
    use safetensors::tensor::{Dtype, TensorView, serialize};
    let data: Vec<u8> = (0..48).collect();
    let views = [
        ("m", TensorView::new(Dtype::F16, vec![2, 3, 4], &data).unwrap()),
        ("v", TensorView::new(Dtype::F32, vec![12], &data).unwrap()),
        ("empty", TensorView::new(Dtype::F32, vec![0, 4], &[]).unwrap()),
    ];
    let folder = single();
    folder.write("model.safetensors", serialize(views, None).unwrap());
    let files = ModelFiles::open(folder.path()).unwrap();
    let mut out = Vec::new();
    assert_eq!(files.read_rows("m", 0..6, 0..4, &mut out).unwrap(), DType::F16);
    assert_eq!(out, data);
    files.read_rows("m", 4..6, 1..2, &mut out).unwrap();
    assert_eq!(out, [34, 35, 42, 43]);
    assert_eq!(files.read_vector("v", 0..1).unwrap(), [f32::from_le_bytes([0, 1, 2, 3])]);
    assert_eq!(files.tensor("empty").unwrap().elements(), 0);
}

#[test]
fn threads_share_one_reader() {
    let folder = single();
    let files = ModelFiles::open(folder.path()).unwrap();
    std::thread::scope(|scope| {
        for row in 0..3u16 {
            let files = &files;
            scope.spawn(move || {
                let mut out = Vec::new();
                for _ in 0..200 {
                    files.read_rows(UP, usize::from(row)..usize::from(row) + 1, 0..1, &mut out).unwrap();
                    assert_eq!(out, (4 * row).to_le_bytes());
                    files.release(UP);
                }
            });
        }
    });
}
