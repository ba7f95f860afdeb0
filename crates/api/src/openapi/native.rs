//! The fields of the endpoints that ask for no answer of a model: text, and whoever runs the server.

use super::fields::Kind::{Bool, Object, Shape, Text};
use super::fields::{Field, FieldTable, Kind, read, required};
use super::shapes;
use crate::engine::router::REPLICAS_MAX;
use crate::request::text::TEXTS_MAX;
use serde_json::{Value, json};

/// `/tokenize`
pub(crate) const TOKENIZE: FieldTable =
    FieldTable { name: "TokenizeRequest", groups: &[TOKENIZE_FIELDS, TOKENIZE_CHAT] };
/// `/detokenize`
pub(crate) const DETOKENIZE: FieldTable =
    FieldTable { name: "DetokenizeRequest", groups: &[DETOKENIZE_FIELDS] };
/// `/abort_request`
pub(crate) const ABORT: FieldTable = FieldTable { name: "AbortRequest", groups: &[ABORT_FIELDS] };

/// `/drain_replica`, `/resume_replica`
pub(crate) const REPLICA: FieldTable = FieldTable { name: "ReplicaRequest", groups: &[REPLICA_FIELDS] };

#[rustfmt::skip]
const TOKENIZE_FIELDS: &[Field] = &[
    read("model", Kind::Model, "accepted", "another name is 404"),
    read("prompt", Shape(TEXTS), "this or `messages`", "a list is answered with lists"),
    read("messages", Shape(shapes::MESSAGES), "", "tokenized as the chat would be"),
    read("add_special_tokens", Bool, "true, with `messages` false", "a beginning-of-text token is not doubled"),
    read("return_token_strs", Bool, "false", "`token_strs`: each token as the vocabulary spells it"),
];

/// How `messages` are rendered; a `prompt` is not.
#[rustfmt::skip]
pub(crate) const TOKENIZE_CHAT: &[Field] = &[
    read("add_generation_prompt", Bool, "true", "as in a chat; this and what follows needs `messages`"),
    read("continue_final_message", Bool, "false", "as in a chat"),
    read("tools", Shape(shapes::TOOLS), "none", "as in a chat"),
    read("tool_choice", Shape(shapes::TOOL_CHOICE), "\"auto\"", "as in a chat"),
    read("parallel_tool_calls", Bool, "true", "as in a chat"),
    read("documents", Shape(shapes::DOCUMENTS), "none", "as in a chat"),
    read("chat_template", Text, "the model's choice", "as in a chat"),
    read("chat_template_kwargs", Object, "none", "as in a chat"),
    read("reasoning_effort", Text, "the model's choice", "as in a chat"),
];

#[rustfmt::skip]
const DETOKENIZE_FIELDS: &[Field] = &[
    read("model", Kind::Model, "accepted", "another name is 404"),
    required("tokens", Shape(TOKENS), "a list of lists is answered with a list"),
    read("skip_special_tokens", Bool, "false", ""),
];

#[rustfmt::skip]
const ABORT_FIELDS: &[Field] = &[
    read("rid", Text, "this or `abort_all`", "the id of an answer"),
    read("request_id", Text, "", "another name of `rid`"),
    read("abort_all", Bool, "false", "ends every answer"),
];

#[rustfmt::skip]
const REPLICA_FIELDS: &[Field] = &[
    required("replica", Kind::Integer(0, REPLICAS_MAX as i128 - 1), "its number (`dp_rank`)"),
];

const TEXTS: shapes::Shape = shapes::Shape {
    words: || format!("string; list of 1 to {TEXTS_MAX} strings"),
    schema: || {
        let several =
            json!({"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": TEXTS_MAX});
        json!({"anyOf": [{"type": "string"}, several]})
    },
};

const TOKENS: shapes::Shape = shapes::Shape {
    words: || format!("list of token ids; list of 1 to {TEXTS_MAX} such lists"),
    schema: || {
        let ids: Value = json!({"type": "array", "items": {"type": "integer", "minimum": 0}});
        json!({"anyOf": [ids, {"type": "array", "items": ids, "minItems": 1, "maxItems": TEXTS_MAX}]})
    },
};
