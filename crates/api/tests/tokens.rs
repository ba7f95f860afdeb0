//! Tokens and log-probabilities of prompts, in vLLM's fields.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, delta, post};
use lockstep_core::{FinishReason, RequestId};
use lockstep_wire::{Delta, Echo, TextLogprobs, TokenText};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn token(id: u32, logprob: Option<f32>) -> TextLogprobs {
    let text = |id| TokenText { id, bytes: format!("t{id}").into_bytes(), is_shown: true };
    let top = logprob.map(|_| vec![(text(9), -0.25), (text(id), -0.5)]).unwrap_or_default();
    TextLogprobs { token: text(id), logprob, rank: u32::from(logprob.is_some()) * 2, top }
}

/// The first delta of a request whose prompt is `ids`.
fn first(id: RequestId, ids: &[u32], finish: Option<FinishReason>) -> Delta {
    let tokens = ids.iter().enumerate().map(|(at, id)| token(*id, (at > 0).then_some(-0.5))).collect();
    let echo = Echo { text: None, ids: ids.to_vec(), tokens };
    Delta { echo: Some(Box::new(echo)), ..delta(id, "yo", finish) }
}

fn shown() -> Value {
    let best = json!({"logprob": -0.25, "rank": 1, "decoded_token": "t9"});
    json!([null, {"5": {"logprob": -0.5, "rank": 2, "decoded_token": "t5"}, "9": best}])
}

#[tokio::test]
async fn a_chat_tells_of_its_prompt_once() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "n": 2, "prompt_logprobs": 2,
        "return_token_ids": true});
    client.send(post(CHAT, &body.to_string())).await;
    let (one, two) = (server.engine.request().await, server.engine.request().await);
    // The second choice need not compute the prompt again.
    assert_eq!((one.sampling.prompt_logprobs, two.sampling.prompt_logprobs), (Some(2), None));
    assert!(one.text.prompt_tokens && !one.text.echo && !two.text.reports_prompt());
    assert_eq!(one.sampling.logprobs, None);
    server.engine.finish(two.id, "b", FinishReason::Stop);
    server.engine.delta(first(one.id, &[4, 5], Some(FinishReason::Length)));
    let reply = client.reply().await.json();
    assert_eq!((&reply["prompt_logprobs"], &reply["prompt_token_ids"]), (&shown(), &json!([4, 5])));
    assert_eq!(reply["choices"][0]["message"]["content"], "yo");
    for choice in reply["choices"].as_array().unwrap() {
        assert_eq!((&choice["token_ids"], &choice["logprobs"]), (&json!([1]), &Value::Null));
        assert!(choice.get("prompt_token_ids").is_none() && choice.get("prompt_logprobs").is_none());
    }
}

#[tokio::test]
async fn each_choice_of_a_completion_tells_of_its_prompt() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let body = json!({"prompt": [[4, 5], [6]], "n": 2, "prompt_logprobs": 1, "max_tokens": 0});
    client.send(post(COMPLETIONS, &body.to_string())).await;
    for prompt in [&[4, 5][..], &[6]] {
        let (one, two) = (server.engine.request().await, server.engine.request().await);
        assert_eq!((one.sampling.prompt_logprobs, one.sampling.max_tokens), (Some(1), Some(1)));
        server.engine.delta(first(one.id, prompt, Some(FinishReason::Length)));
        server.engine.finish(two.id, "b", FinishReason::Stop);
    }
    let reply = client.reply().await.json();
    for (index, choice) in reply["choices"].as_array().unwrap().iter().enumerate() {
        let expected = if index < 2 { shown() } else { json!([null]) };
        assert_eq!(choice["prompt_logprobs"], expected, "{index}");
        // Nothing else was asked for, nothing generated is shown.
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(""), &json!("length")));
        assert!(choice.get("prompt_token_ids").is_none() && choice.get("token_ids").is_none());
    }
    assert!(reply.get("prompt_logprobs").is_none());
    assert_eq!(reply["usage"]["completion_tokens"], 0);
}

/// The chunks of a stream, which all are whole.
fn chunks(body: &str) -> Vec<Value> {
    let events = body.trim_end().split("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
    events.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[tokio::test]
async fn streams_tell_tokens_by_their_ids() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let bodies = [
        (CHAT, json!({"messages": [{"role": "user", "content": "hi"}]})),
        (COMPLETIONS, json!({"prompt": [4, 5]})),
    ];
    for (path, mut body) in bodies {
        body["stream"] = json!(true);
        body["return_token_ids"] = json!(true);
        client.send(post(path, &body.to_string())).await;
        let request = server.engine.request().await;
        assert!(request.text.prompt_tokens && request.sampling.prompt_logprobs.is_none());
        server.engine.delta(first(request.id, &[4, 5], None));
        // Tokens without text come with the next chunk.
        server.engine.text(request.id, "");
        server.engine.finish(request.id, "", FinishReason::Stop);
        let chunks = chunks(client.reply().await.text());
        let of_prompt = if path == CHAT { &chunks[0] } else { &chunks[0]["choices"][0] };
        assert_eq!(of_prompt["prompt_token_ids"], json!([4, 5]));
        let told = chunks.iter().filter(|chunk| chunk.to_string().contains("prompt_token_ids")).count();
        assert_eq!(told, 1, "{chunks:?}");
        let ids = chunks.iter().filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array());
        assert_eq!(ids.flatten().cloned().collect::<Vec<_>>(), [1, 1, 1].map(|id| json!(id)));
    }
    // Those who do not ask are told nothing.
    client.send(post(COMPLETIONS, r#"{"prompt": "x"}"#)).await;
    let request = server.engine.request().await;
    assert!(!request.text.reports_prompt());
    server.engine.finish(request.id, "a", FinishReason::Stop);
    assert!(!client.reply().await.text().contains("token_ids"));
}

#[tokio::test]
async fn what_streams_have_no_place_for_is_refused() {
    let mut server = Server::start().await;
    let body = json!({"prompt": "x", "stream": true, "prompt_logprobs": 0});
    let error = server.ask(post(COMPLETIONS, &body.to_string())).await.error(400);
    assert_eq!(error["param"], "prompt_logprobs");
    // A chat shows no prompt, so it generates something.
    let body =
        json!({"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "max_tokens": 0});
    let error = server.ask(post(CHAT, &body.to_string())).await.error(400);
    assert_eq!(error["param"], "max_tokens");
    for value in [json!(21), json!(-1), json!("1")] {
        let body = json!({"prompt": "x", "prompt_logprobs": value});
        let error = server.ask(post(COMPLETIONS, &body.to_string())).await.error(400);
        assert_eq!(error["param"], "prompt_logprobs");
    }
    server.engine.expect_silence();
}
