//! What hosts must have in common, beyond what they are told.

use super::plan::ServePlan;
use crate::error::{CliError, Result};
use lockstep_comm::library::LibraryError;
use lockstep_comm::nccl;
use lockstep_core::ExitCode;
use lockstep_engine::{DeviceConfig, GpuPlan};
use lockstep_launch::hosts::Fact;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Files up to this size are read whole.
const WHOLE_BYTES_MAX: u64 = 1 << 20;
/// Of larger ones, so many pieces of [`SAMPLE_BYTES`], evenly spread: their names, types and shapes stand at the
/// beginning, and another training or format changes every one of the others.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: usize = 4096;

/// Everything that makes ranks compute, or the scheduler decide, differently.
pub fn facts(plan: &ServePlan) -> Result<Vec<Fact>> {
    let topology = plan.layout.topology;
    let b = &plan.batching;
    let model = model_digest(&plan.model_path).map_err(|e| {
        CliError::new(ExitCode::ModelFiles, format!("{} cannot be read: {e}", plan.model_path.display()))
    })?;
    let (device, gpus) = match &plan.device {
        DeviceConfig::Cpu => ("cpu", None),
        DeviceConfig::Cuda { gpus, .. } => ("cuda", Some(gpus)),
    };
    let nccl = match nccl_version(gpus) {
        Ok(version) => version,
        Err(error) if plan.has_api() => {
            let why = format!("host 0 cannot reach the GPUs of other hosts: {error}");
            return Err(CliError::new(ExitCode::Flags, why));
        }
        // Host 0 refuses this host and names it.
        Err(error) => format!("none ({error})"),
    };
    let or_default = |number: Option<usize>| number.map_or("the model's".into(), |n| n.to_string());
    Ok(vec![
        Fact::new("lockstep", env!("CARGO_PKG_VERSION")),
        Fact::new("--tp", topology.tp_size),
        Fact::new("--pp", topology.pp_size),
        Fact::new("--device", device),
        Fact::new("--share-gpu", gpus.is_some_and(|gpus| gpus.share_gpu)),
        Fact::new("--disable-custom-all-reduce", gpus.is_some_and(|gpus| gpus.nccl_only)),
        Fact::new("NCCL", nccl),
        Fact::new("layers of the stages (--pp-layers)", format!("{:?}", plan.stages)),
        Fact::new("model files", model),
        Fact::new("--dummy-weights", format!("{:?}", plan.dummy_weights.as_ref().map(|dummy| dummy.seed))),
        Fact::new("weights (--dtype, --quantize, --cpu-exact)", format!("{:?}", plan.weights)),
        Fact::new("end tokens", format!("{:?}", plan.eos_tokens)),
        Fact::new("--page-size", b.page_size),
        Fact::new("--max-running", b.running_max),
        Fact::new("--max-waiting", b.waiting_max),
        Fact::new("--chunk", b.chunk),
        Fact::new("--max-context", or_default(b.context_max)),
        Fact::new("batching flags", format!("{b:?}")),
        Fact::new("--allow-imbalance", plan.allow_imbalance),
        Fact::new("--collective-timeout", plan.collective_timeout.as_secs_f64()),
    ])
}

/// The version of NCCL where ranks on several hosts talk through it: other versions do not understand each other.
fn nccl_version(gpus: Option<&GpuPlan>) -> std::result::Result<String, LibraryError> {
    match gpus.filter(|gpus| gpus.has_library()) {
        None => Ok("no use".into()),
        Some(_) => nccl::library_version().map(|(_, version)| version),
    }
}

/// Names, sizes and content (of large files samples) of a model's files: 16 hexadecimal digits, and what they are of.
fn model_digest(path: &Path) -> io::Result<String> {
    let mut files = Vec::new();
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // Marks of the cache and of tools are not the model's.
            if std::fs::metadata(entry.path())?.is_file()
                && !name.starts_with('.')
                && !name.ends_with(".verified")
            {
                files.push((name, entry.path()));
            }
        }
        files.sort();
    } else {
        files.push((String::new(), path.to_owned()));
    }
    let mut hash = Sha256::new();
    let mut bytes = 0;
    for (name, path) in &files {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        bytes += size;
        hash.update(format!("{name} {size}\n"));
        sample(&file, size, &mut hash)?;
    }
    let digits: String = hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{digits} ({} files, {bytes} bytes)", files.len()))
}

fn sample(file: &File, size: u64, hash: &mut Sha256) -> io::Result<()> {
    if size <= WHOLE_BYTES_MAX {
        let mut whole = vec![0; size as usize];
        file.read_exact_at(&mut whole, 0)?;
        hash.update(&whole);
        return Ok(());
    }
    let mut piece = [0; SAMPLE_BYTES];
    for index in 0..SAMPLES {
        file.read_exact_at(&mut piece, (size - SAMPLE_BYTES as u64) * index / (SAMPLES - 1))?;
        hash.update(piece);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_testkit::TempDir;

    #[test]
    fn another_model_has_another_digest_and_marks_do_not_count() {
        let dir = TempDir::new("facts");
        let large = vec![7u8; (WHOLE_BYTES_MAX as usize) + 5000];
        std::fs::write(dir.path().join("model.safetensors"), &large).unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        let first = model_digest(dir.path()).unwrap();
        assert!(first.ends_with(&format!("(2 files, {} bytes)", large.len() + 2)), "{first}");
        std::fs::write(dir.path().join(".cache"), "x").unwrap();
        assert_eq!(model_digest(dir.path()).unwrap(), first);
        std::fs::write(dir.path().join("config.json"), "[]").unwrap();
        assert_ne!(model_digest(dir.path()).unwrap(), first);
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        let mut other = large.clone();
        *other.last_mut().unwrap() = 8;
        std::fs::write(dir.path().join("model.safetensors"), &other).unwrap();
        assert_ne!(model_digest(dir.path()).unwrap(), first);
    }
}
