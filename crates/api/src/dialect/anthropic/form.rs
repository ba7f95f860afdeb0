//! Anthropic's message, whole and as events.
//!
//! `message_start`; per content block `content_block_start`, `content_block_delta`s, `content_block_stop`;
//! `message_delta` with the stop reason and the counts; `message_stop`. `ping` while nothing happens, `error`
//! instead of the rest where the answer is cut.

use crate::answer::{
    Finish, Form, Frames, Joined, JoinedCall, Label, NewPart, NewTokens, Section, WholeChoice,
};
use crate::errors::ErrorForm;
use crate::parsers::Event as Part;
use lockstep_core::{FinishReason, Refusal};
use lockstep_wire::Usage;
use serde_json::{Map, Value, json};

/// One answer. It has one choice.
#[derive(Debug)]
pub(super) struct Message {
    id: String,
    model: String,
    /// What is out, in a stream.
    told: Joined,
}

impl Message {
    pub(super) fn new(label: Label) -> Self {
        let Label { serial, model, .. } = label;
        Self { id: format!("msg_{serial}"), model, told: Joined::default() }
    }

    /// The message object; `end` is its stop reason and stop sequence.
    fn json(&self, content: Vec<Value>, end: (Value, Value), usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": end.0,
            "stop_sequence": end.1,
            "usage": usage,
        })
    }

    /// The place of the block that is being told.
    fn block(&self) -> usize {
        self.told.sections.len().saturating_sub(1)
    }
}

impl Form for Message {
    fn id(&self) -> &str {
        &self.id
    }

    fn keep_alive(&self) -> &'static str {
        "event: ping\ndata: {\"type\":\"ping\"}\n\n"
    }

    fn begin(&mut self, usage: Usage, out: &mut Frames) {
        let message = self.json(Vec::new(), (Value::Null, Value::Null), usage_json(usage));
        event(out, &json!({"type": "message_start", "message": message}));
    }

    fn part(&mut self, new: NewPart<'_>, out: &mut Frames) {
        let is_beginning = self.told.is_beginning(new.part);
        if is_beginning && !self.told.sections.is_empty() {
            stop_block(self.block(), out);
        }
        self.told.add(new.part);
        if is_beginning {
            let block = match new.part {
                Part::ReasoningDelta(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
                Part::ToolCallStart { id, name, .. } => {
                    json!({"type": "tool_use", "id": id, "name": name, "input": {}})
                }
                Part::TextDelta(_) | Part::ToolCallArgumentsDelta { .. } => {
                    json!({"type": "text", "text": ""})
                }
            };
            event(
                out,
                &json!({"type": "content_block_start", "index": self.block(), "content_block": block}),
            );
        }
        let delta = match new.part {
            Part::TextDelta(text) => json!({"type": "text_delta", "text": text}),
            Part::ReasoningDelta(text) => json!({"type": "thinking_delta", "thinking": text}),
            Part::ToolCallArgumentsDelta { text, .. } => {
                json!({"type": "input_json_delta", "partial_json": text})
            }
            Part::ToolCallStart { .. } => return,
        };
        event(out, &json!({"type": "content_block_delta", "index": self.block(), "delta": delta}));
    }

    fn finish(&mut self, _choice: usize, finish: &Finish, _rest: NewTokens, out: &mut Frames) {
        if !self.told.sections.is_empty() {
            stop_block(self.block(), out);
        }
        let (reason, sequence) = end(finish);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        event(out, &json!({"type": "message_delta", "delta": delta, "usage": usage_of(finish)}));
    }

    fn end(&mut self, _usage: Usage, out: &mut Frames) {
        event(out, &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, refusal: &Refusal, errors: ErrorForm, out: &mut Frames) {
        out.event("error", &errors.json(refusal));
    }

    fn whole(&mut self, choices: &[WholeChoice], _usage: Usage) -> String {
        let WholeChoice { joined, finish, .. } =
            choices.first().expect("invariant: a message has one choice");
        self.json(joined.sections.iter().map(block_json).collect(), end(finish), usage_of(finish)).to_string()
    }
}

/// An event is named by its type.
fn event(out: &mut Frames, body: &Value) {
    out.event(body["type"].as_str().unwrap_or_default(), &body.to_string());
}

fn stop_block(index: usize, out: &mut Frames) {
    event(out, &json!({"type": "content_block_stop", "index": index}));
}

fn block_json(section: &Section) -> Value {
    match section {
        Section::Text(text) => json!({"type": "text", "text": text}),
        Section::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Section::Call(JoinedCall { id, name, arguments }) => {
            // An answer that ended inside the call has no whole input.
            let input: Map<String, Value> = serde_json::from_str(arguments).unwrap_or_default();
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

/// Stop reason and stop sequence. An answer that the server ended is told as one that met its limit: the API has
/// no other word for an answer that is cut.
fn end(finish: &Finish) -> (Value, Value) {
    let reason = match (finish.reason, &finish.stop) {
        (FinishReason::Length | FinishReason::Abort | FinishReason::NoToken, _) => "max_tokens",
        (FinishReason::Stop, _) if finish.has_calls => "tool_use",
        (FinishReason::Stop, Some(stop)) => return (json!("stop_sequence"), json!(stop)),
        (FinishReason::Stop, None) => "end_turn",
    };
    (json!(reason), Value::Null)
}

/// The counts of an answer that has ended.
fn usage_of(finish: &Finish) -> Value {
    let mut usage = usage_json(finish.usage);
    if finish.reasoning_tokens > 0 {
        usage["output_tokens_details"] = json!({"thinking_tokens": finish.reasoning_tokens});
    }
    usage
}

/// Prompt tokens that were in the cache are counted apart.
fn usage_json(usage: Usage) -> Value {
    let Usage { prompt_tokens, cached_tokens, completion_tokens } = usage;
    json!({
        "input_tokens": prompt_tokens.saturating_sub(cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": completion_tokens,
    })
}
