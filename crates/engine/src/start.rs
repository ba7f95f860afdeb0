//! From a [`RankConfig`] to a running rank loop: open, load, size the pool, agree, connect, serve.
//!
//! Every rank takes the same path; the barriers are where they wait for the slowest. While loading
//! the wait has no deadline, because the launcher watches every process for death and aborts the
//! group through its shared memory.

use crate::config::{DeviceConfig, PackedCacheMode, RankConfig};
use crate::control::{Follower, Primary};
use crate::exchange::TokenSource;
use crate::flight::{self, FlightError};
use crate::links::{ZmqFollower, ZmqPrimary};
use crate::memory::{self, Committed};
use crate::pipeline;
use crate::rank_loop::{LoopSettings, RankLoop, Role};
use crate::runner::{ModelRunner, Runner, RunnerParts};
use crate::{EngineError, Result};
use lockstep_backend::{Backend, KvLayout, PipelinePlace};
use lockstep_comm::collective::Collective;
use lockstep_comm::group::{Patience, ProcessGroup};
use lockstep_comm::link::Context;
use lockstep_comm::watch::Mark;
use lockstep_core::shard::{self, HeadShard};
use lockstep_core::{DType, ModelConfig};
use lockstep_model::{
    CacheKey, Decoder, DummyWeights, Loader, ModelError, ModelRules, PackedCache, Progress, WeightSource,
    Workspace, packed_cache,
};
use lockstep_scheduler::{CachePolicy, QueueOrder, Scheduler, SchedulerConfig, StepOrder};
use lockstep_weights::ModelFiles;
use lockstep_wire::{EngineInfo, RankInfo, Ready, Role as WireRole, StageWork, ToApi};
use std::time::{Duration, Instant};

/// How long the last results may take to leave after a shutdown.
const FAREWELL: Duration = Duration::from_secs(2);

/// The CPU process group and the tensor collective of one rank.
pub struct Groups {
    /// All ranks of the replica.
    pub replica: Box<dyn ProcessGroup>,
    /// The TP group, of one stage.
    pub tensors: Box<dyn Collective>,
    /// Where there are several stages: the ranks, one a stage, that pass activations on; places are stages.
    pub pipeline: Option<Box<dyn Collective>>,
}

/// A rank that is about to take its first step.
pub struct Prepared<B: Backend> {
    /// All ranks of the replica.
    pub group: Box<dyn ProcessGroup>,
    /// With nothing submitted.
    pub scheduler: Scheduler,
    /// Over the loaded model.
    pub runner: ModelRunner<B>,
    /// What the rank tells of itself.
    pub info: EngineInfo,
}

/// Runs one rank until it is told to stop. **Collective: all ranks of the replica.**
///
/// `on_progress` hears how many parts of the model are loaded, then how many steps are recorded; `mark` shows
/// what the loop does.
pub fn run<B: Backend>(
    config: &RankConfig,
    backend: B,
    groups: Groups,
    on_progress: Progress<'_>,
    mark: Option<Mark>,
) -> Result<()> {
    serve(config, prepare(config, backend, groups, on_progress)?, mark)
}

/// Loads the model and sizes the pool. **Collective: all ranks of the replica.**
pub fn prepare<B: Backend>(
    config: &RankConfig,
    backend: B,
    mut groups: Groups,
    on_progress: Progress<'_>,
) -> Result<Prepared<B>> {
    let started = Instant::now();
    let source = open_source::<B>(config)?;
    let model = source.config().clone();
    let context_wanted = config.batching.context_max.unwrap_or(model.max_position).min(model.max_position);
    let device = backend.describe();
    let mut loaded = load(config, backend, &*source, context_wanted, on_progress)?;
    drop(source);
    let slower = loaded.join_pipeline(config, &mut *groups.replica, model.hidden_size)?;
    tracing::info!(
        "loaded {} MiB of weights in {:.2} s; {} MiB were expected, and {} MiB is the most that was resident",
        loaded.weight_bytes >> 20,
        started.elapsed().as_secs_f64(),
        loaded.expected.weight_bytes >> 20,
        resident_bytes_max() >> 20
    );
    let layout = kv_layout(&model, config, loaded.backend.kv_dtype());
    let committed = Committed { weight_bytes: loaded.weight_bytes, ..loaded.expected };
    let local_pages = memory::local_pages(config, layout, committed, context_wanted)?;
    let rule = (config.parallel.tp_size, config.allow_imbalance);
    let (num_pages, warning) =
        memory::agree_on_pages(&mut *groups.replica, local_pages, rule, Patience::Idle)?;
    let layout = KvLayout { num_pages, ..layout };
    let scheduler = scheduler(config, num_pages, context_wanted)?;
    let rank = RankInfo {
        rank: config.parallel.rank(),
        pid: std::process::id(),
        label: config.parallel.label(),
        layers: config.stage.range(),
        device,
        weight_bytes: loaded.weight_bytes as u64,
        kv_bytes: layout.pool_bytes() as u64,
        resident_bytes_max: resident_bytes_max(),
        stage_work: StageWork::default(),
    };
    let info = EngineInfo {
        context_max: scheduler.context_max(),
        page_size: layout.page_size,
        pages_total: num_pages,
        pages_free: num_pages,
        ranks: gather_ranks(&mut *groups.replica, &rank)?,
        notes: warning.into_iter().chain(slower).collect(),
        ..EngineInfo::default()
    };
    let mut runner =
        loaded.into_runner(config, layout, (groups.tensors, groups.pipeline), model.vocab_size)?;
    let recording = Instant::now();
    let recorded = runner.record(config.batching.running_max, config.batching.chunk, on_progress)?;
    if recorded > 0 {
        tracing::info!(
            "recorded {recorded} sizes of decode steps in {:.2} s",
            recording.elapsed().as_secs_f64()
        );
    }
    Ok(Prepared { group: groups.replica, scheduler, runner, info })
}

/// The model's files, or weights made up in their place; rank 0 says what is unpacked while loading.
fn open_source<B: Backend>(config: &RankConfig) -> Result<Box<dyn WeightSource>> {
    if let Some(dummy) = &config.dummy_weights {
        return Ok(Box::new(DummyWeights::new(dummy.config.clone(), dummy.dtype, dummy.seed)));
    }
    let files = ModelFiles::open(&config.model)?;
    if config.parallel.is_primary() {
        tracing::info!("weights are {}", files.source_label());
        let as_codes = B::TAKES_CODES && config.weights.keeps_codes();
        files.conversions(as_codes).iter().for_each(|line| tracing::info!("{line}"));
        if let Some(report) = files.unread_keys_report() {
            tracing::warn!("{report}");
        }
    }
    Ok(Box::new(files))
}

/// A rank's weights and buffers.
struct Loaded<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    work: Workspace<B>,
    /// Tokens of the largest step.
    tokens_max: usize,
    weight_bytes: usize,
    /// What the shard rules said before loading.
    expected: Committed,
}

fn load<B: Backend>(
    config: &RankConfig,
    backend: B,
    source: &dyn WeightSource,
    context_max: usize,
    on_progress: Progress<'_>,
) -> Result<Loaded<B>> {
    let (model, parallel, stage) = (source.config(), config.parallel, config.stage);
    if stage.of != model.num_layers || stage.end > stage.of {
        let problem = format!("the stage has layers {:?} of a model of {}", stage.range(), model.num_layers);
        return Err(EngineError::Internal(problem));
    }
    let limits = scheduler_config(config, 1, context_max);
    // Logits are the last stage's.
    let rows_max = if stage.has_logits() { limits.step_rows_max() } else { 0 };
    let tokens_max = limits.step_tokens_max();
    shard::check_tp_size(model, parallel.tp_size as i64).map_err(ModelError::from)?;
    let sizes = (tokens_max, rows_max);
    let mut expected = Committed::of_stage::<B>(source, (parallel, stage), config.weights, sizes);
    let place = pipeline_place(config, tokens_max, model.hidden_size);
    if place.previous().is_some_and(|before| place.shares_host_with(before)) {
        let (hidden, dtype) = (model.hidden_size, backend.kv_dtype());
        expected.workspace_bytes += B::pipeline_bytes(parallel.pp_size, tokens_max, hidden, dtype);
    }
    memory::check_before_loading(&memory::allowance(config, &parallel.label()), expected)?;
    let cache = open_cache::<B>(config, source, expected.weight_bytes);
    let loader = Loader::new(source, &backend, parallel, config.weights, on_progress);
    let loader = loader.of_stage(stage).with_cache(cache);
    let decoder = Decoder::load(&loader, context_max)?;
    let weight_bytes = loader.packed_bytes() as usize;
    if let Some(cache) = loader.take_cache() {
        if cache.reads() {
            tracing::info!("weights came packed from {}", cache.file().display());
        }
        // Written beside the serving; the process's end may cut it short, and nothing stays then.
        drop(cache.finish());
    }
    if parallel.is_primary()
        && let Some(report) = ModelRules::new(model).unused_report(source)
    {
        tracing::warn!("{report}");
    }
    let work = Workspace::new(&backend, model, parallel, tokens_max, rows_max)?;
    Ok(Loaded { decoder, work, tokens_max, weight_bytes, expected, backend })
}

/// Where a rank stands among the stages, whose steps have at most `rows_max` rows of `cols` elements.
fn pipeline_place(config: &RankConfig, rows_max: usize, cols: usize) -> PipelinePlace {
    let p = config.parallel;
    PipelinePlace {
        rank: p.replica_rank(),
        stage_size: p.tp_size,
        stages: p.pp_size,
        rows_max,
        cols,
        patience: config.stage_patience(p.pp_rank),
        shares_gpus: matches!(&config.device, DeviceConfig::Cuda { gpus, .. } if gpus.share_gpu),
        hosts: config.host_map(),
    }
}

/// The rank's packed weights on disk, where they are wanted and worth it.
fn open_cache<B: Backend>(
    config: &RankConfig,
    source: &dyn WeightSource,
    weight_bytes: usize,
) -> Option<PackedCache> {
    let (version, mode) = (B::PACKED_VERSION?, config.weights);
    let folder = match &config.packed_cache {
        PackedCacheMode::Off => return None,
        PackedCacheMode::Auto(folder) => {
            packed_cache::pays(source, mode, weight_bytes).then(|| folder.clone())?
        }
        PackedCacheMode::Always(folder) => folder.clone(),
    };
    let (place, stage) = (config.parallel, config.stage);
    let model = config.model.file_stem().unwrap_or_default().to_string_lossy();
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let key = CacheKey {
        folder,
        name: format!(
            "{}-tp{}of{}",
            model.chars().map(safe).collect::<String>(),
            place.tp_rank,
            place.tp_size
        ),
        description: format!(
            "{}tp rank {} of {}, layers {:?} of {}, weights {mode:?}",
            source.identity()?,
            place.tp_rank,
            place.tp_size,
            stage.range(),
            stage.of
        ),
    };
    Some(PackedCache::open(key, version))
}

impl<B: Backend> Loaded<B> {
    /// Joins the neighbouring stages, if there are any; gives a sentence if activations take a slower way than the device
    /// knows. **Collective: all ranks of the replica.**
    fn join_pipeline(
        &mut self,
        config: &RankConfig,
        replica: &mut dyn ProcessGroup,
        hidden_size: usize,
    ) -> Result<Option<String>> {
        let p = config.parallel;
        if p.pp_size == 1 {
            return Ok(None);
        }
        let place = pipeline_place(config, self.tokens_max, hidden_size);
        let reason = self.backend.join_pipeline(replica, &place).map_err(ModelError::from)?;
        let slower = reason.map(|reason| {
            format!("activations go from stage to stage through the host's memory, which is slow: {reason}")
        });
        if let Some(sentence) = slower.as_ref().filter(|_| p.is_primary()) {
            tracing::warn!("{sentence}");
        }
        Ok(slower)
    }

    fn into_runner(
        self,
        config: &RankConfig,
        layout: KvLayout,
        (collective, pipeline): (Box<dyn Collective>, Option<Box<dyn Collective>>),
        vocab_size: usize,
    ) -> Result<ModelRunner<B>> {
        let cache = self.backend.kv_cache(layout)?;
        Ok(ModelRunner::new(RunnerParts {
            backend: self.backend,
            collective,
            pipeline,
            decoder: self.decoder,
            cache,
            work: self.work,
            tokens_max: self.tokens_max,
            page_size: layout.page_size,
            vocab_size,
            eos_tokens: config.eos_tokens.clone(),
            reports_logprobs: config.parallel.is_sampler(),
        }))
    }
}

/// Serves over a prepared rank: the loop on this thread, or in a pipeline beside it.
fn serve<B: Backend>(config: &RankConfig, prepared: Prepared<B>, mark: Option<Mark>) -> Result<()> {
    let Prepared { group, scheduler, runner, info } = prepared;
    match config.parallel.pp_size {
        1 => {
            let runner = runner.watched(mark.clone());
            serve_loop(config, LoopParts { group, scheduler, runner, info, mark })
        }
        // The loop shows where it is, the device beside it what it computes: a track of a mark has one writer.
        _ => pipeline::beside(runner, mark.clone(), |runner| {
            serve_loop(config, LoopParts { group, scheduler, runner, info, mark })
        }),
    }
}

/// What a serving loop is made of, besides its links.
struct LoopParts<R> {
    group: Box<dyn ProcessGroup>,
    scheduler: Scheduler,
    runner: R,
    info: EngineInfo,
    mark: Option<Mark>,
}

/// Connects the control plane, tells the api that all ranks are ready, and loops.
fn serve_loop<R: Runner>(config: &RankConfig, parts: LoopParts<R>) -> Result<()> {
    let LoopParts { mut group, scheduler, runner, info, mark } = parts;
    let context = Context::new();
    let settings = loop_settings(config);
    let patience = settings.collective_timeout;
    if config.parallel.is_primary() {
        let links = ZmqPrimary::open(&context, &config.links, group.size() - 1, patience)?;
        let mut links = links.watched(mark.clone());
        group.barrier(Patience::Idle)?;
        let ready = Ready {
            role: WireRole::Scheduler(config.parallel.rank()),
            engine: Some(info.clone()),
            chat_error: None,
        };
        links.tell_api(ToApi::Ready(Box::new(ready)))?;
        let role: Role<ZmqPrimary, ZmqFollower> = Role::Primary(links);
        let mut rank_loop = RankLoop::new(role, group, scheduler, runner, settings, info).watched(mark);
        run_recorded(&mut rank_loop, config)?;
        match rank_loop.into_role() {
            Role::Primary(links) => Ok(links.finish(FAREWELL)?),
            Role::Follower(_) => Ok(()),
        }
    } else {
        let links = ZmqFollower::open(&context, &config.links, patience)?;
        group.barrier(Patience::Idle)?;
        let role: Role<ZmqPrimary, ZmqFollower> = Role::Follower(links);
        let mut rank_loop = RankLoop::new(role, group, scheduler, runner, settings, info).watched(mark);
        run_recorded(&mut rank_loop, config)
    }
}

/// The loop's choices as the flags say.
pub(crate) fn loop_settings(config: &RankConfig) -> LoopSettings {
    let place = config.parallel;
    let source =
        TokenSource { rank: place.topology().sampler(), patience: config.stage_patience(place.pp_size) };
    LoopSettings {
        token_source: (place.pp_size > 1).then_some(source),
        collective_timeout: config.patience(),
        request_timeout_ms: config.batching.request_timeout_ms,
        flight_segment_bytes: flight::SEGMENT_BYTES,
    }
}

/// Runs the loop; when it fails by itself, what its scheduler was told and decided is written to
/// `--flight-dir`.
fn run_recorded<P: Primary, F: Follower, R: Runner>(
    rank_loop: &mut RankLoop<P, F, R>,
    config: &RankConfig,
) -> Result<()> {
    if let Some(folder) = &config.flight_dir {
        rank_loop.flight().set_folder(folder.clone(), config.parallel.rank());
    }
    let end = rank_loop.run();
    if end.as_ref().is_err_and(|error| !error.is_consequence()) {
        match rank_loop.flight().write() {
            Ok(file) => tracing::error!("wrote {}; see it with `lockstep replay`", file.display()),
            Err(FlightError::NoFolder) => {}
            Err(error) => tracing::warn!("the flight recorder cannot be written: {error}"),
        }
    }
    end
}

fn kv_layout(model: &ModelConfig, config: &RankConfig, dtype: DType) -> KvLayout {
    let (p, page_size) = (config.parallel, config.batching.page_size);
    let heads = HeadShard::new(model.num_heads, model.num_kv_heads, p.tp_rank, p.tp_size);
    KvLayout {
        local_layers: config.stage.count(),
        local_kv_heads: heads.kv_heads.len(),
        head_dim: model.head_dim,
        page_size,
        num_pages: 0,
        dtype,
    }
}

fn scheduler_config(config: &RankConfig, num_pages: usize, context_max: usize) -> SchedulerConfig {
    let batching = &config.batching;
    SchedulerConfig {
        page_size: batching.page_size,
        num_pages,
        max_running: batching.running_max,
        token_budget: batching.chunk,
        context_max,
        cache: if batching.prefix_cache { CachePolicy::Radix } else { CachePolicy::None },
        mixed: batching.mixed,
        overlap: batching.overlap,
        stages: config.parallel.pp_size,
        eos_tokens: config.eos_tokens.clone(),
        waiting_max: batching.waiting_max,
        queue_order: if batching.longest_prefix_first { QueueOrder::LongestPrefix } else { QueueOrder::Fcfs },
        step_order: if batching.decode_first { StepOrder::DecodeFirst } else { StepOrder::PrefillFirst },
        reserve_percent: batching.reserve_percent,
        // A debug build catches whoever reads a page after it was freed.
        track_freed: cfg!(debug_assertions),
    }
}

fn scheduler(config: &RankConfig, num_pages: usize, context_max: usize) -> Result<Scheduler> {
    let settings = scheduler_config(config, num_pages, context_max);
    settings.validate().map_err(|e| EngineError::Memory(e.to_string()))?;
    Ok(Scheduler::new(settings))
}

/// Every rank's facts, on every rank. **Collective: all ranks of the replica.**
fn gather_ranks(group: &mut dyn ProcessGroup, mine: &RankInfo) -> Result<Vec<RankInfo>> {
    let sent = lockstep_wire::encode(mine).map_err(|e| EngineError::Internal(e.to_string()))?;
    let mut slot = vec![0u8; RANK_INFO_BYTES];
    let Some(room) = slot.get_mut(4..4 + sent.len()) else {
        return Err(EngineError::Internal(format!("rank facts take {} bytes", sent.len())));
    };
    room.copy_from_slice(&sent);
    slot[..4].copy_from_slice(&(sent.len() as u32).to_le_bytes());
    let mut all = vec![0u8; RANK_INFO_BYTES * group.size()];
    group.all_gather(&slot, &mut all, Patience::Idle)?;
    let decode = |slot: &[u8]| {
        let len = u32::from_le_bytes([slot[0], slot[1], slot[2], slot[3]]) as usize;
        lockstep_wire::decode(slot.get(4..4 + len).unwrap_or_default())
            .map_err(|e| EngineError::Internal(e.to_string()))
    };
    all.chunks_exact(RANK_INFO_BYTES).map(decode).collect()
}

/// Room for one encoded [`RankInfo`].
const RANK_INFO_BYTES: usize = 1024;

/// Peak resident memory of this process in bytes, from the kernel's own count; 0 if unknown.
fn resident_bytes_max() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.split_whitespace().next()).and_then(|n| n.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
