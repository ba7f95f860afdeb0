//! Fetching from the Hugging Face hub, or what speaks like it.
//!
//! **Invariant:** bytes already here are never fetched again, as long as the server honours ranges.
//! A hub that cannot be connected to is given up at once (another source may be reachable); one that
//! has answered before is tried again, continuing where the connection was cut.

use super::catalogue::{Hub, Model};
use super::error::{PullError, SourceError};
use super::partial::{CHUNK_BYTES, Partial};
use super::progress::Progress;
use std::io::Read;
use std::time::Duration;
use ureq::http::{HeaderMap, Response};
use ureq::{Agent, Body};

/// The public hub.
const ENDPOINT: &str = "https://huggingface.co";
/// Bytes that must arrive for an attempt not to count as futile.
const WORTHWHILE_BYTES: u64 = 1 << 20;

/// Where the hub is and how patient to be with it.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// Scheme and host, no slash at the end.
    pub endpoint: String,
    /// Futile attempts in a row before giving up.
    pub attempts: u32,
    /// Pause before the second attempt; doubles with every futile one.
    pub first_pause: Duration,
    /// Longest silence of a server.
    pub silence: Duration,
}

impl HubOptions {
    /// The public hub, or the mirror that `HF_ENDPOINT` names.
    pub fn from_environment() -> Self {
        let endpoint = std::env::var("HF_ENDPOINT").ok().filter(|e| !e.is_empty());
        Self {
            endpoint: endpoint.as_deref().unwrap_or(ENDPOINT).trim_end_matches('/').to_owned(),
            attempts: 5,
            first_pause: Duration::from_millis(500),
            silence: Duration::from_secs(30),
        }
    }

    fn agent(&self) -> Agent {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_resolve(Some(Duration::from_secs(5)))
            .timeout_connect(Some(Duration::from_secs(5)))
            .timeout_recv_response(Some(self.silence))
            .timeout_per_read(Some(self.silence))
            .user_agent(concat!("lockstep/", env!("CARGO_PKG_VERSION")));
        // A mirror on this machine is never behind a proxy.
        let local = ["http://127.0.0.1", "http://localhost", "http://[::1]"];
        let config = match local.iter().any(|prefix| self.endpoint.starts_with(prefix)) {
            true => config.proxy(None),
            false => config,
        };
        config.build().into()
    }
}

/// Why one attempt ended.
enum Attempt {
    /// The file is complete.
    Done,
    /// Nobody there.
    Unreachable(String),
    /// Worth another attempt.
    Cut(String),
}

/// Continues `partial` until it has all bytes of `model`. The content is checked by the caller.
pub fn fetch(
    options: &HubOptions,
    hub: &Hub,
    model: &Model,
    partial: &mut Partial,
    progress: &mut dyn Progress,
) -> Result<(), SourceError> {
    let Hub { repository, revision, file } = hub;
    let url = format!("{}/{repository}/resolve/{revision}/{file}", options.endpoint);
    let agent = options.agent();
    let (mut futile, mut answered) = (0, false);
    loop {
        let before = partial.len();
        let cause = match attempt(&agent, &url, model, partial, progress)? {
            Attempt::Done => return Ok(()),
            Attempt::Unreachable(cause) if !answered => {
                return Err(SourceError::Unavailable(format!(
                    "{} cannot be reached ({cause})",
                    options.endpoint
                )));
            }
            Attempt::Unreachable(cause) => cause,
            Attempt::Cut(cause) => {
                answered = true;
                cause
            }
        };
        futile = if partial.len() >= before + WORTHWHILE_BYTES { 1 } else { futile + 1 };
        if futile >= options.attempts {
            let (at, all) = (partial.len(), model.size_bytes);
            return Err(SourceError::Unavailable(format!(
                "{} broke off at {at} of {all} bytes, {futile} times in a row ({cause})",
                options.endpoint
            )));
        }
        progress.note(&format!("download interrupted at {} bytes ({cause}); continuing", partial.len()));
        std::thread::sleep(options.first_pause * 2u32.pow(futile - 1));
    }
}

/// One request.
fn attempt(
    agent: &Agent,
    url: &str,
    model: &Model,
    partial: &mut Partial,
    progress: &mut dyn Progress,
) -> Result<Attempt, SourceError> {
    if partial.len() > model.size_bytes {
        partial.clear()?;
    }
    if partial.len() == model.size_bytes {
        return Ok(Attempt::Done);
    }
    let mut request = agent.get(url).header("Accept-Encoding", "identity");
    if partial.len() > 0 {
        request = request.header("Range", format!("bytes={}-", partial.len()));
    }
    let response = match request.call() {
        Ok(response) => response,
        Err(error @ (ureq::Error::TooManyRedirects | ureq::Error::RedirectFailed)) => {
            return Err(SourceError::Unavailable(format!("{url}: {error}")));
        }
        // A cut while waiting for the answer and "nobody there" look alike; both lose no bytes.
        Err(error) => return Ok(Attempt::Unreachable(error.to_string())),
    };
    match response.status().as_u16() {
        200 => {
            // The whole file, whether or not a range was asked for.
            partial.clear()?;
            check_size(url, number(response.headers(), "content-length"), model)?;
            receive(response, url, model, partial, progress)
        }
        206 => {
            let (start, total) = content_range(response.headers());
            check_size(url, total, model)?;
            if start != Some(partial.len()) {
                partial.clear()?;
                return Ok(Attempt::Cut("the server answered with another range".into()));
            }
            receive(response, url, model, partial, progress)
        }
        416 => {
            partial.clear()?;
            Ok(Attempt::Cut("the server refused the range".into()))
        }
        status @ (408 | 429 | 500..=599) => Ok(Attempt::Cut(format!("status {status}"))),
        status => Err(SourceError::Unavailable(format!("{url} answered with status {status}"))),
    }
}

/// Appends the body.
fn receive(
    response: Response<Body>,
    url: &str,
    model: &Model,
    partial: &mut Partial,
    progress: &mut dyn Progress,
) -> Result<Attempt, SourceError> {
    let mut body = response.into_body().into_reader();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        progress.at(partial.len());
        match body.read(&mut buffer) {
            Ok(0) if partial.len() == model.size_bytes => return Ok(Attempt::Done),
            Ok(0) => return Ok(Attempt::Cut("connection closed".into())),
            Ok(n) => partial.append(&buffer[..n])?,
            // All bytes are here: how the connection ended does not matter.
            Err(_) if partial.len() == model.size_bytes => return Ok(Attempt::Done),
            Err(error) => return Ok(Attempt::Cut(error.to_string())),
        }
        if partial.len() > model.size_bytes {
            let got = partial.len();
            partial.clear()?;
            return Err(PullError::WrongSize { from: url.into(), got, expected: model.size_bytes }.into());
        }
    }
}

/// Refuses another file before it is fetched.
fn check_size(url: &str, announced: Option<u64>, model: &Model) -> Result<(), PullError> {
    match announced {
        Some(got) if got != model.size_bytes => {
            Err(PullError::WrongSize { from: url.into(), got, expected: model.size_bytes })
        }
        _ => Ok(()),
    }
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// Start and total of `Content-Range: bytes 5-9/10`.
fn content_range(headers: &HeaderMap) -> (Option<u64>, Option<u64>) {
    let text = headers.get("content-range").and_then(|v| v.to_str().ok()).unwrap_or_default();
    let (range, total) = text.trim_start_matches("bytes").trim().split_once('/').unwrap_or_default();
    (range.split('-').next().and_then(|start| start.trim().parse().ok()), total.trim().parse().ok())
}
