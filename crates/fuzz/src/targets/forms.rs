//! What an answer may be held to: regular expressions, Lark, GBNF, JSON schemas, choices.

use lockstep_core::TokenId;
use lockstep_grammar::{Checker, Grammars};
use lockstep_wire::Vocabulary;
use serde_json::json;
use std::sync::OnceLock;

/// Words of the languages.
pub(crate) const FORM_WORDS: &[&str] = &[
    "root ::= ",
    "start: ",
    "[a-z]",
    "[^\"]",
    "\\d",
    "\\pL",
    "(?i)",
    "{1,3}",
    "{0,1000}",
    "{5,}",
    "*",
    "+",
    "?",
    "|",
    "(",
    ")",
    ".",
    "&",
    "~",
    "/x/",
    "%json ",
    "%ignore ",
    "%regex ",
    "<[0]>",
    "\"a\"",
    "\\x00",
    "\\u{10ffff}",
    "\n",
    "#",
    "-",
    "lazy",
    "stop=",
    "{\"type\":\"object\"",
    "\"properties\":",
    "\"enum\":[",
    "\"$ref\":\"#\"",
    "\"anyOf\":[",
    "\"pattern\":\"",
    "\"minimum\":",
    "\"multipleOf\":",
    "\"minLength\":",
    "\"items\":",
    "\"required\":",
    "\"additionalProperties\":",
    "\"const\":",
    "\"format\":\"",
];

/// End token of the vocabulary below.
const EOS: TokenId = 256;
/// Tokens of an answer that are tried.
const STEPS: usize = 24;

/// The first byte chooses the form, the rest is its text.
pub(crate) fn forms(input: &[u8]) {
    let Some((kind, text)) = input.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let form = match kind % 5 {
        0 => json!({"regex": text}),
        1 => json!({"grammar": text}),
        2 => json!({"json": text}),
        3 => match serde_json::from_str::<serde_json::Value>(text) {
            Ok(schema) => json!({"json": schema}),
            Err(_) => return,
        },
        _ => json!({"choice": text.split('\n').collect::<Vec<_>>()}),
    };
    let body = json!({"prompt": "ab", "structured_outputs": form}).to_string();
    for grammar in lockstep_api::fuzzing::grammars_of(body.as_bytes()) {
        if checker().check(&grammar).is_err() {
            continue;
        }
        // It can be satisfied, so an answer gets on, or has come to its end.
        let mut matcher = grammars().matcher(&grammar);
        for _ in 0..STEPS {
            matcher.compute_mask();
            let allowed = |id: &TokenId| {
                matcher.words().get(*id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
            };
            // From both ends of the alphabet in turn would find no more: digits and letters come first.
            let Some(next) = (0x20..EOS).chain(0..0x20).find(allowed) else { break };
            matcher.push(&[next]);
        }
    }
}

fn vocabulary() -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    (0..=u8::MAX).for_each(|byte| vocabulary.push(&[byte], false));
    vocabulary.push(b"<|eos|>", true);
    vocabulary
}

fn checker() -> &'static Checker {
    static CHECKER: OnceLock<Checker> = OnceLock::new();
    CHECKER.get_or_init(|| Checker::new(&vocabulary()).expect("the vocabulary is sound"))
}

fn grammars() -> &'static Grammars {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(|| {
        Grammars::new(&vocabulary(), EOS as usize + 1, &[EOS]).expect("the vocabulary is sound")
    })
}
