//! The fields of Anthropic's requests.

use super::fields::Kind::{self, Bool, Integer, Number, Object, Shape, Text};
use super::fields::{Field, FieldTable, Neutral, ignored, read, required, unsupported};
use super::requests::{ENGINE, OPEN};
use super::shapes;
use crate::request::limits::TEMPERATURE_MAX;
use serde_json::{Value, json};

/// `/v1/messages`
pub(crate) const MESSAGES: FieldTable = FieldTable {
    name: "MessagesRequest",
    groups: &[CONVERSATION_FIELDS, ANSWER_FIELDS, ENGINE, WITHOUT_EFFECT, UNSUPPORTED],
};

/// `/v1/messages/count_tokens`: what says how the answer is generated has no meaning there.
pub(crate) const COUNT_TOKENS: FieldTable =
    FieldTable { name: "CountTokensRequest", groups: &[CONVERSATION_FIELDS, WITHOUT_EFFECT, UNSUPPORTED] };

/// What the prompt is made of.
#[rustfmt::skip]
const CONVERSATION_FIELDS: &[Field] = &[
    read("model", Kind::Model, "accepted", "another name is 404"),
    required("messages", Shape(CONVERSATION), "an assistant's message at the end is continued"),
    read("system", Shape(SYSTEM), "none", "becomes a system message"),
    read("tools", Shape(TOOLS), "none", "tools that only Anthropic's models know are 400"),
    read("tool_choice", Shape(TOOL_CHOICE), "{\"type\": \"auto\"}", "see \"Tool calls\"; `any` is `required`"),
    read("thinking", Shape(THINKING), "the model's",
        "sets `enable_thinking` and `thinking` of the chat template; how long the model thinks is its own choice"),
    read("output_config", Shape(OUTPUT_CONFIG), "none",
        "`effort` is `reasoning_effort` of a chat, `format` its `response_format`"),
    read("chat_template", Text, "the model's choice", "as in a chat"),
    read("chat_template_kwargs", Object, "none", "as in a chat"),
];

/// What the answer is to be.
#[rustfmt::skip]
const ANSWER_FIELDS: &[Field] = &[
    required("max_tokens", Integer(1, OPEN), "as in a chat"),
    read("stop_sequences", Shape(shapes::STOP_LIST), "none", "`stop` of a chat"),
    read("stream", Bool, "false", ""),
    read("temperature", Number(0.0, TEMPERATURE_MAX), "the model's, else 1", "as in a chat"),
    read("top_p", Number(0.0, 1.0), "the model's, else 1", "as in a chat"),
];

const WITHOUT_EFFECT: &[Field] = &[
    ignored("metadata"),
    ignored("service_tier"),
    ignored("cache_control"),
    ignored("inference_geo"),
    ignored("diagnostics"),
];

/// Fields with a meaning in Anthropic's own service, and OpenAI's names of what is called otherwise here.
const UNSUPPORTED: &[Field] = &[
    unsupported("container", Neutral::Nothing),
    unsupported("output_format", Neutral::Nothing),
    unsupported("response_format", Neutral::Nothing),
    unsupported("context_management", Neutral::Empty),
    unsupported("mcp_servers", Neutral::Empty),
    unsupported("stop", Neutral::Empty),
    unsupported("speed", Neutral::Text(&["standard"])),
    unsupported("n", Neutral::Number(1.0)),
    unsupported("logprobs", Neutral::Bool(false)),
];

/// Text, or content blocks; which blocks a role may hold is validation's to say.
fn content() -> Value {
    let block = json!({"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]});
    json!({"anyOf": [{"type": "string"}, {"type": "array", "items": block}]})
}

const CONVERSATION: shapes::Shape = shapes::Shape {
    words: || "list of messages of `user` and `assistant`, at least one".into(),
    schema: || {
        let message = json!({
            "type": "object",
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": content()},
            "required": ["role", "content"],
        });
        json!({"type": "array", "minItems": 1, "items": message})
    },
};

const SYSTEM: shapes::Shape =
    shapes::Shape { words: || "string, or list of text blocks".into(), schema: content };

const TOOLS: shapes::Shape = shapes::Shape {
    words: || "list of `{\"name\", \"description\", \"input_schema\", \"strict\"}`".into(),
    schema: || {
        let tool = json!({
            "type": "object",
            "properties": {
                "type": {"enum": ["custom", null]},
                "name": {"type": "string"},
                "input_schema": {"type": "object"},
            },
            "required": ["name", "input_schema"],
        });
        json!({"type": "array", "items": tool})
    },
};

const TOOL_CHOICE: shapes::Shape = shapes::Shape {
    words: || {
        "`{\"type\": \"auto\"}`, `any`, `none`, or `tool` with a `name`; `disable_parallel_tool_use`".into()
    },
    schema: || {
        json!({
            "type": "object",
            "properties": {
                "type": {"enum": ["auto", "any", "none", "tool"]},
                "name": {"type": ["string", "null"]},
                "disable_parallel_tool_use": {"type": ["boolean", "null"]},
            },
            "required": ["type"],
        })
    },
};

const THINKING: shapes::Shape = shapes::Shape {
    words: || "`{\"type\": \"enabled\"}`, `disabled` or `adaptive`; `budget_tokens` is checked only".into(),
    schema: || {
        json!({
            "type": "object",
            "properties": {
                "type": {"enum": ["enabled", "disabled", "adaptive"]},
                "budget_tokens": {"type": ["integer", "null"], "minimum": 1},
            },
            "required": ["type"],
        })
    },
};

const OUTPUT_CONFIG: shapes::Shape = shapes::Shape {
    words: || "`{\"effort\", \"format\": {\"type\": \"json_schema\", \"schema\"}}`".into(),
    schema: || {
        let format = json!({
            "type": ["object", "null"],
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            "required": ["type", "schema"],
        });
        json!({"type": "object", "properties": {"effort": {"type": ["string", "null"]}, "format": format}})
    },
};
