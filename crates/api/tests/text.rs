//! `/tokenize` and `/detokenize`.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, config, post};
use lockstep_api::{ApiConfig, Outbound};
use lockstep_core::Refusal;
use lockstep_wire::{Prompt, TextAnswer, TextQuestion, ToApi, ToTokenizer, Tokenized};
use serde_json::json;
use std::time::Duration;

/// The question that the api asks next.
async fn question(server: &mut Server) -> (u64, TextQuestion) {
    match server.engine.next().await {
        Outbound::Tokenizer(_, ToTokenizer::AskText { query, question }) => (query, *question),
        other => panic!("expected a question, got {other:?}"),
    }
}

fn answer(server: &Server, query: u64, result: Result<TextAnswer, Refusal>) {
    server.engine.inbound.deliver(ToApi::TextAnswered { query, result });
}

fn tokens(tokens: &[u32], pieces: Option<&[&str]>) -> Result<TextAnswer, Refusal> {
    let pieces = pieces.map(|list| list.iter().map(|piece| (*piece).to_owned()).collect());
    Ok(TextAnswer::Tokens(Tokenized { tokens: tokens.to_vec(), pieces }))
}

#[tokio::test]
async fn a_prompt_is_tokenized_by_a_tokenizer() {
    let mut server = Server::start().await;
    for (body, special, pieces) in [
        (r#"{"prompt":"ab"}"#, true, None),
        (
            r#"{"model":"org/tiny","prompt":"ab","add_special_tokens":null,"return_token_strs":true}"#,
            true,
            Some(["Ġa", "b"]),
        ),
        (r#"{"prompt":"ab","add_special_tokens":false,"return_token_strs":false}"#, false, None),
    ] {
        let mut client = server.connect().await;
        client.send(post("/tokenize", body)).await;
        let (query, asked) = question(&mut server).await;
        let prompt = Prompt::Text("ab".into());
        let expected =
            TextQuestion::Tokenize { prompt, add_special_tokens: special, with_pieces: pieces.is_some() };
        assert_eq!(asked, expected);
        answer(&server, query, tokens(&[5, 6], pieces.as_ref().map(|pieces| &pieces[..])));
        let expected = json!({"count": 2, "max_model_len": 64, "tokens": [5, 6], "token_strs": pieces});
        assert_eq!(client.reply().await.json(), expected);
    }
}

#[tokio::test]
async fn messages_are_rendered_and_lists_answered_as_lists() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let body = r#"{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":false}"#;
    client.send(post("/tokenize", body)).await;
    let (query, asked) = question(&mut server).await;
    let TextQuestion::Tokenize { prompt: Prompt::Chat(chat), add_special_tokens: false, .. } = asked else {
        panic!("unexpected {asked:?}")
    };
    assert_eq!(chat.messages_json, r#"[{"role":"user","content":"hi"}]"#);
    assert!(!chat.add_generation_prompt);
    answer(&server, query, tokens(&[], None));
    assert_eq!(client.reply().await.json()["count"], 0);

    client.send(post("/v1/tokenize", r#"{"prompt":["a","b"]}"#)).await;
    let (first, _) = question(&mut server).await;
    let (second, _) = question(&mut server).await;
    answer(&server, second, tokens(&[2, 3], None));
    answer(&server, first, tokens(&[1], None));
    let reply = client.reply().await.json();
    assert_eq!((&reply["tokens"], &reply["count"]), (&json!([[1], [2, 3]]), &json!([1, 2])));
}

#[tokio::test]
async fn tokens_become_text() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    for (skip, body) in
        [(false, r#"{"tokens":[1,2.0]}"#), (true, r#"{"tokens":[1,2],"skip_special_tokens":true}"#)]
    {
        client.send(post("/detokenize", body)).await;
        let (query, asked) = question(&mut server).await;
        let expected = TextQuestion::Detokenize { tokens: vec![1, 2], skip_special_tokens: skip };
        assert_eq!(asked, expected);
        answer(&server, query, Ok(TextAnswer::Text("é".into())));
        assert_eq!(client.reply().await.json(), json!({"prompt": "é", "text": "é"}));
    }
    client.send(post("/v1/detokenize", r#"{"tokens":[[1],[]]}"#)).await;
    for text in ["x", ""] {
        let (query, _) = question(&mut server).await;
        answer(&server, query, Ok(TextAnswer::Text(text.into())));
    }
    assert_eq!(client.reply().await.json()["text"], json!(["x", ""]));
}

#[tokio::test]
async fn bad_requests_name_their_field_and_reach_nobody() {
    let mut server = Server::start_with(ApiConfig { strict_api: true, ..config() }, 1, 100).await;
    for (path, body, status, param) in [
        ("/tokenize", r#"{}"#, 400, "prompt"),
        ("/tokenize", r#"{"prompt":5}"#, 400, "prompt"),
        ("/tokenize", r#"{"prompt":[]}"#, 400, "prompt"),
        ("/tokenize", r#"{"prompt":["a",1]}"#, 400, "prompt"),
        ("/tokenize", r#"{"prompt":"a","messages":[]}"#, 400, "prompt"),
        ("/tokenize", r#"{"messages":[]}"#, 400, "messages"),
        ("/tokenize", r#"{"prompt":"a","model":"x"}"#, 404, "model"),
        ("/tokenize", r#"{"prompt":"a","return_token_strs":1}"#, 400, "return_token_strs"),
        ("/tokenize", r#"{"prompt":"a","temperature":1}"#, 400, "temperature"),
        ("/detokenize", r#"{"tokens":null}"#, 400, "tokens"),
        ("/detokenize", r#"{"tokens":[300]}"#, 400, "tokens"),
        ("/detokenize", r#"{"tokens":[-1]}"#, 400, "tokens"),
        ("/detokenize", r#"{"tokens":[[1],2]}"#, 400, "tokens"),
        ("/detokenize", r#"{"tokens":["1"]}"#, 400, "tokens"),
    ] {
        assert_eq!(server.ask(post(path, body)).await.error(status)["param"], param, "{body}");
    }
    server.engine.expect_silence();
}

#[tokio::test]
async fn refusals_failures_and_drains_end_a_question() {
    let mut server = Server::start_with(config(), 1, 1).await;
    let mut client = server.connect().await;
    let body = r#"{"prompt":"a"}"#;
    client.send(post("/tokenize", body)).await;
    let (query, _) = question(&mut server).await;
    // As many questions as requests may be open.
    assert_eq!(server.ask(post("/tokenize", body)).await.error(503)["code"], "queue_full");
    answer(&server, query, Err(Refusal::invalid_param("prompt", "too much")));
    assert_eq!(client.reply().await.error(400)["param"], "prompt");

    client.send(post("/tokenize", body)).await;
    let (late, _) = question(&mut server).await;
    server.handle.drain(Duration::from_secs(3600));
    while server.ask(common::get("/health")).await.status == 200 {
        tokio::task::yield_now().await;
    }
    server.handle.fail("a child died");
    assert_eq!(client.reply().await.error(503)["code"], "engine_failed");
    answer(&server, late, tokens(&[1], None));
}
