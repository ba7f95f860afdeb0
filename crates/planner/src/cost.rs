//! What a step moves, computes and sends, and the time that takes.
//!
//! Time = max(bytes / bandwidth, operations / rate) + layers x overhead + collectives; [`work`](crate::work) counts.

use crate::device::Device;
use crate::hosts::{LOGIT_BYTES, Spread, sums};
use crate::pipeline::Part;
use crate::work::{Counts, Row, Work};
use crate::{Facts, Workload};
use lockstep_core::shard::VocabShard;
use lockstep_core::{ModelConfig, ParallelInfo, StageLayers};
use serde::Serialize;

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
    /// The part of [`decode_one_ms`](Self::decode_one_ms) spent in collectives, and in hops to stages on other hosts.
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

/// What the formulas need, of one rank.
struct Sizes<'a> {
    counts: Counts<'a>,
    config: &'a ModelConfig,
    device: &'a Device,
    workload: &'a Workload,
    p: ParallelInfo,
    stage: StageLayers,
    spread: &'a Spread,
}

impl Cost {
    /// The costs of the rank that has this part. Panics when the tp size is illegal.
    pub fn new(facts: &Facts<'_>, device: &Device, workload: &Workload, part: Part, spread: &Spread) -> Self {
        let sizes = Sizes::new(facts, device, workload, part, spread);
        let config = facts.config;
        let all_reduces = if part.p.tp_size == 1 { 0 } else { sums(&part.stage) };
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
    /// Hops between them are left out on one host.
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
    fn new(
        facts: &Facts<'a>,
        device: &'a Device,
        workload: &'a Workload,
        Part { p, stage }: Part,
        spread: &'a Spread,
    ) -> Self {
        let counts = Counts::new(facts, device.kind, Part { p, stage });
        Self { counts, config: facts.config, device, workload, p, stage, spread }
    }

    fn decode_ms(&self, requests: usize) -> f64 {
        let work = self.counts.step(&vec![Row::decode(self.workload.context); requests]);
        self.roofline_ms(&work) + self.overhead_ms(1) + self.collectives_ms(requests, requests)
    }

    fn prefill_ms(&self) -> f64 {
        let (tokens, chunk) = (self.workload.context, self.workload.chunk);
        let steps = Row::prefill(0, tokens, chunk);
        let rooflines: f64 = steps.iter().map(|row| self.roofline_ms(&self.counts.step(&[*row]))).sum();
        let collectives = steps.len() as f64 * self.collectives_ms(tokens.min(chunk), 1);
        rooflines + self.overhead_ms(steps.len()) + collectives
    }

    fn roofline_ms(&self, work: &Work) -> f64 {
        work.roofline_s(self.device, self.p.replica_size() / self.workload.hosts) * 1e3
    }

    fn overhead_ms(&self, steps: usize) -> f64 {
        (steps * self.stage.count()) as f64 * self.device.layer_overhead_us / 1e3
    }

    /// All-reduces over `tokens` and the gather of the logits of `rows`, of one step; and the hop to a stage on another host.
    fn collectives_ms(&self, tokens: usize, rows: usize) -> f64 {
        let (config, link) = (self.config, &self.workload.link);
        let stream = (tokens * config.hidden_size * self.device.kind.activation_bytes()) as f64;
        let logits = || {
            let vocab = VocabShard::new(config.vocab_size, self.p.tp_rank, self.p.tp_size).padded.len();
            (rows * vocab) as f64 * LOGIT_BYTES
        };
        let (spread, stage) = (self.spread, self.p.pp_rank);
        let hop = if self.stage.has_logits() { 0.0 } else { spread.hop(stage, stream).ms(link) };
        if self.p.tp_size == 1 {
            return hop;
        }
        let (sum, gather) = if spread.crosses(stage) {
            (spread.sum(stage, stream).ms(link), spread.gather(stage, logits()).ms(link))
        } else {
            let one = |bytes: f64| self.device.sum_us(bytes, self.p.tp_size) / 1e3;
            (one(stream), one(logits()))
        };
        sums(&self.stage) as f64 * sum + if self.stage.has_logits() { gather } else { 0.0 } + hop
    }
}
