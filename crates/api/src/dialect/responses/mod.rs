//! OpenAI's `POST /v1/responses`, without a memory: nothing is stored, so a request brings its whole
//! conversation.
//!
//! Translated into a chat request; see `docs/api.md`, "Responses", for what has no counterpart. The answer's
//! output items are the sections of the model's text in the order in which it wrote them: reasoning, messages,
//! function calls.

mod form;
mod input;
mod request;

pub(crate) use request::INCLUDES;

use super::{Dialect, Reading};
use crate::answer::{Form, Label};
use crate::openapi::{fields::FieldTable, responses};
use crate::request::{Call, Endpoint, Names};
use form::Response;
use lockstep_core::Refusal;
use serde_json::{Map, Value};

/// `POST /v1/responses`
#[derive(Debug)]
pub(crate) enum Responses {}

impl Dialect for Responses {
    const NAMES: Names = Names(&[
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("tools[].function", "tools[]"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
        ("reasoning_effort", "reasoning.effort"),
    ]);

    const FIELDS: FieldTable = responses::RESPONSES;

    /// Fields of the response that repeat those of the request.
    type Echo = Map<String, Value>;

    fn read(body: Map<String, Value>, reading: &Reading<'_>) -> Result<(Call, Self::Echo), Refusal> {
        let config = reading.config;
        reading.policy.check(&Self::FIELDS, &body, config.strict_api)?;
        let translated = request::translate(&body)?;
        let call = Self::validated(Endpoint::Chat, &translated, reading)?;
        Ok((call, request::echo(&body, config)))
    }

    fn form(label: Label, call: &Call, echo: Self::Echo) -> Box<dyn Form> {
        Box::new(Response::new(label, call.logprobs, echo))
    }
}
