//! How long the scheduler thinks. Prints microseconds per step; meaningful in release builds:
//! `cargo test --release -p lockstep-scheduler --test overhead -- --nocapture`.
#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_core::{RequestId, SamplingParams};
use lockstep_scheduler::{Request, Scheduler, SchedulerConfig, StepPlan};
use std::time::{Duration, Instant};

/// Nanoseconds: mean of planning, of completing, and the worst whole step, over `steps` decode steps.
fn decode(batch: usize, context: usize, steps: usize) -> [u128; 3] {
    let config = SchedulerConfig {
        num_pages: batch * (context + steps).div_ceil(16) + 2 * batch + 100,
        max_running: batch,
        token_budget: 1 << 20,
        context_max: 1 << 17,
        reserve_percent: 0,
        ..SchedulerConfig::default()
    };
    let mut scheduler = Scheduler::new(config);
    let sampling = SamplingParams { max_tokens: Some(steps as u32 + 50), ..SamplingParams::default() };
    for id in 0..batch as u64 {
        let prompt = (0..context as u32).map(|i| i + 1000 * id as u32).collect();
        scheduler.submit(Request::new(RequestId(id), prompt, sampling.clone()), 0).unwrap();
    }
    let (mut plan, mut events, tokens) = (StepPlan::new(), Vec::new(), vec![5; batch]);
    assert!(scheduler.plan_into(&mut plan));
    let (mut planning, mut completing, mut worst) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    for step in 0..steps as u64 {
        let start = Instant::now();
        assert!(scheduler.plan_into(&mut plan));
        let planned = start.elapsed();
        scheduler.complete(step, &tokens);
        scheduler.take_events(&mut events);
        let done = start.elapsed();
        assert_eq!((plan.rows.len(), events.len()), (batch, batch));
        events.clear();
        // The first steps grow the buffers.
        if step >= 20 {
            planning += planned;
            completing += done - planned;
            worst = worst.max(done);
        }
    }
    let count = steps as u128 - 20;
    [planning.as_nanos() / count, completing.as_nanos() / count, worst.as_nanos()]
}

#[test]
fn microseconds_per_decode_step() {
    let steps = if cfg!(debug_assertions) { 100 } else { 1000 };
    for (batch, context) in [(1, 512), (32, 512), (256, 512), (256, 4096), (1024, 512)] {
        let [plan, complete, worst] = decode(batch, context, steps).map(|ns| ns as f64 / 1000.0);
        println!(
            "batch {batch:4}, context {context:4}; µs: plan {plan:.1}, complete {complete:.1}, worst {worst:.1}"
        );
    }
}

#[test]
fn a_long_queue_that_does_not_fit_costs_little() {
    let config = SchedulerConfig { num_pages: 100, waiting_max: 100_000, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(config);
    let sampling = SamplingParams { max_tokens: Some(400), ..SamplingParams::default() };
    for id in 0..10_000 {
        let prompt = (0..800).map(|i| i + 1000 * id as u32).collect();
        scheduler.submit(Request::new(RequestId(id), prompt, sampling.clone()), 0).unwrap();
    }
    let mut plan = StepPlan::new();
    let start = Instant::now();
    for step in 0..200 {
        assert!(scheduler.plan_into(&mut plan));
        scheduler.complete(step, &vec![5; plan.sample_count()]);
    }
    println!("{:?} per step with {:?}", start.elapsed() / 200, scheduler.counters());
}
