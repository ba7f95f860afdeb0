//! What a step moves and computes: the one place where bytes and operations are counted.
//!
//! A step reads every weight once (of an untied embedding only some rows, which are not counted; the head only when it
//! makes logits; of the experts those that some token chose) and the cached K and V in sight of its rows, with a sliding
//! window only the window's. [`cost`](crate::cost) makes times of it, `lockstep bench cpu` floors.

use crate::Facts;
use crate::device::{Device, DeviceKind};
use crate::pipeline::Part;
use lockstep_core::shard::{Group, HeadShard, WeightRule};
use lockstep_core::{ModelConfig, StageLayers, WeightType};
use lockstep_model::rules::ModelRules;
use std::ops::AddAssign;

/// What a step computes of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Positions in the cache before it.
    pub start: usize,
    /// Tokens computed.
    pub tokens: usize,
    /// K and V of the positions before this one are read for another row of the same step, which shares them.
    pub own_from: usize,
    /// Whether logits are made of its last token.
    pub logits: bool,
}

impl Row {
    /// A decoding request that attends to `seen` positions, its own among them.
    pub fn decode(seen: usize) -> Self {
        Self { start: seen.saturating_sub(1), tokens: 1, own_from: 0, logits: true }
    }

    /// The steps of a prompt from position `start` to `end`, `chunk` tokens each; the last one makes logits.
    pub fn prefill(start: usize, end: usize, chunk: usize) -> Vec<Self> {
        let row = |at: usize| {
            let next = end.min(at + chunk);
            Self { start: at, tokens: next - at, own_from: 0, logits: next == end }
        };
        (start..end).step_by(chunk).map(row).collect()
    }
}

/// Bytes and operations of one rank, of a step or of several. A multiplication counts with its addition.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Weights read.
    pub weight_bytes: f64,
    /// K and V read.
    pub kv_bytes: f64,
    /// Multiplications of floats: products with float weights, attention.
    pub float_macs: f64,
    /// Multiplications of integers: products with codes.
    pub code_macs: f64,
}

impl Work {
    /// Seconds that moving the bytes takes a rank of `ranks` of this device.
    pub fn moving_s(&self, device: &Device, ranks: usize) -> f64 {
        (self.weight_bytes + self.kv_bytes) / (device.bandwidth_gbs * 1e9 * device.rank_share(ranks))
    }

    /// Seconds that computing takes a rank of `ranks` of this device.
    pub fn computing_s(&self, device: &Device, ranks: usize) -> f64 {
        let codes = device.int8_tops.unwrap_or(device.tflops);
        let seconds = self.float_macs / device.tflops + self.code_macs / codes;
        2.0 * seconds / (1e12 * device.rank_share(ranks))
    }

    /// The longer of both, since they overlap (Williams, Waterman, Patterson 2009).
    pub fn roofline_s(&self, device: &Device, ranks: usize) -> f64 {
        self.moving_s(device, ranks).max(self.computing_s(device, ranks))
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.weight_bytes += other.weight_bytes;
        self.kv_bytes += other.kv_bytes;
        self.float_macs += other.float_macs;
        self.code_macs += other.code_macs;
    }
}

/// Multiplications of some matrices by one token.
#[derive(Clone, Copy, Debug, Default)]
struct Macs {
    float: f64,
    code: f64,
}

impl Macs {
    fn add(&mut self, weight_type: WeightType, macs: f64) {
        match weight_type {
            WeightType::Float(_) => self.float += macs,
            WeightType::Coded(_) => self.code += macs,
        }
    }
}

/// The sizes of one rank's part of a model, from which the work of its steps follows.
pub struct Counts<'a> {
    config: &'a ModelConfig,
    stage: StageLayers,
    /// Bytes of an element of K and V.
    kv_element_bytes: f64,
    /// Bytes of weights that every step reads.
    dense_bytes: f64,
    /// Bytes of all experts.
    expert_bytes: f64,
    /// Bytes of the output head.
    head_bytes: f64,
    /// Of a token without its logits.
    token: Macs,
    /// Of a row of logits.
    head: Macs,
    local_heads: f64,
    local_kv_heads: f64,
}

impl<'a> Counts<'a> {
    /// Of the rank that has this part, on this kind of device. Panics when the tp size is illegal.
    pub fn new(facts: &Facts<'a>, kind: DeviceKind, Part { p, stage }: Part) -> Self {
        let config = facts.config;
        let rules = &ModelRules::of_stage(config, stage);
        let type_of = |rule: &WeightRule| rule.weight_type(p, &rules.exact_tp_sizes, facts.type_of);
        let bytes = |rule: &WeightRule| type_of(rule).packed_bytes(rule.local_elements(p)) as f64;
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        let mut counts = Self {
            config,
            stage,
            kv_element_bytes: kind.activation_bytes() as f64,
            dense_bytes: 0.0,
            expert_bytes: 0.0,
            head_bytes: 0.0,
            token: Macs::default(),
            head: Macs::default(),
            local_heads: heads.query_heads.len() as f64,
            local_kv_heads: heads.kv_heads.len() as f64,
        };
        for rule in rules.iter() {
            match rule.group {
                Group::Experts => counts.expert_bytes += bytes(rule),
                // The head is counted below.
                Group::Vocabulary => {}
                _ => counts.dense_bytes += bytes(rule),
            }
            let share = match (rule.group, &config.moe) {
                (Group::Vocabulary | Group::Biases | Group::Norms, _) => 0.0,
                (Group::Experts, Some(moe)) => moe.experts_per_token as f64 / moe.num_experts as f64,
                _ => 1.0,
            };
            counts.token.add(type_of(rule), share * rule.local_elements(p) as f64);
        }
        if let Some(head) = rules.output_head() {
            counts.head_bytes = bytes(head);
            counts.head.add(type_of(head), head.local_elements(p) as f64);
        }
        counts
    }

    /// The work of a step that has these rows.
    pub fn step(&self, rows: &[Row]) -> Work {
        let tokens: usize = rows.iter().map(|row| row.tokens).sum();
        let logits = rows.iter().filter(|row| row.logits).count();
        let seen: f64 = rows.iter().map(|row| self.seen(row)).sum();
        let cached: f64 = rows.iter().map(|row| self.cached(row)).sum();
        let head_bytes = if logits > 0 { self.head_bytes } else { 0.0 };
        let head_dim = self.config.head_dim as f64;
        let of_tokens = |token: f64, head: f64| tokens as f64 * token + logits as f64 * head;
        Work {
            weight_bytes: self.dense_bytes + self.expert_bytes * self.chosen(tokens) + head_bytes,
            kv_bytes: 2.0 * cached * self.local_kv_heads * head_dim * self.kv_element_bytes,
            float_macs: of_tokens(self.token.float, self.head.float)
                + 2.0 * seen * self.local_heads * head_dim,
            code_macs: of_tokens(self.token.code, self.head.code),
        }
    }

    /// Sum over layers and tokens of the positions that a token sees.
    fn seen(&self, row: &Row) -> f64 {
        let first = row.start + 1;
        let of_layer = |layer: usize| {
            let window = self.config.window(layer).unwrap_or(usize::MAX);
            let (count, last) = (row.tokens, row.start + row.tokens);
            // Those that see everything before them, then those that see a window.
            let growing = count.min(window.saturating_sub(row.start));
            let (growing, full) = (growing as f64, (count - growing) as f64);
            let plain = growing * (2.0 * first as f64 + growing - 1.0) / 2.0;
            plain + full * window.min(last) as f64
        };
        self.stage.range().map(of_layer).sum()
    }

    /// Sum over layers of the cached positions whose K and V are read for this row.
    fn cached(&self, row: &Row) -> f64 {
        let of_layer = |layer: usize| {
            let first = self.config.window(layer).map_or(0, |window| row.start.saturating_sub(window - 1));
            row.start.saturating_sub(first.max(row.own_from)) as f64
        };
        self.stage.range().map(of_layer).sum()
    }

    /// Share of the experts that some of so many tokens chose, each independently.
    fn chosen(&self, tokens: usize) -> f64 {
        self.config.moe.as_ref().map_or(0.0, |moe| {
            let one = moe.experts_per_token as f64 / moe.num_experts as f64;
            1.0 - (1.0 - one).powf(tokens as f64)
        })
    }
}
