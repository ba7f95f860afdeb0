//! The address of a server, as people write it.

use super::ClientError;
use hyper::Uri;
use std::fmt;

/// Scheme, host, port and whatever path stands before `/v1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl(String);

impl BaseUrl {
    /// Of `text`, which may end in a slash or, as OpenAI's clients are told it, in `/v1`.
    pub fn parse(text: &str) -> Result<Self, ClientError> {
        let wrong = |reason: &str| ClientError::Url { url: text.to_owned(), reason: reason.to_owned() };
        let uri: Uri = text.trim().parse().map_err(|e| wrong(&format!("{e}")))?;
        let Some(authority) = uri.authority() else { return Err(wrong("it names no host")) };
        let scheme = match uri.scheme_str() {
            Some(scheme @ ("http" | "https")) => scheme,
            Some(_) => return Err(wrong("its scheme is neither http nor https")),
            None => return Err(wrong("it does not begin with http:// or https://")),
        };
        if uri.query().is_some() {
            return Err(wrong("it has a query"));
        }
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path);
        Ok(Self(format!("{scheme}://{authority}{path}")))
    }

    /// The address of `path`, which begins with a slash.
    pub fn join(&self, path: &str) -> Result<Uri, ClientError> {
        let url = format!("{}{path}", self.0);
        url.parse().map_err(|e| ClientError::Url { url, reason: format!("{e}") })
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_people_write_them() {
        for text in ["http://h:1", "http://h:1/", "http://h:1/v1", " http://h:1/v1/ "] {
            assert_eq!(BaseUrl::parse(text).unwrap().to_string(), "http://h:1", "{text}");
        }
        let below = BaseUrl::parse("https://h/api/v1").unwrap();
        assert_eq!(below.join("/v1/models").unwrap(), "https://h/api/v1/models");
    }

    #[test]
    fn what_is_no_address_is_refused_in_a_sentence() {
        for text in ["", "127.0.0.1:1919", "localhost", "ftp://h", "http://h/?x=1", "http:// h"] {
            let error = BaseUrl::parse(text).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("http://127.0.0.1:1919"), "{error}");
        }
    }
}
