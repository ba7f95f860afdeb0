//! Finds call sections in the text of an answer and hands them to their readers.
//!
//! **Invariants**
//! - Every character comes out: as text, as part of a call, or it was markup of a section with a call.
//! - What merely looks like a call comes out as text, unchanged: nothing of a section is dropped
//!   before its first call has started.
//! - White space directly before or after a section is layout and left out.
//! - Time is linear: a character is looked at once by a reader and at most once more as text.

use super::Function;
use super::choice::ToolFormat;
use super::deepseek::{DEEPSEEK, DeepSeekCalls, KIMI};
use super::event::Sink;
use super::glm::{self, GlmCalls};
use super::json_calls::{JsonCalls, Shape};
use super::mistral::{self, MistralCalls};
use super::pythonic::{self, PythonicCalls};
use super::section::{Section, Step};
use super::xml::{self, XmlCalls};

/// What forced calls have before the function's name.
const NAME_KEY: &str = "\"name\": \"";
const HERMES_OPEN: &str = "<tool_call>";
const LLAMA_TAG: &str = "<|python_tag|>";
const PHI_OPEN: &str = "functools";
const PHI_TAG: &str = "<|tool_call|>";

impl ToolFormat {
    /// Markers that open a section anywhere in the answer.
    pub(super) fn openers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[HERMES_OPEN],
            Self::Llama3Json => &[LLAMA_TAG],
            Self::Mistral => &[mistral::TOOL_CALLS],
            Self::Pythonic => &[pythonic::PYTHON_START],
            Self::Phi4Mini => &[PHI_OPEN, PHI_TAG],
            Self::DeepSeek => &[DEEPSEEK.calls_begin],
            Self::KimiK2 => &[KIMI.calls_begin],
            Self::Qwen3Coder => &[xml::TOOL_CALL, xml::FUNCTION],
            Self::Glm => &[glm::TOOL_CALL],
        }
    }

    /// The character that opens a section without a marker, at the start of an answer only.
    fn bare_opener(self) -> Option<char> {
        match self {
            Self::Llama3Json => Some('{'),
            Self::Pythonic => Some('['),
            _ => None,
        }
    }

    /// The reader of a section behind `opener`; `None`: of a bare one.
    fn section(self, opener: Option<&str>, functions: &[Function]) -> Box<dyn Section> {
        match self {
            Self::Hermes => Box::new(JsonCalls::new(Shape::Any, &["</tool_call>"])),
            Self::Llama3Json if opener.is_some() => Box::new(JsonCalls::new(Shape::Objects, &[])),
            Self::Llama3Json => Box::new(JsonCalls::new(Shape::Objects, &[]).bare(functions)),
            Self::Mistral => Box::new(MistralCalls::new()),
            Self::Pythonic if opener.is_some() => Box::new(PythonicCalls::new(&[], true)),
            Self::Pythonic => Box::new(PythonicCalls::new(functions, false)),
            Self::Phi4Mini if opener == Some(PHI_TAG) => {
                Box::new(JsonCalls::new(Shape::Any, &["<|/tool_call|>"]))
            }
            Self::Phi4Mini => Box::new(JsonCalls::new(Shape::List, &[])),
            Self::DeepSeek => Box::new(DeepSeekCalls::new(&DEEPSEEK)),
            Self::KimiK2 => Box::new(DeepSeekCalls::new(&KIMI)),
            Self::Qwen3Coder => Box::new(XmlCalls::new(functions, opener.unwrap_or(xml::TOOL_CALL))),
            Self::Glm => Box::new(GlmCalls::new(functions)),
        }
    }
}

/// The tool-call parser of one answer.
#[derive(Debug)]
pub(super) struct ToolParser {
    format: ToolFormat,
    functions: Vec<Function>,
    /// The answer holds nothing but calls of these; empty: it need not.
    forced: Vec<String>,
    section: Option<Box<dyn Section>>,
    /// What would be text if it turned out not to be markup: the beginning of an opener, or the
    /// section's characters that belong to no call.
    held: String,
    /// White space that is text unless a section follows or went before.
    spaces: String,
    /// Nothing but white space came yet.
    is_at_start: bool,
    is_after_section: bool,
}

impl ToolParser {
    pub(super) fn new(format: ToolFormat, functions: Vec<Function>, forced: Vec<String>) -> Self {
        Self {
            format,
            functions,
            forced,
            section: None,
            held: String::new(),
            spaces: String::new(),
            is_at_start: true,
            is_after_section: false,
        }
    }

    pub(super) fn push(&mut self, text: &str, sink: &mut Sink) {
        for c in text.chars() {
            match self.section.take() {
                Some(section) => self.section_char(section, c, sink),
                None => self.text_char(c, sink),
            }
        }
    }

    fn section_char(&mut self, mut section: Box<dyn Section>, c: char, sink: &mut Sink) {
        let calls = sink.call_count();
        let step = section.push(c, sink);
        if sink.call_count() > calls {
            self.spaces.clear();
            self.is_after_section = true;
        }
        match step {
            Step::More => {
                self.held.push(c);
                self.section = Some(section);
            }
            Step::Used => {
                self.held.clear();
                self.section = Some(section);
            }
            // A section without a call never completes, it fails.
            Step::Done => self.held.clear(),
            Step::Fail => {
                self.release(sink);
                self.text_char(c, sink);
            }
        }
    }

    /// What was held is text after all.
    fn release(&mut self, sink: &mut Sink) {
        let held = std::mem::take(&mut self.held);
        held.chars().for_each(|c| self.tell(c, sink));
    }

    fn text_char(&mut self, c: char, sink: &mut Sink) {
        if self.is_at_start && self.held.is_empty() && self.format.bare_opener() == Some(c) {
            self.is_at_start = false;
            let section = self.format.section(None, &self.functions);
            return self.section_char(section, c, sink);
        }
        self.held.push(c);
        let openers = self.format.openers();
        loop {
            if let Some(opener) = openers.iter().find(|opener| **opener == self.held) {
                self.is_at_start = false;
                self.section = Some(self.format.section(Some(opener), &self.functions));
                return;
            }
            if self.held.is_empty() || openers.iter().any(|opener| opener.starts_with(&self.held)) {
                return;
            }
            let first = self.held.remove(0);
            self.tell(first, sink);
        }
    }

    /// One character of text.
    fn tell(&mut self, c: char, sink: &mut Sink) {
        if c.is_whitespace() {
            self.spaces.push(c);
            return;
        }
        self.is_at_start = false;
        self.is_after_section = false;
        sink.text(&std::mem::take(&mut self.spaces));
        sink.text(c.encode_utf8(&mut [0; 4]));
    }

    /// The answer ended before the arguments of a call that it is held to: what came is markup, and a call if it can
    /// be of one function only. A further call must have its whole name.
    fn tell_begun(&mut self, sink: &mut Sink) {
        let held = std::mem::take(&mut self.held);
        if held.is_empty() {
            return;
        }
        self.spaces.clear();
        let begun = held.rsplit_once(NAME_KEY).map_or("", |(_, begun)| begun);
        let is_first = sink.call_count() == 0;
        let fits = |name: &&String| {
            begun.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('"'))
                || (is_first && name.starts_with(begun))
        };
        let mut names = self.forced.iter().filter(fits);
        if let (Some(name), None) = (names.next(), names.next()) {
            sink.start(name.clone(), None);
        }
    }

    /// The answer is over.
    pub(super) fn finish(&mut self, sink: &mut Sink) {
        if let Some(mut section) = self.section.take() {
            section.finish(sink);
            if section.is_between_calls() {
                self.held.clear();
            }
        }
        if !self.forced.is_empty() {
            self.tell_begun(sink);
        }
        self.release(sink);
        if !self.is_after_section {
            sink.text(&std::mem::take(&mut self.spaces));
        }
    }
}
