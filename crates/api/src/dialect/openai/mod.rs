//! OpenAI's `/v1/chat/completions` and `/v1/completions`: the dialect that validation is written in.
//!
//! Per choice of a stream: (chat) one chunk with the role, chunks with text, reasoning and tool calls as they
//! are decided, one chunk with `finish_reason`. `data: [DONE]` comes last, but not behind an error, which has
//! OpenAI's nested form.

mod logprobs;
mod shape;

pub(super) use logprobs::{ChatToken, chat_tokens};

use super::{Dialect, Reading};
use crate::answer::{Form, Label};
use crate::openapi::{fields::FieldTable, requests};
use crate::request::{Call, Endpoint, Names};
use lockstep_core::Refusal;
use serde_json::{Map, Value};
use shape::Head;

/// `POST /v1/chat/completions`
#[derive(Debug)]
pub(crate) enum Chat {}

/// `POST /v1/completions`
#[derive(Debug)]
pub(crate) enum Completions {}

impl Dialect for Chat {
    const NAMES: Names = Names(&[]);
    const FIELDS: FieldTable = requests::CHAT;
    type Echo = ();

    fn read(body: Map<String, Value>, reading: &Reading<'_>) -> Result<(Call, ()), Refusal> {
        reading.policy.check(&Self::FIELDS, &body, reading.config.strict_api)?;
        Ok((Self::validated(Endpoint::Chat, &body, reading)?, ()))
    }

    fn form(label: Label, call: &Call, (): ()) -> Box<dyn Form> {
        Box::new(Head::new(Endpoint::Chat, label, call))
    }
}

impl Dialect for Completions {
    const NAMES: Names = Names(&[("messages", "prompt")]);
    const FIELDS: FieldTable = requests::COMPLETIONS;
    type Echo = ();

    fn read(body: Map<String, Value>, reading: &Reading<'_>) -> Result<(Call, ()), Refusal> {
        reading.policy.check(&Self::FIELDS, &body, reading.config.strict_api)?;
        Ok((Self::validated(Endpoint::Completions, &body, reading)?, ()))
    }

    fn form(label: Label, call: &Call, (): ()) -> Box<dyn Form> {
        Box::new(Head::new(Endpoint::Completions, label, call))
    }
}
