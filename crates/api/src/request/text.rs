//! Validation of `/tokenize` and `/detokenize`, in vLLM's form; SGLang's is part of it.

use super::sampling::token_ids;
use super::{chat, check_model, policy::FieldPolicy, tools};
use crate::ApiConfig;
use crate::fields::{Fields, kind};
use crate::openapi::native;
use lockstep_core::limits::WIRE_MESSAGE_BYTES_MAX;
use lockstep_core::{Refusal, TokenId};
use lockstep_wire::Prompt;
use serde_json::{Map, Value};

/// Texts of one request.
pub(crate) const TEXTS_MAX: usize = 128;
/// Token ids of one text, so that they fit half of a message to a tokenizer.
const TOKENS_MAX: usize = WIRE_MESSAGE_BYTES_MAX / 2 / size_of::<TokenId>();

/// One value, or a list of them: the answer has the same form.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

/// What `/tokenize` is asked.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenizeCall {
    pub(crate) prompts: OneOrMany<Prompt>,
    pub(crate) add_special_tokens: bool,
    /// Answer the vocabulary's spelling of each token.
    pub(crate) with_pieces: bool,
}

/// What `/detokenize` is asked.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DetokenizeCall {
    pub(crate) tokens: OneOrMany<Vec<TokenId>>,
    pub(crate) skip_special_tokens: bool,
}

/// `prompt` is a string or a list of them; `messages` as in a chat, tools and template fields included.
pub(crate) fn tokenize(
    body: &Map<String, Value>,
    config: &ApiConfig,
    policy: &FieldPolicy,
) -> Result<TokenizeCall, Refusal> {
    let fields = Fields::new(body, "");
    policy.check(&native::TOKENIZE, body, config.strict_api)?;
    check_model(&fields, config)?;
    let is_chat = fields.get("messages").is_some();
    if is_chat && fields.get("prompt").is_some() {
        return Err(fields.invalid("prompt", "cannot stand beside messages: send one of them"));
    }
    if !is_chat
        && let Some(field) = native::TOKENIZE_CHAT.iter().find(|field| fields.get(field.name).is_some())
    {
        return Err(
            fields.invalid(field.name, "says how messages are rendered, but there are none; leave it out")
        );
    }
    let prompts = if is_chat {
        let tools = tools::read(&fields, config)?;
        OneOrMany::One(chat::prompt(&fields, config, tools.as_ref())?.0)
    } else {
        texts(&fields)?
    };
    // A chat template writes the special tokens itself.
    let add_special_tokens = fields.boolean("add_special_tokens")?.unwrap_or(!is_chat);
    let with_pieces = fields.boolean("return_token_strs")?.unwrap_or(false);
    Ok(TokenizeCall { prompts, add_special_tokens, with_pieces })
}

fn texts(fields: &Fields<'_>) -> Result<OneOrMany<Prompt>, Refusal> {
    match fields.get("prompt") {
        None => {
            Err(fields.invalid("prompt", "is required: a string, a list of strings, or messages instead"))
        }
        Some(Value::String(text)) => Ok(OneOrMany::One(Prompt::Text(text.clone()))),
        Some(Value::Array(list)) => {
            check_count(fields, "prompt", list.len())?;
            let text = |item: &Value| {
                let wrong =
                    || fields.invalid("prompt", format!("must hold strings only, got {}", kind(item)));
                item.as_str().map(|text| Prompt::Text(text.into())).ok_or_else(wrong)
            };
            list.iter().map(text).collect::<Result<_, _>>().map(OneOrMany::Many)
        }
        Some(other) => {
            let message = format!("must be a string or a list of strings, got {}", kind(other));
            Err(fields.invalid("prompt", message))
        }
    }
}

/// `tokens` is a list of token ids, or a list of such lists.
pub(crate) fn detokenize(
    body: &Map<String, Value>,
    config: &ApiConfig,
    policy: &FieldPolicy,
) -> Result<DetokenizeCall, Refusal> {
    let fields = Fields::new(body, "");
    policy.check(&native::DETOKENIZE, body, config.strict_api)?;
    check_model(&fields, config)?;
    let Some(list) = fields.list("tokens")? else {
        return Err(fields.invalid("tokens", "is required: a list of token ids"));
    };
    let ids = |list: &[Value]| {
        if list.len() > TOKENS_MAX {
            let message = format!("has {} token ids, accepted are {TOKENS_MAX}", list.len());
            return Err(fields.invalid("tokens", message));
        }
        token_ids(&fields, "tokens", list, config.vocab_size)
    };
    let tokens = if list.iter().any(Value::is_array) {
        check_count(&fields, "tokens", list.len())?;
        let inner = |item: &Value| match item {
            Value::Array(list) => ids(list),
            other => Err(fields.invalid("tokens", format!("mixes lists with {}", kind(other)))),
        };
        OneOrMany::Many(list.iter().map(inner).collect::<Result<_, _>>()?)
    } else {
        OneOrMany::One(ids(list)?)
    };
    let skip_special_tokens = fields.boolean("skip_special_tokens")?.unwrap_or(false);
    Ok(DetokenizeCall { tokens, skip_special_tokens })
}

fn check_count(fields: &Fields<'_>, name: &str, count: usize) -> Result<(), Refusal> {
    if count == 0 || count > TEXTS_MAX {
        return Err(fields.invalid(name, format!("has {count} entries, accepted are 1 to {TEXTS_MAX}")));
    }
    Ok(())
}
