//! A model folder in Hugging Face layout, every part of it open to change before it is written.

use crate::safetensors;
use crate::tensor::{FileDType, Weights};
use serde_json::{Value, json};
use std::path::Path;

/// Where a folder keeps its chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatTemplate {
    /// Nowhere.
    None,
    /// `chat_template` of tokenizer_config.json.
    InConfig(&'static str),
    /// A list of named templates in tokenizer_config.json; the first is `default`.
    NamedList(&'static str, &'static str),
    /// `chat_template.jinja`.
    JinjaFile(&'static str),
    /// `chat_template.json`.
    JsonFile(&'static str),
}

/// The files of a model before they are written.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    /// config.json.
    pub config: Value,
    /// All tensors.
    pub weights: Weights,
    /// Their float type in the files.
    pub dtype: FileDType,
    /// Number of safetensors files; more than one means an index.
    pub shards: usize,
    /// tokenizer.json.
    pub tokenizer: Value,
    /// tokenizer_config.json, without the chat template.
    pub tokenizer_config: Value,
    /// generation_config.json.
    pub generation_config: Option<Value>,
    /// The chat template and its place.
    pub chat_template: ChatTemplate,
}

impl ModelFolder {
    /// Writes all files into `dir`, which is made if it does not exist.
    pub fn write(&self, dir: &Path) -> std::io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let write_json = |name: &str, value: &Value| std::fs::write(dir.join(name), format!("{value:#}"));
        let mut tokenizer_config = self.tokenizer_config.clone();
        match self.chat_template {
            ChatTemplate::None => {}
            ChatTemplate::InConfig(text) => tokenizer_config["chat_template"] = json!(text),
            ChatTemplate::NamedList(default, other) => {
                tokenizer_config["chat_template"] = json!([
                    {"name": "default", "template": default},
                    {"name": "tool_use", "template": other},
                ]);
            }
            ChatTemplate::JinjaFile(text) => std::fs::write(dir.join("chat_template.jinja"), text)?,
            ChatTemplate::JsonFile(text) => {
                write_json("chat_template.json", &json!({"chat_template": text}))?
            }
        }
        write_json("config.json", &self.config)?;
        write_json("tokenizer.json", &self.tokenizer)?;
        write_json("tokenizer_config.json", &tokenizer_config)?;
        if let Some(generation_config) = &self.generation_config {
            write_json("generation_config.json", generation_config)?;
        }
        safetensors::write_model(dir, &self.weights, self.dtype, self.shards)
    }
}
