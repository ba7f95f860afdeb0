//! What happened in a run: a hash of everything, and the last events for people.

use lockstep_kvcache::Hasher64;
use std::collections::VecDeque;

/// Events shown with a finding.
const RECENT_MAX: usize = 60;

/// Who did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    /// A rank.
    Rank(usize),
    /// The clients behind the control plane.
    Client,
}

/// What was done; the two numbers of an [`Entry`] are explained here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The client sends request `a` on link `b`.
    Submit,
    /// The client aborts request `a` on link `b`.
    Abort,
    /// The client asks for the state: query `a`.
    Query,
    /// The client asks to flush the cache.
    Flush,
    /// The client asks for the end.
    Shutdown,
    /// The client hears of request `a`; `b` is its number of tokens.
    Hear,
    /// A rank takes `a` messages from its inbox.
    Receive,
    /// A rank publishes message `a`.
    Publish,
    /// A rank takes a broadcast.
    Take,
    /// A rank arrives at gather `a`.
    Arrive,
    /// A rank launches step `a` with `b` rows.
    Launch,
    /// A rank collects step `a` with `b` tokens.
    Collect,
    /// A rank's stage has run `a` steps, for the next of which rank `b` of the next stage waits.
    PassOn,
    /// A rank has done loop step `a`; `b` is its token hash.
    Step,
    /// A rank ends; `a` is 1 for an error.
    End,
    /// A rank is killed or stopped.
    Fault,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Simulated microseconds since start.
    pub time_us: u64,
    /// Who.
    pub actor: Actor,
    /// What.
    pub action: Action,
    /// First detail.
    pub a: u64,
    /// Second detail.
    pub b: u64,
}

/// The events of one run.
pub struct EventLog {
    hash: Hasher64,
    recent: VecDeque<Entry>,
    keep_all: bool,
}

impl EventLog {
    /// An empty log; with `keep_all` it keeps every event, else the last ones.
    pub fn new(keep_all: bool) -> Self {
        Self { hash: Hasher64::default(), recent: VecDeque::new(), keep_all }
    }

    /// Appends an event.
    pub fn push(&mut self, entry: Entry) {
        let actor = match entry.actor {
            Actor::Rank(rank) => rank as u64,
            Actor::Client => u64::MAX,
        };
        for word in [entry.time_us, actor, entry.action as u64, entry.a, entry.b] {
            self.hash.word(word);
        }
        if !self.keep_all && self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(entry);
    }

    /// A hash of all events: equal for equal runs.
    pub fn hash(&self) -> u64 {
        self.hash.finish()
    }

    /// The events kept, oldest first.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.recent.iter()
    }
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { time_us, action, a, b, .. } = self;
        match self.actor {
            Actor::Rank(rank) => write!(f, "{time_us:>10} us  rank {rank}  {action:?} {a} {b}"),
            Actor::Client => write!(f, "{time_us:>10} us  client  {action:?} {a} {b}"),
        }
    }
}
