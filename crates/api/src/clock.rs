//! Times as Ollama and Anthropic write them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A time in RFC 3339, UTC, with nanoseconds.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    // A clock before 1970 is no reason to fail a request.
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (year, month, day) = civil(since.as_secs() / 86_400);
    let second = since.as_secs() % 86_400;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:09}Z", since.subsec_nanos())
}

/// The same of Unix seconds, without a fraction.
pub(crate) fn rfc3339_seconds(seconds: u64) -> String {
    let text = rfc3339(UNIX_EPOCH + Duration::from_secs(seconds));
    text.split('.').next().map_or_else(String::new, |whole| format!("{whole}Z"))
}

/// Year, month and day of a day since 1970 (Howard Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

/// A duration in nanoseconds.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_at_the_edges() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000000005Z"),
            (951_782_399, "2000-02-28T23:59:59.000000005Z"),
            (951_782_400, "2000-02-29T00:00:00.000000005Z"),
            (1_709_164_800, "2024-02-29T00:00:00.000000005Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000000005Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000005Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::new(seconds, 5)), expected);
        }
    }
}
