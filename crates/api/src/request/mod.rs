//! Validation: from a JSON object to requests for the engine, or to a refusal. Pure: no clock and
//! no I/O except the random seed of a request that gives none.

mod chat;
mod completions;
mod forced;
mod gbnf;
pub(crate) mod limits;
mod names;
pub(crate) mod policy;
mod sampling;
mod structured;
#[cfg(test)]
mod tests;
pub(crate) mod text;
mod tools;

use crate::ApiConfig;
use crate::dialect::{Chat, Dialect};
use crate::engine::NewRequest;
use crate::fields::Fields;
use limits::{CHOICES_BYTES_MAX, PRIORITY_MAX, RID_BYTES_MAX};
use lockstep_core::{Refusal, SamplingParams};
use lockstep_wire::{Prompt, TextParams, TokenizeParams};
pub(crate) use names::Names;
use serde_json::{Map, Value, json};
pub(crate) use tools::Parsing;

/// Which of OpenAI's two generation endpoints a request is written for; decides fields and defaults. Other
/// APIs' requests are translated into one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Call {
    /// Asks where the time of its requests goes.
    pub(crate) fn ask_for_timing(&mut self) {
        self.requests.iter_mut().for_each(|request| request.text.timing = true);
    }

    /// Takes the prompt's text out of the answer: its dialect tells of the prompt's tokens at most.
    pub(crate) fn hide_prompt_text(&mut self) {
        self.requests.iter_mut().for_each(|request| request.text.echo = false);
    }
}

/// A validated call: what to run and how to answer.
#[derive(Debug, PartialEq)]
pub(crate) struct Call {
    /// One per choice of the answer: the `n` of the first prompt, then those of the second, ...
    pub(crate) requests: Vec<NewRequest>,
    /// Choices per prompt.
    pub(crate) n: usize,
    /// How log-probabilities are shown; they come only if they were asked for.
    pub(crate) logprobs: LogprobsWish,
    /// The same for the prompt's tokens, apart from the answer's.
    pub(crate) prompt_logprobs: LogprobsWish,
    /// Tokens are shown by their ids, the prompt's too.
    pub(crate) token_ids: bool,
    /// How answers are taken apart; `None`: they are text.
    pub(crate) parsing: Option<Parsing>,
    /// `max_tokens: 0`: the engine generates one token, which the answer leaves out.
    pub(crate) prompt_only: bool,
    /// The client's own ids, of all choices or of one, by which it may abort them.
    pub(crate) names: Vec<(String, Option<usize>)>,
    /// Answer with server-sent events.
    pub(crate) stream: bool,
    /// Send one more chunk with the token counts.
    pub(crate) include_usage: bool,
}

/// What of log-probabilities a client wants to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogprobsWish {
    /// Nothing: the field is null.
    None,
    /// Each token's own and so many alternatives.
    Top(u32),
}

/// Validates a request written for one of the two endpoints; its field names are checked before
/// ([`FieldPolicy`](policy::FieldPolicy)).
pub(crate) fn validate(
    endpoint: Endpoint,
    body: &Map<String, Value>,
    config: &ApiConfig,
) -> Result<Call, Refusal> {
    let fields = Fields::new(body, "");
    check_model(&fields, config)?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = include_usage(&fields, stream)?;
    let mut text = sampling::text_params(&fields, endpoint)?;
    let n = sampling::choices(&fields, endpoint)?;
    let (mut sampling, prompt_only) = sampling::sampling_params(&fields, endpoint, config)?;
    let mut tokenizing = sampling::tokenize_params(&fields, config)?;
    tokenizing.grammar_field =
        if sampling.grammar.is_some() { structured::field(&fields) } else { "tools" }.into();
    if sampling.grammar.is_some() && !tokenizing.bad_words.is_empty() {
        let message = "cannot be combined with a form, which may leave no other word";
        return Err(fields.invalid("bad_words", message));
    }
    let (prompts, parsing) = match endpoint {
        Endpoint::Completions => (completions::prompts(&fields, config)?, None),
        Endpoint::Chat => {
            let tools = tools::read(&fields, config)?;
            let (prompt, begins_in_reasoning) = chat::prompt(&fields, config, tools.as_ref())?;
            let reasoning =
                tools::Reasoning { begins: begins_in_reasoning, wish: tools::reasoning_wish(&fields)? };
            let parsing = tools::parsing(tools, reasoning, config, &mut sampling, &mut text)?;
            (vec![prompt], parsing)
        }
    };
    let cache_salt = sampling::cache_salt(&fields)?;
    let priority = fields.integer("priority", -PRIORITY_MAX..=PRIORITY_MAX)?.unwrap_or(0) as i32;
    let choices = prompts.len() * n;
    if choices > CHOICES_MAX {
        let message = format!("times the prompts makes {choices} choices, accepted are {CHOICES_MAX}");
        return Err(fields.invalid("n", message));
    }
    check_bytes(&fields, &prompts, n, &sampling, &tokenizing)?;
    let request = |prompt: &Prompt, choice| {
        // In a whole answer the first choice of a prompt reports it for all.
        let reports = choice == 0 || stream;
        let prompt_logprobs = sampling.prompt_logprobs.filter(|_| reports || text.echo);
        NewRequest {
            prompt: prompt.clone(),
            tokenizing: tokenizing.clone(),
            sampling: SamplingParams { choice, prompt_logprobs, ..sampling.clone() },
            text: TextParams { prompt_tokens: text.prompt_tokens && reports, ..text.clone() },
            cache_salt: cache_salt.clone(),
            priority,
        }
    };
    let requests = prompts.iter().flat_map(|prompt| (0..n as u32).map(move |choice| (prompt, choice)));
    let requests = requests.map(|(prompt, choice)| request(prompt, choice)).collect();
    let wish = |count: Option<u32>| count.map_or(LogprobsWish::None, LogprobsWish::Top);
    Ok(Call {
        requests,
        n,
        logprobs: wish(sampling.logprobs),
        prompt_logprobs: wish(sampling::prompt_logprobs(&fields)?),
        token_ids: sampling::token_ids_wish(&fields)?,
        parsing,
        prompt_only,
        names: names_of(&fields)?,
        stream,
        include_usage,
    })
}

/// Refuses `fields` of a streamed chat that no server takes, in the words of its refusal. What depends on a model (its
/// context, vocabulary, template) only its server can judge; names that are not known are accepted, as there.
pub fn check_chat_fields(fields: &Map<String, Value>) -> Result<(), Refusal> {
    let anything = u32::MAX as usize;
    let config = ApiConfig::new("", anything, anything);
    let known: Map<String, Value> = fields
        .iter()
        .filter(|(name, _)| Chat::FIELDS.find(name).is_some())
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    policy::FieldPolicy::default().check(&Chat::FIELDS, &known, false)?;
    let mut body = known;
    body.insert("messages".into(), json!([{"role": "user", "content": "x"}]));
    body.insert("stream".into(), true.into());
    validate(Endpoint::Chat, &body, &config).map(|_| ())
}

/// Choices of one answer: prompts times `n`.
const CHOICES_MAX: usize = 1024;

/// Every choice is a request of its own, so a few bytes of a body can become many.
fn check_bytes(
    fields: &Fields<'_>,
    prompts: &[Prompt],
    n: usize,
    sampling: &SamplingParams,
    tokenizing: &TokenizeParams,
) -> Result<(), Refusal> {
    let texts: usize = prompts.iter().map(Prompt::bytes).sum();
    let words = tokenizing.bad_words.iter().map(String::len);
    let rules = sampling.rule_bytes() + words.sum::<usize>();
    let bytes = n.saturating_mul(texts + prompts.len() * rules);
    if bytes <= CHOICES_BYTES_MAX {
        return Ok(());
    }
    let message = format!(
        "makes {} choices, whose prompts and token rules have {bytes} bytes together, accepted are \
         {CHOICES_BYTES_MAX}; ask for fewer choices or send several requests",
        prompts.len() * n
    );
    Err(fields.invalid("n", message))
}

/// What the client calls its request.
fn names_of(fields: &Fields<'_>) -> Result<Vec<(String, Option<usize>)>, Refusal> {
    let mut names = Vec::new();
    for field in ["rid", "request_id"] {
        let Some(name) = fields.string(field)? else { continue };
        if name.is_empty() || name.len() > RID_BYTES_MAX {
            return Err(fields.invalid(field, format!("must have 1 to {RID_BYTES_MAX} bytes")));
        }
        names.push((name.to_owned(), None));
    }
    Ok(names)
}

/// Absent, or the served name.
fn check_model(fields: &Fields<'_>, config: &ApiConfig) -> Result<(), Refusal> {
    match fields.string("model")? {
        Some(name) if name != config.served_model_name => Err(model_not_found(name, config)),
        _ => Ok(()),
    }
}

/// The 404 for another model's name.
pub(crate) fn model_not_found(name: &str, config: &ApiConfig) -> Refusal {
    let served = &config.served_model_name;
    let name = policy::shorten(name);
    let refusal = Refusal::with_status(
        404,
        "invalid_request_error",
        format!("the model {name:?} does not exist on this server, which serves {served:?}"),
    );
    Refusal { param: Some("model".into()), ..refusal }.with_code("model_not_found")
}

fn include_usage(fields: &Fields<'_>, stream: bool) -> Result<bool, Refusal> {
    let Some(options) = fields.object("stream_options")? else { return Ok(false) };
    if !stream {
        return Err(fields.invalid("stream_options", "needs stream: true"));
    }
    let options = Fields::new(options, "stream_options.");
    if options.boolean("continuous_usage_stats")? == Some(true) {
        return Err(options.invalid("continuous_usage_stats", "is not supported; leave it out"));
    }
    Ok(options.boolean("include_usage")?.unwrap_or(false))
}
