//! The real binary gives the known answers: tensor parallelism at every legal size, batches in any
//! order, chunked prefill, context limits, and every way a model folder can look.
//!
//! Case numbers in the tests' names are those of the project's list of cases.

mod common;

use common::{REFUSAL_LIMIT, assert_greedy, command, rounds, serve, serve_with};
use lockstep_testkit::folder::ChatTemplate;
use lockstep_testkit::random::Random;
use lockstep_testkit::{Fixture, Server, TempDir, fixtures, template};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Serves each fixture at each size and compares with its fixed answer.
fn check_at(names: &[&str], tp_sizes: &[usize]) {
    for name in names {
        for &tp_size in tp_sizes {
            let served = serve(name, tp_size);
            assert_greedy(&served.server, &served.fixture, tp_size);
            served.server.stop();
        }
    }
}

#[test]
fn a1_biases_of_row_parallel_layers_are_added_once() {
    check_at(&["rand_bias"], &[1, 2, 4]);
}

#[test]
fn a2_vocabulary_that_tp_does_not_divide() {
    for tp_size in [1, 2] {
        let served = serve("rand_vocab_odd", tp_size);
        assert_greedy(&served.server, &served.fixture, tp_size);
        std::thread::scope(|scope| {
            for _ in 0..5 {
                scope.spawn(|| assert_greedy(&served.server, &served.fixture, tp_size));
            }
        });
        served.server.stop();
    }
}

#[test]
fn a3_fewer_kv_heads_than_ranks() {
    check_at(&["rand_kv1", "rand_kv2_tp4"], &[1, 2, 4]);
    check_at(&["rand_kv2_tp4"], &[8]);
}

#[test]
fn every_family_and_rope_at_every_legal_size() {
    check_at(&["rand_yarn", "rand_yarn_af1", "rand_rope_dynamic", "rand_gemma3_nested"], &[1, 2]);
    let windowed = ["rand_mistral_window", "rand_qwen2_window", "rand_qwen3_window"];
    let fused = ["rand_phi3", "rand_phi3_longrope"];
    let sandwiched = ["rand_gemma2", "rand_gemma3"];
    let mixtures = ["rand_qwen3_moe", "rand_qwen3_moe_sparse_step"];
    for names in [&windowed[..], &fused, &sandwiched, &mixtures] {
        check_at(names, &[1, 2, 4, 8]);
    }
    check_at(&["rand_qwen3_moe_heads6"], &[1, 2, 6]);
}

#[test]
fn a4_illegal_tp_sizes_are_refused_with_what_would_work() {
    let temp = TempDir::new("a4");
    #[rustfmt::skip]
    let cases: &[(&str, &str, &[&str])] = &[
        ("rand_heads3", "2", &["3 query heads", "1, 3"]),
        ("rand_llama", "3", &["4 query heads", "1, 2, 4"]),
        ("rand_llama", "0", &["1, 2, 4"]),
        ("rand_llama", "-1", &["--tp"]),
        ("rand_llama", "64", &["1, 2, 4"]),
        ("rand_heads6", "3", &["2 KV heads", "1, 2, 6"]),
    ];
    for (name, tp_size, words) in cases {
        let model = Fixture::named(name).write_into(temp.path());
        let exit = lockstep_testkit::ServeCommand::new(common::BINARY, &model)
            .flag("--tp", tp_size)
            .run_to_exit(REFUSAL_LIMIT);
        assert_eq!(exit.code, Some(2), "{name} --tp {tp_size}: {}", exit.output);
        for word in *words {
            assert!(exit.output.contains(word), "{name} --tp {tp_size}: no {word:?} in {}", exit.output);
        }
        assert!(!exit.output.contains("panicked"), "{}", exit.output);
    }
    check_at(&["rand_heads3"], &[1, 3]);
}

#[test]
fn a5_tied_head() {
    check_at(&["rand_tied"], &[1, 2]);
}

#[test]
fn a6_separate_q_k_v_with_biases_fused_by_us() {
    check_at(&["rand_llama", "rand_qwen2"], &[1, 2, 4]);
}

#[test]
fn a7_norm_on_q_and_k() {
    check_at(&["rand_qwen3_qknorm"], &[1, 2]);
}

#[test]
fn eight_ranks_on_one_host() {
    check_at(&["rand_heads8"], &[8]);
}

#[test]
fn half_precision_checkpoints() {
    check_at(&["rand_bf16", "rand_f16"], &[1, 2]);
}

/// A sampled continuation of the short prompt.
fn sampled(server: &Server, prompt: &str, seed: Option<u64>) -> String {
    let mut extra = json!({"temperature": 1.5, "max_tokens": 64, "ignore_eos": true});
    if let Some(seed) = seed {
        extra["seed"] = json!(seed);
    }
    server.complete(prompt, extra).text
}

#[test]
fn a9_ranks_draw_the_same_tokens() {
    let mut alone: BTreeMap<u64, String> = BTreeMap::new();
    for tp_size in [1, 2] {
        let served = serve("rand_llama", tp_size);
        let server = &served.server;
        let baseline = server.baseline();
        let prompt = &served.fixture.expect.prompt;
        for seed in [1, 2, 3] {
            let text = sampled(server, prompt, Some(seed));
            let before = alone.entry(seed).or_insert_with(|| text.clone());
            assert_eq!(*before, text, "seed {seed} at tp {tp_size}");
        }
        assert_ne!(alone[&1], alone[&2], "different seeds, different texts");
        // The ranks' digests are compared every step: different draws would end the server.
        for _ in 0..rounds(3) {
            std::thread::scope(|scope| {
                for i in 0..8_u64 {
                    let alone = &alone;
                    scope.spawn(move || match alone.get(&i) {
                        Some(text) => {
                            assert_eq!(sampled(server, prompt, Some(i)), *text, "seed {i} in a batch")
                        }
                        None => drop(sampled(server, prompt, None)),
                    });
                }
            });
        }
        server.after_check(&baseline, prompt, &served.fixture.expect.greedy_text);
        served.server.stop();
    }
}

#[test]
fn b7_every_answer_in_a_changing_batch_equals_the_answer_alone() {
    let served = serve_with(Fixture::named("rand_llama"), 2, |c| c.flag("--chunk", 24));
    let server = &served.server;
    let baseline = server.baseline();
    let prompts: Vec<String> = (0..24_u32).map(|i| fixtures_prompt(i, 2 + i % 13)).collect();
    let ask = |i: usize| server.complete(&prompts[i], json!({"max_tokens": 32})).text;
    let alone: Vec<String> = (0..prompts.len()).map(ask).collect();
    let seed = 20_261_129;
    println!("seed {seed}");
    for round in 0..rounds(3) {
        // Six clients, each with four prompts in random order: requests join and leave at all
        // kinds of moments, some of them by hanging up.
        let mut random = Random::new(seed + round as u64);
        let mut order: Vec<usize> = (0..prompts.len()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, random.below(i as u64 + 1) as usize);
        }
        std::thread::scope(|scope| {
            for part in order.chunks(4) {
                let (alone, prompts, ask) = (&alone, &prompts, &ask);
                scope.spawn(move || {
                    for &i in part {
                        if i % 5 == 4 {
                            let body = server.completion_body(&prompts[i], json!({"max_tokens": 32}));
                            let mut stream = server.open_stream("/v1/completions", &body);
                            stream.next_event().expect("the stream is alive");
                        }
                        assert_eq!(ask(i), alone[i], "round {round}, prompt {:?}", prompts[i]);
                    }
                });
            }
        });
    }
    server.after_check(&baseline, &served.fixture.expect.prompt, &served.fixture.expect.greedy_text);
    served.server.stop();
}

/// `len` words from `w{first+1}` on.
fn fixtures_prompt(first: u32, len: u32) -> String {
    lockstep_testkit::tokenizer::words(&(first + 1..first + 1 + len).collect::<Vec<_>>())
}

#[test]
fn d5_prompts_longer_than_the_chunk() {
    let fixture = Fixture::named("rand_long_prompt");
    let plans = [(1, 16, 1), (7, 1, 1), (32, 16, 1), (99, 1, 1), (100, 16, 1), (101, 1, 1), (7, 16, 2)];
    for (chunk, page_size, tp_size) in plans {
        let served =
            serve_with(fixture.clone(), tp_size, |c| c.flag("--chunk", chunk).flag("--page-size", page_size));
        let server = &served.server;
        let baseline = server.baseline();
        assert_greedy(server, &fixture, tp_size);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| assert_greedy(server, &fixture, tp_size));
            }
        });
        // Hang up while the prompt is being computed.
        let body =
            server.completion_body(&fixture.expect.prompt, json!({"max_tokens": 400, "ignore_eos": true}));
        drop(server.open_stream("/v1/completions", &body));
        server.after_check(&baseline, &fixture.expect.prompt, &fixture.expect.greedy_text);
        served.server.stop();
    }
}

#[test]
fn d7_exactly_at_the_context_limit() {
    // The second limit is no multiple of the page size.
    for limit in [64_usize, 61] {
        let served = serve_with(Fixture::named("chain"), 1, |c| c.flag("--max-context", limit));
        let server = &served.server;
        let baseline = server.baseline();
        let models = server.get("/v1/models").json();
        assert_eq!(models["data"][0]["max_model_len"], json!(limit), "{models}");
        // One byte is one token; the last letter picks the endless script.
        let prompt = |len: usize| "x".repeat(len - 1) + "C";
        for (len, max_tokens, tokens) in [
            (limit - 2, json!(1), 1),
            (limit - 2, json!(2), 2),
            (limit - 2, Value::Null, 2),
            (limit - 1, json!(1), 1),
            (limit - 1, json!(2), 1),
            (limit - 1, Value::Null, 1),
        ] {
            let answer = server.complete(&prompt(len), json!({"max_tokens": max_tokens}));
            let got = (answer.completion_tokens, answer.finish.as_str(), answer.prompt_tokens);
            assert_eq!(
                got,
                (tokens, "length", len as u64),
                "limit {limit}, prompt {len}, max_tokens {max_tokens}"
            );
        }
        for max_tokens in [json!(1), json!(2), Value::Null] {
            let body = server.completion_body(&prompt(limit), json!({"max_tokens": max_tokens}));
            let response = server.post("/v1/completions", &body);
            assert_eq!(response.status, 400, "{}", response.json());
            assert_eq!(response.json()["error"]["code"], json!("context_length_exceeded"));
        }
        server.after_check(&baseline, "A", " alpha beta gamma delta");
        served.server.stop();
    }
}

#[test]
fn e1_the_index_decides_which_files_belong_to_the_model() {
    check_at(&["load_sharded", "load_stale_shard", "load_symlinked"], &[1, 2]);
    let served = serve("load_extra", 1);
    assert_greedy(&served.server, &served.fixture, 1);
    let output = served.server.stop();
    let warnings = output.lines().filter(|l| l.contains("foo.bar")).count();
    assert_eq!(warnings, 1, "one warning names the unknown tensors: {output}");
}

#[test]
fn e1_relative_paths_and_odd_names() {
    let fixture = Fixture::named("load_sharded");
    let temp = TempDir::new("e1");
    let odd = temp.join("mit Leerzeichen und 漢字 é");
    fixture.write(&odd).expect("the folder can be written");
    for model in ["mit Leerzeichen und 漢字 é", "./mit Leerzeichen und 漢字 é"] {
        let server = command(std::path::Path::new(model), 2).working_dir(temp.path()).start();
        assert_greedy(&server, &fixture, 2);
        server.stop();
    }
}

/// Starts a fixture that must be refused and checks code, time and message.
fn assert_refused(fixture: &Fixture, tp_size: usize) {
    let temp = TempDir::new(fixture.name);
    let model = fixture.write_into(temp.path());
    let exit = command(&model, tp_size).run_to_exit(REFUSAL_LIMIT);
    let context = format!("{} at tp {tp_size}: {}", fixture.name, exit.output);
    assert_eq!(exit.code, Some(3), "{context}");
    for word in &fixture.expect.refusal_words {
        assert!(exit.output.contains(word.as_str()), "no {word:?} from {context}");
    }
    assert!(!exit.output.contains("listening on"), "the port was opened: {context}");
    assert!(!exit.output.contains("panicked"), "{context}");
}

#[test]
fn e2_missing_or_misshapen_tensors() {
    for name in ["load_missing", "load_missing_shard", "load_wrong_shape", "load_layers3_in_config"] {
        for tp_size in [1, 2] {
            assert_refused(&Fixture::named(name), tp_size);
        }
    }
}

#[test]
fn e7_broken_files() {
    let names =
        ["load_truncated", "load_header_cut", "load_zero_bytes", "load_lfs_pointer", "load_huge_header"];
    for name in names {
        let mut fixture = Fixture::named(name);
        fixture.expect.refusal_words.push("download".into());
        assert_refused(&fixture, 1);
        assert_refused(&fixture, 2);
    }
    for name in ["load_tokenizer_cut", "load_config_empty"] {
        assert_refused(&Fixture::named(name), 1);
    }
    let exit = command(std::path::Path::new("no/such/model"), 1).run_to_exit(REFUSAL_LIMIT);
    assert_eq!(exit.code, Some(3), "{}", exit.output);
    assert!(exit.output.contains("no/such/model"), "{}", exit.output);
}

#[test]
fn e3_end_tokens_from_every_source() {
    let served = serve("chain", 1);
    let answer = served.server.complete("F", json!({"max_tokens": 12}));
    assert_eq!((answer.text.as_str(), answer.finish.as_str(), answer.completion_tokens), (" one", "stop", 2));
    let answer = served.server.complete("F", json!({"max_tokens": 8, "ignore_eos": true}));
    assert_eq!((answer.finish.as_str(), answer.completion_tokens), ("length", 8));
    assert_eq!(answer.text, " one two three");
    served.server.stop();

    let served = serve("chain_no_generation_config", 1);
    let answer = served.server.complete("F", json!({"max_tokens": 12}));
    assert_eq!((answer.text.as_str(), answer.finish.as_str()), (" one two three", "stop"));
    served.server.stop();

    let served = serve("chain_eos_only_in_tokenizer_config", 1);
    let answer = served.server.complete("A", json!({"max_tokens": 12}));
    assert_eq!((answer.text.as_str(), answer.finish.as_str()), (" alpha beta gamma delta", "stop"));
    served.server.stop();
}

#[test]
fn e4_both_spellings_of_rope_values() {
    check_at(&["rand_rope4_llama3", "rand_rope5_llama3", "rand_rope_linear"], &[1, 2]);
}

#[test]
fn e5_head_dim_given_absent_or_null() {
    check_at(&["rand_headdim"], &[1, 2]);
    for null in [false, true] {
        let mut fixture = Fixture::named("rand_heads3");
        let config = fixture.folder.config.as_object_mut().expect("invariant: config is an object");
        config.remove("head_dim");
        if null {
            config.insert("head_dim".into(), Value::Null);
        }
        let served = serve_with(fixture, 3, |c| c);
        assert_greedy(&served.server, &served.fixture, 3);
        served.server.stop();
    }
}

#[test]
fn codes_give_the_texts_of_floats() {
    for format in ["q8_0", "q4_0", "q4_k"] {
        for tp_size in [1, 4] {
            let served = serve_with(Fixture::named("chain"), tp_size, |c| c.flag("--quantize", format));
            for script in &served.fixture.expect.scripts {
                let answer =
                    served.server.complete(&script.key.to_string(), json!({"max_tokens": script.ids.len()}));
                let what = format!("{format} at tp {tp_size}, script {:?}", script.key);
                assert_eq!(answer.text.trim_start(), script.text.trim_start(), "{what}");
            }
            served.server.stop();
        }
    }
}

#[test]
fn e6_where_the_chat_template_lives() {
    let places =
        ["chain", "chain_jinja_file", "chain_template_json", "chain_named_templates", "chain_hard_template"];
    for name in places {
        let served = serve(name, 1);
        let answer = served.server.chat("ab", json!({}));
        assert_eq!((answer.text.as_str(), answer.finish.as_str()), (" hello there", "stop"), "{name}");
        served.server.stop();
    }
    let temp = TempDir::new("e6");
    let file = temp.join("override.jinja");
    std::fs::write(&file, template::PLAIN).expect("the file can be written");
    let served = serve_with(Fixture::named("chain_nochat"), 1, |c| c.flag("--chat-template", file.display()));
    assert_eq!(served.server.chat("ab", json!({})).text, " hello there");
    served.server.stop();
}

#[test]
fn e6_a_model_without_a_template_says_so() {
    let mut fixture = Fixture::named("chain");
    fixture.folder.chat_template = ChatTemplate::None;
    let served = serve_with(fixture, 1, |c| c);
    let server = &served.server;
    let response = server.post("/v1/chat/completions", &server.chat_body("ab", json!({})));
    assert_eq!(response.status, 400, "{}", response.json());
    let message = response.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("chat template") && message.contains("--chat-template"), "{message}");
    assert_eq!(server.complete("A", json!({})).text, " alpha beta gamma delta");
    let output = served.server.stop();
    let warnings = output.lines().filter(|l| l.contains("chat template")).count();
    assert_eq!(warnings, 1, "one warning at start: {output}");
}

#[test]
fn every_known_answer_is_tried_somewhere() {
    // A fixture that is added must be used here or in another test of the binary or its clients.
    let sources = [
        include_str!("correctness.rs"),
        include_str!("streaming.rs"),
        include_str!("processes.rs"),
        include_str!("../../../tests/python/conftest.py"),
        include_str!("../../../tests/python/test_openai_features.py"),
    ];
    let unused: Vec<&str> = fixtures::names()
        .into_iter()
        .filter(|name| !sources.iter().any(|s| s.contains(&format!("\"{name}\""))))
        .collect();
    assert_eq!(unused, Vec::<&str>::new(), "fixtures that no test serves");
}
