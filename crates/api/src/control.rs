//! How the launcher steers a running server: drain it, or tell it that the engine is lost.
//!
//! **Invariant:** phases only go forward (serving, draining, failed); a failure is final and wins
//! over a drain.

use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// What the server is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Requests are admitted.
    Serving,
    /// New requests get 503; open ones may end within `grace`.
    Draining { grace: Duration },
    /// The engine is lost; every request is answered with `cause`.
    Failed { cause: String },
}

/// The server's end: handed to [`serve`](crate::serve).
#[derive(Debug)]
pub struct ServerControl {
    pub(crate) phase: watch::Receiver<Phase>,
}

/// The launcher's end.
#[derive(Clone, Debug)]
pub struct ServerHandle {
    phase: Arc<watch::Sender<Phase>>,
}

impl ServerControl {
    /// Both ends, in the serving phase. A server whose handles are all dropped serves for ever.
    pub fn new() -> (ServerHandle, ServerControl) {
        let (sender, phase) = watch::channel(Phase::Serving);
        (ServerHandle { phase: Arc::new(sender) }, ServerControl { phase })
    }

    /// Waits for the next change of phase.
    pub(crate) async fn changed(&mut self) {
        if self.phase.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl ServerHandle {
    /// Stops admission (503 with Retry-After) and lets open requests end within `grace`, counted
    /// from now. Calling it again sets a new grace, so a second signal can pass zero.
    pub fn drain(&self, grace: Duration) {
        self.phase.send_if_modified(|phase| {
            let forward = !matches!(phase, Phase::Failed { .. });
            if forward {
                *phase = Phase::Draining { grace };
            }
            forward
        });
    }

    /// The engine is lost (a child died): every open request is answered with `cause` at once.
    /// Only the first cause counts.
    pub fn fail(&self, cause: impl Into<String>) {
        let cause = cause.into();
        self.phase.send_if_modified(|phase| {
            let forward = !matches!(phase, Phase::Failed { .. });
            if forward {
                *phase = Phase::Failed { cause };
            }
            forward
        });
    }
}

/// How [`serve`](crate::serve) ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Drained: every open request got its whole answer.
    Drained,
    /// The grace was over; this many requests were ended with an error.
    Cut {
        /// Requests that did not get their whole answer.
        requests: usize,
    },
    /// The engine was lost.
    Failed,
}
