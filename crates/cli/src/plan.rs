//! `lockstep plan`: what a model takes and how fast it will be at each tp size; loads nothing.

use crate::checkpoint::{self, ConfigOnly};
use crate::error::{CliError, Result};
use crate::flags::plan::PlanFlags;
use crate::output::say;
use crate::pull;
use crate::serve::memory;
use anyhow::Context;
use lockstep_backend::cpu::probe;
use lockstep_core::limits::FLAG_FILE_BYTES_MAX;
use lockstep_core::shard::Group;
use lockstep_core::{ExitCode, ModelConfig, StoredType, WeightMode, files};
use lockstep_model::WeightSource;
use lockstep_planner::device::GIB;
use lockstep_planner::{Device, DeviceKind, DeviceTable, Facts, Link, PlanError, Workload, plan, table};
use lockstep_weights::ModelFiles;
use std::path::Path;

/// Bytes read to measure this machine's bandwidth: far more than its caches, little enough to take a
/// fraction of a second.
const PROBE_BYTES: usize = 256 << 20;

/// Prints the plan as text, or as JSON with `--json`.
pub fn run(flags: &PlanFlags) -> Result<()> {
    let flag_error = CliError::with(ExitCode::Flags);
    // Conflicts with the device are for those who serve: a plan may be for another machine.
    let mode = flags.weights.mode("auto").map_err(&flag_error)?;
    let table = match &flags.devices {
        None => DeviceTable::built_in(),
        Some(path) => read_table(path).map_err(&flag_error)?,
    };
    let device = match flags.device.as_str() {
        "detect" => detect(&table)?,
        name => table.find(name).map_err(|e| flag_error_of(&e))?,
    };
    let path = pull::resolve_config(&flags.model, &pull::cache_dir(flags.cache_dir.clone()))?;
    let description = Description::read(&path, mode)?;
    let config = description.config();
    let default = Workload::default_for(device.kind, config.max_position);
    let workload = Workload {
        context: flags.context.unwrap_or(default.context),
        concurrency: flags.concurrency.unwrap_or(default.concurrency),
        chunk: flags.chunk.unwrap_or(default.chunk),
        page_size: flags.page_size,
        stages: flags.pp,
        replicas: flags.dp,
        hosts: flags.nnodes,
        link: Link { gbit_s: flags.link_gbit, latency_us: flags.link_us },
        memory_ratio: flags.memory_ratio.unwrap_or(default.memory_ratio),
    };
    flags.check(&workload).map_err(&flag_error)?;
    let takes_codes = device.kind.takes_codes();
    let type_of =
        |group: Group, name: &str| Some(mode.weight_type(description.stored_type(name)?, group, takes_codes));
    let facts = Facts { config, type_of: &type_of, source: description.source(), notes: description.notes() };
    let plan = plan(&facts, &device, workload).map_err(|e| flag_error_of(&e))?;
    let text = match flags.json {
        true => serde_json::to_string_pretty(&plan).map_err(CliError::with(ExitCode::Internal))? + "\n",
        false => table::render(&plan),
    };
    say(text)
}

fn flag_error_of(error: &PlanError) -> CliError {
    CliError::new(ExitCode::Flags, error)
}

fn read_table(path: &Path) -> anyhow::Result<DeviceTable> {
    let text = files::read_text(path, FLAG_FILE_BYTES_MAX).context("--devices")?;
    DeviceTable::parse(&text).with_context(|| format!("--devices {}", path.display()))
}

/// A model's description, with tensor headers where there are any.
enum Description {
    /// A whole checkpoint.
    Files(Box<ModelFiles>),
    /// A folder without weights.
    ConfigOnly(Box<ConfigOnly>),
}

impl Description {
    /// Refuses, with its own sentence, what a server would refuse to load.
    fn read(path: &Path, mode: WeightMode) -> Result<Self> {
        if checkpoint::is_config_only(path)? {
            return Ok(Self::ConfigOnly(Box::new(checkpoint::config_only(path, mode.cast())?)));
        }
        Ok(Self::Files(Box::new(checkpoint::open(path)?)))
    }

    fn config(&self) -> &ModelConfig {
        match self {
            Self::Files(files) => files.config(),
            Self::ConfigOnly(model) => &model.config,
        }
    }

    /// How a tensor is stored.
    fn stored_type(&self, tensor: &str) -> Option<StoredType> {
        match self {
            Self::Files(files) => files.stored_type(tensor),
            Self::ConfigOnly(model) => Some(StoredType { dtype: model.dtype, codes: None }),
        }
    }

    fn source(&self) -> String {
        match self {
            Self::Files(files) => format!("{}, from the files' headers", files.source_label()),
            Self::ConfigOnly(model) => format!("all {}, from config.json alone", model.dtype.name()),
        }
    }

    fn notes(&self) -> Vec<String> {
        match self {
            Self::Files(files) => checkpoint::notes(files),
            Self::ConfigOnly(model) => model.notes.clone(),
        }
    }
}

/// The device of this machine: its first NVIDIA GPU if the driver names one that the table has, else
/// its processor, measured.
fn detect(table: &DeviceTable) -> Result<Device> {
    if let Some(model) = nvidia_model() {
        return match table.match_gpu(&model) {
            Some(device) => Ok(device),
            None => Err(CliError::new(
                ExitCode::Flags,
                format!(
                    "this machine has an {model}, which the device table lacks; give --device or --devices FILE"
                ),
            )),
        };
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let bandwidth_gbs =
        probe::bandwidth_gbs(cores, PROBE_BYTES, true).map_err(CliError::with(ExitCode::Memory))?;
    let base = table.find("cpu").map_err(|e| flag_error_of(&e))?;
    let available = memory::available_bytes().map_or(base.memory_gib, |bytes| bytes as f64 / GIB);
    let round = |value: f64, digits: f64| (value * digits).round() / digits;
    Ok(Device {
        name: "this machine".into(),
        kind: DeviceKind::Cpu,
        memory_gib: round(available, 10.0),
        bandwidth_gbs: round(bandwidth_gbs, 10.0),
        // Matrix products reach about two thirds of the FMA rate.
        tflops: round(probe::fma_gflops(cores) * 0.65 / 1e3, 1e3),
        // And under half of that of integers, beside unpacking codes and scaling.
        int8_tops: Some(round(probe::dot_gops(cores) * 0.45 / 1e3, 1e3)),
        source: format!("measured now with {cores} threads; memory is what is available"),
        ..base
    })
}

/// The first GPU's name as the NVIDIA driver gives it.
fn nvidia_model() -> Option<String> {
    let mut gpus: Vec<_> =
        std::fs::read_dir("/proc/driver/nvidia/gpus").ok()?.filter_map(|e| e.ok()).collect();
    gpus.sort_by_key(|entry| entry.file_name());
    let text = std::fs::read_to_string(gpus.first()?.path().join("information")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(line.trim().to_owned())
}
