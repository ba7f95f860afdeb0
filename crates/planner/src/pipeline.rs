//! What the stages of a pipeline hold and take, and how long they wait for each other.

use crate::cost::Cost;
use crate::device::Device;
use crate::hosts::Spread;
use crate::memory::RankMemory;
use crate::{Facts, Workload};
use lockstep_core::{ParallelInfo, StageLayers};
use serde::Serialize;
use std::ops::Range;

/// The part of the model that a rank has: its shard of its stage's layers.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Where it stands.
    pub p: ParallelInfo,
    /// Which layers.
    pub stage: StageLayers,
}

/// One stage.
#[derive(Clone, Debug, Serialize)]
pub struct Stage {
    /// Its layers.
    pub layers: Range<usize>,
    /// What one of its ranks holds.
    pub memory: RankMemory,
    /// What a step costs on it that holds an even part of the load's requests.
    pub cost: Cost,
}

/// The stages of one choice, together.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// In order.
    pub stages: Vec<Stage>,
    /// The fullest stage: its pages are the pool's.
    pub memory: RankMemory,
    /// What the load costs on all of them.
    pub cost: Cost,
    /// Share of the time in which a stage waits under the load, 0 for one stage.
    pub bubble: f64,
}

impl Pipeline {
    /// The stages with `layers` at `tp_size`; one of them is a model that is not cut. Panics when the tp size is
    /// illegal, or without a stage.
    pub fn new(
        facts: &Facts<'_>,
        device: &Device,
        workload: &Workload,
        spread: &Spread,
        (tp_size, layers): (usize, &[StageLayers]),
    ) -> Self {
        let pp_size = layers.len();
        let of_step = Workload { concurrency: workload.concurrency.div_ceil(pp_size), ..*workload };
        let stage = |(pp_rank, stage): (usize, &StageLayers)| {
            // Rank 0 is the fullest: padding of the vocabulary falls on the last ranks.
            let p = ParallelInfo { pp_rank, pp_size, ..ParallelInfo::tensor_parallel(0, tp_size) };
            let part = Part { p, stage: *stage };
            Stage {
                layers: stage.range(),
                memory: RankMemory::new(facts, device, workload, part),
                cost: Cost::new(facts, device, &of_step, part, spread),
            }
        };
        let stages: Vec<Stage> = layers.iter().enumerate().map(stage).collect();
        let fullest = stages.iter().min_by_key(|stage| stage.memory.pages);
        let memory = fullest.expect("invariant: there is a stage").memory;
        let costs: Vec<Cost> = stages.iter().map(|stage| stage.cost).collect();
        let (cost, bubble) = (Cost::of_stages(&costs, workload), bubble(&costs, workload));
        Self { stages, memory, cost, bubble }
    }
}

/// With fewer requests than stages, stages have nothing; beyond that, they wait for the slowest one.
fn bubble(stages: &[Cost], workload: &Workload) -> f64 {
    let times = || stages.iter().map(|stage| stage.decode_all_ms);
    let (count, sum, max) = (stages.len(), times().sum::<f64>(), times().fold(0.0, f64::max));
    let filled = workload.concurrency.min(count);
    // A cycle in which each step in flight is computed once: no shorter than the slowest stage needs for all of them,
    // nor than one step takes.
    let cycle = (max * filled as f64).max(sum);
    1.0 - sum * filled as f64 / (cycle * count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceTable;
    use lockstep_core::DType;

    #[test]
    fn stages_share_memory_and_wait_for_each_other() {
        let text =
            std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/configs/qwen3-8b.json")).unwrap();
        let config = lockstep_core::config::hf::parse(&text).unwrap();
        let facts = Facts {
            config: &config,
            type_of: &|_, _| Some(DType::Bf16.into()),
            source: "bf16".into(),
            notes: Vec::new(),
        };
        let device = DeviceTable::built_in().find("h200").unwrap();
        let pipeline = |stages, concurrency| {
            let workload =
                Workload { concurrency, ..Workload::default_for(device.kind, config.max_position) };
            let layers = StageLayers::of_stages(&config, stages, None).unwrap();
            let workload = Workload { stages, ..workload };
            let spread = Spread::new(device.kind, &workload, 1).unwrap();
            Pipeline::new(&facts, &device, &workload, &spread, (1, &layers))
        };
        let (one, two) = (pipeline(1, 32), pipeline(2, 32));
        assert_eq!((one.stages.len(), one.bubble), (1, 0.0));
        let weights: u64 = two.stages.iter().map(|stage| stage.memory.weight_bytes).sum();
        assert_eq!(weights, one.memory.weight_bytes, "an untied model is cut without a rest");
        let kv: u64 = two.stages.iter().map(|stage| stage.memory.kv_bytes_per_token).sum();
        assert_eq!(kv, one.memory.kv_bytes_per_token);
        assert!(two.memory.pages > one.memory.pages);
        assert!(two.bubble < 0.1, "balanced: {}", two.bubble);
        assert!((pipeline(2, 1).bubble - 0.5).abs() < 0.05 && (pipeline(4, 2).bubble - 0.5).abs() < 0.1);
        // One request goes through all stages; many are served by all at once.
        assert!((two.cost.decode_one_ms / one.cost.decode_one_ms - 1.0).abs() < 0.1);
        assert!(two.cost.decode_tokens_per_s > one.cost.decode_tokens_per_s);
    }
}
