//! The mixture of experts on the CPU: only chosen experts' weights are read, each once for all its
//! tokens.
//!
//! ```text
//! g_e = act(gate_e(x)) * up_e(x) * weight_e          for the chosen experts e of a token
//! s_b = fma(g_e[k], down_e[k], ...) for ascending e, then ascending k of leaf b, from 0
//! out = ((s_0 + s_1) + (s_2 + s_3)) + ...
//! ```
//! One chain of fused multiply-adds per token, output and leaf, whatever the other tokens are; so the
//! bits depend neither on the batch nor on threads, and a rank that holds some of the leaves computes
//! its subtree of the same tree.
//!
//! Tokens are taken in slabs of [`SLAB_ROWS`] so that the workspace stays bounded. Within a slab, in
//! operations of the pool: probabilities, gate and up by (expert, range of tiles), activation, down
//! by (band of tokens, range of tiles).

mod down;
mod route;

use super::activation::GatedRow;
use super::matmul::{self, Matmul, PARALLEL_OPS_MIN};
use super::memory::Arena;
use super::packed::PackedLinear;
use super::pointwise::for_rows;
use super::pool::ThreadPool;
use super::simd::{Isa, LANES};
use super::tensor::{CpuTensor, RowsIn, RowsOut};
use crate::{ExpertWeights, LinearSpec, MoeShape, Result};
use down::Down;
use lockstep_core::WeightType;
use lockstep_core::config::Activation;
use route::{RouterSoftmax, Routing};
use std::ops::Range;

/// Tokens handled at a time at most.
const SLAB_ROWS: usize = 512;
/// Tokens whose sums a thread keeps while the experts pass by: 8 leaves of 3 tiles fill 384 KiB.
const BAND_ROWS: usize = 256;

/// Scratch elements of each thread.
pub(super) const SCRATCH_LEN: usize =
    if down::SCRATCH_LEN > matmul::SCRATCH_LEN { down::SCRATCH_LEN } else { matmul::SCRATCH_LEN };

/// The experts of one layer, by expert id.
pub struct CpuExperts(Vec<ExpertWeights<super::CpuBackend>>);

impl CpuExperts {
    /// Panics when the experts differ in shape or their projections do not fit together.
    pub(super) fn new(experts: Vec<ExpertWeights<super::CpuBackend>>) -> Self {
        let first = experts.first().expect("a mixture has at least one expert");
        let (gate_up, down) = (first.gate_up.spec(), first.down.spec());
        assert_eq!(gate_up.out_features, 2 * down.in_features, "gate and up are as wide as down's input");
        assert_eq!(gate_up.in_features, down.out_features, "experts keep the width");
        let alike =
            |e: &ExpertWeights<super::CpuBackend>| e.gate_up.spec() == gate_up && e.down.spec() == down;
        assert!(experts.iter().all(alike), "all experts of a layer have the same shape and type");
        for spec in [gate_up, down] {
            assert!(matches!(spec.weight_type, WeightType::Float(_)), "experts are floats");
        }
        Self(experts)
    }

    fn gate_up_spec(&self) -> &LinearSpec {
        self.0[0].gate_up.spec()
    }

    fn down_spec(&self) -> &LinearSpec {
        self.0[0].down.spec()
    }

    fn gate_up(&self, expert: u32) -> &PackedLinear {
        &self.0[expert as usize].gate_up
    }
}

/// What [`crate::Backend::moe`] works in; one serves all layers.
pub struct CpuMoeWorkspace {
    /// `[slab, experts]`.
    probabilities: CpuTensor,
    /// `[slab * experts_per_token, 2 * local_inner]`; the gated product replaces the gate.
    gate_up: CpuTensor,
    routing: Routing,
    /// Row modulo [`BAND_ROWS`] of each pair.
    places: Vec<u32>,
    shape: MoeShape,
}

impl CpuMoeWorkspace {
    pub(super) fn new(arena: &Arena, shape: MoeShape) -> Result<Self> {
        assert!(
            (1..=shape.num_experts).contains(&shape.experts_per_token),
            "a token takes {} of {} experts",
            shape.experts_per_token,
            shape.num_experts
        );
        let slab = shape.rows_max.min(SLAB_ROWS);
        let pairs = slab * shape.experts_per_token;
        Ok(Self {
            probabilities: CpuTensor::new(arena, slab, shape.num_experts)?,
            gate_up: CpuTensor::new(arena, pairs, 2 * shape.local_inner)?,
            routing: Routing::new(slab, shape.num_experts, shape.experts_per_token),
            places: vec![0; pairs],
            shape,
        })
    }

    /// Bytes of [`CpuMoeWorkspace::new`] for this shape.
    pub(super) fn bytes(shape: &MoeShape) -> usize {
        let slab = shape.rows_max.min(SLAB_ROWS);
        // Besides the activations each pair has a choice (8 bytes), a row, a weight and a place.
        let per_pair = 2 * shape.local_inner * size_of::<f32>() + 20;
        slab * (shape.num_experts * size_of::<f32>() + shape.experts_per_token * per_pair)
            + shape.num_experts * 2 * size_of::<u32>()
    }
}

/// One call of [`crate::Backend::moe`].
pub(super) struct Mixture<'a> {
    pub isa: Isa,
    /// A row of [`SCRATCH_LEN`] for each thread.
    pub scratch: RowsOut<'a>,
    pub experts: &'a CpuExperts,
    pub experts_per_token: usize,
    pub activation: Activation,
    pub norm_topk_prob: bool,
    /// `[rows, num_experts]`.
    pub logits: RowsIn<'a>,
    /// `[rows, hidden]`.
    pub x: RowsIn<'a>,
    /// `[rows, hidden]`.
    pub out: RowsOut<'a>,
}

impl Mixture<'_> {
    /// Computes the first `rows` rows.
    pub(super) fn run(&self, pool: &ThreadPool, rows: usize, work: &mut CpuMoeWorkspace) {
        let (experts, hidden) = (self.experts.0.len(), self.experts.down_spec().out_features);
        assert_eq!([experts, self.logits.cols], [work.shape.num_experts; 2], "a logit for every expert");
        assert_eq!([self.x.cols, self.out.cols], [hidden; 2], "x and out have the columns of the experts");
        let inner = self.experts.down_spec().in_features;
        assert_eq!(
            (inner, self.experts_per_token),
            (work.shape.local_inner, work.shape.experts_per_token),
            "the workspace is made for these experts"
        );
        assert!(rows <= work.shape.rows_max, "{rows} rows; the workspace holds {}", work.shape.rows_max);
        for from in (0..rows).step_by(SLAB_ROWS) {
            let slab = from..rows.min(from + SLAB_ROWS);
            self.route(pool, &slab, work);
            self.gate_and_up(pool, work);
            self.activate(pool, inner, work);
            self.down(pool, &slab, work);
        }
    }

    /// Probabilities, choices, and the pairs sorted by expert.
    fn route(&self, pool: &ThreadPool, slab: &Range<usize>, work: &mut CpuMoeWorkspace) {
        let experts = self.logits.cols;
        let probabilities = work.probabilities.view_mut(slab.len());
        for_rows(pool, slab.len(), experts, &|row| {
            let logits = self.logits.row(slab.start + row).as_ptr();
            let softmax = RouterSoftmax { logits, out: probabilities.pointer(row, 0), len: experts };
            // SAFETY: `experts` elements of each; this row of the probabilities belongs to this
            // call alone.
            unsafe { self.isa.run(softmax) };
        });
        work.routing.fill(work.probabilities.rows(slab.len()), slab.start, self.norm_topk_prob);
        for (place, row) in work.places.iter_mut().zip(&work.routing.rows) {
            *place = row % BAND_ROWS as u32;
        }
    }

    /// `[pairs, 2 * inner]`: each expert's rows times its gate and up.
    fn gate_and_up(&self, pool: &ThreadPool, work: &mut CpuMoeWorkspace) {
        let routing = &work.routing;
        let out = work.gate_up.view_mut(routing.len());
        let spec = self.experts.gate_up_spec();
        let tiles = spec.out_features.div_ceil(LANES);
        let ops = routing.len() * spec.out_features * spec.in_features;
        let ranges = ranges(pool.threads(), ops, tiles, routing.active.len());
        pool.run(routing.active.len() * ranges, &|chunk, thread| {
            // SAFETY: the scratch row of a thread is used by one chunk at a time.
            let scratch = unsafe { self.scratch.part(thread, 0, matmul::SCRATCH_LEN) };
            let (expert, range) = (routing.active[chunk / ranges], chunk % ranges);
            let pairs = routing.pairs(expert);
            let product = Matmul {
                isa: self.isa,
                weights: self.experts.gate_up(expert),
                x: self.x,
                codes: None,
                x_rows: Some(&routing.rows[pairs.clone()]),
                bias: None,
                gate: None,
                rows: pairs.len(),
                out: out.rows_from(pairs.start),
            };
            product.run_tiles(range * tiles / ranges..(range + 1) * tiles / ranges, scratch);
        });
    }

    /// Gated product times routing weight, in place of the gate.
    fn activate(&self, pool: &ThreadPool, inner: usize, work: &mut CpuMoeWorkspace) {
        let pairs = work.routing.len();
        let rows = work.gate_up.view_mut(pairs);
        for_rows(pool, pairs, inner, &|pair| {
            // SAFETY: each pair has its own row.
            let row = unsafe { rows.part(pair, 0, 2 * inner) };
            let (gate, up) = row.split_at_mut(inner);
            let gate = gate.as_mut_ptr();
            let gated = GatedRow {
                activation: self.activation,
                gate,
                up: up.as_ptr(),
                out: gate,
                len: inner,
                factor: work.routing.weights[pair],
            };
            // SAFETY: `inner` elements of each, in place.
            unsafe { self.isa.run(gated) };
        });
    }

    /// The sums of the experts into `out`.
    fn down(&self, pool: &ThreadPool, slab: &Range<usize>, work: &CpuMoeWorkspace) {
        let routing = &work.routing;
        let spec = self.experts.down_spec();
        let down = Down {
            isa: self.isa,
            experts: self.experts,
            routing,
            places: &work.places,
            gated: work.gate_up.view(routing.len()),
            pairs_max: routing.active.iter().map(|&e| routing.pairs(e).len()).max().unwrap_or(1),
            out: self.out,
        };
        let tiles = spec.out_features.div_ceil(LANES);
        let bands = slab.len().div_ceil(BAND_ROWS);
        let ops = routing.len() * spec.out_features * spec.in_features;
        let ranges = ranges(pool.threads(), ops, tiles, bands);
        pool.run(bands * ranges, &|chunk, thread| {
            // SAFETY: the scratch row of a thread is used by one chunk at a time.
            let scratch = unsafe { self.scratch.part(thread, 0, down::SCRATCH_LEN) };
            let (band, range) = (slab.start + chunk / ranges * BAND_ROWS, chunk % ranges);
            let rows = band..slab.end.min(band + BAND_ROWS);
            down.run(rows, range * tiles / ranges..(range + 1) * tiles / ranges, scratch);
        });
    }
}

/// Ranges to cut `tiles` into, for `parts` independent parts of work with `ops` multiply-adds in all:
/// several chunks a thread even out threads that lose their core for a while, at least 8 tiles keep
/// groups full.
fn ranges(threads: usize, ops: usize, tiles: usize, parts: usize) -> usize {
    if threads == 1 || ops < PARALLEL_OPS_MIN {
        return 1;
    }
    (8 * threads).div_ceil(parts.max(1)).clamp(1, (tiles / 8).max(1))
}
