//! Clients that go away before their answer is whole (B8): slot and pages come free at once, whatever the request was
//! doing and however the connection ended, and the log stays quiet. `tests/faults/storm.py` does it by the thousand.
//!
//! `LOCKSTEP_TEST_ROUNDS` raises the number of repetitions.

mod common;

use common::{rounds, serve_with};
use lockstep_testkit::process::poll;
use lockstep_testkit::server::Baseline;
use lockstep_testkit::{Fixture, Server};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// Everything must be free this soon: a step, by design; a busy machine takes longer.
const FREE_LIMIT: Duration = Duration::from_secs(5);

/// A request on a connection of its own, whose answer nobody has begun to read.
fn send(server: &Server, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).expect("the server listens");
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).expect("the request is taken");
    stream
}

/// Waits until so many requests run and wait.
fn until_there_are(server: &Server, running: u64, waiting: u64) {
    let reached = || {
        let info = server.get("/server_info").json();
        let engine = &info["engine"];
        (engine["running"] == running && engine["waiting"] == waiting).then_some(())
    };
    assert!(
        poll(FREE_LIMIT, reached).is_some(),
        "never {running} running and {waiting} waiting: {}",
        server.info()
    );
}

fn assert_free(server: &Server, baseline: &Baseline, what: &str) {
    let free = || {
        let idle = ["running", "waiting", "requests_open"].iter().all(|key| server.info_number(key) == 0);
        (idle && server.pages_unheld() == baseline.pages_unheld).then_some(())
    };
    assert!(poll(FREE_LIMIT, free).is_some(), "{what}: {}", server.info());
}

/// Reads until the first event.
fn begin(stream: &mut TcpStream) {
    let (mut answer, mut part) = (Vec::new(), [0; 512]);
    while !answer.windows(6).any(|bytes| bytes == b"data: ") {
        let count = stream.read(&mut part).expect("the answer begins");
        assert!(count > 0, "closed: {}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&part[..count]);
    }
}

#[test]
fn b8_a_client_that_leaves_holds_nothing() {
    let served = serve_with(Fixture::named("chain_long"), 2, |c| {
        c.flag("--num-tokenizer", 1).flag("--max-running", 2).flag("--chunk", 64)
    });
    let server = &served.server;
    let baseline = server.baseline();
    let endless = |stream: bool| server.completion_body("C", json!({"max_tokens": 10_000, "stream": stream}));
    let mut requests = 0;
    for _ in 0..rounds(2) {
        let mut streamed = send(server, &endless(true));
        begin(&mut streamed);
        drop(streamed);
        assert_free(server, &baseline, "left in the middle of a stream");

        let whole = send(server, &endless(false));
        until_there_are(server, 1, 0);
        drop(whole);
        assert_free(server, &baseline, "left while waiting for a whole answer");

        let mut first = [0; 2].map(|_| send(server, &endless(true)));
        until_there_are(server, 2, 0);
        let queued = send(server, &endless(true));
        until_there_are(server, 2, 1);
        drop(queued);
        until_there_are(server, 2, 0);
        first.iter_mut().for_each(begin);
        drop(first);
        assert_free(server, &baseline, "left while queued behind a full batch");

        let prompt = "x".repeat(8000) + "C";
        let prefilling = send(server, &server.completion_body(&prompt, json!({"max_tokens": 10_000})));
        until_there_are(server, 1, 0);
        drop(prefilling);
        assert_free(server, &baseline, "left while the prompt was computed");

        let mut unread = send(server, &endless(true));
        begin(&mut unread);
        // What has come and was not read turns the close into a reset.
        let arrived = poll(FREE_LIMIT, || unread.peek(&mut [0]).ok().filter(|count| *count > 0));
        assert!(arrived.is_some(), "nothing more came");
        drop(unread);
        assert_free(server, &baseline, "reset");

        let mut half = send(server, &endless(true));
        begin(&mut half);
        half.shutdown(Shutdown::Write).expect("a connection");
        // Who closes only the sending half still gets the answer.
        (0..3).for_each(|_| begin(&mut half));
        until_there_are(server, 1, 0);
        drop(half);
        assert_free(server, &baseline, "half closed, then closed");
        requests += 8;
    }
    server.after_check(&baseline, "A", " alpha beta gamma delta");
    let output = served.server.stop();
    let lines = output.lines().skip_while(|line| !line.contains("listening on")).count();
    // Listening, draining, drained, and one for each request at most.
    assert!(lines <= 3 + requests, "{lines} lines for {requests} requests:\n{output}");
}
