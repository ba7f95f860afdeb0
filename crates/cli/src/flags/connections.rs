//! How clients connect, and how long they may keep the server waiting.

use anyhow::{Context, Result, bail};
use clap::Args;
use lockstep_api::{CONNECTIONS_MAX, Cors, Patience, TURNED_AWAY_MAX, Tls};
use std::path::PathBuf;
use std::time::Duration;

/// Descriptors that the API process needs of its own: logs, signals, the listener, event loops (20 counted).
const DESCRIPTORS_OWN: usize = 32;
/// And for every child: its pipes and descriptor, links to it (8 counted).
const DESCRIPTORS_PER_CHILD: usize = 12;
/// Longest time-out in seconds.
const SECONDS_MAX: f64 = 86_400.0;

/// Connection flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct ConnectionFlags {
    /// Certificate in PEM form, with those it was signed with behind it: the server then speaks HTTPS only.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of `--tls-cert` in PEM form, not encrypted.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Origin whose web pages may use the server, e.g. `https://chat.example.org`; may be given several times. `*`
    /// means all, `none` means none [default: *].
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,

    /// Connections at once; more are answered 503 [default: 8192, or what the limit of open files allows].
    #[arg(long)]
    pub max_connections: Option<usize>,

    /// Seconds for a TLS handshake, and from the first byte of a request to the end of its head.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub head_timeout: f64,

    /// Seconds for a request's body, plus one for every 16 KiB that came.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub body_timeout: f64,

    /// Seconds that a connection may be open without a request.
    #[arg(long, value_name = "SECONDS", default_value_t = 75.0)]
    pub keep_alive_timeout: f64,

    /// Seconds for which a client may take no byte of its answer; then its request is aborted.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    pub write_timeout: f64,
}

/// What the flags come to.
#[derive(Clone, Debug)]
pub struct Connections {
    /// `--tls-cert` and `--tls-key`, read.
    pub tls: Option<Tls>,
    /// `--cors-origin`.
    pub cors: Cors,
    /// `--max-connections`.
    pub connections_max: usize,
    /// The time-outs.
    pub patience: Patience,
}

impl ConnectionFlags {
    /// Checks the flags and reads the files. `descriptors` is the process's limit of open files (`None`: unlimited),
    /// `children` how many processes it will start.
    pub fn resolve(&self, descriptors: Option<u64>, children: usize) -> Result<Connections> {
        let tls = match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => Some(Tls::from_files(cert, key)?),
            _ => None,
        };
        Ok(Connections {
            tls,
            cors: self.cors()?,
            connections_max: self.connections_max(descriptors, children)?,
            patience: Patience {
                head: seconds("--head-timeout", self.head_timeout)?,
                body: seconds("--body-timeout", self.body_timeout)?,
                idle: seconds("--keep-alive-timeout", self.keep_alive_timeout)?,
                write: seconds("--write-timeout", self.write_timeout)?,
            },
        })
    }

    fn connections_max(&self, descriptors: Option<u64>, children: usize) -> Result<usize> {
        let spare = DESCRIPTORS_OWN + DESCRIPTORS_PER_CHILD * children + TURNED_AWAY_MAX;
        let descriptors =
            descriptors.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        let possible = descriptors.saturating_sub(spare);
        let raise = "raise the hard limit (ulimit -Hn, LimitNOFILE=)";
        match self.max_connections {
            Some(0) => bail!("--max-connections 0 lets nobody in; give at least 1"),
            Some(wanted) if wanted > possible => bail!(
                "--max-connections {wanted} needs {} file descriptors, and this process may open {descriptors}; \
                 {raise} or give at most {possible}",
                wanted.saturating_add(spare)
            ),
            Some(wanted) => Ok(wanted),
            None if possible == 0 => {
                bail!("this process may open {descriptors} files, at least {} are needed; {raise}", spare + 1)
            }
            None if possible < CONNECTIONS_MAX => {
                tracing::warn!(
                    "this process may open {descriptors} files: {possible} connections are served at once instead \
                     of {CONNECTIONS_MAX}; {raise}"
                );
                Ok(possible)
            }
            None => Ok(CONNECTIONS_MAX),
        }
    }

    fn cors(&self) -> Result<Cors> {
        match self.cors_origin.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            [] | ["*"] => Ok(Cors::Any),
            ["none"] => Ok(Cors::Nobody),
            _ => Ok(Cors::Only(self.cors_origin.iter().map(|text| origin(text)).collect::<Result<_>>()?)),
        }
    }
}

/// An origin as browsers write it: scheme and host, no path.
fn origin(text: &str) -> Result<lockstep_api::Origin> {
    let host = text.split_once("://").filter(|(scheme, _)| !scheme.is_empty()).map(|(_, host)| host);
    let is_origin = host.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*', ',', ' ']));
    if !is_origin {
        bail!(
            "--cors-origin {text} is not an origin; write scheme://host[:port] without a path, or * or none alone"
        );
    }
    text.parse().with_context(|| format!("--cors-origin {text} has characters that no header may have"))
}

fn seconds(flag: &str, value: f64) -> Result<Duration> {
    if !(0.1..=SECONDS_MAX).contains(&value) {
        bail!("{flag} {value} is outside 0.1..={SECONDS_MAX} seconds");
    }
    Ok(Duration::from_secs_f64(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Only {
        #[command(flatten)]
        flags: ConnectionFlags,
    }

    /// Two ranks, a tokenizer and a detokenizer.
    const CHILDREN: usize = 4;

    fn resolve(args: &[&str], descriptors: Option<u64>) -> Result<Connections> {
        let args = std::iter::once("lockstep").chain(args.iter().copied());
        Only::try_parse_from(args)?.flags.resolve(descriptors, CHILDREN)
    }

    #[test]
    fn connections_fit_into_the_limit_of_open_files() {
        let max = |args: &[&str], limit| resolve(args, limit).map(|c| c.connections_max);
        assert_eq!(max(&[], None).unwrap(), CONNECTIONS_MAX);
        assert_eq!(max(&[], Some(1144)).unwrap(), 1000);
        assert_eq!(max(&["--max-connections", "1000"], Some(1144)).unwrap(), 1000);
        let refused = max(&["--max-connections", "1001"], Some(1144)).unwrap_err().to_string();
        assert!(refused.contains("needs 1145") && refused.contains("give at most 1000"), "{refused}");
        assert_eq!(max(&[], Some(256)).unwrap(), 112);
        assert!(max(&[], Some(144)).is_err());
        assert!(max(&["--max-connections", "0"], None).is_err());
    }

    #[test]
    fn origins_are_origins() {
        let cors = |args: &[&str]| resolve(args, None).map(|c| c.cors);
        assert_eq!(cors(&[]).unwrap(), Cors::Any);
        assert_eq!(cors(&["--cors-origin", "none"]).unwrap(), Cors::Nobody);
        let two = cors(&["--cors-origin", "https://a.example", "--cors-origin", "http://b:8080"]).unwrap();
        assert_eq!(
            two,
            Cors::Only(vec!["https://a.example".parse().unwrap(), "http://b:8080".parse().unwrap()])
        );
        for wrong in ["a.example", "https://a.example/", "https://", "://a", "https://*.example"] {
            assert!(cors(&["--cors-origin", wrong]).is_err(), "{wrong}");
        }
        assert!(cors(&["--cors-origin", "*", "--cors-origin", "https://a.example"]).is_err());
    }

    #[test]
    fn time_outs_have_bounds_and_tls_needs_both_files() {
        for wrong in ["0", "-1", "NaN", "1e9"] {
            assert!(resolve(&[&format!("--head-timeout={wrong}")], None).is_err(), "{wrong}");
        }
        assert!(resolve(&["--tls-cert", "x.pem"], None).is_err());
    }
}
