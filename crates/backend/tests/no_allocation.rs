//! No operation allocates: a step run a second time asks the allocator for nothing, on any thread.
//!
//! One test, alone in its process, since the count is of the whole process.

#![allow(clippy::unwrap_used)]

use lockstep_backend::cpu::{CpuBackend, CpuOptions, CpuTensor};
use lockstep_backend::{
    Attention, AttentionBatch, AttentionRow, Backend, ExpertWeights, KvLayout, LinearSpec, MoeArgs, MoeShape,
    QkvShape, ReduceAddNorm, RopeAndStore,
};
use lockstep_comm::collective::OneRank;
use lockstep_core::DType;
use lockstep_core::config::{Activation, RopeFrequencies};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, counting what is asked of it.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: passed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on to the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const HIDDEN: usize = 64;
const INNER: usize = 48;
const TOKENS: usize = 70;
const START: usize = 1500;
const SHAPE: QkvShape = QkvShape { local_heads: 4, local_kv_heads: 2, head_dim: 16, norm_eps: 1e-6 };

/// What a small model with one layer needs.
struct Model {
    backend: CpuBackend,
    cache: <CpuBackend as Backend>::KvCache,
    rope: <CpuBackend as Backend>::RopeTable,
    experts: <CpuBackend as Backend>::Experts,
    work: <CpuBackend as Backend>::MoeWorkspace,
    projection: <CpuBackend as Backend>::Linear,
    norm: <CpuBackend as Backend>::Vector,
    tensors: [CpuTensor; 6],
    pages: Vec<u32>,
}

impl Model {
    fn new() -> Self {
        let backend = CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap();
        let linear = |out, inputs| {
            let spec = LinearSpec::single_leaf(out, inputs, DType::F32);
            let mut linear = backend.linear(spec).unwrap();
            backend.pack_rows(&mut linear, 0, &0.01f32.to_le_bytes().repeat(out * inputs));
            linear
        };
        let expert = |_| ExpertWeights { gate_up: linear(2 * INNER, HIDDEN), down: linear(HIDDEN, INNER) };
        let experts = backend.experts((0..6).map(expert).collect()).unwrap();
        let shape = MoeShape {
            rows_max: TOKENS,
            num_experts: 6,
            experts_per_token: 2,
            local_inner: INNER,
            hidden: HIDDEN,
        };
        let num_pages = (START + TOKENS).div_ceil(16);
        let layout = KvLayout {
            local_layers: 1,
            local_kv_heads: 2,
            head_dim: 16,
            page_size: 16,
            num_pages,
            dtype: DType::F32,
        };
        let frequencies = RopeFrequencies { inverse: vec![1.0, 0.1, 0.01], attention_factor: 1.0 };
        let tensor = |cols| backend.tensor(TOKENS, cols).unwrap();
        Self {
            cache: backend.kv_cache(layout).unwrap(),
            rope: backend.rope_table(&frequencies, START + TOKENS).unwrap(),
            experts,
            work: backend.moe_workspace(shape).unwrap(),
            projection: linear(8 * 16, HIDDEN),
            norm: backend.vector(&[1.0; HIDDEN]).unwrap(),
            tensors: [HIDDEN, HIDDEN, 8 * 16, HIDDEN, HIDDEN, 6].map(tensor),
            pages: (0..num_pages as u32).collect(),
            backend,
        }
    }

    /// One step of `positions.len()` tokens of a request.
    fn step(&mut self, positions: &[u32], slots: &[u32]) {
        let (b, rows) = (&mut self.backend, positions.len());
        let [residual, x, qkv, attended, partial, logits] = &mut self.tensors;
        b.rms_norm(residual, &self.norm, 1e-6, rows, x);
        b.matmul(&self.projection, x, None, rows, qkv);
        let (shape, rope) = (SHAPE, &self.rope);
        b.rope_and_store(
            RopeAndStore { layer: 0, shape, qk_norm: None, rope, positions, slots },
            qkv,
            &mut self.cache,
        );
        let row = AttentionRow {
            first_token: 0,
            token_count: rows as u32,
            start_position: positions[0],
            first_page: 0,
        };
        let batch = AttentionBatch { rows: &[row], pages: &self.pages };
        let args = Attention { layer: 0, shape, batch, scale: 0.25, softcap: Some(50.0), window: Some(1200) };
        b.attention(args, qkv, &self.cache, attended);
        let args = MoeArgs {
            router_logits: logits,
            experts_per_token: 2,
            norm_topk_prob: true,
            activation: Activation::GeluTanh,
        };
        b.moe(args, &self.experts, attended, rows, (&mut self.work, partial));
        let (norm_weight, post_norm) = (&self.norm, Some(&self.norm));
        let args = ReduceAddNorm { bias: None, post_norm, norm_weight, norm_eps: 1e-6 };
        b.reduce_add_norm(&OneRank, args, partial, (residual, x), rows).unwrap();
        b.scale(x, 8.0, rows);
        b.softcap(x, 30.0, rows);
        b.gather_rows(x, &[0], partial);
        assert!(b.read(partial, 1).unwrap().iter().all(|v| v.is_finite()));
    }
}

#[test]
fn a_step_that_ran_before_allocates_nothing() {
    let mut model = Model::new();
    let positions: Vec<u32> = (START as u32..(START + TOKENS) as u32).collect();
    // Prefill, and decode, which is cut by splits: the first time buffers may grow. Afterwards a step that asks for
    // memory does so every time, whereas the test harness's own thread, which is counted too, does so at most once.
    let mut step = |tokens: usize| {
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        model.step(&positions[..tokens], &positions[..tokens]);
        ALLOCATIONS.load(Ordering::SeqCst) - before
    };
    for tokens in [TOKENS, 1] {
        step(tokens);
        let least = (0..3).map(|_| step(tokens)).min();
        assert_eq!(least, Some(0), "allocations in a step of {tokens} tokens");
    }
}
