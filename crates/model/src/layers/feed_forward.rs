//! The second half of a layer: the gated MLP `down(act(gate(x)) * up(x))` (Shazeer 2020), or experts
//! that are such MLPs.

use super::linear::{ColumnParallel, LinearRules, Projections, RowParallel};
use super::moe::{Moe, MoeBuffers, MoeRules};
use crate::Result;
use crate::families::{Layout, Stored};
use crate::loader::Loader;
use lockstep_backend::Backend;
use lockstep_core::shard::{Group, RowCut, WeightRule};
use lockstep_core::{Activation, ModelConfig, ParallelInfo};

/// The rules of one gated MLP.
#[derive(Clone, Debug)]
pub struct MlpRules {
    /// gate|up, column-parallel.
    pub gate_up: LinearRules,
    /// down, row-parallel.
    pub down: LinearRules,
}

/// Where one gated MLP lies and how wide it is.
pub struct MlpPlace<'a> {
    /// What its weights count as.
    pub group: Group,
    /// Name before `gate_proj`, `up_proj` and `down_proj`.
    pub prefix: &'a str,
    /// How the file holds gate and up.
    pub gate_up: Stored,
    /// Inner width over all ranks.
    pub inner: usize,
    /// All three projections have biases.
    pub bias: bool,
}

impl MlpRules {
    /// Inner width cut evenly: rows of gate and up, columns of down.
    pub fn new(place: &MlpPlace<'_>, hidden: usize) -> Self {
        let MlpPlace { group, prefix, gate_up: stored, inner, bias } = *place;
        let rows = &[(inner, RowCut::Even), (inner, RowCut::Even)];
        let projections = Projections { prefix, stored, rows };
        let down = format!("{prefix}.down_proj");
        Self {
            gate_up: LinearRules::column_parallel(group, &projections, hidden, bias),
            down: LinearRules::row_parallel(group, &down, hidden, inner, bias),
        }
    }

    /// All rules.
    pub fn iter(&self) -> impl Iterator<Item = &WeightRule> {
        self.gate_up.iter().chain(self.down.iter())
    }
}

/// The rules of one layer's second half.
#[derive(Clone, Debug)]
pub enum FeedForwardRules {
    /// One MLP for all tokens.
    Dense(MlpRules),
    /// Experts.
    Sparse(MoeRules),
}

impl FeedForwardRules {
    /// Experts where the config has them for `layer`, else the MLP.
    pub fn new(config: &ModelConfig, layout: &Layout, prefix: &str, layer: usize) -> Self {
        if let (Some(moe), Some(names)) = (config.moe_of(layer), &layout.experts) {
            return Self::Sparse(MoeRules::new(moe, names, prefix, config.hidden_size));
        }
        let place = MlpPlace {
            group: Group::Mlp,
            prefix,
            gate_up: layout.gate_up,
            inner: config.intermediate_size,
            bias: config.mlp_bias,
        };
        Self::Dense(MlpRules::new(&place, config.hidden_size))
    }

    /// All rules.
    pub fn iter(&self) -> Box<dyn Iterator<Item = &WeightRule> + '_> {
        match self {
            Self::Dense(rules) => Box::new(rules.iter()),
            Self::Sparse(rules) => Box::new(rules.iter()),
        }
    }
}

/// Activations inside the second half, allocated once and shared by all layers.
pub struct FeedForwardBuffers<B: Backend> {
    /// Of models with a dense layer.
    dense: Option<DenseBuffers<B>>,
    /// Of models with experts.
    sparse: Option<MoeBuffers<B>>,
}

struct DenseBuffers<B: Backend> {
    gate_up: B::Tensor,
    gated: B::Tensor,
}

impl<B: Backend> FeedForwardBuffers<B> {
    /// For steps of at most `tokens_max` tokens.
    pub fn new(backend: &B, config: &ModelConfig, p: ParallelInfo, tokens_max: usize) -> Result<Self> {
        let dense = |inner: usize| -> Result<DenseBuffers<B>> {
            Ok(DenseBuffers {
                gate_up: backend.tensor(tokens_max, 2 * inner)?,
                gated: backend.tensor(tokens_max, inner)?,
            })
        };
        let moe = config.moe.as_ref();
        Ok(Self {
            dense: dense_inner(config, p).map(dense).transpose()?,
            sparse: moe
                .map(|moe| MoeBuffers::new(backend, moe, config.hidden_size, p, tokens_max))
                .transpose()?,
        })
    }

    /// Bytes that [`new`](Self::new) asks for.
    pub fn bytes(config: &ModelConfig, p: ParallelInfo, tokens_max: usize) -> usize {
        let dense = dense_inner(config, p).map_or(0, |inner| 3 * inner * tokens_max * size_of::<f32>());
        let sparse = |moe| MoeBuffers::<B>::bytes(moe, config.hidden_size, p, tokens_max);
        dense + config.moe.as_ref().map_or(0, sparse)
    }
}

/// This rank's inner width of the dense MLPs, if the model has any.
fn dense_inner(config: &ModelConfig, p: ParallelInfo) -> Option<usize> {
    let dense = (0..config.num_layers).any(|layer| config.moe_of(layer).is_none());
    dense.then(|| RowCut::Even.local(config.intermediate_size, p).len())
}

/// One layer's second half.
pub enum FeedForward<B: Backend> {
    /// One MLP for all tokens.
    Dense(GatedMlp<B>),
    /// Experts.
    Sparse(Moe<B>),
}

impl<B: Backend> FeedForward<B> {
    /// Loads what the rules name.
    pub fn load(loader: &Loader<'_, B>, rules: &FeedForwardRules) -> Result<Self> {
        match rules {
            FeedForwardRules::Dense(rules) => GatedMlp::load(loader, rules).map(Self::Dense),
            FeedForwardRules::Sparse(rules) => Moe::load(loader, rules).map(Self::Sparse),
        }
    }

    /// This rank's partial sums of the output, `[rows, hidden]`, without the bias.
    pub fn forward(
        &self,
        backend: &mut B,
        x: &B::Tensor,
        rows: usize,
        buffers: &mut FeedForwardBuffers<B>,
        partial: &mut B::Tensor,
    ) {
        let made = "invariant: buffers are made for the layers of the same config";
        match self {
            Self::Dense(mlp) => mlp.forward(backend, x, rows, buffers.dense.as_mut().expect(made), partial),
            Self::Sparse(moe) => moe.forward(backend, x, rows, buffers.sparse.as_mut().expect(made), partial),
        }
    }

    /// The bias to add once to the reduced sum.
    pub fn bias(&self) -> Option<&B::Vector> {
        match self {
            Self::Dense(mlp) => mlp.down.bias.as_ref(),
            Self::Sparse(_) => None,
        }
    }
}

/// gate and up fused column-parallel, down row-parallel.
pub struct GatedMlp<B: Backend> {
    gate_up: ColumnParallel<B>,
    down: RowParallel<B>,
    activation: Activation,
}

impl<B: Backend> GatedMlp<B> {
    fn load(loader: &Loader<'_, B>, rules: &MlpRules) -> Result<Self> {
        Ok(Self {
            gate_up: ColumnParallel::load(loader, &rules.gate_up)?,
            down: RowParallel::load(loader, &rules.down)?,
            activation: loader.config().activation,
        })
    }

    fn forward(
        &self,
        backend: &mut B,
        x: &B::Tensor,
        rows: usize,
        buffers: &mut DenseBuffers<B>,
        partial: &mut B::Tensor,
    ) {
        let room = (&mut buffers.gate_up, &mut buffers.gated);
        self.gate_up.forward_gated(backend, self.activation, x, rows, room);
        self.down.forward(backend, &buffers.gated, rows, partial);
    }
}
