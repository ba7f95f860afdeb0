//! Decode and prefill of one model on one rank, without processes around it.

use super::{bandwidth, cores};
use crate::checkpoint;
use crate::error::{CliError, Result};
use crate::flags::DecodeFlags;
use crate::output::say_line;
use crate::pull;
use crate::serve::memory;
use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_backend::cuda::{CudaBackend, CudaOptions};
use lockstep_backend::{AttentionBatch, AttentionRow, Backend, Choice, ForwardInput, KvLayout, RowChoice};
use lockstep_comm::collective::OneRank;
use lockstep_core::{DType, ExitCode, ModelConfig, ParallelInfo, SamplingParams, WeightMode};
use lockstep_engine::memory::{Allowance, Committed, check_before_loading};
use lockstep_model::{
    Decoder, DummyWeights, Loader, ModelRules, ShardBytes, WeightSource, Workspace, weight_types,
};
use std::path::Path;
use std::time::Instant;

/// Tokens per page of the benchmark's pool.
const PAGE_SIZE: usize = 16;
/// Steps before the clock starts: first use of a shape costs more.
const WARM_STEPS: usize = 3;

/// Prints decode and prefill speed of one model, on CPUs beside the floor.
pub fn decode(flags: &DecodeFlags) -> Result<()> {
    let flag_error = CliError::with(ExitCode::Flags);
    let mode = flags.weights.mode(&flags.device).map_err(&flag_error)?;
    let threads = flags.threads.unwrap_or_else(cores);
    let internal = CliError::with(ExitCode::Internal);
    match flags.device.as_str() {
        "cpu" => {
            let options = CpuOptions { threads, ..CpuOptions::default() };
            let backend = CpuBackend::new(options).map_err(&internal)?;
            let (step, weight_bytes) = measure(flags, backend, mode)?;
            let bandwidth = bandwidth(threads, true)?;
            let floor = weight_bytes as f64 / (bandwidth * 1e9);
            say_line(format_args!(
                "memory floor        {:>9.2} ms a step ({} MiB of weights at {bandwidth:.1} GB/s)",
                floor * 1e3,
                weight_bytes >> 20
            ))?;
            say_line(format_args!("share of the floor  {:>9.0} %", 100.0 * floor / step))?;
        }
        "cuda" => {
            let dtype = mode.cast().unwrap_or(DType::Bf16);
            let backend = CudaBackend::new(CudaOptions { gpu: 0, dtype }).map_err(&internal)?;
            let (step, weight_bytes) = measure(flags, backend, WeightMode::Cast(dtype))?;
            let rate = weight_bytes as f64 / step / 1e9;
            say_line(format_args!(
                "weights read        {rate:>9.0} GB/s ({} MiB a step)",
                weight_bytes >> 20
            ))?;
        }
        other => {
            let sentence = format!("--device {other} is not known; use cpu or cuda");
            return Err(CliError::new(ExitCode::Flags, sentence));
        }
    }
    Ok(())
}

/// Where the weights come from.
fn source(flags: &DecodeFlags, path: &Path, mode: WeightMode) -> Result<Box<dyn WeightSource>> {
    if !flags.dummy_weights {
        return Ok(Box::new(checkpoint::open(path)?));
    }
    let model = checkpoint::config_only(path, mode.cast())?;
    Ok(Box::new(DummyWeights::new(model.config, model.dtype, 1)))
}

/// Fails when this machine cannot hold what a CPU needs; a GPU says so itself when it is full.
fn check_memory<B: Backend>(
    flags: &DecodeFlags,
    source: &dyn WeightSource,
    backend: &B,
    mode: WeightMode,
) -> Result<()> {
    if flags.device != "cpu" {
        return Ok(());
    }
    let (bytes, origin) = memory::allowed()?;
    let rows = flags.prompt.max(flags.batch);
    let expected = Committed {
        kept_bytes: Run::layout(flags, source.config(), backend).pool_bytes(),
        ..Committed::expected::<B>(source, ParallelInfo::SINGLE, mode, (rows, flags.batch))
    };
    let allowed = Allowance {
        who: "this command",
        bytes,
        origin: &origin,
        rest: "anything else",
        remedy: "give a smaller --prompt or --batch, --dtype bf16, or use a machine with more memory",
    };
    check_before_loading(&allowed, expected).map_err(|e| CliError::new(e.exit_code(), e))
}

/// Seconds of a decode step, and the bytes of weights that it reads.
fn measure<B: Backend>(flags: &DecodeFlags, backend: B, mode: WeightMode) -> Result<(f64, usize)> {
    let path = pull::resolve(&flags.model, &pull::cache_dir(None))?;
    let internal = CliError::with(ExitCode::Internal);
    let source = source(flags, &path, mode)?;
    check_memory::<B>(flags, &*source, &backend, mode)?;
    let start = Instant::now();
    say_line(format_args!("{} on {}", path.display(), backend.describe()))?;
    let mut run = Run::load(flags, &*source, backend, mode).map_err(&internal)?;
    say_line(format_args!("load                {:>9.2} s", start.elapsed().as_secs_f64()))?;
    let vocab = source.config().vocab_size as u32;
    let prompt: Vec<u32> = (0..flags.prompt as u32).map(|i| 1 + i * 37 % (vocab - 1)).collect();
    run.prefill(&prompt[..prompt.len().min(16)])?;
    run.prefill(&prompt)?;
    let start = Instant::now();
    run.prefill(&prompt)?;
    let seconds = start.elapsed().as_secs_f64();
    say_line(format_args!(
        "prefill {:>5}       {:>9.1} tokens/s ({:.2} ms)",
        prompt.len(),
        prompt.len() as f64 / seconds,
        seconds * 1e3
    ))?;
    for i in 0..WARM_STEPS {
        run.step(flags.prompt + i)?;
    }
    let start = Instant::now();
    for i in 0..flags.tokens {
        run.step(flags.prompt + WARM_STEPS + i)?;
    }
    let step = start.elapsed().as_secs_f64() / flags.tokens as f64;
    say_line(format_args!(
        "decode, batch {:<5} {:>9.1} tokens/s ({:.2} ms a step)",
        flags.batch,
        flags.batch as f64 / step,
        step * 1e3
    ))?;
    Ok((step, run.weight_bytes))
}

/// Positions of a request.
fn positions(flags: &DecodeFlags) -> usize {
    flags.prompt + flags.tokens + WARM_STEPS + 1
}

fn pages_of_request(flags: &DecodeFlags) -> usize {
    positions(flags).div_ceil(PAGE_SIZE)
}

/// One rank's model.
struct Run<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    work: Workspace<B>,
    cache: B::KvCache,
    batch: usize,
    vocab_size: usize,
    pages_of_request: usize,
    weight_bytes: usize,
}

impl<B: Backend> Run<B> {
    fn load(
        flags: &DecodeFlags,
        source: &dyn WeightSource,
        backend: B,
        mode: WeightMode,
    ) -> anyhow::Result<Self> {
        let (parallel, model) = (ParallelInfo::SINGLE, source.config());
        let positions = positions(flags);
        anyhow::ensure!(
            positions <= model.max_position,
            "--prompt and --tokens make {positions} positions, but the model has {}",
            model.max_position
        );
        let silent = |_: usize, _: usize| {};
        let loader = Loader::new(source, &backend, parallel, mode, &silent);
        let decoder = Decoder::load(&loader, positions)?;
        // A step reads every weight once, but of an embedding that is not also the head only a few rows.
        let type_of = weight_types(source, mode, B::TAKES_CODES);
        let vocabulary = ShardBytes::of(&ModelRules::new(model), parallel, type_of).vocabulary;
        let unread = if model.tie_word_embeddings { 0 } else { vocabulary / 2 };
        let weight_bytes = loader.packed_bytes() as usize - unread;
        let rows = flags.prompt.max(flags.batch);
        let work = Workspace::new(&backend, model, parallel, rows, flags.batch)?;
        let cache = backend.kv_cache(Self::layout(flags, model, &backend))?;
        Ok(Self {
            backend,
            decoder,
            work,
            cache,
            batch: flags.batch,
            vocab_size: model.vocab_size,
            pages_of_request: pages_of_request(flags),
            weight_bytes,
        })
    }

    /// Pages for all requests.
    fn layout(flags: &DecodeFlags, model: &ModelConfig, backend: &B) -> KvLayout {
        KvLayout {
            local_layers: model.num_layers,
            local_kv_heads: model.num_kv_heads,
            head_dim: model.head_dim,
            page_size: PAGE_SIZE,
            num_pages: pages_of_request(flags) * flags.batch,
            dtype: backend.kv_dtype(),
        }
    }

    /// The prompt of the first request, from its start.
    fn prefill(&mut self, tokens: &[u32]) -> Result<()> {
        self.forward(tokens, &(0..tokens.len() as u32).collect::<Vec<_>>(), 1)
    }

    /// One token of every request at `position`.
    fn step(&mut self, position: usize) -> Result<()> {
        let tokens: Vec<u32> = (0..self.batch as u32).map(|i| 1 + i).collect();
        self.forward(&tokens, &vec![position as u32; self.batch], self.batch)
    }

    /// `requests` rows of equally many tokens; waits for the best token after each row.
    fn forward(&mut self, tokens: &[u32], positions: &[u32], requests: usize) -> Result<()> {
        let pages: Vec<u32> = (0..(self.pages_of_request * requests) as u32).collect();
        let each = tokens.len() / requests;
        let (mut rows, mut slots) = (Vec::new(), Vec::new());
        for request in 0..requests {
            let first = request * each;
            rows.push(AttentionRow {
                first_token: first as u32,
                token_count: each as u32,
                start_position: positions[first],
                first_page: (request * self.pages_of_request) as u32,
            });
            let start = request * self.pages_of_request * PAGE_SIZE;
            slots.extend(positions[first..first + each].iter().map(|p| start as u32 + p));
        }
        let logit_tokens: Vec<u32> = (1..=requests).map(|n| (n * each - 1) as u32).collect();
        let input = ForwardInput {
            token_ids: tokens,
            positions,
            slots: &slots,
            batch: AttentionBatch { rows: &rows, pages: &pages },
            logit_tokens: &logit_tokens,
        };
        let context = (&mut self.backend, &OneRank as &dyn lockstep_comm::collective::Collective);
        self.decoder
            .forward(context, &input, &mut self.cache, &mut self.work)
            .map_err(CliError::with(ExitCode::Internal))?;
        let internal = CliError::with(ExitCode::Internal);
        // As a server does it for greedy requests.
        let greedy = vec![RowChoice::new(&SamplingParams::default(), 0); requests];
        if !self.backend.can_choose(&greedy[0]) {
            std::hint::black_box(self.backend.read(self.work.logits(), requests).map_err(&internal)?);
            return Ok(());
        }
        let choice = Choice {
            rows: &greedy,
            changes: &[],
            first_id: 0,
            local_vocab: self.decoder.vocab_shard().padded.len(),
            local_real: self.vocab_size,
            vocab_size: self.vocab_size,
        };
        self.backend.choose(&OneRank, self.work.logits_mut(), &choice).map_err(&internal)?;
        self.backend.take_chosen(&mut Vec::new()).map_err(&internal)
    }
}
