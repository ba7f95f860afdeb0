//! What a grammar may cost, judged by its source before anything is compiled.
//!
//! A grammar comes from a client, and the library's own budgets leave gaps: the time for the properties of an
//! object grows with the square of their number and the stack with the number itself, a large `multipleOf` takes
//! minutes, and `allOf` over `anyOf` multiplies out. The limits here are the same on every rank, far above
//! what schemas in use need, and keep a compilation to a few hundred milliseconds.

use crate::GrammarError;
use lockstep_core::Grammar;
use serde_json::Value;

/// Longest source in bytes.
pub(crate) const SOURCE_BYTES_MAX: usize = 256 << 10;
/// Sum over all objects of the squares of their properties' numbers: 400 in one, or 10 in each of 1,600.
const PROPERTY_SQUARES_MAX: usize = 160_000;
/// Values of all `enum`s.
const ENUM_VALUES_MAX: usize = 10_000;
/// Options of all `anyOf`s and `oneOf`s.
const OPTIONS_MAX: usize = 1_000;
/// Combinations of the options inside one `allOf`.
const COMBINATIONS_MAX: usize = 32;
/// Rules of a Lark grammar: the time of a mask grows with the square of the rules that one token can cross.
const RULES_MAX: usize = 1_000;
/// Alternatives of a Lark grammar.
const ALTERNATIVES_MAX: usize = 5_000;
/// What introduces a JSON schema in a Lark grammar.
const EMBEDDED_SCHEMA: &str = "%json";
/// Significant digits of `multipleOf`, read as a number: 0.25 counts as 25, 3000 as 3.
const MULTIPLE_OF_MAX: u64 = 1_000;

/// The source's size.
pub(crate) fn check_size(grammar: &Grammar) -> Result<(), GrammarError> {
    let len = match grammar {
        Grammar::JsonObject => 0,
        Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
        Grammar::Choice(texts) => texts.iter().map(String::len).sum(),
    };
    at_most("bytes", len, SOURCE_BYTES_MAX)
}

/// The shape of a JSON schema. Names inside `const`, `enum` or `default` count as keywords as well.
pub(crate) fn check_schema(schema: &Value) -> Result<(), GrammarError> {
    let mut totals = Totals::default();
    totals.add(schema)?;
    totals.check()
}

/// The number of rules and alternatives of a Lark grammar, and the JSON schemas in it taken together. Characters
/// in its strings count as well.
pub(crate) fn check_lark(text: &str) -> Result<(), GrammarError> {
    let mut totals = Totals::default();
    let (mut rules, mut alternatives) = (0, 0);
    let mut count = |part: &str| {
        rules += part.lines().filter(|line| line.contains(':')).count();
        alternatives += part.matches('|').count();
    };
    let mut rest = text;
    while let Some(at) = rest.find(EMBEDDED_SCHEMA) {
        count(&rest[..at]);
        rest = &rest[at + EMBEDDED_SCHEMA.len()..];
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        // What is no JSON is the library's to refuse.
        if let Some(Ok(schema)) = values.next() {
            totals.add(&schema)?;
            rest = &rest[values.byte_offset()..];
        }
    }
    count(rest);
    at_most("rules", rules, RULES_MAX)?;
    at_most("alternatives", alternatives, ALTERNATIVES_MAX)?;
    totals.check()
}

fn at_most(what: &str, got: usize, max: usize) -> Result<(), GrammarError> {
    if got > max {
        return Err(GrammarError(format!("it has {got} {what}, accepted are {max}")));
    }
    Ok(())
}

/// Counts over whole schemas. Their depth is bounded, since they were parsed.
#[derive(Default)]
struct Totals {
    property_squares: usize,
    enum_values: usize,
    options: usize,
}

impl Totals {
    fn add(&mut self, value: &Value) -> Result<(), GrammarError> {
        match value {
            Value::Array(list) => list.iter().try_for_each(|item| self.add(item)),
            Value::Object(map) => map.iter().try_for_each(|(name, value)| {
                self.keyword(name, value)?;
                self.add(value)
            }),
            _ => Ok(()),
        }
    }

    fn check(&self) -> Result<(), GrammarError> {
        at_most("enum values", self.enum_values, ENUM_VALUES_MAX)?;
        at_most("options in anyOf and oneOf", self.options, OPTIONS_MAX)?;
        if self.property_squares > PROPERTY_SQUARES_MAX {
            let most = PROPERTY_SQUARES_MAX.isqrt();
            return Err(GrammarError(format!(
                "its objects have too many properties (at most {most} in one object, fewer if there are several \
                 large ones); split it"
            )));
        }
        Ok(())
    }

    fn keyword(&mut self, name: &str, value: &Value) -> Result<(), GrammarError> {
        match (name, value) {
            ("properties" | "patternProperties", Value::Object(map)) => {
                self.property_squares += map.len() * map.len();
            }
            ("prefixItems" | "items", Value::Array(list)) => self.property_squares += list.len() * list.len(),
            ("enum", Value::Array(list)) => self.enum_values += list.len(),
            ("anyOf" | "oneOf", Value::Array(list)) => self.options += list.len(),
            ("allOf", Value::Array(list)) => {
                let combinations = list.iter().map(options_of).fold(1, usize::saturating_mul);
                at_most("combinations of options in an allOf", combinations, COMBINATIONS_MAX)?;
            }
            ("multipleOf", Value::Number(number)) => check_multiple_of(&number.to_string())?,
            _ => {}
        }
        Ok(())
    }
}

/// How many alternatives one part of an `allOf` has.
fn options_of(part: &Value) -> usize {
    let len = |name: &str| part.get(name).and_then(Value::as_array).map_or(1, Vec::len).max(1);
    len("anyOf").saturating_mul(len("oneOf"))
}

fn check_multiple_of(number: &str) -> Result<(), GrammarError> {
    let digits: String = number.chars().filter(char::is_ascii_digit).collect();
    let significant = digits.trim_end_matches('0').trim_start_matches('0');
    let is_small = significant.is_empty() || significant.parse().is_ok_and(|n: u64| n <= MULTIPLE_OF_MAX);
    if is_small && !number.contains(['e', 'E']) {
        return Ok(());
    }
    Err(GrammarError(format!(
        "its multipleOf {number} is too costly; accepted are numbers whose digits without leading and trailing zeros make \
         at most {MULTIPLE_OF_MAX}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn properties(count: usize) -> Value {
        (0..count)
            .map(|i| (format!("p{i}"), json!({"type": "string"})))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }

    #[test]
    fn each_limit_accepts_its_value_and_refuses_one_more() {
        let options = |count: usize| vec![json!({"type": "null"}); count];
        let either = |count: usize| json!({"anyOf": options(count)});
        for (accepted, refused, word) in [
            (
                json!({"properties": properties(400)}),
                json!({"properties": properties(401)}),
                "400 in one object",
            ),
            (json!({"enum": vec![1; 10_000]}), json!({"x": {"enum": vec![1; 10_001]}}), "10001 enum values"),
            (json!({"oneOf": options(1000)}), json!([either(500), either(501)]), "1001 options"),
            (
                json!({"allOf": [either(8), either(4)]}),
                json!({"allOf": [either(8), either(5)]}),
                "40 combinations",
            ),
            (json!({"multipleOf": 1000}), json!({"multipleOf": 1001}), "1001"),
            (json!({"multipleOf": 0.025}), json!({"multipleOf": 0.1234}), "0.1234"),
            (json!({"multipleOf": 3_000_000}), json!({"multipleOf": 1e300}), "multipleOf"),
        ] {
            check_schema(&accepted).unwrap_or_else(|error| panic!("{word}: {error}"));
            let error = check_schema(&refused).expect_err(word).to_string();
            assert!(error.contains(word), "{error}");
        }
    }
    #[test]
    fn lark_counts_its_own_rules_and_the_schemas_in_it() {
        let rules = |count: usize| "a: \"b\"\n".repeat(count);
        check_lark(&rules(1000)).unwrap();
        assert!(check_lark(&rules(1001)).unwrap_err().to_string().contains("1001 rules"));
        assert!(check_lark(&"|".repeat(5001)).unwrap_err().to_string().contains("5001 alternatives"));
        let embedded = |count: usize| {
            let schema = serde_json::to_string_pretty(&json!({"properties": properties(count)})).unwrap();
            check_lark(&format!("start: x y\nx: %json {schema}\ny: %json {schema}\n"))
        };
        embedded(280).unwrap();
        assert!(embedded(290).unwrap_err().to_string().contains("properties"));
        check_lark("start: %json {\n%json").unwrap();
    }
}
