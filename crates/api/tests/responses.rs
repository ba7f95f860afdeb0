//! OpenAI's `/v1/responses`: what the engine is asked for, and what clients read, event by event.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Reply, Server, chat, check_error, config, delta, post};
use lockstep_api::ApiConfig;
use lockstep_api::parsers::{Opening, ParserChoice, ReasoningFormat, ToolFormat};
use lockstep_core::{FinishReason, Grammar, Refusal, RequestId};
use lockstep_wire::{Delta, GenerateRequest, TextLogprobs, TokenText};
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";
const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

fn hermes() -> ApiConfig {
    let parsers = ParserChoice {
        tools: Some(ToolFormat::Hermes),
        reasoning: Some(ReasoningFormat::Think),
        opening: Opening::Never,
    };
    ApiConfig { parsers, ..config() }
}

fn body(extra: Value) -> String {
    let mut body = json!({"input": "hi"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body.to_string()
}

fn weather() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"type": "function", "name": "weather", "description": "now", "parameters": schema, "strict": true}])
}

/// The answer when the engine sends these deltas.
async fn answer_of(body: String, deltas: Vec<Delta>) -> Reply {
    let mut server = Server::start_with(hermes(), 1, 100).await;
    let mut client = server.connect().await;
    client.send(post(PATH, &body)).await;
    let id = server.engine.request().await.id;
    for delta in deltas {
        server.engine.delta(Delta { id, ..delta });
    }
    let reply = client.reply().await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

/// The answer when the engine generates `text` in pieces of `cut` characters.
async fn answer(body: String, text: &str, cut: usize, finish: FinishReason) -> Reply {
    let pieces = text.chars().collect::<Vec<_>>();
    let piece = |chars: &[char]| delta(RequestId(0), &chars.iter().collect::<String>(), None);
    let mut deltas: Vec<Delta> = pieces.chunks(cut).map(piece).collect();
    deltas.push(delta(RequestId(0), "", Some(finish)));
    answer_of(body, deltas).await
}

/// The bodies of a stream's events, whose names must be their types and whose numbers must count.
fn events(text: &str) -> Vec<Value> {
    let event = |(number, frame): (usize, &str)| {
        let (name, data) = frame.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let body: Value = serde_json::from_str(data).unwrap();
        assert_eq!((&body["type"], &body["sequence_number"]), (&json!(name), &json!(number)));
        body
    };
    text.strip_suffix("\n\n").unwrap().split("\n\n").enumerate().map(event).collect()
}

/// Ids and times differ between answers.
fn comparable(mut response: Value) -> Value {
    assert!(response["id"].take().as_str().unwrap().starts_with("resp_"));
    response["created_at"].take();
    for item in response["output"].as_array_mut().unwrap() {
        let prefix = match item["type"].as_str().unwrap() {
            "message" => "msg_",
            "reasoning" => "rs_",
            _ => "fc_",
        };
        assert!(item["id"].take().as_str().unwrap().starts_with(prefix));
        if item.get("call_id").is_some() {
            assert!(item["call_id"].take().as_str().unwrap().starts_with("call_"));
        }
    }
    response
}

#[tokio::test]
async fn items_come_in_order_and_a_stream_ends_with_the_whole_response() {
    let text = format!("<think>\nwell\n</think>\n\nLet me see.\n{CALL}");
    let asked =
        |stream: bool| body(json!({"stream": stream, "tools": weather(), "instructions": "Be brief."}));
    let whole = comparable(answer(asked(false), &text, 1000, FinishReason::Stop).await.json());
    let usage = json!({"input_tokens": 3, "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 5});
    let expected = json!({
        "id": null, "object": "response", "created_at": null, "status": "completed", "error": null,
        "incomplete_details": null, "model": "org/tiny",
        "output": [
            {"id": null, "type": "reasoning", "status": "completed", "summary": [],
                "content": [{"type": "reasoning_text", "text": "well"}]},
            {"id": null, "type": "message", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]},
            {"id": null, "type": "function_call", "status": "completed", "call_id": null, "name": "weather",
                "arguments": "{\"city\": \"Rome\"}"},
        ],
        "usage": usage, "background": false, "instructions": "Be brief.", "max_output_tokens": null,
        "max_tool_calls": null, "parallel_tool_calls": true, "previous_response_id": null,
        "prompt_cache_key": null, "reasoning": {"effort": null, "summary": null}, "safety_identifier": null,
        "service_tier": "default", "store": false, "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto", "tools": weather(),
        "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": null, "metadata": {},
    });
    assert_eq!(whole, expected);
    for cut in [1, 2, 7] {
        let reply = answer(asked(true), &text, cut, FinishReason::Stop).await;
        let events = events(reply.text());
        assert_eq!(events.last().unwrap()["type"], "response.completed");
        // Every piece of these counts two tokens in all: reasoning is counted up to its end.
        let mut last = comparable(events.last().unwrap()["response"].clone());
        last["usage"]["output_tokens_details"]["reasoning_tokens"] = 0.into();
        assert_eq!(last, whole, "cut {cut}");
    }
}

#[tokio::test]
async fn the_events_of_a_stream_by_the_letter() {
    let text = format!("<think>hm</think>a\n{CALL}");
    let reply =
        answer(body(json!({"stream": true, "tools": weather()})), &text, 1000, FinishReason::Stop).await;
    assert!(!reply.text().contains("[DONE]"));
    let events = events(reply.text());
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(kinds, expected);
    let without = |event: &Value| {
        let mut event = event.clone();
        for name in ["type", "sequence_number"] {
            event.as_object_mut().unwrap().shift_remove(name);
        }
        event
    };
    let created = &events[0]["response"];
    assert_eq!(
        (&created["status"], &created["output"], &created["usage"]),
        (&json!("in_progress"), &json!([]), &Value::Null)
    );
    let (text_id, call_id) = (&events[8]["item"]["id"], &events[14]["item"]["id"]);
    let item = json!({"id": text_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []});
    assert_eq!(without(&events[8]), json!({"output_index": 1, "item": item}));
    let part = |text| json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
    let at = |extra: Value| {
        let mut body = json!({"item_id": text_id, "output_index": 1, "content_index": 0});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    assert_eq!(without(&events[9]), at(json!({"part": part("")})));
    assert_eq!(without(&events[10]), at(json!({"delta": "a", "logprobs": []})));
    assert_eq!(without(&events[11]), at(json!({"text": "a", "logprobs": []})));
    assert_eq!(without(&events[12]), at(json!({"part": part("a")})));
    assert_eq!(events[13]["item"]["content"], json!([part("a")]));
    assert_eq!(
        (&events[14]["item"]["arguments"], &events[14]["item"]["name"]),
        (&json!(""), &json!("weather"))
    );
    let arguments = "{\"city\": \"Rome\"}";
    let call = |name: &str| json!({"item_id": call_id, "output_index": 2, name: arguments});
    assert_eq!((without(&events[15]), without(&events[16])), (call("delta"), call("arguments")));
    assert_eq!(without(&events[4])["delta"], "hm");
    assert_eq!(events[18]["response"]["output"][2], events[17]["item"]);
}

#[tokio::test]
async fn an_answer_that_is_cut_is_incomplete_and_a_failure_is_told() {
    for stream in [false, true] {
        let reply = answer(body(json!({"stream": stream})), "ab", 1, FinishReason::Length).await;
        let response = if stream {
            let last = events(reply.text()).pop().unwrap();
            assert_eq!(last["type"], "response.incomplete");
            last["response"].clone()
        } else {
            reply.json()
        };
        assert_eq!(
            (&response["status"], &response["output"][0]["status"]),
            (&json!("incomplete"), &json!("incomplete"))
        );
        assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    }
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(post(PATH, &body(json!({"stream": true})))).await;
    let id = server.engine.request().await.id;
    server.engine.text(id, "a");
    server.engine.refuse(id, Refusal::unavailable("gone"));
    let last = events(client.reply().await.text()).pop().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"], json!({"code": "server_error", "message": "gone"}));
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], "a");
    // Before anything is sent, a refusal is an answer of its own.
    let mut client = server.connect().await;
    client.send(post(PATH, &body(json!({"stream": true})))).await;
    let id = server.engine.request().await.id;
    server.engine.refuse(id, Refusal::context_length(99, 64));
    assert_eq!(client.reply().await.error(400)["param"], "input");
}

#[tokio::test]
async fn log_probabilities_stand_with_the_text() {
    let token = |text: &str| TextLogprobs {
        token: TokenText { id: 0, bytes: text.into(), is_shown: true },
        logprob: Some(-0.5),
        rank: 1,
        top: Vec::new(),
    };
    let with = |text: &str, finish| Delta {
        logprobs: Some(Box::new(vec![token(text)])),
        ..delta(RequestId(0), text, finish)
    };
    let entry =
        |text: &str| json!({"token": text, "logprob": -0.5, "bytes": text.as_bytes(), "top_logprobs": []});
    for asked in [json!({"include": ["message.output_text.logprobs"]}), json!({"top_logprobs": 2})] {
        for stream in [false, true] {
            let mut asked = asked.clone();
            asked["stream"] = stream.into();
            let reply =
                answer_of(body(asked), vec![with("a", None), with("b", Some(FinishReason::Stop))]).await;
            let response = if stream {
                let events = events(reply.text());
                let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
                let new: Vec<_> = deltas.map(|event| event["logprobs"].clone()).collect();
                assert_eq!(new, [json!([entry("a")]), json!([entry("b")])]);
                events.last().unwrap()["response"].clone()
            } else {
                reply.json()
            };
            assert_eq!(response["output"][0]["content"][0]["logprobs"], json!([entry("a"), entry("b")]));
        }
    }
}

/// What the engine is asked for.
async fn request(extra: Value) -> GenerateRequest {
    let mut server = Server::start_with(hermes(), 1, 100).await;
    let mut client = server.connect().await;
    client.send(post(PATH, &body(extra))).await;
    server.engine.request().await
}

#[tokio::test]
async fn input_becomes_a_chat() {
    let (messages, tools, _) = chat(
        request(json!({
            "instructions": "Be brief.",
            "tools": weather(),
            "input": [
                {"role": "developer", "content": "Be kind."},
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                    {"type": "output_text", "text": "I look.", "annotations": []}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{\"city\": \"Rome\"}"},
                {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "broken"},
                {"type": "function_call_output", "call_id": "c1", "output": "sun"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "?"}]},
                {"role": "user", "content": "and?"},
            ],
        }))
        .await,
    );
    let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}});
    let expected = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
            "tool_calls": [call("c1", json!({"city": "Rome"})), call("c2", json!("broken"))]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1", "name": "weather"},
        {"role": "tool", "content": "?", "tool_call_id": "c2", "name": "weather"},
        {"role": "user", "content": "and?"},
    ]);
    assert_eq!(messages, expected);
    let mut function = weather()[0].clone();
    function.as_object_mut().unwrap().shift_remove("type");
    assert_eq!(tools, json!([{"type": "function", "function": function}]));
}

#[tokio::test]
async fn parameters_reach_the_engine() {
    let asked =
        request(json!({"temperature": 0.5, "top_p": 0.9, "seed": 5, "max_output_tokens": 9, "stop": ["X"],
        "store": true, "metadata": {"a": "b"}, "stream_options": {"include_obfuscation": false},
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "none", "summary": "auto"}}))
        .await;
    let sampling = &asked.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.seed), (0.5, 0.9, 5));
    assert_eq!((sampling.max_tokens, sampling.logprobs), (Some(9), None));
    assert_eq!(asked.text.stop, ["X"]);
    let variables = json!({"reasoning_effort": "none", "enable_thinking": false, "thinking": false});
    assert_eq!(chat(asked).2, variables);
    let format = json!({"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": true});
    let asked = request(json!({"text": {"format": format}})).await;
    assert_eq!(asked.sampling.grammar, Some(Grammar::JsonSchema("{\"type\":\"object\"}".into())));
    let asked = request(json!({"text": {"format": {"type": "json_object"}}})).await;
    assert_eq!(asked.sampling.grammar, Some(Grammar::JsonObject));
    for choice in [json!("required"), json!({"type": "function", "name": "weather"})] {
        let asked = request(json!({"tools": weather(), "tool_choice": choice})).await;
        assert!(matches!(&asked.sampling.grammar, Some(Grammar::Lark(text)) if text.contains("weather")));
    }
}

#[tokio::test]
async fn refusals_name_the_fields_of_responses() {
    let server = Server::start_with(hermes(), 1, 100).await;
    let item = |item: Value| json!({"input": [item]});
    for (extra, field) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (item(json!({"type": "item_reference", "id": "x"})), "input[0].type"),
        (item(json!({"type": "web_search_call"})), "input[0].type"),
        (item(json!({"role": "tool", "content": "x"})), "input[0].role"),
        (item(json!({"role": "user", "content": [{"type": "input_image"}]})), "input[0].content[0]"),
        (item(json!({"type": "function_call_output", "call_id": "c", "output": "x"})), "input[0].call_id"),
        (item(json!({"type": "reasoning", "encrypted_content": "x"})), "input[0].encrypted_content"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"background": true}), "background"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"include": ["everything"]}), "include"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x"}}}), "text.format.schema"),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
        (
            json!({"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]}),
            "tools[0].parameters",
        ),
        (json!({"tool_choice": {"type": "mcp"}}), "tool_choice"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"messages": [{"role": "user", "content": "x"}]}), "messages"),
        (json!({"reasoning": {"effort": 5}}), "reasoning.effort"),
    ] {
        let reply = server.ask(post(PATH, &body(extra.clone()))).await;
        let error = reply.error(400);
        assert_eq!(error["param"], field, "{extra}");
        assert!(error["message"].as_str().unwrap().starts_with(&format!("{field} ")), "{error}");
    }
    check_error(&server.ask(post(PATH, &body(json!({"model": "other"})))).await.json());
}
