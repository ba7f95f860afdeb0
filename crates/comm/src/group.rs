//! The CPU process group: agreement between the ranks of a replica about small things.

use crate::collective::CollectiveError;
use std::time::Duration;

/// Result of this module.
pub type Result<T> = std::result::Result<T, CollectiveError>;

/// How long a rank may wait for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// A peer that does not arrive in time is an error.
    Deadline(Duration),
    /// Idle: the others may legitimately be waiting for work. Only an abort ends the wait.
    Idle,
}

/// **Collective:** all ranks of the group call every method in the same order with equal sizes.
pub trait ProcessGroup: Send {
    /// This rank.
    fn rank(&self) -> usize;
    /// Ranks of the group.
    fn size(&self) -> usize;
    /// Returns when every rank has called it.
    fn barrier(&mut self, patience: Patience) -> Result<()>;
    /// Every rank's `send` (equal lengths, at most 64 KiB) in rank order into `recv`
    /// (`send.len() * size()` bytes).
    fn all_gather(&mut self, send: &[u8], recv: &mut [u8], patience: Patience) -> Result<()>;
    /// Copies rank `root`'s `data` to every rank.
    fn broadcast(&mut self, data: &mut [u8], root: usize, patience: Patience) -> Result<()>;
}

/// Some ranks of a larger group, evenly spaced, as a group of their own.
///
/// **Collective:** all parts of the larger group call the same methods at the same time with equal sizes, each for itself: what
/// travels, travels through all.
pub struct PartOf<'a> {
    whole: &'a mut dyn ProcessGroup,
    first: usize,
    size: usize,
    /// From one rank of the part to the next.
    stride: usize,
}

impl<'a> PartOf<'a> {
    /// The part of `whole` that the calling rank is in, when it is cut into parts of `size`. Panics when it cannot be.
    pub fn of(whole: &'a mut dyn ProcessGroup, size: usize) -> Self {
        assert!(size > 0 && whole.size().is_multiple_of(size), "{} ranks in parts of {size}", whole.size());
        let first = whole.rank() / size * size;
        Self { whole, first, size, stride: 1 }
    }

    /// The ranks with the calling rank's place in such parts, one of each. Panics when it cannot be cut so.
    pub fn across(whole: &'a mut dyn ProcessGroup, size: usize) -> Self {
        assert!(size > 0 && whole.size().is_multiple_of(size), "{} ranks in parts of {size}", whole.size());
        let (first, parts) = (whole.rank() % size, whole.size() / size);
        Self { whole, first, size: parts, stride: size }
    }

    /// Its first rank's number in the larger group.
    pub fn first(&self) -> usize {
        self.first
    }
}

impl ProcessGroup for PartOf<'_> {
    fn rank(&self) -> usize {
        (self.whole.rank() - self.first) / self.stride
    }

    fn size(&self) -> usize {
        self.size
    }

    fn barrier(&mut self, patience: Patience) -> Result<()> {
        self.whole.barrier(patience)
    }

    fn all_gather(&mut self, send: &[u8], recv: &mut [u8], patience: Patience) -> Result<()> {
        let mut all = vec![0; send.len() * self.whole.size()];
        self.whole.all_gather(send, &mut all, patience)?;
        for index in 0..self.size {
            let from = (self.first + index * self.stride) * send.len();
            recv[index * send.len()..][..send.len()].copy_from_slice(&all[from..][..send.len()]);
        }
        Ok(())
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize, patience: Patience) -> Result<()> {
        let mut all = vec![0; data.len() * self.size];
        self.all_gather(data, &mut all, patience)?;
        data.copy_from_slice(&all[root * data.len()..][..data.len()]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::{self, ShmOptions};

    #[test]
    fn parts_hear_their_own_ranks_only() {
        let ends = shm::as_threads(4, ShmOptions::for_ranks(4), |mut group, _| {
            let rank = group.rank() as u8;
            let mut part = PartOf::of(&mut group, 2);
            let mut heard = [0; 2];
            part.barrier(Patience::Idle)?;
            part.all_gather(&[rank], &mut heard, Patience::Idle)?;
            let mut word = [rank];
            part.broadcast(&mut word, 1, Patience::Idle)?;
            Ok::<_, CollectiveError>((part.rank(), part.size(), part.first(), heard, word[0]))
        });
        let ends: Vec<_> = ends.unwrap().into_iter().map(|end| end.unwrap().unwrap()).collect();
        let expected =
            [(0, 2, 0, [0, 1], 1), (1, 2, 0, [0, 1], 1), (0, 2, 2, [2, 3], 3), (1, 2, 2, [2, 3], 3)];
        assert_eq!(ends, expected);
    }

    #[test]
    fn parts_across_have_one_rank_of_each() {
        let ends = shm::as_threads(6, ShmOptions::for_ranks(6), |mut group, _| {
            let rank = group.rank() as u8;
            let mut part = PartOf::across(&mut group, 2);
            let mut heard = [0; 3];
            part.all_gather(&[rank], &mut heard, Patience::Idle)?;
            let mut word = [rank];
            part.broadcast(&mut word, 0, Patience::Idle)?;
            Ok::<_, CollectiveError>((part.rank(), part.size(), heard, word[0]))
        });
        let ends: Vec<_> = ends.unwrap().into_iter().map(|end| end.unwrap().unwrap()).collect();
        let (even, odd) = ([0, 2, 4], [1, 3, 5]);
        let expected = [
            (0, 3, even, 0),
            (0, 3, odd, 1),
            (1, 3, even, 0),
            (1, 3, odd, 1),
            (2, 3, even, 0),
            (2, 3, odd, 1),
        ];
        assert_eq!(ends, expected);
    }
}
