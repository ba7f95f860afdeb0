//! The CUDA backend: one GPU a rank, own kernels compiled where they run, cuBLASLt for matrix products.
//!
//! Weights, activations, K and V are bf16 (or f16, or f32, the test mode); sums, norms, softmax, logits and
//! router logits are f32. Nothing of CUDA is needed to build or to start: the driver, NVRTC and cuBLASLt
//! are opened when the first backend is made, and a machine without them gets one sentence.
//!
//! **Invariants**
//! * Everything runs on one stream, in call order; the host waits in [`Backend::read`](crate::Backend::read) and
//!   [`Backend::take_chosen`](crate::Backend::take_chosen) only.
//! * Memory is taken at start-up; the lists of a step grow to the largest step and then stay. When one moves,
//!   recordings are made anew.
//! * Results are repeatable for the same step, and close to the CPU's (`selftest` holds every operation
//!   to a bound); they are not bit-equal across batches.
//! * An operation that cannot return an error keeps it; the next one that can reports it.
//!
//! Reading order: `driver`, `device`, `memory`, `compile`, `launch`, `tensor`, `gemm`, `few_rows`, `products`, `attention`, `ring`, `moe`,
//! `peers`, `reduce`, `stages`, `step_times`, `sample`, `choose`, `recording`, `operations`; [`selftest`] compares with the CPU, `bench` times sums over ranks.

mod attention;
mod bench;
mod choose;
mod compile;
mod device;
mod driver;
mod few_rows;
mod gemm;
mod launch;
mod memory;
mod moe;
mod operations;
mod peers;
mod product_times;
mod products;
mod recording;
mod reduce;
mod ring;
mod sample;
pub mod selftest;
pub mod speed;
mod stages;
mod step_times;
pub mod survey;
mod tensor;

pub use attention::CudaKvCache;
pub use bench::{Sample, SumSize};
pub use compile::kernel_cache;
pub use device::OtherRanks;
pub use moe::{CudaExperts, CudaMoeWorkspace};
pub use peers::{PeerMode, SUM_RANKS};
pub use recording::CudaRecording;
pub use tensor::{CudaLinear, CudaRopeTable, CudaTensor, CudaVector};

use crate::Result;
use attention::AttentionStep;
use choose::Chooser;
use compile::Source;
use device::Device;
use driver::Address;
use launch::{Kernel, Module};
use lockstep_comm::collective::Collective;
use lockstep_core::DType;
use memory::{List, Staging};
use peers::Peers;
use products::Products;
use stages::Stages;
use std::cell::RefCell;
use std::rc::Rc;
use step_times::StepTimes;

/// Widest row that the norm kernels hold: 1024 threads of two parts of 8.
const NORM_COLS_MAX: usize = 16_384;

/// Which GPU, and in which type it computes.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Index among the GPUs of this machine.
    pub gpu: usize,
    /// Type of weights, activations, K and V.
    pub dtype: DType,
}

/// The [`Backend`](crate::Backend) of one GPU. Used from the thread that made it.
pub struct CudaBackend {
    device: Rc<Device>,
    dtype: DType,
    kernels: Kernels,
    products: Products,
    staging: RefCell<Staging>,
    attention: AttentionStep,
    lists: StepLists,
    chooser: Chooser,
    /// The other ranks' memory, where they lend it.
    peers: Option<Box<Peers>>,
    /// The stages before and after, where there are any.
    stages: Option<Stages>,
    step_times: StepTimes,
}

/// What every model needs.
struct Kernels {
    embed: Kernel,
    gather_rows: Kernel,
    scale: Kernel,
    softcap: Kernel,
    gated_activation: Kernel,
    poison: Kernel,
    rms_norm: Kernel,
    add_norm: Kernel,
    rope_and_store: Kernel,
}

impl Kernels {
    fn load(device: &Rc<Device>, pointwise: &Module, dtype: DType) -> Result<Self> {
        let norm = Source::Norm.load(device, dtype)?;
        Ok(Self {
            embed: pointwise.kernel("embed", 0)?,
            gather_rows: pointwise.kernel("gather_rows", 0)?,
            scale: pointwise.kernel("scale", 0)?,
            softcap: pointwise.kernel("softcap", 0)?,
            gated_activation: pointwise.kernel("gated_activation", 0)?,
            poison: pointwise.kernel("poison", 0)?,
            rms_norm: norm.kernel("rms_norm", 0)?,
            add_norm: norm.kernel("add_norm", 0)?,
            rope_and_store: Source::Rope.load(device, dtype)?.kernel("rope_and_store", 0)?,
        })
    }
}

/// The numbers of the current step on the device.
#[derive(Default)]
struct StepLists {
    ids: List<u32>,
    positions: List<u32>,
    slots: List<u32>,
    rows: List<u32>,
}

impl CudaBackend {
    /// Opens the GPU and compiles or loads the kernels.
    ///
    /// Errors with one sentence on a machine without driver, GPU or libraries.
    pub fn new(options: CudaOptions) -> Result<Self> {
        Self::among(None, options)
    }

    /// The same where `others` may keep a step from ending; without them a step is waited for for ever.
    pub fn among(others: Option<OtherRanks>, options: CudaOptions) -> Result<Self> {
        let device = Rc::new(Device::open(options.gpu, others)?);
        Source::compile_missing(&Source::of_every_model(options.dtype), &device.architecture());
        let pointwise = Source::Pointwise.load(&device, options.dtype)?;
        Ok(Self {
            dtype: options.dtype,
            kernels: Kernels::load(&device, &pointwise, options.dtype)?,
            chooser: Chooser::new(&device, &pointwise)?,
            products: Products::new(&device, options.dtype)?,
            staging: RefCell::new(Staging::new(&device)?),
            attention: AttentionStep::new(&device)?,
            lists: StepLists::default(),
            peers: None,
            stages: None,
            step_times: StepTimes::default(),
            device,
        })
    }

    /// Bytes of device memory that nobody has taken.
    pub fn free_bytes(&self) -> Result<usize> {
        Ok(self.device.memory()?.0)
    }

    /// Has NCCL connect the ranks of `pipeline`, one a stage, for what they will pass on.
    /// **Collective: all ranks of the pipeline.**
    pub fn open_transfers(&self, pipeline: &dyn Collective) -> Result<()> {
        stages::open_transfers(&self.device, pipeline)
    }

    /// Waits until everything queued has run. Errors with the first failure.
    pub fn wait(&self) -> Result<()> {
        self.device.wait()
    }

    /// Makes the device's copy of `values` in the list that `list` names.
    fn set(&mut self, list: fn(&mut StepLists) -> &mut List<u32>, values: &[u32]) -> Result<Address> {
        list(&mut self.lists).set(&self.device, self.staging.get_mut(), values)
    }

    /// [`Self::set`] for operations that cannot return an error.
    fn upload(&mut self, list: fn(&mut StepLists) -> &mut List<u32>, values: &[u32]) -> Option<Address> {
        match self.set(list, values) {
            Ok(address) => Some(address),
            Err(error) => {
                self.device.keep(Err(error));
                None
            }
        }
    }

    /// Copies `values` into the first rows of a tensor, rounded to its type.
    pub(crate) fn write(&mut self, tensor: &mut CudaTensor, values: &[f32]) -> Result<()> {
        let bytes = tensor::narrowed(values, tensor.dtype);
        assert!(bytes.len() <= tensor.buffer.bytes(), "the values fit the tensor");
        // SAFETY: by the assertion.
        unsafe { self.staging.get_mut().copy_in(tensor.buffer.address(), &bytes) }
    }

    /// The largest of the first `cols` logits of each row, and its column, on the host.
    pub(crate) fn best_logits(
        &mut self,
        x: &CudaTensor,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<(f32, u32)>> {
        let pairs = self.chooser.queue_best(x.rows(rows, x.cols, DType::F32), rows, x.cols, cols)?;
        // SAFETY: `queue_best` has a pair for each row.
        let copied = unsafe { self.staging.get_mut().copy_out(pairs, rows * size_of::<[u32; 2]>())? };
        let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let pair = |pair: &[u8; 8]| (f32::from_bits(word(&pair[..4])), word(&pair[4..]));
        Ok(copied.as_chunks::<8>().0.iter().map(pair).collect())
    }
}

/// Has the driver load all kernels of a library with it, unless the user has said when. Ranks that are threads and share a GPU
/// need that: by default a kernel is loaded at its first launch, which waits for what runs in the context, and so for another
/// rank's kernel that waits for this rank (of 32 runs of `verify --tp 4 --share-gpu` three ended so; with the variable set by the
/// shell none of 60).
///
/// # Safety
/// No other thread reads or writes the environment meanwhile. Only what comes before the first use of a GPU counts.
pub unsafe fn load_kernels_at_once() {
    const LOADING: &str = "CUDA_MODULE_LOADING";
    if std::env::var_os(LOADING).is_none() {
        // SAFETY: the caller's promise.
        unsafe { std::env::set_var(LOADING, "EAGER") };
    }
}

/// Ends the process at once, without the handlers of the CUDA libraries: those wait for kernels, one of
/// which may wait for a rank that has stopped. The system takes the device's memory back.
pub fn exit_process(code: i32) -> ! {
    // SAFETY: runs nothing of this process any more.
    unsafe { libc::_exit(code) }
}

/// Threads of a block that holds one row of a norm.
fn norm_threads(cols: usize) -> usize {
    assert!(cols <= NORM_COLS_MAX, "{cols} columns of a norm, of at most {NORM_COLS_MAX}");
    cols.div_ceil(tensor::VECTOR).next_multiple_of(32).min(1024)
}
