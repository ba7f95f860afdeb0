//! Links: first in, first out each, in any order across.

use crate::random::Random;
use crate::scenario::Timing;

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// From a tokenizer to rank 0; the number is the tokenizer's.
    Tokenizer(usize),
    /// From the api to rank 0.
    ApiToRank,
    /// From rank 0 to a follower.
    Broadcast(usize),
    /// From rank 0 to the detokenizer.
    Detokenizer,
    /// From rank 0 to the api.
    Api,
}

/// When messages arrive.
pub struct Network {
    /// Per link: when its last message arrives.
    busy_until_us: Vec<(Link, u64)>,
}

impl Network {
    /// Idle links.
    pub fn new() -> Self {
        Self { busy_until_us: Vec::new() }
    }

    /// When a message sent now arrives: after a random delay, never before one sent earlier on this link.
    pub fn arrival_us(&mut self, link: Link, now_us: u64, timing: &Timing, random: &mut Random) -> u64 {
        let stalls = random.one_in(timing.stall_one_in);
        let delay_us = random.between(0, timing.link_us) * if stalls { 30 } else { 1 };
        let at = match self.busy_until_us.iter().position(|(other, _)| *other == link) {
            Some(at) => at,
            None => {
                self.busy_until_us.push((link, 0));
                self.busy_until_us.len() - 1
            }
        };
        let busy = &mut self.busy_until_us[at].1;
        *busy = (*busy).max(now_us + delay_us);
        *busy
    }
}
