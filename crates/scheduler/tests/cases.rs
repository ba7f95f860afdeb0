//! The rules of `docs/scheduling.md`, one by one: what users of other engines ran into, and our bounds.
#![allow(clippy::unwrap_used)] // tests may unwrap

mod common;

use common::{EOS, Harness, endless, prompt};
use lockstep_core::{FinishReason, Grammar, NO_TOKEN, RequestId, SamplingParams, TokenId};
use lockstep_scheduler::{
    CachePolicy, Event, OVERTAKEN_MAX, QueueOrder, Request, RowInput, Scheduler, SchedulerConfig, StepOrder,
};

fn config(page_size: usize, num_pages: usize) -> SchedulerConfig {
    SchedulerConfig { page_size, num_pages, ..SchedulerConfig::default() }
}

/// A workload on every combination of overlap, mixed and cache.
fn each_mode(base: SchedulerConfig, test: impl Fn(Harness)) {
    for bits in 0..8 {
        let config = SchedulerConfig {
            overlap: bits & 1 == 0,
            mixed: bits & 2 == 0,
            cache: if bits & 4 == 0 { CachePolicy::Radix } else { CachePolicy::None },
            ..base.clone()
        };
        println!("{config:?}");
        test(Harness::new(config, bits == 0));
    }
}

#[test]
fn what_the_pool_can_never_hold_is_refused_with_numbers_and_delays_nobody() {
    let config = SchedulerConfig { context_max: 512, ..config(16, 8) };
    let mut scheduler = Scheduler::new(config.clone());
    assert_eq!(scheduler.context_max(), 128);
    let refusal = scheduler.submit(Request::new(RequestId(1), prompt(1, 200), endless(1)), 0).unwrap_err();
    assert_eq!((refusal.status, refusal.code.as_deref()), (400, Some("context_length_exceeded")));
    for number in ["200", "128 tokens", "8 pages of 16", "at most 127"] {
        assert!(refusal.message.contains(number), "{number} in: {}", refusal.message);
    }
    let refusal = scheduler.submit(Request::new(RequestId(2), prompt(1, 600), endless(1)), 0).unwrap_err();
    assert!(refusal.message.contains("512"), "{}", refusal.message);
    assert!(!scheduler.has_work(), "a refused request leaves no trace");

    each_mode(config, |mut harness| {
        let long = harness.submit(prompt(1, 100), endless(100)).unwrap();
        let small = harness.submit(prompt(2, 1), endless(4)).unwrap();
        harness.drain(100);
        assert_eq!(harness.outputs[&long].tokens.len(), 28, "up to the pool's 128 tokens");
        assert_eq!(harness.outputs[&long].finish, Some(FinishReason::Length));
        assert_eq!(harness.outputs[&small].tokens.len(), 4);
    });
}

#[test]
fn duplicates_empty_prompts_and_a_full_queue_are_refused() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_running: 1, waiting_max: 1, ..config(16, 8) });
    let request = |id: u64, prompt: &[TokenId]| Request::new(RequestId(id), prompt.to_vec(), endless(1));
    assert_eq!(scheduler.submit(request(1, &[]), 0).unwrap_err().status, 400);
    scheduler.submit(request(1, &[5]), 0).unwrap();
    assert!(scheduler.submit(request(1, &[6]), 0).unwrap_err().message.contains("r1"));
    scheduler.submit(request(2, &[5]), 0).unwrap();
    let refusal = scheduler.submit(request(3, &[5]), 0).unwrap_err();
    assert_eq!(refusal.status, 503);
    assert_eq!(refusal.code.as_deref(), Some("queue_full"));
    assert!(refusal.message.contains("2 requests are open, 1 may run and 1 wait"), "{}", refusal.message);
    scheduler.abort(RequestId(1));
    scheduler.submit(request(3, &[5]), 0).unwrap();
    scheduler.submit(request(3, &[5]), 0).unwrap_err();
}

#[test]
fn a_request_without_a_token_to_choose_ends_alone() {
    for overlap in [false, true] {
        let mut scheduler = Scheduler::new(SchedulerConfig { overlap, ..config(16, 8) });
        for id in [1, 2] {
            scheduler.submit(Request::new(RequestId(id), prompt(id as u32, 5), endless(3)), 0).unwrap();
        }
        let steps: Vec<_> = std::iter::from_fn(|| scheduler.plan()).map(|plan| plan.step).collect();
        assert_eq!(steps.len(), 1 + usize::from(overlap));
        scheduler.complete(0, &[NO_TOKEN, 7]);
        let mut events = Vec::new();
        scheduler.take_events(&mut events);
        let ended = |event: &Event| match event {
            Event::Finished { id, finish, usage } => Some((id.0, *finish, usage.completion_tokens)),
            Event::Token { .. } => None,
        };
        let expected = [(1, FinishReason::NoToken, 0)];
        assert_eq!(events.iter().filter_map(ended).collect::<Vec<_>>(), expected, "overlap {overlap}");
        scheduler.check().unwrap();
        if overlap {
            // What the step in flight makes of it is thrown away.
            scheduler.complete(1, &[9, 8]);
        }
        while let Some(plan) = scheduler.plan() {
            scheduler.complete(plan.step, &vec![8; plan.sample_count()]);
        }
        events.clear();
        scheduler.take_events(&mut events);
        assert!(
            events.iter().all(|event| matches!(event, Event::Token { id: RequestId(2), .. })),
            "{events:?}"
        );
        scheduler.check().unwrap();
        assert!(!scheduler.has_work());
    }
}

#[test]
fn constraints_that_leave_no_first_token_are_refused() {
    let mut scheduler = Scheduler::new(SchedulerConfig { eos_tokens: vec![EOS], ..config(16, 8) });
    let mut submit = |id: u64, sampling: SamplingParams| {
        scheduler.submit(Request::new(RequestId(id), prompt(1, 5), sampling), 0)
    };
    let allowed = |ids: &[TokenId]| SamplingParams { allowed_token_ids: Some(ids.to_vec()), ..endless(3) };
    for (id, sampling) in [
        SamplingParams { min_tokens: 1, ..allowed(&[EOS]) },
        SamplingParams { min_tokens: 1, stop_token_ids: vec![7], ..allowed(&[EOS, 7]) },
        SamplingParams { bad_words: vec![vec![7], vec![8]], ..allowed(&[7, 8]) },
        SamplingParams { bad_words: vec![vec![7]], min_tokens: 2, ..allowed(&[7, EOS]) },
    ]
    .into_iter()
    .enumerate()
    {
        let refusal = submit(id as u64, sampling).unwrap_err();
        let told = (refusal.status, refusal.code.as_deref(), refusal.param.as_deref());
        assert_eq!(told, (400, Some("no_token_left"), Some("allowed_token_ids")), "{}", refusal.message);
    }
    for (id, sampling) in [
        allowed(&[EOS]),
        SamplingParams { min_tokens: 1, ..allowed(&[EOS, 9]) },
        SamplingParams { bad_words: vec![vec![7, 7]], ..allowed(&[7]) },
        // A form says itself where the answer ends.
        SamplingParams { min_tokens: 1, grammar: Some(Grammar::JsonObject), ..allowed(&[EOS]) },
    ]
    .into_iter()
    .enumerate()
    {
        submit(10 + id as u64, sampling).unwrap();
    }
}

#[test]
fn running_out_of_pages_retracts_and_loses_nothing() {
    for page_size in [1, 2, 16] {
        for reserve_percent in [0, 100] {
            let tight = SchedulerConfig { reserve_percent, ..config(page_size, 256 / page_size) };
            let roomy = SchedulerConfig { reserve_percent, ..config(page_size, 2048 / page_size) };
            each_mode(tight, |mut harness| {
                let mut free = Harness::new(
                    SchedulerConfig { num_pages: roomy.num_pages, ..harness.scheduler.config().clone() },
                    false,
                );
                for tag in 0..12 {
                    harness.submit(prompt(tag, 1), endless(60)).unwrap();
                    free.submit(prompt(tag, 1), endless(60)).unwrap();
                }
                free.drain(1000);
                harness.drain(3 * free.steps * 2);
                assert!(harness.outputs.values().all(|o| o.tokens.len() == 60));
                let counters = harness.scheduler.counters();
                println!(
                    "{} steps with {} retractions, {} in a pool that fits",
                    harness.steps, counters.retractions, free.steps
                );
                assert!(harness.steps < 3 * free.steps + 60, "{} steps", harness.steps);
                assert!(reserve_percent > 0 || counters.retractions > 0);
            });
        }
    }
}

#[test]
fn equal_prompts_at_once_share_pages_and_churn_does_not_disturb_them() {
    for page_size in [1, 2, 3, 16] {
        each_mode(config(page_size, 200usize.div_ceil(page_size)), |mut harness| {
            for round in 0..6 {
                (0..4).for_each(|_| _ = harness.submit(prompt(round, 40), endless(20)).unwrap());
                (0..8).for_each(|i| {
                    _ = harness.submit(prompt(100 + 8 * round + i, 5 + i as usize), endless(10)).unwrap()
                });
                harness.drain(3000);
            }
        });
    }
}

#[test]
fn page_edges_give_the_same_answers_and_aligned_hits() {
    for page_size in [1, 2, 3, 16, 64] {
        each_mode(config(page_size, 600usize.div_ceil(page_size)), |mut harness| {
            for len in
                [page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size, 2 * page_size + 1]
            {
                let base = prompt(1, len.max(1));
                let change = |at: usize| {
                    let mut changed = base.clone();
                    let at = at.min(changed.len() - 1);
                    changed[at] += 500;
                    changed
                };
                let longer: Vec<TokenId> = base.iter().copied().chain([9]).collect();
                for variant in [base.clone(), base.clone(), change(len), change(page_size), longer] {
                    harness.submit(variant, endless(3)).unwrap();
                    harness.drain(1000);
                }
            }
        });
    }
}

#[test]
fn cached_tokens_are_whole_pages_less_than_the_prompt_and_counted_once() {
    for (page_size, hit) in [(1, 49), (16, 48), (50, 0)] {
        let mut harness = Harness::new(config(page_size, 20_000 / page_size), true);
        let first = harness.submit(prompt(1, 50), endless(5)).unwrap();
        harness.drain(100);
        let second = harness.submit(prompt(1, 50), endless(5)).unwrap();
        harness.drain(100);
        assert_eq!(harness.outputs[&first].usage.cached_tokens, 0);
        assert_eq!(harness.outputs[&second].usage.cached_tokens, hit);
        assert_eq!(harness.outputs[&second].usage.prompt_tokens, 50);
    }
    // Another namespace shares nothing.
    let mut harness = Harness::new(config(1, 1000), true);
    harness.submit(prompt(1, 50), endless(5)).unwrap();
    harness.drain(100);
    let request = Request {
        cache_salt: Some("tenant".into()),
        ..Request::new(RequestId(0), prompt(1, 50), endless(5))
    };
    let other = harness.submit_request(request, 0).unwrap();
    harness.drain(100);
    assert_eq!(harness.outputs[&other].usage.cached_tokens, 0);
}

#[test]
fn a_long_prompt_gives_the_same_answer_in_any_chunks_and_others_decode_between() {
    for page_size in [1, 16] {
        for token_budget in [1, 7, 16, 32, 99, 100, 101] {
            let config = SchedulerConfig { token_budget, ..config(page_size, 1200 / page_size) };
            each_mode(config, |mut harness| {
                let decoding = harness.submit(prompt(50, 2), endless(300)).unwrap();
                while harness.outputs[&decoding].tokens.len() < 2 {
                    harness.turn();
                }
                harness.submit(prompt(1, 90), endless(2)).unwrap();
                let aborted = harness.submit(prompt(2, 100), endless(2)).unwrap();
                let before = (harness.steps, harness.outputs[&decoding].tokens.len());
                (0..8).for_each(|_| _ = harness.turn());
                let decoded = harness.outputs[&decoding].tokens.len() - before.1;
                let steps = (harness.steps - before.0) as usize;
                let wait_max =
                    if harness.scheduler.config().mixed { 1 } else { SchedulerConfig::PREFILL_RUN_MAX + 1 };
                assert!((decoded + 1) * wait_max as usize >= steps - 1, "{decoded} tokens in {steps} steps");
                harness.abort(aborted);
                for tag in [1, 2, 3, 4, 5, 6] {
                    harness.submit(prompt(tag, 100), endless(4)).unwrap();
                }
                harness.drain(4000);
            });
        }
    }
}

#[test]
fn exactly_at_the_context_limit() {
    for (page_size, num_pages) in [(16, 100), (3, 100), (16, 4)] {
        for max_tokens in [Some(1), Some(2), None] {
            each_mode(SchedulerConfig { context_max: 64, ..config(page_size, num_pages) }, |mut harness| {
                let sampling = SamplingParams { max_tokens, ignore_eos: true, ..SamplingParams::default() };
                let one = harness.submit(prompt(1, 63), sampling.clone()).unwrap();
                let two = harness.submit(prompt(2, 62), sampling.clone()).unwrap();
                assert_eq!(harness.submit(prompt(3, 64), sampling.clone()), None);
                harness.drain(100);
                assert_eq!(harness.outputs[&one].tokens.len(), 1);
                assert_eq!(harness.outputs[&one].finish, Some(FinishReason::Length));
                assert_eq!(harness.outputs[&two].tokens.len(), max_tokens.unwrap_or(2) as usize);
            });
        }
    }
}

#[test]
fn small_requests_pass_a_big_one_but_not_for_ever() {
    // 70 % of the pool is taken for long; a request of 50 % comes, then ever more small ones.
    let config =
        SchedulerConfig { context_max: 900, reserve_percent: 0, token_budget: 4096, ..config(1, 1000) };
    let mut harness = Harness::new(config, true);
    let holder = harness.submit(prompt(0, 600), endless(100)).unwrap();
    harness.turn();
    let big = harness.submit(prompt(1, 500), endless(2)).unwrap();
    let first_small: Vec<RequestId> =
        (0..20).map(|tag| harness.submit(prompt(10 + tag, 2), endless(2)).unwrap()).collect();
    let asked = harness.steps;
    while harness.outputs[&first_small[19]].finish.is_none() {
        harness.turn();
    }
    assert!(harness.steps - asked < 6, "small ones are not delayed");
    assert!(harness.outputs[&big].tokens.is_empty());
    let mut passed = 20;
    while harness.outputs[&big].first_token_step.is_none() {
        harness.submit(prompt(100 + passed, 2), endless(1)).unwrap();
        harness.turn();
        passed += 1;
    }
    assert!(harness.outputs[&holder].finish.is_some(), "the big one cannot start before");
    assert!(harness.outputs[&big].first_token_step.unwrap() <= harness.outputs[&holder].finish_step + 2);
    let before_big = harness.outputs.iter().filter(|(id, o)| {
        **id > big
            && o.first_token_step.is_some_and(|step| step < harness.outputs[&big].first_token_step.unwrap())
    });
    assert!(before_big.count() <= OVERTAKEN_MAX as usize);
    harness.drain(1000);
}

#[test]
fn a_flood_of_high_priority_does_not_starve_a_low_one() {
    let mut harness = Harness::new(SchedulerConfig { max_running: 1, ..config(1, 100) }, true);
    let with_priority =
        |priority, tag| Request { priority, ..Request::new(RequestId(0), prompt(tag, 3), endless(1)) };
    harness.submit_request(with_priority(1, 0), 0).unwrap();
    let low = harness.submit_request(with_priority(-1, 1), 0).unwrap();
    let mut high = 0;
    while harness.outputs[&low].finish.is_none() {
        harness.submit_request(with_priority(1, 2 + high), 0).unwrap();
        high += 1;
        harness.turn();
        assert!(high < 4 * OVERTAKEN_MAX, "starved");
    }
    assert!(high > OVERTAKEN_MAX / 2, "but priority means something");
    harness.drain(1000);
}

#[test]
fn a_cold_burst_computes_its_common_prefix_once() {
    for overlap in [true, false] {
        let config = SchedulerConfig { overlap, context_max: 2000, ..config(16, 1000) };
        let mut harness = Harness::new(config, true);
        let mut common = prompt(1, 1000);
        for tag in 0..32 {
            common.truncate(1000);
            common.extend(prompt(2 + tag, 20));
            harness.submit(common.clone(), endless(32)).unwrap();
        }
        harness.drain(100);
        let counters = harness.scheduler.counters();
        let (computed, hit) = (counters.computed_tokens, counters.hit_tokens);
        println!("overlap {overlap}: {} steps, computed {computed}, hit {hit}", harness.steps);
        assert_eq!(hit, 31 * 992, "62 whole pages of the prefix");
        assert_eq!(computed, 1020 + 31 * 28 + 32 * 31, "prefix once, own suffixes, decodes");
        assert_eq!(counters.prefix_waits, 31);
    }
}

#[test]
fn waiting_for_a_prefix_ends_when_its_owner_is_aborted() {
    for cancel_before_completion in [true, false] {
        let mut harness = Harness::new(SchedulerConfig { token_budget: 64, ..config(1, 200) }, true);
        let owner = harness.submit(prompt(1, 60), endless(2)).unwrap();
        let waiter = harness.submit(prompt(1, 50), endless(2)).unwrap();
        harness.plan();
        let counters = harness.scheduler.counters();
        assert_eq!((counters.prefix_waits, counters.waiting), (1, 1));
        if cancel_before_completion {
            harness.abort(owner);
            assert!(harness.plan(), "nobody computes the prefix any more, so the waiter does");
        } else {
            harness.complete();
            harness.abort(owner);
            assert!(harness.plan());
        }
        let start = if cancel_before_completion { 0 } else { 49 };
        assert_eq!((harness.last_plan.rows[0].id, harness.last_plan.rows[0].start_position), (waiter, start));
        harness.drain(10);
    }
}

#[test]
fn a_short_common_beginning_is_computed_rather_than_waited_for() {
    let mut harness = Harness::new(config(1, 1000), true);
    for (tag, common) in [(2, 31), (3, 31), (4, 40)] {
        let mut tokens = prompt(1, common);
        tokens.extend(prompt(tag, 30));
        harness.submit(tokens, endless(2)).unwrap();
    }
    harness.plan();
    assert_eq!(harness.last_plan.rows.len(), 3, "31 tokens are less than a step costs");
    let mut tokens = prompt(1, 40);
    tokens.extend(prompt(9, 5));
    harness.submit(tokens, endless(2)).unwrap();
    harness.plan();
    assert_eq!(harness.scheduler.counters().waiting, 1, "40 tokens are more");
    harness.drain(100);
}

#[test]
fn overlap_plans_with_the_sampled_token_of_the_step_in_flight_and_throws_away_what_ended() {
    let mut harness = Harness::new(config(4, 10), true);
    let request = SamplingParams { stop_token_ids: (0..50).collect(), ..SamplingParams::default() };
    let ends_at_once = harness.submit(prompt(1, 6), request).unwrap();
    assert!(harness.plan());
    assert_eq!((harness.last_plan.rows[0].input, harness.last_plan.rows[0].samples), (RowInput::Known, true));
    assert!(harness.plan(), "the next step is planned before the first completes");
    assert_eq!(harness.last_plan.rows[0].input, RowInput::SampledBy { step: 0, sample_index: 0 });
    assert!(!harness.plan(), "but not a third one");
    harness.complete();
    assert_eq!(harness.outputs[&ends_at_once].finish, Some(FinishReason::Stop));
    let counters = harness.scheduler.counters();
    assert_eq!(
        (counters.running, counters.draining, counters.pages_held),
        (0, 1, 2),
        "pages stay while in use"
    );
    harness.abort(ends_at_once);
    harness.complete();
    assert_eq!(harness.outputs[&ends_at_once].tokens.len(), 1);
    harness.check_idle();
    assert!(!harness.scheduler.has_work());
}

/// Row ids of the plan just made.
fn planned(harness: &Harness) -> Vec<u64> {
    harness.last_plan.rows.iter().map(|row| row.id.0).collect()
}

#[test]
fn stages_share_the_decode_rows_and_no_row_waits_for_a_step_in_flight() {
    let config = SchedulerConfig { stages: 3, ..config(4, 100) };
    let mut harness = Harness::new(config, true);
    for tag in 0..7 {
        harness.submit(prompt(tag, 5), endless(6)).unwrap();
    }
    assert!(harness.plan() && !harness.plan(), "all prompts fit one step, and their tokens are awaited");
    harness.complete();
    for rows in [vec![0, 1, 2], vec![3, 4, 5], vec![6]] {
        assert!(harness.plan());
        assert_eq!(planned(&harness), rows);
        assert!(harness.last_plan.rows.iter().all(|row| row.input == RowInput::Known));
    }
    assert_eq!((harness.in_flight(), harness.plan()), (3, false), "as many steps as stages");
    harness.complete();
    assert!(harness.plan());
    assert_eq!(planned(&harness), [0, 1, 2], "whose tokens are known");
    harness.drain(100);
}

/// Prefill steps between two decode steps make the first ones' tokens known while the others wait for their turn.
#[test]
fn every_decode_gets_its_turn_though_prefill_steps_come_between() {
    let config = SchedulerConfig { stages: 2, mixed: false, token_budget: 2, ..config(4, 400) };
    let mut harness = Harness::new(config, true);
    let decoding: Vec<_> = (0..6).map(|tag| harness.submit(prompt(tag, 2), endless(80)).unwrap()).collect();
    while decoding.iter().any(|id| harness.outputs[id].tokens.is_empty()) {
        harness.turn();
    }
    harness.submit(prompt(9, 900), endless(1)).unwrap();
    let mut waited: Vec<u32> = vec![0; decoding.len()];
    for _ in 0..200 {
        harness.turn();
        let rows = planned(&harness);
        for (id, waited) in decoding.iter().zip(&mut waited).filter(|_| !rows.is_empty()) {
            *waited = if rows.contains(&id.0) { 0 } else { *waited + 1 };
        }
        // Two turns of two stages, each after the longest run of prefill steps.
        let bound = 4 * (SchedulerConfig::PREFILL_RUN_MAX + 1);
        assert!(waited.iter().all(|steps| *steps < bound), "{waited:?}");
    }
    harness.drain(2000);
}

#[test]
fn chunks_of_one_prompt_follow_each_other_through_the_stages() {
    let mut harness = Harness::new(SchedulerConfig { stages: 4, token_budget: 8, ..config(4, 100) }, true);
    harness.submit(prompt(1, 30), endless(2)).unwrap();
    let chunks: Vec<_> = std::iter::from_fn(|| harness.plan().then(|| harness.last_plan.rows[0].clone()))
        .map(|row| (row.start_position, row.token_count, row.samples))
        .collect();
    assert_eq!(chunks, [(0, 8, false), (8, 8, false), (16, 8, false), (24, 6, true)]);
    harness.drain(100);
}

#[test]
fn a_pipeline_runs_empty_before_a_retraction() {
    let mut harness = Harness::new(SchedulerConfig { stages: 2, reserve_percent: 0, ..config(4, 5) }, true);
    for tag in 0..2 {
        harness.submit(prompt(tag, 7), endless(12)).unwrap();
    }
    let mut drained = false;
    while harness.scheduler.counters().retractions == 0 {
        let planned = harness.plan();
        drained |= !planned && harness.in_flight() == 1;
        let in_flight = harness.in_flight();
        if harness.scheduler.counters().retractions > 0 {
            assert_eq!(in_flight, 1, "the step that retracted is the only one");
        }
        if !planned || in_flight == 2 {
            harness.complete();
        }
    }
    assert!(drained);
    harness.drain(200);
}

#[test]
fn abort_in_any_state_reports_once_and_releases_after_the_launched_step() {
    each_mode(SchedulerConfig { token_budget: 4, max_running: 1, ..config(2, 20) }, |mut harness| {
        let prefilling = harness.submit(prompt(1, 10), endless(5)).unwrap();
        let waiting = harness.submit(prompt(2, 10), endless(5)).unwrap();
        harness.plan();
        for _ in 0..2 {
            harness.abort(waiting);
            harness.abort(prefilling);
            harness.abort(RequestId(77));
        }
        let counters = harness.scheduler.counters();
        assert_eq!((counters.draining, counters.waiting, counters.pages_held), (1, 0, 5));
        harness.complete();
        harness.check_idle();
        assert!(harness.outputs.values().all(|o| o.finish == Some(FinishReason::Abort)));
        assert!(!harness.scheduler.has_work() && !harness.plan());
        let caches = harness.scheduler.config().cache == CachePolicy::Radix;
        assert!(!caches || harness.scheduler.counters().pages_cached == 2, "the computed chunk is kept");
    });
}

#[test]
fn a_deadline_is_an_abort_stamped_by_rank_0() {
    let mut harness = Harness::new(config(2, 20), true);
    let request = |deadline| Request {
        deadline_ms: Some(deadline),
        ..Request::new(RequestId(0), prompt(1, 3), endless(8))
    };
    let late = harness.submit_request(request(100), 50).unwrap();
    let later = harness.submit_request(request(1000), 60).unwrap();
    harness.turn();
    harness.both(|s| s.advance(99));
    assert_eq!(harness.outputs[&late].finish, None);
    harness.both(|s| s.advance(100));
    assert_eq!(harness.outputs[&late].finish, Some(FinishReason::Abort));
    harness.drain(100);
    assert_eq!(harness.outputs[&later].finish, Some(FinishReason::Length));
}

#[test]
fn end_tokens_of_model_and_request_and_min_tokens() {
    // Over many seeds: EOS ends unless ignored, stop tokens always end, none before min_tokens.
    each_mode(config(4, 200), |mut harness| {
        for seed in 0..20 {
            for (ignore_eos, stops, min_tokens) in
                [(false, vec![], 0), (true, vec![3, 4], 0), (false, vec![3], 12)]
            {
                let sampling = SamplingParams {
                    seed,
                    ignore_eos,
                    min_tokens,
                    stop_token_ids: stops,
                    max_tokens: Some(150),
                    ..SamplingParams::default()
                };
                harness.submit(prompt(1, 3), sampling).unwrap();
            }
        }
        harness.drain(20_000);
        let ends: Vec<TokenId> = harness
            .outputs
            .values()
            .filter(|o| o.finish == Some(FinishReason::Stop))
            .map(|o| *o.tokens.last().unwrap())
            .collect();
        assert!(ends.contains(&EOS) && ends.contains(&3));
    });
}

#[test]
fn no_end_token_counts_before_min_tokens_even_if_it_is_sampled() {
    let mut scheduler = Scheduler::new(SchedulerConfig { eos_tokens: vec![EOS], ..config(4, 20) });
    let sampling = SamplingParams { min_tokens: 2, stop_token_ids: vec![3], ..SamplingParams::default() };
    scheduler.submit(Request::new(RequestId(1), vec![1], sampling), 0).unwrap();
    for (token, finish) in [(EOS, None), (3, None), (EOS, Some(FinishReason::Stop))] {
        let plan = scheduler.plan().unwrap();
        scheduler.complete(plan.step, &[token]);
        let mut events = Vec::new();
        scheduler.take_events(&mut events);
        let [Event::Token { finish: got, is_eos, .. }] = events[..] else {
            panic!("one token, got {events:?}")
        };
        assert_eq!((got, is_eos), (finish, finish.is_some()));
    }
}

#[test]
fn unmixed_steps_bound_the_wait_of_both_sides() {
    for step_order in [StepOrder::PrefillFirst, StepOrder::DecodeFirst] {
        let config = SchedulerConfig { mixed: false, step_order, token_budget: 4, ..config(1, 2000) };
        let mut harness = Harness::new(config, true);
        (0..3).for_each(|tag| _ = harness.submit(prompt(tag, 3), endless(200)).unwrap());
        (0..40).for_each(|_| _ = harness.turn());
        harness.submit(prompt(9, 200), endless(1)).unwrap();
        let (mut run, mut longest) = ((0, 0), (0, 0));
        for _ in 0..60 {
            harness.turn();
            let is_prefill = harness.last_plan.rows[0].id == RequestId(3);
            assert!(harness.last_plan.rows.iter().all(|row| (row.id == RequestId(3)) == is_prefill));
            run = if is_prefill { (run.0 + 1, 0) } else { (0, run.1 + 1) };
            longest = (longest.0.max(run.0), longest.1.max(run.1));
        }
        match step_order {
            StepOrder::PrefillFirst => assert_eq!(longest, (SchedulerConfig::PREFILL_RUN_MAX, 1)),
            StepOrder::DecodeFirst => assert_eq!(longest, (1, SchedulerConfig::DECODE_RUN_MAX)),
        }
        harness.drain(1000);
    }
}

#[test]
fn the_longest_cached_prefix_goes_first_when_asked() {
    let config =
        SchedulerConfig { queue_order: QueueOrder::LongestPrefix, max_running: 1, ..config(1, 1000) };
    let mut harness = Harness::new(config, true);
    harness.submit(prompt(1, 30), endless(1)).unwrap();
    harness.drain(10);
    let cold = harness.submit(prompt(2, 30), endless(1)).unwrap();
    let warm = harness.submit(prompt(1, 30), endless(1)).unwrap();
    harness.drain(10);
    assert!(harness.outputs[&warm].finish_step < harness.outputs[&cold].finish_step);
}

#[test]
fn flush_forgets_what_nobody_holds() {
    let mut harness = Harness::new(config(1, 100), true);
    harness.submit(prompt(1, 30), endless(2)).unwrap();
    harness.drain(10);
    assert_eq!(harness.scheduler.counters().pages_cached, 31);
    let held = harness.submit(prompt(1, 10), endless(20)).unwrap();
    harness.turn();
    harness.both(Scheduler::flush_cache);
    let counters = harness.scheduler.counters();
    assert_eq!((counters.pages_cached, harness.outputs[&held].finish), (0, None));
    harness.drain(50);
}

#[test]
fn digests_differ_when_anything_does() {
    let digest = |prompt: Vec<TokenId>, token: TokenId| {
        let mut scheduler = Scheduler::new(config(2, 10));
        scheduler.submit(Request::new(RequestId(1), prompt, endless(5)), 0).unwrap();
        let plan = scheduler.plan().unwrap();
        scheduler.complete(plan.step, &[token]);
        scheduler.digest()
    };
    let base = digest(vec![1, 2, 3], 9);
    assert_eq!(base.first_difference(&digest(vec![1, 2, 3], 9)), None);
    assert_eq!(base.first_difference(&digest(vec![1, 2, 4], 9)), Some("plan_hash"));
    assert_eq!(base.first_difference(&digest(vec![1, 2, 3], 8)), Some("token_hash"));
}
