//! The broadcast to a real process that is stopped and continued: nothing is dropped meanwhile.

// A failed unwrap is a failed test, in helper functions too.
#![allow(clippy::unwrap_used)]

use lockstep_comm::link::random_prefix;
use lockstep_comm::{BroadcastReceiver, BroadcastSender, Context, Endpoint, LinkError};
use lockstep_core::{RequestId, SamplingParams};
use lockstep_wire::{SubmitRequest, TextParams, ToScheduler};
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Long enough that only a hang reaches it.
const LONG: Duration = Duration::from_secs(120);
const ENDPOINT: &str = "LOCKSTEP_TEST_ENDPOINT";

/// Does nothing in the test run itself; in a child it is a rank that follows the broadcast.
#[test]
fn follower_process() {
    let Ok(endpoint) = std::env::var(ENDPOINT) else { return };
    let mut receiver = BroadcastReceiver::connect(&Context::new(), &Endpoint(endpoint)).unwrap();
    // The receiver itself checks that no number is missing.
    while receiver.recv(Some(LONG)).unwrap().expect("a broadcast comes").message != ToScheduler::Shutdown {}
}

#[test]
fn a_stopped_rank_makes_rank_0_wait_and_loses_nothing() {
    let endpoint = Endpoint::private(&random_prefix(), "broadcast");
    let mut sender = BroadcastSender::bind(&Context::new(), &endpoint, Duration::from_millis(50)).unwrap();
    let mut follower = Command::new(std::env::current_exe().unwrap())
        .args(["follower_process", "--exact", "--nocapture"])
        .env(ENDPOINT, &endpoint.0)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    sender.wait_for_subscribers(1, LONG).unwrap();
    let pid = Pid::from_child(&follower);
    kill_process(pid, Signal::STOP).unwrap();
    let message = ToScheduler::Submit(Box::new(SubmitRequest {
        id: RequestId(1),
        prompt: vec![7; 4_000],
        sampling: SamplingParams::default(),
        text: TextParams::default(),
        cache_salt: None,
        priority: 0,
    }));
    let mut sent = 0u64;
    let error = loop {
        match sender.send(sent, &message) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 100_000, "a stopped rank must stop rank 0");
    };
    assert!(matches!(&error, LinkError::Full { waited_ms: 50, .. }), "{error}");
    assert!(error.to_string().contains(&endpoint.0), "{error}");
    assert!(sent >= 1_000, "the queue holds 1000 messages, {sent} were taken");
    kill_process(pid, Signal::CONT).unwrap();
    let start = Instant::now();
    while let Err(error) = sender.send(sent, &ToScheduler::Shutdown) {
        assert!(matches!(error, LinkError::Full { .. }) && start.elapsed() < LONG, "{error}");
    }
    assert!(follower.wait().unwrap().success(), "the rank saw all {sent} messages in order");
}
