//! Every decoder that bytes from outside reach, as a function of those bytes: taken or refused, never a panic, a hang or
//! memory out of proportion.
//!
//! Two users: the libFuzzer program of this crate, which searches for minutes or hours and knows where an input went,
//! and `cargo test`, which runs each target's corpus and a fixed number of changed inputs ([`mutate`]). The targets call
//! the very functions that the server and the tools call, with files where those read files.
//!
//! **Invariant:** a target depends on nothing but its input.
//!
//! Reading order: [`TARGETS`], `targets`, [`mutate`].

pub mod mutate;
mod targets;

/// A decoder under test.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What `--target` and the folder of its corpus call it.
    pub name: &'static str,
    /// Panics where a server would, or where a promise is broken.
    pub run: fn(&[u8]),
    /// Words of its language, for changes that keep an input readable.
    pub words: &'static [&'static str],
    /// How many changed inputs `cargo test` tries: a second or two of them.
    pub bounded: u32,
}

/// All targets. An input that stands for several files has a zero byte between them.
pub const TARGETS: &[Target] = &[
    // A request's body, at every endpoint that generates.
    Target { name: "requests", run: targets::requests, words: JSON, bounded: 4_000 },
    // A message between processes, as each of the five kinds.
    Target { name: "wire", run: targets::wire, words: &[], bounded: 40_000 },
    // What another host says: the first byte says which of a stranger's bytes, a known sender's, a launcher's message, addresses.
    Target { name: "hosts", run: targets::hosts, words: targets::HOST_WORDS, bounded: 20_000 },
    // A watch page and a rank group's memory; begins with the size of the file.
    Target { name: "shared", run: targets::shared, words: &[], bounded: 2_000 },
    // A GGUF file: header, metadata, tensors, vocabulary.
    Target { name: "gguf", run: targets::gguf, words: targets::GGUF_WORDS, bounded: 1_500 },
    // model.safetensors.
    Target { name: "safetensors", run: targets::safetensors, words: JSON, bounded: 3_000 },
    // config.json, generation_config.json, model.safetensors.index.json.
    Target { name: "config", run: targets::config, words: JSON, bounded: 3_000 },
    // tokenizer.json, tokenizer_config.json.
    Target { name: "tokenizer", run: targets::tokenizer, words: JSON, bounded: 1_000 },
    // A chat template, messages, chat_template_kwargs.
    Target { name: "template", run: targets::template, words: targets::TEMPLATE_WORDS, bounded: 600 },
    // A form of an answer; the first byte says which: regex, Lark or GBNF, JSON schema, choices.
    Target { name: "forms", run: targets::forms, words: targets::FORM_WORDS, bounded: 800 },
];

const JSON: &[&str] = &[
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "18446744073709551616",
    "9223372036854775807",
    "[]",
    "{}",
    "\"\"",
    "[[[[[[[[",
    "{\"a\":",
    "\\ud800",
    "\\u0000",
    "0.5",
    "4294967295",
    "1152921504606846976",
    ",",
    ":",
    "\"",
];
