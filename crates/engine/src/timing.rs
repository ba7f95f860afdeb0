//! Where the time of a request went: of every request until its first token, of those that ask until their end.
//!
//! **Invariants:** only rank 0 keeps this, and nothing reads it but answers and metrics: no decision depends on a clock.
//! While all open requests have their first token and none asks, a step costs one look at an empty map; no clock is
//! read and nothing is allocated.
//!
//! Called by the rank loop: [`Timings::begin`] when a request is accepted, [`Timings::launched`] with every plan,
//! [`Timings::report`] with every result.

use lockstep_core::RequestId;
use lockstep_scheduler::{Event, StepPlan};
use lockstep_wire::Timing;
use std::collections::BTreeMap;
use std::time::Duration;

/// The open requests that ask or have no token yet. Times are those of [`Primary::now`](crate::control::Primary::now).
#[derive(Debug, Default)]
pub(crate) struct Timings {
    open: BTreeMap<RequestId, Span>,
    /// Of these, requests that ask.
    asking: usize,
}

/// What is known of one request.
#[derive(Debug)]
struct Span {
    asks: bool,
    taken: Duration,
    /// Launch of its first step.
    started: Option<Duration>,
    first_token: Option<Duration>,
    sums: Timing,
}

impl Timings {
    /// Whether no open request asks and all have their first token.
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// A request was taken, which `asks` or does not.
    pub(crate) fn begin(&mut self, id: RequestId, asks: bool, now: Duration) {
        let span = Span { asks, taken: now, started: None, first_token: None, sums: Timing::default() };
        self.open.insert(id, span);
        self.asking += usize::from(asks);
    }

    /// A step is about to be launched.
    pub(crate) fn launched(&mut self, plan: &StepPlan, now: Duration) {
        let batch = plan.rows.len() as u32;
        let asking = self.asking > 0;
        for row in plan.rows.iter().filter(|row| row.is_prefill || asking) {
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

    /// What to tell of the request of `event`: with its first token, or its end before that, and if it asks with every
    /// event.
    pub(crate) fn report(&mut self, event: &Event, now: Duration) -> Option<Box<Timing>> {
        let (id, usage, finish, has_token) = match event {
            Event::Token { id, usage, finish, .. } => (id, usage, *finish, true),
            Event::Finished { id, usage, finish } => (id, usage, Some(*finish), false),
        };
        // A later token of a request that does not ask, unless another one asks: then the map knows.
        if self.asking == 0 && has_token && usage.completion_tokens > 1 {
            return None;
        }
        let span = self.open.get_mut(id)?;
        if has_token {
            span.first_token.get_or_insert(now);
        }
        span.sums.retractions = usage.retractions;
        let (timing, asks) = (span.until(now), span.asks);
        if finish.is_some() || !asks {
            self.open.remove(id);
            self.asking -= usize::from(asks);
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

    /// Runs to the end, one millisecond a step; the reports of each request.
    fn run(config: SchedulerConfig, requests: &[(Request, bool)]) -> BTreeMap<RequestId, Vec<Timing>> {
        let (mut scheduler, mut timings) = (Scheduler::new(config), Timings::default());
        let (mut plan, mut events, mut last) = (StepPlan::new(), Vec::new(), BTreeMap::<_, Vec<_>>::new());
        let mut now = Duration::ZERO;
        for (request, asks) in requests {
            scheduler.submit(request.clone(), 0).unwrap();
            timings.begin(request.id, *asks, now);
        }
        while scheduler.has_work() {
            assert!(scheduler.plan_into(&mut plan));
            timings.launched(&plan, now);
            now += Duration::from_millis(1);
            scheduler.complete(plan.step, &vec![9; plan.sample_count()]);
            scheduler.take_events(&mut events);
            for event in events.drain(..) {
                let (Event::Token { id, .. } | Event::Finished { id, .. }) = event;
                last.entry(id).or_default().extend(timings.report(&event, now).map(|timing| *timing));
            }
        }
        assert!(timings.is_empty() && timings.asking == 0, "every end is seen");
        last
    }

    fn config() -> SchedulerConfig {
        SchedulerConfig { overlap: false, page_size: 2, num_pages: 64, ..SchedulerConfig::default() }
    }

    #[test]
    fn phases_chunks_and_batches_are_counted() {
        let config = SchedulerConfig { token_budget: 4, max_running: 1, ..config() };
        let last =
            run(config, &[(request(1, 7, 3), true), (request(2, 4, 2), true), (request(3, 1, 4), false)]);
        let reports: Vec<_> = last.values().map(Vec::len).collect();
        assert_eq!(reports, [3, 2, 1], "with every token, or with the first only");
        let whole = |queue: u64, prefill: u64, decode: u64| (queue * 1000, prefill * 1000, decode * 1000);
        let seen = |id: u64| {
            let t = last[&RequestId(id)].last().unwrap();
            ((t.queue_us, t.prefill_us, t.decode_us), (t.prefill_chunks, t.steps), (t.batch_min, t.batch_max))
        };
        assert_eq!(seen(1), (whole(0, 2, 2), (2, 4), (1, 1)));
        assert_eq!(seen(2), (whole(4, 1, 1), (1, 2), (1, 1)));
        assert_eq!(seen(3), (whole(6, 1, 0), (1, 1), (1, 1)));
    }

    #[test]
    fn retractions_and_the_chunks_after_them_are_counted() {
        let config = SchedulerConfig { num_pages: 12, reserve_percent: 0, ..config() };
        let requests: Vec<_> = (0..3).map(|id| (request(id, 3, 12), true)).collect();
        let reports = run(config, &requests);
        let last: BTreeMap<_, _> = reports.iter().map(|(id, all)| (*id, *all.last().unwrap())).collect();
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
        timings.begin(RequestId(1), false, Duration::from_millis(1));
        let usage = Default::default();
        let event = Event::Finished { id: RequestId(1), finish: FinishReason::Abort, usage };
        let timing = timings.report(&event, Duration::from_millis(5)).unwrap();
        assert_eq!(*timing, Timing { queue_us: 4000, ..Timing::default() });
        assert_eq!(timings.report(&event, Duration::ZERO), None);
    }
}
