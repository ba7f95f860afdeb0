//! The CPU backend: f32 activations, weights widened in registers, own threads, own kernels.
//!
//! Kernels are written once over sixteen lanes ([`simd`]) and run as AVX-512, AVX2 or portable
//! code with the same bits. Each module states its formula; together they give the promise of
//! `docs/architecture.md`, "Numbers": a row's result depends on nothing but the row, the weights and
//! the positions before it.
//!
//! **Invariants**
//! * Memory for an operation exists before it runs: activations, pool and workspaces are made at
//!   start-up. The list of attention tasks grows once to the largest step.
//! * Only this folder holds unsafe kernels of the CPU. A panic in one aborts the process.
//!
//! Reading order: [`simd`], `pool`, `memory`, `packed`, `matmul`, `codes`, `pointwise`, `activation`,
//! `kv_cache`, `attention`, `moe`; [`probe`] measures the machine, [`numa`] finds its nodes.

// Kernels index lanes and tiles by number; iterator adapters would put vector operations into
// closures, which do not inherit the target features.
#![allow(clippy::needless_range_loop)]

mod activation;
mod ahead;
mod attention;
mod codes;
mod exp;
mod kv_cache;
mod matmul;
mod memory;
mod moe;
pub mod numa;
mod packed;
mod pointwise;
mod pool;
pub mod probe;
mod simd;
mod tanh;
mod tensor;
#[cfg(test)]
mod tests;

pub use kv_cache::{CpuKvCache, CpuRopeTable};
pub use moe::{CpuExperts, CpuMoeWorkspace};
pub use packed::PackedLinear;
pub use simd::Isa;
pub use tensor::{CpuTensor, CpuVector};

use crate::{
    Attention, Backend, Bands, ExpertWeights, KvLayout, LinearSpec, MoeArgs, MoeShape, PackedBytes,
    ReadPacked, ReduceAddNorm, Result, RopeAndStore,
};
use lockstep_comm::collective::Collective;
use lockstep_core::config::{Activation, RopeFrequencies};
use lockstep_core::{PageId, WeightType};
use std::borrow::Cow;
use std::cell::RefCell;
use tensor::RowsOut;

/// How the backend of one rank runs.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Compute threads of this rank, the calling thread included; 0 means one per core.
    pub threads: usize,
    /// The NUMA node that the calling thread and the others keep to; `None` leaves placement to the system.
    pub placement: Option<numa::Placement>,
    /// Instruction set; `None` takes the fastest of this machine.
    pub isa: Option<Isa>,
}

/// The [`Backend`] of one CPU rank. Used from the thread that made it.
pub struct CpuBackend {
    isa: Isa,
    /// The NUMA node that it keeps to.
    node: Option<usize>,
    pool: pool::ThreadPool,
    arena: memory::Arena,
    scratch: tensor::Scratch,
    attention_plan: attention::Plan,
    /// Shared by all products; [`Backend::tensor`] makes room for its tensors.
    coded_inputs: RefCell<codes::CodedInputs>,
}

impl CpuBackend {
    /// Binds the calling thread to its NUMA node if it has one, starts the threads and makes the workspace (under 1 MiB a
    /// thread).
    ///
    /// Errors when the workspace cannot be mapped. Panics when this machine cannot run
    /// `options.isa`.
    pub fn new(options: CpuOptions) -> Result<Self> {
        let isa = options.isa.unwrap_or_else(Isa::detect);
        assert!(
            isa.is_supported(),
            "this machine cannot run {}; use one of {:?}",
            isa.name(),
            Isa::available()
        );
        let threads = if options.threads == 0 { available_cores() } else { options.threads };
        // Before anything is mapped or started: threads inherit it, and memory is where it is first touched.
        options.placement.iter().for_each(numa::Placement::bind);
        let node = options.placement.map(|placement| placement.node);
        let pool = pool::ThreadPool::new(threads);
        let arena = memory::Arena::default();
        // A mixture's scratch covers the matrix product's.
        let scratch = tensor::Scratch::new(&arena, threads, moe::SCRATCH_LEN.max(attention::SCRATCH_LEN))?;
        let coded_inputs = RefCell::new(codes::CodedInputs::new()?);
        Ok(Self { isa, node, pool, arena, scratch, attention_plan: attention::Plan::new()?, coded_inputs })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// A product, its activations rounded first where the matrix has codes.
    fn product(
        &mut self,
        w: &PackedLinear,
        x: &CpuTensor,
        bias: Option<&CpuVector>,
        rows: usize,
        (gate, out): (Option<Activation>, RowsOut<'_>),
    ) {
        let (isa, pool, x) = (self.isa, &self.pool, x.view(rows));
        let codes = match w.spec().weight_type {
            WeightType::Float(_) => None,
            WeightType::Coded(layout) => Some(self.coded_inputs.get_mut().fill((isa, pool), x, layout)),
        };
        let bias = bias.map(CpuVector::values);
        let product = matmul::Matmul { isa, weights: w, x, codes, x_rows: None, bias, rows, gate, out };
        product.run(pool, self.scratch.view());
    }
}

/// Cores this process may use.
fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Vector = CpuVector;
    type Linear = PackedLinear;
    type KvCache = CpuKvCache;
    type RopeTable = CpuRopeTable;
    type Experts = CpuExperts;
    type MoeWorkspace = CpuMoeWorkspace;
    type Recording = std::convert::Infallible;

    const TAKES_CODES: bool = true;

    const PACKED_VERSION: Option<u32> = Some(packed::VERSION);

    fn describe(&self) -> String {
        let node = self.node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
        format!("cpu {} x{}{node}", self.isa.name(), self.threads())
    }

    fn tensor(&self, rows_max: usize, cols: usize) -> Result<CpuTensor> {
        self.coded_inputs.borrow_mut().reserve(rows_max, cols)?;
        CpuTensor::new(&self.arena, rows_max, cols)
    }

    fn vector(&self, values: &[f32]) -> Result<CpuVector> {
        Ok(CpuVector(values.to_vec()))
    }

    fn linears(&self, specs: &[LinearSpec]) -> Result<Vec<PackedLinear>> {
        specs.iter().map(|spec| PackedLinear::new(&self.arena, spec.clone())).collect()
    }

    fn pack_rows(&self, linear: &mut PackedLinear, first_row: usize, data: &[u8]) {
        linear.pack_rows(self.isa, &self.pool, first_row, data);
    }

    fn pack_bands(&self, linears: &mut [PackedLinear], bands: &Bands<'_>) {
        PackedLinear::pack_bands(linears, self.isa, &self.pool, bands);
    }

    fn packed(&self, linear: &PackedLinear) -> PackedBytes {
        linear.share()
    }

    fn fill_packed(&self, linears: &mut [PackedLinear], read: &ReadPacked<'_>) {
        PackedLinear::fill(linears, &self.pool, read);
    }

    fn linear_bytes(&self, linear: &PackedLinear) -> usize {
        linear.bytes()
    }

    fn kv_cache(&self, layout: KvLayout) -> Result<CpuKvCache> {
        CpuKvCache::new(layout)
    }

    fn rope_table(&self, frequencies: &RopeFrequencies, max_position: usize) -> Result<CpuRopeTable> {
        CpuRopeTable::new(&self.pool, frequencies, max_position)
    }

    fn experts(&self, experts: Vec<ExpertWeights<Self>>) -> Result<CpuExperts> {
        Ok(CpuExperts::new(experts))
    }

    fn moe_workspace(&self, shape: MoeShape) -> Result<CpuMoeWorkspace> {
        CpuMoeWorkspace::new(&self.arena, &mut self.coded_inputs.borrow_mut(), shape)
    }

    fn moe_workspace_bytes(shape: &MoeShape) -> usize {
        CpuMoeWorkspace::bytes(shape)
    }

    fn embed(&mut self, table: &PackedLinear, first_id: u32, ids: &[u32], out: &mut CpuTensor) {
        let spec = table.spec();
        assert_eq!(out.cols(), spec.in_features, "embeddings are as wide as out");
        let cols = spec.in_features;
        let out = out.view_mut(ids.len());
        pointwise::for_rows(&self.pool, ids.len(), cols, &|token| {
            // SAFETY: each token has its own row.
            let row = unsafe { out.part(token, 0, cols) };
            match ids[token].checked_sub(first_id).map(|local| local as usize) {
                Some(local) if local < spec.out_features => table.unpack_row(local, row),
                _ => row.fill(0.0),
            }
        });
    }

    fn all_reduce(&mut self, collective: &dyn Collective, x: &mut CpuTensor, rows: usize) -> Result<()> {
        Ok(collective.all_reduce_f32(x.rows_mut(rows))?)
    }

    fn send(&mut self, pipeline: &dyn Collective, x: &CpuTensor, rows: usize, to: usize) -> Result<()> {
        Ok(pipeline.send_f32(x.rows(rows), to)?)
    }

    fn recv(&mut self, pipeline: &dyn Collective, x: &mut CpuTensor, rows: usize, from: usize) -> Result<()> {
        Ok(pipeline.recv_f32(x.rows_mut(rows), from)?)
    }

    fn rms_norm(&mut self, x: &CpuTensor, weight: &CpuVector, eps: f32, rows: usize, out: &mut CpuTensor) {
        pointwise::rms_norm(self.isa, &self.pool, x.view(rows), &weight.0, eps, out.view_mut(rows));
    }

    fn matmul(
        &mut self,
        w: &PackedLinear,
        x: &CpuTensor,
        bias: Option<&CpuVector>,
        rows: usize,
        out: &mut CpuTensor,
    ) {
        self.product(w, x, bias, rows, (None, out.view_mut(rows)));
    }

    fn gated_matmul(
        &mut self,
        activation: Activation,
        (w, bias): (&PackedLinear, Option<&CpuVector>),
        x: &CpuTensor,
        rows: usize,
        buffers: (&mut CpuTensor, &mut CpuTensor),
    ) {
        let (gate_up, out) = buffers;
        if !matmul::can_gate(w.spec()) {
            self.matmul(w, x, bias, rows, gate_up);
            return self.gated_activation(activation, gate_up, rows, out);
        }
        self.product(w, x, bias, rows, (Some(activation), out.view_mut(rows)));
    }

    fn rope_and_store(&mut self, args: RopeAndStore<'_, Self>, qkv: &mut CpuTensor, cache: &mut CpuKvCache) {
        let store = kv_cache::StoreTokens {
            layer: args.layer,
            shape: args.shape,
            qk_norm: args.qk_norm.map(|(q, k)| (q.values(), k.values())),
            rope: args.rope,
            positions: args.positions,
            slots: args.slots,
        };
        store.run(self.isa, &self.pool, qkv.view_mut(args.positions.len()), cache);
    }

    fn attention(&mut self, args: Attention<'_>, qkv: &CpuTensor, cache: &CpuKvCache, out: &mut CpuTensor) {
        let tokens =
            args.batch.rows.iter().map(|r| (r.first_token + r.token_count) as usize).max().unwrap_or(0);
        let runtime = attention::Runtime {
            isa: self.isa,
            pool: &self.pool,
            scratch: self.scratch.view(),
            plan: &mut self.attention_plan,
        };
        attention::attention(runtime, &args, qkv.view(tokens), cache, out.view_mut(tokens));
    }

    fn gated_activation(
        &mut self,
        activation: Activation,
        gate_up: &CpuTensor,
        rows: usize,
        out: &mut CpuTensor,
    ) {
        activation::gated(self.isa, &self.pool, activation, gate_up.view(rows), out.view_mut(rows));
    }

    fn scale(&mut self, x: &mut CpuTensor, factor: f32, rows: usize) {
        let change = activation::Change::Scale(factor);
        activation::change(self.isa, &self.pool, change, x.view_mut(rows), rows);
    }

    fn softcap(&mut self, x: &mut CpuTensor, cap: f32, rows: usize) {
        assert!(cap > 0.0, "a soft cap is positive");
        let change = activation::Change::Softcap(cap);
        activation::change(self.isa, &self.pool, change, x.view_mut(rows), rows);
    }

    fn moe(
        &mut self,
        args: MoeArgs<'_, Self>,
        experts: &CpuExperts,
        x: &CpuTensor,
        rows: usize,
        (work, out): (&mut CpuMoeWorkspace, &mut CpuTensor),
    ) {
        let mixture = moe::Mixture {
            isa: self.isa,
            scratch: self.scratch.view(),
            experts,
            experts_per_token: args.experts_per_token,
            activation: args.activation,
            norm_topk_prob: args.norm_topk_prob,
            logits: args.router_logits.view(rows),
            x: x.view(rows),
            out: out.view_mut(rows),
        };
        mixture.run(&self.pool, rows, (work, self.coded_inputs.get_mut()));
    }

    fn reduce_add_norm(
        &mut self,
        collective: &dyn Collective,
        args: ReduceAddNorm<'_, Self>,
        partial: &mut CpuTensor,
        (residual, out): (&mut CpuTensor, &mut CpuTensor),
        rows: usize,
    ) -> Result<()> {
        collective.all_reduce_f32(partial.rows_mut(rows))?;
        let add_norm = pointwise::AddNorm {
            x: partial.view_mut(rows),
            rows,
            bias: args.bias.map(CpuVector::values),
            post_weight: args.post_norm.map(CpuVector::values),
            weight: args.norm_weight.values(),
            eps: args.norm_eps,
            residual: residual.view_mut(rows),
            out: out.view_mut(rows),
        };
        add_norm.run(self.isa, &self.pool);
        Ok(())
    }

    fn gather_rows(&mut self, x: &CpuTensor, rows: &[u32], out: &mut CpuTensor) {
        let cols = x.cols();
        assert_eq!(out.cols(), cols, "x and out have the same columns");
        let source = x.rows(x.rows_max());
        for (target, &row) in out.rows_mut(rows.len()).chunks_exact_mut(cols).zip(rows) {
            target.copy_from_slice(&source[row as usize * cols..][..cols]);
        }
    }

    fn read<'a>(&mut self, x: &'a CpuTensor, rows: usize) -> Result<Cow<'a, [f32]>> {
        Ok(Cow::Borrowed(x.rows(rows)))
    }

    fn poison(&mut self, cache: &mut CpuKvCache, pages: &[PageId]) {
        cache.poison(pages);
    }
}
