//! What launchers tell each other. JSON, so that another version can be told from nonsense.

use crate::{ChildStatus, Failure};
use lockstep_core::ExitCode;
use lockstep_wire::Role;
use serde::{Deserialize, Serialize};

/// Something that must be equal on every host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// What it is, to follow "has": `--tp`, `lockstep`.
    pub name: String,
    /// Its value here.
    pub value: String,
}

impl Fact {
    /// A fact.
    pub fn new(name: impl Into<String>, value: impl ToString) -> Self {
        Self { name: name.into(), value: value.to_string() }
    }
}

/// The first thing that host `host` has otherwise than host 0.
pub(crate) fn disagreement(host: usize, theirs: &[Fact], ours: &[Fact]) -> Option<String> {
    ours.iter().find_map(|our| {
        let their = theirs.iter().find(|their| their.name == our.name);
        let their = their.map_or("nothing", |their| &their.value);
        (their != our.value).then(|| {
            format!(
                "host {host} has {} {their}, host 0 has {}; it must be the same on every host",
                our.name, our.value
            )
        })
    })
}

/// What a host comes with.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Join {
    pub(crate) nnodes: usize,
    pub(crate) node_rank: usize,
    pub(crate) facts: Vec<Fact>,
}

/// What host 0 tells another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToHost {
    /// It has joined the run of this name.
    Welcome {
        /// Random; keys of the run are derived with it.
        run: String,
        /// Milliseconds of silence after which a host is lost.
        limit_ms: u64,
    },
    /// It cannot join, for this reason.
    Refused(String),
    /// Its ranks are to be started.
    Start(StartOrder),
    /// The engine serves.
    Serving,
    /// Ranks must not wait for each other any more, because of this.
    Abort(String),
    /// Its ranks are to be ended, because of this; more may follow.
    End(String),
    /// Its ranks will end by themselves.
    Draining,
    /// It is over.
    Goodbye {
        /// What every launcher exits with.
        code: ExitCode,
        /// Why, unless it was drained.
        why: String,
    },
    /// Host 0 lives.
    Beat,
}

/// Which set of ranks is to be started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartOrder {
    /// Counts the sets of this run.
    pub incarnation: usize,
    /// Port on host 0 where rank 0 publishes to ranks of other hosts.
    pub broadcast_port: u16,
}

/// What a host tells host 0.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromHost {
    /// The first message.
    Join(Join),
    /// A child of its has ended although nobody asked it to; `Failed` follows.
    Died { name: String, role: Role, status: ChildStatus },
    /// The first cause among its children.
    Failed(Box<Failure>),
    /// It has no children any more.
    Ended,
    /// It has heard that ranks will end by themselves.
    DrainNoted,
    /// It was sent this signal.
    Signal(i32),
    /// It lives.
    Beat,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let ours = [Fact::new("lockstep", "1.0"), Fact::new("--tp", 2), Fact::new("--chunk", 512)];
        assert_eq!(disagreement(1, &ours, &ours), None);
        let theirs = [Fact::new("--chunk", 256), Fact::new("--tp", 4), Fact::new("lockstep", "1.0")];
        let said = disagreement(1, &theirs, &ours).unwrap();
        assert_eq!(said, "host 1 has --tp 4, host 0 has 2; it must be the same on every host");
        assert!(
            disagreement(2, &[], &ours).unwrap().starts_with("host 2 has lockstep nothing, host 0 has 1.0")
        );
    }
}
