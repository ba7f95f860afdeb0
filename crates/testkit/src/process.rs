//! Looks at and signals the processes of a server under test, through `/proc` and `kill`.
//!
//! **Invariant:** only processes that carry the test's own mark in their environment are ever
//! found or signalled, also after their parent died and init adopted them.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Environment variable whose value marks the processes of one server under test; children
/// inherit it.
pub const MARK_VARIABLE: &str = "LOCKSTEP_TEST_MARK";

/// Pause between two looks at a condition that is waited for.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A running process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Process id.
    pub pid: u32,
    /// Parent's process id; 1 or another reaper after the parent died.
    pub parent: u32,
    /// `argv[0]`, as `ps` shows it, without leading folders.
    pub name: String,
}

/// A signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Ctrl-C.
    Int,
    /// Polite end.
    Term,
    /// Immediate end.
    Kill,
    /// The terminal closed.
    Hup,
    /// Freeze.
    Stop,
    /// Go on after a freeze.
    Cont,
}

impl Signal {
    const fn name(self) -> &'static str {
        match self {
            Signal::Int => "INT",
            Signal::Term => "TERM",
            Signal::Kill => "KILL",
            Signal::Hup => "HUP",
            Signal::Stop => "STOP",
            Signal::Cont => "CONT",
        }
    }
}

/// Sends `signal` to one process; a process that is already gone is no error.
pub fn signal(pid: u32, signal: Signal) {
    send(&pid.to_string(), signal);
}

/// Sends `signal` to a process group, as a terminal does on Ctrl-C.
pub fn signal_group(group: u32, signal: Signal) {
    send(&format!("-- -{group}"), signal);
}

fn send(target: &str, signal: Signal) {
    // The shell's builtin, so that no package and no unsafe code is needed.
    let script = format!("kill -s {} {target}", signal.name());
    let output = Command::new("/bin/sh").arg("-c").arg(script).output().expect("invariant: /bin/sh runs");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() || message.contains("No such process"), "kill {target}: {message}");
}

/// Living processes (no zombies) whose environment holds `mark`, by ascending pid.
pub fn marked(mark: &str) -> Vec<ProcessInfo> {
    let wanted = format!("{MARK_VARIABLE}={mark}");
    let mut found: Vec<ProcessInfo> = std::fs::read_dir("/proc")
        .expect("invariant: /proc is mounted")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid: u32| read_process(pid, &wanted))
        .collect();
    found.sort_unstable_by_key(|p| p.pid);
    found
}

/// `None` when the process ended meanwhile, is a zombie or has another mark.
fn read_process(pid: u32, wanted: &str) -> Option<ProcessInfo> {
    let dir = Path::new("/proc").join(pid.to_string());
    let environment = std::fs::read(dir.join("environ")).ok()?;
    if !environment.split(|b| *b == 0).any(|entry| entry == wanted.as_bytes()) {
        return None;
    }
    let stat = std::fs::read_to_string(dir.join("stat")).ok()?;
    // "pid (comm) state ppid ..."; comm may hold spaces and brackets.
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    let parent = fields.next()?.parse().ok()?;
    let command = std::fs::read(dir.join("cmdline")).ok()?;
    let argv0 = String::from_utf8_lossy(command.split(|b| *b == 0).next()?).into_owned();
    let name = argv0.rsplit('/').next()?.to_owned();
    Some(ProcessInfo { pid, parent, name })
}

/// Looks again and again until `condition` gives a value; `None` when `limit` has passed.
pub fn poll<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        if start.elapsed() >= limit {
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;

    #[test]
    fn marked_processes_are_found_by_name_and_end_when_killed() {
        let mark = format!("process-test-{}", std::process::id());
        let mut child = Command::new("sleep")
            .arg0("a-name-of-its-own")
            .arg("60")
            .env(MARK_VARIABLE, &mark)
            .spawn()
            .unwrap();
        // Between fork and exec the child still shows this process's name.
        let found = poll(Duration::from_secs(10), || {
            marked(&mark).into_iter().find(|p| p.name == "a-name-of-its-own")
        });
        assert_eq!(found.map(|p| (p.pid, p.parent)), Some((child.id(), std::process::id())));
        signal(child.id(), Signal::Kill);
        assert!(!child.wait().unwrap().success());
        assert_eq!(marked(&mark), []);
    }
}
