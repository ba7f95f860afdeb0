//! A mixture of experts: a replicated router chooses a few of many gated MLPs for each token
//! (Shazeer et al. 2017). Every rank holds a slice of every expert, so that each token's work is
//! shared evenly whatever the router chooses.

use super::feed_forward::{MlpPlace, MlpRules};
use crate::Result;
use crate::families::{ExpertNames, LLAMA};
use crate::loader::Loader;
use lockstep_backend::{Backend, ExpertWeights, MoeArgs, MoeShape};
use lockstep_core::shard::{Columns, Group, Piece, RowCut, WeightRule};
use lockstep_core::{Activation, MoeConfig, ParallelInfo};

/// The rules of one layer's router and experts.
#[derive(Clone, Debug)]
pub struct MoeRules {
    router: WeightRule,
    experts: Vec<MlpRules>,
}

impl MoeRules {
    /// The router replicated; each expert cut inside, like a dense MLP.
    pub fn new(moe: &MoeConfig, names: &ExpertNames, prefix: &str, hidden: usize) -> Self {
        let router = format!("{prefix}.{}.weight", names.router);
        let pieces = vec![Piece::whole(router, moe.num_experts, RowCut::Replicated)];
        let expert = |e: usize| {
            let place = MlpPlace {
                group: Group::Experts,
                prefix: &format!("{prefix}.{}.{e}", names.experts),
                gate_up: LLAMA.gate_up,
                inner: moe.expert_intermediate_size,
                bias: false,
            };
            MlpRules::new(&place, hidden)
        };
        Self {
            router: WeightRule::matrix(Group::Router, pieces, Columns { global_len: hidden, cut: false }),
            experts: (0..moe.num_experts).map(expert).collect(),
        }
    }

    /// All rules.
    pub fn iter(&self) -> impl Iterator<Item = &WeightRule> {
        std::iter::once(&self.router).chain(self.experts.iter().flat_map(MlpRules::iter))
    }
}

/// Buffers of all sparse layers.
pub struct MoeBuffers<B: Backend> {
    router_logits: B::Tensor,
    work: B::MoeWorkspace,
}

impl<B: Backend> MoeBuffers<B> {
    /// For steps of at most `rows_max` tokens of width `hidden`.
    pub fn new(
        backend: &B,
        moe: &MoeConfig,
        hidden: usize,
        p: ParallelInfo,
        rows_max: usize,
    ) -> Result<Self> {
        Ok(Self {
            router_logits: backend.tensor_f32(rows_max, moe.num_experts)?,
            work: backend.moe_workspace(shape(moe, hidden, p, rows_max))?,
        })
    }

    /// Bytes that [`new`](Self::new) asks for.
    pub fn bytes(moe: &MoeConfig, hidden: usize, p: ParallelInfo, rows_max: usize) -> usize {
        let router_logits = rows_max * moe.num_experts * size_of::<f32>();
        router_logits + B::moe_workspace_bytes(&shape(moe, hidden, p, rows_max))
    }
}

fn shape(moe: &MoeConfig, hidden: usize, p: ParallelInfo, rows_max: usize) -> MoeShape {
    MoeShape {
        rows_max,
        num_experts: moe.num_experts,
        experts_per_token: moe.experts_per_token,
        local_inner: RowCut::Even.local(moe.expert_intermediate_size, p).len(),
        hidden,
    }
}

/// One layer's router and this rank's slices of its experts.
pub struct Moe<B: Backend> {
    router: B::Linear,
    experts: B::Experts,
    experts_per_token: usize,
    norm_topk_prob: bool,
    activation: Activation,
}

impl<B: Backend> Moe<B> {
    /// Loads what the rules name. Panics when the config has no experts.
    pub fn load(loader: &Loader<'_, B>, rules: &MoeRules) -> Result<Self> {
        let config = loader.config();
        let moe = config.moe.as_ref().expect("invariant: rules with experts come from a config with experts");
        let of_experts = rules.experts.iter().flat_map(|mlp| [&mlp.gate_up.weight, &mlp.down.weight]);
        let mut matrices = loader.matrices(&of_experts.collect::<Vec<_>>())?.into_iter();
        let mut experts = Vec::with_capacity(rules.experts.len());
        while let (Some(gate_up), Some(down)) = (matrices.next(), matrices.next()) {
            experts.push(ExpertWeights { gate_up, down });
        }
        Ok(Self {
            router: loader.matrix(&rules.router)?,
            experts: loader.backend().experts(experts)?,
            experts_per_token: moe.experts_per_token,
            norm_topk_prob: moe.norm_topk_prob,
            activation: config.activation,
        })
    }

    /// This rank's partial sums over the chosen experts, `[rows, hidden]`. All ranks compute the same
    /// router logits and so choose the same experts.
    pub fn forward(
        &self,
        backend: &mut B,
        x: &B::Tensor,
        rows: usize,
        buffers: &mut MoeBuffers<B>,
        partial: &mut B::Tensor,
    ) {
        backend.matmul(&self.router, x, None, rows, &mut buffers.router_logits);
        let args = MoeArgs {
            router_logits: &buffers.router_logits,
            experts_per_token: self.experts_per_token,
            norm_topk_prob: self.norm_topk_prob,
            activation: self.activation,
        };
        backend.moe(args, &self.experts, x, rows, (&mut buffers.work, partial));
    }
}
