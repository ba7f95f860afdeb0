//! The few operations a decoder needs, behind one trait, with one implementation per device.
//!
//! Layers and models are generic over [`Backend`]; they see tensors as row-major matrices
//! `[rows, cols]` of activations and never a kernel, a thread or a stream. All unsafe kernels of
//! the workspace live below this crate.
//!
//! **Invariants**
//! * Operations are queued in call order and see each other's results (CPU: they run at once).
//! * No operation allocates: buffers are made at start-up with their largest row count, and an
//!   operation works on the first `rows` rows.
//! * CPU results are bit-equal for a row whatever the other rows, thread count, page size,
//!   chunking and tp size (1, 2, 4, 8) are; see `docs/architecture.md`, "Numbers".
//!
//! Reading order: this file, [`batch`], [`linear`], [`bands`], [`moe`], [`pipeline`], [`choice`], [`changes`], [`sampler`], then [`cpu`] and [`cuda`].

pub mod bands;
pub mod batch;
pub mod changes;
pub mod choice;
pub mod cpu;
pub mod cuda;
pub mod linear;
pub mod moe;
pub mod pipeline;
pub mod sampler;

pub use bands::Bands;
pub use batch::{AttentionBatch, AttentionRow, ForwardInput};
pub use changes::{LogitChanges, Penalties, SeenToken};
pub use choice::{CHOSEN_BIT, Choice, RowChoice};
pub use linear::LinearSpec;
pub use moe::{ExpertWeights, MoeArgs, MoeShape};
pub use pipeline::PipelinePlace;

use lockstep_comm::collective::Collective;
use lockstep_comm::group::ProcessGroup;
use lockstep_core::config::{Activation, RopeFrequencies};
use lockstep_core::{DType, PageId, TokenId};
use std::sync::Arc;
use std::time::Duration;

/// Errors of building or running device operations.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Memory for weights, pool or workspace could not be had.
    #[error("cannot allocate {bytes} bytes for {what}; {hint}")]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// Bytes asked for.
        bytes: usize,
        /// What to change.
        hint: String,
    },
    /// The device refused or failed an operation.
    #[error("{operation} failed: {problem}")]
    Device {
        /// What was being done.
        operation: String,
        /// What the device's library said.
        problem: String,
    },
    /// This machine or model is none that the device's backend takes; says which would be.
    #[error("{0}")]
    Unsupported(String),
    /// A collective failed (a rank died or the server is stopping).
    #[error(transparent)]
    Collective(#[from] lockstep_comm::collective::CollectiveError),
}

impl BackendError {
    fn no_pipeline(device: &str) -> Self {
        Self::Unsupported(format!(
            "{device} has joined no pipeline, so it passes no activations on; use --pp 1"
        ))
    }
}

/// The bytes of a packed matrix, shared with it.
pub type PackedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Bytes of a piece of a packed matrix; its last one may have fewer.
pub const PACKED_CHUNK_BYTES: usize = 1 << 20;

/// Puts a piece of a packed matrix, by the matrix's index and the piece's first byte, into memory. False when it
/// cannot; the reader keeps the reason.
pub type ReadPacked<'a> = dyn Fn(usize, usize, &mut [u8]) -> bool + Sync + 'a;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, BackendError>;

/// Where K and V of one model shard are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Layers of this rank.
    pub local_layers: usize,
    /// KV heads of this rank.
    pub local_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Pages of the pool.
    pub num_pages: usize,
    /// Type of K and V ([`Backend::kv_dtype`]).
    pub dtype: DType,
}

impl KvLayout {
    /// Bytes of the whole pool, K and V.
    pub fn pool_bytes(&self) -> usize {
        self.page_bytes() * self.num_pages
    }

    /// Bytes of one page over all layers, K and V.
    pub fn page_bytes(&self) -> usize {
        let elements = self.local_layers * self.local_kv_heads * self.head_dim * self.page_size;
        2 * elements * self.dtype.size_bytes()
    }
}

/// Shape of the fused q|k|v activation of one rank: columns are
/// `[local_heads*head_dim | local_kv_heads*head_dim | local_kv_heads*head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkvShape {
    /// Query heads of this rank.
    pub local_heads: usize,
    /// KV heads of this rank.
    pub local_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Added to the mean square of the per-head q/k norm.
    pub norm_eps: f32,
}

/// Residual add and RMSNorm that follow a row-parallel linear.
pub struct ReduceAddNorm<'a, B: Backend + ?Sized> {
    /// Added once to the reduced sum: `[cols]`.
    pub bias: Option<&'a B::Vector>,
    /// Weight `[cols]` of an RMSNorm of the reduced sum, bias included, before it is added to the
    /// residual stream (Gemma's sandwich norms).
    pub post_norm: Option<&'a B::Vector>,
    /// RMSNorm weight `[cols]` for the next half layer's input.
    pub norm_weight: &'a B::Vector,
    /// Epsilon of both norms.
    pub norm_eps: f32,
}

/// A device that can run a decoder. One value per rank process, used from one thread.
pub trait Backend {
    /// Activations `[rows_max, cols]`, f32 on CPU.
    type Tensor;
    /// A replicated vector of f32 (norm weights, biases).
    type Vector;
    /// A packed weight matrix.
    type Linear;
    /// The rank's KV pool over all its layers.
    type KvCache;
    /// Precomputed cos/sin `[max_position, rotary_dim/2]`.
    type RopeTable;
    /// The experts of one layer.
    type Experts;
    /// Buffers of a mixture of experts; one serves all layers.
    type MoeWorkspace;
    /// A step's operations as the device repeats them ([`Backend::record`]).
    type Recording;

    /// Whether [`Backend::matmul`] and [`Backend::embed`] take matrices of codes.
    const TAKES_CODES: bool = false;

    /// Version of how packed matrices lie in memory, on devices whose matrices can be kept outside and
    /// [filled in](Backend::fill_packed) again. **Invariant:** another one whenever the same elements would become other bytes.
    const PACKED_VERSION: Option<u32> = None;

    /// E.g. `cpu avx512 x2`; shown in logs and `/server_info`.
    fn describe(&self) -> String;

    // ---- made at start-up -------------------------------------------------------------------

    /// Zeroed activations.
    fn tensor(&self, rows_max: usize, cols: usize) -> Result<Self::Tensor>;
    /// Zeroed activations that are f32 on every device: logits, and those of a router.
    fn tensor_f32(&self, rows_max: usize, cols: usize) -> Result<Self::Tensor> {
        self.tensor(rows_max, cols)
    }
    /// Copies `values` to the device.
    fn vector(&self, values: &[f32]) -> Result<Self::Vector>;
    /// Memory for weight matrices that are loaded together; rows arrive through [`Backend::pack_rows`].
    fn linears(&self, specs: &[LinearSpec]) -> Result<Vec<Self::Linear>>;
    /// Memory for one.
    fn linear(&self, spec: LinearSpec) -> Result<Self::Linear> {
        let linear = self.linears(&[spec])?.pop();
        Ok(linear.expect("invariant: a matrix for each description"))
    }
    /// Packs `data` (row-major `[n, spec.in_features]` little-endian elements or groups of `spec.weight_type`, as it comes
    /// from files) as
    /// output rows `first_row..first_row+n`. Called in bands of a few MiB so that loading needs
    /// little memory beyond the shard.
    fn pack_rows(&self, linear: &mut Self::Linear, first_row: usize, data: &[u8]);
    /// Reads and packs all `bands` of `linears`, which [`pack_rows`](Self::pack_rows) packs one by one unless
    /// the device can do better. Ends early when a band cannot be read.
    fn pack_bands(&self, linears: &mut [Self::Linear], bands: &Bands<'_>) {
        bands.read_ahead(bands::readers(), |band| {
            self.pack_rows(&mut linears[band.matrix], band.first_row, &band.data);
        });
    }
    /// The bytes of a packed matrix, which is not packed again. Where there is a [`PACKED_VERSION`](Self::PACKED_VERSION).
    fn packed(&self, _: &Self::Linear) -> PackedBytes {
        unreachable!("only for devices with a version of packed matrices")
    }
    /// Fills new matrices with what [`packed`](Self::packed) gave of matrices made for the same descriptions, as `read`
    /// brings it, on the device's threads. Ends early when a piece cannot be had; the matrices are of no use then.
    fn fill_packed(&self, _: &mut [Self::Linear], _read: &ReadPacked<'_>) {
        unreachable!("only for devices with a version of packed matrices")
    }
    /// Bytes the packed matrix occupies.
    fn linear_bytes(&self, linear: &Self::Linear) -> usize;
    /// The type in which the device keeps K and V.
    fn kv_dtype(&self) -> DType {
        DType::F32
    }
    /// The KV pool. Panics when `layout` has another type than [`Backend::kv_dtype`].
    fn kv_cache(&self, layout: KvLayout) -> Result<Self::KvCache>;
    /// cos/sin of `position * frequencies.inverse[i]` times the attention factor, computed in f64,
    /// stored f32.
    fn rope_table(&self, frequencies: &RopeFrequencies, max_position: usize) -> Result<Self::RopeTable>;
    /// The experts of a layer, by expert id. Panics when their shapes, types or leaves differ, or on devices that keep
    /// experts in one piece when one call of [`linears`](Self::linears) has not made them all, in this order.
    fn experts(&self, experts: Vec<ExpertWeights<Self>>) -> Result<Self::Experts>;
    /// Buffers for [`Backend::moe`].
    fn moe_workspace(&self, shape: MoeShape) -> Result<Self::MoeWorkspace>;
    /// Bytes that [`Backend::moe_workspace`] asks for.
    fn moe_workspace_bytes(shape: &MoeShape) -> usize;

    // ---- one step ---------------------------------------------------------------------------

    /// `out[t] = table[ids[t] - first_id]`, or zeros where the id is not in
    /// `first_id..first_id + table.out_features` (another rank holds it). `table` is a packed
    /// [`LinearSpec`] `[local_vocab, hidden]`, so a tied head shares it.
    fn embed(&mut self, table: &Self::Linear, first_id: u32, ids: &[u32], out: &mut Self::Tensor);
    /// Sums `x[..rows]` over the TP group in place. **Collective: all ranks of the TP group.**
    fn all_reduce(&mut self, collective: &dyn Collective, x: &mut Self::Tensor, rows: usize) -> Result<()>;
    /// Makes ready to pass activations to and from the neighbours of `place`, where the device needs that; gives why it
    /// takes a slower way than it knows, where it does.
    /// **Collective: all ranks of the replica, after [`Self::all_reduce`] works and before the pool is sized.**
    fn join_pipeline(&mut self, _: &mut dyn ProcessGroup, _: &PipelinePlace) -> Result<Option<String>> {
        Ok(None)
    }
    /// Bytes of the device's memory that [`Self::join_pipeline`] takes on stages after the first, for streams of
    /// `rows_max` rows of `cols` elements.
    fn pipeline_bytes(_stages: usize, _rows_max: usize, _cols: usize, _dtype: DType) -> usize {
        0
    }
    /// Sends `x[..rows]` to stage `to` of a pipeline, which [receives](Self::recv) it; goes on before that stage has.
    /// Errors before [`Self::join_pipeline`] on devices that need it.
    fn send(&mut self, _: &dyn Collective, _x: &Self::Tensor, _rows: usize, _to: usize) -> Result<()> {
        Err(BackendError::no_pipeline(&self.describe()))
    }
    /// `x[..rows]` from stage `from` of a pipeline, for which the device or the caller waits.
    fn recv(&mut self, _: &dyn Collective, _x: &mut Self::Tensor, _rows: usize, _from: usize) -> Result<()> {
        Err(BackendError::no_pipeline(&self.describe()))
    }
    /// Whether operations run after the call that queues them has returned, so that a caller may queue a step before the
    /// one before it has ended.
    fn runs_behind(&self) -> bool {
        false
    }
    /// What is queued from here on is a step, as far as its time counts: what it waits for is not.
    fn begin_step(&mut self) -> Result<()> {
        Ok(())
    }
    /// The step that began last is queued.
    fn end_step(&mut self) -> Result<()> {
        Ok(())
    }
    /// Whether [`Self::await_step`] would not wait.
    fn step_has_ended(&mut self) -> bool {
        true
    }
    /// Waits for the oldest step that is queued so; gives how long the device computed it, `None` where operations run when
    /// they are called, so that the caller knows. Errors as [`Self::read`].
    fn await_step(&mut self) -> Result<Option<Duration>> {
        Ok(None)
    }
    /// `out = x / sqrt(mean(x²) + eps) * weight` per row.
    fn rms_norm(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Vector,
        eps: f32,
        rows: usize,
        out: &mut Self::Tensor,
    );
    /// `out = x · Wᵀ (+ bias)`.
    fn matmul(
        &mut self,
        w: &Self::Linear,
        x: &Self::Tensor,
        bias: Option<&Self::Vector>,
        rows: usize,
        out: &mut Self::Tensor,
    );
    /// Per-head q/k RMSNorm (when `qk_norm` holds the two weights `[head_dim]`), rope on q and k by
    /// absolute position, and the store of k and v into their slots of layer `layer`. q is rotated
    /// in place inside `qkv`. The table's frequency `i` turns the elements `i` and
    /// `i + rotary_dim/2` of each head; those from `rotary_dim` on pass through.
    fn rope_and_store(
        &mut self,
        args: RopeAndStore<'_, Self>,
        qkv: &mut Self::Tensor,
        cache: &mut Self::KvCache,
    );
    /// Causal grouped-query attention of q (the first columns of `qkv`) over the cached positions
    /// `0..=p` of each token's request, `p` its own, or the last `window` of them. Positions out of
    /// sight are neither read nor walked: their pages may be gone.
    /// `out`: `[tokens, local_heads*head_dim]`.
    fn attention(
        &mut self,
        args: Attention<'_>,
        qkv: &Self::Tensor,
        cache: &Self::KvCache,
        out: &mut Self::Tensor,
    );
    /// `out = act(x[.., ..n]) * x[.., n..]` for the fused gate|up activation of width `2n`.
    fn gated_activation(
        &mut self,
        activation: Activation,
        gate_up: &Self::Tensor,
        rows: usize,
        out: &mut Self::Tensor,
    );
    /// [`matmul`](Self::matmul) of a fused gate|up matrix, then [`gated_activation`](Self::gated_activation) of its
    /// result: a device may do both at once. `buffers` are room for the product, `[rows, 2n]`, whose content means
    /// nothing afterwards, and the result, `[rows, n]`.
    fn gated_matmul(
        &mut self,
        activation: Activation,
        (w, bias): (&Self::Linear, Option<&Self::Vector>),
        x: &Self::Tensor,
        rows: usize,
        buffers: (&mut Self::Tensor, &mut Self::Tensor),
    ) {
        let (gate_up, out) = buffers;
        self.matmul(w, x, bias, rows, gate_up);
        self.gated_activation(activation, gate_up, rows, out);
    }
    /// `x *= factor`.
    fn scale(&mut self, x: &mut Self::Tensor, factor: f32, rows: usize);
    /// `x = cap * tanh(x / cap)`.
    fn softcap(&mut self, x: &mut Self::Tensor, cap: f32, rows: usize);
    /// A mixture of gated MLPs over `x` `[rows, hidden]`. Each token takes the experts of largest
    /// softmax probability (over all experts, f32; equal ones by ascending id), weighted by it or by
    /// its share among them. `out` `[rows, hidden]` receives this rank's partial sums, to be reduced
    /// like those of a down projection.
    ///
    /// Determinism: within a leaf of the down projection experts add up in ascending id, then
    /// leaves as in [`Backend::matmul`]; bit-equal for a token whatever the batch, and over tp 1, 2,
    /// 4, 8.
    fn moe(
        &mut self,
        args: MoeArgs<'_, Self>,
        experts: &Self::Experts,
        x: &Self::Tensor,
        rows: usize,
        buffers: (&mut Self::MoeWorkspace, &mut Self::Tensor), // (work, out)
    );
    /// The end of every half layer: `partial` summed over the TP group, bias added once, normed if
    /// the family asks (`post_norm`), `residual += sum`, `out = rms_norm(residual)`. `partial` is
    /// left undefined. One operation so that a device may fuse it.
    /// **Collective: all ranks of the TP group, in the same order.**
    fn reduce_add_norm(
        &mut self,
        collective: &dyn Collective,
        args: ReduceAddNorm<'_, Self>,
        partial: &mut Self::Tensor,
        streams: (&mut Self::Tensor, &mut Self::Tensor), // (residual, out)
        rows: usize,
    ) -> Result<()>;
    /// `out[i] = x[rows[i]]`.
    fn gather_rows(&mut self, x: &Self::Tensor, rows: &[u32], out: &mut Self::Tensor);
    /// The first `rows` rows as host memory, row-major. Waits for the device; errors with whatever failed
    /// there since the last call that could say so.
    fn read<'a>(&mut self, x: &'a Self::Tensor, rows: usize) -> Result<std::borrow::Cow<'a, [f32]>>;

    // ---- tokens chosen on the device --------------------------------------------------------

    /// Whether [`Backend::choose`] chooses such rows.
    fn can_choose(&self, _row: &RowChoice) -> bool {
        false
    }
    /// Queues the choice of a token for each of the first rows of `logits` `[rows, local_vocab]` (a tensor of
    /// [`Backend::tensor_f32`], which is changed as the choice says), the same on all ranks, and its way to the host: an
    /// id, or [`NO_TOKEN`](lockstep_core::NO_TOKEN) where no logit is larger than negative infinity. A later step
    /// names the tokens by [`CHOSEN_BIT`]. Only for rows that [`Backend::can_choose`].
    /// **Collective: all ranks of the TP group.**
    fn choose(&mut self, _: &dyn Collective, _logits: &mut Self::Tensor, _choice: &Choice<'_>) -> Result<()> {
        unreachable!("only for rows that can_choose takes")
    }
    /// Waits for the tokens of the oldest [`Backend::choose`] that have not been taken; they replace `tokens`.
    /// Errors as [`Backend::read`]. At most two steps' tokens may wait to be taken.
    fn take_chosen(&mut self, _tokens: &mut Vec<TokenId>) -> Result<()> {
        unreachable!("nothing was chosen")
    }

    // ---- recorded steps ---------------------------------------------------------------------

    /// With a number, products that the device knows several ways for take each of them, timed, as they are met, and so
    /// does one of `prompt_rows` rows with the same matrix; the fastest are kept for this and later starts. Without, no
    /// longer. For start-up: ways differ in the last bits of their results.
    fn tune(&mut self, _prompt_rows: Option<usize>) -> Result<()> {
        Ok(())
    }

    /// How many rows the recording has that a decode step of `rows` rows takes, the missing ones as padding;
    /// `None` where such a step is not recorded.
    fn recorded_rows(&self, _rows: usize) -> Option<usize> {
        None
    }
    /// The page that padding rows write to and read from; no request holds it.
    fn padding_page(&self, _cache: &Self::KvCache) -> PageId {
        unreachable!("only where steps are recorded")
    }
    /// Brings the numbers of the next step to the device, where its operations, queued or replayed, find them.
    fn stage(&mut self, _step: &ForwardInput<'_>) -> Result<()> {
        Ok(())
    }
    /// Records what `queue` queues, without running it: the operations of a step whose numbers have been
    /// staged, and of which one with as many rows has run before. `None` where steps are not recorded.
    fn record<E: From<BackendError>>(
        &mut self,
        _queue: impl FnOnce(&mut Self) -> std::result::Result<(), E>,
    ) -> std::result::Result<Option<Self::Recording>, E> {
        Ok(None)
    }
    /// Queues a recording for the numbers staged last. The caller keeps all tensors, weights and caches that it
    /// names. False, and nothing is queued, when it is out of date: record again.
    fn replay(&mut self, _recording: &Self::Recording) -> Result<bool> {
        Ok(false)
    }

    /// Fills K and V of these pages with NaN in every layer, so that a read of a page that was given
    /// back, or of a slot that was never written, shows in the logits. For debug builds and tests.
    fn poison(&mut self, cache: &mut Self::KvCache, pages: &[PageId]);
}

/// Arguments of [`Backend::rope_and_store`].
pub struct RopeAndStore<'a, B: Backend + ?Sized> {
    /// Layer of the cache to write, local index.
    pub layer: usize,
    /// Head counts.
    pub shape: QkvShape,
    /// Norm weights of q and k, if the family has them.
    pub qk_norm: Option<(&'a B::Vector, &'a B::Vector)>,
    /// cos/sin.
    pub rope: &'a B::RopeTable,
    /// Absolute position of each token, `[tokens]`.
    pub positions: &'a [u32],
    /// Slot of each token, `page * page_size + offset`, `[tokens]`.
    pub slots: &'a [u32],
}

/// Arguments of [`Backend::attention`].
pub struct Attention<'a> {
    /// Layer of the cache to read, local index.
    pub layer: usize,
    /// Head counts.
    pub shape: QkvShape,
    /// Which tokens belong to which request and where their pages are.
    pub batch: AttentionBatch<'a>,
    /// Multiplies the dot products.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Positions that a token sees, its own included; `None` for all before it.
    pub window: Option<usize>,
}
