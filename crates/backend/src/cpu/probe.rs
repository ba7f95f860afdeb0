//! Measures of the machine and of the kernels, for `lockstep bench hw` and the benches: what
//! memory and arithmetic can give, next to what the matrix product makes of it.
//!
//! Every measure repeats short runs for [`MEASURE`] and keeps the best, since other processes can only
//! slow a run.

use super::memory::Region;
use super::pool::ThreadPool;
use super::simd::{Isa, Kernel, LANES, Simd};
use super::{CpuBackend, CpuOptions, PackedLinear};
use crate::{
    Attention, AttentionBatch, AttentionRow, Backend, ExpertWeights, KvLayout, LinearSpec, MoeArgs, MoeShape,
    QkvShape, Result,
};
use lockstep_core::config::Activation;
use lockstep_core::shard::leaf_bounds;
use lockstep_core::{CODE_GROUP, DType, WeightType};
use std::time::{Duration, Instant};

/// Bytes a chunk of the bandwidth measure reads.
const READ_CHUNK: usize = 256 << 10;
/// How long a measure repeats its runs, of which it makes at least [`RUNS_MIN`].
const MEASURE: Duration = Duration::from_millis(40);
const RUNS_MIN: usize = 5;

/// Sums `len` elements (a multiple of 64), only to read them, as four streams: what one core can
/// have under way at once is more than one stream gives.
#[derive(Clone, Copy)]
struct Read {
    data: *const f32,
    len: usize,
}

impl Kernel for Read {
    type Output = f32;

    /// # Safety
    /// `data` is valid for `len` elements.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let stream = self.len / 4;
        // SAFETY: `i + 16 <= stream`, a quarter of the data.
        unsafe {
            let mut sums = [S::splat(0.0); 4];
            for i in (0..stream).step_by(LANES) {
                for s in 0..4 {
                    sums[s] = S::add(sums[s], S::load(self.data.add(s * stream + i)));
                }
            }
            S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
        }
    }
}

/// `rounds` times 12 independent fused multiply-adds of 16 lanes.
#[derive(Clone, Copy)]
struct Fma {
    rounds: usize,
}

/// Accumulators of [`Fma`] and [`Dot`]: more than latency times throughput on any core, and they fit AVX2.
const FMA_CHAINS: usize = 12;

impl Kernel for Fma {
    type Output = f32;

    /// # Safety
    /// The machine supports `S`.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: register operations only.
        unsafe {
            let factor = S::splat(std::hint::black_box(0.999));
            let mut acc = [S::splat(1.0); FMA_CHAINS];
            for _ in 0..self.rounds {
                for a in &mut acc {
                    *a = S::fma(*a, factor, factor);
                }
            }
            let mut total = S::splat(0.0);
            for a in acc {
                total = S::add(total, a);
            }
            S::sum(total)
        }
    }
}

/// `rounds` times 12 independent integer dot products of 16 lanes, four bytes each.
#[derive(Clone, Copy)]
struct Dot {
    rounds: usize,
}

impl Kernel for Dot {
    type Output = f32;

    /// # Safety
    /// The machine supports `S`.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: register operations only.
        unsafe {
            let codes = S::splat_i32(std::hint::black_box(0x0101_0101));
            let mut acc = [S::splat_i32(1); FMA_CHAINS];
            for _ in 0..self.rounds {
                for a in &mut acc {
                    // Each with a factor of its own that changes, since AVX2 multiplies before it adds, and would do so
                    // once for all. Sums of four bytes cannot overflow in so few rounds.
                    *a = S::dot::<true>(*a, codes, *a);
                }
            }
            let mut total = S::splat(0.0);
            for a in acc {
                total = S::add(total, S::as_floats(a));
            }
            S::sum(total)
        }
    }
}

/// Reading speed of `threads` threads over `bytes` bytes in GB/s, on huge or ordinary pages.
pub fn bandwidth_gbs(threads: usize, bytes: usize, huge: bool) -> Result<f64> {
    let chunks = bytes.div_ceil(READ_CHUNK).max(1);
    let mut region = Region::own(chunks * READ_CHUNK, huge, "the bandwidth measure")?;
    region.as_mut_slice::<f32>().fill(1.0);
    let data = region.as_slice::<f32>();
    let (pool, isa) = (ThreadPool::new(threads.max(1)), Isa::detect());
    let best = best_of(|| {
        pool.run(chunks, &|chunk, _| {
            let part = &data[chunk * READ_CHUNK / 4..(chunk + 1) * READ_CHUNK / 4];
            // SAFETY: the slice is valid for its length, a multiple of 64 elements.
            std::hint::black_box(unsafe { isa.run(Read { data: part.as_ptr(), len: part.len() }) });
        });
    });
    Ok((chunks * READ_CHUNK) as f64 / best.as_secs_f64() / 1e9)
}

/// Fused multiply-add speed of `threads` threads in GFLOP/s (two operations each).
pub fn fma_gflops(threads: usize) -> f64 {
    // Lanes of one operation each.
    chains_gops(threads, LANES, Fma { rounds: CHAIN_ROUNDS })
}

/// Speed of integer dot products, of codes below 64 with signed bytes, of `threads` threads in 10^9 operations a second
/// (two a pair of bytes): what products with codes are made of.
pub fn dot_gops(threads: usize) -> f64 {
    chains_gops(threads, VECTOR_BYTES, Dot { rounds: CHAIN_ROUNDS })
}

/// Rounds of a chain.
const CHAIN_ROUNDS: usize = 40_000;
/// Bytes of a vector.
const VECTOR_BYTES: usize = 4 * LANES;

/// 10^9 operations a second of [`FMA_CHAINS`] chains of [`CHAIN_ROUNDS`] instructions, of which each multiplies and adds
/// `pairs` pairs.
fn chains_gops<K: Kernel<Output = f32> + Sync>(threads: usize, pairs: usize, kernel: K) -> f64 {
    let (pool, isa) = (ThreadPool::new(threads.max(1)), Isa::detect());
    let chunks = threads.max(1) * 8;
    let best = best_of(|| {
        pool.run(chunks, &|_, _| {
            // SAFETY: register operations of the detected instruction set.
            std::hint::black_box(unsafe { isa.run(kernel) });
        });
    });
    (chunks * CHAIN_ROUNDS * FMA_CHAINS * pairs * 2) as f64 / best.as_secs_f64() / 1e9
}

/// A matrix product to time.
#[derive(Clone, Copy, Debug)]
pub struct MatmulShape {
    /// Rows of activations.
    pub rows: usize,
    /// Inputs.
    pub in_features: usize,
    /// Outputs.
    pub out_features: usize,
    /// Form of the weights.
    pub weight_type: WeightType,
    /// How many different matrices take turns, so that weights come from memory as in a model.
    pub matrices: usize,
}

impl MatmulShape {
    /// Bytes of weights one product reads.
    pub fn weight_bytes(&self) -> usize {
        self.weight_type.packed_bytes(self.in_features * self.out_features)
    }

    /// Floating point operations of one product.
    pub fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.in_features as f64 * self.out_features as f64
    }
}

/// A packed matrix of ones (codes: of ones times 1, plus 1 where there are bases), so that no time goes into denormals.
fn ones(backend: &CpuBackend, spec: &LinearSpec) -> Result<PackedLinear> {
    let (unit, elements) = match spec.weight_type {
        WeightType::Float(DType::F32) => (1f32.to_le_bytes().to_vec(), 1),
        WeightType::Float(DType::F16) => (half::f16::ONE.to_le_bytes().to_vec(), 1),
        WeightType::Float(DType::Bf16) => (half::bf16::ONE.to_le_bytes().to_vec(), 1),
        WeightType::Coded(layout) => {
            let factors = half::f16::ONE.to_le_bytes().repeat(layout.factors());
            ([factors, vec![1; CODE_GROUP]].concat(), CODE_GROUP)
        }
    };
    let mut linear = backend.linear(spec.clone())?;
    backend.pack_rows(&mut linear, 0, &unit.repeat(spec.in_features * spec.out_features / elements));
    Ok(linear)
}

/// Best time of one product on a backend made from `options`.
pub fn matmul_time(options: CpuOptions, shape: MatmulShape) -> Result<Duration> {
    let mut backend = CpuBackend::new(options)?;
    let spec = LinearSpec::single_leaf(shape.out_features, shape.in_features, shape.weight_type);
    let matrices =
        (0..shape.matrices.max(1)).map(|_| ones(&backend, &spec)).collect::<Result<Vec<PackedLinear>>>()?;
    let mut x = backend.tensor(shape.rows, shape.in_features)?;
    x.rows_mut(shape.rows).fill(0.5);
    let mut out = backend.tensor(shape.rows, shape.out_features)?;
    let best = best_of(|| {
        for linear in &matrices {
            backend.matmul(linear, &x, None, shape.rows, &mut out);
        }
    });
    Ok(best / matrices.len() as u32)
}

/// An attention call to time: one request.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Tokens computed.
    pub tokens: usize,
    /// Tokens cached before them.
    pub start: usize,
    /// Sliding window.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// Query-key pairs of one head.
    fn pairs(&self) -> f64 {
        let seen = |token: usize| (self.start + token + 1).min(self.window.unwrap_or(usize::MAX));
        (0..self.tokens).map(seen).sum::<usize>() as f64
    }

    /// Floating point operations of the two products.
    pub fn flops(&self) -> f64 {
        4.0 * self.pairs() * (self.heads * self.head_dim) as f64
    }

    /// Bytes of keys and values in sight.
    pub fn kv_bytes(&self) -> usize {
        let seen = self.window.map_or(usize::MAX, |w| w + self.tokens - 1).min(self.start + self.tokens);
        2 * seen * self.kv_heads * self.head_dim * size_of::<f32>()
    }
}

/// Best time of one attention call on a backend made from `options`. Layers take turns, so that
/// keys and values come from memory as in a model.
pub fn attention_time(options: CpuOptions, shape: AttentionShape) -> Result<Duration> {
    let mut backend = CpuBackend::new(options)?;
    let num_pages = (shape.start + shape.tokens).div_ceil(shape.page_size);
    let layout = KvLayout {
        local_layers: 16,
        local_kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        page_size: shape.page_size,
        num_pages,
        dtype: DType::F32,
    };
    let mut cache = backend.kv_cache(layout)?;
    let (k, v) = cache.parts_mut();
    // Scores and values that vary, so that the softmax meets ordinary numbers.
    for (i, (k, v)) in k.iter_mut().zip(v).enumerate() {
        (*k, *v) = ((i % 61) as f32 / 61.0, (i % 53) as f32 / 53.0);
    }
    let width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    let mut qkv = backend.tensor(shape.tokens, width)?;
    qkv.rows_mut(shape.tokens).fill(0.1);
    let mut out = backend.tensor(shape.tokens, shape.heads * shape.head_dim)?;
    let pages: Vec<u32> = (0..num_pages as u32).collect();
    let row = AttentionRow {
        first_token: 0,
        token_count: shape.tokens as u32,
        start_position: shape.start as u32,
        first_page: 0,
    };
    let heads = QkvShape {
        local_heads: shape.heads,
        local_kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        norm_eps: 0.0,
    };
    let best = best_of(|| {
        for layer in 0..layout.local_layers {
            let batch = AttentionBatch { rows: &[row], pages: &pages };
            let scale = 1.0 / (shape.head_dim as f32).sqrt();
            let args = Attention { layer, shape: heads, batch, scale, softcap: None, window: shape.window };
            backend.attention(args, &qkv, &cache, &mut out);
        }
    });
    Ok(best / layout.local_layers as u32)
}

/// A mixture of experts to time, bf16.
#[derive(Clone, Copy, Debug)]
pub struct MixtureShape {
    /// Rows of activations.
    pub rows: usize,
    /// Width of the model.
    pub hidden: usize,
    /// Width of an expert.
    pub inner: usize,
    /// Experts.
    pub num_experts: usize,
    /// Experts that a token takes.
    pub experts_per_token: usize,
}

impl MixtureShape {
    /// Floating point operations of the three projections.
    pub fn flops(&self) -> f64 {
        6.0 * (self.rows * self.experts_per_token) as f64 * (self.hidden * self.inner) as f64
    }

    /// Bytes of an expert's weights.
    pub fn expert_bytes(&self) -> usize {
        3 * self.hidden * self.inner * DType::Bf16.size_bytes()
    }
}

/// Best time of one mixture on a backend made from `options`. Tokens choose neighbouring experts in
/// turn, so that the load is even and a decode step finds its weights in memory, not in a cache.
pub fn mixture_time(options: CpuOptions, shape: MixtureShape) -> Result<Duration> {
    let mut backend = CpuBackend::new(options)?;
    let mut down = LinearSpec::single_leaf(shape.hidden, shape.inner, DType::Bf16);
    down.leaves = leaf_bounds(shape.inner, 1, 0, 1);
    let gate_up = LinearSpec::single_leaf(2 * shape.inner, shape.hidden, DType::Bf16);
    let expert = |_| Ok(ExpertWeights { gate_up: ones(&backend, &gate_up)?, down: ones(&backend, &down)? });
    let experts = (0..shape.num_experts).map(expert).collect::<Result<_>>()?;
    let experts = backend.experts(experts)?;
    let mut work = backend.moe_workspace(MoeShape {
        rows_max: shape.rows,
        num_experts: shape.num_experts,
        experts_per_token: shape.experts_per_token,
        local_inner: shape.inner,
        hidden: shape.hidden,
    })?;
    let mut x = backend.tensor(shape.rows, shape.hidden)?;
    x.rows_mut(shape.rows).fill(1e-3);
    let mut out = backend.tensor(shape.rows, shape.hidden)?;
    let mut logits = backend.tensor(shape.rows, shape.num_experts)?;
    let mut first = 0;
    let best = best_of(|| {
        for row in logits.rows_mut(shape.rows).chunks_exact_mut(shape.num_experts) {
            row.fill(0.0);
            for i in 0..shape.experts_per_token {
                row[(first + i) % shape.num_experts] = 1.0;
            }
            first += shape.experts_per_token;
        }
        let args = MoeArgs {
            router_logits: &logits,
            experts_per_token: shape.experts_per_token,
            norm_topk_prob: true,
            activation: Activation::Silu,
        };
        backend.moe(args, &experts, &x, shape.rows, (&mut work, &mut out));
    });
    Ok(best)
}

/// The shortest run of a measure, after one to warm up.
fn best_of(mut work: impl FnMut()) -> Duration {
    work();
    let (started, mut runs, mut best) = (Instant::now(), 0, Duration::MAX);
    while runs < RUNS_MIN || started.elapsed() < MEASURE {
        let run = Instant::now();
        work();
        best = best.min(run.elapsed());
        runs += 1;
    }
    best
}
