//! `/metrics` of a real server under load: valid, complete, as documented, and right.

mod common;

use common::serve_with;
use lockstep_testkit::{Fixture, Server};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A family as a scrape shows it.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    help: String,
    /// Name with suffix, labels and value, in order.
    samples: Vec<(String, BTreeMap<String, String>, f64)>,
}

/// Labels of a sample: `a="x",b="y"`.
fn labels(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').expect("name=value");
            let value = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).expect("quotes");
            assert!(!value.contains(['"', '\\', '\n']), "{pair} needs no escapes here");
            (name.to_owned(), value.to_owned())
        })
        .collect()
}

/// Families by name. Panics at what OpenMetrics does not allow.
fn parse(text: &str) -> BTreeMap<String, Family> {
    let mut families = BTreeMap::<String, Family>::new();
    let mut current = String::new();
    assert!(text.ends_with("# EOF\n"), "the end is marked");
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(meta) = line.strip_prefix("# ") {
            let mut parts = meta.splitn(3, ' ');
            let (word, name, rest) =
                (parts.next(), parts.next().expect("a name"), parts.next().expect("a value"));
            if name != current {
                current = name.to_owned();
                assert!(families.insert(current.clone(), Family::default()).is_none(), "{name} comes twice");
            }
            let family = families.get_mut(name).expect("the current family");
            let field = match word {
                Some("HELP") => &mut family.help,
                Some("TYPE") => &mut family.kind,
                other => panic!("{other:?} in {line}"),
            };
            assert!(field.is_empty() && family.samples.is_empty(), "{line} comes late or twice");
            rest.clone_into(field);
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').expect("a value");
        let (name, inside) = match sample.split_once('{') {
            Some((name, rest)) => (name, rest.strip_suffix('}').expect("closed labels")),
            None => (sample, ""),
        };
        let family = families.get_mut(&current).expect("a family before its samples");
        let suffix = name.strip_prefix(&current).unwrap_or_else(|| panic!("{name} under {current}"));
        let allowed: &[&str] = match family.kind.as_str() {
            "counter" => &["_total"],
            "gauge" => &[""],
            "histogram" => &["_bucket", "_sum", "_count"],
            other => panic!("type {other} of {current}"),
        };
        assert!(allowed.contains(&suffix), "{name} is a sample of a {}", family.kind);
        let value: f64 = value.parse().expect("a number");
        assert!(value >= 0.0, "{line}");
        let sample = (suffix.to_owned(), labels(inside), value);
        assert!(
            family.samples.iter().all(|(s, l, _)| (s, l) != (&sample.0, &sample.1)),
            "{line} comes twice"
        );
        family.samples.push(sample);
    }
    families
}

/// Buckets that ascend to `+Inf`, which is the count.
fn check_histogram(name: &str, family: &Family) {
    let value = |suffix: &str| family.samples.iter().find(|s| s.0 == suffix).map(|s| s.2);
    let buckets: Vec<(f64, f64)> = family
        .samples
        .iter()
        .filter(|sample| sample.0 == "_bucket")
        .map(|(_, labels, count)| (labels["le"].replace("+Inf", "inf").parse().expect("a bound"), *count))
        .collect();
    assert!(buckets.len() > 10, "{name}");
    assert!(buckets.windows(2).all(|w| w[0].0 < w[1].0 && w[0].1 <= w[1].1), "{name}: {buckets:?}");
    let (last, count) = buckets.last().copied().expect("a bucket");
    assert!(last.is_infinite() && Some(count) == value("_count"), "{name}");
    assert!(value("_sum").is_some(), "{name}");
}

/// Rows of the table "Metrics" of `docs/operations.md`: name, type, labels.
fn documented() -> BTreeMap<String, (String, BTreeSet<String>)> {
    let text = document("docs/operations.md");
    let section = text.split("\n## Metrics\n").nth(1).expect("a section Metrics");
    let section = section.split("\n## ").next().expect("its text");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `lockstep_"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let name = format!("lockstep_{}", cells[0].trim_end_matches('`'));
        let labels = cells[2].split(',').map(|label| label.trim().to_owned());
        assert!(!cells[3].is_empty() && !cells[4].is_empty(), "unit and meaning of {name}");
        (name, (cells[1].to_owned(), labels.filter(|label| !label.is_empty()).collect()))
    })
    .collect()
}

fn document(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn scrape(server: &Server) -> BTreeMap<String, Family> {
    let response = server.get("/metrics");
    assert_eq!(response.status, 200);
    parse(&String::from_utf8(response.body).expect("UTF-8"))
}

/// The sum of a family's samples with `suffix` whose labels include `wanted`.
fn sum(families: &BTreeMap<String, Family>, name: &str, suffix: &str, wanted: &[(&str, &str)]) -> f64 {
    let family = families.get(name).unwrap_or_else(|| panic!("{name} is exported"));
    let matches = |labels: &BTreeMap<String, String>| {
        wanted.iter().all(|(name, value)| labels.get(*name).is_some_and(|found| found == value))
    };
    family.samples.iter().filter(|s| s.0 == suffix && matches(&s.1)).map(|s| s.2).sum()
}

#[test]
fn metrics_are_valid_documented_and_count_every_request() {
    let served = serve_with(Fixture::named("chain_long"), 2, |c| c.flag("--num-tokenizer", 1));
    let server = &served.server;
    // A health check's own request counts nowhere below.
    assert_eq!(server.get("/health_generate").status, 200);
    let steps_before = sum(&scrape(server), "lockstep_generated_tokens", "_total", &[]);
    const LONG: u64 = 40;
    let finished = std::thread::scope(|scope| {
        let ask = |index: u64| {
            let body = json!({"max_tokens": LONG, "n": 1 + index % 2});
            server.complete("C", body);
            1 + index % 2
        };
        let asked: Vec<_> = (0..6).map(|index| scope.spawn(move || ask(index))).collect();
        asked.into_iter().map(|thread| thread.join().expect("an answer")).sum::<u64>()
    });
    let stopped = 2;
    (0..stopped).for_each(|_| drop(server.complete("A", json!({}))));
    // One that the engine refuses, two that it never sees, one whose client leaves.
    let too_long = "C ".repeat(20_000);
    assert_eq!(server.post("/v1/completions", &server.completion_body(&too_long, json!({}))).status, 400);
    let bad = server.completion_body("C", json!({"temperature": -1}));
    assert_eq!(server.post("/v1/completions", &bad).status, 400);
    assert_eq!(server.get("/nowhere").status, 404);
    let body = server.completion_body("C", json!({"max_tokens": 100_000}));
    let mut stream = server.open_stream("/v1/completions", &body);
    stream.next_event().expect("an event").expect("a stream that has begun");
    drop(stream);
    let gone = || (server.info()["api"]["requests_open"] == 0).then_some(());
    lockstep_testkit::process::poll(std::time::Duration::from_secs(30), gone)
        .expect("the client's leaving is seen");

    let families = scrape(server);
    let count = |name: &str| sum(&families, name, "_count", &[]) as u64;
    let ended =
        |reason: &str| sum(&families, "lockstep_requests_ended", "_total", &[("reason", reason)]) as u64;
    assert_eq!((ended("length"), ended("stop"), ended("refused"), ended("left")), (finished, stopped, 1, 1));
    let all = sum(&families, "lockstep_requests", "_total", &[]) as u64;
    assert_eq!(all, finished + stopped + 2);
    assert_eq!(all, sum(&families, "lockstep_requests_ended", "_total", &[]) as u64, "none is open");
    let status = |status: &str| sum(&families, "lockstep_http_errors", "_total", &[("status", status)]);
    assert_eq!((status("400"), status("404")), (2.0, 1.0));
    for name in ["e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"] {
        assert_eq!(count(&format!("lockstep_{name}")), finished + stopped, "{name}");
    }
    for name in ["time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"]
    {
        assert_eq!(
            count(&format!("lockstep_{name}")),
            finished + stopped + 1,
            "{name}: the one that left too"
        );
    }
    let generated = sum(&families, "lockstep_request_generation_tokens", "_sum", &[]) as u64;
    assert!(generated > finished * LONG, "{generated}");
    assert!(count("lockstep_inter_token_latency_seconds") >= generated - finished - stopped);
    assert!(sum(&families, "lockstep_generated_tokens", "_total", &[]) >= steps_before + generated as f64);
    check_against_table(&families);
    served.server.stop();
}

/// Every family is documented, and every documented one is exported, with the labels that the table names.
fn check_against_table(families: &BTreeMap<String, Family>) {
    let table = documented();
    let names = |keys: Vec<&String>| keys.into_iter().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(families.keys().collect()), names(table.keys().collect()));
    for (name, family) in families {
        let (kind, labels) = &table[name];
        assert_eq!(&family.kind, kind, "{name}");
        assert!(family.help.ends_with('.'), "{name}: {}", family.help);
        assert!(!family.samples.is_empty(), "{name} has no sample");
        for (_, found, _) in &family.samples {
            let found: BTreeSet<_> = found.keys().filter(|label| *label != "le").cloned().collect();
            assert_eq!(&found, labels, "labels of {name}");
        }
        if kind == "histogram" {
            check_histogram(name, family);
        }
    }
    for role in ["api", "scheduler", "tokenizer", "detokenizer"] {
        assert!(sum(families, "lockstep_process_resident_bytes", "", &[("role", role)]) > 1e6, "{role}");
    }
    for activity in ["plan", "launch", "wait", "sample"] {
        for rank in ["0", "1"] {
            let spent = [("rank", rank), ("activity", activity)];
            assert!(sum(families, "lockstep_rank_activity_seconds", "_total", &spent) > 0.0, "{activity}");
        }
    }
}

#[test]
fn the_dashboard_uses_documented_metrics_only() {
    let table = documented();
    let dashboard: serde_json::Value = serde_json::from_str(&document("deploy/grafana.json")).expect("JSON");
    let text = dashboard.to_string();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut used = BTreeSet::new();
    for (at, _) in text.match_indices("lockstep_") {
        let name: String = text[at..].chars().take_while(|c| is_name(*c)).collect();
        let suffixes: [(&str, &[&str]); 3] =
            [("counter", &["_total"]), ("gauge", &[""]), ("histogram", &["_bucket", "_sum", "_count"])];
        let found = table.iter().find(|(family, (kind, _))| {
            let allowed = suffixes.iter().find(|(k, _)| k == kind).map_or(&[][..], |(_, allowed)| *allowed);
            name.strip_prefix(family.as_str()).is_some_and(|rest| allowed.contains(&rest))
        });
        used.insert(found.unwrap_or_else(|| panic!("{name} is in no row of the table")).0.clone());
    }
    for (name, (kind, _)) in &table {
        assert!(kind != "histogram" || used.contains(name), "{name} is on no panel");
    }
}
