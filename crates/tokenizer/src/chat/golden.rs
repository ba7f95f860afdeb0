//! Every template of `tests/templates` renders every chat as transformers does.
//!
//! `LOCKSTEP_TEMPLATES=DIR` checks another folder of that layout, e.g. with models' own templates, which
//! are not ours to keep here (`make_golden.py --folder DIR` makes its golden files).

use super::*;
use std::path::PathBuf;

/// The moment at which the golden texts were made.
const NOW: fn() -> u64 = || 1_721_995_506;

fn own_folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/templates"))
}

fn folder() -> PathBuf {
    std::env::var_os("LOCKSTEP_TEMPLATES").map_or_else(own_folder, PathBuf::from)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).expect(name)
}

fn read_json(name: &str) -> Json {
    serde_json::from_str(&read(name)).expect(name)
}

fn special_tokens(family: &Json) -> BTreeMap<String, String> {
    serde_json::from_value(family.clone()).unwrap()
}

fn family_template(family: &str, special: &Json) -> ChatTemplate {
    let mut sources = TemplateSources::single(read(&format!("{family}.jinja")));
    for name in [TOOL_USE, RAG] {
        let file = format!("{family}.{name}.jinja");
        if folder().join(&file).exists() {
            sources.insert(name, read(&file));
        }
    }
    ChatTemplate::compile(sources, special_tokens(special), NOW).unwrap()
}

fn request(case: &Json) -> ChatMessages {
    ChatMessages {
        messages_json: case["messages"].to_string(),
        tools_json: case.get("tools").map(Json::to_string),
        template_kwargs_json: case.get("kwargs").map(Json::to_string),
        add_generation_prompt: case.get("add_generation_prompt") != Some(&Json::Bool(false)),
    }
}

/// What differs, in words.
fn difference(expected: &Json, got: &Result<String, Refusal>, exact_refusal: bool) -> Option<String> {
    match (expected, got) {
        (Json::String(expected), Ok(got)) if expected == got => None,
        (Json::Object(error), Err(refusal)) if refusal.status == 400 => {
            let message = error["error"].as_str().unwrap();
            (exact_refusal && !refusal.message.ends_with(message))
                .then(|| format!("expected refusal {message:?}, got {:?}", refusal.message))
        }
        _ => Some(format!("expected {expected:?}\n     got {got:?}")),
    }
}

#[test]
fn popular_templates_render_as_transformers_renders_them() {
    let families: Map<String, Json> = serde_json::from_str(&read("families.json")).unwrap();
    let cases: Json =
        serde_json::from_str(&std::fs::read_to_string(own_folder().join("cases.json")).unwrap()).unwrap();
    let mut failures = Vec::new();
    let mut count = 0;
    for (family, special) in &families {
        let template = family_template(family, special);
        let golden = read_json(&format!("golden/{family}.json"));
        for case in cases.as_array().unwrap() {
            let name = case["name"].as_str().unwrap();
            let Some(expected) = golden.get(name) else { continue };
            count += 1;
            // A refusal of the template's own is told in its words; a failure of Jinja in ours.
            let is_raised = expected["error"].as_str().is_some_and(|e| read_all(family).contains(e));
            let difference = difference(expected, &template.render(&request(case)), is_raised);
            failures.extend(difference.map(|text| format!("{family}, {name}: {text}")));
        }
    }
    assert!(failures.is_empty(), "{} of {count} differ:\n{}", failures.len(), failures.join("\n"));
    assert!(
        folder() != own_folder() || families.len() >= 12 && count > 300,
        "{} families, {count} chats",
        families.len()
    );
}

fn read_all(family: &str) -> String {
    read(&format!("{family}.jinja"))
}

#[test]
fn the_dialect_is_that_of_transformers() {
    let golden: Map<String, Json> = serde_json::from_str(&read("golden/dialect.json")).unwrap();
    let special = special_tokens(&read_json("families.json")["chatml"]);
    let plain = request(&read_json("cases.json")[0]);
    let mut failures = Vec::new();
    for (source, expected) in &golden {
        let got = ChatTemplate::compile(TemplateSources::single(source), special.clone(), NOW)
            .map_err(Refusal::invalid)
            .and_then(|template| template.render(&plain));
        failures.extend(difference(expected, &got, false).map(|text| format!("{source}\n{text}")));
    }
    assert!(failures.is_empty(), "{} of {} differ:\n{}", failures.len(), golden.len(), failures.join("\n"));
}
