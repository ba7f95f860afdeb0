//! Which of several deaths came first; pure, time is an argument.
//!
//! **Invariant:** at most one verdict for a set of processes that fail together, and it never names a process that
//! only reacted (exit code [`GROUP_ABORTED_EXIT`]) when another one explains itself in time.

use crate::status::{ChildStatus, Failure, GROUP_ABORTED_EXIT};
use std::time::{Duration, Instant};

/// How long other deaths may still turn out to be the cause of one that explains itself. A process
/// that dies closes its sockets a moment before its end can be seen, so a peer's reaction can be
/// observed first.
const WINDOW: Duration = Duration::from_millis(100);
/// The same when only reactions were seen: the cause exists, but takes longer to end (freeing
/// gigabytes, writing a core file).
const WINDOW_REACTIONS_ONLY: Duration = Duration::from_secs(2);

/// How much a death explains; smaller is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    /// Killed from outside or crashed: never a reaction to a peer.
    Signal,
    /// An error of its own, though it may come from a peer's absence.
    OwnError,
    /// Says itself that another process is the cause.
    Reaction,
}

impl Weight {
    fn of(status: ChildStatus) -> Self {
        match status {
            ChildStatus::Signal(_) => Weight::Signal,
            ChildStatus::Exit(GROUP_ABORTED_EXIT) => Weight::Reaction,
            ChildStatus::Exit(_) | ChildStatus::Unknown | ChildStatus::Lost => Weight::OwnError,
        }
    }
}

/// Collects deaths and names the first cause.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    deaths: Vec<Failure>,
    first: Option<Instant>,
    given: bool,
}

impl Verdict {
    /// One more unexpected death, in order of observation.
    pub(crate) fn add(&mut self, death: Failure, now: Instant) {
        if self.given {
            return;
        }
        self.first.get_or_insert(now);
        self.deaths.push(death);
    }

    /// When [`Self::decide`] will have an answer.
    pub(crate) fn due(&self) -> Option<Instant> {
        let explained = self.deaths.iter().any(|d| Weight::of(d.status) < Weight::Reaction);
        self.first.map(|first| first + if explained { WINDOW } else { WINDOW_REACTIONS_ONLY })
    }

    /// The first cause, once; `None` before it is due.
    pub(crate) fn decide(&mut self, now: Instant) -> Option<Failure> {
        if self.due()? > now { None } else { self.decide_now() }
    }

    /// The first cause as far as it is known, once; for when nobody will wait any longer.
    pub(crate) fn decide_now(&mut self) -> Option<Failure> {
        self.first = None;
        // min_by_key keeps the first of equals, that is, the earliest observation.
        let cause = std::mem::take(&mut self.deaths).into_iter().min_by_key(|d| Weight::of(d.status))?;
        self.given = true;
        Some(cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Phase;
    use lockstep_wire::Role;

    fn death(name: &str, status: ChildStatus) -> Failure {
        Failure::new(name.into(), Role::Scheduler(0), status, Phase::Serving, Vec::new())
    }

    /// Deaths as (milliseconds, name, status); the verdict's time and name.
    fn verdict(deaths: &[(u64, &str, ChildStatus)]) -> (u64, String) {
        let start = Instant::now();
        let mut verdict = Verdict::default();
        for ms in 0..5000 {
            let now = start + Duration::from_millis(ms);
            for (_, name, status) in deaths.iter().filter(|d| d.0 == ms) {
                verdict.add(death(name, *status), now);
            }
            if let Some(cause) = verdict.decide(now) {
                assert_eq!(verdict.decide_now(), None, "one verdict only");
                return (ms, cause.process);
            }
        }
        panic!("no verdict");
    }

    #[test]
    fn a_reaction_seen_first_does_not_hide_the_kill() {
        let aborted = ChildStatus::Exit(GROUP_ABORTED_EXIT);
        assert_eq!(verdict(&[(0, "a", aborted), (40, "b", ChildStatus::Signal(9))]), (100, "b".into()));
        // The killed process took 1.5 s to free its memory.
        assert_eq!(verdict(&[(0, "a", aborted), (1500, "b", ChildStatus::Signal(9))]), (1500, "b".into()));
        assert_eq!(verdict(&[(0, "a", aborted), (1, "c", aborted)]), (2000, "a".into()));
    }

    #[test]
    fn signals_explain_more_than_errors_and_ties_go_to_the_earliest() {
        let error = ChildStatus::Exit(1);
        assert_eq!(verdict(&[(5, "a", error), (6, "b", ChildStatus::Signal(11))]), (105, "b".into()));
        assert_eq!(verdict(&[(5, "a", error), (5, "b", error)]), (105, "a".into()));
        let kill = ChildStatus::Signal(9);
        assert_eq!(verdict(&[(1, "a", kill), (1, "b", kill), (2, "c", error)]), (101, "a".into()));
    }

    #[test]
    fn deaths_after_the_verdict_are_ignored() {
        let mut verdict = Verdict::default();
        let now = Instant::now();
        verdict.add(death("a", ChildStatus::Exit(1)), now);
        assert_eq!(verdict.decide_now().unwrap().process, "a");
        verdict.add(death("b", ChildStatus::Exit(1)), now);
        assert_eq!((verdict.due(), verdict.decide_now()), (None, None));
    }
}
