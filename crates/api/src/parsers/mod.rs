//! Answers in text to answers in parts: text, reasoning, tool calls.
//!
//! A model writes everything as one text, each family in its own way. [`AnswerParser`] turns the deltas
//! of that text into [`Event`]s, for streams and whole answers alike: feed everything, then
//! [`finish`](AnswerParser::finish). It is pure; one per choice of a request.
//!
//! **Invariants**
//! - However the text is cut into deltas, the joined events are the same.
//! - No character is lost: it is text, reasoning, a name, arguments, or markup of a call that was told.
//!   What merely looks like a call comes out as text, unchanged. White space next to markup is layout.
//! - Time and memory are linear in the text.
//!
//! **An answer that ends early** (`max_tokens`, a stop string): reasoning that was not closed stays
//! reasoning. A call whose arguments had begun stays a call with the arguments as far as they came,
//! not repaired, as OpenAI does; the finish reason tells. A call that had not begun comes out as text, unless the
//! answer is held to calls: then it is a call without arguments where its function is certain, and never text.
//! The same holds where a model breaks off a call with something that is not JSON: the call stays as
//! it is, and what follows is text.
//!
//! Reading order: [`choice`] (which parsers), `event`, `json` (the streaming JSON core), `section`,
//! the readers of each family (`json_calls`, `mistral`, `deepseek`, `pythonic` with `python`, `xml` and `glm` with
//! `arguments`),
//! `tools` (which finds their sections), `reasoning`.

mod arguments;
pub mod choice;
mod deepseek;
mod event;
mod glm;
mod json;
mod json_calls;
mod mistral;
mod python;
mod pythonic;
mod reasoning;
mod section;
mod tools;
mod xml;

pub use choice::{
    Opening, ParserChoice, REASONING_PARSERS, ReasoningFormat, TOOL_CALL_PARSERS, ToolFormat, detect,
};
pub use event::Event;

use event::{IdStyle, Sink};
use reasoning::ReasoningSplitter;
use serde_json::Value;
use tools::ToolParser;

/// A function that a request offers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments; null if there is none.
    pub parameters: Value,
}

impl Function {
    /// The function of a tool in OpenAI's shape, `{"type": "function", "function": {"name", ...}}`.
    pub fn from_tool(tool: &Value) -> Option<Self> {
        let function = tool.get("function")?;
        let name = function.get("name")?.as_str()?.to_owned();
        Some(Self { name, parameters: function.get("parameters").cloned().unwrap_or_default() })
    }

    /// Whether the parameter `key` is a text: its schema says so, or says nothing.
    fn takes_text(&self, key: &str) -> bool {
        let schema = self.parameters.get("properties").and_then(|properties| properties.get(key));
        match schema.and_then(|schema| schema.get("type")) {
            Some(kind) => kind == "string",
            None => schema.is_none_or(|schema| schema.get("anyOf").is_none()),
        }
    }
}

/// What one answer is parsed with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerSetup {
    /// How calls are written; `None` leaves them in the text (requests without tools).
    pub tools: Option<ToolFormat>,
    /// The functions of the request. Formats without markers take only calls to these for calls; empty:
    /// to any function. Formats without types take them from here.
    pub functions: Vec<Function>,
    /// The answer is held to calls of these functions; empty: it is not held to calls.
    pub forced: Vec<String>,
    /// How reasoning is written; `None` leaves it in the text.
    pub reasoning: Option<ReasoningFormat>,
    /// The prompt ended inside reasoning ([`ParserChoice::begins_in_reasoning`]).
    pub begins_in_reasoning: bool,
    /// Goes into the ids of calls (`call_<seed><index>`, or Mistral's form of it): letters and digits, unlike any other answer's.
    pub id_seed: String,
}

/// The parser of one answer.
#[derive(Debug)]
pub struct AnswerParser {
    reasoning: Option<ReasoningSplitter>,
    tools: Option<ToolParser>,
    sink: Sink,
}

impl AnswerParser {
    /// A parser at the start of an answer.
    pub fn new(setup: AnswerSetup) -> Self {
        let AnswerSetup { tools, functions, forced, reasoning, begins_in_reasoning, id_seed } = setup;
        Self {
            reasoning: reasoning.map(|format| ReasoningSplitter::new(format.tags(), begins_in_reasoning)),
            tools: tools.map(|format| ToolParser::new(format, functions, forced)),
            sink: Sink::new(id_seed, tools.map_or(IdStyle::Call, ToolFormat::id_style)),
        }
    }

    /// Takes the next piece of the answer's text; gives what is decided by now.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        match &mut self.reasoning {
            None => self.content(text),
            Some(splitter) => {
                let mut content = String::new();
                splitter.push(text, &mut self.sink, &mut content);
                self.content(&content);
            }
        }
        self.sink.take()
    }

    /// The answer is over: gives what was held back.
    pub fn finish(&mut self) -> Vec<Event> {
        if let Some(mut splitter) = self.reasoning.take() {
            let mut content = String::new();
            splitter.finish(&mut self.sink, &mut content);
            self.content(&content);
        }
        if let Some(mut tools) = self.tools.take() {
            tools.finish(&mut self.sink);
        }
        self.sink.take()
    }

    /// Whether the text so far ends inside reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_inside)
    }

    /// Whether a call was told: the finish reason is then `tool_calls`, not `stop`.
    pub fn has_calls(&self) -> bool {
        self.sink.call_count() > 0
    }

    fn content(&mut self, text: &str) {
        match &mut self.tools {
            Some(tools) => tools.push(text, &mut self.sink),
            None => self.sink.text(text),
        }
    }
}

#[cfg(test)]
mod tests;
