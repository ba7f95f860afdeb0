//! Loaded kernels and their launches.

use super::device::Device;
use super::driver::{
    Address, Handle, LaunchAttribute, LaunchConfig, MAX_DYNAMIC_SHARED_BYTES, PROGRAMMATIC_SERIALIZATION,
    SHARED_MEMORY_PERCENT,
};
use crate::Result;
use std::ffi::{CString, c_void};
use std::rc::Rc;

/// Words of 8 bytes of all arguments, at most: the largest kernel takes 21.
const ARGUMENT_WORDS: usize = 32;
/// 32-bit words of one structure, at most.
const STRUCTURE_WORDS: usize = 24;

/// The kernels of one source file on the device.
pub(super) struct Module {
    device: Rc<Device>,
    handle: Handle,
}

impl Module {
    /// Loads machine code.
    pub fn load(device: &Rc<Device>, code: &[u8]) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the driver checks the code, whose header holds its length; the out-pointer is valid.
        let status = unsafe { (device.api.module_load)(&raw mut handle, code.as_ptr().cast()) };
        device.check(status, "loading kernels")?;
        Ok(Self { device: Rc::clone(device), handle })
    }

    /// A kernel by name; `shared_bytes` is what its launches ask for beyond its own.
    pub fn kernel(&self, name: &'static str, shared_bytes: u32) -> Result<Kernel> {
        let mut function = std::ptr::null_mut();
        let c_name = CString::new(name).expect("invariant: kernel names hold no zero byte");
        // SAFETY: the module is loaded and never unloaded; the name ends with a zero.
        let code =
            unsafe { (self.device.api.module_function)(&raw mut function, self.handle, c_name.as_ptr()) };
        self.device.check(code, &format!("finding kernel {name}"))?;
        if shared_bytes > 0 {
            // SAFETY: the function was just found.
            let code = unsafe {
                (self.device.api.function_set)(function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes as i32)
            };
            self.device.check(code, &format!("reserving shared memory for kernel {name}"))?;
        }
        let overlaps = self.device.can_overlap_launches();
        Ok(Kernel { device: Rc::clone(&self.device), function, name, shared_bytes, overlaps })
    }
}

/// A kernel that can be launched.
pub(super) struct Kernel {
    device: Rc<Device>,
    function: Handle,
    name: &'static str,
    shared_bytes: u32,
    /// Its blocks may start before the kernel before it has ended.
    overlaps: bool,
}

/// Blocks and threads of a launch.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    /// Blocks in x, y, z. A launch with a zero does nothing.
    pub blocks: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
}

impl Grid {
    /// One block a row.
    pub fn rows(rows: usize, threads: usize) -> Self {
        Self { blocks: [rows, 1, 1], threads }
    }

    /// One thread an element.
    pub fn elements(count: usize) -> Self {
        Self { blocks: [count.div_ceil(256), 1, 1], threads: 256 }
    }
}

/// The arguments of a kernel, in order.
#[derive(Default)]
pub(super) struct Args {
    words: [u64; ARGUMENT_WORDS],
    /// First word of each argument.
    starts: [usize; ARGUMENT_WORDS],
    count: usize,
    used: usize,
}

impl Args {
    fn push(mut self, words: &[u64]) -> Self {
        self.starts[self.count] = self.used;
        self.words[self.used..self.used + words.len()].copy_from_slice(words);
        self.count += 1;
        self.used += words.len();
        self
    }

    /// A pointer into device memory.
    pub fn address(self, address: Address) -> Self {
        self.push(&[address])
    }

    /// A pointer, or null.
    pub fn optional(self, address: Option<Address>) -> Self {
        self.push(&[address.unwrap_or(0)])
    }

    /// `u64`.
    pub fn long(self, value: usize) -> Self {
        self.push(&[value as u64])
    }

    /// `u32` or a non-negative `int`. Panics beyond `u32`.
    pub fn int(self, value: usize) -> Self {
        let value = u32::try_from(value).expect("invariant: sizes of one step fit 32 bits");
        self.push(&[u64::from(value)])
    }

    /// `float`.
    pub fn float(self, value: f32) -> Self {
        self.push(&[u64::from(value.to_bits())])
    }

    /// A structure, as its 32-bit words. Panics when their number is odd, which would shift what follows.
    pub fn words(self, words: &[u32]) -> Self {
        let (pairs, rest) = words.as_chunks::<2>();
        assert!(
            rest.is_empty() && words.len() <= STRUCTURE_WORDS,
            "structures have an even number of words, at most {STRUCTURE_WORDS}"
        );
        let mut joined = [0; STRUCTURE_WORDS / 2];
        for (word, pair) in joined.iter_mut().zip(pairs) {
            *word = u64::from(pair[0]) | u64::from(pair[1]) << 32;
        }
        self.push(&joined[..pairs.len()])
    }
}

impl Kernel {
    /// One that starts only when the kernel before it has ended.
    pub fn without_overlap(self) -> Self {
        Self { overlaps: false, ..self }
    }

    /// One during which multiprocessors make at least so many hundredths of the memory that can be either shared memory, and the
    /// rest first-level cache: kernels that overlap it find the cache that small.
    pub fn with_shared_percent(self, percent: usize) -> Result<Self> {
        // SAFETY: the function is loaded and never unloaded.
        let code =
            unsafe { (self.device.api.function_set)(self.function, SHARED_MEMORY_PERCENT, percent as i32) };
        self.device.check(code, &format!("dividing shared memory and cache for kernel {}", self.name))?;
        Ok(self)
    }

    /// Queues the kernel. What goes wrong is kept on the device and reported later.
    ///
    /// # Safety
    /// `args` are those the kernel declares; the memory they name is valid for what this grid reads and
    /// writes until it has run.
    pub unsafe fn launch(&self, grid: Grid, mut args: Args) {
        if grid.blocks.contains(&0) {
            return;
        }
        let words = args.words.as_mut_ptr();
        let mut pointers = [std::ptr::null_mut::<c_void>(); ARGUMENT_WORDS];
        for (pointer, &start) in pointers.iter_mut().zip(&args.starts[..args.count]) {
            *pointer = words.wrapping_add(start).cast();
        }
        let mut overlap = LaunchAttribute { id: PROGRAMMATIC_SERIALIZATION, padding: [0; 4], value: [0; 16] };
        overlap.value[0] = 1;
        let config = LaunchConfig {
            grid: grid.blocks.map(|n| n as u32),
            block: [grid.threads as u32, 1, 1],
            shared_bytes: self.shared_bytes,
            stream: self.device.stream,
            attributes: &raw const overlap,
            attribute_count: u32::from(self.overlaps),
        };
        // SAFETY: the configuration and arguments live until the call returns, which copies them; the
        // rest is the caller's promise.
        let code = unsafe {
            (self.device.api.launch)(
                &raw const config,
                self.function,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        if code != 0 {
            self.device.keep(self.device.check(code, &format!("launching kernel {}", self.name)));
        }
    }
}
