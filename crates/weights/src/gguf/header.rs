//! Bytes of a GGUF file to key positions and tensor descriptions; pure.
//!
//! **Invariant:** every position in the result lies inside the file and every text is UTF-8, so
//! later access needs no checks that could fail. Malformed bytes give a [`Fault`], never a panic.

use crate::error::Fault;
use crate::storage::{StorageKind, TensorInfo};
use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

/// Most keys a file may have (real files: below 100).
const KEYS_MAX: u64 = 1 << 16;
/// Longest key in bytes, from the format's description.
const KEY_BYTES_MAX: u64 = (1 << 16) - 1;
/// Most tensors a file may have (a 405B model: about 1,100).
const TENSORS_MAX: u64 = 1 << 20;
/// Most dimensions of a tensor, from the format's description.
const DIMS_MAX: u32 = 4;
/// Largest alignment of tensor data in bytes.
const ALIGNMENT_MAX: u64 = 1 << 20;
/// Alignment of tensor data without the key `general.alignment`.
const ALIGNMENT_DEFAULT: u64 = 32;
/// Versions of the format that are read.
const VERSIONS: RangeInclusive<u32> = 2..=3;
/// First bytes of every GGUF file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

type Result<T> = std::result::Result<T, Fault>;

/// Type of a metadata value or of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueKind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    U64,
    I64,
    F64,
}

impl ValueKind {
    /// The format's numbering; 9 is the array, which is not an element type here.
    fn from_number(number: u32) -> Option<Self> {
        use ValueKind::*;
        let kinds = [
            Some(U8),
            Some(I8),
            Some(U16),
            Some(I16),
            Some(U32),
            Some(I32),
            Some(F32),
            Some(Bool),
            Some(Text),
            None,
            Some(U64),
            Some(I64),
            Some(F64),
        ];
        kinds.get(number as usize).copied().flatten()
    }

    /// Bytes of one value; `None` for text, whose length stands before it.
    pub fn size_bytes(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text => None,
        }
    }
}

/// Where the value of one key lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Type of the value or of the array's elements.
    pub kind: ValueKind,
    /// Elements of an array; `None` for a single value.
    pub count: Option<usize>,
    /// Bytes of the value or of all elements; texts include their length words.
    pub bytes: Range<usize>,
}

/// One tensor as the file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RawTensor {
    /// GGUF name.
    pub name: String,
    /// Shape in Hugging Face order (the reverse of the file's) and type.
    pub info: TensorInfo,
    /// Index of the file among the parts of the model; 0 until parts are joined.
    pub file: usize,
    /// Bytes in the file; empty for a type of unknown size.
    pub bytes: Range<usize>,
}

/// Everything before the tensor data.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Keys in order of name.
    pub entries: BTreeMap<String, Entry>,
    /// Tensors in order of the file.
    pub tensors: Vec<RawTensor>,
}

/// Why a sound GGUF file is not read: another version, or the other byte order. `None` when it is read, or is no
/// GGUF file at all.
pub(crate) fn foreign(bytes: &[u8]) -> Option<String> {
    let version = bytes.strip_prefix(MAGIC)?.first_chunk().map(|word| u32::from_le_bytes(*word))?;
    let (first, last) = (VERSIONS.start(), VERSIONS.end());
    match (version, version.swap_bytes()) {
        (version, _) if VERSIONS.contains(&version) => None,
        (_, swapped) if (1..=*last).contains(&swapped) => Some(format!(
            "is a big-endian GGUF file (version {swapped}), and only little-endian ones are read; convert it with \
             gguf_convert_endian.py of llama.cpp, or download a little-endian version of the model"
        )),
        (version, _) => Some(format!(
            "is a GGUF file of version {version}, and versions {first} and {last} are read; convert the model again \
             with today's llama.cpp, or download it again"
        )),
    }
}

/// Parses the header of a whole mapped file.
pub(crate) fn parse(bytes: &[u8]) -> Result<Header> {
    let mut cursor = Cursor { bytes, at: 0 };
    let magic = cursor.take(4, "GGUF magic")?;
    if magic != MAGIC {
        return Err(Fault::new("first four bytes", "GGUF", format!("{:?}", String::from_utf8_lossy(magic))));
    }
    let version = cursor.u32("format version")?;
    if !VERSIONS.contains(&version) {
        return Err(Fault::new("format version", "2 or 3", version.to_string()));
    }
    let tensor_count = cursor.limited("tensor count", TENSORS_MAX)?;
    let key_count = cursor.limited("metadata key count", KEYS_MAX)?;
    let mut entries = BTreeMap::new();
    for _ in 0..key_count {
        let (key, entry) = cursor.entry()?;
        if entries.insert(key.clone(), entry).is_some() {
            return Err(Fault::new(format!("metadata key {key}"), "one value", "two"));
        }
    }
    let alignment = alignment(bytes, &entries)?;
    let mut described = Vec::new();
    for _ in 0..tensor_count {
        described.push(cursor.tensor()?);
    }
    let data_start = cursor.at.next_multiple_of(alignment);
    let tensors = place(described, data_start, alignment, bytes.len())?;
    Ok(Header { entries, tensors })
}

/// `general.alignment`, checked; a power of two like llama.cpp asks for.
fn alignment(bytes: &[u8], entries: &BTreeMap<String, Entry>) -> Result<usize> {
    let Some(entry) = entries.get("general.alignment") else { return Ok(ALIGNMENT_DEFAULT as usize) };
    let what = "general.alignment";
    if entry.kind != ValueKind::U32 || entry.count.is_some() {
        return Err(Fault::new(what, "a u32", format!("{:?}", entry.kind)));
    }
    let mut cursor = Cursor { bytes, at: entry.bytes.start };
    let value = u64::from(cursor.u32(what)?);
    if !value.is_power_of_two() || value > ALIGNMENT_MAX {
        return Err(Fault::new(what, format!("a power of two up to {ALIGNMENT_MAX}"), value.to_string()));
    }
    Ok(value as usize)
}

/// A tensor description whose offset is still relative to the data section.
struct Described {
    name: String,
    info: TensorInfo,
    offset: u64,
}

/// Turns relative offsets into byte ranges and checks them against the file and each other.
fn place(
    described: Vec<Described>,
    data_start: usize,
    alignment: usize,
    file_len: usize,
) -> Result<Vec<RawTensor>> {
    let mut tensors = Vec::with_capacity(described.len());
    for Described { name, info, offset } in described {
        if !offset.is_multiple_of(alignment as u64) {
            return Err(Fault::new(
                format!("offset of tensor {name}"),
                format!("a multiple of {alignment}"),
                offset.to_string(),
            ));
        }
        let len = info.stored_bytes();
        let end = (data_start as u64).checked_add(offset).and_then(|start| start.checked_add(len as u64));
        let Some(end) = end.filter(|end| *end <= file_len as u64) else {
            let need = (data_start as u128) + u128::from(offset) + len as u128;
            return Err(Fault::new(
                format!("file length for tensor {name}"),
                format!("at least {need} bytes"),
                format!("{file_len} bytes"),
            ));
        };
        let end = end as usize;
        tensors.push(RawTensor { name, info, file: 0, bytes: end - len..end });
    }
    let mut order: Vec<&RawTensor> = tensors.iter().filter(|t| !t.bytes.is_empty()).collect();
    order.sort_by_key(|t| t.bytes.start);
    for pair in order.windows(2) {
        if pair[1].bytes.start < pair[0].bytes.end {
            return Err(Fault::new(
                format!("start of tensor {}", pair[1].name),
                format!("byte {} or later (the end of {})", pair[0].bytes.end, pair[0].name),
                format!("byte {}", pair[1].bytes.start),
            ));
        }
    }
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Fault::new(format!("tensor {}", pair[0]), "one description", "two")),
        None => Ok(tensors),
    }
}

/// A position in the file that never runs past its end.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        if len > left as u64 {
            return Err(Fault::new(
                format!("{what} at byte {}", self.at),
                format!("{len} bytes"),
                format!("{left} bytes"),
            ));
        }
        let start = self.at;
        self.at += len as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let taken = self.take(N as u64, what)?;
        Ok(taken.try_into().expect("invariant: take gives exactly N bytes"))
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn limited(&mut self, what: &str, limit: u64) -> Result<u64> {
        let value = self.u64(what)?;
        if value > limit {
            return Err(Fault::new(what, format!("at most {limit}"), value.to_string()));
        }
        Ok(value)
    }

    /// A text: length in bytes as u64, then UTF-8.
    pub fn text(&mut self, what: &str) -> Result<&'a str> {
        let len = self.u64(what)?;
        let taken = self.take(len, what)?;
        std::str::from_utf8(taken).map_err(|e| Fault::new(what, "UTF-8 text", e.to_string()))
    }

    /// The name of a key or tensor, copied.
    fn name(&mut self, what: &str) -> Result<String> {
        let name = self.text(what)?;
        if name.is_empty() || name.len() as u64 > KEY_BYTES_MAX {
            return Err(Fault::new(
                what,
                format!("1 to {KEY_BYTES_MAX} bytes"),
                format!("{} bytes", name.len()),
            ));
        }
        Ok(name.to_owned())
    }

    fn entry(&mut self) -> Result<(String, Entry)> {
        const ARRAY: u32 = 9;
        let key = self.name("metadata key")?;
        let what = format!("metadata key {key}");
        let mut number = self.u32(&what)?;
        let mut count = None;
        if number == ARRAY {
            number = self.u32(&what)?;
            count = Some(self.u64(&what)?);
        }
        let kind = ValueKind::from_number(number).ok_or_else(|| {
            let found = if number == ARRAY { "an array of arrays".into() } else { format!("type {number}") };
            Fault::new(&what, "a value type of the format (0 to 12)", found)
        })?;
        let start = self.at;
        match kind.size_bytes() {
            // A saturated product is larger than any file, so `take` refuses it.
            Some(size) => drop(self.take(count.unwrap_or(1).saturating_mul(size as u64), &what)?),
            None => {
                for _ in 0..count.unwrap_or(1) {
                    self.text(&what)?;
                }
            }
        }
        let count = count.map(|c| c as usize);
        Ok((key, Entry { kind, count, bytes: start..self.at }))
    }

    fn tensor(&mut self) -> Result<Described> {
        let name = self.name("tensor name")?;
        let what = format!("tensor {name}");
        let dims = self.u32(&what)?;
        if !(1..=DIMS_MAX).contains(&dims) {
            return Err(Fault::new(&what, format!("1 to {DIMS_MAX} dimensions"), dims.to_string()));
        }
        let mut shape = Vec::with_capacity(dims as usize);
        // 2^60 elements of 4 bytes are still far from overflowing a usize.
        let mut elements = 1u64;
        for _ in 0..dims {
            let dim = self.u64(&what)?;
            elements = elements.checked_mul(dim).filter(|n| (1..1 << 60).contains(n)).ok_or_else(|| {
                Fault::new(&what, "dimensions above 0 with a product below 2^60", format!("dimension {dim}"))
            })?;
            shape.push(dim as usize);
        }
        shape.reverse();
        let number = self.u32(&what)?;
        let stored = tensor_kind(number)
            .ok_or_else(|| Fault::new(&what, "a tensor type of the format", format!("type {number}")))?;
        let info = TensorInfo { shape, stored };
        if !info.cols().is_multiple_of(stored.block_len()) {
            return Err(Fault::new(
                &what,
                format!("rows of a multiple of {} elements ({stored})", stored.block_len()),
                info.cols().to_string(),
            ));
        }
        Ok(Described { offset: self.u64(&what)?, name, info })
    }
}

/// ggml's numbering of tensor types (`ggml.h`, `enum ggml_type`).
fn tensor_kind(number: u32) -> Option<StorageKind> {
    use StorageKind::*;
    Some(match number {
        0 => F32,
        1 => F16,
        2 => Q4_0,
        3 => Q4_1,
        6 => Q5_0,
        7 => Q5_1,
        8 => Q8_0,
        10 => Q2K,
        11 => Q3K,
        12 => Q4K,
        13 => Q5K,
        14 => Q6K,
        20 => Iq4Nl,
        30 => Bf16,
        31 => Unsupported("Q4_0_4_4"),
        32 => Unsupported("Q4_0_4_8"),
        33 => Unsupported("Q4_0_8_8"),
        36 => Unsupported("IQ4_NL_4_4"),
        37 => Unsupported("IQ4_NL_4_8"),
        38 => Unsupported("IQ4_NL_8_8"),
        9 => Unsupported("Q8_1"),
        15 => Unsupported("Q8_K"),
        16 => Unsupported("IQ2_XXS"),
        17 => Unsupported("IQ2_XS"),
        18 => Unsupported("IQ3_XXS"),
        19 => Unsupported("IQ1_S"),
        21 => Unsupported("IQ3_S"),
        22 => Unsupported("IQ2_S"),
        23 => Unsupported("IQ4_XS"),
        24 => Unsupported("I8"),
        25 => Unsupported("I16"),
        26 => Unsupported("I32"),
        27 => Unsupported("I64"),
        28 => Unsupported("F64"),
        29 => Unsupported("IQ1_M"),
        34 => Unsupported("TQ1_0"),
        35 => Unsupported("TQ2_0"),
        39 => Unsupported("MXFP4"),
        _ => return None,
    })
}
