//! One log form for every process, as text or as JSON.
//!
//! Text: time, level, process, message, fields: `2026-11-29T16:04:19.123456Z  INFO TP0 loaded 494 MiB of weights`. JSON
//! (`--log-format json`): one object a line with the same and `target`, `role` and `rank`; the fields of an event, such
//! as `request`, stand beside them. Everything goes to stderr; the launcher forwards its children's lines unchanged, and
//! in JSON makes an object of what is none ([`raw_line`]).

use crate::flags::logging::{LogFormat, LogLevel, LoggingFlags};
use lockstep_launch::LineForm;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::{fmt, io};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// What is logged, and how; the launcher tells its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSettings {
    /// `--log-level`.
    pub level: LogLevel,
    /// `--log-format`.
    pub format: LogFormat,
}

impl LogSettings {
    /// What becomes of lines that are no events: a child's panic, a library's words, the launcher's last word.
    pub fn raw_lines(self) -> Option<LineForm> {
        match self.format {
            LogFormat::Text => None,
            LogFormat::Json => Some(raw_line),
        }
    }
}

/// Who logs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speaker {
    /// As log lines show it: `TP0`, `tokenizer-1`, `api`.
    pub label: String,
    /// What it does, in one word.
    pub role: String,
    /// Its rank, if it is one.
    pub rank: Option<usize>,
}

impl Speaker {
    /// A process that is alone with what it does.
    pub fn named(name: &str) -> Self {
        Self { label: name.into(), role: name.into(), rank: None }
    }
}

/// [`init`] for a command that is no server.
pub fn init_command(name: &str, flags: &LoggingFlags) {
    let settings = LogSettings { level: flags.log_level, format: LogFormat::Text };
    init(Speaker::named(name), settings, io::stderr);
}

/// Sends this process's events to `out`, marked with `speaker`.
///
/// A log that cannot be written is lost; it never ends or stops the process. The launcher passes
/// its [`StderrSink`](lockstep_launch::StderrSink), which never blocks; children pass stderr, a
/// pipe that the launcher always reads.
pub fn init<W, M>(speaker: Speaker, settings: LogSettings, out: M)
where
    W: io::Write,
    M: Fn() -> W + Send + Sync + 'static,
{
    let level: LevelFilter = settings.level.name().parse().unwrap_or(LevelFilter::INFO);
    let filter = EnvFilter::builder().with_default_directive(level.into()).parse_lossy("");
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(out)
        .with_ansi(false)
        .log_internal_errors(false);
    // A second call (tests) keeps the first subscriber.
    let _ = match settings.format {
        LogFormat::Text => {
            let subscriber = subscriber.event_format(TextForm { label: speaker.label });
            tracing::subscriber::set_global_default(subscriber.finish())
        }
        LogFormat::Json => {
            let subscriber = subscriber.event_format(JsonForm { speaker });
            tracing::subscriber::set_global_default(subscriber.finish())
        }
    };
}

struct TextForm {
    label: String,
}

impl<S, N> FormatEvent<S, N> for TextForm
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        SystemTime.format_time(&mut writer)?;
        write!(writer, " {:>5} {} ", event.metadata().level(), self.label)?;
        ctx.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

struct JsonForm {
    speaker: Speaker,
}

impl<S, N> FormatEvent<S, N> for JsonForm
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut line = head(metadata.level().as_str(), metadata.target());
        let Speaker { label, role, rank } = &self.speaker;
        line.insert("process".into(), label.as_str().into());
        line.insert("role".into(), role.as_str().into());
        if let Some(rank) = rank {
            line.insert("rank".into(), (*rank).into());
        }
        line.insert("message".into(), fields.message.into());
        for (name, value) in fields.others {
            // A field never hides what every line has.
            line.entry(name).or_insert(value);
        }
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// What every line begins with.
fn head(level: &str, target: &str) -> Map<String, Value> {
    let mut time = String::new();
    // Writing to a String cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut time));
    let head = [("time", time.as_str()), ("level", level), ("target", target)];
    head.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect()
}

/// A line that is no event as one, at level ERROR: what processes say past their log is why they end. `None` if it is
/// an object already.
fn raw_line(line: &[u8]) -> Option<Vec<u8>> {
    if line.first() == Some(&b'{') {
        return None;
    }
    let mut object = head("ERROR", "stderr");
    object.insert("message".into(), String::from_utf8_lossy(line).into());
    Some(Value::Object(object).to_string().into_bytes())
}

/// An event's fields as JSON.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(String, Value)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            (name, value) => self.others.push((name.to_owned(), value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Out(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Out {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_one_object_whatever_it_says() {
        let out = Out::default();
        let writer = out.clone();
        let speaker = Speaker { label: "TP1".into(), role: "scheduler".into(), rank: Some(1) };
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .event_format(JsonForm { speaker })
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(request = %"r7", tokens = 3, level = "mine", "two\nlines and a \"quote\"");
        });
        let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["message"], "two\nlines and a \"quote\"");
        assert_eq!((&line["request"], &line["tokens"]), (&"r7".into(), &3.into()));
        assert_eq!(
            (&line["level"], &line["process"], &line["role"]),
            (&"WARN".into(), &"TP1".into(), &"scheduler".into())
        );
        assert_eq!(line["rank"], 1);
        assert!(line["time"].as_str().is_some_and(|time| time.ends_with('Z')), "{line}");
        assert!(line["target"].as_str().is_some_and(|target| target.contains("logging")), "{line}");
    }

    #[test]
    fn what_is_no_object_becomes_one() {
        assert_eq!(raw_line(b"{\"a\":1}"), None);
        let line: Value = serde_json::from_slice(&raw_line(b"thread 'x' panicked \xff").unwrap()).unwrap();
        assert_eq!(
            (&line["level"], &line["message"]),
            (&"ERROR".into(), &"thread 'x' panicked \u{fffd}".into())
        );
    }
}
