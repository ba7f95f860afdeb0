//! Logits against Hugging Face transformers: every case of `tests/golden/cases`, as its script made it.
//!
//! Each case is one tiny model that stands for one thing a family or a key of `config.json` changes. It is
//! read in each spelling that a file may have, run at several tp sizes, and must agree with
//! transformers within 1e-4 of the largest logit; the script guarantees that cases differ by 1e-2 or more.

#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may panic too

// Shared with the forward tests, which use more of it.
#[allow(dead_code)]
#[path = "../forward/group.rs"]
mod group;

use group::{Layout, Logits, first_difference, one_by_one, run};
use lockstep_testkit::random::Random;
use lockstep_testkit::{FileDType, TempDir, Tensor, Weights, safetensors};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Case names begin with one of these; a test each, so that they run beside each other.
const FAMILIES: [&str; 8] = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3"];

/// How far a logit may be from transformers', relative to the largest of its position.
const AGREE: f64 = 1e-4;

fn cases_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases")
}

/// The family of a case: the longest of [`FAMILIES`] that its name begins with.
fn family_of(case: &str) -> &'static str {
    let named = FAMILIES.into_iter().filter(|f| case.starts_with(&format!("{f}_")));
    named.max_by_key(|f| f.len()).unwrap_or_else(|| panic!("no test reads {case}"))
}

fn case_names() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(cases_dir())
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

/// One file of `tests/golden/cases`.
struct Golden {
    name: String,
    value: Value,
}

impl Golden {
    fn read(name: &str) -> Self {
        let text = std::fs::read(cases_dir().join(format!("{name}.json"))).unwrap();
        Self { name: name.to_owned(), value: serde_json::from_slice(&text).unwrap() }
    }

    /// The weights by the rule of the script.
    fn weights(&self) -> Weights {
        let gemma = self.name.starts_with("gemma");
        let shapes = self.value["tensors"].as_object().unwrap();
        shapes.iter().map(|(name, shape)| (name.clone(), tensor(name, &usizes(shape), gemma))).collect()
    }

    /// The `config.json` in every spelling, with what it is called in a message.
    fn configs(&self) -> Vec<(String, Value)> {
        let implied: Vec<&str> =
            self.value["implied"].as_array().unwrap().iter().map(|k| k.as_str().unwrap()).collect();
        let mut configs = Vec::new();
        for key in ["config", "config_4"] {
            let config = self.value[key].clone();
            assert!(config.is_object(), "{} has no {key}", self.name);
            if !implied.is_empty() {
                let mut shorter = config.clone();
                shorter.as_object_mut().unwrap().retain(|k, _| !implied.contains(&k.as_str()));
                configs.push((format!("{key} without {implied:?}"), shorter));
            }
            configs.push((key.to_owned(), config));
        }
        configs
    }

    /// The largest difference at the stored positions, relative to the largest logit of each.
    fn error(&self, logits: &Logits) -> f64 {
        let positions = usizes(&self.value["positions"]);
        let rows = self.value["logits"].as_array().unwrap();
        assert_eq!(positions.len(), rows.len());
        let error_at = |(position, row): (&usize, &Value)| {
            let want: Vec<f64> = row.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
            let got = &logits[0][*position];
            assert_eq!(want.len(), got.len(), "{}", self.name);
            let scale = want.iter().fold(0f64, |m, v| m.max(v.abs()));
            // A NaN must not get lost in a maximum.
            assert!(got.iter().all(|v| v.is_finite()), "{} position {position}", self.name);
            want.iter().zip(got).fold(0f64, |m, (a, b)| m.max((a - f64::from(*b)).abs())) / scale
        };
        positions.iter().zip(rows).map(error_at).fold(0.0, f64::max)
    }
}

fn usizes(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
}

/// `center + width * (2u - 1)` over the tensor's own stream; see `tests/golden/make_golden.py`.
fn tensor(name: &str, shape: &[usize], gemma: bool) -> Tensor {
    let (center, width) = match shape {
        [_] if name.ends_with("norm.weight") => (if gemma { 0.0 } else { 1.0 }, 0.375),
        [_] => (0.0, 0.5),
        _ if name.ends_with("embed_tokens.weight") => (0.0, 0.25),
        _ => (0.0, 2.5 / (shape[shape.len() - 1] as f64).sqrt()),
    };
    let mut random = Random::named(0, name);
    Tensor::from_fn(shape, || (center + width * (2.0 * random.unit() - 1.0)) as f32)
}

/// Runs one case every way; returns the largest error.
fn check(name: &str, folder: &Path) -> f64 {
    let golden = Golden::read(name);
    safetensors::write_model(folder, &golden.weights(), FileDType::F32, 1).unwrap();
    let prompts = [usizes(&golden.value["prompt"]).iter().map(|&id| id as u32).collect::<Vec<u32>>()];
    let whole = one_by_one(&prompts, usize::MAX >> 1);
    let mut base: Option<Logits> = None;
    for (spelling, config) in golden.configs() {
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let logits = run(folder, Layout::default(), &prompts, &whole);
        let error = golden.error(&logits);
        assert!(error <= AGREE, "{name}, {spelling}: {error:.2e} of the largest logit from transformers");
        if let Some(difference) = base.as_ref().and_then(|base| first_difference(base, &logits)) {
            panic!("{name}, {spelling}: {difference}");
        }
        base.get_or_insert(logits);
    }
    let base = base.unwrap();
    for (tp, chunk) in [(1, 1), (2, 7), (4, usize::MAX >> 1)] {
        let layout = Layout { tp, page_size: 4, ..Layout::default() };
        let got = run(folder, layout, &prompts, &one_by_one(&prompts, chunk));
        if let Some(difference) = first_difference(&base, &got) {
            panic!("{name}, tp {tp}, chunk {chunk}: {difference}");
        }
    }
    golden.error(&base)
}

/// Checks all cases of a family and reports every one that fails.
fn family(family: &str) {
    let temp = TempDir::new(&format!("golden-{family}"));
    let names: Vec<String> = case_names().into_iter().filter(|n| family_of(n) == family).collect();
    assert!(!names.is_empty(), "no case of {family}");
    let mut failed = Vec::new();
    for name in names {
        let folder = temp.join(&name);
        std::fs::create_dir_all(&folder).unwrap();
        match std::panic::catch_unwind(|| check(&name, &folder)) {
            Ok(error) => println!("{name}: {error:.1e} of the largest logit"),
            Err(_) => failed.push(name), // its message is printed already
        }
    }
    assert!(failed.is_empty(), "{failed:?} disagree with transformers");
}

#[test]
fn llama() {
    family("llama");
}

#[test]
fn mistral() {
    family("mistral");
}

#[test]
fn qwen2() {
    family("qwen2");
}

#[test]
fn qwen3() {
    family("qwen3");
}

#[test]
fn qwen3_moe() {
    family("qwen3_moe");
}

#[test]
fn phi3() {
    family("phi3");
}

#[test]
fn gemma2() {
    family("gemma2");
}

#[test]
fn gemma3() {
    family("gemma3");
}

#[test]
fn every_family_has_cases_and_every_case_a_family() {
    let found: BTreeSet<&str> = case_names().iter().map(|name| family_of(name)).collect();
    assert_eq!(found, BTreeSet::from(FAMILIES));
}
