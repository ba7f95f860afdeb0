//! A launcher in a process of its own, so that it can be signalled and killed.

use crate::Case;
use crate::harness::{Launcher, PATIENCE, Process};
use rustix::process::Signal;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

pub const CASES: &[Case] = &[
    ("no_child_outlives_a_killed_launcher", no_child_outlives_a_killed_launcher),
    ("a_second_signal_ends_everything_at_once", a_second_signal_ends_everything_at_once),
    ("hanging_up_twice_is_not_hurrying", hanging_up_twice_is_not_hurrying),
    ("nohup_is_respected", nohup_is_respected),
    ("the_failure_is_the_last_line_and_sets_the_exit_code", the_failure_is_the_last_line),
    ("replacing_the_program_file_changes_nothing", replacing_the_program_file_changes_nothing),
    ("the_child_flag_is_not_for_people", the_child_flag_is_not_for_people),
    ("a_launcher_whose_own_loop_is_stuck_says_so_and_ends", a_stuck_launcher_ends),
];

/// Issue text: every descendant is gone within 5 s.
const GONE_WITHIN: Duration = Duration::from_secs(5);

fn no_child_outlives_a_killed_launcher() {
    let mut launcher = Launcher::this_binary("sleep,busy,deaf,no-death-signal,sleep");
    let children = launcher.children();
    children[4].signal(Signal::STOP);
    launcher.process.kill().unwrap();
    for (i, child) in children.iter().enumerate() {
        assert!(child.ends_within(GONE_WITHIN), "child {i} lives");
    }
}

fn a_second_signal_ends_everything_at_once() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut launcher = Launcher::this_binary("deaf,busy");
        let children = launcher.children();
        launcher.signal(signal);
        assert_eq!(launcher.say(), format!("signal {}", signal.as_raw()));
        assert!(!children[0].ends_within(Duration::ZERO));
        launcher.signal(signal);
        assert_eq!(launcher.say(), "cleaned");
        assert!(children.iter().all(|c| c.ends_within(GONE_WITHIN)));
        let (status, stderr) = launcher.end();
        assert_eq!(status.code(), Some(code));
        assert!(stderr.trim_end().ends_with("): ended without drain"), "{stderr}");
    }
}

fn a_stuck_launcher_ends() {
    let mut launcher = Launcher::this_binary("stuck");
    assert_eq!(launcher.say(), "stuck");
    let (status, stderr) = launcher.end();
    assert_eq!(status.code(), Some(1), "{stderr}");
    let last = stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("lockstep: api did not answer for 1."), "{stderr}");
    assert!(last.ends_with("; ended") && last.contains("sleeping"), "{last}");
}

fn hanging_up_twice_is_not_hurrying() {
    let mut launcher = Launcher::this_binary("sleep");
    let children = launcher.children();
    for _ in 0..2 {
        launcher.signal(Signal::HUP);
        assert_eq!(launcher.say(), "signal 1");
    }
    assert!(!children[0].ends_within(Duration::ZERO));
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.end().0.code(), Some(143));
}

fn nohup_is_respected() {
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\""]).arg(std::env::current_exe().unwrap());
    let mut launcher = Launcher::start(&mut command, "sleep");
    launcher.children();
    launcher.signal(Signal::HUP);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.say(), "signal 2");
}

fn the_failure_is_the_last_line() {
    let mut launcher = Launcher::this_binary("sleep,exit 3 up ERROR TP1 a.safetensors: header is short");
    let children = launcher.say();
    let sleeper = children.split(' ').nth(1).unwrap().parse().unwrap();
    let (status, stderr) = launcher.end();
    assert_eq!(status.code(), Some(3));
    assert_eq!(
        stderr.lines().last().unwrap(),
        "lockstep: lockstep-TP1-scheduler exited with code 3 (model files) while loading; \
         last error: up ERROR TP1 a.safetensors: header is short"
    );
    let still_there = rustix::process::test_kill_process(rustix::process::Pid::from_raw(sleeper).unwrap());
    assert!(still_there.is_err(), "the other child was not reaped");
}

fn replacing_the_program_file_changes_nothing() {
    let folder = std::env::temp_dir().join(format!("lockstep-launch-test-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut launcher = Launcher::start(&mut Command::new(&program), "wait sleep");
    assert_eq!(launcher.say(), "waiting");
    let other = folder.join("other");
    std::fs::write(&other, "#!/bin/sh\nexit 9\n").unwrap();
    std::fs::rename(&other, &program).unwrap();
    launcher.process.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let children = launcher.children();
    std::fs::remove_dir_all(&folder).unwrap();
    launcher.process.kill().unwrap();
    assert!(children[0].ends_within(GONE_WITHIN));
    assert_eq!(launcher.end().0.signal(), Some(9));
}

fn the_child_flag_is_not_for_people() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.arg("--lockstep-child").stdin(std::process::Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("use `lockstep serve`"), "{stderr}");
    // With a pipe that ends at once, there is no launcher.
    let (reader, writer) = std::io::pipe().unwrap();
    let mut child =
        Command::new(std::env::current_exe().unwrap()).arg("--lockstep-child").stdin(reader).spawn().unwrap();
    drop(writer);
    assert!(Process::open(child.id()).ends_within(PATIENCE));
    assert_eq!(child.wait().unwrap().code(), Some(lockstep_launch::ORPHANED_EXIT));
}
