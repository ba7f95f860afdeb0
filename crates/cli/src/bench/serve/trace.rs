//! Requests from a file: recorded prompts, or recorded lengths and times.
//!
//! One JSON object a line, in whichever form is at hand: `prompt` (text or token ids), `messages`, the `body` of a
//! batch line, or lengths with the ids of shared sections as the traces of Mooncake have them
//! (`input_length`, `hash_ids`, each id standing for 512 tokens).

use anyhow::{Context, Result, bail};
use lockstep_core::files;
use lockstep_core::limits::FLAG_FILE_BYTES_MAX;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

/// Largest timestamp: thousands of years.
const TIMESTAMP_MAX: f64 = 1e15;

/// One request of a trace.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct TraceLine {
    /// Milliseconds, from any origin.
    pub timestamp: Option<f64>,
    /// Text or token ids.
    pub prompt: Option<Value>,
    /// Of a chat.
    pub messages: Option<Value>,
    /// A whole request.
    pub body: Option<Map<String, Value>>,
    /// Prompt tokens, where the prompt is not given.
    #[serde(alias = "input_len", alias = "prompt_len")]
    pub input_length: Option<usize>,
    /// Sections that requests share.
    #[serde(default)]
    pub hash_ids: Vec<u64>,
    /// Answer tokens.
    #[serde(alias = "output_len", alias = "max_tokens")]
    pub output_length: Option<usize>,
}

/// All lines of a file; errors name the line.
pub fn read(path: &Path) -> Result<Vec<TraceLine>> {
    let text = files::read_text(path, FLAG_FILE_BYTES_MAX).context("--trace")?;
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let line = parse(line).with_context(|| format!("--trace {}, line {}", path.display(), index + 1))?;
        lines.push(line);
    }
    if lines.is_empty() {
        bail!("--trace {} holds no line; write one request a line", path.display());
    }
    let timed = lines.iter().filter(|line| line.timestamp.is_some()).count();
    if timed != 0 && timed != lines.len() {
        bail!(
            "--trace {}: {timed} of {} lines have a timestamp; give all of them one, or none",
            path.display(),
            lines.len()
        );
    }
    Ok(lines)
}

fn parse(line: &str) -> Result<TraceLine> {
    let parsed: TraceLine = serde_json::from_str(line)?;
    let forms = [
        parsed.prompt.is_some(),
        parsed.messages.is_some(),
        parsed.body.is_some(),
        parsed.input_length.is_some() && parsed.prompt.is_none(),
    ];
    match forms.iter().filter(|is| **is).count() {
        1 => {}
        0 => bail!("no prompt; give prompt, messages, body or input_length"),
        _ => bail!("several prompts; give one of prompt, messages, body and input_length"),
    }
    if parsed.input_length == Some(0) || parsed.output_length == Some(0) {
        bail!("a length is 0; it must be at least 1");
    }
    if let Some(at) = parsed.timestamp.filter(|at| !(0.0..=TIMESTAMP_MAX).contains(at)) {
        bail!("timestamp {at} is outside 0..={TIMESTAMP_MAX} milliseconds");
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_testkit::TempDir;

    fn read_text(text: &str) -> Result<Vec<TraceLine>> {
        let temp = TempDir::new("trace");
        std::fs::write(temp.join("t.jsonl"), text).unwrap();
        read(&temp.join("t.jsonl"))
    }

    #[test]
    fn every_form_is_read() {
        let lines = read_text(
            "{\"prompt\": \"a\", \"output_len\": 3}\n\n{\"prompt\": [1, 2], \"input_length\": 2}\n\
             {\"messages\": []}\n{\"custom_id\": \"x\", \"body\": {\"prompt\": \"b\"}}\n",
        );
        assert_eq!(
            lines.unwrap().iter().map(|l| l.output_length).collect::<Vec<_>>(),
            [Some(3), None, None, None]
        );
        let lines = read_text(
            r#"{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}"#,
        );
        let line = &lines.unwrap()[0];
        assert_eq!(
            (line.timestamp, line.input_length, &line.hash_ids[..]),
            (Some(27482.0), Some(600), &[46, 47][..])
        );
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, words) in [
            ("{\"prompt\": \"a\"}\nno", "line 2"),
            ("{}", "no prompt"),
            ("{\"prompt\": \"a\", \"messages\": []}", "several"),
            ("{\"prompt\": \"a\", \"output_length\": 0}", "0"),
            ("{\"prompt\": \"a\", \"timestamp\": 1}\n{\"prompt\": \"a\"}", "1 of 2"),
            (" ", "no line"),
        ] {
            let error = format!("{:#}", read_text(text).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }
}
