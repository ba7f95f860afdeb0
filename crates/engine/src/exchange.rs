//! What all ranks agree on before each step: how many messages belong to it, what time it is, and
//! that they took the same decisions in the step before.
//!
//! One all-gather of [`RECORD_BYTES`] per rank and step. A digest mismatch stops the server with
//! one line naming step, rank and the first field that differs: what would be a deadlock hours
//! later becomes an error now.
//!
//! In a pipeline also what the last stage sampled, which all ranks are told in the order of steps.

use crate::{EngineError, Result};
use lockstep_comm::group::{Patience, ProcessGroup};
use lockstep_core::{RequestId, TokenId};
use lockstep_scheduler::StepDigest;
use lockstep_wire::{StageWork, StepLogprobs};
use std::time::Duration;

/// Bytes each rank contributes: nine little-endian u64 (messages, stamp, prepared, stage times, digest words).
pub const RECORD_BYTES: usize = 72;

/// What rank 0 decides for everyone (other ranks pass zeros), and what every rank reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Announcement {
    /// Broadcasts that belong to this step.
    pub messages: u32,
    /// Rank 0's clock, the only one that schedulers see.
    pub stamp_ms: u64,
    /// Grammars that this rank has prepared; in the answer, the least of all ranks.
    pub prepared: u64,
    /// In a pipeline: how long this rank's device computed, of the time in which there was work; for reports.
    pub times: StageWork,
}

/// The per-step agreement of one rank.
pub struct Exchange {
    received: Vec<u8>,
}

impl Exchange {
    /// For a group of `size` ranks.
    pub fn new(size: usize) -> Self {
        Self { received: vec![0; RECORD_BYTES * size] }
    }

    /// Rank 0 announces; everyone compares digests. Returns rank 0's announcement, with what all ranks have
    /// prepared.
    ///
    /// **Collective: all ranks of the replica, once per step.**
    pub fn agree(
        &mut self,
        group: &mut dyn ProcessGroup,
        mine: Announcement,
        digest: &StepDigest,
        patience: Patience,
    ) -> Result<Announcement> {
        group.all_gather(&encode(mine, digest), &mut self.received, patience)?;
        let (records, _) = self.received.as_chunks::<RECORD_BYTES>();
        let mut prepared = mine.prepared;
        for (rank, record) in records.iter().enumerate() {
            let (announced, theirs) = decode(record);
            prepared = prepared.min(announced.prepared);
            if let Some(field) = digest.first_difference(&theirs) {
                return Err(EngineError::Diverged(format!(
                    "ranks diverged at step {}: rank {rank} disagrees with rank {} about {field} ({:x?} against \
                     {:x?}); answers can no longer be trusted, so the server stops",
                    digest.step,
                    group.rank(),
                    theirs.to_words(),
                    digest.to_words(),
                )));
            }
        }
        let primary = records.first().map_or(mine, |primary| decode(primary).0);
        Ok(Announcement { prepared, ..primary })
    }

    /// What each rank announced last of its stage's times; nothing of note before the first step.
    pub fn stage_work(&self) -> impl Iterator<Item = StageWork> {
        self.received.as_chunks::<RECORD_BYTES>().0.iter().map(|record| decode(record).0.times)
    }
}

/// The rank whose tokens all ranks of a pipeline take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSource {
    /// Its number in the replica.
    pub rank: usize,
    /// How long the others wait for its stage to have computed a step.
    pub patience: Duration,
}

/// What the oldest step in flight will come to, known to all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens that it samples.
    pub tokens: usize,
    /// Some row wants log-probabilities.
    pub has_logprobs: bool,
}

impl TokenSource {
    /// Copies the step's tokens, and appends its log-probabilities, from this source to all other ranks; on the source
    /// `logprobs` are those of this step. A step that samples nothing costs nothing.
    ///
    /// **Collective: all ranks of the replica, in the order of steps.**
    pub fn share(
        &self,
        group: &mut dyn ProcessGroup,
        shape: StepShape,
        tokens: &mut Vec<TokenId>,
        logprobs: &mut Vec<(RequestId, StepLogprobs)>,
    ) -> Result<()> {
        let (is_source, patience) = (group.rank() == self.rank, Patience::Deadline(self.patience));
        if is_source && tokens.len() != shape.tokens {
            let problem = format!("a step sampled {} tokens, {} were planned", tokens.len(), shape.tokens);
            return Err(EngineError::Internal(problem));
        }
        if shape.tokens > 0 {
            let mut bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            bytes.resize(4 * shape.tokens, 0);
            group.broadcast(&mut bytes, self.rank, patience)?;
            let told: Vec<_> = bytes.as_chunks::<4>().0.iter().map(|t| TokenId::from_le_bytes(*t)).collect();
            // Whoever sampled too must have sampled the same: their next tokens depend on it.
            if !tokens.is_empty() && *tokens != told {
                return Err(EngineError::Diverged(format!(
                    "ranks diverged: rank {} sampled {tokens:?} and rank {} {told:?} in the same step; answers can no \
                     longer be trusted, so the server stops",
                    group.rank(),
                    self.rank
                )));
            }
            *tokens = told;
        }
        if !shape.has_logprobs {
            return Ok(());
        }
        let internal = |error: postcard::Error| EngineError::Internal(format!("log-probabilities: {error}"));
        let mut bytes = match is_source {
            true => postcard::to_allocvec(logprobs).map_err(internal)?,
            false => Vec::new(),
        };
        let mut len = (bytes.len() as u64).to_le_bytes();
        group.broadcast(&mut len, self.rank, patience)?;
        bytes.resize(u64::from_le_bytes(len) as usize, 0);
        group.broadcast(&mut bytes, self.rank, patience)?;
        if !is_source {
            let told: Vec<_> = postcard::from_bytes(&bytes).map_err(internal)?;
            logprobs.extend(told);
        }
        Ok(())
    }
}

fn encode(announcement: Announcement, digest: &StepDigest) -> [u8; RECORD_BYTES] {
    let [step, plan, pages, tokens] = digest.to_words();
    let Announcement { messages, stamp_ms, prepared, times } = announcement;
    let StageWork { computed_us, work_us } = times;
    let words = [u64::from(messages), stamp_ms, prepared, computed_us, work_us, step, plan, pages, tokens];
    let mut record = [0; RECORD_BYTES];
    for (slot, word) in record.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *slot = word.to_le_bytes();
    }
    record
}

fn decode(record: &[u8; RECORD_BYTES]) -> (Announcement, StepDigest) {
    let mut words = [0; RECORD_BYTES / 8];
    for (word, bytes) in words.iter_mut().zip(record.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    let [messages, stamp_ms, prepared, computed_us, work_us, digest @ ..] = words;
    let times = StageWork { computed_us, work_us };
    (Announcement { messages: messages as u32, stamp_ms, prepared, times }, StepDigest::from_words(digest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::group;

    /// A group of two whose other member always says the same.
    struct Pair {
        other: [u8; RECORD_BYTES],
    }

    impl ProcessGroup for Pair {
        fn rank(&self) -> usize {
            0
        }
        fn size(&self) -> usize {
            2
        }
        fn barrier(&mut self, _: Patience) -> group::Result<()> {
            Ok(())
        }
        fn all_gather(&mut self, send: &[u8], recv: &mut [u8], _: Patience) -> group::Result<()> {
            recv[..RECORD_BYTES].copy_from_slice(send);
            recv[RECORD_BYTES..].copy_from_slice(&self.other);
            Ok(())
        }
        fn broadcast(&mut self, _: &mut [u8], _: usize, _: Patience) -> group::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn rank_0_announces_and_a_difference_is_named() {
        let digest = StepDigest { step: 7, plan_hash: 1, page_hash: 2, token_hash: 3 };
        let mine = Announcement { messages: 5, stamp_ms: 1 << 40, prepared: 3, times: StageWork::default() };
        let times = StageWork { computed_us: 3, work_us: 1 << 33 };
        let theirs = Announcement { prepared: 2, times, ..Announcement::default() };
        let mut group = Pair { other: encode(theirs, &digest) };
        let mut exchange = Exchange::new(2);
        let agreed = exchange.agree(&mut group, mine, &digest, Patience::Idle).unwrap();
        assert_eq!(agreed, Announcement { prepared: 2, ..mine });
        assert_eq!(exchange.stage_work().collect::<Vec<_>>(), [StageWork::default(), times]);
        let other = StepDigest { page_hash: 9, token_hash: 8, ..digest };
        group.other = encode(Announcement::default(), &other);
        let message =
            Exchange::new(2).agree(&mut group, mine, &digest, Patience::Idle).unwrap_err().to_string();
        assert!(
            message.contains("step 7") && message.contains("rank 1") && message.contains("page_hash"),
            "{message}"
        );
    }
}
