//! SGLang's `/generate`.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, delta, post};
use lockstep_core::{FinishReason, Grammar, RequestId};
use lockstep_wire::{Delta, Echo, Prompt, TextLogprobs, TokenText};
use serde_json::{Value, json};

const PATH: &str = "/generate";

fn logprobs(id: u32, logprob: Option<f32>) -> TextLogprobs {
    let token = |id: u32| TokenText { id, bytes: format!("t{id}").into(), is_shown: true };
    let top = logprob.map(|_| vec![(token(9), -0.25)]).unwrap_or_default();
    TextLogprobs { token: token(id), logprob, rank: 2, top }
}

fn events(text: &str) -> Vec<Value> {
    let data = text.strip_suffix("data: [DONE]\n\n").expect("a whole stream");
    data.split_terminator("\n\n")
        .map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}

#[tokio::test]
async fn sampling_params_reach_the_engine() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let sampling = json!({
        "max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "stop": ["x"], "stop_token_ids": [3], "ignore_eos": true, "skip_special_tokens": false, "n": 1,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "sampling_seed": 11,
        "stream_interval": 4, "no_stop_trim": false, "json_schema": null,
    });
    client.send(post(PATH, &json!({"text": "hi", "sampling_params": sampling}).to_string())).await;
    let request = server.engine.request().await;
    assert_eq!(request.prompt, Prompt::Text("hi".into()));
    let params = &request.sampling;
    assert_eq!(
        (params.max_tokens, params.min_tokens, params.temperature, params.seed),
        (Some(7), 2, 0.5, 11)
    );
    assert_eq!((params.top_p, params.top_k, params.min_p), (0.9, 5, 0.1));
    assert_eq!(
        (params.presence_penalty, params.frequency_penalty, params.repetition_penalty),
        (0.5, 0.25, 1.5)
    );
    assert!(params.ignore_eos && params.stop_token_ids == [3]);
    assert!(request.text.stop == ["x"] && !request.text.skip_special_tokens && !request.text.echo);
    server.engine.finish(request.id, "yo", FinishReason::Length);
    let reply = client.reply().await.json();
    assert_eq!((&reply["text"], &reply["output_ids"]), (&json!("yo"), &json!([1])));
    let meta = &reply["meta_info"];
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 2}));
    assert_eq!(
        (&meta["prompt_tokens"], &meta["completion_tokens"], &meta["cached_tokens"]),
        (&json!(3), &json!(2), &json!(1))
    );
    assert!(meta["id"].is_string() && meta["e2e_latency"].as_f64().unwrap() >= 0.0);
    assert!(meta.get("output_token_logprobs").is_none());

    for (field, value, grammar) in [
        ("regex", json!("a+"), Grammar::Regex("a+".into())),
        ("json_schema", json!("{}"), Grammar::JsonSchema("{}".into())),
        ("ebnf", json!("start: \"a\""), Grammar::Lark("start: \"a\"".into())),
    ] {
        client
            .send(post(PATH, &json!({"input_ids": [1, 2], "sampling_params": {field: value}}).to_string()))
            .await;
        let request = server.engine.request().await;
        assert_eq!((request.prompt, request.sampling.max_tokens), (Prompt::Tokens(vec![1, 2]), Some(128)));
        assert_eq!(request.sampling.grammar, Some(grammar));
        server.engine.finish(request.id, "", FinishReason::Stop);
        let meta = client.reply().await.json()["meta_info"].clone();
        assert_eq!(meta["finish_reason"], json!({"type": "stop", "matched": 1}));
    }
}

#[tokio::test]
async fn streams_are_cumulative() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client
        .send(post(PATH, r#"{"text":"hi","stream":true,"rid":"mine","sampling_params":{"stop":"b"}}"#))
        .await;
    let id = server.engine.request().await.id;
    server.engine.text(id, "one ");
    server.engine.text(id, "");
    server.engine.text(id, "two");
    server.engine.delta(Delta { stop_string: Some(0), ..delta(id, "", Some(FinishReason::Stop)) });
    let reply = client.reply().await;
    let events = events(reply.text());
    let texts: Vec<_> = events.iter().map(|event| event["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["one ", "one two", "one two"]);
    let ids: Vec<_> = events.iter().map(|event| event["output_ids"].as_array().unwrap().len()).collect();
    assert_eq!(ids, [1, 3, 4]);
    assert!(events.iter().all(|event| event["meta_info"]["id"] == "mine" && event.get("index").is_none()));
    assert_eq!(events[1]["meta_info"]["finish_reason"], Value::Null);
    assert_eq!(events[2]["meta_info"]["finish_reason"], json!({"type": "stop", "matched": "b"}));
    assert_eq!(
        server.engine.next().await,
        lockstep_api::Outbound::Tokenizer(0, lockstep_wire::ToTokenizer::Abort { id, replica: 0 })
    );
}

#[tokio::test]
async fn lists_and_choices_are_answered_as_lists() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let body = r#"{"text":["a","b"],"rid":["x","y"],"sampling_params":{"n":2}}"#;
    client.send(post(PATH, body)).await;
    let mut ids: Vec<RequestId> = Vec::new();
    for _ in 0..4 {
        ids.push(server.engine.request().await.id);
    }
    for (number, id) in ids.iter().enumerate().rev() {
        server.engine.finish(*id, &number.to_string(), FinishReason::Stop);
    }
    let reply = client.reply().await.json();
    let items: Vec<_> = reply
        .as_array()
        .unwrap()
        .iter()
        .map(|item| (item["text"].clone(), item["meta_info"]["id"].clone()))
        .collect();
    let expected = [("0", "x_0"), ("1", "x_1"), ("2", "y_0"), ("3", "y_1")];
    assert_eq!(items, expected.map(|(text, id)| (json!(text), json!(id))));

    client.send(post(PATH, r#"{"input_ids":[[1],[2]],"stream":true}"#)).await;
    let (first, second) = (server.engine.request().await.id, server.engine.request().await.id);
    server.engine.finish(second, "b", FinishReason::Stop);
    server.engine.finish(first, "a", FinishReason::Stop);
    let reply = client.reply().await;
    let order: Vec<_> =
        events(reply.text()).iter().map(|e| (e["index"].clone(), e["text"].clone())).collect();
    assert!(order.contains(&(json!(0), json!("a"))) && order[0] == (json!(1), json!("b")));
}

#[tokio::test]
async fn log_probabilities_of_prompt_and_answer() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let body = json!({"text": "hi", "return_logprob": true, "top_logprobs_num": 1, "logprob_start_len": 1,
        "return_text_in_logprobs": true, "sampling_params": {"max_new_tokens": 1}});
    client.send(post(PATH, &body.to_string())).await;
    let request = server.engine.request().await;
    // The answer's text goes on with no other text.
    assert!(request.text.prompt_tokens && !request.text.echo);
    assert_eq!(request.sampling.prompt_logprobs, Some(1));
    let prompt = vec![logprobs(4, None), logprobs(5, Some(-0.5)), logprobs(6, Some(-1.0))];
    server.engine.delta(Delta {
        logprobs: Some(Box::new(vec![logprobs(1, Some(-2.0))])),
        echo: Some(Box::new(Echo { text: None, ids: vec![4, 5, 6], tokens: prompt })),
        ..delta(request.id, "yo", Some(FinishReason::Length))
    });
    let reply = client.reply().await.json();
    assert_eq!(reply["text"], "yo");
    let meta = &reply["meta_info"];
    assert_eq!(meta["input_token_logprobs"], json!([[-0.5, 5, "t5"], [-1.0, 6, "t6"]]));
    assert_eq!(meta["output_token_logprobs"], json!([[-2.0, 1, "t1"]]));
    assert_eq!(meta["input_top_logprobs"], json!([[[-0.25, 9, "t9"]], [[-0.25, 9, "t9"]]]));
    assert_eq!(meta["output_top_logprobs"], json!([[[-0.25, 9, "t9"]]]));

    // Nothing generated is shown, and only the answer's own are asked for.
    let body = json!({"input_ids": [1], "return_logprob": true, "sampling_params": {"max_new_tokens": 0}});
    client.send(post(PATH, &body.to_string())).await;
    let request = server.engine.request().await;
    assert!(!request.text.reports_prompt());
    server.engine.delta(Delta {
        logprobs: Some(Box::new(vec![logprobs(1, Some(-2.0))])),
        ..delta(request.id, "yo", Some(FinishReason::Length))
    });
    let reply = client.reply().await.json();
    assert_eq!((&reply["text"], &reply["output_ids"]), (&json!(""), &json!([])));
    assert_eq!(reply["meta_info"]["output_token_logprobs"], json!([]));
    assert!(reply["meta_info"].get("input_token_logprobs").is_none());
}

#[tokio::test]
async fn refusals_name_sglangs_fields() {
    let mut server = Server::start().await;
    for (body, param) in [
        (json!({}), "text"),
        (json!({"text": 5}), "text"),
        (json!({"text": [1]}), "text"),
        (json!({"text": "a", "input_ids": [1]}), "input_ids"),
        (json!({"input_ids": "a"}), "input_ids"),
        (json!({"input_ids": [300]}), "input_ids"),
        (json!({"input_ids": vec![1; 64]}), "input_ids"),
        (json!({"text": "a", "rid": ["x", "y"]}), "rid"),
        (json!({"text": ["a", "b"], "rid": "x"}), "rid"),
        (json!({"text": "a", "top_logprobs_num": 2}), "top_logprobs_num"),
        (json!({"text": "a", "return_logprob": true, "top_logprobs_num": 21}), "top_logprobs_num"),
        (json!({"text": "a", "return_logprob": [true]}), "return_logprob"),
        (json!({"text": "a", "lora_path": "x"}), "lora_path"),
        (json!({"text": "a", "sampling_params": []}), "sampling_params"),
        (json!({"text": "a", "sampling_params": {"max_new_tokens": -1}}), "sampling_params.max_new_tokens"),
        (json!({"text": "a", "sampling_params": {"min_new_tokens": 200}}), "sampling_params.min_new_tokens"),
        (json!({"text": "a", "sampling_params": {"temperature": "x"}}), "sampling_params.temperature"),
        (json!({"text": "a", "sampling_params": {"stop_regex": "x"}}), "sampling_params.stop_regex"),
        (json!({"text": "a", "sampling_params": {"ebnf": "a ::= b"}}), "sampling_params.ebnf"),
    ] {
        let error = server.ask(post(PATH, &body.to_string())).await.error(400);
        assert_eq!(error["param"], param, "{body}");
        let is_length = error["code"] == "context_length_exceeded";
        assert!(is_length || error["message"].as_str().unwrap().starts_with(param), "{error}");
    }
    server.engine.expect_silence();
}
