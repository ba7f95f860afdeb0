//! The endpoints for whoever runs the server, on the real binary with two ranks: flush, abort, a real health
//! check, tokens and text, and the two native dialects. One server: a start costs more than all checks.

mod common;

use common::serve;
use lockstep_testkit::Server;
use serde_json::{Value, json};

/// A stream that has begun, and the id of its answer.
fn running(server: &Server) -> (lockstep_testkit::http::EventStream, String) {
    // The fixture's answer to "C" outlives any test.
    let body = server.completion_body("C", json!({"max_tokens": 100_000, "stream": true}));
    let mut stream = server.open_stream("/v1/completions", &body);
    let event = stream.next_event().expect("an event").expect("a stream");
    let chunk: Value = serde_json::from_str(&event).expect("a chunk");
    (stream, chunk["id"].as_str().expect("an id").to_owned())
}

fn check_flush(server: &Server) {
    server.complete("B B B B B B B B B B B B B B B B B B B B B B B B", json!({"max_tokens": 4}));
    let cached = server.info_number("pages_cached");
    let flushed = server.post("/flush_cache", &json!({})).json();
    assert_eq!(flushed["pages_flushed"], json!(cached), "{flushed}");
    assert_eq!((&flushed["pages_cached"], &flushed["pages_held"]), (&json!(0), &json!(0)), "{flushed}");
    assert_eq!(server.get("/flush_cache").json()["pages_flushed"], 0);
}

fn check_abort(server: &Server) {
    let baseline = server.baseline();
    let (mut stream, id) = running(server);
    assert_eq!(server.post("/abort_request", &json!({"rid": id})).json()["requests_aborted"], 1);
    let mut last = String::new();
    let mut finish = Value::Null;
    while let Some(event) = stream.next_event().expect("an event") {
        if let Ok(chunk) = serde_json::from_str::<Value>(&event) {
            finish = chunk["choices"][0]["finish_reason"].clone();
        }
        last = event;
    }
    assert_eq!((finish, last.as_str()), (json!("abort"), "[DONE]"));
    assert_eq!(server.post("/abort_request", &json!({"rid": id})).json()["requests_aborted"], 0);
    server.after_check(&baseline, "A", " alpha beta gamma delta");
}

fn check_text(server: &Server) {
    let tokens = server.post("/tokenize", &json!({"prompt": "B", "return_token_strs": true})).json();
    assert_eq!(
        tokens["count"].as_u64(),
        tokens["tokens"].as_array().map(|list| list.len() as u64),
        "{tokens}"
    );
    let ids = tokens["tokens"].clone();
    let text = server.post("/detokenize", &json!({"tokens": ids, "skip_special_tokens": true})).json();
    assert_eq!(text["prompt"], "B");
    let counted = server.complete("B", json!({"max_tokens": 1})).prompt_tokens;
    assert_eq!(tokens["count"].as_u64(), Some(counted));
}

fn check_dialects(server: &Server) {
    let body = json!({"text": "B", "sampling_params": {"max_new_tokens": 12, "temperature": 0}});
    let answer = server.post("/generate", &body).json();
    assert_eq!(
        (&answer["text"], &answer["meta_info"]["finish_reason"]["type"]),
        (&json!("😀é漢 ok"), &json!("stop"))
    );
    let body = json!({"prompt": "B", "raw": true, "stream": false, "options": {"temperature": 0}});
    let answer = server.post("/api/generate", &body).json();
    assert_eq!((&answer["response"], &answer["done_reason"]), (&json!("😀é漢 ok"), &json!("stop")));
    let nanos = |name: &str| answer[name].as_u64().unwrap_or_default();
    assert!(nanos("prompt_eval_duration") > 0 && nanos("eval_duration") > 0, "{answer}");
    assert!(nanos("total_duration") >= nanos("prompt_eval_duration") + nanos("eval_duration"), "{answer}");
}

#[test]
fn operations_on_a_running_server() {
    let served = serve("chain_long", 2);
    let server = &served.server;
    check_flush(server);
    check_abort(server);
    check_text(server);
    check_dialects(server);
    let healthy = server.get("/health_generate");
    assert_eq!((healthy.status, &healthy.json()["status"]), (200, &json!("ok")));
    assert_eq!(server.get("/get_model_info").json()["is_generation"], true);
    let models = server.get("/api/tags").json();
    assert_eq!(models["models"][0]["name"], server.get("/api/ps").json()["models"][0]["name"]);
    served.server.stop();
}
