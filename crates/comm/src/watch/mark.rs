//! Writing to the page.

use super::now_ns;
use super::page::{
    BEAT, HEAD, INSIDE, Position, SINCE, TOKEN, WORD, event_offset, mark_offset, spent_offset, track_offset,
};
use crate::mapping::Mapping;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

/// What a loop can be seen doing side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Track {
    /// Its [`Activity`], with the number of the step.
    Loop = 0,
    /// Operations of the process group.
    Group = 1,
    /// Operations of the tensor collective.
    Tensors = 2,
    /// Steps that a pipeline stage's device computes, noted once they have ended.
    Device = 3,
}

impl Track {
    /// All of them, in order.
    pub const ALL: [Track; 4] = [Track::Loop, Track::Group, Track::Tensors, Track::Device];
}

/// What a loop is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Activity {
    /// It has not begun.
    None = 0,
    /// It waits for work.
    Idle = 1,
    /// It handles a message (a text process), or messages of a step (a rank).
    Messages = 2,
    /// Ranks agree on a step.
    Agree = 3,
    /// The scheduler plans a step.
    Plan = 4,
    /// A forward pass is launched; on CPU it runs here.
    Launch = 5,
    /// Logits or tokens of a step are awaited from the device.
    Wait = 6,
    /// Results are sent.
    Send = 7,
    /// It has left its loop.
    Ended = 8,
    /// Tokens are chosen from logits by the host.
    Sample = 9,
}

impl Activity {
    /// All of them, by number.
    pub const ALL: [Activity; 10] = [
        Activity::None,
        Activity::Idle,
        Activity::Messages,
        Activity::Agree,
        Activity::Plan,
        Activity::Launch,
        Activity::Wait,
        Activity::Send,
        Activity::Ended,
        Activity::Sample,
    ];

    /// One word.
    pub const fn name(self) -> &'static str {
        match self {
            Activity::None => "starting",
            Activity::Idle => "idle",
            Activity::Messages => "messages",
            Activity::Agree => "agree",
            Activity::Plan => "plan",
            Activity::Launch => "launch",
            Activity::Wait => "wait",
            Activity::Send => "send",
            Activity::Ended => "ended",
            Activity::Sample => "sample",
        }
    }

    /// The activity with number `code`; unknown numbers (damaged memory) read as none.
    pub const fn from_code(code: u8) -> Self {
        if (code as usize) < Self::ALL.len() { Self::ALL[code as usize] } else { Self::None }
    }
}

/// A loop's own place on the page. Clones write the same place: each track must have one writer.
#[derive(Clone, Debug)]
pub struct Mark {
    memory: Arc<Mapping>,
    marks: usize,
    mark: usize,
}

impl Mark {
    pub(super) fn new(memory: Arc<Mapping>, marks: usize, mark: usize) -> Self {
        Self { memory, marks, mark }
    }

    /// The loop lives.
    pub fn beat(&self) {
        self.store(mark_offset(self.mark) + BEAT, now_ns());
    }

    /// A step with tokens is complete on this rank.
    pub fn token(&self) {
        let now = now_ns();
        self.store(mark_offset(self.mark) + TOKEN, now);
        self.store(mark_offset(self.mark) + BEAT, now);
    }

    /// The loop turns to `activity`, in step `step` (0 where there are no steps).
    pub fn enter(&self, activity: Activity, step: u64) {
        let track = track_offset(self.mark, Track::Loop);
        let before = self.long(track + WORD).load(Ordering::Relaxed);
        let word = Position::pack(step, activity as u8, true);
        let now = now_ns();
        self.store(mark_offset(self.mark) + BEAT, now);
        if before == word {
            return;
        }
        let since = self.long(track + SINCE).load(Ordering::Relaxed);
        let spent = spent_offset(self.mark, Activity::from_code((before >> 1) as u8));
        if since > 0 {
            self.add(spent, now.saturating_sub(since));
        }
        self.write(Track::Loop, word, now);
    }

    /// An operation begins or ends on [`Track::Group`] or [`Track::Tensors`].
    pub(crate) fn note(&self, track: Track, sequence: u64, code: u8, inside: bool) {
        let now = now_ns();
        let at = track_offset(self.mark, track);
        if !inside {
            let since = self.long(at + SINCE).load(Ordering::Relaxed);
            self.add(at + INSIDE, now.saturating_sub(since));
        }
        self.store(mark_offset(self.mark) + BEAT, now);
        self.write(track, Position::pack(sequence, code, inside), now);
    }

    /// The device has computed step `step` on [`Track::Device`] for so long until now. It is no sign of life of the loop.
    pub fn computed(&self, step: u64, took: Duration) {
        let now = now_ns();
        let at = track_offset(self.mark, Track::Device);
        // Devices compute one step after the other, whatever the clocks of host and device say.
        let since = self.long(at + SINCE).load(Ordering::Relaxed);
        let begun = now.saturating_sub(took.as_nanos() as u64).max(since);
        self.add(at + INSIDE, now - begun);
        self.write(Track::Device, Position::pack(step, 0, true), begun);
        self.write(Track::Device, Position::pack(step, 0, false), now);
    }

    /// Position and event. The head is published last, so that a reader who sees it sees the event.
    fn write(&self, track: Track, word: u64, now: u64) {
        let at = track_offset(self.mark, track);
        self.store(at + SINCE, now);
        self.store(at + WORD, word);
        let head = self.long(at + HEAD);
        let index = head.load(Ordering::Relaxed);
        let event = event_offset(self.marks, self.mark, track, index);
        // The last head is visible before this event is: a reader learns that its place is being written.
        fence(Ordering::Release);
        self.store(event, now);
        self.store(event + 8, word);
        head.store(index + 1, Ordering::Release);
    }

    fn long(&self, offset: usize) -> &AtomicU64 {
        self.memory.long(offset)
    }

    fn store(&self, offset: usize, value: u64) {
        self.long(offset).store(value, Ordering::Relaxed);
    }

    /// Not an atomic addition: this loop is the only writer.
    fn add(&self, offset: usize, value: u64) {
        let number = self.long(offset);
        number.store(number.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
    }
}
