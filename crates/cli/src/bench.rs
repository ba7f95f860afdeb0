//! `lockstep bench`: what this machine can do, and what the CPU backend makes of it.

use crate::error::{CliError, Result};
use crate::flags::{DecodeFlags, HwFlags};
use crate::pull;
use lockstep_backend::cpu::{CpuBackend, CpuOptions, probe};
use lockstep_backend::{AttentionBatch, AttentionRow, Backend, KvLayout};
use lockstep_comm::collective::OneRank;
use lockstep_comm::shm::{SharedRegion, ShmCollective, ShmGroup, ShmLayout, ShmOptions};
use lockstep_core::{DType, ExitCode, ModelConfig, ParallelInfo};
use lockstep_model::{Decoder, ForwardInput, Loader, ShardBytes, Workspace};
use lockstep_weights::ModelFiles;
use std::sync::Arc;
use std::time::Instant;

/// Bytes read by the bandwidth probe: larger than any cache.
const PROBE_BYTES: usize = 1 << 30;
/// Rounds of each collective.
const COLLECTIVE_ROUNDS: usize = 20_000;
/// Tokens per page of the benchmark's pool.
const PAGE_SIZE: usize = 16;

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn bandwidth(threads: usize, huge: bool) -> Result<f64> {
    probe::bandwidth_gbs(threads, PROBE_BYTES, huge).map_err(CliError::with(ExitCode::Memory))
}

/// Prints bandwidth, FMA rate and collective times.
pub fn hardware(flags: &HwFlags) -> Result<()> {
    let mut threads = vec![1];
    threads.extend(flags.threads.or(Some(cores())).filter(|&n| n > 1));
    println!(
        "{:>7}  {:>18}  {:>18}  {:>14}",
        "threads", "read GB/s (huge)", "read GB/s (4 KiB)", "f32 FMA GFLOP/s"
    );
    for &n in &threads {
        println!(
            "{n:>7}  {:>18.1}  {:>18.1}  {:>14.0}",
            bandwidth(n, true)?,
            bandwidth(n, false)?,
            probe::fma_gflops(n)
        );
    }
    println!("\nshared memory, two threads of this process:");
    two_ranks().map_err(CliError::with(ExitCode::Internal))?;
    let Some(model) = &flags.model else { return Ok(()) };
    println!();
    decode(&DecodeFlags { model: model.clone(), threads: flags.threads, tokens: 64, prompt: 512 })
}

/// Latencies of barrier and all-reduce between two ranks, as threads with a rank's shared memory.
fn two_ranks() -> anyhow::Result<()> {
    let fd = SharedRegion::create(ShmLayout::new(2, ShmLayout::SLOT_BYTES_DEFAULT)?)?;
    let region = Arc::new(SharedRegion::map(&fd)?);
    let measure =
        |rank: usize, region: Arc<SharedRegion>| -> anyhow::Result<Vec<lockstep_comm::bench::Latency>> {
            let options = ShmOptions::for_ranks(2);
            let mut group = ShmGroup::new(Arc::clone(&region), rank, options)?;
            let collective = ShmCollective::new(region, rank, options)?;
            Ok(lockstep_comm::bench::measure(&mut group, &collective, COLLECTIVE_ROUNDS)?)
        };
    std::thread::scope(|scope| {
        let other = Arc::clone(&region);
        let peer = scope.spawn(move || measure(1, other).map(drop));
        for row in measure(0, region)? {
            println!("{row}");
        }
        peer.join().map_err(|_| anyhow::anyhow!("the second rank panicked"))?
    })
}

/// Prints decode and prefill speed of one model beside the floor.
pub fn decode(flags: &DecodeFlags) -> Result<()> {
    let threads = flags.threads.unwrap_or_else(cores);
    let path = pull::resolve(&flags.model, &pull::cache_dir(None))?;
    let files = ModelFiles::open(&path).map_err(CliError::with(ExitCode::ModelFiles))?;
    let model = files.config().clone();
    let positions = (flags.prompt + flags.tokens + 1).min(model.max_position);
    let start = Instant::now();
    let mut run =
        Run::load(&files, &model, threads, positions).map_err(CliError::with(ExitCode::Internal))?;
    println!("{}: {}, {} threads", path.display(), files.source_label(), threads);
    println!("load                {:>9.2} s", start.elapsed().as_secs_f64());
    let prompt: Vec<u32> =
        (0..flags.prompt as u32).map(|i| 1 + i * 37 % (model.vocab_size as u32 - 1)).collect();
    run.forward(&prompt[..prompt.len().min(16)], 0)?;
    let start = Instant::now();
    run.forward(&prompt, 0)?;
    let seconds = start.elapsed().as_secs_f64();
    println!("prefill {:>5}       {:>9.1} tokens/s", prompt.len(), prompt.len() as f64 / seconds);
    let start = Instant::now();
    for i in 0..flags.tokens {
        run.forward(&[1 + i as u32], prompt.len() + i)?;
    }
    let step = start.elapsed().as_secs_f64() / flags.tokens as f64;
    let bandwidth = bandwidth(threads, true)?;
    let floor = run.weight_bytes as f64 / (bandwidth * 1e9);
    println!("decode, batch 1     {:>9.1} tokens/s ({:.2} ms a step)", 1.0 / step, step * 1e3);
    println!(
        "memory floor        {:>9.2} ms a step ({} MiB of weights at {bandwidth:.1} GB/s)",
        floor * 1e3,
        run.weight_bytes >> 20
    );
    println!("share of the floor  {:>9.0} %", 100.0 * floor / step);
    Ok(())
}

/// One rank's model without processes around it.
struct Run {
    backend: CpuBackend,
    decoder: Decoder<CpuBackend>,
    work: Workspace<CpuBackend>,
    cache: <CpuBackend as Backend>::KvCache,
    pages: Vec<u32>,
    weight_bytes: usize,
}

impl Run {
    fn load(
        files: &ModelFiles,
        model: &ModelConfig,
        threads: usize,
        positions: usize,
    ) -> anyhow::Result<Self> {
        let backend = CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() })?;
        let parallel = ParallelInfo::SINGLE;
        let silent = |_: usize, _: usize| {};
        let loader = Loader::new(files, &backend, parallel, None, &silent);
        let decoder = Decoder::load(&loader, positions)?;
        // A step reads every weight once, but of an embedding that is not also the head only a few rows.
        let shard = ShardBytes::new(
            model,
            parallel,
            files.dtype_of("model.embed_tokens.weight").unwrap_or(DType::F32),
        );
        let unread = if model.tie_word_embeddings { 0 } else { shard.vocabulary / 2 };
        let weight_bytes = loader.packed_bytes() as usize - unread;
        let work = Workspace::new(&backend, model, parallel, positions, 1)?;
        let num_pages = positions.div_ceil(PAGE_SIZE);
        let cache = backend.kv_cache(KvLayout {
            local_layers: model.num_layers,
            local_kv_heads: model.num_kv_heads,
            head_dim: model.head_dim,
            page_size: PAGE_SIZE,
            num_pages,
        })?;
        Ok(Self { backend, decoder, work, cache, pages: (0..num_pages as u32).collect(), weight_bytes })
    }

    /// Runs `tokens` at `start`; logits of the last.
    fn forward(&mut self, tokens: &[u32], start: usize) -> Result<()> {
        let positions: Vec<u32> = (start..start + tokens.len()).map(|p| p as u32).collect();
        let row = AttentionRow {
            first_token: 0,
            token_count: tokens.len() as u32,
            start_position: start as u32,
            first_page: 0,
        };
        let input = ForwardInput {
            token_ids: tokens,
            positions: &positions,
            slots: &positions,
            batch: AttentionBatch { rows: &[row], pages: &self.pages },
            logit_tokens: &[tokens.len() as u32 - 1],
        };
        let context = (&mut self.backend, &OneRank as &dyn lockstep_comm::collective::Collective);
        self.decoder
            .forward(context, &input, &mut self.cache, &mut self.work)
            .map_err(CliError::with(ExitCode::Internal))?;
        Ok(())
    }
}
