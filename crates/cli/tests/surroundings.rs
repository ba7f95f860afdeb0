//! The real binary in surroundings that containers and service managers give it: as process 1, with a `TMPDIR` that is
//! too long for a socket's path or cannot be written, with a full `/dev/shm`, with few file descriptors (B10, B11).
//!
//! Namespaces need a kernel that lets this user make them; where it does not, the test says so and ends.
//! `LOCKSTEP_TEST_ROUNDS` raises the number of repetitions.

mod common;

use common::{BINARY, REFUSAL_LIMIT, Served, command, rounds, serve_with};
use lockstep_testkit::fixtures::random_models;
use lockstep_testkit::http::HttpClient;
use lockstep_testkit::process::{self, MARK_VARIABLE, Signal, poll};
use lockstep_testkit::server::{EXIT_LIMIT, Streamed};
use lockstep_testkit::{Fixture, Server, TempDir};
use serde_json::json;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The answer to the fixture's prompt `A`.
const ALPHA: &str = " alpha beta gamma delta";
const PROCESS_1: [&str; 6] = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"];
const OWN_MOUNTS: [&str; 4] = ["unshare", "--user", "--map-root-user", "--mount"];

/// Whether these words can start a program here; says why not.
fn permitted(words: &[&str]) -> bool {
    let tried = Command::new(words[0]).args(&words[1..]).arg("true").stderr(Stdio::piped()).output();
    let reason = match tried {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    eprintln!("skipped: `{}` is not possible here: {reason}", words.join(" "));
    false
}

/// The launcher itself, where another program started it.
fn launcher(server: &Server) -> u32 {
    server.process("lockstep").pid
}

#[test]
fn a_server_as_process_1() {
    if !permitted(&PROCESS_1) {
        return;
    }
    let temp = TempDir::new("process-1");
    let model = Fixture::named("chain").write_into(temp.path());
    let command = command(&model, 2).flag("--grace-seconds", 1).under(&PROCESS_1);

    let mut server = command.start();
    assert_eq!(server.complete("A", json!({})).text, ALPHA);
    process::signal(launcher(&server), Signal::Term);
    let exit = server.wait_exit(EXIT_LIMIT);
    assert_eq!(exit.code, Some(0), "{}", exit.output);
    server.wait_gone(Duration::from_secs(1));

    let mut server = command.start();
    process::signal(server.process("lockstep-TP1-scheduler").pid, Signal::Kill);
    let exit = server.wait_exit(EXIT_LIMIT);
    let last = exit.output.lines().last().unwrap_or_default();
    assert!(
        exit.code == Some(4) && last.contains("lockstep-TP1-scheduler was killed by signal 9"),
        "{exit:?}"
    );

    let server = command.start();
    process::signal(launcher(&server), Signal::Kill);
    server.wait_gone(Duration::from_secs(5));
}

/// The kernel drops what process 1 does not handle: Ctrl-C must end a tool, and a server that is still reading files.
#[test]
fn commands_as_process_1_end_on_a_signal() {
    if !permitted(&PROCESS_1) {
        return;
    }
    let temp = TempDir::new("process-1-tools");
    let model = random_models::slow(4, 512).write_into(temp.path());
    for (number, (signal, code)) in [(Signal::Int, 130), (Signal::Term, 143)].into_iter().enumerate() {
        let mark = format!("surroundings-{}-{number}", std::process::id());
        let mut tool = Command::new(PROCESS_1[0]);
        tool.args(&PROCESS_1[1..]).args([BINARY, "verify", "--tokens", "200", "--model"]).arg(&model);
        tool.env(MARK_VARIABLE, &mark).stdout(Stdio::null()).stderr(Stdio::null());
        let mut tool = tool.spawn().expect("it was permitted");
        let named = || process::marked(&mark).into_iter().find(|p| p.name == "lockstep");
        let verify = poll(EXIT_LIMIT, named).expect("the tool runs");
        // Until it has come to its first line: before that, the signal is lost.
        let ended = poll(EXIT_LIMIT, || {
            process::signal(verify.pid, signal);
            tool.try_wait().expect("a child of this test")
        });
        process::signal(verify.pid, Signal::Kill);
        assert_eq!(ended.and_then(|status| status.code()), Some(code), "{signal:?}");
    }
}

/// Names in the folder as a process sees it.
fn seen_by(pid: u32, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/root{folder}")).expect("the folder is there");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn neither_temporary_folder_nor_dev_shm_is_needed() {
    let temp = TempDir::new("surroundings");
    let model = Fixture::named("chain").write_into(temp.path());
    // Twice as long as the path of a socket may be.
    let long = temp.join(&"t".repeat(100)).join("u".repeat(116));
    std::fs::create_dir_all(&long).expect("a folder");
    let command = command(&model, 2).flag("--num-tokenizer", 1).env("TMPDIR", &long);
    let server = command.start();
    assert_eq!(server.complete("A", json!({})).text, ALPHA);
    assert_eq!(std::fs::read_dir(&long).expect("the folder").count(), 0);
    server.stop();

    // 64 MiB of shared memory, as containers have it, all of it taken; and nowhere to write a file.
    let script = "mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o ro tmpfs \"$TMPDIR\" && \
                  head -c 64M /dev/zero >/dev/shm/full && exec \"$@\"";
    let words = [&OWN_MOUNTS[..], &["sh", "-c", script, "sh"]].concat();
    if !permitted(
        &[&OWN_MOUNTS[..], &["sh", "-c", "mount -t tmpfs tmpfs /dev/shm && exec \"$@\"", "sh"]].concat(),
    ) {
        return;
    }
    for _ in 0..rounds(1) {
        let server = command.clone().under(&words).start();
        assert_eq!(server.complete("A", json!({})).text, ALPHA);
        assert_eq!(seen_by(server.process("lockstep-TP0-scheduler").pid, "/dev/shm"), ["full"]);
        process::signal(launcher(&server), Signal::Term);
        server.wait_gone(EXIT_LIMIT);
    }
}

/// The shell's words that run a command with these limits of open files.
fn with_files(limits: &str) -> [String; 4] {
    ["sh".into(), "-c".into(), format!("ulimit {limits} && exec \"$@\""), "sh".into()]
}

fn served_with_files(limits: &str, tp_size: usize) -> Served {
    let words = with_files(limits);
    serve_with(Fixture::named("chain_long"), tp_size, |command| {
        command.under(&words.each_ref().map(String::as_str)).flag("--max-running", 64)
    })
}

#[test]
fn too_few_file_descriptors_are_said_at_start() {
    let temp = TempDir::new("few-files");
    let model = Fixture::named("chain").write_into(temp.path());
    for files in [16, 64, 140] {
        let words = with_files(&format!("-n {files}"));
        let command =
            command(&model, 2).flag("--num-tokenizer", 1).under(&words.each_ref().map(String::as_str));
        let exit = command.run_to_exit(REFUSAL_LIMIT);
        let sentence = format!(
            "lockstep: this process may open {files} files, at least 145 are needed; raise the hard limit"
        );
        let last = exit.output.lines().last().unwrap_or_default();
        assert!(exit.code == Some(2) && last.starts_with(&sentence), "{exit:?}");
        assert!(!exit.output.contains("TP0"), "a rank was started: {}", exit.output);
    }
}

/// Files that a process has open.
fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process lives").count()
}

/// How a stream of the endless answer, cut at 40 tokens, ended.
#[derive(PartialEq, Eq, Debug)]
enum Outcome {
    Answered,
    TurnedAway,
}

fn stream_in_thread(http: HttpClient, body: serde_json::Value) -> JoinHandle<Outcome> {
    thread::spawn(move || {
        let mut stream = http.open_stream("/v1/completions", &body).expect("every connection is answered");
        match stream.status {
            200 => {
                let streamed = Streamed::read(&mut stream);
                assert!(
                    streamed.done && streamed.error.is_none(),
                    "{:?} {:?}",
                    streamed.error,
                    streamed.broken
                );
                assert_eq!(streamed.text, " tick tock".repeat(20));
                Outcome::Answered
            }
            503 => Outcome::TurnedAway,
            other => panic!("status {other}"),
        }
    })
}

#[test]
fn b11_more_streams_than_file_descriptors() {
    for (limits, all) in [("-Sn 64", true), ("-n 256", false)] {
        let served = served_with_files(limits, 1);
        let server = &served.server;
        let baseline = server.baseline();
        // What the baseline's own connections held is gone.
        let before = poll(EXIT_LIMIT, || Some(descriptors(server.pid())).filter(|count| *count < 64));
        let before = before.expect("few descriptors when idle");
        for _ in 0..rounds(1) {
            let body = server.completion_body("C", json!({"max_tokens": 40, "stream": true}));
            let streams: Vec<_> = (0..400).map(|_| stream_in_thread(server.http, body.clone())).collect();
            let outcomes: Vec<Outcome> =
                streams.into_iter().map(|s| s.join().expect("a right end")).collect();
            let answered = outcomes.iter().filter(|outcome| **outcome == Outcome::Answered).count();
            assert!(
                answered >= 100 && (answered == 400 || !all),
                "{limits}: {answered} of 400 were answered"
            );
        }
        server.after_check(&baseline, "A", ALPHA);
        let closed = poll(EXIT_LIMIT, || (descriptors(server.pid()) <= before).then_some(()));
        assert!(
            closed.is_some(),
            "{limits}: {} descriptors, {before} at the start",
            descriptors(server.pid())
        );
    }
}

#[test]
fn b11_requests_leave_no_descriptor() {
    let served = serve_with(Fixture::named("chain"), 2, |command| command.flag("--num-tokenizer", 1));
    let server = &served.server;
    let count =
        || server.processes().iter().map(|p| (p.name.clone(), descriptors(p.pid))).collect::<Vec<_>>();
    server.complete("A", json!({}));
    let before = count();
    for _ in 0..rounds(1) {
        for _ in 0..500 {
            assert_eq!(server.complete("A", json!({})).text, ALPHA);
        }
    }
    // Fewer are fine: at the start a connection of the first request may still have been closing.
    let no_more = || count().iter().zip(&before).all(|(now, then)| now.0 == then.0 && now.1 <= then.1);
    let kept = poll(EXIT_LIMIT, || no_more().then_some(()));
    assert!(kept.is_some(), "{:?}, at the start {before:?}", count());
}

/// A drain that runs out of time: short answers are whole, endless ones end with an error event that says why, new
/// requests are refused, and the whole takes the grace and not much more.
#[test]
fn b3_a_drain_ends_streams_when_the_grace_is_over() {
    const GRACE: Duration = Duration::from_secs(2);
    let Served { mut server, .. } = serve_with(Fixture::named("chain_long"), 2, |c| {
        c.flag("--num-tokenizer", 1).flag("--grace-seconds", GRACE.as_secs()).flag("--num-pages", 4096)
    });
    let body = |tokens: u32| server.completion_body("C", json!({"max_tokens": tokens}));
    let mut short = server.open_stream("/v1/completions", &body(60));
    let mut endless = server.open_stream("/v1/completions", &body(100_000));
    endless.next_event().expect("the stream is alive").expect("the stream has begun");
    let told = Instant::now();
    server.signal(Signal::Term);
    let refused = poll(GRACE, || server.http.get("/health").ok().filter(|r| r.status == 503));
    assert!(refused.is_some(), "healthy while draining");
    assert!(Streamed::read(&mut short).done, "the short answer is whole");
    let mut cut = Streamed::default();
    cut.read_rest(&mut endless);
    let error = cut.error.unwrap_or_else(|| panic!("no error event: {:?}", cut.broken));
    assert!(told.elapsed() >= GRACE.mul_f64(0.9), "cut after {:?}: {error}", told.elapsed());
    let exit = server.wait_exit(EXIT_LIMIT);
    assert!(told.elapsed() < GRACE + Duration::from_secs(4), "{:?}", told.elapsed());
    let last = exit.output.lines().last().unwrap_or_default();
    assert!(exit.code == Some(143) && last.contains("because the grace was over"), "{exit:?}");
    assert!(error["message"].as_str().is_some_and(|m| m.contains("shut")), "{error}");
    server.wait_gone(Duration::from_secs(1));
}

/// A path that is no folder at all changes nothing either.
#[test]
fn a_missing_home_and_temporary_folder_change_nothing() {
    let temp = TempDir::new("nowhere");
    let model = Fixture::named("chain").write_into(temp.path());
    let nowhere = Path::new("/nowhere/at/all");
    let server =
        command(&model, 1).env("TMPDIR", nowhere).env("HOME", nowhere).env("XDG_CACHE_HOME", nowhere).start();
    assert_eq!(server.complete("A", json!({})).text, ALPHA);
    server.stop();
}
