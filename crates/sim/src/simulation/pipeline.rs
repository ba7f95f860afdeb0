//! What pipeline stages wait for: a step runs on a stage once the one before it has passed its activations on.
//!
//! The fake model needs no activations, so every rank runs all of it and checks all of its memory; what stages add is
//! that they run a step one after the other, and that the ranks of the last one alone have its tokens.

use super::{Action, Actor, Checked, Event, PATIENCE_US, Reply, Simulation, Waiting};
use lockstep_comm::group::Patience;
use lockstep_engine::exchange::TokenSource;
use std::time::Duration;

/// Whose tokens `ranks` ranks in `stages` stages take.
pub(super) fn token_source(ranks: usize, stages: usize, patience: Duration) -> Option<TokenSource> {
    let source = TokenSource { rank: ranks - ranks / stages, patience: patience * stages as u32 };
    (stages > 1).then_some(source)
}

impl Simulation {
    /// Steps that are in flight as long as there is work for as many: one a stage, and with overlap two on a single one.
    fn depth(&self) -> usize {
        let config = &self.scenario.config;
        if config.stages > 1 { config.stages } else { 1 + usize::from(config.overlap) }
    }

    /// A loop waits for a step only when all stages have one, or when it could launch none: else stages would idle.
    fn may_collect(&self, rank: usize) -> Checked {
        let (in_flight, depth) = (self.ranks[rank].device.in_flight(), self.depth());
        if self.ranks[rank].has_launched && in_flight < depth {
            return Err(format!(
                "rank {rank} waits for a step with {in_flight} of {depth} in flight, although it has just launched one"
            ));
        }
        Ok(())
    }

    /// There are no more steps in flight than stages have room for.
    pub(super) fn has_room(&self, rank: usize) -> Checked {
        let (in_flight, depth) = (self.ranks[rank].device.in_flight(), self.depth());
        if in_flight > depth {
            return Err(format!("{in_flight} steps are in flight, at most {depth} are legal"));
        }
        Ok(())
    }

    fn stages(&self) -> usize {
        self.scenario.config.stages
    }

    /// Ranks of a stage.
    fn tp_size(&self) -> usize {
        self.ranks.len() / self.stages()
    }

    /// Whether a rank's stage is the last one.
    fn samples(&self, rank: usize) -> bool {
        rank / self.tp_size() + 1 == self.stages()
    }

    /// The rank whose activations a rank needs; none on the first stage.
    fn before(&self, rank: usize) -> Option<usize> {
        rank.checked_sub(self.tp_size())
    }

    /// Whether what a rank's next step needs has not come.
    fn awaits_activations(&self, rank: usize) -> bool {
        self.before(rank).is_some_and(|before| self.ranks[before].passed_on <= self.ranks[rank].passed_on)
    }

    /// The rank waits, unless the group has been aborted: longer on later stages, so that who waits for a rank that is
    /// gone gives up before those who wait for it.
    fn await_activations(&mut self, rank: usize) -> Option<Reply> {
        if let Some(error) = self.group.abort_error(rank) {
            return Some(Reply::GroupFailed(error));
        }
        let patience = Duration::from_micros(PATIENCE_US) * (rank / self.tp_size()) as u32;
        self.wait(rank, Waiting::Activations, Patience::Deadline(patience));
        None
    }

    /// The oldest step, once the device has run it, which takes what the stage before passes on.
    pub(super) fn collect(&mut self, rank: usize) -> Result<Option<Reply>, String> {
        self.may_collect(rank)?;
        if self.awaits_activations(rank) {
            return Ok(self.await_activations(rank));
        }
        self.run_oldest(rank).map(|()| None)
    }

    fn run_oldest(&mut self, rank: usize) -> Checked {
        let collected = self.ranks[rank].device.collect(&self.oracle);
        let (step, tokens) = collected.map_err(|what| format!("rank {rank}: {what}"))?;
        self.agreement.collected(rank, tokens.clone())?;
        self.note(Actor::Rank(rank), Action::Collect, step, tokens.len() as u64);
        let tokens = if self.samples(rank) { tokens } else { Vec::new() };
        let delay_us = self.delay(rank, self.scenario.timing.compute_us);
        self.at(self.now_us + delay_us, Event::Resume(rank, Reply::Collected(step, tokens)));
        Ok(())
    }

    /// What a rank gets that has waited in vain.
    pub(super) fn no_activations(&self, rank: usize) -> Reply {
        let missing = self.before(rank).unwrap_or(rank);
        let waited_ms = PATIENCE_US / 1000 * (rank / self.tp_size()) as u64;
        Reply::GroupFailed(self.group.no_activations(rank, missing, waited_ms))
    }

    /// A step has run on a rank: the next stage may run it.
    pub(super) fn pass_on(&mut self, rank: usize) -> Checked {
        if self.ranks[rank].end.is_some() {
            return Ok(());
        }
        self.ranks[rank].passed_on += 1;
        let next = rank + self.tp_size();
        let waits = self.ranks.get(next).is_some_and(|next| next.waiting == Some(Waiting::Activations));
        if !waits || self.awaits_activations(next) {
            return Ok(());
        }
        self.note(Actor::Rank(rank), Action::PassOn, self.ranks[rank].passed_on as u64, next as u64);
        self.wake(next);
        self.run_oldest(next)
    }
}
