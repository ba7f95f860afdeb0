//! Pipeline stages on the real binary: answers, what is told of them, a death, and what is refused.

mod common;

use common::{REFUSAL_LIMIT, Served, assert_greedy, command, serve_with};
use lockstep_testkit::process::{self, Signal};
use lockstep_testkit::server::EXIT_LIMIT;
use lockstep_testkit::{Fixture, TempDir};
use serde_json::json;
use std::time::Duration;

#[test]
fn two_stages_answer_like_one_and_a_death_ends_both() {
    let served = serve_with(Fixture::named("rand_llama"), 2, |c| c.flag("--pp", 2).flag("--threads", 1));
    let Served { mut server, fixture, .. } = served;
    assert_greedy(&server, &fixture, 2);
    // Several at once, so that both stages have something to do; with log-probabilities, which come from the last one.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_greedy(&server, &fixture, 2);
                let asked = json!({"max_tokens": 5, "logprobs": 2, "temperature": 0});
                let body = server.completion_body(&fixture.expect.prompt, asked);
                let answer = server.post("/v1/completions", &body).json();
                let values = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().cloned();
                let values = values.unwrap_or_default();
                assert_eq!(values.iter().filter(|value| value.is_number()).count(), 5, "{answer}");
            });
        }
    });
    let info = server.info();
    assert_eq!(info["topology"], json!({"tp_size": 2, "pp_size": 2, "dp_size": 1}));
    let ranks = info["engine"]["ranks"].as_array().cloned().unwrap_or_default();
    let labels: Vec<_> = ranks.iter().filter_map(|rank| rank["label"].as_str()).collect();
    assert_eq!(labels, ["PP0-TP0", "PP0-TP1", "PP1-TP0", "PP1-TP1"]);
    let layers = |rank: usize, end: &str| ranks[rank]["layers"][end].as_u64();
    assert_eq!((layers(0, "start"), layers(0, "end")), (Some(0), layers(2, "start")));
    assert!(ranks.iter().all(|rank| rank["kv_bytes"].as_u64() > Some(0)), "{info}");
    let stages = info["stages"].as_array().cloned().unwrap_or_default();
    let shares = |stage: &serde_json::Value| {
        let number = |field: &str| stage[field].as_f64().unwrap_or(-1.0);
        (number("computed_seconds"), number("work_seconds"), number("bubble"))
    };
    for stage in &stages {
        let (computed, work, bubble) = shares(stage);
        assert!(0.0 < computed && computed <= work, "{stage}");
        assert!((bubble - (1.0 - computed / work)).abs() < 1e-6, "{stage}");
    }
    assert_eq!(stages.len(), 4, "{info}");
    let metrics = String::from_utf8(server.get("/metrics").body).expect("UTF-8");
    let samples = metrics.lines().filter(|line| line.starts_with("lockstep_stage_bubble_ratio{"));
    assert_eq!(samples.count(), 4, "{metrics}");
    // Requests come for as long as is recorded, so that both stages have steps in it.
    let trace = std::thread::scope(|scope| {
        let recording = scope.spawn(|| server.get("/debug/trace?seconds=1").json());
        while !recording.is_finished() {
            assert_greedy(&server, &fixture, 2);
        }
        recording.join().expect("a trace")
    });
    let drawn = trace["otherData"]["stages"].as_array().cloned().unwrap_or_default();
    let bubbles: Vec<f64> = drawn.iter().filter_map(|stage| stage["bubble"].as_f64()).collect();
    assert!(bubbles.len() == 4 && bubbles.iter().all(|bubble| (0.0..1.0).contains(bubble)), "{drawn:?}");
    assert!(drawn.iter().all(|stage| stage["steps"].as_u64() > Some(0)), "{drawn:?}");
    assert_eq!(drawn[3]["rank"], "PP1-TP1");
    let events = trace["traceEvents"].as_array().cloned().unwrap_or_default();
    let lanes = events.iter().filter(|event| event["args"]["name"] == "device of the stage");
    assert_eq!(lanes.count(), 4);
    let victim = "lockstep-PP1-TP1-scheduler";
    process::signal(server.process(victim).pid, Signal::Kill);
    let exit = server.wait_exit(EXIT_LIMIT);
    assert_eq!(exit.code, Some(4), "{}", exit.output);
    let last = exit.output.lines().last().unwrap_or_default();
    assert!(last.contains(&format!("{victim} was killed by signal 9")), "{last}");
    server.wait_gone(Duration::from_secs(1));
    assert!(exit.output.contains("layers: PP0 0 to"), "the start tells who has which: {}", exit.output);
}

#[test]
fn impossible_stages_are_refused_in_one_sentence() {
    let temp = TempDir::new("pp-refused");
    let fixture = Fixture::named("rand_llama");
    let model = fixture.write_into(temp.path());
    let layers = fixture.folder.config["num_hidden_layers"].as_u64().unwrap_or_default();
    let cases: [(&[(&str, &str)], String); 6] = [
        (&[("--pp", "0")], "--pp 0 is outside 1..=64 stages".into()),
        (&[("--pp", "-2")], "--pp -2 is outside 1..=64 stages".into()),
        (&[("--pp", "60")], format!("the model has {layers} layers; use --pp 1 to {layers}")),
        (&[("--pp", "2"), ("--pp-layers", "1,90")], format!("must add up to the model's {layers} layers")),
        (&[("--pp", "2"), ("--pp-layers", "1")], "a number above 0 for each of the 2 stages".into()),
        (
            &[("--pp", "2"), ("--device", "cuda"), ("--gpu-ids", "0")],
            "--gpu-ids names 1 GPUs for 2 ranks".into(),
        ),
    ];
    for (flags, sentence) in cases {
        let command = flags.iter().fold(command(&model, 1), |c, (flag, value)| c.flag(flag, value));
        let exit = command.run_to_exit(REFUSAL_LIMIT);
        assert_eq!(exit.code, Some(2), "{flags:?}: {}", exit.output);
        assert!(exit.output.contains(&sentence), "{sentence} is not in\n{}", exit.output);
    }
}
