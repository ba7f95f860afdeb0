//! Where the time of a request went, for requests that ask for it.
//!
//! **Invariants:** only rank 0 keeps this, and nothing reads it but the answer: no decision depends on a clock.
//! While no open request asks, a step costs one look at an empty map; no clock is read and nothing is allocated.
//!
//! Called by the rank loop: [`Timings::begin`] when a request is accepted, [`Timings::launched`] with every plan,
//! [`Timings::report`] with every result.

use lockstep_core::RequestId;
use lockstep_scheduler::{Event, StepPlan};
use lockstep_wire::Timing;
use std::collections::BTreeMap;
use std::time::Duration;

/// The open requests that ask. Times are those of [`Primary::now`](crate::control::Primary::now).
#[derive(Debug, Default)]
pub(crate) struct Timings {
    open: BTreeMap<RequestId, Span>,
}

/// What is known of one request.
#[derive(Debug)]
struct Span {
    taken: Duration,
    /// Launch of its first step.
    started: Option<Duration>,
    first_token: Option<Duration>,
    sums: Timing,
}

impl Timings {
    /// Whether no open request asks.
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// A request that asks was taken.
    pub(crate) fn begin(&mut self, id: RequestId, now: Duration) {
        let span = Span { taken: now, started: None, first_token: None, sums: Timing::default() };
        self.open.insert(id, span);
    }

    /// A step is about to be launched.
    pub(crate) fn launched(&mut self, plan: &StepPlan, now: Duration) {
        let batch = plan.rows.len() as u32;
        for row in &plan.rows {
            let Some(span) = self.open.get_mut(&row.id) else { continue };
            span.started.get_or_insert(now);
            let sums = &mut span.sums;
            sums.batch_min = if sums.steps == 0 { batch } else { sums.batch_min.min(batch) };
            sums.batch_max = sums.batch_max.max(batch);
            sums.batch_sum += u64::from(batch);
            sums.steps += 1;
            sums.prefill_chunks += u32::from(row.is_prefill);
        }
    }

    /// What to tell of the request of `event`, if it asks; its last event is the end of it.
    pub(crate) fn report(&mut self, event: &Event, now: Duration) -> Option<Box<Timing>> {
        let (id, usage, finish, has_token) = match event {
            Event::Token { id, usage, finish, .. } => (id, usage, *finish, true),
            Event::Finished { id, usage, finish } => (id, usage, Some(*finish), false),
        };
        let span = self.open.get_mut(id)?;
        if has_token {
            span.first_token.get_or_insert(now);
        }
        span.sums.retractions = usage.retractions;
        let timing = span.until(now);
        if finish.is_some() {
            self.open.remove(id);
        }
        Some(Box::new(timing))
    }
}

impl Span {
    fn until(&self, now: Duration) -> Timing {
        let started = self.started.unwrap_or(now);
        let first_token = self.first_token.unwrap_or(now);
        let between = |from: Duration, to: Duration| to.saturating_sub(from).as_micros() as u64;
        Timing {
            queue_us: between(self.taken, started),
            prefill_us: between(started, first_token),
            decode_us: between(first_token, now),
            ..self.sums
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::{FinishReason, SamplingParams};
    use lockstep_scheduler::{Request, Scheduler, SchedulerConfig};

    fn request(id: u64, prompt_len: usize, max_tokens: u32) -> Request {
        let sampling = SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::default() };
        let prompt = (0..prompt_len as u32).map(|i| i + 10 * id as u32).collect();
        Request { id: RequestId(id), prompt, sampling, cache_salt: None, priority: 0, deadline_ms: None }
    }

    /// Runs to the end, one millisecond a step; the last report of each request that asked.
    fn run(config: SchedulerConfig, requests: &[(Request, bool)]) -> BTreeMap<RequestId, Timing> {
        let (mut scheduler, mut timings) = (Scheduler::new(config), Timings::default());
        let (mut plan, mut events, mut last) = (StepPlan::new(), Vec::new(), BTreeMap::new());
        let mut now = Duration::ZERO;
        for (request, asks) in requests {
            scheduler.submit(request.clone(), 0).unwrap();
            if *asks {
                timings.begin(request.id, now);
            }
        }
        while scheduler.has_work() {
            assert!(scheduler.plan_into(&mut plan));
            timings.launched(&plan, now);
            now += Duration::from_millis(1);
            scheduler.complete(plan.step, &vec![9; plan.sample_count()]);
            scheduler.take_events(&mut events);
            for event in events.drain(..) {
                let (Event::Token { id, .. } | Event::Finished { id, .. }) = event;
                last.extend(timings.report(&event, now).map(|timing| (id, *timing)));
            }
        }
        assert!(timings.is_empty(), "every end is seen");
        last
    }

    fn config() -> SchedulerConfig {
        SchedulerConfig { overlap: false, page_size: 2, num_pages: 64, ..SchedulerConfig::default() }
    }

    #[test]
    fn phases_chunks_and_batches_are_counted() {
        let config = SchedulerConfig { token_budget: 4, max_running: 1, ..config() };
        let last =
            run(config, &[(request(1, 7, 3), true), (request(2, 4, 2), true), (request(3, 1, 1), false)]);
        assert_eq!(last.len(), 2, "only those that ask");
        let whole = |queue: u64, prefill: u64, decode: u64| (queue * 1000, prefill * 1000, decode * 1000);
        let seen = |id: u64| {
            let t = &last[&RequestId(id)];
            ((t.queue_us, t.prefill_us, t.decode_us), (t.prefill_chunks, t.steps), (t.batch_min, t.batch_max))
        };
        assert_eq!(seen(1), (whole(0, 2, 2), (2, 4), (1, 1)));
        assert_eq!(seen(2), (whole(4, 1, 1), (1, 2), (1, 1)));
    }

    #[test]
    fn retractions_and_the_chunks_after_them_are_counted() {
        let config = SchedulerConfig { num_pages: 12, reserve_percent: 0, ..config() };
        let requests: Vec<_> = (0..3).map(|id| (request(id, 3, 12), true)).collect();
        let last = run(config, &requests);
        let retracted: u32 = last.values().map(|timing| timing.retractions).sum();
        assert!(retracted > 0 && last[&RequestId(0)].retractions == 0, "{last:?}");
        for timing in last.values() {
            assert_eq!(timing.prefill_chunks, 1 + timing.retractions, "{last:?}");
            assert!(timing.batch_min >= 1 && timing.batch_max <= 3);
            assert!(timing.batch_sum >= u64::from(timing.steps));
        }
        let first = &last[&RequestId(0)];
        assert_eq!((first.steps, first.batch_max), (12, 3));
    }

    #[test]
    fn a_request_that_never_ran_only_waited() {
        let mut timings = Timings::default();
        timings.begin(RequestId(1), Duration::from_millis(1));
        let usage = Default::default();
        let event = Event::Finished { id: RequestId(1), finish: FinishReason::Abort, usage };
        let timing = timings.report(&event, Duration::from_millis(5)).unwrap();
        assert_eq!(*timing, Timing { queue_us: 4000, ..Timing::default() });
        assert_eq!(timings.report(&event, Duration::ZERO), None);
    }
}
