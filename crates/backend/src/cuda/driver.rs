//! The CUDA driver, as far as this backend uses it: its functions, and what it tells of this machine.
//!
//! Opened when the first CUDA backend is made; nothing of it is needed to build or to start. **Invariant:** what is
//! asked here needs no context, so it takes no memory of a GPU.

use super::survey::Gpu;
use crate::{BackendError, Result};
use lockstep_comm::function_table;
use lockstep_comm::library::{Library, LibraryError};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Address in device memory.
pub(super) type Address = u64;
/// A context, stream, module or function of the driver.
pub(super) type Handle = *mut c_void;

function_table! {
    /// Functions of `libcuda.so.1`; names and types as in `cuda.h`.
    Driver {
        init = c"cuInit" (c_uint);
        driver_version = c"cuDriverGetVersion" (*mut c_int);
        device_count = c"cuDeviceGetCount" (*mut c_int);
        device_get = c"cuDeviceGet" (*mut c_int, c_int);
        device_name = c"cuDeviceGetName" (*mut c_char, c_int, c_int);
        device_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
        device_memory = c"cuDeviceTotalMem_v2" (*mut usize, c_int);
        device_pci = c"cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
        can_access_peer = c"cuDeviceCanAccessPeer" (*mut c_int, c_int, c_int);
        device_uuid = c"cuDeviceGetUuid_v2" (*mut [u8; 16], c_int);
        context_retain = c"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
        context_set = c"cuCtxSetCurrent" (Handle);
        context_open_peer = c"cuCtxEnablePeerAccess" (Handle, c_uint);
        memory_info = c"cuMemGetInfo_v2" (*mut usize, *mut usize);
        allocate = c"cuMemAlloc_v2" (*mut Address, usize);
        free = c"cuMemFree_v2" (Address);
        lend = c"cuIpcGetMemHandle" (*mut LentMemory, Address);
        borrow = c"cuIpcOpenMemHandle_v2" (*mut Address, LentMemory, c_uint);
        fill_bytes = c"cuMemsetD8Async" (Address, u8, usize, Handle);
        copy_in = c"cuMemcpyHtoDAsync_v2" (Address, *const c_void, usize, Handle);
        copy_out = c"cuMemcpyDtoHAsync_v2" (*mut c_void, Address, usize, Handle);
        allocate_host = c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        free_host = c"cuMemFreeHost" (*mut c_void);
        stream_create = c"cuStreamCreate" (*mut Handle, c_uint);
        stream_query = c"cuStreamQuery" (Handle);
        capture_begin = c"cuStreamBeginCapture_v2" (Handle, c_uint);
        capture_end = c"cuStreamEndCapture" (Handle, *mut Handle);
        graph_instantiate = c"cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64);
        graph_launch = c"cuGraphLaunch" (Handle, Handle);
        graph_destroy = c"cuGraphDestroy" (Handle);
        graph_executable_destroy = c"cuGraphExecDestroy" (Handle);
        event_create = c"cuEventCreate" (*mut Handle, c_uint);
        event_record = c"cuEventRecord" (Handle, Handle);
        event_query = c"cuEventQuery" (Handle);
        event_elapsed = c"cuEventElapsedTime" (*mut f32, Handle, Handle);
        event_destroy = c"cuEventDestroy_v2" (Handle);
        module_load = c"cuModuleLoadData" (*mut Handle, *const c_void);
        module_function = c"cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
        function_set = c"cuFuncSetAttribute" (Handle, c_int, c_int);
        launch = c"cuLaunchKernelEx" (*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);
        error_text = c"cuGetErrorString" (c_int, *mut *const c_char);
    }
}

/// `CUipcMemHandle`: memory of one process that another may open.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct LentMemory(pub [u8; 64]);

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: Handle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

/// `CUlaunchAttribute`: an id, padding, and 64 bytes of value.
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    pub id: c_uint,
    pub padding: [u8; 4],
    pub value: [u32; 16],
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
pub(super) const PROGRAMMATIC_SERIALIZATION: c_uint = 6;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(super) const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
/// `CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`, in hundredths of what a multiprocessor may have.
pub(super) const SHARED_MEMORY_PERCENT: c_int = 9;

const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const MULTIPROCESSOR_COUNT: c_int = 16;
const L2_CACHE_SIZE: c_int = 38;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

impl Driver {
    /// Opens and starts the driver. Errors with one sentence on a machine without one, or without a GPU.
    pub fn open() -> Result<Self> {
        let hint = "--device cuda needs an NVIDIA driver; install one, or use --device cpu";
        let library = Library::open(&["libcuda.so.1"], hint)?;
        let api = Self::load(&library)?;
        // SAFETY: cuInit may be called at any time; 0 is the only flag.
        let code = unsafe { (api.init)(0) };
        if code == NO_DEVICE {
            return Err(BackendError::Unsupported("this machine has no CUDA GPU; use --device cpu".into()));
        }
        check(&api, code, "starting the CUDA driver")?;
        Ok(api)
    }

    /// CUDA version that it is for.
    pub fn version(&self) -> Result<(c_int, c_int)> {
        let version = read_int(self, "asking for the driver's version", |out| {
            // SAFETY: `out` is valid for one int.
            unsafe { (self.driver_version)(out) }
        })?;
        Ok((version / 1000, version % 1000 / 10))
    }

    /// GPUs that this process may use.
    pub fn count(&self) -> Result<usize> {
        let count = read_int(self, "counting GPUs", |out| {
            // SAFETY: `out` is valid for one int.
            unsafe { (self.device_count)(out) }
        })?;
        Ok(count.max(0) as usize)
    }

    /// The driver's name for GPU `index`, which is below the count.
    pub fn device(&self, index: usize) -> Result<c_int> {
        read_int(self, "choosing the GPU", |out| {
            // SAFETY: `out` is valid for one int; an ordinal that does not exist is an error code.
            unsafe { (self.device_get)(out, index as c_int) }
        })
    }

    /// What the driver tells of GPU `index`; free memory it tells only to programs that take some.
    pub fn describe(&self, index: usize) -> Result<Gpu> {
        let device = self.device(index)?;
        let attribute = |which: c_int| {
            read_int(self, "reading the GPU's properties", |out| {
                // SAFETY: `out` is valid for one int, the device exists.
                unsafe { (self.device_attribute)(out, which, device) }
            })
        };
        let (mut name, mut pci, mut total_bytes) = ([0u8; 128], [0u8; 32], 0);
        // SAFETY: the buffers have the sizes passed and the device exists.
        unsafe {
            let code = (self.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, device);
            check(self, code, "reading the GPU's name")?;
            let code = (self.device_pci)(pci.as_mut_ptr().cast(), pci.len() as c_int, device);
            check(self, code, "reading the GPU's place")?;
            check(self, (self.device_memory)(&raw mut total_bytes, device), "reading the GPU's memory")?;
        }
        Ok(Gpu {
            name: text(&name),
            pci: text(&pci),
            capability: (attribute(CAPABILITY_MAJOR)?, attribute(CAPABILITY_MINOR)?),
            sm_count: attribute(MULTIPROCESSOR_COUNT)?.max(1) as usize,
            l2_bytes: attribute(L2_CACHE_SIZE)?.max(0) as usize,
            total_bytes,
            free_bytes: None,
        })
    }

    /// Whether kernels of GPU `from` may read and write memory of GPU `to`.
    pub fn can_access(&self, from: usize, to: usize) -> Result<bool> {
        let (from, to) = (self.device(from)?, self.device(to)?);
        let can = read_int(self, "asking which GPUs reach each other", |out| {
            // SAFETY: `out` is valid for one int, both devices exist.
            unsafe { (self.can_access_peer)(out, from, to) }
        })?;
        Ok(can != 0)
    }
}

/// A text that a library has written, up to its zero.
pub(super) fn text(bytes: &[u8]) -> String {
    CStr::from_bytes_until_nul(bytes).unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether an allocation failed for lack of memory.
pub(super) fn is_out_of_memory(code: c_int) -> bool {
    code == OUT_OF_MEMORY
}

/// An error that says what was being done, unless `code` is success.
pub(super) fn check(api: &Driver, code: c_int, operation: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the out-pointer is valid; the text is a constant of the driver, or null.
    let known = unsafe { (api.error_text)(code, &raw mut text) } == 0 && !text.is_null();
    let reason = if known {
        // SAFETY: not null, ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "unknown error".into()
    };
    Err(BackendError::Device {
        operation: operation.into(),
        problem: format!("{reason} (CUDA error {code})"),
    })
}

fn read_int(api: &Driver, operation: &str, call: impl Fn(*mut c_int) -> c_int) -> Result<c_int> {
    let mut value = 0;
    check(api, call(&raw mut value), operation)?;
    Ok(value)
}

impl From<LibraryError> for BackendError {
    fn from(error: LibraryError) -> Self {
        Self::Unsupported(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_laid_out_as_the_driver_declares_them() {
        assert_eq!(size_of::<LaunchConfig>(), 56);
        assert_eq!(std::mem::offset_of!(LaunchConfig, stream), 32);
        assert_eq!(size_of::<LaunchAttribute>(), 72);
        assert_eq!(std::mem::offset_of!(LaunchAttribute, value), 8);
    }
}
