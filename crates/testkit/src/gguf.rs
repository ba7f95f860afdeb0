//! Writes GGUF version 3 files: metadata, tensor table, aligned tensor data.
//!
//! Tensor data is given as bytes, so that tests of block types choose every bit. Follows the GGUF
//! specification of the ggml project; dimensions are written innermost first, as GGUF wants them,
//! but given outermost first, as everywhere else here.

pub mod blocks;
pub mod model;

/// Alignment of the data section and of each tensor, in bytes (the format's default).
const ALIGNMENT: usize = 32;

/// A tensor type with its ggml number, elements per block and bytes per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgmlType {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// 32 elements: scale (f16), 4-bit values around 8.
    Q4_0,
    /// 32 elements: scale and minimum (f16), 4-bit values.
    Q4_1,
    /// 32 elements: scale (f16), 32 fifth bits, 4-bit values.
    Q5_0,
    /// 32 elements: scale and minimum (f16), 32 fifth bits, 4-bit values.
    Q5_1,
    /// 32 elements: scale (f16), 8-bit values.
    Q8_0,
    /// 32 elements: scale (f16), 4-bit indices of uneven levels.
    Iq4Nl,
    /// 256 elements: 16 bytes of 4-bit scales and minima, 2-bit values, two f16 scales.
    Q2K,
    /// 256 elements: third bits, 2-bit values, 12 bytes of 6-bit scales, one f16 scale.
    Q3K,
    /// 256 elements: two f16 scales, 12 bytes of 6-bit scales and minima, 4-bit values.
    Q4K,
    /// 256 elements: as Q4K with 32 bytes of fifth bits.
    Q5K,
    /// 256 elements: 4-bit and 2-bit parts, 16 8-bit scales, one f16 scale.
    Q6K,
}

impl GgmlType {
    /// Every type.
    pub const ALL: [GgmlType; 14] = [
        GgmlType::F32,
        GgmlType::F16,
        GgmlType::Bf16,
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Iq4Nl,
        GgmlType::Q2K,
        GgmlType::Q3K,
        GgmlType::Q4K,
        GgmlType::Q5K,
        GgmlType::Q6K,
    ];

    /// The number in a file, elements of one block, bytes of one block.
    const fn layout(self) -> (u32, usize, usize) {
        match self {
            GgmlType::F32 => (0, 1, 4),
            GgmlType::F16 => (1, 1, 2),
            GgmlType::Bf16 => (30, 1, 2),
            GgmlType::Q4_0 => (2, 32, 2 + 16),
            GgmlType::Q4_1 => (3, 32, 2 + 2 + 16),
            GgmlType::Q5_0 => (6, 32, 2 + 4 + 16),
            GgmlType::Q5_1 => (7, 32, 2 + 2 + 4 + 16),
            GgmlType::Q8_0 => (8, 32, 2 + 32),
            GgmlType::Iq4Nl => (20, 32, 2 + 16),
            GgmlType::Q2K => (10, 256, 16 + 64 + 2 + 2),
            GgmlType::Q3K => (11, 256, 32 + 64 + 12 + 2),
            GgmlType::Q4K => (12, 256, 2 + 2 + 12 + 128),
            GgmlType::Q5K => (13, 256, 2 + 2 + 12 + 32 + 128),
            GgmlType::Q6K => (14, 256, 128 + 64 + 16 + 2),
        }
    }

    /// The type's number in a file.
    pub const fn number(self) -> u32 {
        self.layout().0
    }

    /// Elements of one block.
    pub const fn block_elements(self) -> usize {
        self.layout().1
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.layout().2
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum MetaValue {
    /// Type 0.
    U8(u8),
    /// Type 4.
    U32(u32),
    /// Type 5.
    I32(i32),
    /// Type 6.
    F32(f32),
    /// Type 7.
    Bool(bool),
    /// Type 8.
    String(String),
    /// Type 9, elements of one type.
    Array(Vec<MetaValue>),
    /// Type 10.
    U64(u64),
}

impl MetaValue {
    fn type_number(&self) -> u32 {
        match self {
            MetaValue::U8(_) => 0,
            MetaValue::U32(_) => 4,
            MetaValue::I32(_) => 5,
            MetaValue::F32(_) => 6,
            MetaValue::Bool(_) => 7,
            MetaValue::String(_) => 8,
            MetaValue::Array(_) => 9,
            MetaValue::U64(_) => 10,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            MetaValue::U8(v) => out.push(*v),
            MetaValue::U32(v) => out.extend(v.to_le_bytes()),
            MetaValue::I32(v) => out.extend(v.to_le_bytes()),
            MetaValue::F32(v) => out.extend(v.to_le_bytes()),
            MetaValue::Bool(v) => out.push(u8::from(*v)),
            MetaValue::String(v) => write_string(v, out),
            MetaValue::U64(v) => out.extend(v.to_le_bytes()),
            MetaValue::Array(values) => {
                // An empty list still has an element type; uint32 is as good as any.
                out.extend(values.first().map_or(4, MetaValue::type_number).to_le_bytes());
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|v| v.write(out));
            }
        }
    }
}

impl From<u32> for MetaValue {
    fn from(v: u32) -> Self {
        MetaValue::U32(v)
    }
}

impl From<f32> for MetaValue {
    fn from(v: f32) -> Self {
        MetaValue::F32(v)
    }
}

impl From<bool> for MetaValue {
    fn from(v: bool) -> Self {
        MetaValue::Bool(v)
    }
}

impl From<&str> for MetaValue {
    fn from(v: &str) -> Self {
        MetaValue::String(v.to_owned())
    }
}

impl<T: Into<MetaValue>> From<Vec<T>> for MetaValue {
    fn from(v: Vec<T>) -> Self {
        MetaValue::Array(v.into_iter().map(Into::into).collect())
    }
}

struct TensorEntry {
    name: String,
    kind: GgmlType,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// A GGUF file being put together.
#[derive(Default)]
pub struct GgufWriter {
    metadata: Vec<(String, MetaValue)>,
    tensors: Vec<TensorEntry>,
}

impl GgufWriter {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metadata entry.
    pub fn meta(&mut self, key: &str, value: impl Into<MetaValue>) -> &mut Self {
        self.metadata.push((key.to_owned(), value.into()));
        self
    }

    /// Adds a tensor of `shape` (outermost first). Panics when `data` has not the length that
    /// shape and type ask for, or the innermost length is not a multiple of the type's block.
    pub fn tensor(&mut self, name: &str, kind: GgmlType, shape: &[usize], data: Vec<u8>) -> &mut Self {
        let elements: usize = shape.iter().product();
        let innermost = *shape.last().expect("a tensor has at least one dimension");
        assert!(innermost.is_multiple_of(kind.block_elements()), "{name}: rows end inside a block");
        assert_eq!(
            data.len(),
            elements / kind.block_elements() * kind.block_bytes(),
            "{name}: length of data"
        );
        self.tensors.push(TensorEntry { name: name.to_owned(), kind, shape: shape.to_vec(), data });
        self
    }

    /// The bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_string(key, &mut out);
            out.extend(value.type_number().to_le_bytes());
            value.write(&mut out);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            write_string(&tensor.name, &mut out);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&d| out.extend((d as u64).to_le_bytes()));
            out.extend(tensor.kind.number().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(ALIGNMENT);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(&tensor.data);
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }

    /// Writes the file.
    pub fn write(&self, path: &std::path::Path) -> std::io::Result<()> {
        std::fs::write(path, self.encode())
    }
}

fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_follows_the_specification() {
        let mut file = GgufWriter::new();
        file.meta("a", 7_u32).meta("l", vec!["x", "yz"]);
        file.tensor("t", GgmlType::F16, &[2, 3], vec![1; 12]);
        file.tensor("u", GgmlType::Q8_0, &[1, 32], vec![2; 34]);
        let bytes = file.encode();
        assert_eq!(&bytes[..4], b"GGUF");
        assert_eq!(bytes[4..24], [3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[24..41], [1, 0, 0, 0, 0, 0, 0, 0, b'a', 4, 0, 0, 0, 7, 0, 0, 0]);
        // Two tensors of 12 and 34 bytes, each on a 32-byte boundary, padded at the end.
        assert_eq!(bytes.len() % 32, 0);
        let data = bytes.len() - 96;
        assert_eq!(bytes[data..data + 13], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]);
        assert_eq!(bytes[data + 32..data + 67], [[2; 34].as_slice(), &[0]].concat());
    }

    #[test]
    #[should_panic(expected = "length of data")]
    fn wrong_lengths_are_refused() {
        GgufWriter::new().tensor("t", GgmlType::Q4K, &[1, 256], vec![0; 143]);
    }
}
