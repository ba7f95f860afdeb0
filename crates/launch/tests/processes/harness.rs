//! Waiting with deadlines, never with sleeps.

use lockstep_launch::{ChildSpec, Event, Events, StderrSink, Supervisor};
use lockstep_wire::Role;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Set for processes that play the launcher; names what it does.
pub const LAUNCHER_MODE: &str = "LOCKSTEP_TEST_LAUNCHER";

/// A failure to arrive, not a pace: generous, because the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A child spec in test mode `mode` (see `modes::child`).
pub fn spec(rank: usize, mode: &str) -> ChildSpec {
    ChildSpec {
        role: Role::Scheduler(rank),
        name: format!("lockstep-TP{rank}-scheduler"),
        replica: None,
        config_json: mode.into(),
        inherited: Vec::new(),
    }
}

/// A supervisor in this process, with its log lines on a channel.
pub struct Rig {
    pub supervisor: Supervisor,
    pub events: Events,
    pub lines: Receiver<String>,
}

impl Rig {
    pub fn new() -> Self {
        let (sender, lines) = channel();
        let sink = StderrSink::to(Lines { sender, partial: Vec::new() }, None).unwrap();
        let (supervisor, events) = Supervisor::start(sink).unwrap();
        Self { supervisor, events, lines }
    }

    /// Starts a child and waits until it has said "up".
    pub fn up(&mut self, rank: usize, mode: &str) -> Process {
        let process = Process::open(self.supervisor.spawn(spec(rank, mode)).unwrap());
        self.line_with("up");
        process
    }

    /// The next log line that contains `part`.
    pub fn line_with(&self, part: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|e| panic!("no line with {part:?}: {e}"));
            if line.contains(part) {
                return line;
            }
        }
    }

    /// The next event, within [`PATIENCE`].
    pub fn event(&mut self) -> Event {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let next = async { tokio::time::timeout(PATIENCE, self.events.recv()).await };
        runtime.block_on(next).expect("an event in time").expect("a living supervisor")
    }

    /// Skips to the verdict and returns its one line.
    pub fn failure(&mut self) -> lockstep_launch::Failure {
        loop {
            if let Event::Failed(failure) = self.event() {
                return failure;
            }
        }
    }
}

/// Turns writes into lines.
struct Lines {
    sender: Sender<String>,
    partial: Vec<u8>,
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.partial.extend_from_slice(bytes);
        while let Some(end) = self.partial.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            let _ = self.sender.send(String::from_utf8_lossy(&line[..end]).into_owned());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Some process, by descriptor.
pub struct Process(OwnedFd);

impl Process {
    pub fn open(pid: u32) -> Self {
        Self(pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        pidfd_send_signal(&self.0, signal).unwrap();
    }

    /// Whether it ends within `timeout`.
    pub fn ends_within(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&left)) {
                Ok(n) => return n == 1,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => panic!("poll: {e}"),
            }
        }
    }
}

/// A launcher in a process of its own.
pub struct Launcher {
    pub process: Child,
    output: BufReader<ChildStdout>,
}

impl Launcher {
    pub fn start(command: &mut Command, mode: &str) -> Self {
        let mut process = command
            .env(LAUNCHER_MODE, mode)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, output }
    }

    pub fn this_binary(mode: &str) -> Self {
        Self::start(&mut Command::new(std::env::current_exe().unwrap()), mode)
    }

    /// The next line of its stdout; empty at the end.
    pub fn say(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Reads the "children 1 2 3" line that launchers print when all children are up.
    pub fn children(&mut self) -> Vec<Process> {
        let line = self.say();
        let pids = line.strip_prefix("children ").unwrap_or_else(|| panic!("launcher said {line:?}"));
        pids.split(' ').map(|pid| Process::open(pid.parse().unwrap())).collect()
    }

    pub fn signal(&self, signal: Signal) {
        Process::open(self.process.id()).signal(signal);
    }

    /// Exit status and stderr, after it ended by itself.
    pub fn end(mut self) -> (std::process::ExitStatus, String) {
        assert!(Process::open(self.process.id()).ends_within(PATIENCE), "launcher still runs");
        let mut stderr = String::new();
        io::Read::read_to_string(&mut self.process.stderr.take().unwrap(), &mut stderr).unwrap();
        (self.process.wait().unwrap(), stderr)
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
