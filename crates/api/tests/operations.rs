//! Endpoints for whoever runs the server.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, Server, config, get, post};
use lockstep_api::{ApiConfig, Outbound};
use lockstep_core::{FinishReason, Refusal, RequestId};
use lockstep_wire::{EngineInfo, Prompt, ToApi, ToScheduler};
use serde_json::{Value, json};

const STREAM: &str = r#"{"prompt":"C","max_tokens":100,"stream":true}"#;

#[tokio::test]
async fn a_flush_says_what_it_freed() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    for request in [get("/flush_cache"), post("/flush_cache", "")] {
        client.send(request).await;
        let Outbound::Scheduler(0, ToScheduler::FlushCache { query }) = server.engine.next().await else {
            panic!("expected a flush")
        };
        server.engine.inbound.deliver(ToApi::CacheFlushed { query, pages: 5 });
        let Outbound::Scheduler(0, ToScheduler::Info { query }) = server.engine.next().await else {
            panic!("expected a query")
        };
        let info = EngineInfo { query, pages_free: 9, pages_held: 2, ..EngineInfo::default() };
        server.engine.inbound.deliver(ToApi::EngineInfo(Box::new(info)));
        let reply = client.reply().await.json();
        assert_eq!(
            (&reply["pages_flushed"], &reply["pages_held"], &reply["pages_free"]),
            (&json!(5), &json!(2), &json!(9))
        );
    }
}

/// A stream that has begun, the id of its answer, and its request.
async fn streaming(server: &mut Server) -> (Client, String, RequestId) {
    let mut client = server.connect().await;
    client.send(post("/v1/completions", STREAM)).await;
    let id = server.engine.request().await.id;
    server.engine.text(id, "tick");
    client.head().await;
    let chunk = client.chunk().await.unwrap();
    let chunk: Value = serde_json::from_str(chunk.strip_prefix("data: ").unwrap().trim()).unwrap();
    (client, chunk["id"].as_str().unwrap().to_owned(), id)
}

async fn expect_aborted_end(client: &mut Client) {
    let mut text = String::new();
    while let Some(chunk) = client.chunk().await {
        text += &chunk;
    }
    assert!(text.contains(r#""finish_reason":"abort""#) && text.ends_with("data: [DONE]\n\n"), "{text}");
}

async fn abort(server: &Server, body: &Value) -> Value {
    server.ask(post("/abort_request", &body.to_string())).await.json()["requests_aborted"].clone()
}

#[tokio::test]
async fn an_answer_is_aborted_by_its_id() {
    let mut server = Server::start().await;
    let (mut first, name, id) = streaming(&mut server).await;
    let (mut second, other, other_id) = streaming(&mut server).await;
    assert_ne!(name, other);
    assert_eq!(abort(&server, &json!({"rid": name})).await, 1);
    server.engine.expect_abort(0, id).await;
    expect_aborted_end(&mut first).await;
    // Neither a second time, nor by another name.
    assert_eq!(abort(&server, &json!({"rid": name})).await, 0);
    assert_eq!(abort(&server, &json!({"rid": "cmpl-0", "abort_all": false})).await, 0);
    server.engine.finish(id, "late", FinishReason::Stop);
    server.engine.expect_silence();
    assert_eq!(abort(&server, &json!({"abort_all": true})).await, 1);
    server.engine.expect_abort(0, other_id).await;
    expect_aborted_end(&mut second).await;
    for body in ["{}", r#"{"rid":""}"#, r#"{"rid":null,"abort_all":null}"#, r#"{"rid":5}"#] {
        assert_eq!(server.ask(post("/abort_request", body)).await.error(400)["param"], "rid", "{body}");
    }
}

#[tokio::test]
async fn an_aborted_request_keeps_what_came_before() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(post("/v1/completions", r#"{"prompt":"C","n":2}"#)).await;
    let (first, second) = (server.engine.request().await.id, server.engine.request().await.id);
    server.engine.text(first, "tick");
    server.engine.finish(second, "done", FinishReason::Stop);
    // The fake engine's deltas are in the answer's queue: an abort comes behind them.
    assert_eq!(abort(&server, &json!({"abort_all": true})).await, 1);
    server.engine.expect_abort(0, first).await;
    let reply = client.reply().await.json();
    assert_eq!(reply["choices"][0]["text"], "tick");
    assert_eq!(reply["choices"][0]["finish_reason"], "abort");
    assert_eq!(reply["choices"][1]["finish_reason"], "stop");
    assert_eq!(reply["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn health_generate_waits_for_a_token() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(get("/health_generate")).await;
    let request = server.engine.request().await;
    assert_eq!((request.prompt, request.sampling.max_tokens), (Prompt::Tokens(vec![0]), Some(1)));
    server.engine.finish(request.id, "", FinishReason::Length);
    assert_eq!(client.reply().await.json()["status"], "ok");

    client.send(get("/health_generate")).await;
    let request = server.engine.request().await;
    server.engine.refuse(request.id, Refusal::internal("no pages"));
    let message = client.reply().await.error(503)["message"].clone();
    assert_eq!(message, "the engine cannot generate: no pages");

    client.send(get("/health_generate")).await;
    server.engine.request().await;
    server.handle.fail("a child died");
    let message = client.reply().await.error(503)["message"].clone();
    assert!(message.as_str().unwrap().contains("a child died"), "{message}");
}

#[tokio::test]
async fn model_info_in_sglangs_words() {
    let server = Server::start_with(ApiConfig { model_path: "/models/tiny".into(), ..config() }, 1, 1).await;
    for path in ["/get_model_info", "/model_info"] {
        let info = server.ask(get(path)).await.json();
        assert_eq!(info["model_path"], "/models/tiny");
        assert_eq!(info["tokenizer_path"], "/models/tiny");
        assert_eq!(info["is_generation"], true);
        assert_eq!((&info["context_length"], &info["vocab_size"]), (&json!(64), &json!(300)));
    }
}

#[tokio::test]
async fn endpoints_for_other_models_are_refused_in_a_sentence() {
    let server = Server::start().await;
    for path in
        ["/v1/embeddings", "/v1/rerank", "/v1/audio/speech", "/v1/images/generations", "/v1/moderations"]
    {
        let error = server.ask(post(path, r#"{"input":"a"}"#)).await.error(400);
        assert_eq!(error["code"], "unsupported_endpoint");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(path) && message.contains("/v1/chat/completions"), "{message}");
    }
}

#[tokio::test]
async fn methods_are_answered_on_every_endpoint() {
    let server = Server::start().await;
    let with =
        |method: &str, path: &str| format!("{method} {path} HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\n\r\n");
    let head = |path: &str| format!("HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    for (path, allow) in [
        ("/tokenize", "POST"),
        ("/detokenize", "POST"),
        ("/abort_request", "POST"),
        ("/v1/embeddings", "POST"),
        ("/health_generate", "GET,HEAD"),
        ("/get_model_info", "GET,HEAD"),
        ("/flush_cache", "POST,GET,HEAD"),
    ] {
        let reply = server.ask(with("DELETE", path)).await;
        assert_eq!((reply.status, &*reply.headers["allow"]), (405, allow), "{path}");
        let mut preflight = server.connect().await;
        preflight
            .send(format!(
                "OPTIONS {path} HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\nAccess-Control-Request-Method: POST\r\n\r\n"
            ))
            .await;
        assert_eq!(preflight.reply().await.status, 200, "{path}");
    }
    let mut client = server.connect().await;
    client.send(head("/get_model_info")).await;
    let bytes = client.rest().await;
    assert!(bytes.starts_with(b"HTTP/1.1 200") && bytes.ends_with(b"\r\n\r\n"));
}
