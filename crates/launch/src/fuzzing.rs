//! What launchers of several hosts say to each other, for whatever feeds it nonsense: the crate `fuzz`.

use crate::hosts::fuzzing::{FromHost, Join, disagreement};
use crate::hosts::{Fact, StartOrder, ToHost};
use crate::{ChildStatus, Failure, Phase};
use lockstep_core::ExitCode;
use lockstep_wire::Role;
use serde::{Serialize, de::DeserializeOwned};

/// Reads a message as both sides do and says what comes of it. Panics where a launcher would, and where a message is another
/// one after it was written again.
pub fn read_host_message(bytes: &[u8]) {
    if let Ok(order) = serde_json::from_slice::<ToHost>(bytes) {
        assert_eq!(again(&order), order);
    }
    let Ok(message) = serde_json::from_slice::<FromHost>(bytes) else { return };
    let written = format!("{message:?}");
    assert_eq!(format!("{:?}", again(&message)), written);
    match message {
        FromHost::Join(join) => {
            let differs = disagreement(join.node_rank, &join.facts, &facts());
            assert!(differs.is_some() || join.facts.len() >= facts().len());
        }
        FromHost::Failed(failure) => assert!(failure.to_string().contains(&failure.process)),
        FromHost::Died { status, .. } => assert!(!status.to_string().is_empty()),
        FromHost::Ended | FromHost::DrainNoted | FromHost::Signal(_) | FromHost::Beat => {}
    }
}

fn again<T: Serialize + DeserializeOwned>(message: &T) -> T {
    let bytes = serde_json::to_vec(message).expect("what was read can be written");
    serde_json::from_slice(&bytes).expect("what was written can be read")
}

fn facts() -> Vec<Fact> {
    vec![Fact::new("lockstep", "1.0"), Fact::new("--tp", 2)]
}

/// One of every message, for inputs to begin with.
pub fn host_messages() -> Vec<Vec<u8>> {
    let name = || "lockstep-TP1-scheduler".to_owned();
    let (role, status) = (Role::Scheduler(1), ChildStatus::Signal(9));
    let failure = Failure::new(name(), role, status, Phase::Serving, vec!["a last line".into()]);
    let from = [
        FromHost::Join(Join { nnodes: 2, node_rank: 1, facts: facts() }),
        FromHost::Died { name: name(), role, status },
        FromHost::Failed(Box::new(Failure { reason: Some("it was stuck".into()), ..failure })),
        FromHost::Ended,
        FromHost::DrainNoted,
        FromHost::Signal(15),
        FromHost::Beat,
    ];
    let to = [
        ToHost::Welcome { run: "a1b2".into(), limit_ms: 30_000 },
        ToHost::Refused("host 1 has --tp 4".into()),
        ToHost::Start(StartOrder { incarnation: 1, broadcast_port: 40_000 }),
        ToHost::Serving,
        ToHost::Abort("a rank died".into()),
        ToHost::End("a rank died".into()),
        ToHost::Draining,
        ToHost::Goodbye { code: ExitCode::ChildDied, why: "a rank died".into() },
        ToHost::Beat,
    ];
    let from = from.iter().map(serde_json::to_vec);
    from.chain(to.iter().map(serde_json::to_vec))
        .map(|bytes| bytes.expect("invariant: strings and numbers serialise"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_is_read_as_it_was_written() {
        let messages = host_messages();
        messages.iter().for_each(|message| read_host_message(message));
        let is_read = |message: &&Vec<u8>| {
            serde_json::from_slice::<ToHost>(message).is_ok()
                || serde_json::from_slice::<FromHost>(message).is_ok()
        };
        assert_eq!(messages.iter().filter(is_read).count(), 16);
    }
}
