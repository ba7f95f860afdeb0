//! The tables of `docs/api.md`, written from the same rows; a test holds the page against them.

use super::fields::{Behaviour, Field, FieldTable};
use super::{anthropic, native, ollama, requests, responses, sglang};
use crate::routes::ROUTES;

/// The page.
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md");

/// The kinds of request that one table of the page compares, and what its column `on` calls them.
const OPENAI: &[(&str, FieldTable)] = &[("chat", requests::CHAT), ("completions", requests::COMPLETIONS)];

/// The same of Ollama's.
const OLLAMA: &[(&str, FieldTable)] = &[("chat", ollama::CHAT), ("generate", ollama::GENERATE)];

/// The generated parts of the page, by the name in their markers.
fn sections() -> Vec<(&'static str, String)> {
    vec![
        ("endpoints", endpoints()),
        ("fields", fields(OPENAI)),
        ("unsupported", unsupported(OPENAI)),
        ("fields of responses", own_fields(&responses::RESPONSES)),
        ("unsupported in responses", own_unsupported(&responses::RESPONSES)),
        ("fields of messages", own_fields(&anthropic::MESSAGES)),
        ("fields of generate", all_fields(&sglang::GENERATE)),
        ("unsupported in generate", own_unsupported(&sglang::GENERATE)),
        ("fields of sampling_params", own_fields(&sglang::SAMPLING)),
        ("unsupported in sampling_params", own_unsupported(&sglang::SAMPLING)),
        ("fields of ollama", fields(OLLAMA)),
        ("unsupported in ollama", unsupported(OLLAMA)),
        ("fields of options", all_fields(&ollama::OPTIONS)),
        ("unsupported in options", own_unsupported(&ollama::OPTIONS)),
        ("fields of tokenize", all_fields(&native::TOKENIZE)),
        ("unsupported in messages", own_unsupported(&anthropic::MESSAGES)),
    ]
}

fn endpoints() -> String {
    let row = |route: &crate::routes::Route| {
        let (method, path) =
            (route.operation.method.to_uppercase(), super::operations::path_in_document(route.path));
        format!("| `{method} {path}` | {} |\n", route.operation.summary)
    };
    "| endpoint | answer |\n|---|---|\n".to_owned() + &ROUTES.iter().map(row).collect::<String>()
}

/// A row of the page, but for its names.
#[derive(PartialEq)]
struct Row {
    on: String,
    values: String,
    absent: &'static str,
    notes: &'static str,
}

/// Whether these are one group: constants have no address of their own.
fn same(one: &[Field], other: &[Field]) -> bool {
    one.iter().map(|field| field.name).eq(other.iter().map(|field| field.name))
}

/// The rows of `tables` that `make` makes something of, and where they hold: a group that all kinds share is
/// written once. Neighbours that differ in nothing but the name share a row.
fn rows(
    tables: &[(&str, FieldTable)],
    make: fn(&'static Field, String) -> Option<Row>,
) -> Vec<(String, Row)> {
    let mut groups: Vec<(&'static [Field], Vec<&str>)> = Vec::new();
    for (label, table) in tables {
        for group in table.groups {
            match groups.iter_mut().find(|(known, _)| same(known, group)) {
                Some((_, labels)) => labels.push(label),
                None => groups.push((group, vec![label])),
            }
        }
    }
    let mut rows: Vec<(String, Row)> = Vec::new();
    for (group, labels) in groups {
        let on = if labels.len() == tables.len() { "both".into() } else { labels.join(", ") };
        for field in group {
            let name = format!("`{}`", field.name);
            match (make(field, on.clone()), rows.last_mut()) {
                (None, _) => {}
                (Some(row), Some((names, last))) if row == *last => *names = format!("{names}, {name}"),
                (Some(row), _) => rows.push((name, row)),
            }
        }
    }
    rows
}

fn read_row(field: &'static Field, on: String) -> Option<Row> {
    let values = match field.behaviour {
        Behaviour::Read(kind) | Behaviour::Required(kind) => kind.in_words(),
        Behaviour::WithoutEffect => "anything".into(),
        Behaviour::Unsupported(_) => return None,
    };
    Some(Row { on, values, absent: field.absent, notes: field.notes })
}

fn unsupported_row(field: &'static Field, on: String) -> Option<Row> {
    match field.behaviour {
        Behaviour::Unsupported(neutral) => {
            Some(Row { on, values: neutral.in_words(), absent: "", notes: "" })
        }
        _ => None,
    }
}

fn fields(tables: &[(&str, FieldTable)]) -> String {
    let line = |(names, row): (String, Row)| {
        let Row { on, values, absent, notes } = row;
        format!("| {names} | {on} | {values} | {absent} | {notes} |\n")
    };
    "| field | on | values | absent | notes |\n|---|---|---|---|---|\n".to_owned()
        + &rows(tables, read_row).into_iter().map(line).collect::<String>()
        + "| any unknown field | both | anything | | accepted, counted in `/server_info` and logged once; 400 with \
           `--strict-api` |\n"
}

fn unsupported(tables: &[(&str, FieldTable)]) -> String {
    let line = |(names, row): (String, Row)| format!("| {names} | {} | {} |\n", row.on, row.values);
    "| field | on | accepted value |\n|---|---|---|\n".to_owned()
        + &rows(tables, unsupported_row).into_iter().map(line).collect::<String>()
}

/// The table without what every kind of request has, which stands in the first table of the page.
fn own(table: &FieldTable) -> [(&'static str, FieldTable); 1] {
    let groups: Vec<_> =
        table.groups.iter().copied().filter(|group| !same(group, requests::ENGINE)).collect();
    [("", FieldTable { name: table.name, groups: Vec::leak(groups) })]
}

fn own_fields(table: &FieldTable) -> String {
    let line = |(names, row): (String, Row)| {
        let Row { on: _, values, absent, notes } = row;
        format!("| {names} | {values} | {absent} | {notes} |\n")
    };
    "| field | values | absent | notes |\n|---|---|---|---|\n".to_owned()
        + &rows(&own(table), read_row).into_iter().map(line).collect::<String>()
        + "| `min_tokens` to `ebnf` of the table above | | | as there |\n"
}

/// A table that shares nothing.
fn all_fields(table: &FieldTable) -> String {
    let line = |(names, row): (String, Row)| {
        let Row { on: _, values, absent, notes } = row;
        format!("| {names} | {values} | {absent} | {notes} |\n")
    };
    "| field | values | absent | notes |\n|---|---|---|---|\n".to_owned()
        + &rows(&[("", *table)], read_row).into_iter().map(line).collect::<String>()
}

fn own_unsupported(table: &FieldTable) -> String {
    let line = |(names, row): (String, Row)| format!("| {names} | {} |\n", row.values);
    "| field | accepted value |\n|---|---|\n".to_owned()
        + &rows(&own(table), unsupported_row).into_iter().map(line).collect::<String>()
}

/// The page with its generated parts written anew.
fn renewed(mut page: String) -> String {
    for (name, text) in sections() {
        let (begin, end) =
            (format!("<!-- {name}: from the server's own tables -->\n"), format!("<!-- end of {name} -->"));
        let from =
            page.find(&begin).unwrap_or_else(|| panic!("docs/api.md has no line {begin:?}")) + begin.len();
        let to = page.find(&end).unwrap_or_else(|| panic!("docs/api.md has no line {end:?}"));
        page.replace_range(from..to, &text);
    }
    page
}

#[test]
fn the_page_says_what_the_tables_say() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let wanted = renewed(page.clone());
    if std::env::var_os("LOCKSTEP_WRITE_DOCS").is_some() {
        std::fs::write(PAGE, wanted).unwrap();
        return;
    }
    let line = page.lines().zip(wanted.lines()).position(|(is, wanted)| is != wanted);
    let line = line.unwrap_or(page.lines().count().min(wanted.lines().count()));
    assert!(
        page == wanted,
        "docs/api.md differs from the tables from line {} on; LOCKSTEP_WRITE_DOCS=1 cargo test -p lockstep-api \
         the_page writes it anew",
        line + 1
    );
}
