//! Flags of `lockstep chat`.

use super::client::{Param, TargetFlags, param};
use clap::Args;

/// With whom to talk, and how.
#[derive(Args, Debug)]
pub struct ChatFlags {
    /// The server and its model.
    #[command(flatten)]
    pub target: TargetFlags,

    /// System message.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// Field of every request, such as temperature=0.7 or max_tokens=200; may be given several times.
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = param)]
    pub params: Vec<Param>,

    /// Neither read nor write the file of earlier inputs.
    #[arg(long)]
    pub no_history: bool,
}
