//! `lockstep plan`: what a model takes and how fast it will be at each tp size, before anything loads.
//!
//! | file | holds |
//! |---|---|
//! | [`device`] | what a device can do: the editable table `devices.json`, `cpu:24g`, this machine |
//! | [`memory`] | what each rank will hold, from the shard rules that the loader follows |
//! | [`work`] | bytes and operations of a step |
//! | [`cost`] | the time they take, and messages |
//! | [`pipeline`] | both for the stages of a pipeline, and how long they wait for each other |
//! | [`hosts`] | a replica on several hosts: who is where, and what crosses the links |
//! | [`advice`] | what follows from the numbers, in words |
//! | [`table`] | the report as text |
//!
//! **Invariants:** no weight is read; memory comes from the same [`WeightRule`](lockstep_core::shard::WeightRule)s
//! that are loaded, so that plan and server cannot disagree; times are estimates from rates with a named source, not promises.
//! The roofline model follows Williams, Waterman, Patterson (2009).

pub mod advice;
pub mod cost;
pub mod device;
pub mod hosts;
pub mod memory;
pub mod pipeline;
pub mod table;
pub mod work;

pub use device::{Device, DeviceKind, DeviceTable};
pub use hosts::Link;

use cost::Cost;
use hosts::{Hosts, Spread};
use lockstep_core::shard;
use lockstep_core::shard::Group;
use lockstep_core::{ConfigError, ModelConfig, ParallelInfo, StageLayers, WeightType};
use lockstep_model::rules::ModelRules;
use memory::RankMemory;
use pipeline::{Pipeline, Stage};
use serde::Serialize;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A device that is not in the table.
    #[error("--device {got} is not known; known are {known}, cpu:24g (any memory in GiB) and detect")]
    UnknownDevice {
        /// As typed.
        got: String,
        /// Names in the table.
        known: String,
    },
    /// More memory than any machine has.
    #[error("--device {got} asks for more memory than there is anywhere; give at most {max} GiB")]
    TooMuchMemory {
        /// As typed.
        got: String,
        /// The limit in GiB.
        max: f64,
    },
    /// A device table of the user's that cannot be read.
    #[error("device table: {0}")]
    Table(String),
    /// A workload that the model cannot have.
    #[error("--context {context} is above the {max} positions this model was made for; use at most that")]
    Context {
        /// As asked.
        context: usize,
        /// The model's limit.
        max: usize,
    },
    /// Hosts that no tp size can have.
    #[error("{0}")]
    Hosts(String),
    /// Stages that the model cannot be cut into.
    #[error(transparent)]
    Stages(#[from] ConfigError),
}

/// What is known of a model without its weights.
pub struct Facts<'a> {
    /// Its description.
    pub config: &'a ModelConfig,
    /// The form each tensor will have in memory ([`lockstep_model::weight_types`]); `None` when the checkpoint has no such
    /// tensor.
    pub type_of: &'a dyn Fn(Group, &str) -> Option<WeightType>,
    /// Where that is from, for the report.
    pub source: String,
    /// What the files hold that is not read: a sentence each.
    pub notes: Vec<String>,
}

/// The load to plan for, and the flags of `serve` that matter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Workload {
    /// Tokens of prompt plus answer of each request.
    pub context: usize,
    /// Requests at once.
    pub concurrency: usize,
    /// Prefill tokens of a step.
    pub chunk: usize,
    /// Tokens in a page.
    pub page_size: usize,
    /// Share of the device's memory that ranks may use.
    pub memory_ratio: f64,
    /// Pipeline stages of each replica (`--pp`).
    pub stages: usize,
    /// Replicas that share the requests (`--dp`).
    pub replicas: usize,
    /// Hosts that the ranks of a replica are spread over (`--nnodes`).
    pub hosts: usize,
    /// What joins those.
    pub link: Link,
}

impl Workload {
    /// The defaults of `serve` on this kind of device, for a model of `max_position`.
    pub fn default_for(kind: DeviceKind, max_position: usize) -> Self {
        let (concurrency, chunk, memory_ratio) = match kind {
            DeviceKind::Gpu => (32, 8192, 0.9),
            DeviceKind::Cpu => (8, 512, 0.5),
        };
        let context = max_position.min(8192);
        let (stages, replicas, hosts, link) = (1, 1, 1, Link::default());
        Self { context, concurrency, chunk, page_size: 16, memory_ratio, stages, replicas, hosts, link }
    }
}

/// One way to cut the model.
#[derive(Clone, Debug, Serialize)]
pub struct Choice {
    /// Ranks that share every layer.
    pub tp_size: usize,
    /// Why the model cannot be cut so; nothing else is set then.
    pub illegal: Option<String>,
    /// What one rank (the fullest) holds.
    pub memory: Option<RankMemory>,
    /// What a step costs, on all stages together.
    pub cost: Option<Cost>,
    /// Each pipeline stage by itself, where there are several.
    pub stages: Vec<Stage>,
    /// Share of the time in which a stage waits for another under the load.
    pub bubble: f64,
    /// What is on which host, where there are several.
    pub hosts: Option<Hosts>,
}

/// The answer of `lockstep plan`.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Architecture and size in words.
    pub model: String,
    /// Where the element types are from.
    pub source: String,
    /// What the files hold that is not read: a sentence each.
    pub notes: Vec<String>,
    /// All parameters, biases and norms included.
    pub parameters: u64,
    /// The device of every rank; of a machine that replicas share, one replica's share.
    pub device: Device,
    /// What was planned for: one replica's part of the load.
    pub workload: Workload,
    /// One per tp size looked at, ascending.
    pub choices: Vec<Choice>,
    /// The tp size to use, if one can hold the model.
    pub recommended: Option<usize>,
    /// What follows, in words; the first sentence is the recommendation.
    pub advice: Vec<String>,
}

/// Tp sizes shown even when they are illegal, so that the reason is seen.
const SHOWN: [usize; 4] = [1, 2, 4, 8];
/// Legal tp sizes above it are not shown: no host has so many devices.
const SHOWN_MAX: usize = 16;

/// Plans `facts` on `device` for `workload`.
pub fn plan(facts: &Facts<'_>, device: &Device, workload: Workload) -> Result<Plan, PlanError> {
    let config = facts.config;
    if workload.context > config.max_position {
        return Err(PlanError::Context { context: workload.context, max: config.max_position });
    }
    let device = &device.share_of(workload.replicas);
    if workload.replicas > 1 {
        // Replicas on several hosts are no matter of the tp size.
        Spread::new(device.kind, &workload, 1).map_err(PlanError::Hosts)?;
    }
    let concurrency = workload.concurrency.div_ceil(workload.replicas);
    let workload = Workload { concurrency, ..workload };
    let layers = StageLayers::of_stages(config, workload.stages, None)?;
    let choices: Vec<Choice> = (1..=SHOWN_MAX)
        .filter_map(|tp_size| {
            let legal = shard::check_tp_size(config, tp_size as i64).map_err(|e| e.to_string());
            let spread = legal.and_then(|()| Spread::new(device.kind, &workload, tp_size));
            (spread.is_ok() || SHOWN.contains(&tp_size)).then(|| match spread {
                Err(reason) => Choice {
                    tp_size,
                    illegal: Some(reason),
                    memory: None,
                    cost: None,
                    stages: Vec::new(),
                    bubble: 0.0,
                    hosts: None,
                },
                Ok(spread) => choice(facts, device, &workload, (&spread, tp_size, &layers)),
            })
        })
        .collect();
    let parameters =
        ModelRules::new(config).iter().map(|rule| rule.local_elements(ParallelInfo::SINGLE) as u64).sum();
    let mut plan = Plan {
        model: describe(config, parameters),
        source: facts.source.clone(),
        notes: facts.notes.clone(),
        parameters,
        device: device.clone(),
        workload,
        choices,
        recommended: None,
        advice: Vec::new(),
    };
    plan.recommended = advice::recommended(&plan);
    plan.advice = advice::sentences(&plan);
    Ok(plan)
}

fn choice(
    facts: &Facts<'_>,
    device: &Device,
    workload: &Workload,
    (spread, tp_size, layers): (&Spread, usize, &[StageLayers]),
) -> Choice {
    let Pipeline { stages, memory, cost, bubble } =
        Pipeline::new(facts, device, workload, spread, (tp_size, layers));
    let hosts =
        (workload.hosts > 1).then(|| Hosts::new(facts, workload, spread, (layers, &stages), memory.pages));
    let stages = if stages.len() > 1 { stages } else { Vec::new() };
    Choice { tp_size, illegal: None, memory: Some(memory), cost: Some(cost), stages, bubble, hosts }
}

fn describe(config: &ModelConfig, parameters: u64) -> String {
    let experts = config.moe.as_ref().map_or(String::new(), |moe| {
        format!(", {} experts of which {} a token", moe.num_experts, moe.experts_per_token)
    });
    format!(
        "{}, {:.2} billion parameters, {} layers, hidden {}, {} query heads, {} KV heads of {}{experts}, context {}",
        config.architecture,
        parameters as f64 / 1e9,
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.max_position
    )
}
