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
//! Experts may be codes, each projection by itself: then a projection's inputs are rounded, and the sums of an expert and
//! a leaf are as [`codes`](super::codes) has them; see `coded`.
//!
//! Tokens are taken in slabs of [`SLAB_ROWS`] so that the workspace stays bounded. Within a slab, in
//! operations of the pool: probabilities, gate and up by (expert, range of tiles), activation, down
//! by (band of tokens, range of tiles).

mod coded;
mod down;
mod route;

use super::activation::Gated;
use super::codes::{BLOCK_ROWS, CodedInputs};
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
use route::{EMPTY, RouterSoftmax, Routing};
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
        Self(experts)
    }

    fn gate_up_spec(&self) -> &LinearSpec {
        self.0[0].gate_up.spec()
    }

    fn down_spec(&self) -> &LinearSpec {
        self.0[0].down.spec()
    }

    /// What segments of slots start at multiples of: whole blocks of rounded rows where there are codes.
    fn align(&self) -> usize {
        let coded = |spec: &LinearSpec| matches!(spec.weight_type, WeightType::Coded(_));
        if coded(self.gate_up_spec()) || coded(self.down_spec()) { BLOCK_ROWS } else { 1 }
    }

    fn gate_up(&self, expert: u32) -> &PackedLinear {
        &self.0[expert as usize].gate_up
    }
}

/// What [`crate::Backend::moe`] works in; one serves all layers.
pub struct CpuMoeWorkspace {
    /// `[slab, experts]`.
    probabilities: CpuTensor,
    /// `[slots, 2 * local_inner]`; the gated product replaces the gate.
    gate_up: CpuTensor,
    routing: Routing,
    shape: MoeShape,
}

impl CpuMoeWorkspace {
    /// Makes room in `rounded` too.
    pub(super) fn new(arena: &Arena, rounded: &mut CodedInputs, shape: MoeShape) -> Result<Self> {
        assert!(
            (1..=shape.num_experts).contains(&shape.experts_per_token),
            "a token takes {} of {} experts",
            shape.experts_per_token,
            shape.num_experts
        );
        let slab = shape.rows_max.min(SLAB_ROWS);
        let slots = Self::slots(&shape);
        rounded.reserve(slots, shape.hidden.max(shape.local_inner))?;
        Ok(Self {
            probabilities: CpuTensor::new(arena, slab, shape.num_experts)?,
            gate_up: CpuTensor::new(arena, slots, 2 * shape.local_inner)?,
            routing: Routing::new(slab, BAND_ROWS, shape.num_experts, shape.experts_per_token),
            shape,
        })
    }

    fn slots(shape: &MoeShape) -> usize {
        let slab = shape.rows_max.min(SLAB_ROWS);
        Routing::slots(slab, BAND_ROWS, shape.num_experts, shape.experts_per_token)
    }

    /// Bytes of [`CpuMoeWorkspace::new`] for this shape.
    pub(super) fn bytes(shape: &MoeShape) -> usize {
        let slab = shape.rows_max.min(SLAB_ROWS);
        // Besides the activations each slot has a row, a place and a weight, and each pair a choice.
        let per_slot = 2 * shape.local_inner * size_of::<f32>() + 12;
        let per_token = shape.num_experts * size_of::<f32>() + shape.experts_per_token * 8;
        let segments = shape.num_experts * slab.div_ceil(BAND_ROWS) * 8;
        slab * per_token + Self::slots(shape) * per_slot + segments + shape.num_experts * size_of::<u32>()
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
    /// Computes the first `rows` rows. `rounded` is working memory.
    pub(super) fn run(
        &self,
        pool: &ThreadPool,
        rows: usize,
        (work, rounded): (&mut CpuMoeWorkspace, &mut CodedInputs),
    ) {
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
            self.gate_and_up(pool, work, rounded);
            self.activate(pool, inner, work);
            self.down(pool, &slab, work, rounded);
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
        let probabilities = work.probabilities.rows(slab.len());
        work.routing.fill(probabilities, slab.start, self.norm_topk_prob, self.experts.align());
    }

    /// `[slots, 2 * inner]`: each expert's rows times its gate and up.
    fn gate_and_up(&self, pool: &ThreadPool, work: &mut CpuMoeWorkspace, rounded: &mut CodedInputs) {
        let routing = &work.routing;
        let out = work.gate_up.view_mut(routing.len());
        let spec = self.experts.gate_up_spec();
        let source =
            |slot: usize| (routing.places[slot] != EMPTY).then(|| self.x.row(routing.rows[slot] as usize));
        let codes = match spec.weight_type {
            WeightType::Float(_) => None,
            WeightType::Coded(layout) => {
                let size = (routing.len(), spec.in_features);
                Some(rounded.fill_from((self.isa, pool), size, layout, &source))
            }
        };
        let tiles = spec.out_features.div_ceil(LANES);
        let ops = routing.len() * spec.out_features * spec.in_features;
        let ranges = ranges(pool.threads(), ops, tiles, routing.active.len());
        pool.run(routing.active.len() * ranges, &|chunk, thread| {
            // SAFETY: the scratch row of a thread is used by one chunk at a time.
            let scratch = unsafe { self.scratch.part(thread, 0, matmul::SCRATCH_LEN) };
            let (expert, range) = (routing.active[chunk / ranges], chunk % ranges);
            let slots = routing.slots_of(expert);
            let product = Matmul {
                isa: self.isa,
                weights: self.experts.gate_up(expert),
                x: self.x,
                codes: codes.map(|codes| codes.part(slots.clone())),
                x_rows: codes.is_none().then(|| &routing.rows[slots.clone()]),
                bias: None,
                gate: None,
                rows: slots.len(),
                out: out.rows_from(slots.start),
            };
            product.run_tiles(range * tiles / ranges..(range + 1) * tiles / ranges, scratch);
        });
    }

    /// Gated product times routing weight, in place of the gate.
    fn activate(&self, pool: &ThreadPool, inner: usize, work: &mut CpuMoeWorkspace) {
        let slots = work.routing.len();
        let rows = work.gate_up.view_mut(slots);
        for_rows(pool, slots, inner, &|slot| {
            if work.routing.places[slot] == EMPTY {
                return;
            }
            // SAFETY: each slot has its own row.
            let row = unsafe { rows.part(slot, 0, 2 * inner) };
            let (gate, up) = row.split_at_mut(inner);
            let gate = gate.as_mut_ptr();
            let gated = Gated {
                activation: self.activation,
                gate,
                up: up.as_ptr(),
                out: gate,
                len: inner,
                rows: 1,
                out_stride: inner,
                factor: work.routing.weights[slot],
            };
            // SAFETY: `inner` elements of each, in place.
            unsafe { self.isa.run(gated) };
        });
    }

    /// The sums of the experts into `out`.
    fn down(
        &self,
        pool: &ThreadPool,
        slab: &Range<usize>,
        work: &CpuMoeWorkspace,
        rounded: &mut CodedInputs,
    ) {
        let routing = &work.routing;
        let spec = self.experts.down_spec();
        let gated = work.gate_up.view(routing.len());
        let source =
            |slot: usize| (routing.places[slot] != EMPTY).then(|| &gated.row(slot)[..spec.in_features]);
        let codes = match spec.weight_type {
            WeightType::Float(_) => None,
            WeightType::Coded(layout) => {
                let size = (routing.len(), spec.in_features);
                Some(rounded.fill_from((self.isa, pool), size, layout, &source))
            }
        };
        let down = Down {
            isa: self.isa,
            experts: self.experts,
            routing,
            gated,
            codes,
            pairs_max: routing.active.iter().map(|&e| routing.slots_of(e).len()).max().unwrap_or(1),
            out: self.out,
        };
        let tiles = spec.out_features.div_ceil(LANES);
        let bands = slab.len().div_ceil(BAND_ROWS);
        let ops = routing.len() * spec.out_features * spec.in_features;
        let ranges = ranges(pool.threads(), ops, tiles, bands);
        pool.run(bands * ranges, &|chunk, thread| {
            // SAFETY: the scratch row of a thread is used by one chunk at a time.
            let scratch = unsafe { self.scratch.part(thread, 0, down::SCRATCH_LEN) };
            let (band, range) = (chunk / ranges, chunk % ranges);
            let first = slab.start + band * BAND_ROWS;
            let rows = first..slab.end.min(first + BAND_ROWS);
            down.run((band, rows), range * tiles / ranges..(range + 1) * tiles / ranges, scratch);
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
