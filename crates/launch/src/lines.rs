//! From a child's output bytes to log lines, and from its last lines to the one that tells why it
//! ended. Pure.
//!
//! **Invariant:** memory per child is bounded by one line ([`LINE_BYTES_MAX`]) and the tail
//! ([`TAIL_LINES_MAX`] lines), whatever the child writes.

use crate::status::ChildStatus;
use std::collections::VecDeque;

/// Bytes of a line that are passed on; the rest of the line is dropped.
pub(crate) const LINE_BYTES_MAX: usize = 16 << 10;
/// Lines kept for the report of a death.
pub(crate) const TAIL_LINES_MAX: usize = 20;
/// Characters of the last line in the one-line report.
const REPORT_CHARS_MAX: usize = 400;
/// Appended to a line that was cut.
const CUT_MARK: &[u8] = b" [line cut]";

/// Cuts a byte stream into lines.
#[derive(Debug, Default)]
pub(crate) struct LineSplitter {
    partial: Vec<u8>,
    skipping: bool,
}

impl LineSplitter {
    /// Takes bytes as they arrive and hands out each finished line without its newline.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut emit: impl FnMut(&[u8])) {
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            self.append(&bytes[..end], &mut emit);
            if !std::mem::take(&mut self.skipping) {
                emit(&self.partial);
            }
            self.partial.clear();
            bytes = &bytes[end + 1..];
        }
        self.append(bytes, &mut emit);
    }

    /// The stream ended: hands out what came after the last newline.
    pub(crate) fn finish(&mut self, mut emit: impl FnMut(&[u8])) {
        if !self.partial.is_empty() {
            emit(&self.partial);
        }
        *self = Self::default();
    }

    fn append(&mut self, bytes: &[u8], emit: &mut impl FnMut(&[u8])) {
        if self.skipping {
            return;
        }
        let room = LINE_BYTES_MAX - self.partial.len();
        self.partial.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if bytes.len() > room {
            self.partial.extend_from_slice(CUT_MARK);
            emit(&self.partial);
            self.partial.clear();
            self.skipping = true;
        }
    }
}

/// The last lines of one child.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    lines: VecDeque<String>,
}

impl Tail {
    /// Remembers a line, forgetting the oldest.
    pub(crate) fn push(&mut self, line: &[u8]) {
        if self.lines.len() == TAIL_LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(String::from_utf8_lossy(line).into_owned());
    }

    /// The lines as text, oldest first.
    pub(crate) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lines).into_iter().map(|line| as_text(&line).unwrap_or(line)).collect()
    }
}

/// What a log line in JSON would be as text; `None` for any other line.
fn as_text(line: &str) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Line {
        time: String,
        level: String,
        process: String,
        message: String,
    }
    let Line { time, level, process, message } = serde_json::from_str(line).ok()?;
    Some(format!("{time} {level:>5} {process} {message}"))
}

/// The line that tells most about an end, introduced by what it is; `None` without any output.
///
/// A panic message wins (Rust prints it over several lines and a hint after it). A process that
/// exited by itself is explained by its last error; one killed from outside by what it last did.
pub(crate) fn telling_line(lines: &[String], status: ChildStatus) -> Option<String> {
    let lines: Vec<String> = lines.iter().map(|l| readable(l)).filter(|l| !l.trim().is_empty()).collect();
    if let Some(at) = lines.iter().rposition(|l| l.starts_with("thread '") && l.contains("panicked at")) {
        let place = &lines[at][lines[at].find("panicked at").unwrap_or(0)..];
        let message = lines.get(at + 1).filter(|l| !is_panic_hint(l)).map_or("", |l| l.as_str());
        return Some(shorten(format!("last error: {place} {message}").trim_end()));
    }
    if !matches!(status, ChildStatus::Signal(_))
        && let Some(error) = lines.iter().rfind(|l| l.split_whitespace().any(|word| word == "ERROR"))
    {
        return Some(shorten(&format!("last error: {error}")));
    }
    lines.iter().rfind(|l| !is_panic_hint(l)).map(|l| shorten(&format!("last log line: {l}")))
}

fn is_panic_hint(line: &str) -> bool {
    line.starts_with("note: ") && line.contains("RUST_BACKTRACE")
}

/// Without colour codes and control characters: the report must stay one line on any terminal.
fn readable(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => {
                if chars.as_str().starts_with('[') {
                    chars.next();
                    chars.by_ref().find(|c| ('@'..='~').contains(c));
                }
            }
            '\t' => out.push(' '),
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

fn shorten(line: &str) -> String {
    match line.char_indices().nth(REPORT_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut splitter = LineSplitter::default();
        let mut out = Vec::new();
        for chunk in chunks {
            splitter.push(chunk, |l| out.push(l.to_vec()));
        }
        splitter.finish(|l| out.push(l.to_vec()));
        out
    }

    #[test]
    fn any_cutting_of_the_stream_gives_the_same_lines() {
        let mut text = b"one\n\ntwo \xff\nlast without newline".to_vec();
        text.splice(4..4, vec![b'x'; LINE_BYTES_MAX + 5]);
        let whole = split(&[&text]);
        assert_eq!(whole.len(), 4);
        assert_eq!(whole[1].len(), LINE_BYTES_MAX + CUT_MARK.len());
        for size in [1, 2, 3, 1000, LINE_BYTES_MAX, LINE_BYTES_MAX + 1] {
            assert_eq!(split(&text.chunks(size).collect::<Vec<_>>()), whole, "chunks of {size}");
        }
    }

    #[test]
    fn a_line_of_exactly_the_limit_is_whole() {
        let mut text = vec![b'x'; LINE_BYTES_MAX];
        text.push(b'\n');
        assert_eq!(split(&[&text]), [text[..LINE_BYTES_MAX].to_vec()]);
    }

    #[test]
    fn the_tail_keeps_the_newest() {
        let mut tail = Tail::default();
        for i in 0..50 {
            tail.push(format!("{i}").as_bytes());
        }
        let lines = tail.take();
        assert_eq!((lines.len(), lines[0].as_str(), lines[19].as_str()), (20, "30", "49"));
    }

    #[test]
    fn json_lines_are_told_as_text() {
        let mut tail = Tail::default();
        tail.push(
            br#"{"time":"12:00","level":"ERROR","target":"x","process":"TP0","rank":0,"message":"no \"a\""}"#,
        );
        tail.push(b"{not json");
        assert_eq!(tail.take(), ["12:00 ERROR TP0 no \"a\"", "{not json"]);
    }

    fn telling(lines: &[&str], status: ChildStatus) -> Option<String> {
        telling_line(&lines.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>(), status)
    }

    #[test]
    fn panics_show_their_message_not_the_hint() {
        let lines = [
            "12:00 ERROR TP0 earlier",
            "thread 'main' (7) panicked at src/a.rs:3:5:",
            "index out of bounds",
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace",
        ];
        let want = "last error: panicked at src/a.rs:3:5: index out of bounds";
        assert_eq!(telling(&lines, ChildStatus::Exit(101)).unwrap(), want);
        assert_eq!(telling(&lines, ChildStatus::Signal(6)).unwrap(), want);
    }

    #[test]
    fn errors_explain_exits_and_last_lines_explain_kills() {
        let lines = ["\u{1b}[31mERROR\u{1b}[0m TP0 no\tmemory", "TP0 bye", " "];
        assert_eq!(telling(&lines, ChildStatus::Exit(5)).unwrap(), "last error: ERROR TP0 no memory");
        assert_eq!(telling(&lines, ChildStatus::Signal(9)).unwrap(), "last log line: TP0 bye");
        assert_eq!(telling(&[" "], ChildStatus::Exit(1)), None);
    }

    #[test]
    fn the_report_stays_short() {
        let line = telling(&["é".repeat(9000).as_str()], ChildStatus::Exit(1)).unwrap();
        assert_eq!(line.chars().count(), REPORT_CHARS_MAX + 3);
    }
}
