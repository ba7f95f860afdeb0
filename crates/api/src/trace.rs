//! `/debug/trace`: what every loop did for some seconds, as a trace for Perfetto or `chrome://tracing`.
//!
//! Read off the watch page while the server works; the loops notice nothing. A process of the trace is a loop; its
//! threads are what it does, the operations of the process group and those of the tensor collective, and in a pipeline the
//! steps that the stage's device computes. In an operation
//! the bar of the rank that came last is the shortest: the others wait for it. A stage's bubble is what lies between its
//! steps while there is one on any stage.
//!
//! **Invariant:** memory is bounded by [`EVENTS_MAX`]; what was overwritten in a ring before it was read is counted
//! and said in the trace, never guessed.

use crate::config::Watched;
use crate::handlers::App;
use crate::respond::{Answer, json_text, refuse};
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use lockstep_comm::shm::Operation;
use lockstep_comm::watch::{Activity, Event, Track, now_ns};
use lockstep_core::Refusal;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

/// Seconds recorded when the query says nothing.
const SECONDS: f64 = 5.0;
const SECONDS_MAX: f64 = 60.0;
/// Time between two looks at the rings: a ring holds a few thousand operations.
const LOOK: Duration = Duration::from_millis(50);
/// Events of one trace, about 200 MB of JSON; it ends early when there are more.
const EVENTS_MAX: usize = 2_000_000;

/// `GET /debug/trace?seconds=5`: records from now on, then answers with the trace.
pub(crate) async fn trace(State(app): State<Arc<App>>, uri: Uri) -> Answer {
    let seconds = match seconds(uri.query().unwrap_or_default()) {
        Ok(seconds) => seconds,
        Err(refusal) => return refuse(&refusal),
    };
    let Some(watched) = app.config.watch.clone() else {
        return refuse(&Refusal::internal("this server has no watch page"));
    };
    let mut recording = Recording::new(watched);
    let end = tokio::time::Instant::now() + seconds;
    while tokio::time::Instant::now() < end && recording.events < EVENTS_MAX {
        tokio::time::sleep(LOOK.min(end - tokio::time::Instant::now())).await;
        recording.look();
    }
    // Up to hundreds of megabytes, which no other answer should wait for.
    match tokio::task::spawn_blocking(move || recording.json()).await {
        Ok(json) => json_text(StatusCode::OK, json),
        Err(error) => refuse(&Refusal::internal(format!("the trace cannot be written: {error}"))),
    }
}

/// The value of `seconds` in a query.
fn seconds(query: &str) -> Result<Duration, Refusal> {
    let text = query.split('&').find_map(|part| part.strip_prefix("seconds="));
    let seconds = match text {
        None => SECONDS,
        Some(text) => text.parse().unwrap_or(f64::NAN),
    };
    if seconds > 0.0 && seconds <= SECONDS_MAX {
        return Ok(Duration::from_secs_f64(seconds));
    }
    let message = format!(
        "seconds={} is not a number above 0 and up to {SECONDS_MAX}",
        text.unwrap_or_default().chars().take(40).collect::<String>()
    );
    Err(Refusal::invalid_param("seconds", message))
}

/// One ring and what was read of it.
struct Ring {
    /// Index among the loops.
    owner: usize,
    track: Track,
    next: u64,
    events: Vec<Event>,
}

/// A trace in the making.
struct Recording {
    watched: Watched,
    rings: Vec<Ring>,
    start_ns: u64,
    events: usize,
    lost: u64,
}

impl Recording {
    /// Begins with what comes after this moment.
    fn new(watched: Watched) -> Self {
        let mut rings = Vec::new();
        for (owner, (_, mark)) in watched.loops.iter().enumerate() {
            for track in Track::ALL {
                let next = watched.page.events_end(*mark, track);
                rings.push(Ring { owner, track, next, events: Vec::new() });
            }
        }
        Self { watched, rings, start_ns: now_ns(), events: 0, lost: 0 }
    }

    /// Takes what has come since the last look.
    fn look(&mut self) {
        for ring in &mut self.rings {
            let (page, mark) = (&self.watched.page, self.watched.loops[ring.owner].1);
            let before = ring.events.len();
            let (next, lost) = page.events(mark, ring.track, ring.next, &mut ring.events);
            ring.next = next;
            self.events += ring.events.len() - before;
            self.lost += lost;
        }
    }

    /// The trace in Chrome's JSON form; times are microseconds since its beginning.
    fn json(&self) -> String {
        let end_ns = now_ns();
        let mut json = String::with_capacity(64 * self.events + 4096);
        json.push_str("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
        for (pid, (name, mark)) in self.watched.loops.iter().enumerate() {
            let named = |json: &mut String, kind: &str, tid: usize, name: &str| {
                // Writing to a String cannot fail.
                let _ = write!(
                    json,
                    "{{\"ph\":\"M\",\"name\":\"{kind}\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"name\":\"{name}\"}}}},"
                );
            };
            named(&mut json, "process_name", 0, name);
            let is_stage = self.watched.stages > 1 && self.watched.ranks.contains(mark);
            let device = is_stage.then_some("device of the stage");
            for (tid, track) in ["loop", "process group", "tensors"].into_iter().chain(device).enumerate() {
                named(&mut json, "thread_name", tid, track);
            }
        }
        for ring in &self.rings {
            for (at, event) in ring.events.iter().enumerate().filter(|(_, event)| event.inside) {
                let after = ring.events.get(at + 1).map_or(end_ns, |next| next.at_ns);
                self.bar(&mut json, ring, event, after);
            }
        }
        if json.ends_with(',') {
            json.pop();
        }
        let _ = write!(json, "],\"otherData\":{{\"events\":{},\"lost\":{}", self.events, self.lost);
        if self.watched.stages > 1 {
            let _ = write!(json, ",\"stages\":{}", self.stages());
        }
        json.push_str("}}");
        json
    }

    /// By rank what its device computed, and its bubble: the share of the time without, while a step of its replica was on
    /// some stage.
    fn stages(&self) -> serde_json::Value {
        let mut stages = Vec::new();
        for marks in self.watched.by_replica() {
            let ring_of = |mark: &usize| {
                let is_its =
                    |ring: &&Ring| ring.track == Track::Device && self.watched.loops[ring.owner].1 == *mark;
                self.rings.iter().find(is_its)
            };
            let devices: Vec<(&str, Vec<Bar>)> = marks
                .iter()
                .filter_map(ring_of)
                .map(|ring| (self.watched.loops[ring.owner].0.as_str(), bars(&ring.events)))
                .collect();
            let work_ns = in_flight_ns(devices.iter().flat_map(|(_, bars)| bars));
            for (name, bars) in devices {
                let computed_ns: u64 = bars.iter().map(|bar| bar.end_ns - bar.start_ns).sum();
                let bubble = if work_ns == 0 { 0.0 } else { 1.0 - computed_ns as f64 / work_ns as f64 };
                let seconds = |ns: u64| ns as f64 / 1e9;
                stages.push(serde_json::json!({
                    "rank": name, "steps": bars.len(), "computed_seconds": seconds(computed_ns),
                    "work_seconds": seconds(work_ns), "bubble": bubble,
                }));
            }
        }
        stages.into()
    }

    fn bar(&self, json: &mut String, ring: &Ring, event: &Event, end_ns: u64) {
        let (name, number) = match ring.track {
            Track::Loop => (Activity::from_code(event.code).name(), "step"),
            Track::Group | Track::Tensors => (Operation::from_code(event.code).name(), "operation"),
            Track::Device => ("compute", "step"),
        };
        let micros = |ns: u64| ns as f64 / 1e3;
        let _ = write!(
            json,
            "{{\"ph\":\"X\",\"name\":\"{name}\",\"pid\":{},\"tid\":{},\"ts\":{:.3},\"dur\":{:.3},\"args\":{{\"{number}\":{}}}}},",
            ring.owner,
            ring.track as usize,
            micros(event.at_ns.saturating_sub(self.start_ns)),
            micros(end_ns.saturating_sub(event.at_ns)),
            event.sequence
        );
    }
}

/// A step on one device.
#[derive(Clone, Copy, Debug)]
struct Bar {
    step: u64,
    start_ns: u64,
    end_ns: u64,
}

/// The steps of a device's events that were recorded whole.
fn bars(events: &[Event]) -> Vec<Bar> {
    let bar = |pair: &[Event]| {
        let is_whole = pair[0].inside && !pair[1].inside && pair[0].sequence == pair[1].sequence;
        let (start_ns, end_ns) = (pair[0].at_ns, pair[1].at_ns.max(pair[0].at_ns));
        is_whole.then_some(Bar { step: pair[0].sequence, start_ns, end_ns })
    };
    events.windows(2).filter_map(bar).collect()
}

/// Nanoseconds in which some step was on its way: from its beginning on the first device to its end on the last.
fn in_flight_ns<'a>(bars: impl Iterator<Item = &'a Bar>) -> u64 {
    let mut steps: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for bar in bars {
        let (start, end) = steps.entry(bar.step).or_insert((bar.start_ns, bar.end_ns));
        (*start, *end) = ((*start).min(bar.start_ns), (*end).max(bar.end_ns));
    }
    let mut spans: Vec<_> = steps.into_values().collect();
    spans.sort_unstable();
    let (mut total, mut covered) = (0, 0);
    for (start, end) in spans {
        total += end.saturating_sub(start.max(covered));
        covered = covered.max(end);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::watch::WatchPage;

    #[test]
    fn a_trace_is_json_with_a_bar_for_each_thing_done() {
        let (_, page) = WatchPage::create(2).unwrap();
        let loops = vec![("TP0".to_owned(), 0), ("TP1".to_owned(), 1)];
        page.mark(0).enter(Activity::Plan, 1);
        let mut recording =
            Recording::new(Watched { page: page.clone(), loops, ranks: vec![0, 1], replicas: 1, stages: 1 });
        page.mark(0).enter(Activity::Launch, 2);
        page.mark(0).enter(Activity::Wait, 2);
        page.mark(1).enter(Activity::Idle, 0);
        recording.look();
        let trace: serde_json::Value = serde_json::from_str(&recording.json()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let bars: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        let named: Vec<_> = bars.iter().map(|bar| bar["name"].as_str().unwrap()).collect();
        assert_eq!(named, ["launch", "wait", "idle"], "nothing from before the recording");
        assert_eq!((&bars[0]["args"]["step"], &bars[2]["pid"]), (&2.into(), &1.into()));
        assert_eq!(trace["otherData"]["lost"], 0);
    }

    #[test]
    fn stages_have_a_lane_and_wait_while_others_compute() {
        let (_, page) = WatchPage::create(3).unwrap();
        let loops = vec![("PP0-TP0".to_owned(), 0), ("PP1-TP0".to_owned(), 1), ("api".to_owned(), 2)];
        let mut recording =
            Recording::new(Watched { page: page.clone(), loops, ranks: vec![0, 1], replicas: 1, stages: 2 });
        let event = |at_ns, sequence, inside| Event { at_ns, sequence, code: 0, inside };
        let step = |step, start, end| [event(start, step, true), event(end, step, false)];
        // Step 1 goes through both stages, then step 2, with a pause in which there is nothing to do.
        let devices = [[step(1, 100, 200), step(2, 500, 600)], [step(1, 200, 500), step(2, 600, 900)]];
        for (owner, events) in devices.into_iter().enumerate() {
            let mut rings = recording.rings.iter_mut();
            let ring = rings.find(|ring| ring.owner == owner && ring.track == Track::Device).unwrap();
            ring.events = events.concat();
        }
        let trace: serde_json::Value = serde_json::from_str(&recording.json()).unwrap();
        let stages = trace["otherData"]["stages"].as_array().unwrap();
        let of = |rank: usize, field: &str| stages[rank][field].as_f64().unwrap();
        assert_eq!((stages.len(), &stages[1]["rank"]), (2, &"PP1-TP0".into()));
        assert_eq!((of(0, "computed_seconds"), of(0, "work_seconds")), (200e-9, 800e-9));
        assert_eq!((of(0, "bubble"), of(1, "bubble")), (0.75, 0.25));
        let events = trace["traceEvents"].as_array().unwrap();
        let lanes = events.iter().filter(|event| event["args"]["name"] == "device of the stage").count();
        let bars = events.iter().filter(|event| event["ph"] == "X" && event["name"] == "compute").count();
        assert_eq!((lanes, bars), (2, 4));
        // What is in flight on two stages at once counts once.
        let overlap = [Bar { step: 1, start_ns: 0, end_ns: 10 }, Bar { step: 2, start_ns: 5, end_ns: 12 }];
        assert_eq!(in_flight_ns(overlap.iter()), 12);
    }

    #[test]
    fn seconds_are_checked() {
        assert_eq!(seconds("").unwrap(), Duration::from_secs(5));
        assert_eq!(seconds("a=b&seconds=0.5").unwrap(), Duration::from_millis(500));
        for bad in ["seconds=0", "seconds=61", "seconds=-1", "seconds=x", "seconds=nan"] {
            assert_eq!(seconds(bad).unwrap_err().status, 400, "{bad}");
        }
    }
}
