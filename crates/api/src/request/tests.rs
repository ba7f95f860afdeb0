//! Validation rules, field by field: cases C9, C10 and the prompt forms of C13.

use super::policy::FieldPolicy;
use super::{Call, Endpoint, validate};
use crate::openapi::requests;
use crate::{ApiConfig, SamplingDefaults};
use lockstep_core::{Grammar, Refusal, SamplingParams};
use lockstep_wire::{ChatMessages, Prompt};
use serde_json::{Map, Value, json};

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
    let table = match endpoint {
        Endpoint::Chat => requests::CHAT,
        Endpoint::Completions => requests::COMPLETIONS,
    };
    let body = body.as_object().unwrap();
    FieldPolicy::default().check(&table, body, config.strict_api)?;
    validate(endpoint, body, config)
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
        ("n", json!([0, -1, 129, 1.5, "x"])),
        ("presence_penalty", json!([-2.1, 2.1, "x"])),
        ("frequency_penalty", json!([-3, 3])),
        ("repetition_penalty", json!([0, -1, 11])),
        ("logit_bias", json!([{"300": 1}, {"x": 1}, {"-1": 1}, {"5": 101}, {"5": "x"}, [5]])),
        ("allowed_token_ids", json!([[], [300], ["x"], 5])),
        ("logprobs", json!([1, "x"])),
        ("top_logprobs", json!([1, 21, -1])),
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
    assert_eq!(seed(chat(json!({"seed": i64::MIN}))), 1 << 63);
    // One less is no 64-bit integer, though the nearest number that JSON's reader has for it is one.
    let below = serde_json::from_str::<Value>("-9223372036854775809").unwrap();
    assert_eq!(refused_param(chat(json!({ "seed": below }))), "seed");
    assert_ne!(seed(chat(json!({}))), seed(chat(json!({}))));
}

#[test]
fn choices_do_not_make_gigabytes_of_a_body() {
    let (long, bias) = ("a".repeat(1 << 20), (0..300).map(|id| (id.to_string(), json!(1.0))));
    let bias: Map<String, Value> = bias.collect();
    assert!(completions(json!({"prompt": long, "n": 64})).is_ok());
    assert_eq!(refused_param(completions(json!({"prompt": long, "n": 65}))), "n");
    let messages = json!([{"role": "user", "content": long}]);
    assert_eq!(refused_param(chat(json!({"messages": messages, "n": 64}))), "n");
    let schema = json!({"type": "string", "description": long});
    assert_eq!(refused_param(chat(json!({"n": 65, "guided_json": schema}))), "n");
    assert!(chat(json!({"n": 128, "logit_bias": bias})).is_ok());
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
    policy.check(&requests::COMPLETIONS, body, false).unwrap();
    assert_eq!(policy.unknown(), 2, "null is absent");
    let nulls = json!({"prompt": "a", "bar": null});
    policy.check(&requests::COMPLETIONS, nulls.as_object().unwrap(), true).unwrap();
    let refusal = policy.check(&requests::COMPLETIONS, body, true).unwrap_err();
    assert_eq!((refusal.param.as_deref(), refusal.code.as_deref()), (Some("foo"), Some("unknown_field")));
}

#[test]
fn unsupported_fields_are_refused_unless_neutral() {
    for (name, refused, neutral) in [
        ("tool_choice", json!("required"), json!("none")),
        ("top_logprobs", json!(3), json!(0)),
        ("best_of", json!(2), json!(1)),
        ("echo", json!(true), json!(false)),
        ("functions", json!([{}]), json!([])),
        ("modalities", json!(["audio"]), json!(["text"])),
        ("function_call", json!({"name": "f"}), json!("auto")),
    ] {
        assert_eq!(refused_param(chat(json!({ name: refused }))), name);
        chat(json!({ name: neutral })).unwrap();
    }
    for (name, refused, neutral) in [
        ("top_logprobs", json!(2), json!(0)),
        ("suffix", json!("x"), json!("")),
        ("stop_regex", json!("x"), json!("")),
        ("include_reasoning", json!(false), json!(true)),
        ("reasoning_effort", json!("low"), Value::Null),
        ("best_of", json!(2), json!(1)),
    ] {
        assert_eq!(refused_param(completions(json!({ name: refused }))), name);
        completions(json!({ name: neutral })).unwrap();
    }
}

#[test]
fn n_makes_that_many_choices_of_each_prompt() {
    let call = completions(json!({"prompt": ["a", "b"], "n": 3, "seed": 7, "best_of": 3})).unwrap();
    let seen: Vec<_> = call
        .requests
        .iter()
        .map(|r| match &r.prompt {
            Prompt::Text(text) => (text.as_str(), r.sampling.choice, r.sampling.seed),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(seen, [("a", 0, 7), ("a", 1, 7), ("a", 2, 7), ("b", 0, 7), ("b", 1, 7), ("b", 2, 7)]);
    assert_eq!(call.n, 3);
    assert_eq!(chat(json!({"n": 128})).unwrap().requests.len(), 128);
    assert_eq!(refused_param(completions(json!({"n": 2, "best_of": 3}))), "best_of");
    assert_eq!(refused_param(completions(json!({"best_of": 2}))), "best_of");
    let many = json!({"prompt": vec!["a"; 128], "n": 9});
    assert_eq!(refused_param(completions(many)), "n");
}

#[test]
fn penalties_bias_and_allowed_tokens() {
    let params = sampling(chat(json!({
        "presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.25,
        "logit_bias": {"7": -100, "5": 1.5}, "allowed_token_ids": [5, 7, 299],
    })));
    assert_eq!((params.presence_penalty, params.frequency_penalty), (-2.0, 0.5));
    assert_eq!(params.repetition_penalty, 1.25);
    assert_eq!(params.logit_bias, [(5, 1.5), (7, -100.0)]);
    assert_eq!(params.allowed_token_ids, Some(vec![5, 7, 299]));
    assert!(!sampling(chat(json!({"logit_bias": {}, "repetition_penalty": 1}))).changes_logits());
}

#[test]
fn logprobs_in_both_shapes_and_echo() {
    let wish = |call: Result<Call, Refusal>| {
        let call = call.unwrap();
        let sampling = &call.requests[0].sampling;
        (sampling.logprobs, sampling.prompt_logprobs, call.requests[0].text.echo, call.prompt_only)
    };
    assert_eq!(wish(chat(json!({}))), (None, None, false, false));
    assert_eq!(wish(chat(json!({"logprobs": false, "top_logprobs": 0}))), (None, None, false, false));
    assert_eq!(wish(chat(json!({"logprobs": true}))), (Some(0), None, false, false));
    assert_eq!(wish(chat(json!({"logprobs": true, "top_logprobs": 20}))), (Some(20), None, false, false));
    assert_eq!(wish(completions(json!({"logprobs": 0}))), (Some(0), None, false, false));
    assert_eq!(wish(completions(json!({"echo": true}))), (None, None, true, false));
    let all = json!({"echo": true, "logprobs": 1, "max_tokens": 0});
    assert_eq!(wish(completions(all.clone())), (Some(1), Some(1), true, true));
    assert_eq!(completions(all).unwrap().requests[0].sampling.max_tokens, Some(1));
    assert_eq!(refused_param(completions(json!({"max_tokens": 0}))), "max_tokens");
    assert_eq!(refused_param(completions(json!({"logprobs": 21}))), "logprobs");
}

#[test]
fn forms_of_answers_in_every_spelling() {
    let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
    let json_schema = || Grammar::JsonSchema(schema.to_string());
    let regex = || Grammar::Regex("a+".into());
    let choice = || Grammar::Choice(vec!["x".into(), "y".into()]);
    for (body, grammar) in [
        (json!({"response_format": {"type": "text"}}), None),
        (json!({"structured_outputs": {}}), None),
        (json!({"response_format": {"type": "json_object"}}), Some(Grammar::JsonObject)),
        (
            json!({"response_format": {"type": "json_schema",
                "json_schema": {"name": "n", "strict": true, "schema": schema}}}),
            Some(json_schema()),
        ),
        (json!({"structured_outputs": {"json": schema}}), Some(json_schema())),
        (json!({"structured_outputs": {"regex": "a+", "choice": null}}), Some(regex())),
        (json!({"structured_outputs": {"json_object": true}}), Some(Grammar::JsonObject)),
        (json!({"guided_json": schema}), Some(json_schema())),
        (json!({"json_schema": schema.to_string()}), Some(json_schema())),
        (json!({"guided_regex": "a+"}), Some(regex())),
        (json!({"regex": "a+"}), Some(regex())),
        (json!({"guided_choice": ["x", "y"]}), Some(choice())),
        (json!({"guided_grammar": "start: \"a\""}), Some(Grammar::Lark("start: \"a\"".into()))),
        (json!({"ebnf": "start: \"a\""}), Some(Grammar::Lark("start: \"a\"".into()))),
        (json!({"ebnf": "root ::= \"a\""}), Some(Grammar::Lark("start : \"a\"\n".into()))),
    ] {
        assert_eq!(sampling(chat(body.clone())).grammar, grammar, "{body}");
        assert_eq!(sampling(completions(body.clone())).grammar, grammar, "{body}");
    }
    for (body, param) in [
        (json!({"response_format": {"type": "alien"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
            "response_format.json_schema.schema",
        ),
        (json!({"response_format": "json"}), "response_format"),
        (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs.structural_tag"),
        (json!({"structured_outputs": {"regex": "a", "json": {}}}), "structured_outputs.regex"),
        (json!({"regex": "a", "ebnf": "start: \"a\""}), "ebnf"),
        (json!({"ebnf": "rule ::= \"a\""}), "ebnf"),
        (json!({"regex": "a", "bad_words": ["b"]}), "bad_words"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_choice": [""]}), "guided_choice"),
        (json!({"guided_json": 5}), "guided_json"),
        (json!({"regex": "a", "min_tokens": 1}), "min_tokens"),
        (json!({"regex": "a", "ignore_eos": true}), "ignore_eos"),
    ] {
        assert_eq!(refused_param(chat(body.clone())), param, "{body}");
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
    let Prompt::Chat(seen) = call.unwrap().requests.remove(0).prompt else { panic!("not a chat prompt") };
    assert_eq!(seen.template_kwargs_json.as_deref(), Some("{\"enable_thinking\":false}"));
    assert!(!seen.add_generation_prompt);
    let documents = json!([{"title": "t"}]);
    let call = chat(json!({"documents": documents, "continue_final_message": true, "chat_template": "rag"}));
    let Prompt::Chat(seen) = call.unwrap().requests.remove(0).prompt else { panic!("not a chat prompt") };
    let kwargs: Value = serde_json::from_str(seen.template_kwargs_json.as_deref().unwrap()).unwrap();
    let expected = json!({"chat_template": "rag", "documents": documents, "continue_final_message": true});
    assert_eq!(kwargs, expected);
    for (body, param) in [
        (json!({"documents": ["text"]}), "documents"),
        (json!({"continue_final_message": true, "add_generation_prompt": true}), "continue_final_message"),
        (json!({"chat_template": 5}), "chat_template"),
    ] {
        assert_eq!(refused_param(chat(body)), param);
    }
}

#[test]
fn the_tokenizer_is_told_what_the_request_wants_of_it() {
    let told = |call: Result<Call, Refusal>| call.unwrap().requests.remove(0).tokenizing;
    let nothing = told(completions(json!({"bad_words": [], "truncate_prompt_tokens": null})));
    assert_eq!((nothing.add_special_tokens, nothing.keep_last, nothing.bad_words.len()), (None, None, 0));
    let body =
        json!({"add_special_tokens": false, "truncate_prompt_tokens": 5, "bad_words": ["no", " never"]});
    for call in [chat(body.clone()), completions(body)] {
        let told = told(call);
        assert_eq!((told.add_special_tokens, told.keep_last), (Some(false), Some(5)));
        assert_eq!(told.bad_words, ["no", " never"]);
    }
    let all = told(completions(json!({"truncate_prompt_tokens": -1})));
    assert_eq!(all.keep_last, Some(config().context_max as u32 - 1), "as much as fits");
    for (name, value) in [
        ("truncate_prompt_tokens", json!(0)),
        ("truncate_prompt_tokens", json!(-2)),
        ("bad_words", json!("no")),
        ("bad_words", json!([" "])),
        ("bad_words", json!([5])),
        ("bad_words", json!(vec!["a"; 1025])),
        ("add_special_tokens", json!(1)),
    ] {
        assert_eq!(refused_param(completions(json!({ name: value }))), name);
    }
    let text = |body| completions(body).unwrap().requests.remove(0).text;
    assert!(!text(json!({"stop": "a"})).keeps_stop);
    assert!(text(json!({"stop": "a", "include_stop_str_in_output": true})).keeps_stop);
    assert!(text(json!({"stop": "a", "no_stop_trim": true})).keeps_stop);
}

#[test]
fn refusals_of_grammars_will_name_the_field_that_was_used() {
    let field = |call: Result<Call, Refusal>| call.unwrap().requests.remove(0).tokenizing.grammar_field;
    let schema = json!({"type": "object"});
    for (name, value) in [
        ("response_format", json!({"type": "json_object"})),
        ("structured_outputs", json!({"regex": "a"})),
        ("guided_json", schema.clone()),
        ("json_schema", schema),
        ("guided_choice", json!(["a"])),
        ("ebnf", json!("start: \"a\"")),
    ] {
        let both = json!({ name: value, "response_format": {"type": "text"} });
        let body = if name == "response_format" { json!({ name: value }) } else { both };
        assert_eq!(field(completions(body)), name);
    }
}

#[test]
fn reasoning_effort_reaches_the_template() {
    let kwargs = |body| {
        let Prompt::Chat(seen) = chat(body).unwrap().requests.remove(0).prompt else {
            panic!("not a chat prompt")
        };
        serde_json::from_str::<Value>(&seen.template_kwargs_json.unwrap()).unwrap()
    };
    assert_eq!(kwargs(json!({"reasoning_effort": "low"})), json!({"reasoning_effort": "low"}));
    let off = json!({"reasoning_effort": "none", "enable_thinking": false, "thinking": false});
    assert_eq!(kwargs(json!({"reasoning_effort": "none"})), off);
    let own = json!({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "max"}});
    assert_eq!(kwargs(own), json!({"reasoning_effort": "max"}), "the template's own variable wins");
}

#[test]
fn reasoning_is_told_apart_hidden_or_left() {
    let parsers = crate::parsers::ParserChoice {
        reasoning: Some(crate::parsers::ReasoningFormat::Think),
        ..Default::default()
    };
    let config = ApiConfig { parsers, ..config() };
    let parsing = |body| call_with(Endpoint::Chat, &config, body).unwrap().parsing;
    assert!(parsing(json!({})).is_some_and(|parsing| !parsing.hides_reasoning));
    assert!(parsing(json!({"include_reasoning": false})).is_some_and(|parsing| parsing.hides_reasoning));
    assert!(parsing(json!({"separate_reasoning": false})).is_none(), "all of it is text");
    let both = json!({"separate_reasoning": false, "include_reasoning": false});
    assert_eq!(refused_param(call_with(Endpoint::Chat, &config, both)), "include_reasoning");
}
