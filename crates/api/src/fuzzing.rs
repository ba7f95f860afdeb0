//! The way from a body's bytes to a validated call, for whatever feeds it nonsense: the crate `fuzz` and the random
//! test below. Pure, and the very functions that the server calls.

use crate::ApiConfig;
use crate::body::parse_object;
use crate::dialect::{Chat, Completions, Dialect, Messages, Reading, Responses, SglangGenerate, ollama};
use crate::parsers::{Opening, ParserChoice, ReasoningFormat, ToolFormat};
use crate::request::{Call, policy::FieldPolicy};
use lockstep_core::{Grammar, Refusal};

/// A server whose model calls tools and reasons, so that every field is looked into.
fn config() -> ApiConfig {
    let parsers = ParserChoice {
        tools: Some(ToolFormat::Hermes),
        reasoning: Some(ReasoningFormat::Think),
        opening: Opening::Always,
    };
    ApiConfig { parsers, ..ApiConfig::new("tiny", 4096, 300) }
}

fn read<D: Dialect>(body: &[u8], reading: &Reading<'_>) -> Result<Call, Refusal> {
    D::read(parse_object(body)?, reading).map(|(call, _)| call)
}

/// Reads `body` at every endpoint that generates; how many took it. Panics where a server would, and where a
/// request is neither taken nor refused as it should be.
pub fn read_everywhere(body: &[u8]) -> usize {
    let config = config();
    let policy = FieldPolicy::default();
    let reading = Reading { config: &config, policy: &policy };
    let results = [
        read::<Chat>(body, &reading),
        read::<Completions>(body, &reading),
        read::<Messages>(body, &reading),
        read::<Responses>(body, &reading),
        read::<SglangGenerate>(body, &reading),
        read::<ollama::Chat>(body, &reading),
        read::<ollama::Generate>(body, &reading),
    ];
    results.iter().filter(|result| is_taken(result)).count()
}

/// The forms that a completions request asks for; none when it is refused.
pub fn grammars_of(body: &[u8]) -> Vec<Grammar> {
    let config = config();
    let policy = FieldPolicy::default();
    let call = read::<Completions>(body, &Reading { config: &config, policy: &policy });
    let requests = call.map(|call| call.requests).unwrap_or_default();
    requests.into_iter().filter_map(|request| request.sampling.grammar).collect()
}

fn is_taken(result: &Result<Call, Refusal>) -> bool {
    match result {
        Ok(call) => {
            assert!(call.n >= 1 && !call.requests.is_empty(), "a call without requests: {call:?}");
            assert_eq!(call.requests.len() % call.n, 0, "every prompt has its choices: {call:?}");
            true
        }
        Err(refusal) => {
            assert!(
                (400..500).contains(&refusal.status),
                "the client is told that it is our fault: {refusal:?}"
            );
            assert!(!refusal.message.is_empty() && refusal.message.len() < 2000, "{refusal:?}");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openapi::fields::FieldTable;
    use crate::random::Rng;
    use serde_json::{Map, Value, json};

    /// Bodies that are taken as they are.
    fn bodies() -> Vec<Value> {
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        let calls =
            json!([{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"city\": 1}"}}]);
        vec![
            json!({"prompt": "ab"}),
            json!({"prompt": ["ab", [1, 2, 3]], "n": 3, "echo": true, "logprobs": 2, "max_tokens": 0, "stop": ["a"]}),
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
                "stream": true, "stream_options": {"include_usage": true}, "logit_bias": {"5": 1.5}}),
            json!({"messages": [{"role": "user", "content": "ab"},
                    {"role": "assistant", "content": null, "tool_calls": calls},
                    {"role": "tool", "tool_call_id": "a", "content": "sunny"}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": true}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": false}),
            json!({"messages": [{"role": "user", "content": "ab"}], "response_format":
                {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, "temperature": 0.5}),
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "ab"}]},
                    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "a", "output": "sunny"}],
                "tools": [{"type": "function", "name": "f", "parameters": schema}], "store": false}),
            json!({"text": "ab", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}),
            json!({"max_tokens": 5, "system": [{"type": "text", "text": "be brief"}], "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "ab"}]},
                    {"role": "assistant", "content": [
                        {"type": "tool_use", "id": "a", "name": "f", "input": {"city": "x"}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]}],
                "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"},
                "thinking": {"type": "enabled", "budget_tokens": 100}, "stop_sequences": ["x"]}),
        ]
    }

    const TABLES: [FieldTable; 7] = [
        Chat::FIELDS,
        Completions::FIELDS,
        Messages::FIELDS,
        Responses::FIELDS,
        SglangGenerate::FIELDS,
        ollama::Chat::FIELDS,
        ollama::Generate::FIELDS,
    ];

    /// A value that no field expects, or one that some do.
    fn odd_value(rng: &mut Rng) -> Value {
        let deep = || (0..100).fold(json!(1), |inner, _| json!([inner]));
        match rng.below(16) {
            0 => Value::Null,
            1 => json!(rng.below(2) == 0),
            2 => json!(-1),
            3 => json!(i64::MIN),
            4 => json!(u64::MAX),
            5 => json!(1e300),
            6 => json!(-0.5),
            7 => json!(rng.below(300)),
            8 => json!(""),
            9 => json!("\u{0}é😀\u{fffd}<|im_end|>".repeat(1 + rng.below(300))),
            10 => json!([]),
            11 => json!({}),
            12 => json!([null, 1, "a", [], {}]),
            13 => json!({"type": "text", "text": 1, "function": null, "": []}),
            14 => deep(),
            _ => json!("auto"),
        }
    }

    /// A place in `value`, as deep as chance will have it.
    fn somewhere<'a>(rng: &mut Rng, value: &'a mut Value) -> &'a mut Value {
        let len = match value {
            Value::Array(list) => list.len(),
            Value::Object(map) => map.len(),
            _ => 0,
        };
        if len == 0 || rng.below(4) == 0 {
            return value;
        }
        let at = rng.below(len);
        let inner = match value {
            Value::Array(list) => list.get_mut(at),
            Value::Object(map) => map.values_mut().nth(at),
            _ => None,
        };
        somewhere(rng, inner.expect("invariant: at is below the length"))
    }

    fn change(rng: &mut Rng, body: &mut Value) {
        let names = |map: &Map<String, Value>| map.keys().cloned().collect::<Vec<_>>();
        let place = if rng.below(2) == 0 { body } else { somewhere(rng, body) };
        match (rng.below(4), place) {
            (0, Value::Object(map)) if !map.is_empty() => {
                let names = names(map);
                map.remove(&names[rng.below(names.len())]);
            }
            (1 | 2, Value::Object(map)) => {
                let fields: Vec<_> = TABLES[rng.below(TABLES.len())].fields().collect();
                map.insert(rng.pick(&fields).name.into(), odd_value(rng));
            }
            (3, Value::Array(list)) if !list.is_empty() => {
                let copy = list[rng.below(list.len())].clone();
                list.push(copy);
            }
            (_, place) => *place = odd_value(rng),
        }
    }

    #[test]
    fn changed_bodies_are_taken_or_refused() {
        let bodies = bodies();
        for body in &bodies {
            assert!(read_everywhere(body.to_string().as_bytes()) > 0, "{body}");
        }
        let mut taken = 0;
        for seed in 0..20_000 {
            let mut rng = Rng::new(seed);
            let mut body = bodies[rng.below(bodies.len())].clone();
            (0..=rng.below(3)).for_each(|_| change(&mut rng, &mut body));
            let mut bytes = body.to_string().into_bytes();
            // One in four is no longer JSON, or not UTF-8.
            if rng.below(4) == 0 {
                let at = rng.below(bytes.len());
                bytes[at] = rng.below(256) as u8;
                bytes.truncate(bytes.len() - rng.below(2) * rng.below(bytes.len()));
            }
            taken += usize::from(
                std::panic::catch_unwind(|| read_everywhere(&bytes)).unwrap_or_else(|_| {
                    panic!("seed {seed}: {}", String::from_utf8_lossy(&bytes));
                }) > 0,
            );
        }
        // Neither is everything refused nor does everything pass.
        assert!((2_000..18_000).contains(&taken), "{taken}");
    }
}
