//! Every kernel through the compiler for every architecture, without a GPU.

use super::super::few_rows::GEMV_NAMES;
use super::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const ALL: [Source; 23] = [
    Source::Pointwise,
    Source::Norm,
    Source::Rope,
    Source::Gemv,
    Source::Skinny,
    Source::Moe,
    Source::Experts,
    Source::Peers(2),
    Source::Peers(4),
    Source::Peers(8),
    Source::Stages,
    Source::Sample,
    Source::AttentionToken(64),
    Source::AttentionToken(128),
    Source::AttentionToken(256),
    Source::AttentionDecode(64),
    Source::AttentionDecode(128),
    Source::AttentionDecode(256),
    Source::AttentionTile(64),
    Source::AttentionTile(128),
    Source::AttentionTile(256),
    Source::AttentionHopper(64),
    Source::AttentionHopper(128),
];

impl Source {
    /// Kernels that the file must define.
    fn kernels(self) -> &'static [&'static str] {
        match self {
            Self::Pointwise => &["embed", "gather_rows", "scale", "softcap", "gated_activation", "poison"],
            Self::Norm => &["rms_norm", "add_norm"],
            Self::Rope => &["rope_and_store"],
            Self::Gemv => GEMV_NAMES.as_flattened(),
            Self::Skinny => &["skinny_plain", "skinny_gated"],
            Self::Moe => &["route", "moe_gate_up", "moe_down"],
            Self::Experts => &[
                "group",
                "experts_up_16",
                "experts_up_32",
                "experts_up_64",
                "experts_up_128",
                "experts_down_16",
                "experts_down_32",
                "experts_down_64",
                "experts_down_128",
                "join_experts",
            ],
            Self::Peers(_) => &[
                "reduce_one_shot",
                "reduce_two_shot",
                "reduce_norm_one_shot",
                "reduce_norm_two_shot",
                "gather",
            ],
            Self::Stages => &["stage_send", "stage_recv"],
            Self::Sample => &["sample_best", "sample_weigh", "sample_pick"],
            Self::AttentionToken(256) => &["attention_token_1", "attention_token_2", "attention_token_4"],
            Self::AttentionToken(_) => {
                &["attention_token_1", "attention_token_2", "attention_token_4", "attention_token_8"]
            }
            Self::AttentionDecode(256) => &["attention_decode_4", "attention_decode_8"],
            Self::AttentionDecode(_) => &["attention_decode_4", "attention_decode_8", "attention_decode_16"],
            Self::AttentionTile(_) | Self::AttentionHopper(_) => &["attention_tile"],
        }
    }
}

#[test]
fn the_cache_tells_sources_types_and_architectures_apart() {
    let mut names = std::collections::HashSet::new();
    for source in ALL {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for architecture in ["sm_80", "sm_90a"] {
                assert!(names.insert(source.file_name(dtype, architecture)));
            }
        }
    }
}

/// Compiles every kernel for every architecture where the compiler library is installed
/// (`LOCKSTEP_TEST_NVRTC=1` makes its absence a failure; no GPU is needed), and prints which kernels keep
/// registers in memory, which costs speed and may be on purpose.
#[test]
fn every_kernel_compiles_for_every_architecture() {
    let compiler = match Compiler::open() {
        Ok(compiler) => compiler,
        Err(error) if std::env::var_os("LOCKSTEP_TEST_NVRTC").is_none() => {
            eprintln!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let jobs: Vec<(&str, Source, DType)> = ["sm_80", "sm_89", "sm_90a", "sm_100a"]
        .into_iter()
        .flat_map(|architecture| ALL.map(|source| (architecture, source)))
        .flat_map(|(architecture, source)| {
            types(architecture, source).iter().map(move |dtype| (architecture, source, *dtype))
        })
        .collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new((Vec::new(), Vec::new())));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let compiled = compile(&compiler, *job);
                    let (usages, complaints) = &mut *done.lock().unwrap();
                    match compiled {
                        Ok(mut found) => usages.append(&mut found),
                        Err(complaint) => complaints.push(complaint),
                    }
                }
            });
        }
    });
    let (mut usages, complaints) = done.into_inner().unwrap();
    usages.sort();
    print_table(&usages);
    assert!(
        complaints.is_empty(),
        "{} of {} files:\n{}",
        complaints.len(),
        jobs.len(),
        complaints.join("\n")
    );
}

/// What a kernel takes of a multiprocessor, as the assembler says.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Usage {
    /// File, type and architecture.
    place: String,
    kernel: String,
    registers: usize,
    stack_bytes: usize,
    spilled_bytes: usize,
    shared_bytes: usize,
}

/// One file's kernels, or what is wrong with it.
fn compile(
    compiler: &Compiler,
    (architecture, source, dtype): (&str, Source, DType),
) -> std::result::Result<Vec<Usage>, String> {
    let place = format!("{} {} {architecture}", source.name(), dtype.name());
    let mut options = source.options(dtype, architecture);
    options.push("--ptxas-options=-v".into());
    let compiled = compiler
        .compile(&source.name(), &source.text(), &options)
        .map_err(|error| format!("{place}: {error}"))?;
    let usages = usages(&place, &compiled.log);
    for kernel in source.kernels() {
        let in_code = compiled.code.windows(kernel.len()).any(|bytes| bytes == kernel.as_bytes());
        if !in_code || !usages.iter().any(|usage| usage.kernel == *kernel) {
            return Err(format!("{place}: there is no kernel {kernel}"));
        }
    }
    Ok(usages)
}

/// Reads the assembler's log: for each kernel its name, then its stack and spills, then registers and
/// shared memory.
fn usages(place: &str, log: &str) -> Vec<Usage> {
    let before = |line: &str, unit: &str| -> usize {
        let digits = line.split(unit).next().unwrap_or_default().rsplit(|c: char| !c.is_ascii_digit()).next();
        if line.contains(unit) { digits.and_then(|digits| digits.parse().ok()).unwrap_or(0) } else { 0 }
    };
    let mut found: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some(name) = line.split("Compiling entry function '").nth(1) {
            let kernel = name.split('\'').next().unwrap_or_default().to_owned();
            found.push(Usage { place: place.into(), kernel, ..Usage::default() });
        } else if let Some(usage) = found.last_mut() {
            usage.stack_bytes += before(line, " bytes stack frame");
            usage.spilled_bytes += before(line, " bytes spill stores");
            usage.registers += before(line, " registers");
            usage.shared_bytes += before(line, " bytes smem");
        }
    }
    found
}

fn print_table(usages: &[Usage]) {
    let in_memory: Vec<&Usage> = usages.iter().filter(|usage| usage.stack_bytes > 0).collect();
    println!(
        "{} kernels compile; {} of them keep registers or arrays in memory:",
        usages.len(),
        in_memory.len()
    );
    println!(
        "{:36} {:24} {:>9} {:>7} {:>7} {:>7}",
        "file", "kernel", "registers", "stack", "spilled", "shared"
    );
    for usage in in_memory {
        let Usage { place, kernel, registers, stack_bytes, spilled_bytes, shared_bytes } = usage;
        println!("{place:36} {kernel:24} {registers:9} {stack_bytes:7} {spilled_bytes:7} {shared_bytes:7}");
    }
}

#[test]
fn the_assemblers_log_is_read() {
    let log = "ptxas info    : 20 bytes gmem
ptxas info    : Compiling entry function 'attention_tile' for 'sm_90a'
ptxas info    : Function properties for attention_tile
ptxas         .     56 bytes stack frame, 64 bytes spill stores, 84 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 56 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compiling entry function 'scale' for 'sm_90a'
ptxas info    : Used 12 registers, used 0 barriers";
    let usage = |kernel: &str, registers, stack_bytes, spilled_bytes, shared_bytes| Usage {
        place: "here".into(),
        kernel: kernel.into(),
        registers,
        stack_bytes,
        spilled_bytes,
        shared_bytes,
    };
    let expected = [usage("attention_tile", 255, 56, 64, 4096), usage("scale", 12, 0, 0, 0)];
    assert_eq!(usages("here", log), expected);
}

/// The types to compile for. On all but the measured architecture one type and one head size are
/// enough; the kernels that take tokens one by one differ for f32, and tiles have no f32.
fn types(architecture: &str, source: Source) -> &'static [DType] {
    match (architecture, source) {
        ("sm_90a", Source::AttentionToken(_) | Source::Stages | Source::Sample) => &[DType::F32],
        (
            "sm_90a",
            Source::Skinny
            | Source::Experts
            | Source::AttentionDecode(_)
            | Source::AttentionTile(_)
            | Source::AttentionHopper(_),
        ) => &[DType::Bf16, DType::F16],
        (_, Source::AttentionHopper(_)) => &[],
        ("sm_90a", _) => &[DType::F32, DType::Bf16, DType::F16],
        (_, Source::AttentionToken(128) | Source::Stages | Source::Sample) => &[DType::F32],
        (_, Source::AttentionDecode(128) | Source::AttentionTile(128)) => &[DType::Bf16],
        (_, Source::AttentionToken(_) | Source::AttentionDecode(_) | Source::AttentionTile(_)) => &[],
        _ => &[DType::Bf16],
    }
}
