//! `lockstep verify`: the same answers at every tp size, with every number of stages, on every device, and at every chunking, page size, batch and
//! cache hit? Exit code 0 says yes.

use crate::checkpoint;
use crate::error::{CliError, Result};
use crate::flags::verify::VerifyFlags;
use crate::output::say;
use crate::pull;
use crate::serve::memory;
use lockstep_backend::cuda;
use lockstep_core::limits::FLAG_FILE_BYTES_MAX;
use lockstep_core::{
    DType, ExitCode, HostMap, ModelConfig, StageLayers, TokenId, Topology, WeightMode, files, shard,
};
use lockstep_engine::{DeviceConfig, GpuPlan};
use lockstep_model::{DummyWeights, WeightSource, has_codes};
use lockstep_tokenizer::{TextModel, TextOptions};
use lockstep_verify::{Device, Options, Report, WholeSource, check_device, report, verify};
use std::io::{IsTerminal, Write};
use std::path::Path;

/// What is asked when no file of prompts is given: prose, code, another script, a word, a long text.
const PROMPTS: [&str; 4] = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "写一首关于春天的短诗：",
    "Once",
];
/// Repeated to make the long prompt.
const SENTENCE: &str = "A rank that waits for another must say for which one, and since when. ";
/// Repetitions of [`SENTENCE`]: longer than a chunk and than several pages.
const REPEATS: usize = 12;
/// Length of made-up prompts for a model without a tokenizer.
const MADE_UP: [usize; 4] = [1, 7, 40, 200];
/// Longest answer: the logits of all its positions are held, twice.
const TOKENS_MAX: usize = 512;
/// Most threads that a rank may have.
const THREADS_MAX: usize = 1024;

/// Runs all comparisons and prints them.
pub fn run(flags: &VerifyFlags) -> Result<()> {
    let flag_error = CliError::with::<anyhow::Error>(ExitCode::Flags);
    if flags.gpus.share_gpu {
        // SAFETY: the command has no other thread yet, and has not looked at a GPU.
        unsafe { cuda::load_kernels_at_once() };
    }
    let mode = verify_mode(flags).map_err(&flag_error)?;
    check(flags).map_err(&flag_error)?;
    let path = pull::resolve(&flags.model, &pull::cache_dir(flags.cache_dir.clone()))?;
    let (source, notes): (Box<dyn WeightSource>, _) = match flags.dummy_weights {
        Some(seed) => {
            let model = checkpoint::config_only(&path, mode.cast())?;
            (Box::new(DummyWeights::new(model.config, model.dtype, seed)), model.notes)
        }
        None => {
            let files = checkpoint::open(&path)?;
            let notes = checkpoint::notes(&files);
            (Box::new(files), notes)
        }
    };
    let devices = devices(flags, mode, has_codes(&*source, mode)).map_err(&flag_error)?;
    let on_gpus = devices.iter().any(|device| matches!(device, Device::Cuda { .. }));
    let tp_sizes = tp_sizes(flags, source.config(), on_gpus)?;
    let pp_sizes = pp_sizes(flags, source.config())?;
    let max = |sizes: &[usize]| sizes.iter().copied().max().unwrap_or(1);
    let topology = Topology { pp_size: max(&pp_sizes), ..Topology::tensor_parallel(max(&tp_sizes)) };
    let largest = topology.world_size();
    let kind = if on_gpus { "cuda" } else { "cpu" };
    let gpus =
        match flags.gpus.device(kind, None, (&topology, &HostMap::single(&topology))).map_err(&flag_error)? {
            DeviceConfig::Cuda { gpus, .. } => gpus,
            DeviceConfig::Cpu => GpuPlan::default(),
        };
    // Before the reference runs, which takes longer.
    devices
        .iter()
        .try_for_each(|&device| check_device(device, &gpus, largest))
        .map_err(CliError::with(ExitCode::Flags))?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let prompts = prompts(flags, &path, source.config())?;
    let (memory_bytes, memory_origin) = memory::allowed()?;
    let options = Options {
        memory_bytes,
        memory_origin,
        devices,
        prompts,
        tokens: flags.tokens,
        threads: flags.threads.unwrap_or((cores / largest).max(1)),
        bisect: flags.bisect,
        gpus,
        tp_sizes,
        pp_sizes,
    };
    let verdict = compared(flags, &WholeSource(&*source), &options, notes);
    if let Err(error) = &verdict
        && on_gpus
    {
        // A GPU may wait for a rank that has stopped; the CUDA libraries would wait with it when the process ends.
        let _ = writeln!(std::io::stderr(), "lockstep: {}", error.message);
        cuda::exit_process(error.code.code());
    }
    verdict
}

/// Runs all comparisons and prints them. Errors when one failed.
fn compared(
    flags: &VerifyFlags,
    subject: &WholeSource<'_>,
    options: &Options,
    notes: Vec<String>,
) -> Result<()> {
    let show = std::io::stderr().is_terminal();
    let progress = |what: &str| {
        if show {
            // Decoration: nobody reading it is no error.
            let _ = write!(std::io::stderr(), "\r\x1b[K{what} ...");
        }
    };
    let found = verify(subject, options, &progress);
    if show {
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
    let found: Report = found.map_err(|error| {
        let message = error.to_string();
        CliError::new(error.exit_code(), message)
    })?;
    let found = Report { notes, ..found };
    say(match flags.json {
        true => serde_json::to_string_pretty(&found).map_err(CliError::with(ExitCode::Internal))? + "\n",
        false => report::render(&found),
    })?;
    match found.passed() {
        true => Ok(()),
        false => Err(CliError::new(ExitCode::Internal, "the answers are not what was promised; see above")),
    }
}

/// The form of weights asked for; GPUs among the devices rule some out.
fn verify_mode(flags: &VerifyFlags) -> anyhow::Result<WeightMode> {
    let on_gpus = flags.device.iter().any(|name| name == "cuda");
    flags.weights.mode(if on_gpus { "cuda" } else { "cpu" })
}

/// The devices asked for, each once. Beside GPUs the CPU is the exact f32 reference; GPUs compute in bf16 unless told
/// otherwise, as `serve` does.
fn devices(flags: &VerifyFlags, mode: WeightMode, coded: bool) -> anyhow::Result<Vec<Device>> {
    let beside_gpus = flags.device.iter().any(|name| name == "cuda");
    let mut devices = Vec::new();
    for name in &flags.device {
        let device = match name.as_str() {
            "auto" | "cpu" if beside_gpus => {
                Device::Cpu { weights: WeightMode::Cast(DType::F32), coded: false }
            }
            "auto" | "cpu" => Device::Cpu { weights: mode, coded },
            "cuda" => Device::Cuda { dtype: mode.cast().unwrap_or(DType::Bf16) },
            other => anyhow::bail!("--device {other} is not known; use auto, cpu, cuda or cpu,cuda"),
        };
        anyhow::ensure!(!devices.contains(&device), "--device names {name} twice; give each device once");
        devices.push(device);
    }
    Ok(devices)
}

fn check(flags: &VerifyFlags) -> anyhow::Result<()> {
    if !(1..=TOKENS_MAX).contains(&flags.tokens) {
        anyhow::bail!("--tokens {} is outside 1 to {TOKENS_MAX}", flags.tokens);
    }
    if let Some(threads) = flags.threads.filter(|threads| !(1..=THREADS_MAX).contains(threads)) {
        anyhow::bail!("--threads {threads} is outside 1 to {THREADS_MAX}");
    }
    Ok(())
}

/// The numbers of stages asked for, each legal and once.
fn pp_sizes(flags: &VerifyFlags, config: &ModelConfig) -> Result<Vec<usize>> {
    let mut sizes = Vec::new();
    for &pp in &flags.pp {
        let size = usize::try_from(pp).unwrap_or(0);
        StageLayers::of_stages(config, size, None).map_err(CliError::with(ExitCode::Flags))?;
        if sizes.contains(&size) {
            let sentence = format!("--pp names {pp} twice; give each number once");
            return Err(CliError::new(ExitCode::Flags, sentence));
        }
        sizes.push(size);
    }
    Ok(sizes)
}

/// The sizes asked for, each legal and once.
fn tp_sizes(flags: &VerifyFlags, config: &ModelConfig, on_gpus: bool) -> Result<Vec<usize>> {
    let asked: Vec<i64> = match flags.tp.is_empty() {
        // How many GPUs are there for the taking is not this command's to guess.
        true if on_gpus => vec![1],
        true => [1, 2, 4].into_iter().filter(|&tp| shard::check_tp_size(config, tp).is_ok()).collect(),
        false => flags.tp.clone(),
    };
    let mut sizes = Vec::new();
    for tp in asked {
        shard::check_tp_size(config, tp).map_err(CliError::with(ExitCode::Flags))?;
        if sizes.contains(&(tp as usize)) {
            return Err(CliError::new(
                ExitCode::Flags,
                format!("--tp names {tp} twice; give each size once"),
            ));
        }
        sizes.push(tp as usize);
    }
    Ok(sizes)
}

/// Prompts as tokens that leave room for the answer. A model with made-up weights needs no tokenizer.
fn prompts(flags: &VerifyFlags, path: &Path, config: &ModelConfig) -> Result<Vec<Vec<TokenId>>> {
    let room = config.max_position.saturating_sub(flags.tokens + 1);
    if room == 0 {
        return Err(CliError::new(
            ExitCode::Flags,
            format!(
                "--tokens {} fill the model's {} positions; ask for fewer",
                flags.tokens, config.max_position
            ),
        ));
    }
    let mut prompts: Vec<Vec<TokenId>> = match (&flags.prompts, flags.dummy_weights) {
        (None, Some(_)) => {
            let token = |i: usize| ((1 + i * 7919) % config.vocab_size) as TokenId;
            MADE_UP.iter().map(|&len| (0..len).map(|i| token(i + len)).collect()).collect()
        }
        (file, _) => encoded(file.as_deref(), path)?,
    };
    for (index, prompt) in prompts.iter_mut().enumerate() {
        if flags.prompts.is_some() && prompt.len() > room {
            let sentence = format!(
                "prompt {} of --prompts has {} tokens; the model's {} positions leave {room} beside --tokens {}; shorten it",
                index + 1,
                prompt.len(),
                config.max_position,
                flags.tokens
            );
            return Err(CliError::new(ExitCode::Flags, sentence));
        }
        // Only our own prompts are cut: any length of them will do.
        prompt.truncate(room);
        if let Some(token) = prompt.iter().find(|token| **token as usize >= config.vocab_size) {
            let sentence = format!(
                "the tokenizer gives token id {token}, outside the model's vocabulary of {}; its files belong to \
                 another model",
                config.vocab_size
            );
            return Err(CliError::new(ExitCode::ModelFiles, sentence));
        }
    }
    Ok(prompts)
}

fn encoded(file: Option<&Path>, model: &Path) -> Result<Vec<Vec<TokenId>>> {
    let texts: Vec<String> = match file {
        None => PROMPTS.iter().map(|p| (*p).to_owned()).chain([SENTENCE.repeat(REPEATS)]).collect(),
        Some(file) => {
            let text = files::read_text(file, FLAG_FILE_BYTES_MAX)
                .map_err(|e| CliError::new(ExitCode::Flags, format!("--prompts: {e}")))?;
            text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect()
        }
    };
    if let (true, Some(file)) = (texts.is_empty(), file) {
        let sentence =
            format!("--prompts {} holds no line with text; write one prompt a line", file.display());
        return Err(CliError::new(ExitCode::Flags, sentence));
    }
    let model_files = CliError::with(ExitCode::ModelFiles);
    let tokenizer = TextModel::load(model, &TextOptions::default()).map_err(model_files)?;
    texts
        .iter()
        .map(|text| tokenizer.encode(text, true).map_err(|r| CliError::new(ExitCode::Flags, r.message)))
        .collect()
}
