//! Resident memory stays near what is asked for. Alone in its process, so that nothing else counts.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::{Folder, Gguf, llama_json};
use lockstep_weights::ModelFiles;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

/// Largest resident size of this process so far, in bytes.
fn peak_resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() * 1024
}

/// Writes `head` and makes the file `len` bytes long, the rest a hole that reads as zeros.
fn sparse(path: &Path, head: &[u8], len: usize) {
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(head).unwrap();
    file.set_len(len as u64).unwrap();
    file.seek(SeekFrom::End(-2)).unwrap();
    file.write_all(&[1, 0]).unwrap();
}

/// Reads the right half of the columns in pieces of `rows` rows; returns the last element's bytes.
fn read_half(files: &ModelFiles, name: &str, rows: usize) -> Vec<u8> {
    let shape = files.tensor(name).unwrap().shape;
    let mut out = Vec::new();
    for start in (0..shape[0]).step_by(rows) {
        let end = shape[0].min(start + rows);
        files.read_rows(name, start..end, shape[1] / 2..shape[1], &mut out).unwrap();
    }
    out.split_off(out.len() - 2)
}

#[test]
fn reading_a_large_tensor_keeps_few_pages() {
    const ROWS: usize = 65_536;
    const COLS: usize = 1024;
    const BYTES: usize = 2 * ROWS * COLS; // 128 MiB
    const BOUND: usize = 24 << 20;
    let folder = Folder::new();
    folder.write("config.json", llama_json().to_string());
    let header = format!(r#"{{"w":{{"dtype":"BF16","shape":[{ROWS},{COLS}],"data_offsets":[0,{BYTES}]}}}}"#);
    let head = common::with_header(&header, &[]);
    sparse(&folder.path().join("model.safetensors"), &head, head.len() + BYTES);
    let q8 = Gguf::model("qwen2")
        .tensor("blk.0.ffn_up.weight", &[ROWS as u64, COLS as u64], 8, Vec::new())
        .bytes();
    sparse(&folder.path().join("q8.gguf"), &q8, q8.len() + ROWS * COLS / 32 * 34);

    let before = peak_resident();
    let files = ModelFiles::open(folder.path()).unwrap();
    assert_eq!(read_half(&files, "w", 512), [1, 0]);
    // Many small reads, as of a loader that packs row by row.
    assert_eq!(read_half(&files, "w", 16), [1, 0]);
    let gguf = ModelFiles::open(&folder.path().join("q8.gguf")).unwrap();
    read_half(&gguf, "model.layers.0.mlp.up_proj.weight", 512);
    let grown = peak_resident() - before;
    assert!(grown <= BOUND, "resident memory grew by {grown} bytes");
}
