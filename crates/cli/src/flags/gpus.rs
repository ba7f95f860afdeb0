//! Which GPUs the ranks use.

use anyhow::{Result, bail};
use clap::Args;
use lockstep_backend::cuda::SUM_RANKS;
use lockstep_core::{HostMap, Topology};
use lockstep_engine::{DeviceConfig, GpuPlan};

/// GPU flags of every command that runs ranks on GPUs.
#[derive(Args, Clone, Debug, Default)]
pub struct GpuFlags {
    /// GPU of each rank of this host, by index, e.g. 0,3 [default: a host's first rank on GPU 0, and so on].
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
    /// The GPUs of this host's ranks, with `topology` on the hosts of `map`. Errors with one sentence when they cannot be
    /// those.
    pub fn plan(&self, topology: &Topology, map: &HostMap) -> Result<GpuPlan> {
        let (tp, ranks) = (topology.tp_size, map.ranks_per_host());
        let listed = self.gpu_ids.len();
        if listed > 0 && listed != ranks {
            let of_host = if map.nnodes() > 1 { " of this host" } else { "" };
            bail!(
                "--gpu-ids names {listed} GPUs for {ranks} ranks{of_host}; name one for each rank{of_host}"
            );
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
        if self.share_gpu && !map.keeps_together(tp) {
            bail!(
                "--share-gpu is for TP groups of one host: --tp {tp} with --nnodes {} is summed by NCCL, which refuses \
                 ranks on one GPU; give each rank its own, or use --pp over the hosts",
                map.nnodes()
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

    /// What the ranks of this host compute on where `--device` names `device`; `memory_ratio` is of a
    /// GPU's free memory. Errors when there are no GPUs and one was asked for.
    pub fn device(
        &self,
        device: &str,
        memory_ratio: Option<f64>,
        (topology, map): (&Topology, &HostMap),
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
                gpus: self.plan(topology, map)?,
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
        let one = |tp, pp_size, dp_size| HostMap::single(&of(tp, pp_size, dp_size));
        let on_one =
            |flags: &GpuFlags, topology: Topology| flags.plan(&topology, &HostMap::single(&topology));
        for (flags, ranks, parts) in cases {
            let text = on_one(&flags, of(ranks, 1, 1)).unwrap_err().to_string();
            assert!(parts.iter().all(|part| text.contains(part)) && !text.contains('\n'), "{text}");
        }
        assert_eq!(on_one(&flags(&[3, 0], false, false), of(2, 1, 1)).unwrap().gpu_of(0), 3);
        assert!(on_one(&flags(&[0, 0], true, false), of(2, 1, 1)).is_ok());
        assert!(on_one(&flags(&[0, 1, 2, 3], false, false), of(2, 1, 2)).is_ok());
        assert!(on_one(&flags(&[0, 1, 2, 3], false, false), of(2, 2, 1)).is_ok());
        assert!(on_one(&flags(&[], true, false), of(1, 3, 1)).is_ok(), "stages may be any number");
        let few = on_one(&flags(&[0, 1], false, false), of(1, 2, 2)).unwrap_err().to_string();
        assert!(few.contains("names 2 GPUs for 4 ranks"), "{few}");
        let refused = flags(&[0, 1], false, false)
            .device("cpu", None, (&of(2, 1, 1), &one(2, 1, 1)))
            .unwrap_err()
            .to_string();
        assert!(refused.contains("--gpu-ids") && refused.contains("--device cuda"), "{refused}");
        assert_eq!(
            flags(&[], false, false).device("auto", None, (&of(2, 1, 1), &one(2, 1, 1))).unwrap(),
            DeviceConfig::Cpu
        );
        assert!(flags(&[], false, false).device("tpu", None, (&of(1, 1, 1), &one(1, 1, 1))).is_err());
    }

    #[test]
    fn gpus_of_several_hosts_are_one_hosts() {
        let plan = |ids: &[usize], share_gpu, tp, pp_size, nnodes| {
            let topology = Topology { pp_size, ..Topology::tensor_parallel(tp) };
            let map = HostMap::new(&topology, nnodes).unwrap();
            let flags = GpuFlags { gpu_ids: ids.to_vec(), share_gpu, disable_custom_all_reduce: false };
            flags.plan(&topology, &map).map_err(|error| error.to_string())
        };
        assert_eq!(plan(&[1], false, 2, 1, 2).unwrap().gpu_of(0), 1);
        assert_eq!(plan(&[], false, 4, 1, 2).unwrap().gpu_of(1), 1, "each host's ranks begin at 0");
        let many = plan(&[0, 1], false, 2, 1, 2).unwrap_err();
        assert!(many.contains("names 2 GPUs for 1 ranks of this host"), "{many}");
        for (tp, pp, nnodes) in [(2, 1, 2), (4, 1, 2), (2, 3, 2)] {
            let refused = plan(&[], true, tp, pp, nnodes).unwrap_err();
            assert!(refused.contains("NCCL") && refused.contains("--pp"), "{refused}");
        }
        assert!(plan(&[], true, 1, 2, 2).is_ok() && plan(&[], true, 2, 2, 2).is_ok());
    }
}
