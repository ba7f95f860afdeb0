//! Invariants over random answers; a failing seed is printed.

use super::*;
use crate::random::Rng;
use serde_json::json;

const PIECES: &[&str] = &[
    "<tool_call>",
    "<function=f>",
    "<parameter=text>",
    "<parameter=k0>",
    "</parameter>",
    "</function>",
    "</tool_call>",
    "<arg_key>",
    "text</arg_key>",
    "k0</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "\n",
    " ",
    "{",
    "}",
    "[",
    "]",
    "\"",
    ",",
    ":",
    ";",
    "\\",
    "(",
    ")",
    "=",
    "'",
    "\"name\"",
    "\"arguments\"",
    "\"parameters\"",
    "\"f\"",
    "f(",
    "a=1",
    "{\"name\": \"f\", \"arguments\": {",
    "{\"name\": \"f\", \"parameters\": {\"a\": \"é😀\"}}",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "functools",
    "null",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.f:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "```json\n",
    "```",
    "text",
    "<",
    "1",
    "-",
    "e",
    "\\u00e9",
    "[f(a=\"x\")]",
    "true",
    "\"}",
];

fn random_answer(rng: &mut Rng) -> String {
    (0..rng.below(24)).map(|_| rng.pick(PIECES)).collect()
}

fn random_setup(rng: &mut Rng) -> AnswerSetup {
    let reasoning = [None, Some(ReasoningFormat::Think), Some(ReasoningFormat::DeepSeekR1)][rng.below(3)];
    setup(Some(FORMATS[rng.below(FORMATS.len())]), reasoning)
}

#[test]
fn any_cut_of_any_answer_gives_the_same_events() {
    for seed in 1..=20_000_u64 {
        let mut rng = Rng::new(seed);
        let (setup, answer) = (random_setup(&mut rng), random_answer(&mut rng));
        let mut parser = AnswerParser::new(setup.clone());
        let (mut events, mut rest) = (Vec::new(), answer.as_str());
        while !rest.is_empty() {
            let cut = rest.ceil_char_boundary(1 + rng.below(9).min(rest.len() - 1));
            events.extend(parser.push(&rest[..cut]));
            rest = &rest[cut..];
        }
        events.extend(parser.finish());
        assert_eq!(joined(events), parse_whole(&setup, &answer), "seed {seed}: {setup:?} {answer:?}");
    }
}

/// Text and reasoning stand in the answer, in order. Without calls nothing else was in it but the tags of
/// one block of reasoning and white space beside them.
#[test]
fn no_character_is_lost() {
    for seed in 1..=20_000_u64 {
        let mut rng = Rng::new(seed);
        let (setup, answer) = (random_setup(&mut rng), random_answer(&mut rng));
        let events = parse_whole(&setup, &answer);
        let told: String = events
            .iter()
            .map(|event| match event {
                Event::TextDelta(text) | Event::ReasoningDelta(text) => text.as_str(),
                Event::ToolCallArgumentsDelta { .. } | Event::ToolCallStart { .. } => "",
            })
            .collect();
        let context = || format!("seed {seed}: {setup:?}\n{answer:?}\n{events:?}");
        let mut rest = answer.chars();
        assert!(told.chars().all(|c| rest.any(|r| r == c)), "{}", context());
        if count_started(&events) > 0 {
            continue;
        }
        if setup.reasoning.is_none() {
            assert_eq!(told, answer, "{}", context());
        }
        let len = |text: &str| text.chars().filter(|c| !c.is_whitespace()).count();
        let lost = len(&answer) - len(&told);
        assert!([0, 7, 8, 15].contains(&lost), "{lost} characters lost, {}", context());
    }
}

/// Calls are numbered from 0 in order, and arguments follow their own call.
fn count_started(events: &[Event]) -> usize {
    let mut count = 0;
    for event in events {
        match event {
            Event::ToolCallStart { index, .. } => {
                assert_eq!(*index, count, "{events:?}");
                count += 1;
            }
            Event::ToolCallArgumentsDelta { index, .. } => assert_eq!(index + 1, count, "{events:?}"),
            _ => {}
        }
    }
    count
}

/// Calls that are written as their family writes them come back exactly, among text and white space.
#[test]
fn written_calls_come_back() {
    let values = [
        json!(1),
        json!(-2.5),
        json!("a\"}]'é\n😀</tool_call>"),
        json!([true, null, {"k": "v"}]),
        json!({"x": {}}),
    ];
    for seed in 1..=5_000_u64 {
        let mut rng = Rng::new(seed);
        let format = FORMATS[rng.below(FORMATS.len())];
        let mut wanted = Vec::new();
        for _ in 0..=rng.below(3) {
            let arguments: serde_json::Map<String, serde_json::Value> = (0..rng.below(3))
                .map(|i| (format!("k{i}"), values[rng.below(values.len())].clone()))
                .collect();
            wanted.push((rng.pick(&["f", "get_weather"]), serde_json::Value::Object(arguments)));
        }
        // A format without markers has its calls at the start of an answer only.
        let is_marked = !matches!(format, ToolFormat::Llama3Json | ToolFormat::Pythonic);
        let before = if is_marked { rng.pick(&["", "Well, [1] {2} <b>.", "é"]) } else { "" };
        let behind = rng.pick(&["", "That is all."]);
        let calls = match format {
            ToolFormat::Mistral if rng.below(2) == 0 => written_by_new_mistral(&wanted),
            _ => written(format, &wanted),
        };
        let answer = format!("{before}{calls}\n{behind}");
        let events = parse_whole(&setup(Some(format), None), &answer);
        let mut told = String::new();
        let mut got: Vec<(String, String)> = Vec::new();
        for event in &events {
            match event {
                Event::ToolCallStart { name, .. } => got.push((name.clone(), String::new())),
                Event::ToolCallArgumentsDelta { index, text } => got[*index].1.push_str(text),
                Event::TextDelta(text) => told.push_str(text.trim()),
                other => panic!("seed {seed}: {other:?} in {answer:?}"),
            }
        }
        let got: Vec<_> =
            got.iter().map(|(name, text)| (name.as_str(), serde_json::from_str(text).unwrap())).collect();
        assert_eq!(got, wanted, "seed {seed}: {answer:?}");
        assert_eq!(told, format!("{before}{behind}"), "seed {seed}: {answer:?}");
    }
}

/// From its eleventh tokenizer on.
fn written_by_new_mistral(calls: &[(&str, serde_json::Value)]) -> String {
    calls.iter().map(|(name, arguments)| format!("[TOOL_CALLS]{name}[ARGS]{arguments}")).collect()
}

fn written(format: ToolFormat, calls: &[(&str, serde_json::Value)]) -> String {
    let object = |(name, arguments): &(&str, serde_json::Value)| {
        json!({"name": name, "arguments": arguments}).to_string()
    };
    let objects: Vec<String> = calls.iter().map(object).collect();
    let each = |write: &dyn Fn(&str, &str) -> String| -> String {
        calls.iter().map(|(name, arguments)| write(name, &arguments.to_string())).collect()
    };
    match format {
        ToolFormat::Hermes => objects.iter().map(|o| format!("\n<tool_call>\n{o}\n</tool_call>")).collect(),
        ToolFormat::Llama3Json => objects.join("; "),
        ToolFormat::Mistral => format!("[TOOL_CALLS] [{}]", objects.join(", ")),
        ToolFormat::Phi4Mini => format!("functools[{}]", objects.join(",")),
        ToolFormat::DeepSeek => {
            let calls = each(&|name, arguments| {
                format!(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>\n"
                )
            });
            format!("<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
        }
        ToolFormat::KimiK2 => {
            let calls = each(&|name, arguments| {
                format!(
                    "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
                )
            });
            format!("<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
        }
        ToolFormat::Qwen3Coder => {
            let value = |value: &serde_json::Value| value.as_str().map_or(value.to_string(), str::to_owned);
            let write = |(name, arguments): &(&str, serde_json::Value)| {
                let pairs = arguments.as_object().unwrap().iter();
                let pairs: String =
                    pairs.map(|(k, v)| format!("<parameter={k}>\n{}\n</parameter>\n", value(v))).collect();
                format!("<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>\n")
            };
            calls.iter().map(write).collect()
        }
        ToolFormat::Glm => {
            let value = |value: &serde_json::Value| value.as_str().map_or(value.to_string(), str::to_owned);
            let write = |(name, arguments): &(&str, serde_json::Value)| {
                let pairs = arguments.as_object().unwrap().iter();
                let pair = |(k, v): (&String, &serde_json::Value)| {
                    format!("<arg_key>{k}</arg_key>\n<arg_value>{}</arg_value>\n", value(v))
                };
                format!("<tool_call>{name}\n{}</tool_call>\n", pairs.map(pair).collect::<String>())
            };
            calls.iter().map(write).collect()
        }
        ToolFormat::Pythonic => {
            let keyword = |(name, arguments): &(&str, serde_json::Value)| {
                let object = arguments.as_object().unwrap();
                let pairs: Vec<String> = object.iter().map(|(k, v)| format!("{k}={v}")).collect();
                format!("{name}({})", pairs.join(", "))
            };
            format!("[{}]", calls.iter().map(keyword).collect::<Vec<_>>().join(", "))
        }
    }
}

/// 100 KB of every kind of repetition takes its time once.
#[test]
fn time_is_linear_in_the_answer() {
    let began = std::time::Instant::now();
    for piece in ["\n", "<tool_call>", "<tool_call>{\"", "{\"name\": ", "<", "[f(", "<think>\n", "a "] {
        for format in FORMATS {
            let answer = piece.repeat(100_000 / piece.len());
            parse_whole(&setup(Some(format), Some(ReasoningFormat::Think)), &answer);
        }
    }
    // Quadratic work would take minutes.
    assert!(began.elapsed().as_secs() < 30, "{:?}", began.elapsed());
}
