//! Where the server listens and how it ends.

use anyhow::{Result, bail};
use clap::Args;
use std::net::IpAddr;

/// Server flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct ServerFlags {
    /// Address to listen on; 0.0.0.0 opens the server to the network.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,

    /// Port to listen on; 0 picks a free one and logs it.
    #[arg(long, default_value_t = 1919)]
    pub port: u16,

    /// Seconds that running requests get to finish after SIGINT or SIGTERM.
    #[arg(long, default_value_t = 5.0)]
    pub grace_seconds: f64,

    /// Answer 400 to request fields that are not known instead of ignoring them.
    #[arg(long)]
    pub strict_api: bool,
}

impl ServerFlags {
    /// The address, resolved without DNS except for `localhost`.
    pub fn address(&self) -> Result<IpAddr> {
        if self.host == "localhost" {
            return Ok(IpAddr::from([127, 0, 0, 1]));
        }
        match self.host.parse() {
            Ok(address) => Ok(address),
            Err(_) => bail!("--host {} is not an IP address; use e.g. 127.0.0.1, 0.0.0.0 or ::", self.host),
        }
    }

    /// The grace is a sensible number of seconds.
    pub fn check_grace(&self) -> Result<()> {
        if !(0.0..=3600.0).contains(&self.grace_seconds) {
            bail!("--grace-seconds {} is outside 0..=3600", self.grace_seconds);
        }
        Ok(())
    }
}
