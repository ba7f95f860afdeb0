//! Mixtures of experts: routing, then every (token, expert) pair's MLP.
//!
//! 16-bit types take grouped products (`experts.cu`): pairs are sorted by expert on the device, so each expert's weights
//! are read once for all of its pairs, from one token to a long prompt, and a launch depends on nothing but the number
//! of tokens. f32, the test mode, takes pair after pair (`moe.cu`).

use super::compile::Source;
use super::device::Device;
use super::driver::Address;
use super::launch::{Args, Grid, Kernel, Module};
use super::memory::Buffer;
use super::ring::{self, RingPlan, TILES};
use super::tensor::{CudaTensor, VECTOR};
use crate::cuda::CudaBackend;
use crate::{BackendError, ExpertWeights, MoeArgs, MoeShape, Result};
use lockstep_core::DType;
use lockstep_core::config::Activation;
use std::rc::Rc;

/// Experts that the router and the sorting of pairs take; threads of the latter.
const EXPERTS_MAX: usize = 512;
/// Rows that are taken at once; longer steps are taken in parts, which bounds the workspace.
const ROWS_MAX: usize = 8192;
/// Pairs of an exact launch: a grid's second dimension ends at 65,535.
const PAIRS_MAX: usize = 65_535;
/// Warps of an exact block, one output each.
const WARPS: usize = 8;
/// Threads that add up a token's experts, a vector of outputs each.
const JOIN_THREADS: usize = 128;
/// Rows whose pairs are not sorted: an expert that both choose is read twice, which costs less than sorting.
const UNSORTED_ROWS_MAX: usize = 2;
/// Bytes of an entry of the list of tiles.
const TILE_BYTES: usize = 16;
/// Pairs of an expert, on average, up to which each tile of [`TILES`] is taken: beyond these, too many experts have more
/// pairs than the tile holds.
const MEAN_PAIRS_MAX: [usize; 3] = [6, 20, 56];

/// The experts of a layer, one after another in one buffer each.
pub struct CudaExperts {
    gate_up: Buffer,
    down: Buffer,
    count: usize,
    inner: usize,
    hidden: usize,
}

impl CudaExperts {
    /// Panics when the experts' shapes differ, or when their matrices do not lie in one piece.
    pub(super) fn new(experts: Vec<ExpertWeights<CudaBackend>>) -> Self {
        let first = experts.first().expect("invariant: a mixture has experts");
        let specs = (first.gate_up.spec.clone(), first.down.spec.clone());
        let (count, hidden, inner) = (experts.len(), specs.0.in_features, specs.1.in_features);
        let buffers = experts.into_iter().map(|ExpertWeights { gate_up, down }| {
            assert_eq!((&gate_up.spec, &down.spec), (&specs.0, &specs.1), "experts are of one shape");
            (gate_up.buffer, down.buffer)
        });
        let (gate_up, down) = buffers.unzip();
        Self { gate_up: Buffer::join(gate_up), down: Buffer::join(down), count, inner, hidden }
    }
}

/// Choices and inner activations of one step, and the kernels.
pub struct CudaMoeWorkspace {
    shape: MoeShape,
    chosen: Buffer,
    weights: Buffer,
    inner: Buffer,
    route: Kernel,
    products: Products,
}

/// What multiplies with the experts.
enum Products {
    /// f32.
    Exact { gate_up: Kernel, down: Kernel },
    /// 16-bit types.
    Grouped(Box<Grouped>),
}

/// The grouped products and their lists.
struct Grouped {
    order: Buffer,
    tiles: Buffer,
    tile_count: Buffer,
    /// The down product of every pair.
    products: Buffer,
    group: Kernel,
    join: Kernel,
    /// Gate and up, and down, of each tile of [`TILES`].
    tile_kernels: Vec<TileKernels>,
    sm_count: usize,
}

struct TileKernels {
    up: Kernel,
    down: Kernel,
    plan: RingPlan,
}

/// Rows of one launch: their x, their pairs' choices, weights and inner activations, and their out.
#[derive(Clone, Copy)]
struct Part {
    rows: usize,
    per_token: usize,
    x: Address,
    chosen: Address,
    weights: Address,
    inner: Address,
    out: Address,
    activation: usize,
}

impl CudaMoeWorkspace {
    /// Errors when there are more experts than the kernels take.
    pub(super) fn new(device: &Rc<Device>, shape: MoeShape, dtype: DType) -> Result<Self> {
        if shape.num_experts > EXPERTS_MAX {
            return Err(BackendError::Unsupported(format!(
                "{} experts, but the CUDA router takes up to {EXPERTS_MAX}; use --device cpu",
                shape.num_experts
            )));
        }
        let module = Source::Moe.load(device, dtype)?;
        let pairs = pairs_at_once(&shape);
        let room = |bytes| room(device, bytes);
        let products = match dtype {
            DType::F32 => Products::Exact {
                gate_up: module.kernel("moe_gate_up", 0)?,
                down: module.kernel("moe_down", 0)?,
            },
            DType::Bf16 | DType::F16 => Products::Grouped(Box::new(Grouped::new(device, &shape, dtype)?)),
        };
        Ok(Self {
            shape,
            chosen: room(pairs * size_of::<u32>())?,
            weights: room(pairs * size_of::<f32>())?,
            inner: room(pairs * shape.local_inner * dtype.size_bytes())?,
            route: module.kernel("route", 0)?,
            products,
        })
    }

    /// Bytes for the types that take most of each.
    pub(super) fn bytes(shape: &MoeShape) -> usize {
        let pair =
            3 * size_of::<u32>() + shape.local_inner * size_of::<f32>() + shape.hidden * size_of::<u16>();
        pairs_at_once(shape) * pair + tiles_at_once(shape) * TILE_BYTES
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
        let (per_token, inner, hidden) = (args.experts_per_token, experts.inner, experts.hidden);
        let MoeShape { rows_max, experts_per_token, local_inner, num_experts, .. } = self.shape;
        assert_eq!(
            (per_token, inner, hidden, experts.count),
            (experts_per_token, local_inner, self.shape.hidden, num_experts),
            "the workspace's"
        );
        assert!(rows <= rows_max, "{rows} rows in a workspace for {rows_max}");
        let logits = args.router_logits.rows(rows, experts.count, DType::F32);
        let (from, to) = (x.rows(rows, hidden, x.dtype), out.rows(rows, hidden, x.dtype));
        for first in (0..rows).step_by(ROWS_MAX) {
            let row = (first * hidden * x.dtype.size_bytes()) as u64;
            let part = Part {
                rows: ROWS_MAX.min(rows - first),
                per_token,
                x: from + row,
                chosen: self.chosen.address(),
                weights: self.weights.address(),
                inner: self.inner.address(),
                out: to + row,
                activation: activation_code(args.activation),
            };
            let route = Args::default()
                .address(logits + (first * experts.count * size_of::<f32>()) as u64)
                .int(experts.count)
                .int(per_token)
                .int(usize::from(args.norm_topk_prob))
                .address(part.chosen)
                .address(part.weights);
            let lists = match &self.products {
                Products::Grouped(grouped) if part.rows <= UNSORTED_ROWS_MAX => grouped.lists().map(Some),
                _ => [None; 3],
            };
            let route = lists.into_iter().fold(route, Args::optional);
            // SAFETY: `logits` was checked, and the workspace has room for the pairs of `part.rows` rows.
            unsafe { self.route.launch(Grid::rows(part.rows, 32), route) };
            match &self.products {
                Products::Exact { gate_up, down } => {
                    exact(gate_up, down, experts, part, x.dtype.size_bytes() as u64);
                }
                Products::Grouped(grouped) => grouped.run(experts, part),
            }
        }
    }
}

fn room(device: &Rc<Device>, bytes: usize) -> Result<Buffer> {
    Buffer::zeroed(device, bytes, "a mixture's workspace")
}

fn pairs_at_once(shape: &MoeShape) -> usize {
    shape.rows_max.min(ROWS_MAX) * shape.experts_per_token
}

/// Tiles of the smallest kind, which are the most, or of single pairs that are not sorted.
fn tiles_at_once(shape: &MoeShape) -> usize {
    let sorted = tiles_max(pairs_at_once(shape), shape.num_experts, TILES[0].tokens);
    sorted.max(UNSORTED_ROWS_MAX.min(shape.rows_max) * shape.experts_per_token)
}

/// Most tiles of `width` pairs that `pairs` pairs can make: each expert's last one may be short.
fn tiles_max(pairs: usize, experts: usize, width: usize) -> usize {
    pairs.min(pairs / width + experts)
}

/// Queues a part pair after pair.
fn exact(gate_up: &Kernel, down: &Kernel, experts: &CudaExperts, part: Part, element_bytes: u64) {
    let (per_token, inner, hidden) = (part.per_token, experts.inner, experts.hidden);
    let step = PAIRS_MAX / per_token;
    for first in (0..part.rows).step_by(step) {
        let count = step.min(part.rows - first);
        let pair = (first * per_token) as u64;
        let chosen = part.chosen + pair * size_of::<u32>() as u64;
        let weights = part.weights + pair * size_of::<f32>() as u64;
        let work = part.inner + pair * inner as u64 * element_bytes;
        let row = (first * hidden) as u64 * element_bytes;
        let up = [experts.gate_up.address(), part.x + row, chosen, work];
        let up = up.into_iter().fold(Args::default(), Args::address);
        let up = up.int(inner).int(hidden).int(per_token).int(part.activation);
        let to = [experts.down.address(), work, chosen, weights, part.out + row];
        let to = to.into_iter().fold(Args::default(), Args::address);
        let to = to.int(inner).int(hidden).int(per_token);
        let grid = |outputs: usize, y| Grid { blocks: [outputs.div_ceil(WARPS), y, 1], threads: 32 * WARPS };
        // SAFETY: rows `first..first + count` of x and out and their pairs lie inside their buffers;
        // chosen experts are below `experts.count` by the router.
        unsafe {
            gate_up.launch(grid(inner, count * per_token), up);
            down.launch(grid(hidden, count), to);
        }
    }
}

impl Grouped {
    fn new(device: &Rc<Device>, shape: &MoeShape, dtype: DType) -> Result<Self> {
        let module = Source::Experts.load(device, dtype)?;
        let names = [
            ("experts_up_16", "experts_down_16"),
            ("experts_up_32", "experts_down_32"),
            ("experts_up_64", "experts_down_64"),
            ("experts_up_128", "experts_down_128"),
        ];
        let kernels = |module: &Module, (up, down), plan: RingPlan| {
            let [up, down] = [up, down].map(|name| module.kernel(name, plan.shared_bytes));
            Ok(TileKernels { up: up?, down: down?, plan })
        };
        let plans = ring::plans(&device.architecture());
        let tile_kernels = names.into_iter().zip(plans).map(|(names, plan)| kernels(&module, names, plan));
        let pairs = pairs_at_once(shape);
        Ok(Self {
            order: room(device, pairs * size_of::<u32>())?,
            tiles: room(device, tiles_at_once(shape) * TILE_BYTES)?,
            tile_count: room(device, size_of::<u32>())?,
            products: room(device, pairs * shape.hidden * dtype.size_bytes())?,
            group: module.kernel("group", 0)?,
            join: module.kernel("join_experts", 0)?,
            tile_kernels: tile_kernels.collect::<Result<_>>()?,
            sm_count: device.sm_count,
        })
    }

    /// Sorted pairs, tiles and their number.
    fn lists(&self) -> [Address; 3] {
        [&self.order, &self.tiles, &self.tile_count].map(Buffer::address)
    }

    /// Queues a part whose pairs have been chosen, and sorted where there are no more rows than
    /// [`UNSORTED_ROWS_MAX`].
    fn run(&self, experts: &CudaExperts, part: Part) {
        let (inner, hidden, pairs) = (experts.inner, experts.hidden, part.rows * part.per_token);
        let kind = tile_for(pairs, experts.count);
        let (tile, kernels) = (TILES[kind], &self.tile_kernels[kind]);
        let with_lists = |args: Args| self.lists().into_iter().fold(args, Args::address);
        let group = with_lists(Args::default().address(part.chosen).int(pairs).int(tile.tokens));
        let up = with_lists(Args::default().address(experts.gate_up.address()).address(part.x));
        let up = up.address(part.inner).int(inner).int(hidden).int(part.per_token).int(part.activation);
        let down = with_lists(Args::default().address(experts.down.address()).address(part.inner));
        let down = down.address(self.products.address()).int(hidden).int(inner);
        let down = down.int(part.per_token).int(part.activation);
        let join = [self.products.address(), part.weights, part.out];
        let join = join.into_iter().fold(Args::default(), Args::address).int(hidden).int(part.per_token);
        // Half of a tile's rows are gates.
        let tiles = tiles_max(pairs, experts.count, tile.tokens);
        let grid = |output_tiles: usize| {
            ring::grid((tiles * output_tiles).min(self.sm_count * kernels.plan.resident))
        };
        let join_grid =
            Grid { blocks: [hidden.div_ceil(JOIN_THREADS * VECTOR), part.rows, 1], threads: JOIN_THREADS };
        // SAFETY: lists, inner activations and products have room for `pairs` pairs, x and out for the part's
        // rows; chosen experts are below `experts.count` by the router. `experts_down` reads the list before
        // it waits, which is right because `experts_up` comes between it and what made the list.
        unsafe {
            if part.rows > UNSORTED_ROWS_MAX {
                self.group.launch(Grid::rows(1, EXPERTS_MAX), group);
            }
            kernels.up.launch(grid(inner.div_ceil(tile.rows / 2)), up);
            kernels.down.launch(grid(hidden.div_ceil(tile.rows)), down);
            self.join.launch(join_grid, join);
        }
    }
}

/// The tile of [`TILES`] for a step.
fn tile_for(pairs: usize, experts: usize) -> usize {
    let mean = pairs.div_ceil(experts);
    MEAN_PAIRS_MAX.iter().position(|most| mean <= *most).unwrap_or(MEAN_PAIRS_MAX.len())
}

/// How kernels name an activation.
pub(super) fn activation_code(activation: Activation) -> usize {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_room_for_the_worst_choices() {
        for (pairs, experts, width) in [(1usize, 128, 16), (8, 128, 16), (2048, 128, 32), (65_536, 128, 128)]
        {
            // One pair for every expert but the first, which takes the rest.
            let others = experts.min(pairs) - 1;
            let tiles = others + (pairs - others).div_ceil(width);
            assert!(tiles <= tiles_max(pairs, experts, width), "{pairs} pairs, {experts} experts, {width}");
        }
    }

    #[test]
    fn unsorted_pairs_have_room_for_a_tile_each() {
        let shape = MoeShape { rows_max: 2, num_experts: 2, experts_per_token: 2, local_inner: 8, hidden: 8 };
        assert_eq!(tiles_at_once(&shape), 4);
        assert_eq!(tiles_at_once(&MoeShape { rows_max: 1, ..shape }), 2);
    }

    #[test]
    fn more_pairs_take_larger_tiles() {
        let kinds = [8, 512, 1024, 2048, 2568, 8192, 65_536].map(|pairs| tile_for(pairs, 128));
        assert_eq!(kinds, [0, 0, 1, 1, 2, 3, 3]);
        assert_eq!(tile_for(1, 8), 0);
    }
}
