//! Tool calls and reasoning in chat answers, what the engine is told of them, and keys.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, check_error, config, post};
use lockstep_api::parsers::{Opening, ParserChoice, ReasoningFormat, ToolFormat};
use lockstep_api::{ApiConfig, ApiKeys};
use lockstep_core::{FinishReason, Grammar};
use lockstep_wire::{GenerateRequest, Prompt};
use serde_json::{Value, json};

const PATH: &str = "/v1/chat/completions";

fn model(tools: ToolFormat, reasoning: Option<ReasoningFormat>, opening: Opening) -> ApiConfig {
    ApiConfig { parsers: ParserChoice { tools: Some(tools), reasoning, opening }, ..config() }
}

fn hermes() -> ApiConfig {
    model(ToolFormat::Hermes, Some(ReasoningFormat::Think), Opening::Never)
}

fn body(extra: Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": null}}],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The choices of an answer whose choice `i` is `texts[i]`, generated in pieces of `cut` characters.
async fn choices(config: ApiConfig, mut body: Value, texts: &[&str], cut: usize, stream: bool) -> Vec<Value> {
    body["stream"] = json!(stream);
    body["n"] = json!(texts.len());
    let mut server = Server::start_with(config, 1, 100).await;
    let mut client = server.connect().await;
    client.send(post(PATH, &body.to_string())).await;
    for text in texts {
        let id = server.engine.request().await.id;
        for piece in text.chars().collect::<Vec<_>>().chunks(cut) {
            server.engine.text(id, &piece.iter().collect::<String>());
        }
        server.engine.finish(id, "", FinishReason::Stop);
    }
    let reply = client.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    if !stream {
        let whole = reply.json()["choices"].as_array().unwrap().clone();
        return whole.into_iter().map(|choice| json!([choice["message"], choice["finish_reason"]])).collect();
    }
    let mut joined = vec![json!([{"role": "assistant", "content": ""}, null]); texts.len()];
    for event in reply.text().split("\n\n").filter_map(|event| event.strip_prefix("data: {")) {
        let chunk: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
        let choice = &chunk["choices"][0];
        join(&mut joined[choice["index"].as_u64().unwrap() as usize], choice);
    }
    joined
}

fn append(target: &mut Value, text: &Value) {
    let joined = format!("{}{}", target.as_str().unwrap_or_default(), text.as_str().unwrap());
    *target = joined.into();
}

/// As OpenAI's clients join chunks: texts are appended, calls by index.
fn join(into: &mut Value, choice: &Value) {
    assert_eq!(into[1], Value::Null, "nothing follows the finish");
    into[1] = choice["finish_reason"].clone();
    let (delta, message) = (&choice["delta"], &mut into[0]);
    for name in ["content", "reasoning_content"] {
        if delta.get(name).is_some() {
            append(&mut message[name], &delta[name]);
        }
    }
    for call in delta["tool_calls"].as_array().into_iter().flatten() {
        if message.get("tool_calls").is_none() {
            message["tool_calls"] = json!([]);
        }
        let calls = message["tool_calls"].as_array_mut().unwrap();
        if let Some(id) = call.get("id") {
            assert_eq!(call["index"], calls.len());
            assert_eq!((&call["type"], &call["function"]["arguments"]), (&json!("function"), &json!("")));
            let function = json!({"name": call["function"]["name"], "arguments": ""});
            calls.push(json!({"id": id, "type": "function", "function": function}));
        } else {
            assert!(call.get("type").is_none() && call["function"].get("name").is_none());
            let open = calls.last_mut().unwrap();
            append(&mut open["function"]["arguments"], &call["function"]["arguments"]);
        }
    }
}

/// Ids differ between answers; content is null in a whole message that only calls, never written in chunks.
fn comparable(choices: &[Value]) -> Vec<Value> {
    let mut choices = choices.to_vec();
    for choice in &mut choices {
        for call in choice[0].get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let id = call["id"].take();
            assert!(id.as_str().unwrap().starts_with("call_"), "{id}");
        }
        if choice[0]["content"] == "" && choice[0].get("tool_calls").is_some() {
            choice[0]["content"] = Value::Null;
        }
    }
    choices
}

fn calls(list: &[(&str, &str)]) -> Value {
    let call = |(name, arguments): &(&str, &str)| json!({"id": null, "type": "function", "function": {"name": name, "arguments": arguments}});
    list.iter().map(call).collect()
}

const ROME: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
const OSLO: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
const ROME_ARGUMENTS: &str = "{\"city\": \"Rome\"}";
const OSLO_ARGUMENTS: &str = "{\"city\": \"Oslo\"}";

#[tokio::test]
async fn calls_and_reasoning_are_the_same_whole_and_streamed_at_any_cut() {
    let thinking = format!("<think>\nwell\n</think>\n\nLet me see.\n{ROME}\n{OSLO}");
    let texts = [ROME, thinking.as_str(), "plain <tool_call> text"];
    let rome = calls(&[("weather", ROME_ARGUMENTS)]);
    let both = calls(&[("weather", ROME_ARGUMENTS), ("weather", OSLO_ARGUMENTS)]);
    let whole = choices(hermes(), body(json!({})), &texts, 1000, false).await;
    let ids: std::collections::BTreeSet<_> = whole
        .iter()
        .flat_map(|choice| choice[0]["tool_calls"].as_array().into_iter().flatten())
        .map(|call| call["id"].to_string())
        .collect();
    assert_eq!(ids.len(), 3, "every call of every choice has its own id");
    assert_eq!(whole[0][0]["content"], Value::Null);
    let whole = comparable(&whole);
    assert_eq!(whole[0], json!([{"role": "assistant", "content": null, "tool_calls": rome}, "tool_calls"]));
    assert_eq!(whole[1][0]["content"], "Let me see.");
    assert_eq!(whole[1][0]["tool_calls"], both);
    assert_eq!(whole[1][0]["reasoning_content"].as_str().unwrap().trim(), "well");
    assert_eq!(whole[2], json!([{"role": "assistant", "content": "plain <tool_call> text"}, "stop"]));
    for (cut, stream) in [(1, false), (1, true), (2, true), (7, true), (1000, true)] {
        let other = choices(hermes(), body(json!({})), &texts, cut, stream).await;
        assert_eq!(comparable(&other), whole, "cut {cut}, stream {stream}");
    }
}

#[tokio::test]
async fn one_call_where_parallel_calls_are_not_wanted() {
    let text = format!("{ROME}\n{OSLO}");
    for stream in [false, true] {
        let one = body(json!({"parallel_tool_calls": false}));
        let got = comparable(&choices(hermes(), one, &[&text], 3, stream).await);
        assert_eq!(got[0][0]["tool_calls"], calls(&[("weather", ROME_ARGUMENTS)]));
        assert_eq!(got[0][1], "tool_calls");
    }
}

#[tokio::test]
async fn without_tools_a_call_is_text_and_a_form_holds_no_reasoning() {
    let plain = json!({"tools": null});
    let got = choices(hermes(), body(plain.clone()), &[ROME], 5, true).await;
    assert_eq!(got[0], json!([{"role": "assistant", "content": ROME}, "stop"]));
    let r1 = || model(ToolFormat::Hermes, Some(ReasoningFormat::DeepSeekR1), Opening::Always);
    let got = choices(r1(), body(plain), &["why</think>so"], 4, true).await;
    let expected = json!([{"role": "assistant", "content": "so", "reasoning_content": "why"}, "stop"]);
    assert_eq!(got[0], expected);
    let form = json!({"response_format": {"type": "json_object"}});
    let got = choices(r1(), body(form), &["{\"a\": 1}"], 4, false).await;
    assert_eq!(got[0], json!([{"role": "assistant", "content": "{\"a\": 1}"}, "stop"]));
}

/// What the engine is asked for.
async fn request(config: ApiConfig, extra: Value) -> GenerateRequest {
    let mut server = Server::start_with(config, 1, 100).await;
    let mut client = server.connect().await;
    client.send(post(PATH, &body(extra).to_string())).await;
    server.engine.request().await
}

fn tools_seen(request: &GenerateRequest) -> Option<String> {
    match &request.prompt {
        Prompt::Chat(chat) => chat.tools_json.clone(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_template_sees_the_tools_and_the_engine_a_forced_call() {
    let auto = request(hermes(), json!({})).await;
    let tools = tools_seen(&auto).unwrap();
    assert!(tools.contains("\"weather\"") && !tools.contains("strict"), "nulls are left out: {tools}");
    assert!(auto.sampling.grammar.is_none() && auto.text.skip_special_tokens);
    let none = request(hermes(), json!({"tool_choice": "none"})).await;
    assert_eq!((tools_seen(&none), none.sampling.grammar), (None, None));
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for choice in [json!("required"), named] {
        let forced = request(hermes(), json!({"tool_choice": choice})).await;
        assert!(matches!(&forced.sampling.grammar, Some(Grammar::Lark(text)) if text.contains("weather")));
    }
    let mistral = model(ToolFormat::Mistral, None, Opening::Never);
    assert!(!request(mistral, json!({})).await.text.skip_special_tokens, "its markers are special tokens");
}

#[tokio::test]
async fn tools_that_cannot_be_used_are_refused_by_name() {
    let deepseek = || model(ToolFormat::DeepSeek, None, Opening::Never);
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    for (config, extra, param) in [
        (config(), json!({}), "tools"),
        (deepseek(), json!({"tool_choice": "required"}), "tool_choice"),
        (hermes(), json!({"tool_choice": named("nobody")}), "tool_choice"),
        (hermes(), json!({"tool_choice": "always"}), "tool_choice"),
        (hermes(), json!({"tool_choice": "required", "tools": []}), "tool_choice"),
        (hermes(), json!({"tool_choice": "required", "regex": "a"}), "tool_choice"),
        (hermes(), json!({"tool_choice": "required", "ignore_eos": true}), "ignore_eos"),
        (hermes(), json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (hermes(), json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (hermes(), json!({"tools": [named("a b")]}), "tools[0].function.name"),
        (hermes(), json!({"tools": [5]}), "tools[0]"),
        (hermes(), json!({"functions": [{"name": "f"}]}), "functions"),
    ] {
        let server = Server::start_with(config, 1, 100).await;
        let reply = server.ask(post(PATH, &body(extra.clone()).to_string())).await;
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{extra}");
        check_error(&reply.json());
    }
}

#[tokio::test]
async fn keys_open_everything_but_health() {
    let keys = ApiKeys::new(vec!["first".into(), "second".into()]);
    let server = Server::start_with(ApiConfig { api_keys: keys, ..config() }, 1, 100).await;
    let get = |path: &str, header: &str| {
        format!("GET {path} HTTP/1.1\r\nHost: x\r\n{header}Connection: close\r\n\r\n")
    };
    for header in ["Authorization: Bearer first\r\n", "authorization: bearer second\r\n"] {
        assert_eq!(server.ask(get("/v1/models", header)).await.status, 200, "{header}");
    }
    // A proxy's key beside the client's: one that is right suffices.
    for header in [
        "Authorization: Bearer wrong\r\nx-api-key: first\r\n",
        "x-api-key: wrong\r\nAuthorization: Bearer second\r\n",
        "Authorization: Basic eA==\r\nAuthorization: Bearer first\r\n",
    ] {
        assert_eq!(server.ask(get("/v1/models", header)).await.status, 200, "{header}");
    }
    let wrong = [
        "",
        "Authorization: Bearer no\r\nx-api-key: neither\r\n",
        "Authorization: Bearer firs\r\n",
        "Authorization: Basic first\r\n",
        "Authorization: first\r\n",
    ];
    for header in wrong {
        let reply = server.ask(get("/v1/models", header)).await;
        assert_eq!(
            (reply.status, &reply.json()["error"]["code"]),
            (401, &json!("invalid_api_key")),
            "{header}"
        );
        assert_eq!(reply.headers["www-authenticate"], "Bearer");
        assert_eq!(reply.headers["access-control-allow-origin"], "*");
    }
    assert_eq!(server.ask(post(PATH, &body(json!({})).to_string())).await.status, 401);
    assert_eq!(server.ask(get("/health", "")).await.status, 200);
    let preflight = "OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\n\
        Access-Control-Request-Method: POST\r\nConnection: close\r\n\r\n";
    assert_eq!(server.ask(preflight).await.status, 200);
}
