//! How long a pipeline stage's device computed, of the time in which there was work.
//!
//! There is work while a step is in flight: from when the rank's loop queues it until all ranks know its tokens. The share of
//! that time in which the device did not compute is the stage's bubble (`docs/parallelism.md`).

use lockstep_wire::StageWork;
use std::time::{Duration, Instant};

/// What a stage's device did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Steps that have ended.
    pub steps: u64,
    /// In which the device computed, without what it waited for the stage before.
    pub computed: Duration,
    /// In which there was work.
    pub worked: Duration,
}

impl StageTimes {
    /// The same for other ranks.
    pub fn work(&self) -> StageWork {
        let us = |time: Duration| time.as_micros() as u64;
        StageWork { computed_us: us(self.computed), work_us: us(self.worked) }
    }
}

/// Keeps a stage's times, on the rank's loop.
#[derive(Debug, Default)]
pub(crate) struct StageClock {
    times: StageTimes,
    in_flight: usize,
    /// Since when there is work that is not in `times`.
    since: Option<Instant>,
}

impl StageClock {
    /// A step is queued at `now`.
    pub(crate) fn launched(&mut self, now: Instant) {
        self.in_flight += 1;
        self.since.get_or_insert(now);
    }

    /// The device has computed a step for `computed`.
    pub(crate) fn computed(&mut self, computed: Duration) {
        self.times.steps += 1;
        self.times.computed += computed;
    }

    /// The oldest step is over on all ranks at `now`.
    pub(crate) fn ended(&mut self, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(1);
        let since = if self.in_flight > 0 { self.since.replace(now) } else { self.since.take() };
        self.times.worked += since.map_or(Duration::ZERO, |since| now - since);
    }

    /// Up to the step that ended last.
    pub(crate) fn times(&self) -> StageTimes {
        self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_the_time_with_steps_in_flight() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let computed = Duration::from_millis(10);
        let mut clock = StageClock::default();
        assert_eq!(clock.times().work().bubble(), 0.0);
        // Two steps of 10 ms in flight from 0 to 30, then nothing for a while, then one that takes 20 in all.
        clock.launched(at(0));
        clock.launched(at(5));
        (0..3).for_each(|_| clock.computed(computed));
        clock.ended(at(20));
        clock.ended(at(30));
        clock.launched(at(100));
        clock.ended(at(120));
        let times = clock.times();
        assert_eq!((times.steps, times.computed.as_millis(), times.worked.as_millis()), (3, 30, 50));
        assert!((times.work().bubble() - 0.4).abs() < 1e-9);
    }
}
