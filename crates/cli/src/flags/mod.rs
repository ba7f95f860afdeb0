//! Command-line flags: one file per group, one field per flag with its default, help and checks.
//!
//! Parsing (clap) and validation (`validated()` of each group) are separate, so that every check
//! that needs more than one flag is written once. Spellings of mini-SGLang and SGLang are accepted
//! as aliases. `docs/operations.md` lists the same flags.

pub mod batch;
pub mod batching;
pub mod bench_serve;
pub mod chat;
pub mod client;
pub mod connections;
pub mod gpus;
pub mod hosts;
pub mod logging;
pub mod memory;
pub mod model;
pub mod parallel;
pub mod plan;
pub mod server;
pub mod trace;
pub mod verify;

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Lockstep: an LLM serving engine with multi-process tensor parallelism.
#[derive(Parser, Debug)]
#[command(name = "lockstep", version, about, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Commands of the binary.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Start a server: one process per rank, plus tokenizer, detokenizer and the HTTP API.
    Serve(Box<ServeFlags>),
    /// Talk to a model: of a running server, or of one that is started for it.
    Chat(chat::ChatFlags),
    /// Answer a file of requests in OpenAI's batch format; continues where an earlier run ended.
    Batch(batch::BatchFlags),
    /// Show what a model takes and how fast it will be at each tp size, on a device you name; loads nothing.
    Plan(plan::PlanFlags),
    /// Check that answers are the same at every tp size, chunking, page size, batch and cache hit.
    Verify(verify::VerifyFlags),
    /// Fetch a model of the catalogue or the hub into the cache directory and print its path.
    Pull(PullFlags),
    /// Run a rank's scheduler again on a flight recording and compare every decision; needs no model.
    Replay(ReplayFlags),
    /// Measure this machine and what the backend makes of it.
    Bench(BenchFlags),
    /// Record for some seconds what every rank of a running server does, into a file for Perfetto.
    Trace(trace::TraceFlags),
    /// Compare every operation of a device with the CPU backend's, on random shapes; needs no model.
    Selftest(SelftestFlags),
    /// Show what this machine has for a server, whether each device can be used, and how fast it is.
    Doctor(DoctorFlags),
}

/// Flags of `lockstep serve`. Negative numbers parse as values, so that the message about them names
/// the flag's range.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub struct ServeFlags {
    /// Which model.
    #[command(flatten)]
    pub model: model::ModelFlags,
    /// Where to listen.
    #[command(flatten)]
    pub server: server::ServerFlags,
    /// How clients connect.
    #[command(flatten)]
    pub connections: connections::ConnectionFlags,
    /// How many processes.
    #[command(flatten)]
    pub parallel: parallel::ParallelFlags,
    /// On which hosts.
    #[command(flatten)]
    pub hosts: hosts::HostFlags,
    /// Which GPUs.
    #[command(flatten)]
    pub gpus: gpus::GpuFlags,
    /// How requests share a step.
    #[command(flatten)]
    pub batching: batching::BatchingFlags,
    /// How much memory.
    #[command(flatten)]
    pub memory: memory::MemoryFlags,
    /// What to log.
    #[command(flatten)]
    pub logging: logging::ServeLoggingFlags,
}

/// Flags of `lockstep replay`.
#[derive(Args, Debug)]
pub struct ReplayFlags {
    /// A file written to `--flight-dir`.
    pub file: PathBuf,
}

/// Flags of `lockstep pull`.
#[derive(Args, Debug)]
pub struct PullFlags {
    /// Catalogue name or `org/name[@revision][:file.gguf]` of the hub; without one the catalogue is listed.
    pub name: Option<String>,
    /// Where models are kept [default: $LOCKSTEP_CACHE, else the user's cache directory].
    #[arg(long)]
    pub cache_dir: Option<PathBuf>,
    /// What to log.
    #[command(flatten)]
    pub logging: logging::LoggingFlags,
}

/// Flags of `lockstep selftest`.
#[derive(Args, Debug)]
pub struct SelftestFlags {
    /// The device: cuda.
    #[arg(long, default_value = "cuda")]
    pub device: String,
    /// Index of the GPU.
    #[arg(long, default_value_t = 0)]
    pub gpu: usize,
    /// The types to compute in.
    #[arg(long, value_delimiter = ',', default_values = ["bf16", "f16", "f32"])]
    pub dtype: Vec<String>,
    /// Random cases of each operation.
    #[arg(long, default_value_t = 40)]
    pub cases: usize,
    /// What the cases are drawn from.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// What to log.
    #[command(flatten)]
    pub logging: logging::LoggingFlags,
}

/// Flags of `lockstep doctor`.
#[derive(Args, Debug)]
pub struct DoctorFlags {
    /// The device that must be usable, else the command fails: cpu, cuda, or auto for any.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Measure nothing.
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// What to log.
    #[command(flatten)]
    pub logging: logging::LoggingFlags,
}

/// Flags of `lockstep bench`.
#[derive(Args, Debug)]
pub struct BenchFlags {
    /// What to measure.
    #[command(subcommand)]
    pub what: BenchCommand,
}

/// Benchmarks.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Memory bandwidth, FMA rate and shared-memory collectives of this machine.
    Hw(HwFlags),
    /// Every column of the table of CPU workloads beside its floor on this machine, without HTTP.
    Cpu(CpuFlags),
    /// Decode at batch 1 and prefill of a model, against the floor of this machine, in process.
    Decode(DecodeFlags),
    /// Sums over the ranks' GPUs by size: our own kernels in one shot and in two, and NCCL.
    Comm(CommFlags),
    /// HTTP load against any server that speaks OpenAI's API: latency percentiles and throughput.
    Serve(Box<bench_serve::BenchServeFlags>),
    /// Throughput of the engine on requests of random lengths, all there at once, without HTTP.
    Offline(OfflineFlags),
    /// Prefill time and time per output token of the engine, by batch, without HTTP.
    ///
    /// A batch of B are B requests that are submitted at once. "prefill ms" passes until each of them has a token.
    /// "TPOT ms" is the median time from one token of a request to its next, counted only while all B decode: where each had
    /// a token before and has got one meanwhile, in one step or, with --pp, shared out over the steps in flight. "tokens/s" is
    /// B / TPOT.
    Latency(LatencyFlags),
}

/// What both engine benchmarks run.
#[derive(Args, Debug)]
pub struct EngineFlags {
    /// Catalogue name, folder, GGUF file, or org/name of the hub.
    #[arg(long)]
    pub model: String,
    /// cpu or cuda.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Form of weights.
    #[command(flatten)]
    pub weights: model::WeightFlags,
    /// Make weights up from a seed; the model may then be a folder with only a config.json.
    #[arg(long)]
    pub dummy_weights: bool,
    /// Ranks of each stage, as threads of this process.
    #[arg(long, default_value_t = 1)]
    pub tp: usize,
    /// Pipeline stages, on CPUs.
    #[arg(long, default_value_t = 1)]
    pub pp: usize,
    /// Which GPUs.
    #[command(flatten)]
    pub gpus: gpus::GpuFlags,
    /// Threads of all ranks together [default: all cores].
    #[arg(long)]
    pub threads: Option<usize>,
    /// How requests share a step.
    #[command(flatten)]
    pub batching: batching::BatchingFlags,
    /// How much memory.
    #[command(flatten)]
    pub memory: memory::MemoryFlags,
    /// What the requests are drawn from.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// What to log.
    #[command(flatten)]
    pub logging: logging::LoggingFlags,
}

/// Flags of `lockstep bench offline`; the defaults are the workload that mini-SGLang and nano-vllm publish.
#[derive(Args, Debug)]
pub struct OfflineFlags {
    /// What runs.
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Requests.
    #[arg(long, default_value_t = 256)]
    pub requests: usize,
    /// Shortest prompt and answer in tokens; lengths are uniform.
    #[arg(long, default_value_t = 100)]
    pub length_min: usize,
    /// Longest prompt and answer in tokens.
    #[arg(long, default_value_t = 1024)]
    pub length_max: usize,
    /// Sampling temperature.
    #[arg(long, default_value_t = 0.6)]
    pub temperature: f32,
}

/// Flags of `lockstep bench cpu`.
#[derive(Args, Debug)]
pub struct CpuFlags {
    /// What runs.
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Repetitions of each workload, with fresh prompts; the median counts.
    #[arg(long, default_value_t = 3)]
    pub repeat: usize,
}

/// Flags of `lockstep bench latency`.
#[derive(Args, Debug)]
pub struct LatencyFlags {
    /// What runs.
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Requests that run at once; a row each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32])]
    pub batch: Vec<usize>,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 1024)]
    pub prompt: usize,
    /// Tokens of each answer.
    #[arg(long, default_value_t = 64)]
    pub tokens: usize,
    /// Sampling temperature.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
}

/// Flags of `lockstep bench hw`.
#[derive(Args, Debug)]
pub struct HwFlags {
    /// Threads to measure with [default: 1 and all cores].
    #[arg(long)]
    pub threads: Option<usize>,

    /// Also decode this model (catalogue name, folder or GGUF file) and print its share of the memory floor.
    #[arg(long)]
    pub model: Option<String>,
}

/// Flags of `lockstep bench comm`.
#[derive(Args, Debug)]
pub struct CommFlags {
    /// The device: cuda.
    #[arg(long, default_value = "cuda")]
    pub device: String,
    /// Ranks, as threads of this process.
    #[arg(long, default_value_t = 2)]
    pub tp: usize,
    /// Which GPUs.
    #[command(flatten)]
    pub gpus: gpus::GpuFlags,
    /// Type of the elements: bf16, f16 or f32.
    #[arg(long, default_value = "bf16")]
    pub dtype: String,
    /// Rows of the sums that end half layers.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128, 256])]
    pub tokens: Vec<usize>,
    /// Columns of those.
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 5120])]
    pub hidden: Vec<usize>,
    /// Sizes of plain sums in KiB.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536])]
    pub kib: Vec<usize>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// What to log.
    #[command(flatten)]
    pub logging: logging::LoggingFlags,
}

/// Flags of `lockstep bench decode`.
#[derive(Args, Debug)]
pub struct DecodeFlags {
    /// Catalogue name, folder or GGUF file.
    #[arg(long)]
    pub model: String,
    /// Threads [default: all cores].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Tokens to decode.
    #[arg(long, default_value_t = 64)]
    pub tokens: usize,
    /// Prompt tokens of the prefill measurement.
    #[arg(long, default_value_t = 512)]
    pub prompt: usize,
    /// Requests that decode at once.
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// cpu or cuda.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Form of weights [default: the file's own, on GPUs bf16].
    #[command(flatten)]
    pub weights: model::WeightFlags,
    /// Make weights up from a seed; the model may then be a folder with only a config.json.
    #[arg(long)]
    pub dummy_weights: bool,
}
