//! `--numa` on the machine that the tests run on, whatever nodes it has.

mod common;

use common::{command, serve_with};
use lockstep_testkit::{Fixture, TempDir};
use serde_json::Value;
use std::process::Command;

/// The nodes of this machine that have cores and memory, as the kernel lists them.
fn has_node_0() -> bool {
    let read = |file: &str| std::fs::read_to_string(format!("/sys/devices/system/node/node0/{file}"));
    let has_cores = read("cpulist").is_ok_and(|list| !list.trim().is_empty());
    has_cores && read("meminfo").is_ok_and(|text| !text.contains("MemTotal:       0 kB"))
}

#[test]
fn ranks_keep_to_the_node_they_are_given_and_say_so() {
    if !has_node_0() {
        return eprintln!("skipped: this machine shows no NUMA node 0");
    }
    let served = serve_with(Fixture::named("rand_llama"), 2, |command| command.flag("--numa", "0,0"));
    common::assert_greedy(&served.server, &served.fixture, 2);
    let info: Value = served.server.get("/server_info").json();
    let ranks = info["engine"]["ranks"].as_array().cloned().unwrap_or_default();
    assert_eq!(ranks.len(), 2, "{info}");
    for rank in ranks {
        assert!(rank["device"].as_str().is_some_and(|device| device.ends_with(", NUMA node 0")), "{rank}");
    }
}

#[test]
fn impossible_nodes_are_refused_in_a_sentence() {
    let temp = TempDir::new("numa");
    let model = Fixture::named("rand_llama").write_into(temp.path());
    for (nodes, words) in [
        ("0,99", "--numa names node 99, which this machine does not have"),
        ("0", "--numa names 1 nodes for 2 ranks of this host"),
        ("all", "--numa all is not known; use auto, off, or a node for each rank"),
    ] {
        let refused = command(&model, 2).flag("--numa", nodes).run_to_exit(common::REFUSAL_LIMIT);
        assert_eq!(refused.code, Some(2), "{}", refused.output);
        assert!(refused.output.contains(words), "{}", refused.output);
    }
}

#[test]
fn doctor_names_the_nodes() {
    let output = Command::new(common::BINARY).args(["doctor", "--quick"]).output().expect("the binary runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.lines().any(|line| line.trim().starts_with("NUMA nodes")), "{text}");
}
