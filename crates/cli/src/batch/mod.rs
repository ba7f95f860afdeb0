//! `lockstep batch`: answers a file of requests into a file of answers, in OpenAI's batch format.
//!
//! **Invariants**
//! * Nothing is sent before every line of the input was read and found fit.
//! * A line of the output is written whole, once per `custom_id`, and only when its request is decided: an HTTP
//!   answer (also a refusal), or an answer that took too long. A server that cannot be reached decides
//!   nothing; it ends the run.
//! * So the same command, run again after whatever ended it, asks only for what is missing.
//!
//! Reading order: [`input`], [`output`], [`send`], [`mod@run`], [`summary`].

mod input;
mod output;
mod run;
mod send;
mod summary;

use crate::client::{Target, runtime};
use crate::error::{CliError, Result, code_of_signal};
use crate::flags::batch::BatchFlags;
use crate::output::say_line;
use input::Input;
use lockstep_core::ExitCode;
use output::Output;
use run::{End, Run};
use std::io::Write;
use std::time::Duration;
use summary::Summary;

/// Bad lines that are shown; of the others there is a count.
const BAD_LINES_SHOWN: usize = 20;

/// Answers all lines that are not answered yet. Exit code 0 says that every line has a good answer.
pub fn run(flags: &BatchFlags) -> Result<()> {
    let flag_error = CliError::with::<anyhow::Error>(ExitCode::Flags);
    flags.check().map_err(&flag_error)?;
    let input = Input::read(&flags.input).map_err(&flag_error)?;
    refuse_bad(&input, flags.skip_bad_lines)?;
    let mut output = Output::open(&flags.output).map_err(&flag_error)?;
    output.check_belongs_to(&input).map_err(&flag_error)?;
    if flags.retry_failed {
        output.forget_failed().map_err(CliError::with(ExitCode::Internal))?;
    }
    let mut summary = Summary::new(&input, &output);
    if summary.left() == 0 {
        return finish(&summary, End::Done);
    }
    let runtime = runtime()?;
    let mut target = Target::open(&flags.target, &runtime, flags.concurrency)?;
    let end = ask(flags, &input, output, &mut target, &mut summary, &runtime);
    target.close();
    finish(&summary, end?)
}

fn ask(
    flags: &BatchFlags,
    input: &Input,
    output: Output,
    target: &mut Target,
    summary: &mut Summary,
    runtime: &tokio::runtime::Runtime,
) -> Result<End> {
    // Without --url the model is the one that was started; with it, the one that was named.
    let model = flags.target.model.is_some().then(|| target.model.clone());
    if model.is_none() {
        refuse_unserved(input, target)?;
    }
    let asker = send::Asker {
        client: target.client.clone(),
        model,
        default_model: target.model.clone(),
        retries: flags.retries,
        limit: Duration::from_secs_f64(flags.timeout),
        server_returns: flags.target.url.is_some(),
    };
    let run = Run { input, output, asker, concurrency: flags.concurrency };
    match runtime.block_on(run.all(summary)) {
        Err(error) => Err(CliError::new(ExitCode::Internal, error)),
        Ok(End::Lost(lost)) => Ok(match target.failure() {
            Some(failure) => End::Lost(failure.message),
            None => End::Lost(lost),
        }),
        Ok(end) => Ok(end),
    }
}

/// Lines that cannot be sent end the run before it begins, unless they are to be passed over.
fn refuse_bad(input: &Input, skips: bool) -> Result<()> {
    for bad in input.bad.iter().take(BAD_LINES_SHOWN) {
        let _ = writeln!(std::io::stderr(), "line {}: {}", bad.number, bad.reason);
    }
    let count = input.bad.len();
    if count > BAD_LINES_SHOWN {
        let _ = writeln!(std::io::stderr(), "... and {} more", count - BAD_LINES_SHOWN);
    }
    match (count, skips) {
        (0, _) | (_, true) => Ok(()),
        _ => Err(CliError::new(
            ExitCode::Flags,
            format!("{count} lines cannot be sent, so nothing was; mend them, or pass --skip-bad-lines"),
        )),
    }
}

/// Without `--model`, every model that a line names is served.
fn refuse_unserved(input: &Input, target: &Target) -> Result<()> {
    let unserved = input.lines.iter().find(|line| {
        line.model.as_ref().is_some_and(|model| !target.served.is_empty() && !target.served.contains(model))
    });
    match unserved {
        None => Ok(()),
        Some(line) => Err(CliError::new(
            ExitCode::Flags,
            format!(
                "line {} asks for model {:?}, the server has {}; --model {} answers every line with that one",
                line.number,
                line.model.as_deref().unwrap_or_default(),
                target.served.join(", "),
                target.served.first().map_or("NAME", String::as_str)
            ),
        )),
    }
}

/// Prints the counts; the exit code says whether every line has a good answer.
fn finish(summary: &Summary, end: End) -> Result<()> {
    say_line(summary)?;
    let left = summary.left();
    let again = "the same command goes on from here";
    match end {
        End::Lost(cause) => {
            Err(CliError::new(ExitCode::Internal, format!("{cause}; {left} lines are left, {again}")))
        }
        End::Signal(signal) if left > 0 => Err(CliError::new(
            code_of_signal(signal),
            format!("stopped by signal {signal} with {left} lines left; {again}"),
        )),
        _ if summary.failed() > 0 => {
            let text = format!("{} lines failed; --retry-failed asks for them again", summary.failed());
            Err(CliError::new(ExitCode::Internal, text))
        }
        _ if summary.bad > 0 => {
            Err(CliError::new(ExitCode::Internal, format!("{} bad lines were passed over", summary.bad)))
        }
        _ => Ok(()),
    }
}
