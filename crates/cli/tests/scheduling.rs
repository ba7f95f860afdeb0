//! The real binary under every batching policy: answers do not depend on cache, overlap, mixing or page
//! size, and nothing starves, leaks or repeats. Cases D1 to D6 and D8.

mod common;

use common::serve_with;
use lockstep_testkit::random::Random;
use lockstep_testkit::{Fixture, Server, TempDir};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A prompt of `len` words that starts at `first`.
fn words(first: u32, len: u32) -> String {
    (0..len).map(|i| format!("w{}", (first + 7 * i) % 250)).collect::<Vec<_>>().join(" ")
}

/// Answers to `prompts`, asked all at once; 24 greedy tokens each.
fn together(server: &Server, prompts: &[String]) -> Vec<String> {
    std::thread::scope(|scope| {
        let asking: Vec<_> = prompts
            .iter()
            .map(|p| scope.spawn(|| server.complete(p, json!({"max_tokens": 24, "ignore_eos": true})).text))
            .collect();
        asking.into_iter().map(|a| a.join().expect("an answer")).collect()
    })
}

#[test]
fn answers_do_not_depend_on_policies() {
    // Shared prefixes of 40 tokens, own tails; and lengths around page boundaries (D4).
    let mut prompts: Vec<String> =
        (0..6).map(|i| format!("{} {}", words(3, 40), words(100 + i, 5))).collect();
    for page in [2, 3, 16] {
        prompts.extend([page - 1, page, page + 1, 2 * page + 1].map(|len| words(page, len.max(1))));
    }
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    let variants: &[&[(&str, &str)]] = &[
        &[("--page-size", "1"), ("--overlap", "on")],
        &[("--page-size", "2"), ("--no-overlap", "")],
        &[("--page-size", "3"), ("--mixed", "false")],
        &[("--page-size", "16"), ("--cache", "none")],
        &[("--page-size", "16"), ("--chunk", "7"), ("--mixed", "false"), ("--no-overlap", "")],
        &[("--page-size", "64"), ("--max-running", "3"), ("--overlap", "on")],
        // A pool of 320 tokens for 18 requests of up to 70: retraction.
        &[("--page-size", "16"), ("--num-pages", "20"), ("--overlap", "on")],
        &[("--page-size", "16"), ("--num-pages", "20")],
    ];
    for variant in variants {
        let served = serve_with(Fixture::named("rand_llama"), 2, |mut command| {
            for (name, value) in *variant {
                command = if value.is_empty() { command.switch(name) } else { command.flag(name, value) };
            }
            command
        });
        let baseline = served.server.baseline();
        for _round in 0..2 {
            for (prompt, text) in prompts.iter().zip(together(&served.server, &prompts)) {
                let expected = known.entry(prompt.clone()).or_insert_with(|| text.clone());
                assert_eq!(*expected, text, "{variant:?}, prompt {prompt}");
            }
        }
        served.server.after_check(&baseline, &prompts[0], &known[&prompts[0]].clone());
        served.server.stop();
    }
    // And alone, each in an empty server's cache.
    let served = serve_with(Fixture::named("rand_llama"), 1, |c| c.flag("--cache", "none"));
    for (prompt, text) in &known {
        let alone = served.server.complete(prompt, json!({"max_tokens": 24, "ignore_eos": true}));
        assert_eq!(&alone.text, text, "alone, prompt {prompt}");
    }
    served.server.stop();
}

#[test]
fn d1_a_request_the_pool_can_never_hold() {
    let served = serve_with(Fixture::named("chain"), 1, |c| c.flag("--num-pages", 8));
    let server = &served.server;
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["max_model_len"], json!(128), "the lowered limit is advertised");
    let refused = server.post("/v1/completions", &server.completion_body(&"x".repeat(200), json!({})));
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["code"], json!("context_length_exceeded"));
    let clipped = server.complete(&("x".repeat(99) + "C"), json!({"max_tokens": 100}));
    assert_eq!((clipped.completion_tokens, clipped.finish.as_str()), (28, "length"));
    assert_eq!(server.complete("A", json!({})).text, " alpha beta gamma delta");
    served.server.stop();
}

#[test]
fn d2_running_out_of_pages_while_decoding() {
    let expected = " tick tock".repeat(30);
    for (page_size, pages) in [(1, 256), (2, 128), (16, 16)] {
        for overlap in [true, false] {
            let served = serve_with(Fixture::named("chain"), 2, |c| {
                let c = c.flag("--page-size", page_size).flag("--num-pages", pages);
                if overlap { c.flag("--overlap", "on") } else { c.switch("--no-overlap") }
            });
            let server = &served.server;
            let baseline = server.baseline();
            std::thread::scope(|scope| {
                for _ in 0..12 {
                    scope.spawn(|| {
                        let body = server.completion_body("C", json!({"max_tokens": 60, "stream": true}));
                        let streamed = server.stream("/v1/completions", &body);
                        assert_eq!(streamed.text, expected, "page size {page_size}, overlap {overlap}");
                    });
                }
            });
            server.after_check(&baseline, "A", " alpha beta gamma delta");
            served.server.stop();
        }
    }
}

#[test]
fn d3_the_same_cold_prefix_at_once() {
    let served = serve_with(Fixture::named("rand_llama"), 2, |c| c.flag("--num-pages", 24));
    let server = &served.server;
    let mut random = Random::new(5);
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    for _round in 0..common::rounds(6) {
        let shared = words(random.below(250) as u32, 40);
        let mut prompts = vec![shared; 4];
        prompts.extend((0..8).map(|_| words(random.below(250) as u32, 5 + random.below(30) as u32)));
        for (prompt, text) in prompts.iter().zip(together(server, &prompts)) {
            let expected = known.entry(prompt.clone()).or_insert_with(|| text.clone());
            assert_eq!(*expected, text, "prompt {prompt}");
        }
    }
    for (prompt, text) in known {
        let alone = server.complete(&prompt, json!({"max_tokens": 24, "ignore_eos": true}));
        assert_eq!(alone.text, text, "alone, prompt {prompt}");
    }
    served.server.stop();
}

#[test]
fn d6_small_requests_pass_a_big_one_and_it_starts_too() {
    let served =
        serve_with(Fixture::named("chain"), 1, |c| c.flag("--num-pages", 32).flag("--max-running", 8));
    let server = &served.server;
    std::thread::scope(|scope| {
        // 70 % of 512 tokens, then one that needs half of the pool, then small ones.
        let long = scope.spawn(|| server.complete(&("x".repeat(100) + "C"), json!({"max_tokens": 250})));
        let big = scope.spawn(|| server.complete(&("y".repeat(250) + "C"), json!({"max_tokens": 6})));
        for _ in 0..20 {
            assert_eq!(server.complete("A", json!({})).text, " alpha beta gamma delta");
        }
        assert_eq!(long.join().expect("an answer").completion_tokens, 250);
        assert_eq!(big.join().expect("an answer").completion_tokens, 6);
    });
    served.server.stop();
}

#[test]
fn d8_cached_tokens_are_reported_everywhere() {
    for page_size in [1u64, 16] {
        let served = serve_with(Fixture::named("chain"), 1, |c| c.flag("--page-size", page_size));
        let server = &served.server;
        let prompt = "q".repeat(49) + "A";
        let usage = |answer: Value| {
            let cached = answer["prompt_tokens_details"]["cached_tokens"].as_u64().expect("cached_tokens");
            (answer["prompt_tokens"].as_u64().expect("prompt_tokens"), cached)
        };
        let whole = |path: &str, body: &Value| usage(server.post(path, body).json()["usage"].clone());
        let body = server.completion_body(&prompt, json!({}));
        assert_eq!(whole("/v1/completions", &body), (50, 0));
        let hit = 49 / page_size * page_size;
        assert_eq!(whole("/v1/completions", &body), (50, hit));
        let chat = server.chat_body(&"q".repeat(60), json!({}));
        let (tokens, cached) = whole("/v1/chat/completions", &chat);
        assert_eq!(cached, 0);
        assert_eq!(whole("/v1/chat/completions", &chat), (tokens, (tokens - 1) / page_size * page_size));
        let streamed = server
            .completion_body(&prompt, json!({"stream": true, "stream_options": {"include_usage": true}}));
        let streamed = server.stream("/v1/completions", &streamed);
        assert_eq!(usage(streamed.usage.expect("usage was asked for")), (50, hit));
        served.server.stop();
    }
}

#[test]
fn cached_prefixes_are_shared_within_a_salt_only() {
    let served = serve_with(Fixture::named("chain"), 2, |c| c);
    let cached = |salt: Value| {
        let body = served.server.completion_body(&("q".repeat(49) + "A"), json!({"cache_salt": salt}));
        let answer = served.server.post("/v1/completions", &body).json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("cached_tokens")
    };
    assert_eq!([cached(json!("a")), cached(json!("b")), cached(json!(null))], [0, 0, 0]);
    assert_eq!([cached(json!("a")), cached(json!("b")), cached(json!(null))], [48, 48, 48]);
    served.server.stop();
}

#[test]
fn a_request_over_its_time_is_ended_and_releases_everything() {
    let served = serve_with(Fixture::named("chain_long"), 2, |c| {
        c.flag("--request-timeout", 0.2).flag("--num-pages", 4096)
    });
    let baseline = served.server.baseline();
    let answer = served.server.complete("C", json!({"max_tokens": 16_000}));
    assert_eq!(answer.finish, "abort");
    assert!((1..16_000).contains(&answer.completion_tokens), "{}", answer.completion_tokens);
    served.server.after_check(&baseline, "A", " alpha beta gamma delta");
    served.server.stop();
}

/// The value of one sample of `/metrics`.
fn metric(server: &Server, sample: &str) -> u64 {
    let text = String::from_utf8(server.get("/metrics").body).expect("UTF-8");
    let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{sample} is not in\n{text}"))
}

#[test]
fn the_flight_recorder_is_written_on_request_and_replays() {
    let folder = TempDir::new("flight");
    let served = serve_with(Fixture::named("rand_llama"), 2, |c| {
        c.flag("--num-pages", 20).flag("--overlap", "on").flag("--flight-dir", folder.path().display())
    });
    let server = &served.server;
    let prompts: Vec<String> = (0..8).map(|i| format!("{} {}", words(3, 40), words(100 + i, 5))).collect();
    together(server, &prompts);
    assert!(metric(server, "lockstep_retractions_total") > 0, "the pool holds fewer requests than run");
    let reply = server.post("/debug/flight", &json!({}));
    assert_eq!(reply.status, 200);
    let files: Vec<String> = serde_json::from_value(reply.json()["files"].clone()).expect("paths");
    assert_eq!(files.len(), 2, "one per rank: {files:?}");
    for file in &files {
        let mode = std::fs::metadata(file).expect("the file is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "prompts are in it");
        let replay = Command::new(common::BINARY).args(["replay", file]).output().expect("the binary runs");
        let said = String::from_utf8_lossy(&replay.stdout).into_owned();
        assert!(replay.status.success() && said.contains("every decision is reproduced"), "{said}");
        assert!(said.contains("8 messages"), "{said}");
    }
    served.server.stop();
}

#[test]
fn pages_add_up_in_the_metrics_and_recordings_need_a_folder() {
    let served = serve_with(Fixture::named("rand_llama"), 1, |c| c.flag("--num-pages", 40));
    let server = &served.server;
    together(server, &[words(1, 30), words(2, 50)]);
    let state = |state| metric(server, &format!("lockstep_kv_pages{{state=\"{state}\"}}"));
    assert_eq!(metric(server, "lockstep_kv_pool_pages"), 40);
    assert_eq!((state("held"), state("free") + state("cached")), (0, 40), "an idle server holds no page");
    assert!(state("cached") > 0);
    assert_eq!(metric(server, "lockstep_prompt_tokens_total"), 30 + 50);
    assert_eq!(metric(server, "lockstep_generated_tokens_total"), 48);
    let refused = server.post("/debug/flight", &json!({}));
    assert_eq!(refused.status, 400);
    assert!(refused.json()["error"]["message"].as_str().is_some_and(|m| m.contains("--flight-dir")));
    served.server.stop();
}
