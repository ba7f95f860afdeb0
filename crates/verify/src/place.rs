//! Where a run takes place, and what two places owe each other.
//!
//! Ranks on CPUs owe each other bits, as `docs/architecture.md`, "Numbers", says. A GPU sums in another order and
//! rounds what it keeps, so it owes closeness: [`Bound::between`], which follows from the rounding of its type and
//! the depth of the model and not from what was measured (`docs/verifying.md`, "Bounds").

use lockstep_core::limits::K_LEAVES;
use lockstep_core::{DType, ModelConfig, Topology, WeightMode};
use serde::Serialize;

/// What ranks compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU backend.
    Cpu {
        /// Form of matrices.
        weights: WeightMode,
        /// Some matrices are kept as codes, and what meets them is rounded to 8 bits.
        coded: bool,
    },
    /// A GPU for each rank.
    Cuda {
        /// Type of weights, activations, K and V.
        dtype: DType,
    },
}

impl Device {
    /// For people.
    pub fn words(self) -> String {
        match self {
            Self::Cpu { .. } => "cpu".into(),
            Self::Cuda { dtype } => format!("cuda {}", dtype.name()),
        }
    }

    /// The forms in which it runs a step; the others are held against the first.
    pub const fn forms(self) -> &'static [Form] {
        match self {
            Self::Cpu { .. } => &[Form::Eager],
            Self::Cuda { .. } => &[Form::Eager, Form::Recorded],
        }
    }

    /// A page size that differs from the usual one as much as the device allows: GPUs take powers of two.
    pub const fn unusual_page_size(self) -> usize {
        match self {
            Self::Cpu { .. } => 3,
            Self::Cuda { .. } => 4,
        }
    }

    /// The type that its results are rounded to.
    const fn rounds_to(self) -> DType {
        match self {
            Self::Cpu { coded: false, .. } => DType::F32,
            // A group's elements are rounded by 1/254 of the largest: as in bf16.
            Self::Cpu { coded: true, .. } => DType::Bf16,
            Self::Cuda { dtype } => dtype,
        }
    }
}

/// How a device runs a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Operation by operation.
    Eager,
    /// Replayed from a recording (a CUDA graph), as decode steps are served.
    Recorded,
}

impl Form {
    /// For people.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Recorded => "recorded",
        }
    }
}

/// A device and how its ranks share a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// What ranks compute on.
    pub device: Device,
    /// Ranks of a pipeline stage.
    pub tp: usize,
    /// Pipeline stages.
    pub pp: usize,
}

impl Place {
    /// For people.
    pub fn words(self) -> String {
        let stages = if self.pp > 1 { format!(" pp {}", self.pp) } else { String::new() };
        format!("{} tp {}{stages}", self.device.words(), self.tp)
    }

    /// Its ranks.
    pub fn topology(self) -> Topology {
        Topology { pp_size: self.pp, ..Topology::tensor_parallel(self.tp) }
    }

    /// What a run at `self` and one at `other` must have in common, schedules apart. Stages change nothing: each goes on
    /// with exactly the values that the one before had.
    pub fn promise(self, other: Self, config: &ModelConfig) -> Promise {
        let tree = |place: Self| K_LEAVES.is_multiple_of(place.tp);
        match (self.device, other.device) {
            (Device::Cpu { .. }, Device::Cpu { .. }) if tree(self) && tree(other) => Promise::BitEqual,
            // However a prompt comes through, CPU ranks sum in the same order.
            (Device::Cpu { .. }, Device::Cpu { .. }) if self.tp == other.tp => Promise::BitEqual,
            (a, b) => Promise::Close(Bound::between(a, b, config)),
        }
    }
}

/// What two runs must have in common.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// Every bit.
    BitEqual,
    /// Errors within a bound.
    Close(Bound),
}

/// How far apart two runs may be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// Largest error as a share of the largest logit, and RMS error as a share of the logits' RMS; the best token
    /// may differ only where the two best are closer than that share of the largest logit.
    pub share: f64,
    /// Share of the positions, and of the texts, that must keep to it. Below 1 the RMS error is not bounded.
    pub of_positions: f64,
}

/// Least [`Bound::share`]: what f32 sums in another order may come to.
const CLOSE: f64 = 1e-4;
/// Values rounded on the way through a layer: per half layer the norm, the projection in, what is done with it
/// (two roundings), the projection out and the sum.
const ROUNDINGS_OF_LAYER: usize = 12;
/// The same outside the layers: weights, embedding, final norm, head.
const ROUNDINGS_OUTSIDE: usize = 4;
/// Unit roundoffs of a 16-bit type that are owed at any depth: where attention is sharp, the rounding of a score moves
/// the weights of its softmax by many times that. Random models of two layers came to 28 in bf16 and 36 in f16, all of
/// them exact in f32.
const SHARP_UNITS: f64 = 42.0;
/// Where experts are chosen by rounded numbers: near ties fall either way, and what another expert answers is not
/// bounded by any rounding.
const OF_POSITIONS_ROUTED: f64 = 0.5;

impl Bound {
    /// `sqrt(roundings) * (u + u32 * sqrt(K))`, at least [`CLOSE`] and, in 16-bit types, [`SHARP_UNITS`]: independent roundings of relative size `u` (the
    /// coarser type's) add up as their root, and so do the `K` f32 additions of the longest sum before each.
    pub fn between(a: Device, b: Device, config: &ModelConfig) -> Self {
        let unit = unit_roundoff(a.rounds_to()).max(unit_roundoff(b.rounds_to()));
        let attended = config.num_heads * config.head_dim;
        let longest_sum = config.intermediate_size.max(config.hidden_size).max(attended) as f64;
        let roundings = (ROUNDINGS_OF_LAYER * config.num_layers + ROUNDINGS_OUTSIDE) as f64;
        let share = roundings.sqrt() * (unit + unit_roundoff(DType::F32) * longest_sum.sqrt());
        let is_narrow = unit > unit_roundoff(DType::F32);
        let sharp = if is_narrow { SHARP_UNITS * unit } else { 0.0 };
        Self {
            share: share.max(CLOSE).max(sharp),
            of_positions: if config.moe.is_some() && is_narrow { OF_POSITIONS_ROUTED } else { 1.0 },
        }
    }
}

/// Largest relative error of rounding to nearest.
fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => (-24.0_f64).exp2(),
        DType::F16 => (-11.0_f64).exp2(),
        DType::Bf16 => (-8.0_f64).exp2(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::config::{Dimensions, Family, MoeConfig, RopeConfig, RopeScaling};

    const CPU: Device = Device::Cpu { weights: WeightMode::AsStored, coded: false };

    fn cuda(dtype: DType) -> Device {
        Device::Cuda { dtype }
    }

    fn model(num_layers: usize, width: usize) -> ModelConfig {
        let sizes = Dimensions {
            hidden_size: width,
            intermediate_size: 4 * width,
            num_layers,
            num_heads: width / 64,
            num_kv_heads: 1,
            head_dim: 64,
            vocab_size: 1000,
            max_position: 1000,
            rms_norm_eps: 1e-5,
        };
        ModelConfig::plain(Family::Llama, sizes, RopeConfig { theta: 1e4, scaling: RopeScaling::None })
    }

    #[test]
    fn the_bound_follows_type_and_depth() {
        let small = model(2, 64);
        let share = |dtype, config: &ModelConfig| Bound::between(CPU, cuda(dtype), config).share;
        assert_eq!(share(DType::F32, &small), CLOSE, "f32 sums in another order");
        let coded = Device::Cpu { weights: WeightMode::AsStored, coded: true };
        assert_eq!(Bound::between(coded, coded, &small).share, share(DType::Bf16, &small));
        // 42 roundings of 2^-8, and of 2^-11.
        assert!((share(DType::Bf16, &small) - 42.0 / 256.0).abs() < 1e-4);
        assert!((share(DType::F16, &small) * 8.0 - share(DType::Bf16, &small)).abs() < 1e-4);
        let deep = model(80, 8192);
        // 31.05 * 2^-24 * (1 + sqrt(32768)) for f32.
        assert!((share(DType::F32, &deep) - 3.369e-4).abs() < 1e-6, "{}", share(DType::F32, &deep));
        // sqrt(12 * 150 + 4) = 42.5.
        assert!(share(DType::Bf16, &model(150, 8192)) > share(DType::Bf16, &small));
    }

    #[test]
    fn only_rounded_routers_are_excused_at_some_positions() {
        let mut routed = model(2, 64);
        routed.moe = Some(MoeConfig {
            num_experts: 4,
            experts_per_token: 2,
            expert_intermediate_size: 64,
            norm_topk_prob: true,
            sparse_layers: vec![true; 2],
        });
        assert_eq!(Bound::between(CPU, cuda(DType::F32), &routed).of_positions, 1.0);
        assert_eq!(Bound::between(CPU, cuda(DType::Bf16), &routed).of_positions, OF_POSITIONS_ROUTED);
        assert_eq!(Bound::between(CPU, cuda(DType::Bf16), &model(2, 64)).of_positions, 1.0);
    }

    #[test]
    fn cpu_ranks_owe_bits_where_their_sums_are_one_tree() {
        let config = model(2, 64);
        let bits = |a: (Device, usize), b: (Device, usize)| {
            let place = |(device, tp)| Place { device, tp, pp: 1 };
            place(a).promise(place(b), &config) == Promise::BitEqual
        };
        assert!(bits((CPU, 1), (CPU, 8)) && bits((CPU, 3), (CPU, 3)));
        assert!(!bits((CPU, 1), (CPU, 3)) && !bits((CPU, 1), (cuda(DType::F32), 1)));
        assert!(!bits((cuda(DType::Bf16), 1), (cuda(DType::Bf16), 1)));
    }
}
