//! What a run did, counted.

use super::input::{Input, Line};
use super::output::{Decided, Output};
use crate::client::chunk::{Usage, error_message};
use serde_json::Value;
use std::fmt;
use std::time::Instant;

/// Counts of a run and of the runs before it.
#[derive(Debug)]
pub struct Summary {
    lines: usize,
    /// Lines that could not be sent.
    pub bad: usize,
    good_before: usize,
    failed_before: usize,
    good: usize,
    failed: usize,
    repetitions: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    /// The first failure of this run, in a sentence.
    first_failure: Option<String>,
    begun: Instant,
}

impl Summary {
    /// Before the first request.
    pub fn new(input: &Input, output: &Output) -> Self {
        let good_before = output.done.values().filter(|good| **good).count();
        Self {
            lines: input.lines.len(),
            bad: input.bad.len(),
            good_before,
            failed_before: output.done.len() - good_before,
            good: 0,
            failed: 0,
            repetitions: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
            first_failure: None,
            begun: Instant::now(),
        }
    }

    /// Counts a decided request.
    pub fn add(&mut self, line: &Line, decided: &Decided, repetitions: u32) {
        self.repetitions += u64::from(repetitions);
        match decided.is_good() {
            true => self.good += 1,
            false => self.failed += 1,
        }
        let cause = match decided {
            Decided::Answered { status, body, .. } => {
                let usage = body.get("usage").cloned().map(serde_json::from_value::<Usage>);
                if let Some(Ok(usage)) = usage {
                    self.prompt_tokens += usage.prompt_tokens;
                    self.cached_tokens += usage.cached_tokens();
                    self.completion_tokens += usage.completion_tokens;
                }
                format!("{status}: {}", error_message(body.get("error").unwrap_or(&Value::Null)))
            }
            Decided::Unanswered { message, .. } => message.clone(),
        };
        if !decided.is_good() {
            let told = || format!("line {} (custom_id {:?}): {cause}", line.number, line.custom_id);
            self.first_failure.get_or_insert_with(told);
        }
    }

    /// Lines without an answer of any kind.
    pub fn left(&self) -> usize {
        self.lines - self.good_before - self.failed_before - self.good - self.failed
    }

    /// Lines whose answer is no good one, of this run and earlier ones.
    pub fn failed(&self) -> usize {
        self.failed_before + self.failed
    }

    /// For the end of a progress bar.
    pub fn short(&self) -> String {
        format!("{} tokens, {} failed", self.completion_tokens, self.failed)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} lines: {} answered, {} failed", self.lines, self.good, self.failed)?;
        let before = self.good_before + self.failed_before;
        if before > 0 {
            write!(f, ", {before} were done before ({} of them failed)", self.failed_before)?;
        }
        write!(f, ", {} left", self.left())?;
        let seconds = self.begun.elapsed().as_secs_f64();
        if self.good + self.failed > 0 {
            write!(
                f,
                "\n{} prompt tokens ({} cached), {} generated in {seconds:.1} s ({:.1} tokens/s), {} repetitions",
                self.prompt_tokens,
                self.cached_tokens,
                self.completion_tokens,
                self.completion_tokens as f64 / seconds.max(1e-9),
                self.repetitions
            )?;
        }
        self.first_failure.as_ref().map_or(Ok(()), |first| write!(f, "\nfirst failure: {first}"))
    }
}
