//! What the scheduler's decisions cost: `cargo bench -p lockstep-scheduler`. Figures in `docs/performance.md`.
#![allow(clippy::unwrap_used)] // a benchmark may unwrap

use divan::Bencher;
use lockstep_core::{RequestId, SamplingParams, TokenId};
use lockstep_scheduler::{Request, Scheduler, SchedulerConfig, StepPlan};

/// Decode steps that a prepared scheduler can take.
const STEPS_MAX: usize = 40_000;

fn main() {
    divan::main();
}

/// A scheduler with `batch` requests of `context` tokens decoding, and a plan's buffers.
fn decoding(batch: usize, context: usize) -> (Scheduler, StepPlan) {
    let config = SchedulerConfig {
        num_pages: batch * (context + STEPS_MAX).div_ceil(16) + 2 * batch + 100,
        max_running: batch,
        token_budget: 1 << 20,
        context_max: 1 << 17,
        reserve_percent: 0,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config);
    let sampling = SamplingParams { max_tokens: Some(STEPS_MAX as u32), ..SamplingParams::default() };
    for id in 0..batch as u64 {
        let prompt = (0..context as TokenId).map(|i| i + 1000 * id as TokenId).collect();
        scheduler.submit(Request::new(RequestId(id), prompt, sampling.clone()), 0).unwrap();
    }
    let mut plan = StepPlan::new();
    assert!(scheduler.plan_into(&mut plan));
    (scheduler, plan)
}

/// One decode step as the rank loop takes it: plan the next, complete the last, take the events.
#[divan::bench(args = [(1, 512), (32, 512), (256, 512), (256, 4096), (1024, 512)], sample_size = 10)]
fn decode_step(bencher: Bencher<'_, '_>, (batch, context): (usize, usize)) {
    let (mut scheduler, mut plan) = decoding(batch, context);
    let (mut events, tokens) = (Vec::new(), vec![5; batch]);
    bencher.bench_local(|| {
        let previous = plan.step;
        assert!(scheduler.plan_into(&mut plan));
        scheduler.complete(previous, &tokens);
        scheduler.take_events(&mut events);
        assert_eq!((plan.rows.len(), events.len()), (batch, batch));
        events.clear();
    });
}

/// The same with 10,000 requests waiting that do not fit into the pool.
#[divan::bench(sample_size = 10)]
fn step_over_a_long_queue(bencher: Bencher<'_, '_>) {
    let config = SchedulerConfig { num_pages: 100, waiting_max: 100_000, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(config);
    let sampling = SamplingParams { max_tokens: Some(400), ..SamplingParams::default() };
    for id in 0..10_000 {
        let prompt = (0..800).map(|i| i + 1000 * id as TokenId).collect();
        scheduler.submit(Request::new(RequestId(id), prompt, sampling.clone()), 0).unwrap();
    }
    let (mut plan, mut events) = (StepPlan::new(), Vec::new());
    bencher.bench_local(|| {
        assert!(scheduler.plan_into(&mut plan));
        scheduler.complete(plan.step, &vec![5; plan.sample_count()]);
        scheduler.take_events(&mut events);
        events.clear();
    });
}
