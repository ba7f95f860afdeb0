//! The JSON of `/generate`.

use crate::answer::{Finish, Form, Frames, Label, NewPart, NewTokens, PromptTokens, WholeChoice};
use crate::parsers::Event as Part;
use crate::respond::to_json;
use lockstep_core::{FinishReason, TokenId};
use lockstep_wire::{TextLogprobs, TokenText, Usage};
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

/// What the client asked its answer to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    /// The whole answer is a list, and a stream's events tell their choice.
    pub(super) is_list: bool,
    /// One per choice, or none.
    pub(super) rids: Vec<String>,
    pub(super) logprobs: bool,
    /// The most likely tokens as well.
    pub(super) with_top: bool,
    /// Log-probabilities come with the tokens' texts.
    pub(super) with_text: bool,
    /// Log-probabilities of the prompt from this token on.
    pub(super) prompt_from: Option<usize>,
}

/// How an answer is written, with all it has said: streams repeat it.
#[derive(Debug)]
pub(super) struct Answer {
    label: Label,
    id: String,
    wish: Wish,
    started: Instant,
    choices: Vec<Choice>,
}

/// A choice so far.
#[derive(Debug, Default)]
struct Choice {
    text: String,
    prompt: Option<Arc<PromptTokens>>,
    ids: Vec<TokenId>,
    logprobs: Vec<TextLogprobs>,
}

impl Choice {
    fn add(&mut self, tokens: &NewTokens) {
        if let Some(prompt) = &tokens.prompt {
            self.prompt = Some(Arc::clone(prompt));
        }
        self.ids.extend_from_slice(&tokens.ids);
        self.logprobs.extend_from_slice(&tokens.logprobs);
    }
}

#[derive(Serialize)]
struct Item<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    text: &'a str,
    output_ids: &'a [TokenId],
    meta_info: Meta<'a>,
}

#[derive(Serialize)]
struct Meta<'a> {
    id: &'a str,
    /// Null while the choice goes on.
    finish_reason: Option<Reason<'a>>,
    prompt_tokens: u32,
    completion_tokens: u32,
    cached_tokens: u32,
    /// Seconds since the request was submitted.
    e2e_latency: f64,
    #[serde(flatten)]
    logprobs: Option<Logprobs>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Reason<'a> {
    Stop { matched: Matched<'a> },
    Length { length: u32 },
    Abort { message: &'static str },
}

/// What ended a choice: a stop string or an end token.
#[derive(Serialize)]
#[serde(untagged)]
enum Matched<'a> {
    Text(&'a str),
    Token(Option<TokenId>),
}

/// Log-probability, token and, if asked for, its text.
type Entry = (Option<f32>, TokenId, Option<String>);

#[derive(Serialize)]
struct Logprobs {
    #[serde(skip_serializing_if = "Option::is_none")]
    input_token_logprobs: Option<Vec<Entry>>,
    output_token_logprobs: Vec<Entry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_top_logprobs: Option<Vec<Option<Vec<Entry>>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_top_logprobs: Option<Vec<Option<Vec<Entry>>>>,
}

impl Answer {
    pub(super) fn new(label: Label, wish: Wish) -> Self {
        let id = wish.rids.first().cloned().unwrap_or_else(|| label.serial.clone());
        Self { label, id, wish, started: Instant::now(), choices: Vec::new() }
    }

    fn choice(&mut self, index: usize) -> &mut Choice {
        if self.choices.len() <= index {
            self.choices.resize_with(index + 1, Choice::default);
        }
        &mut self.choices[index]
    }

    /// One choice as it stands; `in_stream` tells which it is, where there are several.
    fn item(&self, index: usize, usage: Usage, finish: Option<&Finish>, in_stream: bool) -> String {
        let choice = &self.choices[index];
        let numbered = format!("{}-{index}", self.label.serial);
        let id = match self.wish.rids.get(index) {
            Some(rid) => rid,
            None if self.wish.is_list => &numbered,
            None => &self.id,
        };
        let meta_info = Meta {
            id,
            finish_reason: finish.map(|finish| self.reason(choice, finish)),
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_tokens,
            e2e_latency: self.started.elapsed().as_secs_f64(),
            logprobs: self.wish.logprobs.then(|| self.logprobs(choice)),
        };
        let index = (in_stream && self.wish.is_list).then_some(index);
        to_json(&Item { index, text: &choice.text, output_ids: &choice.ids, meta_info })
    }

    fn reason<'a>(&self, choice: &Choice, finish: &'a Finish) -> Reason<'a> {
        match finish.reason {
            FinishReason::Stop => Reason::Stop {
                matched: match &finish.stop {
                    Some(text) => Matched::Text(text),
                    None => Matched::Token(choice.ids.last().copied()),
                },
            },
            FinishReason::Length => Reason::Length { length: finish.usage.completion_tokens },
            FinishReason::Abort | FinishReason::NoToken => {
                Reason::Abort { message: "the request was aborted" }
            }
        }
    }

    fn logprobs(&self, choice: &Choice) -> Logprobs {
        let prompt = choice.prompt.as_ref().map_or(&[][..], |prompt| &prompt.logprobs);
        let prompt = self.wish.prompt_from.map(|from| prompt.get(from..).unwrap_or_default());
        let output = choice.logprobs.as_slice();
        let with_text = self.wish.with_text;
        let own =
            |list: &[TextLogprobs]| list.iter().map(|l| entry(&l.token, l.logprob, with_text)).collect();
        let top = |list: &[TextLogprobs]| {
            let all = |l: &TextLogprobs| {
                let entries = l.top.iter().map(|(token, logprob)| entry(token, Some(*logprob), with_text));
                l.logprob.map(|_| entries.collect())
            };
            list.iter().map(all).collect()
        };
        let with_top = self.wish.with_top;
        Logprobs {
            input_token_logprobs: prompt.map(own),
            output_token_logprobs: own(output),
            input_top_logprobs: prompt.filter(|_| with_top).map(top),
            output_top_logprobs: with_top.then(|| top(output)),
        }
    }
}

fn entry(token: &TokenText, logprob: Option<f32>, with_text: bool) -> Entry {
    (logprob, token.id, with_text.then(|| String::from_utf8_lossy(&token.bytes).into_owned()))
}

impl Form for Answer {
    fn id(&self) -> &str {
        &self.id
    }

    fn part(&mut self, new: NewPart<'_>, out: &mut Frames) {
        let choice = self.choice(new.choice);
        if let Part::TextDelta(text) = new.part {
            choice.text.push_str(text);
        }
        choice.add(&new.tokens);
        out.data(&self.item(new.choice, new.usage, None, true));
    }

    fn finish(&mut self, choice: usize, finish: &Finish, rest: NewTokens, out: &mut Frames) {
        self.choice(choice).add(&rest);
        out.data(&self.item(choice, finish.usage, Some(finish), true));
    }

    fn end(&mut self, _usage: Usage, out: &mut Frames) {
        out.data("[DONE]");
    }

    fn whole(&mut self, choices: &[WholeChoice], _usage: Usage) -> String {
        let mut items = Vec::with_capacity(choices.len());
        for (index, whole) in choices.iter().enumerate() {
            let choice = self.choice(index);
            choice.text = whole.joined.text();
            choice.add(&whole.tokens);
            items.push(self.item(index, whole.finish.usage, Some(&whole.finish), false));
        }
        if self.wish.is_list { format!("[{}]", items.join(",")) } else { items.concat() }
    }
}
