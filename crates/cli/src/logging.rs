//! One log format for every process: time, level, role, message, fields.
//!
//! `2026-11-29T16:04:19.123456Z  INFO TP0 loaded 494 MiB of weights`. Everything goes to stderr;
//! the launcher forwards its children's lines unchanged.

use std::fmt;
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Sends this process's events to stderr, marked with `role`, from `level` up.
pub fn init(role: &str, level: &str) {
    let level: LevelFilter = level.parse().unwrap_or(LevelFilter::INFO);
    let filter = EnvFilter::builder().with_default_directive(level.into()).parse_lossy("");
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
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
