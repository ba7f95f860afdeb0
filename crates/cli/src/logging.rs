//! One log format for every process: time, level, role, message, fields.
//!
//! `2026-11-29T16:04:19.123456Z  INFO TP0 loaded 494 MiB of weights`. Everything goes to stderr;
//! the launcher forwards its children's lines unchanged.

use std::{fmt, io};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Sends this process's events to `out`, marked with `role`, from `level` up.
///
/// A log that cannot be written is lost; it never ends or stops the process. The launcher passes
/// its [`StderrSink`](lockstep_launch::StderrSink), which never blocks; children pass stderr, a
/// pipe that the launcher always reads.
pub fn init<W, M>(role: &str, level: &str, out: M)
where
    W: io::Write,
    M: Fn() -> W + Send + Sync + 'static,
{
    let level: LevelFilter = level.parse().unwrap_or(LevelFilter::INFO);
    let filter = EnvFilter::builder().with_default_directive(level.into()).parse_lossy("");
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(out)
        .with_ansi(false)
        .log_internal_errors(false)
        .event_format(RoleFormat { role: role.to_owned() })
        .finish();
    // A second call (tests) keeps the first subscriber.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

struct RoleFormat {
    role: String,
}

impl<S, N> FormatEvent<S, N> for RoleFormat
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
        write!(writer, " {:>5} {} ", event.metadata().level(), self.role)?;
        ctx.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
