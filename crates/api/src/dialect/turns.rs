//! Messages for the chat template, built from APIs that keep texts, calls and results apart.

use serde_json::{Map, Value, json};

/// One message.
#[derive(Debug, Default)]
pub(super) struct Turn {
    pub(super) role: &'static str,
    pub(super) texts: Vec<String>,
    pub(super) reasoning: Vec<String>,
    /// Tool calls in OpenAI's shape; see [`call`].
    pub(super) calls: Vec<Value>,
    /// The id and the function of the call that a tool message answers.
    pub(super) answers: Option<(String, String)>,
}

/// A tool call for a chat template.
pub(super) fn call(id: &str, name: &str, arguments: &Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

impl Turn {
    /// A turn with nothing in it.
    pub(super) fn of(role: &'static str) -> Self {
        Self { role, ..Self::default() }
    }

    /// The message, its texts joined by `separator`.
    pub(super) fn json(self, separator: &str) -> Value {
        let mut map = Map::new();
        map.insert("role".into(), self.role.into());
        map.insert("content".into(), self.texts.join(separator).into());
        if let Some((id, name)) = self.answers {
            map.insert("tool_call_id".into(), id.into());
            map.insert("name".into(), name.into());
        }
        if !self.reasoning.is_empty() {
            map.insert("reasoning_content".into(), self.reasoning.join(separator).into());
        }
        if !self.calls.is_empty() {
            map.insert("tool_calls".into(), self.calls.into());
        }
        map.into()
    }
}
