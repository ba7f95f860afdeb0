//! The waiting requests, and the bound on how often one may be overtaken.
//!
//! **Invariant:** once [`OVERTAKEN_MAX`] requests that arrived later were admitted before a waiting one,
//! nothing is admitted until it is (or it leaves). So neither a flood of small requests, nor of cached ones,
//! nor of higher priorities starves anybody.

use crate::entry::{Precedence, Slot};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Admissions of later arrivals that a waiting request tolerates.
pub const OVERTAKEN_MAX: u32 = 64;

/// Waiting requests in order of service.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Queue {
    /// Priority, then retracted ones (false) before new ones, then arrival.
    order: BTreeSet<(Reverse<i32>, bool, u64, Slot)>,
    by_arrival: BTreeMap<u64, Waiting>,
    /// Arrivals that were overtaken too often.
    aged: BTreeSet<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Waiting {
    slot: Slot,
    priority: i32,
    is_new: bool,
    overtaken: u32,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.by_arrival.len()
    }

    pub fn contains(&self, slot: Slot, precedence: Precedence) -> bool {
        self.by_arrival.get(&precedence.1).is_some_and(|w| w.slot == slot)
    }

    /// Adds a request behind all of its priority, or (`is_new` false: retracted) before all new ones of it.
    pub fn push(&mut self, slot: Slot, (Reverse(priority), arrival): Precedence, is_new: bool) {
        self.order.insert((Reverse(priority), is_new, arrival, slot));
        self.by_arrival.insert(arrival, Waiting { slot, priority, is_new, overtaken: 0 });
    }

    /// Takes a request out without admitting it.
    pub fn remove(&mut self, (_, arrival): Precedence) {
        let w = self.by_arrival.remove(&arrival).expect("invariant: a waiting request is in the queue");
        self.order.remove(&(Reverse(w.priority), w.is_new, arrival, w.slot));
        self.aged.remove(&arrival);
    }

    /// Takes a request out for admission and counts it against all that arrived earlier.
    ///
    /// Amortised cheap: a request is counted at most [`OVERTAKEN_MAX`] times before it blocks others.
    pub fn admit(&mut self, precedence: Precedence) {
        self.remove(precedence);
        for (&arrival, waiting) in self.by_arrival.range_mut(..precedence.1) {
            waiting.overtaken += 1;
            if waiting.overtaken >= OVERTAKEN_MAX {
                self.aged.insert(arrival);
            }
        }
    }

    /// The request that must be admitted next, before any other, if one was overtaken too often.
    pub fn aged(&self) -> Option<Slot> {
        self.aged.first().map(|arrival| self.by_arrival[arrival].slot)
    }

    /// Waiting requests in order of service.
    pub fn iter(&self) -> impl Iterator<Item = Slot> {
        self.order.iter().map(|&(_, _, _, slot)| slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(queue: &Queue) -> Vec<Slot> {
        queue.iter().collect()
    }

    #[test]
    fn priority_then_retracted_then_arrival() {
        let mut queue = Queue::default();
        queue.push(0, (Reverse(0), 10), true);
        queue.push(1, (Reverse(0), 11), true);
        queue.push(2, (Reverse(5), 12), true);
        queue.push(3, (Reverse(0), 14), false);
        queue.push(4, (Reverse(0), 13), false);
        assert_eq!(order(&queue), [2, 4, 3, 0, 1]);
        queue.remove((Reverse(0), 13));
        assert_eq!(order(&queue), [2, 3, 0, 1]);
    }

    #[test]
    fn a_request_overtaken_too_often_goes_first() {
        let mut queue = Queue::default();
        queue.push(0, (Reverse(-1), 0), true);
        for arrival in 1..=u64::from(OVERTAKEN_MAX) {
            assert_eq!(queue.aged(), None, "before arrival {arrival}");
            queue.push(1, (Reverse(0), arrival), true);
            queue.admit((Reverse(0), arrival));
        }
        assert_eq!(queue.aged(), Some(0));
        queue.admit((Reverse(-1), 0));
        assert_eq!((queue.aged(), queue.len()), (None, 0));
    }
}
