//! The items of `input` in the words of a chat: reasoning and function calls join the assistant's message,
//! outputs become tool messages. The texts of content parts are joined as they are, as in a chat.

use super::super::turns::{Turn, call};
use crate::fields::{Fields, kind};
use crate::request::policy::shorten;
use lockstep_core::Refusal;
use serde_json::Value;
use std::collections::HashMap;

/// A chat in the making.
#[derive(Debug, Default)]
struct Chat {
    turns: Vec<Turn>,
    /// Names of the functions called so far, by the id of the call.
    called: HashMap<String, String>,
}

/// The chat of `instructions` and `input`.
pub(super) fn messages(fields: &Fields<'_>) -> Result<Value, Refusal> {
    let mut chat = Chat::default();
    if let Some(text) = fields.string("instructions")? {
        chat.turns.push(Turn { texts: vec![text.into()], ..Turn::of("system") });
    }
    match fields.get("input") {
        Some(Value::String(text)) => chat.turns.push(Turn { texts: vec![text.clone()], ..Turn::of("user") }),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                let name = format!("input[{index}]");
                let Some(map) = item.as_object() else {
                    return Err(fields.invalid(&name, format!("must be an item, got {}", kind(item))));
                };
                let path = fields.path_of(&name);
                chat.item(&Fields::new(map, &path))?;
            }
        }
        Some(Value::Array(_)) => return Err(fields.invalid("input", "is empty; send at least one item")),
        other => {
            let got = other.map_or("nothing", kind);
            return Err(fields.invalid("input", format!("must be a string or a list of items, got {got}")));
        }
    }
    Ok(chat.turns.into_iter().map(|turn| turn.json("")).collect())
}

impl Chat {
    fn item(&mut self, item: &Fields<'_>) -> Result<(), Refusal> {
        match item.string("type")? {
            None | Some("message") => self.message(item),
            Some("reasoning") => self.reasoning(item),
            Some("function_call") => self.function_call(item),
            Some("function_call_output") => self.function_call_output(item),
            Some("item_reference") => {
                let message = "is \"item_reference\", but this server keeps no items; send the item itself";
                Err(item.invalid("type", message).with_code("unsupported_field"))
            }
            Some(other) => {
                let known = "message, reasoning, function_call, function_call_output";
                Err(item.invalid("type", format!("must be one of {known}, got {:?}", shorten(other))))
            }
        }
    }

    fn message(&mut self, item: &Fields<'_>) -> Result<(), Refusal> {
        const ROLES: [&str; 4] = ["user", "assistant", "system", "developer"];
        let role = item.string("role")?;
        let Some(role) = ROLES.into_iter().find(|known| role == Some(known)) else {
            return Err(item.invalid("role", format!("must be one of {}", ROLES.join(", "))));
        };
        let texts = texts(item, "content")?;
        let is_begun = |turn: &&mut Turn| role == "assistant" && turn.role == role && turn.texts.is_empty();
        match self.turns.last_mut().filter(is_begun) {
            Some(turn) => turn.texts = texts,
            None => self.turns.push(Turn { texts, ..Turn::of(role) }),
        }
        Ok(())
    }

    /// Reasoning comes before the message or the calls that it led to.
    fn reasoning(&mut self, item: &Fields<'_>) -> Result<(), Refusal> {
        let list = |name| match item.get(name) {
            Some(Value::Array(list)) if !list.is_empty() => texts(item, name),
            _ => Ok(Vec::new()),
        };
        let (content, summary) = (list("content")?, list("summary")?);
        let reasoning = if content.is_empty() { summary } else { content };
        if reasoning.is_empty() && item.get("encrypted_content").is_some() {
            let message = "cannot be read by this server; leave the item out, or send its content";
            return Err(item.invalid("encrypted_content", message).with_code("unsupported_field"));
        }
        self.turns.push(Turn { reasoning, ..Turn::of("assistant") });
        Ok(())
    }

    fn function_call(&mut self, item: &Fields<'_>) -> Result<(), Refusal> {
        let (id, name) = (required(item, "call_id")?, required(item, "name")?);
        let arguments = required(item, "arguments")?;
        if self.turns.last().is_none_or(|turn| turn.role != "assistant") {
            self.turns.push(Turn::of("assistant"));
        }
        let turn = self.turns.last_mut().expect("invariant: a turn was pushed if there was none");
        turn.calls.push(call(id, name, &arguments.into()));
        self.called.insert(id.into(), name.into());
        Ok(())
    }

    fn function_call_output(&mut self, item: &Fields<'_>) -> Result<(), Refusal> {
        let id = required(item, "call_id")?;
        let Some(name) = self.called.get(id).cloned() else {
            let message = format!("is {:?}, but no function_call before it has that id", shorten(id));
            return Err(item.invalid("call_id", message));
        };
        let texts = texts(item, "output")?;
        self.turns.push(Turn { texts, answers: Some((id.into(), name)), ..Turn::of("tool") });
        Ok(())
    }
}

fn required<'a>(item: &Fields<'a>, name: &str) -> Result<&'a str, Refusal> {
    item.string(name)?.ok_or_else(|| item.invalid(name, "is required: a string"))
}

/// The texts of a string or a list of parts.
fn texts(item: &Fields<'_>, name: &str) -> Result<Vec<String>, Refusal> {
    let parts = match item.get(name) {
        Some(Value::String(text)) => return Ok(vec![text.clone()]),
        Some(Value::Array(parts)) => parts,
        other => {
            let got = other.map_or("nothing", kind);
            return Err(item.invalid(name, format!("must be a string or a list of text parts, got {got}")));
        }
    };
    let text = |(index, part): (usize, &Value)| {
        let field = match part["type"].as_str() {
            Some("input_text" | "output_text" | "text" | "reasoning_text" | "summary_text") => "text",
            Some("refusal") => "refusal",
            _ => "",
        };
        part[field].as_str().map(str::to_owned).ok_or_else(|| {
            let got = part["type"]
                .as_str()
                .map_or_else(|| "another value".into(), |t| format!("type {:?}", shorten(t)));
            let message = format!("must be a text part, since this model takes text only, got {got}");
            item.invalid(&format!("{name}[{index}]"), message)
        })
    };
    parts.iter().enumerate().map(text).collect()
}
