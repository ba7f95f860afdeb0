//! What a device can do: a small table that users can replace.

use crate::PlanError;
use serde::{Deserialize, Serialize};

/// The two kinds that ranks run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// One device per rank; 16-bit weights, activations and KV.
    Gpu,
    /// One machine shared by all ranks; f32 activations and KV.
    Cpu,
}

impl DeviceKind {
    /// Bytes of an element of activations and KV.
    pub const fn activation_bytes(self) -> usize {
        match self {
            DeviceKind::Gpu => 2,
            DeviceKind::Cpu => 4,
        }
    }
}

/// One device. Rates are what programs reach, not what data sheets say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// As typed after `--device`.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Memory: of one GPU, or of the machine.
    pub memory_gib: f64,
    /// Reading weights and KV, GB/s: of one GPU, or of the machine.
    pub bandwidth_gbs: f64,
    /// Matrix products, TFLOP/s: of one GPU, or of the machine.
    pub tflops: f64,
    /// Time a layer takes beside its bytes and operations: launches, small kernels, barriers.
    pub layer_overhead_us: f64,
    /// A small all-reduce.
    pub all_reduce_latency_us: f64,
    /// Bytes of a large all-reduce over its time.
    pub all_reduce_gbs: f64,
    /// Memory of each rank that holds neither weights, activations nor KV: driver context, library
    /// workspaces, captured graphs, communication buffers.
    pub fixed_gib: f64,
    /// Where the numbers are from.
    pub source: String,
}

impl Device {
    /// Bytes that one of `tp_size` ranks may use.
    pub fn rank_budget_bytes(&self, ratio: f64, tp_size: usize) -> u64 {
        let sharers = match self.kind {
            DeviceKind::Gpu => 1.0,
            DeviceKind::Cpu => tp_size as f64,
        };
        (self.memory_gib * ratio / sharers * GIB) as u64
    }

    /// The share of bandwidth and arithmetic that one of `tp_size` ranks has.
    pub fn rank_share(&self, tp_size: usize) -> f64 {
        match self.kind {
            DeviceKind::Gpu => 1.0,
            DeviceKind::Cpu => 1.0 / tp_size as f64,
        }
    }
}

/// Bytes in a GiB.
pub const GIB: f64 = (1_u64 << 30) as f64;

/// All devices that can be named.
#[derive(Clone, Debug)]
pub struct DeviceTable(Vec<Device>);

impl DeviceTable {
    /// The table that comes with Lockstep.
    pub fn built_in() -> Self {
        Self::parse(include_str!("../devices.json")).expect("invariant: the table is tested")
    }

    /// A user's table in the same form.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let devices: Vec<Device> = serde_json::from_str(text)
            .map_err(|e| PlanError::Table(format!("not a list of devices: {e}")))?;
        for device in &devices {
            let rates = [device.memory_gib, device.bandwidth_gbs, device.tflops, device.all_reduce_gbs];
            if !rates.iter().all(|rate| rate.is_finite() && *rate > 0.0) {
                return Err(PlanError::Table(format!("{} has a rate that is not above 0", device.name)));
            }
        }
        Ok(Self(devices))
    }

    /// The device whose name is part of a GPU's own name, such as `NVIDIA H200`; where memory sizes differ, the one
    /// whose size is part of it too.
    pub fn match_gpu(&self, model: &str) -> Option<Device> {
        let plain = |text: &str| text.to_lowercase().replace(['-', ' '], "");
        let model = plain(model);
        let parts =
            |device: &Device| device.name.split('-').filter(|part| model.contains(&plain(part))).count();
        let base = |device: &Device| plain(device.name.split('-').next().unwrap_or(&device.name));
        let matching = self.0.iter().filter(|d| d.kind == DeviceKind::Gpu && model.contains(&base(d)));
        matching.max_by_key(|d| (base(d).len(), parts(d))).cloned()
    }

    /// A device by name; `cpu:24g` is the CPU with 24 GiB.
    pub fn find(&self, name: &str) -> Result<Device, PlanError> {
        let (base, memory) = match name.split_once(':') {
            Some((base, size)) => (base, Some(size)),
            None => (name, None),
        };
        let known = self.0.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ");
        let unknown = || PlanError::UnknownDevice { got: name.to_owned(), known };
        let mut device = match self.0.iter().find(|d| d.name == base) {
            Some(device) => device.clone(),
            None => return Err(unknown()),
        };
        if let Some(size) = memory {
            let number = size.strip_suffix(['g', 'G']).unwrap_or(size).parse::<f64>().ok();
            let Some(gib) = number.filter(|gib| gib.is_finite() && *gib > 0.0) else { return Err(unknown()) };
            device.memory_gib = gib;
            device.name = name.to_owned();
        }
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_by_name_and_memory() {
        let table = DeviceTable::built_in();
        assert_eq!(table.find("h200").unwrap().kind, DeviceKind::Gpu);
        let cpu = table.find("cpu:24g").unwrap();
        assert_eq!((cpu.memory_gib, cpu.rank_budget_bytes(0.5, 2)), (24.0, 6 << 30));
        for wrong in ["h20", "cpu:x", "cpu:0", "cpu:-1g", ""] {
            let message = table.find(wrong).unwrap_err().to_string();
            assert!(message.contains("h200, h100-80g"), "{message}");
        }
    }

    #[test]
    fn gpus_by_the_drivers_name() {
        let name = |model: &str| DeviceTable::built_in().match_gpu(model).map(|d| d.name);
        assert_eq!(name("NVIDIA H200").as_deref(), Some("h200"));
        assert_eq!(name("NVIDIA H100 80GB HBM3").as_deref(), Some("h100-80g"));
        assert_eq!(name("NVIDIA GeForce RTX 4090").as_deref(), Some("rtx4090"));
        assert_eq!(name("NVIDIA A100-SXM4-80GB").as_deref(), Some("a100-80g"));
        assert_eq!(name("NVIDIA A100-PCIE-40GB").as_deref(), Some("a100-40g"));
        assert_eq!(name("NVIDIA T4"), None);
    }

    #[test]
    fn a_broken_table_is_refused() {
        assert!(DeviceTable::parse("{}").is_err());
        let text = include_str!("../devices.json").replacen("\"tflops\": 720", "\"tflops\": 0", 1);
        assert!(DeviceTable::parse(&text).unwrap_err().to_string().contains("h200"));
        let text = include_str!("../devices.json").replacen("tflops", "teraflops", 1);
        assert!(DeviceTable::parse(&text).unwrap_err().to_string().contains("teraflops"));
    }
}
