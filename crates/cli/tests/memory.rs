//! The real binary keeps its promises about memory: a rank holds little beyond its shard, and all ranks use
//! the smallest pool.

mod common;

use common::serve_with;
use lockstep_testkit::{Fixture, fixtures};
use serde_json::json;

/// What a rank may hold beyond its weights while loading: 15 % and this.
const SLACK_BYTES: u64 = 64 << 20;

#[test]
fn peak_memory_of_a_rank_stays_near_its_shard() {
    for tp_size in [1, 2, 4] {
        // 8 layers of hidden 1,024 in f32: 305 MB, so that a rank that read everything would be found out.
        let model = fixtures::random_models::slow(8, 1024);
        let served = serve_with(model, tp_size, |c| c.flag("--num-pages", 64).flag("--chunk", 64));
        let info = served.server.info();
        let ranks = info["engine"]["ranks"].as_array().expect("ranks").clone();
        assert_eq!(ranks.len(), tp_size);
        for rank in ranks {
            let number = |key: &str| rank[key].as_u64().unwrap_or_else(|| panic!("{key} of {rank}"));
            let (weights, peak) = (number("weight_bytes"), number("resident_bytes_max"));
            assert!(weights > (280 << 20) / tp_size as u64, "the shard is large enough to tell: {rank}");
            let limit = weights * 115 / 100 + SLACK_BYTES;
            assert!(peak > weights && peak <= limit, "tp {tp_size}: peak {peak}, limit {limit}: {rank}");
        }
        served.server.stop();
    }
}

#[test]
fn b9_all_ranks_use_the_smallest_pool() {
    let served = serve_with(Fixture::named("chain"), 2, |c| c.flag("--debug-num-pages", "18,15"));
    let info = served.server.info();
    assert_eq!(info["engine"]["pages_total"], json!(15), "{info}");
    let notes = info["engine"]["notes"].to_string();
    assert!(notes.contains("rank 0: 18") && notes.contains("rank 1: 15"), "{notes}");
    // Fill the pool: 15 pages of 16 tokens.
    let answer = served.server.complete("C", json!({"max_tokens": 1000}));
    assert_eq!((answer.prompt_tokens, answer.completion_tokens), (1, 239));
    served.server.after_check(&served.server.baseline(), "A", " alpha beta gamma delta");
    let output = served.server.stop();
    assert_eq!(output.matches("rank 1: 15").count(), 1, "one warning with both numbers: {output}");
}

#[test]
fn ranks_that_differ_too_much_are_refused_unless_allowed() {
    let temp = lockstep_testkit::TempDir::new("imbalance");
    let model = Fixture::named("chain").write_into(temp.path());
    let command = || {
        lockstep_testkit::ServeCommand::new(common::BINARY, &model).tp(2).flag("--debug-num-pages", "20,15")
    };
    let exit = command().run_to_exit(common::REFUSAL_LIMIT);
    assert_eq!(exit.code, Some(5), "{exit:?}");
    for words in ["rank 0: 20, rank 1: 15", "25 % apart where at most 20 %", "--allow-imbalance"] {
        assert!(exit.output.contains(words), "{}", exit.output);
    }
    let server = command().switch("--allow-imbalance").start();
    assert_eq!(server.info()["engine"]["pages_total"], json!(15));
    server.stop();
}

#[test]
fn what_cannot_fit_is_refused_before_it_is_loaded() {
    let temp = lockstep_testkit::TempDir::new("memory");
    // 305 MB, of which no rank may hold half.
    let model = fixtures::random_models::slow(8, 1024).write_into(temp.path());
    let exit = lockstep_testkit::ServeCommand::new(common::BINARY, &model)
        .flag("--memory-ratio", "0.001")
        .run_to_exit(common::REFUSAL_LIMIT);
    assert_eq!(exit.code, Some(5), "{exit:?}");
    assert!(exit.output.contains("leaves nothing for KV pages"), "{}", exit.output);
    assert!(!exit.output.contains("loaded "), "{}", exit.output);
}

#[test]
fn too_little_memory_is_a_sentence_with_numbers() {
    let temp = lockstep_testkit::TempDir::new("memory");
    let model = Fixture::named("chain").write_into(temp.path());
    let exit = lockstep_testkit::ServeCommand::new(common::BINARY, &model)
        .flag("--memory-ratio", "0.0000001")
        .run_to_exit(common::REFUSAL_LIMIT);
    assert_eq!(exit.code, Some(5), "{exit:?}");
    assert!(exit.output.contains("--memory-ratio") && exit.output.contains("MiB"), "{}", exit.output);
}
