//! Faults, ends of ranks, and what must be true when nothing happens any more.

use super::{Action, Actor, Checked, Event, FaultKind, NOTICE_US, RankEnd, Reply, Simulation, Waiting};

impl Simulation {
    /// The scenario's fault happens now.
    pub(super) fn strike(&mut self) -> Checked {
        let Some(fault) = self.scenario.fault else { return Ok(()) };
        let rank = &mut self.ranks[fault.rank];
        if rank.end.is_some() {
            return Ok(());
        }
        rank.end = Some(RankEnd::Faulted);
        (rank.waiting, rank.deadline_us) = (None, None);
        self.totals.faults += 1;
        self.note(Actor::Rank(fault.rank), Action::Fault, u64::from(fault.kind == FaultKind::Killed), 0);
        if fault.kind == FaultKind::Killed {
            let cause = format!("rank {} was killed", fault.rank);
            self.at(self.now_us + NOTICE_US, Event::Abort(cause));
        }
        Ok(())
    }

    pub(super) fn was_killed(&self, rank: usize) -> bool {
        let is_killed = self.scenario.fault.is_some_and(|f| f.rank == rank && f.kind == FaultKind::Killed);
        is_killed && matches!(self.ranks[rank].end, Some(RankEnd::Faulted))
    }

    /// A rank's loop has returned. With an error the launcher aborts the group.
    pub(super) fn returned(&mut self, rank: usize, result: Result<(), String>) -> Checked {
        self.note(Actor::Rank(rank), Action::End, u64::from(result.is_err()), 0);
        if let Err(error) = &result {
            let struck = self.ranks.iter().position(|r| matches!(r.end, Some(RankEnd::Faulted)));
            match struck {
                None => return Err(format!("rank {rank} ends: {error}")),
                Some(struck) if !error.contains(&format!("rank {struck}")) => {
                    return Err(format!("rank {rank} ends without naming rank {struck}: {error}"));
                }
                Some(_) => self.at(self.now_us + NOTICE_US, Event::Abort(error.clone())),
            }
        }
        self.ranks[rank].end = Some(RankEnd::Returned(result));
        Ok(())
    }

    /// Everyone in the group leaves it with an error, now or when next in it.
    pub(super) fn abort_group(&mut self, cause: String) -> Checked {
        self.group.abort(cause);
        for rank in 0..self.ranks.len() {
            if matches!(self.ranks[rank].waiting, Some(Waiting::Gather | Waiting::Activations))
                && let Some(error) = self.group.abort_error(rank)
            {
                self.wake(rank);
                self.resume(rank, Reply::GroupFailed(error))?;
            }
        }
        Ok(())
    }

    /// Nothing will happen any more: everyone must have got what was promised.
    pub(super) fn check_end(&self) -> Checked {
        let struck = self.ranks.iter().position(|r| matches!(r.end, Some(RankEnd::Faulted)));
        for (rank, state) in self.ranks.iter().enumerate() {
            // Followers of a stopped rank 0 that has nothing to do cannot know; the launcher's part.
            let may_wait = struck == Some(0) && state.waiting == Some(Waiting::Gather);
            match &state.end {
                None if may_wait => {}
                None => return Err(format!("rank {rank} hangs: it waits for {:?} for ever", state.waiting)),
                Some(RankEnd::Returned(Ok(()))) if struck.is_some() && self.shutdown_reached_nobody() => {
                    return Err(format!("rank {rank} ends well though rank {struck:?} is gone"));
                }
                Some(_) => {}
            }
        }
        if struck.is_some() || self.scenario.shutdown_us.is_some() {
            return Ok(());
        }
        if let Some(id) = self.client.unanswered() {
            return Err(format!("{id} never ends"));
        }
        let report = self.ranks[0].last_report.as_ref().ok_or("rank 0 never stepped")?;
        let c = &report.counters;
        if (c.pages_held, c.waiting, c.running, c.draining) != (0, 0, 0, 0) {
            return Err(format!("not idle at the end: {c:?}"));
        }
        Ok(())
    }

    fn shutdown_reached_nobody(&self) -> bool {
        self.scenario.shutdown_us.is_none()
    }

    pub(super) fn count_totals(&mut self) {
        let totals = &mut self.totals;
        totals.requests = self.scenario.requests.len() as u64;
        totals.tokens = self.client.heard.tokens;
        totals.aborted = self.client.heard.aborted;
        totals.refused = self.client.heard.refused;
        if let Some(report) = &self.ranks[0].last_report {
            totals.retractions = report.counters.retractions;
            totals.hit_tokens = report.counters.hit_tokens;
            totals.evicted_pages = report.counters.evicted_pages;
            totals.prefix_waits = report.counters.prefix_waits;
        }
    }
}
