//! Which files of a repository make a model that can be served.
//!
//! Follows what the loader and the tokenizer read: the index decides about safetensors files, and other
//! formats (PyTorch pickles, ONNX, the publisher's original files) are not fetched. A GGUF file brings
//! its own description and vocabulary. Reasons are clauses for the user.

use super::id::{HubId, is_gguf, is_safe_path};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Names the weight files.
pub const INDEX: &str = "model.safetensors.index.json";
/// The weight file of a model that has one.
pub const SINGLE: &str = "model.safetensors";
/// The description.
pub const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
/// Everything else that says what a model is, where it exists.
const TEXTS: [&str; 13] = [
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "quantize_config.json",
];
/// Folder of the chat templates beyond the first.
const MORE_TEMPLATES: &str = "additional_chat_templates/";
/// GGUF files that a message lists.
const LISTED_MAX: usize = 8;

/// What is wanted of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Description, tokenizer and safetensors files.
    Whole,
    /// The description alone.
    Config,
    /// A GGUF file: its parts in order, or the only one.
    Gguf(Vec<String>),
}

impl What {
    /// The model that an id means.
    pub fn of(id: &HubId) -> Self {
        match &id.file {
            None => What::Whole,
            Some(file) => What::Gguf(parts(file)),
        }
    }

    /// What is given to the loader, in a folder that has all of it.
    pub fn path_in(&self, folder: &Path) -> PathBuf {
        match self {
            What::Whole | What::Config => folder.to_owned(),
            What::Gguf(parts) => folder.join(&parts[0]),
        }
    }
}

/// The files of `gguf-split` that belong to `file`, which is one of them; else `file` alone.
fn parts(file: &str) -> Vec<String> {
    let split = || {
        let (prefix, rest) = file.split_at_checked(file.len().checked_sub("-00001-of-00002.gguf".len())?)?;
        let (number, count) = rest.strip_prefix('-')?.strip_suffix(".gguf")?.split_once("-of-")?;
        let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<u32>().ok());
        let (number, count) = (digits(number)??, digits(count)??);
        let name = |n| format!("{prefix}-{n:05}-of-{count:05}.gguf");
        (1..=count).contains(&number).then(|| (1..=count).map(name).collect())
    };
    split().unwrap_or_else(|| vec![file.to_owned()])
}

/// Refuses a repository that lacks what is wanted, as far as the names of its files tell.
pub fn check(id: &HubId, what: &What, names: &BTreeSet<&str>) -> Result<(), String> {
    let needed = match what {
        What::Gguf(parts) => match parts.iter().find(|part| !names.contains(part.as_str())) {
            Some(part) => return Err(format!("its repository has no {part}; {}", gguf_files(id, names))),
            None => return Ok(()),
        },
        What::Whole if !names.contains(INDEX) && !names.contains(SINGLE) => {
            return Err(format!(
                "its repository has neither {SINGLE} nor {INDEX}; {}",
                gguf_files(id, names)
            ));
        }
        What::Whole => {
            [(CONFIG, "which describes the model"), (TOKENIZER, "the only tokenizer that is read")].as_slice()
        }
        What::Config => &[(CONFIG, "which describes the model")],
    };
    match needed.iter().find(|(name, _)| !names.contains(name)) {
        Some((name, purpose)) => Err(format!(
            "its repository has no {name}, {purpose}; use another repository of this model, or fetch it \
             with other tools, add the file and give --model the folder"
        )),
        None => Ok(()),
    }
}

/// What to name instead.
fn gguf_files(id: &HubId, names: &BTreeSet<&str>) -> String {
    let gguf: Vec<&str> = names.iter().copied().filter(|name| is_gguf(name)).collect();
    let Some(first) = gguf.first() else {
        let pickles = [".bin", ".pt", ".pth"];
        let has_pickles = names.iter().any(|name| pickles.iter().any(|end| name.ends_with(end)));
        let pickled =
            if has_pickles { "PyTorch files, which can run code when opened, are not read; " } else { "" };
        return format!("{pickled}use a repository with a safetensors or GGUF version of this model");
    };
    let more = if gguf.len() > LISTED_MAX { ", ..." } else { "" };
    format!(
        "name one of its GGUF files, as in {}:{first} (it has {}{more})",
        HubId { file: None, ..id.clone() },
        gguf[..gguf.len().min(LISTED_MAX)].join(", ")
    )
}

/// The text files among `names`.
pub fn texts(names: &BTreeSet<&str>) -> Vec<String> {
    let is_template = |name: &str| name.strip_prefix(MORE_TEMPLATES).is_some_and(|n| n.ends_with(".jinja"));
    let wanted = names.iter().filter(|name| TEXTS.contains(name) || is_template(name));
    wanted.map(|name| (*name).to_owned()).collect()
}

/// The weight files that an index names.
pub fn shards(index: &[u8]) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index)
        .map_err(|e| format!("its {INDEX} cannot be read ({e}); report it to the repository's owner"))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    match names.iter().find(|name| !is_safe_path(name) || !name.ends_with(".safetensors")) {
        Some(name) => Err(format!(
            "its {INDEX} names the weight file {name:?}, which is no safetensors file inside its folder; use \
             another repository of this model"
        )),
        None if names.is_empty() => {
            Err(format!("its {INDEX} names no weight file; report it to the repository's owner"))
        }
        None => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_means_all() {
        let all = ["d/x-00001-of-00003.gguf", "d/x-00002-of-00003.gguf", "d/x-00003-of-00003.gguf"];
        assert_eq!(parts(all[1]), all);
        for alone in
            ["x.gguf", "x-00004-of-00003.gguf", "x-1-of-3.gguf", "x-00000-of-00003.gguf", "ü-of-00003.gguf"]
        {
            assert_eq!(parts(alone), [alone]);
        }
    }

    #[test]
    fn says_what_a_repository_lacks() {
        let id = HubId::parse("a/b@v1").unwrap();
        let lacks = |what: &What, names: &[&'static str]| {
            check(&id, what, &names.iter().copied().collect()).err().unwrap_or_default()
        };
        let whole = |names: &[&'static str]| lacks(&What::Whole, names);
        assert_eq!(whole(&[CONFIG, TOKENIZER, SINGLE]), "");
        assert_eq!(whole(&[CONFIG, TOKENIZER, INDEX]), "");
        assert!(whole(&[CONFIG, SINGLE]).contains("has no tokenizer.json"));
        assert!(whole(&[TOKENIZER, SINGLE]).contains("has no config.json"));
        let message = whole(&["q4.gguf", "q8.gguf"]);
        assert!(message.contains("as in a/b@v1:q4.gguf (it has q4.gguf, q8.gguf)"), "{message}");
        assert!(whole(&[CONFIG, "pytorch_model.bin"]).contains("PyTorch files"));
        assert!(whole(&["consolidated.safetensors"]).contains("neither model.safetensors nor"));
        let config = |names: &[&'static str]| lacks(&What::Config, names);
        assert!(config(&[CONFIG]).is_empty() && config(&[SINGLE]).contains("has no config.json"));
        let gguf = What::Gguf(parts("x-00001-of-00002.gguf"));
        let message = lacks(&gguf, &["x-00001-of-00002.gguf"]);
        assert!(message.starts_with("its repository has no x-00002-of-00002.gguf; name one of"), "{message}");
    }

    #[test]
    fn an_index_names_files_of_its_folder() {
        let index = |name: &str| format!(r#"{{"weight_map": {{"a": {name:?}, "b": "m-2.safetensors"}}}}"#);
        let names = shards(index("m-1.safetensors").as_bytes()).unwrap();
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["m-1.safetensors", "m-2.safetensors"]);
        for name in ["../m.safetensors", "/m.safetensors", "x/../../m.safetensors", "m.bin"] {
            assert!(shards(index(name).as_bytes()).unwrap_err().contains("names the weight file"), "{name}");
        }
        assert!(shards(br#"{"weight_map": {}}"#).is_err() && shards(b"[]").is_err());
    }
}
