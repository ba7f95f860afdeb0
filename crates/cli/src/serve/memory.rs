//! How much memory this host has to give.

use crate::error::{CliError, Result};
use lockstep_core::ExitCode;
use lockstep_verify::memory::MEMORY_RATIO;

/// What a command may take that holds no pool which grows into the rest, and the words for it.
pub fn allowed() -> Result<(usize, String)> {
    let available = available_bytes().ok_or_else(|| {
        CliError::new(ExitCode::Internal, "cannot read the available memory from /proc/meminfo; mount /proc")
    })?;
    let origin = format!("{:.0} % of {} MiB available", 100.0 * MEMORY_RATIO, available >> 20);
    Ok(((available as f64 * MEMORY_RATIO) as usize, origin))
}

/// Bytes that programs may still take without swapping: the smaller of the kernel's estimate and
/// what the control group leaves. `None` where neither can be read.
pub fn available_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(cgroup_left_bytes().map_or(kib * 1024, |left| left.min(kib * 1024)))
}

/// What a version-2 control group still allows this process; `None` without a limit.
fn cgroup_left_bytes() -> Option<u64> {
    let path = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = path.lines().find_map(|l| l.strip_prefix("0::"))?;
    let read = |file: &str| std::fs::read_to_string(format!("/sys/fs/cgroup{group}/{file}")).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    Some(limit.saturating_sub(used))
}

/// Memory of this process that is in RAM, of pages shared with others its part. `None` where the kernel does not say.
pub fn proportional_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let kib: u64 =
        text.lines().find_map(|l| l.strip_prefix("Pss:"))?.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}
