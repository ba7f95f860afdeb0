//! The findings as text: notes on the files, a line per comparison, then where runs part.

use crate::compare::Compared;
use crate::{Comparison, Promise, Report};
use std::fmt::Write;

/// The whole report.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    for note in &report.notes {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "note  {note}");
    }
    for c in &report.comparisons {
        let verdict = if c.passed { "ok  " } else { "FAIL" };
        let _ = write!(out, "{verdict}  {:<64} ", c.what);
        let _ = match &c.error {
            Some(error) => writeln!(out, "{error}"),
            None => writeln!(out, "{}", numbers(c)),
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

/// Errors beside their bounds, where there are any, and the agreement.
fn numbers(c: &Comparison) -> String {
    let (max, rms) = (c.max_error, c.rms_error);
    match (c.compared, c.promise, c.rms_bound) {
        (Compared::Texts, Promise::BitEqual, _) => {
            format!("same      tokens {}/{}", c.top1_equal, c.positions)
        }
        (Compared::Texts, Promise::Close(_), _) => format!(
            "close     tokens {}/{}  others where the best led by at most {:.2e}",
            c.top1_equal, c.positions, c.max_bound
        ),
        (Compared::Logits, Promise::BitEqual, _) => {
            format!("bit-equal max {max:.2e}  rms {rms:.2e}{}", agreement(c))
        }
        (Compared::Logits, Promise::Close(_), Some(bound)) => format!(
            "close     max {max:.2e} (bound {:.2e})  rms {rms:.2e} (bound {bound:.2e}){}",
            c.max_bound,
            agreement(c)
        ),
        (Compared::Logits, Promise::Close(bound), None) => format!(
            "close     max {max:.2e} (bound {:.2e}, kept at {} positions, at {:.0} % needed)  rms {rms:.2e}{}",
            c.max_bound,
            c.within,
            100.0 * bound.of_positions,
            agreement(c)
        ),
    }
}

fn agreement(c: &Comparison) -> String {
    format!("  of {:.3}  same best token {}/{}", c.largest_logit, c.top1_equal, c.positions)
}
