//! Unpacked blocks against golden data of the `gguf` Python package (`data/make_blocks.py`), and
//! against the testkit's element-by-element reading in f64.
#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking too

mod common;

use common::{Folder, Gguf};
use lockstep_core::DType;
use lockstep_testkit::gguf::{GgmlType, blocks};
use lockstep_testkit::random::Random;
use lockstep_weights::{ModelFiles, StorageKind};

/// Kind and ggml's number for it.
const KINDS: [(StorageKind, u32); 14] = [
    (StorageKind::F32, 0),
    (StorageKind::F16, 1),
    (StorageKind::Bf16, 30),
    (StorageKind::Q4_1, 3),
    (StorageKind::Q5_0, 6),
    (StorageKind::Q8_0, 8),
    (StorageKind::Q4K, 12),
    (StorageKind::Q6K, 14),
    (StorageKind::Q4_0, 2),
    (StorageKind::Q5_1, 7),
    (StorageKind::Q5K, 13),
    (StorageKind::Q2K, 10),
    (StorageKind::Q3K, 11),
    (StorageKind::Iq4Nl, 20),
];
const VECTOR: &str = "model.norm.weight";
const MATRIX: &str = "model.layers.0.mlp.up_proj.weight";

/// Stored blocks and the values they unpack to.
fn golden(kind: StorageKind) -> (Vec<u8>, Vec<f32>) {
    let golden: serde_json::Value = serde_json::from_str(include_str!("data/blocks.json")).unwrap();
    let field = |field: &str| -> Vec<u8> {
        let text = golden[kind.name()][field].as_str().unwrap();
        text.as_bytes()
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    };
    let values = field("f32").as_chunks::<4>().0.iter().map(|b| f32::from_be_bytes(*b)).collect();
    (field("blocks"), values)
}

/// A file that holds the four blocks as a vector and, twice, as a matrix of two rows a time.
fn open(kind: StorageKind, number: u32) -> (ModelFiles, Vec<f32>) {
    let (blocks, values) = golden(kind);
    let n = values.len() as u64;
    let gguf = Gguf::model("qwen2").tensor("output_norm.weight", &[n], number, blocks.clone()).tensor(
        "blk.0.ffn_up.weight",
        &[4, n / 2],
        number,
        [blocks.clone(), blocks].concat(),
    );
    let folder = Folder::new();
    (ModelFiles::open(&folder.write("blocks.gguf", gguf.bytes())).unwrap(), values)
}

#[test]
fn vectors_unpack_bit_for_bit() {
    for (kind, number) in KINDS {
        let (files, expected) = open(kind, number);
        let got = files.read_vector(VECTOR, 0..expected.len()).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&expected), "{kind}");
    }
}

#[test]
fn any_rows_and_columns_of_a_matrix_are_the_same_elements() {
    for (kind, number) in KINDS {
        let (files, values) = open(kind, number);
        let cols = values.len() / 2;
        let element = |row: usize, col: usize| values[(row % 2) * cols + col];
        let encode = |value: f32| match kind {
            StorageKind::F32 => value.to_le_bytes().to_vec(),
            StorageKind::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            _ => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        };
        let bounds = [0, 1, cols / 3, cols / 2, cols - 1, cols];
        let mut out = Vec::new();
        for (from, to) in bounds.iter().flat_map(|f| bounds.map(|t| (*f, t))).filter(|(f, t)| f <= t) {
            for rows in [0..4, 1..3, 2..2] {
                let dtype = files.read_rows(MATRIX, rows.clone(), from..to, &mut out).unwrap();
                assert_eq!(Some(dtype), files.dtype_of(MATRIX));
                assert!(!kind.is_quantised() || dtype == DType::Bf16);
                let expected: Vec<u8> = rows
                    .clone()
                    .flat_map(|r| (from..to).map(move |c| (r, c)))
                    .flat_map(|(r, c)| encode(element(r, c)))
                    .collect();
                assert_eq!(out, expected, "{kind} rows {rows:?} columns {from}..{to}");
            }
        }
    }
}

/// The same kinds as the testkit spells them.
const TESTKIT_KINDS: [(StorageKind, GgmlType); 14] = [
    (StorageKind::F32, GgmlType::F32),
    (StorageKind::F16, GgmlType::F16),
    (StorageKind::Bf16, GgmlType::Bf16),
    (StorageKind::Q4_0, GgmlType::Q4_0),
    (StorageKind::Q4_1, GgmlType::Q4_1),
    (StorageKind::Q5_0, GgmlType::Q5_0),
    (StorageKind::Q5_1, GgmlType::Q5_1),
    (StorageKind::Q8_0, GgmlType::Q8_0),
    (StorageKind::Iq4Nl, GgmlType::Iq4Nl),
    (StorageKind::Q2K, GgmlType::Q2K),
    (StorageKind::Q3K, GgmlType::Q3K),
    (StorageKind::Q4K, GgmlType::Q4K),
    (StorageKind::Q5K, GgmlType::Q5K),
    (StorageKind::Q6K, GgmlType::Q6K),
];

#[test]
fn random_blocks_have_the_values_of_their_layout() {
    const SEED: u64 = 0xb10c;
    println!("seed {SEED}");
    let mut random = Random::new(SEED);
    for (kind, testkit_kind) in TESTKIT_KINDS {
        let stored = blocks::random(testkit_kind, 64, &mut random);
        let expected = blocks::elements(testkit_kind, &stored);
        let n = expected.len() as u64;
        let gguf = Gguf::model("qwen2").tensor("output_norm.weight", &[n], testkit_kind.number(), stored);
        let folder = Folder::new();
        let files = ModelFiles::open(&folder.write("random.gguf", gguf.bytes())).unwrap();
        let got = files.read_vector(VECTOR, 0..expected.len()).unwrap();
        for (block, (got, expected)) in
            got.chunks(kind.block_len()).zip(expected.chunks(kind.block_len())).enumerate()
        {
            // A value is the difference of two products at most, each rounded in f32; their size is
            // bounded by that of the block's largest elements.
            let size = expected.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            for (i, (g, e)) in got.iter().zip(expected).enumerate() {
                let error = (f64::from(*g) - e).abs();
                assert!(error <= 1e-5 * size, "{kind} block {block} element {i}: {g} instead of {e}");
            }
        }
    }
}

#[test]
fn codes_of_a_slice_are_those_of_the_whole() {
    const SEED: u64 = 0xc0de;
    println!("seed {SEED}");
    let mut random = Random::new(SEED);
    let (rows, cols) = (6, 1024);
    for (kind, testkit_kind) in TESTKIT_KINDS {
        let Some(layout) = kind.code_layout() else { continue };
        let stored = blocks::random(testkit_kind, rows * cols / kind.block_len(), &mut random);
        let gguf = Gguf::model("qwen2").tensor(
            "blk.0.ffn_up.weight",
            &[rows as u64, cols as u64],
            testkit_kind.number(),
            stored,
        );
        let folder = Folder::new();
        let files = ModelFiles::open(&folder.write("codes.gguf", gguf.bytes())).unwrap();
        assert_eq!(files.codes_of(MATRIX), Some(layout), "{kind}");
        let read = |rows, cols| {
            let mut out = vec![1, 2, 3];
            files.read_codes(MATRIX, (rows, cols), layout, &mut out).unwrap();
            out
        };
        let (whole, row_bytes) = (read(0..rows, 0..cols), cols / 32 * layout.staged_group_bytes());
        assert_eq!(whole.len(), rows * row_bytes, "{kind}");
        for (from, to) in [(1, 6), (3, 4)] {
            // From the middle of a block of 256 on.
            let groups = 3 * layout.staged_group_bytes()..29 * layout.staged_group_bytes();
            let want: Vec<u8> = whole[from * row_bytes..to * row_bytes]
                .chunks(row_bytes)
                .flat_map(|row| row[groups.clone()].to_vec())
                .collect();
            assert!(read(from..to, 96..928) == want, "{kind} rows {from}..{to}");
        }
        let error = files.read_codes(MATRIX, (0..rows + 1, 0..cols), layout, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("rows 0..7"), "{error}");
    }
}
