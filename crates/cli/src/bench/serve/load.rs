//! Sends a workload and notes when what arrived.

use super::workload::{Planned, Workload};
use crate::client::chunk::{Chunk, Usage};
use crate::client::{Client, ClientError};
use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

/// What came of one request.
#[derive(Clone, Debug)]
pub struct Record {
    /// Since the start of the load.
    pub sent: Duration,
    /// How much later than planned it was sent.
    pub late: Duration,
    /// From sending to the first text; `None` for an answer without any.
    pub ttft: Option<Duration>,
    /// From sending to the last event with text or the reason of the end.
    pub e2e: Duration,
    /// Between two events with text, in seconds; a million of them need no more digits.
    pub gaps_s: Vec<f32>,
    /// Token counts; those of the answer are events where the server does not count.
    pub usage: Usage,
    /// Kind and text of the failure.
    pub failure: Option<(String, String)>,
}

/// What came of all that were sent.
#[derive(Debug)]
pub struct Loaded {
    /// In the order of their ends.
    pub records: Vec<Record>,
    /// From the first request to the end of the last.
    pub duration: Duration,
    /// Ctrl-C came: requests that were not over are not counted.
    pub interrupted: bool,
}

/// Sends every request when it is due and there is room, and waits for all answers. Errors when signals
/// cannot be caught.
pub async fn drive(client: &Client, path: &'static str, workload: &Workload) -> Result<Loaded> {
    lockstep_launch::init::hand_over(SignalKind::interrupt().as_raw_value());
    let mut interrupts = signal(SignalKind::interrupt())?;
    let start = Instant::now();
    let bar = bar(workload.requests.len());
    let room = workload.concurrency.unwrap_or(usize::MAX);
    let mut waiting = workload.requests.iter().peekable();
    let mut flying = JoinSet::new();
    let mut loaded = Loaded { records: Vec::new(), duration: Duration::ZERO, interrupted: false };
    while waiting.peek().is_some() || !flying.is_empty() {
        let due = waiting.peek().map(|request| request.at.map_or(start, |at| start + at));
        tokio::select! {
            () = wait_until(due), if due.is_some() && flying.len() < room => {
                let (Some(request), Some(due)) = (waiting.next(), due) else { continue };
                // Without a time of its own a request is due when there is room.
                let due = if request.at.is_some() { due } else { Instant::now() };
                flying.spawn(one(client.clone(), path, request.clone(), (start, due), workload.limit));
            }
            Some(landed) = flying.join_next() => {
                let record: Record = landed?;
                loaded.duration = loaded.duration.max(record.sent + record.e2e);
                loaded.records.push(record);
                bar.inc(1);
            }
            _ = interrupts.recv() => {
                loaded.interrupted = true;
                loaded.duration = start.elapsed();
                break;
            }
        }
    }
    bar.finish_and_clear();
    Ok(loaded)
}

/// Returns at `due`, at once when that is past.
async fn wait_until(due: Option<Instant>) {
    if let Some(due) = due.filter(|due| *due > Instant::now()) {
        tokio::time::sleep_until(due.into()).await;
    }
}

/// One request to its end, whatever that is.
async fn one(
    client: Client,
    path: &'static str,
    request: Planned,
    (start, due): (Instant, Instant),
    limit: Duration,
) -> Record {
    let sent = Instant::now();
    let mut heard = Heard { sent, first: None, last: None, gaps_s: Vec::new(), events: 0, usage: None };
    let failure = match tokio::time::timeout(limit, listen(&client, path, request, &mut heard)).await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error),
        Err(_) => Some(ClientError::Timeout { base: client.base(), seconds: limit.as_secs_f64() }),
    };
    let end = match failure {
        None => heard.last.unwrap_or_else(Instant::now),
        Some(_) => Instant::now(),
    };
    Record {
        sent: sent.duration_since(start),
        late: sent.saturating_duration_since(due),
        ttft: heard.first.map(|first| first.duration_since(sent)),
        e2e: end.duration_since(sent),
        gaps_s: heard.gaps_s,
        usage: heard.usage.unwrap_or_else(|| Usage::of_answer(heard.events)),
        failure: failure.map(|error| (error.kind(), error.to_string())),
    }
}

/// What arrived of an answer.
struct Heard {
    sent: Instant,
    first: Option<Instant>,
    /// Text or the reason of the end.
    last: Option<Instant>,
    gaps_s: Vec<f32>,
    /// Events with text.
    events: u64,
    usage: Option<Usage>,
}

impl Heard {
    fn text(&mut self, at: Instant) {
        match self.last.filter(|_| self.first.is_some()) {
            Some(last) => self.gaps_s.push(at.duration_since(last).as_secs_f32()),
            None => self.first = Some(at.max(self.sent)),
        }
        self.last = Some(at.max(self.sent));
        self.events += 1;
    }
}

async fn listen(
    client: &Client,
    path: &'static str,
    request: Planned,
    heard: &mut Heard,
) -> std::result::Result<(), ClientError> {
    let mut stream = client.stream(path, request.body).await?;
    while let Some((data, at)) = stream.next().await? {
        let chunk = Chunk::parse(stream.base(), &data)?;
        if !chunk.text().is_empty() || !chunk.reasoning().is_empty() {
            heard.text(at);
        } else if chunk.finish_reason().is_some() {
            heard.last = Some(at.max(heard.sent));
        }
        if let Some(usage) = chunk.usage {
            heard.usage = Some(usage);
        }
    }
    Ok(())
}

/// A bar on a terminal, nothing elsewhere.
fn bar(requests: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("[{bar:30}] {pos}/{len} {per_sec} {elapsed} eta {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(requests as u64).with_style(style)
}
