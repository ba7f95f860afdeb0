//! How many processes and threads.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use lockstep_api::engine::Replication;
use lockstep_api::engine::router::{DpPolicy, REPLICAS_MAX};
use lockstep_core::Topology;
use lockstep_core::limits::TP_SIZE_MAX;

/// Parallelism flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct ParallelFlags {
    /// Tensor-parallel size: rank processes that share every layer.
    #[arg(long, visible_aliases = ["tp-size", "tensor-parallel-size"], default_value_t = 1, allow_negative_numbers = true)]
    pub tp: i64,

    /// Pipeline-parallel size: stages that have consecutive layers each, with `--tp` ranks, and pass activations on; as
    /// many steps are in flight as there are stages.
    #[arg(long, visible_aliases = ["pp-size", "pipeline-parallel-size"], default_value_t = 1, allow_negative_numbers = true)]
    pub pp: i64,

    /// Layers of each stage, such as 13,11 [default: so that stages compute about as long, the head counted].
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    pub pp_layers: Option<Vec<usize>>,

    /// Data-parallel size: replicas of the whole model, each with `--tp` times `--pp` ranks and a KV pool of its own, behind one
    /// API.
    #[arg(long, visible_aliases = ["dp-size", "data-parallel-size"], default_value_t = 1, allow_negative_numbers = true)]
    pub dp: i64,

    /// With several replicas, which one gets a request: `prefix-affinity`: where most of its prompt was before, unless
    /// that replica is too far ahead in load; `least-load`: where the fewest requests are open; `round-robin`.
    #[arg(long, value_name = "POLICY", default_value = "prefix-affinity")]
    pub dp_policy: DpPolicyFlag,

    /// How many open requests a replica that is preferred for a prefix may be ahead of the least loaded one [default: a
    /// quarter of --max-running].
    #[arg(long, value_name = "REQUESTS")]
    pub dp_load_bound: Option<usize>,

    /// Tokenizer processes; 0 means one worker that tokenizes and detokenizes.
    #[arg(long, default_value_t = 0)]
    pub num_tokenizer: usize,

    /// Threads of each rank [default: cores / ranks, or of its NUMA node / ranks there, at least 1].
    #[arg(long)]
    pub threads: Option<usize>,

    /// NUMA nodes of this host's ranks, on CPUs: auto gives every node of several equally many ranks, which keep to its cores
    /// and memory; off leaves them to the system; 0,1 names the node of each rank.
    #[arg(long, value_name = "NODES", default_value = "auto", allow_hyphen_values = true)]
    pub numa: String,

    /// Seconds a rank waits for another in a collective before the server stops.
    #[arg(long, default_value_t = 30.0)]
    pub collective_timeout: f64,
}

/// Values of `--dp-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DpPolicyFlag {
    /// Where most of the prompt was before.
    PrefixAffinity,
    /// Where the fewest requests are open.
    LeastLoad,
    /// One after the other.
    RoundRobin,
}

/// Most ranks of a server.
const RANKS_MAX: usize = 256;
/// Most tokenizer processes.
const NUM_TOKENIZER_MAX: usize = 64;
/// Most threads of a rank.
const THREADS_MAX: usize = 512;

impl ParallelFlags {
    /// Replicas; an illegal number counts as 1 until [`Self::check`] refuses it.
    pub fn replicas(&self) -> usize {
        usize::try_from(self.dp).unwrap_or(1).clamp(1, REPLICAS_MAX)
    }

    /// Stages of a replica; an illegal number counts as 1 until [`Self::check`] refuses it.
    pub fn stages(&self) -> usize {
        usize::try_from(self.pp).unwrap_or(1).clamp(1, TP_SIZE_MAX)
    }

    /// All axes; illegal numbers count as 1.
    pub fn topology(&self) -> Topology {
        let tp_size = usize::try_from(self.tp).unwrap_or(1).max(1);
        Topology { tp_size, pp_size: self.stages(), dp_size: self.replicas() }
    }

    /// How requests are spread over replicas of which each runs `running_max` requests and may have
    /// `requests_open_max` open.
    pub fn replication(&self, running_max: usize, requests_open_max: usize) -> Replication {
        let policy = match self.dp_policy {
            DpPolicyFlag::PrefixAffinity => DpPolicy::PrefixAffinity,
            DpPolicyFlag::LeastLoad => DpPolicy::LeastLoad,
            DpPolicyFlag::RoundRobin => DpPolicy::RoundRobin,
        };
        let load_bound = self.dp_load_bound.unwrap_or((running_max / 4).max(1));
        Replication { replicas: self.replicas(), requests_open_max, policy, load_bound }
    }

    /// Threads of each rank, where `default` is what suits the machine.
    pub fn threads(&self, default: usize) -> Result<usize> {
        match self.threads {
            None => Ok(default),
            Some(n) if (1..=THREADS_MAX).contains(&n) => Ok(n),
            Some(n) => bail!("--threads {n} is outside 1..={THREADS_MAX}"),
        }
    }

    /// Child processes of the server: ranks, tokenizers, the detokenizer. An illegal `--tp` counts as 1: it is
    /// refused where the sizes that the model takes are known.
    pub fn children(&self) -> usize {
        let Topology { tp_size, pp_size, dp_size } = self.topology();
        tp_size.saturating_mul(pp_size * dp_size) + self.num_tokenizer + 1
    }

    /// Checks that need no model.
    pub fn check(&self) -> Result<()> {
        if !(1..=REPLICAS_MAX as i64).contains(&self.dp) {
            bail!("--dp {} is outside 1..={REPLICAS_MAX} replicas", self.dp);
        }
        if !(1..=TP_SIZE_MAX as i64).contains(&self.pp) {
            bail!("--pp {} is outside 1..={TP_SIZE_MAX} stages", self.pp);
        }
        // What is wrong with --tp itself is said with the sizes that the model takes.
        let Topology { tp_size: tp, pp_size, dp_size } = self.topology();
        let of_replica = tp.saturating_mul(pp_size);
        if self.pp > 1 && of_replica > TP_SIZE_MAX {
            bail!(
                "--tp {tp} with --pp {pp_size} makes replicas of {of_replica} ranks, at most {TP_SIZE_MAX} are possible"
            );
        }
        let ranks = of_replica.saturating_mul(dp_size);
        if self.dp > 1 && ranks > RANKS_MAX {
            bail!(
                "--tp {tp} with --pp {pp_size} and --dp {dp_size} makes {ranks} ranks, at most {RANKS_MAX} are possible"
            );
        }
        if self.num_tokenizer > NUM_TOKENIZER_MAX {
            bail!("--num-tokenizer {} is above {NUM_TOKENIZER_MAX}", self.num_tokenizer);
        }
        if !(1.0..=3600.0).contains(&self.collective_timeout) {
            bail!("--collective-timeout {} is outside 1..=3600 seconds", self.collective_timeout);
        }
        Ok(())
    }
}
