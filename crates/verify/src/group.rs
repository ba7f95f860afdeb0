//! The ranks of a replica inside one process: a thread per rank, over the shared memory that rank processes use, and NCCL
//! where each has a GPU.
//!
//! A group loads once. Every run then starts from an empty KV pool and fresh activations, so that no run sees another.
//! **Invariant:** all ranks get the same runs in the same order; the first that fails ends the group.

use crate::forward::{Forward, Layers, Logits, Unsound};
use crate::greedy::Greedy;
use crate::memory::{self, RunSizes};
use crate::place::{Device, Place};
use crate::{Result, Subject, VerifyError};
use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_backend::{Backend, KvLayout, PipelinePlace};
use lockstep_comm::NcclCollective;
use lockstep_comm::collective::Collective;
use lockstep_comm::group::{Patience, ProcessGroup};
use lockstep_comm::shm::{
    AbortHandle, AbortOnPanic, SharedRegion, ShmCollective, ShmGroup, ShmLayout, ShmOptions,
};
use lockstep_core::shard::HeadShard;
use lockstep_core::{HostMap, ModelConfig, ParallelInfo, StageLayers, TokenId, WeightMode};
use lockstep_engine::gpu::{self, GpuPlan, JoinSpec, Joined};
use lockstep_engine::start::Groups;
use lockstep_model::{Decoder, Loader, Workspace};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Room for a residual stream on its way between two stages; larger ones come in parts.
const TRANSFER_BYTES: usize = 1 << 20;
/// Steps in flight in a pipeline: a device keeps the tokens of so many.
const STEPS_IN_FLIGHT: usize = 2;
/// How long a rank waits for another's part of a step; the first one may compile kernels meanwhile.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a group is made.
#[derive(Clone, Copy)]
pub struct Spec<'a> {
    /// What it loads.
    pub subject: &'a dyn Subject,
    /// On what.
    pub place: Place,
    /// Threads of each rank, on CPUs.
    pub threads: usize,
    /// Which GPUs.
    pub gpus: &'a GpuPlan,
    /// Longest sequence of all runs: longrope chooses by it, so it is the same at every place.
    pub positions_max: usize,
    /// What its runs will hold.
    pub sizes: RunSizes,
}

/// What a run needs of memory.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens of the largest step.
    pub tokens_max: usize,
    /// Rows of logits of the largest step.
    pub logits_max: usize,
    /// Tokens in a page.
    pub page_size: usize,
    /// Pages of the pool.
    pub num_pages: usize,
}

/// What a loaded rank can be asked for, whatever its device. **Collective: all ranks of the group.**
pub trait Runs {
    /// Teacher-forced logits, gathered over the vocabulary.
    fn logits(&mut self, forward: &Forward) -> Result<Logits>;
    /// Residual streams.
    fn layers(&mut self, forward: &Forward) -> Result<Layers>;
    /// The first value that is no number.
    fn unsound(&mut self, forward: &Forward) -> Result<Option<Unsound>>;
    /// Greedy texts.
    fn texts(&mut self, greedy: &Greedy) -> Result<Vec<Vec<TokenId>>>;
}

/// One loaded rank.
pub struct Rank<B: Backend> {
    /// Its place.
    pub parallel: ParallelInfo,
    /// The layers that it has.
    pub stage: StageLayers,
    /// Steps that greedy text has in flight.
    pub steps_max: usize,
    /// The model as this rank was told.
    pub config: ModelConfig,
    /// `None` once a run has failed.
    loaded: Option<Loaded<B>>,
}

/// What loading made.
pub struct Loaded<B: Backend> {
    /// Device.
    pub backend: B,
    /// Shard.
    pub decoder: Decoder<B>,
    /// All ranks.
    pub replica: Box<dyn ProcessGroup>,
    /// The TP group.
    pub collective: Box<dyn Collective>,
    /// Where there are several stages: the ranks, one a stage, that pass activations on.
    pub pipeline: Option<Box<dyn Collective>>,
}

impl<B: Backend> Rank<B> {
    /// What was loaded. Errors when a run failed before.
    pub fn loaded(&mut self) -> Result<&mut Loaded<B>> {
        self.loaded.as_mut().ok_or(VerifyError::Ended)
    }

    /// The same, taken out until [`put_back`](Self::put_back).
    pub fn take(&mut self) -> Result<Loaded<B>> {
        self.loaded.take().ok_or(VerifyError::Ended)
    }

    /// Ends a loan.
    pub fn put_back(&mut self, loaded: Loaded<B>) {
        self.loaded = Some(loaded);
    }

    /// Activations and an empty pool for one run.
    pub fn memory(&mut self, sizes: Sizes) -> Result<(Workspace<B>, B::KvCache)> {
        let (p, config, local_layers) = (self.parallel, self.config.clone(), self.stage.count());
        let backend = &self.loaded()?.backend;
        let work = Workspace::new(backend, &config, p, sizes.tokens_max, sizes.logits_max)?;
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        let cache = backend.kv_cache(KvLayout {
            local_layers,
            local_kv_heads: heads.kv_heads.len(),
            head_dim: config.head_dim,
            page_size: sizes.page_size,
            num_pages: sizes.num_pages,
            dtype: backend.kv_dtype(),
        })?;
        let loaded = self.loaded()?;
        if loaded.pipeline.is_some() {
            // On GPUs that ranks share: taking memory waits for kernels, and those of another stage may wait for each other.
            loaded.replica.barrier(Patience::Idle)?;
        }
        Ok((work, cache))
    }
}

impl<B: Backend> Runs for Rank<B> {
    fn logits(&mut self, forward: &Forward) -> Result<Logits> {
        forward.logits_on(self)
    }

    fn layers(&mut self, forward: &Forward) -> Result<Layers> {
        forward.layers_on(self)
    }

    fn unsound(&mut self, forward: &Forward) -> Result<Option<Unsound>> {
        forward.unsound_on(self)
    }

    fn texts(&mut self, greedy: &Greedy) -> Result<Vec<Vec<TokenId>>> {
        greedy.texts_on(self)
    }
}

/// A rank between two runs, or why there is none.
type Seat = Result<Box<dyn Runs>>;
/// One run on one rank.
type Job = Box<dyn FnOnce(Seat) -> Seat + Send>;

/// A group that waits for runs.
pub struct Group {
    region: Arc<SharedRegion>,
    jobs: Vec<Sender<Job>>,
    /// Whose answers count.
    sampler: usize,
}

impl Group {
    /// Loads every rank on a thread of its own and lends the group to `body`.
    pub fn with<T>(spec: Spec<'_>, body: impl FnOnce(&Group) -> T) -> Result<T> {
        let ranks = spec.place.topology().world_size();
        let layout = ShmLayout::new(ranks, ShmLayout::SLOT_BYTES_DEFAULT)?;
        let layout = match spec.place.pp {
            1 => layout,
            // Residual streams of the steps in flight.
            stages => layout.with_transfers(stages * TRANSFER_BYTES),
        };
        let region = Arc::new(SharedRegion::map(SharedRegion::create(layout)?)?);
        if matches!(spec.place.device, Device::Cuda { .. }) && ranks > 1 {
            // SAFETY: no rank thread of this process runs yet.
            unsafe { NcclCollective::prepare_environment() };
        }
        Ok(std::thread::scope(|scope| {
            let (mut jobs, mut threads) = (Vec::new(), Vec::new());
            for rank in 0..ranks {
                let (sender, receiver) = channel();
                jobs.push(sender);
                let region = Arc::clone(&region);
                threads.push(scope.spawn(move || attend(spec, rank, region, &receiver)));
            }
            let group = Group { region, jobs, sampler: spec.place.topology().sampler() };
            let value = body(&group);
            // Without senders the ranks go home. One that panicked was reported by the run it left.
            drop(group);
            threads.into_iter().for_each(|thread| drop(thread.join()));
            value
        }))
    }

    /// Runs `body` on every rank; the answer of the first rank of the last stage, which has the logits. The first rank that fails ends all of them, and its error is
    /// the answer; [`VerifyError::Ended`] is that of later runs.
    pub fn run<T: Send + 'static>(
        &self,
        body: impl Fn(&mut dyn Runs) -> Result<T> + Send + Sync + 'static,
    ) -> Result<T> {
        let body = Arc::new(body);
        let ask = |(rank, jobs): (usize, &Sender<Job>)| {
            let (body, region) = (Arc::clone(&body), Arc::clone(&self.region));
            let (sender, answer) = channel();
            let job = move |seat: Seat| {
                let done = seat.and_then(|mut runs| body(&mut *runs).map(|value| (runs, value)));
                let (seat, value) = match done {
                    Ok((runs, value)) => (Ok(runs), Ok(value)),
                    Err(error) => {
                        AbortHandle::of(region).abort(&format!("rank {rank}: {error}"));
                        (Err(VerifyError::Ended), Err(error))
                    }
                };
                // Whoever asked has gone only when the whole group goes.
                let _ = sender.send(value);
                seat
            };
            // A rank that is gone drops the job and with it the sender: the answer tells.
            let _ = jobs.send(Box::new(job));
            answer
        };
        let answers: Vec<Receiver<Result<T>>> = self.jobs.iter().enumerate().map(ask).collect();
        let heard = answers.into_iter().enumerate();
        let mut answers: Vec<Result<T>> =
            heard.map(|(rank, answer)| answer.recv().unwrap_or(Err(VerifyError::Panicked(rank)))).collect();
        // The cause rather than what followed from it on the other ranks.
        let is_cause = |a: &Result<T>| a.as_ref().is_err_and(|e| !is_consequence(e));
        let at = answers
            .iter()
            .position(is_cause)
            .or(answers.iter().position(|a| a.is_err()))
            .unwrap_or(self.sampler);
        answers.swap_remove(at)
    }
}

/// One rank's thread: loads, then runs what comes.
fn attend(spec: Spec<'_>, rank: usize, region: Arc<SharedRegion>, jobs: &Receiver<Job>) {
    let guard = AbortOnPanic { abort: AbortHandle::of(Arc::clone(&region)), rank };
    let mut seat = load(spec, rank, &region);
    if let Err(error) = &seat {
        // The first run will hear of it; the other ranks must not wait.
        guard.abort.abort(&format!("rank {rank}: {error}"));
    }
    while let Ok(job) = jobs.recv() {
        seat = job(seat);
    }
}

fn load(spec: Spec<'_>, rank: usize, region: &Arc<SharedRegion>) -> Seat {
    let p = spec.place.topology().place(rank);
    let source = spec.subject.source(p);
    let stage = memory::stage_of(source, p)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let options = ShmOptions { deadline: PATIENCE, ranks_share_cores: p.world_size() * spec.threads > cores };
    let pipeline = (p.pp_size > 1).then(|| ShmCollective::of_pipeline(Arc::clone(region), p, options));
    let groups = Groups {
        replica: Box::new(ShmGroup::new(Arc::clone(region), rank, options)?),
        tensors: Box::new(ShmCollective::of_stage(Arc::clone(region), p, options)?),
        pipeline: pipeline.transpose()?.map(|pipeline| Box::new(pipeline) as Box<dyn Collective>),
    };
    match spec.place.device {
        Device::Cpu { weights, .. } => {
            let backend = CpuBackend::new(CpuOptions { threads: spec.threads, ..CpuOptions::default() })?;
            loaded(spec, (p, stage), weights, backend, groups)
        }
        Device::Cuda { dtype } => {
            let join = JoinSpec {
                dtype,
                patience: PATIENCE,
                hosts: HostMap::single(&p.topology()),
                address: None,
                abort: None,
            };
            let Joined { backend, mut groups } = gpu::join(spec.gpus, &join, groups)?;
            let free_bytes = backend.free_bytes()?;
            // Nobody takes memory before all who share a GPU have asked how much is free.
            groups.replica.barrier(Patience::Idle)?;
            let sharing = spec.gpus.sharing(rank, p.world_size());
            memory::check_gpu(source, (p, stage), dtype, spec.sizes, (free_bytes, sharing))?;
            loaded(spec, (p, stage), WeightMode::Cast(dtype), backend, groups)
        }
    }
}

fn loaded<B: Backend + 'static>(
    spec: Spec<'_>,
    (parallel, stage): (ParallelInfo, StageLayers),
    weights: WeightMode,
    mut backend: B,
    groups: Groups,
) -> Seat {
    let source = spec.subject.source(parallel);
    let config = source.config().clone();
    let Groups { mut replica, tensors: collective, pipeline } = groups;
    if pipeline.is_some() {
        let place = PipelinePlace {
            rank: parallel.replica_rank(),
            stage_size: parallel.tp_size,
            stages: parallel.pp_size,
            rows_max: spec.sizes.tokens_max(),
            cols: config.hidden_size,
            patience: PATIENCE,
            shares_gpus: spec.gpus.share_gpu,
            hosts: HostMap::single(&parallel.topology()),
        };
        backend.join_pipeline(&mut *replica, &place)?;
    }
    let silent = |_: usize, _: usize| {};
    let loader = Loader::new(source, &backend, parallel, weights, &silent).of_stage(stage);
    let decoder = Decoder::load(&loader, spec.positions_max)?;
    let loaded = Loaded { backend, decoder, replica, collective, pipeline };
    // Ranks that are threads on one GPU compute in turns: what one prepares waits for kernels of all.
    let in_turns = spec.gpus.share_gpu && matches!(spec.place.device, Device::Cuda { .. });
    let steps_max = if parallel.pp_size > 1 && !in_turns { STEPS_IN_FLIGHT } else { 1 };
    Ok(Box::new(Rank { parallel, stage, steps_max, config, loaded: Some(loaded) }))
}

/// Whether an error only says that another rank failed.
fn is_consequence(error: &VerifyError) -> bool {
    use lockstep_comm::collective::CollectiveError::Aborted;
    match error {
        VerifyError::Collective(Aborted { .. }) => true,
        VerifyError::Backend(lockstep_backend::BackendError::Collective(Aborted { .. })) => true,
        VerifyError::Model(lockstep_model::ModelError::Backend(e)) => {
            matches!(e, lockstep_backend::BackendError::Collective(Aborted { .. }))
        }
        VerifyError::Engine(e) => e.is_consequence(),
        _ => false,
    }
}
