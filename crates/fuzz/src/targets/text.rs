//! Tokenizers and chat templates.

use super::files_of;
use lockstep_tokenizer::{TextModel, TextOptions};
use lockstep_wire::{ChatMessages, TextParams};
use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// Words of chat templates.
pub(crate) const TEMPLATE_WORDS: &[&str] = &[
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{%-",
    "-%}",
    "for m in messages",
    "endfor",
    "if ",
    "endif",
    "set ",
    "macro f(x)",
    "endmacro",
    "f(1)",
    "range(10)",
    "namespace(a=1)",
    "| tojson",
    "| trim",
    "| length",
    ".split('a')",
    "[0]",
    "[-1:]",
    "~",
    "*",
    "**",
    "//",
    "% 0",
    "loop.index",
    "raise_exception('a')",
    "strftime_now('%Y')",
    "is defined",
    "| list",
    "| sort",
    "| join(',')",
    "| replace('a','aa')",
    "| indent(9)",
    "| batch(2)",
    "| slice(3)",
    "| tojson(indent=9)",
    "messages",
    "generation",
    "endgeneration",
    "call f()",
    "endcall",
    "filter upper",
    "endfilter",
    "recursive",
    "loop(m)",
    "self",
];

/// A text with everything that tokenizers treat apart.
const TEXT: &str = "ab w5 <s></s> 漢\u{fffd}é 😀 \n\t 12345 ,.!";
/// Ids that are decoded.
const IDS: std::ops::Range<u32> = 0..80;
/// A tokenizer of a few bytes, for templates that are no part of one.
const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
    "post_processor": null, "decoder": null, "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"#;

/// A folder for one input after the other, of one thread.
pub(super) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    pub(super) fn with(run: impl FnOnce(&Self)) {
        thread_local!(static FOLDER: RefCell<Option<Scratch>> = const { RefCell::new(None) });
        FOLDER.with_borrow_mut(|folder| run(folder.get_or_insert_with(Self::new)));
    }

    fn new() -> Self {
        let name = format!("lockstep-fuzz-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Self { path }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(super) fn write(&self, name: &str, content: &[u8]) {
        std::fs::write(self.join(name), content).expect("the folder is writable");
    }

    pub(super) fn write_or_remove(&self, name: &str, content: Option<&[u8]>) {
        match content {
            Some(content) => self.write(name, content),
            // Mostly it was not there.
            None => drop(std::fs::remove_file(self.join(name))),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// One or two files.
pub(crate) fn tokenizer(input: &[u8]) {
    Scratch::with(|folder| {
        let mut files = files_of(input);
        folder.write("tokenizer.json", files.next().unwrap_or_default());
        folder.write_or_remove("tokenizer_config.json", files.next());
        read_text(folder.path(), None, &[]);
    });
}

/// A template, then the messages, then the template's keyword arguments.
pub(crate) fn template(input: &[u8]) {
    Scratch::with(|folder| {
        let mut files = files_of(input);
        folder.write("tokenizer.json", TOKENIZER.as_bytes());
        folder.write("template.jinja", files.next().unwrap_or_default());
        let rest: Vec<&[u8]> = files.collect();
        read_text(folder.path(), Some(folder.join("template.jinja")), &rest);
    });
}

/// Loads what a model says of text and uses all of it.
pub(super) fn read_text(path: &Path, chat_template: Option<PathBuf>, chat: &[&[u8]]) {
    let options = TextOptions { chat_template, context_max: Some(4096), vocab_size: None };
    let Ok(model) = TextModel::load(path, &options) else { return };
    let ids = model.encode(TEXT, true).unwrap_or_default();
    for skip_special_tokens in [true, false] {
        model.decode(&ids, skip_special_tokens);
        IDS.for_each(|id| drop(model.token_text(id, skip_special_tokens)));
    }
    model.token_pieces(&ids);
    model.vocabulary();
    let mut decoder = model.decoder(&TextParams { stop: vec!["ab".into()], ..TextParams::default() });
    let mut text = String::new();
    for id in IDS {
        if model.push_token(&mut decoder, id, &mut text) {
            break;
        }
    }
    model.finish_text(&mut decoder, &mut text);
    let of = |index: usize| chat.get(index).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let messages = ChatMessages {
        messages_json: of(0).unwrap_or_else(|| r#"[{"role": "user", "content": "ab"}]"#.into()),
        tools_json: None,
        template_kwargs_json: of(1),
        add_generation_prompt: true,
    };
    if let Err(refusal) = model.render_chat(&messages) {
        assert!(!refusal.message.is_empty() && refusal.message.len() < 10_000, "{refusal:?}");
    }
}
