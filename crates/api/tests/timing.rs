//! `x-lockstep-timing` and the field `timing`: where an answer's time went.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, delta, post, within};
use lockstep_core::FinishReason;
use lockstep_wire::{Delta, Timing};
use serde_json::{Value, json};

const TIMING: Timing = Timing {
    queue_us: 1500,
    prefill_us: 20_000,
    decode_us: 300_250,
    steps: 4,
    prefill_chunks: 2,
    batch_min: 1,
    batch_max: 3,
    batch_sum: 7,
    retractions: 1,
};

/// A request with the header `x-lockstep-timing: <value>`.
fn with_header(body: &str, value: &str) -> String {
    post("/v1/completions", body).replacen("Host: x", &format!("Host: x\r\nx-lockstep-timing: {value}"), 1)
}

fn last_delta(id: lockstep_core::RequestId) -> Delta {
    Delta { timing: Some(Box::new(TIMING)), ..delta(id, "x", Some(FinishReason::Stop)) }
}

fn check(timing: &Value) {
    let mut timing = timing.clone();
    let total = timing.as_object_mut().unwrap().remove("total_ms").unwrap();
    assert!(total.as_f64().unwrap() >= 0.0);
    let expected = json!({
        "queue_ms": 1.5, "prefill_ms": 20.0, "decode_ms": 300.25, "time_to_first_token_ms": 21.5,
        "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2,
        "retractions": 1, "prefill_chunks": 2, "steps": 4, "batch_size": {"min": 1, "mean": 1.75, "max": 3},
    });
    assert_eq!(timing, expected);
}

#[tokio::test]
async fn header_and_field_ask_and_the_answer_says_it_in_both() {
    let mut server = Server::start().await;
    let asking = [
        with_header(r#"{"prompt":"a"}"#, "1"),
        post("/v1/completions", r#"{"prompt":"a","timing":true}"#),
        with_header(r#"{"prompt":"a","timing":null}"#, "true"),
    ];
    for request in asking {
        let mut client = server.connect().await;
        client.send(request).await;
        let request = server.engine.request().await;
        assert!(request.text.timing);
        server.engine.delta(last_delta(request.id));
        let reply = client.reply().await;
        check(&serde_json::from_str(&reply.headers["x-lockstep-timing"]).unwrap());
        check(&reply.json()["choices"][0]["timing"]);
    }
}

#[tokio::test]
async fn a_stream_has_it_in_the_finish_chunk_only() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let body = r#"{"messages":[{"role":"user","content":"a"}],"stream":true,"timing":true}"#;
    client.send(post("/v1/chat/completions", body)).await;
    let id = server.engine.request().await.id;
    server.engine.text(id, "tick");
    server.engine.delta(last_delta(id));
    client.head().await;
    let mut text = String::new();
    while let Some(chunk) = within("a chunk", client.chunk()).await {
        text += &chunk;
    }
    let chunks: Vec<Value> = text
        .split("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    let (last, others) = chunks.split_last().unwrap();
    check(&last["choices"][0]["timing"]);
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert!(others.iter().all(|chunk| chunk["choices"][0].get("timing").is_none()), "{text}");
}

#[tokio::test]
async fn nobody_who_does_not_ask_pays_or_sees_it() {
    let mut server = Server::start().await;
    for request in
        [post("/v1/completions", r#"{"prompt":"a"}"#), with_header(r#"{"prompt":"a","timing":false}"#, "0")]
    {
        let mut client = server.connect().await;
        client.send(request).await;
        let request = server.engine.request().await;
        assert!(!request.text.timing);
        server.engine.finish(request.id, "x", FinishReason::Stop);
        let reply = client.reply().await;
        assert!(!reply.headers.contains_key("x-lockstep-timing") && !reply.text().contains("timing"));
    }
    let error = server.ask(with_header(r#"{"prompt":"a"}"#, "maybe")).await.error(400);
    assert_eq!(error["param"], "x-lockstep-timing");
    let error = server.ask(post("/v1/completions", r#"{"prompt":"a","timing":"yes"}"#)).await.error(400);
    assert_eq!(error["param"], "timing");
    server.engine.expect_silence();
}
