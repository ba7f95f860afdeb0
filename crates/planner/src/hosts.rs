//! A replica on several hosts: which ranks are where, what a step sends between hosts, and how long a link takes for it.
//!
//! Counted is what leaves the host that sends most, since a link carries both directions at once. On CPUs a TP group that
//! does not fit a host sends every part from rank to rank (`lockstep_comm::gloo`); on GPUs its sums go around a ring,
//! and a round of messages for each doubling of hosts is what they wait for at least. Stages pass the residual stream on
//! from each rank to the one in the same place. What ranks say of a step beside tensors (a few hundred bytes) is left out.

use crate::device::DeviceKind;
use crate::pipeline::Stage;
use crate::{Facts, Workload};
use lockstep_comm::shm::ONE_SHOT_BYTES_MAX;
use lockstep_core::shard::VocabShard;
use lockstep_core::{HostMap, StageLayers, Topology};
use serde::Serialize;
use std::ops::{AddAssign, Range};

/// Bytes of a logit.
pub(crate) const LOGIT_BYTES: f64 = 4.0;

/// What joins two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Each way.
    pub gbit_s: f64,
    /// From sending a small message to having it.
    pub latency_us: f64,
}

impl Default for Link {
    /// Ethernet as it is common between machines of one rack.
    fn default() -> Self {
        Self { gbit_s: 10.0, latency_us: 50.0 }
    }
}

/// What leaves the host that sends most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Traffic {
    /// Bytes.
    pub bytes: f64,
    /// Messages that wait for each other.
    pub rounds: f64,
}

impl Traffic {
    /// Milliseconds over a link.
    pub fn ms(&self, link: &Link) -> f64 {
        self.rounds * link.latency_us / 1e3 + self.bytes * 8.0 / (link.gbit_s * 1e6)
    }

    fn times(self, count: usize) -> Self {
        Self { bytes: self.bytes * count as f64, rounds: self.rounds * count as f64 }
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.rounds += other.rounds;
    }
}

/// The ranks of one replica, on its hosts.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    topology: Topology,
    map: HostMap,
    kind: DeviceKind,
}

impl Spread {
    /// Errors with the sentence of `serve` where the hosts cannot have equally many ranks.
    pub fn new(kind: DeviceKind, workload: &Workload, tp_size: usize) -> Result<Self, String> {
        let topology = Topology { tp_size, pp_size: workload.stages, dp_size: workload.replicas };
        Ok(Self { topology, map: HostMap::new(&topology, workload.hosts)?, kind })
    }

    fn ranks_of_stage(&self, pp_rank: usize) -> Range<usize> {
        pp_rank * self.topology.tp_size..(pp_rank + 1) * self.topology.tp_size
    }

    /// Whether the ranks of a stage lie on several hosts.
    pub fn crosses(&self, pp_rank: usize) -> bool {
        !self.map.shares_host(self.ranks_of_stage(pp_rank))
    }

    /// Ranks of a stage on each host that has some.
    fn members(&self, pp_rank: usize) -> Vec<usize> {
        let ranks = self.ranks_of_stage(pp_rank);
        let on = |host| {
            let own = self.map.ranks_of(host);
            ranks.end.min(own.end).saturating_sub(ranks.start.max(own.start))
        };
        (0..self.map.nnodes()).map(on).filter(|count| *count > 0).collect()
    }

    /// A sum of `bytes` over the ranks of a stage.
    pub fn sum(&self, pp_rank: usize, bytes: f64) -> Traffic {
        let n = self.topology.tp_size as f64;
        let ring = 2.0 * (n - 1.0) / n * bytes;
        let at_once = n == 2.0 || bytes <= ONE_SHOT_BYTES_MAX as f64;
        // Everything to everybody, or a shard to everybody and the sum of a shard.
        let (each, rounds) = if at_once { (bytes, 1.0) } else { (2.0 * bytes / n, 2.0) };
        self.exchange(pp_rank, each, rounds, (ring, 2.0))
    }

    /// Parts of `bytes` that every rank of a stage gets from every other.
    pub fn gather(&self, pp_rank: usize, bytes: f64) -> Traffic {
        let ring = (self.topology.tp_size as f64 - 1.0) * bytes;
        self.exchange(pp_rank, bytes, 1.0, (ring, 1.0))
    }

    /// `each` bytes from every rank of a stage to every other; on GPUs `ring` bytes from each host to the next.
    fn exchange(&self, pp_rank: usize, each: f64, rounds: f64, (ring, passes): (f64, f64)) -> Traffic {
        if !self.crosses(pp_rank) {
            return Traffic::default();
        }
        let members = self.members(pp_rank);
        match self.kind {
            DeviceKind::Gpu => Traffic { bytes: ring, rounds: passes * (members.len() as f64).log2().ceil() },
            DeviceKind::Cpu => {
                let pairs = |own: &usize| own * (self.topology.tp_size - own);
                let most = members.iter().map(pairs).max().unwrap_or_default();
                Traffic { bytes: most as f64 * each, rounds }
            }
        }
    }

    /// What stage `pp_rank` passes on to the next, `bytes` from each of its ranks.
    pub fn hop(&self, pp_rank: usize, bytes: f64) -> Traffic {
        let mut leaving = vec![0.0; self.map.nnodes()];
        for rank in self.ranks_of_stage(pp_rank) {
            let host = self.map.host_of(rank);
            if host != self.map.host_of(rank + self.topology.tp_size) {
                leaving[host] += bytes;
            }
        }
        let bytes = leaving.into_iter().fold(0.0, f64::max);
        Traffic { bytes, rounds: if bytes > 0.0 { 1.0 } else { 0.0 } }
    }

    /// All that a step of `tokens` tokens and `rows` rows of logits sends, through stages with `layers`.
    pub fn step(&self, facts: &Facts<'_>, layers: &[StageLayers], tokens: usize, rows: usize) -> Traffic {
        let config = facts.config;
        let stream = (tokens * config.hidden_size * self.kind.activation_bytes()) as f64;
        let vocab = VocabShard::new(config.vocab_size, 0, self.topology.tp_size).padded.len();
        let mut all = Traffic::default();
        for (pp_rank, stage) in layers.iter().enumerate() {
            all += self.sum(pp_rank, stream).times(sums(stage));
            if stage.has_logits() {
                all += self.gather(pp_rank, (rows * vocab) as f64 * LOGIT_BYTES);
            } else {
                all += self.hop(pp_rank, stream);
            }
        }
        all
    }
}

/// Sums over the ranks of a stage in a step: two a layer, and one of the embedding.
pub(crate) fn sums(stage: &StageLayers) -> usize {
    2 * stage.count() + usize::from(stage.embeds())
}

/// One host.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    /// Global ranks.
    pub ranks: Range<usize>,
    /// What they are called, in order.
    pub labels: Vec<String>,
    /// Weights, activations and buffers of all of them.
    pub committed_bytes: u64,
    /// KV of all of them, with the pool's pages.
    pub kv_bytes: u64,
}

/// The hosts of one choice.
#[derive(Clone, Debug, Serialize)]
pub struct Hosts {
    /// In order of `--node-rank`.
    pub hosts: Vec<Host>,
    /// Whether some TP group lies on several of them.
    pub tp_crosses: bool,
    /// Sent by a decode step of one request.
    pub decode_one: Traffic,
    /// Sent by decode steps that give each request of the load a token.
    pub decode_all: Traffic,
    /// Sent by a step with a full chunk of a prompt.
    pub prefill_chunk: Traffic,
}

impl Hosts {
    /// `stages` with `layers`, of which each rank of a stage holds what the stage says and the pool has `pages`.
    pub fn new(
        facts: &Facts<'_>,
        workload: &Workload,
        spread: &Spread,
        (layers, stages): (&[StageLayers], &[Stage]),
        pages: u64,
    ) -> Self {
        let places: Vec<_> = spread.topology.places().collect();
        let host = |node_rank| {
            let ranks = spread.map.ranks_of(node_rank);
            let of_ranks = || places[ranks.clone()].iter().map(|place| &stages[place.pp_rank].memory);
            let page_size = workload.page_size as u64;
            Host {
                labels: places[ranks.clone()].iter().map(|place| place.label()).collect(),
                committed_bytes: of_ranks().map(|memory| memory.committed_bytes()).sum(),
                kv_bytes: of_ranks().map(|memory| memory.kv_bytes_per_token * page_size * pages).sum(),
                ranks,
            }
        };
        let step = |tokens, rows| spread.step(facts, layers, tokens, rows);
        let in_flight = workload.concurrency.min(layers.len());
        Self {
            hosts: (0..spread.map.nnodes()).map(host).collect(),
            tp_crosses: (0..layers.len()).any(|pp_rank| spread.crosses(pp_rank)),
            decode_one: step(1, 1),
            // Each of the steps in flight has an even part of the requests.
            decode_all: step(
                workload.concurrency.div_ceil(in_flight),
                workload.concurrency.div_ceil(in_flight),
            )
            .times(in_flight),
            prefill_chunk: step(workload.chunk.min(workload.context), 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(kind: DeviceKind, (tp_size, stages, hosts): (usize, usize, usize)) -> Spread {
        let workload = Workload { stages, hosts, ..Workload::default_for(kind, 4096) };
        Spread::new(kind, &workload, tp_size).unwrap()
    }

    #[test]
    fn a_link_takes_its_latency_and_its_rate() {
        let link = Link { gbit_s: 10.0, latency_us: 50.0 };
        assert_eq!(Traffic { bytes: 1.25e6, rounds: 2.0 }.ms(&link), 0.1 + 1.0);
    }

    #[test]
    fn ranks_of_one_host_send_nothing_and_others_what_they_send() {
        let (cpu, gpu) = (DeviceKind::Cpu, DeviceKind::Gpu);
        // tp inside, pp across: nothing but the hop, of both ranks of the stage.
        let inside = spread(cpu, (2, 2, 2));
        assert!(!inside.crosses(0) && !inside.crosses(1));
        assert_eq!(inside.sum(0, 1e6), Traffic::default());
        assert_eq!(inside.hop(0, 1e3), Traffic { bytes: 2e3, rounds: 1.0 });
        // Two ranks exchange everything; four on two hosts a quarter of it, each with two over there, twice.
        assert_eq!(spread(cpu, (2, 1, 2)).sum(0, 1e6), Traffic { bytes: 1e6, rounds: 1.0 });
        assert_eq!(spread(cpu, (4, 1, 2)).sum(0, 1e6), Traffic { bytes: 4.0 * 0.5e6, rounds: 2.0 });
        assert_eq!(spread(cpu, (4, 1, 2)).sum(0, 1e3), Traffic { bytes: 4.0 * 1e3, rounds: 1.0 });
        assert_eq!(spread(cpu, (4, 1, 2)).gather(0, 1e3), Traffic { bytes: 4e3, rounds: 1.0 });
        // A ring: 2 (n - 1) / n of the bytes leave each host.
        assert_eq!(spread(gpu, (4, 1, 2)).sum(0, 1e6), Traffic { bytes: 1.5e6, rounds: 2.0 });
        assert_eq!(spread(gpu, (8, 1, 4)).sum(0, 1e6), Traffic { bytes: 1.75e6, rounds: 4.0 });
        // Six ranks on three hosts: of the two stages of three the middle host has one rank each.
        let uneven = spread(cpu, (3, 2, 3));
        assert!(uneven.crosses(0) && uneven.crosses(1));
        assert_eq!((uneven.members(0), uneven.members(1)), (vec![2, 1], vec![1, 2]));
        // Ranks 0 and 1 reach 3 and 4 on hosts 1 and 2, rank 2 reaches 5.
        assert_eq!(uneven.hop(0, 1e3), Traffic { bytes: 2e3, rounds: 1.0 });
    }

    #[test]
    fn hosts_that_do_not_divide_the_ranks_are_refused_as_serve_does() {
        let workload = Workload { hosts: 3, ..Workload::default_for(DeviceKind::Cpu, 4096) };
        let refusal = Spread::new(DeviceKind::Cpu, &workload, 2).unwrap_err();
        assert!(refusal.contains("--nnodes 3 does not divide the 2 ranks"), "{refusal}");
    }
}
