//! Validation rules, field by field: cases C9, C10 and the prompt forms of C13.

use super::policy::FieldPolicy;
use super::{Call, Endpoint, validate};
use crate::{ApiConfig, SamplingDefaults};
use lockstep_core::{Refusal, SamplingParams};
use lockstep_wire::{ChatMessages, Prompt};
use serde_json::{Value, json};

fn config() -> ApiConfig {
    ApiConfig::new("tiny", 64, 300)
}

fn call_with(endpoint: Endpoint, config: &ApiConfig, extra: Value) -> Result<Call, Refusal> {
    let mut body = match endpoint {
        Endpoint::Chat => json!({"model": "tiny", "messages": [{"role": "user", "content": "ab"}]}),
        Endpoint::Completions => json!({"model": "tiny", "prompt": "ab"}),
    };
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    validate(endpoint, body.as_object().unwrap(), config, &FieldPolicy::default())
}

fn chat(extra: Value) -> Result<Call, Refusal> {
    call_with(Endpoint::Chat, &config(), extra)
}

fn completions(extra: Value) -> Result<Call, Refusal> {
    call_with(Endpoint::Completions, &config(), extra)
}

/// Everything but the random seed.
fn sampling(call: Result<Call, Refusal>) -> SamplingParams {
    SamplingParams { seed: 0, ..call.unwrap().requests.remove(0).sampling }
}

fn refused_param(call: Result<Call, Refusal>) -> String {
    let refusal = call.unwrap_err();
    assert_eq!(refusal.status, 400, "{refusal:?}");
    assert!(refusal.message.contains(refusal.param.as_deref().unwrap()), "{refusal:?}");
    refusal.param.unwrap()
}

fn messages_json(call: Result<Call, Refusal>) -> Value {
    let Prompt::Chat(ChatMessages { messages_json, .. }) = call.unwrap().requests.remove(0).prompt else {
        panic!("not a chat prompt")
    };
    serde_json::from_str(&messages_json).unwrap()
}

#[test]
fn null_equals_absent_for_every_field() {
    let names = [
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "user",
        "logit_bias",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "response_format",
        "logprobs",
        "presence_penalty",
        "functions",
        "model",
        "ignore_eos",
        "min_tokens",
        "stop_token_ids",
        "skip_special_tokens",
        "chat_template_kwargs",
        "add_generation_prompt",
        "metadata",
    ];
    let absent = sampling(chat(json!({})));
    for name in names {
        assert_eq!(sampling(chat(json!({ name: null }))), absent, "{name}");
    }
}

#[test]
fn defaults_are_openais_unless_the_model_has_its_own() {
    let expected = SamplingParams { temperature: 1.0, max_tokens: None, ..SamplingParams::default() };
    assert_eq!(sampling(chat(json!({}))), expected);
    assert_eq!(sampling(completions(json!({}))), SamplingParams { max_tokens: Some(16), ..expected });
    let defaults =
        SamplingDefaults { temperature: Some(0.7), top_k: Some(20), top_p: Some(0.8), min_p: Some(0.1) };
    let config = ApiConfig { default_sampling: defaults, ..config() };
    let own = sampling(call_with(Endpoint::Chat, &config, json!({})));
    assert_eq!((own.temperature, own.top_k, own.top_p, own.min_p), (0.7, 20, 0.8, 0.1));
    let asked = json!({"temperature": 0.5, "top_k": 0, "top_p": 1, "min_p": 0});
    let asked = sampling(call_with(Endpoint::Chat, &config, asked));
    assert_eq!((asked.temperature, asked.top_k, asked.top_p, asked.min_p), (0.5, 0, 1.0, 0.0));
}

#[test]
fn edge_values_of_sampling_fields() {
    assert!(sampling(chat(json!({"temperature": 0, "top_p": 0.5, "top_k": 7}))).is_greedy());
    assert!(sampling(chat(json!({"temperature": 1e-9}))).is_greedy());
    for (top_k, read) in [(json!(-1), 0), (json!(0), 0), (json!(1), 1), (json!(1_000_000_000), 1_000_000_000)]
    {
        assert_eq!(sampling(chat(json!({ "top_k": top_k }))).top_k, read);
    }
    assert_eq!(sampling(chat(json!({"top_k": 1_000_000_000_000_u64}))).top_k, u32::MAX);
    let zero = sampling(chat(json!({"top_p": 0})));
    assert_eq!((zero.top_k, zero.top_p), (1, 1.0));
    assert_eq!(sampling(chat(json!({"top_p": 1}))).top_p, 1.0);
    assert_eq!(sampling(chat(json!({"max_tokens": 5.0}))).max_tokens, Some(5));
    assert_eq!(sampling(chat(json!({"max_tokens": 5_000_000_000_u64}))).max_tokens, Some(u32::MAX));
}

#[test]
fn impossible_values_are_refused_by_name() {
    for (name, values) in [
        ("max_tokens", json!([0, -1, 1.5, "5", true, []])),
        ("max_completion_tokens", json!([0, "x"])),
        ("temperature", json!([-0.1, 101, "hot", true, []])),
        ("top_p", json!([-0.1, 1.1, "x"])),
        ("top_k", json!([-2, 1.5, "x"])),
        ("min_p", json!([-0.1, 1.1])),
        ("min_tokens", json!([-1, 1.5])),
        ("seed", json!([1.5, "x", 36893488147419103232.0])),
        ("stop", json!(["", [""], [1], 5, {}])),
        ("stop_token_ids", json!([[300], [-1], ["x"], 5])),
        ("ignore_eos", json!([1, "true"])),
        ("stream", json!(["yes", 1])),
        ("skip_special_tokens", json!([0])),
        ("n", json!([0, -1, 2, 1000, "x"])),
        ("messages", json!([[], {}, 5, "x"])),
        ("chat_template_kwargs", json!([[]])),
    ] {
        for value in values.as_array().unwrap() {
            assert_eq!(refused_param(chat(json!({ name: value }))), name, "{value}");
        }
    }
    assert_eq!(refused_param(chat(json!({"min_tokens": 6, "max_tokens": 5}))), "min_tokens");
    let many: Vec<_> = (0..17).map(|i| i.to_string()).collect();
    assert_eq!(refused_param(chat(json!({ "stop": many }))), "stop");
    assert_eq!(refused_param(chat(json!({ "stop": "x".repeat(1025) }))), "stop");
}

#[test]
fn max_completion_tokens_wins() {
    let both = chat(json!({"max_tokens": 5, "max_completion_tokens": 7}));
    assert_eq!(sampling(both).max_tokens, Some(7));
}

#[test]
fn stop_as_string_list_or_nothing() {
    for (stop, read) in [
        (json!("a"), vec!["a"]),
        (json!([]), vec![]),
        (json!(["1", "2", "3", "4", "5"]), vec!["1", "2", "3", "4", "5"]),
    ] {
        assert_eq!(chat(json!({ "stop": stop })).unwrap().requests[0].text.stop, read);
    }
    let text = chat(json!({})).unwrap().requests.remove(0).text;
    assert!(text.skip_special_tokens && text.stop.is_empty());
}

#[test]
fn seeds_are_kept_or_drawn() {
    let seed = |call: Result<Call, Refusal>| call.unwrap().requests[0].sampling.seed;
    assert_eq!(seed(chat(json!({"seed": u64::MAX}))), u64::MAX);
    assert_eq!(seed(chat(json!({"seed": -1}))), u64::MAX);
    assert_eq!(seed(chat(json!({"seed": 7}))), 7);
    assert_ne!(seed(chat(json!({}))), seed(chat(json!({}))));
}

#[test]
fn stream_options_need_a_stream() {
    let options = json!({"include_usage": true});
    assert_eq!(refused_param(chat(json!({ "stream_options": options }))), "stream_options");
    let call = chat(json!({"stream": true, "stream_options": options})).unwrap();
    assert!(call.stream && call.include_usage);
    let call = chat(json!({"stream": true, "stream_options": {}})).unwrap();
    assert!(call.stream && !call.include_usage);
    let usage_everywhere = json!({"stream": true, "stream_options": {"continuous_usage_stats": true}});
    assert_eq!(refused_param(chat(usage_everywhere)), "stream_options.continuous_usage_stats");
}

#[test]
fn unknown_fields_are_counted_or_refused() {
    let policy = FieldPolicy::default();
    let body = json!({"prompt": "a", "foo": 1, "bar": null, "messages": []});
    let body = body.as_object().unwrap();
    validate(Endpoint::Completions, body, &config(), &policy).unwrap();
    assert_eq!(policy.unknown(), 3);
    let strict = ApiConfig { strict_api: true, ..config() };
    let refusal = validate(Endpoint::Completions, body, &strict, &policy).unwrap_err();
    assert_eq!((refusal.param.as_deref(), refusal.code.as_deref()), (Some("foo"), Some("unknown_field")));
}

#[test]
fn unsupported_fields_are_refused_unless_neutral() {
    for (name, refused, neutral) in [
        ("tools", json!([{"type": "function"}]), json!([])),
        ("tool_choice", json!("required"), json!("none")),
        ("response_format", json!({"type": "json_object"}), json!({"type": "text"})),
        ("logprobs", json!(true), json!(false)),
        ("top_logprobs", json!(3), json!(0)),
        ("n", json!(2), json!(1)),
        ("logit_bias", json!({"5": 1}), json!({})),
        ("presence_penalty", json!(0.5), json!(0)),
        ("frequency_penalty", json!(-0.5), json!(0.0)),
        ("repetition_penalty", json!(1.1), json!(1)),
        ("functions", json!([{}]), json!([])),
        ("modalities", json!(["audio"]), json!(["text"])),
        ("continue_final_message", json!(true), json!(false)),
    ] {
        assert_eq!(refused_param(chat(json!({ name: refused }))), name);
        chat(json!({ name: neutral })).unwrap();
    }
    for (name, refused, neutral) in [
        ("logprobs", json!(0), json!(null)),
        ("echo", json!(true), json!(false)),
        ("suffix", json!("x"), json!("")),
        ("best_of", json!(2), json!(1)),
    ] {
        assert_eq!(refused_param(completions(json!({ name: refused }))), name);
        completions(json!({ name: neutral })).unwrap();
    }
}

#[test]
fn model_names() {
    let refusal = chat(json!({"model": "other"})).unwrap_err();
    assert_eq!((refusal.status, refusal.code.as_deref()), (404, Some("model_not_found")));
    assert!(refusal.message.contains("\"tiny\"") && refusal.message.contains("\"other\""));
    assert_eq!(refused_param(chat(json!({"model": 5}))), "model");
}

#[test]
fn prompts_of_completions() {
    let prompts = |prompt: Value| {
        completions(json!({ "prompt": prompt }))
            .map(|call| call.requests.into_iter().map(|request| request.prompt).collect::<Vec<_>>())
    };
    let text = |text: &str| Prompt::Text(text.into());
    assert_eq!(prompts(json!("ab")).unwrap(), [text("ab")]);
    assert_eq!(prompts(json!("")).unwrap(), [text("")]);
    assert_eq!(prompts(json!(["ab"])).unwrap(), [text("ab")]);
    assert_eq!(prompts(json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
    assert_eq!(prompts(json!([5, 6, 299])).unwrap(), [Prompt::Tokens(vec![5, 6, 299])]);
    assert_eq!(prompts(json!([[5], [6]])).unwrap(), [Prompt::Tokens(vec![5]), Prompt::Tokens(vec![6])]);
    for bad in [
        json!(null),
        json!(5),
        json!([]),
        json!([[]]),
        json!([null]),
        json!([5, "a"]),
        json!([300]),
        json!([-1]),
        json!([1.5]),
        json!({}),
    ] {
        let refusal = prompts(bad.clone()).unwrap_err();
        assert_eq!((refusal.status, refusal.param.as_deref()), (400, Some("prompt")), "{bad}");
    }
    assert!(prompts(json!(vec![1; 63])).is_ok());
    let refusal = prompts(json!(vec![1; 64])).unwrap_err();
    assert_eq!(refusal.code.as_deref(), Some("context_length_exceeded"));
    assert!(prompts(json!(vec!["a"; 129])).is_err());
}

#[test]
fn messages_as_real_clients_send_them() {
    let one = |message: Value| messages_json(chat(json!({ "messages": [message] })));
    let parts = json!([{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]);
    assert_eq!(one(json!({"role": "user", "content": parts})), json!([{"role": "user", "content": "abcd"}]));
    assert_eq!(
        one(json!({"content": "a", "role": "assistant"})),
        json!([{"content": "a", "role": "assistant"}])
    );
    let named = json!({"role": "user", "name": "Ann", "content": "a", "extra": {"x": [1]}});
    assert_eq!(one(named.clone()), json!([named]));
    let developer = json!({"role": "developer", "content": "be brief", "refusal": null});
    assert_eq!(one(developer), json!([{"role": "developer", "content": "be brief"}]));
    assert_eq!(
        one(json!({"role": "assistant", "content": ""})),
        json!([{"role": "assistant", "content": ""}])
    );

    let call = |arguments: Value| json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}});
    let turn = |calls: Value| json!({"role": "assistant", "content": null, "tool_calls": calls});
    let expected =
        json!([{"role": "assistant", "content": "", "tool_calls": [call(json!({"b": 1, "a": 2.0}))]}]);
    let got = one(turn(json!([call(json!("{\"b\": 1, \"a\": 2.0}"))])));
    assert_eq!(got.to_string(), expected.to_string());
    let odd = one(turn(json!([call(json!("not json"))])));
    assert_eq!(odd[0]["tool_calls"][0]["function"]["arguments"], "not json");
    let tool = json!({"role": "tool", "tool_call_id": "c1", "content": "42"});
    assert_eq!(one(tool.clone()), json!([tool]));
    let absent = json!({"role": "assistant", "tool_calls": [call(json!("{}"))]});
    assert_eq!(one(absent)[0]["content"], "");
}

#[test]
fn messages_that_are_refused() {
    for (message, param) in [
        (json!("x"), "messages[0]"),
        (json!({"content": "a"}), "messages[0].role"),
        (json!({"role": "alien", "content": "a"}), "messages[0].role"),
        (json!({"role": 5, "content": "a"}), "messages[0].role"),
        (json!({"role": "user"}), "messages[0].content"),
        (json!({"role": "user", "content": null}), "messages[0].content"),
        (json!({"role": "assistant", "content": null, "tool_calls": []}), "messages[0].content"),
        (json!({"role": "user", "content": 5}), "messages[0].content"),
        (
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            "messages[0].content[0]",
        ),
        (json!({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0]"),
        (json!({"role": "user", "content": ["a"]}), "messages[0].content[0]"),
        (json!({"role": "user", "content": "a", "name": 5}), "messages[0].name"),
    ] {
        assert_eq!(refused_param(chat(json!({ "messages": [message] }))), param);
    }
    let without_template =
        ApiConfig { chat_error: Some("this model has no chat template".into()), ..config() };
    let refusal = call_with(Endpoint::Chat, &without_template, json!({})).unwrap_err();
    assert_eq!((refusal.status, refusal.message.as_str()), (400, "this model has no chat template"));
    assert!(call_with(Endpoint::Completions, &without_template, json!({})).is_ok());
}

#[test]
fn template_variables_pass_through() {
    let call =
        chat(json!({"chat_template_kwargs": {"enable_thinking": false}, "add_generation_prompt": false}));
    let Prompt::Chat(chat) = call.unwrap().requests.remove(0).prompt else { panic!("not a chat prompt") };
    assert_eq!(chat.template_kwargs_json.as_deref(), Some("{\"enable_thinking\":false}"));
    assert!(!chat.add_generation_prompt);
}
