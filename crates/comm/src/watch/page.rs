//! The page itself: layout, making and mapping, and reading.

use super::mark::{Activity, Mark, Track};
use super::{RING_EVENTS, now_ns};
use crate::mapping::{Failed, Mapping};
use crate::shm::Operation;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// "LOCKWTCH" in ASCII.
const MAGIC: u64 = u64::from_be_bytes(*b"LOCKWTCH");
/// Raised whenever the layout changes.
const VERSION: u32 = 3;
const HEADER_BYTES: usize = 4096;
const HEADER_MARKS: usize = 12;
/// Most marks of a page: ranks, tokenizers and a few others.
const MARKS_MAX: usize = 512;

/// Bytes of a mark: two pairs of cache lines, so that no two loops write into one.
const MARK_BYTES: usize = 256;
/// Offsets inside a mark.
pub(super) const BEAT: usize = 0;
pub(super) const TOKEN: usize = 8;
const TRACKS: usize = 32;
const TRACK_BYTES: usize = 32;
const SPENT: usize = 160;
/// Offsets inside a track.
pub(super) const WORD: usize = 0;
pub(super) const SINCE: usize = 8;
pub(super) const INSIDE: usize = 16;
pub(super) const HEAD: usize = 24;

const EVENT_BYTES: usize = 16;
const RING_BYTES: usize = RING_EVENTS * EVENT_BYTES;
const TRACK_COUNT: usize = Track::ALL.len();

/// Kinds of activity, [`Activity::None`] included.
pub const ACTIVITIES: usize = Activity::ALL.len();

const _: () = assert!(TRACKS + TRACK_COUNT * TRACK_BYTES <= SPENT && SPENT + ACTIVITIES * 8 <= MARK_BYTES);

/// The page cannot be made or mapped, or is not one of this binary.
#[derive(Debug, thiserror::Error)]
#[error("watch page: {0}")]
pub struct WatchError(String);

impl From<Failed> for WatchError {
    fn from((what, error): Failed) -> Self {
        Self(format!("{what}: {error}"))
    }
}

/// Where everything of a page with so many marks lies.
pub(super) const fn mark_offset(mark: usize) -> usize {
    HEADER_BYTES + mark * MARK_BYTES
}

/// Of a track's numbers.
pub(super) const fn track_offset(mark: usize, track: Track) -> usize {
    mark_offset(mark) + TRACKS + track as usize * TRACK_BYTES
}

/// Of the nanoseconds spent in an activity.
pub(super) const fn spent_offset(mark: usize, activity: Activity) -> usize {
    mark_offset(mark) + SPENT + activity as usize * 8
}

/// Of event number `index` in a ring of a page with `marks` marks.
pub(super) const fn event_offset(marks: usize, mark: usize, track: Track, index: u64) -> usize {
    let rings = HEADER_BYTES + (marks * MARK_BYTES).next_multiple_of(4096);
    let ring = rings + (mark * TRACK_COUNT + track as usize) * RING_BYTES;
    ring + (index % RING_EVENTS as u64) as usize * EVENT_BYTES
}

const fn total_bytes(marks: usize) -> usize {
    event_offset(marks, marks, Track::Loop, 0)
}

/// What a loop does on one of its tracks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Count of operations since start, or the number of the step.
    pub sequence: u64,
    /// An [`Operation`] or, on [`Track::Loop`], an [`Activity`], by number; 0 on [`Track::Device`].
    pub code: u8,
    /// It has not left yet.
    pub inside: bool,
    /// Since when, as [`now_ns`] tells; 0 for never.
    pub since_ns: u64,
    /// Nanoseconds spent inside, in all; without the operation it is in.
    pub inside_ns: u64,
}

impl Position {
    pub(super) const fn pack(sequence: u64, code: u8, inside: bool) -> u64 {
        (sequence << 9) | ((code as u64) << 1) | inside as u64
    }

    const fn unpack(word: u64) -> (u64, u8, bool) {
        (word >> 9, (word >> 1) as u8, word & 1 == 1)
    }

    /// Of [`Track::Group`] and [`Track::Tensors`].
    pub const fn operation(&self) -> Operation {
        Operation::from_code(self.code)
    }

    /// Of [`Track::Loop`].
    pub const fn activity(&self) -> Activity {
        Activity::from_code(self.code)
    }
}

/// A moment of a loop; the two of one sequence number are arrival and departure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, as [`now_ns`] tells.
    pub at_ns: u64,
    /// As [`Position::sequence`].
    pub sequence: u64,
    /// As [`Position::code`].
    pub code: u8,
    /// Arrival, not departure. Activities only arrive.
    pub inside: bool,
}

/// All that is known of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// When it last did anything; 0 for never.
    pub beat_ns: u64,
    /// When it last finished a step with tokens; 0 for never.
    pub token_ns: u64,
    /// By [`Track`].
    pub tracks: [Position; TRACK_COUNT],
    /// Nanoseconds by [`Activity`], in all; without the one it is in.
    pub spent_ns: [u64; ACTIVITIES],
}

impl Seen {
    /// What it does on `track`.
    pub const fn track(&self, track: Track) -> &Position {
        &self.tracks[track as usize]
    }

    /// How long ago its last token was, if there was one.
    pub fn token_age(&self, now_ns: u64) -> Option<Duration> {
        (self.token_ns > 0).then(|| Duration::from_nanos(now_ns.saturating_sub(self.token_ns)))
    }
}

/// A mapped page. Cheap to clone.
#[derive(Clone, Debug)]
pub struct WatchPage {
    memory: Arc<Mapping>,
    marks: usize,
}

impl WatchPage {
    /// Makes a page with `marks` marks (1..=512) and maps it. **Called once per server, by the launcher.**
    /// The descriptor is close-on-exec; whoever starts the children passes it on deliberately.
    pub fn create(marks: usize) -> Result<(OwnedFd, Self), WatchError> {
        if !(1..=MARKS_MAX).contains(&marks) {
            return Err(WatchError(format!("{marks} marks asked for, possible are 1..={MARKS_MAX}")));
        }
        let fd = Mapping::create(c"lockstep-watch", total_bytes(marks))?;
        let memory = Mapping::map(&fd, total_bytes(marks))?;
        memory.word(HEADER_MARKS).store(marks as u32, Ordering::Relaxed);
        memory.publish_header(MAGIC, VERSION);
        Ok((fd, Self { memory: Arc::new(memory), marks }))
    }

    /// Maps a page made by [`WatchPage::create`]; header and size are checked. The descriptor may be closed
    /// afterwards.
    pub fn map(fd: impl AsFd) -> Result<Self, WatchError> {
        let fd = fd.as_fd();
        let file_bytes = Mapping::file_bytes(fd)?;
        if file_bytes < HEADER_BYTES {
            return Err(WatchError(format!(
                "the descriptor has {file_bytes} bytes, its header alone {HEADER_BYTES}"
            )));
        }
        let header = Mapping::map(fd, HEADER_BYTES)?;
        header
            .check_header(MAGIC, VERSION)
            .map_err(|found| WatchError(format!("the descriptor is none of this binary ({found})")))?;
        let marks = header.word(HEADER_MARKS).load(Ordering::Relaxed) as usize;
        if !(1..=MARKS_MAX).contains(&marks) || file_bytes != total_bytes(marks) {
            return Err(WatchError(format!("{marks} marks do not fit a descriptor of {file_bytes} bytes")));
        }
        Ok(Self { memory: Arc::new(Mapping::map(fd, file_bytes)?), marks })
    }

    /// The right to write mark number `mark`, for the one loop it belongs to. Panics when there is none.
    pub fn mark(&self, mark: usize) -> Mark {
        assert!(mark < self.marks, "mark {mark} of {}", self.marks);
        Mark::new(self.memory.clone(), self.marks, mark)
    }

    /// Number of marks.
    pub fn marks(&self) -> usize {
        self.marks
    }

    /// Forgets the last life of a loop: its beat, token and positions, not the times spent. For the launcher,
    /// before it starts that loop's process again.
    pub fn reset(&self, mark: usize) {
        for offset in [BEAT, TOKEN] {
            self.memory.long(mark_offset(mark) + offset).store(0, Ordering::Relaxed);
        }
        for track in Track::ALL {
            for offset in [WORD, SINCE] {
                self.memory.long(track_offset(mark, track) + offset).store(0, Ordering::Relaxed);
            }
        }
    }

    /// Where a loop stands now; the numbers are read one after the other. Panics when there is no such mark.
    pub fn read(&self, mark: usize) -> Seen {
        assert!(mark < self.marks, "mark {mark} of {}", self.marks);
        let long = |offset: usize| self.memory.long(offset).load(Ordering::Relaxed);
        let position = |track: Track| {
            let at = track_offset(mark, track);
            let (sequence, code, inside) = Position::unpack(long(at + WORD));
            Position { sequence, code, inside, since_ns: long(at + SINCE), inside_ns: long(at + INSIDE) }
        };
        Seen {
            beat_ns: long(mark_offset(mark) + BEAT),
            token_ns: long(mark_offset(mark) + TOKEN),
            tracks: Track::ALL.map(position),
            spent_ns: Activity::ALL.map(|activity| long(spent_offset(mark, activity))),
        }
    }

    /// Number of the event that comes next in a ring; where to begin with [`Self::events`].
    pub fn events_end(&self, mark: usize, track: Track) -> u64 {
        self.memory.long(track_offset(mark, track) + HEAD).load(Ordering::Acquire)
    }

    /// Appends to `into` the events from number `from` on that are still there, oldest first; the number to go
    /// on from, and how many were overwritten before they were read.
    pub fn events(&self, mark: usize, track: Track, from: u64, into: &mut Vec<Event>) -> (u64, u64) {
        let end = self.events_end(mark, track);
        let first = from.min(end).max(end.saturating_sub(RING_EVENTS as u64));
        let begun = into.len();
        for index in first..end {
            let at = event_offset(self.marks, mark, track, index);
            let at_ns = self.memory.long(at).load(Ordering::Relaxed);
            let (sequence, code, inside) = Position::unpack(self.memory.long(at + 8).load(Ordering::Relaxed));
            into.push(Event { at_ns, sequence, code, inside });
        }
        // Orders the reads above before the one below: what was overwritten meanwhile is thrown away, and the
        // event that is being written now too.
        std::sync::atomic::fence(Ordering::Acquire);
        let end_now = self.events_end(mark, track);
        let valid = end_now.saturating_add(1).saturating_sub(RING_EVENTS as u64);
        let torn = valid.saturating_sub(first).min(end - first);
        into.drain(begun..begun + torn as usize);
        (end, first + torn - from.min(end))
    }

    /// How long ago every one of the loops `marks` had finished a step with tokens: the age of the oldest last
    /// token; `None` when one of them never did.
    pub fn token_age(&self, marks: impl IntoIterator<Item = usize>) -> Option<Duration> {
        let now = now_ns();
        marks
            .into_iter()
            .map(|mark| self.read(mark).token_age(now))
            .try_fold(Duration::ZERO, |oldest, age| age.map(|age| oldest.max(age)))
    }
}
