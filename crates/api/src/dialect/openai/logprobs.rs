//! Log-probabilities in the two shapes that OpenAI has for them, and in vLLM's for a prompt.
//!
//! One entry per generated token, the end token included, so that entries and `completion_tokens` agree; with
//! `echo` the prompt's tokens come first. A token that is no whole character is spelled by its bytes
//! (`\xf0\x9f`, in completions `bytes:\xf0\x9f`), as OpenAI does it, so that different tokens stay different.

use crate::request::Endpoint;
use lockstep_core::TokenId;
use lockstep_wire::{TextLogprobs, TokenText};
use serde::ser::{Serialize, Serializer};

/// The value of a choice's `logprobs`.
#[derive(serde::Serialize)]
#[serde(untagged)]
pub(crate) enum LogprobsBody {
    Chat(ChatLogprobs),
    Completions(CompletionsLogprobs),
}

#[derive(serde::Serialize)]
pub(super) struct ChatLogprobs {
    content: Vec<ChatToken>,
    /// Always null.
    refusal: (),
}

/// A token of a chat answer; the same in responses.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct ChatToken {
    #[serde(flatten)]
    token: ChatAlternative,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(Clone, Debug, serde::Serialize)]
struct ChatAlternative {
    token: String,
    logprob: Option<f32>,
    bytes: Vec<u8>,
}

#[derive(serde::Serialize)]
pub(super) struct CompletionsLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    /// Null when no alternatives were asked for.
    top_logprobs: Option<Vec<Option<Alternatives>>>,
    text_offset: Vec<usize>,
}

/// An object from token to log-probability, best first.
struct Alternatives(Vec<(String, f32)>);

impl Serialize for Alternatives {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

/// Where the next token of a choice begins in its text, in characters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TextOffset(usize);

impl TextOffset {
    /// The offset of `token`; moves on behind it. A token inside a character has the offset behind it.
    fn next(&mut self, token: &TokenText) -> usize {
        let offset = self.0;
        if token.is_shown {
            // Every byte that does not continue a character begins one.
            self.0 += token.bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count();
        }
        offset
    }
}

impl LogprobsBody {
    /// The shape of `endpoint` for `tokens`, which follow those already counted in `offset`; `top` is how many
    /// alternatives were asked for.
    pub(super) fn new(
        endpoint: Endpoint,
        top: u32,
        tokens: &[TextLogprobs],
        offset: &mut TextOffset,
    ) -> Self {
        match endpoint {
            Endpoint::Chat => Self::Chat(ChatLogprobs { content: chat_tokens(tokens), refusal: () }),
            Endpoint::Completions => {
                let texts = || tokens.iter().map(|t| completions_text(&t.token));
                Self::Completions(CompletionsLogprobs {
                    tokens: texts().collect(),
                    token_logprobs: tokens.iter().map(|t| t.logprob).collect(),
                    top_logprobs: (top > 0).then(|| tokens.iter().map(|t| alternatives(t, top)).collect()),
                    text_offset: tokens.iter().map(|t| offset.next(&t.token)).collect(),
                })
            }
        }
    }
}

/// The tokens of a chat answer.
pub(crate) fn chat_tokens(tokens: &[TextLogprobs]) -> Vec<ChatToken> {
    tokens.iter().map(chat_token).collect()
}

fn chat_token(token: &TextLogprobs) -> ChatToken {
    let alternative = |token: &TokenText, logprob| ChatAlternative {
        token: text_or_escaped(&token.bytes, ""),
        logprob,
        bytes: token.bytes.clone(),
    };
    ChatToken {
        token: alternative(&token.token, token.logprob),
        top_logprobs: token.top.iter().map(|(text, logprob)| alternative(text, Some(*logprob))).collect(),
    }
}

/// The alternatives and the token itself, which OpenAI adds where it is not among them. Null for the first
/// token of a prompt.
fn alternatives(token: &TextLogprobs, top: u32) -> Option<Alternatives> {
    let logprob = token.logprob?;
    let mut list: Vec<(String, f32)> = Vec::with_capacity(token.top.len() + 1);
    // An echoed prompt's may be more: `prompt_logprobs` asked for them.
    let best = token.top.iter().take(top as usize);
    let all = best.map(|(text, logprob)| (text, *logprob)).chain([(&token.token, logprob)]);
    for (text, logprob) in all {
        let text = completions_text(text);
        // Two tokens may have the same text; an object has room for the likelier one.
        if list.iter().all(|(other, _)| *other != text) {
            list.push((text, logprob));
        }
    }
    Some(Alternatives(list))
}

/// The tokens of a prompt in vLLM's shape: null for the first, then an object from token id to [`RankedToken`], the
/// token's own first.
#[derive(serde::Serialize)]
#[serde(transparent)]
pub(super) struct PromptLogprobs(Vec<Option<RankedTokens>>);

struct RankedTokens(Vec<(TokenId, RankedToken)>);

#[derive(serde::Serialize)]
struct RankedToken {
    logprob: f32,
    /// Place among all tokens, 1 for the most likely.
    rank: u32,
    decoded_token: String,
}

impl Serialize for RankedTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, token)| (id, token)))
    }
}

impl PromptLogprobs {
    /// Of `tokens` with their `top` alternatives.
    pub(super) fn new(tokens: &[TextLogprobs], top: u32) -> Self {
        let ranked = |token: &TokenText, logprob, rank| {
            (token.id, RankedToken { logprob, rank, decoded_token: text_or_escaped(&token.bytes, "") })
        };
        let entry = |token: &TextLogprobs| {
            let own = ranked(&token.token, token.logprob?, token.rank);
            let best = token.top.iter().zip(1..=top);
            let best = best.filter(|((other, _), _)| other.id != token.token.id);
            let others = best.map(|((other, logprob), rank)| ranked(other, *logprob, rank));
            Some(RankedTokens(std::iter::once(own).chain(others).collect()))
        };
        Self(tokens.iter().map(entry).collect())
    }
}

fn completions_text(token: &TokenText) -> String {
    text_or_escaped(&token.bytes, "bytes:")
}

/// The text that `bytes` are, or their escaped spelling behind `prefix`.
fn text_or_escaped(bytes: &[u8], prefix: &str) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => bytes.iter().fold(prefix.to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn token(bytes: &[u8], is_shown: bool, logprob: Option<f32>, top: &[(&str, f32)]) -> TextLogprobs {
        let text = |bytes: &[u8], is_shown| TokenText { id: 0, bytes: bytes.to_vec(), is_shown };
        let top = top.iter().map(|(t, l)| (text(t.as_bytes(), true), *l)).collect();
        TextLogprobs { token: text(bytes, is_shown), logprob, rank: 7, top }
    }

    fn value(body: &LogprobsBody) -> Value {
        serde_json::from_str(&crate::respond::to_json(body)).unwrap()
    }

    #[test]
    fn completions_list_tokens_alternatives_and_offsets() {
        let tokens = [
            token(b"<s>", false, None, &[]),
            token("é".as_bytes(), true, Some(-0.5), &[("a", -0.25), ("é", -0.5)]),
            token(&[0xF0, 0x9F], true, Some(-1.0), &[("b", -0.5)]),
            token(&[0x98, 0x80], true, Some(-2.0), &[]),
            token(b"x", true, Some(-3.0), &[]),
        ];
        let mut offset = TextOffset::default();
        let body = value(&LogprobsBody::new(Endpoint::Completions, 2, &tokens, &mut offset));
        assert_eq!(body["tokens"], json!(["<s>", "é", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "x"]));
        assert_eq!(body["token_logprobs"], json!([null, -0.5, -1.0, -2.0, -3.0]));
        assert_eq!(body["text_offset"], json!([0, 0, 1, 2, 2]));
        assert_eq!(body["top_logprobs"][0], Value::Null);
        assert_eq!(body["top_logprobs"][1].to_string(), r#"{"a":-0.25,"é":-0.5}"#);
        assert_eq!(body["top_logprobs"][2], json!({"b": -0.5, "bytes:\\xf0\\x9f": -1.0}));
        let next = [token(b"y", true, Some(-1.0), &[])];
        let body = value(&LogprobsBody::new(Endpoint::Completions, 0, &next, &mut offset));
        assert_eq!((&body["text_offset"], &body["top_logprobs"]), (&json!([3]), &Value::Null));
    }

    #[test]
    fn chat_lists_tokens_with_their_bytes() {
        let tokens = [token(&[0xE6, 0xBC], true, Some(-1.5), &[("é", -0.5)])];
        let body = value(&LogprobsBody::new(Endpoint::Chat, 1, &tokens, &mut TextOffset::default()));
        let top = json!([{"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}]);
        let content =
            json!([{"token": "\\xe6\\xbc", "logprob": -1.5, "bytes": [0xE6, 0xBC], "top_logprobs": top}]);
        assert_eq!(body, json!({"content": content, "refusal": null}));
    }

    #[test]
    fn a_prompt_is_listed_by_token_id() {
        let mut token = token(b"b", true, Some(-1.5), &[("a", -0.5), ("b", -1.5), ("c", -2.0)]);
        for (id, (text, _)) in (5..).zip(&mut token.top) {
            text.id = id;
        }
        token.token.id = 6;
        token.rank = 2;
        let first = TextLogprobs { logprob: None, ..token.clone() };
        let body = crate::respond::to_json(&PromptLogprobs::new(&[first, token], 2));
        let own = r#""6":{"logprob":-1.5,"rank":2,"decoded_token":"b"}"#;
        let best = r#""5":{"logprob":-0.5,"rank":1,"decoded_token":"a"}"#;
        assert_eq!(body, format!("[null,{{{own},{best}}}]"));
    }
}
