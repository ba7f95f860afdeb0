//! One random case of each operation.

use super::choose::choose;
use super::decode::decode;
use super::{Probe, Random};
use crate::cpu::CpuBackend;
use crate::cuda::CudaBackend;
use crate::cuda::tensor::narrowed;
use crate::{
    Attention, AttentionBatch, AttentionRow, ExpertWeights, KvLayout, LinearSpec, MoeArgs, MoeShape,
    QkvShape, ReduceAddNorm, Result, RopeAndStore,
};
use lockstep_comm::OneRank;
use lockstep_core::DType;
use lockstep_core::config::{Activation, RopeFrequencies};

/// The output of a case and its shape in words.
pub(super) type Case = Result<(Vec<f32>, String)>;

/// An operation and how far a result may be from the CPU's.
pub(super) struct Operation {
    pub name: &'static str,
    pub on_cpu: fn(&mut CpuBackend, Random) -> Case,
    pub on_gpu: fn(&mut CudaBackend, Random) -> Case,
    /// Roundings to the GPU's type between input and output, in the root-mean-square sense. A product
    /// counts half a rounding more: cuBLASLt may cut K and round the parts.
    roundings: f64,
}

impl Operation {
    /// Each rounding to nearest moves a value by at most half a unit of the last place, 0.29 of it on
    /// average; f32 sums in another order move by a few units.
    pub fn bound(&self, dtype: DType) -> f64 {
        match dtype {
            DType::Bf16 => self.roundings * 2e-3,
            DType::F16 => self.roundings * 3e-4,
            DType::F32 => 2e-5,
        }
    }
}

macro_rules! operations {
    ($($case:ident $name:literal $roundings:literal;)*) => {
        &[$(Operation { name: $name, on_cpu: $case::<CpuBackend>, on_gpu: $case::<CudaBackend>, roundings: $roundings },)*]
    };
}

/// All operations of the trait that compute.
pub(super) const ALL: &[Operation] = operations![
    embed "embed" 0.0;
    gather_rows "gather_rows" 0.0;
    rms_norm "rms_norm" 1.0;
    matmul "matmul" 1.5;
    matmul_ways "every way of a matmul" 1.5;
    logits "matmul to f32, softcap" 0.1;
    argmax "argmax" 0.0;
    gated_activation "gated_activation" 1.0;
    gated_matmul "gated_matmul" 2.5;
    scale "scale" 1.0;
    reduce_add_norm "reduce_add_norm" 2.5;
    attention "rope_and_store, attention" 3.0;
    decode "attention of many requests" 2.5;
    moe "moe" 2.0;
    choose "choosing tokens" 0.0;
];

/// A matrix and its rows, scaled so that products are about 1.
fn linear<P: Probe>(backend: &mut P, random: &mut Random, out: usize, inputs: usize) -> Result<P::Linear> {
    let mut linear = backend.linear(LinearSpec::single_leaf(out, inputs, random.dtype))?;
    pack(backend, random, (out, inputs), &mut linear);
    Ok(linear)
}

/// Gives a matrix of `out` rows its rows.
fn pack<P: Probe>(
    backend: &mut P,
    random: &mut Random,
    (out, inputs): (usize, usize),
    linear: &mut P::Linear,
) {
    let dtype = random.dtype;
    let scale = 1.0 / (inputs as f32).sqrt();
    let rows: Vec<f32> = random.values(out * inputs).iter().map(|v| v * scale).collect();
    let bytes = narrowed(&rows, dtype);
    // In two bands, as a loader gives them.
    let cut = out / 2 * inputs * dtype.size_bytes();
    backend.pack_rows(linear, 0, &bytes[..cut]);
    backend.pack_rows(linear, out / 2, &bytes[cut..]);
}

fn embed<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (vocab, cols, tokens) = (1 + random.below(300), 8 * (1 + random.below(100)), 1 + random.below(70));
    let table = linear(backend, &mut random, vocab, cols)?;
    let first_id = random.below(50) as u32;
    let ids: Vec<u32> = (0..tokens).map(|_| random.below(vocab + 100) as u32).collect();
    let mut out = backend.empty(tokens, cols)?;
    backend.embed(&table, first_id, &ids, &mut out);
    Ok((backend.read(&out, tokens)?.into_owned(), format!("{tokens} of {vocab} x {cols}")))
}

fn gather_rows<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (rows, cols, wanted) = (1 + random.below(60), 8 * (1 + random.below(300)), 1 + random.below(60));
    let values = random.values(rows * cols);
    let x = backend.filled(&values, cols)?;
    let list: Vec<u32> = (0..wanted).map(|_| random.below(rows) as u32).collect();
    let mut out = backend.empty(wanted, cols)?;
    backend.gather_rows(&x, &list, &mut out);
    Ok((backend.read(&out, wanted)?.into_owned(), format!("{wanted} of {rows} x {cols}")))
}

/// Widths of rows, from one vector to the widest.
fn width(random: &mut Random) -> usize {
    let small = 8 * (1 + random.below(600));
    random.pick(&[small, small, 576, 896, 4096, 5120, 8192, 12_288])
}

fn rms_norm<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (rows, cols) = (1 + random.below(40), width(&mut random));
    let (x, weight) = (random.values(rows * cols), random.values(cols));
    let (x, weight) = (backend.filled(&x, cols)?, backend.vector(&weight)?);
    let mut out = backend.empty(rows, cols)?;
    backend.rms_norm(&x, &weight, 1e-5, rows, &mut out);
    Ok((backend.read(&out, rows)?.into_owned(), format!("{rows} x {cols}")))
}

/// Rows, outputs and inputs of a product; of few rows also large ones.
fn product_shape(random: &mut Random) -> (usize, usize, usize) {
    let rows = random.pick(&[1, 1, 1, 2, 2, 3, 8, 17, 64, 200]);
    let most = if rows <= 3 { random.pick(&[700, 4000]) } else { 700 };
    (rows, 1 + random.below(most), 8 * (1 + random.below(most / 3)))
}

fn matmul<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (rows, out, inputs) = product_shape(&mut random);
    // cuBLASLt wants outputs whose rows start on 16 bytes for its fast kernels; both kinds are tried.
    let out = if random.below(2) == 0 { out.next_multiple_of(8) } else { out };
    let (x, bias) = (random.values(rows * inputs), random.values(out));
    let w = linear(backend, &mut random, out, inputs)?;
    let x = backend.filled(&x, inputs)?;
    let bias = (random.below(2) == 0).then(|| backend.vector(&bias)).transpose()?;
    let mut y = backend.empty(rows, out)?;
    backend.matmul(&w, &x, bias.as_ref(), rows, &mut y);
    let shape = format!("{rows} x {out} x {inputs}, bias {}", bias.is_some());
    Ok((backend.read(&y, rows)?.into_owned(), shape))
}

/// Several products, so that one follows another in the kernels' workspace.
fn matmul_ways<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (out, inputs) = (8 * (1 + random.below(150)) - random.below(8), 8 * (1 + random.below(250)));
    let rows = random.pick(&[1, 2, 3, 8, 9, 16, 17, 31, 32, 33, 48, 64]);
    let w = linear(backend, &mut random, out, inputs)?;
    let bias = random.values(out);
    let bias = (random.below(2) == 0).then(|| backend.vector(&bias)).transpose()?;
    let numbers = [0, 1, random.below(3), 0];
    let mut result = Vec::new();
    for number in numbers {
        let x = random.values(rows * inputs);
        let x = backend.filled(&x, inputs)?;
        let mut y = backend.empty(rows, out)?;
        backend.matmul_by(number, (&w, &x, bias.as_ref()), rows, &mut y)?;
        result.extend_from_slice(&backend.read(&y, rows)?);
    }
    Ok((result, format!("{rows} x {out} x {inputs}, bias {}, ways {numbers:?}", bias.is_some())))
}

fn logits<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (rows, out, inputs) = product_shape(&mut random);
    let x = random.values(rows * inputs);
    let w = linear(backend, &mut random, out, inputs)?;
    let x = backend.filled(&x, inputs)?;
    let mut y = backend.empty_f32(rows, out)?;
    backend.matmul(&w, &x, None, rows, &mut y);
    let cap = random.pick(&[None, Some(0.5), Some(30.0)]);
    if let Some(cap) = cap {
        backend.softcap(&mut y, cap, rows);
    }
    Ok((backend.read(&y, rows)?.into_owned(), format!("{rows} x {out} x {inputs}, cap {cap:?}")))
}

/// Values of few kinds, so that ties are common; the CPU's answer is the plain loop.
fn argmax<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (rows, stride) = (1 + random.below(20), 1 + random.below(5000));
    let cols = 1 + random.below(stride);
    let kinds = random.pick(&[2, 50, 1 << 20]);
    let values: Vec<f32> = (0..rows * stride).map(|_| random.below(kinds) as f32 - 30.0).collect();
    let mut x = backend.empty_f32(rows, stride)?;
    backend.put(&mut x, &values)?;
    let plain = || -> Vec<(f32, u32)> {
        let first_largest = |row: &[f32]| {
            let mut best = (row[0], 0);
            for (i, v) in row.iter().enumerate().filter(|(_, v)| !v.is_nan()) {
                if *v > best.0 {
                    best = (*v, i as u32);
                }
            }
            best
        };
        values.chunks(stride).map(|row| first_largest(&row[..cols])).collect()
    };
    let best = backend.best(&x, rows, cols)?.unwrap_or_else(plain);
    let result = best.into_iter().flat_map(|(value, at)| [value, at as f32]).collect();
    Ok((result, format!("{rows} rows, {cols} of {stride}, {kinds} kinds")))
}

fn gated_activation<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (rows, inner) = (1 + random.below(40), width(&mut random));
    let activation = random.pick(&[Activation::Silu, Activation::GeluTanh]);
    let values: Vec<f32> = random.values(rows * 2 * inner).iter().map(|v| v * 4.0).collect();
    let x = backend.filled(&values, 2 * inner)?;
    let mut out = backend.empty(rows, inner)?;
    backend.gated_activation(activation, &x, rows, &mut out);
    Ok((backend.read(&out, rows)?.into_owned(), format!("{activation:?} {rows} x {inner}")))
}

/// A fused gate|up matrix and its activation at once, or one after the other.
fn gated_matmul<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (rows, inner, inputs) = product_shape(&mut random);
    let inner = inner.next_multiple_of(8);
    let activation = random.pick(&[Activation::Silu, Activation::GeluTanh]);
    let (x, bias) = (random.values(rows * inputs), random.values(2 * inner));
    let w = linear(backend, &mut random, 2 * inner, inputs)?;
    let x = backend.filled(&x, inputs)?;
    let bias = (random.below(2) == 0).then(|| backend.vector(&bias)).transpose()?;
    let (mut gate_up, mut out) = (backend.empty(rows, 2 * inner)?, backend.empty(rows, inner)?);
    backend.gated_matmul(activation, (&w, bias.as_ref()), &x, rows, (&mut gate_up, &mut out));
    let shape = format!("{activation:?} {rows} x {inner} x {inputs}, bias {}", bias.is_some());
    Ok((backend.read(&out, rows)?.into_owned(), shape))
}

fn scale<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (rows, cols) = (1 + random.below(40), 8 * (1 + random.below(300)));
    let values = random.values(rows * cols);
    let mut x = backend.filled(&values, cols)?;
    backend.scale(&mut x, 33.7, rows);
    Ok((backend.read(&x, rows)?.into_owned(), format!("{rows} x {cols}")))
}

/// Residual and output, one after the other.
fn reduce_add_norm<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let (rows, cols) = (1 + random.below(40), width(&mut random));
    let (partial, residual) = (random.values(rows * cols), random.values(rows * cols));
    let mut partial = backend.filled(&partial, cols)?;
    let mut residual = backend.filled(&residual, cols)?;
    let mut vector = |chance: usize| -> Result<Option<P::Vector>> {
        let values = random.values(cols);
        (random.below(2) < chance).then(|| backend.vector(&values)).transpose()
    };
    let (bias, post_norm, weight) = (vector(1)?, vector(1)?, vector(2)?);
    let args = ReduceAddNorm {
        bias: bias.as_ref(),
        post_norm: post_norm.as_ref(),
        norm_weight: weight.as_ref().expect("invariant: a chance of 2 in 2"),
        norm_eps: 1e-6,
    };
    let shape = format!("{rows} x {cols}, bias {}, post norm {}", bias.is_some(), post_norm.is_some());
    let mut out = backend.empty(rows, cols)?;
    backend.reduce_add_norm(&OneRank, args, &mut partial, (&mut residual, &mut out), rows)?;
    let mut result = backend.read(&residual, rows)?.into_owned();
    result.extend_from_slice(&backend.read(&out, rows)?);
    Ok((result, shape))
}

/// A model's attention and the requests of its steps.
struct AttentionCase {
    shape: QkvShape,
    page_size: usize,
    /// Tokens of each request, and how many a step takes of each.
    tokens: Vec<usize>,
    chunk: usize,
    frequencies: RopeFrequencies,
    scale: f32,
    softcap: Option<f32>,
    window: Option<usize>,
    qk_norm: bool,
}

impl AttentionCase {
    fn new(random: &mut Random) -> Self {
        let head_dim = random.pick(&[16, 64, 64, 80, 96, 128, 128, 256]);
        let (kv_heads, group) = (1 + random.below(3), 1 + random.below(9));
        let shape =
            QkvShape { local_heads: kv_heads * group, local_kv_heads: kv_heads, head_dim, norm_eps: 1e-6 };
        let rotary = random.pick(&[head_dim, head_dim / 2]);
        let inverse = (0..rotary / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / rotary as f64)).collect();
        Self {
            shape,
            page_size: random.pick(&[1, 2, 16, 64]),
            tokens: (0..1 + random.below(3)).map(|_| 1 + random.below(700)).collect(),
            chunk: random.pick(&[1, 5, 64, 300, 1000]),
            frequencies: RopeFrequencies { inverse, attention_factor: random.pick(&[1.0, 1.19]) },
            scale: 1.0 / (head_dim as f32).sqrt(),
            softcap: random.pick(&[None, None, Some(5.0), Some(50.0)]),
            window: random.pick(&[None, None, Some(1), Some(17), Some(100), Some(512)]),
            qk_norm: random.below(2) == 0,
        }
    }

    fn describe(&self) -> String {
        format!(
            "{}/{} heads of {}, page {}, {:?} tokens by {}, window {:?}, cap {:?}, qk norm {}",
            self.shape.local_heads,
            self.shape.local_kv_heads,
            self.shape.head_dim,
            self.page_size,
            self.tokens,
            self.chunk,
            self.window,
            self.softcap,
            self.qk_norm
        )
    }
}

/// The requests of one case, chunk by chunk; only the last 40 steps' outputs count where chunks are tiny.
fn attention<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let mut case = AttentionCase::new(&mut random);
    if case.chunk == 1 {
        case.tokens.iter_mut().for_each(|n| *n = 1 + *n % 90);
    }
    let (shape, page_size) = (case.shape, case.page_size);
    let width = (shape.local_heads + 2 * shape.local_kv_heads) * shape.head_dim;
    let longest = case.tokens.iter().copied().max().unwrap_or(1);
    let pages_of = |tokens: usize| tokens.div_ceil(page_size);
    let num_pages = case.tokens.iter().map(|n| pages_of(*n)).sum::<usize>() + 3;
    let layout = KvLayout {
        local_layers: 2,
        local_kv_heads: shape.local_kv_heads,
        head_dim: shape.head_dim,
        page_size,
        num_pages,
        dtype: backend.kv_dtype(),
    };
    let mut cache = backend.kv_cache(layout)?;
    backend.poison(&mut cache, &(0..num_pages as u32).collect::<Vec<_>>());
    let mut free: Vec<u32> = (0..num_pages as u32).collect();
    let tables: Vec<Vec<u32>> = case
        .tokens
        .iter()
        .map(|n| (0..pages_of(*n)).map(|_| free.swap_remove(random.below(free.len()))).collect())
        .collect();
    let rope = backend.rope_table(&case.frequencies, longest)?;
    let weights = (random.values(shape.head_dim), random.values(shape.head_dim));
    let norms =
        if case.qk_norm { Some((backend.vector(&weights.0)?, backend.vector(&weights.1)?)) } else { None };
    let mut result = Vec::new();
    for start in (0..longest).step_by(case.chunk) {
        let (mut rows, mut pages, mut positions, mut slots) = (vec![], vec![], vec![], vec![]);
        for (tokens, table) in case.tokens.iter().zip(&tables).filter(|(tokens, _)| **tokens > start) {
            let end = (*tokens).min(start + case.chunk);
            rows.push(AttentionRow {
                first_token: positions.len() as u32,
                token_count: (end - start) as u32,
                start_position: start as u32,
                first_page: pages.len() as u32,
            });
            pages.extend(table);
            for position in start..end {
                positions.push(position as u32);
                slots.push(table[position / page_size] * page_size as u32 + (position % page_size) as u32);
            }
        }
        let values: Vec<f32> = random.values(positions.len() * width).iter().map(|v| v * 2.0).collect();
        let mut qkv = backend.filled(&values, width)?;
        let heads = shape.local_heads * shape.head_dim;
        let mut out = backend.empty(positions.len(), heads)?;
        let store = RopeAndStore {
            layer: 1,
            shape,
            qk_norm: norms.as_ref().map(|(q, k)| (q, k)),
            rope: &rope,
            positions: &positions,
            slots: &slots,
        };
        backend.rope_and_store(store, &mut qkv, &mut cache);
        let args = Attention {
            layer: 1,
            shape,
            batch: AttentionBatch { rows: &rows, pages: &pages },
            scale: case.scale,
            softcap: case.softcap,
            window: case.window,
        };
        backend.attention(args, &qkv, &cache, &mut out);
        result.extend_from_slice(&backend.read(&out, positions.len())?);
    }
    Ok((result, case.describe()))
}

fn moe<P: Probe>(backend: &mut P, mut random: Random) -> Case {
    let few = (1 + random.below(20), 8 * (1 + random.below(60)), 8 * (1 + random.below(30)));
    // Enough pairs of an expert for each kind of tile, and more than one of the largest.
    let many = (1 + random.below(300), 8 * (1 + random.below(20)), 8 * (1 + random.below(20)));
    let (rows, hidden, inner) = random.pick(&[few, many]);
    let experts = 1 + random.pick(&[3, 8, 40]).min(random.below(41));
    let per_token = 1 + random.below(experts.min(8));
    let shapes = [(2 * inner, hidden), (hidden, inner)];
    let specs = shapes.map(|(out, inputs)| LinearSpec::single_leaf(out, inputs, random.dtype));
    let specs: Vec<_> = std::iter::repeat_n(specs, experts).flatten().collect();
    let mut matrices = backend.linears(&specs)?.into_iter();
    let mut parts = Vec::with_capacity(experts);
    while let (Some(mut gate_up), Some(mut down)) = (matrices.next(), matrices.next()) {
        pack(backend, &mut random, shapes[0], &mut gate_up);
        pack(backend, &mut random, shapes[1], &mut down);
        parts.push(ExpertWeights { gate_up, down });
    }
    let parts = backend.experts(parts)?;
    let shape = MoeShape {
        rows_max: rows,
        num_experts: experts,
        experts_per_token: per_token,
        local_inner: inner,
        hidden,
    };
    let mut work = backend.moe_workspace(shape)?;
    let (x, logits) = (random.values(rows * hidden), random.values(rows * experts));
    let x = backend.filled(&x, hidden)?;
    let mut router_logits = backend.empty_f32(rows, experts)?;
    backend.put(&mut router_logits, &logits)?;
    let mut out = backend.empty(rows, hidden)?;
    let args = MoeArgs {
        router_logits: &router_logits,
        experts_per_token: per_token,
        norm_topk_prob: random.below(2) == 0,
        activation: random.pick(&[Activation::Silu, Activation::GeluTanh]),
    };
    backend.moe(args, &parts, &x, rows, (&mut work, &mut out));
    let words = format!("{rows} x {hidden}, {per_token} of {experts} experts of {inner}");
    Ok((backend.read(&out, rows)?.into_owned(), words))
}
