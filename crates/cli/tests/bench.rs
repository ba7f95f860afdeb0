//! `lockstep bench` as users call it.

mod common;

use lockstep_testkit::fixtures::random_models;
use lockstep_testkit::{Fixture, TempDir};
use serde_json::Value;
use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    Command::new(common::BINARY).arg("bench").args(args).output().expect("the binary runs")
}

/// The columns in their order, and their names in JSON.
const COLUMNS: [(&str, &str); 9] = [
    ("prefill 512, tok/s", "prefill"),
    ("decode b=1, tok/s", "decode"),
    ("8 at once, tok/s", "conc8"),
    ("32 at once, tok/s", "conc32"),
    ("cold prefix burst, s", "prefix"),
    ("warm, s", "prefix_warm"),
    ("TTFT of 32 tokens, ms", "ttft"),
    ("start, s", "start"),
    ("memory idle, MB", "memory"),
];

#[test]
fn every_cpu_column_stands_beside_its_floor() {
    let temp = TempDir::new("bench-cpu");
    let model = random_models::slow(2, 64).write_into(temp.path()).display().to_string();
    for tp in ["1", "2"] {
        let args = ["cpu", "--model", &model, "--tp", tp, "--repeat", "1", "--num-pages", "2304"];
        let output = bench(&args);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        let rows: Vec<&str> = text.lines().skip(4).collect();
        assert_eq!(rows.len(), COLUMNS.len(), "{text}");
        for (row, (title, _)) in rows.iter().zip(COLUMNS) {
            assert!(row.starts_with(title) && row.contains(" %  "), "{title}: {row}");
        }
        let output = bench(&[&args[..], &["--json"]].concat());
        let report: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
        for (_, name) in COLUMNS {
            let of = |field: &str| report["columns"][name][field].as_f64().unwrap_or_default();
            assert!(of("measured") > 0.0 && of("floor") > 0.0, "{name}: {report}");
            assert!(of("share") > 0.0, "{name}: {report}");
        }
        let weights = report["weight_bytes"].as_f64().unwrap_or_default();
        let steps_of_decoding = 128.0;
        let read = report["columns"]["decode"]["weight_bytes"].as_f64().unwrap_or_default();
        let ranks: f64 = tp.parse().expect("a number");
        assert!(read > 0.0 && read * ranks <= 1.01 * steps_of_decoding * weights, "{report}");
    }
}

#[test]
fn bench_cpu_names_what_it_cannot_measure() {
    let temp = TempDir::new("bench-cpu-refused");
    let short = Fixture::named("rand_llama").write_into(temp.path()).display().to_string();
    for (args, words) in [
        (&["cpu", "--model", &short][..], "the model has 512 positions"),
        (&["cpu", "--model", &short, "--max-running", "8"], "--max-running is 8"),
        (&["cpu", "--model", &short, "--repeat", "0"], "--repeat 0"),
        (&["cpu", "--model", &short, "--pp", "2"], "leave out --device and --pp"),
    ] {
        let output = bench(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains(words) && text.lines().count() == 1, "{args:?}: {text}");
    }
}

#[test]
fn latency_is_that_of_requests_however_their_steps_are_shared() {
    let temp = TempDir::new("bench-latency");
    let model = Fixture::named("rand_llama").write_into(temp.path()).display().to_string();
    let given = [
        "latency",
        "--model",
        &model,
        "--threads",
        "1",
        "--batch",
        "1,4",
        "--prompt",
        "40",
        "--tokens",
        "12",
    ];
    for (tp, pp) in [("1", "1"), ("2", "1"), ("1", "2"), ("2", "2")] {
        let args = [&given[..], &["--tp", tp, "--pp", pp]].concat();
        let output = bench(&[&args[..], &["--json"]].concat());
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let batches: Vec<_> = rows.iter().filter_map(|row| row["batch"].as_u64()).collect();
        assert_eq!(batches, [1, 4], "{text}");
        for row in &rows {
            let (prefill, tpot) = (row["prefill_ms"].as_f64(), row["tpot_ms"].as_f64());
            assert!(prefill > Some(0.0) && tpot > Some(0.0), "tp {tp}, pp {pp}: {row}");
            let stages = row["bubbles"].as_array().map_or(0, Vec::len);
            let ranks = tp.parse::<usize>().expect("a number") * 2;
            assert_eq!(stages, if pp == "1" { 0 } else { ranks }, "{row}");
        }
    }
    // Pages for two of the four: they never decode all at once, which the row says in place of a number.
    let few = [&given[..], &["--pp", "2", "--num-pages", "8", "--page-size", "16"]].concat();
    let output = bench(&few);
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<&str> = text.lines().skip(1).collect();
    assert!(output.status.success() && rows.len() == 2, "{output:?}");
    assert!(!rows[0].contains("never") && rows[1].contains("never decoded all at once"), "{text}");
}
