//! One answer, written as it comes.

use super::stats::AnswerStats;
use crate::client::chunk::Chunk;
use crate::client::{Client, ClientError};
use serde_json::Value;
use std::io::{self, Write};

/// Switches a terminal to dim text, and back.
const DIM: [&str; 2] = ["\x1b[2m", "\x1b[0m"];

/// What became of a request.
#[derive(Debug)]
pub struct Spoken {
    /// The text, without reasoning.
    pub text: String,
    /// Counts and times.
    pub stats: AnswerStats,
    /// Why the model ended; `None` when the answer was stopped here.
    pub finish_reason: Option<String>,
}

/// Why a chat cannot go on, or an answer did not come.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// Of the server or the way to it.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Nobody takes the text.
    #[error("the answer cannot be written: {0}")]
    Output(#[from] io::Error),
}

/// How text is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// As it is, without reasoning.
    Plain,
    /// For a terminal: control characters cannot reach it, and reasoning is shown.
    Terminal {
        /// Whether reasoning is dimmed; otherwise it is in brackets.
        dims: bool,
    },
}

/// Asks and writes to `out` as text arrives, until the answer ends or `stop` does.
pub async fn ask(
    client: &Client,
    request: &Value,
    (out, style): (&mut dyn Write, Style),
    stop: impl Future<Output = ()>,
) -> Result<Spoken, AnswerError> {
    let mut spoken = Spoken { text: String::new(), stats: AnswerStats::sent_now(), finish_reason: None };
    let mut page = Page { out, style, in_reasoning: false, is_empty: true };
    let answered = tokio::select! {
        answered = listen(client, request, &mut page, &mut spoken) => answered,
        () = stop => Ok(()),
    };
    if answered.is_ok() || !page.is_empty {
        page.end()?;
    }
    answered.map(|()| spoken)
}

async fn listen(
    client: &Client,
    request: &Value,
    page: &mut Page<'_>,
    spoken: &mut Spoken,
) -> Result<(), AnswerError> {
    let mut stream = client.stream("/v1/chat/completions", request.to_string().into()).await?;
    while let Some((data, arrived)) = stream.next().await? {
        let chunk = Chunk::parse(stream.base(), &data)?;
        let (reasoning, text) = (chunk.reasoning(), chunk.text());
        if !reasoning.is_empty() || !text.is_empty() {
            spoken.stats.text_at(arrived);
            page.reasoning(reasoning)?;
            page.text(text)?;
            spoken.text += text;
        }
        if let Some(reason) = chunk.finish_reason() {
            spoken.finish_reason = Some(reason.to_owned());
        }
        if let Some(usage) = chunk.usage {
            spoken.stats.counted(usage);
        }
    }
    Ok(())
}

/// Where the answer is written.
struct Page<'a> {
    out: &'a mut dyn Write,
    style: Style,
    in_reasoning: bool,
    is_empty: bool,
}

impl Page<'_> {
    fn reasoning(&mut self, text: &str) -> io::Result<()> {
        let Style::Terminal { dims } = self.style else { return Ok(()) };
        if text.is_empty() {
            return Ok(());
        }
        if !self.in_reasoning {
            self.in_reasoning = true;
            self.out.write_all(if dims { DIM[0] } else { "[" }.as_bytes())?;
        }
        self.show(text)
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        if self.in_reasoning {
            self.end_reasoning()?;
            self.out.write_all(b"\n")?;
        }
        self.show(text)
    }

    fn end_reasoning(&mut self) -> io::Result<()> {
        let Style::Terminal { dims } = self.style else { return Ok(()) };
        self.in_reasoning = false;
        self.out.write_all(if dims { DIM[1] } else { "]" }.as_bytes())
    }

    fn show(&mut self, text: &str) -> io::Result<()> {
        self.is_empty = false;
        match self.style {
            Style::Plain => self.out.write_all(text.as_bytes())?,
            Style::Terminal { .. } => self.out.write_all(harmless(text).as_bytes())?,
        }
        self.out.flush()
    }

    fn end(&mut self) -> io::Result<()> {
        if self.in_reasoning {
            self.end_reasoning()?;
        }
        self.out.write_all(b"\n")?;
        self.out.flush()
    }
}

/// `text` without the characters that steer a terminal: a model may repeat what somebody hid in its prompt.
fn harmless(text: &str) -> String {
    let shown = |c: char| if c.is_control() && !matches!(c, '\n' | '\t') { '\u{fffd}' } else { c };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(style: Style, parts: &[(&str, &str)]) -> String {
        let mut out = Vec::new();
        let mut page = Page { out: &mut out, style, in_reasoning: false, is_empty: true };
        for (reasoning, text) in parts {
            page.reasoning(reasoning).unwrap();
            page.text(text).unwrap();
        }
        page.end().unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn reasoning_is_set_apart_on_a_terminal_and_left_out_elsewhere() {
        let parts = [("so", ""), (" it", ""), ("", "yes"), ("", "!")];
        assert_eq!(page(Style::Terminal { dims: true }, &parts), "\x1b[2mso it\x1b[0m\nyes!\n");
        assert_eq!(page(Style::Terminal { dims: false }, &parts), "[so it]\nyes!\n");
        assert_eq!(page(Style::Plain, &parts), "yes!\n");
        // Stopped while it reasons.
        assert_eq!(page(Style::Terminal { dims: true }, &parts[..1]), "\x1b[2mso\x1b[0m\n");
    }

    #[test]
    fn an_answer_cannot_steer_the_terminal() {
        let evil = [("", "a\x1b]0;title\x07\tb\r\nc")];
        assert_eq!(page(Style::Terminal { dims: true }, &evil), "a\u{fffd}]0;title\u{fffd}\tb\u{fffd}\nc\n");
        assert_eq!(page(Style::Plain, &evil), "a\x1b]0;title\x07\tb\r\nc\n");
    }
}
