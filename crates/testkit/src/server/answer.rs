//! What a server answers, whole or as a stream, in the form that tests compare.

use crate::http::EventStream;
use serde_json::Value;

/// One non-streamed answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Text of choice 0.
    pub text: String,
    /// finish_reason of choice 0.
    pub finish: String,
    /// usage.prompt_tokens.
    pub prompt_tokens: u64,
    /// usage.completion_tokens.
    pub completion_tokens: u64,
}

/// A streamed answer, read to its end.
#[derive(Clone, Debug, Default)]
pub struct Streamed {
    /// All chunks, in order.
    pub chunks: Vec<Value>,
    /// Texts of choice 0, joined.
    pub text: String,
    /// Every finish_reason that was not null.
    pub finishes: Vec<String>,
    /// `data: [DONE]` came last.
    pub done: bool,
    /// The error object of an error event.
    pub error: Option<Value>,
    /// usage, from any chunk.
    pub usage: Option<Value>,
    /// The connection broke before the body's end.
    pub broken: Option<String>,
}

impl Streamed {
    /// Takes in one event's data.
    pub fn push(&mut self, data: &str) {
        if data == "[DONE]" {
            self.done = true;
            return;
        }
        assert!(!self.done, "an event after [DONE]: {data}");
        let chunk: Value =
            serde_json::from_str(data).unwrap_or_else(|e| panic!("event is not JSON ({e}): {data}"));
        if let Some(error) = chunk.get("error").filter(|e| !e.is_null()) {
            self.error = Some(error.clone());
        }
        let choice = &chunk["choices"][0];
        let text = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
        self.text += text.unwrap_or("");
        self.finishes.extend(choice["finish_reason"].as_str().map(str::to_owned));
        if let Some(usage) = chunk.get("usage").filter(|u| !u.is_null()) {
            self.usage = Some(usage.clone());
        }
        self.chunks.push(chunk);
    }

    /// Reads `stream` to its end, however it ends.
    pub fn read(stream: &mut EventStream) -> Self {
        let mut streamed = Self::default();
        streamed.read_rest(stream);
        streamed
    }

    /// Reads what is left of `stream`, however it ends.
    pub fn read_rest(&mut self, stream: &mut EventStream) {
        loop {
            match stream.next_event() {
                Ok(Some(data)) => self.push(&data),
                Ok(None) => return,
                Err(e) => {
                    self.broken = Some(e.to_string());
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_joined() {
        let mut streamed = Streamed::default();
        streamed.push(r#"{"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}]}"#);
        streamed.push(r#"{"choices":[{"index":0,"delta":{"content":" a"},"finish_reason":null}]}"#);
        streamed.push(r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#);
        streamed.push(r#"{"choices":[],"usage":{"prompt_tokens":1}}"#);
        streamed.push("[DONE]");
        assert_eq!((streamed.text.as_str(), streamed.done, streamed.chunks.len()), (" a", true, 4));
        assert_eq!(streamed.finishes, ["stop"]);
        assert!(streamed.usage.is_some() && streamed.error.is_none());
    }
}
