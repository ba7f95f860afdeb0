//! What follows from the numbers, in words.

use crate::device::{DeviceKind, GIB};
use crate::hosts::Traffic;
use crate::memory::RankMemory;
use crate::{Choice, Plan};

/// A step this much faster is worth the ranks it takes.
const FASTER: f64 = 0.95;

/// The smallest tp size that serves the workload, else the smallest that loads.
pub fn recommended(plan: &Plan) -> Option<usize> {
    let memories = || plan.choices.iter().filter_map(|c| Some((c.tp_size, c.memory.as_ref()?)));
    let serving = memories().find(|(_, m)| m.serves(&plan.workload));
    serving.or_else(|| memories().rfind(|(_, m)| m.loads())).map(|(tp_size, _)| tp_size)
}

/// The recommendation and its reasons.
pub fn sentences(plan: &Plan) -> Vec<String> {
    let legal: Vec<&Choice> = plan.choices.iter().filter(|c| c.memory.is_some()).collect();
    let mut sentences = vec![first_sentence(plan, &legal)];
    sentences.extend(replicas(plan));
    sentences.extend(stages(plan));
    sentences.extend(hosts(plan));
    for choice in &legal {
        sentences.extend(why_not_enough(plan, choice));
    }
    for pair in legal.windows(2) {
        sentences.extend(compare(plan, pair[0], pair[1]));
    }
    let replicated = legal.iter().filter(|c| c.memory.is_some_and(|m| m.kv_replicas > 1));
    sentences.extend(replicated.map(|c| {
        let replicas = c.memory.map_or(1, |m| m.kv_replicas);
        format!(
            "tp {}: more ranks than KV heads, so {replicas} ranks hold each head and KV memory shrinks no further.",
            c.tp_size
        )
    }));
    sentences
}

/// What several replicas make together.
fn replicas(plan: &Plan) -> Option<String> {
    let (tp_size, replicas) = (plan.recommended?, plan.workload.replicas);
    let cost = plan.choices.iter().find(|choice| choice.tp_size == tp_size)?.cost?;
    (replicas > 1).then(|| {
        format!(
            "dp {replicas}: {replicas} replicas of {} are {} ranks and make {:.0} tokens/s together under the whole \
             load; a single request is no faster than with one replica.",
            of_replica(tp_size, plan.workload.stages),
            replicas * tp_size * plan.workload.stages,
            cost.decode_tokens_per_s * replicas as f64
        )
    })
}

/// The axes of one replica.
fn of_replica(tp_size: usize, stages: usize) -> String {
    match stages {
        1 => format!("tp {tp_size}"),
        _ => format!("tp {tp_size} x pp {stages}"),
    }
}

/// What the stages of the recommended tp size hold and take, and what the pipeline is worth.
fn stages(plan: &Plan) -> Vec<String> {
    let choice = plan.choices.iter().find(|choice| Some(choice.tp_size) == plan.recommended);
    let Some(choice) = choice.filter(|choice| !choice.stages.is_empty()) else { return Vec::new() };
    let (count, load) = (choice.stages.len(), &plan.workload);
    let mut sentences = vec![format!(
        "pp {count}: {} ranks a replica. Stages wait {:.0} % of the time under {}, and {:.0} % with a single request, which goes \
         through one after the other; have at least {count} requests at once.",
        count * choice.tp_size,
        100.0 * choice.bubble,
        load_in_words(plan),
        100.0 * (1.0 - 1.0 / count as f64)
    )];
    sentences.extend(choice.stages.iter().enumerate().map(|(number, stage)| {
        format!(
            "stage {number} has layers {} to {}: weights {}, activations {}, {} KV pages, {:.2} ms for a step of {} requests.",
            stage.layers.start,
            stage.layers.end - 1,
            size(stage.memory.weight_bytes),
            size(stage.memory.activation_bytes),
            stage.memory.pages,
            stage.cost.decode_all_ms,
            load.concurrency.div_ceil(count)
        )
    }));
    sentences
}

/// What is where at the recommended tp size, and what crosses the links.
fn hosts(plan: &Plan) -> Vec<String> {
    let choice = plan.choices.iter().find(|choice| Some(choice.tp_size) == plan.recommended);
    let Some((choice, hosts)) = choice.and_then(|choice| Some((choice, choice.hosts.as_ref()?))) else {
        return Vec::new();
    };
    let mut sentences: Vec<String> = hosts
        .hosts
        .iter()
        .enumerate()
        .map(|(number, host)| {
            format!(
                "host {number} (--node-rank {number}) has ranks {} to {} ({}): {} before KV, {} of KV.",
                host.ranks.start,
                host.ranks.end - 1,
                host.labels.join(", "),
                size(host.committed_bytes),
                size(host.kv_bytes)
            )
        })
        .collect();
    let (tp_size, link) = (choice.tp_size, &plan.workload.link);
    let (what, way_out) = match hosts.tp_crosses {
        true => (
            format!("tp {tp_size} crosses hosts, so every layer waits twice for the link"),
            format!(
                ". Where each host can hold a TP group, --pp {} with a smaller --tp sends the residual stream once instead",
                least_common_multiple(plan.workload.stages, plan.workload.hosts)
            ),
        ),
        false => ("no TP group crosses hosts, only the residual stream between stages".into(), String::new()),
    };
    let sent =
        |traffic: &Traffic| format!("{} off a host ({:.2} ms)", small_size(traffic.bytes), traffic.ms(link));
    sentences.push(format!(
        "{what}: on links of {} Gbit/s and {} µs a decode step of one request sends {}, a chunk of a prompt {}{way_out}.",
        link.gbit_s,
        link.latency_us,
        sent(&hosts.decode_one),
        sent(&hosts.prefill_chunk)
    ));
    sentences
}

/// The least number of stages that keeps a TP group on one host: each host has whole stages.
fn least_common_multiple(stages: usize, hosts: usize) -> usize {
    (1..=hosts).map(|times| stages * times).find(|pp| pp.is_multiple_of(hosts)).unwrap_or(stages * hosts)
}

/// For what may be below a MiB.
fn small_size(bytes: f64) -> String {
    match bytes / 1024.0 {
        kib if kib < 1024.0 => format!("{kib:.1} KiB"),
        _ => size(bytes as u64),
    }
}

fn size(bytes: u64) -> String {
    match bytes as f64 / GIB {
        gib if gib < 0.1 => format!("{:.1} MiB", gib * 1024.0),
        gib => format!("{gib:.2} GiB"),
    }
}

fn load_in_words(plan: &Plan) -> String {
    let load = &plan.workload;
    format!("{} requests of {} tokens", load.concurrency, load.context)
}

fn first_sentence(plan: &Plan, legal: &[&Choice]) -> String {
    let device = &plan.device.name;
    let Some(tp_size) = plan.recommended else {
        let needs = legal
            .iter()
            .filter_map(|c| Some((c.tp_size, c.memory?.committed_bytes(), c.memory?.budget_bytes)));
        let least = needs.min_by_key(|(_, needed, budget)| needed.saturating_sub(*budget));
        return match least {
            Some((tp, needed, budget)) => format!(
                "No tp size fits: nearest is tp {tp}, where a rank of {device} needs {} before any KV and may use {}. Use a \
                 larger device, a checkpoint with fewer bits, or a higher memory ratio.",
                size(needed),
                size(budget)
            ),
            None => format!("No tp size up to 16 can cut this model for {device}."),
        };
    };
    let choice = legal.iter().find(|c| c.tp_size == tp_size);
    let memory = choice.and_then(|c| c.memory);
    match memory {
        Some(memory) if memory.serves(&plan.workload) => format!(
            "Use tp {tp_size}: the smallest size that serves {} on {device} ({} of them fit).",
            load_in_words(plan),
            memory.concurrency_max
        ),
        Some(memory) => format!(
            "No tp size serves {} on {device}; tp {tp_size} holds the most: {} of them at once, or one of {} tokens. Lower \
             --context or --concurrency, or use a larger device.",
            load_in_words(plan),
            memory.concurrency_max,
            memory.context_max
        ),
        None => String::new(),
    }
}

/// Why a legal size does not load, or loads but does not serve.
fn why_not_enough(plan: &Plan, choice: &Choice) -> Option<String> {
    let memory: &RankMemory = choice.memory.as_ref()?;
    let tp = choice.tp_size;
    if !memory.loads() {
        return Some(format!(
            "tp {tp} does not load: weights {}, activations {} and buffers {} leave nothing of {} for KV.",
            size(memory.weight_bytes),
            size(memory.activation_bytes),
            size(memory.buffer_bytes()),
            size(memory.budget_bytes)
        ));
    }
    if memory.serves(&plan.workload) {
        return None;
    }
    let needed = (plan.workload.concurrency * plan.workload.context) as u64;
    Some(format!(
        "tp {tp} loads but does not serve {}: after weights of {} the budget of {} leaves {} for KV, {} tokens, and the load \
         needs {needed} ({} at {} KiB a token).",
        load_in_words(plan),
        size(memory.weight_bytes),
        size(memory.budget_bytes),
        size(memory.pages * plan.workload.page_size as u64 * memory.kv_bytes_per_token),
        memory.pages * plan.workload.page_size as u64,
        size(needed * memory.kv_bytes_per_token),
        memory.kv_bytes_per_token >> 10
    ))
}

/// What the step from one legal size to the next brings, and why not more.
fn compare(plan: &Plan, from: &Choice, to: &Choice) -> Option<String> {
    let (before, after) = (from.memory?, to.memory?);
    let (slow, fast) = (from.cost?, to.cost?);
    let (a, b) = (from.tp_size, to.tp_size);
    let memory_share = 100.0 * after.committed_bytes() as f64 / before.committed_bytes() as f64;
    let time_share = 100.0 * fast.decode_one_ms / slow.decode_one_ms;
    let ideal = 100.0 * a as f64 / b as f64;
    let shared = match plan.device.kind {
        DeviceKind::Cpu => "; ranks on one machine share its memory and cores",
        DeviceKind::Gpu => "",
    };
    let verdict = if fast.decode_one_ms > slow.decode_one_ms * FASTER {
        format!("tp {b} will be no faster than tp {a} for one request")
    } else {
        format!("tp {b} against tp {a}")
    };
    Some(format!(
        "{verdict}: memory before KV falls to {memory_share:.0} % (ideal {ideal:.0} %) because {} of weights are on every rank \
         and {} of buffers do not shrink; a decode step takes {:.2} instead of {:.2} ms ({time_share:.0} %), of which {:.2} ms are \
         {} all-reduces and {:.2} ms launches and small kernels{shared}.",
        size(after.replicated_bytes),
        size(after.buffer_bytes()),
        fast.decode_one_ms,
        slow.decode_one_ms,
        fast.decode_one_collectives_ms,
        fast.all_reduces_per_step,
        fast.overhead_ms,
    ))
}
