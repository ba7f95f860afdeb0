//! What a server tells of single requests: its log as JSON lines, followed by one request's id through all processes,
//! and traces for a collector.

mod common;

use common::serve_with;
use lockstep_testkit::process::{self, Signal, poll};
use lockstep_testkit::{Fixture, Server};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Far above anything a passing test takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// A completion with further header lines; the answer's head and body.
fn complete_with(server: &Server, headers: &str) -> lockstep_testkit::http::Response {
    let body = server.completion_body("A", json!({})).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n{headers}\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    server.http.raw(format!("{head}{body}").as_bytes()).expect("an answer")
}

/// Every line of `output` as an object with what all lines have.
fn objects(output: &str) -> Vec<Value> {
    let parse = |line: &str| -> Value {
        let object: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        for name in ["time", "level", "target", "message"] {
            assert!(object[name].is_string(), "{name} is missing: {line}");
        }
        object
    };
    output.lines().map(parse).collect()
}

#[test]
fn one_request_is_followed_through_all_processes_of_a_json_log() {
    let mut served = serve_with(Fixture::named("chain_long"), 2, |c| {
        c.flag("--num-tokenizer", 1).flag("--log-format", "json").flag("--log-level", "debug")
    });
    let server = &mut served.server;
    let named = complete_with(server, "X-Request-Id: mine-42\r\n");
    assert_eq!((named.status, named.header("x-request-id")), (200, Some("mine-42")));
    let answer = named.json()["id"].as_str().expect("an id").to_owned();
    let invalid = complete_with(server, "X-Request-Id: a b\r\n");
    assert_eq!((invalid.status, invalid.header("x-request-id")), (200, None));
    // A rank that is killed: also the last word is an object, and it tells of the rank's last line in words.
    process::signal(server.process("lockstep-TP1-scheduler").pid, Signal::Kill);
    let exit = server.wait_exit(PATIENCE);
    assert_eq!(exit.code, Some(4), "{}", exit.output);

    let lines = objects(&exit.output);
    let submitted =
        lines.iter().find(|line| line["x_request_id"] == "mine-42").expect("the client's name is logged");
    assert_eq!((&submitted["answer"], &submitted["level"]), (&json!(answer), &json!("DEBUG")));
    let request = &submitted["request"];
    assert!(request.as_str().is_some_and(|id| id.starts_with('r')), "{submitted}");
    let of_it: Vec<&Value> = lines.iter().filter(|line| line["request"] == *request).collect();
    let processes: BTreeSet<&str> = of_it.iter().filter_map(|line| line["process"].as_str()).collect();
    assert_eq!(processes, BTreeSet::from(["TP0", "TP1", "api", "detokenizer-0", "tokenizer-0"]), "{of_it:?}");
    let queued = of_it.iter().find(|line| line["process"] == "TP1").expect("rank 1 tells");
    assert_eq!((&queued["role"], &queued["rank"]), (&json!("scheduler"), &json!(1)), "{queued}");
    assert!(of_it.iter().any(|line| line["message"] == "request finished" && line["finish"] == "stop"));
    let last = lines.last().expect("a last word");
    let word = last["message"].as_str().unwrap_or_default();
    assert!(word.starts_with("lockstep: lockstep-TP1-scheduler was killed by signal 9"), "{last}");
    assert!(!word.contains('{'), "{last}");
    server.wait_gone(Duration::from_secs(1));
}

/// Takes `count` posts and answers each with 200; the bodies, then the end. The port is closed before the last answer.
fn collector(count: usize) -> (u16, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("its number").port();
    let (sender, bodies) = channel();
    std::thread::spawn(move || {
        let mut listener = Some(listener);
        for left in (0..count).rev() {
            let open = listener.as_ref().expect("open until the last post");
            let mut stream = BufReader::new(open.accept().expect("a connection").0);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert!(stream.read_line(&mut head).expect("a head") > 0, "{head}");
            }
            assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
            let head = head.to_ascii_lowercase();
            assert!(head.contains("content-type: application/json\r\n"), "{head}");
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
            let mut body = vec![0; length.expect("a length")];
            stream.read_exact(&mut body).expect("a body");
            if left == 0 {
                listener = None;
            }
            let answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
            stream.get_mut().write_all(answer).expect("an answer");
            sender.send(serde_json::from_slice(&body).expect("JSON")).expect("the test listens");
        }
    });
    (port, bodies)
}

/// The next post's spans.
fn spans(bodies: &Receiver<Value>) -> Vec<Value> {
    let body = bodies.recv_timeout(PATIENCE).expect("a post");
    let resource = &body["resourceSpans"][0];
    assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "lockstep", "{body}");
    resource["scopeSpans"][0]["spans"].as_array().expect("spans").clone()
}

fn attributes(span: &Value) -> BTreeMap<&str, &Value> {
    let list = span["attributes"].as_array().expect("attributes");
    list.iter()
        .filter_map(|pair| Some((pair["key"].as_str()?, pair["value"].as_object()?.values().next()?)))
        .collect()
}

fn nanos(span: &Value, name: &str) -> u64 {
    span[name].as_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{name} in {span}"))
}

/// The phases of a finished request follow each other without a gap.
fn check_phases(spans: &[Value], request: &Value) {
    let names: Vec<_> = spans.iter().map(|span| span["name"].as_str().unwrap_or_default()).collect();
    assert_eq!(names, ["queue", "prefill", "decode"]);
    let mut at = nanos(request, "startTimeUnixNano");
    for span in spans {
        assert_eq!((&span["parentSpanId"], &span["traceId"]), (&request["spanId"], &request["traceId"]));
        assert_eq!(nanos(span, "startTimeUnixNano"), at, "{span}");
        at = nanos(span, "endTimeUnixNano");
    }
    assert_eq!(at, nanos(request, "endTimeUnixNano"));
    assert!(at > nanos(request, "startTimeUnixNano"));
}

#[test]
fn a_collector_is_told_of_requests_and_its_death_costs_nothing() {
    let (port, bodies) = collector(2);
    let served = serve_with(Fixture::named("chain_long"), 1, |c| {
        c.flag("--otlp-endpoint", format!("http://127.0.0.1:{port}"))
    });
    let server = &served.server;
    let unsampled = "traceparent: 00-11111111111111111111111111111111-2222222222222222-00\r\n";
    assert_eq!(complete_with(server, unsampled).status, 200);
    let parent =
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\ntracestate: a=1\r\n";
    assert_eq!(complete_with(server, &format!("{parent}X-Request-Id: mine-7\r\n")).status, 200);
    let told = spans(&bodies);
    assert_eq!(told.len(), 4, "nothing of the one whose client does not want it: {told:?}");
    let request = &told[0];
    assert_eq!(request["traceId"], "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(
        (&request["parentSpanId"], &request["traceState"]),
        (&json!("b7ad6b7169203331"), &json!("a=1"))
    );
    assert_eq!((&request["name"], &request["kind"]), (&json!("POST /v1/completions"), &json!(2)));
    let said = attributes(request);
    assert_eq!(
        (said["lockstep.end"], said["http.request.header.x-request-id"]),
        (&json!("stop"), &json!("mine-7"))
    );
    assert_eq!(said["gen_ai.usage.output_tokens"], "5", "{said:?}");
    assert_eq!(request["status"], Value::Null);
    check_phases(&told[1..], request);

    // A refusal of the engine, without a parent: an error, and a queue only.
    let too_long = server.completion_body(&"C ".repeat(20_000), json!({}));
    assert_eq!(server.post("/v1/completions", &too_long).status, 400);
    let told = spans(&bodies);
    assert_eq!((told.len(), &told[0]["status"]["code"], &told[1]["name"]), (2, &json!(2), &json!("queue")));
    assert_eq!(told[0]["parentSpanId"], Value::Null);

    // The collector has gone: answers come as before, what it missed is counted, and the end is not held up.
    assert_eq!(server.complete("A", json!({})).text, " alpha beta gamma delta");
    let counted = |outcome: &str, count: u32| {
        let wanted = format!("lockstep_traced_requests_total{{outcome=\"{outcome}\"}} {count}");
        let seen = poll(PATIENCE, || {
            let metrics = String::from_utf8(server.get("/metrics").body).expect("UTF-8");
            metrics.lines().any(|line| line == wanted).then_some(())
        });
        assert!(seen.is_some(), "{wanted} is not in the metrics:\n{}", server.output());
    };
    counted("failed", 1);
    counted("exported", 2);
    assert_eq!(server.get("/health").status, 200);
    let output = served.server.stop();
    assert_eq!(output.matches("traces cannot be sent to").count(), 1, "{output}");
}
