//! The prompt of `/v1/completions`: text or token ids, one or several.

use super::limits::PROMPTS_MAX;
use super::sampling::token_ids;
use crate::ApiConfig;
use crate::fields::{Fields, kind};
use lockstep_core::Refusal;
use lockstep_wire::Prompt;
use serde_json::Value;

/// The prompts, in order; choice `i` of the answer continues prompt `i`.
pub(super) fn prompts(fields: &Fields<'_>, config: &ApiConfig) -> Result<Vec<Prompt>, Refusal> {
    let list = match fields.get("prompt") {
        None => return Err(fields.invalid("prompt", "is required: a string, a list of strings or token ids")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text.clone())]),
        Some(Value::Array(list)) => list.as_slice(),
        Some(other) => {
            let message = format!("must be a string, a list of strings or token ids, got {}", kind(other));
            return Err(fields.invalid("prompt", message));
        }
    };
    match list.first() {
        None => Err(fields.invalid("prompt", "is an empty list; send at least one token id or string")),
        Some(Value::Number(_)) => Ok(vec![tokens(fields, list, config)?]),
        Some(_) if list.len() > PROMPTS_MAX => {
            Err(fields.invalid("prompt", format!("has {} prompts, accepted are {PROMPTS_MAX}", list.len())))
        }
        Some(_) => list.iter().map(|item| one_of_several(fields, item, config)).collect(),
    }
}

fn one_of_several(fields: &Fields<'_>, item: &Value, config: &ApiConfig) -> Result<Prompt, Refusal> {
    match item {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(ids) if ids.is_empty() => {
            Err(fields.invalid("prompt", "holds an empty list of token ids"))
        }
        Value::Array(ids) => tokens(fields, ids, config),
        other => {
            let message = format!("must hold strings or lists of token ids, got {}", kind(other));
            Err(fields.invalid("prompt", message))
        }
    }
}

/// Token ids need no tokenizer, so their length is checked here, before any work.
fn tokens(fields: &Fields<'_>, list: &[Value], config: &ApiConfig) -> Result<Prompt, Refusal> {
    if list.len() >= config.context_max {
        return Err(Refusal::context_length(list.len(), config.context_max));
    }
    Ok(Prompt::Tokens(token_ids(fields, "prompt", list, config.vocab_size)?))
}
