//! SGLang's native `POST /generate`.
//!
//! A request is one prompt or several, as text or token ids, with everything about sampling in
//! `sampling_params`. It is read as a completion. A stream's events are cumulative, as SGLang's are: each holds
//! the whole text of its choice so far. `data: [DONE]` comes last, but not behind an error.

mod answer;

use super::{Dialect, Reading, inside};
use crate::answer::{Form, Label};
use crate::fields::{Fields, kind};
use crate::openapi::{fields::FieldTable, sglang};
use crate::request::limits::RID_BYTES_MAX;
use crate::request::{Call, Endpoint, Names, validate};
use answer::{Answer, Wish};
use lockstep_core::Refusal;
use serde_json::{Map, Value};

/// Tokens of an answer when the request does not say, as SGLang has it.
const MAX_NEW_TOKENS: u32 = 128;
/// `POST /generate`
#[derive(Debug)]
pub(crate) enum Generate {}

/// What `sampling_params` and completions call differently.
const RENAMED: &[(&str, &str)] =
    &[("max_new_tokens", "max_tokens"), ("min_new_tokens", "min_tokens"), ("sampling_seed", "seed")];

/// For requests with `input_ids`.
const NAMES_OF_IDS: Names = Names(&[("prompt", "input_ids"), ("messages", "input_ids")]);

impl Dialect for Generate {
    const NAMES: Names = Names(&[
        ("prompt", "text"),
        ("messages", "text"),
        ("logprobs", "top_logprobs_num"),
        ("prompt_logprobs", "top_logprobs_num"),
        ("max_tokens", "sampling_params.max_new_tokens"),
        ("min_tokens", "sampling_params.min_new_tokens"),
        ("seed", "sampling_params.sampling_seed"),
        ("n", "sampling_params.n"),
        ("temperature", "sampling_params.temperature"),
        ("top_p", "sampling_params.top_p"),
        ("top_k", "sampling_params.top_k"),
        ("min_p", "sampling_params.min_p"),
        ("stop", "sampling_params.stop"),
        ("stop_token_ids", "sampling_params.stop_token_ids"),
        ("ignore_eos", "sampling_params.ignore_eos"),
        ("skip_special_tokens", "sampling_params.skip_special_tokens"),
        ("presence_penalty", "sampling_params.presence_penalty"),
        ("frequency_penalty", "sampling_params.frequency_penalty"),
        ("repetition_penalty", "sampling_params.repetition_penalty"),
        ("logit_bias", "sampling_params.logit_bias"),
        ("allowed_token_ids", "sampling_params.allowed_token_ids"),
        ("structured_outputs", "sampling_params.structured_outputs"),
        ("json_schema", "sampling_params.json_schema"),
        ("regex", "sampling_params.regex"),
        ("ebnf", "sampling_params.ebnf"),
        // The tokenizer does not know which field asked for a form.
        ("response_format", "sampling_params"),
    ]);

    const FIELDS: FieldTable = sglang::GENERATE;
    type Echo = Wish;

    fn read(body: Map<String, Value>, reading: &Reading<'_>) -> Result<(Call, Wish), Refusal> {
        let strict = reading.config.strict_api;
        reading.policy.check(&Self::FIELDS, &body, strict)?;
        let fields = Fields::new(&body, "");
        let none = Map::new();
        let sampling = fields.object("sampling_params")?.unwrap_or(&none);
        reading
            .policy
            .check(&sglang::SAMPLING, sampling, strict)
            .map_err(|refusal| inside("sampling_params.", refusal))?;
        let mut translated = translate(&fields, sampling)?;
        let mut wish = wish(&fields, &translated)?;
        let of_prompt = translated.get("logprobs").filter(|_| wish.prompt_from.is_some()).cloned();
        translated.extend(of_prompt.map(|top| ("prompt_logprobs".into(), top)));
        let max_tokens = Fields::new(&translated, "").integer("max_tokens", 0..=i64::MAX.into());
        let max_tokens = max_tokens.map_err(|refusal| Self::NAMES.in_their_terms(refusal))?;
        // Without an echo a completion generates something.
        translated.insert("echo".into(), (max_tokens == Some(0)).into());
        let has_ids = fields.get("input_ids").is_some();
        let mut call = validate(Endpoint::Completions, &translated, reading.config).map_err(|refusal| {
            let refusal = if has_ids { NAMES_OF_IDS.in_their_terms(refusal) } else { refusal };
            Self::NAMES.in_their_terms(refusal)
        })?;
        call.hide_prompt_text();
        wish.is_list |= call.n > 1;
        let items = call.requests.len();
        wish.rids = rids(&fields, items, items / call.n.max(1))?;
        call.names = wish.rids.iter().enumerate().map(|(i, rid)| (rid.clone(), Some(i))).collect();
        Ok((call, wish))
    }

    fn form(label: Label, _call: &Call, wish: Wish) -> Box<dyn Form> {
        Box::new(Answer::new(label, wish))
    }
}

/// The request as a completion, `echo` left out.
fn translate(fields: &Fields<'_>, sampling: &Map<String, Value>) -> Result<Map<String, Value>, Refusal> {
    let mut translated = sampling.clone();
    // What SGLang does not know by a name that completions know is no wish of the client's.
    translated.retain(|name, _| sglang::SAMPLING.find(name).is_some());
    for (theirs, ours) in RENAMED {
        if let Some(value) = translated.remove(*theirs).filter(|value| !value.is_null()) {
            translated.insert((*ours).into(), value);
        }
    }
    // Null in SGLang's own default request.
    if Fields::new(&translated, "").get("max_tokens").is_none() {
        translated.insert("max_tokens".into(), MAX_NEW_TOKENS.into());
    }
    let prompt = match (fields.get("text"), fields.get("input_ids")) {
        (Some(_), Some(_)) => {
            return Err(fields.invalid("input_ids", "cannot stand beside text: send one of them"));
        }
        (None, None) => {
            return Err(fields.invalid("text", "is required: a string, a list of strings, or input_ids"));
        }
        (Some(text), None) => text_prompt(fields, text)?,
        (None, Some(ids)) => ids_prompt(fields, ids)?,
    };
    translated.insert("prompt".into(), prompt);
    for name in ["model", "stream", "priority", "cache_salt"] {
        translated.extend(fields.get(name).map(|value| (name.into(), value.clone())));
    }
    if let Some(key) = fields.string("extra_key")? {
        if fields.get("cache_salt").is_some() {
            return Err(fields.invalid("extra_key", "is another name of cache_salt: send one of them"));
        }
        translated.insert("cache_salt".into(), key.into());
    }
    if fields.boolean("return_logprob")? == Some(true) {
        let top = fields.get("top_logprobs_num").cloned().unwrap_or_else(|| 0.into());
        translated.insert("logprobs".into(), top);
    }
    Ok(translated)
}

/// Strings only: lists of ids have a field of their own.
fn text_prompt(fields: &Fields<'_>, text: &Value) -> Result<Value, Refusal> {
    let odd = match text {
        Value::String(_) => None,
        Value::Array(list) => list.iter().find(|item| !item.is_string()),
        other => Some(other),
    };
    match odd {
        None => Ok(text.clone()),
        Some(odd) => {
            Err(fields.invalid("text", format!("must be a string or a list of strings, got {}", kind(odd))))
        }
    }
}

fn ids_prompt(fields: &Fields<'_>, ids: &Value) -> Result<Value, Refusal> {
    let odd = match ids {
        Value::Array(list) => list.iter().find(|item| !item.is_number() && !item.is_array()),
        other => Some(other),
    };
    match odd {
        None => Ok(ids.clone()),
        Some(odd) => {
            let message = format!("must be a list of token ids or a list of such lists, got {}", kind(odd));
            Err(fields.invalid("input_ids", message))
        }
    }
}

/// What the answer shows.
fn wish(fields: &Fields<'_>, translated: &Map<String, Value>) -> Result<Wish, Refusal> {
    let logprobs = fields.boolean("return_logprob")?.unwrap_or(false);
    let top = fields.integer("top_logprobs_num", 0..=u32::MAX.into())?.unwrap_or(0);
    if top > 0 && !logprobs {
        return Err(fields.invalid("top_logprobs_num", "needs return_logprob: true"));
    }
    let start = fields.integer("logprob_start_len", -1..=u32::MAX.into())?.unwrap_or(-1);
    let with_text = fields.boolean("return_text_in_logprobs")?.unwrap_or(false);
    let is_list = match translated.get("prompt") {
        Some(Value::Array(list)) => !list.first().is_some_and(Value::is_number),
        _ => false,
    };
    Ok(Wish {
        is_list,
        rids: Vec::new(),
        logprobs,
        with_top: top > 0,
        with_text,
        prompt_from: usize::try_from(start).ok(),
    })
}

/// The client's own ids, one per prompt; of several choices each gets a number behind it.
fn rids(fields: &Fields<'_>, items: usize, prompts: usize) -> Result<Vec<String>, Refusal> {
    let of_prompts = match fields.get("rid") {
        None => return Ok(Vec::new()),
        Some(Value::String(rid)) if prompts == 1 => vec![rid.as_str()],
        Some(Value::Array(list)) if list.len() == prompts => {
            list.iter().filter_map(Value::as_str).collect::<Vec<_>>()
        }
        Some(_) => Vec::new(),
    };
    let is_ok = |rid: &&str| !rid.is_empty() && rid.len() <= RID_BYTES_MAX;
    if of_prompts.len() != prompts || !of_prompts.iter().all(is_ok) {
        let message = format!(
            "must be one string of 1 to {RID_BYTES_MAX} bytes per prompt, of which there are {prompts}"
        );
        return Err(fields.invalid("rid", message));
    }
    let n = items / prompts.max(1);
    let numbered = |rid: &str| {
        (0..n).map(|i| if n == 1 { rid.to_owned() } else { format!("{rid}_{i}") }).collect::<Vec<_>>()
    };
    Ok(of_prompts.into_iter().flat_map(numbered).collect())
}
