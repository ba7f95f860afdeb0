//! Requests without a prompt, by which Ollama's clients load a model, and unload it with `keep_alive: 0`.
//!
//! The served model is loaded before the server listens and stays so. Both are answered at once, as Ollama does, with
//! nothing done: its clients only want to hear that they may go on.

use super::super::{Dialect, Reading};
use super::answer::Field;
use crate::clock::rfc3339;
use crate::fields::Fields;
use lockstep_core::Refusal;
use serde_json::{Map, Value, json};
use std::time::SystemTime;

/// The answer, if `body` holds no prompt. What else it holds is checked as in a request `D` that has one.
pub(super) fn answer<D: Dialect>(
    body: &Map<String, Value>,
    reading: &Reading<'_>,
    field: Field,
) -> Result<Option<Value>, Refusal> {
    let fields = Fields::new(body, "");
    let (name, is_empty, stand_in) = match field {
        Field::Message => {
            let is_empty = fields.list("messages")?.is_none_or(<[Value]>::is_empty);
            ("messages", is_empty, json!([{"role": "user", "content": "."}]))
        }
        Field::Response => ("prompt", fields.string("prompt")?.is_none_or(str::is_empty), json!(".")),
    };
    if !is_empty {
        return Ok(None);
    }
    let mut with_prompt = body.clone();
    with_prompt.insert(name.into(), stand_in);
    D::read(with_prompt, reading)?;
    let unloads = fields.get("keep_alive").is_some_and(is_zero);
    let mut answer = json!({
        "model": reading.config.served_model_name,
        "created_at": rfc3339(SystemTime::now()),
        "done": true,
        "done_reason": if unloads { "unload" } else { "load" },
    });
    match field {
        Field::Message => answer["message"] = json!({"role": "assistant", "content": ""}),
        Field::Response => answer["response"] = "".into(),
    }
    Ok(Some(answer))
}

/// A number of seconds, or a text like `5m`.
fn is_zero(duration: &Value) -> bool {
    match duration {
        Value::String(text) => text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).parse() == Ok(0.0),
        other => other.as_f64() == Some(0.0),
    }
}
