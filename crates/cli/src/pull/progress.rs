//! What the user sees while bytes arrive: a bar on a terminal, else a log line every tenth.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// Told about the state of a fetch.
pub trait Progress {
    /// A file of `total_bytes` is being fetched.
    fn begin(&mut self, what: &str, total_bytes: u64);
    /// So many bytes of it are here; may go back when a source cannot continue another's.
    fn at(&mut self, bytes: u64);
    /// Something to know, in a sentence.
    fn note(&mut self, text: &str);
    /// Nothing more comes.
    fn end(&mut self);
}

/// The progress of one file of several that are fetched under one bar.
pub struct Within<'a> {
    /// Of all files.
    pub whole: &'a mut dyn Progress,
    /// Where this file begins among them; `None` tells notes only.
    pub start: Option<u64>,
}

impl Progress for Within<'_> {
    fn begin(&mut self, _: &str, _: u64) {}

    fn at(&mut self, bytes: u64) {
        if let Some(start) = self.start {
            self.whole.at(start + bytes);
        }
    }

    fn note(&mut self, text: &str) {
        self.whole.note(text);
    }

    fn end(&mut self) {}
}

/// The progress that fits stderr.
pub fn for_stderr() -> Box<dyn Progress> {
    if std::io::stderr().is_terminal() {
        Box::new(Bar { bar: ProgressBar::hidden() })
    } else {
        Box::new(LogLines { what: String::new(), total_bytes: 0, tenths: 0 })
    }
}

struct Bar {
    bar: ProgressBar,
}

impl Progress for Bar {
    fn begin(&mut self, what: &str, total_bytes: u64) {
        let template = "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}";
        let style = ProgressStyle::with_template(template).expect("invariant: a valid template");
        self.bar = ProgressBar::new(total_bytes).with_style(style).with_message(what.to_owned());
        self.bar.enable_steady_tick(Duration::from_millis(200));
    }

    fn at(&mut self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    fn note(&mut self, text: &str) {
        self.bar.suspend(|| tracing::info!("{text}"));
    }

    fn end(&mut self) {
        self.bar.finish_and_clear();
    }
}

struct LogLines {
    what: String,
    total_bytes: u64,
    /// Tenths reported.
    tenths: u64,
}

impl Progress for LogLines {
    fn begin(&mut self, what: &str, total_bytes: u64) {
        (self.what, self.total_bytes, self.tenths) = (what.to_owned(), total_bytes, 0);
        tracing::info!("fetching {what}: {} MB", total_bytes / 1_000_000);
    }

    fn at(&mut self, bytes: u64) {
        let tenths = bytes * 10 / self.total_bytes.max(1);
        if tenths > self.tenths {
            let (done, total) = (bytes / 1_000_000, self.total_bytes / 1_000_000);
            tracing::info!("fetching {}: {}0 % ({done} of {total} MB)", self.what, tenths);
        }
        self.tenths = self.tenths.max(tenths);
    }

    fn note(&mut self, text: &str) {
        tracing::info!("{text}");
    }

    fn end(&mut self) {}
}
