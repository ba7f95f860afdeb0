//! RMSNorm (Zhang & Sennrich 2019), replicated.

use crate::Result;
use crate::loader::Loader;
use lockstep_backend::Backend;
use lockstep_core::shard::{Group, RowCut, WeightRule};

/// The rule of `{name}.weight`, `[width]`.
pub fn rule(name: &str, width: usize) -> WeightRule {
    WeightRule::vector(Group::Norms, format!("{name}.weight"), width, RowCut::Replicated)
}

/// A norm's weight, the same on every rank.
pub struct Norm<B: Backend> {
    /// `[width]`, with the 1 added that Gemma's files leave out.
    pub weight: B::Vector,
    /// Added to the mean square.
    pub eps: f32,
}

impl<B: Backend> Norm<B> {
    /// Loads the weight.
    pub fn load(loader: &Loader<'_, B>, rule: &WeightRule) -> Result<Self> {
        Ok(Self { weight: loader.vector(rule)?, eps: loader.config().rms_norm_eps })
    }

    /// Loads the norm if there is one.
    pub fn load_optional(loader: &Loader<'_, B>, rule: &Option<WeightRule>) -> Result<Option<Self>> {
        rule.as_ref().map(|rule| Self::load(loader, rule)).transpose()
    }
}
