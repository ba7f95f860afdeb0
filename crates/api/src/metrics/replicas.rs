//! Each replica on its own, by its number (`dp`); the other families of the engine are sums over those that answer.
//!
//! A replica that is started again begins its counters anew, as any process does; the sums then fall.

use crate::engine::{ReplicaState, ReplicaStatus, router::Reason};
use lockstep_wire::EngineInfo;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// Name, help and value of a family.
type Counter<T> = (&'static str, &'static str, fn(&T) -> u64);

/// Writes the metrics of all replicas; `infos` are those of the ones that answered.
pub(super) fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    replicas: &[ReplicaStatus],
    infos: &[(usize, EngineInfo)],
) -> std::fmt::Result {
    encode_states(encoder, replicas)?;
    encode_routed(encoder, replicas)?;
    let of_status: [Counter<ReplicaStatus>; 2] = [
        ("replica_requests_moved", "Requests moved to others when the replica died.", |r| r.moved_away),
        ("replica_restarts", "Times the replica was started again.", |r| r.restarts),
    ];
    for (name, help, value) in of_status {
        counters(encoder, (name, help), replicas.iter().map(|r| (r.replica, value(r))))?;
    }
    let of_info: [Counter<EngineInfo>; 4] = [
        ("replica_prompt_tokens", "Prompt tokens of admitted requests.", |i| i.totals.prompt_tokens),
        ("replica_cached_tokens", "Of these, tokens whose KV came from the prefix cache.", |i| {
            i.totals.cached_tokens
        }),
        ("replica_generated_tokens", "Tokens generated.", |i| i.totals.generated_tokens),
        ("replica_steps", "Steps planned.", |i| i.totals.steps),
    ];
    for (name, help, value) in of_info {
        counters(encoder, (name, help), infos.iter().map(|(replica, info)| (*replica, value(info))))?;
    }
    encode_gauges(encoder, replicas, infos)
}

fn encode_states(encoder: &mut DescriptorEncoder<'_>, replicas: &[ReplicaStatus]) -> std::fmt::Result {
    let help = "1 for what the replica does: serving, not_answering, draining, drained, restarting.";
    let mut family = encoder.encode_descriptor("replica_state", help, None, MetricType::Gauge)?;
    for status in replicas {
        for state in ReplicaState::ALL {
            let labels = [("dp", status.replica.to_string()), ("state", state.name().to_owned())];
            ConstGauge::new(i64::from(state == status.state)).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_routed(encoder: &mut DescriptorEncoder<'_>, replicas: &[ReplicaStatus]) -> std::fmt::Result {
    let help = "Requests sent to the replica, by why: only (no other), prefix, load, turn.";
    let mut family = encoder.encode_descriptor("replica_requests_routed", help, None, MetricType::Counter)?;
    for status in replicas {
        for reason in Reason::ALL {
            let labels = [("dp", status.replica.to_string()), ("reason", reason.name().to_owned())];
            let count = status.routed.get(&reason).copied().unwrap_or_default();
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_gauges(
    encoder: &mut DescriptorEncoder<'_>,
    replicas: &[ReplicaStatus],
    infos: &[(usize, EngineInfo)],
) -> std::fmt::Result {
    let help = "Requests of the replica that are not answered completely.";
    let mut family = encoder.encode_descriptor("replica_requests_open", help, None, MetricType::Gauge)?;
    for status in replicas {
        let labels = [("dp", status.replica.to_string())];
        ConstGauge::new(status.open as i64).encode(family.encode_family(&labels)?)?;
    }
    let help = "Pages of the replica's pool by state: free, cached, held.";
    let mut family = encoder.encode_descriptor("replica_kv_pages", help, None, MetricType::Gauge)?;
    for (replica, info) in infos {
        let pages = [("free", info.pages_free), ("cached", info.pages_cached), ("held", info.pages_held)];
        for (state, count) in pages {
            let labels = [("dp", replica.to_string()), ("state", state.to_owned())];
            ConstGauge::new(count as i64).encode(family.encode_family(&labels)?)?;
        }
    }
    let help = "Requests in the replica's scheduler by state.";
    let mut family =
        encoder.encode_descriptor("replica_scheduler_requests", help, None, MetricType::Gauge)?;
    for (replica, info) in infos {
        for (state, count) in [("waiting", info.waiting), ("running", info.running)] {
            let labels = [("dp", replica.to_string()), ("state", state.to_owned())];
            ConstGauge::new(count as i64).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

/// One counter per replica.
fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    values: impl Iterator<Item = (usize, u64)>,
) -> std::fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (replica, value) in values {
        let labels = [("dp", replica.to_string())];
        ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}
