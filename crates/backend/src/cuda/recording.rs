//! Recorded steps: what a decode step queues, kept as a CUDA graph and queued again by one call.
//!
//! A step of some hundred launches costs the host more than a small batch costs the device; a recording
//! costs one launch. It names fixed addresses and grids: those of weights, activations and the lists of a
//! step, whose content changes from step to step ([`Backend::stage`](crate::Backend::stage)). **Invariant:** a
//! recording is replayed only while everything it names is where it was ([`Device::moves`]).

use super::device::Device;
use super::driver::Handle;
use crate::{BackendError, Result};
use std::ffi::c_uint;
use std::rc::Rc;

/// Calls that would break the recording fail on this thread, and only there.
const CAPTURE_THREAD_LOCAL: c_uint = 1;

/// Numbers of rows that are recorded. Steps in between are padded: each number costs memory and start-up
/// time, each padded row its share of the step.
const ROWS_FINE: [usize; 9] = [1, 2, 3, 4, 6, 8, 12, 16, 24];
/// Above those, multiples of these up to the number beside.
const ROWS_COARSE: [(usize, usize); 3] = [(8, 64), (16, 256), (64, 4096)];

/// The rows of the recording that a step of `rows` rows takes; `None` beyond the largest.
pub(super) fn recorded_rows(rows: usize) -> Option<usize> {
    if rows == 0 {
        return None;
    }
    let fine = ROWS_FINE.iter().copied().find(|n| *n >= rows);
    fine.or_else(|| {
        ROWS_COARSE.iter().find(|(_, end)| *end >= rows).map(|(step, _)| rows.next_multiple_of(*step))
    })
}

/// A step as the device repeats it.
pub struct CudaRecording {
    device: Rc<Device>,
    executable: Handle,
    /// [`Device::moves`] when it was made.
    moves: u64,
}

impl CudaRecording {
    /// Records what `queue` queues, without running it. What it uses must have been used before: nothing
    /// may be allocated or compiled meanwhile.
    pub(super) fn of<E: From<BackendError>>(
        device: &Rc<Device>,
        queue: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        device.report()?;
        let api = &device.api;
        // SAFETY: the stream lives as long as the process.
        let begun = unsafe { (api.capture_begin)(device.stream, CAPTURE_THREAD_LOCAL) };
        device.check(begun, "recording a step")?;
        device.set_recording(true);
        let queued = queue();
        device.set_recording(false);
        let mut graph = std::ptr::null_mut();
        // SAFETY: the out-pointer is valid; ends what was begun above.
        let ended = unsafe { (api.capture_end)(device.stream, &raw mut graph) };
        // What made the queueing fail says more than the end of a broken recording.
        let failed = device.report();
        queued?;
        failed?;
        device.check(ended, "ending the recording of a step")?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was just made and is destroyed once; the out-pointer is valid.
        let code = unsafe {
            let code = (api.graph_instantiate)(&raw mut executable, graph, 0);
            (api.graph_destroy)(graph);
            code
        };
        device.check(code, "preparing the recording of a step")?;
        Ok(Self { device: Rc::clone(device), executable, moves: device.moves() })
    }

    /// Whether everything it names is where it was.
    pub(super) fn is_usable(&self) -> bool {
        self.moves == self.device.moves()
    }

    /// Queues the recorded step. The caller keeps alive what it names.
    pub(super) fn replay(&self) -> Result<()> {
        self.device.report()?;
        // SAFETY: made by `of`; what it names is where it was, which the caller has checked.
        let code = unsafe { (self.device.api.graph_launch)(self.executable, self.device.stream) };
        self.device.check(code, "queueing a recorded step")
    }
}

impl Drop for CudaRecording {
    fn drop(&mut self) {
        if self.device.may_free() {
            // SAFETY: made by `of` and destroyed once; the driver waits for what still runs.
            unsafe { (self.device.api.graph_executable_destroy)(self.executable) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_holds_the_rows_and_wastes_few() {
        assert_eq!(recorded_rows(0), None);
        assert_eq!(recorded_rows(4097), None);
        let mut distinct = std::collections::BTreeSet::new();
        for rows in 1..=4096 {
            let recorded = recorded_rows(rows).unwrap();
            assert!(recorded >= rows && recorded_rows(recorded) == Some(recorded), "{rows}: {recorded}");
            assert!(recorded - rows <= (rows / 2).min(63), "{rows}: {recorded}");
            distinct.insert(recorded);
        }
        assert!(distinct.range(..=256).count() <= 32, "{distinct:?}");
    }
}
