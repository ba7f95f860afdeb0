//! Waits until every process has acknowledged, and gives up as soon as one cannot.

use super::plan::ServePlan;
use super::spawn::Server;
use crate::error::{CliError, Result, code_of_signal};
use crate::flags::logging::LogFormat;
use indicatif::{ProgressBar, ProgressStyle};
use lockstep_core::ExitCode;
use lockstep_launch::{Concern, Event, Limits, ReadyTracker, Stage, Watchdog};
use lockstep_wire::{EngineInfo, Ready, ToApi};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// What the children told about themselves.
pub struct Facts {
    /// The state at start of the replica with the smallest context.
    pub engine: EngineInfo,
    /// Why chat requests cannot be rendered, if so.
    pub chat_error: Option<String>,
}

impl Facts {
    /// Takes in what a replica's primary says.
    fn take(&mut self, engine: EngineInfo) {
        for note in &engine.notes {
            tracing::warn!("{note}");
        }
        if self.engine.context_max == 0 || engine.context_max < self.engine.context_max {
            self.engine = engine;
        }
    }
}

/// Returns when every replica's primary (for its ranks), every tokenizer and the detokenizer are ready.
///
/// Errors with the first cause when a process ends, and with 130/143 on a signal. There is no
/// time-out: a slow disk is not an error, and a death is noticed at once. A process that a signal has
/// stopped is named and, after `--collective-timeout`, ended.
pub async fn wait(plan: &ServePlan, server: &mut Server) -> Result<Facts> {
    let started = Instant::now();
    let mut tracker = ReadyTracker::new(&plan.layout);
    let mut facts = Facts { engine: EngineInfo::default(), chat_error: None };
    let mut loading = Loading::new(plan);
    let limits = (Stage::Loading, Limits::of(plan.collective_timeout));
    let (_watchdog, mut concerns) =
        Watchdog::start(server.page.clone(), server.group.loops.clone(), limits, server.stderr.clone())
            .map_err(CliError::with(ExitCode::Internal))?;
    let mut reminder = tokio::time::interval_at((started + REMINDER).into(), REMINDER);
    while !tracker.is_ready() {
        let Some(inbox) = &mut server.group.inbox else {
            return Err(CliError::new(ExitCode::Internal, "the inbox is gone"));
        };
        tokio::select! {
            message = inbox.recv() => match message.map_err(CliError::with(ExitCode::Internal))? {
                ToApi::Loading { rank, done, total } => loading.update(rank, done, total),
                ToApi::Ready(ready) => {
                    let Ready { role, engine, chat_error } = *ready;
                    engine.into_iter().for_each(|engine| facts.take(engine));
                    facts.chat_error = chat_error.or(facts.chat_error);
                    tracker.acknowledge(role);
                }
                other => tracing::debug!("before readiness: {other:?}"),
            },
            Some(concern) = concerns.recv() => if let Concern::Lost { process, why } = concern {
                server.supervisor.give_up(&process, why).map_err(CliError::with(ExitCode::Internal))?;
            },
            _ = reminder.tick() => {
                tracing::info!("still waiting for {:?} after {:.0} s", tracker.missing(), started.elapsed().as_secs_f64());
            }
            event = server.events.recv() => match event {
                Some(Event::Signal(signal)) => return Err(by_signal(signal)),
                Some(event) => return Err(death(server, event).await),
                None => return Err(CliError::new(ExitCode::Internal, "the supervising thread is gone")),
            },
        }
    }
    loading.finish();
    tracing::info!("all processes are ready after {:.2} s", started.elapsed().as_secs_f64());
    if let Some(reason) = &facts.chat_error {
        tracing::warn!("{reason}");
    }
    Ok(facts)
}

/// The error that a signal means while nothing is served.
pub fn by_signal(signal: i32) -> CliError {
    CliError::new(code_of_signal(signal), format!("stopped by signal {signal} while loading"))
}

/// How often the launcher says whom it waits for.
const REMINDER: Duration = Duration::from_secs(10);

async fn death(server: &mut Server, event: Event) -> CliError {
    let failure = match event {
        Event::Failed(failure) => Some(failure),
        Event::ChildDied { name, status, .. } => server.verdict(&format!("{name} {status}")).await,
        _ => None,
    };
    match failure {
        // Failure's text begins with the program's name already.
        Some(f) => CliError::new(f.exit_code, f.to_string().trim_start_matches("lockstep: ")),
        None => CliError::new(ExitCode::ChildDied, "a child process ended while loading"),
    }
}

/// One progress bar for all ranks on a terminal; silent elsewhere.
struct Loading {
    bar: Option<ProgressBar>,
    ranks: usize,
    done: BTreeMap<usize, usize>,
}

impl Loading {
    fn new(plan: &ServePlan) -> Self {
        let is_for_people = plan.log.format == LogFormat::Text && std::io::stderr().is_terminal();
        let bar = is_for_people.then(|| {
            let style =
                ProgressStyle::with_template("loading weights [{bar:40}] {pos}/{len} parts {elapsed}")
                    .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(1).with_style(style)
        });
        Self { bar, ranks: plan.layout.topology.world_size(), done: BTreeMap::new() }
    }

    fn update(&mut self, rank: usize, done: usize, total: usize) {
        self.done.insert(rank, done);
        if let Some(bar) = &self.bar {
            bar.set_length((total * self.ranks) as u64);
            bar.set_position(self.done.values().sum::<usize>() as u64);
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
