//! Writes safetensors files: 8 bytes of header length, a JSON header, the tensors.
//!
//! Follows the format's specification; the header is padded with spaces to a multiple of 8.

pub mod quantised;

use crate::tensor::{FileDType, Weights};
use serde_json::{Map, Value, json};
use std::path::Path;

/// A tensor of any type of the format, as bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// Name in the file.
    pub name: String,
    /// The format's spelling, e.g. `I32` or `F8_E4M3`.
    pub dtype: &'static str,
    /// Lengths, outermost first.
    pub shape: Vec<usize>,
    /// Little-endian elements.
    pub bytes: Vec<u8>,
}

/// The bytes of a file with all of `weights`, stored as `dtype`.
pub fn encode(weights: &Weights, dtype: FileDType) -> Vec<u8> {
    let stored = |(name, tensor): (&String, &crate::tensor::Tensor)| StoredTensor {
        name: name.clone(),
        dtype: dtype.safetensors_name(),
        shape: tensor.shape.clone(),
        bytes: dtype.bytes(&tensor.data),
    };
    encode_stored(&weights.iter().map(stored).collect::<Vec<_>>())
}

/// The bytes of a file with `tensors`, in their order.
pub fn encode_stored(tensors: &[StoredTensor]) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend(&tensor.bytes);
        header.insert(
            tensor.name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()]}),
        );
    }
    encode_raw(&Value::Object(header).to_string(), &data)
}

/// A file with this header text and data, whatever they say; for files that must be refused.
pub fn encode_raw(header: &str, data: &[u8]) -> Vec<u8> {
    let padded_len = header.len().next_multiple_of(8);
    let mut bytes = (padded_len as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(8 + padded_len, b' ');
    bytes.extend(data);
    bytes
}

/// The name of shard `i` (from 0) of `count`, as transformers names it.
pub fn shard_name(i: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", i + 1)
}

/// Writes `model.safetensors`, or `count > 1` shards of neighbouring tensors with their index.
pub fn write_model(dir: &Path, weights: &Weights, dtype: FileDType, count: usize) -> std::io::Result<()> {
    if count <= 1 {
        return std::fs::write(dir.join("model.safetensors"), encode(weights, dtype));
    }
    let per_shard = weights.len().div_ceil(count);
    let mut map = Map::new();
    let names: Vec<&String> = weights.keys().collect();
    for (i, names) in names.chunks(per_shard).enumerate() {
        let file = shard_name(i, count);
        let shard: Weights = names.iter().map(|n| ((*n).clone(), weights[*n].clone())).collect();
        std::fs::write(dir.join(&file), encode(&shard, dtype))?;
        map.extend(names.iter().map(|n| ((*n).clone(), json!(file))));
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), format!("{index:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    #[test]
    fn header_and_data_follow_the_format() {
        let weights = Weights::from([
            ("a".to_owned(), Tensor { shape: vec![2], data: vec![1.0, -2.0] }),
            ("b".to_owned(), Tensor { shape: vec![1, 1], data: vec![0.5] }),
        ]);
        let bytes = encode(&weights, FileDType::Bf16);
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(len % 8, 0);
        let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        assert_eq!(header["b"], json!({"dtype": "BF16", "shape": [1, 1], "data_offsets": [4, 6]}));
        assert_eq!(bytes[8 + len..], [0x80, 0x3f, 0x00, 0xc0, 0x00, 0x3f]);
    }
}
