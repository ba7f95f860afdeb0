//! Clients that keep the server waiting, too many of them, heads that are too large; whose web pages may ask.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, Server, config, get, post};
use lockstep_api::{ApiConfig, Cors, Patience};
use std::time::Duration;

const PATH: &str = "/v1/completions";
const SHORT: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(3600);
/// Nobody is ever overdue.
const ENDLESS: Patience = Patience { head: LONG, body: LONG, idle: LONG, write: LONG };

async fn start(patience: Patience, connections_max: usize) -> Server {
    Server::start_with(ApiConfig { patience, connections_max, ..config() }, 1, 100).await
}

/// `GET /version` with further header fields.
fn with_fields(fields: &str) -> String {
    get("/version").replacen("Host: x\r\n", &format!("Host: x\r\n{fields}"), 1)
}

#[tokio::test]
async fn a_head_that_does_not_end_gets_a_408() {
    let server = start(Patience { head: SHORT, ..ENDLESS }, 100).await;
    let mut client = server.connect().await;
    client.send(get("/version")).await;
    assert_eq!(client.reply().await.status, 200);
    client.send("GET /version HT").await;
    let error = client.reply().await.error(408);
    assert_eq!(error["code"], "request_timeout");
    assert_eq!(client.rest().await, b"", "the connection is closed");
    assert_eq!(server.ask(get("/health")).await.status, 200);
}

#[tokio::test]
async fn idle_connections_are_closed_and_long_answers_are_not() {
    let mut server = start(Patience { idle: SHORT, ..ENDLESS }, 100).await;
    let mut waiting = server.connect().await;
    waiting.send(post(PATH, r#"{"prompt":"a","stream":true}"#)).await;
    let id = server.engine.request().await.id;
    let mut silent = server.connect().await;
    let mut used = server.connect().await;
    used.send(get("/version")).await;
    assert_eq!(used.reply().await.status, 200);
    // Their ends come after the patience is over: for the answer in the making it plays no part.
    assert_eq!(silent.rest().await, b"");
    assert_eq!(used.rest().await, b"");
    server.engine.finish(id, "late", lockstep_core::FinishReason::Stop);
    assert_eq!(waiting.head().await.status, 200);
    assert!(waiting.chunk().await.unwrap().contains("late"));
}

#[tokio::test]
async fn a_body_that_does_not_end_gets_a_408() {
    let mut server = start(Patience { body: SHORT, ..ENDLESS }, 100).await;
    let whole = post(PATH, r#"{"prompt":"a"}"#);
    let mut client = server.connect().await;
    client.send(&whole[..whole.len() - 1]).await;
    let error = client.reply().await.error(408);
    assert_eq!(error["code"], "request_timeout");
    assert!(error["message"].as_str().unwrap().contains("13 bytes"), "{error}");
    assert_eq!(client.rest().await, b"", "the rest would be read as a request");
    server.engine.expect_silence();
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_and_its_request_aborted() {
    let mut server = start(Patience { write: SHORT, ..ENDLESS }, 100).await;
    let mut client = server.connect().await;
    client.send(post(PATH, r#"{"prompt":"a","max_tokens":50,"stream":true}"#)).await;
    let id = server.engine.request().await.id;
    // More than the socket buffers of both ends hold.
    let text = "x".repeat(1 << 20);
    for _ in 0..32 {
        server.engine.text(id, &text);
    }
    server.engine.expect_abort(0, id).await;
    assert_eq!(server.ask(get("/health")).await.status, 200);
}

#[tokio::test]
async fn connections_beyond_the_limit_are_told_so_and_health_still_answers() {
    let server = start(ENDLESS, 1).await;
    let mut first = server.connect().await;
    first.send(get("/version")).await;
    assert_eq!(first.reply().await.status, 200);
    let mut second = server.connect().await;
    second.send(get("/version")).await;
    let reply = second.reply().await;
    assert_eq!(reply.error(503)["code"], "too_many_connections");
    assert_eq!((reply.headers["retry-after"].as_str(), reply.headers["connection"].as_str()), ("1", "close"));
    assert_eq!(second.rest().await, b"");
    assert_eq!(server.ask(get("/health")).await.status, 200);
    first.send(get("/version")).await;
    assert_eq!(first.reply().await.status, 200, "those that are served stay so");
    drop(first);
    // The server hears of it at once, but nothing tells a client when.
    while server.ask(get("/version")).await.status != 200 {}
}

#[tokio::test]
async fn large_heads_are_refused_in_words_and_huge_ones_without() {
    let server = start(ENDLESS, 100).await;
    let many: String = (0..100).map(|i| format!("x-{i}: y\r\n")).collect();
    let error = server.ask(with_fields(&many)).await.error(431);
    assert_eq!(error["code"], "header_too_large");
    assert!(error["message"].as_str().unwrap().contains("101 header fields"), "{error}");
    let long = format!("x-long: {}\r\n", "y".repeat(40 << 10));
    let reply = server.ask(with_fields(&long)).await;
    assert!(reply.headers.contains_key("access-control-allow-origin"));
    reply.error(431);
    let fits: String = (0..99).map(|i| format!("x-{i}: y\r\n")).collect();
    assert_eq!(server.ask(with_fields(&fits)).await.status, 200);
    let huge = format!("x-huge: {}\r\n", "y".repeat(60 << 10)).repeat(3);
    let mut client = server.connect().await;
    // What fills the server's buffer and no more: unread bytes would make its end a reset.
    client.send(&with_fields(&huge)[..64 << 10]).await;
    assert_eq!(client.head().await.status, 431);
}

async fn allowed_origin(cors: Cors, origin: &str) -> Option<String> {
    let server = Server::start_with(ApiConfig { cors, ..config() }, 1, 100).await;
    let mut reply = server.ask(with_fields(&format!("Origin: {origin}\r\n"))).await;
    assert_eq!(reply.status, 200);
    reply.headers.remove("access-control-allow-origin")
}

#[tokio::test]
async fn only_the_origins_given_are_named() {
    let only =
        || Cors::Only(vec!["https://a.example".parse().unwrap(), "https://b.example".parse().unwrap()]);
    assert_eq!(allowed_origin(only(), "https://b.example").await.as_deref(), Some("https://b.example"));
    assert_eq!(allowed_origin(only(), "https://c.example").await, None);
    assert_eq!(allowed_origin(Cors::Any, "https://c.example").await.as_deref(), Some("*"));
    assert_eq!(allowed_origin(Cors::Nobody, "https://a.example").await, None);
}

#[tokio::test]
async fn deep_json_is_refused_in_words() {
    let mut server = Server::start().await;
    let nested = |depth: usize| {
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        post(PATH, &format!(r#"{{"prompt":"a","unknown":{open}{close}}}"#))
    };
    // The object itself is the first level.
    let error = server.ask(nested(127)).await.error(400);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("deeper than 127 levels"), "{message}");
    let mut client: Client = server.connect().await;
    client.send(nested(126)).await;
    server.engine.request().await;
}
