//! Latencies of barrier and all-reduce, for `lockstep bench comm` and `examples/bench_comm.rs`.

use crate::collective::{Collective, Result};
use crate::group::{Patience, ProcessGroup};
use std::time::Instant;

/// One measured operation.
#[derive(Clone, Debug)]
pub struct Latency {
    /// Which operation.
    pub operation: &'static str,
    /// Payload of one rank.
    pub bytes: usize,
    /// Rounds measured.
    pub rounds: usize,
    /// Median over rounds, of this rank.
    pub p50_ns: u64,
    /// 99th percentile over rounds, of this rank.
    pub p99_ns: u64,
}

impl std::fmt::Display for Latency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:<10} {:>8} B  {:>6} rounds  p50 {:>8.1} us  p99 {:>8.1} us",
            self.operation,
            self.bytes,
            self.rounds,
            self.p50_ns as f64 / 1e3,
            self.p99_ns as f64 / 1e3
        )
    }
}

/// Measures barrier, 8 KiB and 1 MiB all-reduce. **Collective.** A tenth of the rounds is spent on
/// warming up; sums are checked. Panics when a sum is wrong.
pub fn measure(
    group: &mut dyn ProcessGroup,
    collective: &dyn Collective,
    rounds: usize,
) -> Result<Vec<Latency>> {
    let mut rows = vec![measure_barrier(group, rounds)?];
    for (bytes, rounds) in [(8 << 10, rounds), (1 << 20, rounds.div_ceil(20))] {
        rows.push(measure_all_reduce(group, collective, bytes, rounds)?);
    }
    Ok(rows)
}

fn measure_barrier(group: &mut dyn ProcessGroup, rounds: usize) -> Result<Latency> {
    let mut nanos = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let start = Instant::now();
        group.barrier(Patience::Idle)?;
        nanos.push(start.elapsed().as_nanos() as u64);
    }
    Ok(summarise("barrier", 0, nanos))
}

fn measure_all_reduce(
    group: &mut dyn ProcessGroup,
    collective: &dyn Collective,
    bytes: usize,
    rounds: usize,
) -> Result<Latency> {
    let mut x = vec![0f32; bytes / 4];
    let ranks = collective.size();
    let sum = (ranks * (ranks + 1) / 2) as f32;
    let mut nanos = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        x.fill(collective.rank() as f32 + 1.0);
        // Start together, as ranks that just finished equal shares of a layer do.
        group.barrier(Patience::Idle)?;
        let start = Instant::now();
        collective.all_reduce_f32(&mut x)?;
        nanos.push(start.elapsed().as_nanos() as u64);
        assert!(x.iter().all(|v| *v == sum), "all_reduce of {bytes} bytes gave a wrong sum");
    }
    Ok(summarise("all_reduce", bytes, nanos))
}

fn summarise(operation: &'static str, bytes: usize, mut nanos: Vec<u64>) -> Latency {
    let mut nanos = nanos.split_off(nanos.len() / 10);
    nanos.sort_unstable();
    let at = |percent: usize| nanos.get(nanos.len() * percent / 100).copied().unwrap_or(0);
    Latency { operation, bytes, rounds: nanos.len(), p50_ns: at(50), p99_ns: at(99) }
}
