//! What a device can do: a small table that users can replace.

use crate::PlanError;
use lockstep_backend::Backend;
use lockstep_backend::cpu::CpuBackend;
use lockstep_backend::cuda::CudaBackend;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

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

    /// Whether its products take codes.
    pub const fn takes_codes(self) -> bool {
        match self {
            DeviceKind::Gpu => CudaBackend::TAKES_CODES,
            DeviceKind::Cpu => CpuBackend::TAKES_CODES,
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
    /// The same of products with codes, whose multiplications are of integers, in 10^12 operations a second; without it they
    /// count as the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub int8_tops: Option<f64>,
    /// Time a layer takes beside its bytes and operations: launches, small kernels, barriers.
    pub layer_overhead_us: f64,
    /// What a sum over two ranks takes: (bytes, microseconds), ascending by bytes.
    pub all_reduce_us: Vec<(f64, f64)>,
    /// Memory of each rank for the driver's context and code.
    pub driver_gib: f64,
    /// For the workspaces of matrix products.
    pub workspace_gib: f64,
    /// For decode steps that are recorded once and replayed.
    pub graphs_gib: f64,
    /// For what ranks send each other; a rank alone has none.
    pub communication_gib: f64,
    /// Where the numbers are from.
    pub source: String,
}

impl Device {
    /// Microseconds that `ranks` ranks take to sum `bytes`: between the sizes of the table along a line, beyond them at
    /// the rate of the last. What depends on the size grows with 2 (n - 1) / n, the bytes that a rank moves in a ring
    /// of n (Thakur, Rabenseifner, Gropp 2005).
    pub fn sum_us(&self, bytes: f64, ranks: usize) -> f64 {
        let n = ranks as f64;
        let latency = self.all_reduce_us[0].1;
        latency + (self.sum_of_two_us(bytes) - latency) * 2.0 * (n - 1.0) / n
    }

    fn sum_of_two_us(&self, bytes: f64) -> f64 {
        let known = &self.all_reduce_us;
        match known.iter().position(|&(size, _)| bytes <= size) {
            Some(0) => known[0].1,
            Some(next) => {
                let ((small, fast), (large, slow)) = (known[next - 1], known[next]);
                fast + (slow - fast) * (bytes - small) / (large - small)
            }
            None => known.last().map_or(0.0, |&(size, us)| us * bytes / size),
        }
    }

    /// Bytes that one of `tp_size` ranks may use.
    pub fn rank_budget_bytes(&self, ratio: f64, tp_size: usize) -> u64 {
        let sharers = match self.kind {
            DeviceKind::Gpu => 1.0,
            DeviceKind::Cpu => tp_size as f64,
        };
        (self.memory_gib * ratio / sharers * GIB) as u64
    }

    /// What is wrong with the numbers, if anything is.
    fn check(&self) -> Result<(), String> {
        let is_rate = |rate: &f64| RATES.contains(rate);
        if ![self.bandwidth_gbs, self.tflops].iter().chain(&self.int8_tops).all(is_rate) {
            return Err(format!("has a rate that is not above 0, or outside {RATES:?}"));
        }
        if !(self.memory_gib > 0.0 && self.memory_gib <= MEMORY_GIB_MAX) {
            let gib = self.memory_gib;
            return Err(format!(
                "has {gib} GiB of memory, not above 0 or above the limit of {MEMORY_GIB_MAX}"
            ));
        }
        let rest = [
            self.layer_overhead_us,
            self.driver_gib,
            self.workspace_gib,
            self.graphs_gib,
            self.communication_gib,
        ];
        if !rest.iter().all(|value| (0.0..=MEMORY_GIB_MAX).contains(value)) {
            return Err(format!("has an overhead or a memory below 0 or above {MEMORY_GIB_MAX}"));
        }
        let sums = &self.all_reduce_us;
        let ascend = sums.windows(2).all(|pair| pair[0].0 < pair[1].0);
        match !sums.is_empty() && ascend && sums.iter().all(|(bytes, us)| is_rate(bytes) && is_rate(us)) {
            true => Ok(()),
            false => {
                Err("needs all_reduce_us: pairs of bytes and microseconds above 0, ascending by bytes".into())
            }
        }
    }

    /// What one of `replicas` replicas has: of a machine whose memory and cores all share, a part; of GPUs, its own.
    pub fn share_of(&self, replicas: usize) -> Self {
        let parts = match self.kind {
            DeviceKind::Cpu => replicas as f64,
            DeviceKind::Gpu => 1.0,
        };
        // As many digits as a reader can use.
        let part = |all: f64| if parts == 1.0 { all } else { (all / parts * 1e3).round() / 1e3 };
        Self {
            memory_gib: part(self.memory_gib),
            bandwidth_gbs: part(self.bandwidth_gbs),
            tflops: part(self.tflops),
            int8_tops: self.int8_tops.map(part),
            ..self.clone()
        }
    }

    /// The share of bandwidth and arithmetic that one of `tp_size` ranks has.
    pub fn rank_share(&self, tp_size: usize) -> f64 {
        match self.kind {
            DeviceKind::Gpu => 1.0,
            DeviceKind::Cpu => 1.0 / tp_size as f64,
        }
    }
}

/// Rates, bytes and times that are believed.
const RATES: RangeInclusive<f64> = 1e-6..=1e12;
/// Most memory that a device may claim, in GiB: a thousand times the largest machine's.
const MEMORY_GIB_MAX: f64 = (1_u64 << 24) as f64;

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
        if devices.is_empty() || devices.iter().any(|device| device.name.trim().is_empty()) {
            return Err(PlanError::Table("needs at least one device, and a name for each".into()));
        }
        for device in &devices {
            device.check().map_err(|what| PlanError::Table(format!("{} {what}", device.name)))?;
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
            let Some(gib) = number.filter(|gib| *gib > 0.0) else { return Err(unknown()) };
            if gib > MEMORY_GIB_MAX {
                return Err(PlanError::TooMuchMemory { got: name.to_owned(), max: MEMORY_GIB_MAX });
            }
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
        for wrong in ["h20", "cpu:x", "cpu:0", "cpu:-1g", "cpu:nan", ""] {
            let message = table.find(wrong).unwrap_err().to_string();
            assert!(message.contains("h200, h100-80g"), "{message}");
        }
        for wrong in ["cpu:1e30g", "cpu:inf"] {
            let message = table.find(wrong).unwrap_err().to_string();
            assert!(message.contains(wrong) && message.contains("at most 16777216"), "{message}");
        }
    }

    /// Two H200s as measured, what lies between, and what more ranks send.
    #[test]
    fn sums_take_what_was_measured() {
        let h200 = DeviceTable::built_in().find("h200").unwrap();
        for (bytes, us) in
            [(1.0, 3.1), (8192.0, 3.1), (65_536.0, 3.4), (2_097_152.0, 9.3), (67_108_864.0, 249.0)]
        {
            assert!((h200.sum_us(bytes, 2) - us).abs() < 1e-9, "{bytes}: {}", h200.sum_us(bytes, 2));
        }
        assert!((h200.sum_us((8192.0 + 65_536.0) / 2.0, 2) - 3.25).abs() < 1e-9);
        assert!((h200.sum_us(2.0 * 67_108_864.0, 2) - 498.0).abs() < 1e-9);
        // 3.1 + (9.3 - 3.1) * 2 * 3 / 4.
        assert!((h200.sum_us(2_097_152.0, 4) - 12.4).abs() < 1e-9);
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
        assert!(DeviceTable::parse("{}").is_err() && DeviceTable::parse("[]").is_err());
        let text = include_str!("../devices.json").replacen("\"tflops\": 720", "\"tflops\": 0", 1);
        assert!(DeviceTable::parse(&text).unwrap_err().to_string().contains("h200"));
        for (from, to, words) in [
            ("[[8192, 3.1]", "[[999999, 3.1]", "ascending by bytes"),
            ("\"graphs_gib\": 0.06", "\"graphs_gib\": -1", "below 0"),
            ("\"memory_gib\": 139.8", "\"memory_gib\": 1e30", "above the limit"),
            ("\"bandwidth_gbs\": 4200", "\"bandwidth_gbs\": 1e-300", "a rate"),
            ("\"driver_gib\": 0.55", "\"driver_gib\": 1e300", "a memory"),
            ("\"name\": \"h200\"", "\"name\": \" \"", "a name for each"),
        ] {
            let text = include_str!("../devices.json").replacen(from, to, 1);
            let message = DeviceTable::parse(&text).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
        let text = include_str!("../devices.json").replacen("tflops", "teraflops", 1);
        assert!(DeviceTable::parse(&text).unwrap_err().to_string().contains("teraflops"));
    }
}
