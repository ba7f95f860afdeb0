//! A supervisor in this process, its children real.

use crate::Case;
use crate::harness::{PATIENCE, Process, Rig, spec};
use lockstep_core::ExitCode;
use lockstep_launch::{
    ChildSpec, ChildStatus, Event, GROUP_ABORTED_EXIT, LaunchError, Phase, ShutdownReport,
};
use lockstep_wire::Role;
use rustix::fs::MemfdFlags;
use rustix::process::Signal;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const CASES: &[Case] = &[
    ("a_killed_child_is_named_in_one_line", a_killed_child_is_named_in_one_line),
    ("exit_codes_while_loading", exit_codes_while_loading),
    ("a_panic_shows_its_message", a_panic_shows_its_message),
    ("reactions_do_not_hide_the_cause", reactions_do_not_hide_the_cause),
    ("an_open_verdict_is_given_at_shutdown", an_open_verdict_is_given_at_shutdown),
    ("a_replica_fails_and_ends_alone", a_replica_fails_and_ends_alone),
    ("shutdown_ends_every_kind_of_child", shutdown_ends_every_kind_of_child),
    ("exit_zero_is_expected_only_while_draining", exit_zero_is_expected_only_while_draining),
    ("drop_leaves_nobody", drop_leaves_nobody),
    ("children_can_be_started_again", children_can_be_started_again),
    ("a_childs_surroundings", a_childs_surroundings),
    ("inherited_descriptors_arrive_in_order", inherited_descriptors_arrive_in_order),
    ("large_configurations_do_not_block", large_configurations_do_not_block),
    ("bad_specs_are_refused", bad_specs_are_refused),
    ("output_is_forwarded_line_by_line", output_is_forwarded_line_by_line),
    ("a_flood_of_output_starves_nobody", a_flood_of_output_starves_nobody),
];

fn a_killed_child_is_named_in_one_line() {
    let mut rig = Rig::new();
    let _zero = rig.up(0, "sleep");
    let one = rig.up(1, "busy");
    rig.supervisor.set_phase(Phase::Serving).unwrap();
    one.signal(Signal::KILL);
    let died = Event::ChildDied {
        name: "lockstep-TP1-scheduler".into(),
        role: Role::Scheduler(1),
        status: ChildStatus::Signal(9),
    };
    assert_eq!(rig.event(), died);
    let failure = rig.failure();
    assert_eq!(
        failure.to_string(),
        "lockstep: lockstep-TP1-scheduler was killed by signal 9 (SIGKILL) while serving; last log line: up"
    );
    assert_eq!(failure.exit_code, ExitCode::ChildDied);
}

fn a_replica_fails_and_ends_alone() {
    let mut rig = Rig::new();
    let up = |rig: &Rig, rank: usize, replica: usize| {
        let spec = ChildSpec { replica: Some(replica), ..spec(rank, "sleep") };
        let process = Process::open(rig.supervisor.spawn(spec).unwrap());
        rig.line_with("up");
        process
    };
    let _stays = up(&rig, 0, 0);
    let (one, _two) = (up(&rig, 1, 1), up(&rig, 2, 1));
    rig.supervisor.set_phase(Phase::Serving).unwrap();
    one.signal(Signal::KILL);
    assert!(matches!(rig.event(), Event::ChildDied { role: Role::Scheduler(1), .. }));
    let failure = rig.failure();
    assert_eq!((failure.replica, failure.phase), (Some(1), Phase::Serving));
    rig.supervisor.end_replica(1, PATIENCE).unwrap();
    assert_eq!(rig.event(), Event::ReplicaEnded(1));
    let left: Vec<_> = rig.supervisor.processes().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(left, ["lockstep-TP0-scheduler"]);
    // Its place is taken again, and fails again, now while it loads.
    rig.supervisor.set_replica_phase(1, Phase::Loading).unwrap();
    up(&rig, 1, 1).signal(Signal::KILL);
    assert!(matches!(rig.event(), Event::ChildDied { .. }));
    let failure = rig.failure();
    assert_eq!((failure.replica, failure.phase), (Some(1), Phase::Loading));
    rig.supervisor.end_replica(1, PATIENCE).unwrap();
    assert_eq!(rig.event(), Event::ReplicaEnded(1), "nobody is left to wait for");
}

fn exit_codes_while_loading() {
    for (code, want, meaning) in [
        (2, ExitCode::Flags, " (flags or illegal layout)"),
        (3, ExitCode::ModelFiles, " (model files)"),
        (5, ExitCode::Memory, " (not enough memory)"),
        (1, ExitCode::ChildDied, " (internal error)"),
        (0, ExitCode::ChildDied, " (success)"),
        (GROUP_ABORTED_EXIT, ExitCode::ChildDied, " (its rank group was aborted)"),
        (99, ExitCode::ChildDied, ""),
    ] {
        let mut rig = Rig::new();
        rig.supervisor.spawn(spec(0, &format!("exit {code} 12:00 ERROR TP0 short file"))).unwrap();
        let failure = rig.failure();
        assert_eq!(
            failure.to_string(),
            format!(
                "lockstep: lockstep-TP0-scheduler exited with code {code}{meaning} while loading; \
                 last error: 12:00 ERROR TP0 short file"
            )
        );
        assert_eq!(failure.exit_code, want, "code {code}");
    }
}

fn a_panic_shows_its_message() {
    let mut rig = Rig::new();
    rig.supervisor.spawn(spec(0, "panic page 7 is free twice")).unwrap();
    let text = rig.failure().to_string();
    let start = "lockstep: lockstep-TP0-scheduler exited with code 101 (panic) while loading; last error: panicked at ";
    assert!(text.starts_with(start) && text.ends_with(": page 7 is free twice"), "{text}");
}

/// A child that exits with `code` when the returned end is written to.
fn told(rig: &mut Rig, rank: usize, code: i32) -> std::io::PipeWriter {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut spec = spec(rank, &format!("exit-when-told {code}"));
    spec.inherited = vec![Arc::new(OwnedFd::from(reader))];
    rig.supervisor.spawn(spec).unwrap();
    rig.line_with("up");
    writer
}

fn reactions_do_not_hide_the_cause() {
    let mut rig = Rig::new();
    rig.supervisor.set_phase(Phase::Serving).unwrap();
    let mut zero = told(&mut rig, 0, GROUP_ABORTED_EXIT);
    let one = rig.up(1, "sleep");
    zero.write_all(b"!").unwrap();
    let Event::ChildDied { name, .. } = rig.event() else { panic!("no death") };
    assert_eq!(name, "lockstep-TP0-scheduler");
    one.signal(Signal::ABORT);
    let text = rig.failure().to_string();
    assert!(text.starts_with("lockstep: lockstep-TP1-scheduler was killed by signal 6 (SIGABRT)"), "{text}");
}

fn an_open_verdict_is_given_at_shutdown() {
    let mut rig = Rig::new();
    let _one = rig.up(1, "sleep");
    rig.supervisor.spawn(spec(0, &format!("exit {GROUP_ABORTED_EXIT} TP1 left barrier 4"))).unwrap();
    assert!(matches!(rig.event(), Event::ChildDied { .. }));
    rig.supervisor.shutdown(PATIENCE).unwrap();
    assert_eq!(rig.failure().process, "lockstep-TP0-scheduler");
    assert_eq!(rig.event(), Event::AllExited, "deaths of a shutdown are no news");
}

fn shutdown_ends_every_kind_of_child() {
    let mut rig = Rig::new();
    let processes = [rig.up(0, "sleep"), rig.up(1, "busy"), rig.up(2, "deaf"), rig.up(3, "deaf")];
    processes[3].signal(Signal::STOP);
    let report = rig.supervisor.shutdown(Duration::from_millis(300)).unwrap();
    let killed = vec!["lockstep-TP2-scheduler".into(), "lockstep-TP3-scheduler".into()];
    assert_eq!(report, ShutdownReport { killed, left: vec![] });
    assert!(processes.iter().all(|p| p.ends_within(Duration::ZERO)));
    assert_eq!(rig.supervisor.processes().unwrap(), []);
    assert_eq!(rig.event(), Event::AllExited);
}

fn exit_zero_is_expected_only_while_draining() {
    let mut rig = Rig::new();
    let mut good = told(&mut rig, 0, 0);
    let mut bad = told(&mut rig, 1, 7);
    rig.supervisor.set_phase(Phase::Draining).unwrap();
    good.write_all(b"!").unwrap();
    let exited = Event::ChildExited { name: "lockstep-TP0-scheduler".into(), role: Role::Scheduler(0) };
    assert_eq!(rig.event(), exited);
    bad.write_all(b"!").unwrap();
    let text = rig.failure().to_string();
    assert_eq!(text, "lockstep: lockstep-TP1-scheduler exited with code 7 while draining; last log line: up");
}

fn drop_leaves_nobody() {
    let mut rig = Rig::new();
    let processes = [rig.up(0, "deaf"), rig.up(1, "busy")];
    processes[1].signal(Signal::STOP);
    drop(rig);
    assert!(processes.iter().all(|p| p.ends_within(Duration::ZERO)));
}

fn children_can_be_started_again() {
    let mut rig = Rig::new();
    for round in 0..3 {
        let process = rig.up(0, "sleep");
        rig.supervisor.set_phase(Phase::Serving).unwrap();
        process.signal(Signal::KILL);
        assert_eq!(rig.failure().process, "lockstep-TP0-scheduler", "round {round}");
        rig.supervisor.begin_shutdown(Duration::ZERO).unwrap();
        while rig.event() != Event::AllExited {}
    }
}

fn a_childs_surroundings() {
    // Leaked on purpose, as a C library might: must not reach the child.
    let leaked = rustix::fs::memfd_create("leak", MemfdFlags::empty()).unwrap();
    let rig = Rig::new();
    rig.supervisor.spawn(spec(0, "describe")).unwrap();
    let line = rig.line_with("argv0=");
    let want = "argv0=lockstep-TP0-scheduler name=lockstep-TP0-scheduler comm=lockstep-TP0-sc own_group=true \
                int=true hup=true term=false fds=";
    assert!(line.starts_with(want), "{line}");
    assert_eq!(line.strip_prefix(want).unwrap(), "[0, 1, 2]");
    drop(leaked);
}

fn inherited_descriptors_arrive_in_order() {
    let memory = |text: &str| {
        let mut file = std::fs::File::from(rustix::fs::memfd_create(text, MemfdFlags::CLOEXEC).unwrap());
        file.write_all(text.as_bytes()).unwrap();
        Arc::new(OwnedFd::from(file))
    };
    let (first, second) = (memory("first"), memory("second"));
    assert!(first.as_raw_fd() < second.as_raw_fd());
    let rig = Rig::new();
    for rank in 0..2 {
        let mut spec = spec(rank, "read-inherited");
        spec.inherited = vec![second.clone(), first.clone()];
        rig.supervisor.spawn(spec).unwrap();
        assert_eq!(rig.line_with("inherited"), "inherited second");
        assert_eq!(rig.line_with("inherited"), "inherited first");
    }
}

fn large_configurations_do_not_block() {
    let rig = Rig::new();
    let config = format!("echo-length {}", "ä\"".repeat(1 << 20));
    rig.supervisor.spawn(spec(0, &config)).unwrap();
    assert_eq!(rig.line_with("length"), format!("length {}", config.len()));
}

fn bad_specs_are_refused() {
    let rig = Rig::new();
    let error = rig.supervisor.spawn(spec(0, &"x".repeat((16 << 20) + 1))).unwrap_err();
    assert!(matches!(error, LaunchError::ConfigTooLarge { .. }), "{error}");
    let mut bad = spec(0, "sleep");
    bad.name = "a\0b".into();
    assert!(matches!(rig.supervisor.spawn(bad).unwrap_err(), LaunchError::BadName { .. }));
    assert_eq!(rig.supervisor.processes().unwrap(), []);
}

fn output_is_forwarded_line_by_line() {
    let mut rig = Rig::new();
    rig.supervisor.spawn(spec(0, "long-line")).unwrap();
    let failure = rig.failure();
    let mut lines: Vec<String> = (0..3).map(|_| rig.lines.recv_timeout(PATIENCE).unwrap()).collect();
    lines.sort();
    assert_eq!(lines[..2], ["from stdout", "no newline"]);
    assert_eq!((lines[2].len(), lines[2].ends_with("x [line cut]")), ((16 << 10) + 11, true));
    let mut tail = failure.last_lines;
    tail.sort();
    assert_eq!(tail, lines);
}

fn a_flood_of_output_starves_nobody() {
    let mut rig = Rig::new();
    let flood = Process::open(rig.supervisor.spawn(spec(0, "flood")).unwrap());
    rig.line_with("flood");
    let other = rig.up(1, "sleep");
    other.signal(Signal::KILL);
    let start = Instant::now();
    assert_eq!(rig.failure().process, "lockstep-TP1-scheduler");
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    rig.supervisor.shutdown(Duration::ZERO).unwrap();
    assert!(flood.ends_within(Duration::ZERO));
}
