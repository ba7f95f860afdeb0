//! The table of `docs/sharding.md` is what the rules say.

#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may panic too

use lockstep_core::config::hf;
use lockstep_core::{Family, ModelConfig};
use lockstep_model::ModelRules;
use lockstep_testkit::fixtures::random_models::TABLE;
use std::path::Path;

/// One fixture of each family; [`config`] gives it every bias that the family can have.
const FIXTURES: [&str; 8] = [
    "rand_bias",
    "rand_mistral_window",
    "rand_qwen2",
    "rand_qwen3_qknorm",
    "rand_qwen3_moe_sparse_step",
    "rand_phi3",
    "rand_gemma2",
    "rand_gemma3",
];

const BEGIN: &str = "<!-- the rules: this table is checked by crates/model/tests/sharding_docs.rs -->\n";
const END: &str = "<!-- end of the rules -->";

/// One line of the table: a tensor with all numbers in its name taken out, and its cuts in row order.
#[derive(PartialEq)]
struct Line {
    tensor: String,
    cuts: Vec<&'static str>,
    counted_as: String,
}

fn config(fixture: &str) -> ModelConfig {
    let row = TABLE.iter().find(|row| row.name == fixture).unwrap();
    let mut config = row.spec(1).config_json();
    let unbiased = ["rand_mistral_window", "rand_qwen2", "rand_phi3"];
    if !unbiased.contains(&fixture) {
        config["attention_bias"] = true.into();
    }
    hf::parse(config.to_string().as_bytes()).unwrap()
}

/// `model.layers.3.mlp` as `model.layers.N.mlp`, experts as `E`.
fn pattern(tensor: &str) -> String {
    let mut parts: Vec<&str> = tensor.split('.').collect();
    for i in 1..parts.len() {
        if parts[i].parse::<usize>().is_ok() {
            parts[i] = if parts[i - 1] == "experts" { "E" } else { "N" };
        }
    }
    parts.join(".")
}

fn lines(config: &ModelConfig) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for rule in ModelRules::new(config).iter() {
        let mut of_rule: Vec<Line> = Vec::new();
        for piece in &rule.pieces {
            let (tensor, cut) = (pattern(&piece.tensor), rule.cut_in_words(piece));
            match of_rule.iter_mut().find(|line| line.tensor == tensor) {
                Some(line) if line.cuts.last() == Some(&cut) => {}
                Some(line) => line.cuts.push(cut),
                None => {
                    let counted_as = format!("{:?}", rule.group).to_lowercase();
                    of_rule.push(Line { tensor, cuts: vec![cut], counted_as });
                }
            }
        }
        lines.extend(of_rule.into_iter().filter(|line| !lines.contains(line)).collect::<Vec<_>>());
    }
    lines
}

fn table() -> String {
    let mut rows: Vec<(Line, Vec<Family>)> = Vec::new();
    for fixture in FIXTURES {
        let config = config(fixture);
        for line in lines(&config) {
            match rows.iter_mut().find(|(known, _)| *known == line) {
                Some((_, families)) => families.push(config.family),
                None => rows.push((line, vec![config.family])),
            }
        }
    }
    let mut text = "| tensor | cut | counted as | families |\n|---|---|---|---|\n".to_owned();
    for (line, families) in rows {
        let names: Vec<&str> = families.iter().map(|family| family.name()).collect();
        let families = if families.len() == Family::ALL.len() { "all".into() } else { names.join(", ") };
        let cuts = line.cuts.join(", then ");
        text += &format!("| `{}` | {cuts} | {} | {families} |\n", line.tensor, line.counted_as);
    }
    text
}

#[test]
fn the_table_of_the_docs_is_what_the_rules_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/sharding.md");
    let page = std::fs::read_to_string(path).unwrap();
    let start = page.find(BEGIN).expect("docs/sharding.md has the marker") + BEGIN.len();
    let end = start + page[start..].find(END).expect("docs/sharding.md has the end marker");
    let expected = table();
    assert!(
        page[start..end] == expected,
        "docs/sharding.md: put this table between the markers:\n{expected}"
    );
}
