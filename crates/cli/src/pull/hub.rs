//! Fetching from the Hugging Face hub, or what speaks like it.
//!
//! **Invariants:** bytes already here are never fetched again, as long as the server honours ranges. A
//! hub that cannot be connected to is given up at once (another source may be reachable); one that has
//! answered before is tried again, continuing where the connection was cut. The token goes to the hub
//! only, not to the storage that it redirects to.

use super::error::{PullError, Refusal, SourceError};
use super::partial::{CHUNK_BYTES, Partial};
use super::progress::Progress;
use std::fmt::Write as _;
use std::io::Read;
use std::time::Duration;
use ureq::config::RedirectAuthHeaders;
use ureq::http::{HeaderMap, Response};
use ureq::{Agent, Body};

/// The public hub.
const ENDPOINT: &str = "https://huggingface.co";
/// Bytes that must arrive for an attempt not to count as futile.
const WORTHWHILE_BYTES: u64 = 1 << 20;
/// Longest answer that is kept in memory. The list of 10 000 files takes 3 MB.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Where the hub is and how patient to be with it.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// Scheme and host, no slash at the end.
    pub endpoint: String,
    /// Of the user, for gated and private repositories.
    pub token: Option<Token>,
    /// The user wants no request to be made.
    pub offline: bool,
    /// Futile attempts in a row before giving up.
    pub attempts: u32,
    /// Pause before the second attempt; doubles with every futile one.
    pub first_pause: Duration,
    /// Longest silence of a server.
    pub silence: Duration,
}

/// A secret that is never printed.
#[derive(Clone)]
pub struct Token(pub String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(...)")
    }
}

impl HubOptions {
    /// The public hub, or the mirror that `HF_ENDPOINT` names; `HF_TOKEN`, else
    /// `HUGGING_FACE_HUB_TOKEN`; `HF_HUB_OFFLINE`.
    pub fn from_environment() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// As [`from_environment`](Self::from_environment), of an environment in which `get` looks.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Self {
        let variable = |name| Some(get(name)?.trim().to_owned()).filter(|value| !value.is_empty());
        let endpoint = variable("HF_ENDPOINT");
        let yes = ["1", "on", "yes", "true"];
        Self {
            endpoint: endpoint.as_deref().unwrap_or(ENDPOINT).trim_end_matches('/').to_owned(),
            token: variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")).map(Token),
            offline: variable("HF_HUB_OFFLINE").is_some_and(|v| yes.contains(&v.to_lowercase().as_str())),
            attempts: 5,
            first_pause: Duration::from_millis(500),
            silence: Duration::from_secs(30),
        }
    }

    /// Where the content of a file is.
    pub fn file_url(&self, repository: &str, revision: &str, file: &str) -> String {
        format!("{}/{repository}/resolve/{}/{}", self.endpoint, quote(revision, ""), quote(file, "/"))
    }

    fn agent(&self) -> Agent {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // A renamed repository is a redirect within the hub, content one to elsewhere.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
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

/// Percent-encodes all but letters, digits, `-._~` and the ASCII characters of `keep`.
pub fn quote(text: &str, keep: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut quoted, byte| {
        match byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || keep.as_bytes().contains(&byte) {
            true => quoted.push(byte.into()),
            false => write!(quoted, "%{byte:02X}").expect("invariant: a String takes everything"),
        }
        quoted
    })
}

/// Why one attempt ended.
enum Attempt {
    /// Everything is here.
    Done,
    /// Nobody there.
    Unreachable(String),
    /// Worth another attempt.
    Cut(String),
}

/// Counts the attempts of one fetch.
struct Patience<'a> {
    options: &'a HubOptions,
    /// In a row.
    futile: u32,
    /// The hub has answered at least once.
    answered: bool,
}

impl Patience<'_> {
    /// After `attempt`: whether all is done; else pauses before another, or gives up. `moved`: the
    /// attempt was worth it. `place`: how far it came.
    fn is_done(
        &mut self,
        attempt: Attempt,
        moved: bool,
        place: &str,
        progress: &mut dyn Progress,
    ) -> Result<bool, SourceError> {
        let endpoint = &self.options.endpoint;
        let cause = match attempt {
            Attempt::Done => return Ok(true),
            Attempt::Unreachable(cause) if !self.answered => {
                return Err(SourceError::Unavailable(format!("{endpoint} cannot be reached ({cause})")));
            }
            Attempt::Unreachable(cause) => cause,
            Attempt::Cut(cause) => {
                self.answered = true;
                cause
            }
        };
        self.futile = if moved { 1 } else { self.futile + 1 };
        let futile = self.futile;
        if futile >= self.options.attempts {
            return Err(SourceError::Unavailable(format!(
                "{endpoint} broke off at {place}, {futile} times in a row ({cause})"
            )));
        }
        progress.note(&format!("download interrupted at {place} ({cause}); continuing"));
        std::thread::sleep(self.options.first_pause * 2u32.pow(futile - 1));
        Ok(false)
    }
}

/// Continues `partial` from `url` until it has all its bytes. The content is checked by the caller.
pub fn fetch(
    options: &HubOptions,
    url: &str,
    partial: &mut Partial,
    progress: &mut dyn Progress,
) -> Result<(), SourceError> {
    refuse_offline(options)?;
    let agent = options.agent();
    let mut patience = Patience { options, futile: 0, answered: false };
    loop {
        let before = partial.len();
        let attempt = fetch_once(options, &agent, url, partial, progress)?;
        let moved = partial.len() >= before + WORTHWHILE_BYTES;
        let place = format!("{} of {} bytes", partial.len(), partial.size_bytes());
        if patience.is_done(attempt, moved, &place, progress)? {
            return Ok(());
        }
    }
}

/// The body of `url`, which must be short.
pub fn get(options: &HubOptions, url: &str, progress: &mut dyn Progress) -> Result<Vec<u8>, SourceError> {
    refuse_offline(options)?;
    let agent = options.agent();
    let mut patience = Patience { options, futile: 0, answered: false };
    loop {
        let mut body = Vec::new();
        let attempt = match ask(options, &agent, url, 0)? {
            Err(attempt) => attempt,
            Ok(response) => {
                let announced = number(response.headers(), "content-length");
                let mut reader = response.into_body().into_reader().take(ANSWER_BYTES_MAX + 1);
                match reader.read_to_end(&mut body) {
                    Err(error) => Attempt::Cut(error.to_string()),
                    Ok(n) if announced.is_some_and(|all| (n as u64) < all.min(ANSWER_BYTES_MAX)) => {
                        Attempt::Cut("connection closed".into())
                    }
                    Ok(_) => Attempt::Done,
                }
            }
        };
        if patience.is_done(attempt, false, "the list of files", progress)? {
            return Ok(body);
        }
    }
}

fn refuse_offline(options: &HubOptions) -> Result<(), SourceError> {
    match options.offline {
        true => Err(SourceError::Unavailable("the hub is not asked because HF_HUB_OFFLINE is set".into())),
        false => Ok(()),
    }
}

/// One request for everything after the first `from` bytes: an answer of status 200, 206 or 416, or
/// why there is none yet.
fn ask(
    options: &HubOptions,
    agent: &Agent,
    url: &str,
    from: u64,
) -> Result<Result<Response<Body>, Attempt>, SourceError> {
    let mut request = agent.get(url).header("Accept-Encoding", "identity");
    if let Some(Token(token)) = &options.token {
        request = request.header("Authorization", format!("Bearer {token}"));
    }
    if from > 0 {
        request = request.header("Range", format!("bytes={from}-"));
    }
    let response = match request.call() {
        Ok(response) => response,
        Err(error @ (ureq::Error::TooManyRedirects | ureq::Error::RedirectFailed)) => {
            return Err(SourceError::Unavailable(format!("{url}: {error}")));
        }
        // A cut while waiting for the answer and "nobody there" look alike; both lose no bytes.
        Err(error) => return Ok(Err(Attempt::Unreachable(error.to_string()))),
    };
    let text = |name| {
        let value = response.headers().get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    };
    match response.status().as_u16() {
        200 | 206 | 416 => Ok(Ok(response)),
        status @ (408 | 429 | 500..=599) => Ok(Err(Attempt::Cut(format!("status {status}")))),
        status => Err(SourceError::Refused(Refusal {
            url: url.to_owned(),
            status,
            code: text("x-error-code"),
            message: text("x-error-message"),
        })),
    }
}

/// One attempt to get the rest of a file.
fn fetch_once(
    options: &HubOptions,
    agent: &Agent,
    url: &str,
    partial: &mut Partial,
    progress: &mut dyn Progress,
) -> Result<Attempt, SourceError> {
    if partial.len() > partial.size_bytes() {
        partial.clear()?;
    }
    if partial.len() == partial.size_bytes() {
        return Ok(Attempt::Done);
    }
    let response = match ask(options, agent, url, partial.len())? {
        Ok(response) => response,
        Err(attempt) => return Ok(attempt),
    };
    match response.status().as_u16() {
        206 => {
            let (start, total) = content_range(response.headers());
            check_size(url, total, partial)?;
            if start != Some(partial.len()) {
                partial.clear()?;
                return Ok(Attempt::Cut("the server answered with another range".into()));
            }
            receive(response, url, partial, progress)
        }
        416 => {
            partial.clear()?;
            Ok(Attempt::Cut("the server refused the range".into()))
        }
        _ => {
            // The whole file, whether or not a range was asked for.
            partial.clear()?;
            check_size(url, number(response.headers(), "content-length"), partial)?;
            receive(response, url, partial, progress)
        }
    }
}

/// Appends the body.
fn receive(
    response: Response<Body>,
    url: &str,
    partial: &mut Partial,
    progress: &mut dyn Progress,
) -> Result<Attempt, SourceError> {
    let mut body = response.into_body().into_reader();
    let mut buffer = vec![0; CHUNK_BYTES];
    let size_bytes = partial.size_bytes();
    loop {
        progress.at(partial.len());
        match body.read(&mut buffer) {
            Ok(0) if partial.len() == size_bytes => return Ok(Attempt::Done),
            Ok(0) => return Ok(Attempt::Cut("connection closed".into())),
            Ok(n) => partial.append(&buffer[..n])?,
            // All bytes are here: how the connection ended does not matter.
            Err(_) if partial.len() == size_bytes => return Ok(Attempt::Done),
            Err(error) => return Ok(Attempt::Cut(error.to_string())),
        }
        if partial.len() > size_bytes {
            let got = partial.len();
            partial.clear()?;
            return Err(PullError::WrongSize { from: url.into(), got, expected: size_bytes }.into());
        }
    }
}

/// Refuses another file before it is fetched.
fn check_size(url: &str, announced: Option<u64>, partial: &Partial) -> Result<(), PullError> {
    let expected = partial.size_bytes();
    match announced {
        Some(got) if got != expected => Err(PullError::WrongSize { from: url.into(), got, expected }),
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
