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
use crate::fields::Fields;
use crate::openapi::{fields::FieldTable, requests};
use crate::request::{Call, Endpoint, LogprobsWish, Names};
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
        Ok((read::<Self>(Endpoint::Chat, &body, reading)?, ()))
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
        Ok((read::<Self>(Endpoint::Completions, &body, reading)?, ()))
    }

    fn form(label: Label, call: &Call, (): ()) -> Box<dyn Form> {
        Box::new(Head::new(Endpoint::Completions, label, call))
    }
}

fn read<D: Dialect>(
    endpoint: Endpoint,
    body: &Map<String, Value>,
    reading: &Reading<'_>,
) -> Result<Call, Refusal> {
    reading.policy.check(&D::FIELDS, body, reading.config.strict_api)?;
    let call = D::validated(endpoint, body, reading)?;
    if call.stream && call.prompt_logprobs != LogprobsWish::None {
        // As in vLLM, whose streams have no place for them.
        let message = "cannot be streamed; leave stream out, or ask a completion for echo and logprobs";
        return Err(Fields::new(body, "").invalid("prompt_logprobs", message));
    }
    Ok(call)
}
