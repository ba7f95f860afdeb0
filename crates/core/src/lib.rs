//! Vocabulary shared by every Lockstep crate: ids, parallel layout, model description, sampling
//! parameters, refusals, limits and exit codes.
//!
//! **Invariant:** nothing here reads a clock, starts a thread or does I/O, except that [`files`] opens what it is told to
//! and [`folders`] reads the environment. Every
//! other crate may use this one; this one uses none of them.
//!
//! Reading order: [`ids`], [`parallel`], [`hosts`], [`config`], [`shard`], [`stages`], [`weight_type`], [`sampling`], [`refusal`],
//! [`exit`], [`limits`], [`files`], [`folders`], [`random`].

pub mod config;
pub mod dtype;
pub mod exit;
pub mod files;
pub mod folders;
pub mod hosts;
pub mod ids;
pub mod limits;
pub mod parallel;
pub mod random;
pub mod refusal;
pub mod sampling;
pub mod shard;
pub mod stages;
pub mod weight_type;

pub use config::{
    Activation, ConfigError, Family, ModelConfig, MoeConfig, QuantizationConfig, RopeConfig, RopeFrequencies,
    RopeScaling,
};
pub use dtype::DType;
pub use exit::ExitCode;
pub use files::FileError;
pub use hosts::HostMap;
pub use ids::{NO_TOKEN, PageId, RequestId, StepId, TokenId};
pub use parallel::{ParallelInfo, Topology};
pub use refusal::Refusal;
pub use sampling::{FinishReason, Grammar, JSON_WHITE_SPACE, SamplingParams};
pub use stages::StageLayers;
pub use weight_type::{CODE_GROUP, CodeLayout, QuantizeFormat, StoredType, WeightMode, WeightType};
