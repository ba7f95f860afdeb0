//! The CUDA backend: one GPU a rank, own kernels compiled where they run, cuBLASLt for matrix products.
//!
//! Weights, activations, K and V are bf16 (or f16, or f32, the test mode); sums, norms, softmax, logits and
//! router logits are f32. Nothing of CUDA is needed to build or to start: the driver, NVRTC and cuBLASLt
//! are opened when the first backend is made, and a machine without them gets one sentence.
//!
//! **Invariants**
//! * Everything runs on one stream, in call order; the host waits in [`Backend::read`] and
//!   [`Backend::take_chosen`] only.
//! * Memory is taken at start-up; the lists of a step grow to the largest step and then stay. When one moves,
//!   recordings are made anew.
//! * Results are repeatable for the same step, and close to the CPU's (`selftest` holds every operation
//!   to a bound); they are not bit-equal across batches.
//! * An operation that cannot return an error keeps it; the next one that can reports it.
//!
//! Reading order: `driver`, `device`, `memory`, `compile`, `launch`, `tensor`, `gemm`, `few_rows`, `products`, `attention`, `ring`, `moe`,
//! `peers`, `reduce`, `stages`, `step_times`, `sample`, `choose`, `recording`; [`selftest`] compares with the CPU, `bench` times sums over ranks.

mod attention;
mod bench;
mod choose;
mod compile;
mod device;
mod driver;
mod few_rows;
mod gemm;
mod launch;
mod memory;
mod moe;
mod peers;
mod product_times;
mod products;
mod recording;
mod reduce;
mod ring;
mod sample;
pub mod selftest;
pub mod speed;
mod stages;
mod step_times;
pub mod survey;
mod tensor;

pub use attention::CudaKvCache;
pub use bench::{Sample, SumSize};
pub use compile::kernel_cache;
pub use moe::{CudaExperts, CudaMoeWorkspace};
pub use peers::{PeerMode, SUM_RANKS};
pub use recording::CudaRecording;
pub use tensor::{CudaLinear, CudaRopeTable, CudaTensor, CudaVector};

use crate::{
    Attention, Backend, BackendError, Choice, ExpertWeights, ForwardInput, KvLayout, LinearSpec, MoeArgs,
    MoeShape, PipelinePlace, ReduceAddNorm, Result, RopeAndStore, RowChoice,
};
use attention::AttentionStep;
use choose::Chooser;
use compile::Source;
use device::Device;
use driver::Address;
use launch::{Args, Grid, Kernel, Module};
use lockstep_comm::collective::Collective;
use lockstep_comm::group::ProcessGroup;
use lockstep_core::config::{Activation, RopeFrequencies};
use lockstep_core::{DType, PageId, TokenId};
use memory::{List, Staging};
use peers::{DataPlane, Peers};
use products::Products;
use stages::Stages;
use std::borrow::Cow;
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;
use step_times::StepTimes;

/// Widest row that the norm kernels hold: 1024 threads of two parts of 8.
const NORM_COLS_MAX: usize = 16_384;

/// Which GPU, and in which type it computes.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Index among the GPUs of this machine.
    pub gpu: usize,
    /// Type of weights, activations, K and V.
    pub dtype: DType,
    /// How long to wait for a step, where another rank may keep it from ending; `None` for ever.
    pub patience: Option<Duration>,
}

/// The [`Backend`] of one GPU. Used from the thread that made it.
pub struct CudaBackend {
    device: Rc<Device>,
    dtype: DType,
    kernels: Kernels,
    products: Products,
    staging: RefCell<Staging>,
    attention: AttentionStep,
    lists: StepLists,
    chooser: Chooser,
    /// The other ranks' memory, where they lend it.
    peers: Option<Box<Peers>>,
    /// The stages before and after, where there are any.
    stages: Option<Stages>,
    step_times: StepTimes,
}

/// What every model needs.
struct Kernels {
    embed: Kernel,
    gather_rows: Kernel,
    scale: Kernel,
    softcap: Kernel,
    gated_activation: Kernel,
    poison: Kernel,
    rms_norm: Kernel,
    add_norm: Kernel,
    rope_and_store: Kernel,
}

impl Kernels {
    fn load(device: &Rc<Device>, pointwise: &Module, dtype: DType) -> Result<Self> {
        let norm = Source::Norm.load(device, dtype)?;
        Ok(Self {
            embed: pointwise.kernel("embed", 0)?,
            gather_rows: pointwise.kernel("gather_rows", 0)?,
            scale: pointwise.kernel("scale", 0)?,
            softcap: pointwise.kernel("softcap", 0)?,
            gated_activation: pointwise.kernel("gated_activation", 0)?,
            poison: pointwise.kernel("poison", 0)?,
            rms_norm: norm.kernel("rms_norm", 0)?,
            add_norm: norm.kernel("add_norm", 0)?,
            rope_and_store: Source::Rope.load(device, dtype)?.kernel("rope_and_store", 0)?,
        })
    }
}

/// The numbers of the current step on the device.
#[derive(Default)]
struct StepLists {
    ids: List<u32>,
    positions: List<u32>,
    slots: List<u32>,
    rows: List<u32>,
}

impl CudaBackend {
    /// Opens the GPU and compiles or loads the kernels.
    ///
    /// Errors with one sentence on a machine without driver, GPU or libraries.
    pub fn new(options: CudaOptions) -> Result<Self> {
        let device = Rc::new(Device::open(options.gpu, options.patience)?);
        Source::compile_missing(&Source::of_every_model(options.dtype), &device.architecture());
        let pointwise = Source::Pointwise.load(&device, options.dtype)?;
        Ok(Self {
            dtype: options.dtype,
            kernels: Kernels::load(&device, &pointwise, options.dtype)?,
            chooser: Chooser::new(&device, &pointwise)?,
            products: Products::new(&device, options.dtype)?,
            staging: RefCell::new(Staging::new(&device)?),
            attention: AttentionStep::new(&device)?,
            lists: StepLists::default(),
            peers: None,
            stages: None,
            step_times: StepTimes::default(),
            device,
        })
    }

    /// Bytes of device memory that nobody has taken.
    pub fn free_bytes(&self) -> Result<usize> {
        Ok(self.device.memory()?.0)
    }

    /// Waits until everything queued has run. Errors with the first failure.
    pub fn wait(&self) -> Result<()> {
        self.device.wait()
    }

    /// Makes the device's copy of `values` in the list that `list` names.
    fn set(&mut self, list: fn(&mut StepLists) -> &mut List<u32>, values: &[u32]) -> Result<Address> {
        list(&mut self.lists).set(&self.device, self.staging.get_mut(), values)
    }

    /// [`Self::set`] for operations that cannot return an error.
    fn upload(&mut self, list: fn(&mut StepLists) -> &mut List<u32>, values: &[u32]) -> Option<Address> {
        match self.set(list, values) {
            Ok(address) => Some(address),
            Err(error) => {
                self.device.keep(Err(error));
                None
            }
        }
    }

    /// Copies `values` into the first rows of a tensor, rounded to its type.
    pub(crate) fn write(&mut self, tensor: &mut CudaTensor, values: &[f32]) -> Result<()> {
        let bytes = tensor::narrowed(values, tensor.dtype);
        assert!(bytes.len() <= tensor.buffer.bytes(), "the values fit the tensor");
        // SAFETY: by the assertion.
        unsafe { self.staging.get_mut().copy_in(tensor.buffer.address(), &bytes) }
    }

    /// The largest of the first `cols` logits of each row, and its column, on the host.
    pub(crate) fn best_logits(
        &mut self,
        x: &CudaTensor,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<(f32, u32)>> {
        let pairs = self.chooser.queue_best(x.rows(rows, x.cols, DType::F32), rows, x.cols, cols)?;
        // SAFETY: `queue_best` has a pair for each row.
        let copied = unsafe { self.staging.get_mut().copy_out(pairs, rows * size_of::<[u32; 2]>())? };
        let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let pair = |pair: &[u8; 8]| (f32::from_bits(word(&pair[..4])), word(&pair[4..]));
        Ok(copied.as_chunks::<8>().0.iter().map(pair).collect())
    }
}

/// Ends the process at once, without the handlers of the CUDA libraries: those wait for kernels, one of
/// which may wait for a rank that has stopped. The system takes the device's memory back.
pub fn exit_process(code: i32) -> ! {
    // SAFETY: runs nothing of this process any more.
    unsafe { libc::_exit(code) }
}

/// Threads of a block that holds one row of a norm.
fn norm_threads(cols: usize) -> usize {
    assert!(cols <= NORM_COLS_MAX, "{cols} columns of a norm, of at most {NORM_COLS_MAX}");
    cols.div_ceil(tensor::VECTOR).next_multiple_of(32).min(1024)
}

impl Backend for CudaBackend {
    type Tensor = CudaTensor;
    type Vector = CudaVector;
    type Linear = CudaLinear;
    type KvCache = CudaKvCache;
    type RopeTable = CudaRopeTable;
    type Experts = CudaExperts;
    type MoeWorkspace = CudaMoeWorkspace;
    type Recording = CudaRecording;

    fn describe(&self) -> String {
        format!("cuda {} {}", self.device.name, self.dtype.name())
    }

    fn tensor(&self, rows_max: usize, cols: usize) -> Result<CudaTensor> {
        CudaTensor::new(&self.device, rows_max, cols, self.dtype)
    }

    fn tensor_f32(&self, rows_max: usize, cols: usize) -> Result<CudaTensor> {
        CudaTensor::new(&self.device, rows_max, cols, DType::F32)
    }

    fn vector(&self, values: &[f32]) -> Result<CudaVector> {
        CudaVector::new(&self.device, &mut self.staging.borrow_mut(), values, self.dtype)
    }

    fn linears(&self, specs: &[LinearSpec]) -> Result<Vec<CudaLinear>> {
        CudaLinear::all(&self.device, specs, self.dtype)
    }

    fn pack_rows(&self, linear: &mut CudaLinear, first_row: usize, data: &[u8]) {
        self.device.keep(linear.pack(&mut self.staging.borrow_mut(), first_row, data));
    }

    fn linear_bytes(&self, linear: &CudaLinear) -> usize {
        linear.buffer.bytes()
    }

    fn kv_dtype(&self) -> DType {
        self.dtype
    }

    fn kv_cache(&self, layout: KvLayout) -> Result<CudaKvCache> {
        assert_eq!(layout.dtype, self.dtype, "type of K and V");
        CudaKvCache::new(&self.device, layout)
    }

    fn rope_table(&self, frequencies: &RopeFrequencies, max_position: usize) -> Result<CudaRopeTable> {
        CudaRopeTable::new(&self.device, &mut self.staging.borrow_mut(), frequencies, max_position)
    }

    fn experts(&self, experts: Vec<ExpertWeights<Self>>) -> Result<CudaExperts> {
        Ok(CudaExperts::new(experts))
    }

    fn moe_workspace(&self, shape: MoeShape) -> Result<CudaMoeWorkspace> {
        CudaMoeWorkspace::new(&self.device, shape, self.dtype)
    }

    fn moe_workspace_bytes(shape: &MoeShape) -> usize {
        CudaMoeWorkspace::bytes(shape)
    }

    fn embed(&mut self, table: &CudaLinear, first_id: u32, ids: &[u32], out: &mut CudaTensor) {
        let spec = &table.spec;
        let (to, from) = (out.rows(ids.len(), spec.in_features, self.dtype), table.buffer.address());
        let Some(list) = self.upload(|lists| &mut lists.ids, ids) else { return };
        let args = Args::default().address(from).address(list).address(self.chooser.chosen());
        let args = args.int(first_id as usize);
        let args = args.int(spec.out_features).address(to).int(spec.in_features);
        // SAFETY: `out` holds a row for each id; ids outside the table read nothing.
        unsafe { self.kernels.embed.launch(Grid::rows(ids.len(), 128), args) };
    }

    fn all_reduce(&mut self, collective: &dyn Collective, x: &mut CudaTensor, rows: usize) -> Result<()> {
        self.reduce(collective, x, rows)
    }

    fn join_pipeline(
        &mut self,
        replica: &mut dyn ProcessGroup,
        place: &PipelinePlace,
    ) -> Result<Option<String>> {
        let (stages, refusal) = Stages::connect(&self.device, self.dtype, replica, place)?;
        self.stages = Some(stages);
        Ok(refusal)
    }

    fn pipeline_bytes(stages: usize, rows_max: usize, cols: usize, dtype: DType) -> usize {
        Stages::inbox_bytes(stages, rows_max, cols, dtype)
    }

    fn send(&mut self, pipeline: &dyn Collective, x: &CudaTensor, rows: usize, to: usize) -> Result<()> {
        let stream = (x.rows(rows, x.cols, self.dtype), x.bytes(rows));
        let stages = self.stages.as_mut().ok_or_else(|| BackendError::no_pipeline("this rank"))?;
        // SAFETY: the tensor holds as many bytes.
        unsafe { stages.send(self.staging.get_mut(), pipeline, stream, to)? };
        self.device.report()
    }

    fn recv(
        &mut self,
        pipeline: &dyn Collective,
        x: &mut CudaTensor,
        rows: usize,
        from: usize,
    ) -> Result<()> {
        let stream = (x.rows(rows, x.cols, self.dtype), x.bytes(rows));
        let stages = self.stages.as_mut().ok_or_else(|| BackendError::no_pipeline("this rank"))?;
        // SAFETY: the tensor holds as many bytes.
        unsafe { stages.recv(self.staging.get_mut(), pipeline, stream, from)? };
        self.device.report()
    }

    fn runs_behind(&self) -> bool {
        true
    }

    fn begin_step(&mut self) -> Result<()> {
        self.step_times.begin(&self.device)
    }

    fn end_step(&mut self) -> Result<()> {
        self.step_times.end()
    }

    fn step_has_ended(&mut self) -> bool {
        self.step_times.has_ended(&self.device)
    }

    fn await_step(&mut self) -> Result<Option<Duration>> {
        self.step_times.wait(&self.device)
    }

    fn rms_norm(&mut self, x: &CudaTensor, weight: &CudaVector, eps: f32, rows: usize, out: &mut CudaTensor) {
        let cols = x.cols;
        let args = Args::default().address(x.rows(rows, cols, self.dtype)).address(weight.exact(cols));
        let args = args.float(eps).address(out.rows(rows, cols, self.dtype)).int(cols);
        // SAFETY: both tensors hold `rows` rows of `cols` columns.
        unsafe { self.kernels.rms_norm.launch(Grid::rows(rows, norm_threads(cols)), args) };
    }

    fn matmul(
        &mut self,
        w: &CudaLinear,
        x: &CudaTensor,
        bias: Option<&CudaVector>,
        rows: usize,
        out: &mut CudaTensor,
    ) {
        let result = self.products.matmul((w, bias), x, rows, out);
        self.device.keep(result);
    }

    fn rope_and_store(
        &mut self,
        args: RopeAndStore<'_, Self>,
        qkv: &mut CudaTensor,
        cache: &mut CudaKvCache,
    ) {
        let (shape, tokens) = (&args.shape, args.positions.len());
        let all_heads = shape.local_heads + 2 * shape.local_kv_heads;
        assert_eq!(args.slots.len(), tokens, "a slot for each token");
        let (slots_max, positions_max) =
            ((cache.layout().num_pages + 1) * cache.layout().page_size, args.rope.positions);
        assert!(args.slots.iter().all(|slot| (*slot as usize) < slots_max), "slots lie inside the pool");
        assert!(
            args.positions.iter().all(|p| (*p as usize) < positions_max),
            "positions lie inside the table"
        );
        let x = qkv.rows(tokens, all_heads * shape.head_dim, self.dtype);
        let (k, v) = cache.layer(args.layer, shape);
        let Some(positions) = self.upload(|lists| &mut lists.positions, args.positions) else { return };
        let Some(slots) = self.upload(|lists| &mut lists.slots, args.slots) else { return };
        let norms = args.qk_norm.map(|(q, k)| (q.exact(shape.head_dim), k.exact(shape.head_dim)));
        let list = Args::default().address(x).optional(norms.map(|n| n.0)).optional(norms.map(|n| n.1));
        let list = list.address(args.rope.buffer.address()).address(positions).address(slots);
        let list = list.address(k).address(v).int(shape.local_heads).int(shape.local_kv_heads);
        let list = list.int(shape.head_dim).int(args.rope.half).float(shape.norm_eps);
        let grid = Grid { blocks: [all_heads.div_ceil(8), tokens, 1], threads: 256 };
        // SAFETY: tokens, slots and positions lie inside tensor, pool and table by the checks above.
        unsafe { self.kernels.rope_and_store.launch(grid, list) };
    }

    fn attention(
        &mut self,
        args: Attention<'_>,
        qkv: &CudaTensor,
        cache: &CudaKvCache,
        out: &mut CudaTensor,
    ) {
        let result = self.attention.run(self.staging.get_mut(), &args, qkv, cache, out);
        self.device.keep(result);
    }

    fn gated_activation(
        &mut self,
        activation: Activation,
        gate_up: &CudaTensor,
        rows: usize,
        out: &mut CudaTensor,
    ) {
        let inner = out.cols;
        let (from, to) = (gate_up.rows(rows, 2 * inner, self.dtype), out.rows(rows, inner, self.dtype));
        let args = Args::default().address(from).address(to).int(inner).int(moe::activation_code(activation));
        let grid = Grid { blocks: [inner.div_ceil(256 * tensor::VECTOR), rows, 1], threads: 256 };
        // SAFETY: both tensors have the sizes that were checked.
        unsafe { self.kernels.gated_activation.launch(grid, args) };
    }

    fn gated_matmul(
        &mut self,
        activation: Activation,
        matrix: (&CudaLinear, Option<&CudaVector>),
        x: &CudaTensor,
        rows: usize,
        (gate_up, out): (&mut CudaTensor, &mut CudaTensor),
    ) {
        let code = moe::activation_code(activation);
        match self.products.gated_matmul(code, matrix, x, rows, (gate_up, out)) {
            Ok(true) => {}
            Ok(false) => self.gated_activation(activation, gate_up, rows, out),
            Err(error) => self.device.keep(Err(error)),
        }
    }

    fn scale(&mut self, x: &mut CudaTensor, factor: f32, rows: usize) {
        let count = rows * x.cols;
        let args = Args::default().address(x.rows(rows, x.cols, self.dtype)).float(factor).long(count);
        // SAFETY: the tensor holds `count` elements.
        unsafe { self.kernels.scale.launch(Grid::elements(count), args) };
    }

    fn softcap(&mut self, x: &mut CudaTensor, cap: f32, rows: usize) {
        let count = rows * x.cols;
        let args = Args::default().address(x.rows(rows, x.cols, DType::F32)).float(cap).long(count);
        // SAFETY: the tensor holds `count` elements of f32.
        unsafe { self.kernels.softcap.launch(Grid::elements(count), args) };
    }

    fn moe(
        &mut self,
        args: MoeArgs<'_, Self>,
        experts: &CudaExperts,
        x: &CudaTensor,
        rows: usize,
        buffers: (&mut CudaMoeWorkspace, &mut CudaTensor),
    ) {
        let (work, out) = buffers;
        work.run(&args, experts, x, rows, out);
    }

    fn reduce_add_norm(
        &mut self,
        collective: &dyn Collective,
        args: ReduceAddNorm<'_, Self>,
        partial: &mut CudaTensor,
        streams: (&mut CudaTensor, &mut CudaTensor),
        rows: usize,
    ) -> Result<()> {
        self.end_half_layer(collective, &args, (partial, streams.0, streams.1), rows)
    }

    fn gather_rows(&mut self, x: &CudaTensor, rows: &[u32], out: &mut CudaTensor) {
        let cols = x.cols;
        let from = x.rows(x.rows_max, cols, self.dtype);
        let to = out.rows(rows.len(), cols, self.dtype);
        assert!(rows.iter().all(|row| (*row as usize) < x.rows_max), "rows lie inside the tensor");
        let Some(list) = self.upload(|lists| &mut lists.rows, rows) else { return };
        let args = Args::default().address(from).address(list).address(to).int(cols);
        // SAFETY: rows of both tensors were checked.
        unsafe { self.kernels.gather_rows.launch(Grid::rows(rows.len(), 128), args) };
    }

    fn can_choose(&self, _row: &RowChoice) -> bool {
        true
    }

    fn choose(
        &mut self,
        collective: &dyn Collective,
        logits: &mut CudaTensor,
        choice: &Choice<'_>,
    ) -> Result<()> {
        let from = logits.rows(choice.rows.len(), choice.local_vocab, DType::F32);
        let plane = DataPlane { peers: self.peers.as_deref(), collective, device: &self.device };
        self.chooser.queue(self.staging.get_mut(), &plane, from, choice)
    }

    fn take_chosen(&mut self, tokens: &mut Vec<TokenId>) -> Result<()> {
        self.chooser.take(tokens)
    }

    fn tune(&mut self, prompt_rows: Option<usize>) -> Result<()> {
        self.products.tune(prompt_rows)
    }

    fn recorded_rows(&self, rows: usize) -> Option<usize> {
        // What another thread does before it replays its own recording may wait for the context they share.
        recording::recorded_rows(rows).filter(|_| !self.device.shares_context())
    }

    fn padding_page(&self, cache: &CudaKvCache) -> PageId {
        cache.padding_page()
    }

    fn stage(&mut self, step: &ForwardInput<'_>) -> Result<()> {
        self.set(|lists| &mut lists.ids, step.token_ids)?;
        self.set(|lists| &mut lists.positions, step.positions)?;
        self.set(|lists| &mut lists.slots, step.slots)?;
        self.set(|lists| &mut lists.rows, step.logit_tokens)?;
        self.attention.stage(self.staging.get_mut(), &step.batch, self.dtype != DType::F32)
    }

    fn record<E: From<BackendError>>(
        &mut self,
        queue: impl FnOnce(&mut Self) -> std::result::Result<(), E>,
    ) -> std::result::Result<Option<CudaRecording>, E> {
        let device = Rc::clone(&self.device);
        CudaRecording::of(&device, || queue(self)).map(Some)
    }

    fn replay(&mut self, recording: &CudaRecording) -> Result<bool> {
        if !recording.is_usable() {
            return Ok(false);
        }
        recording.replay()?;
        Ok(true)
    }

    fn read<'a>(&mut self, x: &'a CudaTensor, rows: usize) -> Result<Cow<'a, [f32]>> {
        let bytes = x.bytes(rows);
        // SAFETY: the tensor holds that many bytes.
        let copied = unsafe { self.staging.get_mut().copy_out(x.buffer.address(), bytes)? };
        Ok(Cow::Owned(tensor::widened(copied, x.dtype)))
    }

    fn poison(&mut self, cache: &mut CudaKvCache, pages: &[PageId]) {
        cache.poison(&self.kernels.poison, pages);
    }
}
