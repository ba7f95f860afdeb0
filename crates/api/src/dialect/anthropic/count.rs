//! `POST /v1/messages/count_tokens`: the tokens of a conversation as the model's template writes it.
//!
//! A tokenizer renders and counts; no rank hears of it.

use super::super::{Dialect, Reading};
use super::{Messages, request};
use crate::body::read_object;
use crate::connection::Connection;
use crate::handlers::App;
use crate::openapi::anthropic;
use crate::request::Endpoint;
use crate::respond::{Answer, json_or_refusal};
use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::Request;
use lockstep_core::Refusal;
use serde_json::json;
use std::sync::Arc;

/// `POST /v1/messages/count_tokens`
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    ConnectInfo(connection): ConnectInfo<Connection>,
    request: Request<Body>,
) -> Answer {
    let _hold = connection.hold();
    json_or_refusal(counted(&app, request).await.map(|count| json!({ "input_tokens": count })))
}

async fn counted(app: &App, request: Request<Body>) -> Result<usize, Refusal> {
    let body = read_object(request, &app.config, &app.bodies).await?;
    let reading = Reading { config: &app.config, policy: &app.policy };
    app.policy.check(&anthropic::COUNT_TOKENS, &body, app.config.strict_api)?;
    let translated = request::translate(&body, &app.config, request::Length::Absent)?;
    let call = Messages::validated(Endpoint::Chat, &translated, &reading)?;
    let prompt = call.requests.into_iter().next().expect("invariant: a chat has a request").prompt;
    // A template writes its special tokens itself.
    let tokenized = app.engine.tokenize(prompt, false, false).await;
    tokenized.map(|found| found.tokens.len()).map_err(|refusal| Messages::NAMES.in_their_terms(refusal))
}
