//! The vocabulary of request fields: what a field may hold and what the server does with it.
//!
//! **Invariant:** one row per field and kind of request. The field policy, the schemas of `/openapi.json` and the
//! tables of `docs/api.md` are read from the same row, and ranges are the constants that validation uses.

use super::shapes::Shape;
use serde_json::{Value, json};

/// A field of a request.
#[derive(Debug)]
pub(crate) struct Field {
    /// As it is spelled in JSON.
    pub(crate) name: &'static str,
    /// What the server does with it.
    pub(crate) behaviour: Behaviour,
    /// What it stands for when it is left out, in words of `docs/api.md`; JSON (`false`, `16`) is the
    /// document's default too. Empty: nothing to say.
    pub(crate) absent: &'static str,
    /// What else there is to know, in Markdown.
    pub(crate) notes: &'static str,
}

/// What the server does with a field.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Behaviour {
    /// Reads it.
    Read(Kind),
    /// Reads it and fails without it.
    Required(Kind),
    /// Accepts whatever it holds: bookkeeping of the client or of the API's own service.
    WithoutEffect,
    /// It has a meaning elsewhere that this server does not have: refused, unless null or neutral.
    Unsupported(Neutral),
}

/// What a field may hold besides null, which means absent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// The served name.
    Model,
    /// true or false
    Bool,
    /// A string.
    Text,
    /// A string of so many bytes.
    TextOf(usize, usize),
    /// An integer in these bounds; `5.0` is one.
    Integer(i128, i128),
    /// A finite number in these bounds.
    Number(f64, f64),
    /// An object whose members are somebody else's to check.
    Object,
    /// Something with parts of its own.
    Shape(Shape),
}

/// The value at which an unsupported field changes nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Neutral {
    /// Only null.
    Nothing,
    /// This one.
    Bool(bool),
    /// This one.
    Number(f64),
    /// An empty string, list or object.
    Empty,
    /// One of these strings.
    Text(&'static [&'static str]),
    /// `["text"]`
    TextModality,
    /// As [`Neutral::Empty`], or `"none"` or `"auto"`: OpenAI's former name of this field.
    Former(&'static str),
}

/// The fields of a kind of request, in groups that kinds share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldTable {
    /// The name of its schema in the OpenAPI document.
    pub(crate) name: &'static str,
    /// Every name stands in one group only.
    pub(crate) groups: &'static [&'static [Field]],
}

impl FieldTable {
    /// All rows, in the order of the groups.
    pub(crate) fn fields(&self) -> impl Iterator<Item = &'static Field> + use<> {
        self.groups.iter().copied().flatten()
    }

    /// The row of `name`.
    pub(crate) fn find(&self, name: &str) -> Option<&'static Field> {
        self.fields().find(|field| field.name == name)
    }
}

/// A row of a field that is read.
pub(crate) const fn read(name: &'static str, kind: Kind, absent: &'static str, notes: &'static str) -> Field {
    Field { name, behaviour: Behaviour::Read(kind), absent, notes }
}

/// A row of a field that must be there.
pub(crate) const fn required(name: &'static str, kind: Kind, notes: &'static str) -> Field {
    Field { name, behaviour: Behaviour::Required(kind), absent: "400", notes }
}

/// A row of a field that is accepted without effect.
pub(crate) const fn ignored(name: &'static str) -> Field {
    Field { name, behaviour: Behaviour::WithoutEffect, absent: "", notes: "accepted, without effect" }
}

/// A row of a field that is refused unless neutral.
pub(crate) const fn unsupported(name: &'static str, neutral: Neutral) -> Field {
    Field { name, behaviour: Behaviour::Unsupported(neutral), absent: "", notes: "" }
}

impl Kind {
    /// In words of `docs/api.md`.
    pub(crate) fn in_words(self) -> String {
        match self {
            Kind::Model => "the served name".into(),
            Kind::Bool => "bool".into(),
            Kind::Text => "string".into(),
            Kind::TextOf(least, most) => format!("string of {least} to {most} bytes"),
            Kind::Integer(least, most) => integer_in_words(least, most),
            Kind::Number(least, most) => format!("{least}..={most}"),
            Kind::Object => "object".into(),
            Kind::Shape(shape) => (shape.words)(),
        }
    }

    /// As JSON Schema, without null.
    fn schema(self) -> Value {
        match self {
            Kind::Model => json!({"$ref": "#/components/schemas/ServedModel"}),
            Kind::Bool => json!({"type": "boolean"}),
            Kind::Text => json!({"type": "string"}),
            // JSON Schema counts characters, of which a string has at most as many as bytes.
            Kind::TextOf(least, most) => json!({"type": "string", "minLength": least, "maxLength": most}),
            Kind::Integer(least, most) => {
                json!({"type": "integer", "minimum": integer_json(least), "maximum": integer_json(most)})
            }
            Kind::Number(least, most) => json!({"type": "number", "minimum": least, "maximum": most}),
            Kind::Object => json!({"type": "object"}),
            Kind::Shape(shape) => (shape.schema)(),
        }
    }
}

/// Bounds that only the integer type sets are no news.
fn integer_in_words(least: i128, most: i128) -> String {
    let is_open =
        |bound: i128| bound >= i64::MAX.into() || bound == u32::MAX.into() || bound <= i64::MIN.into();
    match (is_open(least), is_open(most)) {
        (true, _) => "any 64-bit integer, signed or not".into(),
        (false, true) => format!("integer >= {least}"),
        (false, false) => format!("integer in {least}..={most}"),
    }
}

/// Bounds lie in the range of 64-bit integers, signed or not.
fn integer_json(bound: i128) -> Value {
    i64::try_from(bound)
        .map(Value::from)
        .or_else(|_| u64::try_from(bound).map(Value::from))
        .unwrap_or_default()
}

impl Neutral {
    /// Whether `value` changes nothing; null is never asked.
    pub(crate) fn accepts(self, value: &Value) -> bool {
        match self {
            Neutral::Number(neutral) => value.as_f64() == Some(neutral),
            _ => self.values().contains(value),
        }
    }

    /// Everything but null that changes nothing.
    fn values(self) -> Vec<Value> {
        let empty = [json!(""), json!([]), json!({})];
        match self {
            Neutral::Nothing => Vec::new(),
            Neutral::Bool(neutral) => vec![neutral.into()],
            Neutral::Number(neutral) => vec![neutral.into()],
            Neutral::Empty => empty.into(),
            Neutral::Text(texts) => texts.iter().map(|text| json!(text)).collect(),
            Neutral::TextModality => vec![json!(["text"])],
            Neutral::Former(_) => empty.into_iter().chain(["none".into(), "auto".into()]).collect(),
        }
    }

    /// What a client should do, for a refusal.
    pub(crate) fn advice(self) -> String {
        match self {
            Neutral::Nothing => "leave it out".into(),
            Neutral::Bool(neutral) => format!("leave it out or send {neutral}"),
            Neutral::Number(neutral) => format!("leave it out or send {neutral}"),
            Neutral::Empty => "leave it out or send it empty".into(),
            Neutral::Text(texts) => format!("leave it out or send {:?}", texts[0]),
            Neutral::TextModality => "leave it out or send [\"text\"]".into(),
            Neutral::Former(now) => format!("it is OpenAI's former way to say {now}; send {now} instead"),
        }
    }

    /// In words of `docs/api.md`.
    pub(crate) fn in_words(self) -> String {
        match self {
            Neutral::Nothing => "null".into(),
            Neutral::Bool(neutral) => neutral.to_string(),
            Neutral::Number(neutral) => neutral.to_string(),
            Neutral::Empty => "empty".into(),
            Neutral::Text(texts) => {
                texts.iter().map(|text| format!("`{text:?}`")).collect::<Vec<_>>().join(" or ")
            }
            Neutral::TextModality => "`[\"text\"]`".into(),
            Neutral::Former(now) => format!("empty, `\"none\"` or `\"auto\"`; the message names `{now}`"),
        }
    }
}

impl Field {
    /// Its JSON Schema, null included.
    fn schema(&self) -> Value {
        let mut schema = match self.behaviour {
            Behaviour::Required(kind) => kind.schema(),
            Behaviour::Read(kind) => or_null(kind.schema()),
            Behaviour::WithoutEffect => json!({}),
            Behaviour::Unsupported(neutral) => {
                let values: Vec<Value> = neutral.values().into_iter().chain([Value::Null]).collect();
                json!({ "enum": values })
            }
        };
        schema["description"] = match self.behaviour {
            Behaviour::Read(kind) | Behaviour::Required(kind) if self.notes.is_empty() => kind.in_words(),
            Behaviour::Read(kind) | Behaviour::Required(kind) => {
                format!("{}; {}", kind.in_words(), self.notes)
            }
            Behaviour::WithoutEffect => self.notes.to_owned(),
            Behaviour::Unsupported(neutral) => format!("not supported; accepted: {}", neutral.in_words()),
        }
        .into();
        if let Ok(default) = serde_json::from_str::<Value>(self.absent)
            && matches!(self.behaviour, Behaviour::Read(_))
        {
            schema["default"] = default;
        }
        schema
    }
}

/// The schema that also takes null.
pub(crate) fn or_null(mut schema: Value) -> Value {
    match (schema["type"].as_str(), schema.get("enum")) {
        (Some("null"), None) => schema,
        (Some(kind), None) => {
            schema["type"] = json!([kind, "null"]);
            schema
        }
        _ => json!({"anyOf": [schema, {"type": "null"}]}),
    }
}

/// The JSON Schema of a request's body. Unknown fields are accepted, so it is open.
pub(crate) fn body_schema(table: &FieldTable) -> Value {
    let properties: serde_json::Map<String, Value> =
        table.fields().map(|field| (field.name.to_owned(), field.schema())).collect();
    let required: Vec<&str> = table
        .fields()
        .filter(|field| matches!(field.behaviour, Behaviour::Required(_)))
        .map(|field| field.name)
        .collect();
    let mut schema = json!({"type": "object", "properties": properties});
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}
