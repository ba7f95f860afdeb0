//! Which processes a server consists of and what their sockets are called; a pure description.
//!
//! **Invariant:** ranks are numbered as [`Topology`] says, so nothing here assumes `world_size == tp_size`. Used
//! by the launcher to spawn, to wait for readiness and to tell each child which endpoints it binds and connects to.

use lockstep_core::{ParallelInfo, Topology};
use lockstep_wire::Role;

/// The processes of one server on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Its ranks.
    pub topology: Topology,
    /// Tokenizer processes; 0 means that the detokenizer process does both.
    pub num_tokenizer: usize,
}

/// One child process of a [`Layout`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its part.
    pub role: Role,
    /// `argv[0]` and the name in every message, e.g. `lockstep-TP0-scheduler`.
    pub name: String,
    /// Place in the parallel layout; schedulers only.
    pub parallel: Option<ParallelInfo>,
}

impl Layout {
    /// Every child in the order to start them: schedulers first, because they load longest.
    pub fn processes(&self) -> Vec<Process> {
        let schedulers = self.topology.places().map(|parallel| Process {
            role: Role::Scheduler(parallel.rank()),
            name: format!("lockstep-{}-scheduler", parallel.label()),
            parallel: Some(parallel),
        });
        let tokenizers = (0..self.num_tokenizer).map(|i| Process {
            role: Role::Tokenizer(i),
            name: format!("lockstep-tokenizer-{i}"),
            parallel: None,
        });
        let detokenizer =
            Process { role: Role::Detokenizer, name: "lockstep-detokenizer-0".into(), parallel: None };
        schedulers.chain(tokenizers).chain([detokenizer]).collect()
    }

    /// Roles whose acknowledgement makes the server ready: the primary of every replica (which
    /// speaks for its ranks after a barrier), every tokenizer and the detokenizer.
    pub fn acknowledging(&self) -> Vec<Role> {
        self.processes()
            .into_iter()
            .filter(|p| p.parallel.is_none_or(|parallel| parallel.is_primary()))
            .map(|p| p.role)
            .collect()
    }

    /// Names of the control-plane sockets.
    pub fn endpoints(&self) -> Endpoints {
        let tokenizers = match self.num_tokenizer {
            0 => vec!["tokenizer-0".into()],
            n => (0..n).map(|i| format!("tokenizer-{i}")).collect(),
        };
        Endpoints {
            api: "api".into(),
            tokenizers,
            detokenizer: "detokenizer-0".into(),
            schedulers: (0..self.topology.dp_size).map(|dp| format!("scheduler-{dp}")).collect(),
            broadcasts: (0..self.topology.dp_size).map(|dp| format!("broadcast-{dp}")).collect(),
        }
    }
}

/// File names of the sockets inside the server's private directory; short, because an ipc path may
/// have 107 bytes in all. The receiver binds, except for broadcasts, which rank 0 binds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoints {
    /// Everything for the api process.
    pub api: String,
    /// One per tokenizer process; a single one, served by the detokenizer process, when there are
    /// no tokenizers.
    pub tokenizers: Vec<String>,
    /// Tokens on their way to text.
    pub detokenizer: String,
    /// Requests to the primary, one per replica.
    pub schedulers: Vec<String>,
    /// Rank 0 to the other ranks, one per replica; nobody subscribes when a replica has one rank.
    pub broadcasts: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(tp_size: usize, pp_size: usize, dp_size: usize, num_tokenizer: usize) -> Layout {
        Layout { topology: Topology { tp_size, pp_size, dp_size }, num_tokenizer }
    }

    fn names(layout: Layout) -> Vec<String> {
        layout.processes().into_iter().map(|p| p.name).collect()
    }

    #[test]
    fn tensor_parallel_names() {
        assert_eq!(
            names(layout(2, 1, 1, 0)),
            ["lockstep-TP0-scheduler", "lockstep-TP1-scheduler", "lockstep-detokenizer-0"]
        );
        assert_eq!(
            names(layout(1, 1, 1, 2)),
            [
                "lockstep-TP0-scheduler",
                "lockstep-tokenizer-0",
                "lockstep-tokenizer-1",
                "lockstep-detokenizer-0"
            ]
        );
    }

    #[test]
    fn every_axis_counts() {
        let t = layout(2, 3, 2, 1);
        assert_eq!(names(t)[7], "lockstep-DP1-PP0-TP1-scheduler");
        assert_eq!(
            t.acknowledging(),
            [Role::Scheduler(0), Role::Scheduler(6), Role::Tokenizer(0), Role::Detokenizer]
        );
        assert_eq!(t.endpoints().broadcasts, ["broadcast-0", "broadcast-1"]);
    }

    #[test]
    fn names_are_unique() {
        let t = layout(8, 2, 2, 3);
        let mut all = names(t);
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!((count, all.len()), (36, 36));
    }

    #[test]
    fn no_tokenizer_still_has_a_tokenizer_endpoint() {
        assert_eq!(layout(1, 1, 1, 0).endpoints().tokenizers, ["tokenizer-0"]);
        assert_eq!(layout(1, 1, 1, 2).endpoints().tokenizers.len(), 2);
    }
}
