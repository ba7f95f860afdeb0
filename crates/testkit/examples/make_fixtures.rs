//! Writes every fixture into a folder: `make_fixtures OUT_DIR [NAME...]`.
//!
//! Used by the tests that are written in other languages; each model folder holds an `expect.json`.

use lockstep_testkit::fixtures::{self, Fixture};
use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(out) = args.next().map(PathBuf::from) else {
        eprintln!("usage: make_fixtures OUT_DIR [NAME...]; names: {}", fixtures::names().join(" "));
        return ExitCode::from(2);
    };
    let mut names: Vec<String> = args.collect();
    if names.is_empty() {
        names = fixtures::names().into_iter().map(str::to_owned).collect();
    }
    for name in names {
        println!("{}", Fixture::named(&name).write_into(&out).display());
    }
    ExitCode::SUCCESS
}
