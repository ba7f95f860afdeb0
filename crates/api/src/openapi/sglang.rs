//! The fields of SGLang's requests.

use super::fields::Kind::{self, Bool, Integer, Number, Shape, TextOf};
use super::fields::{Field, FieldTable, Neutral, body_schema, ignored, read, unsupported};
use super::requests::{ENGINE, OPEN};
use super::shapes;
use crate::request::limits::{
    CACHE_SALT_BYTES_MAX, N_MAX, PRIORITY_MAX, RID_BYTES_MAX, TEMPERATURE_MAX, TOP_LOGPROBS_MAX,
};
use serde_json::json;

/// `/generate`
pub(crate) const GENERATE: FieldTable =
    FieldTable { name: "GenerateRequest", groups: &[OWN, WITHOUT_EFFECT, UNSUPPORTED] };

/// `sampling_params`
pub(crate) const SAMPLING: FieldTable = FieldTable {
    name: "SamplingParams",
    groups: &[SAMPLING_OWN, ENGINE, SAMPLING_WITHOUT_EFFECT, SAMPLING_UNSUPPORTED],
};

#[rustfmt::skip]
const OWN: &[Field] = &[
    read("text", Shape(TEXT), "this or `input_ids`", "a list is answered with a list"),
    read("input_ids", Shape(INPUT_IDS), "", "a list of lists is answered with a list"),
    read("sampling_params", Shape(SAMPLING_PARAMS), "the model's", "see below"),
    read("stream", Bool, "false", "events are cumulative"),
    read("rid", Shape(RID), "made up",
        "the answer's `meta_info.id`, which `/abort_request` knows; `_0`, `_1`, ... follow with `n` above 1"),
    read("return_logprob", Bool, "false", ""),
    read("top_logprobs_num", Integer(0, TOP_LOGPROBS_MAX), "0", "needs `return_logprob: true`"),
    read("logprob_start_len", Integer(-1, OPEN), "-1",
        "from 0 on also the prompt's, from that token on; the whole prompt is then computed. -1: the answer's only"),
    read("return_text_in_logprobs", Bool, "false", "the third value of an entry is the token's text, else null"),
    read("model", Kind::Model, "accepted", "another name is 404"),
    read("cache_salt", TextOf(1, CACHE_SALT_BYTES_MAX), "none", "as above"),
    read("extra_key", TextOf(1, CACHE_SALT_BYTES_MAX), "none", "another name of `cache_salt`"),
    read("priority", Integer(-PRIORITY_MAX, PRIORITY_MAX), "0", "larger is admitted earlier"),
];

const WITHOUT_EFFECT: &[Field] =
    &[ignored("log_metrics"), ignored("user"), ignored("conversation_id"), ignored("background")];

const UNSUPPORTED: &[Field] = &[
    unsupported("image_data", Neutral::Empty),
    unsupported("video_data", Neutral::Empty),
    unsupported("audio_data", Neutral::Empty),
    unsupported("modalities", Neutral::TextModality),
    unsupported("input_embeds", Neutral::Nothing),
    unsupported("token_ids_logprob", Neutral::Empty),
    unsupported("lora_path", Neutral::Nothing),
    unsupported("session_params", Neutral::Nothing),
    unsupported("custom_logit_processor", Neutral::Nothing),
    unsupported("return_hidden_states", Neutral::Bool(false)),
    unsupported("return_routed_experts", Neutral::Bool(false)),
    unsupported("bootstrap_host", Neutral::Nothing),
    unsupported("bootstrap_port", Neutral::Nothing),
    unsupported("bootstrap_room", Neutral::Nothing),
    unsupported("data_parallel_rank", Neutral::Nothing),
];

#[rustfmt::skip]
const SAMPLING_OWN: &[Field] = &[
    read("max_new_tokens", Integer(0, OPEN), "128", "`max_tokens` of a completion; 0 generates nothing"),
    read("min_new_tokens", Integer(0, u32::MAX as i128), "0", "`min_tokens`"),
    read("sampling_seed", Integer(i64::MIN as i128, u64::MAX as i128), "random", "`seed`"),
    read("temperature", Number(0.0, TEMPERATURE_MAX), "the model's, else 1", ""),
    read("top_p", Number(0.0, 1.0), "the model's, else 1", ""),
    read("stop", Shape(shapes::STOP), "none", ""),
    read("n", Integer(1, N_MAX), "1", "above 1 the answer is a list"),
];

const SAMPLING_WITHOUT_EFFECT: &[Field] =
    &[ignored("stream_interval"), ignored("spaces_between_special_tokens")];

const SAMPLING_UNSUPPORTED: &[Field] = &[
    unsupported("stop_regex", Neutral::Empty),
    unsupported("structural_tag", Neutral::Nothing),
    unsupported("custom_params", Neutral::Nothing),
];

const TEXT: shapes::Shape = shapes::Shape {
    words: || "string; list of strings".into(),
    schema: || json!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
};

const INPUT_IDS: shapes::Shape = shapes::Shape {
    words: || "list of token ids; list of such lists".into(),
    schema: || {
        let ids = json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1});
        json!({"anyOf": [ids, {"type": "array", "items": ids, "minItems": 1}]})
    },
};

const SAMPLING_PARAMS: shapes::Shape =
    shapes::Shape { words: || "object".into(), schema: || body_schema(&SAMPLING) };

const RID: shapes::Shape = shapes::Shape {
    words: || format!("string of 1 to {RID_BYTES_MAX} bytes; a list of them for several prompts"),
    schema: || {
        let text = json!({"type": "string", "minLength": 1, "maxLength": RID_BYTES_MAX});
        json!({"anyOf": [text, {"type": "array", "items": text, "minItems": 1}]})
    },
};
