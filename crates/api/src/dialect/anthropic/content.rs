//! Anthropic's messages in the words of a chat: content blocks become texts, tool calls and tool messages.
//!
//! Turns of one role in a row are one turn, as there. The texts of blocks are joined by line feeds.

use super::super::turns::{Turn, call};
use crate::fields::{Fields, kind};
use crate::request::policy::shorten;
use lockstep_core::Refusal;
use serde_json::Value;
use std::collections::HashMap;

/// Between the texts of two blocks.
const BETWEEN_BLOCKS: &str = "\n";

/// A chat in the making.
#[derive(Debug, Default)]
struct Chat {
    turns: Vec<Turn>,
    /// Names of the tools called so far, by the id of the call.
    called: HashMap<String, String>,
}

/// The chat of `system` and `messages`, and whether its last message is the beginning of the answer.
pub(super) fn messages(fields: &Fields<'_>) -> Result<(Value, bool), Refusal> {
    let Some(list) = fields.list("messages")? else {
        return Err(fields.invalid("messages", "is required: a list of messages"));
    };
    if list.is_empty() {
        return Err(fields.invalid("messages", "is empty; send at least one message"));
    }
    let mut chat = Chat::default();
    if let Some(system) = fields.get("system") {
        let texts = texts(fields, "system", system)?;
        chat.turns.push(Turn { texts, ..Turn::of("system") });
    }
    for (index, item) in list.iter().enumerate() {
        let path = format!("messages[{index}].");
        chat.message(&Fields::of_item(item, &path, "role and content")?)?;
    }
    let last = chat.turns.last().filter(|turn| turn.role == "assistant");
    if last.is_some_and(|turn| !turn.calls.is_empty()) {
        let message = "ends with a tool_use; send its tool_result in a user message behind it";
        return Err(fields.invalid("messages", message));
    }
    let ends_open = last.is_some();
    Ok((chat.turns.into_iter().map(|turn| turn.json(BETWEEN_BLOCKS)).collect(), ends_open))
}

impl Chat {
    fn message(&mut self, message: &Fields<'_>) -> Result<(), Refusal> {
        let role = match message.string("role")? {
            Some("user") => "user",
            Some("assistant") => "assistant",
            other => {
                let got = other.map_or_else(|| "nothing".into(), |role| format!("{:?}", shorten(role)));
                let message_ = format!("must be user or assistant, got {got}; instructions go into system");
                return Err(message.invalid("role", message_));
            }
        };
        let content = match message.get("content") {
            Some(Value::String(text)) => {
                self.turn(role).texts.push(text.clone());
                return Ok(());
            }
            Some(Value::Array(blocks)) => blocks,
            other => {
                let got = other.map_or("nothing", kind);
                let wanted = format!("must be a string or a list of content blocks, got {got}");
                return Err(message.invalid("content", wanted));
            }
        };
        if content.is_empty() {
            self.turn(role);
        }
        for (index, block) in content.iter().enumerate() {
            let name = format!("content[{index}]");
            let Some(map) = block.as_object() else {
                return Err(message.invalid(&name, format!("must be a content block, got {}", kind(block))));
            };
            let path = message.path_of(&name);
            self.block(role, &Fields::new(map, &path))?;
        }
        Ok(())
    }

    /// The turn that `role` has now: the last one, if it is its.
    fn turn(&mut self, role: &'static str) -> &mut Turn {
        if self.turns.last().is_none_or(|turn| turn.role != role) {
            self.turns.push(Turn::of(role));
        }
        self.turns.last_mut().expect("invariant: a turn was pushed if there was none")
    }

    fn block(&mut self, role: &'static str, block: &Fields<'_>) -> Result<(), Refusal> {
        match (block.string("type")?, role) {
            (Some("text"), _) => {
                let text = required(block, "text")?;
                self.turn(role).texts.push(text);
            }
            (Some("thinking"), "assistant") => {
                let text = required(block, "thinking")?;
                self.turn(role).reasoning.push(text);
            }
            (Some("tool_use"), "assistant") => self.tool_use(block)?,
            (Some("tool_result"), "user") => self.tool_result(block)?,
            (Some("image" | "document"), _) => {
                return Err(block.invalid("type", "is not text, but this model takes text only"));
            }
            (Some(other), _) => {
                let known = match role {
                    "user" => "text and tool_result",
                    _ => "text, thinking and tool_use",
                };
                let got = shorten(other);
                return Err(
                    block.invalid("type", format!("must be one of {known} in a {role} message, got {got:?}"))
                );
            }
            (None, _) => return Err(block.invalid("type", "is required")),
        }
        Ok(())
    }

    fn tool_use(&mut self, block: &Fields<'_>) -> Result<(), Refusal> {
        let (id, name) = (required(block, "id")?, required(block, "name")?);
        let Some(input) = block.object("input")? else {
            return Err(block.invalid("input", "is required: the object that the tool was called with"));
        };
        self.turn("assistant").calls.push(call(&id, &name, &input.clone().into()));
        self.called.insert(id, name);
        Ok(())
    }

    fn tool_result(&mut self, block: &Fields<'_>) -> Result<(), Refusal> {
        let id = required(block, "tool_use_id")?;
        let Some(name) = self.called.get(&id).cloned() else {
            let got = shorten(&id);
            let message = format!("is {got:?}, but no tool_use before it has that id");
            return Err(block.invalid("tool_use_id", message));
        };
        let mut texts = match block.get("content") {
            None => Vec::new(),
            Some(content) => texts(block, "content", content)?,
        };
        if block.boolean("is_error")? == Some(true) {
            // Templates have no other way to say it.
            let text = texts.join(BETWEEN_BLOCKS);
            texts = vec![format!("Error: {text}").trim_end().to_owned()];
        }
        self.turns.push(Turn { texts, answers: Some((id, name)), ..Turn::of("tool") });
        Ok(())
    }
}

fn required(block: &Fields<'_>, name: &str) -> Result<String, Refusal> {
    block.string(name)?.map(str::to_owned).ok_or_else(|| block.invalid(name, "is required: a string"))
}

/// The texts of a string or a list of text blocks.
fn texts(fields: &Fields<'_>, name: &str, content: &Value) -> Result<Vec<String>, Refusal> {
    let blocks = match content {
        Value::String(text) => return Ok(vec![text.clone()]),
        Value::Array(blocks) => blocks,
        other => {
            let message = format!("must be a string or a list of text blocks, got {}", kind(other));
            return Err(fields.invalid(name, message));
        }
    };
    let text = |(index, block): (usize, &Value)| match (block["type"].as_str(), block["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (kind, _) => {
            let name = format!("{name}[{index}]");
            let got = kind.map_or_else(|| "another value".into(), |kind| format!("type {:?}", shorten(kind)));
            Err(fields
                .invalid(&name, format!("must be a text block, since this model takes text only, got {got}")))
        }
    };
    blocks.iter().enumerate().map(text).collect()
}
