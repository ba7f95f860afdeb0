//! Rules of the whole repository, enforced as a test: which crate may use which, a SAFETY comment
//! on every `unsafe`, where `cfg(feature)` may stand, module docs, file length, no placeholders.
//!
//! Reads the sources of all crates; follows TigerBeetle's `tidy` and the table "Crates" of
//! `docs/architecture.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Hard limit of lines per file.
const FILE_LINES_MAX: usize = 800;
/// How far above an `unsafe` its comment may start: the lines of one statement, its attributes and
/// the comment itself.
const SAFETY_LINES_MAX: usize = 40;

/// The crate import table. `comm` stands in `model` because a layer takes a `Collective`, and
/// `core` wherever ids and configurations pass.
#[rustfmt::skip]
const IMPORTS: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("wire", &["core"]),
    ("comm", &["core", "wire"]),
    ("weights", &["core"]),
    ("backend", &["core", "comm"]),
    ("model", &["core", "comm", "weights", "backend"]),
    ("planner", &["core", "comm", "backend", "model"]),
    ("kvcache", &["core"]),
    ("scheduler", &["core", "kvcache"]),
    ("grammar", &["core", "wire"]),
    ("engine", &["core", "wire", "comm", "weights", "backend", "model", "kvcache", "scheduler", "grammar"]),
    ("verify", &["core", "comm", "weights", "backend", "model", "scheduler", "engine"]),
    ("tokenizer", &["core", "wire", "comm", "weights", "grammar"]),
    ("api", &["core", "wire", "comm", "grammar"]),
    ("launch", &["core", "wire", "comm"]),
    ("sim", &["core", "wire", "comm", "kvcache", "scheduler", "engine"]),
    ("testkit", &[]),
    ("fuzz", &["core", "wire", "comm", "weights", "grammar", "tokenizer", "api", "launch"]),
    ("xtask", &["sim"]),
    ("cli", &["core", "wire", "comm", "weights", "backend", "model", "planner", "verify", "grammar", "kvcache", "scheduler", "engine",
              "tokenizer", "api", "launch", "sim"]),
];

fn crates_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("invariant: crates/testkit").to_owned()
}

/// Every Rust file of every crate, with its path relative to `crates/`.
fn sources() -> Vec<(String, String)> {
    let root = crates_dir();
    let mut files = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("sources can be listed") {
            let path = entry.expect("sources can be listed").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name =
                    path.strip_prefix(&root).expect("invariant: below root").to_string_lossy().into_owned();
                files.push((name, std::fs::read_to_string(&path).expect("sources are UTF-8")));
            }
        }
    }
    files.sort();
    assert!(files.len() > 30, "found only {} files below {}", files.len(), root.display());
    files
}

fn crate_of(path: &str) -> &str {
    path.split('/').next().unwrap_or_default()
}

/// Names of the `lockstep-*` packages in one section of a manifest.
fn lockstep_dependencies(manifest: &str, section: &str) -> BTreeSet<String> {
    let mut inside = false;
    let mut found = BTreeSet::new();
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            inside = line == format!("[{section}]");
        } else if inside && let Some(rest) = line.strip_prefix("lockstep-") {
            found.insert(rest.split(['.', ' ', '=']).next().unwrap_or_default().to_owned());
        }
    }
    found
}

/// Fails with one line per finding.
fn report(rule: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{rule}: {} findings\n{}", findings.len(), findings.join("\n"));
}

#[test]
fn crates_use_only_what_the_table_allows() {
    let table: BTreeMap<&str, &[&str]> = IMPORTS.iter().copied().collect();
    let mut findings = Vec::new();
    for entry in std::fs::read_dir(crates_dir()).unwrap() {
        let dir = entry.unwrap().path();
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let Ok(manifest) = std::fs::read_to_string(dir.join("Cargo.toml")) else { continue };
        let Some(allowed) = table.get(name.as_str()) else {
            findings.push(format!("{name} is not in the crate import table"));
            continue;
        };
        for section in ["dependencies", "build-dependencies"] {
            for used in lockstep_dependencies(&manifest, section) {
                if !allowed.contains(&used.as_str()) {
                    findings.push(format!("{name} may not use {used} ([{section}])"));
                }
            }
        }
        for used in lockstep_dependencies(&manifest, "dev-dependencies") {
            if used != "testkit" && !allowed.contains(&used.as_str()) {
                findings.push(format!("tests of {name} may not use {used}"));
            }
        }
    }
    report("crate import table", &findings);
}

#[test]
fn the_import_table_has_no_cycle() {
    // Rows come in dependency order, except that the binary's row is last.
    let mut seen = BTreeSet::new();
    for (name, allowed) in IMPORTS {
        assert!(allowed.iter().all(|used| seen.contains(used)), "{name} uses a later row");
        seen.insert(*name);
    }
}

/// `line` without string literals, character literals and a trailing comment.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' => {
                while let Some(inner) = chars.next() {
                    match inner {
                        '\\' => drop(chars.next()),
                        '"' => break,
                        _ => {}
                    }
                }
            }
            '/' if chars.peek() == Some(&'/') => break,
            _ => code.push(c),
        }
    }
    code
}

/// Whether `code` holds `unsafe` as a word that must be explained: a block, an impl, foreign
/// functions or a public function. A function pointer's type and an attribute need nothing; a
/// private or trait function is explained by its trait and by the blocks that call it.
fn opens_unsafe(code: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices("unsafe").any(|(at, word)| {
        let before = code[..at].chars().next_back();
        let after = &code[at + word.len()..];
        if before.is_some_and(is_word) || after.chars().next().is_some_and(|c| is_word(c) || c == '(') {
            return false;
        }
        let after = after.trim_start();
        let after =
            after.strip_prefix("extern \"\"").or(after.strip_prefix("extern ")).unwrap_or(after).trim_start();
        !after.starts_with("fn") || (after.starts_with("fn ") && code.trim_start().starts_with("pub"))
    })
}

/// Whether the statement that holds line `at` is preceded by a comment with a SAFETY text.
fn has_safety_comment(lines: &[&str], at: usize) -> bool {
    if lines[at].contains("// SAFETY:") {
        return true;
    }
    let mut in_comment = false;
    for line in lines[..at].iter().rev().map(|l| l.trim()).take(SAFETY_LINES_MAX) {
        if line.starts_with("//") {
            in_comment = true;
            if line.contains("SAFETY:") || line.contains("# Safety") {
                return true;
            }
        } else if line.starts_with("#[") {
            continue;
        } else if in_comment || line.is_empty() || line.ends_with([';', '}', '{']) {
            return false;
        }
    }
    false
}

#[test]
fn every_unsafe_says_why_it_is_safe() {
    let mut findings = Vec::new();
    for (path, text) in sources() {
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            if opens_unsafe(&code_of(line)) && !has_safety_comment(&lines, i) {
                findings.push(format!("crates/{path}:{}: {}", i + 1, line.trim()));
            }
        }
    }
    report("a SAFETY comment on every unsafe", &findings);
}

#[test]
fn features_are_asked_for_only_in_backend_and_comm() {
    let mut findings = Vec::new();
    for (path, text) in sources() {
        if matches!(crate_of(&path), "backend" | "comm") {
            continue;
        }
        for (i, line) in text.lines().enumerate() {
            if code_of(line).replace(' ', "").contains("feature=") && line.contains("cfg") {
                findings.push(format!("crates/{path}:{}", i + 1));
            }
        }
    }
    report("cfg(feature) only in backend and comm", &findings);
}

#[test]
fn no_placeholders() {
    // Put together here, so that this file does not hold the words themselves.
    let words = [format!("{}!(", "todo"), format!("{}!(", "unimplemented")];
    let mut findings = Vec::new();
    for (path, text) in sources() {
        for (i, line) in text.lines().enumerate() {
            if words.iter().any(|w| code_of(line).contains(w.as_str())) {
                findings.push(format!("crates/{path}:{}: {}", i + 1, line.trim()));
            }
        }
    }
    report("no placeholders", &findings);
}

#[test]
fn every_file_starts_with_module_docs_and_is_short_enough() {
    let mut findings = Vec::new();
    for (path, text) in sources() {
        let first = text.lines().find(|l| !l.trim().is_empty()).unwrap_or_default();
        let is_test_module =
            path.ends_with("/tests.rs") || path.contains("/src/") && path.contains("/tests/");
        if !first.starts_with("//!") && !is_test_module {
            findings.push(format!("crates/{path} does not start with //!"));
        }
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            findings.push(format!("crates/{path} has {lines} lines; the limit is {FILE_LINES_MAX}"));
        }
    }
    report("module docs and file length", &findings);
}

#[test]
fn the_checks_find_what_they_look_for() {
    assert!(opens_unsafe("let x = unsafe { y };") && opens_unsafe("unsafe impl Send for X {}"));
    assert!(opens_unsafe("pub unsafe fn f() {}") && opens_unsafe("unsafe extern \"C\" {"));
    assert!(!opens_unsafe("    unsafe fn of_a_trait();"));
    assert!(!opens_unsafe("type F = unsafe fn(u32);") && !opens_unsafe("deny(unsafe_code)"));
    assert!(!opens_unsafe("#[unsafe(no_mangle)]") && !opens_unsafe(&code_of("// unsafe { }")));
    assert!(!opens_unsafe(&code_of("let s = \"unsafe { }\";")));
    let good = ["// SAFETY: it is", "let x =", "    unsafe { f() };"];
    assert!(has_safety_comment(&good, 2));
    let bad = ["// SAFETY: another statement", "g();", "let x = unsafe { f() };"];
    assert!(!has_safety_comment(&bad, 2));
    let manifest = "[dependencies]\nlockstep-core.workspace = true\nserde = \"1\"\n[dev-dependencies]\nlockstep-testkit = { path = \"x\" }";
    assert_eq!(lockstep_dependencies(manifest, "dependencies"), BTreeSet::from(["core".to_owned()]));
    assert_eq!(lockstep_dependencies(manifest, "dev-dependencies"), BTreeSet::from(["testkit".to_owned()]));
}
