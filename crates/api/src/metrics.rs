//! `/metrics`: gauges, counters and histograms in the OpenMetrics text format, which Prometheus reads.
//!
//! Names and units follow Prometheus' conventions: base units, `_total` for counters, one name per quantity with
//! labels for its parts; what SGLang and vLLM both measure of requests is called as there, behind our prefix. Three
//! sources: rank 0's counters at the moment of the scrape (since all ranks decide alike they are every rank's), what
//! the api saw of requests ([`requests`]), and the watch page for what differs between ranks ([`ranks`]).
//!
//! **Invariants:** `lockstep_kv_pages` over its states adds up to `lockstep_kv_pool_pages`; the table "Metrics" of
//! `docs/operations.md` lists every family and no other (a test on a real server compares them).

use crate::config::{ProcessInfo, Watched};
use crate::engine::ReplicaStatus;
use crate::respond::{Answer, refuse};
use crate::statistics::Statistics;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Response, header};
use axum::middleware::Next;
use lockstep_core::Refusal;
use lockstep_wire::{EngineInfo, StageWork};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

mod ranks;
mod replicas;
mod requests;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The answer to a scrape.
pub(crate) fn answer(scrape: Scrape) -> Answer {
    let mut registry = Registry::with_prefix("lockstep");
    registry.register_collector(Box::new(scrape));
    let mut text = String::new();
    if prometheus_client::encoding::text::encode(&mut text, &registry).is_err() {
        return refuse(&Refusal::internal("the metrics cannot be written as text"));
    }
    let mut answer = Response::new(Body::from(text));
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    answer
}

/// Error answers by status. Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct HttpErrors(Arc<Mutex<BTreeMap<u16, u64>>>);

impl HttpErrors {
    fn counts(&self) -> BTreeMap<u16, u64> {
        self.0.lock().expect("invariant: nothing panics while holding it").clone()
    }
}

/// A layer around all others: counts error answers.
pub(crate) async fn count_errors(State(errors): State<HttpErrors>, request: Request, next: Next) -> Answer {
    let answer = next.run(request).await;
    let status = answer.status();
    if status.is_client_error() || status.is_server_error() {
        let mut counts = errors.0.lock().expect("invariant: nothing panics while holding it");
        *counts.entry(status.as_u16()).or_default() += 1;
    }
    answer
}

/// One scrape's numbers.
#[derive(Debug)]
pub(crate) struct Scrape {
    /// All replicas together.
    pub(crate) engine: EngineInfo,
    pub(crate) infos: Vec<(usize, EngineInfo)>,
    pub(crate) replicas: Vec<ReplicaStatus>,
    pub(crate) requests_open: usize,
    pub(crate) statistics: Statistics,
    pub(crate) http_errors: HttpErrors,
    pub(crate) traced: [(&'static str, u64); 3],
    pub(crate) watched: Option<Watched>,
    pub(crate) processes: Vec<ProcessInfo>,
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let engine = &self.engine;
        let gauge = &mut |name, help, value: usize| gauge(&mut encoder, name, help, value);
        gauge("kv_pool_pages", "Pages of the KV pool, equal on every rank.", engine.pages_total)?;
        gauge("kv_page_size_tokens", "Tokens in a page.", engine.page_size)?;
        gauge("context_max_tokens", "Longest prompt plus answer that is served.", engine.context_max)?;
        gauge("http_requests_open", "Requests taken and not answered completely.", self.requests_open)?;
        let pages =
            [("free", engine.pages_free), ("cached", engine.pages_cached), ("held", engine.pages_held)];
        let help = "Pages by state: free, cached (a prefix that no request holds), held by requests.";
        gauges(&mut encoder, "kv_pages", help, "state", &pages)?;
        let requests =
            [("waiting", engine.waiting), ("running", engine.running), ("draining", engine.draining)];
        gauges(
            &mut encoder,
            "scheduler_requests",
            "Requests in the scheduler by state.",
            "state",
            &requests,
        )?;
        let weights: Vec<_> =
            engine.ranks.iter().map(|r| (r.rank.to_string(), r.weight_bytes as usize)).collect();
        let weights: Vec<_> = weights.iter().map(|(rank, bytes)| (rank.as_str(), *bytes)).collect();
        gauges(&mut encoder, "rank_weight_bytes", "Weights that a rank holds.", "rank", &weights)?;
        self.encode_stages(&mut encoder)?;
        self.encode_use(&mut encoder)?;
        self.encode_totals(&mut encoder)?;
        self.encode_processes(&mut encoder)?;
        replicas::encode(&mut encoder, &self.replicas, &self.infos)?;
        requests::encode(&mut encoder, &self.statistics, &self.http_errors)?;
        let help = "Requests whose spans a collector of traces took (exported) or did not (failed), and those for which \
                    the queue to it had no room (dropped).";
        counters(&mut encoder, "traced_requests", help, "outcome", &self.traced)?;
        match &self.watched {
            Some(watched) => ranks::encode(&mut encoder, watched),
            None => Ok(()),
        }
    }
}

impl Scrape {
    /// Memory of the processes that live.
    fn encode_processes(&self, encoder: &mut DescriptorEncoder<'_>) -> std::fmt::Result {
        let help = "Memory of a process that is in RAM; pages that it shares with others included.";
        let mut family =
            encoder.encode_descriptor("process_resident_bytes", help, None, MetricType::Gauge)?;
        for process in &self.processes {
            let Some(bytes) = resident_bytes(process.pid) else { continue };
            let rank = process.rank.map(|rank| rank.to_string()).unwrap_or_default();
            let labels = [("process", &*process.name), ("role", &*process.role), ("rank", &*rank)];
            ConstGauge::new(bytes as i64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// What the devices of a pipeline's stages did; zeros without one.
    fn encode_stages(&self, encoder: &mut DescriptorEncoder<'_>) -> std::fmt::Result {
        type Value = fn(&StageWork) -> f64;
        let families: [(&str, &str, Value); 2] = [
            ("stage_computed_seconds", "Time in which a pipeline stage's rank computed.", |work| {
                work.computed_us as f64 / 1e6
            }),
            ("stage_work_seconds", "Time in which a step of a pipeline was in flight.", |work| {
                work.work_us as f64 / 1e6
            }),
        ];
        let ranks = &self.engine.ranks;
        for (name, help, value) in families {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for rank in ranks {
                let labels = [("rank", rank.rank.to_string())];
                ConstCounter::new(value(&rank.stage_work)).encode(family.encode_family(&labels)?)?;
            }
        }
        let help =
            "Share of the time with work in which a pipeline stage's rank did not compute, since its start.";
        let mut family = encoder.encode_descriptor("stage_bubble_ratio", help, None, MetricType::Gauge)?;
        for rank in ranks {
            let labels = [("rank", rank.rank.to_string())];
            ConstGauge::new(rank.stage_work.bubble()).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// Shares that everybody would work out otherwise.
    fn encode_use(&self, encoder: &mut DescriptorEncoder<'_>) -> std::fmt::Result {
        let EngineInfo { pages_held, pages_total, .. } = self.engine;
        let help = "Pages held by requests, of all pages of the pool.";
        let metric = encoder.encode_descriptor("kv_usage_ratio", help, None, MetricType::Gauge)?;
        ConstGauge::new(pages_held as f64 / pages_total.max(1) as f64).encode(metric)
    }

    fn encode_totals(&self, encoder: &mut DescriptorEncoder<'_>) -> std::fmt::Result {
        let totals = &self.engine.totals;
        let counters = [
            ("scheduler_steps", "Steps planned.", totals.steps),
            ("prompt_tokens", "Prompt tokens of admitted requests.", totals.prompt_tokens),
            ("cached_tokens", "Prompt tokens whose KV came from the prefix cache.", totals.cached_tokens),
            ("generated_tokens", "Tokens generated.", totals.generated_tokens),
            ("computed_tokens", "Tokens that went through the model.", totals.computed_tokens),
            ("retractions", "Requests put back because pages ran out.", totals.retractions),
            ("evicted_pages", "Pages of cached prefixes given up.", totals.evicted_pages),
            ("prefix_waits", "Admissions put off to share a prefix in flight.", totals.prefix_waits),
        ];
        counters.into_iter().try_for_each(|(name, help, value)| counter(encoder, name, help, value))
    }
}

/// Resident memory, as the kernel counts it.
fn resident_bytes(pid: u32) -> Option<usize> {
    const PAGE_BYTES: usize = 4096;
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    Some(text.split(' ').nth(1)?.parse::<usize>().ok()? * PAGE_BYTES)
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: usize) -> std::fmt::Result {
    let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    ConstGauge::new(value as i64).encode(metric)
}

fn counter(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> std::fmt::Result {
    let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    ConstCounter::new(value).encode(metric)
}

/// One counter per value of `label`.
fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &str,
    values: &[(&str, u64)],
) -> std::fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for &(value, number) in values {
        ConstCounter::new(number).encode(family.encode_family(&[(label, value)])?)?;
    }
    Ok(())
}

/// One gauge per value of `label`.
fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &str,
    values: &[(&str, usize)],
) -> std::fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for &(value, number) in values {
        let labels = [(label, value)];
        ConstGauge::new(number as i64).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}
