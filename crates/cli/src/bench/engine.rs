//! `bench offline` and `bench latency`: the engine itself, loop, scheduler and cache included, in one process.

use super::random::Random;
use crate::checkpoint::{self, dummy_spec};
use crate::device::{RankTask, on_device};
use crate::error::{CliError, Result};
use crate::flags::{EngineFlags, LatencyFlags, OfflineFlags};
use crate::logging;
use crate::output::say_line;
use crate::pull;
use crate::serve;
use lockstep_backend::Backend;
use lockstep_backend::cuda;
use lockstep_comm::NcclCollective;
use lockstep_comm::link::Endpoint;
use lockstep_comm::shm::{SharedRegion, ShmLayout};
use lockstep_core::{
    ExitCode, HostMap, ModelConfig, ParallelInfo, RequestId, SamplingParams, StageLayers, Topology,
};
use lockstep_engine::links::RankLinks;
use lockstep_engine::offline::{self, OfflineLink, OfflineReport, OfflineSet};
use lockstep_engine::start::{self, Groups};
use lockstep_engine::{DummySpec, EngineError, PackedCacheMode, RankConfig};
use lockstep_wire::{SubmitRequest, TextParams};
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a rank waits for another.
const PATIENCE: Duration = Duration::from_secs(30);
/// Requests that run before the clock starts, each one prompt and a few tokens.
const WARM_TOKENS: u32 = 4;

/// Prints the throughput of a set of requests of random lengths.
pub fn offline(flags: &OfflineFlags) -> Result<()> {
    let engine = Engine::new(&flags.engine)?;
    let (min, max) = (flags.length_min, flags.length_max);
    if min == 0 || min > max || max > u32::MAX as usize {
        let sentence =
            format!("--length-min {min} and --length-max {max} leave no length; give 1 <= min <= max");
        return Err(CliError::new(ExitCode::Flags, sentence));
    }
    let mut random = Random::of_seed(flags.engine.seed);
    let lengths: Vec<_> =
        (0..flags.requests).map(|_| (within(&mut random, min, max), within(&mut random, min, max))).collect();
    let requests = engine.requests(&lengths, flags.temperature, &mut random);
    let inputs: usize = lengths.iter().map(|(input, _)| input).sum();
    let runs = engine.run(vec![engine.warm_up(flags.temperature), requests.into()])?.reports;
    let report = &runs[1];
    let seconds = report.elapsed.as_secs_f64();
    let (output, rate) = (report.output_tokens, report.output_tokens as f64 / seconds);
    if flags.engine.json {
        let json = serde_json::json!({
            "model": flags.engine.model, "tp": flags.engine.tp, "pp": flags.engine.pp,
            "device": flags.engine.device,
            "requests": flags.requests, "input_tokens": inputs, "output_tokens": output, "steps": report.steps.len(),
            "seconds": seconds, "output_tokens_per_second": rate, "bubbles": bubbles(report),
        });
        say_line(format_args!("{json}"))?;
    } else {
        say_line(format_args!(
            "{} requests, {inputs} prompt tokens, {output} output tokens in {seconds:.2} s",
            flags.requests
        ))?;
        say_line(format_args!(
            "{rate:.0} output tokens/s, {:.0} tokens/s in all",
            (inputs + output) as f64 / seconds
        ))?;
        for (rank, bubble) in bubbles(report).iter().enumerate() {
            let label = engine.topology.place(rank).label();
            say_line(format_args!("{label} waited {:.0} % of the time", 100.0 * bubble))?;
        }
    }
    Ok(())
}

/// The share of the time in which each rank of a pipeline did not compute; empty without one.
fn bubbles(report: &OfflineReport) -> Vec<f64> {
    report.stages.iter().filter(|stage| stage.work_us > 0).map(|stage| stage.bubble()).collect()
}

/// Prints prefill time and time per output token for each batch: of a request, between two of its tokens, while as
/// many decode at once; over the stages of a pipeline their steps share them.
pub fn latency(flags: &LatencyFlags) -> Result<()> {
    let engine = Engine::new(&flags.engine)?;
    let mut random = Random::of_seed(flags.engine.seed);
    let mut sets = vec![engine.warm_up(flags.temperature)];
    for &batch in &flags.batch {
        // Once to meet every shape, once for the clock.
        for _ in 0..2 {
            let lengths = vec![(flags.prompt, flags.tokens); batch];
            sets.push(engine.requests(&lengths, flags.temperature, &mut random).into());
        }
    }
    let runs = engine.run(sets)?.reports;
    if !flags.engine.json {
        say_line(format_args!(
            "{:>6}  {:>13}  {:>12}  {:>12}",
            "batch", "prefill ms", "TPOT ms", "tokens/s"
        ))?;
    }
    for (&batch, report) in flags.batch.iter().zip(runs[1..].iter().skip(1).step_by(2)) {
        let prefill = report.first_tokens(batch).unwrap_or_default().as_secs_f64() * 1e3;
        let tpot = report.token_time(batch).map(|time| time.as_secs_f64() * 1e3);
        if flags.engine.json {
            let json = serde_json::json!({
                "model": flags.engine.model, "tp": flags.engine.tp, "pp": flags.engine.pp,
                "device": flags.engine.device, "batch": batch,
                "prompt": flags.prompt, "prefill_ms": prefill, "tpot_ms": tpot, "bubbles": bubbles(report),
            });
            say_line(format_args!("{json}"))?;
        } else if let Some(tpot) = tpot {
            say_line(format_args!(
                "{batch:>6}  {prefill:>13.2}  {tpot:>12.3}  {:>12.0}",
                batch as f64 * 1e3 / tpot
            ))?;
        } else {
            say_line(format_args!(
                "{batch:>6}  {prefill:>13.2}  {:>12}  {:>12}  never decoded all at once: the memory for KV holds fewer such \
                 requests, or --tokens is too small; lower --batch or --prompt",
                "-", "-"
            ))?;
        }
    }
    Ok(())
}

/// One model, ready to be loaded by every rank.
pub(super) struct Engine {
    pub config: RankConfig,
    pub model: ModelConfig,
    topology: Topology,
    stages: Vec<StageLayers>,
    /// Bytes of activations that may be on their way from one rank to another.
    transfer_bytes: usize,
    /// How long reading the model's description and the flags took.
    opening: Duration,
}

/// What came of running sets of requests.
pub(super) struct EngineRun {
    /// One a set.
    pub reports: Vec<OfflineReport>,
    /// From opening the model's files until every rank could take a request.
    pub start: Duration,
    /// Memory of the process then, all ranks; `None` where the kernel does not say.
    pub idle_bytes: Option<u64>,
}

impl Engine {
    pub fn new(flags: &EngineFlags) -> Result<Self> {
        let started = Instant::now();
        logging::init_command("bench", &flags.logging);
        let flag_error = CliError::with::<anyhow::Error>(ExitCode::Flags);
        flags.batching.check().map_err(&flag_error)?;
        flags.memory.check(flags.batching.page_size).map_err(&flag_error)?;
        let path = pull::resolve(&flags.model, &pull::cache_dir(None))?;
        let (model, dummy_weights) = described(flags, &path)?;
        lockstep_core::shard::check_tp_size(&model, flags.tp as i64)
            .map_err(CliError::with(ExitCode::Flags))?;
        let topology = Topology { pp_size: flags.pp, ..Topology::tensor_parallel(flags.tp) };
        let device = flags
            .gpus
            .device(&flags.device, flags.memory.memory_ratio, (&topology, &HostMap::single(&topology)))
            .map_err(&flag_error)?;
        let stages =
            StageLayers::of_stages(&model, flags.pp, None).map_err(CliError::with(ExitCode::Flags))?;
        if flags.gpus.share_gpu && flags.tp > 1 && flags.pp > 1 {
            // Ranks are threads of one context here: what one prepares may wait for kernels that wait for another one.
            let sentence = "--share-gpu takes --tp or --pp here, not both; `lockstep serve` takes both";
            return Err(CliError::new(ExitCode::Flags, sentence));
        }
        if flags.gpus.share_gpu {
            // SAFETY: no rank's thread has been started, and no other thread touches the environment.
            unsafe { cuda::load_kernels_at_once() };
        }
        let ranks = topology.world_size();
        let threads = flags.threads.unwrap_or_else(super::cores).div_ceil(ranks).max(1);
        let (memory_budget_bytes, memory_budget_origin) =
            serve::budget(flags.memory.memory_ratio.unwrap_or(serve::CPU_MEMORY_RATIO), ranks)?;
        let batching = flags.batching.batching(&device);
        let transfer_bytes = batching.transfer_bytes(model.hidden_size, flags.pp);
        let unused = || Endpoint::private("bench", "unused");
        let links = RankLinks {
            replica: 0,
            inbox: unused(),
            broadcast: unused(),
            detokenizer: unused(),
            api: unused(),
            remote: None,
        };
        let config = RankConfig {
            hosts: None,
            parallel: ParallelInfo::SINGLE,
            stage: stages[0],
            model: path,
            eos_tokens: model.eos_tokens.clone(),
            weights: flags.weights.mode(&flags.device).map_err(&flag_error)?,
            packed_cache: PackedCacheMode::Off,
            dummy_weights,
            threads,
            placement: None,
            memory_budget_bytes,
            memory_budget_origin,
            num_pages: flags.memory.num_pages,
            allow_imbalance: flags.memory.allow_imbalance,
            batching,
            device,
            collective_timeout_ms: PATIENCE.as_millis() as u64,
            flight_dir: None,
            links,
        };
        Ok(Self { config, model, topology, stages, transfer_bytes, opening: started.elapsed() })
    }

    /// Ranks in all.
    pub fn ranks(&self) -> usize {
        self.topology.world_size()
    }

    /// Request `index` of a set: an answer of exactly `answer` tokens.
    pub fn request(index: usize, prompt: Vec<u32>, answer: usize, temperature: f32) -> SubmitRequest {
        SubmitRequest {
            id: RequestId(index as u64),
            prompt,
            sampling: SamplingParams {
                temperature,
                seed: index as u64,
                max_tokens: Some(answer as u32),
                ignore_eos: true,
                ..SamplingParams::default()
            },
            text: TextParams::default(),
            cache_salt: None,
            priority: 0,
        }
    }

    /// A random prompt.
    pub fn prompt(&self, length: usize, random: &mut Random) -> Vec<u32> {
        (0..length).map(|_| within(random, 0, self.model.vocab_size - 1) as u32).collect()
    }

    /// Requests of (prompt, answer) lengths with random prompts.
    fn requests(
        &self,
        lengths: &[(usize, usize)],
        temperature: f32,
        random: &mut Random,
    ) -> Vec<SubmitRequest> {
        let request = |(index, &(prompt, answer)): (usize, &(usize, usize))| {
            Self::request(index, self.prompt(prompt, random), answer, temperature)
        };
        lengths.iter().enumerate().map(request).collect()
    }

    /// A small set that makes everything happen once.
    fn warm_up(&self, temperature: f32) -> OfflineSet {
        self.requests(&[(64, WARM_TOKENS as usize); 4], temperature, &mut Random::of_seed(0)).into()
    }

    /// Loads the model on every rank and runs the sets one after the other; gives rank 0's reports.
    pub fn run(&self, sets: Vec<OfflineSet>) -> Result<EngineRun> {
        let internal = CliError::with::<anyhow::Error>(ExitCode::Internal);
        let ranks = self.topology.world_size();
        let layout = ShmLayout::new(ranks, ShmLayout::SLOT_BYTES_DEFAULT).map_err(|e| internal(e.into()))?;
        let layout = if self.stages.len() > 1 { layout.with_transfers(self.transfer_bytes) } else { layout };
        let region = SharedRegion::create(layout).map_err(|e| internal(e.into()))?;
        let (followers, mut receivers): (Vec<_>, Vec<_>) = (1..ranks).map(|_| mpsc::channel()).unzip();
        let started = Instant::now();
        let started = started.checked_sub(self.opening).unwrap_or(started);
        if ranks > 1 {
            // SAFETY: no rank's thread has been started, and no other thread touches the environment.
            unsafe { NcclCollective::prepare_environment() };
        }
        std::thread::scope(|scope| {
            let region = &region;
            let others: Vec<_> = (1..ranks)
                .map(|rank| {
                    let link = OfflineLink::Follower(receivers.remove(0));
                    scope.spawn(move || self.rank(rank, region, Sets { sets: Vec::new(), link, started }))
                })
                .collect();
            let link = OfflineLink::Primary(followers);
            let reports = self.rank(0, region, Sets { sets, link, started });
            for other in others {
                other.join().map_err(|_| internal(anyhow::anyhow!("a rank panicked")))??;
            }
            reports
        })
    }

    fn rank(&self, rank: usize, region: &std::os::fd::OwnedFd, sets: Sets) -> Result<EngineRun> {
        let parallel = self.topology.place(rank);
        let config = RankConfig { parallel, stage: self.stages[parallel.pp_rank], ..self.config.clone() };
        on_device(&config, region, None, sets).map_err(|e| CliError::new(e.exit_code(), e.to_string()))
    }
}

/// The description of the model, and the weights to make up if asked to.
fn described(flags: &EngineFlags, path: &Path) -> Result<(ModelConfig, Option<DummySpec>)> {
    if !flags.dummy_weights {
        let files = checkpoint::open(path)?;
        return Ok((files.config().clone(), None));
    }
    let dummy = dummy_spec(path, &flags.weights.dtype, flags.seed)?;
    Ok((dummy.config.clone(), Some(dummy)))
}

/// Sets of requests, run one after the other over one loaded model.
struct Sets {
    sets: Vec<OfflineSet>,
    link: OfflineLink,
    started: Instant,
}

impl RankTask for Sets {
    type Output = EngineRun;

    fn run<B: Backend>(
        self,
        config: &RankConfig,
        backend: B,
        groups: Groups,
    ) -> std::result::Result<EngineRun, EngineError> {
        let device = backend.describe();
        let prepared = start::prepare(config, backend, groups, &|_, _| ())?;
        let start = self.started.elapsed();
        let idle_bytes = serve::memory::proportional_bytes();
        if config.parallel.is_primary() {
            eprintln!("{} on {device}: ready after {:.2} s", config.model.display(), start.as_secs_f64());
        }
        let reports = offline::run(config, prepared, self.link, self.sets)?;
        match reports.iter().find_map(|report| report.failed.as_ref()) {
            Some((count, reason)) => {
                Err(EngineError::Memory(format!("{count} requests were refused: {reason}")))
            }
            None => Ok(EngineRun { reports, start, idle_bytes }),
        }
    }
}

/// A length from `min` to `max`, both included.
fn within(random: &mut Random, min: usize, max: usize) -> usize {
    min + (random.next() % (max - min + 1) as u64) as usize
}
