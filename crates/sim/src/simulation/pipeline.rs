//! What pipeline stages wait for: a step runs on a stage once the one before it has passed its activations on.
//!
//! The fake model needs no activations, so every rank runs all of it and checks all of its memory; what stages add is
//! that they run a step one after the other, and that the ranks of the last one alone have its tokens.

use super::{Action, Actor, Checked, PATIENCE_US, Reply, Simulation, Waiting};
use lockstep_comm::group::Patience;
use lockstep_engine::exchange::TokenSource;
use std::time::Duration;

/// Whose tokens `ranks` ranks in `stages` stages take.
pub(super) fn token_source(ranks: usize, stages: usize, patience: Duration) -> Option<TokenSource> {
    let source = TokenSource { rank: ranks - ranks / stages, patience: patience * stages as u32 };
    (stages > 1).then_some(source)
}

impl Simulation {
    fn stages(&self) -> usize {
        self.scenario.config.stages
    }

    /// Ranks of a stage.
    fn tp_size(&self) -> usize {
        self.ranks.len() / self.stages()
    }

    /// Whether a rank's stage is the last one.
    pub(super) fn samples(&self, rank: usize) -> bool {
        rank / self.tp_size() + 1 == self.stages()
    }

    /// The rank whose activations a rank needs; none on the first stage.
    fn before(&self, rank: usize) -> Option<usize> {
        rank.checked_sub(self.tp_size())
    }

    /// Whether what a rank's next step needs has not come.
    pub(super) fn awaits_activations(&self, rank: usize) -> bool {
        self.before(rank).is_some_and(|before| self.ranks[before].passed_on <= self.ranks[rank].passed_on)
    }

    /// The rank waits, unless the group has been aborted: longer on later stages, so that who waits for a rank that is
    /// gone gives up before those who wait for it.
    pub(super) fn await_activations(&mut self, rank: usize) -> Option<Reply> {
        if let Some(error) = self.group.abort_error(rank) {
            return Some(Reply::GroupFailed(error));
        }
        let patience = Duration::from_micros(PATIENCE_US) * (rank / self.tp_size()) as u32;
        self.wait(rank, Waiting::Activations, Patience::Deadline(patience));
        None
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
