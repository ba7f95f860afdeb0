//! What the flight recorder costs a step: `cargo bench -p lockstep-engine`. Figures in `docs/performance.md`.
#![allow(clippy::unwrap_used)] // a benchmark may unwrap

use divan::Bencher;
use lockstep_core::{RequestId, SamplingParams, TokenId};
use lockstep_engine::flight::{FlightRecorder, SEGMENT_BYTES};
use lockstep_scheduler::{Request, Scheduler, SchedulerConfig, StepPlan};

fn main() {
    divan::main();
}

/// The records of one decode step.
#[divan::bench(args = [1, 32, 256, 1024])]
fn record_step(bencher: Bencher<'_, '_>, batch: usize) {
    let scheduler = Scheduler::new(SchedulerConfig::default());
    let mut recorder = FlightRecorder::new(None, SEGMENT_BYTES);
    let tokens: Vec<TokenId> = vec![7; batch];
    bencher.bench_local(|| {
        recorder.step(1, &scheduler);
        recorder.plan(true, scheduler.digest());
        recorder.tokens(&tokens);
    });
}

/// The start of a segment: a snapshot of a scheduler whose tree holds a million tokens.
#[divan::bench]
fn snapshot_of_a_million_tokens(bencher: Bencher<'_, '_>) {
    let config = SchedulerConfig {
        num_pages: 70_000,
        context_max: 1 << 17,
        token_budget: 1 << 20,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config);
    let sampling = SamplingParams { max_tokens: Some(1), ..SamplingParams::default() };
    for id in 0..10 {
        let prompt = (0..100_000).map(|i| i + 150_000 * id as TokenId).collect();
        scheduler.submit(Request::new(RequestId(id), prompt, sampling.clone()), 0).unwrap();
    }
    let mut plan = StepPlan::new();
    while scheduler.has_work() {
        assert!(scheduler.plan_into(&mut plan));
        scheduler.complete(plan.step, &vec![1; plan.sample_count()]);
    }
    assert!(scheduler.counters().pages_cached > 60_000);
    // Segments of no bytes: every step starts one.
    let mut recorder = FlightRecorder::new(None, 0);
    bencher.bench_local(|| recorder.step(1, &scheduler));
}
