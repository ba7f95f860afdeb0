//! Everything a scheduler process is told at start; written by the launcher, read once.

use crate::EngineError;
use crate::gpu::GpuPlan;
use crate::links::RankLinks;
use lockstep_backend::cpu::numa::Placement;
use lockstep_comm::meeting::Invitation;
use lockstep_core::{DType, HostMap, ModelConfig, ParallelInfo, StageLayers, TokenId, Topology, WeightMode};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Configuration of one rank. Equal on all ranks of a replica except `parallel`, `stage` and `pages`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankConfig {
    /// Where this rank stands.
    pub parallel: ParallelInfo,
    /// The layers of its pipeline stage.
    pub stage: StageLayers,
    /// Model folder or GGUF file.
    pub model: PathBuf,
    /// End tokens from every source of the model.
    pub eos_tokens: Vec<TokenId>,
    /// `--dtype`, `--cpu-exact`, `--quantize`: the form of weights in memory.
    pub weights: WeightMode,
    /// `--packed-cache`.
    pub packed_cache: PackedCacheMode,
    /// `--device`.
    pub device: DeviceConfig,
    /// `--dummy-weights`: made-up weights instead of the model's files.
    pub dummy_weights: Option<DummySpec>,
    /// Threads of this rank (`--threads`).
    pub threads: usize,
    /// The NUMA node that it keeps to (`--numa`).
    pub placement: Option<Placement>,
    /// Bytes this rank may use for weights, activations and KV together.
    pub memory_budget_bytes: usize,
    /// How [`RankConfig::memory_budget_bytes`] came about, for messages.
    pub memory_budget_origin: String,
    /// `--num-pages`; `None` sizes the pool from the budget.
    pub num_pages: Option<usize>,
    /// `--allow-imbalance`: serve although ranks can hold very different numbers of pages.
    pub allow_imbalance: bool,
    /// Batching.
    pub batching: Batching,
    /// Milliseconds a rank waits for another in a collective (`--collective-timeout`); for another stage so many times as
    /// long as there are stages.
    pub collective_timeout_ms: u64,
    /// `--flight-dir`: where a rank that fails writes what its scheduler was told and decided.
    pub flight_dir: Option<PathBuf>,
    /// Names of the control-plane links.
    pub links: RankLinks,
    /// Where ranks are on several hosts (`--nnodes`).
    pub hosts: Option<RankHosts>,
}

/// Whether packed weights are kept on disk for later starts, and in which folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PackedCacheMode {
    /// Never.
    #[default]
    Off,
    /// Where making them takes much longer than reading them.
    Auto(PathBuf),
    /// Always.
    Always(PathBuf),
}

/// How a rank joins those of other hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankHosts {
    /// Who is where.
    pub map: HostMap,
    /// The address of this rank's host.
    pub address: IpAddr,
    /// Where ranks tell each other how to reach them.
    pub invitation: Invitation,
}

/// What a rank computes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum DeviceConfig {
    /// The cores of this host.
    Cpu,
    /// A GPU. Its memory is divided where the rank runs, so [`RankConfig::memory_budget_bytes`] does not count.
    Cuda {
        /// `--memory-ratio`: share of the GPU's free memory, of all ranks on it together.
        memory_ratio: f64,
        /// Which GPUs, and how tensors move between them.
        gpus: GpuPlan,
    },
}

impl RankConfig {
    /// Which of the replica's ranks are on which host.
    pub fn host_map(&self) -> HostMap {
        let one_replica = Topology { dp_size: 1, ..self.parallel.topology() };
        self.hosts.as_ref().map_or_else(|| HostMap::single(&one_replica), |hosts| hosts.map)
    }

    /// What `error` says, and on which host the rank is that was waited for, where there are several.
    pub fn explain(&self, error: &EngineError) -> String {
        explained(error, self.hosts.as_ref().map(|hosts| hosts.map))
    }

    /// How long a rank waits for another in a collective.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(self.collective_timeout_ms)
    }

    /// How long it waits for what the first `stages` pipeline stages compute: each may take as long as ranks may be
    /// apart. So whoever waits for a rank that is gone gives up before those who wait for it.
    pub fn stage_patience(&self, stages: usize) -> Duration {
        self.patience() * stages.max(1) as u32
    }
}

fn explained(error: &EngineError, hosts: Option<HostMap>) -> String {
    match (error.missing_rank(), hosts) {
        (Some(rank), Some(map)) => format!("{error}; rank {rank} is on host {}", map.host_of(rank)),
        _ => error.to_string(),
    }
}

impl DeviceConfig {
    /// What the rank with global number `rank` is told, where this is for the ranks of all replicas: the GPUs of its
    /// replica, and its share of the memory of one that other replicas use too.
    pub fn of_rank(&self, topology: &Topology, rank: usize) -> Self {
        match self {
            Self::Cpu => Self::Cpu,
            Self::Cuda { memory_ratio, gpus } => {
                let place = topology.place(rank);
                let own = gpus.of_replica(topology, place.dp_rank);
                let here = own.sharing(place.replica_rank(), topology.replica_size()) as f64;
                let everywhere = gpus.sharing(rank, topology.world_size()) as f64;
                Self::Cuda { memory_ratio: memory_ratio * (here / everywhere), gpus: own }
            }
        }
    }
}

/// Weights made up from a seed for the config in the model folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DummySpec {
    /// What the folder's config.json says.
    pub config: ModelConfig,
    /// Type of matrices.
    pub dtype: DType,
    /// `--dummy-weights SEED`.
    pub seed: u64,
}

impl Batching {
    /// Room for the residual streams `[tokens, hidden_size]`, f32, of as many of the largest steps as there are `stages`:
    /// then no stage waits for the next one to take what it sends.
    pub fn transfer_bytes(&self, hidden_size: usize, stages: usize) -> usize {
        (self.running_max + self.chunk).saturating_mul(hidden_size * size_of::<f32>()).saturating_mul(stages)
    }
}

/// Batching flags, equal on all ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Batching {
    /// Tokens per page.
    pub page_size: usize,
    /// Requests that may run at once.
    pub running_max: usize,
    /// Prefill tokens of one step.
    pub chunk: usize,
    /// `--max-context`; `None` is the model's.
    pub context_max: Option<usize>,
    /// Requests that may wait while `running_max` run; one more is refused with a 503.
    pub waiting_max: usize,
    /// Keep prefixes of finished requests (`--cache radix`).
    pub prefix_cache: bool,
    /// Prefill and decode in one step (`--mixed`).
    pub mixed: bool,
    /// Plan a step before the previous one's tokens are read.
    pub overlap: bool,
    /// Longest cached prefix first instead of first come, first served.
    pub longest_prefix_first: bool,
    /// Without `mixed`: decode steps first instead of prefill steps.
    pub decode_first: bool,
    /// Share of a request's possible answer that admission reserves, percent.
    pub reserve_percent: usize,
    /// Milliseconds after which a request is ended, from its arrival at rank 0.
    pub request_timeout_ms: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_backend::BackendError;
    use lockstep_comm::CollectiveError;

    #[test]
    fn a_rank_that_is_missing_on_another_host_is_named_with_it() {
        let map = HostMap::new(&Topology { pp_size: 2, ..Topology::tensor_parallel(2) }, 2).unwrap();
        let (operation, sequence, waited_ms) = ("all-reduce", 7, 3000);
        let late = CollectiveError::Timeout { rank: 0, missing: 3, operation, sequence, waited_ms };
        let late = EngineError::from(BackendError::from(late));
        assert!(
            explained(&late, Some(map)).ends_with("; rank 3 is on host 1"),
            "{}",
            explained(&late, Some(map))
        );
        assert_eq!(explained(&late, None), late.to_string());
        let other = EngineError::Memory("full".into());
        assert_eq!(explained(&other, Some(map)), "full");
    }
}
