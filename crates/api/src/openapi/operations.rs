//! What an endpoint takes and gives.

use super::fields::{FieldTable, body_schema};
use crate::errors::ErrorForm;
use serde_json::{Value, json};

/// One method of one path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    /// `get` or `post`.
    pub(crate) method: &'static str,
    /// The JSON that a request carries; `None`: it has no body.
    pub(crate) body: Option<FieldTable>,
    /// What it is answered with.
    pub(crate) answer: Answers,
    /// What it is for, in Markdown: a cell of `docs/api.md`.
    pub(crate) summary: &'static str,
}

/// What a request that succeeds is answered with. Names are those of [`answers`](super::answers).
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answers {
    /// JSON of this schema.
    Json(&'static str),
    /// JSON of the first schema, or server-sent events that hold JSON of the second.
    WholeOrStream(&'static str, &'static str),
    /// JSON of the first schema, or lines that hold JSON of the second.
    WholeOrLines(&'static str, &'static str),
    /// Text of this media type.
    Text(&'static str),
}

impl Operation {
    /// `GET`, answered with JSON.
    pub(crate) const fn get(answer: &'static str, summary: &'static str) -> Self {
        Self { method: "get", body: None, answer: Answers::Json(answer), summary }
    }

    /// `POST` of `body`, answered with JSON.
    pub(crate) const fn post(body: FieldTable, answer: &'static str, summary: &'static str) -> Self {
        Self { method: "post", body: Some(body), answer: Answers::Json(answer), summary }
    }

    /// `POST` of a request that generates: answered whole or as a stream.
    pub(crate) const fn generate(body: FieldTable, answer: Answers, summary: &'static str) -> Self {
        Self { method: "post", body: Some(body), answer, summary }
    }

    /// The operation object for `path`, as the router spells it.
    pub(super) fn document(&self, path: &str) -> Value {
        let id: String = path.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let error = match ErrorForm::of_path(path) {
            ErrorForm::OpenAi => "#/components/responses/Error",
            ErrorForm::Anthropic => "#/components/responses/AnthropicError",
            ErrorForm::Ollama => "#/components/responses/OllamaError",
        };
        let mut operation = json!({
            "operationId": format!("{}{}", self.method, id.trim_end_matches('_')),
            "summary": self.summary,
            "responses": {"200": self.answer.document(), "default": {"$ref": error}},
        });
        if let Some(table) = &self.body {
            operation["requestBody"] = json!({"required": true, "content": {"application/json": {
                "schema": {"$ref": format!("#/components/schemas/{}", table.name)}}}});
        }
        if let Some(name) = parameter(path) {
            operation["parameters"] = json!([{"name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}]);
        }
        operation
    }
}

/// The name of the path's parameter.
fn parameter(path: &str) -> Option<&str> {
    let (_, behind) = path.split_once('{')?;
    behind.split('}').next().map(|name| name.trim_start_matches('*'))
}

/// The path as OpenAPI writes it, which knows no parameter of several segments.
pub(super) fn path_in_document(path: &str) -> String {
    path.replace("{*", "{")
}

impl Answers {
    fn document(self) -> Value {
        let schema = |name: &str| json!({"schema": {"$ref": format!("#/components/schemas/{name}")}});
        let content = match self {
            Self::Json(name) => json!({"application/json": schema(name)}),
            Self::WholeOrStream(whole, event) => json!({
                "application/json": schema(whole),
                "text/event-stream": {"schema": events(event)},
            }),
            Self::WholeOrLines(whole, line) => json!({
                "application/json": schema(whole),
                "application/x-ndjson": {"schema": {
                    "type": "string",
                    "description": format!("One JSON value per line; each is a {line}."),
                }},
            }),
            Self::Text(media_type) => json!({ media_type: {"schema": {"type": "string"}} }),
        };
        json!({"description": "What was asked for.", "content": content})
    }
}

/// One server-sent event: its data is JSON of the schema `name`, or OpenAI's last word.
fn events(name: &str) -> Value {
    let schema = json!({"$ref": format!("#/components/schemas/{name}")});
    json!({
        "type": "object",
        "description": format!("A server-sent event; its data is a {name}, at last in OpenAI's streams [DONE]."),
        "properties": {
            "event": {"type": "string"},
            "data": {"anyOf": [
                {"const": "[DONE]"},
                {"type": "string", "contentMediaType": "application/json", "contentSchema": schema},
            ]},
        },
        "required": ["data"],
    })
}

/// The schemas of all request bodies in `operations`, by name.
pub(super) fn request_schemas<'a>(
    operations: impl Iterator<Item = &'a Operation>,
) -> serde_json::Map<String, Value> {
    let tables = operations.filter_map(|operation| operation.body.as_ref());
    tables.map(|table| (table.name.to_owned(), body_schema(table))).collect()
}
