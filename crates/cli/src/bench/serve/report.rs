//! The figures of a load, as a table and as JSON.

use super::load::{Loaded, Record};
use super::workload::Workload;
use crate::bench::percentiles::Percentiles;
use crate::error::{CliError, Result};
use crate::flags::bench_serve::{Arrival, BenchEndpoint, BenchServeFlags};
use lockstep_core::ExitCode;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Share of a core above which the client's own work may be what is measured.
const CPU_SHARE_MAX: f64 = 0.8;

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    url: String,
    model: String,
    endpoint: BenchEndpoint,
    request_rate: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arrival: Option<Arrival>,
    concurrency_limit: Option<usize>,
    seed: u64,
    requests: usize,
    completed: usize,
    failed: usize,
    /// Completed, but no token of the answer had text: in no figure of tokens' times.
    without_text: usize,
    interrupted: bool,
    errors: BTreeMap<String, ErrorCount>,
    duration_s: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    requests_per_s: f64,
    output_tokens_per_s: f64,
    total_tokens_per_s: f64,
    concurrency_mean: f64,
    concurrency_max: usize,
    ttft_ms: Percentiles,
    tpot_ms: Percentiles,
    itl_ms: Percentiles,
    e2e_ms: Percentiles,
    client: ClientCost,
}

/// Failures of one kind.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct ErrorCount {
    count: usize,
    /// The text of the first.
    first: String,
}

/// What the client itself took.
#[derive(Debug, Serialize)]
struct ClientCost {
    cpu_s: f64,
    /// Of one core; the client has no more than one.
    cpu_share: f64,
    /// How much later than planned requests were sent.
    late_ms: Percentiles,
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Milliseconds per token behind the first; of answers with at least two, and with text.
fn tpot(record: &Record) -> Option<f64> {
    let tokens = record.usage.completion_tokens.checked_sub(1).filter(|tokens| *tokens > 0)?;
    Some(ms(record.e2e.saturating_sub(record.ttft?)) / tokens as f64)
}

/// The most requests that were open at one time.
fn concurrency_max(records: &[Record]) -> usize {
    let mut changes: Vec<(Duration, i64)> =
        records.iter().flat_map(|r| [(r.sent, 1), (r.sent + r.e2e, -1)]).collect();
    // Ends before beginnings of the same moment.
    changes.sort_unstable();
    let open = changes.iter().scan(0, |open, (_, change)| {
        *open += change;
        Some(*open)
    });
    open.max().unwrap_or(0).unsigned_abs() as usize
}

impl Report {
    /// Of `loaded`, for which the client took `cpu`; `server` is its address and the model's name.
    pub fn new(
        flags: &BenchServeFlags,
        server: (String, String),
        workload: &Workload,
        loaded: &Loaded,
        cpu: Duration,
    ) -> Self {
        let good: Vec<&Record> = loaded.records.iter().filter(|record| record.failure.is_none()).collect();
        let mut errors: BTreeMap<String, ErrorCount> = BTreeMap::new();
        for (kind, text) in loaded.records.iter().filter_map(|record| record.failure.as_ref()) {
            let entry =
                errors.entry(kind.clone()).or_insert_with(|| ErrorCount { count: 0, first: text.clone() });
            entry.count += 1;
        }
        let seconds = loaded.duration.as_secs_f64().max(1e-9);
        let sum = |number: fn(&Record) -> u64| good.iter().map(|record| number(record)).sum::<u64>();
        let prompt_tokens = sum(|record| record.usage.prompt_tokens);
        let completion_tokens = sum(|record| record.usage.completion_tokens);
        let of = |time: fn(&Record) -> Option<Duration>| {
            Percentiles::of(good.iter().filter_map(|record| time(record)).map(ms).collect())
        };
        let gaps = good.iter().flat_map(|r| r.gaps_s.iter().map(|gap| f64::from(*gap) * 1e3));
        Self {
            url: server.0,
            model: server.1,
            endpoint: flags.endpoint,
            request_rate: flags.request_rate,
            arrival: flags.request_rate.map(|_| flags.arrival),
            concurrency_limit: workload.concurrency,
            seed: flags.seed,
            requests: workload.requests.len(),
            completed: good.len(),
            failed: loaded.records.len() - good.len(),
            without_text: good.iter().filter(|record| record.ttft.is_none()).count(),
            interrupted: loaded.interrupted,
            errors,
            duration_s: seconds,
            prompt_tokens,
            cached_tokens: sum(|record| record.usage.cached_tokens()),
            completion_tokens,
            requests_per_s: good.len() as f64 / seconds,
            output_tokens_per_s: completion_tokens as f64 / seconds,
            total_tokens_per_s: (prompt_tokens + completion_tokens) as f64 / seconds,
            concurrency_mean: loaded.records.iter().map(|r| r.e2e.as_secs_f64()).sum::<f64>() / seconds,
            concurrency_max: concurrency_max(&loaded.records),
            ttft_ms: of(|record| record.ttft),
            tpot_ms: Percentiles::of(good.iter().filter_map(|record| tpot(record)).collect()),
            itl_ms: Percentiles::of(gaps.collect()),
            e2e_ms: of(|record| Some(record.e2e)),
            client: ClientCost {
                cpu_s: cpu.as_secs_f64(),
                cpu_share: cpu.as_secs_f64() / seconds,
                late_ms: Percentiles::of(loaded.records.iter().map(|record| ms(record.late)).collect()),
            },
        }
    }

    /// Errors when nothing was measured, or not all of it.
    pub fn verdict(&self) -> Result<()> {
        if self.interrupted {
            return Err(CliError::new(ExitCode::Interrupted, "stopped before all requests were answered"));
        }
        match self.completed {
            0 => Err(CliError::new(ExitCode::Internal, "no request was answered; see above")),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} at {}, {} requests in {:.2} s",
            self.model, self.url, self.requests, self.duration_s
        )?;
        writeln!(f, "{:<26} {:>12}", "completed", self.completed)?;
        if self.without_text > 0 {
            writeln!(f, "{:<26} {:>12}  only in E2E", "  without any text", self.without_text)?;
        }
        writeln!(f, "{:<26} {:>12}", "failed", self.failed)?;
        for (kind, ErrorCount { count, first }) in &self.errors {
            writeln!(f, "  {kind:<24} {count:>12}  {first}")?;
        }
        let cached = format!("  ({} cached)", self.cached_tokens);
        writeln!(f, "{:<26} {:>12}{cached}", "prompt tokens", self.prompt_tokens)?;
        writeln!(f, "{:<26} {:>12}", "generated tokens", self.completion_tokens)?;
        writeln!(f, "{:<26} {:>12.2}", "requests/s", self.requests_per_s)?;
        writeln!(f, "{:<26} {:>12.1}", "generated tokens/s", self.output_tokens_per_s)?;
        writeln!(f, "{:<26} {:>12.1}", "all tokens/s", self.total_tokens_per_s)?;
        let most = format!("  (at most {})", self.concurrency_max);
        writeln!(f, "{:<26} {:>12.1}{most}", "requests in flight, mean", self.concurrency_mean)?;
        writeln!(f, "\n{:<10} {:>10} {:>10} {:>10} {:>10} {:>10}", "ms", "mean", "p50", "p90", "p99", "max")?;
        let rows =
            [("TTFT", &self.ttft_ms), ("TPOT", &self.tpot_ms), ("ITL", &self.itl_ms), ("E2E", &self.e2e_ms)];
        for (name, p) in rows.into_iter().chain([("sent late", &self.client.late_ms)]) {
            let Percentiles { mean, p50, p90, p99, max } = p;
            writeln!(f, "{name:<10} {mean:>10.2} {p50:>10.2} {p90:>10.2} {p99:>10.2} {max:>10.2}")?;
        }
        let (cpu_s, share) = (self.client.cpu_s, self.client.cpu_share);
        writeln!(f, "\nthe client took {cpu_s:.2} s of CPU, {:.0} % of a core", share * 100.0)?;
        if share > CPU_SHARE_MAX {
            writeln!(
                f,
                "its one core was nearly full: times may be the client's; spread the load over several"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::chunk::Usage;

    fn record(sent_ms: u64, e2e_ms: u64, gaps_s: &[f32], tokens: u64) -> Record {
        Record {
            sent: Duration::from_millis(sent_ms),
            late: Duration::ZERO,
            ttft: Some(Duration::from_millis(5)),
            e2e: Duration::from_millis(e2e_ms),
            gaps_s: gaps_s.to_vec(),
            usage: Usage::of_answer(tokens),
            failure: None,
        }
    }

    #[test]
    fn tpot_counts_tokens_not_events() {
        assert_eq!(tpot(&record(0, 1005, &[0.5, 0.5], 5)), Some(250.0));
        assert_eq!(tpot(&record(0, 9, &[], 1)), None);
        assert_eq!(tpot(&record(0, 9, &[], 0)), None);
        assert_eq!(tpot(&Record { ttft: None, ..record(0, 9, &[], 5) }), None);
    }

    #[test]
    fn open_requests_are_counted_at_their_most() {
        let records =
            [record(0, 10, &[], 1), record(5, 10, &[], 1), record(10, 10, &[], 1), record(40, 1, &[], 1)];
        assert_eq!((concurrency_max(&records), concurrency_max(&[])), (2, 0));
    }
}
