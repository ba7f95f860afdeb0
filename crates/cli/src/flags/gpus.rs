//! Which GPUs the ranks use.

use anyhow::{Result, bail};
use clap::Args;
use lockstep_backend::cuda::SUM_RANKS;
use lockstep_core::Topology;
use lockstep_engine::{DeviceConfig, GpuPlan};

/// GPU flags of every command that runs ranks on GPUs.
#[derive(Args, Clone, Debug, Default)]
pub struct GpuFlags {
    /// GPU of each rank, by index, e.g. 0,3 [default: rank r on GPU r].
    #[arg(long, value_delimiter = ',', value_name = "IDS")]
    pub gpu_ids: Vec<usize>,

    /// Test mode: several ranks may use one GPU, all the first unless --gpu-ids says otherwise.
    #[arg(long)]
    pub share_gpu: bool,

    /// Sum over ranks by NCCL alone.
    #[arg(long)]
    pub disable_custom_all_reduce: bool,
}

/// Share of a GPU's free memory that its ranks take unless `--memory-ratio` says otherwise.
const GPU_MEMORY_RATIO: f64 = 0.9;

impl GpuFlags {
    /// The GPUs of all ranks. Errors with one sentence when they cannot be those.
    pub fn plan(&self, topology: &Topology) -> Result<GpuPlan> {
        let (tp, ranks) = (topology.tp_size, topology.world_size());
        let listed = self.gpu_ids.len();
        if listed > 0 && listed != ranks {
            bail!("--gpu-ids names {listed} GPUs for {ranks} ranks; name one for each rank");
        }
        let twice = (1..listed).find(|rank| self.gpu_ids[..*rank].contains(&self.gpu_ids[*rank]));
        if let Some(rank) = twice.filter(|_| !self.share_gpu) {
            let gpu = self.gpu_ids[rank];
            bail!(
                "--gpu-ids names GPU {gpu} twice; give each rank its own, or pass --share-gpu to test on fewer"
            );
        }
        if self.share_gpu && self.disable_custom_all_reduce {
            bail!(
                "--share-gpu needs what --disable-custom-all-reduce turns off: NCCL refuses ranks on one GPU"
            );
        }
        if self.share_gpu && tp != 1 && !SUM_RANKS.contains(&tp) {
            bail!("--share-gpu takes --tp 1, 2, 4 or 8, not {tp}");
        }
        Ok(GpuPlan {
            ids: self.gpu_ids.clone(),
            share_gpu: self.share_gpu,
            nccl_only: self.disable_custom_all_reduce,
        })
    }

    /// What all ranks compute on where `--device` names `device`; `memory_ratio` is of a
    /// GPU's free memory. Errors when there are no GPUs and one was asked for.
    pub fn device(
        &self,
        device: &str,
        memory_ratio: Option<f64>,
        topology: &Topology,
    ) -> Result<DeviceConfig> {
        let given = [
            ("--gpu-ids", !self.gpu_ids.is_empty()),
            ("--share-gpu", self.share_gpu),
            ("--disable-custom-all-reduce", self.disable_custom_all_reduce),
        ];
        let given = given.iter().find(|(_, is_given)| *is_given);
        match (device, given) {
            ("auto" | "cpu", None) => Ok(DeviceConfig::Cpu),
            ("auto" | "cpu", Some((flag, _))) => bail!("{flag} is about GPUs; give --device cuda as well"),
            ("cuda", _) => Ok(DeviceConfig::Cuda {
                memory_ratio: memory_ratio.unwrap_or(GPU_MEMORY_RATIO),
                gpus: self.plan(topology)?,
            }),
            _ => bail!("--device {device} is not known; use auto, cpu or cuda"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_gpus_are_one_sentence_with_the_way_out() {
        let flags = |ids: &[usize], share_gpu, disable_custom_all_reduce| GpuFlags {
            gpu_ids: ids.to_vec(),
            share_gpu,
            disable_custom_all_reduce,
        };
        let cases: [(GpuFlags, usize, &[&str]); 5] = [
            (flags(&[0], false, false), 2, &["names 1 GPUs for 2 ranks"]),
            (flags(&[0, 1, 2], false, false), 2, &["names 3 GPUs for 2 ranks"]),
            (flags(&[1, 1], false, false), 2, &["GPU 1 twice", "--share-gpu"]),
            (flags(&[], true, true), 2, &["--share-gpu", "--disable-custom-all-reduce"]),
            (flags(&[], true, false), 3, &["--tp 1, 2, 4 or 8, not 3"]),
        ];
        let of = |tp, pp_size, dp_size| Topology { pp_size, dp_size, ..Topology::tensor_parallel(tp) };
        for (flags, ranks, parts) in cases {
            let text = flags.plan(&of(ranks, 1, 1)).unwrap_err().to_string();
            assert!(parts.iter().all(|part| text.contains(part)) && !text.contains('\n'), "{text}");
        }
        assert_eq!(flags(&[3, 0], false, false).plan(&of(2, 1, 1)).unwrap().gpu_of(0), 3);
        assert!(flags(&[0, 0], true, false).plan(&of(2, 1, 1)).is_ok());
        assert!(flags(&[0, 1, 2, 3], false, false).plan(&of(2, 1, 2)).is_ok());
        assert!(flags(&[0, 1, 2, 3], false, false).plan(&of(2, 2, 1)).is_ok());
        assert!(flags(&[], true, false).plan(&of(1, 3, 1)).is_ok(), "stages may be any number");
        let few = flags(&[0, 1], false, false).plan(&of(1, 2, 2)).unwrap_err().to_string();
        assert!(few.contains("names 2 GPUs for 4 ranks"), "{few}");
        let refused = flags(&[0, 1], false, false).device("cpu", None, &of(2, 1, 1)).unwrap_err().to_string();
        assert!(refused.contains("--gpu-ids") && refused.contains("--device cuda"), "{refused}");
        assert_eq!(flags(&[], false, false).device("auto", None, &of(2, 1, 1)).unwrap(), DeviceConfig::Cpu);
        assert!(flags(&[], false, false).device("tpu", None, &of(1, 1, 1)).is_err());
    }
}
