//! Text, streams and refusals over HTTP from the real binary: characters split over tokens, stop
//! strings, spaces, special tokens, finish reasons, usage, over-long prompts, and the
//! beginning-of-text token.
//!
//! Case numbers in the tests' names are those of the project's list of cases.

mod common;

use common::{serve, serve_with};
use lockstep_testkit::{Fixture, Server};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Text, finish reason and completion tokens, equal whether streamed or not.
fn both_ways(server: &Server, prompt: &str, extra: &Value) -> (String, String, u64) {
    let mut body = server.completion_body(prompt, extra.clone());
    let whole = server.answer(COMPLETIONS, &body);
    body["stream_options"] = json!({"include_usage": true});
    let streamed = server.stream(COMPLETIONS, &body);
    let context = format!("prompt {prompt:?} {extra}: {:?}", streamed.chunks);
    assert!(streamed.done && streamed.error.is_none() && streamed.broken.is_none(), "{context}");
    assert_eq!(streamed.text, whole.text, "streamed and whole text differ; {context}");
    assert_eq!(streamed.finishes, std::slice::from_ref(&whole.finish), "{context}");
    let usage = streamed.usage.unwrap_or_else(|| panic!("no usage; {context}"));
    assert_eq!(usage["prompt_tokens"], json!(whole.prompt_tokens), "{context}");
    (whole.text, whole.finish, whole.completion_tokens)
}

#[test]
fn c1_a_character_split_over_tokens() {
    let served = serve("chain", 1);
    let server = &served.server;
    let (text, finish, _) = both_ways(server, "B", &json!({"max_tokens": 12}));
    assert_eq!((text.as_str(), finish.as_str()), ("😀é漢 ok", "stop"));
    std::thread::scope(|scope| {
        for prompt in ["B", "xB", "B", "yyB"] {
            scope.spawn(move || {
                let streamed =
                    server.stream(COMPLETIONS, &server.completion_body(prompt, json!({"max_tokens": 12})));
                assert_eq!(streamed.text, "😀é漢 ok");
            });
        }
    });
    // Cut inside the first character: nothing of it may be shown as a replacement character
    // followed by more text.
    let (text, finish, tokens) = both_ways(server, "B", &json!({"max_tokens": 6}));
    assert_eq!((text.as_str(), finish.as_str(), tokens), ("😀é", "length", 6));
    served.server.stop();
}

#[test]
fn c2_stop_strings_span_tokens() {
    let served = serve("chain", 1);
    let server = &served.server;
    let baseline = server.baseline();
    for (prompt, stop, text) in [
        ("D", json!("TOP"), "S"),
        ("D", json!(["P!", "TO"]), "S"),
        ("D", json!("STOP!"), ""),
        ("D", json!("T"), "S"),
        ("A", json!("ta ga"), " alpha be"),
        ("B", json!("é漢"), "😀"),
        ("E", json!("<|end|>"), "<|end not"),
    ] {
        let got = both_ways(server, prompt, &json!({"stop": stop, "max_tokens": 16}));
        assert_eq!((got.0.as_str(), got.1.as_str()), (text, "stop"), "prompt {prompt}, stop {stop}");
    }
    for (field, stop, text) in [("include_stop_str_in_output", "TOP", "STOP"), ("no_stop_trim", "T", "ST")] {
        let got = both_ways(server, "D", &json!({"stop": stop, "max_tokens": 16, field: true}));
        assert_eq!((got.0.as_str(), got.1.as_str()), (text, "stop"), "{field}");
    }
    // The prompt's last token decides what the chain says next.
    let got = both_ways(server, "no matter D", &json!({"truncate_prompt_tokens": 1, "stop": "TOP"}));
    assert_eq!(got.0, "S");
    // S, T, O, P were generated; one step more may have been on its way.
    let (_, _, tokens) = both_ways(server, "D", &json!({"stop": "TOP", "max_tokens": 16}));
    assert!((4..=5).contains(&tokens), "completion_tokens {tokens}");
    server.after_check(&baseline, "A", " alpha beta gamma delta");
    served.server.stop();
}

#[test]
fn c3_spaces_between_and_before_words() {
    let mut cleaned = Fixture::named("chain");
    cleaned.folder.tokenizer_config["clean_up_tokenization_spaces"] = json!(true);
    for fixture in [Fixture::named("chain"), cleaned] {
        let served = serve_with(fixture, 1, |c| c);
        let (text, ..) = both_ways(&served.server, "A", &json!({"max_tokens": 12}));
        assert_eq!(text, " alpha beta gamma delta");
        served.server.stop();
    }
    let served = serve("chain_metaspace", 1);
    for script in &served.fixture.expect.scripts {
        if !script.key.is_ascii_uppercase() {
            continue;
        }
        let (text, ..) =
            both_ways(&served.server, &script.key.to_string(), &json!({"max_tokens": script.ids.len()}));
        // The decoder's Strip belongs to the beginning of a whole text; a continuation keeps its
        // space, but both are readings that clients know.
        assert_eq!(text.trim_start(), script.text.trim_start(), "script {:?}", script.key);
    }
    served.server.stop();
}

#[test]
fn c4_special_tokens_are_filtered_by_id() {
    let served = serve("chain", 1);
    let server = &served.server;
    for (prompt, text) in [
        ("A", " alpha beta gamma delta"),
        ("F", " one"),
        ("G", " x y"),
        ("E", "<|end not"),
        ("H", "\n\ndata: [DONE] tail"),
    ] {
        let (got, finish, _) = both_ways(server, prompt, &json!({"max_tokens": 12}));
        assert_eq!((got.as_str(), finish.as_str()), (text, "stop"), "prompt {prompt}");
    }
    // Markers inside a user's text: whatever the rule, it is one rule for both kinds of answer.
    let body = server.chat_body("a<|im_end|>b", json!({"stream_options": {"include_usage": true}}));
    let streamed = server.stream(CHAT, &body);
    let whole = server.chat("a<|im_end|>b", json!({}));
    let usage = streamed.usage.expect("asked for");
    assert_eq!(usage["prompt_tokens"], json!(whole.prompt_tokens));
    assert_eq!((streamed.text.as_str(), whole.text.as_str()), (" hello there", " hello there"));
    served.server.stop();
}

#[test]
fn c5_finish_reasons() {
    let served = serve("chain", 1);
    let server = &served.server;
    for (prompt, extra, finish, tokens) in [
        ("A", json!({"max_tokens": 12}), "stop", Some(5)),
        ("C", json!({"max_tokens": 5}), "length", Some(5)),
        ("D", json!({"max_tokens": 12, "stop": "TOP"}), "stop", None),
        ("A", json!({"max_tokens": 4}), "length", Some(4)),
        ("A", json!({"max_tokens": 5}), "stop", Some(5)),
        // Until the context is full; a larger wish is clipped.
        ("C", json!({"max_tokens": 100_000}), "length", Some(511)),
    ] {
        let got = both_ways(server, prompt, &extra);
        assert_eq!(got.1, finish, "prompt {prompt} {extra}");
        assert!(tokens.is_none_or(|t| t == got.2), "prompt {prompt} {extra}: {} tokens", got.2);
    }
    served.server.stop();
}

/// What every stream must obey, whatever it says.
fn assert_stream_shape(server: &Server, path: &str, body: &Value, object: &str) {
    let streamed = server.stream(path, body);
    let chunks = &streamed.chunks;
    assert!(streamed.done, "[DONE] last");
    for chunk in chunks {
        assert_eq!(chunk["object"], json!(object), "{chunk}");
        assert_eq!((&chunk["id"], &chunk["created"]), (&chunks[0]["id"], &chunks[0]["created"]), "{chunk}");
        assert_eq!(chunk["model"], json!(server.model_name), "{chunk}");
    }
    let with_finish = |c: &Value| !c["choices"][0]["finish_reason"].is_null();
    let finishing: Vec<usize> = (0..chunks.len()).filter(|&i| with_finish(&chunks[i])).collect();
    assert_eq!(finishing.len(), 1, "exactly one chunk carries the finish reason: {chunks:?}");
    for chunk in &chunks[finishing[0] + 1..] {
        assert_eq!(chunk["choices"], json!([]), "content after the finish: {chunk}");
    }
}

#[test]
fn c5_shape_of_streams() {
    let served = serve("chain", 1);
    let server = &served.server;
    for extra in [json!({}), json!({"stream_options": {"include_usage": true}}), json!({"max_tokens": 1})] {
        assert_stream_shape(server, CHAT, &server.chat_body("ab", extra.clone()), "chat.completion.chunk");
        assert_stream_shape(server, COMPLETIONS, &server.completion_body("A", extra), "text_completion");
    }
    let chat = server.stream(CHAT, &server.chat_body("ab", json!({})));
    assert_eq!(
        (chat.text.as_str(), chat.finishes.as_slice()),
        (" hello there", ["stop".to_owned()].as_slice())
    );
    assert_eq!(chat.chunks[0]["choices"][0]["delta"]["role"], json!("assistant"));
    let whole = server.post(CHAT, &server.chat_body("ab", json!({}))).json();
    assert_eq!(whole["object"], json!("chat.completion"));
    assert_eq!(whole["choices"][0]["message"]["role"], json!("assistant"));
    let whole = server.post(COMPLETIONS, &server.completion_body("A", json!({}))).json();
    assert_eq!(whole["object"], json!("text_completion"));
    served.server.stop();
}

#[test]
fn c6_usage_in_streams_only_when_asked() {
    let served = serve("chain", 1);
    let server = &served.server;
    for (prompt, extra) in [
        ("A", json!({"max_tokens": 12})),
        ("A", json!({"max_tokens": 1})),
        ("C", json!({"max_tokens": 7})),
        ("D", json!({"stop": "TOP"})),
    ] {
        let mut body = server.completion_body(prompt, extra);
        let without = server.stream(COMPLETIONS, &body);
        assert!(without.usage.is_none(), "not asked for: {:?}", without.chunks);
        assert!(without.chunks.iter().all(|c| c["choices"].as_array().is_some_and(|l| l.len() == 1)));

        let whole = server.answer(COMPLETIONS, &body);
        body["stream_options"] = json!({"include_usage": true});
        let with = server.stream(COMPLETIONS, &body);
        let (last, before) = with.chunks.split_last().expect("a stream has chunks");
        assert_eq!(last["choices"], json!([]), "{last}");
        assert!(before.iter().all(|c| c["usage"].is_null()), "{before:?}");
        let usage = &last["usage"];
        let (sent, received) = (usage["prompt_tokens"].as_u64(), usage["completion_tokens"].as_u64());
        assert_eq!(sent, Some(whole.prompt_tokens));
        if body["stop"].is_null() {
            assert_eq!(received, Some(whole.completion_tokens));
        }
        assert_eq!(usage["total_tokens"].as_u64(), sent.zip(received).map(|(a, b)| a + b));
    }
    let body = server.completion_body("A", json!({"stream_options": {"include_usage": true}}));
    let response = server.post(COMPLETIONS, &body);
    assert_eq!(response.status, 400, "{}", response.json());
    assert!(response.json()["error"]["message"].is_string());
    served.server.stop();
}

#[test]
fn c8_an_over_long_prompt_is_refused_at_once() {
    let served = serve_with(Fixture::named("chain"), 1, |c| c.flag("--max-context", 64));
    let server = &served.server;
    let baseline = server.baseline();
    assert_eq!(server.complete(&("x".repeat(62) + "C"), json!({})).completion_tokens, 1);
    for len in [64, 65, 1000, 1_000_000] {
        for stream in [false, true] {
            let text = "x".repeat(len);
            let completion = server.completion_body(&text, json!({"stream": stream}));
            let chat = server.chat_body(&text, json!({"stream": stream}));
            for (path, body) in [(COMPLETIONS, completion), (CHAT, chat)] {
                let response = server.post(path, &body);
                let error = response.json()["error"].clone();
                assert_eq!(response.status, 400, "{path}, {len} tokens, stream {stream}: {error}");
                assert_eq!(error["code"], json!("context_length_exceeded"), "{error}");
                let message = error["message"].as_str().unwrap_or_default();
                assert!(message.contains("64"), "the limit is named: {message}");
                assert!(path == CHAT || message.contains(&len.to_string()), "the length is named: {message}");
            }
        }
    }
    // A body over the limit of 32 MiB is a 413, which a client that sends all of it gets to read.
    let body = server.completion_body(&"x".repeat(33 << 20), json!({}));
    let response = server.post(COMPLETIONS, &body);
    assert_eq!(response.status, 413);
    assert!(response.json()["error"]["message"].is_string());
    server.after_check(&baseline, "A", " alpha beta gamma delta");
    served.server.stop();
}

#[test]
fn c12_one_beginning_of_text_token() {
    let served = serve("chain_bos", 1);
    assert_eq!(served.server.chat("ab", json!({})).prompt_tokens, 22);
    assert_eq!(served.server.complete("ab", json!({"max_tokens": 1})).prompt_tokens, 3);
    // Given in the prompt already: once, or twice as Hugging Face does it.
    let given = served.server.complete("<|bos|>ab", json!({"max_tokens": 1})).prompt_tokens;
    assert!((3..=4).contains(&given), "{given}");
    served.server.stop();
}

#[test]
fn prompts_as_token_ids() {
    let served = serve("chain_bf16", 2);
    let body = served.server.completion_body("", json!({"prompt": [65], "max_tokens": 8}));
    let answer = served.server.answer(COMPLETIONS, &body);
    assert_eq!((answer.text.as_str(), answer.prompt_tokens), (" alpha beta gamma delta", 1));
    served.server.stop();
}

#[test]
fn errors_have_openais_form() {
    let served = serve("chain", 1);
    let server = &served.server;
    let post = |text: &str| {
        let headers = [("Content-Type", "application/json")];
        server.http.request("POST", COMPLETIONS, &headers, text.as_bytes()).expect("an answer")
    };
    let unknown = server.post(COMPLETIONS, &server.completion_body("A", json!({"model": "nobody"})));
    assert_eq!((unknown.status, unknown.json()["error"]["code"].clone()), (404, json!("model_not_found")));
    assert!(
        unknown.json()["error"]["message"].as_str().is_some_and(|m| m.contains("chain")),
        "names what is served"
    );
    for (response, status) in [
        (post("{"), 400),
        (post("[]"), 400),
        (post(""), 400),
        (post(&json!({"model": "chain", "prompt": 5}).to_string()), 400),
        (post(&json!({"model": "chain", "prompt": "A", "temperature": "hot"}).to_string()), 400),
        (server.get("/nowhere"), 404),
        (server.get(COMPLETIONS), 405),
    ] {
        assert_eq!(response.status, status, "{}", response.json());
        let error = &response.json()["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{error}");
    }
    assert_eq!(server.get("/health").status, 200);
    assert!(server.get("/version").json()["version"].is_string());
    served.server.stop();
}
