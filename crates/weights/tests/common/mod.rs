//! Small writers of model files for this crate's tests.
// Each test binary uses a part of this; failing to write a test file should panic.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder that disappears with its owner.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("lockstep-weights-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// SplitMix64 (Steele et al. 2014): every seed is a good one.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// A config.json of a tiny Llama.
pub fn llama_json() -> serde_json::Value {
    serde_json::json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 10,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64, "eos_token_id": 3})
}

/// One tensor for the safetensors writer: name, dtype, shape, data.
pub type Stored<'a> = (&'a str, &'a str, &'a [usize], Vec<u8>);

/// A safetensors file with the tensors in the given order.
pub fn safetensors(tensors: &[Stored]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), serde_json::json!({"format": "pt"}));
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(
            (*name).into(),
            serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}),
        );
        data.extend_from_slice(bytes);
    }
    with_header(&serde_json::Value::Object(header).to_string(), &data)
}

pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

pub fn f32_bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Builds a GGUF file, version 3.
#[derive(Clone, Default)]
pub struct Gguf {
    keys: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

impl Gguf {
    /// The keys that a model of `architecture` needs: hidden 8, 2 heads, 1 KV head, 1 layer, and a
    /// vocabulary of 4 tokens.
    pub fn model(architecture: &str) -> Self {
        let key = |name: &str| format!("{architecture}.{name}");
        Self::default()
            .text("general.architecture", architecture)
            .u32(&key("block_count"), 1)
            .u32(&key("context_length"), 64)
            .u32(&key("embedding_length"), 8)
            .u32(&key("feed_forward_length"), 16)
            .u32(&key("attention.head_count"), 2)
            .u32(&key("attention.head_count_kv"), 1)
            .f32(&key("attention.layer_norm_rms_epsilon"), 1e-6)
            .f32(&key("rope.freq_base"), 10_000.0)
            .texts("tokenizer.ggml.tokens", &["a", "é", "漢", "<end>"])
            .u32("tokenizer.ggml.eos_token_id", 3)
            .tensor("token_embd.weight", &[4, 8], 0, f32_bytes((0..32).map(|i| i as f32)))
    }

    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.retain(|(k, _)| k != key);
        self.keys.push((key.into(), [&kind.to_le_bytes(), value].concat()));
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.keys.retain(|(k, _)| k != key);
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &text(value))
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Self {
        let mut bytes = [8u32.to_le_bytes().as_slice(), &(values.len() as u64).to_le_bytes()].concat();
        values.iter().for_each(|v| bytes.extend(text(v)));
        self.raw(key, 9, &bytes)
    }

    /// Adds a tensor; `shape` is in Hugging Face order.
    pub fn tensor(mut self, name: &str, shape: &[u64], kind: u32, data: Vec<u8>) -> Self {
        self.tensors.push((name.into(), shape.iter().rev().copied().collect(), kind, data));
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            file.extend(text(key));
            file.extend(value);
        }
        let mut data = Vec::new();
        for (name, dims, kind, bytes) in &self.tensors {
            file.extend(text(name));
            file.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| file.extend(d.to_le_bytes()));
            file.extend(kind.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            data.extend_from_slice(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        file
    }
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}
