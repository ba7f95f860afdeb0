//! What one rank will hold, computed as the server computes it.

use crate::device::{Device, DeviceKind, GIB};
use crate::pipeline::Part;
use crate::{Facts, Workload};
use lockstep_backend::Backend;
use lockstep_backend::cpu::CpuBackend;
use lockstep_backend::cuda::CudaBackend;
use lockstep_core::DType;
use lockstep_core::shard::HeadShard;
use lockstep_model::rules::ModelRules;
use lockstep_model::{ShardBytes, Workspace};
use serde::Serialize;

/// Memory of one rank. All counts are this rank's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankMemory {
    /// What it may use.
    pub budget_bytes: u64,
    /// Its shard.
    pub weight_bytes: u64,
    /// The part of the shard that other ranks hold too.
    pub replicated_bytes: u64,
    /// Activations of the largest step.
    pub activation_bytes: u64,
    /// The driver's context and code.
    pub driver_bytes: u64,
    /// Workspaces of matrix products.
    pub workspace_bytes: u64,
    /// Recorded decode steps (CUDA graphs).
    pub graph_bytes: u64,
    /// What ranks send each other; 0 on one rank.
    pub communication_bytes: u64,
    /// K and V of one token over all its layers.
    pub kv_bytes_per_token: u64,
    /// KV pages that the rest of the budget holds.
    pub pages: u64,
    /// How many ranks hold each KV head.
    pub kv_replicas: usize,
    /// Longest request: what the pool holds, or the model's own limit.
    pub context_max: u64,
    /// Requests of the workload's context that fit at once.
    pub concurrency_max: u64,
}

/// What ranks sum through, and what a stage before leaves for this one.
fn communication_bytes(
    facts: &Facts<'_>,
    device: &Device,
    workload: &Workload,
    Part { p, stage }: Part,
) -> u64 {
    let joint = if p.replica_size() > 1 { (device.communication_gib * GIB) as u64 } else { 0 };
    if device.kind == DeviceKind::Cpu || stage.embeds() {
        return joint;
    }
    let (rows, hidden) = (workload.chunk + workload.concurrency, facts.config.hidden_size);
    joint + CudaBackend::pipeline_bytes(p.pp_size, rows, hidden, DType::Bf16) as u64
}

impl RankMemory {
    /// The memory of the rank that has this part. Panics when the tp size is illegal.
    pub fn new(facts: &Facts<'_>, device: &Device, workload: &Workload, Part { p, stage }: Part) -> Self {
        let config = facts.config;
        let shard = ShardBytes::of(&ModelRules::of_stage(config, stage), p, facts.type_of);
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        // Logits are the last stage's.
        let rows = if stage.has_logits() { workload.concurrency } else { 0 };
        // f32 in the CPU backend; a GPU keeps activations in 16 bits.
        let f32_bytes =
            Workspace::<CpuBackend>::bytes(config, p, workload.chunk + workload.concurrency, rows);
        let activation_bytes = (f32_bytes * device.kind.activation_bytes() / size_of::<f32>()) as u64;
        let elements = 2 * stage.count() * heads.kv_heads.len() * config.head_dim;
        let kv_bytes_per_token = (elements * device.kind.activation_bytes()) as u64;
        let budget_bytes = device.rank_budget_bytes(workload.memory_ratio, p.replica_size() / workload.hosts);
        let gib = |gib: f64| (gib * GIB) as u64;
        let mut memory = Self {
            budget_bytes,
            weight_bytes: shard.total() as u64,
            replicated_bytes: shard.replicated as u64,
            activation_bytes,
            driver_bytes: gib(device.driver_gib),
            workspace_bytes: gib(device.workspace_gib),
            graph_bytes: gib(device.graphs_gib),
            communication_bytes: communication_bytes(facts, device, workload, Part { p, stage }),
            kv_bytes_per_token,
            pages: 0,
            kv_replicas: heads.kv_replicas,
            context_max: 0,
            concurrency_max: 0,
        };
        let page_size = workload.page_size as u64;
        memory.pages =
            budget_bytes.saturating_sub(memory.committed_bytes()) / (kv_bytes_per_token * page_size);
        memory.context_max = (memory.pages * page_size).min(config.max_position as u64);
        memory.concurrency_max = memory.pages / (workload.context as u64).div_ceil(page_size);
        memory
    }

    /// What does not shrink with more ranks.
    pub fn buffer_bytes(&self) -> u64 {
        self.driver_bytes + self.workspace_bytes + self.graph_bytes + self.communication_bytes
    }

    /// Whether weights and buffers fit and leave room for a request of two tokens.
    pub fn loads(&self) -> bool {
        self.pages > 0
    }

    /// Whether the whole workload fits.
    pub fn serves(&self, workload: &Workload) -> bool {
        self.concurrency_max >= workload.concurrency as u64
    }

    /// Everything but KV.
    pub fn committed_bytes(&self) -> u64 {
        self.weight_bytes + self.activation_bytes + self.buffer_bytes()
    }
}
