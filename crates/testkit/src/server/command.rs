//! How a server is started: its command line, its port, its captured output, its end.

use super::Server;
use crate::http::HttpClient;
use crate::process::MARK_VARIABLE;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A loopback port that nobody listens on now. Taken below the kernel's ephemeral range, so that no
/// outgoing connection occupies it between this call and the server's bind; different test
/// processes start at different places.
pub fn free_port() -> u16 {
    for _ in 0..10_000 {
        let n = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(std::process::id().wrapping_mul(61));
        let port = 12_000 + (n % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between 12000 and 32000");
}

/// A `lockstep serve` command being put together.
#[derive(Clone, Debug)]
pub struct ServeCommand {
    binary: PathBuf,
    /// Program and arguments that start the binary, which follows them; empty for none.
    under: Vec<String>,
    model: PathBuf,
    port: u16,
    flags: Vec<(String, String)>,
    switches: Vec<String>,
    environment: Vec<(String, PathBuf)>,
    working_dir: Option<PathBuf>,
}

impl ServeCommand {
    /// `serve --model model` on a free port; `binary` is usually `env!("CARGO_BIN_EXE_lockstep")`.
    pub fn new(binary: impl Into<PathBuf>, model: impl Into<PathBuf>) -> Self {
        Self {
            binary: binary.into(),
            under: Vec::new(),
            model: model.into(),
            port: free_port(),
            // Tiny models need no more, and tests share few cores.
            flags: vec![("--threads".into(), "1".into())],
            switches: Vec::new(),
            environment: Vec::new(),
            working_dir: None,
        }
    }

    /// Adds `--tp size`.
    pub fn tp(self, size: usize) -> Self {
        self.flag("--tp", size)
    }

    /// Adds a flag with its value, in place of an earlier value of the same flag.
    pub fn flag(mut self, name: &str, value: impl ToString) -> Self {
        self.flags.retain(|(earlier, _)| earlier != name);
        self.flags.push((name.to_owned(), value.to_string()));
        self
    }

    /// Adds a flag that has no value.
    pub fn switch(mut self, name: &str) -> Self {
        self.switches.push(name.to_owned());
        self
    }

    /// Uses this port.
    pub fn port(self, port: u16) -> Self {
        Self { port, ..self }
    }

    /// The port that the server will use.
    pub fn port_number(&self) -> u16 {
        self.port
    }

    /// Sets an environment variable to a path (`TMPDIR`, for instance).
    pub fn env(mut self, name: &str, value: &Path) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts it in this folder, so that `--model` may be relative.
    pub fn working_dir(self, dir: &Path) -> Self {
        Self { working_dir: Some(dir.to_owned()), ..self }
    }

    /// Has the binary started by this program, which gets these arguments and then the whole command; it must become
    /// the launcher (`exec`) or end as it ends.
    pub fn under(self, words: &[&str]) -> Self {
        Self { under: words.iter().map(|word| (*word).to_owned()).collect(), ..self }
    }

    /// Starts the process and returns at once. It leads a process group of its own.
    pub fn spawn(&self) -> Server {
        let mark = format!("testkit-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut command = match self.under.split_first() {
            None => Command::new(&self.binary),
            Some((program, words)) => {
                let mut command = Command::new(program);
                command.args(words).arg(&self.binary);
                command
            }
        };
        command.args(["serve", "--model"]).arg(&self.model).arg("--port").arg(self.port.to_string());
        command
            .args(self.flags.iter().flat_map(|(name, value)| [name, value]))
            .args(&self.switches)
            .env(MARK_VARIABLE, &mark)
            .process_group(0);
        command.envs(self.environment.iter().map(|(k, v)| (k, v)));
        if let Some(dir) = &self.working_dir {
            command.current_dir(dir);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().unwrap_or_else(|e| panic!("cannot start {}: {e}", self.binary.display()));
        let output = Output::default();
        output.collect(child.stdout.take().expect("invariant: piped"));
        output.collect(child.stderr.take().expect("invariant: piped"));
        let model_name = self.model.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        Server { child, http: HttpClient::local(self.port), port: self.port, mark, model_name, output }
    }

    /// Starts the server and waits until `/health` is 200. Panics with the server's output when it
    /// ends or does not answer in [`super::START_LIMIT`].
    pub fn start(&self) -> Server {
        let mut server = self.spawn();
        server.wait_ready();
        server
    }

    /// Runs a server that is expected to refuse to start. Panics when it still runs after `limit`.
    pub fn run_to_exit(&self, limit: Duration) -> Exit {
        self.spawn().wait_exit(limit)
    }
}

/// How a server ended.
#[derive(Clone, Debug)]
pub struct Exit {
    /// The exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Everything it printed.
    pub output: String,
}

/// What a server printed, stdout and stderr together, filled by two threads.
#[derive(Clone, Default)]
pub(super) struct Output {
    text: Arc<Mutex<String>>,
    open_pipes: Arc<AtomicUsize>,
}

impl Output {
    fn collect(&self, pipe: impl Read + Send + 'static) {
        let this = self.clone();
        this.open_pipes.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || {
            let mut lines = BufReader::new(pipe);
            let mut line = Vec::new();
            while lines.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                this.text
                    .lock()
                    .expect("invariant: no panic while held")
                    .push_str(&String::from_utf8_lossy(&line));
                line.clear();
            }
            this.open_pipes.fetch_sub(1, Ordering::SeqCst);
        });
    }

    /// Whether every process that could still print has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.open_pipes.load(Ordering::SeqCst) == 0
    }

    /// Everything so far.
    pub(super) fn snapshot(&self) -> String {
        self.text.lock().expect("invariant: no panic while held").clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_differ_and_can_be_bound() {
        let (a, b) = (free_port(), free_port());
        assert_ne!(a, b);
        TcpListener::bind(("127.0.0.1", a)).unwrap();
    }
}
