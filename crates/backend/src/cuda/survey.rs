//! What this machine has for CUDA, for `lockstep doctor`: driver, libraries, GPUs and the links between them.
//!
//! Asks only; makes no context, so it takes no memory of a GPU and works beside running servers. What the driver
//! does not tell (links, free memory) comes from its management library, without which those stay unknown.

use super::compile;
use super::device::architecture;
use super::driver::{self, Driver};
use super::gemm;
use crate::Result;
use lockstep_comm::function_table;
use lockstep_comm::library::{Library, LibraryError};
use lockstep_comm::nccl;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Driver and GPUs.
#[derive(Clone, Debug)]
pub struct Survey {
    /// CUDA version of the driver, e.g. (13, 0).
    pub cuda: (i32, i32),
    /// The driver's own version, e.g. `580.159.04`.
    pub driver: Option<String>,
    /// GPUs in the order of their indices.
    pub gpus: Vec<Gpu>,
    /// `[from][to]`: how a GPU reaches another; `None` for itself.
    pub links: Vec<Vec<Option<Link>>>,
}

/// One GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// As NVIDIA sells it.
    pub name: String,
    /// Place on the PCI bus, `domain:bus:device.function`.
    pub pci: String,
    /// Compute capability, e.g. (9, 0).
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub sm_count: usize,
    /// Bytes of the second-level cache.
    pub l2_bytes: usize,
    /// Bytes of memory.
    pub total_bytes: usize,
    /// Bytes that nobody has taken, if known.
    pub free_bytes: Option<usize>,
}

/// How one GPU reaches the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Kernels of one may read and write memory of the other.
    pub peer_access: bool,
    /// NVLinks that are up on the first, when the two are joined by NVLink.
    pub nvlinks: usize,
}

/// A library that is opened when it is needed.
#[derive(Debug)]
pub struct NeededLibrary {
    /// What it is for.
    pub purpose: &'static str,
    /// Where it was found and its version, or why not.
    pub found: std::result::Result<(String, String), LibraryError>,
}

impl Gpu {
    /// Which kernels serve what, as pairs of operation and kernel, for 16-bit types.
    pub fn kernels(&self) -> Vec<(&'static str, &'static str)> {
        let hopper = architecture(self.capability) == "sm_90a";
        let prefill = if hopper {
            "own, wgmma and asynchronous copies (heads to 128), else mma tiles"
        } else {
            "own, mma tiles"
        };
        vec![
            ("matrix products of few rows", "own or cuBLASLt, whichever was faster when timed"),
            ("other matrix products", "cuBLASLt"),
            ("attention of decode rows", "own, mma over shares of contexts"),
            ("attention of prompts", prefill),
            ("experts", "own, grouped"),
            ("norms, rope and KV store, activations", "own"),
            ("sampling and penalties", "own"),
        ]
    }
}

function_table! {
    /// Functions of `libnvidia-ml.so.1`; names and types as in `nvml.h`.
    Management {
        init = c"nvmlInit_v2" ();
        driver_version = c"nvmlSystemGetDriverVersion" (*mut c_char, c_uint);
        by_pci = c"nvmlDeviceGetHandleByPciBusId_v2" (*const c_char, *mut ManagedGpu);
        memory = c"nvmlDeviceGetMemoryInfo" (ManagedGpu, *mut MemoryInfo);
        peer_status = c"nvmlDeviceGetP2PStatus" (ManagedGpu, ManagedGpu, c_int, *mut c_int);
        link_state = c"nvmlDeviceGetNvLinkState" (ManagedGpu, c_uint, *mut c_int);
    }
}

type ManagedGpu = *mut c_void;

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Default)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const THROUGH_NVLINK: c_int = 2;
/// `NVML_NVLINK_MAX_LINKS`.
const NVLINKS_MAX: c_uint = 18;

impl Management {
    /// The library, if there is one that answers.
    fn open() -> Option<Self> {
        let library = Library::open(&["libnvidia-ml.so.1"], "").ok()?;
        let api = Self::load(&library).ok()?;
        // SAFETY: may be called at any time, and more than once.
        (unsafe { (api.init)() } == 0).then_some(api)
    }

    fn driver(&self) -> Option<String> {
        let mut text = [0u8; 96];
        // SAFETY: the buffer has the size passed.
        let code = unsafe { (self.driver_version)(text.as_mut_ptr().cast(), text.len() as c_uint) };
        (code == 0).then(|| driver::text(&text))
    }

    fn gpu(&self, pci: &str) -> Option<ManagedGpu> {
        let pci = std::ffi::CString::new(pci).ok()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a zero and the out-pointer is valid.
        (unsafe { (self.by_pci)(pci.as_ptr(), &raw mut handle) } == 0).then_some(handle)
    }

    fn free_bytes(&self, gpu: ManagedGpu) -> Option<usize> {
        let mut info = MemoryInfo::default();
        // SAFETY: the handle is one of this library's and the out-pointer is valid.
        (unsafe { (self.memory)(gpu, &raw mut info) } == 0).then_some(info.free as usize)
    }

    /// NVLinks that are up on `from`, if they lead to `to`.
    fn nvlinks(&self, from: ManagedGpu, to: ManagedGpu) -> usize {
        let mut status = -1;
        // SAFETY: both handles are this library's and the out-pointer is valid.
        let code = unsafe { (self.peer_status)(from, to, THROUGH_NVLINK, &raw mut status) };
        if code != 0 || status != 0 {
            return 0;
        }
        let is_up = |&link: &c_uint| {
            let mut state = 0;
            // SAFETY: as above; a link that does not exist is an error code.
            unsafe { (self.link_state)(from, link, &raw mut state) == 0 && state == 1 }
        };
        (0..NVLINKS_MAX).filter(is_up).count()
    }
}

/// Asks driver and management library. Errors with one sentence on a machine without a driver; GPUs that are too
/// old for the kernels are listed all the same.
pub fn survey() -> Result<Survey> {
    let api = Driver::open()?;
    let cuda = api.version()?;
    let management = Management::open();
    let count = api.count()?;
    let mut gpus = Vec::with_capacity(count);
    for index in 0..count {
        let mut gpu = api.describe(index)?;
        let managed = management.as_ref().and_then(|api| Some((api, api.gpu(&gpu.pci)?)));
        gpu.free_bytes = managed.and_then(|(api, handle)| api.free_bytes(handle));
        gpus.push(gpu);
    }
    let link = |from: usize, to: usize| -> Result<Option<Link>> {
        if from == to {
            return Ok(None);
        }
        let nvlinks = management.as_ref().and_then(|api| {
            let (from, to) = (api.gpu(&gpus[from].pci)?, api.gpu(&gpus[to].pci)?);
            Some(api.nvlinks(from, to))
        });
        Ok(Some(Link { peer_access: api.can_access(from, to)?, nvlinks: nvlinks.unwrap_or(0) }))
    };
    let links =
        (0..count).map(|from| (0..count).map(|to| link(from, to)).collect()).collect::<Result<_>>()?;
    Ok(Survey { cuda, driver: management.and_then(|api| api.driver()), gpus, links })
}

/// The libraries that `--device cuda` opens beside the driver. The compiler of kernels is only needed while some
/// are not in the cache, NCCL only for several GPUs.
pub fn libraries() -> Vec<NeededLibrary> {
    vec![
        NeededLibrary { purpose: "matrix products (cuBLASLt)", found: gemm::library_version() },
        NeededLibrary { purpose: "compiling kernels (NVRTC)", found: compile::library_version() },
        NeededLibrary { purpose: "several GPUs (NCCL)", found: nccl::library_version() },
    ]
}
