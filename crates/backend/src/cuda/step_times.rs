//! How long the device computed each step, between two points of its stream.
//!
//! A pipeline stage asks: what it waited for the stage before lies outside. **Invariant:** steps end in the order in which
//! they began.

use super::device::{Device, Event};
use crate::Result;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// The points of steps.
#[derive(Default)]
pub(super) struct StepTimes {
    /// Begun, and ended unless it is the newest; oldest first.
    open: VecDeque<[Event; 2]>,
    free: Vec<[Event; 2]>,
}

impl StepTimes {
    /// What is queued from here on is the next step's.
    pub fn begin(&mut self, device: &Rc<Device>) -> Result<()> {
        let events = match self.free.pop() {
            Some(events) => events,
            None => [Event::timed(device)?, Event::timed(device)?],
        };
        events[0].record()?;
        self.open.push_back(events);
        Ok(())
    }

    /// What was queued so far was the newest step's.
    pub fn end(&mut self) -> Result<()> {
        self.open.back().map_or(Ok(()), |[_, end]| end.record())
    }

    /// Whether [`Self::wait`] would not wait: the oldest step has ended, or something has failed.
    pub fn has_ended(&self, device: &Device) -> bool {
        self.open.front().is_none_or(|[_, end]| device.has_reached(end))
    }

    /// Waits for the oldest step; gives how long it took from its begin on.
    pub fn wait(&mut self, device: &Device) -> Result<Option<Duration>> {
        let Some(events) = self.open.pop_front() else { return Ok(None) };
        device.wait_for(&events[1])?;
        let microseconds = events[1].us_since(&events[0])?;
        self.free.push(events);
        Ok(Some(Duration::from_secs_f64(f64::from(microseconds.max(0.0)) / 1e6)))
    }
}
