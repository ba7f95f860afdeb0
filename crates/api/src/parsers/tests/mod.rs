//! What each format's answers become, and how parsers are chosen.

mod random;

use super::*;
use serde_json::json;

const FORMATS: [ToolFormat; 9] = [
    ToolFormat::KimiK2,
    ToolFormat::Hermes,
    ToolFormat::Llama3Json,
    ToolFormat::Mistral,
    ToolFormat::Pythonic,
    ToolFormat::Phi4Mini,
    ToolFormat::DeepSeek,
    ToolFormat::Qwen3Coder,
    ToolFormat::Glm,
];

/// A function whose parameter `text` is a text, and `k0`, `k1` and `k2` anything.
fn function(name: &str) -> Function {
    let any = json!({"type": ["string", "number", "array", "object", "null", "boolean"]});
    let properties = json!({"text": {"type": "string"}, "k0": any, "k1": any, "k2": any});
    let tool = json!({"function": {"name": name, "parameters": {"properties": properties}}});
    Function::from_tool(&tool).unwrap()
}

fn setup(tools: Option<ToolFormat>, reasoning: Option<ReasoningFormat>) -> AnswerSetup {
    AnswerSetup {
        tools,
        functions: vec![function("f"), function("get_weather")],
        forced: Vec::new(),
        reasoning,
        begins_in_reasoning: reasoning == Some(ReasoningFormat::DeepSeekR1),
        id_seed: "s".into(),
    }
}

/// The joined answer: neighbours of one kind are one.
fn joined(events: impl IntoIterator<Item = Event>) -> Vec<Event> {
    let mut out: Vec<Event> = Vec::new();
    for event in events {
        match (out.last_mut(), event) {
            (Some(Event::TextDelta(last)), Event::TextDelta(text)) => last.push_str(&text),
            (Some(Event::ReasoningDelta(last)), Event::ReasoningDelta(text)) => last.push_str(&text),
            (
                Some(Event::ToolCallArgumentsDelta { index: a, text: last }),
                Event::ToolCallArgumentsDelta { index, text },
            ) if *a == index => last.push_str(&text),
            (_, event) => out.push(event),
        }
    }
    out
}

fn parse_whole(setup: &AnswerSetup, text: &str) -> Vec<Event> {
    let mut parser = AnswerParser::new(setup.clone());
    let mut events = parser.push(text);
    events.extend(parser.finish());
    joined(events)
}

fn text(text: &str) -> Event {
    Event::TextDelta(text.into())
}

fn reasoning(text: &str) -> Event {
    Event::ReasoningDelta(text.into())
}

/// As every format but Mistral's has it.
fn call(index: usize, name: &str, arguments: &str) -> Vec<Event> {
    let start = Event::ToolCallStart { index, id: IdStyle::Call.id("s", index), name: name.into() };
    match arguments {
        "" => vec![start],
        _ => vec![start, Event::ToolCallArgumentsDelta { index, text: arguments.into() }],
    }
}

fn check(format: ToolFormat, answer: &str, expected: &[Vec<Event>]) {
    let setup = setup(Some(format), None);
    let mut expected = expected.concat();
    for event in &mut expected {
        if let Event::ToolCallStart { index, id, .. } = event {
            *id = format.id_style().id("s", *index);
        }
    }
    assert_eq!(parse_whole(&setup, answer), expected, "{format:?}: {answer}");
    // The same a character at a time.
    let mut parser = AnswerParser::new(setup);
    let mut events: Vec<Event> =
        answer.chars().flat_map(|c| parser.push(c.encode_utf8(&mut [0; 4]))).collect();
    events.extend(parser.finish());
    assert_eq!(joined(events), expected, "{format:?}, by characters: {answer}");
}

/// Mistral's templates refuse other ids when the call comes back in a later turn.
#[test]
fn mistral_ids_are_nine_letters_and_digits_and_all_different() {
    let ids: std::collections::BTreeSet<String> =
        (0..5000).map(|i| IdStyle::Nine.id(&format!("{}0x", i / 5), i % 5)).collect();
    assert_eq!(ids.len(), 5000);
    assert!(ids.iter().all(|id| id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric())), "{ids:?}");
    assert_eq!(IdStyle::Call.id("a0x", 3), "call_a0x3");
}

#[test]
fn hermes_calls() {
    use ToolFormat::Hermes;
    let answer = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, {\"b\": \"}</tool_call>\"}]}}\n</tool_call>\n\
                  <tool_call>\n{\"arguments\": {}, \"name\": \"g\"}\n</tool_call>\n";
    let arguments = r#"{"a": [1, {"b": "}</tool_call>"}]}"#;
    check(Hermes, answer, &[vec![text("Let me see.")], call(0, "f", arguments), call(1, "g", "{}")]);
    check(
        Hermes,
        "<tool_call>{\"name\": \"now\"}</tool_call> so",
        &[call(0, "now", "{}"), vec![text(" so")]],
    );
    let amid = "Hm. \n<tool_call>{\"name\": \"f\"}</tool_call>\n So.";
    check(Hermes, amid, &[vec![text("Hm.")], call(0, "f", "{}"), vec![text("\n So.")]]);
    // JSON text inside a string, and a raw line break inside a string.
    let doubled = r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#;
    check(Hermes, doubled, &[call(0, "f", r#"{"a": 1}"#)]);
    let raw = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x\ny\"}}</tool_call>";
    check(Hermes, raw, &[call(0, "f", r#"{"a": "x\ny"}"#)]);
    let null = r#"<tool_call>{"name": "f", "arguments": null}</tool_call>"#;
    check(Hermes, null, &[call(0, "f", "{}")]);
}

/// Wherever an answer that is held to calls is cut, none of its markup is text.
#[test]
fn a_forced_call_that_is_cut_is_a_call() {
    let call_of = |text: &str, forced: &[&str]| {
        let forced = forced.iter().map(|name| (*name).to_owned()).collect();
        for format in [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral, ToolFormat::Phi4Mini]
        {
            let (open, key) = match format {
                ToolFormat::Hermes => ("<tool_call>\n", "arguments"),
                ToolFormat::Llama3Json => ("", "parameters"),
                ToolFormat::Mistral => ("[TOOL_CALLS] [", "arguments"),
                _ => ("functools[", "arguments"),
            };
            let text = format!("{open}{}", text.replace("KEY", key));
            let setup = AnswerSetup { forced: Vec::clone(&forced), ..setup(Some(format), None) };
            for (end, _) in text.char_indices().skip(1) {
                let events = parse_whole(&setup, &text[..end]);
                let mut by_characters = AnswerParser::new(setup.clone());
                let mut parts: Vec<Event> = text[..end]
                    .chars()
                    .flat_map(|c| by_characters.push(c.encode_utf8(&mut [0; 4])))
                    .collect();
                parts.extend(by_characters.finish());
                assert_eq!(joined(parts), events, "{format:?} {:?}", &text[..end]);
                let names: Vec<_> = events
                    .iter()
                    .filter_map(|event| match event {
                        Event::ToolCallStart { name, .. } => Some(name.as_str()),
                        Event::ToolCallArgumentsDelta { .. } => None,
                        other => panic!("{format:?} {:?} leaves {other:?}", &text[..end]),
                    })
                    .collect();
                let is_certain = forced.len() == 1 || text[..end].contains("\"name\": \"g");
                let expected: &[&str] = if is_certain { &["get_weather"] } else { &[] };
                assert_eq!(names, expected, "{format:?} {:?}", &text[..end]);
            }
        }
    };
    let text = "{\"name\": \"get_weather\", \"KEY\": {\"text\": \"Rome\"";
    call_of(text, &["get_weather"]);
    call_of(text, &["f", "get_weather"]);
    // A further call is told by its whole name.
    let setup = AnswerSetup {
        forced: vec!["f".into(), "get_weather".into()],
        ..setup(Some(ToolFormat::Hermes), None)
    };
    let first = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    for (further, calls) in
        [("\n<tool_", 1), ("\n<tool_call>\n{\"name\": \"get_w", 1), ("\n<tool_call>\n{\"name\": \"f\"", 2)]
    {
        let events = parse_whole(&setup, &format!("{first}{further}"));
        assert_eq!(events.iter().filter(|event| matches!(event, Event::ToolCallStart { .. })).count(), calls);
        assert!(!events.iter().any(|event| matches!(event, Event::TextDelta(_))), "{events:?}");
    }
}

#[test]
fn llama_calls() {
    use ToolFormat::Llama3Json;
    let one = r#"{"name": "f", "parameters": {"a": 1.5e3}}"#;
    check(Llama3Json, one, &[call(0, "f", r#"{"a": 1.5e3}"#)]);
    check(Llama3Json, &format!("<|python_tag|>{one}"), &[call(0, "f", r#"{"a": 1.5e3}"#)]);
    let typed =
        r#" {"type": "function", "name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 2}}"#;
    check(Llama3Json, typed, &[call(0, "f", "{}"), call(1, "f", r#"{"b": 2}"#)]);
    for data in [
        r#"{"name": "Bob", "age": 3}"#,
        r#"{"name": "Bob"}"#,
        r#"{"name": "unknown", "parameters": {}}"#,
        r#"{"name": "f", "parameters": [1]}"#,
        r#"{"name": "f", "age": 3, "parameters": {}}"#,
        r#"{"name": "f", "id": [1}, "parameters": {}}"#,
        r#"The call is {"name": "f", "parameters": {}}"#,
        "{}",
        "<|python_tag|>print(1)",
        "{\"a\": 1} and more",
    ] {
        check(Llama3Json, data, &[vec![text(data)]]);
    }
}

#[test]
fn mistral_calls() {
    use ToolFormat::Mistral;
    let list = r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "abcdefghi"}]"#;
    check(Mistral, list, &[call(0, "f", r#"{"a": 1}"#), call(1, "g", "{}")]);
    let named = r#"Well[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g{}"#;
    check(Mistral, named, &[vec![text("Well")], call(0, "f", r#"{"a": "]"}"#), call(1, "g", "{}")]);
    let with_id = parse_whole(&setup(Some(Mistral), None), "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}");
    assert!(matches!(&with_id[0], Event::ToolCallStart { id, .. } if id == "abcdefghi"), "{with_id:?}");
    for data in ["[TOOL_CALLS] are great", "[TOOL_CALLS][]", "[TOOL_CALLS][1]", "[TOOL", "[1, 2]"] {
        check(Mistral, data, &[vec![text(data)]]);
    }
}

#[test]
fn kimi_calls_keep_their_ids() {
    let call = |id: &str, arguments: &str| {
        format!("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>")
    };
    let section = |calls: &str| format!("<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>");
    let two = call("functions.get_weather:0", r#"{"city": "Bern"}"#) + &call("f:12", "{}");
    let events = parse_whole(&setup(Some(ToolFormat::KimiK2), None), &format!("Well.{}", section(&two)));
    let start =
        |index, id: &str, name: &str| Event::ToolCallStart { index, id: id.into(), name: name.into() };
    let arguments = |index, text: &str| Event::ToolCallArgumentsDelta { index, text: text.into() };
    let expected = [
        text("Well."),
        start(0, "functions.get_weather:0", "get_weather"),
        arguments(0, r#"{"city": "Bern"}"#),
        start(1, "f:12", "f"),
        arguments(1, "{}"),
    ];
    assert_eq!(events, expected);
    for id in ["f", "functions.f:", "functions.:0", "functions.f:x", ""] {
        let data = section(&call(id, "{}"));
        check(ToolFormat::KimiK2, &data, &[vec![text(&data)]]);
    }
}

#[test]
fn pythonic_calls() {
    use ToolFormat::Pythonic;
    let answer = r#"[get_weather(city="Z\"ü)", days=2, deep={'a': [True, None, -1.5], 'b': (1,)}), f()]"#;
    let arguments = r#"{"city": "Z\"ü)", "days": 2, "deep": {"a": [true, null, -1.5], "b": [1]}}"#;
    check(Pythonic, answer, &[call(0, "get_weather", arguments), call(1, "f", "{}")]);
    let tagged = "Now: <|python_start|>[other(x='é\\n')]<|python_end|>";
    check(Pythonic, tagged, &[vec![text("Now:")], call(0, "other", r#"{"x": "é\n"}"#)]);
    for data in
        ["[1, 2]", "[f(1)]", "[f(a=b)]", "[unknown(a=1)]", "[]", "[f(a=1", "See [f(a=1)]", "[f(a=01)]"]
    {
        check(Pythonic, data, &[vec![text(data)]]);
    }
    check(Pythonic, "[f(a=1), 5]", &[call(0, "f", r#"{"a": 1}"#), vec![text(", 5]")]]);
}

#[test]
fn phi_calls() {
    use ToolFormat::Phi4Mini;
    let answer = r#"functools[{"name": "f", "arguments": {"a": 1}},{"name": "g", "arguments": {}}]"#;
    check(Phi4Mini, answer, &[call(0, "f", r#"{"a": 1}"#), call(1, "g", "{}")]);
    let tagged = r#"<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>"#;
    check(Phi4Mini, tagged, &[call(0, "f", "{}")]);
    check(Phi4Mini, &tagged.replace(['[', ']'], ""), &[call(0, "f", "{}")]);
    for data in ["import functools\nx = [1]", "functools", "functools.reduce", "functools[0]"] {
        check(Phi4Mini, data, &[vec![text(data)]]);
    }
}

#[test]
fn deepseek_calls() {
    use ToolFormat::DeepSeek;
    let v3 = "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n\
              <｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(DeepSeek, v3, &[vec![text("Ok.")], call(0, "f", r#"{"a": 1}"#), call(1, "g", "{}")]);
    let v31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(DeepSeek, v31, &[call(0, "f", r#"{"a": 1}"#)]);
    for data in ["<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>x", "<｜tool▁calls"]
    {
        check(DeepSeek, data, &[vec![text(data)]]);
    }
}

#[test]
fn qwen3_coder_calls() {
    use ToolFormat::Qwen3Coder;
    let answer = "Ok.\n<tool_call>\n<function=f>\n<parameter=text>\n12 \"<a>\"\n\nx\n</parameter>\n<parameter=k0>\n[1, {\"a\": null}]\n\
                  </parameter>\n<parameter=k1>\nTrue\n</parameter>\n<parameter=k2>free text</parameter>\n</function>\n</tool_call>";
    let arguments = r#"{"text": "12 \"<a>\"\n\nx", "k0": [1, {"a": null}], "k1": true, "k2": "free text"}"#;
    check(Qwen3Coder, answer, &[vec![text("Ok.")], call(0, "f", arguments)]);
    let bare = "<function=g>\n</function> bye";
    check(Qwen3Coder, bare, &[call(0, "g", "{}"), vec![text(" bye")]]);
    // Ends inside a text and inside a value that is not one; breaks off between tags.
    let cut = |value: &str| format!("<tool_call><function=f><parameter={value}");
    check(Qwen3Coder, &cut("text>ab\n</par"), &[call(0, "f", "{\"text\": \"ab\\n</par")]);
    check(Qwen3Coder, &cut("k0>[1, 2"), &[call(0, "f", "{\"k0\": [1, 2")]);
    check(Qwen3Coder, "<function=f>oops", &[call(0, "f", "{"), vec![text("oops")]]);
    let no_key = "<function=f><parameter=a\nb";
    check(Qwen3Coder, no_key, &[call(0, "f", "{"), vec![text("<parameter=a\nb")]]);
    check(Qwen3Coder, "<function=f></par<", &[call(0, "f", "{"), vec![text("</par<")]]);
    check(Qwen3Coder, "<function=f><parameter=ci", &[call(0, "f", "{\"ci")]);
    for data in ["<tool_call>{}</tool_call>", "<function=a b>", "<function=", "<tool_call>\n<func"] {
        check(Qwen3Coder, data, &[vec![text(data)]]);
    }
}

#[test]
fn glm_calls() {
    use ToolFormat::Glm;
    let answer = "Ok.\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value> 12 \"<a>\"\n</arg_value>\n<arg_key>k0</arg_key>\n\
                  <arg_value>[1, {\"a\": null}]</arg_value>\n<arg_key>k1</arg_key>\n<arg_value>free text</arg_value>\n</tool_call>\n\
                  <tool_call>g\n</tool_call>\n<tool_call>g</tool_call> bye";
    // White space inside a text is the text's.
    let arguments = r#"{"text": " 12 \"<a>\"\n", "k0": [1, {"a": null}], "k1": "free text"}"#;
    let calls = [call(0, "f", arguments), call(1, "g", "{}"), call(2, "g", "{}")].concat();
    check(Glm, answer, &[vec![text("Ok.")], calls, vec![text(" bye")]]);
    // As GLM 4.7 writes it, without layout.
    let dense = "<tool_call>f<arg_key>k0</arg_key><arg_value>true</arg_value></tool_call>";
    check(Glm, dense, &[call(0, "f", r#"{"k0": true}"#)]);
    // Ends inside a text, a value that is not one, a name and between tags; breaks off between tags.
    let cut = |rest: &str| format!("<tool_call>f\n<arg_key>{rest}");
    check(Glm, &cut("text</arg_key><arg_value>ab</arg_v"), &[call(0, "f", "{\"text\": \"ab</arg_v")]);
    check(Glm, &cut("k0</arg_key><arg_value>[1, 2"), &[call(0, "f", "{\"k0\": [1, 2")]);
    check(Glm, &cut("ci</arg"), &[call(0, "f", "{\"ci")]);
    check(Glm, &cut("k0</arg_key><arg_value>1</arg_value>\n</tool"), &[call(0, "f", "{\"k0\": 1")]);
    check(Glm, &cut("k0</arg_key> oops"), &[call(0, "f", "{"), vec![text("k0</arg_key> oops")]]);
    for data in [
        "<tool_call>{}</tool_call>",
        "<tool_call>f and g</tool_call>",
        "<tool_call>f</tool",
        "<tool_call></tool_call>",
        "<tool_call>f\n<arg_value>1</arg_value></tool_call>",
    ] {
        check(Glm, data, &[vec![text(data)]]);
    }
}

/// Whatever is cut off: text before a call has started, the call as far as it came afterwards.
#[test]
fn an_answer_that_ends_early() {
    use ToolFormat::{DeepSeek, Hermes, Mistral};
    check(Hermes, "<tool_call>\n{\"name\": \"f", &[vec![text("<tool_call>\n{\"name\": \"f")]]);
    check(
        Hermes,
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x",
        &[call(0, "f", "{\"a\": \"x")],
    );
    check(Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_", &[call(0, "f", "{}")]);
    check(Hermes, "hi <tool_ca", &[vec![text("hi <tool_ca")]]);
    check(Hermes, "hi \n", &[vec![text("hi \n")]]);
    let second = r#"[TOOL_CALLS][{"name": "f", "arguments": {}}, {"nam"#;
    check(Mistral, second, &[call(0, "f", "{}"), vec![text(r#", {"nam"#)]]);
    check(
        DeepSeek,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
        &[vec![text("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f")]],
    );
    // Broken off by the model itself.
    let broken = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": oops}}</tool_call>";
    check(Hermes, broken, &[call(0, "f", "{\"a\": "), vec![text("oops}}</tool_call>")]]);
    let again = "<tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    check(Hermes, again, &[vec![text("<tool_call>")], call(0, "f", "{}")]);
}

#[test]
fn reasoning_is_split_off() {
    use ReasoningFormat::{DeepSeekR1, Kimi, Mistral, Think};
    let cases = [
        (
            Think,
            "<think>\nAdd </thin them.\n</think>\n\n2 <think>",
            vec![reasoning("Add </thin them."), text("2 <think>")],
        ),
        (Think, "no tags </think>", vec![text("no tags </think>")]),
        (Think, "\n<think>\n\n</think>\n\nx", vec![text("x")]),
        (Think, "<thin", vec![text("<thin")]),
        (Think, "<think>never ends \n", vec![reasoning("never ends \n")]),
        (Think, "<thinking>", vec![text("<thinking>")]),
        (DeepSeekR1, "Add.\n</think>\n2", vec![reasoning("Add."), text("2")]),
        (DeepSeekR1, "<think>\nAdd.</think>2", vec![reasoning("Add."), text("2")]),
        (DeepSeekR1, "</think>2", vec![text("2")]),
        (Mistral, "[THINK]a[/THINK]b", vec![reasoning("a"), text("b")]),
        (Kimi, "◁think▷a◁/think▷b", vec![reasoning("a"), text("b")]),
    ];
    for (format, answer, expected) in cases {
        assert_eq!(parse_whole(&setup(None, Some(format)), answer), expected, "{answer}");
    }
    let both =
        "<think>\nI need it.\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let expected = [vec![reasoning("I need it.")], call(0, "f", "{}")].concat();
    assert_eq!(parse_whole(&setup(Some(ToolFormat::Hermes), Some(Think)), both), expected);
}

#[test]
fn parsers_are_chosen_by_the_template() {
    let folder = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/templates"));
    let expected = [
        ("qwen25", Some(ToolFormat::Hermes), None, Opening::Never),
        ("qwen3", Some(ToolFormat::Hermes), Some(ReasoningFormat::Think), Opening::Never),
        ("hermes3.tool_use", Some(ToolFormat::Hermes), None, Opening::Never),
        ("llama31", Some(ToolFormat::Llama3Json), None, Opening::Never),
        ("mistral_v03", Some(ToolFormat::Mistral), None, Opening::Never),
        ("mistral_nemo", Some(ToolFormat::Mistral), None, Opening::Never),
        ("pythonic", Some(ToolFormat::Pythonic), None, Opening::Never),
        ("phi4_mini", Some(ToolFormat::Phi4Mini), None, Opening::Never),
        (
            "deepseek_r1_distill",
            Some(ToolFormat::DeepSeek),
            Some(ReasoningFormat::DeepSeekR1),
            Opening::Always,
        ),
        ("glm45", Some(ToolFormat::Glm), Some(ReasoningFormat::Think), Opening::Never),
        ("gemma2", None, None, Opening::Never),
        ("chatml", None, None, Opening::Never),
    ];
    for (name, tools, reasoning, opening) in expected {
        let text = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        assert_eq!(detect(&text, ""), ParserChoice { tools, reasoning, opening }, "{name}");
    }
    assert_eq!(detect("", "NousResearch/Hermes-3-Llama-3.2-3B").tools, Some(ToolFormat::Hermes));
    assert_eq!(detect("", "meta-llama/Llama-3.2-1B-Instruct").tools, Some(ToolFormat::Llama3Json));
    assert_eq!(detect("", "zai-org/GLM-4.6").tools, Some(ToolFormat::Glm));
    assert_eq!(detect("<tool_call>\n<function=x>", "").tools, Some(ToolFormat::Qwen3Coder));
    let v31 = "</think>{% if add_generation_prompt %}{% if not thinking %}{{'</think>'}}{% else %}{{'<think>'}}{% endif %}{% endif %}";
    let choice = detect(v31, "");
    assert_eq!((choice.reasoning, choice.opening), (Some(ReasoningFormat::Think), Opening::OnRequest));
    let forced = choice.with(Some(ToolFormat::Mistral), Some(ReasoningFormat::Kimi));
    assert_eq!((forced.tools, forced.reasoning), (Some(ToolFormat::Mistral), Some(ReasoningFormat::Kimi)));
    let r1 = ParserChoice::default().with(None, Some(ReasoningFormat::DeepSeekR1));
    assert_eq!((r1.tools, r1.opening), (None, Opening::Always));
}

#[test]
fn a_request_turns_thinking_on_and_off() {
    let begins = |opening, kwargs: serde_json::Value| {
        let choice = ParserChoice { opening, ..ParserChoice::default() };
        choice.begins_in_reasoning(kwargs.as_object().unwrap())
    };
    let (on, off) = (json!({"enable_thinking": true}), json!({"thinking": false}));
    assert!(begins(Opening::Always, json!({})) && begins(Opening::Always, on.clone()));
    assert!(!begins(Opening::Always, off.clone()));
    assert!(!begins(Opening::Always, json!({"continue_final_message": true})));
    assert!(begins(Opening::OnRequest, on.clone()));
    assert!(!begins(Opening::OnRequest, json!({})) && !begins(Opening::OnRequest, off));
    assert!(!begins(Opening::Never, on));
}

#[test]
fn every_name_finds_its_parser() {
    for (name, format) in TOOL_CALL_PARSERS {
        assert_eq!(ToolFormat::from_name(name), Some(*format));
        assert_eq!(ToolFormat::from_name(format.name()), Some(*format));
    }
    for (name, format) in REASONING_PARSERS {
        assert_eq!(ReasoningFormat::from_name(name), Some(*format));
        assert_eq!(ReasoningFormat::from_name(format.name()), Some(*format));
    }
    assert_eq!(ToolFormat::from_name("nonsense"), None);
}
