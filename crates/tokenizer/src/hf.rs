//! The text files of a Hugging Face model folder.
//!
//! Read: `tokenizer.json` (required), `tokenizer_config.json`, `special_tokens_map.json`, and the chat
//! template from, in order, `--chat-template`, `chat_template.jinja`, `chat_template.json`,
//! `tokenizer_config.json`; further templates, by file name, from `additional_chat_templates`. Not read: `added_tokens.json`, `vocab.json` and other files that
//! `tokenizer.json` already contains.

use crate::chat::TemplateSources;
use crate::error::TokenizerError;
use lockstep_core::files;
use lockstep_core::limits::MODEL_JSON_BYTES_MAX;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use tokenizers::{AddedToken, Tokenizer};

/// The names that templates know special tokens by.
const SPECIAL_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// What a model folder says about text.
pub(crate) struct HfText {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) templates: TemplateSources,
    /// `bos_token` → its text, and so on.
    pub(crate) special_tokens: BTreeMap<String, String>,
    pub(crate) cleans_up_spaces: bool,
}

/// Reads a model folder.
pub(crate) fn read_folder(folder: &Path) -> Result<HfText, TokenizerError> {
    let tokenizer = read_tokenizer(&folder.join("tokenizer.json"))?;
    let config = read_object(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let map = read_object(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
    let mut text = HfText {
        tokenizer,
        templates: read_templates(folder, &config)?,
        special_tokens: BTreeMap::new(),
        cleans_up_spaces: config
            .get("clean_up_tokenization_spaces")
            .and_then(Value::as_bool)
            .unwrap_or(false),
    };
    for name in SPECIAL_NAMES {
        let value = config.get(name).filter(|v| !v.is_null()).or_else(|| map.get(name));
        if let Some(content) = value.and_then(token_text) {
            mark_special(&mut text.tokenizer, content, value, folder)?;
            text.special_tokens.insert(name.into(), content.into());
        }
    }
    Ok(text)
}

/// The end tokens that a folder's tokenizer files name; without loading the vocabulary.
pub(crate) fn eos_text(folder: &Path) -> Result<Option<String>, TokenizerError> {
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let object = read_object(&folder.join(file))?.unwrap_or_default();
        if let Some(text) = object.get("eos_token").and_then(token_text) {
            return Ok(Some(text.into()));
        }
    }
    Ok(None)
}

/// Loads a `tokenizer.json`.
pub(crate) fn read_tokenizer(path: &Path) -> Result<Tokenizer, TokenizerError> {
    let bytes = read_limited(path)?.ok_or_else(|| TokenizerError::Missing { path: path.into() })?;
    // The library unwraps inside some deserialisers; a damaged file must not take the process down.
    catch_unwind(AssertUnwindSafe(|| Tokenizer::from_bytes(&bytes)))
        .map_err(|_| TokenizerError::malformed(path, "the tokenizers library gave up on it"))?
        .map_err(|e| TokenizerError::malformed(path, e))
}

/// A special token is written as a string or as an object with its text in `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str()).filter(|text| !text.is_empty())
}

/// As transformers does, a named special token that is in the vocabulary but not marked yet becomes one.
/// (Unlike transformers, a token outside the vocabulary is not given a new id: the model has no row for it.)
fn mark_special(
    tokenizer: &mut Tokenizer,
    content: &str,
    value: Option<&Value>,
    path: &Path,
) -> Result<(), TokenizerError> {
    let is_marked = tokenizer.get_added_vocabulary().is_special_token(content);
    if is_marked || tokenizer.token_to_id(content).is_none() {
        return Ok(());
    }
    let flag = |name: &str| value.and_then(|v| v.get(name)).and_then(Value::as_bool).unwrap_or(false);
    let token = AddedToken::from(content, true)
        .normalized(flag("normalized"))
        .lstrip(flag("lstrip"))
        .rstrip(flag("rstrip"))
        .single_word(flag("single_word"));
    tokenizer.add_special_tokens([token]).map_err(|e| TokenizerError::malformed(path, e))?;
    Ok(())
}

/// The chat templates of a folder.
fn read_templates(folder: &Path, config: &Map<String, Value>) -> Result<TemplateSources, TokenizerError> {
    let mut sources = match read_text(&folder.join("chat_template.jinja"))? {
        Some(text) => TemplateSources::single(text),
        None => {
            let file = read_object(&folder.join("chat_template.json"))?.unwrap_or_default();
            let value = file.get("chat_template").or_else(|| config.get("chat_template"));
            value.map(template_sources).unwrap_or_default()
        }
    };
    let named = folder.join("additional_chat_templates");
    let entries = match std::fs::read_dir(&named) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(sources),
        Err(source) => return Err(TokenizerError::Read { path: named, source }),
    };
    for entry in entries {
        let path = entry.map_err(|source| TokenizerError::Read { path: named.clone(), source })?.path();
        let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja"));
        if let Some(name) = name
            && let Some(text) = read_text(&path)?
        {
            sources.insert(name, text);
        }
    }
    Ok(sources)
}

/// The chat templates of a folder, without its vocabulary.
pub(crate) fn folder_templates(folder: &Path) -> Result<TemplateSources, TokenizerError> {
    read_templates(folder, &read_object(&folder.join("tokenizer_config.json"))?.unwrap_or_default())
}

/// A template is a string, a list of `{"name", "template"}`, or an object of texts by name.
pub(crate) fn template_sources(value: &Value) -> TemplateSources {
    let mut sources = TemplateSources::default();
    match value {
        Value::String(text) => return TemplateSources::single(text),
        Value::Array(entries) => {
            for entry in entries {
                let text = |field: &str| entry.get(field).and_then(Value::as_str);
                if let Some((name, text)) = text("name").zip(text("template")) {
                    sources.insert(name, text);
                }
            }
        }
        Value::Object(named) => {
            for (name, text) in named {
                if let Some(text) = text.as_str() {
                    sources.insert(name, text);
                }
            }
        }
        _ => {}
    }
    sources
}

/// A template given by the user: a Jinja text, or JSON with a `chat_template`.
pub(crate) fn read_template_file(path: &Path) -> Result<TemplateSources, TokenizerError> {
    let text = read_text(path)?.ok_or_else(|| TokenizerError::Missing { path: path.into() })?;
    match serde_json::from_str::<Value>(&text) {
        Ok(json) => Ok(template_sources(json.get("chat_template").unwrap_or(&json))),
        Err(_) => Ok(TemplateSources::single(text)),
    }
}

fn read_object(path: &Path) -> Result<Option<Map<String, Value>>, TokenizerError> {
    let Some(bytes) = read_limited(path)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|e| TokenizerError::malformed(path, e))
}

fn read_text(path: &Path) -> Result<Option<String>, TokenizerError> {
    let Some(bytes) = read_limited(path)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(|e| TokenizerError::malformed(path, e))
}

/// The bytes of a file of bounded size; `None` when it does not exist.
fn read_limited(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    match files::read(path, MODEL_JSON_BYTES_MAX) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error.into()),
    }
}
