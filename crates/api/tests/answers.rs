//! What clients read: JSON documents and event streams, byte for byte. Cases C5, C6, C8.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, check_error, delta, post};
use lockstep_core::{FinishReason, Refusal};
use lockstep_wire::{Delta, Prompt};
use serde_json::{Value, json};

const CHAT: &str = r#"{"messages":[{"role":"user","content":"hi"}]}"#;
const CHAT_STREAM: &str = r#"{"stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
const USAGE: &str = r#"{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}"#;

/// The events of a stream, checked against the letter of the format.
fn events(body: &str) -> Vec<&str> {
    assert!(body.ends_with("\n\n"));
    let events: Vec<_> = body.trim_end_matches('\n').split("\n\n").collect();
    events.into_iter().map(|event| event.strip_prefix("data: ").unwrap()).collect()
}

#[tokio::test]
async fn a_whole_chat_answer() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(post("/v1/chat/completions", CHAT)).await;
    let request = server.engine.request().await;
    assert!(matches!(request.prompt, Prompt::Chat(_)));
    server.engine.text(request.id, "Hé");
    server.engine.text(request.id, "");
    server.engine.finish(request.id, "llo", FinishReason::Length);
    let reply = client.reply().await;
    assert_eq!(reply.status, 200);
    let id = reply.json()["id"].as_str().unwrap().to_string();
    let created = reply.json()["created"].as_u64().unwrap();
    assert!(id.starts_with("chatcmpl-") && created > 1_700_000_000);
    let expected = format!(
        r#"{{"id":"{id}","object":"chat.completion","created":{created},"model":"org/tiny","choices":[{{"index":0,"message":{{"role":"assistant","content":"Héllo"}},"logprobs":null,"finish_reason":"length"}}],"usage":{USAGE}}}"#
    );
    assert_eq!(reply.text(), expected);
    server.engine.expect_silence();
}

#[tokio::test]
async fn a_whole_completion() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(post("/v1/completions", r#"{"prompt":[5,6]}"#)).await;
    let request = server.engine.request().await;
    assert_eq!(request.prompt, Prompt::Tokens(vec![5, 6]));
    server.engine.finish(request.id, " x", FinishReason::Stop);
    let reply = client.reply().await.json();
    assert_eq!(reply["object"], "text_completion");
    assert_eq!(
        reply["choices"],
        json!([{"index": 0, "text": " x", "logprobs": null, "finish_reason": "stop"}])
    );
    assert_eq!(reply["usage"].to_string(), USAGE);
}

#[tokio::test]
async fn a_streamed_chat_answer_byte_for_byte() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(post("/v1/chat/completions", CHAT_STREAM)).await;
    let id = server.engine.request().await.id;
    server.engine.text(id, "");
    server.engine.text(id, "a\n\ndata: [DONE]");
    server.engine.text(id, "");
    server.engine.finish(id, "b", FinishReason::Stop);
    let reply = client.reply().await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(reply.headers["cache-control"], "no-cache");
    let first: Value = serde_json::from_str(events(reply.text())[0]).unwrap();
    let head = format!(
        r#"{{"id":{},"object":"chat.completion.chunk","created":{},"model":"org/tiny","choices":[{{"index":0,"delta":"#,
        first["id"], first["created"]
    );
    let expected: String = [
        r#"{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
        r#"{"content":"a\n\ndata: [DONE]"},"logprobs":null,"finish_reason":null}]}"#,
        r#"{"content":"b"},"logprobs":null,"finish_reason":null}]}"#,
        r#"{},"logprobs":null,"finish_reason":"stop"}]}"#,
    ]
    .iter()
    .map(|rest| format!("data: {head}{rest}\n\n"))
    .collect();
    assert_eq!(reply.text(), expected + "data: [DONE]\n\n");
    server.engine.expect_silence();
}

#[tokio::test]
async fn a_streamed_completion_with_usage() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let body = r#"{"prompt":"x","stream":true,"stream_options":{"include_usage":true}}"#;
    client.send(post("/v1/completions", body)).await;
    let id = server.engine.request().await.id;
    server.engine.text(id, "a");
    server.engine.finish(id, "", FinishReason::Length);
    let reply = client.reply().await;
    let events = events(reply.text());
    assert_eq!(events.len(), 4);
    assert_eq!(events[3], "[DONE]");
    let chunks: Vec<Value> = events[..3].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    for chunk in &chunks {
        assert_eq!((&chunk["id"], &chunk["created"]), (&chunks[0]["id"], &chunks[0]["created"]));
        assert_eq!(chunk["object"], "text_completion");
    }
    assert_eq!(
        chunks[0]["choices"],
        json!([{"index": 0, "text": "a", "logprobs": null, "finish_reason": null}])
    );
    assert_eq!(
        chunks[1]["choices"],
        json!([{"index": 0, "text": "", "logprobs": null, "finish_reason": "length"}])
    );
    assert!(
        chunks[0].as_object().unwrap()["usage"].is_null()
            && chunks[1].as_object().unwrap()["usage"].is_null()
    );
    assert_eq!((&chunks[2]["choices"], chunks[2]["usage"].to_string()), (&json!([]), USAGE.to_string()));
}

#[tokio::test]
async fn text_is_sent_as_soon_as_it_is_there() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(post("/v1/completions", r#"{"prompt":"x","stream":true}"#)).await;
    let id = server.engine.request().await.id;
    server.engine.text(id, "first");
    assert_eq!(client.head().await.status, 200);
    assert!(client.chunk().await.unwrap().contains("\"first\""));
    server.engine.text(id, "second");
    assert!(client.chunk().await.unwrap().contains("\"second\""));
    server.engine.finish(id, "", FinishReason::Stop);
    assert!(client.chunk().await.unwrap().ends_with("data: [DONE]\n\n"));
    assert_eq!(client.chunk().await, None);
}

#[tokio::test]
async fn several_prompts_are_several_choices() {
    for stream in [false, true] {
        let mut server = Server::start_with(common::config(), 3, 100).await;
        let mut client = server.connect().await;
        client
            .send(post("/v1/completions", &format!(r#"{{"prompt":["a","b"],"seed":1,"stream":{stream}}}"#)))
            .await;
        let (first, second) = (server.engine.request().await, server.engine.request().await);
        assert_eq!((&first.prompt, &second.prompt), (&Prompt::Text("a".into()), &Prompt::Text("b".into())));
        server.engine.text(second.id, "B1");
        server.engine.text(first.id, "A1");
        server.engine.finish(second.id, "B2", FinishReason::Length);
        server.engine.finish(first.id, "A2", FinishReason::Stop);
        let reply = client.reply().await;
        if !stream {
            let reply = reply.json();
            let choice = |index: usize| {
                let choice = &reply["choices"][index];
                (choice["index"].as_u64(), choice["text"].as_str(), choice["finish_reason"].as_str())
            };
            assert_eq!(choice(0), (Some(0), Some("A1A2"), Some("stop")));
            assert_eq!(choice(1), (Some(1), Some("B1B2"), Some("length")));
            assert_eq!(reply["usage"]["total_tokens"], 10);
            continue;
        }
        let events = events(reply.text());
        assert_eq!(events.iter().filter(|event| **event == "[DONE]").count(), 1);
        let mut texts = [String::new(), String::new()];
        let mut finishes = [Vec::new(), Vec::new()];
        for event in &events[..events.len() - 1] {
            let chunk: Value = serde_json::from_str(event).unwrap();
            let choice = &chunk["choices"][0];
            let index = choice["index"].as_u64().unwrap() as usize;
            assert!(finishes[index].is_empty(), "nothing follows the finish");
            texts[index] += choice["text"].as_str().unwrap();
            finishes[index].extend(choice["finish_reason"].as_str().map(String::from));
        }
        assert_eq!(texts, ["A1A2", "B1B2"]);
        assert_eq!(finishes, [vec!["stop".to_string()], vec!["length".to_string()]]);
    }
}

#[tokio::test]
async fn a_refusal_keeps_its_status_also_for_streams() {
    for (path, body, param) in [
        ("/v1/chat/completions", CHAT, "messages"),
        ("/v1/chat/completions", CHAT_STREAM, "messages"),
        ("/v1/completions", r#"{"prompt":"x"}"#, "prompt"),
        ("/v1/completions", r#"{"prompt":"x","stream":true}"#, "prompt"),
    ] {
        let mut server = Server::start().await;
        let mut client = server.connect().await;
        client.send(post(path, body)).await;
        let id = server.engine.request().await.id;
        server.engine.refuse(id, Refusal::context_length(65, 64));
        let error = client.reply().await.error(400);
        assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!(param)));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("65") && message.contains("64"));
        server.engine.expect_silence();
    }
}

#[tokio::test]
async fn a_refusal_inside_a_stream_is_an_error_event() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(post("/v1/completions", r#"{"prompt":["x","y"],"stream":true}"#)).await;
    let (first, second) = (server.engine.request().await.id, server.engine.request().await.id);
    server.engine.text(first, "a");
    client.head().await;
    client.chunk().await.unwrap();
    server.engine.refuse(second, Refusal::internal("broken"));
    let event = client.chunk().await.unwrap();
    let error = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(check_error(&error)["message"], "broken");
    assert_eq!(client.chunk().await, None);
    server.engine.expect_abort(0, first).await;
}

#[tokio::test]
async fn a_stop_string_ends_the_answer_and_aborts_the_request() {
    for stream in [false, true] {
        let mut server = Server::start_with(common::config(), 2, 100).await;
        let mut client = server.connect().await;
        client
            .send(post("/v1/completions", &format!(r#"{{"prompt":"x","stop":"T","stream":{stream}}}"#)))
            .await;
        let (tokenizer, request) = server.engine.request_at().await;
        assert_eq!(request.text.stop, ["T"]);
        server
            .engine
            .delta(Delta { stop_string: Some(0), ..delta(request.id, "S", Some(FinishReason::Stop)) });
        server.engine.text(request.id, "late");
        assert!(!client.reply().await.text().contains("late"));
        server.engine.expect_abort(tokenizer, request.id).await;
        server.engine.expect_silence();
    }
}

#[tokio::test]
async fn requests_go_round_the_tokenizers() {
    let mut server = Server::start_with(common::config(), 3, 100).await;
    let mut seen = Vec::new();
    let mut clients = Vec::new();
    for _ in 0..6 {
        let mut client = server.connect().await;
        client.send(post("/v1/completions", r#"{"prompt":"x"}"#)).await;
        seen.push(server.engine.request_at().await.0);
        clients.push(client);
    }
    assert_eq!(seen[..3], seen[3..]);
    seen.truncate(3);
    seen.sort();
    assert_eq!(seen, [0, 1, 2]);
}

#[tokio::test]
async fn an_aborted_finish_is_named() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(post("/v1/completions", r#"{"prompt":"x"}"#)).await;
    let id = server.engine.request().await.id;
    server.engine.finish(id, "part", FinishReason::Abort);
    assert_eq!(client.reply().await.json()["choices"][0]["finish_reason"], "abort");
}
