//! The task that sends ended requests to the collector.

use super::otlp::{self, About};
use super::{OtlpEndpoint, Record, Shared};
use axum::body::Body;
use axum::http::{Request, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};

/// Requests told at once.
const BATCH_LEN_MAX: usize = 512;
/// How long the first of a batch waits for others.
const GATHERING: Duration = Duration::from_millis(500);
/// How long a collector may take for a batch.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take for what is left when the server ends.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// The running task.
#[derive(Debug)]
pub(crate) struct Exporter {
    task: JoinHandle<()>,
    stop: oneshot::Sender<()>,
}

impl Exporter {
    /// Starts the task on this event loop.
    pub(super) fn start(
        endpoint: OtlpEndpoint,
        about: About,
        records: mpsc::Receiver<Record>,
        shared: Arc<Shared>,
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        let export = Export { endpoint, about: Arc::new(about), shared, is_failing: false };
        Self { task: tokio::spawn(export.run(records, stopped)), stop }
    }

    /// Sends what is queued, for a moment at most; then the task is gone.
    pub(crate) async fn finish(mut self) {
        // It has ended by itself only if it panicked.
        let _ = self.stop.send(());
        if tokio::time::timeout(LAST_PATIENCE, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

struct Export {
    endpoint: OtlpEndpoint,
    about: Arc<About>,
    shared: Arc<Shared>,
    /// The last batch was not taken.
    is_failing: bool,
}

impl Export {
    async fn run(mut self, mut records: mpsc::Receiver<Record>, mut stopped: oneshot::Receiver<()>) {
        let mut is_stopping = false;
        while !is_stopping {
            let mut batch = Vec::new();
            tokio::select! {
                _ = records.recv_many(&mut batch, BATCH_LEN_MAX) => {}
                _ = &mut stopped => is_stopping = true,
            }
            if !is_stopping && batch.len() < BATCH_LEN_MAX {
                tokio::select! {
                    () = tokio::time::sleep(GATHERING) => {}
                    _ = &mut stopped => is_stopping = true,
                }
            }
            loop {
                while batch.len() < BATCH_LEN_MAX
                    && let Ok(record) = records.try_recv()
                {
                    batch.push(record);
                }
                if batch.is_empty() {
                    break;
                }
                self.send(std::mem::take(&mut batch)).await;
            }
        }
    }

    /// Tells the collector of a batch. What it does not take is lost and counted.
    async fn send(&mut self, batch: Vec<Record>) {
        let count = batch.len() as u64;
        let (about, shared) = (self.about.clone(), self.shared.clone());
        // Up to a megabyte of JSON, for which no answer should wait.
        let body = tokio::task::spawn_blocking(move || otlp::body(&about, &batch, &shared.ids)).await;
        let sent = match body {
            Ok(body) => tokio::time::timeout(PATIENCE, post(&self.endpoint, body))
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {} s", PATIENCE.as_secs()))),
            Err(error) => Err(error.to_string()),
        };
        let outcomes = &self.shared.outcomes;
        let outcome = if sent.is_ok() { &outcomes.exported } else { &outcomes.failed };
        outcome.fetch_add(count, Ordering::Relaxed);
        // Once per change: a collector that is away for hours must not fill the log.
        match (&sent, self.is_failing) {
            (Err(why), false) => {
                tracing::warn!("traces cannot be sent to {}: {why}; requests go on without", self.endpoint);
            }
            (Ok(()), true) => tracing::info!("traces are sent to {} again", self.endpoint),
            _ => {}
        }
        self.is_failing = sent.is_err();
    }
}

/// Posts `body` on a connection of its own. Errors with what went wrong, in words.
async fn post(endpoint: &OtlpEndpoint, body: String) -> Result<(), String> {
    let OtlpEndpoint { host, port, path } = endpoint;
    let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(|e| e.to_string())?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
    // Ends with this function, however that ends.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let host = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let request = Request::post(path)
        .header(header::HOST, host)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body))
        .map_err(|e| e.to_string())?;
    match sender.send_request(request).await.map_err(|e| e.to_string())?.status() {
        status if status.is_success() => Ok(()),
        status => Err(format!("it answered {status}")),
    }
}
