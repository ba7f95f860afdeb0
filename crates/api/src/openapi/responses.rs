//! The fields of requests for responses.

use super::fields::Kind::{self, Bool, Integer, Number, Object, Shape, Text};
use super::fields::{Field, FieldTable, Neutral, ignored, read, required, unsupported};
use super::requests::{ENGINE, OPEN};
use super::shapes;
use crate::request::limits::{TEMPERATURE_MAX, TOOLS_MAX, TOP_LOGPROBS_MAX};
use serde_json::{Value, json};

/// `/v1/responses`
pub(crate) const RESPONSES: FieldTable =
    FieldTable { name: "ResponsesRequest", groups: &[OWN, ENGINE, WITHOUT_EFFECT, UNSUPPORTED] };

#[rustfmt::skip]
const OWN: &[Field] = &[
    read("model", Kind::Model, "accepted", "another name is 404"),
    required("input", Shape(INPUT), "see \"Responses\""),
    read("instructions", Text, "none", "becomes a system message in front"),
    read("stream", Bool, "false", ""),
    read("max_output_tokens", Integer(1, OPEN), "until an end token or the context is full",
        "`max_completion_tokens` of a chat"),
    read("temperature", Number(0.0, TEMPERATURE_MAX), "the model's, else 1", "as in a chat"),
    read("top_p", Number(0.0, 1.0), "the model's, else 1", "as in a chat"),
    read("stop", Shape(shapes::STOP), "none", "as in a chat"),
    read("top_logprobs", Integer(0, TOP_LOGPROBS_MAX), "0", "above 0 it asks for log-probabilities"),
    read("include", Shape(INCLUDE), "none",
        "`message.output_text.logprobs` asks for log-probabilities; the others change nothing here"),
    read("text", Shape(TEXT), "text", "`format` is `response_format` of a chat"),
    read("reasoning", Shape(REASONING), "the model's choice",
        "`effort` is `reasoning_effort` of a chat; reasoning comes as it is, never as a summary"),
    read("tools", Shape(TOOLS), "none", "tools that run on OpenAI's servers are 400"),
    read("tool_choice", Shape(TOOL_CHOICE), "\"auto\"", "see \"Tool calls\""),
    read("parallel_tool_calls", Bool, "true", "as in a chat"),
    read("store", Bool, "false", "accepted, but nothing is kept"),
    read("background", Shape(NOT_TRUE), "false", "true is 400, since nothing is kept"),
    read("previous_response_id", Shape(NOTHING), "none", "400, since nothing is kept"),
    read("conversation", Shape(NOTHING), "none", "400, since nothing is kept"),
    read("chat_template", Text, "the model's choice", "as in a chat"),
    read("chat_template_kwargs", Object, "none", "as in a chat"),
];

const WITHOUT_EFFECT: &[Field] = &[
    ignored("metadata"),
    ignored("user"),
    ignored("service_tier"),
    ignored("safety_identifier"),
    ignored("prompt_cache_key"),
    ignored("prompt_cache_retention"),
    ignored("prompt_cache_options"),
    ignored("stream_options"),
    ignored("max_tool_calls"),
];

/// Fields with a meaning in OpenAI's own service, and chat's names of what is called otherwise here.
const UNSUPPORTED: &[Field] = &[
    unsupported("prompt", Neutral::Nothing),
    unsupported("moderation", Neutral::Nothing),
    unsupported("max_tokens", Neutral::Nothing),
    unsupported("response_format", Neutral::Nothing),
    unsupported("context_management", Neutral::Empty),
    unsupported("messages", Neutral::Empty),
    unsupported("truncation", Neutral::Text(&["disabled"])),
    unsupported("n", Neutral::Number(1.0)),
];

const INPUT: shapes::Shape = shapes::Shape {
    words: || "string, or list of items, at least one".into(),
    schema: || {
        let item = json!({"type": "object", "properties": {"type": {"enum":
            ["message", "reasoning", "function_call", "function_call_output", null]}}});
        json!({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": item}]})
    },
};

const INCLUDE: shapes::Shape = shapes::Shape {
    words: || "list of OpenAI's values".into(),
    schema: || json!({"type": "array", "items": {"enum": crate::dialect::RESPONSE_INCLUDES}}),
};

const TEXT: shapes::Shape = shapes::Shape {
    words: || {
        "`{\"format\"}`: `{\"type\": \"text\"}`, `json_object`, or `json_schema` with `name`, `schema`, `strict`"
            .into()
    },
    schema: || {
        let kinds = json!({"type": ["object", "null"], "required": ["type"], "anyOf": [
            {"properties": {"type": {"enum": ["text", "json_object"]}}},
            {"properties": {"type": {"const": "json_schema"}}, "required": ["schema"]},
        ]});
        json!({"type": "object", "properties": {"format": kinds, "verbosity": {"enum": ["medium", null]}}})
    },
};

const REASONING: shapes::Shape = shapes::Shape {
    words: || "`{\"effort\"}`".into(),
    schema: || json!({"type": "object", "properties": {"effort": {"type": ["string", "null"]}}}),
};

const TOOLS: shapes::Shape = shapes::Shape {
    words: || {
        format!(
            "list of up to {TOOLS_MAX} `{{\"type\": \"function\", \"name\", \"description\", \"parameters\", \
             \"strict\"}}`"
        )
    },
    schema: || {
        let tool = json!({
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        });
        json!({"type": "array", "items": tool, "maxItems": TOOLS_MAX})
    },
};

const TOOL_CHOICE: shapes::Shape = shapes::Shape {
    words: || "`\"auto\"`, `\"none\"`, `\"required\"`, `{\"type\": \"function\", \"name\"}`".into(),
    schema: || {
        json!({"anyOf": [
            {"enum": ["auto", "none", "required"]},
            {"type": "object", "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
                "required": ["type", "name"]},
        ]})
    },
};

const NOT_TRUE: shapes::Shape =
    shapes::Shape { words: || "false".into(), schema: || json!({"const": false}) };

const NOTHING: shapes::Shape =
    shapes::Shape { words: || "null".into(), schema: || Value::from_iter([("type", "null")]) };
