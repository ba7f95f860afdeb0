//! What a step moves, computes and sends, and the time that takes.
//!
//! Time = max(bytes / bandwidth, operations / rate) + layers x overhead + collectives. A decode step reads every
//! weight once (of an untied embedding only some rows, of the experts those that some token chose) and the KV of every
//! request; with a sliding window only the window's.

use crate::device::Device;
use crate::pipeline::Part;
use crate::{Facts, Workload};
use lockstep_core::shard::{Group, HeadShard, VocabShard, WeightRule};
use lockstep_core::{ParallelInfo, StageLayers};
use lockstep_model::rules::ModelRules;
use serde::Serialize;

/// Bytes of a logit.
const LOGIT_BYTES: f64 = 4.0;

/// What steps cost at one tp size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// All-reduces of one step: two a layer and one for the embedding; 0 on one rank.
    pub all_reduces_per_step: usize,
    /// Bytes that each of them sums for one decoding request.
    pub all_reduce_bytes_per_token: usize,
    /// A decode step of one request at the workload's context.
    pub decode_one_ms: f64,
    /// A decode step of all the workload's requests.
    pub decode_all_ms: f64,
    /// The part of [`decode_one_ms`](Self::decode_one_ms) spent in collectives.
    pub decode_one_collectives_ms: f64,
    /// The part of any step spent in launches and small kernels.
    pub overhead_ms: f64,
    /// Generated tokens a second, all requests together.
    pub decode_tokens_per_s: f64,
    /// Prefill of one prompt as long as the context.
    pub prefill_ms: f64,
    /// Prompt tokens a second.
    pub prefill_tokens_per_s: f64,
}

/// Sizes that the formulas need, of one rank.
struct Sizes<'a> {
    facts: &'a Facts<'a>,
    device: &'a Device,
    workload: &'a Workload,
    p: ParallelInfo,
    stage: StageLayers,
    /// Weight bytes that every step reads.
    dense_bytes: f64,
    /// Weight bytes of all experts.
    expert_bytes: f64,
    /// Multiplications of one token, head left out.
    dense_macs: f64,
    /// Multiplications of one row of logits.
    head_macs: f64,
    local_heads: f64,
    local_kv_heads: f64,
}

impl Cost {
    /// The costs of the rank that has this part. Panics when the tp size is illegal.
    pub fn new(facts: &Facts<'_>, device: &Device, workload: &Workload, part: Part) -> Self {
        let sizes = Sizes::new(facts, device, workload, part);
        let config = facts.config;
        let all_reduces = if part.p.tp_size == 1 { 0 } else { sizes.sums() };
        let decode_one_ms = sizes.decode_ms(1);
        let decode_all_ms = sizes.decode_ms(workload.concurrency);
        let prefill_ms = sizes.prefill_ms();
        Self {
            all_reduces_per_step: all_reduces,
            all_reduce_bytes_per_token: config.hidden_size * device.kind.activation_bytes(),
            decode_one_ms,
            decode_all_ms,
            decode_one_collectives_ms: sizes.collectives_ms(1, 1),
            overhead_ms: sizes.overhead_ms(1),
            decode_tokens_per_s: workload.concurrency as f64 / decode_all_ms * 1e3,
            prefill_ms,
            prefill_tokens_per_s: workload.context as f64 / prefill_ms * 1e3,
        }
    }
}

impl Cost {
    /// What `workload` costs on all stages, of which each has these costs for a step with an even part of its requests.
    /// Hops between them are left out.
    pub fn of_stages(stages: &[Self], workload: &Workload) -> Self {
        let sum = |value: fn(&Self) -> f64| stages.iter().map(value).sum::<f64>();
        let max = |value: fn(&Self) -> f64| stages.iter().map(value).fold(0.0, f64::max);
        let steps = workload.concurrency.min(stages.len()) as f64;
        // A token of every request: the slowest stage computes all steps in flight, and none is done before its last stage.
        let decode_all_ms = (max(|c| c.decode_all_ms) * steps).max(sum(|c| c.decode_all_ms));
        let chunks = workload.context.div_ceil(workload.chunk) as f64;
        let prefill_ms = (sum(|c| c.prefill_ms) + (chunks - 1.0) * max(|c| c.prefill_ms)) / chunks;
        Self {
            all_reduces_per_step: stages.iter().map(|c| c.all_reduces_per_step).sum(),
            all_reduce_bytes_per_token: stages.first().map_or(0, |c| c.all_reduce_bytes_per_token),
            decode_one_ms: sum(|c| c.decode_one_ms),
            decode_all_ms,
            decode_one_collectives_ms: sum(|c| c.decode_one_collectives_ms),
            overhead_ms: sum(|c| c.overhead_ms),
            decode_tokens_per_s: workload.concurrency as f64 / decode_all_ms * 1e3,
            prefill_ms,
            prefill_tokens_per_s: workload.context as f64 / prefill_ms * 1e3,
        }
    }
}

impl<'a> Sizes<'a> {
    fn new(facts: &'a Facts<'a>, device: &'a Device, workload: &'a Workload, part: Part) -> Self {
        let (config, p) = (facts.config, part.p);
        let rules = &ModelRules::of_stage(config, part.stage);
        let bytes = |rule: &WeightRule| {
            let weight_type = rule.weight_type(p, &rules.exact_tp_sizes, facts.type_of);
            weight_type.packed_bytes(rule.local_elements(p)) as f64
        };
        let (mut dense_bytes, mut expert_bytes, mut dense_macs) = (0.0, 0.0, 0.0);
        for rule in rules.iter() {
            match rule.group {
                Group::Experts => expert_bytes += bytes(rule),
                // Counted below.
                Group::Vocabulary => {}
                _ => dense_bytes += bytes(rule),
            }
            let share = match (rule.group, &config.moe) {
                (Group::Vocabulary | Group::Biases | Group::Norms, _) => 0.0,
                (Group::Experts, Some(moe)) => moe.experts_per_token as f64 / moe.num_experts as f64,
                _ => 1.0,
            };
            dense_macs += share * rule.local_elements(p) as f64;
        }
        let head = rules.output_head();
        dense_bytes += head.map_or(0.0, bytes);
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        Self {
            facts,
            device,
            workload,
            p,
            stage: part.stage,
            dense_bytes,
            expert_bytes,
            dense_macs,
            head_macs: head.map_or(0.0, |head| head.local_elements(p) as f64),
            local_heads: heads.query_heads.len() as f64,
            local_kv_heads: heads.kv_heads.len() as f64,
        }
    }

    /// Sum over layers of the positions that a token at `position` sees.
    fn seen(&self, position: f64) -> f64 {
        let config = self.facts.config;
        self.stage
            .range()
            .map(|layer| config.window(layer).map_or(position, |window| position.min(window as f64)))
            .sum()
    }

    /// Weight bytes read by a step of `tokens`: experts that nobody chose are left out (each token
    /// chooses independently).
    fn weight_bytes(&self, tokens: f64) -> f64 {
        let chosen = self.facts.config.moe.as_ref().map_or(0.0, |moe| {
            let one = moe.experts_per_token as f64 / moe.num_experts as f64;
            1.0 - (1.0 - one).powf(tokens)
        });
        self.dense_bytes + self.expert_bytes * chosen
    }

    fn decode_ms(&self, requests: usize) -> f64 {
        let batch = requests as f64;
        let config = self.facts.config;
        let seen = self.seen(self.workload.context as f64);
        let head_dim = config.head_dim as f64;
        let kv_bytes =
            2.0 * seen * self.local_kv_heads * head_dim * self.device.kind.activation_bytes() as f64;
        let bytes = self.weight_bytes(batch) + batch * kv_bytes;
        let attention_macs = 2.0 * seen * self.local_heads * head_dim;
        let macs = batch * (self.dense_macs + self.head_macs + attention_macs);
        self.roofline_ms(bytes, macs) + self.overhead_ms(1) + self.collectives_ms(requests, requests)
    }

    fn prefill_ms(&self) -> f64 {
        let (tokens, chunk) = (self.workload.context, self.workload.chunk);
        let steps = tokens.div_ceil(chunk);
        let head_dim = self.facts.config.head_dim as f64;
        // Positions seen by all tokens together: the mean token sees half the context, or its window.
        let seen = self.seen(tokens as f64 / 2.0) * tokens as f64;
        let macs =
            tokens as f64 * self.dense_macs + self.head_macs + 2.0 * seen * self.local_heads * head_dim;
        let bytes = steps as f64 * self.weight_bytes(tokens.min(chunk) as f64);
        let collectives = steps as f64 * self.collectives_ms(tokens.min(chunk), 1);
        self.roofline_ms(bytes, macs) + self.overhead_ms(steps) + collectives
    }

    fn roofline_ms(&self, bytes: f64, macs: f64) -> f64 {
        let share = self.device.rank_share(self.p.replica_size());
        let moving = bytes / (self.device.bandwidth_gbs * 1e9 * share);
        let computing = 2.0 * macs / (self.device.tflops * 1e12 * share);
        moving.max(computing) * 1e3
    }

    fn overhead_ms(&self, steps: usize) -> f64 {
        (steps * self.stage.count()) as f64 * self.device.layer_overhead_us / 1e3
    }

    /// All-reduces of a step on several ranks.
    fn sums(&self) -> usize {
        2 * self.stage.count() + usize::from(self.stage.embeds())
    }

    /// All-reduces over `tokens` and the gather of the logits of `rows`, of one step.
    fn collectives_ms(&self, tokens: usize, rows: usize) -> f64 {
        if self.p.tp_size == 1 {
            return 0.0;
        }
        let config = self.facts.config;
        let one = |bytes: f64| self.device.sum_us(bytes, self.p.tp_size) / 1e3;
        let sum = one((tokens * config.hidden_size * self.device.kind.activation_bytes()) as f64);
        let vocab = VocabShard::new(config.vocab_size, self.p.tp_rank, self.p.tp_size).padded.len();
        let logits = if self.stage.has_logits() { one((rows * vocab) as f64 * LOGIT_BYTES) } else { 0.0 };
        self.sums() as f64 * sum + logits
    }
}
