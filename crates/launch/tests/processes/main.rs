//! Tests with real processes. This binary is test runner, launcher and child in one: children are
//! entered through `child::enter` as in the product, launchers by an environment variable.

#![allow(clippy::unwrap_used, reason = "clippy.toml excuses tests, but takes this crate for a program")]

mod harness;
mod launchers;
mod modes;
mod supervised;

use std::panic::AssertUnwindSafe;
use std::process::ExitCode;

/// A named test.
pub type Case = (&'static str, fn());

fn main() -> ExitCode {
    if let Some(entry) = lockstep_launch::child::enter() {
        modes::child(entry);
    }
    if let Some(mode) = std::env::var_os(harness::LAUNCHER_MODE) {
        modes::launcher(mode.to_str().unwrap());
    }
    run(&[supervised::CASES, launchers::CASES].concat())
}

/// The part of libtest that people use: a name filter, `--list`, one line per test.
fn run(cases: &[Case]) -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|a| a == "--list") {
        cases.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let filter = args.iter().find(|a| !a.starts_with('-')).cloned().unwrap_or_default();
    let mut failed = Vec::new();
    for (name, case) in cases.iter().filter(|(name, _)| name.contains(&filter)) {
        let passed = std::panic::catch_unwind(AssertUnwindSafe(case)).is_ok();
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        if !passed {
            failed.push(*name);
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("failed: {failed:?}");
    ExitCode::FAILURE
}
