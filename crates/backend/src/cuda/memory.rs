//! Device memory, and the ways into and out of it.
//!
//! **Invariant:** memory is taken at start-up; [`List`]s and the read buffer grow to the largest step and
//! then stay. What goes to the device passes through pinned memory, which is not written again before
//! the device has read it.

use super::device::Device;
use super::driver::{Address, is_out_of_memory};
use crate::{BackendError, Result};
use bytemuck::Pod;
use std::ffi::c_void;
use std::rc::Rc;

/// Bytes of the pinned ring; weights are loaded through it.
const STAGING_BYTES: usize = 64 << 20;
/// Entries of a list at first; then it doubles.
const LIST_MIN: usize = 4096;

/// Device memory of its own, or a part of such memory.
pub(super) struct Buffer {
    memory: Rc<Memory>,
    address: Address,
    bytes: usize,
}

/// What the driver gave. Given back when nobody has a part of it any more.
struct Memory {
    device: Rc<Device>,
    start: Address,
}

impl Buffer {
    /// Zeroed memory. Errors with what it is for.
    pub fn zeroed(device: &Rc<Device>, bytes: usize, what: &str) -> Result<Self> {
        Self::filled(device, bytes, 0, what)
    }

    /// Memory of bytes `value`. Errors with what it is for.
    pub fn filled(device: &Rc<Device>, bytes: usize, value: u8, what: &str) -> Result<Self> {
        let mut address = 0;
        let size = bytes.max(16);
        // SAFETY: the out-pointer is valid and the context is current.
        let code = unsafe { (device.api.allocate)(&raw mut address, size) };
        if is_out_of_memory(code) {
            let (free, _) = device.memory()?;
            let hint = format!(
                "{} MiB of the GPU are free; lower --memory-ratio, --chunk or --max-running, or use a larger --tp",
                free >> 20
            );
            return Err(BackendError::OutOfMemory { what: what.into(), bytes, hint });
        }
        device.check(code, "allocating memory")?;
        let memory = Rc::new(Memory { device: Rc::clone(device), start: address });
        // SAFETY: the range was just allocated.
        let code = unsafe { (device.api.fill_bytes)(address, value, size, device.stream) };
        device.check(code, "clearing memory")?;
        Ok(Self { memory, address, bytes })
    }

    /// Zeroed memory in `count` parts of `bytes` bytes, one after another. Errors with what it is for.
    pub fn parts(device: &Rc<Device>, bytes: usize, count: usize, what: &str) -> Result<Vec<Self>> {
        let Self { memory, address, .. } = Self::zeroed(device, count * bytes, what)?;
        let part = |index: usize| Self {
            memory: Rc::clone(&memory),
            address: address + (index * bytes) as u64,
            bytes,
        };
        Ok((0..count).map(part).collect())
    }

    /// Parts that lie one after another, as one. Panics when they do not, or when there are none.
    pub fn join(parts: Vec<Self>) -> Self {
        let mut parts = parts.into_iter();
        let mut joined = parts.next().expect("invariant: there is a part");
        for part in parts {
            let end = joined.address + joined.bytes as u64;
            assert!(
                Rc::ptr_eq(&part.memory, &joined.memory) && part.address == end,
                "parts of one memory, in order"
            );
            joined.bytes += part.bytes;
        }
        joined
    }

    /// Queues filling it with `byte`.
    pub fn fill(&self, byte: u8) -> Result<()> {
        let device = &self.memory.device;
        // SAFETY: the range is allocated.
        let code = unsafe { (device.api.fill_bytes)(self.address, byte, self.bytes, device.stream) };
        device.check(code, "filling memory")
    }

    /// Where it starts; aligned to 256 bytes unless it is a part.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.device.may_free() {
            // SAFETY: allocated by `Buffer::filled` and freed once; the driver waits for what still uses it. An
            // error here has been or will be reported by whatever uses the device.
            unsafe { (self.device.api.free)(self.start) };
        }
    }
}

/// Takes host memory that the device reads and writes at the same address, aligned to a page and never null. Errors when
/// the system has none.
pub(super) fn allocate_pinned(device: &Device, bytes: usize) -> Result<*mut u8> {
    let mut start: *mut c_void = std::ptr::null_mut();
    // SAFETY: the out-pointer is valid and the context is current.
    let code = unsafe { (device.api.allocate_host)(&raw mut start, bytes, 0) };
    if is_out_of_memory(code) {
        let hint = "raise the limit of locked memory or free host memory".into();
        return Err(BackendError::OutOfMemory { what: "pinned host memory".into(), bytes, hint });
    }
    device.check(code, "allocating pinned memory")?;
    assert!(!start.is_null(), "the driver gave no memory and no error");
    Ok(start.cast())
}

/// Pinned host memory.
pub(super) struct Pinned {
    device: Rc<Device>,
    start: *mut u8,
    bytes: usize,
}

impl Pinned {
    /// Errors when the system has none.
    pub fn new(device: &Rc<Device>, bytes: usize) -> Result<Self> {
        Ok(Self { device: Rc::clone(device), start: allocate_pinned(device, bytes)?, bytes })
    }

    /// Makes it at least `bytes` large, with other content. Waits for the device if it was smaller.
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        if self.bytes < bytes {
            self.device.wait()?;
            *self = Self::new(&self.device, bytes.next_power_of_two())?;
        }
        Ok(())
    }

    /// Queues a copy of `bytes` bytes from the device. Panics when they do not fit.
    ///
    /// # Safety
    /// `from` is valid for `bytes` bytes of device memory, and nobody looks at this memory until the copy has run.
    pub unsafe fn copy_from(&mut self, from: Address, bytes: usize) -> Result<()> {
        assert!(bytes <= self.bytes, "{bytes} bytes into pinned memory of {}", self.bytes);
        let device = &self.device;
        // SAFETY: both ranges are valid by the assertion and the caller's promise.
        let code = unsafe { (device.api.copy_out)(self.start.cast(), from, bytes, device.stream) };
        device.check(code, "copying from the device")
    }

    /// Its first `bytes` bytes; what a copy that has not run will write there is undefined. Panics beyond the end.
    pub fn bytes(&self, bytes: usize) -> &[u8] {
        assert!(bytes <= self.bytes, "{bytes} bytes of pinned memory of {}", self.bytes);
        // SAFETY: allocated by `new`, and inside by the assertion; callers wait for copies before.
        unsafe { std::slice::from_raw_parts(self.start, bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.may_free() {
            // SAFETY: allocated by `new` and freed once.
            unsafe { (self.device.api.free_host)(self.start.cast()) };
        }
    }
}

/// The way into device memory, and out.
pub(super) struct Staging {
    device: Rc<Device>,
    ring: Pinned,
    /// Bytes of the ring that the device may not have read yet.
    used: usize,
    out: Pinned,
}

impl Staging {
    /// With its pinned memory.
    pub fn new(device: &Rc<Device>) -> Result<Self> {
        Ok(Self {
            device: Rc::clone(device),
            ring: Pinned::new(device, STAGING_BYTES)?,
            used: 0,
            out: Pinned::new(device, 1 << 20)?,
        })
    }

    /// Queues a copy of `data` to `to`; `data` may change as soon as this returns. Waits for the device
    /// when the ring is full.
    ///
    /// # Safety
    /// `to` is valid for `data.len()` bytes of device memory.
    pub unsafe fn copy_in(&mut self, to: Address, data: &[u8]) -> Result<()> {
        if self.device.is_recording() {
            return Err(BackendError::Device {
                operation: "recording a step".into(),
                problem: "its numbers were not on the device".into(),
            });
        }
        let mut done = 0;
        while done < data.len() {
            if self.used == self.ring.bytes {
                self.device.wait()?;
                self.used = 0;
            }
            let part = (data.len() - done).min(self.ring.bytes - self.used);
            // SAFETY: `used + part` is inside the ring and nobody reads that part; the device range is
            // valid by the caller's promise.
            let code = unsafe {
                let pinned = self.ring.start.add(self.used);
                std::ptr::copy_nonoverlapping(data[done..].as_ptr(), pinned, part);
                let device = &self.device;
                (device.api.copy_in)(to + done as u64, pinned.cast(), part, device.stream)
            };
            self.device.check(code, "copying to the device")?;
            // The next copy starts on its own cache line.
            self.used = (self.used + part).next_multiple_of(64).min(self.ring.bytes);
            done += part;
        }
        Ok(())
    }

    /// Waits for everything queued and gives `bytes` bytes from `from`; valid until the next call.
    ///
    /// # Safety
    /// `from` is valid for `bytes` bytes of device memory.
    pub unsafe fn copy_out(&mut self, from: Address, bytes: usize) -> Result<&[u8]> {
        self.out.reserve(bytes)?;
        // SAFETY: the device range is valid by the caller's promise; nobody looks before the wait.
        unsafe { self.out.copy_from(from, bytes)? };
        self.device.wait()?;
        self.used = 0;
        Ok(self.out.bytes(bytes))
    }
}

/// Numbers that a step brings, kept on the device and copied only when they change: the layers of a
/// model ask for the same ones.
pub(super) struct List<T> {
    host: Vec<T>,
    buffer: Option<Buffer>,
    /// Recordings may name its address.
    is_recorded: bool,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self { host: Vec::new(), buffer: None, is_recorded: true }
    }
}

impl<T> List<T> {
    /// Of numbers that only launches outside recordings read, so that recordings outlive its growth.
    pub fn unrecorded() -> Self {
        Self { is_recorded: false, ..Self::default() }
    }
}

impl<T: Pod + PartialEq> List<T> {
    /// Makes the device's copy equal to `values`; gives where it is.
    pub fn set(&mut self, device: &Rc<Device>, staging: &mut Staging, values: &[T]) -> Result<Address> {
        let buffer = match &mut self.buffer {
            Some(buffer) if buffer.bytes() >= size_of_val(values) => {
                if self.host == values {
                    return Ok(buffer.address());
                }
                buffer
            }
            buffer => {
                if self.is_recorded {
                    device.note_move();
                }
                let room = values.len().next_power_of_two().max(LIST_MIN) * size_of::<T>();
                buffer.insert(Buffer::zeroed(device, room, "the numbers of a step")?)
            }
        };
        self.host.clear();
        self.host.extend_from_slice(values);
        // SAFETY: the buffer holds `values`. Kernels that read the old ones come before on the stream.
        unsafe { staging.copy_in(buffer.address(), bytemuck::cast_slice(values))? };
        Ok(buffer.address())
    }
}
