//! Searches the seeds of the random fixtures and prints them, one line per row of the table.
//!
//! Run it after adding a row with seed 0: `cargo run --release -p lockstep-testkit --example
//! find_seeds`; it searches rows with seed 0, or those named as arguments. The seeds it finds are fixed in the table by hand, and a test proves them again.

use lockstep_testkit::fixtures::random_models::{MARGIN_MIN, RandomFixture, TABLE};
use lockstep_testkit::reference::Reference;

fn main() {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |row: &&RandomFixture| match names.len() {
        0 => row.seed == 0,
        _ => names.iter().any(|name| name == row.name),
    };
    for row in TABLE.iter().filter(wanted) {
        match (1..400).find_map(|seed| try_seed(row, seed).map(|found| (seed, found))) {
            Some((seed, (ids, margin))) => {
                println!("{} seed {seed} greedy {ids:?} margin {margin:.3}", row.name);
            }
            None => println!("{} has no seed below 400", row.name),
        }
    }
}

/// The answer and its margin, if the seed gives a clear answer that every mistake changes.
fn try_seed(row: &RandomFixture, seed: u64) -> Option<(Vec<u32>, f64)> {
    let spec = row.spec(seed);
    let weights = spec.weights();
    let (prompt, steps) = (row.prompt.ids(), row.steps());
    let right = Reference::new(&spec, &weights).greedy(&prompt, steps, &[]);
    let mut distinct = right.ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    // Some room above what the test asks for.
    let clear = right.min_margin >= MARGIN_MIN + 0.05 && distinct.len() >= 4;
    if !clear || right.ids.iter().any(|id| (256..=260).contains(id)) {
        return None;
    }
    let separates = row.faults.iter().all(|&(fault, tp_size)| {
        Reference::with_fault(&spec, &weights, tp_size, Some(fault)).greedy(&prompt, steps, &[]).ids
            != right.ids
    });
    separates.then_some((right.ids, right.min_margin))
}
