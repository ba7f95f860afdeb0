//! Where a collector listens.

use axum::http::Uri;
use std::str::FromStr;

/// What OTLP/HTTP puts behind a collector's address for traces.
const TRACES_PATH: &str = "/v1/traces";

/// The address of a collector that takes OTLP over plain HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpEndpoint {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) path: String,
}

impl FromStr for OtlpEndpoint {
    type Err = String;

    /// From `http://host:4318`, with or without a path before `/v1/traces`.
    fn from_str(text: &str) -> Result<Self, String> {
        let uri: Uri =
            text.parse().map_err(|_| "it is no address; write e.g. http://127.0.0.1:4318".to_owned())?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err("https is not spoken; run a collector on this host and let it forward".into());
            }
            _ => return Err("it does not begin with http://; write e.g. http://127.0.0.1:4318".into()),
        }
        let port = uri.port_u16().ok_or("the port is missing; collectors take OTLP over HTTP at 4318")?;
        if uri.query().is_some() || text.contains('@') {
            return Err(
                "an address with a query or a user is not supported; write e.g. http://127.0.0.1:4318".into(),
            );
        }
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let base = uri.path().trim_end_matches('/');
        let path = if base.ends_with(TRACES_PATH) { base.to_owned() } else { format!("{base}{TRACES_PATH}") };
        Ok(Self { host, port, path })
    }
}

impl std::fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, port, path } = self;
        if host.contains(':') {
            write!(f, "http://[{host}]:{port}{path}")
        } else {
            write!(f, "http://{host}:{port}{path}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_completed_or_refused_with_a_way_out() {
        let parsed = |text: &str| text.parse::<OtlpEndpoint>().map(|endpoint| endpoint.to_string());
        let whole = "http://c:4318/v1/traces".to_owned();
        for same in ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"] {
            assert_eq!(parsed(same), Ok(whole.clone()), "{same}");
        }
        assert_eq!(parsed("http://[::1]:1/a/"), Ok("http://[::1]:1/a/v1/traces".into()));
        for (bad, word) in [
            ("https://c:4318", "https"),
            ("c:4318", "http://"),
            ("http://c", "4318"),
            ("http://u@c:4318", "user"),
            ("http://c:4318?x", "query"),
            ("", "address"),
        ] {
            let message = parsed(bad).unwrap_err();
            assert!(message.contains(word), "{bad}: {message}");
        }
    }
}
