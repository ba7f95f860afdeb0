//! The APIs that this server speaks, one module each: how a request reads, how an answer is written.
//!
//! **Invariant:** a dialect translates, it never decides. Every request becomes the same [`Call`] through the
//! one validation in [`request`](crate::request), so a field has one range, one default and one meaning; when
//! and in which order a client is told something is the machinery's in [`answer`](crate::answer). How errors
//! are written goes by path ([`errors`](crate::errors)).
//!
//! A new dialect: a [`Dialect`] with its [`FieldTable`] and [`Names`], a
//! [`Form`], and a route to [`generate`](crate::handlers::generate).

mod anthropic;
pub(crate) mod ollama;
mod openai;
mod responses;
mod sglang;
mod translation;
mod turns;

pub(crate) use anthropic::{Messages, count_tokens, models as anthropic_models};
pub(crate) use openai::{Chat, Completions};
pub(crate) use responses::{INCLUDES as RESPONSE_INCLUDES, Responses};
pub(crate) use sglang::Generate as SglangGenerate;

use crate::ApiConfig;
use crate::answer::{Form, Label};
use crate::openapi::fields::FieldTable;
use crate::request::{Call, Endpoint, Names, policy::FieldPolicy, validate};
use lockstep_core::Refusal;
use serde_json::{Map, Value};

/// One API's way to ask for text at one endpoint.
pub(crate) trait Dialect: 'static {
    /// What its clients call the fields that OpenAI calls otherwise.
    const NAMES: Names;

    /// The fields of its requests.
    const FIELDS: FieldTable;

    /// What of the request only the answer's form needs.
    type Echo: Send;

    /// The answer to a request that asks for no text, if it is one.
    fn without_text(_body: &Map<String, Value>, _reading: &Reading<'_>) -> Result<Option<Value>, Refusal> {
        Ok(None)
    }

    /// Reads a request: checks its fields, translates it, and has it [`validated`](Self::validated). Refusals
    /// name fields as the client does.
    fn read(body: Map<String, Value>, reading: &Reading<'_>) -> Result<(Call, Self::Echo), Refusal>;

    /// The call that a translated request is, or a refusal in the client's words.
    fn validated(
        endpoint: Endpoint,
        translated: &Map<String, Value>,
        reading: &Reading<'_>,
    ) -> Result<Call, Refusal> {
        validate(endpoint, translated, reading.config).map_err(|refusal| Self::NAMES.in_their_terms(refusal))
    }

    /// How the answer to `call` is written. The requests of `call` are under way already.
    fn form(label: Label, call: &Call, echo: Self::Echo) -> Box<dyn Form>;
}

/// What requests are read with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading<'a> {
    pub(crate) config: &'a ApiConfig,
    pub(crate) policy: &'a FieldPolicy,
}

/// The same refusal about a field inside `path`, such as `options.`.
fn inside(path: &str, mut refusal: Refusal) -> Refusal {
    if let Some(param) = &mut refusal.param {
        if refusal.message.starts_with(param.as_str()) {
            refusal.message.insert_str(0, path);
        }
        param.insert_str(0, path);
    }
    refusal
}
