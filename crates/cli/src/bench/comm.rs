//! `bench comm`: sums over the GPUs of a TP group by size, one shot, two shots and NCCL, and where to change over.

use crate::error::{CliError, Result};
use crate::flags::CommFlags;
use crate::flags::model::DtypeFlag;
use crate::logging;
use crate::output::say_line;
use lockstep_backend::cuda::{self, Sample, SumSize};
use lockstep_comm::NcclCollective;
use lockstep_comm::shm::{self, ShmOptions};
use lockstep_core::{DType, ExitCode, HostMap, Topology};
use lockstep_engine::gpu::{self, GpuPlan, JoinSpec, Joined};
use lockstep_engine::start::Groups;
use lockstep_engine::{DeviceConfig, EngineError};
use std::time::Duration;

/// How long a rank waits for another.
const PATIENCE: Duration = Duration::from_secs(30);
/// Columns of a plain sum, in bytes; its size is a multiple.
const PLAIN_ROW_BYTES: usize = 1024;
/// Names of the ways, as [`Sample::micros`] has them.
const WAYS: [&str; 3] = ["one shot", "two shots", "NCCL"];

/// Prints a line a size, and the switch points that follow.
pub fn comm(flags: &CommFlags) -> Result<()> {
    logging::init_command("bench", &flags.logging);
    let flag_error = CliError::with::<anyhow::Error>(ExitCode::Flags);
    let (plan, dtype) = checked(flags).map_err(&flag_error)?;
    let sizes = sizes(flags, dtype);
    let samples =
        measured(flags.tp, &plan, dtype, &sizes).map_err(|e| CliError::new(e.exit_code(), e.to_string()))?;
    let rows: Vec<(SumSize, Sample)> = sizes.into_iter().zip(samples).collect();
    if !flags.json {
        say_line(format_args!(
            "{:>6} {:>6} {:>5} {:>10}  {:>10} {:>10} {:>10}  {:<9} bits equal  error",
            "rows", "cols", "norm", "bytes", WAYS[0], WAYS[1], WAYS[2], "best"
        ))?;
    }
    for (size, sample) in &rows {
        if flags.json {
            say_line(format_args!("{}", json_of(flags, *size, sample)))?;
        } else {
            say_line(format_args!("{}", line_of(*size, sample)))?;
        }
    }
    if !flags.json {
        say_line(format_args!("{}", suggestion(&rows)))?;
    }
    match rows.iter().all(|(_, sample)| is_right(sample, dtype)) {
        true => Ok(()),
        false => {
            Err(CliError::new(ExitCode::Internal, "sums are wrong, or not the same on all ranks; see above"))
        }
    }
}

/// What a few sums over the first `ranks` GPUs take, for `lockstep doctor`: names and values. The end of a half layer of one
/// token and of 128, of 4,096 columns, and 64 MiB.
pub fn few_sums(ranks: usize) -> Result<Vec<(String, String)>> {
    let half_layer = |rows: usize| SumSize { rows, cols: 4096, with_norm: true };
    let large =
        SumSize { rows: 64 << 10, cols: PLAIN_ROW_BYTES / DType::Bf16.size_bytes(), with_norm: false };
    let sizes = [half_layer(1), half_layer(128), large];
    let samples = measured(ranks, &GpuPlan::default(), DType::Bf16, &sizes)
        .map_err(|e| CliError::new(e.exit_code(), e.to_string()))?;
    let line = |(size, sample): (&SumSize, &Sample)| {
        let what = if size.with_norm { "with add and norm" } else { "alone" };
        let times =
            (0..WAYS.len()).filter_map(|way| Some(format!("{} {:.1} us", WAYS[way], sample.micros[way]?)));
        let verdict = if is_right(sample, DType::Bf16) { "" } else { "; THE SUM IS WRONG" };
        let name = format!("sum of {ranks} GPUs, {} KiB {what}", sample.bytes >> 10);
        (name, format!("{}{verdict}", times.collect::<Vec<_>>().join(", ")))
    };
    Ok(sizes.iter().zip(&samples).map(line).collect())
}

fn checked(flags: &CommFlags) -> anyhow::Result<(GpuPlan, DType)> {
    anyhow::ensure!(flags.tp >= 2, "--tp {} sums nothing; give at least 2", flags.tp);
    anyhow::ensure!(
        flags.tokens.iter().chain(&flags.hidden).chain(&flags.kib).all(|n| *n > 0),
        "--tokens, --hidden and --kib are at least 1"
    );
    if let Some(hidden) = flags.hidden.iter().find(|hidden| !hidden.is_multiple_of(8)) {
        anyhow::bail!("--hidden {hidden} is no multiple of 8, which the kernels take");
    }
    let dtype = DtypeFlag { dtype: flags.dtype.clone() }.convert()?.unwrap_or(DType::Bf16);
    let topology = Topology::tensor_parallel(flags.tp);
    match flags.gpus.device(&flags.device, None, (&topology, &HostMap::single(&topology)))? {
        DeviceConfig::Cuda { gpus, .. } => Ok((gpus, dtype)),
        DeviceConfig::Cpu => anyhow::bail!(
            "--device {} has its collectives measured by `lockstep bench hw`; use cuda here",
            flags.device
        ),
    }
}

/// Ends of half layers first, then the sums they hold, then plain sums by size.
fn sizes(flags: &CommFlags, dtype: DType) -> Vec<SumSize> {
    let mut sizes = Vec::new();
    for with_norm in [true, false] {
        for &cols in &flags.hidden {
            sizes.extend(flags.tokens.iter().map(|&rows| SumSize { rows, cols, with_norm }));
        }
    }
    let cols = PLAIN_ROW_BYTES / dtype.size_bytes();
    let plain =
        flags.kib.iter().map(|kib| SumSize { rows: (kib << 10) / PLAIN_ROW_BYTES, cols, with_norm: false });
    sizes.extend(plain);
    sizes
}

/// Rank 0's samples; the ranks are threads.
fn measured(
    ranks: usize,
    plan: &GpuPlan,
    dtype: DType,
    sizes: &[SumSize],
) -> std::result::Result<Vec<Sample>, EngineError> {
    // SAFETY: no rank's thread has been started, and no other thread touches the environment.
    unsafe {
        if plan.share_gpu {
            cuda::load_kernels_at_once();
        }
        NcclCollective::prepare_environment();
    }
    let options = ShmOptions { deadline: PATIENCE, ranks_share_cores: false };
    let ends = shm::as_threads(ranks, options, |group, collective| {
        let groups = Groups { replica: Box::new(group), tensors: Box::new(collective), pipeline: None };
        let hosts = HostMap::single(&Topology::tensor_parallel(ranks));
        let join = JoinSpec { dtype, patience: PATIENCE, hosts, address: None, abort: None };
        let Joined { mut backend, mut groups } = gpu::join(plan, &join, groups)?;
        let mut sample = |size: &SumSize| backend.time_sums(&*groups.tensors, &mut *groups.replica, *size);
        sizes.iter().map(|size| sample(size).map_err(EngineError::from)).collect()
    })?;
    let panicked = |_| Err(EngineError::Internal("a rank panicked".into()));
    let mut ends: Vec<_> = ends.into_iter().map(|end| end.unwrap_or_else(panicked)).collect();
    // The cause rather than what followed from it on the other ranks.
    let is_cause =
        |end: &std::result::Result<_, EngineError>| end.as_ref().is_err_and(|e| !e.is_consequence());
    let at = ends.iter().position(is_cause).unwrap_or(0);
    ends.swap_remove(at)
}

/// Whether all ranks have the same bits and those of the exact sum, rounded.
fn is_right(sample: &Sample, dtype: DType) -> bool {
    let bound = match dtype {
        DType::Bf16 => 8e-3,
        DType::F16 => 1e-3,
        DType::F32 => 1e-6,
    };
    sample.is_equal && sample.error_max <= bound
}

/// The fastest way, as an index of [`WAYS`].
fn best(sample: &Sample) -> Option<usize> {
    let timed = (0..WAYS.len()).filter_map(|way| sample.micros[way].map(|micros| (way, micros)));
    timed.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(way, _)| way)
}

fn line_of(size: SumSize, sample: &Sample) -> String {
    let [one, two, nccl] = sample.micros.map(|m| m.map_or("-".to_owned(), |m| format!("{m:.2} us")));
    format!(
        "{:>6} {:>6} {:>5} {:>10}  {one:>10} {two:>10} {nccl:>10}  {:<9} {:<10}  {:.1e}",
        size.rows,
        size.cols,
        if size.with_norm { "yes" } else { "no" },
        sample.bytes,
        best(sample).map_or("-", |way| WAYS[way]),
        if sample.is_equal { "yes" } else { "NO" },
        sample.error_max
    )
}

fn json_of(flags: &CommFlags, size: SumSize, sample: &Sample) -> serde_json::Value {
    serde_json::json!({
        "tp": flags.tp, "dtype": flags.dtype, "rows": size.rows, "cols": size.cols, "with_norm": size.with_norm,
        "bytes": sample.bytes, "one_shot_us": sample.micros[0], "two_shot_us": sample.micros[1],
        "nccl_us": sample.micros[2], "bits_equal": sample.is_equal, "error": sample.error_max,
    })
}

/// Largest size up to which `wins` holds for every size measured.
fn largest(rows: &[(SumSize, Sample)], wins: impl Fn(&Sample) -> bool) -> Option<usize> {
    let first_lost = rows.iter().filter(|(_, s)| !wins(s)).map(|(_, s)| s.bytes).min();
    let won = rows.iter().map(|(_, s)| s.bytes).filter(|bytes| first_lost.is_none_or(|lost| *bytes < lost));
    won.max()
}

/// Where the measurement says to change over; those of sums with a norm count, where most of the time goes.
fn suggestion(rows: &[(SumSize, Sample)]) -> String {
    let sentence = |what: &str, rows: &[(SumSize, Sample)]| {
        let kib = |bytes: Option<usize>| bytes.map_or("no size".into(), |b| format!("{} KiB", b >> 10));
        let one = largest(rows, |sample| best(sample) == Some(0));
        let own = largest(rows, |sample| best(sample) != Some(2));
        format!("{what}: one shot is the fastest up to {}, a kernel of ours up to {}", kib(one), kib(own))
    };
    let (norms, plain): (Vec<_>, Vec<_>) = rows.iter().cloned().partition(|(size, _)| size.with_norm);
    format!("{}\n{}", sentence("with norm", &norms), sentence("plain", &plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kib: usize, micros: [Option<f64>; 3]) -> (SumSize, Sample) {
        let size = SumSize { rows: 1, cols: kib << 9, with_norm: true };
        (size, Sample { bytes: kib << 10, micros, is_equal: true, error_max: 0.0 })
    }

    #[test]
    fn the_switch_points_are_the_last_sizes_before_another_way_wins() {
        let rows = [
            row(8, [Some(3.0), Some(5.0), Some(9.0)]),
            row(256, [Some(6.0), Some(7.0), Some(10.0)]),
            row(1024, [Some(12.0), Some(9.0), Some(14.0)]),
            row(8192, [Some(80.0), Some(50.0), Some(48.0)]),
        ];
        assert_eq!(largest(&rows, |sample| best(sample) == Some(0)), Some(256 << 10));
        assert_eq!(largest(&rows, |sample| best(sample) != Some(2)), Some(1024 << 10));
        assert_eq!(largest(&rows, |_| false), None);
        assert!(suggestion(&rows).contains("with norm: one shot is the fastest up to 256 KiB"));
        assert_eq!(best(&row(1, [None, None, Some(1.0)]).1), Some(2));
    }
}
