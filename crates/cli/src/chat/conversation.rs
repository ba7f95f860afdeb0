//! What was said so far and what is asked with it.

use serde_json::{Map, Value, json};

/// Fields that the chat fills itself, or whose answers it cannot show.
const OWN_FIELDS: [&str; 8] =
    ["messages", "model", "stream", "stream_options", "n", "tools", "tool_choice", "logprobs"];

/// A system message, turns, and fields that go with every request.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    system: Option<String>,
    turns: Vec<Value>,
    params: Map<String, Value>,
}

impl Conversation {
    /// Nothing said yet.
    pub fn new(system: Option<String>) -> Self {
        Self { system, ..Self::default() }
    }

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Replaces the system message.
    pub fn set_system(&mut self, text: Option<String>) {
        self.system = text;
    }

    /// The fields sent with every request.
    pub fn params(&self) -> &Map<String, Value> {
        &self.params
    }

    /// Sets a field; null takes it away. A value that no server takes beside the others is refused in its words; what
    /// depends on the model is for the server to say.
    pub fn set_param(&mut self, name: &str, value: Value) -> Result<(), String> {
        if OWN_FIELDS.contains(&name) {
            return Err(format!("{name} is not for setting in a chat"));
        }
        let mut params = self.params.clone();
        match value {
            Value::Null => drop(params.shift_remove(name)),
            value => {
                params.insert(name.to_owned(), value);
                lockstep_api::check_chat_fields(&params).map_err(|refusal| refusal.message)?;
            }
        }
        self.params = params;
        Ok(())
    }

    /// Forgets all turns.
    pub fn reset(&mut self) {
        self.turns.clear();
    }

    /// The request that asks `model` for the answer to `message`.
    pub fn request(&self, model: &str, message: &str) -> Value {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let user = json!({"role": "user", "content": message});
        let messages: Vec<Value> = system.chain(self.turns.iter().cloned()).chain([user]).collect();
        let mut body = self.params.clone();
        body.insert("model".into(), model.into());
        body.insert("messages".into(), messages.into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        body.into()
    }

    /// Keeps a turn. Reasoning is not kept: models are made to see answers only.
    pub fn add(&mut self, message: &str, answer: &str) {
        self.turns.push(json!({"role": "user", "content": message}));
        self.turns.push(json!({"role": "assistant", "content": answer}));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_hold_all_that_was_said() {
        let mut chat = Conversation::new(Some("Be brief.".into()));
        chat.set_param("temperature", json!(0)).unwrap();
        chat.set_param("seed", json!(1)).unwrap();
        chat.set_param("seed", Value::Null).unwrap();
        chat.add("A", " alpha");
        let body = chat.request("m", "B");
        let roles: Vec<_> = body["messages"].as_array().unwrap().iter().map(|m| m["role"].clone()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert_eq!(
            (&body["model"], &body["temperature"], &body["seed"]),
            (&json!("m"), &json!(0), &Value::Null)
        );
        assert_eq!(body["stream_options"]["include_usage"], true);
        chat.reset();
        chat.set_system(None);
        assert_eq!(chat.request("m", "B")["messages"], json!([{"role": "user", "content": "B"}]));
    }

    #[test]
    fn fields_of_the_chat_itself_cannot_be_set() {
        let mut chat = Conversation::default();
        assert!(chat.set_param("stream", json!(false)).unwrap_err().contains("stream"));
    }

    #[test]
    fn values_that_no_server_takes_are_refused_when_they_are_set() {
        let mut chat = Conversation::default();
        for (name, value, words) in [
            ("temperature", json!("hot"), "temperature must be a number"),
            ("top_p", json!(2), "top_p must be"),
            ("stop", json!(5), "stop must be a string or a list of strings"),
            ("suffix", json!("x"), "suffix is not supported"),
        ] {
            let refused = chat.set_param(name, value).unwrap_err();
            assert!(refused.starts_with(words), "{refused}");
        }
        assert!(chat.params().is_empty());
        chat.set_param("max_tokens", json!(5)).unwrap();
        assert!(
            chat.set_param("min_tokens", json!(6)).unwrap_err().contains("must not exceed the token limit")
        );
        chat.set_param("chat_template_kwargs", json!({"enable_thinking": false})).unwrap();
        chat.set_param("unheard_of", json!(1)).unwrap();
        assert_eq!(chat.params().len(), 3);
    }
}
