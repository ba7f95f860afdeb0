//! Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! Translated into a chat request; see `docs/api.md`, "Anthropic", for what has no counterpart. The answer's
//! content blocks are the sections of the model's text in the order in which it wrote them: thinking, text,
//! tool calls.

mod content;
mod count;
mod form;
pub(crate) mod models;
mod request;

pub(crate) use count::count_tokens;

use super::{Dialect, Reading};
use crate::answer::{Form, Label};
use crate::openapi::{anthropic, fields::FieldTable};
use crate::request::{Call, Endpoint, Names};
use form::Message;
use lockstep_core::Refusal;
use serde_json::{Map, Value};

/// `POST /v1/messages`
#[derive(Debug)]
pub(crate) enum Messages {}

impl Dialect for Messages {
    const NAMES: Names = Names(&[
        ("stop", "stop_sequences"),
        ("tools[].function.parameters", "tools[].input_schema"),
        ("tools[].function", "tools[]"),
        ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
        ("continue_final_message", "messages"),
        ("response_format.json_schema", "output_config.format"),
        ("response_format", "output_config.format"),
        ("reasoning_effort", "output_config.effort"),
    ]);
    const FIELDS: FieldTable = anthropic::MESSAGES;
    type Echo = ();

    fn read(body: Map<String, Value>, reading: &Reading<'_>) -> Result<(Call, ()), Refusal> {
        let config = reading.config;
        reading.policy.check(&Self::FIELDS, &body, config.strict_api)?;
        let translated = request::translate(&body, config, request::Length::Required)?;
        Ok((Self::validated(Endpoint::Chat, &translated, reading)?, ()))
    }

    fn form(label: Label, _call: &Call, (): ()) -> Box<dyn Form> {
        Box::new(Message::new(label))
    }
}
