//! The cost of structured output per step: 32 requests, a vocabulary of 150,000 tokens, one thread.
#![allow(clippy::unwrap_used)] // benches may unwrap

use divan::Bencher;
use lockstep_core::{Grammar, TokenId};
use lockstep_grammar::{Grammars, Matcher};
use lockstep_wire::Vocabulary;

const TOKENS: usize = 150_000;
const ROWS: usize = 32;
const SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "required": ["name", "age", "tags"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}}}}"#;
const DOCUMENT: &str = r#"{"name": "Ada Lovelace of London", "age": 36, "tags": ["red", "blue"]}"#;

fn main() {
    divan::main();
}

/// Single bytes, then words of 2 to 9 letters, half of them behind a space, as byte-pair vocabularies have.
fn vocabulary() -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    (0..=u8::MAX).for_each(|byte| vocabulary.push(&[byte], false));
    vocabulary.push(b"<|eos|>", true);
    let mut state = 1u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 257..TOKENS {
        let mut word = if next(2) == 0 { vec![b' '] } else { Vec::new() };
        for _ in 0..2 + next(8) {
            // Squared: letters that are much more frequent than others, hence long shared prefixes.
            word.push(b'a' + (next(26) * next(26) / 26) as u8);
        }
        vocabulary.push(&word, false);
    }
    vocabulary
}

fn grammars() -> Grammars {
    Grammars::new(&vocabulary(), TOKENS, &[256]).unwrap()
}

/// Making the masks of a vocabulary possible; once per server.
#[divan::bench(sample_count = 3)]
fn prepare(bencher: Bencher) {
    let vocabulary = vocabulary();
    bencher.bench_local(|| Grammars::new(&vocabulary, TOKENS, &[256]).unwrap());
}

/// Masks of a whole document for 32 requests; divide by its 70 steps.
#[divan::bench(sample_count = 10)]
fn document_of_32_requests(bencher: Bencher) {
    let grammars = grammars();
    let tokens: Vec<TokenId> = DOCUMENT.bytes().map(TokenId::from).collect();
    let grammar = Grammar::JsonSchema(SCHEMA.into());
    bencher
        .with_inputs(|| (0..ROWS).map(|_| grammars.matcher(&grammar)).collect::<Vec<Matcher>>())
        .bench_local_values(|mut matchers| {
            for token in &tokens {
                for matcher in &mut matchers {
                    matcher.compute_mask();
                    matcher.push(&[*token]);
                }
            }
            matchers
        });
}
