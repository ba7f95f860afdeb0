//! Mixtures of experts: routing, then every (token, expert) pair's MLP.
//!
//! Right for decode, where each pair's weights are read once anyway; a long prompt reads an expert once
//! for each of its tokens, which a grouped matrix product would not.

use super::compile::Source;
use super::driver::Device;
use super::launch::{Args, Grid, Kernel};
use super::memory::Buffer;
use super::tensor::{CudaLinear, CudaTensor};
use crate::cuda::CudaBackend;
use crate::{BackendError, ExpertWeights, MoeArgs, MoeShape, Result};
use lockstep_core::DType;
use lockstep_core::config::Activation;
use std::rc::Rc;

/// Experts that the router kernel takes.
const EXPERTS_MAX: usize = 512;
/// Tokens of one launch: a grid's second dimension ends at 65,535 pairs.
const PAIRS_MAX: usize = 65_535;
/// Warps of a block, one output each.
const WARPS: usize = 8;

/// The experts of a layer, one after another in one buffer each.
pub struct CudaExperts {
    gate_up: Buffer,
    down: Buffer,
    count: usize,
    inner: usize,
    hidden: usize,
}

impl CudaExperts {
    /// Panics when the experts' shapes differ.
    pub(super) fn new(device: &Rc<Device>, experts: &[ExpertWeights<CudaBackend>]) -> Result<Self> {
        let first = experts.first().expect("invariant: a mixture has experts");
        let (hidden, inner) = (first.gate_up.spec.in_features, first.down.spec.in_features);
        let join = |part: fn(&ExpertWeights<CudaBackend>) -> &CudaLinear| {
            let each = part(first).buffer.bytes();
            let joined = Buffer::zeroed(device, each * experts.len(), "experts")?;
            for (index, expert) in experts.iter().enumerate() {
                let linear = part(expert);
                assert_eq!(linear.spec.in_features, part(first).spec.in_features, "experts are of one shape");
                assert_eq!(
                    linear.spec.out_features,
                    part(first).spec.out_features,
                    "experts are of one shape"
                );
                joined.copy_from(index * each, &linear.buffer)?;
            }
            Ok::<_, BackendError>(joined)
        };
        Ok(Self {
            gate_up: join(|expert| &expert.gate_up)?,
            down: join(|expert| &expert.down)?,
            count: experts.len(),
            inner,
            hidden,
        })
    }
}

/// Choices and inner activations of one step, and the kernels.
pub struct CudaMoeWorkspace {
    shape: MoeShape,
    chosen: Buffer,
    weights: Buffer,
    inner: Buffer,
    route: Kernel,
    gate_up: Kernel,
    down: Kernel,
}

impl CudaMoeWorkspace {
    /// Errors when there are more experts than the router kernel takes.
    pub(super) fn new(device: &Rc<Device>, shape: MoeShape, dtype: DType) -> Result<Self> {
        if shape.num_experts > EXPERTS_MAX {
            return Err(BackendError::Unsupported(format!(
                "{} experts, but the CUDA router takes up to {EXPERTS_MAX}; use --device cpu",
                shape.num_experts
            )));
        }
        let module = Source::Moe.load(device, dtype)?;
        let pairs = shape.rows_max * shape.experts_per_token;
        let room = |bytes| Buffer::zeroed(device, bytes, "a mixture's workspace");
        Ok(Self {
            shape,
            chosen: room(pairs * size_of::<u32>())?,
            weights: room(pairs * size_of::<f32>())?,
            inner: room(pairs * shape.local_inner * dtype.size_bytes())?,
            route: module.kernel("route", 0)?,
            gate_up: module.kernel("moe_gate_up", 0)?,
            down: module.kernel("moe_down", 0)?,
        })
    }

    /// Bytes for the widest type.
    pub(super) fn bytes(shape: &MoeShape) -> usize {
        shape.rows_max * shape.experts_per_token * (8 + shape.local_inner * size_of::<f32>())
    }

    /// Queues the mixture of `rows` rows. Panics when shapes differ from what was made.
    pub(super) fn run(
        &mut self,
        args: &MoeArgs<'_, CudaBackend>,
        experts: &CudaExperts,
        x: &CudaTensor,
        rows: usize,
        out: &CudaTensor,
    ) {
        let dtype = x.dtype;
        let (per_token, inner, hidden) = (args.experts_per_token, experts.inner, experts.hidden);
        assert_eq!(
            (per_token, inner),
            (self.shape.experts_per_token, self.shape.local_inner),
            "the workspace's"
        );
        assert!(rows <= self.shape.rows_max, "{rows} rows in a workspace for {}", self.shape.rows_max);
        let logits = args.router_logits.rows(rows, experts.count, DType::F32);
        let (from, to) = (x.rows(rows, hidden, dtype), out.rows(rows, hidden, dtype));
        let kind = activation_code(args.activation);
        let route = Args::default()
            .address(logits)
            .int(experts.count)
            .int(per_token)
            .int(usize::from(args.norm_topk_prob))
            .address(self.chosen.address())
            .address(self.weights.address());
        // SAFETY: choices have room for `rows_max * experts_per_token` pairs; `logits` was checked.
        unsafe { self.route.launch(Grid::rows(rows, 32), route) };
        let step = PAIRS_MAX / per_token;
        for first in (0..rows).step_by(step) {
            let count = step.min(rows - first);
            let (pair, size) = ((first * per_token) as u64, dtype.size_bytes() as u64);
            let chosen = self.chosen.address() + pair * 4;
            let weights = self.weights.address() + pair * 4;
            let work = self.inner.address() + pair * inner as u64 * size;
            let row = (first * hidden) as u64 * size;
            let up = [experts.gate_up.address(), from + row, chosen, work];
            let up = up.into_iter().fold(Args::default(), Args::address);
            let up = up.int(inner).int(hidden).int(per_token).int(kind);
            let down = [experts.down.address(), work, chosen, weights, to + row];
            let down = down.into_iter().fold(Args::default(), Args::address);
            let down = down.int(inner).int(hidden).int(per_token);
            let grid =
                |outputs: usize, y| Grid { blocks: [outputs.div_ceil(WARPS), y, 1], threads: 32 * WARPS };
            // SAFETY: rows `first..first + count` of x and out and their pairs lie inside their buffers;
            // chosen experts are below `experts.count` by the router.
            unsafe {
                self.gate_up.launch(grid(inner, count * per_token), up);
                self.down.launch(grid(hidden, count), down);
            }
        }
    }
}

/// How kernels name an activation.
pub(super) fn activation_code(activation: Activation) -> usize {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
    }
}
