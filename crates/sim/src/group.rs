//! The simulated CPU process group.

use lockstep_comm::collective::CollectiveError;

/// One gather at a time, like the real one: a rank cannot arrive at the next before all have arrived.
pub struct Group {
    arrived: Vec<Option<Vec<u8>>>,
    sequence: u64,
    abort_cause: Option<String>,
}

const OPERATION: &str = "all_gather";

impl Group {
    /// A group of so many ranks.
    pub fn new(ranks: usize) -> Self {
        Self { arrived: vec![None; ranks], sequence: 0, abort_cause: None }
    }

    /// Gathers completed.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// A rank arrives; everyone's bytes when it was the last one.
    pub fn arrive(&mut self, rank: usize, send: Vec<u8>) -> Result<Option<Vec<u8>>, CollectiveError> {
        let other = self.arrived.iter().position(|a| a.as_ref().is_some_and(|a| a.len() != send.len()));
        if let Some(peer) = other {
            return Err(CollectiveError::Mismatch {
                rank,
                peer,
                sequence: self.sequence,
                mine: format!("{OPERATION} of {} bytes", send.len()),
                theirs: format!("{OPERATION} of another size"),
            });
        }
        let before = self.arrived[rank].replace(send);
        assert!(before.is_none(), "invariant: a rank that has arrived waits");
        if self.arrived.iter().any(Option::is_none) {
            return Ok(None);
        }
        self.sequence += 1;
        Ok(Some(self.arrived.iter_mut().filter_map(Option::take).flatten().collect()))
    }

    /// Everyone leaves with an error from now on. The first cause stays.
    pub fn abort(&mut self, cause: String) {
        self.abort_cause.get_or_insert(cause);
    }

    /// The error of a rank in an aborted group.
    pub fn abort_error(&self, rank: usize) -> Option<CollectiveError> {
        let cause = self.abort_cause.clone()?;
        Some(CollectiveError::Aborted { rank, operation: OPERATION, cause })
    }

    /// The error of a rank that waited in vain for the activations of rank `missing`.
    pub fn no_activations(&self, rank: usize, missing: usize, waited_ms: u64) -> CollectiveError {
        CollectiveError::Timeout { rank, missing, operation: "recv", sequence: self.sequence, waited_ms }
    }

    /// The error of a rank whose patience is at its end.
    pub fn timeout(&mut self, rank: usize, waited_ms: u64) -> CollectiveError {
        let missing = self.arrived.iter().position(Option::is_none).unwrap_or(rank);
        CollectiveError::Timeout { rank, missing, operation: OPERATION, sequence: self.sequence, waited_ms }
    }
}
