//! `/health` and its like: whether the process answers, whether requests are admitted, whether tokens come.
//!
//! | endpoint | asks | 503 while |
//! |---|---|---|
//! | `/health/live` | nobody | never: whoever can read the answer has it |
//! | `/health` | nobody | requests are refused, or a process does not answer |
//! | `/health/ready` | the ranks, if no token went round them lately | the same, or no token comes |
//! | `/health_generate` | the ranks, always | the same, or no token comes |
//!
//! With several replicas (`--dp`) all is well while one of them serves; `/health/ready` tells of each.
//!
//! **Invariant:** none of them says that all is well while another of them, asked at the same moment, knows
//! better: they look at the same three things, in the same order.

use crate::engine::{Caller, Event, NewRequest, ReplicaState};
use crate::handlers::App;
use crate::replicas;
use crate::respond::{Answer, json, refuse};
use axum::extract::State;
use lockstep_core::{Refusal, SamplingParams};
use lockstep_wire::{Prompt, TextParams, TokenizeParams};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long the token of a health check may take; one that waits behind long prompts needs a while.
const GENERATE_PATIENCE: Duration = Duration::from_secs(20);
/// A token that went round every rank so lately proves that the next will.
const TOKEN_AGE_MAX: Duration = Duration::from_secs(10);
/// How long a token may take otherwise: callers of `/health/ready` give up early.
const READY_PATIENCE: Duration = Duration::from_secs(2);
/// Any token that every vocabulary has.
const PROMPT: u32 = 0;
/// In front of everything that clients may ask for.
const PRIORITY: i32 = i32::MAX;

/// `GET /health/live`: the process answers.
pub(crate) async fn live() -> Answer {
    json(&json!({ "status": "ok" }))
}

/// `GET /health`: 200 while requests are admitted and every process answers, else 503 with the reason.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Answer {
    match trouble(&app) {
        None => json(&json!({ "status": "ok" })),
        Some(refusal) => refuse(&refusal),
    }
}

/// `GET /health/ready`: 200 if a token went round every rank within the last seconds, or does now; `token_age_seconds`
/// says when.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Answer {
    if let Some(refusal) = trouble(&app) {
        return refuse(&refusal);
    }
    if token_age(&app).is_none_or(|age| age > TOKEN_AGE_MAX) {
        // One probe for all who ask at the same time; the others find its token.
        let _probing = app.probing.lock().await;
        if token_age(&app).is_none_or(|age| age > TOKEN_AGE_MAX)
            && let Err(refusal) = probe(&app, READY_PATIENCE).await
        {
            return refuse(&refusal);
        }
    }
    match trouble(&app) {
        // Without processes to watch (in tests) the probe itself is the proof.
        None => {
            let age = token_age(&app).unwrap_or_default().as_secs_f64();
            let replicas = replicas::states(&app);
            json(&json!({ "status": "ready", "token_age_seconds": age, "replicas": replicas }))
        }
        Some(refusal) => refuse(&refusal),
    }
}

/// `GET /health_generate`: 200 once all ranks together have generated a token, else 503 with the reason.
pub(crate) async fn generate(State(app): State<Arc<App>>) -> Answer {
    if let Some(refusal) = trouble(&app) {
        return refuse(&refusal);
    }
    let started = Instant::now();
    match probe(&app, GENERATE_PATIENCE).await {
        Ok(()) => json(&json!({ "status": "ok", "generate_ms": started.elapsed().as_secs_f64() * 1e3 })),
        Err(refusal) => refuse(&refusal),
    }
}

/// What is known to be wrong without asking anybody.
fn trouble(app: &App) -> Option<Refusal> {
    let not_answering = |text: String| Refusal::unavailable(text).with_code("not_answering");
    app.engine.refusing().or_else(|| app.engine.suspicion().map(not_answering))
}

/// How long ago a token had gone round every rank of a replica that serves: of the one that had the latest.
fn token_age(app: &App) -> Option<Duration> {
    let watched = app.config.watch.as_ref()?;
    let status = app.engine.replica_status();
    let serving =
        watched.by_replica().zip(status).filter(|(_, status)| status.state == ReplicaState::Serving);
    serving.filter_map(|(marks, _)| watched.page.token_age(marks.iter().copied())).min()
}

/// Has all ranks generate a token within `patience`. Errors with a 503 that says why there was none.
async fn probe(app: &App, patience: Duration) -> Result<(), Refusal> {
    match tokio::time::timeout(patience, generate_one(app)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(refusal)) => {
            let message = format!("the engine cannot generate: {}", refusal.message);
            Err(Refusal { message, ..Refusal::unavailable("") })
        }
        Err(_) => Err(Refusal::unavailable(format!(
            "no token came within {} s; {} requests are open, so the engine is overloaded or stuck",
            patience.as_secs(),
            app.engine.requests_open()
        ))),
    }
}

/// Generates one token; leaving early aborts it.
async fn generate_one(app: &App) -> Result<(), Refusal> {
    let request = NewRequest {
        prompt: Prompt::Tokens(vec![PROMPT]),
        tokenizing: TokenizeParams::default(),
        sampling: SamplingParams { max_tokens: Some(1), ignore_eos: true, ..SamplingParams::default() },
        text: TextParams::default(),
        cache_salt: None,
        priority: PRIORITY,
    };
    let mut generation = app.engine.submit(vec![request], 1, Caller::HealthCheck)?;
    loop {
        match generation.next().await {
            (_, Event::Refused(refusal)) => return Err(refusal),
            (_, Event::Delta(delta)) if delta.finish.is_some() => return Ok(()),
            (_, Event::Delta(_)) => {}
        }
    }
}
