//! How requests share a step.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use lockstep_core::limits::PAGE_SIZE_MAX;
use lockstep_engine::{Batching, DeviceConfig};

/// Defaults of `--max-running` and `--chunk`: a chunk of a CPU takes about as long as a decode step of the batch may, one
/// of a GPU fills it.
const CPU_RUNNING_AND_CHUNK: (usize, usize) = (64, 512);
const GPU_RUNNING_AND_CHUNK: (usize, usize) = (256, 8192);

/// Batching flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct BatchingFlags {
    /// Tokens per KV page.
    #[arg(long, default_value_t = 16)]
    pub page_size: usize,

    /// Requests that run at once; others wait [default: 64, GPU 256].
    #[arg(long, visible_aliases = ["max-running-requests", "max-running-req"])]
    pub max_running: Option<usize>,

    /// Requests that may wait; more are answered 503.
    #[arg(long, visible_aliases = ["max-queued", "max-queued-requests"], default_value_t = 4096)]
    pub max_waiting: usize,

    /// Prefill tokens of one step; longer prompts are computed in chunks [default: 512, GPU 8192].
    #[arg(long, visible_aliases = ["chunked-prefill-size", "max-prefill-length"])]
    pub chunk: Option<usize>,

    /// Longest prompt plus answer in tokens [default: the model's, or what the pool holds].
    #[arg(long, visible_aliases = ["context-length", "max-seq-len-override"])]
    pub max_context: Option<usize>,

    /// Prefix cache: radix keeps the KV of finished requests, none forgets it.
    #[arg(long, value_enum, default_value_t = Cache::Radix)]
    pub cache: Cache,

    /// Prefill and decode in one step; `--mixed false` alternates.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub mixed: bool,

    /// Which waiting request of equal priority is admitted first.
    #[arg(long, value_enum, default_value_t = QueueOrder::Fcfs)]
    pub queue_order: QueueOrder,

    /// With `--mixed false`: which kind of step goes first; the other waits for a bounded number of steps.
    #[arg(long, value_enum, default_value_t = StepOrder::PrefillFirst)]
    pub step_order: StepOrder,

    /// Share of each request's possible answer for which admission keeps pages free, in percent.
    #[arg(long, default_value_t = 100)]
    pub reserve_percent: usize,

    /// Seconds after which a request is ended (finish `abort`), from its arrival at rank 0.
    #[arg(long)]
    pub request_timeout: Option<f64>,

    /// Plan and launch a step before the previous step's tokens are read. auto is on for GPUs and off on CPU, where
    /// a step runs when it is launched, so that overlap would only hold every token back for a step.
    #[arg(long, value_enum, default_value_t = Overlap::Auto)]
    pub overlap: Overlap,

    /// The same as `--overlap off`.
    #[arg(long, visible_aliases = ["disable-overlap-schedule"], conflicts_with = "overlap")]
    pub no_overlap: bool,
}

/// Kinds of prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Cache {
    /// Radix tree over pages.
    Radix,
    /// No reuse.
    None,
}

/// Whether steps overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Overlap {
    /// What suits the device.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Admission orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QueueOrder {
    /// First come, first served.
    Fcfs,
    /// Longest cached prefix first, within a fairness bound.
    LongestPrefix,
}

/// Step orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StepOrder {
    /// Prefill steps first.
    PrefillFirst,
    /// Decode steps first.
    DecodeFirst,
}

impl BatchingFlags {
    /// Every number is in its range.
    pub fn check(&self) -> Result<()> {
        let ranges = [
            ("--page-size", self.page_size, PAGE_SIZE_MAX),
            ("--max-running", self.max_running.unwrap_or(1), 4096),
            ("--max-waiting", self.max_waiting, 1 << 20),
            ("--chunk", self.chunk.unwrap_or(1), 1 << 20),
        ];
        for (flag, value, max) in ranges {
            if value == 0 || value > max {
                bail!("{flag} {value} is outside 1..={max}");
            }
        }
        if self.reserve_percent > 100 {
            bail!("--reserve-percent {} is outside 0..=100", self.reserve_percent);
        }
        if self.request_timeout.is_some_and(|t| !(0.001..=1e6).contains(&t)) {
            bail!("--request-timeout must be 0.001 to 1000000 seconds");
        }
        if self.max_context.is_some_and(|c| c < 2) {
            bail!("--max-context must be at least 2: one token of prompt and one of answer");
        }
        Ok(())
    }

    /// What the ranks are told, with defaults that suit their device.
    pub fn batching(&self, device: &DeviceConfig) -> Batching {
        let is_gpu = *device != DeviceConfig::Cpu;
        let (running_max, chunk) = if is_gpu { GPU_RUNNING_AND_CHUNK } else { CPU_RUNNING_AND_CHUNK };
        Batching {
            page_size: self.page_size,
            running_max: self.max_running.unwrap_or(running_max),
            chunk: self.chunk.unwrap_or(chunk),
            context_max: self.max_context,
            waiting_max: self.max_waiting,
            prefix_cache: self.cache == Cache::Radix,
            mixed: self.mixed,
            overlap: match self.overlap {
                Overlap::On => true,
                Overlap::Off => false,
                Overlap::Auto => is_gpu && !self.no_overlap,
            },
            longest_prefix_first: self.queue_order == QueueOrder::LongestPrefix,
            decode_first: self.step_order == StepOrder::DecodeFirst,
            reserve_percent: self.reserve_percent,
            request_timeout_ms: self.request_timeout.map(|seconds| (seconds * 1e3) as u64),
        }
    }
}
