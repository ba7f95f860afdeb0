//! The file of requests: every line is checked before any is sent, and read again when it is.
//!
//! Only ids and places are kept, so the size of a file is bounded by the disk.

use anyhow::{Context, Result, bail};
use lockstep_core::files;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Largest line; a server takes no larger body.
const LINE_BYTES_MAX: usize = 64 << 20;

/// A request that may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Counted from 1.
    pub number: usize,
    /// Names the request; no other line has it.
    pub custom_id: String,
    /// What the body names, if it does.
    pub model: Option<String>,
    offset: u64,
    bytes: usize,
}

/// A line that cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadLine {
    /// Counted from 1.
    pub number: usize,
    /// Why, in a sentence.
    pub reason: String,
}

/// What is asked with a line.
#[derive(Debug, PartialEq)]
pub struct Request {
    /// Names the request.
    pub custom_id: String,
    /// Path on the server.
    pub url: String,
    /// JSON body.
    pub body: Map<String, Value>,
}

/// All lines of a file.
#[derive(Debug)]
pub struct Input {
    file: File,
    /// In the file's order.
    pub lines: Vec<Line>,
    /// In the file's order.
    pub bad: Vec<BadLine>,
}

impl Input {
    /// Reads and checks every line. Errors only when the file cannot be read or holds no line.
    pub fn read(path: &Path) -> Result<Self> {
        let named = || format!("--input {}", path.display());
        let file = files::open(path).context("--input")?;
        let mut reader = BufReader::new(&file);
        let (mut lines, mut bad) = (Vec::new(), Vec::new());
        let mut numbers: HashMap<String, usize> = HashMap::new();
        let (mut offset, mut buffer) = (0, Vec::new());
        for number in 1.. {
            buffer.clear();
            let read = reader.read_until(b'\n', &mut buffer).with_context(named)?;
            if read == 0 {
                break;
            }
            let (at, bytes) = (offset, buffer.trim_ascii_end().len());
            offset += read as u64;
            if bytes == 0 {
                continue;
            }
            let checked = request(&buffer[..bytes]).and_then(|request| {
                match numbers.insert(request.custom_id.clone(), number) {
                    None => Ok(request),
                    Some(first) => {
                        numbers.insert(request.custom_id.clone(), first);
                        Err(format!("custom_id {:?} is that of line {first}", request.custom_id))
                    }
                }
            });
            match checked {
                Ok(Request { custom_id, body, .. }) => {
                    let model = body.get("model").and_then(Value::as_str).map(str::to_owned);
                    lines.push(Line { number, custom_id, model, offset: at, bytes });
                }
                Err(reason) => bad.push(BadLine { number, reason }),
            }
        }
        if lines.is_empty() && bad.is_empty() {
            bail!("--input {} holds no line; write one request a line", path.display());
        }
        Ok(Self { file, lines, bad })
    }

    /// The request of a line. Errors when the file was changed since it was checked.
    pub fn request(&self, line: &Line) -> Result<Request> {
        let mut bytes = vec![0; line.bytes];
        self.file.read_exact_at(&mut bytes, line.offset).context("the input cannot be read any more")?;
        match request(&bytes) {
            Ok(request) if request.custom_id == line.custom_id => Ok(request),
            _ => bail!("line {} of the input was changed while it was being answered", line.number),
        }
    }
}

/// The request that a line spells, or a sentence about what it lacks. null equals absent.
fn request(bytes: &[u8]) -> std::result::Result<Request, String> {
    if bytes.len() > LINE_BYTES_MAX {
        return Err(format!("{} bytes are more than the {LINE_BYTES_MAX} of a line", bytes.len()));
    }
    let json: Value = serde_json::from_slice(bytes).map_err(|e| format!("not JSON ({e})"))?;
    let Value::Object(mut fields) = json else { return Err("not a JSON object".into()) };
    let text = |name: &str| match fields.get(name) {
        Some(Value::String(text)) => Ok(Some(text.clone())),
        None | Some(Value::Null) => Ok(None),
        Some(other) => Err(format!("{name} is {other}, not a string")),
    };
    let custom_id = text("custom_id")?.filter(|id| !id.is_empty());
    let custom_id = custom_id.ok_or("custom_id is missing; give each line one of its own")?;
    match text("method")?.as_deref() {
        Some("POST") => {}
        Some(other) => return Err(format!("method is {other}; use POST")),
        None => return Err("method is missing; use POST".into()),
    }
    let url = text("url")?.ok_or("url is missing; use /v1/chat/completions or /v1/completions")?;
    if !url.starts_with("/v1/") || url.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err(format!("url is {url:?}; use a path such as /v1/chat/completions"));
    }
    let Some(Value::Object(body)) = fields.remove("body") else {
        return Err("body is not a JSON object".into());
    };
    if body.get("stream").is_some_and(|stream| !matches!(stream, Value::Null | Value::Bool(false))) {
        return Err("body asks for a stream, which a line of a file cannot be; leave stream out".into());
    }
    Ok(Request { custom_id, url, body })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_testkit::TempDir;

    fn read(text: &str) -> (TempDir, Result<Input>) {
        let temp = TempDir::new("batch-input");
        let path = temp.join("in.jsonl");
        std::fs::write(&path, text).unwrap();
        let input = Input::read(&path);
        (temp, input)
    }

    fn line(id: &str, body: &str) -> String {
        format!(r#"{{"custom_id":"{id}","method":"POST","url":"/v1/completions","body":{body}}}"#)
    }

    #[test]
    fn lines_are_found_again() {
        let text =
            format!("{}\n\n  \r\n{}\r\n{}", line("a", "{}"), line("é", r#"{"model":"m"}"#), line("c", "{}"));
        let (_temp, input) = read(&text);
        let input = input.unwrap();
        let found: Vec<_> = input.lines.iter().map(|l| (l.number, l.custom_id.as_str())).collect();
        assert_eq!((found, input.bad.len()), (vec![(1, "a"), (4, "é"), (5, "c")], 0));
        assert_eq!(input.lines[1].model.as_deref(), Some("m"));
        for line in &input.lines {
            assert_eq!(input.request(line).unwrap().custom_id, line.custom_id);
        }
    }

    #[test]
    fn bad_lines_are_named_with_their_number_and_cause() {
        let cases = [
            ("{".to_owned(), "not JSON"),
            ("[]".to_owned(), "not a JSON object"),
            (line("", "{}"), "custom_id is missing"),
            (line("x", "{}").replace("POST", "GET"), "use POST"),
            (line("x", "{}").replace("/v1/", "http://h/"), "/v1/chat/completions"),
            (line("x", "[]"), "body"),
            (line("x", r#"{"stream":true}"#), "stream"),
            (line("good", "{}"), "that of line 1"),
        ];
        let mut text = line("good", "{}");
        cases.iter().for_each(|(line, _)| text += &format!("\n{line}"));
        let (_temp, input) = read(&text);
        let input = input.unwrap();
        assert_eq!((input.lines.len(), input.bad.len()), (1, cases.len()));
        for (index, (bad, (_, reason))) in input.bad.iter().zip(&cases).enumerate() {
            assert_eq!(bad.number, index + 2);
            assert!(bad.reason.contains(reason), "{bad:?}");
        }
    }

    #[test]
    fn an_empty_file_is_refused() {
        assert!(read("\n \n").1.unwrap_err().to_string().contains("holds no line"));
    }

    #[test]
    fn a_file_that_changes_is_noticed() {
        let (temp, input) = read(&line("a", "{}"));
        std::fs::write(temp.join("in.jsonl"), line("b", "{}")).unwrap();
        let input = input.unwrap();
        assert!(input.request(&input.lines[0]).unwrap_err().to_string().contains("line 1"));
    }
}
