//! The machine without its GPUs.

use super::{Section, gib};
use crate::bench;
use crate::error::Result;
use crate::pull;
use crate::serve::memory::available_bytes;
use lockstep_backend::Backend;
use lockstep_backend::cpu::numa::Nodes;
use lockstep_backend::cpu::{CpuBackend, CpuOptions, probe};
use rustix::process::{Resource, getrlimit};
use std::path::Path;

/// Variables of the environment that this program reads begin so.
const VARIABLES: &str = "LOCKSTEP_";

/// What the machine is, without measuring anything.
pub(super) fn machine() -> Section {
    let mut section = Section::new("machine");
    section.line("lockstep", format!("{} for {}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH));
    section.line("processor", processor());
    section.line("memory", memory());
    section.line("NUMA nodes", Nodes::of_this_machine().to_string());
    section.line("open files", open_files());
    section.line("cache", cache(&pull::cache_dir(None)));
    for (name, value) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with(VARIABLES) {
            section.line(name.clone(), value.to_string_lossy());
        }
    }
    section
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| Some(line.strip_prefix("model name")?.split_once(':')?.1.trim()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kernels = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() });
    let kernels = kernels.map_or_else(|error| error.to_string(), |backend| backend.describe());
    let kernels = kernels.trim_start_matches("cpu ").trim_end_matches(" x1").to_owned();
    format!("{}, {cores} cores for this process, {kernels} kernels", name.unwrap_or("of unknown name"))
}

fn memory() -> String {
    let total = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = total.lines().find_map(|line| {
        let kib: u64 = line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok()?;
        Some(gib(kib << 10))
    });
    let available = available_bytes().map(gib);
    let unknown = || "unknown".to_owned();
    format!("{}, {} available", total.unwrap_or_else(unknown), available.unwrap_or_else(unknown))
}

fn open_files() -> String {
    let limit = getrlimit(Resource::Nofile);
    let number = |limit: Option<u64>| limit.map_or_else(|| "unlimited".into(), |limit| limit.to_string());
    format!("limit {}, which serve raises to {}", number(limit.current), number(limit.maximum))
}

/// The cache folder and what the file system below it has left.
fn cache(folder: &Path) -> String {
    let existing = folder.ancestors().find(|folder| folder.exists());
    let free = existing.and_then(|folder| rustix::fs::statvfs(folder).ok());
    let free = free.map_or_else(String::new, |info| format!(", {} free", gib(info.f_bavail * info.f_frsize)));
    format!("{}{free}", folder.display())
}

/// Memory bandwidth, arithmetic and what two ranks need to meet; about two seconds.
pub(super) fn speed() -> Result<Section> {
    let mut section = Section::new("processor speed");
    let cores = bench::cores();
    section
        .line("reading memory", format!("{:.1} GB/s with {cores} threads", bench::bandwidth(cores, true)?));
    section.line("f32 multiply-add", format!("{:.0} GFLOP/s", probe::fma_gflops(cores)));
    section.line("integer dot products", format!("{:.0} GOP/s", probe::dot_gops(cores)));
    for row in bench::two_ranks(SPEED_ROUNDS)? {
        let name = format!("{} of two ranks, {} B", row.operation, row.bytes);
        section.line(
            name,
            format!("{:.1} us median, {:.1} us p99", row.p50_ns as f64 / 1e3, row.p99_ns as f64 / 1e3),
        );
    }
    Ok(section)
}

/// Rounds of each collective.
const SPEED_ROUNDS: usize = 2_000;
