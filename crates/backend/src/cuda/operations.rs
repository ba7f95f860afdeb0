//! The operations of a forward pass, on the GPU: what each asks of its arguments, and the kernel it queues.
//!
//! An operation with state of its own (products, attention, sums, stages, choices) is a line here and a module beside.

use super::launch::{Args, Grid};
use super::peers::DataPlane;
use super::stages::Stages;
use super::{
    CudaBackend, CudaExperts, CudaKvCache, CudaLinear, CudaMoeWorkspace, CudaRecording, CudaRopeTable,
    CudaTensor, CudaVector, moe, norm_threads, recording, tensor,
};
use crate::{
    Attention, Backend, BackendError, Choice, ExpertWeights, ForwardInput, KvLayout, LinearSpec, MoeArgs,
    MoeShape, PipelinePlace, ReduceAddNorm, Result, RopeAndStore, RowChoice,
};
use lockstep_comm::collective::Collective;
use lockstep_comm::group::ProcessGroup;
use lockstep_core::config::{Activation, RopeFrequencies};
use lockstep_core::{DType, PageId, TokenId};
use std::borrow::Cow;
use std::rc::Rc;
use std::time::Duration;

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
