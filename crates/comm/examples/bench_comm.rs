//! Barrier and all-reduce latencies between real processes: `bench_comm [ranks] [rounds] [slot KiB]`.

use lockstep_comm::{SharedRegion, ShmCollective, ShmGroup, ShmLayout, ShmOptions, bench};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |a| a.parse());
    let (ranks, rounds, slot_kib) = (number(0, 2)?, number(1, 20_000)?, number(2, 256)?);
    if let Some(rank) = args.get(3) {
        return measure(rank.parse()?, ranks, rounds).map(|()| ExitCode::SUCCESS);
    }
    let fd = SharedRegion::create(ShmLayout::new(ranks, slot_kib << 10)?)?;
    let mut children = Vec::new();
    for rank in 0..ranks {
        let args = [ranks, rounds, slot_kib, rank].map(|n| n.to_string());
        let mut command = Command::new(std::env::current_exe()?);
        command.args(args).stdin(Stdio::from(fd.try_clone()?));
        children.push(command.spawn()?);
    }
    let mut all_well = true;
    for mut child in children {
        all_well &= child.wait()?.success();
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One rank; the shared memory is its standard input.
fn measure(rank: usize, ranks: usize, rounds: usize) -> Result<()> {
    let region = Arc::new(SharedRegion::map(std::io::stdin())?);
    let options = ShmOptions::for_ranks(ranks);
    let mut group = ShmGroup::new(region.clone(), rank, options)?;
    let collective = ShmCollective::new(region, rank, options)?;
    for row in bench::measure(&mut group, &collective, rounds)? {
        if rank == 0 {
            println!("{row}");
        }
    }
    Ok(())
}
