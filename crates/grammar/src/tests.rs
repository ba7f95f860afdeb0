use super::*;
use lockstep_core::TokenId;
use lockstep_wire::Vocabulary;

const EOS: TokenId = 256;

/// One token per byte, the end token, and two longer ones.
fn vocabulary() -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    for byte in 0..=u8::MAX {
        vocabulary.push(&[byte], false);
    }
    vocabulary.push(b"<|eos|>", true);
    vocabulary.push(b"true", false);
    vocabulary.push(b"<|tool|>", true);
    vocabulary
}

fn grammars() -> Grammars {
    Grammars::new(&vocabulary(), 260, &[EOS]).unwrap()
}

/// Whether the computed mask has the bit of `id`.
fn may_follow(matcher: &Matcher, id: TokenId) -> bool {
    matcher.words().get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
}

/// The ids that may follow, of a vocabulary with one padded row.
fn allowed(matcher: &mut Matcher) -> Vec<TokenId> {
    matcher.compute_mask();
    (0..260).filter(|id| may_follow(matcher, *id)).collect()
}

fn bytes(text: &str) -> Vec<TokenId> {
    text.bytes().map(TokenId::from).collect()
}

#[test]
fn a_choice_allows_its_texts_and_then_the_end() {
    let mut matcher = grammars().matcher(&Grammar::Choice(vec!["yes".into(), "ye\"".into(), "true".into()]));
    assert_eq!(allowed(&mut matcher), [u32::from(b't'), u32::from(b'y'), 257]);
    matcher.push(&bytes("ye"));
    assert_eq!(allowed(&mut matcher), [u32::from(b'"'), u32::from(b's')]);
    matcher.push(&bytes("s"));
    assert_eq!(allowed(&mut matcher), [EOS]);
    matcher.push(&[EOS]);
    assert_eq!(allowed(&mut matcher), [EOS], "nothing else ever follows");
}

#[test]
fn a_rebuilt_matcher_allows_the_same() {
    let schema = r#"{"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"], "additionalProperties": false}"#;
    let grammars = grammars();
    let grammar = Grammar::JsonSchema(schema.into());
    let mut stepwise = grammars.matcher(&grammar);
    let text = r#"{"a":true,"b":"y"}"#;
    for (at, token) in bytes(text).into_iter().enumerate() {
        let mut rebuilt = grammars.matcher(&grammar);
        rebuilt.push(&bytes(&text[..at]));
        let list = allowed(&mut stepwise);
        assert_eq!(list, allowed(&mut rebuilt), "after {:?}", &text[..at]);
        assert!(list.contains(&token), "{:?} may follow {:?}", &text[at..=at], &text[..at]);
        stepwise.push(&[token]);
    }
    assert_eq!(allowed(&mut stepwise), [EOS]);
}

#[test]
fn special_tokens_are_never_text() {
    let mut matcher = grammars().matcher(&Grammar::Regex("(?s:.*)".into()));
    let list = allowed(&mut matcher);
    assert!(list.contains(&EOS), "the empty text matches");
    assert!(list.contains(&257) && !list.contains(&258) && !list.contains(&259), "{list:?}");
}

#[test]
fn behind_a_wrong_token_nothing_is_allowed() {
    let mut matcher = grammars().matcher(&Grammar::Regex("[0-9]{3}".into()));
    matcher.push(&bytes("1x"));
    assert!(allowed(&mut matcher).is_empty());
    assert_eq!(matcher.end_token(&[EOS]), None);
    assert!(allowed(&mut Matcher::failed("no reason")).is_empty());
}

#[test]
fn an_answer_may_end_where_its_grammar_is_complete() {
    let mut matcher = grammars().matcher(&Grammar::Regex("ab*".into()));
    for (text, end) in [("", None), ("a", Some(EOS)), ("b", Some(EOS))] {
        matcher.push(&bytes(text));
        matcher.compute_mask();
        assert_eq!(matcher.end_token(&[7, EOS]), end, "{text:?}");
    }
}

#[test]
fn what_no_text_satisfies_is_refused() {
    let checker = Checker::new(&vocabulary()).unwrap();
    let schema = |value: serde_json::Value| Grammar::JsonSchema(value.to_string());
    let lark = |text: &str| Grammar::Lark(text.into());
    let needs_itself = json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]});
    let in_a_list = json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1});
    let in_options = json!({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
        "a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1},
        "b": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}}});
    for bad in [
        lark("start: start \"a\""),
        lark("start: \"a\" start"),
        lark("start: \"x\" a\na: b \"1\"\nb: \"2\" a"),
        lark("start: (\"a\" start)+"),
        Grammar::Regex("[^\\s\\S]".into()),
        schema(json!(false)),
        schema(needs_itself),
        schema(in_a_list),
        schema(in_options),
        schema(json!({"enum": []})),
        schema(json!({"type": "string", "minLength": 3, "maxLength": 2})),
        schema(json!({"type": "array", "minItems": 3, "maxItems": 2})),
        schema(json!({"type": "integer", "minimum": 3, "maximum": 2})),
        schema(json!({"type": "object", "minProperties": 3, "maxProperties": 2})),
        schema(json!({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]})),
        schema(
            json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}},
            "required": ["a"]}),
        ),
        schema(json!({"allOf": [{"type": "string"}, {"type": "integer"}]})),
        schema(
            json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a$", "minLength": 2}},
            "required": ["a"]}),
        ),
        schema(json!({"allOf": [{"const": 1}, {"const": 2}]})),
        schema(json!({"type": "string", "pattern": "^a+$", "minLength": 3, "maxLength": 2})),
        schema(json!({"type": "object", "properties": {}, "required": ["a"], "additionalProperties": false})),
    ] {
        checker.check(&bad).expect_err(&format!("{bad:?}"));
    }
    let named = checker.check(&lark("start: \"x\" a\na: b \"1\"\nb: \"2\" a")).unwrap_err().to_string();
    assert!(named.contains("rule \"a\" always needs itself"), "{named}");
    for good in [
        lark("start: start \"a\" | \"b\""),
        lark("start: \"a\" start?"),
        lark("start: (\"a\" start)*"),
        schema(json!(true)),
        schema(json!({"type": "object", "properties": {"a": {"$ref": "#"}}})),
        schema(json!({"type": "array", "items": {"$ref": "#"}})),
        schema(json!({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["a"]})),
        schema(json!({"type": "object", "properties": {"a": {"enum": []}}})),
        schema(json!({"type": "string", "maxLength": 0})),
        Grammar::Regex("".into()),
    ] {
        checker.check(&good).unwrap_or_else(|e| panic!("{good:?}: {e}"));
    }
}

#[test]
fn white_space_between_json_tokens_is_bounded() {
    let after = |grammar: &Grammar, text: &str| {
        let mut matcher = grammars().matcher(grammar);
        matcher.push(&bytes(text));
        allowed(&mut matcher)
    };
    let takes = |list: &[TokenId], c: char| list.contains(&u32::from(c));
    let any = Grammar::JsonObject;
    for text in ["{", "{ \"a\": 1, \"b\": [", "{\n  \"a\": {\n    \"b\":", "{\r\n\t\t\"a\""] {
        let list = after(&any, text);
        assert!(takes(&list, ' ') && takes(&list, '\n') && !takes(&list, '\t'), "{text:?} {list:?}");
    }
    let deep = format!("{{\n{}", " ".repeat(32));
    assert!(takes(&after(&any, "{\n"), '\t'));
    for text in ["{  ", "{\n\n", deep.as_str()] {
        let list = after(&any, text);
        assert!(!takes(&list, ' ') && !takes(&list, '\n'), "{text:?} {list:?}");
    }
    // A schema may say otherwise itself.
    for (options, space, line_feed) in [
        (json!({"whitespace_flexible": false}), false, false),
        (json!({"whitespace_flexible": true}), true, true),
        (json!({"whitespace_pattern": " +"}), true, false),
        (json!(null), true, true),
    ] {
        let schema = Grammar::JsonSchema(json!({"type": "object", "x-guidance": options}).to_string());
        let list = after(&schema, "{");
        assert_eq!((takes(&list, ' '), takes(&list, '\n')), (space, line_feed), "{options}");
    }
}

#[test]
fn grammars_are_checked_without_the_vocabulary() {
    let checker = Checker::new(&vocabulary()).unwrap();
    for good in [
        Grammar::JsonObject,
        Grammar::JsonSchema(r#"{"type": "array", "items": {"type": "integer"}}"#.into()),
        Grammar::Regex("a+b?".into()),
        Grammar::Lark("start: \"a\" <|tool|> /[0-9]+/".into()),
        Grammar::Choice(vec!["a\n\u{e9}".into()]),
    ] {
        checker.check(&good).unwrap_or_else(|e| panic!("{good:?}: {e}"));
    }
    for bad in [
        Grammar::JsonSchema("{".into()),
        Grammar::JsonSchema(r#"{"type": "alien"}"#.into()),
        Grammar::JsonSchema(r#"{"$ref": "http://example.org/x"}"#.into()),
        Grammar::Regex("(".into()),
        Grammar::Lark("start: nowhere".into()),
        Grammar::Lark("start: <|nobody|>".into()),
        Grammar::Regex("a".repeat(limits::SOURCE_BYTES_MAX + 1)),
    ] {
        let error = checker.check(&bad).expect_err(&format!("{bad:?}")).to_string();
        assert!(!error.is_empty() && error.len() < 4 * REASON_CHARS_MAX, "{error}");
    }
}

/// Each of these took minutes, or ended the process, before there were limits.
#[test]
fn hostile_grammars_cost_their_own_request_only() {
    let checker = Checker::new(&vocabulary()).unwrap();
    let properties: serde_json::Map<_, _> =
        (0..10_000).map(|i| (format!("p{i}"), serde_json::json!({"type": "string"}))).collect();
    let either = |i| serde_json::json!({"anyOf": [{"properties": {format!("a{i}"): {}}}, {"properties": {format!("b{i}"): {}}}]});
    for hostile in [
        serde_json::json!({"type": "object", "properties": properties}).to_string(),
        serde_json::json!({"type": "integer", "multipleOf": 999_983}).to_string(),
        serde_json::json!({"allOf": (0..10).map(either).collect::<Vec<_>>()}).to_string(),
        "[".repeat(100_000),
        format!("{{\"a\": {}1{}}}", "[".repeat(1000), "]".repeat(1000)),
    ] {
        checker.check(&Grammar::JsonSchema(hostile)).unwrap_err();
    }
    let nested = format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000));
    checker.check(&Grammar::Lark(nested)).unwrap_err();
    checker.check(&Grammar::Regex(format!("{}a{}", "(".repeat(50_000), ")".repeat(50_000)))).unwrap_err();
    // What the limits allow passes on a stack that is not the test's, and its masks need no deep one.
    let properties: serde_json::Map<_, _> =
        (0..400).map(|i| (format!("p{i}"), serde_json::json!({"type": "string"}))).collect();
    let schema =
        serde_json::json!({"type": "object", "properties": properties, "additionalProperties": false});
    let mut matcher = grammars().matcher(&Grammar::JsonSchema(schema.to_string()));
    matcher.push(&bytes("{\"p7\":\"x\",\""));
    assert_eq!(allowed(&mut matcher), [u32::from(b'p')]);
}

#[test]
fn the_best_of_a_shard_is_the_largest_that_the_mask_leaves() {
    let matchers = [
        grammars().matcher(&Grammar::Regex("[a-z \"]*".into())),
        grammars().matcher(&Grammar::Choice(vec!["yes".into(), "true".into()])),
        grammars().matcher(&Grammar::Regex("(.|\n)*".into())),
    ];
    for mut matcher in matchers {
        // Before a mask is computed, as after a failure, no token is allowed.
        for round in 0..2 {
            for seed in 0..40u32 {
                // Few values, so that there are ties; NaN and both infinities among them.
                let value = |id: u32| match id.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 7 & 15 {
                    0 => f32::NAN,
                    1 => f32::NEG_INFINITY,
                    2 if seed % 5 == 0 => f32::INFINITY,
                    step => step as f32 - 8.0,
                };
                let logits: Vec<f32> = (0..260).map(value).collect();
                let allowed_or_never = |(id, &logit): (usize, &f32)| match may_follow(&matcher, id as TokenId)
                {
                    true => logit,
                    false => f32::NEG_INFINITY,
                };
                let masked: Vec<f32> = logits.iter().enumerate().map(allowed_or_never).collect();
                for (first, end) in [(0, 260), (0, 100), (100, 260), (33, 97), (64, 128), (255, 260)] {
                    let mut want = None;
                    for (at, &logit) in masked[first..end].iter().enumerate() {
                        if logit > want.map_or(f32::NEG_INFINITY, |(best, _)| best) {
                            want = Some((logit, at));
                        }
                    }
                    assert_eq!(matcher.best(&logits[first..end], first), want, "{first}..{end}");
                }
            }
            if round == 0 {
                matcher.compute_mask();
            }
        }
    }
}
