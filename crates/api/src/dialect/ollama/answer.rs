//! The JSON of `/api/chat` and `/api/generate`.

use super::super::openai::{ChatToken, chat_tokens};
use crate::answer::{
    Finish, Form, Frames, Framing, Joined, JoinedCall, Label, NewPart, NewTokens, Section, WholeChoice,
};
use crate::clock::{nanos, rfc3339};
use crate::parsers::Event as Part;
use crate::request::LogprobsWish;
use crate::respond::to_json;
use lockstep_wire::Usage;
use serde::Serialize;
use serde_json::{Map, Value};
use std::time::{Duration, Instant, SystemTime};

/// Where an answer's text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// In `message`, as chats have it.
    Message,
    /// In `response`.
    Response,
}

/// How an answer is written. There is one choice.
#[derive(Debug)]
pub(super) struct Answer {
    label: Label,
    field: Field,
    started: Instant,
    /// What came of the answer, for the call that is being written.
    joined: Joined,
    /// Calls that the client has.
    calls_sent: usize,
    /// Log-probabilities that no line has carried yet; `None`: nobody asked for them.
    logprobs: Option<Vec<ChatToken>>,
}

/// One line of a stream, or a whole answer.
#[derive(Serialize)]
struct Line<'a> {
    model: &'a str,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a str>,
    done: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<ChatToken>,
    #[serde(flatten)]
    end: Option<End>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
}

#[derive(Serialize)]
struct Call<'a> {
    id: &'a str,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    index: usize,
    name: &'a str,
    arguments: Map<String, Value>,
}

/// What the last line adds; durations in nanoseconds.
#[derive(Serialize)]
struct End {
    done_reason: &'static str,
    total_duration: u64,
    /// The model is loaded before the server listens.
    load_duration: u64,
    prompt_eval_count: u32,
    prompt_eval_duration: u64,
    eval_count: u32,
    eval_duration: u64,
}

impl End {
    /// Of a choice whose answer has taken `total` so far. An aborted one has no times of its parts.
    fn of(finish: &Finish, total: Duration) -> Self {
        let nanos_of = |ms: f64| nanos(Duration::from_secs_f64(ms.max(0.0) / 1e3));
        let timing = finish.timing.as_ref();
        Self {
            done_reason: finish.reason.as_openai(),
            total_duration: nanos(total),
            load_duration: 0,
            prompt_eval_count: finish.usage.prompt_tokens,
            prompt_eval_duration: timing.map_or(0, |timing| nanos_of(timing.time_to_first_token_ms)),
            eval_count: finish.usage.completion_tokens,
            eval_duration: timing.map_or(0, |timing| nanos_of(timing.decode_ms)),
        }
    }
}

/// A call with the object that its arguments spell; none when the answer ended inside them, since a client would
/// run half a call.
fn call(index: usize, call: &JoinedCall) -> Option<Call<'_>> {
    let arguments = serde_json::from_str(&call.arguments).ok()?;
    Some(Call { id: &call.id, function: Function { index, name: &call.name, arguments } })
}

impl Answer {
    pub(super) fn new(label: Label, field: Field, logprobs: LogprobsWish) -> Self {
        Self {
            label,
            field,
            started: Instant::now(),
            joined: Joined::default(),
            calls_sent: 0,
            logprobs: (logprobs != LogprobsWish::None).then(Vec::new),
        }
    }

    /// Keeps the log-probabilities of `tokens` for the next line.
    fn hold(&mut self, tokens: &NewTokens) {
        if let Some(held) = &mut self.logprobs {
            held.extend(chat_tokens(&tokens.logprobs));
        }
    }

    fn line(&mut self, content: &str, thinking: &str, tool_calls: Vec<Call<'_>>, end: Option<End>) -> String {
        let thinking = (!thinking.is_empty()).then_some(thinking);
        let is_message = self.field == Field::Message;
        let logprobs = self.logprobs.as_mut().map(std::mem::take).unwrap_or_default();
        to_json(&Line {
            model: &self.label.model,
            created_at: rfc3339(SystemTime::now()),
            message: is_message.then_some(Message { role: "assistant", content, thinking, tool_calls }),
            response: (!is_message).then_some(content),
            thinking: thinking.filter(|_| !is_message),
            done: end.is_some(),
            logprobs,
            end,
        })
    }

    /// The calls that are complete and that the client does not have; the last one of all only if `all`.
    fn send_calls(&mut self, all: bool, out: &mut Frames) {
        let ends_inside = matches!(self.joined.sections.last(), Some(Section::Call(_))) && !all;
        let complete = self.joined.calls().count() - usize::from(ends_inside);
        let joined = std::mem::take(&mut self.joined);
        let new = joined.calls().enumerate().take(complete).skip(self.calls_sent);
        let calls: Vec<_> = new.filter_map(|(index, new)| call(index, new)).collect();
        if !calls.is_empty() {
            out.line(&self.line("", "", calls, None));
        }
        self.joined = joined;
        self.calls_sent = complete;
    }
}

impl Form for Answer {
    fn id(&self) -> &str {
        &self.label.serial
    }

    fn framing(&self) -> Framing {
        Framing::Lines
    }

    fn part(&mut self, new: NewPart<'_>, out: &mut Frames) {
        self.hold(&new.tokens);
        match new.part {
            Part::TextDelta(text) => out.line(&self.line(text, "", Vec::new(), None)),
            Part::ReasoningDelta(text) => out.line(&self.line("", text, Vec::new(), None)),
            Part::ToolCallStart { .. } | Part::ToolCallArgumentsDelta { .. } => {
                self.joined.add(new.part);
                self.send_calls(false, out);
            }
        }
    }

    fn finish(&mut self, _choice: usize, finish: &Finish, rest: NewTokens, out: &mut Frames) {
        self.hold(&rest);
        self.send_calls(true, out);
        let end = End::of(finish, self.started.elapsed());
        out.line(&self.line("", "", Vec::new(), Some(end)));
    }

    fn end(&mut self, _usage: Usage, _out: &mut Frames) {}

    fn whole(&mut self, choices: &[WholeChoice], _usage: Usage) -> String {
        let Some(WholeChoice { joined, tokens, finish }) = choices.first() else { return String::new() };
        self.hold(tokens);
        let calls = joined.calls().enumerate().filter_map(|(index, new)| call(index, new)).collect();
        let end = End::of(finish, self.started.elapsed());
        self.line(&joined.text(), &joined.reasoning(), calls, Some(end))
    }
}
