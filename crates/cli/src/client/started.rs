//! A server of our own for one command: on a free loopback port, quiet, and gone when the command is.
//!
//! It is this same binary's `lockstep serve`, in a process group of its own so that Ctrl-C stops an answer
//! and not the server. Should this process die, the kernel sends it a SIGTERM and it drains.

use crate::error::{CliError, Result};
use indicatif::{ProgressBar, ProgressStyle};
use lockstep_core::ExitCode;
use rustix::process::{Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal};
use std::io::{self, BufRead, BufReader, IsTerminal};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the server may take to drain and end; its grace and a little more.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How often its end is looked for, and its start is shown to go on.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What the server logs when it can be asked.
const LISTENING: &str = "listening on ";
/// How its last word begins.
const LAST_WORD: &str = "lockstep: ";

/// A running server. Dropping it ends it.
#[derive(Debug)]
pub struct StartedServer {
    child: Child,
    /// Reads the log to its end and gives the server's last word.
    log: Option<JoinHandle<Option<String>>>,
    /// Where it listens.
    pub url: String,
}

impl StartedServer {
    /// Starts `lockstep serve --model model` with `flags` and waits until it can be asked.
    ///
    /// Must be called on a thread that lives as long as the server is needed: the kernel ties the death
    /// signal to it. Errors with the server's own last word and exit code when it ends instead.
    pub fn start(model: &str, flags: &[String]) -> Result<Self> {
        let mut child = spawn(model, flags).map_err(CliError::with(ExitCode::Internal))?;
        let (sender, lines) = channel();
        let stderr = child.stderr.take().expect("invariant: stderr was asked for as a pipe");
        let log = std::thread::spawn(move || read_log(stderr, &sender));
        let mut server = Self { child, log: Some(log), url: String::new() };
        server.url = server.wait_ready(model, &lines)?;
        Ok(server)
    }

    fn wait_ready(&mut self, model: &str, lines: &Receiver<String>) -> Result<String> {
        let bar = Waiting::new(model);
        loop {
            match lines.recv_timeout(LOOK_EVERY) {
                Ok(line) => {
                    if let Some((_, rest)) = line.split_once(LISTENING) {
                        return Ok(rest.split_whitespace().next().unwrap_or_default().to_owned());
                    }
                    bar.show(&line);
                }
                Err(RecvTimeoutError::Timeout) => bar.tick(),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait().map_err(CliError::with(ExitCode::Internal))?;
                    return Err(self.ended(status));
                }
            }
        }
    }

    /// Why the server is gone, if it is.
    pub fn failure(&mut self) -> Option<CliError> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(self.ended(status))
    }

    fn ended(&mut self, status: ExitStatus) -> CliError {
        let code = status.code().and_then(ExitCode::from_code).filter(|code| *code != ExitCode::Drained);
        // The pipe has ended with the server, so this does not wait long.
        let word = self.log.take().and_then(|log| log.join().ok().flatten());
        let word = word.unwrap_or_else(|| format!("{status}, without a word"));
        CliError::new(
            code.unwrap_or(ExitCode::ChildDied),
            format!("the server that was started ended: {word}"),
        )
    }

    /// Drains and ends the server.
    pub fn stop(mut self) {
        self.terminate();
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && start.elapsed() < STOP_LIMIT {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn terminate(&mut self) {
        // Unreaped, so the number is still its own.
        if matches!(self.child.try_wait(), Ok(None))
            && let Some(pid) = Pid::from_raw(self.child.id() as i32)
        {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

impl Drop for StartedServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(model: &str, flags: &[String]) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("lockstep")
        .args(["serve", "--model", model, "--host", "127.0.0.1", "--port", "0"])
        .args(flags)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let parent = getpid();
    let end_with_us = move || {
        set_parent_process_death_signal(Some(Signal::TERM))?;
        // The parent may have died before the line above.
        match getppid() == Some(parent) {
            true => Ok(()),
            false => Err(io::Error::from(rustix::io::Errno::SRCH)),
        }
    };
    // SAFETY: between fork and exec, two system calls and nothing else.
    unsafe { command.pre_exec(end_with_us) };
    command.spawn()
}

/// Reads the server's lines until it ends, passes them on while somebody listens, and returns its last word.
fn read_log(stderr: ChildStderr, lines: &Sender<String>) -> Option<String> {
    let mut reader = BufReader::new(stderr);
    let (mut bytes, mut last_word) = (Vec::new(), None);
    while reader.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
        let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        if let Some(word) = line.strip_prefix(LAST_WORD) {
            last_word = Some(word.to_owned());
        }
        let _ = lines.send(line);
        bytes.clear();
    }
    last_word
}

/// What is shown on a terminal while the server loads.
struct Waiting(Option<ProgressBar>);

impl Waiting {
    fn new(model: &str) -> Self {
        Self(io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {prefix}: {wide_msg} {elapsed}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner());
            ProgressBar::new_spinner().with_style(style).with_prefix(format!("starting a server for {model}"))
        }))
    }

    /// The text of a log line, without time, level and role.
    fn show(&self, line: &str) {
        if let Some(bar) = &self.0 {
            let words: Vec<&str> = line.split_whitespace().skip(3).collect();
            bar.set_message(words.join(" "));
        }
    }

    fn tick(&self) {
        if let Some(bar) = &self.0 {
            bar.tick();
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
