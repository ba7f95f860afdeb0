//! API keys: who may use the server.
//!
//! With keys, every request needs `Authorization: Bearer <key>` or, as Anthropic's clients send it,
//! `x-api-key: <key>`, except `/health` and what begins so (for whoever restarts
//! the server) and `OPTIONS` (browsers ask without the key). Where a request carries several keys (a proxy's beside
//! the client's), one that is right suffices. A request without one costs a header read.

use crate::respond::{Answer, refuse};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use lockstep_core::Refusal;
use std::sync::Arc;

/// The keys that a server accepts. Never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ApiKeys(Vec<String>);

impl ApiKeys {
    /// These keys; none asks nobody for a key.
    pub fn new(keys: Vec<String>) -> Self {
        Self(keys)
    }

    /// Whether nobody is asked for a key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `key` is one of them. The time tells the keys' lengths at most: every key is compared, to
    /// its end.
    fn contains(&self, key: &[u8]) -> bool {
        self.0.iter().fold(false, |found, known| equal(known.as_bytes(), key) | found)
    }
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

/// Equality without an early end; `black_box` keeps the compiler from finding one.
fn equal(known: &[u8], given: &[u8]) -> bool {
    let differing = known.iter().zip(given).fold(0, |bits, (a, b)| std::hint::black_box(bits | (a ^ b)));
    known.len() == given.len() && differing == 0
}

/// The layer in front of every endpoint: passes a request on, or answers 401.
pub(crate) async fn check(State(keys): State<Arc<ApiKeys>>, request: Request, next: Next) -> Answer {
    let is_free =
        keys.is_empty() || request.method() == Method::OPTIONS || request.uri().path().starts_with("/health");
    let has_key = {
        let given = bearers(request.headers()).chain(api_keys(request.headers()));
        given.fold(false, |found, key| keys.contains(key) | found)
    };
    if is_free || has_key {
        return next.run(request).await;
    }
    unauthorized(request)
}

fn bearers(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
    })
}

/// Anthropic's header.
fn api_keys(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers.get_all("x-api-key").iter().map(|key| key.as_bytes().trim_ascii())
}

fn unauthorized(request: Request<Body>) -> Answer {
    let has_key = [header::AUTHORIZATION.as_str(), "x-api-key"]
        .iter()
        .any(|name| request.headers().contains_key(*name));
    let message = match has_key {
        true => "this API key is not one of the server's; send Authorization: Bearer <key>",
        false => "this server needs an API key; send Authorization: Bearer <key>",
    };
    let refusal = Refusal::with_status(401, "invalid_request_error", message).with_code("invalid_api_key");
    let mut answer = refuse(&refusal);
    answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_equal_or_not() {
        let keys = ApiKeys::new(vec!["abc".into(), "longer key".into()]);
        assert!(keys.contains(b"abc") && keys.contains(b"longer key"));
        for wrong in [&b""[..], b"ab", b"abd", b"abcd", b"longer kez"] {
            assert!(!keys.contains(wrong), "{wrong:?}");
        }
        assert!(!ApiKeys::default().contains(b""));
        assert_eq!(format!("{keys:?}"), "2 keys");
    }
}
