//! What protects a server, on the real binary: keys, limits, time-outs, TLS, thousands of connections (B11); where
//! the time of an answer went; calls that are forced.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{REFUSAL_LIMIT, command, serve_with};
use lockstep_testkit::http::Response;
use lockstep_testkit::process::poll;
use lockstep_testkit::server::START_LIMIT;
use lockstep_testkit::{Fixture, Server, TempDir};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring};

const KEY: &str = "a-key-of-a-file";
const COMPLETIONS: &str = "/v1/completions";
/// The answer to the fixture's prompt `A`.
const ALPHA: &str = " alpha beta gamma delta";

/// A request with the key and further headers.
fn ask(server: &Server, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
    let key = format!("Bearer {KEY}");
    let mut all = vec![("Authorization", key.as_str()), ("Content-Type", "application/json")];
    all.extend_from_slice(headers);
    server.http.request(method, path, &all, body.as_bytes()).unwrap()
}

/// Sends an endless streamed request and does not wait for its answer.
fn leave_running(server: &Server, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    stream
}

/// Open requests as the api counts them.
fn open_requests(server: &Server) -> u64 {
    ask(server, "GET", "/server_info", &[], "").json()["api"]["requests_open"].as_u64().unwrap()
}

#[test]
fn keys_queue_limit_time_outs_and_timing() {
    let keys = TempDir::new("keys");
    let file = keys.path().join("keys.txt");
    std::fs::write(&file, format!("# whose\n\n{KEY}\n")).unwrap();
    let served = serve_with(Fixture::named("chain_long"), 1, |command| {
        let command = command.flag("--api-key-file", file.display()).flag("--api-key", "another");
        command.flag("--max-running", 1).flag("--max-queued", 1).flag("--head-timeout", 0.5)
    });
    let server = &served.server;
    let body = server.completion_body("A", json!({})).to_string();
    let without = server.http.request("POST", COMPLETIONS, &[], body.as_bytes()).unwrap();
    assert_eq!((without.status, without.json()["error"]["code"].as_str()), (401, Some("invalid_api_key")));
    assert_eq!(server.get("/health").status, 200);
    let other = [("Authorization", "Bearer another"), ("Content-Type", "application/json")];
    assert_eq!(server.http.request("POST", COMPLETIONS, &other, body.as_bytes()).unwrap().status, 200);

    let timed = ask(server, "POST", COMPLETIONS, &[("x-lockstep-timing", "1")], &body);
    let timing: Value = serde_json::from_str(timed.header("x-lockstep-timing").unwrap()).unwrap();
    assert_eq!(timed.json()["choices"][0]["text"], ALPHA);
    assert_eq!(timed.json()["choices"][0]["timing"], timing);
    assert_eq!(
        (&timing["steps"], &timing["prefill_chunks"], &timing["completion_tokens"]),
        (&json!(5), &json!(1), &json!(5))
    );
    assert_eq!(timing["batch_size"], json!({"min": 1, "mean": 1.0, "max": 1}));
    let ms = |name: &str| timing[name].as_f64().unwrap();
    assert!(ms("prefill_ms") > 0.0 && ms("decode_ms") > 0.0, "{timing}");
    assert!(ms("queue_ms") + ms("prefill_ms") + ms("decode_ms") <= ms("total_ms"), "{timing}");

    let late = server.http.raw(b"GET /health HT").unwrap();
    assert_eq!((late.status, late.json()["error"]["code"].as_str()), (408, Some("request_timeout")));

    let endless = server.completion_body("C", json!({"max_tokens": 100_000, "stream": true}));
    let running: Vec<_> = (0..2).map(|_| leave_running(server, &endless)).collect();
    poll(REFUSAL_LIMIT, || (open_requests(server) == 2).then_some(())).expect("two requests are open");
    let full = ask(server, "POST", COMPLETIONS, &[], &body);
    assert_eq!((full.status, full.json()["error"]["code"].as_str()), (503, Some("queue_full")));
    assert_eq!(full.header("retry-after"), Some("1"));
    drop(running);
    poll(REFUSAL_LIMIT, || (open_requests(server) == 0).then_some(())).expect("both are aborted");
    assert_eq!(ask(server, "POST", COMPLETIONS, &[], &body).json()["choices"][0]["text"], ALPHA);
}

#[test]
fn https_with_a_certificate_of_ones_own() {
    let temp = TempDir::new("tls");
    let model = Fixture::named("chain").write_into(temp.path());
    let made = rcgen::generate_simple_self_signed(["localhost".into()]).unwrap();
    let (cert, key) = (temp.path().join("cert.pem"), temp.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let refused = command(&model, 1).flag("--tls-cert", cert.display()).flag("--tls-key", cert.display());
    let refused = refused.run_to_exit(REFUSAL_LIMIT);
    assert_eq!(refused.code, Some(2), "{}", refused.output);
    assert!(refused.output.contains("holds no private key in PEM form"), "{}", refused.output);

    let command = command(&model, 1).flag("--tls-cert", cert.display()).flag("--tls-key", key.display());
    let server = command.spawn();
    let listening = || server.output().contains("listening on https://").then_some(());
    poll(START_LIMIT, listening).unwrap_or_else(|| panic!("{}", server.output()));
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let session = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    let socket = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut stream = StreamOwned::new(session, socket);
    let body = server.completion_body("A", json!({"stream": true})).to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(" alpha"), "{answer}");
    assert!(answer.contains("data: [DONE]"), "{answer}");
}

/// Files that a process has open.
fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn five_thousand_idle_connections_leave_room_for_those_that_ask() {
    const IDLE: usize = 5000;
    let needed = IDLE as u64 + 400;
    let limit = lockstep_launch::raise_fd_limit().unwrap().now;
    if limit.is_some_and(|limit| limit < needed) {
        eprintln!("skipped: the hard limit of open files is {limit:?}, this test needs {needed}");
        return;
    }
    let served =
        serve_with(Fixture::named("chain"), 1, |command| command.flag("--max-connections", IDLE + 50));
    let server = &served.server;
    let baseline = server.baseline();
    let before = descriptors(server.pid());
    let idle: Vec<_> = (0..IDLE).map(|_| TcpStream::connect(("127.0.0.1", server.port)).unwrap()).collect();
    // Connections of the baseline may be closed after they were counted, so `before` is no part of this; that all count
    // as open is what the refusals below show.
    poll(REFUSAL_LIMIT, || (descriptors(server.pid()) >= IDLE).then_some(())).expect("all are accepted");
    let body = server.completion_body("A", json!({}));
    let streams: Vec<_> = (0..10).map(|_| server.open_stream(COMPLETIONS, &body)).collect();
    assert_eq!(server.complete("A", json!({})).text, ALPHA);
    for mut stream in streams {
        let text = String::from_utf8(stream.rest().unwrap()).unwrap();
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    let more: Vec<_> = (0..100).map(|_| TcpStream::connect(("127.0.0.1", server.port)).unwrap()).collect();
    let refused = poll(REFUSAL_LIMIT, || Some(server.post(COMPLETIONS, &body)).filter(|r| r.status == 503));
    let refused = refused.expect("the server is full");
    assert_eq!(refused.json()["error"]["code"], "too_many_connections");
    assert_eq!(server.get("/health").status, 200);
    drop((idle, more));
    poll(REFUSAL_LIMIT, || (descriptors(server.pid()) <= before + 5).then_some(())).expect("all are closed");
    server.after_check(&baseline, "A", ALPHA);
}

#[test]
fn more_connections_than_files_may_be_open_are_refused_at_start() {
    let temp = TempDir::new("too-many");
    let model = Fixture::named("chain").write_into(temp.path());
    let refused = command(&model, 1).flag("--max-connections", u32::MAX).run_to_exit(REFUSAL_LIMIT);
    assert_eq!(refused.code, Some(2), "{}", refused.output);
    assert!(refused.output.contains("file descriptors"), "{}", refused.output);
}

#[test]
fn a_forced_call_comes_out_whole_and_streamed() {
    let served = serve_with(Fixture::named("chain_tools"), 1, |c| c.flag("--tool-call-parser", "hermes"));
    let server = &served.server;
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false},
    });
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": parameters}});
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
        let extra =
            json!({"tools": [tool], "tool_choice": choice, "max_tokens": 200, "parallel_tool_calls": false});
        let body = server.chat_body("ab", extra);
        let whole = server.post("/v1/chat/completions", &body).json();
        let message = &whole["choices"][0]["message"];
        let function = &message["tool_calls"][0]["function"];
        assert_eq!(function["name"], "weather", "{whole}");
        let arguments = function["arguments"].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Value>(arguments).unwrap(), json!({"city": "Oslo"}), "{whole}");
        assert_eq!(message["content"], Value::Null, "{whole}");
        let streamed = server.stream("/v1/chat/completions", &body);
        let (mut name, mut joined) = (String::new(), String::new());
        for chunk in &streamed.chunks {
            let call = &chunk["choices"][0]["delta"]["tool_calls"][0]["function"];
            name += call["name"].as_str().unwrap_or_default();
            joined += call["arguments"].as_str().unwrap_or_default();
        }
        assert_eq!((name.as_str(), joined.as_str()), ("weather", arguments));
    }
}
