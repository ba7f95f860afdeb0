//! Which hosts a server runs on.

use anyhow::{Context, Result, bail};
use clap::Args;
use lockstep_comm::{gloo, secret::Key};
use lockstep_core::{HostMap, Topology, files};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

/// The variable that holds the secret when no file does.
const SECRET_VARIABLE: &str = "LOCKSTEP_DIST_SECRET";
/// Largest file that is taken for a secret.
const SECRET_FILE_BYTES_MAX: u64 = 64 << 10;

/// Flags of `lockstep serve` about other hosts.
#[derive(Args, Debug)]
pub struct HostFlags {
    /// Hosts that the ranks are spread over, equally many on each; `lockstep serve` is started on every one of them
    /// with the same flags.
    #[arg(long, value_name = "HOSTS", default_value_t = 1, allow_negative_numbers = true)]
    pub nnodes: i64,

    /// Which of the hosts this is, from 0; host 0 has the API.
    #[arg(long, value_name = "NUMBER", default_value_t = 0, allow_negative_numbers = true)]
    pub node_rank: i64,

    /// Where host 0 waits for the others: its name or address, and a port of its own.
    #[arg(long, value_name = "HOST:PORT")]
    pub dist_init_addr: Option<String>,

    /// A file with what only the hosts of this server know, at least 16 characters [default: $LOCKSTEP_DIST_SECRET].
    #[arg(long, value_name = "FILE")]
    pub dist_secret_file: Option<PathBuf>,

    /// The address of this host that the others reach it at [default: the one that --dist-init-addr names on host 0;
    /// the one it reaches host 0 from elsewhere].
    #[arg(long, value_name = "ADDRESS")]
    pub dist_address: Option<IpAddr>,

    /// Seconds to wait for the other hosts.
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    pub dist_timeout: f64,
}

/// One of several hosts.
#[derive(Clone, Debug)]
pub struct SeveralHosts {
    /// Hosts and ranks.
    pub map: HostMap,
    /// Which host this is.
    pub node_rank: usize,
    /// `--dist-init-addr`.
    pub target: String,
    /// `--dist-address`.
    pub address: Option<IpAddr>,
    /// Stands for the secret.
    pub key: Key,
    /// `--dist-timeout`.
    pub patience: Duration,
}

impl HostFlags {
    /// The ranks of `topology` on the hosts. Errors with a sentence when that is not possible.
    pub fn map(&self, topology: &Topology) -> Result<HostMap> {
        let nnodes = usize::try_from(self.nnodes).unwrap_or(0);
        HostMap::new(topology, nnodes).map_err(anyhow::Error::msg)
    }

    /// Which hosts, with `topology` on them; `None` for one host.
    pub fn resolve(&self, topology: &Topology) -> Result<Option<SeveralHosts>> {
        let map = self.map(topology)?;
        let nnodes = map.nnodes();
        if nnodes == 1 {
            return self.check_single().map(|()| None);
        }
        if !gloo::IS_BUILT {
            bail!(
                "--nnodes {nnodes} needs Gloo, which this lockstep was built without; build it with `cargo build \
                 --release --features gloo` (Debian: apt install libgloo-dev libsodium-dev)"
            );
        }
        let Some(node_rank) = usize::try_from(self.node_rank).ok().filter(|rank| *rank < nnodes) else {
            bail!("--node-rank {} is outside 0..={} of --nnodes {nnodes}", self.node_rank, nnodes - 1);
        };
        let Some(target) = self.dist_init_addr.clone() else {
            bail!("--nnodes {nnodes} needs --dist-init-addr HOST:PORT, where host 0 waits for the others");
        };
        if !target
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        {
            bail!("--dist-init-addr {target} is not HOST:PORT");
        }
        if !(1.0..=86_400.0).contains(&self.dist_timeout) {
            bail!("--dist-timeout {} is outside 1..=86400 seconds", self.dist_timeout);
        }
        let patience = Duration::from_secs_f64(self.dist_timeout);
        let key = self.key(nnodes)?;
        Ok(Some(SeveralHosts { map, node_rank, target, address: self.dist_address, key, patience }))
    }

    /// Flags that mean nothing on one host.
    fn check_single(&self) -> Result<()> {
        let given = [
            ("--node-rank", self.node_rank != 0),
            ("--dist-init-addr", self.dist_init_addr.is_some()),
            ("--dist-secret-file", self.dist_secret_file.is_some()),
            ("--dist-address", self.dist_address.is_some()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => bail!("{flag} is about several hosts; give --nnodes as well"),
            None => Ok(()),
        }
    }

    fn key(&self, nnodes: usize) -> Result<Key> {
        let (secret, origin) = match &self.dist_secret_file {
            Some(file) => {
                let secret = files::read_text(file, SECRET_FILE_BYTES_MAX).context("--dist-secret-file")?;
                (secret, format!("--dist-secret-file {}", file.display()))
            }
            None => match std::env::var(SECRET_VARIABLE) {
                Ok(secret) => (secret, SECRET_VARIABLE.to_owned()),
                Err(_) => bail!(
                    "--nnodes {nnodes} needs a secret that only its hosts know: give --dist-secret-file FILE or \
                     {SECRET_VARIABLE} (`openssl rand -hex 32` makes one)"
                ),
            },
        };
        Key::of_secret(&secret).map_err(|why| anyhow::anyhow!("{origin}: {why}"))
    }
}

impl SeveralHosts {
    /// Whether the API is here.
    pub fn is_head(&self) -> bool {
        self.node_rank == 0
    }

    /// On host 0: where to listen for the others.
    pub fn listen_address(&self) -> Result<SocketAddr> {
        let found = self.target.to_socket_addrs();
        let mut found =
            found.with_context(|| format!("--dist-init-addr {} cannot be looked up", self.target))?;
        let named = found.next().with_context(|| format!("{} has no address", self.target))?;
        Ok(SocketAddr::new(self.address.unwrap_or(named.ip()), named.port()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> HostFlags {
        HostFlags {
            nnodes: 1,
            node_rank: 0,
            dist_init_addr: None,
            dist_secret_file: None,
            dist_address: None,
            dist_timeout: 300.0,
        }
    }

    #[test]
    fn one_host_needs_nothing_and_takes_nothing() {
        let topology = Topology::tensor_parallel(2);
        assert!(flags().resolve(&topology).unwrap().is_none());
        let refused = HostFlags { dist_init_addr: Some("a:1".into()), ..flags() };
        let refused = refused.resolve(&topology).unwrap_err().to_string();
        assert!(refused.contains("--dist-init-addr") && refused.contains("--nnodes"), "{refused}");
    }

    #[test]
    fn what_several_hosts_need_is_asked_for_in_one_sentence() {
        let topology = Topology::tensor_parallel(2);
        let two = || HostFlags { nnodes: 2, dist_init_addr: Some("127.0.0.1:7000".into()), ..flags() };
        let refusal = |flags: HostFlags| {
            let text = flags.resolve(&topology).unwrap_err().to_string();
            assert!(!text.contains('\n'), "{text}");
            text
        };
        assert!(refusal(HostFlags { nnodes: 3, ..two() }).contains("use 1, 2"));
        if !gloo::IS_BUILT {
            assert!(refusal(two()).contains("--features gloo"));
            return;
        }
        assert!(refusal(HostFlags { node_rank: 2, ..two() }).contains("0..=1"));
        assert!(refusal(HostFlags { dist_init_addr: None, ..two() }).contains("--dist-init-addr"));
        assert!(refusal(HostFlags { dist_init_addr: Some("host".into()), ..two() }).contains("HOST:PORT"));
        let no_file = HostFlags { dist_secret_file: Some("/nonexistent".into()), ..two() };
        let refused = format!("{:#}", no_file.resolve(&topology).unwrap_err());
        assert!(refused.contains("--dist-secret-file") && refused.contains("/nonexistent"), "{refused}");
    }
}
