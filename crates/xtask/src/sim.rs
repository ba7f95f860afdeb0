//! `cargo xtask sim`: the simulator over many seeds, on all cores, until the time is up or something is found.

use clap::Args;
use lockstep_sim::{Options, Totals, run_seed};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Flags of `cargo xtask sim`.
#[derive(Args)]
pub struct SimArguments {
    /// Run new seeds for this long.
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// The first seed; without --seconds, the only one.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Ranks of every run; the seed decides if not given.
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u64).range(1..=64))]
    ranks: Option<u64>,
    /// Threads, each with runs of its own; all cores if not given.
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: Option<u64>,
    /// Print every event of a single seed.
    #[arg(long, requires = "seed", conflicts_with = "seconds")]
    events: bool,
}

/// Runs it; the exit code is 1 when something was found.
pub fn run(arguments: &SimArguments) -> ExitCode {
    let ranks = arguments.ranks.map(|ranks| ranks as usize);
    if let (Some(seed), None) = (arguments.seed, arguments.seconds) {
        return run_one(seed, Options { ranks, keep_log: arguments.events });
    }
    let seconds = arguments.seconds.unwrap_or(10);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let hunt = Hunt {
        next_seed: AtomicU64::new(arguments.seed.unwrap_or(0)),
        is_over: AtomicBool::new(false),
        totals: Mutex::default(),
    };
    let start = Instant::now();
    let end = start + Duration::from_secs(seconds);
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads.unwrap_or(cores) {
            scope.spawn(|| hunt.work(Options { ranks, keep_log: false }, end));
        }
    });
    let totals = hunt.totals.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    let found = hunt.is_over.into_inner();
    let verdict = if found { "stopped at a finding" } else { "no finding" };
    println!("{totals}\n{verdict} in {:.1} s", start.elapsed().as_secs_f64());
    if found { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn run_one(seed: u64, options: Options) -> ExitCode {
    match run_seed(seed, options) {
        Ok(run) => {
            if options.keep_log {
                run.log.entries().for_each(|entry| println!("{entry}"));
            }
            println!("{}\nno finding; event hash {:016x}", run.totals, run.log.hash());
            ExitCode::SUCCESS
        }
        Err(finding) => {
            println!("{finding}");
            ExitCode::FAILURE
        }
    }
}

/// What the threads share.
struct Hunt {
    next_seed: AtomicU64,
    is_over: AtomicBool,
    totals: Mutex<Totals>,
}

impl Hunt {
    fn work(&self, options: Options, end: Instant) {
        let mut mine = Totals::default();
        while Instant::now() < end && !self.is_over.load(Ordering::Relaxed) {
            let seed = self.next_seed.fetch_add(1, Ordering::Relaxed);
            match run_seed(seed, options) {
                Ok(run) => mine += run.totals,
                Err(finding) => {
                    println!("{finding}\n");
                    self.is_over.store(true, Ordering::Relaxed);
                }
            }
        }
        *self.totals.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) += mine;
    }
}
