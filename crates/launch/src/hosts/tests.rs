use super::{Fact, Head, HeadSpec, Room, RoomSpec, StartOrder, ToHost};
use crate::watcher::Command;
use crate::{ChildStatus, Event, Failure, Phase, Reporter};
use lockstep_comm::secret::Key;
use lockstep_core::{ExitCode, HostMap, Topology};
use lockstep_wire::Role;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Long enough that only a hang reaches it.
const LONG: Duration = Duration::from_secs(60);

fn key() -> Key {
    Key::of_secret("the secret of these tests").unwrap()
}

fn facts(tp: usize) -> Vec<Fact> {
    vec![Fact::new("lockstep", "1.0"), Fact::new("--tp", tp)]
}

/// A room for two hosts and what it reports.
fn room(limit: Duration) -> (Room, Receiver<Command>) {
    let map = HostMap::new(&Topology::tensor_parallel(2), 2).unwrap();
    let address = "127.0.0.1:0".parse().unwrap();
    let (reporter, reported) = Reporter::for_test();
    let spec = RoomSpec { address, key: key(), map, facts: facts(2), limit };
    (Room::open(spec, reporter).unwrap(), reported)
}

fn join_as(room: &Room, key: Key, node_rank: usize, facts: Vec<Fact>) -> Result<Head, String> {
    let target = room.address().to_string();
    Head::join(HeadSpec { target, key, nnodes: 2, node_rank, facts, patience: LONG })
}

fn next(head: &mut Head) -> Result<ToHost, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(LONG, head.next()).await.expect("in time") })
}

fn report(reported: &Receiver<Command>) -> Event {
    match reported.recv_timeout(LONG).expect("a report") {
        Command::Elsewhere(event) => *event,
        _ => panic!("nothing else is reported"),
    }
}

const ORDER: StartOrder = StartOrder { incarnation: 0, broadcast_port: 1 };

fn failure() -> Failure {
    let status = ChildStatus::Signal(9);
    Failure::new("lockstep-TP1-scheduler".into(), Role::Scheduler(1), status, Phase::Serving, Vec::new())
}

#[test]
fn a_host_joins_and_hears_what_is_to_be_done() {
    let (room, _reported) = room(LONG);
    let who_is_missing = room.wait_for_all(Duration::ZERO).unwrap_err();
    assert!(who_is_missing.contains("1 of 2 hosts have joined"), "{who_is_missing}");
    assert!(who_is_missing.contains("host 1 is missing"), "{who_is_missing}");
    let mut head = join_as(&room, key(), 1, facts(2)).unwrap();
    room.wait_for_all(LONG).unwrap();
    assert_eq!(head.run_key.bytes(), room.run_key().bytes());
    room.start(ORDER, ("ranks 0", 2));
    assert_eq!(next(&mut head), Ok(ToHost::Start(ORDER)));
    room.set_phase(Phase::Serving);
    assert_eq!(next(&mut head), Ok(ToHost::Serving));
    room.set_phase(Phase::Draining);
    assert_eq!(next(&mut head), Ok(ToHost::Draining));
    head.drain_noted();
    room.wait_drain_noted(LONG);
    assert!(!room.wait_ended(Duration::ZERO));
    head.ended();
    assert!(room.wait_ended(LONG));
    room.goodbye(ExitCode::Drained, "");
    assert_eq!(next(&mut head), Ok(ToHost::Goodbye { code: ExitCode::Drained, why: String::new() }));
}

#[test]
fn who_does_not_fit_is_sent_away_with_the_reason() {
    let (room, _reported) = room(LONG);
    let secret = Key::of_secret("not the secret of these tests").unwrap();
    let refused = join_as(&room, secret, 1, facts(2)).err().unwrap();
    assert!(refused.contains("another secret"), "{refused}");
    let refused = join_as(&room, key(), 1, facts(4)).err().unwrap();
    assert!(refused.contains("host 1 has --tp 4, host 0 has 2"), "{refused}");
    let refused = join_as(&room, key(), 2, facts(2)).err().unwrap();
    assert!(refused.contains("--node-rank 2, possible are 1..=1"), "{refused}");
    let missing = room.wait_for_all(Duration::ZERO).unwrap_err();
    assert!(missing.contains("last refused: a host comes with --node-rank 2"), "{missing}");
    // A second host in the same place hears of it as its first order.
    let _first = join_as(&room, key(), 1, facts(2)).unwrap();
    room.wait_for_all(LONG).unwrap();
    let mut second = join_as(&room, key(), 1, facts(2)).unwrap();
    let Ok(ToHost::Refused(why)) = next(&mut second) else { panic!("refused") };
    assert!(why.contains("a second host comes with --node-rank 1"), "{why}");
}

#[test]
fn deaths_of_other_hosts_are_reported_while_their_ranks_should_live() {
    let (room, reported) = room(LONG);
    let mut head = join_as(&room, key(), 1, facts(2)).unwrap();
    room.wait_for_all(LONG).unwrap();
    room.start(ORDER, ("ranks 0", 2));
    head.died(failure().process, Role::Scheduler(1), ChildStatus::Signal(9));
    head.failed(failure());
    let Event::ChildDied { name, .. } = report(&reported) else { panic!("a death") };
    assert_eq!(name, "lockstep-TP1-scheduler on host 1");
    let Event::Failed(failed) = report(&reported) else { panic!("a failure") };
    assert!(
        failed.to_string().contains("lockstep-TP1-scheduler on host 1 was killed by signal 9"),
        "{failed}"
    );
    // Ranks that are being ended die, and that is no news.
    room.end("the engine is restarted");
    while next(&mut head).unwrap() != ToHost::End("the engine is restarted".into()) {}
    head.failed(failure());
    head.ended();
    assert!(room.wait_ended(LONG));
    head.signalled(15);
    assert_eq!(report(&reported), Event::Signal(15));
}

#[test]
fn a_host_that_leaves_or_falls_silent_is_lost() {
    let (room, reported) = room(LONG);
    let head = join_as(&room, key(), 1, facts(2)).unwrap();
    room.wait_for_all(LONG).unwrap();
    room.start(ORDER, ("ranks 0", 2));
    room.set_phase(Phase::Serving);
    drop(head);
    let Event::ChildDied { status: ChildStatus::Lost, .. } = report(&reported) else { panic!("a loss") };
    let Event::Failed(failed) = report(&reported) else { panic!("a failure") };
    let said = failed.to_string();
    assert_eq!(said, "lockstep: host 1 (127.0.0.1) was lost while serving: its launcher has ended");
    assert_eq!((failed.exit_code, room.missing()), (ExitCode::ChildDied, vec![1]));
    // It may join again; host 0 that is gone is the last thing it hears.
    let mut again = join_as(&room, key(), 1, facts(2)).unwrap();
    room.wait_for_all(LONG).unwrap();
    room.goodbye(ExitCode::ChildDied, "on purpose");
    assert_eq!(next(&mut again), Ok(ToHost::Goodbye { code: ExitCode::ChildDied, why: "on purpose".into() }));
}
