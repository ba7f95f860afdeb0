//! The device of one rank, and points in its stream.
//!
//! **Invariants:** a [`Device`] holds the device's primary context, current on the thread that made it,
//! and one stream on which everything is queued in call order. What fails after start-up is kept
//! ([`Device::keep`]) and reported by the next operation that can return an error.

use super::driver::{self, Address, Driver, Handle};
use super::peers::Report;
use super::survey::Gpu;
use crate::{BackendError, Result};
use lockstep_comm::{AbortHandle, CollectiveError};
use std::cell::{Cell, OnceCell, RefCell};
use std::ffi::{c_int, c_uint};
use std::rc::Rc;
use std::time::{Duration, Instant};

const NOT_READY: c_int = 600;
const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_WITHOUT_TIME: c_uint = 2;
const EVENT_WITH_TIME: c_uint = 0;
/// Oldest architecture that the kernels are compiled for (bf16 matrix instructions).
const CAPABILITY_MIN: (c_int, c_int) = (8, 0);
/// Oldest driver, by its CUDA version: the first with every function of [`Driver`].
const DRIVER_VERSION_MIN: (c_int, c_int) = (12, 0);

/// Other ranks, which may keep what is queued here from ending.
#[derive(Clone, Debug)]
pub struct OtherRanks {
    /// How long to wait for them.
    pub patience: Duration,
    /// This rank's number in its replica.
    pub rank: usize,
    /// Its host (`--node-rank`). Only ranks of one host write to each other's memory.
    pub host: usize,
    /// Ends waits as soon as the group is told to end.
    pub abort: Option<AbortHandle>,
}

/// One GPU, used by one rank from one thread.
pub(super) struct Device {
    pub api: Driver,
    pub stream: Handle,
    pub name: String,
    /// The primary context, current on the thread that made this.
    pub context: Handle,
    /// Index among the GPUs of this machine.
    pub index: usize,
    /// What the driver calls it.
    pub handle: c_int,
    pub sm_count: usize,
    /// Of the second-level cache.
    pub l2_bytes: usize,
    /// CUDA version of the driver, e.g. (13, 0).
    pub driver_version: (c_int, c_int),
    /// Compute capability, e.g. (9, 0).
    pub capability: (c_int, c_int),
    failure: RefCell<Option<BackendError>>,
    /// What bounds [`Device::wait`]; `None`: nothing.
    others: Option<OtherRanks>,
    /// Something queued never ends: nothing may wait for this device any more, nor free its memory.
    is_lost: Cell<bool>,
    /// What is queued now is recorded instead of run.
    is_recording: Cell<bool>,
    /// How often memory that recordings name has moved.
    moves: Cell<u64>,
    /// Where kernels that wait for other ranks say which one is missing.
    report: OnceCell<Report>,
    /// Another rank uses the same context.
    shares_context: Cell<bool>,
}

impl Device {
    /// Opens GPU `index`. Errors with one sentence on a machine without a driver, without that GPU, or
    /// with one that is too old.
    pub fn open(index: usize, others: Option<OtherRanks>) -> Result<Self> {
        let api = Driver::open()?;
        let version = api.version()?;
        if version < DRIVER_VERSION_MIN {
            return Err(BackendError::Unsupported(format!(
                "the NVIDIA driver is for CUDA {}.{}, but {}.{} or newer is needed; update the driver",
                version.0, version.1, DRIVER_VERSION_MIN.0, DRIVER_VERSION_MIN.1
            )));
        }
        let count = api.count()?;
        if index >= count {
            let problem = format!(
                "GPU {index} is wanted but this machine has {count}, numbered from 0; use a smaller --tp, other --gpu-ids, \
                 or --share-gpu to test several ranks on one"
            );
            return Err(BackendError::Unsupported(problem));
        }
        let device = api.device(index)?;
        let Gpu { name, capability, sm_count, l2_bytes, .. } = api.describe(index)?;
        if capability < CAPABILITY_MIN {
            return Err(BackendError::Unsupported(format!(
                "{name} has compute capability {}.{}, but 8.0 or newer is needed; use --device cpu",
                capability.0, capability.1
            )));
        }
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: out-pointers are valid; the context made by the first call is current from the second.
        unsafe {
            driver::check(&api, (api.context_retain)(&raw mut context, device), "making a context")?;
            driver::check(&api, (api.context_set)(context), "entering the context")?;
            driver::check(
                &api,
                (api.stream_create)(&raw mut stream, STREAM_NON_BLOCKING),
                "making a stream",
            )?;
        }
        Ok(Self {
            api,
            stream,
            name,
            context,
            index,
            handle: device,
            sm_count,
            l2_bytes,
            driver_version: version,
            capability,
            failure: RefCell::default(),
            others,
            is_lost: Cell::new(false),
            is_recording: Cell::new(false),
            moves: Cell::new(0),
            report: OnceCell::new(),
            shares_context: Cell::new(false),
        })
    }

    /// An error that says what was being done, unless `code` is success.
    pub fn check(&self, code: c_int, operation: &str) -> Result<()> {
        driver::check(&self.api, code, operation)
    }

    /// Keeps the first error of operations that cannot return one.
    pub fn keep(&self, result: Result<()>) {
        if let Err(error) = result {
            self.failure.borrow_mut().get_or_insert(error);
        }
    }

    /// The error kept, once.
    pub fn report(&self) -> Result<()> {
        self.failure.borrow_mut().take().map_or(Ok(()), Err)
    }

    /// Waits until everything queued has run; what failed meanwhile is an error here, and so is a wait
    /// beyond the patience, after which the device is lost to this process.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the stream lives as long as the process.
        self.wait_until(|| unsafe { (self.api.stream_query)(self.stream) })
    }

    /// [`Device::wait`] for what was queued before `event` was recorded.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: the event lives as long as its borrow.
        self.wait_until(|| unsafe { (self.api.event_query)(event.handle) })
    }

    /// Whether [`Device::wait_for`] would not wait.
    pub fn has_reached(&self, event: &Event) -> bool {
        // SAFETY: the event lives as long as its borrow.
        let code = unsafe { (self.api.event_query)(event.handle) };
        code != NOT_READY || self.report.get().and_then(Report::failure).is_some()
    }

    fn wait_until(&self, query: impl Fn() -> c_int) -> Result<()> {
        self.report()?;
        let started = Instant::now();
        loop {
            let code = query();
            if let Some(failure) = self.report.get().and_then(Report::failure) {
                // What is queued behind may wait for the missing rank by other means.
                self.is_lost.set(true);
                return Err(failure.into());
            }
            match code {
                NOT_READY => {}
                code => return self.check(code, "running queued operations"),
            }
            if let Some(aborted) = self.aborted() {
                self.is_lost.set(true);
                // Kernels of ours leave the GPU before this process does.
                self.report.get().and_then(Report::stop);
                return Err(aborted.into());
            }
            if self.patience().is_some_and(|patience| started.elapsed() > patience) {
                self.is_lost.set(true);
                if let Some(failure) = self.report.get().and_then(Report::stop) {
                    return Err(failure.into());
                }
                return Err(BackendError::Device {
                    operation: "waiting for the GPU".into(),
                    problem: format!(
                        "nothing ended in {:.0} s; another rank is stopped, dead or in another operation",
                        started.elapsed().as_secs_f64()
                    ),
                });
            }
            std::thread::yield_now();
        }
    }

    /// The error of a wait once the ranks of this host are told to end.
    fn aborted(&self) -> Option<CollectiveError> {
        let others = self.others.as_ref()?;
        others.abort.as_ref()?.error(others.rank, "the wait for its GPU")
    }

    /// How long to wait for other ranks; `None` for ever.
    pub fn patience(&self) -> Option<Duration> {
        self.others.as_ref().map(|others| others.patience)
    }

    /// The host of this rank (`--node-rank`).
    pub fn host(&self) -> usize {
        self.others.as_ref().map_or(0, |others| others.host)
    }

    /// From here on every wait looks at `report` too. Once.
    pub fn watch(&self, report: Report) {
        let is_first = self.report.set(report).is_ok();
        assert!(is_first, "a device joins one group of ranks");
    }

    /// Whether waits look at a report.
    pub fn is_watched(&self) -> bool {
        self.report.get().is_some()
    }

    /// Where kernels find the report that waits look at.
    pub fn report_address(&self) -> Option<Address> {
        self.report.get().map(Report::address)
    }

    /// Ranks of this group are threads that use one context: whatever waits for a context may wait for kernels that
    /// wait for another rank.
    pub fn share_context(&self) {
        self.shares_context.set(true);
    }

    /// Whether ranks of this group use one context; the same on all of them.
    pub fn shares_context(&self) -> bool {
        self.shares_context.get()
    }

    /// What an operation with other ranks came to. After a failure nothing here is waited for any more: what is queued may wait
    /// for them without a limit.
    pub fn with_others<T>(&self, result: std::result::Result<T, CollectiveError>) -> Result<T> {
        result.map_err(|error| {
            self.is_lost.set(true);
            error.into()
        })
    }

    /// Whether memory can be given back, which waits for everything in the context: not after ranks were lost or told to
    /// end, and not where the context is another rank's too.
    pub fn may_free(&self) -> bool {
        !self.is_lost.get() && !self.shares_context.get() && self.aborted().is_none()
    }

    /// Whether what is queued now is recorded instead of run.
    pub fn is_recording(&self) -> bool {
        self.is_recording.get()
    }

    /// From here on what is queued is recorded (or run again).
    pub fn set_recording(&self, recording: bool) {
        self.is_recording.set(recording);
    }

    /// Memory that a recording may name has moved: every recording is of no use any more.
    pub fn note_move(&self) {
        self.moves.set(self.moves.get() + 1);
    }

    /// How often [`Device::note_move`] was called.
    pub fn moves(&self) -> u64 {
        self.moves.get()
    }

    /// (Free, total) bytes of device memory.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both out-pointers are valid.
        let code = unsafe { (self.api.memory_info)(&raw mut free, &raw mut total) };
        self.check(code, "asking for free memory")?;
        Ok((free, total))
    }

    /// Whether a kernel may start its prologue before the one before it has ended.
    pub fn can_overlap_launches(&self) -> bool {
        self.capability >= (9, 0)
    }

    /// What NVRTC calls this GPU's architecture.
    pub fn architecture(&self) -> String {
        architecture(self.capability)
    }
}

/// The name of an architecture for NVRTC; `a` keeps to one generation, for its own instructions.
pub(super) fn architecture((major, minor): (c_int, c_int)) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

/// Shared memory of a multiprocessor of an architecture, in NVRTC's name; a block may have 1 KiB less.
pub(super) fn shared_bytes(architecture: &str) -> usize {
    let kib = match architecture.trim_end_matches('a') {
        "sm_90" | "sm_100" | "sm_103" => 228,
        "sm_80" | "sm_87" => 164,
        // The least that any other has.
        _ => 100,
    };
    kib << 10
}

/// A point in the stream.
pub(super) struct Event {
    device: Rc<Device>,
    handle: Handle,
}

impl Event {
    /// One that has not been recorded, which counts as reached.
    pub fn new(device: &Rc<Device>) -> Result<Self> {
        Self::with(device, EVENT_WITHOUT_TIME)
    }

    /// The same, for [`Self::us_since`].
    pub fn timed(device: &Rc<Device>) -> Result<Self> {
        Self::with(device, EVENT_WITH_TIME)
    }

    fn with(device: &Rc<Device>, flags: c_uint) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the out-pointer is valid and the context is current.
        let code = unsafe { (device.api.event_create)(&raw mut handle, flags) };
        device.check(code, "making an event")?;
        Ok(Self { device: Rc::clone(device), handle })
    }

    /// Moves the point behind everything queued so far.
    pub fn record(&self) -> Result<()> {
        // SAFETY: event and stream live as long as the borrow.
        let code = unsafe { (self.device.api.event_record)(self.handle, self.device.stream) };
        self.device.check(code, "recording an event")
    }

    /// Microseconds from `start`; both were made by [`Self::timed`] and have been reached.
    pub fn us_since(&self, start: &Self) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: the out-pointer is valid and both events live as long as their borrows.
        let code =
            unsafe { (self.device.api.event_elapsed)(&raw mut milliseconds, start.handle, self.handle) };
        self.device.check(code, "reading a time")?;
        Ok(milliseconds * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed once; the driver keeps what is still queued. An error here
        // has been or will be reported by whatever uses the device.
        unsafe { (self.device.api.event_destroy)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_the_compilers_names() {
        assert_eq!(architecture((8, 0)), "sm_80");
        assert_eq!(architecture((9, 0)), "sm_90a");
        assert_eq!(architecture((10, 0)), "sm_100a");
    }
}
