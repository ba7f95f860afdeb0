//! Child processes: which there are, how they start, how they are watched and how they end,
//! independent of what they compute.
//!
//! **Invariants**
//! - No process outlives the launcher: every child gets a death signal from the kernel and watches a
//!   pipe that only the launcher holds open.
//! - The launcher never waits for a child without watching it: one thread polls the process
//!   descriptors, log pipes and signals, and does nothing else that can take long.
//! - A process is only ever signalled through its descriptor (pidfd), never by number, so a reused
//!   process id cannot be hit.
//! - The first cause is what the user reads: ranks that stop because their group was aborted say so
//!   with [`GROUP_ABORTED_EXIT`] and never hide the process that started it.
//!
//! The launcher (the process the user starts, also the api server) uses [`Supervisor`]; every child
//! calls [`child::enter`] first thing in `main`. Reading order: [`layout`], [`child`],
//! [`Supervisor`], [`status`], [`ready`], [`watchdog`]; for several hosts
//! [`hosts`]. Follows vLLM's death pipe and monitor
//! (`multiproc_executor.py`) and TGI's launcher; differs: pidfds instead of polling by id, the child
//! is the same binary, and the verdict waits a moment for the first cause.

mod cause;
pub mod child;
mod error;
pub mod fuzzing;
pub mod hosts;
pub mod init;
mod kernel;
pub mod layout;
mod limits;
mod lines;
pub mod ready;
mod signals;
mod spawn;
pub mod status;
mod stderr;
mod supervisor;
pub mod watchdog;
mod watcher;

pub use child::ChildEntry;
pub use error::LaunchError;
pub use layout::{Endpoints, Layout, Process};
pub use limits::{FdLimit, raise_fd_limit};
pub use ready::{Acknowledged, ReadyTracker};
pub use spawn::ChildSpec;
pub use status::{ChildStatus, Event, Failure, GROUP_ABORTED_EXIT, ORPHANED_EXIT, Phase};
pub use stderr::{LineForm, StderrSink};
pub use supervisor::{Events, Reporter, ShutdownReport, Supervisor};
pub use watchdog::{Concern, Concerns, Limits, Stage, Watchdog, WatchedLoop};
