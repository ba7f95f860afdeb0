//! Random workloads on tiny pools, in every combination of page size, overlap, mixed, cache, order and
//! one or several pipeline stages.
#![allow(clippy::unwrap_used)] // tests may unwrap

mod common;

use common::{Harness, Random};
use lockstep_core::{RequestId, SamplingParams};
use lockstep_scheduler::{CachePolicy, QueueOrder, Request, SchedulerConfig, StepOrder};

const OPS_PER_RUN: usize = 10_000;
/// Bits that [`config`] looks at.
const COMBINATIONS: usize = 64;

fn config(random: &mut Random, combination: usize) -> SchedulerConfig {
    let bit = |n: usize| combination >> n & 1 == 1;
    let page_size = [1, 2, 3, 16][combination >> 3 & 3];
    let pool_tokens = 20 + random.below(100);
    SchedulerConfig {
        page_size,
        num_pages: pool_tokens.div_ceil(page_size).max(2),
        max_running: 1 + random.below(12),
        token_budget: [1, 3, 7, 16, 64][random.below(5)],
        context_max: 10 + random.below(90),
        cache: if bit(0) { CachePolicy::None } else { CachePolicy::Radix },
        mixed: !bit(1),
        overlap: !bit(2),
        stages: if bit(5) { 2 + random.below(3) } else { 1 },
        waiting_max: 30,
        queue_order: if random.one_in(2) { QueueOrder::Fcfs } else { QueueOrder::LongestPrefix },
        step_order: if random.one_in(2) { StepOrder::PrefillFirst } else { StepOrder::DecodeFirst },
        reserve_percent: [0, 0, 50, 100][random.below(4)],
        ..SchedulerConfig::default()
    }
}

/// Prompts share beginnings: a few base texts, cut anywhere, with a tail of their own.
fn request(random: &mut Random, context_max: usize, now_ms: u64) -> Request {
    let len_max = if random.one_in(2) { context_max } else { 8 };
    let len = 1 + random.below(len_max);
    let (base, own) = (random.below(3) as u32, random.below(len / 2 + 1));
    let mut prompt: Vec<u32> = (0..(len - own) as u32).map(|i| 100 * base + i % 7).collect();
    prompt.extend((0..own).map(|_| random.below(3) as u32));
    let sampling = SamplingParams {
        max_tokens: (!random.one_in(4)).then(|| 1 + random.below(60) as u32),
        min_tokens: if random.one_in(4) { random.below(10) as u32 } else { 0 },
        ignore_eos: random.one_in(2),
        stop_token_ids: if random.one_in(5) { vec![11, 12] } else { Vec::new() },
        seed: random.below(1 << 30) as u64,
        ..SamplingParams::default()
    };
    Request {
        cache_salt: random.one_in(4).then(|| "tenant".to_owned()),
        priority: if random.one_in(4) { random.below(5) as i32 - 2 } else { 0 },
        deadline_ms: random.one_in(20).then(|| now_ms + random.below(200) as u64),
        ..Request::new(RequestId(0), prompt, sampling)
    }
}

fn run(seed: u64, combination: usize) -> (u64, u64, u64) {
    let mut random = Random(seed);
    let config = config(&mut random, combination);
    println!("seed {seed}, combination {combination}: {config:?}");
    let mut harness = Harness::new(config, combination.is_multiple_of(3));
    let context_max = harness.scheduler.context_max();
    let (mut now_ms, mut recent) = (0, Vec::new());
    let load = 2 + random.below(20);
    for _ in 0..OPS_PER_RUN {
        match random.below(40) {
            0..5 if harness.scheduler.counters().waiting < load => {
                let request = request(&mut random, context_max, now_ms);
                recent.extend(harness.submit_request(request, now_ms));
            }
            5 if !recent.is_empty() => harness.abort(recent[random.below(recent.len())]),
            6 if random.one_in(10) => harness.both(|s| s.flush_cache()),
            7 => {
                now_ms += random.below(20) as u64;
                harness.both(|s| s.advance(now_ms));
            }
            8..25 => _ = harness.plan(),
            _ => {
                if !harness.complete() {
                    harness.plan();
                }
            }
        }
        // Aborts aim at requests of every age, ended ones included.
        if recent.len() > 40 {
            recent.remove(0);
        }
    }
    harness.abort(RequestId(u64::MAX));
    let work: usize = harness.expected.values().map(|e| e.tokens.len()).sum();
    harness.drain(4 * work as u64 + 100);
    harness.both(|s| s.flush_cache());
    let counters = harness.scheduler.counters();
    assert_eq!(counters.pages_free, counters.pages_total, "every page comes back");
    (counters.steps, counters.retractions, counters.hit_tokens)
}

#[test]
fn every_answer_equals_the_answer_alone() {
    let (mut steps, mut retractions, mut hits) = (0, 0, 0);
    for combination in 0..COMBINATIONS {
        let (s, r, h) = run(0xD00D + 1_000_000 * combination as u64, combination);
        (steps, retractions, hits) = (steps + s, retractions + r, hits + h);
    }
    let operations = COMBINATIONS * OPS_PER_RUN;
    println!("{operations} operations, {steps} steps, {retractions} retractions, {hits} hit tokens");
    assert!(retractions > 1000 && hits > 10_000, "the workload reaches what it is meant to try");
}

/// `cargo test --release -p lockstep-scheduler --test random -- --ignored --nocapture`, any number of seeds.
#[test]
#[ignore = "long; for hunting, with SEEDS in the environment"]
fn many_seeds() {
    let seeds = std::env::var("SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(1000);
    for seed in 0..seeds {
        run(seed << 32, seed as usize % COMBINATIONS);
    }
}
