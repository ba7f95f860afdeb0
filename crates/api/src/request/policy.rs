//! The field policy of the design: unknown fields are accepted, counted and logged once (or
//! refused with `--strict-api`); fields that are known elsewhere but not supported here are
//! refused unless null or at the value that changes nothing.

use lockstep_core::Refusal;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Different unknown names that are logged; later ones are only counted.
const NAMES_LOGGED_MAX: usize = 64;
/// Characters of a client's own text that are repeated in messages and logs.
const QUOTED_CHARS_MAX: usize = 64;

/// The fields of a kind of request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldTable {
    /// Read by this server.
    pub(crate) read: &'static [&'static [&'static str]],
    /// Known and without effect on the answer here: bookkeeping of the client or of the API's own service.
    pub(crate) without_effect: &'static [&'static str],
    /// With a meaning elsewhere that this server does not have.
    pub(crate) unsupported: &'static [(&'static str, Neutral)],
}

/// `/v1/chat/completions`
pub(crate) const CHAT_FIELDS: FieldTable =
    FieldTable { read: &[COMMON, ENGINE, CHAT], without_effect: WITHOUT_EFFECT, unsupported: UNSUPPORTED };
/// `/v1/completions`
pub(crate) const COMPLETIONS_FIELDS: FieldTable =
    FieldTable { read: &[COMMON, ENGINE, COMPLETIONS], ..CHAT_FIELDS };

/// Read on both endpoints.
const COMMON: &[&str] = &[
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "n",
    "logprobs",
    "response_format",
];
/// What further says how an answer is generated, by the same names on every endpoint, whatever its API.
pub(crate) const ENGINE: &[&str] = &[
    "min_tokens",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "cache_salt",
    "priority",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "ebnf",
    "json_schema",
    "timing",
];
/// Read on `/v1/chat/completions` only.
const CHAT: &[&str] = &[
    "messages",
    "max_completion_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "top_logprobs",
];
/// Read on `/v1/completions` only.
const COMPLETIONS: &[&str] = &["prompt", "echo", "best_of"];
/// See [`FieldTable::without_effect`].
const WITHOUT_EFFECT: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "request_id",
];

/// The value at which an unsupported field changes nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Neutral {
    /// Only null.
    Nothing,
    Bool(bool),
    Number(f64),
    /// An empty string, list or object.
    Empty,
    /// One of these strings.
    Text(&'static [&'static str]),
    /// `["text"]`
    TextModality,
    /// As [`Neutral::Empty`], or `"none"` or `"auto"`: OpenAI's former name of this field.
    Former(&'static str),
}

/// Fields with a meaning in OpenAI's, vLLM's or SGLang's API.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("best_of", Neutral::Number(1.0)),
    ("echo", Neutral::Bool(false)),
    ("suffix", Neutral::Empty),
    ("top_logprobs", Neutral::Number(0.0)),
    ("prompt_logprobs", Neutral::Nothing),
    ("length_penalty", Neutral::Number(1.0)),
    ("use_beam_search", Neutral::Bool(false)),
    ("early_stopping", Neutral::Bool(false)),
    ("bad_words", Neutral::Empty),
    ("include_stop_str_in_output", Neutral::Bool(false)),
    ("no_stop_trim", Neutral::Bool(false)),
    ("spaces_between_special_tokens", Neutral::Bool(true)),
    ("truncate_prompt_tokens", Neutral::Nothing),
    ("add_special_tokens", Neutral::Bool(true)),
    ("tools", Neutral::Empty),
    ("tool_choice", Neutral::Text(&["none", "auto"])),
    ("functions", Neutral::Former("tools")),
    ("function_call", Neutral::Former("tool_choice")),
    ("reasoning_effort", Neutral::Nothing),
    ("verbosity", Neutral::Nothing),
    ("modalities", Neutral::TextModality),
    ("audio", Neutral::Nothing),
    ("prediction", Neutral::Nothing),
    ("web_search_options", Neutral::Nothing),
    ("chat_template", Neutral::Nothing),
    ("continue_final_message", Neutral::Bool(false)),
    ("documents", Neutral::Empty),
    ("return_token_ids", Neutral::Bool(false)),
    ("return_tokens_as_token_ids", Neutral::Bool(false)),
    ("prompt_embeds", Neutral::Nothing),
    ("lora_path", Neutral::Nothing),
];

impl Neutral {
    fn accepts(self, value: &Value) -> bool {
        match self {
            Neutral::Nothing => false,
            Neutral::Bool(neutral) => value.as_bool() == Some(neutral),
            Neutral::Number(neutral) => value.as_f64() == Some(neutral),
            Neutral::Empty => match value {
                Value::String(text) => text.is_empty(),
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            },
            Neutral::Text(texts) => value.as_str().is_some_and(|text| texts.contains(&text)),
            Neutral::Former(_) => Neutral::Empty.accepts(value) || value == "none" || value == "auto",
            Neutral::TextModality => {
                matches!(value.as_array().map(Vec::as_slice), Some([one]) if one == "text")
            }
        }
    }

    fn in_words(self) -> String {
        match self {
            Neutral::Nothing => "leave it out".into(),
            Neutral::Bool(neutral) => format!("leave it out or send {neutral}"),
            Neutral::Number(neutral) => format!("leave it out or send {neutral}"),
            Neutral::Empty => "leave it out or send it empty".into(),
            Neutral::Text(texts) => format!("leave it out or send {:?}", texts[0]),
            Neutral::TextModality => "leave it out or send [\"text\"]".into(),
            Neutral::Former(now) => format!("it is OpenAI's former way to say {now}; send {now} instead"),
        }
    }
}

/// Counts unknown fields over the life of the server.
#[derive(Debug, Default)]
pub(crate) struct FieldPolicy {
    unknown: AtomicU64,
    logged: Mutex<BTreeSet<String>>,
}

impl FieldPolicy {
    /// Checks the names of a request, and the values of unsupported fields.
    pub(crate) fn check(
        &self,
        table: &FieldTable,
        body: &Map<String, Value>,
        strict: bool,
    ) -> Result<(), Refusal> {
        for (name, value) in body {
            let name = name.as_str();
            if table.read.iter().chain([&table.without_effect]).any(|names| names.contains(&name)) {
                continue;
            }
            match table.unsupported.iter().find(|(unsupported, _)| *unsupported == name) {
                Some((_, neutral)) if !value.is_null() => check_neutral(name, value, *neutral)?,
                Some(_) => {}
                None => self.unknown_field(name, strict)?,
            }
        }
        Ok(())
    }

    fn unknown_field(&self, name: &str, strict: bool) -> Result<(), Refusal> {
        let shown = shorten(name);
        if strict {
            let message = format!("{shown:?} is not a field of this request; leave it out (--strict-api)");
            return Err(Refusal::invalid_param(shown, message).with_code("unknown_field"));
        }
        self.unknown.fetch_add(1, Ordering::Relaxed);
        let mut logged = self.logged.lock().expect("invariant: nothing panics while holding it");
        if logged.len() < NAMES_LOGGED_MAX && !logged.contains(&shown) {
            tracing::warn!(field = shown, "unknown request field ignored; logged once");
            logged.insert(shown);
        }
        Ok(())
    }

    /// Unknown fields seen so far.
    pub(crate) fn unknown(&self) -> u64 {
        self.unknown.load(Ordering::Relaxed)
    }
}

fn check_neutral(name: &str, value: &Value, neutral: Neutral) -> Result<(), Refusal> {
    if neutral.accepts(value) {
        return Ok(());
    }
    let message = format!("{name} is not supported by this server; {}", neutral.in_words());
    Err(Refusal::invalid_param(name, message).with_code("unsupported_field"))
}

/// A client's own text, short enough for a message.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}
