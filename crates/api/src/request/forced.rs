//! The grammar of an answer that must call: the model's own format, with each function's schema inside.

use crate::parsers::{Function, ToolFormat};
use lockstep_core::JSON_WHITE_SPACE;
use serde_json::{Value, json};
use std::fmt::Write;

/// Where calls stand in an answer, and how one is written around its name and arguments.
struct Layout {
    begin: &'static str,
    /// Before the name, between name and arguments, behind the arguments.
    call: [&'static str; 3],
    /// Between two calls; `None`: models of this format make one.
    separator: Option<&'static str>,
    end: &'static str,
}

/// The layout of a format made of JSON; `None` for the others.
fn layout(format: ToolFormat) -> Option<Layout> {
    let arguments = ["{\"name\": \"", "\", \"arguments\": ", "}"];
    Some(match format {
        ToolFormat::Hermes => Layout {
            begin: "",
            call: ["<tool_call>\n{\"name\": \"", arguments[1], "}\n</tool_call>"],
            separator: Some("\n"),
            end: "",
        },
        ToolFormat::Llama3Json => Layout {
            begin: "",
            call: [arguments[0], "\", \"parameters\": ", arguments[2]],
            separator: None,
            end: "",
        },
        ToolFormat::Mistral => {
            Layout { begin: "[TOOL_CALLS] [", call: arguments, separator: Some(", "), end: "]" }
        }
        ToolFormat::Phi4Mini => {
            Layout { begin: "functools[", call: arguments, separator: Some(", "), end: "]" }
        }
        ToolFormat::Pythonic
        | ToolFormat::DeepSeek
        | ToolFormat::KimiK2
        | ToolFormat::Qwen3Coder
        | ToolFormat::Glm => return None,
    })
}

/// A Lark grammar of answers that hold one call or more to `functions` (at least one) and nothing else,
/// behind reasoning up to `reasoning_close` where the prompt opened it. `None`: the format cannot be forced.
pub(super) fn grammar(
    format: ToolFormat,
    functions: &[&Function],
    one_call: bool,
    reasoning_close: Option<&str>,
) -> Option<String> {
    let Layout { begin, call: [before, between, behind], separator, end } = layout(format)?;
    let mut text = String::new();
    let mut line = |line: std::fmt::Arguments<'_>| {
        writeln!(text, "{line}").expect("invariant: writing to a string does not fail");
    };
    let reasoning = reasoning_close.map_or("", |_| "reasoning ");
    let more = separator.filter(|_| !one_call).map(|text| format!(" ({} call)*", literal(text)));
    let more = more.unwrap_or_default();
    let around = |text: &str| if text.is_empty() { String::new() } else { literal(text) };
    line(format_args!("start: {reasoning}{} call{more} {}", around(begin), around(end)));
    if let Some(close) = reasoning_close {
        line(format_args!("reasoning: thought layout"));
        line(format_args!("thought[suffix={}]: /(?s:.*)/", literal(close)));
        line(format_args!("layout: /[ \\n]{{0,4}}/"));
    }
    let names: Vec<String> = (0..functions.len()).map(|i| format!("call_{i}")).collect();
    line(format_args!("call: {}", names.join(" | ")));
    for (i, function) in functions.iter().enumerate() {
        let head = literal(&format!("{before}{}{between}", function.name));
        line(format_args!("call_{i}: {head} arguments_{i} {}", literal(behind)));
        line(format_args!("arguments_{i}: %json {}", schema(function)));
    }
    Some(text)
}

/// The grammar's strings are spelled like JSON's.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// The schema of a function's arguments, which are always an object; exactly `{}` for a function without parameters.
/// White space is bounded as in other forms, unless the schema says something about it.
fn schema(function: &Function) -> Value {
    let mut schema = match &function.parameters {
        Value::Object(schema) => schema.clone(),
        _ => serde_json::Map::from_iter([
            ("properties".into(), json!({})),
            ("additionalProperties".into(), json!(false)),
            ("x-guidance".into(), json!({"whitespace_flexible": false})),
        ]),
    };
    schema.entry("type").or_insert(json!("object"));
    schema.entry("x-guidance").or_insert(json!({"whitespace_pattern": JSON_WHITE_SPACE}));
    Value::Object(schema)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::parsers::{AnswerParser, AnswerSetup, Event};
    use lockstep_core::Grammar;
    use lockstep_grammar::Grammars;
    use lockstep_wire::Vocabulary;

    const FORCED: [ToolFormat; 4] =
        [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral, ToolFormat::Phi4Mini];

    fn functions() -> Vec<Function> {
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
            "additionalProperties": false});
        vec![
            Function { name: "weather".into(), parameters: schema },
            Function { name: "now".into(), parameters: Value::Null },
        ]
    }

    /// Whether the grammar takes all of `text` and may end there; one token per byte, 256 ends.
    pub(in crate::request) fn accepts(source: &str, text: &str) -> bool {
        let mut vocabulary = Vocabulary::default();
        (0..=u8::MAX).for_each(|byte| vocabulary.push(&[byte], false));
        vocabulary.push(b"<|eos|>", true);
        let mut matcher =
            Grammars::new(&vocabulary, 257, &[256]).unwrap().matcher(&Grammar::Lark(source.into()));
        let tokens = text.bytes().map(u32::from).chain([256]);
        tokens.into_iter().all(|token| {
            matcher.compute_mask();
            let word = matcher.words().get(token as usize / 32).copied().unwrap_or(0);
            matcher.push(&[token]);
            word >> (token % 32) & 1 == 1
        })
    }

    fn source(format: ToolFormat, one_call: bool, close: Option<&str>) -> String {
        let functions = functions();
        grammar(format, &functions.iter().collect::<Vec<_>>(), one_call, close).unwrap()
    }

    /// What each format's two calls look like.
    fn two_calls(format: ToolFormat) -> String {
        let Layout { begin, call: [before, between, behind], separator, end } = layout(format).unwrap();
        let first = format!("{before}weather{between}{{\"city\":\"Rome\"}}{behind}");
        let second = separator.map(|text| format!("{text}{before}now{between}{{}}{behind}"));
        format!("{begin}{first}{}{end}", second.unwrap_or_default())
    }

    #[test]
    fn what_a_grammar_takes_is_what_the_parser_reads() {
        for format in FORCED {
            let text = two_calls(format);
            assert!(accepts(&source(format, false, None), &text), "{format:?} {text}");
            let setup = AnswerSetup { tools: Some(format), functions: functions(), ..Default::default() };
            let mut parser = AnswerParser::new(setup);
            let mut events = parser.push(&text);
            events.extend(parser.finish());
            let names: Vec<_> = events
                .iter()
                .filter_map(|event| match event {
                    Event::ToolCallStart { name, .. } => Some(name.as_str()),
                    Event::TextDelta(text) => panic!("{format:?} left {text:?}"),
                    _ => None,
                })
                .collect();
            assert_eq!(names[0], "weather");
            assert_eq!(names.len(), if format == ToolFormat::Llama3Json { 1 } else { 2 }, "{format:?}");
        }
    }

    #[test]
    fn one_call_known_functions_and_their_schemas_only() {
        let one = source(ToolFormat::Hermes, true, None);
        assert!(!accepts(&one, &two_calls(ToolFormat::Hermes)));
        let call = |name: &str, arguments: &str| {
            format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
        };
        assert!(accepts(&one, &call("now", "{}")));
        for arguments in ["{\"any\": [1]}", "{ }"] {
            assert!(!accepts(&one, &call("now", arguments)), "it has no parameters: {arguments}");
        }
        assert!(accepts(&one, &call("weather", "{\n  \"city\": \"Rome\"\n}")));
        assert!(!accepts(&one, &call("weather", "{\n\n\"city\": \"Rome\"}")), "white space is bounded");
        assert!(!accepts(&one, &call("later", "{}")));
        assert!(!accepts(&one, &call("now", "[]")));
        assert!(!accepts(&one, &call("weather", "{\"city\": 5}")));
        assert!(!accepts(&one, "hello"));
    }

    #[test]
    fn reasoning_that_the_prompt_opened_comes_first() {
        let source = source(ToolFormat::Hermes, true, Some("</think>"));
        let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
        assert!(accepts(&source, &format!("well,\n<b> then</think>\n\n{call}")));
        assert!(accepts(&source, &format!("</think>{call}")));
        assert!(!accepts(&source, &format!("well{call}")));
    }

    #[test]
    fn formats_that_are_not_json_cannot_be_forced() {
        let functions = functions();
        let list: Vec<_> = functions.iter().collect();
        for format in [ToolFormat::Pythonic, ToolFormat::DeepSeek, ToolFormat::Qwen3Coder] {
            assert_eq!(grammar(format, &list, false, None), None);
        }
    }
}
