//! Anthropic's `/v1/messages`: what the engine is asked for, and what clients read, event by event.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Reply, Server, chat, config, delta, get, post};
use lockstep_api::parsers::{Opening, ParserChoice, ReasoningFormat, ToolFormat};
use lockstep_api::{ApiConfig, ApiKeys, Outbound};
use lockstep_core::{FinishReason, Grammar, Refusal};
use lockstep_wire::{
    Delta, GenerateRequest, Prompt, TextAnswer, TextQuestion, ToApi, ToTokenizer, Tokenized,
};
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";

fn hermes() -> ApiConfig {
    let parsers = ParserChoice {
        tools: Some(ToolFormat::Hermes),
        reasoning: Some(ReasoningFormat::Think),
        opening: Opening::Never,
    };
    ApiConfig { parsers, ..config() }
}

fn body(extra: Value) -> String {
    let mut body = json!({"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

fn weather() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"name": "weather", "description": "now", "input_schema": schema, "cache_control": {"type": "ephemeral"}}])
}

/// The answer when the engine generates `text` in pieces of `cut` characters.
async fn answer(body: String, text: &str, cut: usize, last: Delta) -> Reply {
    let mut server = Server::start_with(hermes(), 1, 100).await;
    let mut client = server.connect().await;
    client.send(post(PATH, &body)).await;
    let id = server.engine.request().await.id;
    for piece in text.chars().collect::<Vec<_>>().chunks(cut) {
        server.engine.text(id, &piece.iter().collect::<String>());
    }
    server.engine.delta(Delta { id, ..last });
    let reply = client.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

fn end(finish: FinishReason) -> Delta {
    delta(lockstep_core::RequestId(0), "", Some(finish))
}

/// The bodies of a stream's events, whose names must be their types.
fn events(text: &str) -> Vec<Value> {
    let event = |frame: &str| {
        let (name, data) = frame.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let body: Value = serde_json::from_str(data).unwrap();
        assert_eq!(body["type"], name);
        body
    };
    text.strip_suffix("\n\n").unwrap().split("\n\n").map(event).collect()
}

/// The message that a client builds from a stream, as Anthropic's own does it.
fn accumulate(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    let mut inputs = Vec::new();
    for event in &events[1..] {
        let index = event["index"].as_u64().unwrap_or_default() as usize;
        let content = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(index, content.len());
                content.push(event["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => match event["delta"]["type"].as_str().unwrap() {
                "input_json_delta" => inputs[index] += event["delta"]["partial_json"].as_str().unwrap(),
                kind => {
                    let name = kind.strip_suffix("_delta").unwrap();
                    let text = content[index][name].as_str().unwrap().to_owned();
                    content[index][name] = (text + event["delta"][name].as_str().unwrap()).into();
                }
            },
            "content_block_stop" if !inputs[index].is_empty() => {
                content[index]["input"] = serde_json::from_str(&inputs[index]).unwrap();
            }
            "message_delta" => {
                for (name, value) in event["delta"].as_object().unwrap() {
                    message[name] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "content_block_stop" | "message_stop" | "ping" => {}
            other => panic!("{other}"),
        }
    }
    message
}

const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

/// Ids differ between answers.
fn without_ids(mut message: Value) -> Value {
    let id = message["id"].take();
    assert!(id.as_str().unwrap().starts_with("msg_"));
    for block in message["content"].as_array_mut().unwrap() {
        if block["type"] == "tool_use" {
            assert!(block["id"].take().as_str().unwrap().starts_with("call_"));
        }
    }
    message
}

#[tokio::test]
async fn blocks_come_in_order_and_a_stream_builds_the_whole_message() {
    let text = format!("<think>\nwell\n</think>\n\nLet me see.\n{CALL}");
    let tools = |stream: bool| body(json!({"stream": stream, "tools": weather()}));
    let whole = answer(tools(false), &text, 1000, end(FinishReason::Stop)).await;
    let whole = without_ids(whole.json());
    let usage = json!({"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1,
        "output_tokens": 2});
    let content = json!([
        {"type": "thinking", "thinking": "well", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": null, "name": "weather", "input": {"city": "Rome"}},
    ]);
    let expected = json!({"id": null, "type": "message", "role": "assistant", "model": "org/tiny",
        "content": content, "stop_reason": "tool_use", "stop_sequence": null, "usage": usage});
    assert_eq!(whole, expected);
    for cut in [1, 2, 7, 1000] {
        let reply = answer(tools(true), &text, cut, end(FinishReason::Stop)).await;
        assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
        let mut streamed = without_ids(accumulate(&events(reply.text())));
        if cut < 1000 {
            // How much of the answer was thinking is known step by step.
            let details = streamed["usage"].as_object_mut().unwrap().shift_remove("output_tokens_details");
            assert_eq!(details, Some(json!({"thinking_tokens": 2})));
        }
        assert_eq!(streamed, whole, "cut {cut}");
    }
}

#[tokio::test]
async fn the_events_of_a_stream_by_the_letter() {
    let reply = answer(
        body(json!({"stream": true, "tools": weather()})),
        &format!("a\n{CALL}"),
        1000,
        end(FinishReason::Stop),
    )
    .await;
    let mut events = events(reply.text());
    let usage = json!({"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1,
        "output_tokens": 2});
    let (id, call) = (events[0]["message"]["id"].take(), events[4]["content_block"]["id"].take());
    assert!(id.is_string() && call.is_string());
    let message = json!({"id": null, "type": "message", "role": "assistant", "model": "org/tiny", "content": [],
        "stop_reason": null, "stop_sequence": null, "usage": usage});
    let expected = [
        json!({"type": "message_start", "message": message}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "content_block_start", "index": 1, "content_block":
            {"type": "tool_use", "id": null, "name": "weather", "input": {}}}),
        json!({"type": "content_block_delta", "index": 1, "delta":
            {"type": "input_json_delta", "partial_json": "{\"city\": \"Rome\"}"}}),
        json!({"type": "content_block_stop", "index": 1}),
        json!({"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null}, "usage": usage}),
        json!({"type": "message_stop"}),
    ];
    assert_eq!(events, expected);
}

#[tokio::test]
async fn stop_reasons_say_what_ended_the_answer() {
    let stop = json!({"stop_sequences": ["X", "END"], "stream": false});
    for (last, reason, sequence) in [
        (end(FinishReason::Stop), "end_turn", Value::Null),
        (Delta { stop_string: Some(1), ..end(FinishReason::Stop) }, "stop_sequence", json!("END")),
        (end(FinishReason::Length), "max_tokens", Value::Null),
    ] {
        for stream in [false, true] {
            let mut asked = stop.clone();
            asked["stream"] = json!(stream);
            let reply = answer(body(asked), "", 1, last.clone()).await;
            let message = if stream { accumulate(&events(reply.text())) } else { reply.json() };
            assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!(reason), &sequence));
            assert_eq!(message["content"], json!([]), "no text, no block");
        }
    }
    let cut = CALL.split("Rome").next().unwrap();
    let reply = answer(body(json!({"tools": weather()})), cut, 1000, end(FinishReason::Length)).await.json();
    assert_eq!((&reply["stop_reason"], &reply["content"][0]["input"]), (&json!("max_tokens"), &json!({})));
}

/// What the engine is asked for.
async fn request(extra: Value) -> GenerateRequest {
    let mut server = Server::start_with(hermes(), 1, 100).await;
    let mut client = server.connect().await;
    client.send(post(PATH, &body(extra))).await;
    server.engine.request().await
}

#[tokio::test]
async fn a_conversation_becomes_a_chat() {
    let call = json!({"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}});
    let result = json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]});
    let failed =
        json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": "down", "is_error": true});
    let text = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
    let (messages, tools, _) = chat(
        request(json!({
            "system": [text("Be brief."), text("Be kind.")],
            "tools": weather(),
            "messages": [
                {"role": "user", "content": [text("a"), text("b")]},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"}, text("I look."), call]},
                {"role": "user", "content": [result, text("and?")]},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [failed]},
            ],
        }))
        .await,
    );
    let calls = json!([{"id": "toolu_1", "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Rome"}}}]);
    let expected = json!([
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "sun", "tool_call_id": "toolu_1", "name": "weather"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "Error: down", "tool_call_id": "toolu_1", "name": "weather"},
    ]);
    assert_eq!(messages, expected);
    let function = json!({"name": "weather", "description": "now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}});
    assert_eq!(tools, json!([{"type": "function", "function": function}]));
}

#[tokio::test]
async fn parameters_reach_the_engine() {
    let asked = request(json!({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "max_tokens": 9,
        "stop_sequences": ["X"], "system": null, "metadata": {"user_id": "u"}}))
    .await;
    let sampling = &asked.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.5, 0.9, 7));
    assert_eq!((sampling.seed, sampling.max_tokens), (5, Some(9)));
    assert_eq!(asked.text.stop, ["X"]);
    let prefill = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let asked = request(json!({"messages": prefill})).await;
    assert!(matches!(&asked.prompt, Prompt::Chat(chat) if !chat.add_generation_prompt));
    assert_eq!(chat(asked).2, json!({"continue_final_message": true}));
    for (thinking, variables) in [
        (
            json!({"type": "enabled", "budget_tokens": 2000}),
            json!({"enable_thinking": true, "thinking": true}),
        ),
        (json!({"type": "disabled"}), json!({"enable_thinking": false, "thinking": false})),
        (json!({"type": "adaptive"}), Value::Null),
    ] {
        assert_eq!(chat(request(json!({"thinking": thinking})).await).2, variables);
    }
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "weather"})] {
        let asked = request(json!({"tools": weather(), "tool_choice": choice})).await;
        assert!(matches!(&asked.sampling.grammar, Some(Grammar::Lark(text)) if text.contains("weather")));
    }
    let none = request(json!({"tools": weather(), "tool_choice": {"type": "none"}})).await;
    assert_eq!((none.sampling.grammar.clone(), chat(none).1), (None, Value::Null));
    let format = json!({"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"});
    let asked = request(json!({"output_config": format})).await;
    assert_eq!(asked.sampling.grammar, Some(Grammar::JsonSchema("{\"type\":\"object\"}".into())));
    assert_eq!(chat(asked).2, json!({"reasoning_effort": "low"}));
}

#[tokio::test]
async fn only_one_call_where_parallel_calls_are_not_wanted() {
    let choice = json!({"type": "auto", "disable_parallel_tool_use": true});
    let asked = body(json!({"tools": weather(), "tool_choice": choice}));
    let reply = answer(asked, &format!("{CALL}\n{CALL}"), 9, end(FinishReason::Stop)).await.json();
    assert_eq!(reply["content"].as_array().unwrap().len(), 1);
    assert_eq!(reply["stop_reason"], "tool_use");
}

#[tokio::test]
async fn tokens_are_counted_by_a_tokenizer() {
    let mut server = Server::start_with(hermes(), 1, 100).await;
    let path = "/v1/messages/count_tokens";
    let asked = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "tools": weather()});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        post(path, &body.to_string())
    };
    let mut client = server.connect().await;
    client.send(asked(json!({"system": "Be brief."}))).await;
    let Outbound::Tokenizer(0, ToTokenizer::AskText { query, question }) = server.engine.next().await else {
        panic!("not a question")
    };
    let TextQuestion::Tokenize { prompt: Prompt::Chat(chat), add_special_tokens: false, .. } = *question
    else {
        panic!("not a chat as it is generated from")
    };
    assert!(chat.messages_json.contains("Be brief.") && chat.tools_json.unwrap().contains("weather"));
    let tokens = Tokenized { tokens: vec![1, 2, 3], pieces: None };
    let result = Ok(TextAnswer::Tokens(tokens));
    server.engine.inbound.deliver(ToApi::TextAnswered { query, result });
    assert_eq!(client.reply().await.json(), json!({"input_tokens": 3}));
    let refused = server.ask(asked(json!({"messages": []}))).await;
    check_error(&refused, 400, "invalid_request_error");
    check_error(&server.ask(asked(json!({"model": "other"}))).await, 404, "not_found_error");
}

/// `{"type": "error", "error": {"type", "message"}}`; returns the message.
fn check_error(reply: &Reply, status: u16, kind: &str) -> String {
    assert_eq!(reply.status, status, "{}", reply.text());
    let body = reply.json();
    let message = body["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(body, json!({"type": "error", "error": {"type": kind, "message": message}}));
    message
}

#[tokio::test]
async fn refusals_name_anthropics_fields_in_anthropics_form() {
    let server = Server::start_with(hermes(), 1, 100).await;
    let user = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    for (extra, field) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "system", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (user(json!({"type": "image", "source": {}})), "messages[0].content[0].type"),
        (
            user(json!({"type": "tool_use", "id": "a", "name": "b", "input": {}})),
            "messages[0].content[0].type",
        ),
        (user(json!({"type": "tool_result", "tool_use_id": "a"})), "messages[0].content[0].tool_use_id"),
        (user(json!({"type": "text"})), "messages[0].content[0].text"),
        (json!({"system": [{"type": "image"}]}), "system[0]"),
        (json!({"stop_sequences": ["a", ""]}), "stop_sequences"),
        (json!({"stop_sequences": "a"}), "stop_sequences"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"tools": [{"name": "a b", "input_schema": {}}]}), "tools[0].name"),
        (json!({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}), "tools[0].input_schema"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (json!({"tools": weather(), "tool_choice": {"type": "tool", "name": "x"}}), "tool_choice"),
        (json!({"tool_choice": {"type": "always"}}), "tool_choice.type"),
        (json!({"thinking": {"type": "on"}}), "thinking.type"),
        (json!({"mcp_servers": [{"name": "x"}]}), "mcp_servers"),
        (json!({"n": 2}), "n"),
        (json!({"stop": ["a"]}), "stop"),
        (json!({"response_format": {"type": "xml"}}), "response_format"),
    ] {
        let message =
            check_error(&server.ask(post(PATH, &body(extra.clone()))).await, 400, "invalid_request_error");
        assert!(message.starts_with(&format!("{field} ")), "{extra}: {message}");
    }
    let plain = Server::start().await;
    let thinking = body(json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}));
    let message = check_error(&plain.ask(post(PATH, &thinking)).await, 400, "invalid_request_error");
    assert!(message.starts_with("thinking.type "), "{message}");
}

#[tokio::test]
async fn every_error_of_the_endpoint_has_the_form() {
    let keys = ApiKeys::new(vec!["key".into()]);
    let small = ApiConfig { api_keys: keys, body_bytes_max: 2000, ..config() };
    let mut server = Server::start_with(small, 1, 1).await;
    let with_key = |request: String| request.replacen("Host: x", "Host: x\r\nx-api-key: key", 1);
    let asked = |extra| with_key(post(PATH, &body(extra)));
    check_error(&server.ask(post(PATH, &body(json!({})))).await, 401, "authentication_error");
    check_error(&server.ask(asked(json!({"model": "other"}))).await, 404, "not_found_error");
    check_error(&server.ask(with_key(get(PATH))).await, 405, "invalid_request_error");
    check_error(&server.ask(with_key(post("/v1/messages/nothing", "{}"))).await, 404, "not_found_error");
    check_error(&server.ask(asked(json!({"system": "x".repeat(3000)}))).await, 413, "request_too_large");
    check_error(&server.ask(with_key(post(PATH, "{"))).await, 400, "invalid_request_error");
    // One request is open; there is room for one.
    let mut client = server.connect().await;
    client.send(asked(json!({"stream": true}))).await;
    let id = server.engine.request().await.id;
    let full = server.ask(asked(json!({}))).await;
    check_error(&full, 503, "overloaded_error");
    assert_eq!(full.headers["retry-after"], "1");
    server.engine.text(id, "a");
    server.engine.refuse(id, Refusal::unavailable("gone"));
    let reply = client.reply().await;
    let last = reply.text().trim_end().rsplit("\n\n").next().unwrap().to_owned();
    let expected = r#"event: error
data: {"type":"error","error":{"type":"overloaded_error","message":"gone"}}"#;
    assert_eq!(last, expected);
    // A refusal of the engine, before anything is sent, is an answer of its own.
    let mut client = server.connect().await;
    client.send(asked(json!({"stream": true}))).await;
    let id = server.engine.request().await.id;
    server.engine.refuse(id, Refusal::context_length(99, 64));
    check_error(&client.reply().await, 400, "invalid_request_error");
}
