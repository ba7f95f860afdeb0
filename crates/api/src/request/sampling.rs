//! Sampling and text parameters: ranges, defaults and the documented reading of edge values.

use super::Endpoint;
use super::limits::{
    BAD_WORD_BYTES_MAX, BAD_WORDS_MAX, BIAS_MAX, CACHE_SALT_BYTES_MAX, N_MAX, PENALTY_MAX, REPETITION_MAX,
    REPETITION_MIN, STOP_TOKEN_IDS_MAX, TEMPERATURE_MAX, TOKEN_RULES_MAX, TOP_LOGPROBS_MAX,
};
use crate::ApiConfig;
use crate::fields::{Fields, integer, kind};
use lockstep_core::limits::{STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX};
use lockstep_core::{Refusal, SamplingParams, TokenId};
use lockstep_wire::{TextParams, TokenizeParams};
use serde_json::Value;

/// Below it sampling is greedy: dividing logits by less overflows f32 long before it changes
/// which token wins.
const TEMPERATURE_MIN: f64 = 1e-5;
/// OpenAI's default for completions; chat has none.
const COMPLETIONS_MAX_TOKENS: u32 = 16;

/// `n`, and `best_of`, which must be the same: answers are not ranked here.
pub(super) fn choices(fields: &Fields<'_>, endpoint: Endpoint) -> Result<usize, Refusal> {
    let n = fields.integer("n", 1..=N_MAX)?.unwrap_or(1);
    if endpoint == Endpoint::Completions
        && let Some(best_of) = fields.integer("best_of", 1..=N_MAX)?
        && best_of != n
    {
        let message = format!("must equal n (this server does not rank answers), got {best_of} and {n}");
        return Err(fields.invalid("best_of", message));
    }
    Ok(n as usize)
}

/// How tokens are chosen and reported, with the model's defaults filled in; and whether the answer shows no
/// generated token at all (`max_tokens: 0`).
pub(super) fn sampling_params(
    fields: &Fields<'_>,
    endpoint: Endpoint,
    config: &ApiConfig,
) -> Result<(SamplingParams, bool), Refusal> {
    let defaults = config.default_sampling;
    let temperature = fields.number("temperature", 0.0..=TEMPERATURE_MAX)?;
    let temperature = temperature.unwrap_or(defaults.temperature.unwrap_or(1.0).into());
    let top_p = fields.number("top_p", 0.0..=1.0)?.unwrap_or(defaults.top_p.unwrap_or(1.0).into());
    let top_k = top_k(fields)?.unwrap_or(defaults.top_k.unwrap_or(0));
    let min_p = fields.number("min_p", 0.0..=1.0)?.unwrap_or(defaults.min_p.unwrap_or(0.0).into());
    let echo = endpoint == Endpoint::Completions && fields.boolean("echo")?.unwrap_or(false);
    let of_prompt = prompt_logprobs(fields)?;
    let max_tokens = max_tokens(fields, endpoint, echo || of_prompt.is_some())?;
    let prompt_only = max_tokens == Some(0);
    let min_tokens = min_tokens(fields)?;
    if let Some(max_tokens) = max_tokens
        && min_tokens > max_tokens
    {
        let message = format!("must not exceed the token limit, got {min_tokens} of at most {max_tokens}");
        return Err(fields.invalid("min_tokens", message));
    }
    // The smallest set that reaches probability 0 still holds the most likely token, and only it.
    let (top_k, top_p) = if top_p == 0.0 { (1, 1.0) } else { (top_k, top_p) };
    let logprobs = logprobs(fields, endpoint)?;
    let params = SamplingParams {
        temperature: if temperature < TEMPERATURE_MIN { 0.0 } else { temperature as f32 },
        top_k,
        top_p: top_p as f32,
        min_p: min_p as f32,
        seed: seed(fields)?,
        choice: 0,
        max_tokens: if prompt_only { Some(1) } else { max_tokens },
        min_tokens,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        stop_token_ids: stop_token_ids(fields, config.vocab_size)?,
        presence_penalty: penalty(fields, "presence_penalty")?,
        frequency_penalty: penalty(fields, "frequency_penalty")?,
        repetition_penalty: repetition_penalty(fields)?,
        logit_bias: logit_bias(fields, config.vocab_size)?,
        allowed_token_ids: allowed_token_ids(fields, config.vocab_size)?,
        // Token sequences: the tokenizer finds them.
        bad_words: Vec::new(),
        logprobs,
        prompt_logprobs: of_prompt.max(logprobs.filter(|_| echo)),
        grammar: super::structured::grammar(fields)?,
    };
    Ok((params, prompt_only))
}

fn min_tokens(fields: &Fields<'_>) -> Result<u32, Refusal> {
    Ok(fields.integer("min_tokens", 0..=u32::MAX.into())?.unwrap_or(0) as u32)
}

fn repetition_penalty(fields: &Fields<'_>) -> Result<f32, Refusal> {
    let range = REPETITION_MIN..=REPETITION_MAX;
    Ok(fields.number("repetition_penalty", range)?.unwrap_or(1.0) as f32)
}

fn penalty(fields: &Fields<'_>, name: &str) -> Result<f32, Refusal> {
    Ok(fields.number(name, -PENALTY_MAX..=PENALTY_MAX)?.unwrap_or(0.0) as f32)
}

/// Alternatives per token, if log-probabilities are wanted at all: chat has a switch and a number,
/// completions a number.
fn logprobs(fields: &Fields<'_>, endpoint: Endpoint) -> Result<Option<u32>, Refusal> {
    let range = 0..=TOP_LOGPROBS_MAX;
    if endpoint == Endpoint::Completions {
        return Ok(fields.integer("logprobs", range)?.map(|count| count as u32));
    }
    let is_wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", range)?.unwrap_or(0);
    if top > 0 && !is_wanted {
        return Err(fields.invalid("top_logprobs", "needs logprobs: true"));
    }
    Ok(is_wanted.then_some(top as u32))
}

/// Alternatives per token of the prompt, if its log-probabilities are wanted apart from the answer's.
pub(super) fn prompt_logprobs(fields: &Fields<'_>) -> Result<Option<u32>, Refusal> {
    Ok(fields.integer("prompt_logprobs", 0..=TOP_LOGPROBS_MAX)?.map(|count| count as u32))
}

/// Whether tokens are shown by their ids.
pub(super) fn token_ids_wish(fields: &Fields<'_>) -> Result<bool, Refusal> {
    Ok(fields.boolean("return_token_ids")?.unwrap_or(false))
}

/// An object of token ids (as text, since JSON keys are) and what to add to their logits.
fn logit_bias(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<(TokenId, f32)>, Refusal> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    check_rules(fields, "logit_bias", map.len())?;
    let entry = |(key, value): (&String, &Value)| {
        let id = key.trim().parse::<TokenId>().ok().filter(|id| (*id as usize) < vocab_size);
        let id = id.ok_or_else(|| {
            let got = super::policy::shorten(key);
            fields.invalid(
                "logit_bias",
                format!("has the key {got:?}, but keys are token ids in 0..{vocab_size}"),
            )
        })?;
        let bias = value.as_f64().filter(|bias| bias.abs() <= BIAS_MAX).ok_or_else(|| {
            fields.invalid("logit_bias", format!("must hold numbers in -{BIAS_MAX}..={BIAS_MAX}"))
        })?;
        Ok((id, bias as f32))
    };
    let mut list = map.iter().map(entry).collect::<Result<Vec<_>, Refusal>>()?;
    // "5" and " 5" are different keys, and the later one counts, as for JSON's own duplicates.
    list.reverse();
    list.sort_by_key(|(id, _)| *id);
    list.dedup_by_key(|(id, _)| *id);
    Ok(list)
}

fn allowed_token_ids(fields: &Fields<'_>, vocab_size: usize) -> Result<Option<Vec<TokenId>>, Refusal> {
    let Some(list) = fields.list("allowed_token_ids")? else { return Ok(None) };
    check_rules(fields, "allowed_token_ids", list.len())?;
    if list.is_empty() {
        return Err(fields.invalid("allowed_token_ids", "is empty, so no token could be chosen"));
    }
    token_ids(fields, "allowed_token_ids", list, vocab_size).map(Some)
}

fn check_rules(fields: &Fields<'_>, name: &str, len: usize) -> Result<(), Refusal> {
    if len > TOKEN_RULES_MAX {
        return Err(fields.invalid(name, format!("has {len} entries, accepted are {TOKEN_RULES_MAX}")));
    }
    Ok(())
}

/// -1 and 0 mean all tokens.
fn top_k(fields: &Fields<'_>) -> Result<Option<u32>, Refusal> {
    let Some(top_k) = fields.integer("top_k", -1..=i128::from(i64::MAX))? else { return Ok(None) };
    Ok(Some(u32::try_from(top_k.max(0)).unwrap_or(u32::MAX)))
}

/// `max_completion_tokens` (chat) wins over `max_tokens`; both are checked. 0 makes sense only for a completion
/// that shows something of its prompt.
fn max_tokens(fields: &Fields<'_>, endpoint: Endpoint, shows_prompt: bool) -> Result<Option<u32>, Refusal> {
    let least = i128::from(!shows_prompt || endpoint == Endpoint::Chat);
    let range = least..=i128::from(i64::MAX);
    let plain = fields.integer("max_tokens", range.clone())?;
    let (newer, default) = match endpoint {
        Endpoint::Chat => (fields.integer("max_completion_tokens", range)?, None),
        Endpoint::Completions => (None, Some(COMPLETIONS_MAX_TOKENS)),
    };
    // More than the context holds is not an error: the answer then ends there, with `length`.
    Ok(newer.or(plain).map(|n| u32::try_from(n).unwrap_or(u32::MAX)).or(default))
}

/// Any 64-bit integer, signed or not; a random one when there is none.
fn seed(fields: &Fields<'_>) -> Result<u64, Refusal> {
    match fields.integer("seed", i64::MIN.into()..=u64::MAX.into())? {
        // Negative seeds keep their bits: all that matters is that different seeds stay different.
        Some(seed) => Ok(seed as u64),
        None => getrandom::u64()
            .map_err(|e| Refusal::internal(format!("the system gave no random seed: {e}; send one as seed"))),
    }
}

fn stop_token_ids(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<TokenId>, Refusal> {
    let Some(list) = fields.list("stop_token_ids")? else { return Ok(Vec::new()) };
    if list.len() > STOP_TOKEN_IDS_MAX {
        let message = format!("has {} entries, accepted are {STOP_TOKEN_IDS_MAX}", list.len());
        return Err(fields.invalid("stop_token_ids", message));
    }
    token_ids(fields, "stop_token_ids", list, vocab_size)
}

/// A list of ids that the model has.
pub(super) fn token_ids(
    fields: &Fields<'_>,
    name: &str,
    list: &[Value],
    vocab_size: usize,
) -> Result<Vec<TokenId>, Refusal> {
    let id = |value: &Value| {
        let id = integer(value)
            .ok_or_else(|| fields.invalid(name, format!("must hold token ids only, got {}", kind(value))))?;
        TokenId::try_from(id).ok().filter(|id| (*id as usize) < vocab_size).ok_or_else(|| {
            fields.invalid(name, format!("holds token id {id}, but the model has ids 0..{vocab_size}"))
        })
    };
    list.iter().map(id).collect()
}

/// How tokens become text.
pub(super) fn text_params(fields: &Fields<'_>, endpoint: Endpoint) -> Result<TextParams, Refusal> {
    let stop = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(list)) => {
            list.iter().map(|item| stop_string(fields, item)).collect::<Result<_, _>>()?
        }
        Some(other) => {
            return Err(
                fields.invalid("stop", format!("must be a string or a list of strings, got {}", kind(other)))
            );
        }
    };
    if stop.len() > STOP_STRINGS_MAX {
        let message = format!("has {} strings, accepted are {STOP_STRINGS_MAX}", stop.len());
        return Err(fields.invalid("stop", message));
    }
    if stop.iter().any(String::is_empty) {
        return Err(fields.invalid("stop", "holds an empty string, which would end every answer at once"));
    }
    if let Some(long) = stop.iter().find(|text| text.len() > STOP_STRING_BYTES_MAX) {
        let message = format!("holds a string of {} bytes, accepted are {STOP_STRING_BYTES_MAX}", long.len());
        return Err(fields.invalid("stop", message));
    }
    // vLLM's name and SGLang's.
    let keeps_stop = fields.boolean("include_stop_str_in_output")?.unwrap_or(false)
        | fields.boolean("no_stop_trim")?.unwrap_or(false);
    let skip_special_tokens = fields.boolean("skip_special_tokens")?.unwrap_or(true);
    let echo = endpoint == Endpoint::Completions && fields.boolean("echo")?.unwrap_or(false);
    let prompt_tokens = token_ids_wish(fields)? || prompt_logprobs(fields)?.is_some();
    let timing = fields.boolean("timing")?.unwrap_or(false);
    let min_tokens = min_tokens(fields)?;
    Ok(TextParams { stop, min_tokens, keeps_stop, skip_special_tokens, echo, prompt_tokens, timing })
}

/// What the tokenizer is asked besides the prompt; the field of the grammar is filled in by the caller.
pub(super) fn tokenize_params(fields: &Fields<'_>, config: &ApiConfig) -> Result<TokenizeParams, Refusal> {
    let keep_last = match fields.integer("truncate_prompt_tokens", -1..=i64::MAX.into())? {
        Some(0) => return Err(fields.invalid("truncate_prompt_tokens", "must be -1 or at least 1, got 0")),
        // As many as fit.
        Some(-1) => Some(config.context_max.saturating_sub(1)),
        keep => keep.map(|keep| usize::try_from(keep).unwrap_or(usize::MAX)),
    };
    Ok(TokenizeParams {
        add_special_tokens: fields.boolean("add_special_tokens")?,
        keep_last: keep_last.map(|keep| u32::try_from(keep).unwrap_or(u32::MAX)),
        bad_words: bad_words(fields)?,
        grammar_field: String::new(),
    })
}

fn bad_words(fields: &Fields<'_>) -> Result<Vec<String>, Refusal> {
    let list = fields.list("bad_words")?.unwrap_or_default();
    if list.len() > BAD_WORDS_MAX {
        let message = format!("has {} entries, accepted are {BAD_WORDS_MAX}", list.len());
        return Err(fields.invalid("bad_words", message));
    }
    let word = |item: &Value| {
        let word = item.as_str().filter(|word| !word.trim().is_empty() && word.len() <= BAD_WORD_BYTES_MAX);
        let wrong = || {
            let message =
                format!("must hold strings of 1 to {BAD_WORD_BYTES_MAX} bytes that are not only spaces");
            fields.invalid("bad_words", message)
        };
        word.map(str::to_owned).ok_or_else(wrong)
    };
    list.iter().map(word).collect()
}

fn stop_string(fields: &Fields<'_>, item: &Value) -> Result<String, Refusal> {
    let wrong = || fields.invalid("stop", format!("must hold strings only, got {}", kind(item)));
    item.as_str().map(String::from).ok_or_else(wrong)
}

/// The namespace of cached prefixes: any short string; empty is a 400, since it would look like none.
pub(super) fn cache_salt(fields: &Fields<'_>) -> Result<Option<String>, Refusal> {
    match fields.string("cache_salt")? {
        Some(salt) if salt.is_empty() || salt.len() > CACHE_SALT_BYTES_MAX => {
            Err(fields.invalid("cache_salt", format!("must have 1 to {CACHE_SALT_BYTES_MAX} bytes")))
        }
        salt => Ok(salt.map(str::to_owned)),
    }
}
