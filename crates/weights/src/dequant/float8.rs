//! Eight-bit floats of the Open Compute Project's specification (OFP8): E4M3 (no infinities, one
//! NaN) and E5M2 (the upper half of an f16).

use super::{append_rounded, half_to_f32};
use crate::storage::StorageKind;

/// Elements that are decoded to f32 before they are rounded.
const CHUNK: usize = 512;

/// Appends `scale * value` for each of the eight-bit floats `bytes` as bf16, rounded to nearest even
/// after one f32 product.
///
/// # Panics
/// When `kind` is not an eight-bit float.
#[inline(always)]
pub(crate) fn append_scaled(kind: StorageKind, bytes: &[u8], scale: f32, out: &mut Vec<u8>) {
    let mut values = [0.0f32; CHUNK];
    for bytes in bytes.chunks(CHUNK) {
        let values = &mut values[..bytes.len()];
        match kind {
            StorageKind::Fp8E4m3 => {
                for (value, bits) in values.iter_mut().zip(bytes) {
                    *value = e4m3(*bits) * scale;
                }
            }
            StorageKind::Fp8E5m2 => {
                for (value, bits) in values.iter_mut().zip(bytes) {
                    *value = e5m2(*bits) * scale;
                }
            }
            other => unreachable!("{other} is not an eight-bit float"),
        }
        append_rounded(values, out);
    }
}

/// The value of an E4M3 number: four exponent bits around 7; all ones are NaN.
#[inline(always)]
fn e4m3(bits: u8) -> f32 {
    let rest = u32::from(bits & 0x7f);
    let (normal, subnormal) = ((rest << 20) + (120 << 23), (rest << 20) + (121 << 23));
    // A subnormal is its mantissa times 2^-9: made as 2^-6 + m*2^-9, minus 2^-6.
    let small = f32::from_bits(subnormal) - f32::from_bits(121 << 23);
    let magnitude = if rest < 8 { small } else { f32::from_bits(normal) };
    let magnitude = if rest == 0x7f { f32::NAN } else { magnitude };
    f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x80) << 24)
}

/// The value of an E5M2 number.
#[inline(always)]
fn e5m2(bits: u8) -> f32 {
    half_to_f32(u16::from(bits) << 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sign, exponent and mantissa as the specification writes them.
    fn by_definition(bits: u8, mantissa_bits: u32, bias: i32) -> f64 {
        let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from(bits & 0x7f) >> mantissa_bits;
        let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        match exponent {
            0 => sign * mantissa * 2f64.powi(1 - bias),
            _ => sign * (1.0 + mantissa) * 2f64.powi(exponent - bias),
        }
    }

    #[test]
    fn every_number_has_the_value_of_its_definition() {
        for bits in 0..=u8::MAX {
            if bits & 0x7f == 0x7f {
                assert!(e4m3(bits).is_nan());
            } else {
                assert_eq!(f64::from(e4m3(bits)), by_definition(bits, 3, 7), "{bits:#x}");
            }
            match bits & 0x7f {
                0x7c => assert!(e5m2(bits).is_infinite()),
                0x7d..=0x7f => assert!(e5m2(bits).is_nan()),
                _ => assert_eq!(f64::from(e5m2(bits)), by_definition(bits, 2, 15), "{bits:#x}"),
            }
        }
        assert_eq!((e4m3(0x7e), e4m3(0x80).is_sign_negative()), (448.0, true));
    }

    #[test]
    fn products_are_rounded_once() {
        let mut out = Vec::new();
        let bytes: Vec<u8> = (0..=u8::MAX).filter(|b| b & 0x7f != 0x7f).cycle().take(CHUNK + 9).collect();
        append_scaled(StorageKind::Fp8E4m3, &bytes, 0.3, &mut out);
        for (got, bits) in out.as_chunks::<2>().0.iter().zip(&bytes) {
            let expected = half::bf16::from_f32(by_definition(*bits, 3, 7) as f32 * 0.3);
            assert_eq!(half::bf16::from_le_bytes(*got).to_bits(), expected.to_bits());
        }
    }
}
