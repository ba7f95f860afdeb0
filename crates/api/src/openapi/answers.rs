//! JSON Schemas of what comes back, written beside nothing: the types that write answers borrow from requests in
//! flight, so their schemas stand here, and the client tests hold real answers against them.
//!
//! Objects are closed: a field that is added to an answer has to be added here.

use serde_json::{Map, Value, json};

/// An object with just these fields: `required` ones, and `optional` ones that may be left out.
fn object(required: Value, optional: Value) -> Value {
    let names: Vec<String> = required.as_object().into_iter().flat_map(Map::keys).cloned().collect();
    let mut properties = required;
    if let (Some(all), Value::Object(more)) = (properties.as_object_mut(), optional) {
        all.extend(more);
    }
    json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false})
}

fn of(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

fn or_null(schema: Value) -> Value {
    json!({"anyOf": [schema, {"type": "null"}]})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

/// Every answer's schema, by name. `model` is the served name.
pub(super) fn schemas(model: &str) -> Map<String, Value> {
    let mut all = Map::new();
    for group in [
        common(model),
        chat(),
        completions(),
        responses(),
        anthropic(),
        sglang(),
        ollama(),
        texts(),
        operations(),
        about_the_server(),
    ] {
        all.extend(group.as_object().cloned().unwrap_or_default());
    }
    all
}

fn common(model: &str) -> Value {
    let error = object(
        json!({
            "message": {"type": "string", "description": "One sentence: what, got, limit, what to do."},
            "type": text(),
            "param": {"type": ["string", "null"], "description": "The request field at fault."},
            "code": {"type": ["string", "null"]},
        }),
        json!({}),
    );
    let usage = object(
        json!({
            "prompt_tokens": count(), "completion_tokens": count(), "total_tokens": count(),
            "prompt_tokens_details": object(json!({"cached_tokens": count()}), json!({})),
        }),
        json!({}),
    );
    json!({
        "ServedModel": {"type": "string", "enum": [model]},
        "Message": super::shapes::message(),
        "Error": object(json!({"error": error}), json!({})),
        "OllamaError": object(json!({"error": text()}), json!({})),
        "Timing": timing(),
        "Usage": usage,
        "PromptLogprobs": prompt_logprobs(),
        "FinishReason": {"enum": ["stop", "tool_calls", "length", "abort"]},
    })
}

/// Null for the prompt's first token, then an object from token id to what is known of the token there.
fn prompt_logprobs() -> Value {
    let rank = json!({"type": "integer", "minimum": 1});
    let token =
        object(json!({"logprob": {"type": "number"}, "rank": rank, "decoded_token": text()}), json!({}));
    list(
        json!({"type": ["object", "null"], "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": token}),
    )
}

/// What whole answers and chunks share.
fn envelope(object_name: &str, choice: Value, optional: Value) -> Value {
    object(
        json!({
            "id": text(), "object": {"const": object_name}, "created": count(), "model": of("ServedModel"),
            "choices": list(choice),
        }),
        optional,
    )
}

fn with_usage(mut envelope: Value) -> Value {
    if let Some(required) = envelope["required"].as_array_mut() {
        required.push("usage".into());
    }
    envelope["properties"]["usage"] = of("Usage");
    envelope
}

fn chat() -> Value {
    let call = |index: Value, required: Value, optional: Value| {
        let function = object(json!({"arguments": text()}), json!({"name": text()}));
        let mut required = required;
        required["function"] = function;
        if !index.is_null() {
            required["index"] = index;
        }
        object(required, optional)
    };
    let named = json!({"id": text(), "type": {"const": "function"}});
    let role = json!({"const": "assistant"});
    let message = object(
        json!({"role": role, "content": or_null(text())}),
        json!({"reasoning_content": text(), "tool_calls": list(call(Value::Null, named.clone(), json!({})))}),
    );
    let delta = object(
        json!({}),
        json!({
            "role": role, "content": or_null(text()), "reasoning_content": text(),
            "tool_calls": list(call(count(), json!({}), named)),
        }),
    );
    let token = json!({"token": text(), "logprob": {"type": ["number", "null"]}, "bytes": list(count())});
    let mut entry = token.clone();
    entry["top_logprobs"] = list(object(token, json!({})));
    let logprobs =
        object(json!({"content": list(of("TokenLogprob")), "refusal": {"type": "null"}}), json!({}));
    let choice = |name: &str, content: Value, finish: Value| {
        let mut fields =
            json!({"index": count(), "logprobs": or_null(of("ChatLogprobs")), "finish_reason": finish});
        fields[name] = content;
        object(fields, json!({"timing": of("Timing"), "token_ids": list(count())}))
    };
    let of_prompt = json!({"prompt_logprobs": of("PromptLogprobs"), "prompt_token_ids": list(count())});
    let whole = choice("message", of("AssistantMessage"), of("FinishReason"));
    let chunk = choice("delta", delta, or_null(of("FinishReason")));
    json!({
        "AssistantMessage": message,
        "TokenLogprob": object(entry, json!({})),
        "ChatLogprobs": logprobs,
        "ChatCompletion": with_usage(envelope("chat.completion", whole, of_prompt)),
        "ChatCompletionChunk": envelope(
            "chat.completion.chunk",
            chunk,
            json!({"usage": or_null(of("Usage")), "prompt_token_ids": list(count())}),
        ),
    })
}

fn completions() -> Value {
    let alternatives = or_null(json!({"type": "object", "additionalProperties": {"type": "number"}}));
    let logprobs = object(
        json!({
            "tokens": list(text()), "token_logprobs": list(json!({"type": ["number", "null"]})),
            "top_logprobs": or_null(list(alternatives)), "text_offset": list(count()),
        }),
        json!({}),
    );
    let choice = |finish: Value| {
        object(
            json!({
                "index": count(), "text": text(), "logprobs": or_null(of("CompletionLogprobs")),
                "finish_reason": finish,
            }),
            json!({
                "timing": of("Timing"), "token_ids": list(count()), "prompt_token_ids": list(count()),
                "prompt_logprobs": of("PromptLogprobs"),
            }),
        )
    };
    let chunk = choice(or_null(of("FinishReason")));
    json!({
        "CompletionLogprobs": logprobs,
        "Completion": with_usage(envelope("text_completion", choice(of("FinishReason")), json!({}))),
        "CompletionChunk": envelope("text_completion", chunk, json!({"usage": or_null(of("Usage"))})),
    })
}

/// A choice's timing, where it was asked for; times in milliseconds.
fn timing() -> Value {
    let (time, count) = (json!({"type": "number", "minimum": 0}), count());
    let batch = object(json!({"min": count, "mean": time, "max": count}), json!({}));
    object(
        json!({
            "queue_ms": time, "prefill_ms": time, "decode_ms": time, "time_to_first_token_ms": time,
            "total_ms": time, "prompt_tokens": count, "cached_tokens": count, "completion_tokens": count,
            "retractions": count, "prefill_chunks": count, "steps": count, "batch_size": batch,
        }),
        json!({}),
    )
}

fn responses() -> Value {
    let kind = |name: &str| json!({"const": name});
    let status = json!({"enum": ["in_progress", "completed", "incomplete"]});
    let top =
        object(json!({"token": text(), "logprob": {"type": "number"}, "bytes": list(count())}), json!({}));
    let mut token = top.clone();
    token["properties"]["top_logprobs"] = list(top);
    let part = object(
        json!({"type": kind("output_text"), "text": text(), "annotations": list(json!({})), "logprobs": list(token)}),
        json!({}),
    );
    let thought = object(json!({"type": kind("reasoning_text"), "text": text()}), json!({}));
    let item = json!({"anyOf": [
        object(json!({"id": text(), "type": kind("message"), "status": status, "role": kind("assistant"),
            "content": list(part)}), json!({})),
        object(json!({"id": text(), "type": kind("reasoning"), "status": status, "summary": list(json!({})),
            "content": list(thought)}), json!({})),
        object(json!({"id": text(), "type": kind("function_call"), "status": status, "call_id": text(),
            "name": text(), "arguments": text()}), json!({})),
    ]});
    let usage = object(
        json!({
            "input_tokens": count(),
            "input_tokens_details":
                object(json!({"cached_tokens": count(), "cache_write_tokens": count()}), json!({})),
            "output_tokens": count(),
            "output_tokens_details": object(json!({"reasoning_tokens": count()}), json!({})),
            "total_tokens": count(),
        }),
        json!({}),
    );
    let error = object(json!({"code": text(), "message": text()}), json!({}));
    // Open: the fields of the request follow.
    let response = json!({"type": "object", "properties": {
        "id": text(), "object": kind("response"), "created_at": count(),
        "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]}, "error": or_null(error),
        "incomplete_details": or_null(object(json!({"reason": kind("max_output_tokens")}), json!({}))),
        "model": of("ServedModel"), "output": list(item), "usage": or_null(usage), "store": {"const": false},
    }, "required": ["id", "object", "created_at", "status", "error", "incomplete_details", "model", "output",
        "usage"]});
    let event = json!({"type": "object", "properties": {"type": text(), "sequence_number": count()},
        "required": ["type", "sequence_number"]});
    json!({"Response": response, "ResponseEvent": event})
}

fn anthropic() -> Value {
    let kind = |name: &str| json!({"const": name});
    let error = object(json!({"type": text(), "message": text()}), json!({}));
    let usage = object(
        json!({
            "input_tokens": count(), "cache_creation_input_tokens": count(), "cache_read_input_tokens": count(),
            "output_tokens": count(),
        }),
        json!({"output_tokens_details": object(json!({"thinking_tokens": count()}), json!({}))}),
    );
    let block = json!({"anyOf": [
        object(json!({"type": kind("text"), "text": text()}), json!({})),
        object(json!({"type": kind("thinking"), "thinking": text(), "signature": text()}), json!({})),
        object(json!({"type": kind("tool_use"), "id": text(), "name": text(), "input": {"type": "object"}}), json!({})),
    ]});
    let message = object(
        json!({
            "id": text(), "type": kind("message"), "role": kind("assistant"), "model": of("ServedModel"),
            "content": list(block),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", null]},
            "stop_sequence": {"type": ["string", "null"]}, "usage": usage,
        }),
        json!({}),
    );
    let event = json!({"type": "object", "properties": {"type": {"enum": [
        "message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop", "error",
    ]}}, "required": ["type"]});
    json!({
        "AnthropicError": object(json!({"type": kind("error"), "error": error}), json!({})),
        "AnthropicMessage": message,
        "AnthropicEvent": event,
        "AnthropicCount": object(json!({"input_tokens": count()}), json!({})),
    })
}

fn sglang() -> Value {
    let reason = json!({"type": ["object", "null"], "properties": {"type": {"enum": ["stop", "length", "abort"]}}, "required": ["type"]});
    let meta = object(
        json!({
            "id": text(), "finish_reason": reason, "prompt_tokens": count(), "completion_tokens": count(),
            "cached_tokens": count(), "e2e_latency": {"type": "number", "minimum": 0},
        }),
        json!({
            "input_token_logprobs": list(json!({})), "output_token_logprobs": list(json!({})),
            "input_top_logprobs": list(json!({})), "output_top_logprobs": list(json!({})),
        }),
    );
    let item = object(
        json!({"text": text(), "output_ids": list(count()), "meta_info": meta}),
        json!({"index": count()}),
    );
    json!({
        "GeneratedItem": item,
        "GenerateAnswer": {"anyOf": [of("GeneratedItem"), list(of("GeneratedItem"))]},
    })
}

fn ollama() -> Value {
    let function =
        object(json!({"index": count(), "name": text(), "arguments": {"type": "object"}}), json!({}));
    let call = object(json!({"id": text(), "function": function}), json!({}));
    let message = object(
        json!({"role": {"const": "assistant"}, "content": text()}),
        json!({"thinking": text(), "tool_calls": list(call)}),
    );
    let end = json!({
        "logprobs": list(of("TokenLogprob")),
        "done_reason": {"enum": ["stop", "length", "abort", "load", "unload"]}, "total_duration": count(), "load_duration": count(),
        "prompt_eval_count": count(), "prompt_eval_duration": count(), "eval_count": count(),
        "eval_duration": count(),
    });
    let line = |name: &str, value: Value, mut more: Value| {
        let mut required =
            json!({"model": of("ServedModel"), "created_at": text(), "done": {"type": "boolean"}});
        required[name] = value;
        if let (Some(all), Some(end)) = (more.as_object_mut(), end.as_object()) {
            all.extend(end.clone());
        }
        object(required, more)
    };
    let open = json!({"type": "object"});
    let version = object(json!({"version": text()}), json!({}));
    json!({
        "OllamaChat": line("message", message, json!({})),
        "OllamaGenerated": line("response", text(), json!({"thinking": text()})),
        "OllamaModels": object(json!({"models": list(open.clone())}), json!({})),
        "OllamaModel": open,
        "OllamaVersion": version,
    })
}

/// Of `/tokenize` and `/detokenize`.
fn texts() -> Value {
    let one_or_many = |one: Value| json!({"anyOf": [one, list(one.clone())]});
    json!({
        "Tokens": object(
            json!({
                "count": one_or_many(count()), "max_model_len": count(), "tokens": one_or_many(list(count())),
                "token_strs": or_null(one_or_many(list(text()))),
            }),
            json!({}),
        ),
        "Detokenized": object(json!({"prompt": one_or_many(text()), "text": one_or_many(text())}), json!({})),
    })
}

/// Of the endpoints for whoever runs the server.
fn operations() -> Value {
    let status = json!({"const": "ok"});
    let number = json!({"type": ["number", "null"]});
    let sampling = json!({"temperature": number, "top_k": number, "top_p": number, "min_p": number});
    let flushed = json!({
        "status": status, "message": text(), "pages_flushed": count(), "pages_held": count(),
        "pages_cached": count(), "pages_free": count(),
    });
    let model = json!({
        "model_path": text(), "tokenizer_path": text(), "served_model_name": of("ServedModel"),
        "is_generation": {"const": true}, "context_length": count(), "vocab_size": count(),
        "has_chat_template": {"type": "boolean"}, "has_image_understanding": {"const": false},
        "has_audio_understanding": {"const": false},
        "preferred_sampling_params": object(sampling, json!({})),
    });
    let generated = json!({"status": status, "generate_ms": {"type": "number", "minimum": 0}});
    json!({
        "Flushed": object(flushed, json!({})),
        "ReplicaState": object(
            json!({"status": status, "replica": count(), "state": text(), "requests_open": count()}),
            json!({}),
        ),
        "Aborted": object(json!({"status": status, "requests_aborted": count()}), json!({})),
        "Generated": object(generated, json!({})),
        "ModelInfo": object(model, json!({})),
    })
}

fn about_the_server() -> Value {
    let open = json!({"type": "object"});
    let opens = list(open.clone());
    let process = json!({"name": text(), "pid": count(), "role": text(), "rank": or_null(count())});
    let process = object(process, json!({}));
    let number = json!({"type": "number"});
    let stage = json!({
        "rank": count(), "label": text(), "computed_seconds": number, "work_seconds": number, "bubble": number,
    });
    let stage = object(stage, json!({}));
    let model = json!({
        "id": of("ServedModel"), "object": {"const": "model"}, "created": count(), "owned_by": text(),
        "max_model_len": {"type": "integer", "minimum": 1,
            "description": "Longest prompt plus answer in tokens, as enforced."},
    });
    json!({
        "Model": object(model, json!({})),
        "ModelList": object(json!({"object": {"const": "list"}, "data": list(of("Model"))}), json!({})),
        "Health": object(json!({"status": {"const": "ok"}}), json!({})),
        "Ready": object(
            json!({"status": {"const": "ready"}, "token_age_seconds": {"type": "number"}, "replicas": opens}),
            json!({}),
        ),
        "Version": object(json!({"version": text()}), json!({})),
        "Root": object(
            json!({"server": text(), "version": text(), "model": of("ServedModel"), "endpoints": list(text())}),
            json!({}),
        ),
        "ServerInfo": object(
            json!({
                "version": text(), "model": of("ServedModel"), "topology": open, "engine": open,
                "stages": list(stage), "replicas": opens, "api": open, "processes": list(process),
            }),
            json!({}),
        ),
        "FlightFiles": object(json!({"files": list(text())}), json!({})),
        "Trace": object(
            json!({
                "displayTimeUnit": {"const": "ms"}, "traceEvents": list(json!({"type": "object"})),
                "otherData": object(json!({"events": count(), "lost": count()}), json!({})),
            }),
            json!({}),
        ),
        "OpenApi": {"type": "object", "required": ["openapi", "info", "paths"]},
    })
}
