//! One replica in this process, and what its client heard.

use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_comm::link::Endpoint;
use lockstep_comm::shm::{AbortHandle, AbortOnPanic, ShmCollective, ShmGroup, ShmLayout, ShmOptions};
use lockstep_comm::{Collective, SharedRegion};
use lockstep_core::{
    DType, FinishReason, ModelConfig, ParallelInfo, RequestId, StageLayers, TokenId, Topology, WeightMode,
};
use lockstep_engine::control::{ControlError, Follower, Outgoing, Primary, Result as ControlResult, Wait};
use lockstep_engine::links::RankLinks;
use lockstep_engine::rank_loop::Role;
use lockstep_engine::start::{Groups, prepare};
use lockstep_engine::{Batching, DeviceConfig, DummySpec, RankConfig, offline};
use lockstep_wire::{Broadcast, EngineInfo, StepLogprobs, ToScheduler};
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// The end token.
pub const EOS: TokenId = 256;

/// A small Llama that every layout here can cut: 8 query and 4 KV heads, 7 layers, bytes as vocabulary.
pub fn model() -> ModelConfig {
    let text = br#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 128, "num_hidden_layers": 7, "vocab_size": 257,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": true}"#;
    lockstep_core::config::hf::parse(text).unwrap()
}

/// What varies between runs.
#[derive(Clone, Debug)]
pub struct Setup {
    pub tp: usize,
    pub pp: usize,
    pub num_pages: usize,
    pub chunk: usize,
    pub mixed: bool,
    pub prefix_cache: bool,
}

/// What a client sends: sets of messages, the next when every request of the last has ended.
#[derive(Clone)]
pub struct Script {
    pub waves: VecDeque<Vec<ToScheduler>>,
    /// Requests that it aborts when it has so many tokens of them.
    pub aborts: BTreeMap<RequestId, usize>,
}

/// What it heard of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heard {
    pub tokens: Vec<TokenId>,
    pub finish: Option<FinishReason>,
    pub logprobs: StepLogprobs,
    pub cached_tokens: u32,
}

/// What a run came to.
#[derive(Debug, Default)]
pub struct Outcome {
    pub heard: BTreeMap<RequestId, Heard>,
    pub info: EngineInfo,
}

struct Client {
    started: Instant,
    script: Script,
    open: usize,
    outbox: Vec<ToScheduler>,
    followers: Vec<Sender<Broadcast>>,
    sequence: u64,
    outcome: Outcome,
}

impl Primary for Client {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn receive(&mut self, _: Wait, into: &mut Vec<ToScheduler>) -> ControlResult<()> {
        into.append(&mut self.outbox);
        if self.open > 0 {
            return Ok(());
        }
        match self.script.waves.pop_front() {
            None => into.extend([ToScheduler::Info { query: 1 }, ToScheduler::Shutdown]),
            Some(wave) => {
                self.open = wave.iter().filter(|message| matches!(message, ToScheduler::Submit(_))).count();
                into.extend(wave);
            }
        }
        Ok(())
    }

    fn publish(&mut self, stamp_ms: u64, message: &ToScheduler) -> ControlResult<()> {
        for follower in &self.followers {
            let broadcast = Broadcast { sequence: self.sequence, stamp_ms, message: message.clone() };
            follower.send(broadcast).map_err(|_| ControlError("another rank has ended".into()))?;
        }
        self.sequence += 1;
        Ok(())
    }

    fn deliver(&mut self, out: Outgoing) -> ControlResult<()> {
        match out {
            Outgoing::Step(outs) => {
                for out in outs {
                    let heard = self.outcome.heard.entry(out.id).or_default();
                    heard.tokens.extend(&out.tokens);
                    heard.cached_tokens = out.usage.cached_tokens;
                    if let Some(logprobs) = out.logprobs {
                        heard.logprobs.prompt.extend(logprobs.prompt);
                        heard.logprobs.output.extend(logprobs.output);
                    }
                    heard.finish = out.finish;
                    self.open -= usize::from(out.finish.is_some());
                    if self.script.aborts.get(&out.id) == Some(&heard.tokens.len()) {
                        self.outbox.push(ToScheduler::Abort(out.id));
                    }
                }
            }
            Outgoing::Info(info) => self.outcome.info = *info,
            Outgoing::Refused(id, refusal) => panic!("{id} is refused: {}", refusal.message),
            Outgoing::Begin(_) | Outgoing::CacheFlushed(..) | Outgoing::FlightWritten(..) => {}
        }
        Ok(())
    }
}

struct Told(Receiver<Broadcast>);

impl Follower for Told {
    fn take(&mut self) -> ControlResult<Broadcast> {
        self.0.recv().map_err(|_| ControlError("rank 0 has ended".into()))
    }
}

fn rank_config(setup: &Setup, parallel: ParallelInfo, stage: StageLayers) -> RankConfig {
    let unused = || Endpoint::private("test", "unused");
    RankConfig {
        parallel,
        stage,
        model: PathBuf::new(),
        eos_tokens: vec![EOS],
        weights: WeightMode::AsStored,
        device: DeviceConfig::Cpu,
        packed_cache: lockstep_engine::PackedCacheMode::Off,
        dummy_weights: Some(DummySpec { config: model(), dtype: DType::F32, seed: 7 }),
        threads: 1,
        memory_budget_bytes: 1 << 30,
        memory_budget_origin: "of a test".into(),
        num_pages: Some(setup.num_pages),
        allow_imbalance: false,
        batching: Batching {
            page_size: 4,
            running_max: 8,
            chunk: setup.chunk,
            context_max: None,
            waiting_max: 100,
            prefix_cache: setup.prefix_cache,
            mixed: setup.mixed,
            overlap: false,
            longest_prefix_first: false,
            decode_first: false,
            reserve_percent: 0,
            request_timeout_ms: None,
        },
        placement: None,
        collective_timeout_ms: 30_000,
        flight_dir: None,
        links: RankLinks {
            replica: 0,
            inbox: unused(),
            broadcast: unused(),
            detokenizer: unused(),
            api: unused(),
            remote: None,
        },
        hosts: None,
    }
}

/// Runs `script` at `setup`; every rank is a thread, and in a pipeline two.
pub fn run(setup: &Setup, script: Script) -> Outcome {
    let topology = Topology { tp_size: setup.tp, pp_size: setup.pp, dp_size: 1 };
    let ranks = topology.world_size();
    let stages = StageLayers::of_stages(&model(), setup.pp, None).unwrap();
    let layout = ShmLayout::new(ranks, 16 << 10).unwrap().with_transfers(1 << 20);
    let region = Arc::new(SharedRegion::map(SharedRegion::create(layout).unwrap()).unwrap());
    let (followers, told): (Vec<_>, Vec<_>) = (1..ranks).map(|_| channel()).unzip();
    let client = Client {
        started: Instant::now(),
        script,
        open: 0,
        outbox: Vec::new(),
        followers,
        sequence: 0,
        outcome: Outcome::default(),
    };
    let mut roles: VecDeque<_> = [Role::Primary(client)].into();
    roles.extend(told.into_iter().map(|told| Role::Follower(Told(told))));
    let ends: Vec<_> = std::thread::scope(|scope| {
        let threads = topology.places().zip(roles).map(|(place, role)| {
            let (region, config) = (Arc::clone(&region), rank_config(setup, place, stages[place.pp_rank]));
            scope.spawn(move || run_rank(&config, &region, role))
        });
        threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let primary = ends.into_iter().find_map(|role| match role {
        Role::Primary(client) => Some(client.outcome),
        Role::Follower(_) => None,
    });
    primary.unwrap()
}

fn run_rank(config: &RankConfig, region: &Arc<SharedRegion>, role: Role<Client, Told>) -> Role<Client, Told> {
    let place = config.parallel;
    let _guard = AbortOnPanic { abort: AbortHandle::of(Arc::clone(region)), rank: place.replica_rank() };
    let options = ShmOptions { deadline: config.patience(), ranks_share_cores: true };
    let pipeline = (place.pp_size > 1).then(|| {
        let pipeline = ShmCollective::of_pipeline(Arc::clone(region), place, options).unwrap();
        Box::new(pipeline) as Box<dyn Collective>
    });
    let groups = Groups {
        replica: Box::new(ShmGroup::new(Arc::clone(region), place.replica_rank(), options).unwrap()),
        tensors: Box::new(ShmCollective::of_stage(Arc::clone(region), place, options).unwrap()),
        pipeline,
    };
    let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
    let prepared = prepare(config, backend, groups, &|_, _| ()).unwrap();
    offline::run_loop(config, prepared, role).unwrap_or_else(|error| panic!("{}: {error}", place.label()))
}
