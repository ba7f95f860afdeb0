//! `/tokenize` and `/detokenize`: questions to the tokenizer processes, answered without rank 0.

use crate::body::read_object;
use crate::connection::Connection;
use crate::handlers::App;
use crate::request::text::{self, OneOrMany};
use crate::respond::{Answer, json_or_refusal};
use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::Request;
use futures::future::try_join_all;
use lockstep_core::{Refusal, TokenId};
use lockstep_wire::Tokenized;
use serde::Serialize;
use std::sync::Arc;

/// The answer of `/tokenize`.
#[derive(Serialize)]
struct TokenizeAnswer {
    count: OneOrManyBody<usize>,
    max_model_len: usize,
    tokens: OneOrManyBody<Vec<TokenId>>,
    /// Null unless asked for.
    token_strs: Option<OneOrManyBody<Vec<String>>>,
}

/// The answer of `/detokenize`: vLLM's name and SGLang's.
#[derive(Serialize)]
struct DetokenizeAnswer {
    prompt: OneOrManyBody<String>,
    text: OneOrManyBody<String>,
}

#[derive(Clone, Serialize)]
#[serde(untagged)]
enum OneOrManyBody<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrManyBody<T> {
    /// One value out of `list` if one was asked for, else all.
    fn of(list: Vec<T>, is_one: bool) -> Self {
        let mut list = list;
        match list.pop() {
            Some(one) if is_one => Self::One(one),
            last => {
                list.extend(last);
                Self::Many(list)
            }
        }
    }
}

impl<T> OneOrMany<T> {
    fn into_list(self) -> (Vec<T>, bool) {
        match self {
            OneOrMany::One(one) => (vec![one], true),
            OneOrMany::Many(list) => (list, false),
        }
    }
}

/// `POST /tokenize`, `POST /v1/tokenize`
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    ConnectInfo(connection): ConnectInfo<Connection>,
    request: Request<Body>,
) -> Answer {
    let _hold = connection.hold();
    json_or_refusal(tokenized(&app, request).await)
}

async fn tokenized(app: &App, request: Request<Body>) -> Result<TokenizeAnswer, Refusal> {
    let body = read_object(request, &app.config, &app.bodies).await?;
    let call = text::tokenize(&body, &app.config, &app.policy)?;
    drop(body);
    let (prompts, is_one) = call.prompts.into_list();
    let asked =
        prompts.into_iter().map(|p| app.engine.tokenize(p, call.add_special_tokens, call.with_pieces));
    let (tokens, pieces): (Vec<_>, Vec<_>) =
        try_join_all(asked).await?.into_iter().map(|Tokenized { tokens, pieces }| (tokens, pieces)).unzip();
    let count = tokens.iter().map(Vec::len).collect();
    let pieces: Option<Vec<_>> = pieces.into_iter().collect();
    Ok(TokenizeAnswer {
        count: OneOrManyBody::of(count, is_one),
        max_model_len: app.config.context_max,
        tokens: OneOrManyBody::of(tokens, is_one),
        token_strs: pieces.map(|pieces| OneOrManyBody::of(pieces, is_one)),
    })
}

/// `POST /detokenize`, `POST /v1/detokenize`
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    ConnectInfo(connection): ConnectInfo<Connection>,
    request: Request<Body>,
) -> Answer {
    let _hold = connection.hold();
    json_or_refusal(detokenized(&app, request).await)
}

async fn detokenized(app: &App, request: Request<Body>) -> Result<DetokenizeAnswer, Refusal> {
    let body = read_object(request, &app.config, &app.bodies).await?;
    let call = text::detokenize(&body, &app.config, &app.policy)?;
    drop(body);
    let (lists, is_one) = call.tokens.into_list();
    let asked = lists.into_iter().map(|tokens| app.engine.detokenize(tokens, call.skip_special_tokens));
    let text = OneOrManyBody::of(try_join_all(asked).await?, is_one);
    Ok(DetokenizeAnswer { prompt: text.clone(), text })
}
