//! All requests of a batch, a bounded number at a time, until they are done or the run has to end.

use super::input::{Input, Line};
use super::output::Output;
use super::send::Asker;
use super::summary::Summary;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;

const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Every line is decided.
    Done,
    /// A signal asked for the end.
    Signal(i32),
    /// The server cannot be reached any more; why.
    Lost(String),
}

/// What a run needs.
pub struct Run<'a> {
    /// What to ask.
    pub input: &'a Input,
    /// Where answers go.
    pub output: Output,
    /// Whom to ask.
    pub asker: Asker,
    /// Requests in flight at once.
    pub concurrency: usize,
}

impl Run<'_> {
    /// Asks for every line that has no answer. A signal or a lost server stops new requests; those in flight
    /// are finished, unless a second signal comes. Errors when a file fails.
    pub async fn all(mut self, summary: &mut Summary) -> Result<End> {
        let mut signals = [handled(SignalKind::interrupt())?, handled(SignalKind::terminate())?];
        let input = self.input;
        let undone: Vec<&Line> =
            input.lines.iter().filter(|line| !self.output.done.contains_key(&line.custom_id)).collect();
        let bar = bar(undone.len());
        let mut waiting = undone.into_iter();
        let mut flying = JoinSet::new();
        let mut end = End::Done;
        loop {
            while end == End::Done
                && flying.len() < self.concurrency
                && let Some(line) = waiting.next()
            {
                let (request, asker, line) = (input.request(line)?, self.asker.clone(), line.clone());
                flying.spawn(async move { (line, asker.decide(request).await) });
            }
            tokio::select! {
                landed = flying.join_next() => match landed {
                    None => break,
                    Some(landed) => match landed? {
                        (line, Ok((decided, repetitions))) => {
                            self.output.write(&line, &decided)?;
                            summary.add(&line, &decided, repetitions);
                            bar.inc(1);
                            bar.set_message(summary.short());
                        }
                        (_, Err(error)) => end = End::Lost(error.to_string()),
                    },
                },
                number = any(&mut signals) => {
                    if matches!(end, End::Signal(_)) {
                        break;
                    }
                    end = End::Signal(number);
                    bar.suspend(|| tell_of_end(flying.len()));
                }
            }
        }
        bar.finish_and_clear();
        self.output.sync()?;
        Ok(end)
    }
}

fn tell_of_end(flying: usize) {
    let _ = writeln!(std::io::stderr(), "finishing the {flying} requests in flight; once more ends at once");
}

/// From now on a signal of this kind is only received.
fn handled(kind: SignalKind) -> std::io::Result<Signal> {
    lockstep_launch::init::hand_over(kind.as_raw_value());
    signal(kind)
}

/// The next signal of either kind.
async fn any([interrupt, terminate]: &mut [Signal; 2]) -> i32 {
    tokio::select! {
        _ = interrupt.recv() => SIGINT,
        _ = terminate.recv() => SIGTERM,
    }
}

/// A bar on a terminal, nothing elsewhere.
fn bar(lines: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("[{bar:30}] {pos}/{len} {per_sec} eta {eta} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(lines as u64).with_style(style)
}
