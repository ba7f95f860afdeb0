//! The findings as text: a line per comparison, then where runs part.

use crate::{Promise, Report};
use std::fmt::Write;

/// The whole report.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    for c in &report.comparisons {
        let verdict = if c.passed { "ok  " } else { "FAIL" };
        let promise = match c.promise {
            Promise::BitEqual => "bit-equal",
            Promise::Close => "close",
        };
        // Writing to a string cannot fail.
        let _ = write!(out, "{verdict}  {:<58} ", c.what);
        let _ = match &c.error {
            Some(error) => writeln!(out, "{error}"),
            None => writeln!(
                out,
                "{promise:<9}  max {:.2e}  rms {:.2e}  of {:.3}  same best token {}/{}",
                c.max_error, c.rms_error, c.largest_logit, c.top1_equal, c.positions
            ),
        };
        if let Some(d) = &c.first_difference {
            let _ = writeln!(
                out,
                "      first difference: prompt {}, position {}: {}; the reference led by {:.3e}",
                d.prompt, d.position, d.what, d.margin
            );
        }
    }
    for line in &report.first_layers {
        let _ = writeln!(out, "      {line}");
    }
    let failed = report.comparisons.iter().filter(|c| !c.passed).count();
    let _ = match failed {
        0 => writeln!(out, "every promise kept in {} comparisons", report.comparisons.len()),
        _ => writeln!(out, "{failed} of {} comparisons failed", report.comparisons.len()),
    };
    out
}
