//! Ollama's API: `/api/chat` and `/api/generate`, and what its clients ask about models.
//!
//! Requests are read as chats, `raw` ones as completions; everything about sampling is in `options`. Streams
//! are the default: one JSON object per line, the last one with `done: true`, the counts and the times. A tool
//! call comes whole, in one line. Log-probabilities, where asked for, stand in the line of the text that came with
//! them, those of tokens without text in the next line. Requests without a prompt ask for no text (`loading`).

mod answer;
mod loading;
mod models;
mod translate;

pub(crate) use models::{ps, show, tags, version};

use super::{Dialect, Reading, inside};
use crate::answer::{Form, Label};
use crate::fields::Fields;
use crate::openapi::{fields::FieldTable, ollama};
use crate::request::{Call, Endpoint, Names};
use answer::{Answer, Field};
use lockstep_core::Refusal;
use serde_json::{Map, Value};

/// `POST /api/chat`
#[derive(Debug)]
pub(crate) enum Chat {}

/// `POST /api/generate`
#[derive(Debug)]
pub(crate) enum Generate {}

/// OpenAI's names of what `options` and the rest of a request hold.
macro_rules! names {
    ($($further:expr),*) => {
        Names(&[
            ("max_tokens", "options.num_predict"),
            ("max_completion_tokens", "options.num_predict"),
            ("repetition_penalty", "options.repeat_penalty"),
            ("temperature", "options.temperature"),
            ("top_k", "options.top_k"),
            ("top_p", "options.top_p"),
            ("min_p", "options.min_p"),
            ("seed", "options.seed"),
            ("stop", "options.stop"),
            ("presence_penalty", "options.presence_penalty"),
            ("frequency_penalty", "options.frequency_penalty"),
            ("response_format", "format"),
            $($further),*
        ])
    };
}

impl Dialect for Chat {
    const NAMES: Names = names!();
    const FIELDS: FieldTable = ollama::CHAT;
    type Echo = ();

    fn without_text(body: &Map<String, Value>, reading: &Reading<'_>) -> Result<Option<Value>, Refusal> {
        loading::answer::<Self>(body, reading, Field::Message)
    }

    fn read(body: Map<String, Value>, reading: &Reading<'_>) -> Result<(Call, ()), Refusal> {
        reading.policy.check(&Self::FIELDS, &body, reading.config.strict_api)?;
        let fields = Fields::new(&body, "");
        let mut translated = options(&fields, reading)?;
        translate::common(&fields, reading.config, &mut translated)?;
        translate::messages(&fields, &mut translated)?;
        translated.extend(fields.get("tools").map(|tools| ("tools".into(), tools.clone())));
        Ok((Self::validated(Endpoint::Chat, &translated, reading)?, ()))
    }

    fn form(label: Label, call: &Call, (): ()) -> Box<dyn Form> {
        Box::new(Answer::new(label, Field::Message, call.logprobs))
    }
}

impl Dialect for Generate {
    const NAMES: Names = names!(("messages", "prompt"));
    const FIELDS: FieldTable = ollama::GENERATE;
    type Echo = ();

    fn without_text(body: &Map<String, Value>, reading: &Reading<'_>) -> Result<Option<Value>, Refusal> {
        loading::answer::<Self>(body, reading, Field::Response)
    }

    fn read(body: Map<String, Value>, reading: &Reading<'_>) -> Result<(Call, ()), Refusal> {
        reading.policy.check(&Self::FIELDS, &body, reading.config.strict_api)?;
        let fields = Fields::new(&body, "");
        let mut translated = options(&fields, reading)?;
        translate::common(&fields, reading.config, &mut translated)?;
        let endpoint = translate::prompt(&fields, reading.config, &mut translated)?;
        Ok((Self::validated(endpoint, &translated, reading)?, ()))
    }

    fn form(label: Label, call: &Call, (): ()) -> Box<dyn Form> {
        Box::new(Answer::new(label, Field::Response, call.logprobs))
    }
}

/// The sampling fields of a request.
fn options(fields: &Fields<'_>, reading: &Reading<'_>) -> Result<Map<String, Value>, Refusal> {
    let Some(options) = fields.object("options")? else { return Ok(Map::new()) };
    let checked = reading.policy.check(&ollama::OPTIONS, options, reading.config.strict_api);
    checked.map_err(|refusal| inside("options.", refusal))?;
    translate::options(options)
}
