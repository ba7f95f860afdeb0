//! Speed of the CPU kernels next to what the machine gives in the same run.
//!
//! `cargo bench -p lockstep-backend [-- THREADS] [SECTION...]` prints memory bandwidth, FMA rate, and
//! each kernel with its share of them. Shares compare across machines and loads; plain figures do not.

use lockstep_backend::cpu::probe::{self, AttentionShape, MatmulShape, MixtureShape};
use lockstep_backend::cpu::{CpuOptions, Isa};
use lockstep_core::{CodeLayout, DType, WeightType};

/// What can be measured alone.
const SECTIONS: [&str; 4] = ["decode", "gemm", "attention", "moe"];
const MAPPED: &str = "memory for the measure";

/// Forms of weights.
const FORMS: [WeightType; 5] = [
    WeightType::Float(DType::Bf16),
    WeightType::Float(DType::F32),
    WeightType::Coded(CodeLayout::new(0, 15, true, false)),
    WeightType::Coded(CodeLayout::new(-16, 15, false, false)),
    WeightType::Coded(CodeLayout::new(-128, 127, false, false)),
];
/// (inputs, outputs) of SmolLM2-135M, its head, and a 7B projection.
const SHAPES: [(usize, usize); 6] =
    [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152), (4096, 4096)];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |section: &str| {
        !args.iter().any(|a| SECTIONS.contains(&a.as_str())) || args.iter().any(|a| a == section)
    };
    let threads = args
        .iter()
        .filter_map(|a| a.parse().ok())
        .next()
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let options = CpuOptions { threads, ..CpuOptions::default() };
    println!("{} x{threads}, FMA {:.0} GFLOP/s", Isa::detect().name(), probe::fma_gflops(threads));
    for huge in [true, false] {
        let gbs = probe::bandwidth_gbs(threads, 512 << 20, huge).expect(MAPPED);
        println!("read 512 MiB, huge pages {huge}: {gbs:.1} GB/s");
    }
    if wanted("decode") {
        decode(&options);
    }
    if wanted("gemm") {
        gemm(&options);
    }
    if wanted("attention") {
        attention(&options);
    }
    if wanted("moe") {
        mixture(&options);
    }
}

/// Mixtures of the size of Qwen3-30B-A3B's, with half its experts.
fn mixture(options: &CpuOptions) {
    for rows in [1, 2, 8, 64, 512] {
        let shape = MixtureShape { rows, hidden: 2048, inner: 768, num_experts: 64, experts_per_token: 8 };
        let (peak, gbs) = (
            probe::fma_gflops(options.threads),
            probe::bandwidth_gbs(options.threads, 128 << 20, true).expect(MAPPED),
        );
        let time = probe::mixture_time(options.clone(), shape).expect(MAPPED).as_secs_f64();
        let bytes = shape.expert_bytes() * (rows * shape.experts_per_token).min(shape.num_experts);
        println!(
            "mixture {rows:4} rows: {:.2} ms, {:.0} % of memory, {:.0} % of FMA peak",
            time * 1e3,
            bytes as f64 / time / 1e9 / gbs * 100.0,
            shape.flops() / time / 1e9 / peak * 100.0
        );
    }
}

/// Products with few rows, as a share of memory bandwidth.
fn decode(options: &CpuOptions) {
    for (in_features, out_features) in SHAPES {
        for (rows, weight_type) in [1, 2, 4, 8].into_iter().flat_map(|rows| FORMS.map(|form| (rows, form))) {
            // Enough matrices that they do not stay in any cache.
            let matrices = (128 << 20) / weight_type.packed_bytes(in_features * out_features) + 1;
            let shape = MatmulShape { rows, in_features, out_features, weight_type, matrices };
            let bandwidth = probe::bandwidth_gbs(options.threads, 128 << 20, true).expect(MAPPED);
            let time = probe::matmul_time(options.clone(), shape).expect(MAPPED).as_secs_f64();
            let gbs = shape.weight_bytes() as f64 / time / 1e9;
            println!(
                "{} {rows:4} x {in_features} -> {out_features}: {:.1} us, {gbs:.1} GB/s, {:.0} % of memory",
                weight_type.words(),
                time * 1e6,
                gbs / bandwidth * 100.0
            );
        }
    }
}

/// Products with many rows, as a share of the FMA rate.
fn gemm(options: &CpuOptions) {
    for weight_type in FORMS {
        for (in_features, out_features) in SHAPES {
            for rows in [16, 32, 64, 512] {
                if out_features > 10_000 && rows > 64 {
                    continue;
                }
                let peak = probe::fma_gflops(options.threads);
                let shape = MatmulShape { rows, in_features, out_features, weight_type, matrices: 1 };
                let time = probe::matmul_time(options.clone(), shape).expect(MAPPED).as_secs_f64();
                let gflops = shape.flops() / time / 1e9;
                println!(
                    "{} {rows:4} x {in_features} -> {out_features}: {gflops:.0} GFLOP/s, {:.0} % of {peak:.0}",
                    weight_type.words(),
                    gflops / peak * 100.0
                );
            }
        }
    }
}

/// Attention of SmolLM2-135M's heads, then one KV head, a window, and Gemma's large heads.
fn attention(options: &CpuOptions) {
    let smol = |tokens, start| AttentionShape {
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        page_size: 16,
        tokens,
        start,
        window: None,
    };
    let shapes = [
        smol(512, 0),
        smol(512, 1536),
        smol(1, 1023),
        smol(1, 2047),
        AttentionShape { kv_heads: 1, ..smol(1, 8191) },
        AttentionShape { window: Some(512), ..smol(1, 8191) },
        AttentionShape { head_dim: 256, heads: 4, kv_heads: 1, ..smol(512, 512) },
    ];
    for shape in shapes {
        let peak = probe::fma_gflops(options.threads);
        let time = probe::attention_time(options.clone(), shape).expect(MAPPED).as_secs_f64();
        println!(
            "attention {} tokens after {}, {} KV heads of {}, window {:?}: {:.1} us, {:.0} % of FMA peak, {:.1} GB/s",
            shape.tokens,
            shape.start,
            shape.kv_heads,
            shape.head_dim,
            shape.window,
            time * 1e6,
            shape.flops() / time / 1e9 / peak * 100.0,
            shape.kv_bytes() as f64 / time / 1e9
        );
    }
}
