//! Figures beside floors, for people and programs.

use super::workload::{Unit, Workload};
use lockstep_planner::Device;
use lockstep_planner::work::{Counts, Row, Work};
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

/// What bounds a floor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    /// Reading memory.
    Memory,
    /// Multiplying.
    Arithmetic,
    /// Both: some steps one, some the other.
    Both,
}

impl Bound {
    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Arithmetic => "arithmetic",
            Self::Both => "both",
        }
    }
}

/// The least time of some steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floor {
    /// Sum over steps of the longer of both times.
    pub seconds: f64,
    /// What all of them move and compute, of one rank.
    pub work: Work,
    /// Which of the times it was.
    pub bound: Bound,
}

impl Floor {
    /// Of steps of which each has these rows, on a rank of `ranks`.
    pub fn of_steps(counts: &Counts<'_>, steps: &[Vec<Row>], (device, ranks): (&Device, usize)) -> Self {
        let (mut seconds, mut total) = (0.0, Work::default());
        let (mut by_memory, mut by_arithmetic) = (0, 0);
        for rows in steps {
            let work = counts.step(rows);
            seconds += work.roofline_s(device, ranks);
            if work.moving_s(device, ranks) > work.computing_s(device, ranks) {
                by_memory += 1;
            } else {
                by_arithmetic += 1;
            }
            total += work;
        }
        let bound = match (by_memory, by_arithmetic) {
            (_, 0) => Bound::Memory,
            (0, _) => Bound::Arithmetic,
            _ => Bound::Both,
        };
        Self { seconds, work: total, bound }
    }
}

/// One column of the table.
pub(super) struct Column {
    title: &'static str,
    key: &'static str,
    measured: f64,
    floor: f64,
    /// 1 at the floor.
    share: f64,
    bound: Bound,
    work: Option<Work>,
}

impl Column {
    /// A workload that took `seconds`.
    pub fn of_workload(workload: Workload, seconds: f64, floor: Floor) -> Self {
        let ((title, key), unit) = (workload.names(), workload.unit());
        Self {
            title,
            key,
            measured: unit.value(seconds),
            floor: unit.value(floor.seconds),
            share: floor.seconds / seconds,
            bound: floor.bound,
            work: Some(floor.work),
        }
    }

    /// From opening the files to ready.
    pub fn start(measured: Duration, floor_s: f64) -> Self {
        let measured = Unit::S.value(measured.as_secs_f64());
        let share = floor_s / measured;
        let (title, key) = ("start, s", "start");
        Self { title, key, measured, floor: floor_s, share, bound: Bound::Memory, work: None }
    }

    /// Memory of an idle process beside its weights.
    pub fn memory(bytes: u64, weight_bytes: u64) -> Self {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let (title, key) = ("memory idle, MB", "memory");
        let share = weight_bytes as f64 / bytes as f64;
        Self {
            title,
            key,
            measured: mb(bytes),
            floor: mb(weight_bytes),
            share,
            bound: Bound::Memory,
            work: None,
        }
    }
}

/// The table and what it was measured with.
pub(super) struct Report {
    pub model: String,
    /// Forms of the matrices.
    pub form: &'static str,
    pub tp_size: usize,
    /// Of all ranks together.
    pub threads: usize,
    /// Of all ranks together.
    pub weight_bytes: usize,
    pub device: Device,
    pub columns: Vec<Column>,
}

impl Report {
    /// For people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |text: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "{}", text.trim_end());
        };
        line(format!(
            "{}, tp {}, {} threads in all, {} MiB of weights ({})",
            self.model,
            self.tp_size,
            self.threads,
            self.weight_bytes >> 20,
            self.form
        ));
        line(format!(
            "this machine: {:.1} GB/s of reading that much, {:.0} GFLOP/s of f32 multiply-add, {:.0} GOP/s of integer dot \
             products",
            self.device.bandwidth_gbs,
            self.device.tflops * 1e3,
            self.device.int8_tops.unwrap_or_default() * 1e3
        ));
        line(String::new());
        line(format!("{:<22}  {:>10}  {:>10}  {:>7}  floor is of", "", "measured", "floor", "reached"));
        for column in &self.columns {
            line(format!(
                "{:<22}  {:>10}  {:>10}  {:>5.0} %  {}",
                column.title,
                figure(column.measured),
                figure(column.floor),
                100.0 * column.share,
                column.bound.name()
            ));
        }
        out
    }

    /// For programs: the same, and what the floors count.
    pub fn json(&self) -> String {
        let column = |column: &Column| {
            let mut fields = json!({
                "measured": column.measured, "floor": column.floor, "share": column.share, "bound": column.bound.name(),
            });
            if let (Some(work), Some(fields)) = (column.work, fields.as_object_mut()) {
                fields.insert("weight_bytes".into(), work.weight_bytes.into());
                fields.insert("kv_bytes".into(), work.kv_bytes.into());
                fields.insert("float_multiplications".into(), work.float_macs.into());
                fields.insert("code_multiplications".into(), work.code_macs.into());
            }
            (column.key.to_owned(), fields)
        };
        let columns: serde_json::Map<String, Value> = self.columns.iter().map(column).collect();
        let report = json!({
            "model": self.model, "form": self.form, "tp": self.tp_size, "threads": self.threads,
            "weight_bytes": self.weight_bytes, "bandwidth_gbs": self.device.bandwidth_gbs,
            "fma_gflops": self.device.tflops * 1e3, "dot_gops": self.device.int8_tops.unwrap_or_default() * 1e3,
            "columns": columns,
        });
        format!("{report}\n")
    }
}

/// As many digits as a reader can use.
fn figure(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 0.1 => format!("{v:.2}"),
        v => format!("{v:.4}"),
    }
}
