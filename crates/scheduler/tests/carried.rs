//! What plans carry for sampling beyond positions: histories, and prompt tokens whose logits are wanted.
#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_core::{RequestId, SamplingParams, TokenId};
use lockstep_scheduler::{Request, Scheduler, SchedulerConfig, StepPlan};
use std::collections::BTreeMap;

fn config() -> SchedulerConfig {
    SchedulerConfig { page_size: 4, num_pages: 64, overlap: false, token_budget: 64, ..Default::default() }
}

/// Plans and completes one step; every token is `10 + output index`.
fn step(scheduler: &mut Scheduler) -> StepPlan {
    let plan = scheduler.plan().expect("there is work");
    let rows = plan.rows.iter().filter(|row| row.samples);
    let tokens: Vec<TokenId> = rows.map(|row| 10 + row.output_index).collect();
    scheduler.complete(plan.step, &tokens);
    scheduler.check().unwrap();
    plan
}

fn submit(scheduler: &mut Scheduler, id: u64, prompt: Vec<TokenId>, sampling: SamplingParams) {
    scheduler.submit(Request::new(RequestId(id), prompt, sampling), 0).unwrap();
}

#[test]
fn a_history_comes_once_per_admission_with_every_token_so_far() {
    // 24 pages of 4 tokens: two requests of 40 + 20 tokens do not fit to their ends.
    let mut scheduler = Scheduler::new(SchedulerConfig { num_pages: 24, reserve_percent: 0, ..config() });
    let sampling = SamplingParams { presence_penalty: 1.0, max_tokens: Some(20), ..Default::default() };
    let prompt = |id: u32| (0..40).map(|i| 100 * id + i).collect::<Vec<_>>();
    submit(&mut scheduler, 1, prompt(1), sampling.clone());
    submit(&mut scheduler, 2, prompt(2), sampling);
    submit(&mut scheduler, 3, vec![7], SamplingParams { max_tokens: Some(3), ..Default::default() });
    let mut known: BTreeMap<RequestId, Vec<TokenId>> =
        (1..3).map(|id| (RequestId(id.into()), prompt(id))).collect();
    let mut told: BTreeMap<RequestId, usize> = BTreeMap::new();
    while scheduler.has_work() {
        let plan = step(&mut scheduler);
        for row in &plan.rows {
            if row.id == RequestId(3) {
                assert!(row.history.is_none(), "nobody needs it");
                continue;
            }
            let tokens = known.get_mut(&row.id).unwrap();
            if let Some(history) = &row.history {
                assert_eq!((&history.tokens[..], history.prompt_len), (&tokens[..], 40), "{row:?}");
                *told.entry(row.id).or_default() += 1;
            }
            assert!(told.contains_key(&row.id), "before any row without it");
            if row.samples {
                tokens.push(10 + row.output_index);
            }
        }
    }
    let retractions = scheduler.counters().retractions as usize;
    assert!(retractions > 0, "the pool is too large for this test");
    assert_eq!(told.values().sum::<usize>(), 2 + retractions);
}

#[test]
fn prompt_logits_come_in_small_rows_and_read_no_cache() {
    let mut scheduler = Scheduler::new(config());
    let wanted = SamplingParams { prompt_logprobs: Some(1), max_tokens: Some(2), ..Default::default() };
    let prompt: Vec<TokenId> = (0..50).collect();
    for round in 0..2 {
        let (first, second) = (2 * round, 2 * round + 1);
        submit(&mut scheduler, first, prompt.clone(), wanted.clone());
        submit(&mut scheduler, second, prompt.clone(), wanted.clone());
        let mut seen: BTreeMap<RequestId, Vec<u32>> = BTreeMap::new();
        while scheduler.has_work() {
            let plan = step(&mut scheduler);
            let rows = plan.rows.iter().filter(|row| row.prompt_logits);
            assert!(
                rows.clone().map(|row| row.token_count).sum::<u32>()
                    <= SchedulerConfig::PROMPT_LOGITS_MAX as u32
            );
            rows.for_each(|row| {
                seen.entry(row.id)
                    .or_default()
                    .extend(row.start_position..row.start_position + row.token_count);
            });
        }
        for id in [first, second] {
            assert_eq!(seen[&RequestId(id)], (0..50).collect::<Vec<_>>(), "round {round}");
        }
    }
    assert_eq!(scheduler.counters().hit_tokens, 0);
    // What they computed serves others.
    submit(&mut scheduler, 9, prompt, SamplingParams { max_tokens: Some(1), ..Default::default() });
    step(&mut scheduler);
    assert_eq!(scheduler.counters().hit_tokens, 48);
}
