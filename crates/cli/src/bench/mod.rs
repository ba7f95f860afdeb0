//! `lockstep bench`: what this machine can do, and what the backends make of it.

mod comm;
mod cpu;
mod decode;
mod engine;
mod percentiles;
mod random;
mod serve;

pub use comm::{comm, few_sums};
pub use cpu::cpu;
pub use decode::decode;
pub use engine::{latency, offline};
pub use serve::serve;

use crate::error::{CliError, Result};
use crate::flags::model::{DtypeFlag, WeightFlags};
use crate::flags::{DecodeFlags, HwFlags};
use crate::output::say_line;
use lockstep_backend::cpu::probe;
use lockstep_comm::CollectiveError;
use lockstep_comm::bench::Latency;
use lockstep_comm::shm::{self, ShmOptions};
use lockstep_core::ExitCode;

/// Bytes read by the bandwidth probe: larger than any cache.
const PROBE_BYTES: usize = 1 << 30;
/// Rounds of each collective.
const COLLECTIVE_ROUNDS: usize = 20_000;
/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Measured read bandwidth in GB/s.
pub fn bandwidth(threads: usize, huge: bool) -> Result<f64> {
    probe::bandwidth_gbs(threads, PROBE_BYTES, huge).map_err(CliError::with(ExitCode::Memory))
}

/// Prints bandwidth, FMA rate and collective times.
pub fn hardware(flags: &HwFlags) -> Result<()> {
    let mut threads = vec![1];
    threads.extend(flags.threads.or(Some(cores())).filter(|&n| n > 1));
    say_line(format_args!(
        "{:>7}  {:>18}  {:>18}  {:>15}  {:>15}",
        "threads", "read GB/s (huge)", "read GB/s (4 KiB)", "f32 FMA GFLOP/s", "int8 dot GOP/s"
    ))?;
    for &n in &threads {
        say_line(format_args!(
            "{n:>7}  {:>18.1}  {:>18.1}  {:>15.0}  {:>15.0}",
            bandwidth(n, true)?,
            bandwidth(n, false)?,
            probe::fma_gflops(n),
            probe::dot_gops(n)
        ))?;
    }
    say_line(format_args!("\nshared memory, two threads of this process:"))?;
    for row in two_ranks(COLLECTIVE_ROUNDS)? {
        say_line(format_args!("{row}"))?;
    }
    let Some(model) = &flags.model else { return Ok(()) };
    say_line("")?;
    decode(&DecodeFlags {
        model: model.clone(),
        threads: flags.threads,
        tokens: 64,
        prompt: 512,
        batch: 1,
        device: "cpu".into(),
        weights: WeightFlags { dtype: DtypeFlag { dtype: "auto".into() }, cpu_exact: false, quantize: None },
        dummy_weights: false,
    })
}

/// Latencies of barrier and all-reduce between two ranks, as threads with a rank's shared memory.
pub fn two_ranks(rounds: usize) -> Result<Vec<Latency>> {
    let internal = CliError::with::<CollectiveError>(ExitCode::Internal);
    let measure = |mut group, collective| lockstep_comm::bench::measure(&mut group, &collective, rounds);
    let ends = shm::as_threads(2, ShmOptions::for_ranks(2), measure).map_err(&internal)?;
    let panicked = |_| CliError::new(ExitCode::Internal, "a rank panicked");
    let rows: Result<Vec<_>> =
        ends.into_iter().map(|end| end.map_err(panicked)?.map_err(&internal)).collect();
    Ok(rows?.swap_remove(0))
}
