//! Data parallelism on the real binary: replicas answer alike, one dies and comes back while the other serves, one is
//! drained, and prefixes find their replica.

mod common;

use common::{BINARY, REFUSAL_LIMIT, Served, command, serve_with};
use lockstep_testkit::process::{self, Signal, poll};
use lockstep_testkit::server::{EXIT_LIMIT, Streamed};
use lockstep_testkit::{Fixture, ServeCommand, Server, TempDir};
use serde_json::{Value, json};
use std::time::Duration;

/// A replica is back in this time on a busy machine: its end, a pause of a second, its start.
const BACK: Duration = Duration::from_secs(60);

/// The number of replica `dp` under `key` of `/server_info`, which is at the top of the replica or in its engine.
fn of_replica(server: &Server, dp: usize, pointer: &str) -> u64 {
    let info = server.info();
    info["replicas"][dp].pointer(pointer).and_then(Value::as_u64).unwrap_or_default()
}

/// States of all replicas, as `/health/ready` tells them; empty while it is not ready.
fn states(server: &Server) -> Vec<String> {
    let ready = server.get("/health/ready").json();
    let replicas = ready["replicas"].as_array().cloned().unwrap_or_default();
    replicas.iter().map(|r| r["state"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Requests sent to replica `dp`, for whatever reason.
fn routed(server: &Server, dp: usize) -> u64 {
    let info = server.info();
    let reasons = info["replicas"][dp]["requests_routed"].as_object().cloned().unwrap_or_default();
    reasons.values().filter_map(Value::as_u64).sum()
}

/// Answers to known prompts, from several clients at once.
fn check_answers(server: &Server) {
    std::thread::scope(|scope| {
        for client in 0..4 {
            scope.spawn(move || {
                for turn in 0..4 {
                    let (prompt, text) = match (client + turn) % 2 {
                        0 => ("A", " alpha beta gamma delta"),
                        _ => ("B", " 😀é漢 ok"),
                    };
                    let answer = server.complete(prompt, json!({"max_tokens": 12}));
                    assert_eq!(answer.text.trim_start(), text.trim_start());
                }
            });
        }
    });
}

fn check_layout(server: &Server, names: &[&str], pp_size: usize) {
    for (rank, name) in names.iter().enumerate() {
        let process = server.process(&format!("lockstep-{name}-scheduler"));
        let info = server.info();
        let told = &info["engine"]["ranks"][rank];
        assert_eq!(
            (&told["label"], &told["pid"], &told["rank"]),
            (&json!(name), &json!(process.pid), &json!(rank))
        );
    }
    let info = server.info();
    assert_eq!(info["topology"], json!({"tp_size": 2, "pp_size": pp_size, "dp_size": 2}));
    assert_eq!(info["engine"]["pages_total"], 2 * 1024);
    let ready = poll(BACK, || (states(server) == ["serving", "serving"]).then_some(()));
    assert!(ready.is_some(), "{:?}", states(server));
}

/// Kills rank `victim` of replica 1 under four streams and two waiting requests.
fn check_death(server: &Server, victim: &str) {
    let long = server.completion_body("C", json!({"max_tokens": 1200}));
    let whole = server.stream("/v1/completions", &long);
    assert_eq!(whole.finishes, ["length"]);
    let mut streams: Vec<_> = (0..4).map(|_| server.open_stream("/v1/completions", &long)).collect();
    let mut begun: Vec<Streamed> = (0..4).map(|_| Streamed::default()).collect();
    for (stream, streamed) in streams.iter_mut().zip(&mut begun) {
        streamed.push(&stream.next_event().expect("an event").expect("the stream is open"));
    }
    assert_eq!([0, 1].map(|dp| of_replica(server, dp, "/requests_open")), [2, 2]);
    let before = server.process(victim);
    std::thread::scope(|scope| {
        // Both replicas run as many requests as they may: these wait, one on each.
        let waiting: Vec<_> =
            (0..2).map(|_| scope.spawn(|| server.complete("A", json!({"max_tokens": 4})).text)).collect();
        let waits = poll(BACK, || {
            ([0, 1].map(|dp| of_replica(server, dp, "/requests_open")) == [3, 3]).then_some(())
        });
        assert!(waits.is_some(), "{}", server.info());
        process::signal(before.pid, Signal::Kill);
        let readers: Vec<_> = streams
            .into_iter()
            .zip(begun)
            .map(|(mut stream, mut streamed)| {
                scope.spawn(move || {
                    streamed.read_rest(&mut stream);
                    streamed
                })
            })
            .collect();
        let ends: Vec<Streamed> =
            readers.into_iter().map(|reader| reader.join().expect("a reader")).collect();
        let (failed, fine): (Vec<_>, Vec<_>) = ends.into_iter().partition(|end| end.error.is_some());
        assert_eq!((failed.len(), fine.len()), (2, 2), "{failed:?}");
        for end in &failed {
            let error = end.error.clone().unwrap_or_default();
            assert_eq!(error["code"], "engine_restarting", "{error}");
            let message = error["message"].as_str().unwrap_or_default();
            assert!(message.contains(victim) && message.contains("SIGKILL"), "{message}");
            assert!(whole.text.starts_with(&end.text), "what came was right");
        }
        for end in &fine {
            assert_eq!((end.text == whole.text, end.done, &end.broken), (true, true, &None));
        }
        for answer in waiting {
            assert_eq!(answer.join().expect("an answer"), " alpha beta gamma delta");
        }
    });
    assert_eq!(of_replica(server, 1, "/requests_moved_away"), 1);
    let back = poll(BACK, || (states(server) == ["serving", "serving"]).then_some(()));
    assert!(back.is_some(), "{:?}\n{}", states(server), server.output());
    assert_ne!(server.process(victim).pid, before.pid);
    assert!(server.info()["processes"].to_string().contains(&server.process(victim).pid.to_string()));
}

fn check_drain(server: &Server) {
    let drained = server.post("/drain_replica", &json!({"replica": 0})).json();
    assert_eq!(drained["state"], "drained", "{drained}");
    let before = [routed(server, 0), routed(server, 1)];
    check_answers(server);
    assert_eq!([routed(server, 0), routed(server, 1)], [before[0], before[1] + 16]);
    assert_eq!(states(server), ["drained", "serving"]);
    assert_eq!(server.post("/resume_replica", &json!({"replica": 0})).json()["state"], "serving");
    check_answers(server);
    assert!(routed(server, 0) > before[0]);
}

#[test]
fn replicas_serve_and_one_dies_alone() {
    let served = serve_with(Fixture::named("chain_long"), 2, |c| {
        c.flag("--dp", 2)
            .flag("--dp-policy", "least-load")
            .flag("--num-tokenizer", 1)
            .flag("--max-running", 2)
            .flag("--restart", "on-failure")
    });
    let server = &served.server;
    check_layout(server, &["DP0-TP0", "DP0-TP1", "DP1-TP0", "DP1-TP1"], 1);
    check_answers(server);
    assert!(routed(server, 0) >= 4 && routed(server, 1) >= 4);
    let n = server.completion_body("A", json!({"max_tokens": 4, "n": 3}));
    let before = [routed(server, 0), routed(server, 1)];
    let answer = server.post("/v1/completions", &n).json();
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(3), "{answer}");
    let mut after = [routed(server, 0) - before[0], routed(server, 1) - before[1]];
    after.sort_unstable();
    assert_eq!(after, [0, 3], "choices of one prompt stay together");
    check_death(server, "lockstep-DP1-TP1-scheduler");
    check_answers(server);
    check_drain(server);
    served.server.stop();
}

#[test]
fn replicas_of_two_stages_serve_and_one_dies_alone() {
    let served = serve_with(Fixture::named("chain_long"), 2, |c| {
        c.flag("--pp", 2)
            .flag("--dp", 2)
            .flag("--dp-policy", "least-load")
            .flag("--max-running", 2)
            .flag("--restart", "on-failure")
    });
    let names = [
        "DP0-PP0-TP0",
        "DP0-PP0-TP1",
        "DP0-PP1-TP0",
        "DP0-PP1-TP1",
        "DP1-PP0-TP0",
        "DP1-PP0-TP1",
        "DP1-PP1-TP0",
        "DP1-PP1-TP1",
    ];
    check_layout(&served.server, &names, 2);
    check_answers(&served.server);
    check_death(&served.server, "lockstep-DP1-PP1-TP0-scheduler");
    check_answers(&served.server);
    served.server.stop();
}

/// Words of a session's first turn: its number in binary, so that no two sessions begin alike.
fn turn(session: usize, turn: usize) -> String {
    let bits = (0..40).map(|bit| if session >> (bit % 4) & 1 == 1 { "B " } else { "A " });
    let words: String = bits.collect();
    format!("{}A", words.repeat(turn))
}

/// Prompt and cached tokens of seven sessions that grow by a turn four times, one after the other.
fn hits(policy: &str) -> (u64, u64, Served) {
    let served = serve_with(Fixture::named("chain"), 1, |c| c.flag("--dp", 2).flag("--dp-policy", policy));
    for turns in 1..=4 {
        for session in 0..7 {
            let answer = served.server.complete(&turn(session, turns), json!({"max_tokens": 2}));
            assert_eq!(answer.text.trim_start(), "alpha beta");
        }
    }
    let sum = |pointer| (0..2).map(|dp| of_replica(&served.server, dp, pointer)).sum();
    (sum("/engine/totals/prompt_tokens"), sum("/engine/totals/cached_tokens"), served)
}

#[test]
fn sessions_stay_where_their_prefix_is() {
    let (prompt_tokens, cached, served) = hits("prefix-affinity");
    let known: u64 = (0..2).map(|dp| of_replica(&served.server, dp, "/requests_routed/prefix")).sum();
    assert_eq!(known, 7 * 3, "every turn after the first");
    let metrics = served.server.get("/metrics");
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    for dp in 0..2 {
        let cached = of_replica(&served.server, dp, "/engine/totals/cached_tokens");
        let line = format!("lockstep_replica_cached_tokens_total{{dp=\"{dp}\"}} {cached}");
        assert!(cached > 0 && metrics.contains(&line), "{line} is not in\n{metrics}");
    }
    served.server.stop();
    let (same_tokens, cached_by_turns, served) = hits("round-robin");
    served.server.stop();
    assert_eq!(prompt_tokens, same_tokens);
    // Turns of 40 tokens, pages of 16: affinity finds all whole pages of the turns before.
    assert!(3 * cached_by_turns < 2 * cached, "{cached} cached by affinity, {cached_by_turns} in turns");
    assert!(2 * cached > prompt_tokens, "{cached} of {prompt_tokens}");
}

#[test]
fn without_restart_the_death_of_a_replica_ends_the_server() {
    let Served { mut server, .. } = serve_with(Fixture::named("chain"), 1, |c| c.flag("--dp", 2));
    process::signal(server.process("lockstep-DP1-TP0-scheduler").pid, Signal::Kill);
    let exit = server.wait_exit(EXIT_LIMIT);
    assert_eq!(exit.code, Some(4), "{}", exit.output);
    let last = exit.output.lines().last().unwrap_or_default();
    assert!(last.contains("lockstep-DP1-TP0-scheduler was killed by signal 9"), "{last}");
    server.wait_gone(Duration::from_secs(1));
}

#[test]
fn impossible_numbers_of_replicas_are_refused() {
    let temp = TempDir::new("dp-refused");
    let model = Fixture::named("chain").write_into(temp.path());
    let refused = |command: ServeCommand| command.run_to_exit(REFUSAL_LIMIT);
    for dp in ["0", "-1", "65"] {
        let exit = refused(ServeCommand::new(BINARY, &model).flag("--dp-size", dp));
        assert_eq!(exit.code, Some(2), "{}", exit.output);
        assert!(exit.output.contains(&format!("--dp {dp} is outside 1..=64 replicas")), "{}", exit.output);
    }
    let exit = refused(command(&model, 8).flag("--dp", 40));
    assert_eq!(exit.code, Some(2), "{}", exit.output);
    assert!(exit.output.contains("320 ranks, at most 256"), "{}", exit.output);
}
