//! Every target's corpus, and a fixed number of inputs made of it: none panics, none takes long.
//!
//! `LOCKSTEP_TEST_ROUNDS` multiplies the number of inputs. A failure names the target and the seed, and writes the input
//! to where it says.

#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_fuzz::mutate::Mutator;
use lockstep_fuzz::{TARGETS, Target};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Of one input, on a busy machine.
const LIMIT: Duration = Duration::from_secs(20);
/// Bytes of all corpora together: they are committed.
const CORPUS_BYTES_MAX: u64 = 256 << 10;

fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let mut paths: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

fn check(target: &Target, input: &[u8], what: &str) {
    let begun = Instant::now();
    let ended = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    if ended.is_err() || begun.elapsed() > LIMIT {
        let path = std::env::temp_dir().join(format!("lockstep-fuzz-{}-input", target.name));
        std::fs::write(&path, input).unwrap();
        panic!(
            "{} {what}: {ended:?} after {:?}; the input is in {}",
            target.name,
            begun.elapsed(),
            path.display()
        );
    }
}

fn search(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let corpus = corpus(target);
    for (number, input) in corpus.iter().enumerate() {
        check(target, input, &format!("corpus file {number}"));
    }
    let begun = Instant::now();
    let rounds: u32 = std::env::var("LOCKSTEP_TEST_ROUNDS").map_or(1, |text| text.parse().unwrap());
    for seed in 0..u64::from(target.bounded * rounds) {
        check(target, &Mutator::new(&corpus, target.words, seed).next_input(), &format!("seed {seed}"));
    }
    println!("{name}: {} changed inputs in {:.0} s", target.bounded * rounds, begun.elapsed().as_secs_f64());
}

#[test]
fn requests() {
    search("requests");
}

#[test]
fn messages_and_shared_memory() {
    search("wire");
    search("hosts");
    search("shared");
}

#[test]
fn weights() {
    search("gguf");
    search("safetensors");
    search("config");
}

#[test]
fn text() {
    search("tokenizer");
    search("template");
}

#[test]
fn forms() {
    search("forms");
}

#[test]
fn corpora_are_small_and_every_target_has_one() {
    let mut bytes = 0;
    for target in TARGETS {
        let corpus = corpus(target);
        assert!(!corpus.is_empty(), "{}", target.name);
        bytes += corpus.iter().map(|input| input.len() as u64).sum::<u64>();
    }
    assert!(bytes <= CORPUS_BYTES_MAX, "{bytes} bytes");
}

#[test]
fn changed_inputs_are_the_same_everywhere_and_differ() {
    let corpus = [b"abcdefgh".to_vec(), b"12345678".to_vec()];
    let inputs: Vec<_> = (0..100).map(|seed| Mutator::new(&corpus, &["word"], seed).next_input()).collect();
    let again: Vec<_> = (0..100).map(|seed| Mutator::new(&corpus, &["word"], seed).next_input()).collect();
    assert_eq!(inputs, again);
    let different: std::collections::HashSet<_> = inputs.iter().collect();
    assert!(different.len() > 80, "{}", different.len());
}
