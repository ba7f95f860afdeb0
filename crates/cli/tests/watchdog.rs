//! Processes of the real binary that are stopped instead of killed: noticed, named, ended; and health that says so.
//!
//! `LOCKSTEP_TEST_ROUNDS` has no effect here: a round takes as long as the time-out it is about.

mod common;

use common::{Served, command, serve_with};
use lockstep_testkit::fixtures::random_models;
use lockstep_testkit::process::{self, Signal, poll};
use lockstep_testkit::server::Streamed;
use lockstep_testkit::{Fixture, TempDir};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Seconds of `--collective-timeout`; a process is suspect after half of it.
const TIMEOUT_S: u64 = 3;
/// Everything is over in this time after a process was stopped: the time-out, the end, a busy machine.
const OVER: Duration = Duration::from_secs(30);

fn idle_server(timeout_s: u64) -> Served {
    serve_with(Fixture::named("chain"), 2, |c| {
        c.flag("--num-tokenizer", 1).flag("--collective-timeout", timeout_s)
    })
}

/// The answer's JSON once `path` has status `status`.
fn until_status(served: &Served, path: &str, status: u16) -> Value {
    let http = served.server.http.with_limit(Duration::from_secs(5));
    let found = poll(OVER, || http.get(path).ok().filter(|r| r.status == status).map(|r| r.json()));
    found.unwrap_or_else(|| panic!("{path} is never {status}:\n{}", served.server.output()))
}

#[test]
fn a_stopped_process_on_an_idle_server_is_named_and_ends_it() {
    for (name, label) in [
        ("lockstep-TP0-scheduler", "TP0"),
        ("lockstep-TP1-scheduler", "TP1"),
        ("lockstep-tokenizer-0", "tokenizer-0"),
        ("lockstep-detokenizer-0", "detokenizer-0"),
    ] {
        let mut served = idle_server(TIMEOUT_S);
        let victim = served.server.process(name);
        let stopped = Instant::now();
        process::signal(victim.pid, Signal::Stop);
        let health = until_status(&served, "/health", 503);
        assert_eq!(health["error"]["code"], "not_answering", "{health}");
        let message = health["error"]["message"].as_str().unwrap_or_default();
        assert!(message.starts_with(&format!("{label} does not answer")), "{message}");
        // Requests are admitted meanwhile, and hear how it ends.
        let body = served.server.completion_body("A", json!({}));
        let answer = served.server.http.post("/v1/completions", &body);
        let exit = served.server.wait_exit(OVER);
        assert!(stopped.elapsed() >= Duration::from_secs(TIMEOUT_S), "{name}: {:?}", stopped.elapsed());
        assert_eq!(exit.code, Some(4), "{name}: {}", exit.output);
        let last = exit.output.lines().last().unwrap_or_default();
        let said = format!("lockstep: {name} was ended while serving because {label} did not answer for ");
        assert!(last.starts_with(&said), "{name}: {last}\n{}", exit.output);
        assert!(last.contains("stopped by a signal"), "{last}");
        if let Ok(answer) = answer {
            assert_eq!(answer.status, 503, "{name}");
            let message = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
            assert!(message.contains(&format!("{label} did not answer")), "{message}");
        }
        for other in ["TP0", "TP1", "tokenizer-0", "detokenizer-0", "api"] {
            let told = exit.output.lines().any(|l| l.contains(&format!("{other} (pid ")));
            assert!(told, "the position of {other} is not told:\n{}", exit.output);
        }
        served.server.wait_gone(Duration::from_secs(1));
    }
}

#[test]
fn a_process_stopped_while_loading_is_named_and_ends_the_start() {
    let temp = TempDir::new("stopped-loading");
    let model = random_models::slow(4, 512).write_into(temp.path());
    let mut server =
        command(&model, 2).flag("--num-tokenizer", 1).flag("--collective-timeout", TIMEOUT_S).spawn();
    let name = "lockstep-TP1-scheduler";
    process::signal(server.process(name).pid, Signal::Stop);
    let exit = server.wait_exit(OVER);
    assert_eq!(exit.code, Some(4), "{}", exit.output);
    let last = exit.output.lines().last().unwrap_or_default();
    let said = format!("lockstep: {name} was ended while loading because TP1 did not answer for ");
    assert!(last.starts_with(&said) && last.contains("stopped by a signal"), "{last}");
    assert!(exit.output.lines().any(|line| line.contains("ERROR") && line.contains("TP1 does not answer")));
    server.wait_gone(Duration::from_secs(1));
}

#[test]
fn a_launcher_that_stood_still_suspects_nobody_and_says_nothing() {
    let served = idle_server(TIMEOUT_S);
    let launcher = served.server.pid();
    process::signal(launcher, Signal::Stop);
    // Longer than a stopped child would be left; nothing else can be waited for while the launcher stands still.
    std::thread::sleep(Duration::from_secs(TIMEOUT_S + 1));
    process::signal(launcher, Signal::Cont);
    until_status(&served, "/health", 200);
    until_status(&served, "/health/ready", 200);
    let said = served.server.output();
    assert!(!said.contains("does not answer"), "{said}");
    served.server.stop();
}

#[test]
fn health_follows_a_process_that_stops_and_goes_on() {
    let served = idle_server(60);
    let ready = until_status(&served, "/health/ready", 200);
    assert_eq!(ready["status"], "ready");
    assert!(ready["token_age_seconds"].as_f64().is_some_and(|age| age < 10.0), "{ready}");
    let victim = served.server.process("lockstep-TP1-scheduler");
    process::signal(victim.pid, Signal::Stop);
    for path in ["/health", "/health/ready", "/health_generate"] {
        let health = until_status(&served, path, 503);
        assert!(health["error"]["message"].as_str().is_some_and(|m| m.contains("TP1")), "{path}: {health}");
    }
    assert_eq!(served.server.get("/health/live").status, 200);
    process::signal(victim.pid, Signal::Cont);
    until_status(&served, "/health/ready", 200);
    until_status(&served, "/health", 200);
    assert_eq!(served.server.complete("A", json!({})).text, " alpha beta gamma delta");
    served.server.stop();
}

#[test]
fn a_failed_engine_is_started_again_behind_the_open_port() {
    let served = serve_with(Fixture::named("chain_long"), 2, |c| {
        c.flag("--num-tokenizer", 1).flag("--restart", "on-failure").flag("--restart-limit", 2)
    });
    let server = &served.server;
    for name in ["lockstep-TP1-scheduler", "lockstep-detokenizer-0"] {
        let victim = server.process(name);
        let body = server.completion_body("C", json!({"max_tokens": 900}));
        let mut stream = server.open_stream("/v1/completions", &body);
        stream.next_event().expect("the stream is alive").expect("the stream has begun");
        process::signal(victim.pid, Signal::Kill);
        let mut streamed = Streamed::default();
        streamed.read_rest(&mut stream);
        let error = streamed.error.unwrap_or_else(|| panic!("no error event: {:?}", streamed.broken));
        assert!(error.to_string().contains(name) && error.to_string().contains("SIGKILL"), "{error}");
        let health = until_status(&served, "/health", 503);
        assert_eq!(health["error"]["code"], "engine_restarting", "{health}");
        until_status(&served, "/health/ready", 200);
        assert_ne!(server.process(name).pid, victim.pid);
        assert_eq!(server.complete("A", json!({})).text, " alpha beta gamma delta");
        let listed = server.get("/server_info").json()["processes"].to_string();
        assert!(listed.contains(&server.process(name).pid.to_string()), "{listed}");
    }
    // The third failure in a row is one too many.
    let Served { mut server, .. } = served;
    process::signal(server.process("lockstep-TP0-scheduler").pid, Signal::Kill);
    let exit = server.wait_exit(OVER);
    assert_eq!(exit.code, Some(4), "{}", exit.output);
    let last = exit.output.lines().last().unwrap_or_default();
    assert!(last.contains("lockstep-TP0-scheduler was killed by signal 9"), "{last}");
    server.wait_gone(Duration::from_secs(1));
}
