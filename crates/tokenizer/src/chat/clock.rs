//! `strftime_now`: today's date for templates that mention it.
//!
//! Only here does a text worker read the clock. UTC, so that every host gives the same prompt (and the
//! prefix cache the same prefix); Hugging Face uses local time.

use std::fmt::Write;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Seconds since 1970-01-01 UTC.
pub(super) fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Formats `seconds` since 1970 (UTC) by C's `strftime` letters; unknown ones stay as written.
pub(super) fn strftime(format: &str, seconds: u64) -> String {
    let (days, second_of_day) = ((seconds / 86_400) as i64, seconds % 86_400);
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let weekday = WEEKDAYS[(days + 4).rem_euclid(7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let is_bare = chars.next_if_eq(&'-').is_some();
        let letter = chars.next().unwrap_or('%');
        let mut number = |value: u64| {
            let _ = if is_bare { write!(out, "{value}") } else { write!(out, "{value:02}") };
        };
        match letter {
            'd' => number(day),
            'm' => number(month),
            'H' => number(hour),
            'I' => number(hour12),
            'M' => number(minute),
            'S' => number(second),
            'y' => number(year.rem_euclid(100) as u64),
            'Y' => out.push_str(&year.to_string()),
            'j' => out.push_str(&format!("{:03}", days - days_from_civil(year, 1, 1) + 1)),
            'e' => out.push_str(&format!("{day:>2}")),
            'B' => out.push_str(month_name),
            'b' | 'h' => out.push_str(&month_name[..3]),
            'A' => out.push_str(weekday),
            'a' => out.push_str(&weekday[..3]),
            'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            'Z' => out.push_str("UTC"),
            'z' => out.push_str("+0000"),
            'F' => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            'T' => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            '%' => out.push('%'),
            other => out.extend(['%', other]),
        }
    }
    out
}

/// Howard Hinnant, "chrono-compatible low-level date algorithms": (year, month 1..=12, day 1..=31).
fn civil_from_days(days: i64) -> (i64, u64, u64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = (day_of_year - (153 * shifted + 2) / 5 + 1) as u64;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 } as u64;
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// Days from 1970-01-01; inverse of [`civil_from_days`].
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let shifted = (month + 9) % 12;
    let day_of_era =
        year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + (153 * shifted + 2) / 5 + day - 1;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checked with `date -u -d @1721995506`.
    #[test]
    fn a_known_moment() {
        let t = 1_721_995_506;
        assert_eq!(strftime("%d %b %Y", t), "26 Jul 2024");
        assert_eq!(
            strftime("%A, %B %-d, %Y %H:%M:%S %I %p %j %y %%", t),
            "Friday, July 26, 2024 12:05:06 12 PM 208 24 %"
        );
        assert_eq!(strftime("%F %q %", t), "2024-07-26 %q %");
    }

    #[test]
    fn days_and_dates_are_inverse() {
        for days in (-800_000..800_000).step_by(37) {
            let (y, m, d) = civil_from_days(days);
            assert_eq!(days_from_civil(y, m as i64, d as i64), days);
        }
    }
}
