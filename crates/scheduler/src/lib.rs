//! Which tokens of which requests the next step computes, and where their KV lies.
//!
//! [`Scheduler`] is a pure state machine: no clock, no I/O, no thread, no hash-map order. Every rank
//! of a replica owns one, feeds it the same calls in the same order and gets the same plans; nobody
//! tells another rank what was decided, they only compare [`StepDigest`]s.
//!
//! Called by the engine's rank loop (`crates/engine`) and by the simulator (`crates/sim`), on every
//! rank: `submit`/`abort`/`advance` for messages, then `plan_into`, launch, `complete`, `take_events`.
//!
//! Reading order: [`config`], [`request`], [`plan`], [`event`] (what goes in and out), `entry` (a request's
//! life), `queue`, then [`scheduler`] with one file per act: `admit`, `step`, `retract`, `complete`, `check`.
//! Policies and their bounds are explained in `docs/scheduling.md`.

pub mod config;
pub mod digest;
mod entry;
pub mod event;
pub mod plan;
mod queue;
pub mod request;
pub mod scheduler;

pub use config::{CachePolicy, ConfigError, QueueOrder, SchedulerConfig, StepOrder};
pub use digest::StepDigest;
pub use event::{Counters, Event, Usage};
pub use plan::{History, PlanRow, RowInput, StepPlan};
pub use queue::OVERTAKEN_MAX;
pub use request::Request;
pub use scheduler::Scheduler;
