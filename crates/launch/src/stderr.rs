//! The launcher's stderr as a bounded queue.
//!
//! A terminal that is stopped (Ctrl-S), a full pipe or a slow log collector must stop neither the
//! supervisor nor, through their log pipes, the ranks. **Invariant:** [`StderrSink::write_line`]
//! never blocks; what does not fit in [`QUEUE_BYTES_MAX`] is dropped, counted, and the count is
//! written as soon as there is room again.

use crate::LaunchError;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a line that is written as it is becomes, where the log has a form that it lacks; `None`: it stays. Lines come
/// without their newline.
pub type LineForm = fn(&[u8]) -> Option<Vec<u8>>;

/// Bytes that may wait for the terminal.
const QUEUE_BYTES_MAX: usize = 1 << 20;

/// Writes lines to stderr (or elsewhere) from a thread of its own. Clones share one queue. It also
/// implements [`Write`], one call one or more whole lines, so that the launcher's own log can go
/// through the same queue and keep its place among the children's lines.
#[derive(Clone)]
pub struct StderrSink {
    handle: Arc<Handle>,
}

impl StderrSink {
    /// To the stderr of this process, every line in `form`.
    pub fn start(form: Option<LineForm>) -> Result<Self, LaunchError> {
        Self::to(io::stderr(), form)
    }

    /// To any writer.
    pub fn to(out: impl Write + Send + 'static, form: Option<LineForm>) -> Result<Self, LaunchError> {
        let shared = Arc::new(Shared::default());
        let for_thread = shared.clone();
        std::thread::Builder::new()
            .name("stderr".into())
            .spawn(move || for_thread.run(Formed { out, form }))
            .map_err(LaunchError::system("starting the stderr thread"))?;
        Ok(Self { handle: Arc::new(Handle { shared }) })
    }

    /// Queues one line; `line` comes without its newline.
    pub fn write_line(&self, line: &[u8]) {
        let mut bytes = Vec::with_capacity(line.len() + 1);
        bytes.extend_from_slice(line);
        bytes.push(b'\n');
        self.handle.shared.push(bytes);
    }

    /// Waits until everything queued has been written, at most for `timeout`; whether it was.
    pub fn flush_within(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut queue = self.handle.shared.lock();
        while !queue.is_idle() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            queue =
                self.handle.shared.idle.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Write for StderrSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.handle.shared.push(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Ends the thread when the last clone is gone.
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.filled.notify_one();
    }
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    filled: Condvar,
    idle: Condvar,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    dropped: u64,
    writing: bool,
    closed: bool,
}

impl Queue {
    fn is_idle(&self) -> bool {
        self.lines.is_empty() && self.dropped == 0 && !self.writing
    }
}

impl Shared {
    /// Nothing panics while holding the lock; a poisoned queue is still a valid queue.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: Vec<u8>) {
        let mut queue = self.lock();
        if queue.bytes + line.len() > QUEUE_BYTES_MAX {
            queue.dropped += 1;
        } else {
            queue.bytes += line.len();
            queue.lines.push_back(line);
        }
        drop(queue);
        self.filled.notify_one();
    }

    /// Takes what is queued, or `None` when closed and empty.
    fn take(&self) -> Option<(VecDeque<Vec<u8>>, u64)> {
        let mut queue = self.lock();
        loop {
            if !queue.lines.is_empty() || queue.dropped > 0 {
                queue.writing = true;
                return Some((std::mem::take(&mut queue.lines), std::mem::take(&mut queue.dropped)));
            }
            if queue.closed {
                return None;
            }
            queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Body of the thread. A failed write (closed terminal) loses the line and nothing else.
    fn run(&self, mut out: Formed<impl Write>) {
        while let Some((lines, dropped)) = self.take() {
            for line in lines {
                out.write(&line);
                self.lock().bytes -= line.len();
            }
            if dropped > 0 {
                let told =
                    format!("lockstep: {dropped} log lines were dropped: stderr did not take them in time\n");
                out.write(told.as_bytes());
            }
            let _ = out.out.flush();
            self.lock().writing = false;
            self.idle.notify_all();
        }
    }
}

/// A writer of lines in a form. What cannot be written is lost.
struct Formed<W> {
    out: W,
    form: Option<LineForm>,
}

impl<W: Write> Formed<W> {
    /// Writes whole lines.
    fn write(&mut self, lines: &[u8]) {
        let Some(form) = self.form else {
            let _ = self.out.write_all(lines);
            return;
        };
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            match form(line.strip_suffix(b"\n").unwrap_or(line)) {
                None => drop(self.out.write_all(line)),
                Some(mut formed) => {
                    formed.push(b'\n');
                    let _ = self.out.write_all(&formed);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    /// A terminal that takes a write only when told to.
    struct Stuck {
        allowed: Receiver<()>,
        entered: SyncSender<()>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.entered.try_send(());
            let _ = self.allowed.recv();
            self.written.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_stuck_terminal_loses_lines_but_never_blocks() {
        let (allow, allowed) = sync_channel(0);
        let (entered, has_entered) = sync_channel(1);
        let written = Arc::new(Mutex::new(Vec::new()));
        let sink = StderrSink::to(Stuck { allowed, entered, written: written.clone() }, None).unwrap();
        sink.write_line(b"first");
        has_entered.recv().unwrap();
        let line = vec![b'x'; 1023];
        for _ in 0..2000 {
            sink.write_line(&line);
        }
        assert!(!sink.flush_within(Duration::ZERO));
        drop(allow);
        assert!(sink.flush_within(Duration::from_secs(20)));
        let text = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        let kept = text.lines().filter(|l| l.starts_with('x')).count();
        assert_eq!(kept, (QUEUE_BYTES_MAX - "first\n".len()) / 1024);
        let last = text.lines().last().unwrap();
        assert!(last.starts_with(&format!("lockstep: {} log lines", 2000 - kept)), "{last}");
    }

    #[test]
    fn lines_keep_their_order() {
        let (allow, allowed) = sync_channel(0);
        drop(allow);
        let written = Arc::new(Mutex::new(Vec::new()));
        let mut sink =
            StderrSink::to(Stuck { allowed, entered: sync_channel(1).0, written: written.clone() }, None)
                .unwrap();
        sink.write_line(b"one");
        sink.write_all(b"two\nthree\n").unwrap();
        sink.clone().write_line(b"four");
        assert!(sink.flush_within(Duration::from_secs(20)));
        assert_eq!(written.lock().unwrap().as_slice(), b"one\ntwo\nthree\nfour\n");
    }

    #[test]
    fn lines_without_the_form_get_it() {
        let (allow, allowed) = sync_channel(0);
        drop(allow);
        let written = Arc::new(Mutex::new(Vec::new()));
        let out = Stuck { allowed, entered: sync_channel(1).0, written: written.clone() };
        let form: LineForm = |line| (!line.starts_with(b"{")).then(|| [b"<", line, b">"].concat());
        let mut sink = StderrSink::to(out, Some(form)).unwrap();
        sink.write_all(b"{1}\ntwo\n").unwrap();
        sink.write_line(b"three");
        assert!(sink.flush_within(Duration::from_secs(20)));
        assert_eq!(written.lock().unwrap().as_slice(), b"{1}\n<two>\n<three>\n");
    }
}
