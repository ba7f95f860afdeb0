//! OpenTelemetry traces: what became of each request, as spans for a collector (`--otlp-endpoint`).
//!
//! A request (a choice of an answer) is a span of kind SERVER, called like its endpoint, with the children `queue`,
//! `prefill` and `decode` as far as it came. It continues the trace of the client's `traceparent`
//! ([`context`]), else begins one, which the choices of an answer share. [`otlp`] writes spans, [`export`] sends them.
//!
//! **Invariants:** a request costs a few words until its end, then one place in a bounded queue, for which nobody waits:
//! what finds it full is dropped and counted. A collector that is slow, dead or wrong therefore costs spans and nothing
//! else. Without the flag nothing is kept at all.

mod context;
mod endpoint;
mod export;
mod otlp;

use context::TraceContext;
pub use endpoint::OtlpEndpoint;
pub(crate) use export::Exporter;
pub(crate) use otlp::About;

use crate::request_id;
use crate::statistics::End;
use axum::http::HeaderMap;
use lockstep_core::RequestId;
use lockstep_wire::Usage;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;

/// Ended requests that may wait for the collector.
const QUEUE_LEN_MAX: usize = 4096;

/// Where ended requests go. Clones share the queue; one without a collector keeps nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tracer(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    queue: mpsc::Sender<Record>,
    ids: context::Ids,
    outcomes: Outcomes,
}

/// What became of ended requests, counted.
#[derive(Debug, Default)]
struct Outcomes {
    exported: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
}

/// What is remembered of a traced call until its requests end.
#[derive(Clone, Debug)]
pub(crate) struct Traced {
    shared: Arc<Shared>,
    context: TraceContext,
    /// The path of its endpoint.
    path: String,
    /// The client's own name of it.
    x_request_id: Option<String>,
    started: SystemTime,
}

/// How a request went; times since its submission.
#[derive(Debug)]
pub(crate) struct Course {
    pub(crate) request: RequestId,
    pub(crate) end: End,
    pub(crate) usage: Usage,
    pub(crate) total: Duration,
    /// Until its first token, if there was one.
    pub(crate) first_token: Option<Duration>,
    /// Of that, the part from its first step on, if rank 0 told.
    pub(crate) prefill: Option<Duration>,
}

/// An ended request in the queue.
#[derive(Debug)]
struct Record {
    traced: Traced,
    course: Course,
}

impl Tracer {
    /// A tracer for `endpoint`, and what sends to it. Must be called on the api's event loop.
    pub(crate) fn start(endpoint: OtlpEndpoint, about: About) -> (Self, Exporter) {
        let (queue, records) = mpsc::channel(QUEUE_LEN_MAX);
        let shared = Arc::new(Shared { queue, ids: context::Ids::new(), outcomes: Outcomes::default() });
        let exporter = Exporter::start(endpoint, about, records, shared.clone());
        (Self(Some(shared)), exporter)
    }

    /// A call with `headers` to the endpoint `path` begins; `None` if it is not traced: nobody collects, or the client
    /// has decided against this trace.
    pub(crate) fn begin(&self, path: &str, headers: &HeaderMap) -> Option<Traced> {
        let shared = self.0.clone()?;
        let context = match TraceContext::of(headers) {
            Some(context) if !context.is_sampled => return None,
            Some(context) => context,
            None => TraceContext::begun(&shared.ids),
        };
        let x_request_id = request_id::text_of(headers);
        Some(Traced { shared, context, path: path.into(), x_request_id, started: SystemTime::now() })
    }

    /// Ended requests by what became of their spans.
    pub(crate) fn outcomes(&self) -> [(&'static str, u64); 3] {
        let count = |of: fn(&Outcomes) -> &AtomicU64| {
            self.0.as_ref().map_or(0, |shared| of(&shared.outcomes).load(Ordering::Relaxed))
        };
        [
            ("exported", count(|outcomes| &outcomes.exported)),
            ("dropped", count(|outcomes| &outcomes.dropped)),
            ("failed", count(|outcomes| &outcomes.failed)),
        ]
    }
}

impl Traced {
    /// One of the call's requests has ended.
    pub(crate) fn ended(self, course: Course) {
        let shared = self.shared.clone();
        if shared.queue.try_send(Record { traced: self, course }).is_err() {
            shared.outcomes.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_queue_and_a_dead_collector_are_counted_and_nobody_waits() {
        // Nothing listens at port 1 of a test's machine.
        let endpoint = "http://127.0.0.1:1".parse().unwrap();
        let about = About { model: "m".into(), version: "0".into() };
        let (tracer, exporter) = Tracer::start(endpoint, about);
        let traced = tracer.begin("/v1/completions", &HeaderMap::new()).unwrap();
        // Without an await the exporter cannot run: this would wait for ever if it waited at all.
        for id in 0..QUEUE_LEN_MAX as u64 + 10 {
            traced.clone().ended(Course {
                request: RequestId(id),
                end: End::Stop,
                usage: Usage::default(),
                total: Duration::from_millis(2),
                first_token: Some(Duration::from_millis(1)),
                prefill: None,
            });
        }
        assert_eq!(tracer.outcomes(), [("exported", 0), ("dropped", 10), ("failed", 0)]);
        exporter.finish().await;
        let failed = tracer.outcomes()[2].1;
        assert!(failed > 0, "a refused connection is a failure");
        assert_eq!(Tracer::default().outcomes().map(|(_, count)| count), [0; 3]);
        assert!(Tracer::default().begin("/", &HeaderMap::new()).is_none());
    }
}
