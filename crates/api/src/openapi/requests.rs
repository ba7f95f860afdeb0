//! The fields of OpenAI's two generation endpoints, and those that say on every endpoint how an answer is
//! generated.

use super::fields::Kind::{Bool, Integer, Number, Object, Shape, Text, TextOf};
use super::fields::{Field, FieldTable, Kind, Neutral, ignored, read, required, unsupported};
use super::shapes;
use crate::request::limits::{
    CACHE_SALT_BYTES_MAX, N_MAX, PENALTY_MAX, PRIORITY_MAX, REPETITION_MAX, REPETITION_MIN, RID_BYTES_MAX,
    TEMPERATURE_MAX, TOP_LOGPROBS_MAX,
};

/// `/v1/chat/completions`
pub(crate) const CHAT: FieldTable = FieldTable {
    name: "ChatCompletionRequest",
    groups: &[COMMON, CHAT_ONLY, ENGINE, WITHOUT_EFFECT, UNSUPPORTED, UNSUPPORTED_IN_CHAT],
};

/// `/v1/completions`
pub(crate) const COMPLETIONS: FieldTable = FieldTable {
    name: "CompletionRequest",
    groups: &[COMMON, COMPLETIONS_ONLY, ENGINE, WITHOUT_EFFECT, UNSUPPORTED, UNSUPPORTED_IN_COMPLETIONS],
};

/// The largest integer a client may write where nothing smaller is meant.
pub(super) const OPEN: i128 = i64::MAX as i128;

/// Read on both endpoints.
#[rustfmt::skip]
const COMMON: &[Field] = &[
    read("model", Kind::Model, "accepted", "another name is 404"),
    read("stream", Bool, "false", ""),
    read("stream_options", Shape(shapes::STREAM_OPTIONS), "", "without `stream: true` it is 400"),
    read("temperature", Number(0.0, TEMPERATURE_MAX), "the model's, else 1",
        "0 (and anything below 1e-5) is greedy whatever the other fields say"),
    read("top_p", Number(0.0, 1.0), "the model's, else 1", "0 keeps the most likely token only"),
    read("n", Integer(1, N_MAX), "1",
        "answers per prompt, prompts times `n` at most 1024. Choice index: the `n` of the first prompt, then \
         those of the second. See \"Several choices\""),
    read("stop", Shape(shapes::STOP), "none",
        "an empty list is none, an empty string is 400. The stop string is not part of the text, unless \
         `include_stop_str_in_output` says so"),
    read("rid", TextOf(1, RID_BYTES_MAX), "none", NAMES),
    read("request_id", TextOf(1, RID_BYTES_MAX), "none", NAMES),
    read("prompt_logprobs", Integer(0, TOP_LOGPROBS_MAX), "none",
        "alternatives per token of the prompt; see \"Log-probabilities\". With `stream: true` it is 400"),
    read("return_token_ids", Bool, "false", "shows tokens by their ids, see \"Answers\""),
    read("response_format", Shape(shapes::RESPONSE_FORMAT), "text",
        "see \"Structured output\"; `strict` may be anything, the schema is always enforced"),
];

/// What further says how an answer is generated, by the same names on every endpoint, whatever its API.
#[rustfmt::skip]
pub(crate) const ENGINE: &[Field] = &[
    read("min_tokens", Integer(0, u32::MAX as i128), "0", "at most the limit; no end token before, and no stop string that these tokens complete"),
    read("top_k", Integer(-1, OPEN), "the model's, else off", "-1 and 0 mean off"),
    read("min_p", Number(0.0, 1.0), "the model's, else 0", ""),
    read("seed", Integer(i64::MIN as i128, u64::MAX as i128), "random",
        "the same seed gives the same text at any batch size. Several prompts use the same seed"),
    read("presence_penalty", Number(-PENALTY_MAX, PENALTY_MAX), "0", PENALTIES),
    read("frequency_penalty", Number(-PENALTY_MAX, PENALTY_MAX), "0", PENALTIES),
    read("repetition_penalty", Number(REPETITION_MIN, REPETITION_MAX), "1",
        "divides positive and multiplies negative logits of tokens in prompt or answer"),
    read("logit_bias", Shape(shapes::LOGIT_BIAS), "none", "added before the penalties"),
    read("allowed_token_ids", Shape(shapes::ALLOWED_TOKEN_IDS), "all", "nothing else is chosen"),
    read("bad_words", Shape(shapes::BAD_WORDS), "none",
        "the answer holds none of the token sequences that spell them, at the beginning of a text or behind a \
         space; another way of spelling the same letters remains possible, as in vLLM. Not with a form (400)"),
    read("include_stop_str_in_output", Bool, "false", KEEPS_STOP),
    read("no_stop_trim", Bool, "false", KEEPS_STOP),
    read("add_special_tokens", Bool, "completions: true; chat: false",
        "adds what the tokenizer adds, mostly the beginning-of-text token, and never a second one; chat templates \
         write it themselves. Token ids stay as they are"),
    read("truncate_prompt_tokens", Integer(-1, OPEN), "the whole prompt",
        "the last so many tokens of the prompt are used, at least 1; -1: as many as fit the context"),
    read("stop_token_ids", Shape(shapes::STOP_TOKEN_IDS), "none", ""),
    read("ignore_eos", Bool, "false", "no end token of the model stops the answer"),
    read("skip_special_tokens", Bool, "true", "left out by id, never by text"),
    read("cache_salt", TextOf(1, CACHE_SALT_BYTES_MAX), "none",
        "cached prefixes are shared only among requests with the same salt"),
    read("priority", Integer(-PRIORITY_MAX, PRIORITY_MAX), "0", "larger is admitted earlier"),
    read("timing", Bool, "false", "see \"Timing\""),
    read("structured_outputs", Shape(shapes::STRUCTURED_OUTPUTS), "none", ""),
    read("guided_json", Shape(shapes::SCHEMA), "none", ""),
    read("json_schema", Shape(shapes::SCHEMA), "none", ""),
    read("guided_regex", Text, "none", "the whole answer matches it"),
    read("regex", Text, "none", "the whole answer matches it"),
    read("guided_choice", Shape(shapes::CHOICE), "none", "the answer is one of them"),
    read("guided_grammar", Text, "none", GRAMMARS),
    read("ebnf", Text, "none", GRAMMARS),
];

const NAMES: &str = "the client's own id: `/abort_request` knows the answer by it too";
const PENALTIES: &str =
    "subtracted from the logits of tokens that the answer holds: once, and once per occurrence";
const GRAMMARS: &str = "a grammar in llguidance's Lark dialect, or in GBNF where it holds `::=` (rule `root`, \
    literals, classes, `.`, groups, `*`, `+`, `?`, `{m,n}`, comments; references to tokens, `<...>`, are 400)";
const KEEPS_STOP: &str = "keeps the stop string, and the token of `stop_token_ids` that ended the answer, in the text; vLLM's and \
     SGLang's name";

/// Read on `/v1/chat/completions` only.
#[rustfmt::skip]
const CHAT_ONLY: &[Field] = &[
    required("messages", Shape(shapes::MESSAGES), "see \"Messages\""),
    read("max_tokens", Integer(1, OPEN), "until an end token or the context is full",
        "more than the context holds is not an error: the answer ends when the context is full, with `length`"),
    read("max_completion_tokens", Integer(1, OPEN), "", "wins over `max_tokens`"),
    read("logprobs", Bool, "false", "see \"Log-probabilities\""),
    read("top_logprobs", Integer(0, TOP_LOGPROBS_MAX), "0", "needs `logprobs: true`"),
    read("add_generation_prompt", Bool, "true", ""),
    read("continue_final_message", Bool, "false",
        "the answer goes on with the last message; no generation prompt is added, and \
         `add_generation_prompt: true` beside it is 400"),
    read("tools", Shape(shapes::TOOLS), "none",
        "shown to the chat template, null fields left out; names are 1 to 64 of letters, digits, `_`, `-`, `.`. \
         400 where the model's way to write calls is not known (`--tool-call-parser` names it). `strict` may be \
         anything: schemas are enforced where the call is forced"),
    read("tool_choice", Shape(shapes::TOOL_CHOICE), "\"auto\"", "see \"Tool calls\""),
    read("parallel_tool_calls", Bool, "true", "false: calls behind the first one are left out of the answer"),
    read("documents", Shape(shapes::DOCUMENTS), "none", "for templates that take documents"),
    read("chat_template", Text, "the model's choice",
        "the name of one of the model's templates; the text of a template is 400"),
    read("reasoning_effort", Text, "the model's choice",
        "a variable of the chat templates that know it; `none` also turns off `enable_thinking` and `thinking`"),
    read("separate_reasoning", Bool, "true", "false leaves reasoning in the text, tags included"),
    read("include_reasoning", Bool, "true",
        "false leaves reasoning out of the answer; its tokens are counted. Not with `separate_reasoning: false`"),
    read("chat_template_kwargs", Object, "none", "further variables of the chat template"),
];

/// Read on `/v1/completions` only.
#[rustfmt::skip]
const COMPLETIONS_ONLY: &[Field] = &[
    required("prompt", Shape(shapes::PROMPT),
        "several prompts (at most 128) become several choices, each answered as if asked alone; counts are added \
         up. Token ids must be below the vocabulary size"),
    read("max_tokens", Integer(0, OPEN), "16", "at least 1, but with `echo` or `prompt_logprobs` 0 too: no generated token is shown or counted, \
         `finish_reason` is `length`. Otherwise as in a chat"),
    read("best_of", Integer(1, N_MAX), "", "equal to `n`: answers are not ranked"),
    read("logprobs", Integer(0, TOP_LOGPROBS_MAX), "none",
        "alternatives per token; 0 gives the token's own only"),
    read("echo", Bool, "false",
        "the answer begins with the prompt's text, decoded from its tokens; with `logprobs` also their \
         log-probabilities"),
];

/// Known and without effect on the answer here: bookkeeping of the client or of OpenAI's service.
const WITHOUT_EFFECT: &[Field] = &[
    ignored("user"),
    ignored("metadata"),
    ignored("store"),
    ignored("service_tier"),
    ignored("safety_identifier"),
    ignored("prompt_cache_key"),
    ignored("prompt_cache_retention"),
    // No space is ever put between special tokens, as in the library that fast tokenizers use.
    ignored("spaces_between_special_tokens"),
];

/// Fields with a meaning in OpenAI's, vLLM's or SGLang's API that this server does not have.
const UNSUPPORTED: &[Field] = &[
    unsupported("use_beam_search", Neutral::Bool(false)),
    unsupported("early_stopping", Neutral::Bool(false)),
    unsupported("return_hidden_states", Neutral::Bool(false)),
    unsupported("return_tokens_as_token_ids", Neutral::Bool(false)),
    unsupported("length_penalty", Neutral::Number(1.0)),
    unsupported("suffix", Neutral::Empty),
    unsupported("stop_regex", Neutral::Empty),
    unsupported("functions", Neutral::Former("tools")),
    unsupported("function_call", Neutral::Former("tool_choice")),
    unsupported("modalities", Neutral::TextModality),
    unsupported("verbosity", Neutral::Nothing),
    unsupported("audio", Neutral::Nothing),
    unsupported("prediction", Neutral::Nothing),
    unsupported("web_search_options", Neutral::Nothing),
    unsupported("prompt_embeds", Neutral::Nothing),
    unsupported("lora_path", Neutral::Nothing),
    // A server's limit is a flag; a client that wants less leaves, which ends its request.
    unsupported("timeout", Neutral::Nothing),
    unsupported("request_timeout", Neutral::Nothing),
];

/// Fields that completions have.
const UNSUPPORTED_IN_CHAT: &[Field] =
    &[unsupported("best_of", Neutral::Number(1.0)), unsupported("echo", Neutral::Bool(false))];

/// Fields that chats have, or that have no meaning without tools.
const UNSUPPORTED_IN_COMPLETIONS: &[Field] = &[
    unsupported("reasoning_effort", Neutral::Nothing),
    unsupported("separate_reasoning", Neutral::Bool(true)),
    unsupported("include_reasoning", Neutral::Bool(true)),
    unsupported("top_logprobs", Neutral::Number(0.0)),
    unsupported("continue_final_message", Neutral::Bool(false)),
    unsupported("tools", Neutral::Empty),
    unsupported("documents", Neutral::Empty),
    unsupported("tool_choice", Neutral::Text(&["none", "auto"])),
    unsupported("chat_template", Neutral::Nothing),
    ignored("parallel_tool_calls"),
];
