//! Structured output from the real binary: every form, in every spelling of batch, chunk, tp size and
//! retraction; and grammars that are refused before anything runs.

mod common;

use common::{serve, serve_with};
use lockstep_testkit::{Fixture, Server};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// A schema whose every answer is short, whatever a model of random weights prefers.
fn schema() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["ok", "kind", "n"],
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["red", "green"]}, "n": {"type": "array",
            "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}},
        "x-guidance": {"whitespace_flexible": false},
    })
}

fn body(server: &Server, prompt: &str, extra: &Value) -> Value {
    let mut body = server.completion_body(prompt, json!({"max_tokens": 80}));
    body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    body
}

/// Whole and streamed; both must be the same.
fn text(server: &Server, prompt: &str, extra: &Value) -> (String, String) {
    let body = body(server, prompt, extra);
    let whole = server.answer(COMPLETIONS, &body);
    let streamed = server.stream(COMPLETIONS, &body);
    assert_eq!((&streamed.text, &streamed.finishes[..]), (&whole.text, std::slice::from_ref(&whole.finish)));
    (whole.text, whole.finish)
}

fn assert_satisfies(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
    let keys: Vec<_> = value.as_object().expect("an object").keys().collect();
    assert_eq!(keys, ["ok", "kind", "n"], "{text}");
    assert!(value["ok"].is_boolean() && ["red", "green"].map(Value::from).contains(&value["kind"]), "{text}");
    assert_eq!(value["n"].as_array().map(Vec::len), Some(2), "{text}");
}

#[test]
fn answers_have_the_form_that_was_asked_for() {
    let served = serve("chain", 1);
    let server = &served.server;
    let baseline = server.baseline();
    for temperature in [0.0, 1.5] {
        let with = |extra: Value| {
            let mut extra = extra;
            extra["temperature"] = json!(temperature);
            extra["seed"] = json!(5);
            extra
        };
        let (text_, finish) = text(server, "A", &with(json!({"guided_choice": ["yes", "no", "<|eos|>"]})));
        assert!(["yes", "no", "<|eos|>"].contains(&text_.as_str()) && finish == "stop", "{text_:?} {finish}");
        let (text_, finish) = text(server, "A", &with(json!({"regex": "[0-9]{3}-[a-c]+x"})));
        assert!(finish != "stop" || text_.ends_with('x'), "{text_}");
        assert!(text_[..3].bytes().all(|b| b.is_ascii_digit()) && text_.as_bytes()[3] == b'-', "{text_}");
        let gbnf = json!({"ebnf": "root ::= \"<\" [a-c]{2} \">\""});
        let (text_, finish) = text(server, "A", &with(gbnf));
        assert!(
            text_.len() == 4 && text_.starts_with('<') && text_.ends_with('>') && finish == "stop",
            "{text_}"
        );
        let lark = json!({"guided_grammar": "start: \"<\" word \">\"\nword: \"ab\" | \"cd\" word"});
        let (text_, _) = text(server, "A", &with(lark));
        assert!(text_.starts_with("<ab>") || text_.starts_with("<cd"), "{text_}");
        let format =
            json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema()}});
        let (text_, finish) = text(server, "A", &with(json!({"response_format": format})));
        assert_eq!(finish, "stop");
        assert_satisfies(&text_);
        // Any object: a model of random weights need not end it, but it begins one.
        let (text_, _) = text(server, "A", &with(json!({"response_format": {"type": "json_object"}})));
        assert!(text_.starts_with('{'), "{text_}");
    }
    let chat = server.chat_body(
        "ab",
        json!({"response_format": {"type": "json_schema",
        "json_schema": {"name": "x", "schema": schema()}}, "n": 2, "temperature": 1, "seed": 1}),
    );
    let response = server.post(CHAT, &chat).json();
    for choice in response["choices"].as_array().expect("choices") {
        assert_satisfies(choice["message"]["content"].as_str().expect("a text"));
    }
    server.after_check(&baseline, "A", " alpha beta gamma delta");
    served.server.stop();
}

#[test]
fn forms_do_not_depend_on_the_batch_around() {
    let prompts: Vec<String> = (0..6).map(|i| "x".repeat(30 + i) + "A").collect();
    let extra = |i: usize| json!({"guided_json": schema(), "temperature": 1.2, "seed": i, "frequency_penalty": 0.1, "n": 2});
    let mut known: Vec<Value> = Vec::new();
    for (tp_size, flags) in [
        (1, &[("--num-pages", "1024")][..]),
        (2, &[("--num-pages", "26"), ("--chunk", "7"), ("--reserve-percent", "0")][..]),
        (2, &[("--num-pages", "26"), ("--overlap", "on"), ("--reserve-percent", "0")][..]),
    ] {
        let served = serve_with(Fixture::named("chain"), tp_size, |command| {
            flags.iter().fold(command, |command, (name, value)| command.flag(name, value))
        });
        let server = &served.server;
        let ask = |i: usize| {
            let response = server.post(COMPLETIONS, &body(server, &prompts[i], &extra(i)));
            assert_eq!(response.status, 200, "{}", response.json());
            response.json()["choices"].clone()
        };
        if known.is_empty() {
            known = (0..prompts.len()).map(ask).collect();
            known.iter().flat_map(|c| c.as_array().expect("choices")).for_each(|choice| {
                assert_satisfies(choice["text"].as_str().expect("a text"));
            });
        }
        let together: Vec<Value> = std::thread::scope(|scope| {
            let ask = &ask;
            let asking: Vec<_> = (0..prompts.len()).map(|i| scope.spawn(move || ask(i))).collect();
            asking.into_iter().map(|a| a.join().expect("an answer")).collect()
        });
        assert_eq!(together, known, "tp {tp_size}, {flags:?}");
        if tp_size == 2 {
            assert!(server.info_number("retractions") > 0, "416 tokens for 12 requests of 80 do not suffice");
        }
        served.server.stop();
    }
}

/// The token of one character.
fn token_of(server: &Server, text: &str) -> Value {
    let told = server.post("/tokenize", &json!({"prompt": text, "add_special_tokens": false})).json();
    assert_eq!(told["count"], 1, "{text:?} is one token");
    told["tokens"][0].clone()
}

/// Nobody gets a token that is not allowed: what leaves none is an error, or the end where a form is complete.
#[test]
fn what_leaves_no_token_is_an_error() {
    let served = serve_with(Fixture::named("chain"), 2, |command| command.flag("--overlap", "on"));
    let server = &served.server;
    let baseline = server.baseline();
    let [a, b, x] = ["a", "b", "x"].map(|text| token_of(server, text));
    for temperature in [0.0, 1.0] {
        let with = |extra: Value| {
            let mut body = body(server, "A", &extra);
            body["temperature"] = json!(temperature);
            body
        };
        // What is left: nothing at first, nothing behind `a`, and nothing but the end behind `a`.
        for (extra, text, is_error) in [
            (json!({"regex": "a+", "allowed_token_ids": [b, x]}), "", true),
            (json!({"allowed_token_ids": [a], "bad_words": ["a"]}), "", true),
            (json!({"regex": "ab", "allowed_token_ids": [a, x]}), "a", true),
            (json!({"regex": "a|ab", "allowed_token_ids": [a]}), "a", false),
        ] {
            let body = with(extra);
            let whole = server.post(COMPLETIONS, &body);
            let document = whole.json();
            let told = |error: &Value| {
                assert_eq!(error["code"], "no_token_left", "{error}");
                assert_eq!(error["type"], "invalid_request_error", "{error}");
            };
            if is_error {
                assert_eq!(whole.status, 400, "{body}: {document}");
                told(&document["error"]);
            } else {
                assert_eq!(document["choices"][0]["text"], text, "{body}: {document}");
                assert_eq!(document["choices"][0]["finish_reason"], "stop", "{body}");
            }
            if is_error && text.is_empty() {
                let mut body = body;
                body["stream"] = json!(true);
                let refused = server.post(COMPLETIONS, &body);
                assert_eq!(refused.status, 400, "no head before the first token: {body}");
                told(&refused.json()["error"]);
                continue;
            }
            let streamed = server.stream(COMPLETIONS, &body);
            assert_eq!(streamed.text, text, "{body}");
            match is_error {
                true => told(&streamed.error.expect("an error event")),
                false => assert_eq!((&streamed.finishes[..], streamed.done), (&["stop".into()][..], true)),
            }
        }
    }
    server.after_check(&baseline, "A", " alpha beta gamma delta");
    served.server.stop();
}

#[test]
fn bad_grammars_are_refused_before_anything_runs() {
    let served = serve("chain", 2);
    let server = &served.server;
    let before = server.info_number("steps");
    // Compiling it would overflow a stack.
    let wide: serde_json::Map<_, _> = (0..10_000).map(|i| (format!("p{i}"), json!({}))).collect();
    for stream in [false, true] {
        for extra in [
            json!({"regex": "("}),
            json!({"guided_grammar": "start: nowhere"}),
            json!({"guided_json": {"type": "alien"}}),
            json!({"json_schema": "{"}),
            json!({"guided_json": {"properties": wide}}),
            json!({"ebnf": "root ::= \"a\"{1,2}{"}),
            json!({"guided_grammar": "start: start \"a\""}),
            json!({"guided_json": {"enum": []}}),
            json!({"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x",
                "schema": {"$ref": "http://example.org/schema"}}}}),
        ] {
            let mut body = body(server, "A", &extra);
            body["stream"] = json!(stream);
            let refused = server.post(COMPLETIONS, &body);
            let (field, error) =
                (extra.as_object().expect("an object").keys().next(), &refused.json()["error"]);
            assert_eq!(
                (refused.status, error["param"].as_str()),
                (400, field.map(String::as_str)),
                "{error}"
            );
            if field.is_some_and(|name| name != "ebnf") {
                assert_eq!(error["code"], "invalid_grammar", "{error}");
            }
        }
    }
    assert_eq!(server.info_number("steps"), before, "no step was planned");
    assert_eq!(server.complete("A", json!({})).text, " alpha beta gamma delta");
    served.server.stop();
}
