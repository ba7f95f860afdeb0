//! Structured output: which tokens keep an answer within a grammar.
//!
//! Built on `llguidance`, which compiles JSON schemas, regular expressions and its own Lark dialect in about a
//! millisecond and computes a mask over the vocabulary per token. Two users: a tokenizer's [`Checker`] compiles a request's
//! grammar before rank 0 hears of it, and every rank holds a [`Matcher`] per running request.
//!
//! **Invariants**
//! - A mask is a function of the vocabulary, the grammar and the tokens so far: equal on every rank, in every
//!   batch and after a retraction. Matchers share no caches, since their fill would decide where a budget ends.
//! - A grammar's cost is bounded before it is compiled ([`limits`]) and, per mask, by budgets of `llguidance`.
//! - A grammar that fails while it runs (a budget of `llguidance` is used up) allows no token, which ends its own
//!   answer with an error; it is never an error of the server.

mod limits;
mod matcher;
mod satisfiable;
mod vocabulary;

pub use matcher::Matcher;
pub use vocabulary::{Checker, Grammars};

use llguidance::api::TopLevelGrammar;
use llguidance::{ParserFactory, TokenParser};
use lockstep_core::{Grammar, JSON_WHITE_SPACE};
use serde_json::{Map, Value, json};

/// Why a grammar cannot be used; a sentence for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(String);

/// What compiling a grammar's regular expressions may cost; some 50,000 a millisecond.
const LEXER_FUEL: u64 = 500_000;
/// Items of one row of the parser: an optional property makes up to five, and 400 must pass.
const ROW_ITEMS_MAX: usize = 4_000;
/// Stack of a compilation, which recurses over a grammar; reserved, not used, by ordinary ones.
const COMPILE_STACK_BYTES: usize = 32 << 20;
/// Characters of the library's explanation that are passed on.
const REASON_CHARS_MAX: usize = 500;

/// A factory that prints nothing and explains errors in one line.
fn factory(env: &llguidance::toktrie::TokEnv) -> Result<ParserFactory, GrammarError> {
    let mut factory = ParserFactory::new_simple(env).map_err(|e| GrammarError(e.to_string()))?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.verbose_errors = false;
    // Half of the default, which lets a hostile grammar compile for half a second before it is refused.
    limits.initial_lexer_fuel = LEXER_FUEL;
    limits.max_items_in_row = ROW_ITEMS_MAX;
    Ok(factory)
}

/// Compiles `grammar`, on a thread of its own for its stack; the caller waits.
fn compile(factory: &ParserFactory, grammar: &Grammar) -> Result<TokenParser, GrammarError> {
    let source = source(grammar)?;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(COMPILE_STACK_BYTES);
        let spawned = thread.spawn_scoped(scope, || factory.create_parser(source));
        let compiling = spawned.map_err(|e| GrammarError(format!("no thread can be started for it: {e}")))?;
        match compiling.join() {
            Ok(Ok(parser)) => Ok(parser),
            Ok(Err(error)) => Err(GrammarError(shorten(&error.to_string()))),
            // The library promises errors, but a grammar comes from a client: a panic must cost its request only.
            Err(_) => Err(GrammarError("the grammar library gave up on it; simplify it".into())),
        }
    })
}

fn source(grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
    limits::check_size(grammar)?;
    Ok(match grammar {
        Grammar::JsonObject => {
            TopLevelGrammar::from_json_schema(with_bounded_space(json!({"type": "object"})))
        }
        Grammar::JsonSchema(text) => {
            let schema =
                serde_json::from_str(text).map_err(|e| GrammarError(format!("it is not JSON: {e}")))?;
            limits::check_schema(&schema)?;
            TopLevelGrammar::from_json_schema(with_bounded_space(schema))
        }
        Grammar::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
        Grammar::Lark(text) => {
            limits::check_lark(text)?;
            TopLevelGrammar::from_lark(text.clone())
        }
        Grammar::Choice(texts) => TopLevelGrammar::from_lark(choice(texts)),
    })
}

/// A schema that says nothing about white space, with [`JSON_WHITE_SPACE`]: without a bound a small model may write
/// line feeds until its answer is cut off.
fn with_bounded_space(schema: Value) -> Value {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(true) => Map::new(),
        other => return other,
    };
    let options = schema.entry("x-guidance").or_insert(Value::Null);
    if options.is_null() {
        *options = Value::Object(Map::new());
    }
    if let Value::Object(options) = options
        && !["whitespace_flexible", "whitespace_pattern"].iter().any(|name| options.contains_key(*name))
    {
        options.insert("whitespace_pattern".into(), JSON_WHITE_SPACE.into());
    }
    Value::Object(schema)
}

/// A Lark grammar of literals; its strings are spelled like JSON's.
fn choice(texts: &[String]) -> String {
    let literals: Vec<String> =
        texts.iter().map(|text| serde_json::Value::from(text.as_str()).to_string()).collect();
    format!("start: {}", literals.join(" | "))
}

fn shorten(reason: &str) -> String {
    match reason.char_indices().nth(REASON_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &reason[..end]),
        None => reason.into(),
    }
}

#[cfg(test)]
mod tests;
