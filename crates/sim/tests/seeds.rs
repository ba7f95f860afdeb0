//! A fixed set of seeds on every run of the tests, and the simulator's own promises.
#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_sim::{Options, Totals, run_seed};

const SEEDS: u64 = 400;

#[test]
fn a_fixed_set_of_seeds_has_no_finding_and_reaches_what_it_is_meant_to_try() {
    let mut totals = Totals::default();
    for seed in 0..SEEDS {
        match run_seed(seed, Options::default()) {
            Ok(run) => totals += run.totals,
            Err(finding) => panic!("{finding}"),
        }
    }
    println!("{totals}");
    assert!(totals.rank_steps > 200 * SEEDS, "{totals}");
    let reached = [totals.retractions, totals.hit_tokens, totals.evicted_pages, totals.aborted];
    assert!(reached.iter().all(|&count| count > SEEDS), "{totals}");
    assert!(totals.prefix_waits > 0 && totals.refused > 0 && totals.faults > 10, "{totals}");
}

#[test]
fn a_seed_gives_the_same_events_twice() {
    let keep_log = Options { keep_log: true, ..Options::default() };
    for seed in 0..20 {
        let (first, second) = (run_seed(seed, keep_log).unwrap(), run_seed(seed, keep_log).unwrap());
        assert!(first.log.entries().eq(second.log.entries()), "seed {seed}");
        assert_eq!((first.log.hash(), first.totals), (second.log.hash(), second.totals), "seed {seed}");
        assert!(first.log.entries().count() > 50, "seed {seed}");
    }
    let hash = |seed| run_seed(seed, Options::default()).unwrap().log.hash();
    assert_ne!(hash(1), hash(2));
}

#[test]
fn the_number_of_ranks_can_be_chosen() {
    for ranks in [1, 2, 8] {
        let run =
            run_seed(3, Options { ranks: Some(ranks), keep_log: false }).unwrap_or_else(|e| panic!("{e}"));
        assert!(run.totals.rank_steps >= ranks as u64, "{}", run.totals);
    }
}
