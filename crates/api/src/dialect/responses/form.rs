//! OpenAI's response object, whole and as typed events.
//!
//! `response.created`, `response.in_progress`; per output item `response.output_item.added`, its content
//! (`content_part.added`, deltas, a `done` with all of it, `content_part.done`; for calls the arguments' deltas
//! and their `done`), `response.output_item.done`; last `response.completed`, `response.incomplete` or
//! `response.failed`. Events are numbered; there is no `[DONE]`.

use super::super::openai::{ChatToken, chat_tokens};
use crate::answer::{
    Finish, Form, Frames, Joined, JoinedCall, Label, NewPart, NewTokens, Section, WholeChoice,
};
use crate::errors::ErrorForm;
use crate::parsers::Event as Part;
use crate::request::LogprobsWish;
use lockstep_core::{FinishReason, Refusal};
use lockstep_wire::Usage;
use serde_json::{Map, Value, json};

/// One answer. It has one choice.
#[derive(Debug)]
pub(super) struct Response {
    id: String,
    serial: String,
    created: u64,
    model: String,
    echo: Map<String, Value>,
    wants_logprobs: bool,
    /// The number of the next event.
    sequence: u64,
    /// What is out, in a stream.
    told: Joined,
    /// Log-probabilities that no text has carried yet.
    held: Vec<ChatToken>,
    /// Log-probabilities of each section that is out.
    logprobs: Vec<Vec<ChatToken>>,
    finish: Option<Finish>,
}

/// How a response stands.
#[derive(Clone, Copy, Debug)]
enum State<'a> {
    InProgress,
    Ended(&'a Finish, Usage),
    Failed(&'a Refusal),
}

impl Response {
    pub(super) fn new(label: Label, logprobs: LogprobsWish, echo: Map<String, Value>) -> Self {
        let Label { serial, created, model } = label;
        Self {
            id: format!("resp_{serial}"),
            serial,
            created,
            model,
            echo,
            wants_logprobs: logprobs != LogprobsWish::None,
            sequence: 0,
            told: Joined::default(),
            held: Vec::new(),
            logprobs: Vec::new(),
            finish: None,
        }
    }

    /// The response object.
    fn json(&self, state: State<'_>, output: Vec<Value>) -> Value {
        let (status, error, incomplete, usage) = match state {
            State::InProgress => ("in_progress", Value::Null, Value::Null, Value::Null),
            State::Failed(refusal) => ("failed", error_json(&refusal.message), Value::Null, Value::Null),
            State::Ended(finish, usage) => {
                let usage = usage_json(usage, finish.reasoning_tokens);
                match finish.reason {
                    FinishReason::Stop => ("completed", Value::Null, Value::Null, usage),
                    FinishReason::Length => {
                        ("incomplete", Value::Null, json!({"reason": "max_output_tokens"}), usage)
                    }
                    FinishReason::Abort | FinishReason::NoToken => {
                        ("failed", error_json("the server ended this answer early"), Value::Null, usage)
                    }
                }
            }
        };
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "model": self.model,
            "output": output,
            "usage": usage,
        });
        if let Value::Object(fields) = &mut response {
            fields.extend(self.echo.clone());
        }
        response
    }

    /// The output so far; its last item has `last_status`, the others are completed.
    fn output(&self, sections: &[Section], logprobs: &[Vec<ChatToken>], last_status: &str) -> Vec<Value> {
        let item = |(index, section)| {
            let status = if index + 1 == sections.len() { last_status } else { "completed" };
            let logprobs = logprobs.get(index).map_or(&[][..], Vec::as_slice);
            self.item(index, section, logprobs, status)
        };
        sections.iter().enumerate().map(item).collect()
    }

    fn item(&self, index: usize, section: &Section, logprobs: &[ChatToken], status: &str) -> Value {
        let id = self.item_id(index, section);
        match section {
            Section::Text(_) => json!({
                "id": id,
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [content(section, logprobs)],
            }),
            Section::Reasoning(_) => json!({
                "id": id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": [content(section, &[])],
            }),
            Section::Call(JoinedCall { id: call_id, name, arguments }) => json!({
                "id": id,
                "type": "function_call",
                "status": status,
                "call_id": call_id,
                "name": name,
                "arguments": arguments,
            }),
        }
    }

    fn item_id(&self, index: usize, section: &Section) -> String {
        let prefix = match section {
            Section::Text(_) => "msg",
            Section::Reasoning(_) => "rs",
            Section::Call(_) => "fc",
        };
        format!("{prefix}_{}{index:02x}", self.serial)
    }

    /// Tells an event. `body` is an object without type and number.
    fn tell(&mut self, kind: &str, body: Value, out: &mut Frames) {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        if let (Value::Object(event), Value::Object(body)) = (&mut event, body) {
            event.extend(body);
        }
        self.sequence += 1;
        out.event(kind, &event.to_string());
    }

    /// Tells an event about the content of the section that is being told.
    fn tell_of_content(&mut self, kind: &str, (name, value): (&str, Value), out: &mut Frames) {
        let Some((index, section)) = self.told.sections.iter().enumerate().next_back() else { return };
        let mut body = json!({"item_id": self.item_id(index, section), "output_index": index});
        if !matches!(section, Section::Call(_)) {
            body["content_index"] = 0.into();
        }
        body[name] = value;
        self.tell(kind, body, out);
    }

    /// A section has begun.
    fn open(&mut self, empty: &Section, out: &mut Frames) {
        let index = self.logprobs.len();
        self.logprobs.push(Vec::new());
        let has_content = !matches!(empty, Section::Call(_));
        let mut item = self.item(index, empty, &[], "in_progress");
        if has_content {
            item["content"] = json!([]);
        }
        self.tell("response.output_item.added", json!({"output_index": index, "item": item}), out);
        if has_content {
            self.tell_of_content("response.content_part.added", ("part", content(empty, &[])), out);
        }
    }

    /// The section that was being told is over.
    fn close(&mut self, status: &str, out: &mut Frames) {
        let Some((index, section)) = self.told.sections.iter().enumerate().next_back() else { return };
        let section = section.clone();
        let logprobs = std::mem::take(&mut self.logprobs[index]);
        match &section {
            Section::Text(text) => {
                // The event has the log-probabilities beside the text.
                let body = json!({"item_id": self.item_id(index, &section), "output_index": index,
                    "content_index": 0, "text": text, "logprobs": logprobs});
                self.tell("response.output_text.done", body, out);
            }
            Section::Reasoning(text) => {
                self.tell_of_content("response.reasoning_text.done", ("text", json!(text)), out);
            }
            Section::Call(JoinedCall { arguments, .. }) => {
                let arguments = ("arguments", json!(arguments));
                self.tell_of_content("response.function_call_arguments.done", arguments, out);
            }
        }
        if !matches!(section, Section::Call(_)) {
            let part = content(&section, &logprobs);
            self.tell_of_content("response.content_part.done", ("part", part), out);
        }
        let item = self.item(index, &section, &logprobs, status);
        self.tell("response.output_item.done", json!({"output_index": index, "item": item}), out);
        self.logprobs[index] = logprobs;
    }

    /// Takes in the log-probabilities of tokens that came.
    fn hold(&mut self, tokens: &NewTokens) {
        if self.wants_logprobs {
            self.held.extend(chat_tokens(&tokens.logprobs));
        }
    }

    fn tell_text(&mut self, text: &str, out: &mut Frames) {
        let new = std::mem::take(&mut self.held);
        let Some((index, section)) = self.told.sections.iter().enumerate().next_back() else { return };
        let body = json!({"item_id": self.item_id(index, section), "output_index": index,
            "content_index": 0, "delta": text, "logprobs": new});
        self.logprobs[index].extend(new);
        self.tell("response.output_text.delta", body, out);
    }
}

impl Form for Response {
    fn id(&self) -> &str {
        &self.id
    }

    fn begin(&mut self, _usage: Usage, out: &mut Frames) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.json(State::InProgress, Vec::new());
            self.tell(kind, json!({"response": response}), out);
        }
    }

    fn part(&mut self, new: NewPart<'_>, out: &mut Frames) {
        self.hold(&new.tokens);
        let begun = self.told.is_beginning(new.part).then(|| Section::begun_by(new.part)).flatten();
        if begun.is_some() {
            self.close("completed", out);
        }
        self.told.add(new.part);
        if let Some(empty) = &begun {
            self.open(empty, out);
        }
        match new.part {
            Part::TextDelta(text) => self.tell_text(text, out),
            Part::ReasoningDelta(text) => {
                self.tell_of_content("response.reasoning_text.delta", ("delta", json!(text)), out);
            }
            Part::ToolCallArgumentsDelta { text, .. } => {
                self.tell_of_content("response.function_call_arguments.delta", ("delta", json!(text)), out);
            }
            Part::ToolCallStart { .. } => {}
        }
    }

    fn finish(&mut self, _choice: usize, finish: &Finish, rest: NewTokens, out: &mut Frames) {
        self.hold(&rest);
        let held = std::mem::take(&mut self.held);
        if let (Some(Section::Text(_)), Some(logprobs)) =
            (self.told.sections.last(), self.logprobs.last_mut())
        {
            logprobs.extend(held);
        }
        self.close(item_status(finish), out);
        self.finish = Some(finish.clone());
    }

    fn end(&mut self, usage: Usage, out: &mut Frames) {
        let Some(finish) = self.finish.take() else { return };
        let kind = match finish.reason {
            FinishReason::Stop => "response.completed",
            FinishReason::Length => "response.incomplete",
            FinishReason::Abort | FinishReason::NoToken => "response.failed",
        };
        let output = self.output(&self.told.sections, &self.logprobs, item_status(&finish));
        let response = self.json(State::Ended(&finish, usage), output);
        self.tell(kind, json!({"response": response}), out);
    }

    fn fail(&mut self, refusal: &Refusal, _errors: ErrorForm, out: &mut Frames) {
        if self.sequence == 0 {
            self.begin(Usage::default(), out);
        }
        let output = self.output(&self.told.sections, &self.logprobs, "incomplete");
        let response = self.json(State::Failed(refusal), output);
        self.tell("response.failed", json!({"response": response}), out);
    }

    /// Log-probabilities stand in the first text.
    fn whole(&mut self, choices: &[WholeChoice], usage: Usage) -> String {
        let WholeChoice { joined, tokens, finish } =
            choices.first().expect("invariant: a response has one choice");
        self.hold(tokens);
        let mut all = Some(std::mem::take(&mut self.held));
        let logprobs = |section: &Section| match section {
            Section::Text(_) => all.take().unwrap_or_default(),
            Section::Reasoning(_) | Section::Call(_) => Vec::new(),
        };
        let logprobs: Vec<_> = joined.sections.iter().map(logprobs).collect();
        let output = self.output(&joined.sections, &logprobs, item_status(finish));
        self.json(State::Ended(finish, usage), output).to_string()
    }
}

/// The status of an answer's last item.
fn item_status(finish: &Finish) -> &'static str {
    if finish.reason == FinishReason::Stop { "completed" } else { "incomplete" }
}

/// The content part of a text or of reasoning.
fn content(section: &Section, logprobs: &[ChatToken]) -> Value {
    match section {
        Section::Text(text) => {
            json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
        }
        Section::Reasoning(text) => json!({"type": "reasoning_text", "text": text}),
        Section::Call(_) => Value::Null,
    }
}

fn error_json(message: &str) -> Value {
    json!({"code": "server_error", "message": message})
}

fn usage_json(usage: Usage, reasoning_tokens: u32) -> Value {
    let Usage { prompt_tokens, cached_tokens, completion_tokens } = usage;
    json!({
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens.saturating_add(completion_tokens),
    })
}
