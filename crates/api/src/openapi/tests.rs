//! The tables against the server's own behaviour: what a row says is what validation does.

use super::fields::{Behaviour, Field, Kind};
use super::{document::document, fields::FieldTable, requests};
use crate::ApiConfig;
use crate::request::{Call, Endpoint, policy::FieldPolicy, validate};
use crate::routes::ROUTES;
use lockstep_core::Refusal;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

const ENDPOINTS: [Endpoint; 2] = [Endpoint::Chat, Endpoint::Completions];

fn config() -> ApiConfig {
    ApiConfig::new("tiny", 64, 300)
}

fn table(endpoint: Endpoint) -> &'static FieldTable {
    match endpoint {
        Endpoint::Chat => &requests::CHAT,
        Endpoint::Completions => &requests::COMPLETIONS,
    }
}

/// A request with `name` set to `value`, and with what rules about several fields ask for beside it.
fn call(endpoint: Endpoint, name: &str, value: &Value) -> Result<Call, Refusal> {
    let mut body = match endpoint {
        Endpoint::Chat => json!({"messages": [{"role": "user", "content": "ab"}]}),
        Endpoint::Completions => json!({"prompt": "ab", "max_tokens": u32::MAX}),
    };
    match name {
        "top_logprobs" if endpoint == Endpoint::Chat => body["logprobs"] = json!(true),
        "best_of" if endpoint == Endpoint::Completions => body["n"] = value.clone(),
        "max_tokens" if endpoint == Endpoint::Completions => body["echo"] = json!(true),
        _ => {}
    }
    body[name] = value.clone();
    let body = body.as_object().unwrap();
    FieldPolicy::default().check(table(endpoint), body, false)?;
    validate(endpoint, body, &config())
}

fn accepted(endpoint: Endpoint, name: &str, value: &Value) {
    if let Err(refusal) = call(endpoint, name, value) {
        panic!("{endpoint:?} {name}: {value} is refused: {refusal:?}");
    }
}

fn refused(endpoint: Endpoint, name: &str, value: &Value) {
    match call(endpoint, name, value) {
        // `best_of` is compared with `n`, which is out of bounds then as well.
        Err(refusal) => assert!(
            refusal.status == 400 && (refusal.param.as_deref() == Some(name) || name == "best_of"),
            "{endpoint:?} {name}: {value}: {refusal:?}"
        ),
        Ok(_) => panic!("{endpoint:?} {name}: {value} is accepted"),
    }
}

fn check_kind(endpoint: Endpoint, field: &Field, kind: Kind) {
    let name = field.name;
    let (good, bad) = match kind {
        Kind::Bool => (vec![json!(true), json!(false)], vec![json!("true"), json!(1), json!([])]),
        Kind::Integer(least, most) => {
            let json = |n: i128| i64::try_from(n).map(Value::from).unwrap_or_else(|_| json!(n as u64));
            let mut bad = vec![json!("1"), json!(true), json!(1.5)];
            if i64::try_from(least - 1).is_ok() {
                bad.push(json(least - 1));
            }
            if u64::try_from(most + 1).is_ok() {
                bad.push(json(most + 1));
            }
            (vec![json(least), json(most)], bad)
        }
        Kind::Number(least, most) => {
            let bad = vec![json!("1"), json!(true), json!(least - 0.001), json!(most + 0.001)];
            (vec![json!(least), json!(most)], bad)
        }
        Kind::TextOf(least, most) => (
            vec![json!("x".repeat(least)), json!("x".repeat(most))],
            vec![json!("x".repeat(least - 1)), json!("x".repeat(most + 1)), json!(5)],
        ),
        Kind::Object => (vec![json!({})], vec![json!("{}"), json!([])]),
        Kind::Text | Kind::Model | Kind::Shape(_) => (Vec::new(), vec![json!(5.5)]),
    };
    good.iter().for_each(|value| accepted(endpoint, name, value));
    bad.iter().for_each(|value| refused(endpoint, name, value));
}

#[test]
fn every_row_is_what_validation_does() {
    for endpoint in ENDPOINTS {
        for field in table(endpoint).fields() {
            match field.behaviour {
                Behaviour::Read(kind) => {
                    accepted(endpoint, field.name, &Value::Null);
                    check_kind(endpoint, field, kind);
                }
                Behaviour::Required(kind) => {
                    refused(endpoint, field.name, &Value::Null);
                    check_kind(endpoint, field, kind);
                }
                Behaviour::WithoutEffect => {
                    [json!(null), json!({"a": [1]}), json!("x")]
                        .iter()
                        .for_each(|value| accepted(endpoint, field.name, value));
                }
                Behaviour::Unsupported(neutral) => {
                    accepted(endpoint, field.name, &Value::Null);
                    for value in [
                        json!(""),
                        json!("none"),
                        json!("text"),
                        json!(0),
                        json!(1),
                        json!(true),
                        json!(false),
                    ]
                    .into_iter()
                    .chain([
                        json!([]),
                        json!({}),
                        json!(["text"]),
                        json!([5]),
                        json!({"a": 1}),
                    ]) {
                        let check = if neutral.accepts(&value) { accepted } else { refused };
                        check(endpoint, field.name, &value);
                    }
                }
            }
        }
    }
}

#[test]
fn a_name_has_one_row() {
    let tables = ROUTES.iter().filter_map(|route| route.operation.body);
    for FieldTable { name, groups } in tables {
        let mut seen = BTreeSet::new();
        for field in groups.iter().copied().flatten() {
            assert!(seen.insert(field.name), "{name} has two rows for {}", field.name);
        }
    }
}

/// Every `$ref` in `value`.
fn references(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
            map.values().for_each(|inner| references(inner, found));
        }
        Value::Array(list) => list.iter().for_each(|inner| references(inner, found)),
        _ => {}
    }
}

#[test]
fn the_document_is_whole() {
    let document = document(&config());
    let paths: &Map<String, Value> = document["paths"].as_object().unwrap();
    for route in ROUTES {
        let path = super::operations::path_in_document(route.path);
        assert!(paths[&path].get(route.operation.method).is_some(), "{path}");
    }
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    assert!(found.len() > 10);
    for reference in found {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
    }
    assert_eq!(document["components"]["schemas"]["ServedModel"]["enum"], json!(["tiny"]));
}
