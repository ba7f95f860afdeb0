//! One request until it is decided: repeated while the server is busy, for as long as that is sensible.

use super::input::Request;
use super::output::Decided;
use crate::client::{Answer, Client, ClientError};
use serde_json::Value;
use std::time::Duration;

/// Pause before the first repetition; each further one waits twice as long.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
/// Longest pause that is not the server's own wish.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Longest pause whatever the server wishes.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

/// Asks a server, patiently.
#[derive(Clone, Debug)]
pub struct Asker {
    /// The way to it.
    pub client: Client,
    /// Replaces the model of every request.
    pub model: Option<String>,
    /// For requests that name none.
    pub default_model: String,
    /// Repetitions of one request.
    pub retries: u32,
    /// For one answer.
    pub limit: Duration,
    /// Whether a server that went away may be back soon; one that was started for this run is not.
    pub server_returns: bool,
}

impl Asker {
    /// What becomes of `request`, and how often it was repeated. Errors when the server cannot be reached
    /// or breaks off again and again, which decides nothing about the request.
    pub async fn decide(&self, mut request: Request) -> Result<(Decided, u32), ClientError> {
        if let Some(model) = &self.model {
            request.body.insert("model".into(), model.clone().into());
        } else if request.body.get("model").is_none_or(Value::is_null) {
            request.body.insert("model".into(), self.default_model.clone().into());
        }
        let body = Value::Object(request.body).to_string();
        for repetition in 0.. {
            let answer =
                tokio::time::timeout(self.limit, self.client.post(&request.url, body.clone().into())).await;
            let wish = match answer {
                Err(_) => return Ok((self.too_long(), repetition)),
                Ok(Ok(answer)) if repetition == self.retries || !is_busy(answer.status) => {
                    return Ok((answered(&answer), repetition));
                }
                Ok(Err(error)) if repetition == self.retries || !self.server_returns => return Err(error),
                Ok(Ok(answer)) => answer.retry_after,
                Ok(Err(_)) => None,
            };
            tokio::time::sleep(pause(repetition, wish)).await;
        }
        unreachable!("invariant: the last repetition returns")
    }

    fn too_long(&self) -> Decided {
        let error = ClientError::Timeout { base: self.client.base(), seconds: self.limit.as_secs_f64() };
        Decided::Unanswered { code: error.kind(), message: error.to_string() }
    }
}

/// Whether a later repetition may meet another answer: too many requests, or nobody there to answer them.
fn is_busy(status: u16) -> bool {
    matches!(status, 429 | 502 | 503 | 504)
}

fn answered(answer: &Answer) -> Decided {
    let body: Value = serde_json::from_slice(&answer.body)
        .unwrap_or_else(|_| String::from_utf8_lossy(&answer.body).into_owned().into());
    let id = || body.get("id").and_then(Value::as_str).map(str::to_owned);
    Decided::Answered { status: answer.status, request_id: answer.request_id.clone().or_else(id), body }
}

/// How long to wait before the next repetition: at least what the server wishes.
fn pause(repetition: u32, wish: Option<Duration>) -> Duration {
    let own = PAUSE_FIRST.saturating_mul(1 << repetition.min(16)).min(PAUSE_MAX);
    wish.map_or(own, |wish| wish.clamp(PAUSE_FIRST, RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::runtime;
    use crate::client::scripted::ScriptedServer;

    #[test]
    fn pauses_grow_and_follow_the_server() {
        let ms = |repetition, wish| pause(repetition, wish).as_millis();
        assert_eq!((ms(0, None), ms(1, None), ms(3, None), ms(40, None)), (500, 1000, 4000, 30_000));
        let wish = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(
            (ms(5, wish(1)), ms(0, wish(60)), ms(0, wish(0)), ms(0, wish(86_400))),
            (1000, 60_000, 500, 600_000)
        );
    }

    fn asker(url: &str, retries: u32, server_returns: bool) -> Asker {
        Asker {
            client: Client::new(url, None, 0).unwrap(),
            model: None,
            default_model: "m".into(),
            retries,
            limit: Duration::from_secs(20),
            server_returns,
        }
    }

    fn decide(asker: &Asker) -> Result<(Decided, u32), ClientError> {
        let request = Request { custom_id: "a".into(), url: "/v1/x".into(), body: Default::default() };
        runtime().unwrap().block_on(asker.decide(request))
    }

    #[test]
    fn busy_servers_and_broken_connections_are_asked_again() {
        const BUSY: &str = "HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}";
        const GOOD: &str = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{\"id\":\"x\"}";
        let server = ScriptedServer::start(&[BUSY, GOOD, "", BUSY, BUSY]);
        let (decided, repetitions) = decide(&asker(&server.url, 3, true)).unwrap();
        let body = serde_json::json!({"id": "x"});
        assert_eq!(decided, Decided::Answered { status: 200, request_id: Some("x".into()), body });
        assert_eq!(repetitions, 1);
        // The last answer stands when there are no more repetitions.
        let (decided, repetitions) = decide(&asker(&server.url, 2, true)).unwrap();
        assert!(matches!(decided, Decided::Answered { status: 503, .. }) && repetitions == 2);
        assert!(server.requests()[0].ends_with("{\"model\":\"m\"}"));
    }

    #[test]
    fn a_server_that_is_gone_decides_nothing() {
        let lost = decide(&asker("http://127.0.0.1:1", 100, false)).unwrap_err();
        assert!(matches!(lost, ClientError::Connect { .. }), "{lost}");
    }
}
