//! The parts of OpenAI's streamed answers that are read here; everything else in them is passed over.

use super::ClientError;
use serde::Deserialize;
use serde_json::Value;

/// One event of a chat or completions stream.
#[derive(Debug, Default, Deserialize)]
pub struct Chunk {
    #[serde(default)]
    choices: Vec<ChunkChoice>,
    /// Token counts; in the last chunk, where asked for.
    #[serde(default)]
    pub usage: Option<Usage>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
struct ChunkChoice {
    #[serde(default)]
    delta: Option<Delta>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<String>,
    /// As Lockstep, SGLang and DeepSeek name it; vLLM says `reasoning`.
    #[serde(default, alias = "reasoning")]
    reasoning_content: Option<String>,
}

/// Token counts of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    #[serde(default)]
    pub completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl Usage {
    /// What is known of an answer whose server does not count: its tokens, more or less.
    pub fn of_answer(completion_tokens: u64) -> Self {
        Self { completion_tokens, ..Self::default() }
    }

    /// Tokens of the prompt that the server had computed before.
    pub fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0)
    }
}

impl Chunk {
    /// Of an event's data. Errors: no JSON object of this form, or the server's error event.
    pub fn parse(base: &str, data: &str) -> Result<Self, ClientError> {
        let chunk: Self = serde_json::from_str(data).map_err(|e| ClientError::Protocol {
            base: base.to_owned(),
            reason: format!("an event is no chunk of an answer ({e})"),
        })?;
        match &chunk.error {
            None => Ok(chunk),
            Some(error) => Err(ClientError::Event(error_message(error))),
        }
    }

    /// Text of the first choice.
    pub fn text(&self) -> &str {
        let Some(choice) = self.choices.first() else { return "" };
        let delta = choice.delta.as_ref().and_then(|delta| delta.content.as_deref());
        choice.text.as_deref().or(delta).unwrap_or_default()
    }

    /// Reasoning of the first choice.
    pub fn reasoning(&self) -> &str {
        let delta = self.choices.first().and_then(|c| c.delta.as_ref());
        delta.and_then(|d| d.reasoning_content.as_deref()).unwrap_or_default()
    }

    /// Why the first choice ended, if it has.
    pub fn finish_reason(&self) -> Option<&str> {
        self.choices.first()?.finish_reason.as_deref()
    }
}

/// The words of an error object, whatever server wrote it.
pub fn error_message(error: &Value) -> String {
    let nested = error.get("message").or_else(|| error.get("detail"));
    match nested.unwrap_or(error) {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_both_endpoints() {
        let parse = |data| Chunk::parse("http://h", data).unwrap();
        let chat =
            parse(r#"{"choices":[{"delta":{"content":"a","reasoning":"b"},"finish_reason":null}],"x":1}"#);
        assert_eq!((chat.text(), chat.reasoning(), chat.finish_reason()), ("a", "b", None));
        let text = parse(r#"{"choices":[{"text":"c","finish_reason":"length"}],"usage":null}"#);
        assert_eq!((text.text(), text.finish_reason(), text.usage), ("c", Some("length"), None));
        let usage = parse(
            r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#,
        );
        let usage = usage.usage.unwrap();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()), (7, 2, 4));
    }

    #[test]
    fn error_events_are_errors() {
        let error = Chunk::parse("http://h", r#"{"error":{"message":"the engine died","code":null}}"#);
        assert_eq!(error.unwrap_err(), ClientError::Event("the engine died".into()));
        assert!(matches!(Chunk::parse("http://h", "no"), Err(ClientError::Protocol { .. })));
    }
}
