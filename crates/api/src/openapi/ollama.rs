//! The fields of Ollama's requests.

use super::fields::Kind::{Bool, Integer, Number, Shape, Text};
use super::fields::{Field, FieldTable, Neutral, body_schema, ignored, read, unsupported};
use super::requests::OPEN;
use super::shapes;
use crate::request::limits::{
    PENALTY_MAX, REPETITION_MAX, REPETITION_MIN, TEMPERATURE_MAX, TOP_LOGPROBS_MAX,
};
use serde_json::json;

/// `/api/chat`
pub(crate) const CHAT: FieldTable =
    FieldTable { name: "OllamaChatRequest", groups: &[CHAT_OWN, COMMON, WITHOUT_EFFECT] };

/// `/api/generate`
pub(crate) const GENERATE: FieldTable = FieldTable {
    name: "OllamaGenerateRequest",
    groups: &[GENERATE_OWN, COMMON, WITHOUT_EFFECT, UNSUPPORTED_IN_GENERATE],
};

/// `options`
pub(crate) const OPTIONS: FieldTable =
    FieldTable { name: "OllamaOptions", groups: &[OPTIONS_OWN, OPTIONS_WITHOUT_EFFECT, OPTIONS_UNSUPPORTED] };

/// `/api/show`
pub(crate) const SHOW: FieldTable = FieldTable { name: "OllamaShowRequest", groups: &[SHOW_OWN] };

#[rustfmt::skip]
const CHAT_OWN: &[Field] = &[
    read("messages", Shape(MESSAGES), "as empty",
        "an empty list asks for no text, see below; as in OpenAI's chat, but calls hold their arguments as objects; `thinking` reaches the template as \
         `reasoning_content`, `tool_name` as `name`; `images` are 400. A last message of the assistant's is continued"),
    read("tools", Shape(shapes::TOOLS), "none", "as in OpenAI's chat"),
];

#[rustfmt::skip]
const GENERATE_OWN: &[Field] = &[
    read("prompt", Text, "as empty", "a chat of one message behind the system's; an empty one asks for no text, see below"),
    read("system", Text, "none", ""),
    read("raw", Bool, "false",
        "the prompt as it is, also where the model has no chat template; `system` is then 400"),
];

#[rustfmt::skip]
const COMMON: &[Field] = &[
    read("model", Shape(MODEL), "accepted", "another name is 404"),
    read("think", Shape(THINK), "the model's",
        "`enable_thinking`, `thinking` and `reasoning_effort` of the template; true is 400 where it shows no reasoning"),
    read("format", Shape(FORMAT), "text", "see \"Structured output\""),
    read("options", Shape(OPTIONS_SHAPE), "the model's", "what is absent has the model's default, not Ollama's"),
    read("stream", Bool, "true", ""),
    read("logprobs", Bool, "false", "see \"Log-probabilities\": those of a chat, beside the text they belong to"),
    read("top_logprobs", Integer(0, TOP_LOGPROBS_MAX), "0", "needs `logprobs: true`"),
];

const WITHOUT_EFFECT: &[Field] = &[ignored("keep_alive"), ignored("truncate"), ignored("shift")];

const UNSUPPORTED_IN_GENERATE: &[Field] = &[
    unsupported("suffix", Neutral::Empty),
    unsupported("images", Neutral::Empty),
    unsupported("template", Neutral::Empty),
    unsupported("context", Neutral::Empty),
];

#[rustfmt::skip]
const OPTIONS_OWN: &[Field] = &[
    read("num_predict", Integer(-2, OPEN), "-1", "-1 and -2: until an end token or the context is full"),
    read("num_ctx", Integer(1, OPEN), "", "without effect: the context is the server's, and a prompt that is longer is 400"),
    read("temperature", Number(0.0, TEMPERATURE_MAX), "the model's, else 1", ""),
    read("top_k", Integer(-1, OPEN), "the model's, else off", ""),
    read("top_p", Number(0.0, 1.0), "the model's, else 1", ""),
    read("min_p", Number(0.0, 1.0), "the model's, else 0", ""),
    read("seed", Integer(i64::MIN as i128, u64::MAX as i128), "random", ""),
    read("stop", Shape(shapes::STOP), "none", ""),
    read("repeat_penalty", Number(REPETITION_MIN, REPETITION_MAX), "1", "`repetition_penalty`"),
    read("repeat_last_n", Integer(-1, OPEN), "-1",
        "0 turns the three penalties off; they look at the whole text otherwise, never at a shorter window"),
    read("presence_penalty", Number(-PENALTY_MAX, PENALTY_MAX), "0", ""),
    read("frequency_penalty", Number(-PENALTY_MAX, PENALTY_MAX), "0", ""),
];

/// Resources that the server has already decided on, and details of what it does not do: mirostat is refused unless it
/// is off, and penalties treat line feeds like other tokens.
const OPTIONS_WITHOUT_EFFECT: &[Field] = &[
    ignored("mirostat_eta"),
    ignored("mirostat_tau"),
    ignored("penalize_newline"),
    ignored("num_keep"),
    ignored("num_batch"),
    ignored("num_gpu"),
    ignored("main_gpu"),
    ignored("num_thread"),
    ignored("numa"),
    ignored("use_mmap"),
    ignored("use_mlock"),
    ignored("low_vram"),
    ignored("vocab_only"),
    ignored("f16_kv"),
    ignored("logits_all"),
    ignored("embedding_only"),
];

const OPTIONS_UNSUPPORTED: &[Field] = &[
    unsupported("typical_p", Neutral::Number(1.0)),
    unsupported("tfs_z", Neutral::Number(1.0)),
    unsupported("mirostat", Neutral::Number(0.0)),
];

#[rustfmt::skip]
const SHOW_OWN: &[Field] = &[
    read("model", Shape(MODEL), "this or `name`", "another name is 404"),
    read("name", Shape(MODEL), "", "another name of `model`"),
    ignored("verbose"),
    ignored("system"),
    ignored("options"),
];

const MODEL: shapes::Shape = shapes::Shape {
    words: || "the served name, with `:latest` behind it or without".into(),
    schema: || json!({"type": "string"}),
};

const MESSAGES: shapes::Shape = shapes::Shape {
    words: || "list".into(),
    schema: || {
        let message = json!({
            "type": "object",
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "images": {"type": ["array", "null"], "maxItems": 0},
                "tool_calls": {"type": ["array", "null"]},
            },
            "required": ["role"],
        });
        json!({"type": "array", "items": message})
    },
};

const THINK: shapes::Shape = shapes::Shape {
    words: || "bool, `\"low\"`, `\"medium\"`, `\"high\"`".into(),
    schema: || json!({"enum": [true, false, "low", "medium", "high"]}),
};

const FORMAT: shapes::Shape = shapes::Shape {
    words: || "`\"json\"`, a JSON schema".into(),
    schema: || json!({"anyOf": [{"enum": ["json", ""]}, {"type": "object"}]}),
};

const OPTIONS_SHAPE: shapes::Shape =
    shapes::Shape { words: || "object".into(), schema: || body_schema(&OPTIONS) };
