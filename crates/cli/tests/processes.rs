//! Processes of the real binary: deaths while loading and serving, signals, servers side by side,
//! and what is left behind (nothing).
//!
//! Case numbers in the tests' names are those of the project's list of cases.
//! `LOCKSTEP_TEST_ROUNDS` raises the number of repetitions.

mod common;

use common::{REFUSAL_LIMIT, Served, command, rounds, serve, serve_with};
use lockstep_testkit::fixtures::random_models;
use lockstep_testkit::http::{EventStream, HttpClient};
use lockstep_testkit::process::{self, Signal, poll};
use lockstep_testkit::server::{EXIT_LIMIT, Exit, Streamed, free_port};
use lockstep_testkit::{Fixture, ServeCommand, Server, TempDir};
use serde_json::json;
use std::collections::BTreeSet;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// Every child of a server with two ranks and one tokenizer process.
const CHILDREN: [&str; 4] =
    ["lockstep-TP0-scheduler", "lockstep-TP1-scheduler", "lockstep-tokenizer-0", "lockstep-detokenizer-0"];
/// A child's death must have ended everything in this time.
const DEATH_LIMIT: Duration = Duration::from_secs(5);

/// Two ranks and a tokenizer process of their own.
fn two_ranks(model: &Path) -> ServeCommand {
    command(model, 2).flag("--num-tokenizer", 1).flag("--grace-seconds", 1)
}

/// A server of the endless chain, with pages for a dozen long answers.
fn endless() -> Served {
    serve_with(Fixture::named("chain_long"), 2, |c| {
        c.flag("--num-tokenizer", 1).flag("--grace-seconds", 1).flag("--num-pages", 4096)
    })
}

/// Open streams of long answers, each past its first event.
fn open_streams(server: &Server, count: usize) -> Vec<(EventStream, Streamed)> {
    let body = server.completion_body("C", json!({"max_tokens": 4000}));
    let mut streams: Vec<EventStream> =
        (0..count).map(|_| server.open_stream("/v1/completions", &body)).collect();
    let mut opened = Vec::new();
    for mut stream in streams.drain(..) {
        let mut streamed = Streamed::default();
        streamed.push(&stream.next_event().expect("the stream is alive").expect("the stream has begun"));
        opened.push((stream, streamed));
    }
    opened
}

fn assert_port_free(port: u16) {
    let bound = poll(Duration::from_secs(2), || TcpListener::bind(("127.0.0.1", port)).ok());
    assert!(bound.is_some(), "port {port} is still taken");
}

/// A server that a child's death ended: code, message, nothing left.
fn assert_died_of(server: &Server, exit: &Exit, name: &str) {
    assert_eq!(exit.code, Some(4), "killed {name}; output:\n{}", exit.output);
    let line = exit.output.lines().find(|l| l.contains(name) && l.contains("signal 9"));
    assert!(line.is_some(), "no line names {name} and signal 9:\n{}", exit.output);
    assert!(!exit.output.contains("panicked"), "{}", exit.output);
    server.wait_gone(Duration::from_secs(1));
    assert_port_free(server.port);
}

#[test]
fn b1_a_process_dies_while_loading() {
    let temp = TempDir::new("b1");
    let model = random_models::slow(4, 512).write_into(temp.path());
    for name in CHILDREN {
        for _ in 0..rounds(1) {
            let mut server = two_ranks(&model).spawn();
            let victim = server.process(name);
            process::signal(victim.pid, Signal::Kill);
            let exit = server.wait_exit(EXIT_LIMIT);
            assert_died_of(&server, &exit, name);
        }
    }
}

#[test]
fn b2_the_front_process_is_killed_while_serving() {
    let served = endless();
    let streams = open_streams(&served.server, 2);
    let (port, model) = (served.server.port, served.temp.join("chain_long"));
    served.server.signal(Signal::Kill);
    served.server.wait_gone(DEATH_LIMIT);
    drop(streams);
    // The same port works again at once.
    let server = two_ranks(&model).port(port).start();
    assert_eq!(server.complete("A", json!({})).text, " alpha beta gamma delta");
    server.stop();
}

#[test]
fn b2_the_front_process_is_killed_while_loading_or_in_a_long_prefill() {
    let temp = TempDir::new("b2");
    let fixture = random_models::slow(4, 512);
    let model = fixture.write_into(temp.path());
    let server = two_ranks(&model).spawn();
    server.process("lockstep-TP1-scheduler");
    server.signal(Signal::Kill);
    server.wait_gone(DEATH_LIMIT);

    let server = two_ranks(&model).flag("--chunk", 4096).start();
    let prompt: Vec<u32> = (0..4000).map(|i| i % 250).collect();
    let body = server.completion_body("", json!({"prompt": prompt, "max_tokens": 1}));
    let client = server.http;
    let asking = std::thread::spawn(move || client.post("/v1/completions", &body).map(|r| r.status));
    // Rank 0 answers between steps only: no answer means that it is in the prefill.
    let started = poll(Duration::from_secs(10), || {
        let info = server.get("/server_info");
        let busy = info.status == 503 || info.json()["engine"]["running"].as_u64() > Some(0);
        (busy || asking.is_finished()).then_some(())
    });
    assert!(started.is_some(), "the prompt never ran");
    server.signal(Signal::Kill);
    server.wait_gone(DEATH_LIMIT);
    drop(asking.join());
}

/// Sends `signal` and checks the end: time, code, nothing left.
fn assert_ends_by(mut server: Server, send: impl Fn(&Server), codes: &[i32]) {
    send(&server);
    let exit = server.wait_exit(EXIT_LIMIT);
    assert!(
        exit.code.is_some_and(|c| codes.contains(&c)),
        "{exit:?}, expected one of {codes:?}\n{}",
        exit.output
    );
    assert!(!exit.output.contains("panicked"), "{}", exit.output);
    server.wait_gone(Duration::from_secs(1));
    assert_port_free(server.port);
}

#[test]
fn b3_signals_while_idle() {
    let temp = TempDir::new("b3");
    let model = Fixture::named("chain").write_into(temp.path());
    assert_ends_by(two_ranks(&model).start(), |s| s.signal_group(Signal::Int), &[0, 130]);
    assert_ends_by(two_ranks(&model).start(), |s| s.signal(Signal::Term), &[0, 143]);
    assert_ends_by(two_ranks(&model).start(), |s| s.signal_group(Signal::Hup), &[0, 129, 143]);
}

#[test]
fn b3_signals_while_loading() {
    let temp = TempDir::new("b3-load");
    let model = random_models::slow(4, 512).write_into(temp.path());
    for (signal, codes) in [(Signal::Int, [0, 130]), (Signal::Term, [0, 143])] {
        let server = two_ranks(&model).spawn();
        server.process("lockstep-TP1-scheduler");
        assert_ends_by(server, |s| s.signal_group(signal), &codes);
    }
}

#[test]
fn b3_signals_with_open_streams() {
    for (signal, codes) in [(Signal::Int, [0, 130]), (Signal::Term, [0, 143])] {
        let served = endless();
        let mut streams = open_streams(&served.server, 8);
        assert_ends_by(served.server, |s| s.signal_group(signal), &codes);
        for (stream, streamed) in &mut streams {
            streamed.read_rest(stream);
            let told = streamed.error.is_some() || !streamed.finishes.is_empty();
            assert!(told, "a stream ended without a word: {:?}", streamed.chunks.last());
        }
    }
}

#[test]
fn b3_a_second_interrupt_does_not_wait() {
    let served = serve_with(Fixture::named("chain_long"), 2, |c| {
        c.flag("--grace-seconds", 60).flag("--num-pages", 4096)
    });
    let streams = open_streams(&served.server, 2);
    served.server.signal_group(Signal::Int);
    // The first one stops admission, which can be seen from outside.
    let draining = poll(Duration::from_secs(5), || match served.server.http.get("/health") {
        Ok(response) => (response.status != 200).then_some(()),
        Err(_) => Some(()),
    });
    assert!(draining.is_some(), "still healthy after SIGINT");
    assert_ends_by(served.server, |s| s.signal_group(Signal::Int), &[0, 130]);
    drop(streams);
}

#[test]
fn b4_a_process_dies_in_service() {
    for name in CHILDREN {
        let mut served = endless();
        let mut streams = open_streams(&served.server, 10);
        let victim = served.server.process(name);
        let killed = Instant::now();
        process::signal(victim.pid, Signal::Kill);
        for (stream, streamed) in &mut streams {
            streamed.read_rest(stream);
            let ended_well = streamed.done && !streamed.finishes.is_empty();
            assert!(
                streamed.error.is_some() || ended_well,
                "killed {name}: no error event, {:?}",
                streamed.broken
            );
        }
        assert!(killed.elapsed() < DEATH_LIMIT, "killed {name}: errors came after {:?}", killed.elapsed());
        if let Ok(health) = served.server.http.get("/health") {
            assert_ne!(health.status, 200, "killed {name}: healthy without it");
        }
        let exit = served.server.wait_exit(DEATH_LIMIT);
        assert_died_of(&served.server, &exit, name);
    }
}

#[test]
fn b5_servers_side_by_side() {
    let temp = TempDir::new("b5");
    let (chain, random) = (Fixture::named("chain"), Fixture::named("rand_llama"));
    let models = [chain.write_into(temp.path()), random.write_into(temp.path())];
    for _ in 0..rounds(2) {
        // Two of each, all at the same moment.
        let models = models.iter().cycle().take(4);
        let mut servers: Vec<Server> = models.map(|model| command(model, 2).spawn()).collect();
        servers.iter_mut().for_each(Server::wait_ready);
        for pair in servers.chunks(2) {
            assert_eq!(pair[0].complete("A", json!({})).text, " alpha beta gamma delta");
            common::assert_greedy(&pair[1], &random, 2);
        }
        servers.into_iter().for_each(|server| drop(server.stop()));
    }
}

#[test]
fn b5_a_taken_port_is_refused_before_anything_loads() {
    let temp = TempDir::new("b5-port");
    let model = Fixture::named("chain").write_into(temp.path());
    let taken = TcpListener::bind(("127.0.0.1", free_port())).expect("a free port");
    let port = taken.local_addr().expect("bound").port();
    let started = Instant::now();
    let exit = command(&model, 2).port(port).run_to_exit(REFUSAL_LIMIT);
    assert!(exit.code.is_some_and(|c| c != 0), "{exit:?}");
    let lines: Vec<&str> = exit.output.lines().filter(|l| l.contains(&port.to_string())).collect();
    assert_eq!(lines.len(), 1, "one line names the port: {}", exit.output);
    assert!(!exit.output.contains("TP0"), "a rank was started: {}", exit.output);
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn b6_the_first_request_is_never_lost() {
    let temp = TempDir::new("b6");
    let model = Fixture::named("chain").write_into(temp.path());
    for round in 0..rounds(5) {
        let mut server = two_ranks(&model).spawn();
        // No health check: the request goes out as soon as the port accepts.
        let open = poll(Duration::from_secs(60), || {
            assert!(server.try_wait().is_none(), "ended while starting:\n{}", server.output());
            TcpStream::connect(("127.0.0.1", server.port)).ok()
        });
        assert!(open.is_some(), "the port never opened:\n{}", server.output());
        assert_eq!(server.complete("A", json!({})).text, " alpha beta gamma delta", "round {round}");
        server.stop();
    }
}

/// Names in a folder that are ours.
fn our_files(folder: &str) -> BTreeSet<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return BTreeSet::new() };
    let names = entries.filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()));
    names.filter(|n| n.contains("lockstep") && !n.starts_with("testkit-")).collect()
}

#[test]
fn b10_nothing_is_left_behind_by_a_hard_kill() {
    let temp = TempDir::new("b10");
    let model = Fixture::named("chain").write_into(temp.path());
    let private = temp.join("private");
    std::fs::create_dir(&private).expect("a folder");
    let before: Vec<_> = ["/dev/shm", "/tmp"].map(|f| (f, our_files(f))).into();
    for _ in 0..rounds(3) {
        let server = two_ranks(&model).env("TMPDIR", &private).env("XDG_RUNTIME_DIR", &private).start();
        assert_eq!(server.complete("A", json!({})).text, " alpha beta gamma delta");
        server.processes().iter().for_each(|p| process::signal(p.pid, Signal::Kill));
        server.wait_gone(DEATH_LIMIT);
    }
    let left: Vec<_> =
        std::fs::read_dir(&private).expect("the folder").map(|e| e.expect("entry").path()).collect();
    assert!(left.is_empty(), "left in the private folder: {left:?}");
    // Other tests' servers may be starting meanwhile, so what is new must also go away.
    for (folder, before) in before {
        let clean = poll(Duration::from_secs(10), || our_files(folder).is_subset(&before).then_some(()));
        assert!(clean.is_some(), "left in {folder}: {:?}", our_files(folder).difference(&before));
    }
}

#[test]
fn names_of_the_processes() {
    let served = serve("chain", 2);
    let names = served.server.baseline().process_names;
    for name in ["lockstep-TP0-scheduler", "lockstep-TP1-scheduler", "lockstep-detokenizer-0"] {
        assert_eq!(names.iter().filter(|n| *n == name).count(), 1, "{names:?}");
    }
    assert_eq!(names.len(), 4, "the launcher and three children: {names:?}");
    served.server.stop();
}

/// A log that cannot be written, or that nobody reads, costs the log and nothing else.
#[test]
fn stderr_that_nobody_reads_stops_nothing() {
    let temp = TempDir::new("stderr");
    let model = Fixture::named("chain").write_into(temp.path());
    // A closed pipe, a full disk, a pipe that fills up.
    for sink in ["closed", "/dev/full", "unread"] {
        let port = free_port();
        let mut serve = std::process::Command::new(common::BINARY);
        serve.args(["serve", "--tp", "2", "--threads", "1", "--log-level", "debug", "--model"]).arg(&model);
        serve.args(["--port", &port.to_string()]).stdin(std::process::Stdio::null());
        match sink {
            "/dev/full" => {
                serve.stderr(std::fs::OpenOptions::new().write(true).open(sink).expect("/dev/full"))
            }
            _ => serve.stderr(std::process::Stdio::piped()),
        };
        let mut server = serve.spawn().expect("the server starts");
        let unread = if sink == "unread" {
            server.stderr.take()
        } else {
            drop(server.stderr.take());
            None
        };
        let client = HttpClient::local(port).with_limit(Duration::from_secs(5));
        let up = poll(Duration::from_secs(20), || client.get("/health").ok().filter(|r| r.status == 200));
        assert!(up.is_some(), "{sink}: the server never came up");
        // Each unknown field and each request writes log lines: more than a pipe and its queue hold.
        for i in 0..400 {
            let field = format!("unknown_{i}_{}", "x".repeat(4000));
            let body = json!({"prompt": "A", "max_tokens": 1, (field): 1});
            let answer = client.post("/v1/completions", &body).expect("an answer");
            assert_eq!(answer.status, 200, "{sink}, request {i}");
        }
        process::signal(server.id(), Signal::Term);
        let ended = poll(EXIT_LIMIT, || server.try_wait().expect("a child of this test"));
        if ended.is_none() {
            server.kill().expect("a child of this test");
        }
        assert_eq!(ended.and_then(|status| status.code()), Some(0), "{sink}");
        drop(unread);
    }
}
