//! In which form a rank keeps a weight matrix: as floats, or as small integers with scales that the
//! kernels multiply with directly.
//!
//! A row of a coded matrix is cut into groups of [`CODE_GROUP`] inputs. An element is
//! `scale * code + base`, with `code` a small integer, and scale and base (where the layout has one) of its
//! group, or of its half group, in f16. Every block format of ggml can be written this way; the widest of
//! several layouts ([`CodeLayout::join`]) holds the elements of all of them unchanged, so that projections
//! stored in different formats can still be one matrix.

use crate::DType;
use crate::shard::Group;
use serde::{Deserialize, Serialize};

/// Inputs that share a scale: the block of ggml's 32-element formats.
pub const CODE_GROUP: usize = 32;

/// How the elements of a coded matrix are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CodeLayout {
    /// Bits of a code: 4, 5, 6 or 8.
    bits: u8,
    /// The smallest code; the largest is `lowest + 2^bits - 1`.
    lowest: i16,
    /// Each scale has a base beside it.
    has_base: bool,
    /// Each half of a group has its own scale.
    halves: bool,
}

impl CodeLayout {
    /// The narrowest layout for codes `lowest..=highest`. Panics when a signed byte does not hold them.
    pub const fn new(lowest: i16, highest: i16, has_base: bool, halves: bool) -> Self {
        assert!(
            lowest >= i8::MIN as i16 && highest <= i8::MAX as i16 && lowest <= highest,
            "codes are bytes"
        );
        let bits = match highest - lowest {
            0..16 => 4,
            16..32 => 5,
            32..64 => 6,
            _ => return Self { bits: 8, lowest: i8::MIN as i16, has_base, halves },
        };
        Self { bits, lowest, has_base, halves }
    }

    /// Bits of a code: 4, 5, 6 or 8.
    pub const fn bits(self) -> usize {
        self.bits as usize
    }

    /// The smallest code.
    pub const fn lowest(self) -> i32 {
        self.lowest as i32
    }

    /// Whether an element has a base added.
    pub const fn has_base(self) -> bool {
        self.has_base
    }

    /// Scales of a group: 1, or 2 when each half has its own.
    pub const fn scales(self) -> usize {
        if self.halves { 2 } else { 1 }
    }

    /// Scales and bases of a group.
    pub const fn factors(self) -> usize {
        self.scales() * if self.has_base { 2 } else { 1 }
    }

    /// The narrowest layout that holds what both hold.
    pub const fn join(self, other: Self) -> Self {
        let lowest = if self.lowest < other.lowest { self.lowest } else { other.lowest };
        let (mine, others) = (self.lowest + (1 << self.bits) - 1, other.lowest + (1 << other.bits) - 1);
        let highest = if mine > others { mine } else { others };
        Self::new(lowest, highest, self.has_base || other.has_base, self.halves || other.halves)
    }

    /// Bytes of a group on its way from a file to the device: scales, bases (f16 each), then the codes,
    /// a signed byte each.
    pub const fn staged_group_bytes(self) -> usize {
        2 * self.factors() + CODE_GROUP
    }

    /// Bytes of a group as kernels read it.
    pub const fn packed_group_bytes(self) -> usize {
        2 * self.factors() + CODE_GROUP * self.bits() / 8
    }

    /// E.g. `4-bit codes`, for people.
    pub fn words(self) -> String {
        format!("{}-bit codes{}", self.bits, if self.has_base { " with bases" } else { "" })
    }
}

/// In which form a rank keeps a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// Floats.
    Float(DType),
    /// Codes with scales.
    Coded(CodeLayout),
}

impl From<DType> for WeightType {
    fn from(dtype: DType) -> Self {
        Self::Float(dtype)
    }
}

impl WeightType {
    /// Bytes of `elements` on their way from a file to the device. Panics when codes are asked for elements
    /// that are not whole groups.
    pub const fn staged_bytes(self, elements: usize) -> usize {
        match self {
            Self::Float(dtype) => elements * dtype.size_bytes(),
            Self::Coded(layout) => groups(elements) * layout.staged_group_bytes(),
        }
    }

    /// Bytes of `elements` in memory. Panics as [`staged_bytes`](Self::staged_bytes).
    pub const fn packed_bytes(self, elements: usize) -> usize {
        match self {
            Self::Float(dtype) => elements * dtype.size_bytes(),
            Self::Coded(layout) => groups(elements) * layout.packed_group_bytes(),
        }
    }

    /// The type as floats: what it is, or what [`WeightMode::Exact`] unpacks codes to.
    pub const fn as_float(self) -> DType {
        match self {
            Self::Float(dtype) => dtype,
            Self::Coded(_) => DType::Bf16,
        }
    }

    /// For people.
    pub fn words(self) -> String {
        match self {
            Self::Float(dtype) => dtype.name().into(),
            Self::Coded(layout) => layout.words(),
        }
    }
}

const fn groups(elements: usize) -> usize {
    assert!(elements.is_multiple_of(CODE_GROUP), "coded rows are whole groups");
    elements / CODE_GROUP
}

/// A format that `--quantize` makes out of floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum QuantizeFormat {
    /// ggml's `Q8_0`: signed bytes around 0.
    Q8_0,
    /// ggml's `Q4_0`: 4 bits around 0.
    Q4_0,
    /// 4 bits from a base of each group, as ggml's `Q4_K`, with scale and base in f16 instead of 6 bits.
    Q4K,
}

impl QuantizeFormat {
    /// All, as the flag spells them.
    pub const ALL: [(&'static str, Self); 3] =
        [("q8_0", Self::Q8_0), ("q4_0", Self::Q4_0), ("q4_k", Self::Q4K)];

    /// How its elements are kept.
    pub const fn layout(self) -> CodeLayout {
        match self {
            Self::Q8_0 => CodeLayout::new(-127, 127, false, false),
            Self::Q4_0 => CodeLayout::new(-8, 7, false, false),
            Self::Q4K => CodeLayout::new(0, 15, true, false),
        }
    }
}

/// What a user asks of the form of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum WeightMode {
    /// Floats as the files have them; blocks as codes where the device multiplies with codes, else unpacked.
    #[default]
    AsStored,
    /// Floats as the files have them, blocks unpacked to bf16 (`--cpu-exact`).
    Exact,
    /// Everything as floats of this type (`--dtype`).
    Cast(DType),
    /// Floats turned into codes, blocks as with [`AsStored`](Self::AsStored) (`--quantize`).
    Quantize(QuantizeFormat),
}

/// How a tensor lies in its file, as far as the form in memory depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredType {
    /// Type of its elements when it is read as floats.
    pub dtype: DType,
    /// The layout that holds its blocks unchanged, for formats that have one.
    pub codes: Option<CodeLayout>,
}

impl WeightMode {
    /// The float type that everything becomes, if the user named one.
    pub const fn cast(self) -> Option<DType> {
        match self {
            Self::Cast(dtype) => Some(dtype),
            _ => None,
        }
    }

    /// Whether blocks stay codes on a device that multiplies with codes.
    pub const fn keeps_codes(self) -> bool {
        matches!(self, Self::AsStored | Self::Quantize(_))
    }

    /// The form in which a matrix counted as `group` is kept when nothing speaks against it. `takes_codes`: the
    /// device multiplies with codes.
    ///
    /// The matrices that choose experts stay floats.
    pub fn weight_type(self, stored: StoredType, group: Group, takes_codes: bool) -> WeightType {
        let takes_codes = takes_codes && group != Group::Router;
        let codes = match self {
            Self::Cast(dtype) => return dtype.into(),
            Self::Exact => None,
            Self::AsStored => stored.codes,
            Self::Quantize(format) => Some(stored.codes.unwrap_or(format.layout())),
        };
        match codes.filter(|_| takes_codes) {
            Some(layout) => WeightType::Coded(layout),
            None => stored.dtype.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q4_0: CodeLayout = CodeLayout::new(-8, 7, false, false);
    const Q4_1: CodeLayout = CodeLayout::new(0, 15, true, false);
    const Q5_0: CodeLayout = CodeLayout::new(-16, 15, false, false);
    const Q6_K: CodeLayout = CodeLayout::new(-32, 31, false, true);
    const Q8_0: CodeLayout = CodeLayout::new(-128, 127, false, false);

    #[test]
    fn packed_groups_are_as_large_as_the_blocks_of_ggml() {
        assert_eq!([Q4_0, Q4_1, Q5_0, Q8_0].map(CodeLayout::packed_group_bytes), [18, 20, 22, 34]);
        // Scales of 8 bits under one of 16 become two of 16: 224 bytes instead of 210 for 256 elements.
        assert_eq!(8 * Q6_K.packed_group_bytes(), 224);
        assert_eq!(WeightType::Coded(Q4_1).packed_bytes(576), 18 * 20);
        assert_eq!(WeightType::Coded(Q4_1).staged_bytes(576), 18 * 36);
    }

    #[test]
    fn a_join_holds_both() {
        assert_eq!(Q4_0.join(Q4_0), Q4_0);
        assert_eq!(Q4_0.join(Q5_0), Q5_0);
        assert_eq!(Q5_0.join(Q8_0), Q8_0);
        assert_eq!(Q4_0.join(Q4_1), CodeLayout::new(-8, 15, true, false));
        assert_eq!(Q6_K.join(Q4_1), CodeLayout::new(-32, 31, true, true));
        assert_eq!(CodeLayout::new(0, 31, true, false).join(Q5_0).bits(), 6);
        for (a, b) in [(Q4_0, Q4_1), (Q5_0, Q6_K), (Q8_0, Q4_1)] {
            assert_eq!(a.join(b), b.join(a));
            assert_eq!(a.join(b).join(b), a.join(b));
        }
    }

    #[test]
    fn modes() {
        let blocks = StoredType { dtype: DType::Bf16, codes: Some(Q4_1) };
        let floats = StoredType { dtype: DType::F16, codes: None };
        let format = QuantizeFormat::Q8_0;
        let coded = |layout| WeightType::Coded(layout);
        let float = WeightType::Float;
        for (mode, from_blocks, from_floats) in [
            (WeightMode::AsStored, coded(Q4_1), float(DType::F16)),
            (WeightMode::Exact, float(DType::Bf16), float(DType::F16)),
            (WeightMode::Cast(DType::F32), float(DType::F32), float(DType::F32)),
            (WeightMode::Quantize(format), coded(Q4_1), coded(format.layout())),
        ] {
            assert_eq!(mode.weight_type(blocks, Group::Mlp, true), from_blocks);
            assert_eq!(mode.weight_type(floats, Group::Mlp, true), from_floats);
            assert_eq!(mode.keeps_codes(), matches!(from_blocks, WeightType::Coded(_)));
            assert_eq!(mode.weight_type(blocks, Group::Experts, true), from_blocks);
            for (group, takes_codes) in [(Group::Mlp, false), (Group::Experts, false), (Group::Router, true)]
            {
                assert!(matches!(mode.weight_type(blocks, group, takes_codes), WeightType::Float(_)));
            }
        }
    }
}
