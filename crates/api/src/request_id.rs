//! `x-request-id`: what a client calls its request, in the answer and in the log.
//!
//! A name that is not valid is left out of both: a header that proxies and tracing libraries add must not fail a
//! request, and what is in the log must stay one line.

use crate::respond::Answer;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;

/// The header, on requests and on answers.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// Bytes of a valid name.
const BYTES_MAX: usize = 128;

/// The client's name of its request: up to 128 visible ASCII characters.
pub(crate) fn of(headers: &HeaderMap) -> Option<&HeaderValue> {
    let is_valid = |name: &&HeaderValue| {
        let bytes = name.as_bytes();
        (1..=BYTES_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
    };
    headers.get(HEADER).filter(is_valid)
}

/// The same as text, for logs and traces.
pub(crate) fn text_of(headers: &HeaderMap) -> Option<String> {
    Some(of(headers)?.to_str().ok()?.to_owned())
}

/// A layer around all others: every answer has the name of its request.
pub(crate) async fn echo(request: Request, next: Next) -> Answer {
    let name = of(request.headers()).cloned();
    let mut answer = next.run(request).await;
    if let Some(name) = name {
        answer.headers_mut().insert(HEADER, name);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_short_and_visible() {
        let named = |value: &[u8]| {
            let value = HeaderValue::from_bytes(value).unwrap();
            text_of(&HeaderMap::from_iter([(HEADER, value)]))
        };
        assert_eq!(named(b"req_7f-A/b").as_deref(), Some("req_7f-A/b"));
        assert_eq!(named(&[b'x'; BYTES_MAX]).map(|name| name.len()), Some(BYTES_MAX));
        for bad in [&b""[..], b"a b", b"a\tb", "é".as_bytes(), &[b'x'; BYTES_MAX + 1]] {
            assert_eq!(named(bad), None, "{bad:?}");
        }
        assert_eq!(text_of(&HeaderMap::new()), None);
    }
}
