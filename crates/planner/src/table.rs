//! The report as text: one column per tp size.

use crate::Plan;
use crate::cost::Cost;
use crate::device::{DeviceKind, GIB};
use crate::hosts::{Hosts, Link, Traffic};
use crate::memory::RankMemory;
use std::fmt::Write;

/// Width of the first column.
const LABEL: usize = 36;
/// Width of the other columns.
const CELL: usize = 12;

/// The whole report.
pub fn render(plan: &Plan) -> String {
    let mut out = String::new();
    let load = &plan.workload;
    let mut line = |text: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{}", text.trim_end());
    };
    line(plan.model.clone());
    line(format!("weights: {}", plan.source));
    plan.notes.iter().for_each(|note| line(format!("note: {note}")));
    line(format!(
        "device: {} ({} GiB, {} GB/s, {} TFLOP/s); {}",
        plan.device.name,
        plan.device.memory_gib,
        plan.device.bandwidth_gbs,
        plan.device.tflops,
        plan.device.source
    ));
    line(format!(
        "load: {} requests of {} tokens, chunks of {}, pages of {}, {:.0} % of memory",
        load.concurrency,
        load.context,
        load.chunk,
        load.page_size,
        100.0 * load.memory_ratio
    ));
    if load.stages > 1 {
        line(format!(
            "stages: {0} (pp {0}); memory is that of the fullest rank, time that of all stages; a replica has {0} x tp ranks",
            load.stages
        ));
    }
    if load.replicas > 1 {
        line(format!(
            "replicas: {0} (dp {0}); each column is one of them, with its share of the load{2}; ranks in all are {1} x tp",
            load.replicas,
            load.replicas * load.stages,
            if plan.device.kind == DeviceKind::Cpu { " and of the machine" } else { "" }
        ));
    }
    if load.hosts > 1 {
        line(format!(
            "hosts: {0} (--nnodes {0}), the device is one of them; links of {1} Gbit/s and {2} µs (--link-gbit, --link-us)",
            load.hosts, load.link.gbit_s, load.link.latency_us
        ));
    }
    line(String::new());
    let cells = |label: &str, cell: &dyn Fn(usize) -> String| {
        let row: String = (0..plan.choices.len()).map(|i| format!("{:>CELL$}", cell(i))).collect();
        format!("{label:LABEL$}{row}")
    };
    line(cells("per rank, at tp", &|i| plan.choices[i].tp_size.to_string()));
    line(cells("legal", &|i| if plan.choices[i].illegal.is_none() { "yes" } else { "no" }.into()));
    for (label, value) in memory_rows() {
        line(cells(label, &|i| plan.choices[i].memory.as_ref().map_or("-".into(), &value)));
    }
    let fits = |i: usize| match &plan.choices[i].memory {
        None => "-",
        Some(memory) if memory.serves(load) => "serves",
        Some(memory) if memory.loads() => "loads",
        Some(_) => "no",
    };
    line(cells("fits", &|i| fits(i).into()));
    for (label, value) in cost_rows() {
        line(cells(label, &|i| plan.choices[i].cost.as_ref().map_or("-".into(), &value)));
    }
    for (label, value) in host_rows(load.link).into_iter().filter(|_| load.hosts > 1) {
        line(cells(label, &|i| plan.choices[i].hosts.as_ref().map_or("-".into(), &value)));
    }
    line(String::new());
    for choice in &plan.choices {
        if let Some(reason) = &choice.illegal {
            line(format!("- {reason}"));
        }
    }
    for sentence in &plan.advice {
        line(format!("- {sentence}"));
    }
    line("Times are estimates from the device's rates; `lockstep bench` measures.".into());
    out
}

type Row<T> = (&'static str, Box<dyn Fn(&T) -> String>);

fn row<T>(label: &'static str, value: impl Fn(&T) -> String + 'static) -> Row<T> {
    (label, Box::new(value))
}

fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / GIB)
}

fn memory_rows() -> Vec<Row<RankMemory>> {
    vec![
        row("budget GiB", |m: &RankMemory| gib(m.budget_bytes)),
        row("weights GiB", |m: &RankMemory| gib(m.weight_bytes)),
        row("  of which on several ranks GiB", |m: &RankMemory| gib(m.replicated_bytes)),
        row("activations GiB", |m: &RankMemory| gib(m.activation_bytes)),
        row("driver GiB", |m: &RankMemory| gib(m.driver_bytes)),
        row("workspace GiB", |m: &RankMemory| gib(m.workspace_bytes)),
        row("recorded steps (graphs) GiB", |m: &RankMemory| gib(m.graph_bytes)),
        row("communication GiB", |m: &RankMemory| gib(m.communication_bytes)),
        row("KV KiB a token", |m: &RankMemory| format!("{:.1}", m.kv_bytes_per_token as f64 / 1024.0)),
        row("KV pages", |m: &RankMemory| m.pages.to_string()),
        row("largest context", |m: &RankMemory| m.context_max.to_string()),
        row("requests at that load's context", |m: &RankMemory| m.concurrency_max.to_string()),
    ]
}

fn cost_rows() -> Vec<Row<Cost>> {
    vec![
        row("all-reduces a step", |c: &Cost| c.all_reduces_per_step.to_string()),
        row("bytes of each, a token", |c: &Cost| match c.all_reduces_per_step {
            0 => "0".into(),
            _ => c.all_reduce_bytes_per_token.to_string(),
        }),
        row("decode ms, one request", |c: &Cost| format!("{:.2}", c.decode_one_ms)),
        row("decode ms, whole load", |c: &Cost| format!("{:.2}", c.decode_all_ms)),
        row("tokens/s, whole load", |c: &Cost| format!("{:.0}", c.decode_tokens_per_s)),
        row("prefill of one prompt ms", |c: &Cost| format!("{:.0}", c.prefill_ms)),
        row("prefill tokens/s", |c: &Cost| format!("{:.0}", c.prefill_tokens_per_s)),
    ]
}

fn host_rows(link: Link) -> Vec<Row<Hosts>> {
    let kib = |traffic: &Traffic| format!("{:.1}", traffic.bytes / 1024.0);
    let ms = move |traffic: &Traffic| format!("{:.2}", traffic.ms(&link));
    vec![
        row("ranks on each host", |h: &Hosts| h.hosts[0].labels.len().to_string()),
        row("tp across hosts", |h: &Hosts| if h.tp_crosses { "yes" } else { "no" }.into()),
        row("KiB off a host, decode of one", move |h: &Hosts| kib(&h.decode_one)),
        row("  ms that takes", move |h: &Hosts| ms(&h.decode_one)),
        row("KiB off a host, decode, whole load", move |h: &Hosts| kib(&h.decode_all)),
        row("  ms that takes", move |h: &Hosts| ms(&h.decode_all)),
        row("KiB off a host, prefill chunk", move |h: &Hosts| kib(&h.prefill_chunk)),
        row("  ms that takes", move |h: &Hosts| ms(&h.prefill_chunk)),
    ]
}
