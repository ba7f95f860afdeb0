//! Which tokens of which requests the next step computes, and where their KV lies.
//!
//! [`Scheduler`] is a pure state machine: no clock, no I/O, no thread, no hash-map order. Every rank
//! of a replica owns one, feeds it the same calls in the same order and gets the same plans; nobody
//! tells another rank what was decided, they only compare [`StepDigest`]s.
//!
//! Called by the engine's rank loop (`crates/engine`) and by the simulator (`crates/sim`), on every
//! rank: `submit`/`abort` for messages, then `plan_into`, launch, `complete`, `take_events`.
//!
//! Reading order: [`config`], [`request`], [`plan`], [`event`], then `scheduler`.
//! The policies and their bounds are explained in `docs/scheduling.md`.

pub mod config;
pub mod digest;
pub mod event;
pub mod plan;
pub mod request;
mod scheduler;

pub use config::{CachePolicy, ConfigError, QueueOrder, SchedulerConfig, StepOrder};
pub use digest::StepDigest;
pub use event::{Counters, Event, Usage};
pub use plan::{PlanRow, RowInput, StepPlan};
pub use request::Request;
pub use scheduler::Scheduler;
