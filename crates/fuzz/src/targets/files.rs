//! Files of a model: GGUF, safetensors, and the JSON beside them.

use super::files_of;
use super::text::read_text;
use crate::targets::text::Scratch;
use lockstep_core::CODE_GROUP;
use lockstep_core::shard::{check_tp_size, exact_tp_sizes};
use lockstep_weights::{ModelFiles, read_config};
use std::path::Path;

/// Words of GGUF metadata.
pub(crate) const GGUF_WORDS: &[&str] = &[
    "GGUF",
    "general.architecture",
    "llama",
    "general.alignment",
    "llama.block_count",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.model",
    "tokenizer.chat_template",
    "split.count",
    "token_embd.weight",
];

/// Most of a tensor that is read.
const ROWS_MAX: usize = 2;
const COLS_MAX: usize = 512;

/// The config of a small model whose files are read in full.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 64, "torch_dtype": "float32"}"#;

/// One tensor of no elements: sound, and of no model.
const WEIGHTS: &[u8] =
    b"\x3e\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[0,0]}}      ";

/// A whole file.
pub(crate) fn gguf(input: &[u8]) {
    Scratch::with(|folder| {
        folder.write("model.gguf", input);
        let path = folder.join("model.gguf");
        read_files(&path);
        read_text(&path, None, &[]);
    });
}

/// A whole file, beside a sound config.
pub(crate) fn safetensors(input: &[u8]) {
    Scratch::with(|folder| {
        folder.write("config.json", CONFIG.as_bytes());
        folder.write("model.safetensors", input);
        read_files(folder.path());
    });
}

/// Up to three files, beside sound weights.
pub(crate) fn config(input: &[u8]) {
    Scratch::with(|folder| {
        let mut files = files_of(input);
        folder.write("config.json", files.next().unwrap_or_default());
        folder.write_or_remove("generation_config.json", files.next());
        folder.write_or_remove("model.safetensors.index.json", files.next());
        folder.write("model.safetensors", WEIGHTS);
        if let Ok(read) = read_config(folder.path()) {
            let config = read.config;
            config.validate().expect("what was read is valid");
            for tp_size in [1, 2, 3, 8, 64] {
                let _ = check_tp_size(&config, tp_size);
            }
            exact_tp_sizes(&config);
            config.kv_bytes_per_token(config.num_kv_heads);
            for layer in [0, config.num_layers - 1] {
                config.window(layer);
                config.rope_of(layer);
                config.moe_of(layer);
            }
        }
        read_files(folder.path());
    });
}

fn read_files(path: &Path) {
    let Ok(files) = ModelFiles::open(path) else { return };
    files.source_label();
    files.conversions(true);
    files.conversions(false);
    files.unread_keys_report();
    files.generation_defaults();
    if let Some(metadata) = files.gguf() {
        let keys: Vec<&str> = metadata.keys().collect();
        keys.into_iter().for_each(|key| drop(metadata.describe(key)));
    }
    let names: Vec<String> = files.tensor_names().map(str::to_owned).collect();
    let mut out = Vec::new();
    for name in &names {
        let shape = files.tensor(name).expect("it was listed").shape;
        if let [rows, cols] = shape[..] {
            let _ = files.read_rows(name, 0..rows.min(ROWS_MAX), 0..cols.min(COLS_MAX), &mut out);
            if let Some(layout) = files.codes_of(name) {
                let cols = cols.min(COLS_MAX) / CODE_GROUP * CODE_GROUP;
                let _ = files.read_codes(name, (0..rows.min(ROWS_MAX), 0..cols), layout, &mut out);
            }
        } else if let [len] = shape[..] {
            let _ = files.read_vector(name, 0..len.min(COLS_MAX));
        }
        files.release(name);
    }
}
