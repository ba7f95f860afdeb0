//! How long loading takes against reading the file once from the page cache, and in how much memory.
//!
//! `cargo run --release -p lockstep-model --example load_speed [-- ROUNDS] [bf16|f32|q8_0|q4_k|PATH]...`
//! makes a Llama of half a billion weights for each type named (all four by default), or takes the
//! model at PATH. Every measure is a process of its own, so that memory starts empty and peaks are its
//! own; rounds alternate between reading and loading, because machines are shared. Printed are the best
//! time, the median of the rounds' ratios to reading, of time and of CPU time, and the CPU time (user +
//! system) of the best.
//!
//! Each process does its work three times and tells the quickest: a virtual machine may hand free
//! memory back to its host, and the first touch afterwards took 2 to 5 s a GB where the machine's own
//! page faults take 0.2 s. Memory that the process itself freed a moment ago is still there.

use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_core::config::hf;
use lockstep_core::{ParallelInfo, WeightMode};
use lockstep_model::{Decoder, Loader, ModelRules};
use lockstep_testkit::gguf::{self, GgmlType, GgufWriter, blocks};
use lockstep_testkit::random::Random;
use lockstep_testkit::safetensors::{StoredTensor, encode_stored};
use lockstep_testkit::{FileDType, ModelSpec, TempDir, Weights};
use lockstep_weights::ModelFiles;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const KINDS: [&str; 4] = ["bf16", "f32", "q8_0", "q4_k"];
const ROUNDS: usize = 5;
/// Runs of a process.
const RUNS: usize = 3;
/// Compute threads and ranks of each measured load.
const LOADS: [(usize, usize); 3] = [(1, 1), (2, 1), (1, 2)];
/// Positions of the rope table.
const POSITIONS: usize = 4096;

fn main() -> Result<()> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("read") => return read(Path::new(&args[1])),
        Some("rank") => {
            let [rank, tp, threads] = [&args[2], &args[3], &args[4]].map(|n| n.parse());
            return load(Path::new(&args[1]), ParallelInfo::tensor_parallel(rank?, tp?), threads?);
        }
        _ => {}
    }
    let mut rounds = ROUNDS;
    args.retain(|arg| arg.parse().map(|n| rounds = n).is_err());
    if args.is_empty() {
        args = KINDS.map(String::from).into();
    }
    for model in args {
        if KINDS.contains(&model.as_str()) {
            let folder = TempDir::new("load-speed");
            measure(&model, &make(&model, folder.path())?, rounds)?;
        } else {
            measure(&model, Path::new(&model), rounds)?;
        }
    }
    Ok(())
}

/// What a child says of itself.
#[derive(Clone, Copy)]
struct Figures {
    seconds: f64,
    user: f64,
    system: f64,
    /// Largest resident size, MiB.
    peak: f64,
    /// Packed weights, MiB.
    packed: f64,
}

fn measure(name: &str, path: &Path, rounds: usize) -> Result<()> {
    let bytes: u64 = files_of(path)?.iter().map(|f| f.metadata().map_or(0, |m| m.len())).sum();
    let mut reads = Vec::new();
    let mut loads = LOADS.map(|_| Vec::new());
    for _ in 0..rounds {
        reads.push(finish(vec![start(&["read", &path.display().to_string()])?])?);
        for ((threads, tp), loads) in LOADS.into_iter().zip(&mut loads) {
            let rank = |rank: usize| {
                let numbers = [rank, tp, threads].map(|n| n.to_string());
                start(&["rank", &path.display().to_string(), &numbers[0], &numbers[1], &numbers[2]])
            };
            loads.push(finish((0..tp).map(rank).collect::<Result<_>>()?)?);
        }
    }
    let read = best(&reads);
    println!(
        "{name}: file {} MiB; read once {:.2} s (CPU {:.2} + {:.2} s)",
        bytes >> 20,
        read.seconds,
        read.user,
        read.system
    );
    for ((threads, tp), loads) in LOADS.into_iter().zip(&loads) {
        let median = |cost: fn(&Figures) -> f64| {
            let mut ratios: Vec<f64> = loads.iter().zip(&reads).map(|(l, r)| cost(l) / cost(r)).collect();
            ratios.sort_by(f64::total_cmp);
            ratios[ratios.len() / 2]
        };
        let load = best(loads);
        println!(
            "  tp {tp} x {threads} threads: {:.2} s, of reading: time {:.2}, CPU {:.2}; CPU {:.2} + {:.2} s; \
             peak {:.0} MiB for {:.0} MiB of weights",
            load.seconds,
            median(|f| f.seconds),
            median(|f| f.user + f.system),
            load.user,
            load.system,
            load.peak,
            load.packed
        );
    }
    Ok(())
}

fn best(runs: &[Figures]) -> Figures {
    *runs.iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds)).expect("invariant: at least one round")
}

fn start(args: &[&str]) -> Result<Child> {
    Ok(Command::new(std::env::current_exe()?).args(args).stdout(Stdio::piped()).spawn()?)
}

/// The slowest time and the sum of the rest over the processes of one measure.
fn finish(children: Vec<Child>) -> Result<Figures> {
    let mut all = Figures { seconds: 0.0, user: 0.0, system: 0.0, peak: 0.0, packed: 0.0 };
    for child in children {
        let output = child.wait_with_output()?;
        let numbers: Vec<f64> = String::from_utf8(output.stdout)?
            .split_whitespace()
            .map(str::parse)
            .collect::<std::result::Result<_, _>>()?;
        let [seconds, user, system, peak, packed] = numbers[..] else { return Err("a child failed".into()) };
        all.seconds = all.seconds.max(seconds);
        all.user += user;
        all.system += system;
        all.peak += peak;
        all.packed += packed;
    }
    Ok(all)
}

/// Reads every file of the model into fresh memory.
fn read(path: &Path) -> Result<()> {
    tell(|| {
        for file in files_of(path)? {
            std::hint::black_box(std::fs::read(file)?);
        }
        Ok(0)
    })
}

/// Loads one rank's part.
fn load(path: &Path, parallel: ParallelInfo, threads: usize) -> Result<()> {
    let backend = CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() })?;
    tell(|| {
        let files = ModelFiles::open(path)?;
        let loader = Loader::new(&files, &backend, parallel, WeightMode::AsStored, &|_, _| {});
        Decoder::load(&loader, POSITIONS)?;
        Ok(loader.packed_bytes())
    })
}

/// Prints the figures of the quickest of a few runs of `work`, which gives the bytes it packed.
fn tell(work: impl Fn() -> Result<u64>) -> Result<()> {
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        let (started, [user, system]) = (Instant::now(), cpu_seconds()?);
        let packed = work()? as f64 / f64::from(1 << 20);
        let (seconds, [user_now, system_now]) = (started.elapsed().as_secs_f64(), cpu_seconds()?);
        runs.push(Figures {
            seconds,
            user: user_now - user,
            system: system_now - system,
            peak: peak_mib()?,
            packed,
        });
    }
    let Figures { seconds, user, system, packed, .. } = best(&runs);
    // The backend keeps the open part of its arena, so later runs have peaks that are not a load's.
    let peak = runs[0].peak;
    println!("{seconds} {user} {system} {peak} {packed}");
    Ok(())
}

/// User and system time of this process so far.
fn cpu_seconds() -> Result<[f64; 2]> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // After the name in parentheses: state is field 3, user and system time are 14 and 15, in 1/100 s.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    Ok([fields[11].parse::<f64>()? / 100.0, fields[12].parse::<f64>()? / 100.0])
}

/// Largest resident size of this process so far, MiB.
fn peak_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or("0").trim();
    Ok(peak.trim_end_matches("kB").trim().parse::<f64>()? / 1024.0)
}

fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let files = std::fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let is_weights = |p: &PathBuf| p.extension().is_some_and(|e| e == "safetensors" || e == "gguf");
    Ok(files.into_iter().filter(is_weights).collect())
}

/// Writes a model whose matrices are stored as `kind` and gives its path.
fn make(kind: &str, folder: &Path) -> Result<PathBuf> {
    let stored = match kind {
        "bf16" => GgmlType::Bf16,
        "f32" => GgmlType::F32,
        "q8_0" => GgmlType::Q8_0,
        _ => GgmlType::Q4K,
    };
    let spec = ModelSpec {
        vocab: 40_960,
        hidden: 2048,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        intermediate: 8192,
        layers: if stored == GgmlType::F32 { 3 } else { 7 },
        max_position: POSITIONS,
        tied: true,
        dtype: if stored == GgmlType::F32 { FileDType::F32 } else { FileDType::Bf16 },
        ..ModelSpec::default()
    };
    let config = spec.config_json().to_string();
    let rules = ModelRules::new(&hf::parse(config.as_bytes())?);
    let shapes = rules
        .iter()
        .flat_map(|rule| rule.pieces.iter().map(|piece| (piece.tensor.clone(), rule.stored_shape(piece))));
    let mut random = Random::new(1);
    // One random row, repeated: what the values are does not change the time.
    let mut data = |kind: GgmlType, shape: &[usize]| {
        let (cols, rows) = (shape[shape.len() - 1], shape[..shape.len() - 1].iter().product());
        blocks::random(kind, cols / kind.block_elements(), &mut random).repeat(rows)
    };
    if let GgmlType::Bf16 | GgmlType::F32 = stored {
        let dtype = if stored == GgmlType::F32 { "F32" } else { "BF16" };
        let tensor = |(name, shape): (String, Vec<usize>)| StoredTensor {
            name,
            dtype,
            bytes: data(stored, &shape),
            shape,
        };
        let bytes = encode_stored(&shapes.map(tensor).collect::<Vec<_>>());
        std::fs::write(folder.join("config.json"), config)?;
        std::fs::write(folder.join("model.safetensors"), bytes)?;
        return Ok(folder.to_owned());
    }
    let mut file: GgufWriter = gguf::model::from_spec(&spec, &Weights::new());
    for (name, shape) in shapes {
        let kind = if shape.len() == 1 { GgmlType::F32 } else { stored };
        file.tensor(&gguf_name(name), kind, &shape, data(kind, &shape));
    }
    let path = folder.join("model.gguf");
    file.write(&path)?;
    Ok(path)
}

/// What llama.cpp calls a tensor.
fn gguf_name(name: String) -> String {
    let names = [
        ("model.embed_tokens.", "token_embd."),
        ("model.norm.", "output_norm."),
        ("model.layers.", "blk."),
        ("input_layernorm.", "attn_norm."),
        ("post_attention_layernorm.", "ffn_norm."),
        ("self_attn.q_proj.", "attn_q."),
        ("self_attn.k_proj.", "attn_k."),
        ("self_attn.v_proj.", "attn_v."),
        ("self_attn.o_proj.", "attn_output."),
        ("mlp.gate_proj.", "ffn_gate."),
        ("mlp.up_proj.", "ffn_up."),
        ("mlp.down_proj.", "ffn_down."),
    ];
    names.into_iter().fold(name, |name, (from, to)| name.replace(from, to))
}
