//! What differs between ranks: where their time goes, and which of them comes last.
//!
//! Times are totals that the ranks keep on the watch page. Lateness is worked out at the scrape from the rings of
//! the last collectives, so that it costs the ranks nothing.

use crate::config::Watched;
use lockstep_comm::watch::{Activity, Track, now_ns};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::collections::BTreeMap;

/// Operations of which the lateness is worked out.
const LATEST: u64 = 1024;

/// Writes the metrics of all ranks.
pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, watched: &Watched) -> std::fmt::Result {
    encode_activities(encoder, watched)?;
    encode_collectives(encoder, watched)?;
    encode_lateness(encoder, watched)?;
    if let Some(age) = watched.page.token_age(watched.ranks.iter().copied()) {
        let help = "Since a token had gone round every rank.";
        let metric = encoder.encode_descriptor("token_age_seconds", help, None, MetricType::Gauge)?;
        ConstGauge::new(age.as_secs_f64()).encode(metric)?;
    }
    Ok(())
}

fn encode_activities(encoder: &mut DescriptorEncoder<'_>, watched: &Watched) -> std::fmt::Result {
    let help = "Time that a rank has spent, by part of a step: agree (wait for the other ranks), messages and plan \
                (schedule), launch (on CPU the forward pass), wait (for the device), sample (on the host), send; and \
                idle.";
    let name = "rank_activity_seconds";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    let now = now_ns();
    for (rank, mark) in watched.ranks.iter().enumerate() {
        let seen = watched.page.read(*mark);
        let at = seen.track(Track::Loop);
        for activity in Activity::ALL.into_iter().filter(|a| !matches!(a, Activity::None | Activity::Ended)) {
            // What it does now is not in the totals yet.
            let open = if at.activity() == activity { now.saturating_sub(at.since_ns) } else { 0 };
            let seconds = (seen.spent_ns[activity as usize] + open) as f64 / 1e9;
            let labels = [("rank", rank.to_string()), ("activity", activity.name().to_owned())];
            ConstCounter::new(seconds).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_collectives(encoder: &mut DescriptorEncoder<'_>, watched: &Watched) -> std::fmt::Result {
    let help = "Time that a rank has spent in collectives of the CPU, waiting for others included: of tensors (sums), \
                and of the process group (one a step). The rank with the least is the one that others wait for.";
    let name = "rank_collective_seconds";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (rank, mark) in watched.ranks.iter().enumerate() {
        let seen = watched.page.read(*mark);
        for (track, plane) in [(Track::Group, "group"), (Track::Tensors, "tensors")] {
            let labels = [("rank", rank.to_string()), ("plane", plane.to_owned())];
            let seconds = seen.track(track).inside_ns as f64 / 1e9;
            ConstCounter::new(seconds).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_lateness(encoder: &mut DescriptorEncoder<'_>, watched: &Watched) -> std::fmt::Result {
    let by_group = watched.by_tp_group().map(|marks| lateness(watched, marks, Track::Tensors));
    let by_group: Vec<Vec<f64>> = by_group.collect();
    if by_group.iter().all(Vec::is_empty) {
        return Ok(());
    }
    let help = "How much later than the first rank of its stage a rank came to a collective of tensors: the mean over the latest.";
    let name = "rank_lateness_seconds";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    let group_size = watched.ranks.len() / by_group.len();
    for (group, lateness) in by_group.iter().enumerate() {
        for (at, seconds) in lateness.iter().enumerate() {
            let labels = [("rank", (group * group_size + at).to_string())];
            ConstGauge::new(*seconds).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

/// Mean lateness of the ranks `marks` of a TP group, over the latest operations that every one's ring still holds;
/// empty without any.
fn lateness(watched: &Watched, marks: &[usize], track: Track) -> Vec<f64> {
    let mut arrivals: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut events = Vec::new();
    for mark in marks {
        events.clear();
        let end = watched.page.events_end(*mark, track);
        watched.page.events(*mark, track, end.saturating_sub(2 * LATEST), &mut events);
        for event in events.iter().filter(|event| event.inside) {
            arrivals.entry(event.sequence).or_default().push(event.at_ns);
        }
    }
    let whole: Vec<_> = arrivals.into_values().filter(|times| times.len() == marks.len()).collect();
    let Some(count) = (!whole.is_empty()).then_some(whole.len() as f64) else { return Vec::new() };
    let mut late = vec![0.0; marks.len()];
    for times in whole {
        let first = times.iter().copied().min().unwrap_or_default();
        times.iter().zip(&mut late).for_each(|(at, late)| *late += (at - first) as f64 / 1e9 / count);
    }
    late
}
