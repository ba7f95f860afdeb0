//! `bench cpu`: the table of CPU workloads, each beside its floor on this machine.
//!
//! | file | holds |
//! |---|---|
//! | [`workload`] | the columns: requests, what of their run is timed, and the steps that it needs at least |
//! | [`report`] | figures and floors as text and JSON |
//!
//! The engine itself runs in this process, loop, scheduler and cache included, without HTTP, tokenizer and processes; ranks are
//! threads. Token counts are those of `tests/bench/http_load.py`. A floor is what a step's bytes take at the rate at
//! which this machine reads memory, or its multiplications at the rate of the instructions they are made of, whichever is
//! longer, summed over the steps; [`lockstep_planner::work`] counts both.

mod report;
mod workload;

use super::PROBE_BYTES;
use super::engine::{Engine, EngineRun};
use super::percentiles::Percentiles;
use super::random::Random;
use crate::checkpoint;
use crate::error::{CliError, Result};
use crate::flags::CpuFlags;
use crate::output::say;
use lockstep_backend::cpu::probe;
use lockstep_core::shard::Group;
use lockstep_core::{ExitCode, ParallelInfo, WeightMode, WeightType};
use lockstep_engine::DeviceConfig;
use lockstep_engine::offline::OfflineSet;
use lockstep_model::{DummyWeights, ModelRules, ShardBytes, WeightSource, weight_types};
use lockstep_planner::pipeline::Part;
use lockstep_planner::work::{Counts, Row};
use lockstep_planner::{Device, DeviceKind, DeviceTable, Facts};
use report::{Column, Floor, Report};
use std::path::Path;
use workload::{LONGEST, REQUESTS_MAX, Workload};

/// Prints every column.
pub fn cpu(flags: &CpuFlags) -> Result<()> {
    let flag_error = |sentence: String| CliError::new(ExitCode::Flags, sentence);
    if flags.repeat == 0 {
        return Err(flag_error("--repeat 0 measures nothing; give at least 1".into()));
    }
    let engine = Engine::new(&flags.engine)?;
    if engine.config.device != DeviceConfig::Cpu || flags.engine.pp > 1 {
        let sentence =
            "bench cpu is for CPUs and models that are not cut into stages; leave out --device and --pp";
        return Err(flag_error(sentence.into()));
    }
    let (running_max, positions) = (engine.config.batching.running_max, engine.model.max_position);
    if running_max < REQUESTS_MAX || positions < LONGEST {
        return Err(flag_error(format!(
            "bench cpu runs {REQUESTS_MAX} requests at once of up to {LONGEST} tokens, but --max-running is {running_max} and \
             the model has {positions} positions; give --max-running {REQUESTS_MAX} or more, and a model of a longer context"
        )));
    }
    let model = Model::read(&engine)?;
    let mut random = Random::of_seed(flags.engine.seed);
    let mut sets = vec![workload::warm_up(&engine, &mut random)];
    for _ in 0..flags.repeat {
        sets.extend(Workload::ALL.iter().flat_map(|workload| workload.sets(&engine, &mut random)));
    }
    // On either side of the workloads, since machines are shared: a floor takes the best of what was seen.
    let before = model.device()?;
    let run = engine.run(sets)?;
    let device = faster(before, model.device()?);
    let report = model.report(&engine, flags, (&run, device));
    say(if flags.engine.json { report.json() } else { report.text() })
}

/// What the floors need to know of the model.
struct Model {
    source: Box<dyn WeightSource>,
    mode: WeightMode,
    part: Part,
    ranks: usize,
    /// Of all ranks together.
    threads: usize,
}

impl Model {
    fn read(engine: &Engine) -> Result<Self> {
        let source: Box<dyn WeightSource> = match &engine.config.dummy_weights {
            Some(dummy) => Box::new(DummyWeights::new(dummy.config.clone(), dummy.dtype, dummy.seed)),
            None => Box::new(checkpoint::open(&engine.config.model)?),
        };
        let ranks = engine.ranks();
        // Rank 0 is the fullest.
        let part = Part { p: ParallelInfo::tensor_parallel(0, ranks), stage: engine.config.stage };
        let (mode, threads) = (engine.config.weights, engine.config.threads * ranks);
        Ok(Self { source, mode, part, ranks, threads })
    }

    fn type_of(&self) -> impl Fn(Group, &str) -> Option<WeightType> {
        weight_types(&*self.source, self.mode, DeviceKind::Cpu.takes_codes())
    }

    /// Gives `with` what counts rank 0's steps.
    fn counted<T>(&self, with: impl FnOnce(&Counts<'_>) -> T) -> T {
        let type_of = self.type_of();
        let config = self.source.config();
        let facts = Facts { config, type_of: &type_of, source: String::new(), notes: Vec::new() };
        with(&Counts::new(&facts, DeviceKind::Cpu, self.part))
    }

    /// This machine as these threads find it while they read as many bytes as a step, or more than caches hold: a small
    /// model is partly in them, which makes its floor lower.
    fn device(&self) -> Result<Device> {
        let step = self.counted(|counts| counts.step(&[Row::decode(1)]).weight_bytes);
        let bytes = (step as usize * self.ranks).min(PROBE_BYTES);
        let bandwidth = probe::bandwidth_gbs(self.threads, bytes, true);
        let base = DeviceTable::built_in().find("cpu").map_err(CliError::with(ExitCode::Internal))?;
        Ok(Device {
            name: "this machine".into(),
            bandwidth_gbs: bandwidth.map_err(CliError::with(ExitCode::Memory))?,
            tflops: probe::fma_gflops(self.threads) / 1e3,
            int8_tops: Some(probe::dot_gops(self.threads) / 1e3),
            source: "measured beside the workloads".into(),
            ..base
        })
    }

    /// What was measured, beside what the model's steps need.
    fn report(&self, engine: &Engine, flags: &CpuFlags, (run, device): (&EngineRun, Device)) -> Report {
        let mut columns = Vec::new();
        let sets_of_round: usize = Workload::ALL.iter().map(|workload| workload.set_count()).sum();
        // The first set warms up.
        let mut first = 1;
        for workload in Workload::ALL {
            // Its last set is the one that is timed.
            let last = first + workload.set_count() - 1;
            let times =
                (0..flags.repeat).map(|round| workload.seconds(&run.reports[last + round * sets_of_round]));
            let seconds = Percentiles::of(times.collect()).p50;
            let steps = workload.steps(engine.config.batching.chunk);
            let floor = self.counted(|counts| Floor::of_steps(counts, &steps, (&device, self.ranks)));
            columns.push(Column::of_workload(workload, seconds, floor));
            first += workload.set_count();
        }
        let (rules, type_of) = (ModelRules::new(self.source.config()), self.type_of());
        let of_rank = |rank| {
            let p = ParallelInfo::tensor_parallel(rank, self.ranks);
            ShardBytes::of(&rules, p, &type_of).total()
        };
        let weight_bytes: usize = (0..self.ranks).map(of_rank).sum();
        let moved = file_bytes(&engine.config.model, flags.engine.dummy_weights) as f64 + weight_bytes as f64;
        columns.push(Column::start(run.start, moved / (device.bandwidth_gbs * 1e9)));
        columns.extend(run.idle_bytes.map(|bytes| Column::memory(bytes, weight_bytes as u64)));
        Report {
            model: engine.config.model.display().to_string(),
            form: form(&rules, &type_of),
            tp_size: self.ranks,
            threads: self.threads,
            weight_bytes,
            device,
            columns,
        }
    }
}

/// The best rates of both.
fn faster(a: Device, b: Device) -> Device {
    Device {
        bandwidth_gbs: a.bandwidth_gbs.max(b.bandwidth_gbs),
        tflops: a.tflops.max(b.tflops),
        int8_tops: a.int8_tops.zip(b.int8_tops).map(|(a, b)| a.max(b)),
        ..a
    }
}

/// In which forms the matrices are kept, for readers.
fn form(rules: &ModelRules, type_of: &dyn Fn(Group, &str) -> Option<WeightType>) -> &'static str {
    let types: Vec<WeightType> = rules
        .iter()
        .filter(|rule| !matches!(rule.group, Group::Biases | Group::Norms))
        .map(|rule| rule.weight_type(ParallelInfo::SINGLE, &rules.exact_tp_sizes, type_of))
        .collect();
    let coded = types.iter().filter(|t| matches!(t, WeightType::Coded(_))).count();
    match coded {
        0 => "float weights",
        n if n == types.len() => "codes",
        _ => "codes and float weights",
    }
}

/// Bytes of the model's weight files, which a start reads.
fn file_bytes(model: &Path, made_up: bool) -> u64 {
    let size = |path: &Path| path.metadata().map_or(0, |data| data.len());
    if made_up {
        return 0;
    }
    if model.is_file() {
        return size(model);
    }
    let files = std::fs::read_dir(model).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).map(|path| size(&path)).sum()
}
