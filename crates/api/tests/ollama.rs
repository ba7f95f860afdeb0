//! Ollama's API.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, config, delta, get, post};
use lockstep_api::parsers::{ParserChoice, ReasoningFormat, ToolFormat};
use lockstep_api::{ApiConfig, Outbound, SamplingDefaults};
use lockstep_core::{FinishReason, Grammar, RequestId};
use lockstep_wire::{
    ChatMessages, Delta, EngineInfo, Prompt, RankInfo, TextLogprobs, ToApi, ToScheduler, TokenText,
};
use serde_json::{Value, json};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn with_parsers() -> ApiConfig {
    let parsers = ParserChoice {
        tools: Some(ToolFormat::Hermes),
        reasoning: Some(ReasoningFormat::Think),
        ..ParserChoice::default()
    };
    ApiConfig {
        parsers,
        model_path: "/m/tiny.gguf".into(),
        architecture: "LlamaForCausalLM".into(),
        chat_template: Some("{{ messages }}".into()),
        model_digest: Some("0123456789ab".into()),
        default_sampling: SamplingDefaults { top_k: Some(20), ..SamplingDefaults::default() },
        ..config()
    }
}

fn chat_of(prompt: &Prompt) -> &ChatMessages {
    match prompt {
        Prompt::Chat(chat) => chat,
        other => panic!("expected a chat, got {other:?}"),
    }
}

fn lines(text: &str) -> Vec<Value> {
    assert!(text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The error of a refused request.
async fn refused(server: &Server, path: &str, body: &Value, status: u16) -> String {
    let reply = server.ask(post(path, &body.to_string())).await;
    assert_eq!(reply.status, status, "{body}: {}", reply.text());
    let error = reply.json();
    assert_eq!(error.as_object().unwrap().len(), 1);
    error["error"].as_str().unwrap().to_owned()
}

fn check_end(last: &Value, reason: &str) {
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!(reason)));
    assert_eq!((&last["prompt_eval_count"], &last["eval_count"]), (&json!(3), &json!(2)));
    let nanos = |name: &str| last[name].as_u64().unwrap();
    // The fake engine measures nothing.
    assert!(nanos("total_duration") > 0);
    assert_eq!(nanos("load_duration") + nanos("prompt_eval_duration") + nanos("eval_duration"), 0);
    assert!(last["created_at"].as_str().unwrap().ends_with('Z'));
}

#[tokio::test]
async fn a_chat_streams_lines_unless_told_otherwise() {
    let mut server = Server::start_with(with_parsers(), 1, 10).await;
    let mut client = server.connect().await;
    let body = json!({
        "model": "org/tiny:latest", "messages": [{"role": "user", "content": "hi", "images": []}],
        "keep_alive": "5m", "format": null,
        "options": {"num_predict": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4,
            "stop": ["x"], "repeat_penalty": 1.5, "num_ctx": 64, "num_gpu": 1},
    });
    client.send(post(CHAT, &body.to_string())).await;
    let request = server.engine.request().await;
    assert_eq!(chat_of(&request.prompt).messages_json, r#"[{"role":"user","content":"hi"}]"#);
    let params = &request.sampling;
    assert_eq!((params.max_tokens, params.temperature, params.top_k, params.seed), (Some(9), 0.5, 3, 4));
    assert_eq!((params.top_p, params.min_p, params.repetition_penalty), (0.5, 0.1, 1.5));
    assert_eq!(request.text.stop, ["x"]);
    server.engine.text(request.id, "<think>why</think>be");
    server.engine.text(request.id, "cause");
    server.engine.finish(request.id, "", FinishReason::Stop);
    let reply = client.reply().await;
    assert_eq!(reply.headers["content-type"], "application/x-ndjson");
    let lines = lines(reply.text());
    let joined =
        |field: &str| -> String { lines.iter().filter_map(|line| line["message"][field].as_str()).collect() };
    assert_eq!((joined("content").as_str(), joined("thinking").as_str()), ("because", "why"));
    assert!(lines.iter().all(|line| line["model"] == "org/tiny" && line["message"]["role"] == "assistant"));
    let (last, others) = lines.split_last().unwrap();
    assert!(others.iter().all(|line| line["done"] == false && line.get("done_reason").is_none()));
    check_end(last, "stop");

    client.send(post(CHAT, r#"{"messages":[{"role":"user","content":"hi"}],"stream":false}"#)).await;
    let request = server.engine.request().await;
    assert_eq!(request.sampling.max_tokens, None);
    server.engine.finish(request.id, "<think>w</think>yo", FinishReason::Length);
    let reply = client.reply().await.json();
    assert_eq!(reply["message"], json!({"role": "assistant", "content": "yo", "thinking": "w"}));
    check_end(&reply, "length");
}

#[tokio::test]
async fn calls_come_whole_and_go_back_as_objects() {
    let mut server = Server::start_with(with_parsers(), 1, 10).await;
    let mut client = server.connect().await;
    let tool = json!({"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}});
    for stream in [true, false] {
        let body = json!({
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "", "thinking": "w", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
                {"role": "tool", "content": "2", "tool_name": "add"},
            ],
            "tools": [tool], "stream": stream,
        });
        client.send(post(CHAT, &body.to_string())).await;
        let request = server.engine.request().await;
        let chat = chat_of(&request.prompt);
        let messages: Value = serde_json::from_str(&chat.messages_json).unwrap();
        assert_eq!(
            messages[1]["tool_calls"][0],
            json!({"function": {"name": "add", "arguments": {"a": 1}}, "type": "function"})
        );
        assert_eq!((&messages[1]["reasoning_content"], &messages[2]["name"]), (&json!("w"), &json!("add")));
        assert!(chat.tools_json.as_ref().unwrap().contains("adds"));
        server.engine.text(request.id, "so <tool_call>{\"name\":\"add\",\"argu");
        server.engine.text(request.id, "ments\":{\"b\":[2]}}</tool_call>");
        server.engine.text(request.id, "<tool_call>{\"name\":\"add\",\"arguments\":{}}</tool_call>");
        server.engine.finish(
            request.id,
            "<tool_call>{\"name\":\"add\",\"arguments\":{\"c\"",
            FinishReason::Length,
        );
        let reply = client.reply().await;
        let lines = if stream { lines(reply.text()) } else { vec![reply.json()] };
        let calls: Vec<Value> = lines
            .iter()
            .filter_map(|line| line["message"]["tool_calls"].as_array())
            .flatten()
            .map(|call| call["function"].clone())
            .collect();
        let first = json!({"index": 0, "name": "add", "arguments": {"b": [2]}});
        // Half a call is none.
        assert_eq!(calls, [first, json!({"index": 1, "name": "add", "arguments": {}})]);
        check_end(lines.last().unwrap(), "length");
    }
}

#[tokio::test]
async fn forms_thinking_and_prefill() {
    let mut server = Server::start_with(with_parsers(), 1, 10).await;
    let mut client = server.connect().await;
    let schema = json!({"type": "object"});
    for (field, value, grammar) in [
        ("format", json!("json"), Some(Grammar::JsonObject)),
        ("format", schema.clone(), Some(Grammar::JsonSchema(schema.to_string()))),
        ("format", json!(""), None),
    ] {
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": false, field: value});
        client.send(post(CHAT, &body.to_string())).await;
        let request = server.engine.request().await;
        assert_eq!(request.sampling.grammar, grammar);
        server.engine.finish(request.id, "{}", FinishReason::Stop);
        client.reply().await.json();
    }
    for (think, expected) in [
        (json!(true), json!({"enable_thinking": true, "thinking": true})),
        (json!(false), json!({"enable_thinking": false, "thinking": false})),
        (json!("low"), json!({"reasoning_effort": "low", "enable_thinking": true, "thinking": true})),
    ] {
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": false, "think": think});
        client.send(post(CHAT, &body.to_string())).await;
        let request = server.engine.request().await;
        let kwargs = chat_of(&request.prompt).template_kwargs_json.clone().unwrap();
        assert_eq!(serde_json::from_str::<Value>(&kwargs).unwrap(), expected);
        server.engine.finish(request.id, "", FinishReason::Stop);
        client.reply().await.json();
    }
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]);
    client.send(post(CHAT, &json!({"messages": messages, "stream": false}).to_string())).await;
    let request = server.engine.request().await;
    let chat = chat_of(&request.prompt);
    assert!(!chat.add_generation_prompt);
    assert_eq!(chat.template_kwargs_json.as_deref(), Some(r#"{"continue_final_message":true}"#));
    server.engine.finish(request.id, "", FinishReason::Stop);
}

#[tokio::test]
async fn generate_is_a_chat_of_one_message_or_raw() {
    let mut server = Server::start_with(with_parsers(), 1, 10).await;
    let mut client = server.connect().await;
    client.send(post(GENERATE, r#"{"model":"org/tiny","prompt":"hi","system":"be brief"}"#)).await;
    let request = server.engine.request().await;
    let expected = r#"[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}]"#;
    assert_eq!(chat_of(&request.prompt).messages_json, expected);
    server.engine.text(request.id, "<think>why</think>yo");
    server.engine.finish(request.id, "", FinishReason::Stop);
    let reply = client.reply().await;
    let lines = lines(reply.text());
    let joined = |field: &str| -> String { lines.iter().filter_map(|line| line[field].as_str()).collect() };
    assert_eq!((joined("response").as_str(), joined("thinking").as_str()), ("yo", "why"));
    assert!(lines.iter().all(|line| line.get("message").is_none()));
    check_end(lines.last().unwrap(), "stop");

    client
        .send(post(GENERATE, r#"{"prompt":"hi","raw":true,"stream":false,"suffix":"","context":[]}"#))
        .await;
    let request = server.engine.request().await;
    assert_eq!((&request.prompt, request.sampling.max_tokens), (&Prompt::Text("hi".into()), Some(64)));
    server.engine.finish(request.id, "<think>yo", FinishReason::Stop);
    assert_eq!(client.reply().await.json()["response"], "<think>yo");

    // A model without a chat template continues the prompt.
    let bare = ApiConfig { chat_error: Some("no template".into()), ..config() };
    let mut server = Server::start_with(bare, 1, 10).await;
    let mut client = server.connect().await;
    client.send(post(GENERATE, r#"{"prompt":"hi","stream":false,"options":{"num_predict":-1}}"#)).await;
    let request = server.engine.request().await;
    assert_eq!(request.prompt, Prompt::Text("hi".into()));
    server.engine.finish(request.id, "yo", FinishReason::Stop);
    assert_eq!(client.reply().await.json()["response"], "yo");
    let error = refused(&server, GENERATE, &json!({"prompt": "hi", "system": "x"}), 400).await;
    assert!(error.starts_with("system "), "{error}");
}

#[tokio::test]
async fn refusals_are_ollamas_and_name_its_fields() {
    let mut server = Server::start().await;
    let user = json!([{"role": "user", "content": "hi"}]);
    for (path, body, status, begins) in [
        (CHAT, json!({"messages": "hi"}), 400, "messages "),
        (CHAT, json!({"messages": user, "model": "other"}), 404, "the model \"other\""),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "hi", "images": ["x"]}]}),
            400,
            "messages[0].images ",
        ),
        (CHAT, json!({"messages": [{"role": "user"}]}), 400, "messages[0].content "),
        (CHAT, json!({"messages": user, "options": {"num_predict": "x"}}), 400, "options.num_predict "),
        (CHAT, json!({"messages": user, "options": {"num_ctx": 0}}), 400, "options.num_ctx "),
        (CHAT, json!({"messages": [], "model": "other"}), 404, "the model \"other\""),
        (GENERATE, json!({"options": 5, "prompt": "a"}), 400, "options "),
        (CHAT, json!({"messages": user, "options": {"repeat_penalty": 0}}), 400, "options.repeat_penalty "),
        (CHAT, json!({"messages": user, "options": {"mirostat": 1}}), 400, "options.mirostat "),
        (CHAT, json!({"messages": user, "format": "yaml"}), 400, "format "),
        (CHAT, json!({"messages": user, "think": true}), 400, "think "),
        (CHAT, json!({"messages": user, "logprobs": 5}), 400, "logprobs "),
        (CHAT, json!({"messages": user, "top_logprobs": 2}), 400, "top_logprobs "),
        (GENERATE, json!({"prompt": "a", "logprobs": true, "top_logprobs": 21}), 400, "top_logprobs "),
        (GENERATE, json!({"prompt": 5}), 400, "prompt "),
        (GENERATE, json!({"prompt": "a", "suffix": "b"}), 400, "suffix "),
        (GENERATE, json!({"prompt": "a", "template": "b"}), 400, "template "),
        (GENERATE, json!({"prompt": "a", "context": [1]}), 400, "context "),
        (GENERATE, json!({"prompt": "a", "raw": true, "system": "b"}), 400, "system "),
        ("/api/show", json!({"model": "other"}), 404, "the model \"other\""),
        ("/api/embed", json!({"input": "a"}), 400, "/api/embed needs an embedding model"),
        ("/api/pull", json!({"model": "a"}), 400, "/api/pull "),
    ] {
        let error = refused(&server, path, &body, status).await;
        assert!(error.starts_with(begins), "{body}: {error}");
    }
    server.engine.expect_silence();
}

#[tokio::test]
async fn models_as_ollama_lists_them() {
    let mut server = Server::start_with(with_parsers(), 1, 10).await;
    assert_eq!(server.ask(get("/api/version")).await.json(), json!({"version": "9.9"}));
    let mut client = server.connect().await;
    for path in ["/api/tags", "/api/ps"] {
        client.send(get(path)).await;
        let Outbound::Scheduler(0, ToScheduler::Info { query }) = server.engine.next().await else {
            panic!("expected a query")
        };
        let ranks = vec![
            RankInfo { weight_bytes: 5, ..RankInfo::default() },
            RankInfo { weight_bytes: 6, ..RankInfo::default() },
        ];
        server.engine.inbound.deliver(ToApi::EngineInfo(Box::new(EngineInfo {
            query,
            ranks,
            ..EngineInfo::default()
        })));
        let models = client.reply().await.json()["models"].clone();
        let card = &models[0];
        assert_eq!(
            (&card["name"], &card["model"], &card["size"]),
            (&json!("org/tiny"), &json!("org/tiny"), &json!(11))
        );
        assert_eq!((&card["details"]["format"], &card["digest"]), (&json!("gguf"), &json!("0123456789ab")));
        if path == "/api/ps" {
            assert_eq!((&card["size_vram"], &card["context_length"]), (&json!(11), &json!(64)));
        } else {
            assert_eq!(card["modified_at"], "2023-11-14T22:13:20.000000000Z");
        }
    }
    for body in [r#"{"model":"org/tiny"}"#, r#"{"name":"org/tiny:latest"}"#] {
        let shown = server.ask(post("/api/show", body)).await.json();
        assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
        assert_eq!(shown["model_info"]["general.architecture"], "llama");
        assert_eq!(shown["model_info"]["llama.context_length"], 64);
        assert_eq!(shown["template"], "{{ messages }}");
        assert_eq!(shown["parameters"], "top_k 20");
        assert_eq!(shown["modelfile"], "FROM org/tiny\nPARAMETER top_k 20");
    }
}

/// A delta whose text is one token.
fn with_logprobs(id: RequestId, text: &str, finish: Option<FinishReason>) -> Delta {
    let token = |text: &str| TokenText { id: 1, bytes: text.as_bytes().to_vec(), is_shown: true };
    let logprobs =
        TextLogprobs { token: token(text), logprob: Some(-0.5), rank: 2, top: vec![(token("b"), -0.25)] };
    Delta { logprobs: Some(Box::new(vec![logprobs])), ..delta(id, text, finish) }
}

#[tokio::test]
async fn log_probabilities_stand_beside_their_text() {
    let mut server = Server::start_with(with_parsers(), 1, 10).await;
    let mut client = server.connect().await;
    let best = json!({"token": "b", "logprob": -0.25, "bytes": [98]});
    let entry = |text: &str| json!({"token": text, "logprob": -0.5, "bytes": text.as_bytes(), "top_logprobs": [best]});
    for (path, own) in [
        (CHAT, json!({"messages": [{"role": "user", "content": "hi"}]})),
        (GENERATE, json!({"prompt": "a"})),
        (GENERATE, json!({"prompt": "a", "raw": true})),
    ] {
        for stream in [true, false] {
            let mut body = own.clone();
            let asked = json!({"logprobs": true, "top_logprobs": 1, "stream": stream});
            body.as_object_mut().unwrap().extend(asked.as_object().unwrap().clone());
            client.send(post(path, &body.to_string())).await;
            let request = server.engine.request().await;
            assert_eq!(request.sampling.logprobs, Some(1), "{path}");
            server.engine.delta(with_logprobs(request.id, "x", None));
            // The end token has no text.
            let end =
                Delta { text: String::new(), ..with_logprobs(request.id, "e", Some(FinishReason::Stop)) };
            server.engine.delta(end);
            let reply = client.reply().await;
            let got: Vec<Value> = match stream {
                true => lines(reply.text()),
                false => vec![reply.json()],
            };
            let got: Vec<_> = got.iter().map(|line| line["logprobs"].clone()).collect();
            let expected = match stream {
                true => vec![json!([entry("x")]), json!([entry("e")])],
                false => vec![json!([entry("x"), entry("e")])],
            };
            assert_eq!(got, expected, "{path}");
        }
    }
    client.send(post(GENERATE, r#"{"prompt":"a","stream":false}"#)).await;
    let request = server.engine.request().await;
    assert_eq!(request.sampling.logprobs, None);
    server.engine.finish(request.id, "x", FinishReason::Stop);
    assert!(client.reply().await.json().get("logprobs").is_none());
}

#[tokio::test]
async fn requests_without_a_prompt_load_and_unload_at_once() {
    let mut server = Server::start().await;
    for (path, body, reason) in [
        (GENERATE, json!({"model": "org/tiny:latest"}), "load"),
        (GENERATE, json!({"prompt": "", "keep_alive": "5m"}), "load"),
        (GENERATE, json!({"prompt": null, "keep_alive": 0}), "unload"),
        (CHAT, json!({"messages": [], "keep_alive": -1}), "load"),
        (CHAT, json!({"keep_alive": "0s", "stream": false}), "unload"),
    ] {
        let reply = server.ask(post(path, &body.to_string())).await;
        assert_eq!(reply.status, 200, "{body}: {}", reply.text());
        let answer = reply.json();
        assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!(reason)), "{body}");
        assert_eq!(answer["model"], "org/tiny");
        let text = if path == CHAT { &answer["message"]["content"] } else { &answer["response"] };
        assert_eq!(text, "", "{body}");
    }
    for (body, field) in [
        (json!({"model": "other"}), "other"),
        (json!({"options": {"repeat_last_n": "all"}}), "repeat_last_n"),
        (json!({"options": {"temperature": -1}}), "temperature"),
    ] {
        let reply = server.ask(post(GENERATE, &body.to_string())).await;
        assert!(reply.status >= 400 && reply.text().contains(field), "{body}: {}", reply.text());
    }
    server.engine.expect_silence();
}

/// What its Python client sends where all options are set to Ollama's defaults.
#[tokio::test]
async fn the_defaults_of_ollamas_clients_are_taken() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    for (window, penalty) in [(64, 1.1), (-1, 1.1), (0, 1.0)] {
        let options = json!({"num_ctx": 131_072, "repeat_last_n": window, "repeat_penalty": 1.1, "penalize_newline": false,
            "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "tfs_z": 1, "typical_p": 1.0, "num_keep": 4,
            "logits_all": false, "embedding_only": false});
        client
            .send(post(GENERATE, &json!({"prompt": "a", "options": options, "stream": false}).to_string()))
            .await;
        let request = server.engine.request().await;
        assert_eq!(request.sampling.repetition_penalty, penalty, "repeat_last_n {window}");
        server.engine.finish(request.id, "x", FinishReason::Stop);
        assert_eq!(client.reply().await.status, 200);
    }
}
