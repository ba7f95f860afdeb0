//! The header of one safetensors file; pure.
//!
//! Follows the format's description: a u64 length, a JSON object of that length with one entry per
//! tensor, then the data without gaps. Read by our own code, because the `safetensors` crate's
//! errors name neither file nor sizes; its rules are applied in full.
//!
//! **Invariant:** every range in the result lies inside the file and has the size that shape and
//! type ask for. The claimed header length is compared with the file before it is used.

use crate::error::Fault;
use crate::locate::refuse_stand_in;
use crate::storage::{StorageKind, TensorInfo};
use lockstep_core::limits::SAFETENSORS_HEADER_BYTES_MAX;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::ops::Range;

type Result<T> = std::result::Result<T, Fault>;

/// Bytes of the length word.
const LENGTH_BYTES: usize = 8;

/// A tensor as the header describes it.
#[derive(Deserialize)]
struct Described {
    dtype: String,
    shape: Vec<usize>,
    /// First and past-the-end byte, from the start of the data.
    data_offsets: (usize, usize),
}

/// Parses the header of a whole mapped file: name, shape and type, bytes in the file.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<(String, TensorInfo, Range<usize>)>> {
    refuse_stand_in(bytes)?;
    let found = || format!("{} bytes", bytes.len());
    let Some(length) = bytes.first_chunk::<LENGTH_BYTES>().map(|b| u64::from_le_bytes(*b)) else {
        return Err(Fault::new("file length", "at least 8 bytes", found()));
    };
    if length > SAFETENSORS_HEADER_BYTES_MAX {
        let expected = format!("at most {SAFETENSORS_HEADER_BYTES_MAX} bytes");
        return Err(Fault::new(
            "claimed header length",
            expected,
            format!("{length} bytes in a file of {}", found()),
        ));
    }
    let data_start = LENGTH_BYTES + length as usize;
    let Some(text) = bytes.get(LENGTH_BYTES..data_start) else {
        return Err(Fault::new(
            "file length for the header",
            format!("at least {data_start} bytes"),
            found(),
        ));
    };
    let header: Map<String, Value> = serde_json::from_slice(text)
        .map_err(|e| Fault::new(format!("header of {length} bytes"), "a JSON object", e.to_string()))?;
    let mut tensors = Vec::new();
    for (name, value) in header {
        if name != "__metadata__" {
            let (info, range) = describe(&name, value)?;
            tensors.push((name, info, range));
        }
    }
    tensors.sort_by_key(|(_, _, range)| (range.start, range.end));
    check_data(&mut tensors, data_start, bytes.len())?;
    Ok(tensors)
}

/// Shape, type and data range of one entry, checked against each other.
fn describe(name: &str, value: Value) -> Result<(TensorInfo, Range<usize>)> {
    let what = format!("header entry of tensor {name}");
    let Described { dtype, shape, data_offsets: (start, end) } = serde_json::from_value(value)
        .map_err(|e| Fault::new(&what, "dtype, shape and data_offsets", e.to_string()))?;
    let Some((stored, bits)) = kind_of(&dtype) else {
        return Err(Fault::new(&what, "a dtype of the format", dtype));
    };
    // Zero-sized dimensions first: they must not hide an overflow of the others.
    let product = shape.iter().try_fold(1usize, |n, dim| n.checked_mul((*dim).max(1)));
    let bytes =
        product.and_then(|n| n.checked_mul(bits)).map(|n| if shape.contains(&0) { 0 } else { n.div_ceil(8) });
    let Some(bytes) = bytes else {
        return Err(Fault::new(&what, "a shape that fits memory", format!("{shape:?}")));
    };
    if end.checked_sub(start) != Some(bytes) {
        let found = format!("data_offsets {start}..{end}");
        return Err(Fault::new(&what, format!("{bytes} bytes for {dtype} {shape:?}"), found));
    }
    Ok((TensorInfo { shape, stored }, start..end))
}

/// Checks that the tensors, ascending by start, fill the data exactly, and makes their ranges
/// relative to the file.
fn check_data(
    tensors: &mut [(String, TensorInfo, Range<usize>)],
    data_start: usize,
    file_len: usize,
) -> Result<()> {
    let mut expected_start = 0;
    for (name, _, range) in tensors.iter_mut() {
        if range.start != expected_start {
            let what = format!("first data byte of tensor {name}");
            return Err(Fault::new(
                what,
                format!("{expected_start} (no overlap, no gap)"),
                range.start.to_string(),
            ));
        }
        expected_start = range.end;
    }
    let expected_len = data_start as u128 + expected_start as u128;
    if expected_len != file_len as u128 {
        return Err(Fault::new("file length", format!("{expected_len} bytes"), format!("{file_len} bytes")));
    }
    for (_, _, range) in tensors {
        *range = range.start + data_start..range.end + data_start;
    }
    Ok(())
}

/// Kind and bits per element of the format's types.
fn kind_of(dtype: &str) -> Option<(StorageKind, usize)> {
    use StorageKind::*;
    Some(match dtype {
        "F32" => (F32, 32),
        "F16" => (F16, 16),
        "BF16" => (Bf16, 16),
        "F64" => (Unsupported("F64"), 64),
        "F8_E4M3" => (Unsupported("F8_E4M3"), 8),
        "F8_E5M2" => (Unsupported("F8_E5M2"), 8),
        "F8_E8M0" => (Unsupported("F8_E8M0"), 8),
        "F8_E4M3FNUZ" => (Unsupported("F8_E4M3FNUZ"), 8),
        "F8_E5M2FNUZ" => (Unsupported("F8_E5M2FNUZ"), 8),
        "F6_E2M3" => (Unsupported("F6_E2M3"), 6),
        "F6_E3M2" => (Unsupported("F6_E3M2"), 6),
        "F4" => (Unsupported("F4"), 4),
        "C64" => (Unsupported("C64"), 64),
        "I64" => (Unsupported("I64"), 64),
        "U64" => (Unsupported("U64"), 64),
        "I32" => (Unsupported("I32"), 32),
        "U32" => (Unsupported("U32"), 32),
        "I16" => (Unsupported("I16"), 16),
        "U16" => (Unsupported("U16"), 16),
        "I8" => (Unsupported("I8"), 8),
        "U8" => (Unsupported("U8"), 8),
        "BOOL" => (Unsupported("BOOL"), 8),
        _ => return None,
    })
}
