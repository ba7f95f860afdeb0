//! Counts and speed of answers, for `/stats`.

use crate::client::chunk::Usage;
use std::fmt;
use std::time::{Duration, Instant};

/// One answer.
#[derive(Clone, Copy, Debug)]
pub struct AnswerStats {
    sent: Instant,
    first: Option<Instant>,
    last: Instant,
    /// Chunks that held text, for servers that give no usage and for answers that were stopped.
    chunks: u64,
    usage: Option<Usage>,
}

impl AnswerStats {
    /// Of a request that is sent now.
    pub fn sent_now() -> Self {
        let now = Instant::now();
        Self { sent: now, first: None, last: now, chunks: 0, usage: None }
    }

    /// Text arrived.
    pub fn text_at(&mut self, at: Instant) {
        self.first.get_or_insert(at);
        self.last = at;
        self.chunks += 1;
    }

    /// The server counted.
    pub fn counted(&mut self, usage: Usage) {
        self.usage = Some(usage);
    }

    /// From sending to the first text.
    fn ttft(&self) -> Option<Duration> {
        Some(self.first?.duration_since(self.sent))
    }

    fn completion_tokens(&self) -> u64 {
        self.usage.map_or(self.chunks, |usage| usage.completion_tokens)
    }

    /// Tokens per second behind the first one.
    fn tokens_per_s(&self) -> Option<f64> {
        let seconds = self.last.duration_since(self.first?).as_secs_f64();
        let tokens = self.completion_tokens().saturating_sub(1);
        (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
    }
}

impl fmt::Display for AnswerStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.usage {
            Some(usage) => write!(
                f,
                "{} prompt tokens ({} cached), {} generated",
                usage.prompt_tokens,
                usage.cached_tokens(),
                usage.completion_tokens
            )?,
            None => write!(f, "about {} tokens generated", self.chunks)?,
        }
        if let Some(ttft) = self.ttft() {
            write!(f, ", first after {:.0} ms", ttft.as_secs_f64() * 1e3)?;
        }
        self.tokens_per_s().map_or(Ok(()), |speed| write!(f, ", {speed:.1} tokens/s"))
    }
}

/// All answers of a chat.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatStats {
    last: Option<AnswerStats>,
    answers: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
}

impl ChatStats {
    /// Counts an answer.
    pub fn add(&mut self, answer: AnswerStats) {
        let usage = answer.usage.unwrap_or_default();
        self.answers += 1;
        self.prompt_tokens += usage.prompt_tokens;
        self.cached_tokens += usage.cached_tokens();
        self.completion_tokens += answer.completion_tokens();
        self.last = Some(answer);
    }
}

impl fmt::Display for ChatStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(last) = &self.last else { return f.write_str("no answer yet") };
        let Self { answers, prompt_tokens, cached_tokens, completion_tokens, .. } = self;
        writeln!(f, "last answer: {last}")?;
        write!(f, "this chat: {answers} answers, {prompt_tokens} prompt tokens ({cached_tokens} cached), ")?;
        write!(f, "{completion_tokens} generated")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_of_the_tokens_behind_the_first() {
        let mut stats = AnswerStats::sent_now();
        let at = |ms| stats.sent + Duration::from_millis(ms);
        let (first, last) = (at(100), at(600));
        stats.text_at(first);
        stats.text_at(last);
        let usage =
            r#"{"prompt_tokens":9,"completion_tokens":11,"prompt_tokens_details":{"cached_tokens":8}}"#;
        stats.counted(serde_json::from_str(usage).unwrap());
        let text = "9 prompt tokens (8 cached), 11 generated, first after 100 ms, 20.0 tokens/s";
        assert_eq!(stats.to_string(), text);
        let mut chat = ChatStats::default();
        assert_eq!(chat.to_string(), "no answer yet");
        chat.add(stats);
        chat.add(stats);
        assert!(chat.to_string().ends_with("2 answers, 18 prompt tokens (16 cached), 22 generated"));
    }
}
