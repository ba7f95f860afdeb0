//! Flags and model files, checked together and resolved, before anything starts.

use super::memory;
use super::port::ReservedPort;
use crate::checkpoint::{self, dummy_spec};
use crate::error::{CliError, Result};
use crate::flags::ServeFlags;
use crate::flags::connections::Connections;
use crate::flags::hosts::SeveralHosts;
use crate::logging::LogSettings;
use crate::pull;
use lockstep_api::engine::Replication;
use lockstep_api::{ApiKeys, OtlpEndpoint};
use lockstep_backend::cpu::numa::{self, Nodes, NumaChoice, Placement};
use lockstep_core::{ExitCode, HostMap, ModelConfig, StageLayers, TokenId, Topology, shard};
use lockstep_engine::{Batching, DeviceConfig, DummySpec, PackedCacheMode};
use lockstep_launch::{Layout, Process};
use lockstep_weights::GenerationDefaults;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Share of the host's available memory that ranks take unless `--memory-ratio` says otherwise.
pub(crate) const CPU_MEMORY_RATIO: f64 = 0.5;

/// A server that may be started.
pub struct ServePlan {
    /// Folder or GGUF file, absolute.
    pub model_path: PathBuf,
    /// The model.
    pub model: ModelConfig,
    /// What clients call it.
    pub served_model_name: String,
    /// `--chat-template`.
    pub chat_template: Option<PathBuf>,
    /// End tokens from config, generation config, GGUF and tokenizer, ascending.
    pub eos_tokens: Vec<TokenId>,
    /// Sampling values of generation_config.json.
    pub generation: GenerationDefaults,
    /// `--packed-cache`.
    pub packed_cache: PackedCacheMode,
    /// `--dummy-weights`.
    pub dummy_weights: Option<DummySpec>,
    /// `--allow-imbalance`.
    pub allow_imbalance: bool,
    /// How requests are spread over the replicas.
    pub replication: Replication,
    /// Which processes.
    pub layout: Layout,
    /// Layers of each pipeline stage.
    pub stages: Vec<StageLayers>,
    /// On which of several hosts this is; `None`: there is one.
    pub hosts: Option<SeveralHosts>,
    /// Threads of each rank.
    pub threads: usize,
    /// The NUMA node of each rank of this host; `None` where they are not placed.
    pub placements: Option<Vec<Placement>>,
    /// What ranks compute on.
    pub device: DeviceConfig,
    /// Conversion of weights, if asked for.
    pub weights: lockstep_core::WeightMode,
    /// Batching, equal on all ranks.
    pub batching: Batching,
    /// Bytes each rank may use.
    pub rank_budget_bytes: usize,
    /// How that came about.
    pub budget_origin: String,
    /// `--num-pages` of each rank of a replica.
    pub num_pages: Vec<Option<usize>>,
    /// How long a rank waits for another.
    pub collective_timeout: Duration,
    /// How long running requests get after a signal.
    pub grace: Duration,
    /// Refuse unknown request fields.
    pub strict_api: bool,
    /// `--api-key` and `--api-key-file`.
    pub api_keys: ApiKeys,
    /// How clients connect.
    pub connections: Connections,
    /// `--flight-dir`.
    pub flight_dir: Option<PathBuf>,
    /// `--otlp-endpoint`.
    pub otlp: Option<OtlpEndpoint>,
    /// What the children log, and how.
    pub log: LogSettings,
    /// The HTTP port.
    pub port: Option<ReservedPort>,
}

impl ServePlan {
    /// Checks and resolves. `descriptors` is this process's limit of open files; `None`: unlimited. Exit codes: 2
    /// flags and illegal tp, 3 model files.
    pub fn new(flags: &ServeFlags, descriptors: Option<u64>) -> Result<Self> {
        check_flags(flags).map_err(CliError::with(ExitCode::Flags))?;
        let api_keys = flags.server.api_keys().map_err(CliError::with(ExitCode::Flags))?;
        let connections = flags.connections.resolve(descriptors, flags.parallel.children());
        let connections = connections.map_err(CliError::with(ExitCode::Flags))?;
        let address = flags.server.address().map_err(CliError::with(ExitCode::Flags))?;
        // The other hosts have no api.
        let port = match flags.hosts.node_rank {
            0 => Some(ReservedPort::new(SocketAddr::new(address, flags.server.port))?),
            _ => None,
        };
        let model_files = CliError::with(ExitCode::ModelFiles);
        let cache_dir = pull::cache_dir(flags.model.cache_dir.clone());
        let model_path = pull::resolve(&flags.model.model, &cache_dir)?;
        let described = Described::read(flags, &model_path)?;
        let model = described.config;
        shard::check_tp_size(&model, flags.parallel.tp).map_err(CliError::with(ExitCode::Flags))?;
        let topology = flags.parallel.topology();
        let tp = topology.tp_size;
        let stages = StageLayers::of_stages(&model, topology.pp_size, flags.parallel.pp_layers.as_deref())
            .map_err(CliError::with(ExitCode::Flags))?;
        let hosts = flags.hosts.resolve(&topology);
        let hosts = hosts.map_err(CliError::with(ExitCode::Flags))?;
        let ranks = hosts.as_ref().map_or(topology.world_size(), |hosts| hosts.map.ranks_per_host());
        check_context(flags, &model)?;
        let mut eos_tokens = described.eos_tokens;
        eos_tokens.extend(lockstep_tokenizer::eos_tokens_of(&model_path).map_err(&model_files)?);
        eos_tokens.sort_unstable();
        eos_tokens.dedup();
        if let Some(id) = eos_tokens.iter().find(|id| **id as usize >= model.vocab_size) {
            tracing::warn!(
                "end token {id} is outside the model's {} tokens and will never come",
                model.vocab_size
            );
        }
        let device = device(flags, tp).map_err(CliError::with(ExitCode::Flags))?;
        let placements = placements(flags, &device, ranks).map_err(CliError::with(ExitCode::Flags))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = placements.as_deref().map_or((cores / ranks).max(1), numa::threads_of);
        let batching = flags.batching.batching(&device);
        // Requests that run and requests that wait: those beyond are refused before they are tokenized.
        let requests_open_max = batching.running_max.saturating_add(batching.waiting_max);
        let (rank_budget_bytes, budget_origin) =
            budget(flags.memory.memory_ratio.unwrap_or(CPU_MEMORY_RATIO), ranks)?;
        Ok(Self {
            served_model_name: served_name(flags, &model_path),
            chat_template: flags.model.chat_template.clone(),
            eos_tokens,
            generation: described.generation,
            packed_cache: flags.model.packed_cache().map_err(CliError::with(ExitCode::Flags))?,
            dummy_weights: described.dummy,
            allow_imbalance: flags.memory.allow_imbalance,
            layout: Layout { topology, num_tokenizer: flags.parallel.num_tokenizer },
            stages,
            replication: flags.parallel.replication(batching.running_max, requests_open_max),
            threads: flags.parallel.threads(threads).map_err(CliError::with(ExitCode::Flags))?,
            placements,
            batching,
            device,
            weights: flags
                .model
                .weights
                .mode(&flags.model.device)
                .map_err(CliError::with(ExitCode::Flags))?,
            rank_budget_bytes,
            budget_origin,
            num_pages: (0..topology.replica_size()).map(|rank| flags.memory.pages_of(rank)).collect(),
            collective_timeout: Duration::from_secs_f64(flags.parallel.collective_timeout),
            grace: Duration::from_secs_f64(flags.server.grace_seconds),
            strict_api: flags.server.strict_api,
            api_keys,
            connections,
            flight_dir: flags.logging.flight_dir.clone(),
            otlp: flags.logging.otlp_endpoint.clone(),
            log: flags.logging.settings(),
            port,
            hosts,
            model,
            model_path,
        })
    }

    /// One line about what will run.
    pub fn summary(&self) -> String {
        let m = &self.model;
        format!(
            "serving {} ({}, {} layers, {} query heads, {} KV heads) on {} with {}{}, {} threads a rank",
            self.served_model_name,
            m.architecture,
            m.num_layers,
            m.num_heads,
            m.num_kv_heads,
            match self.device {
                DeviceConfig::Cpu => "cpu",
                DeviceConfig::Cuda { .. } => "cuda",
            },
            self.layout.topology,
            self.hosts.as_ref().map(|h| format!(" on {} hosts", h.map.nnodes())).unwrap_or_default(),
            self.threads
        )
    }
}

impl ServePlan {
    /// Which ranks are where.
    pub fn host_map(&self) -> HostMap {
        self.hosts.as_ref().map_or_else(|| HostMap::single(&self.layout.topology), |hosts| hosts.map)
    }

    /// Whether the api, and with it tokenizers and the detokenizer, is on this host.
    pub fn has_api(&self) -> bool {
        self.hosts.as_ref().is_none_or(SeveralHosts::is_head)
    }

    /// The children of this host's launcher in the order to start them, with the rank of those that are one.
    pub fn processes_here(&self) -> Vec<(Option<usize>, Process)> {
        let node_rank = self.hosts.as_ref().map_or(0, |hosts| hosts.node_rank);
        let ranks = self.host_map().ranks_of(node_rank);
        let numbered = self.layout.processes().into_iter();
        let numbered = numbered.map(|process| (process.parallel.map(|parallel| parallel.rank()), process));
        numbered.filter(|(rank, _)| rank.map_or(self.has_api(), |rank| ranks.contains(&rank))).collect()
    }

    /// The NUMA node of a rank of this host.
    pub fn placement(&self, rank: usize) -> Option<&Placement> {
        self.placements.as_ref()?.get(self.host_map().local_rank(rank))
    }

    /// Which rank of this host is on which NUMA node, where they are placed.
    pub fn placements_in_words(&self) -> Option<String> {
        let words = self.placements.as_ref()?.iter().enumerate();
        let words = words.map(|(rank, placement)| format!("rank {rank} on {}", placement.describe()));
        Some(format!("NUMA, ranks of this host: {}", words.collect::<Vec<_>>().join(", ")))
    }

    /// Which rank stands where, where there is more than one axis.
    pub fn rank_order(&self) -> Option<String> {
        let topology = self.layout.topology;
        let map = self.host_map();
        let places = topology.places().map(|place| {
            let host = self.hosts.as_ref().map(|_| format!(" on host {}", map.host_of(place.rank())));
            format!("{} {}{}", place.rank(), place.label(), host.unwrap_or_default())
        });
        let is_worth_telling = topology.world_size() > topology.tp_size || self.hosts.is_some();
        is_worth_telling.then(|| {
            let places: Vec<_> = places.collect();
            format!("ranks (tp fastest, then pp, then dp): {}{}", places.join(", "), self.stages_in_words())
        })
    }

    /// Who has which layers, where there are several stages.
    fn stages_in_words(&self) -> String {
        let stages = self.stages.iter().enumerate();
        let words = stages.map(|(stage, layers)| format!("PP{stage} {} to {}", layers.first, layers.end - 1));
        match self.stages.len() {
            1 => String::new(),
            _ => format!("; layers: {}", words.collect::<Vec<_>>().join(", ")),
        }
    }
}

/// What the model's files, or its config alone, say.
struct Described {
    config: ModelConfig,
    eos_tokens: Vec<TokenId>,
    generation: GenerationDefaults,
    dummy: Option<DummySpec>,
}

impl Described {
    fn read(flags: &ServeFlags, path: &Path) -> Result<Self> {
        let flag_error = CliError::with::<anyhow::Error>(ExitCode::Flags);
        let uses_generation = flags.model.uses_generation_config().map_err(&flag_error)?;
        if let Some(seed) = flags.model.dummy_weights {
            let dummy = dummy_spec(path, &flags.model.weights.dtype, seed)?;
            let (config, eos_tokens) = (dummy.config.clone(), dummy.config.eos_tokens.clone());
            let generation = GenerationDefaults::default();
            return Ok(Self { config, eos_tokens, generation, dummy: Some(dummy) });
        }
        let files = checkpoint::open(path)?;
        Ok(Self {
            config: files.config().clone(),
            eos_tokens: files.eos_tokens().to_vec(),
            generation: if uses_generation { files.generation_defaults() } else { Default::default() },
            dummy: None,
        })
    }
}

fn device(flags: &ServeFlags, tp: usize) -> anyhow::Result<DeviceConfig> {
    let topology =
        Topology { tp_size: tp, pp_size: flags.parallel.stages(), dp_size: flags.parallel.replicas() };
    let map = flags.hosts.map(&topology)?;
    flags.gpus.device(&flags.model.device, flags.memory.memory_ratio, (&topology, &map))
}

/// The NUMA nodes of this host's ranks.
fn placements(
    flags: &ServeFlags,
    device: &DeviceConfig,
    ranks: usize,
) -> anyhow::Result<Option<Vec<Placement>>> {
    let choice: NumaChoice = flags.parallel.numa.parse()?;
    if *device != DeviceConfig::Cpu {
        if matches!(choice, NumaChoice::Nodes(_)) {
            anyhow::bail!("--numa {} is for --device cpu; leave it out on GPUs", flags.parallel.numa);
        }
        return Ok(None);
    }
    let nodes = Nodes::of_this_machine();
    let placed = nodes.place(&choice, ranks)?;
    let usable = nodes.iter().filter(|node| node.is_usable()).count();
    if placed.is_none() && choice == NumaChoice::Auto && usable > 1 {
        tracing::info!(
            "{usable} NUMA nodes and {ranks} ranks: ranks are not kept to nodes; --tp or --dp {usable} would give each node one"
        );
    }
    Ok(placed)
}

fn check_flags(flags: &ServeFlags) -> anyhow::Result<()> {
    flags.parallel.check()?;
    // What is wrong with --tp itself is said with the sizes that the model takes.
    device(flags, usize::try_from(flags.parallel.tp).unwrap_or(1).max(1))?;
    flags.model.weights.mode(&flags.model.device)?;
    flags.model.packed_cache()?;
    flags.model.check_chat_template()?;
    flags.model.check_served_name()?;
    flags.server.check_grace()?;
    flags.batching.check()?;
    if let Some(dir) = flags.logging.flight_dir.as_deref().filter(|dir| !dir.is_dir()) {
        anyhow::bail!("--flight-dir {} is not a folder; create it first", dir.display());
    }
    flags.memory.check(flags.batching.page_size)
}

fn check_context(flags: &ServeFlags, model: &ModelConfig) -> Result<()> {
    match flags.batching.max_context {
        Some(context) if context > model.max_position => Err(CliError::new(
            ExitCode::Flags,
            format!(
                "--max-context {context} is above the {} positions this model was made for; use at most that",
                model.max_position
            ),
        )),
        _ => Ok(()),
    }
}

/// What each of `ranks` ranks may use, and the words for it.
pub(crate) fn budget(ratio: f64, ranks: usize) -> Result<(usize, String)> {
    let available = memory::available_bytes().ok_or_else(|| {
        CliError::new(
            ExitCode::Internal,
            "cannot read the available memory from /proc/meminfo; give --num-pages",
        )
    })?;
    let share = (available as f64 * ratio / ranks as f64) as usize;
    let origin =
        format!("--memory-ratio {ratio} of {} MiB available, shared by {ranks} ranks", available >> 20);
    Ok((share, origin))
}

/// `--served-model-name`, else the catalogue name, folder name or file stem.
fn served_name(flags: &ServeFlags, path: &std::path::Path) -> String {
    if let Some(name) = &flags.model.served_model_name {
        return name.clone();
    }
    if pull::is_name(&flags.model.model) {
        return flags.model.model.clone();
    }
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = if real.is_file() { real.file_stem() } else { real.file_name() };
    name.map_or_else(|| flags.model.model.clone(), |n| n.to_string_lossy().into_owned())
}
