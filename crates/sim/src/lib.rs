//! A whole replica in one thread, decided by a seed: the server's own rank loop, scheduler and cache with
//! simulated links, group, clock and device, and clients that check every answer.
//!
//! [`run_seed`] is one run. A finding prints the command that replays it. Everything is explained in
//! `docs/simulation.md`; follows TigerBeetle's `vopr` and FoundationDB's simulation.
//!
//! **Invariant:** a run depends on its seed alone (and on the number of ranks, if given): no thread, clock,
//! address or hash-map order. Two runs of a seed have the same event log.
//!
//! Reading order: [`scenario`] (what a seed decides), [`rank`] (the loop in a coroutine), [`simulation`] (the
//! world), [`device`] and [`oracle`] (the fake model), [`client`] and [`checks`] (what is checked).

mod checks;
mod client;
mod device;
mod group;
mod log;
mod network;
mod oracle;
mod random;
mod rank;
mod scenario;
mod simulation;

pub use log::{Action, Actor, Entry, EventLog};

use random::Random;
use scenario::Scenario;
use simulation::Simulation;

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Ranks; `None` lets the seed decide (1 to 6).
    pub ranks: Option<usize>,
    /// Keep all events instead of the last ones.
    pub keep_log: bool,
}

/// What a run came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Runs.
    pub seeds: u64,
    /// Steps of all ranks' loops.
    pub rank_steps: u64,
    /// Requests sent.
    pub requests: u64,
    /// Tokens that clients heard.
    pub tokens: u64,
    /// Requests that ended by an abort.
    pub aborted: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Requests put back because pages ran out.
    pub retractions: u64,
    /// Prompt tokens found in the cache.
    pub hit_tokens: u64,
    /// Pages evicted.
    pub evicted_pages: u64,
    /// Requests that waited for a prefix in flight.
    pub prefix_waits: u64,
    /// Ranks killed or stopped.
    pub faults: u64,
}

impl std::ops::AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.seeds += other.seeds;
        self.rank_steps += other.rank_steps;
        self.requests += other.requests;
        self.tokens += other.tokens;
        self.aborted += other.aborted;
        self.refused += other.refused;
        self.retractions += other.retractions;
        self.hit_tokens += other.hit_tokens;
        self.evicted_pages += other.evicted_pages;
        self.prefix_waits += other.prefix_waits;
        self.faults += other.faults;
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} seeds, {} rank steps, {} requests ({} aborted, {} refused), {} tokens, {} retractions, {} hit \
             tokens, {} evicted pages, {} prefix waits, {} faults",
            self.seeds,
            self.rank_steps,
            self.requests,
            self.aborted,
            self.refused,
            self.tokens,
            self.retractions,
            self.hit_tokens,
            self.evicted_pages,
            self.prefix_waits,
            self.faults
        )
    }
}

/// A run that went well.
pub struct Run {
    /// What it came to.
    pub totals: Totals,
    /// Its events.
    pub log: EventLog,
}

/// Something that must not happen, and how to see it again.
#[derive(Debug, thiserror::Error)]
#[error(
    "seed {seed}, rank 0's loop step {step}: {what}\n  events before it:\n{events}\n  scenario: {scenario}\n  replay \
     with: cargo xtask sim --seed {seed}{ranks}"
)]
pub struct Finding {
    /// The seed.
    pub seed: u64,
    /// Steps that rank 0's loop had done.
    pub step: usize,
    /// What was found.
    pub what: String,
    events: String,
    scenario: String,
    ranks: String,
}

/// Runs one seed to its end.
pub fn run_seed(seed: u64, options: Options) -> Result<Run, Box<Finding>> {
    let mut random = Random::new(seed);
    let scenario = Scenario::of(&mut random, options.ranks);
    let mut simulation = Simulation::new(scenario.clone(), random, options.keep_log);
    match simulation.run() {
        Ok(()) => {
            simulation.totals.seeds = 1;
            Ok(Run { totals: simulation.totals, log: simulation.log })
        }
        Err(what) => {
            let events: Vec<String> = simulation.log.entries().map(|e| format!("    {e}")).collect();
            let described = Scenario { requests: Vec::new(), ..scenario };
            Err(Box::new(Finding {
                seed,
                step: simulation.step(),
                what,
                events: events.join("\n"),
                scenario: format!("{described:?}"),
                ranks: options.ranks.map_or(String::new(), |ranks| format!(" --ranks {ranks}")),
            }))
        }
    }
}

/// Steps of the loop within which all requests must be done, however unlucky: every token may be computed
/// several times, alone.
fn loop_steps_max(oracle: &device::Oracle) -> usize {
    let tokens: usize = oracle.values().map(|expected| expected.tokens.len() + 2).sum();
    10 * tokens + 1000
}
