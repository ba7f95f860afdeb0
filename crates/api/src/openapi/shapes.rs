//! Values of request fields that have parts: what `docs/api.md` says of them, and their JSON Schema.
//!
//! A schema refuses nothing that validation accepts. Where a rule needs the model or another field (token ids
//! below the vocabulary's size), it is left to validation.

use super::fields::or_null;
use crate::request::limits::{
    ALLOWED_CHOICES_MAX, BAD_WORD_BYTES_MAX, BAD_WORDS_MAX, BIAS_MAX, FUNCTION_NAME_LEN_MAX, PROMPTS_MAX,
    STOP_TOKEN_IDS_MAX, TOKEN_RULES_MAX, TOOLS_MAX,
};
use lockstep_core::limits::{STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX};
use serde_json::{Value, json};

/// A value with parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// In Markdown.
    pub(crate) words: fn() -> String,
    /// As JSON Schema, without null.
    pub(crate) schema: fn() -> Value,
}

pub(super) const MESSAGES: Shape = Shape {
    words: || "list, at least one".into(),
    schema: || json!({"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}}),
};

/// A message of a chat.
pub(super) fn message() -> Value {
    let part = json!({
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    });
    let roles = ["system", "developer", "user", "assistant", "tool"];
    json!({
        "type": "object",
        "properties": {
            "role": {"type": "string", "enum": roles},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": part}, {"type": "null"}]},
            "name": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"]},
        },
        "required": ["role"],
        // Only an assistant's message that calls tools goes without content.
        "if": {"properties": {"role": {"enum": ["system", "developer", "user", "tool"]}}},
        "then": {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
        "else": {"anyOf": [
            {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
            {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
        ]},
    })
}

fn token_id() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn token_ids(least: usize, most: usize) -> Value {
    json!({"type": "array", "items": token_id(), "minItems": least, "maxItems": most})
}

pub(super) const PROMPT: Shape = Shape {
    words: || "string; token ids; list of strings; list of token-id lists".into(),
    schema: || {
        let ids = json!({"type": "array", "items": token_id(), "minItems": 1});
        let several = json!({"anyOf": [{"type": "string"}, ids.clone()]});
        json!({"anyOf": [
            {"type": "string"},
            ids,
            {"type": "array", "items": several, "minItems": 1, "maxItems": PROMPTS_MAX},
        ]})
    },
};

pub(super) const STREAM_OPTIONS: Shape = Shape {
    words: || "`{\"include_usage\": bool}`".into(),
    schema: || {
        let off = json!({"enum": [false, null], "description": "Not supported."});
        let wish = json!({"type": ["boolean", "null"], "default": false});
        json!({"type": "object", "properties": {"include_usage": wish, "continuous_usage_stats": off}})
    },
};

pub(super) const STOP: Shape = Shape {
    words: || {
        format!(
            "string, or list of up to {STOP_STRINGS_MAX} strings, each of up to {STOP_STRING_BYTES_MAX} bytes"
        )
    },
    schema: || {
        let text = json!({"type": "string", "minLength": 1, "maxLength": STOP_STRING_BYTES_MAX});
        json!({"anyOf": [text.clone(), {"type": "array", "items": text, "maxItems": STOP_STRINGS_MAX}]})
    },
};

/// The same, always a list.
pub(super) const STOP_LIST: Shape = Shape {
    words: || {
        format!("list of up to {STOP_STRINGS_MAX} strings, each of up to {STOP_STRING_BYTES_MAX} bytes")
    },
    schema: || {
        let text = json!({"type": "string", "minLength": 1, "maxLength": STOP_STRING_BYTES_MAX});
        json!({"type": "array", "items": text, "maxItems": STOP_STRINGS_MAX})
    },
};

pub(super) const BAD_WORDS: Shape = Shape {
    words: || {
        format!("list of up to {BAD_WORDS_MAX} strings, none blank, each of up to {BAD_WORD_BYTES_MAX} bytes")
    },
    schema: || {
        let text = json!({"type": "string", "minLength": 1, "maxLength": BAD_WORD_BYTES_MAX});
        json!({"type": "array", "items": text, "maxItems": BAD_WORDS_MAX})
    },
};

pub(super) const STOP_TOKEN_IDS: Shape = Shape {
    words: || format!("up to {STOP_TOKEN_IDS_MAX} token ids"),
    schema: || token_ids(0, STOP_TOKEN_IDS_MAX),
};

pub(super) const ALLOWED_TOKEN_IDS: Shape =
    Shape { words: || "list of token ids".into(), schema: || token_ids(1, TOKEN_RULES_MAX) };

pub(super) const LOGIT_BIAS: Shape = Shape {
    words: || format!("object: token id (as text) to -{BIAS_MAX}..={BIAS_MAX}"),
    schema: || {
        json!({
            "type": "object",
            "propertyNames": {"pattern": "^\\s*\\+?[0-9]+\\s*$"},
            "additionalProperties": {"type": "number", "minimum": -BIAS_MAX, "maximum": BIAS_MAX},
            "maxProperties": TOKEN_RULES_MAX,
        })
    },
};

/// A JSON schema in a request, itself.
fn schema_or_text() -> Value {
    json!({"anyOf": [{"type": "object"}, {"type": "string"}]})
}

pub(super) const SCHEMA: Shape =
    Shape { words: || "a JSON schema, as object or text".into(), schema: schema_or_text };

pub(super) const CHOICE: Shape = Shape {
    words: || format!("1 to {ALLOWED_CHOICES_MAX} strings, none empty"),
    schema: || {
        let text = json!({"type": "string", "minLength": 1});
        json!({"type": "array", "items": text, "minItems": 1, "maxItems": ALLOWED_CHOICES_MAX})
    },
};

pub(super) const RESPONSE_FORMAT: Shape = Shape {
    words: || {
        "`{\"type\": \"text\"}`, `{\"type\": \"json_object\"}`, \
         `{\"type\": \"json_schema\", \"json_schema\": {\"name\", \"schema\", \"strict\"}}`"
            .into()
    },
    schema: || {
        let wanted = json!({
            "type": "object",
            "properties": {"schema": schema_or_text(), "strict": {"type": ["boolean", "null"]}},
            "required": ["schema"],
        });
        json!({"type": "object", "required": ["type"], "anyOf": [
            {"properties": {"type": {"enum": ["text", "json_object"]}}},
            {"properties": {"type": {"const": "json_schema"}, "json_schema": wanted}, "required": ["json_schema"]},
        ]})
    },
};

pub(super) const STRUCTURED_OUTPUTS: Shape = Shape {
    words: || "object with one of `json`, `regex`, `choice`, `grammar`, `json_object`".into(),
    schema: || {
        json!({"type": "object", "properties": {
            "json": or_null(schema_or_text()),
            "regex": {"type": ["string", "null"]},
            "choice": or_null((CHOICE.schema)()),
            "grammar": {"type": ["string", "null"]},
            "json_object": {"type": ["boolean", "null"]},
        }, "additionalProperties": {"type": "null"}})
    },
};

pub(super) const TOOLS: Shape = Shape {
    words: || {
        format!(
            "list of up to {TOOLS_MAX} `{{\"type\": \"function\", \"function\": {{\"name\", \"description\", \
             \"parameters\", \"strict\"}}}}`"
        )
    },
    schema: || {
        let parameters = json!({"anyOf": [{"type": "null"},
            {"type": "object", "properties": {"type": {"const": "object"}}}]});
        let pattern = format!("^[A-Za-z0-9_.-]{{1,{FUNCTION_NAME_LEN_MAX}}}$");
        let function = json!({
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": pattern},
                "description": {"type": ["string", "null"]},
                "parameters": parameters,
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        });
        let tool = json!({
            "type": "object",
            "properties": {"type": {"enum": ["function", null]}, "function": function},
            "required": ["function"],
        });
        json!({"type": "array", "items": tool, "maxItems": TOOLS_MAX})
    },
};

pub(super) const TOOL_CHOICE: Shape = Shape {
    words: || {
        "`\"auto\"`, `\"none\"`, `\"required\"`, `{\"type\": \"function\", \"function\": {\"name\"}}`".into()
    },
    schema: || {
        let function =
            json!({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]});
        json!({"anyOf": [
            {"enum": ["auto", "none", "required"]},
            {"type": "object", "properties": {"type": {"const": "function"}, "function": function},
                "required": ["type", "function"]},
        ]})
    },
};

pub(super) const DOCUMENTS: Shape = Shape {
    words: || "list of objects".into(),
    schema: || json!({"type": "array", "items": {"type": "object"}}),
};
