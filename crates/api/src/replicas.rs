//! The replicas to whoever runs the server: what each does, drain one, go on with it.

use crate::body::read_object;
use crate::engine::ReplicaStatus;
use crate::fields::Fields;
use crate::handlers::App;
use crate::openapi::native;
use crate::respond::{Answer, json_or_refusal};
use axum::body::Body;
use axum::extract::State;
use axum::http::Request;
use lockstep_core::Refusal;
use lockstep_wire::{EngineInfo, RankInfo};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `POST /drain_replica`: `{"replica": 1}`. It gets no further requests; those that it has go on.
pub(crate) async fn drain(State(app): State<Arc<App>>, request: Request<Body>) -> Answer {
    json_or_refusal(set_draining(&app, request, true).await)
}

/// `POST /resume_replica`: it gets requests again.
pub(crate) async fn resume(State(app): State<Arc<App>>, request: Request<Body>) -> Answer {
    json_or_refusal(set_draining(&app, request, false).await)
}

async fn set_draining(app: &App, request: Request<Body>, is_draining: bool) -> Result<Value, Refusal> {
    let body = read_object(request, &app.config, &app.bodies).await?;
    app.policy.check(&native::REPLICA, &body, app.config.strict_api)?;
    let fields = Fields::new(&body, "");
    let numbers = 0..=app.engine.replicas() as i128 - 1;
    let Some(replica) = fields.integer("replica", numbers)? else {
        return Err(fields.invalid("replica", "is required: the number of the replica"));
    };
    let status = app.engine.set_draining(replica as usize, is_draining);
    tracing::info!("replica {replica} is {} on request", status.state.name());
    Ok(json!({
        "status": "ok",
        "replica": status.replica,
        "state": status.state.name(),
        "requests_open": status.open,
    }))
}

/// What `/server_info` says of each replica; `engine` is null where none answered.
pub(crate) fn described(app: &App, infos: &[(usize, EngineInfo)]) -> Vec<Value> {
    let of = |status: &ReplicaStatus| {
        let routed: Map<String, Value> =
            status.routed.iter().map(|(reason, count)| (reason.name().into(), json!(count))).collect();
        json!({
            "dp": status.replica,
            "state": status.state.name(),
            "requests_open": status.open,
            "requests_routed": routed,
            "requests_moved_away": status.moved_away,
            "restarts": status.restarts,
            "engine": infos.iter().find(|(replica, _)| *replica == status.replica).map(|(_, info)| info),
        })
    };
    app.engine.replica_status().iter().map(of).collect()
}

/// What `/server_info` says of the ranks of pipelines: how long each computed, of the time in which there was work.
pub(crate) fn stages(engine: &EngineInfo) -> Vec<Value> {
    let of = |rank: &RankInfo| {
        json!({
            "rank": rank.rank,
            "label": rank.label,
            "computed_seconds": rank.stage_work.computed_us as f64 / 1e6,
            "work_seconds": rank.stage_work.work_us as f64 / 1e6,
            "bubble": rank.stage_work.bubble(),
        })
    };
    engine.ranks.iter().filter(|rank| rank.stage_work.work_us > 0).map(of).collect()
}

/// What `/health/ready` says of each replica.
pub(crate) fn states(app: &App) -> Vec<Value> {
    let ages: Vec<Option<f64>> = app.config.watch.as_ref().map_or_else(Vec::new, |watched| {
        let age =
            |marks: &[usize]| watched.page.token_age(marks.iter().copied()).map(|age| age.as_secs_f64());
        watched.by_replica().map(age).collect()
    });
    let of = |status: ReplicaStatus| {
        json!({
            "dp": status.replica,
            "state": status.state.name(),
            "token_age_seconds": ages.get(status.replica).copied().flatten(),
        })
    };
    app.engine.replica_status().into_iter().map(of).collect()
}
