//! `lockstep serve` on a host other than host 0: no api, no tokenizers, only ranks, started and ended as host 0 says.
//!
//! ```text
//! join → (Start → serve → End)* → Goodbye
//! ```
//! **Invariants:** a death here is told to host 0 at once and decided there; what is heard of a host 0 that is lost is
//! the end of everything here. The launcher ends with host 0's exit code, or with 4 when host 0 is lost.

use super::abroad::Abroad;
use super::facts::facts;
use super::plan::ServePlan;
use super::ready::by_signal;
use super::spawn::{END_GRACE, Group};
use crate::error::{CliError, Result, code_of_signal};
use crate::flags::hosts::SeveralHosts;
use lockstep_comm::watch::WatchPage;
use lockstep_core::ExitCode;
use lockstep_launch::hosts::{Head, HeadSpec, StartOrder, ToHost};
use lockstep_launch::{
    Concern, Concerns, Event, Events, Limits, Phase, Stage, StderrSink, Supervisor, Watchdog,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How much longer than its own drain host 0 may take to say goodbye after a signal here.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(15);

/// Joins host 0 and does what it says, until it says goodbye.
pub async fn run(plan: &ServePlan, hosts: &SeveralHosts, stderr: &StderrSink) -> Result<()> {
    let spec = HeadSpec {
        target: hosts.target.clone(),
        key: hosts.key.clone(),
        nnodes: hosts.map.nnodes(),
        node_rank: hosts.node_rank,
        facts: facts(plan)?,
        patience: hosts.patience,
    };
    // No child exists yet: a signal simply ends this process.
    let joined = tokio::task::spawn_blocking(move || Head::join(spec)).await;
    let head =
        joined.map_err(CliError::with(ExitCode::Internal))?.map_err(CliError::with(ExitCode::Flags))?;
    tracing::info!("joined host 0 at {} as host {}", head.address, hosts.node_rank);
    let (supervisor, events) =
        Supervisor::start(stderr.clone()).map_err(CliError::with(ExitCode::Internal))?;
    let marks = hosts.map.ranks_per_host();
    let (page_fd, page) = WatchPage::create(marks).map_err(CliError::with(ExitCode::Internal))?;
    let follower = Follower {
        plan,
        hosts,
        head,
        supervisor,
        events,
        page,
        page_fd: Arc::new(page_fd),
        stderr,
        group: None,
        watchdog: None,
        concerns: None,
        is_ending: false,
        leave_at: None,
    };
    follower.follow().await
}

struct Follower<'a> {
    plan: &'a ServePlan,
    hosts: &'a SeveralHosts,
    head: Head,
    supervisor: Supervisor,
    events: Events,
    page: WatchPage,
    page_fd: Arc<OwnedFd>,
    stderr: &'a StderrSink,
    /// The ranks of now.
    group: Option<Group>,
    watchdog: Option<Watchdog>,
    concerns: Option<Concerns>,
    /// Host 0 has had the ranks ended.
    is_ending: bool,
    /// After that signal and time host 0 is not waited for any more.
    leave_at: Option<(i32, Instant)>,
}

/// What happened.
enum News {
    Order(std::result::Result<ToHost, String>),
    Local(Option<Event>),
    Concern(Concern),
    /// A rank says something to an api that is not here: how far it has loaded.
    Loading,
    Late(i32),
}

impl Follower<'_> {
    async fn follow(mut self) -> Result<()> {
        let ended = loop {
            let done = match self.news().await {
                News::Order(Ok(order)) => self.obey(order),
                News::Order(Err(why)) => Err(self.lost(&why)),
                News::Local(Some(event)) => self.tell(event),
                News::Local(None) => Err(CliError::new(ExitCode::Internal, "the supervising thread is gone")),
                News::Concern(concern) => self.heed(concern),
                News::Loading => Ok(None),
                News::Late(signal) => Err(CliError::new(
                    code_of_signal(signal),
                    format!("host 0 did not end the server after signal {signal} here"),
                )),
            };
            match done {
                Ok(None) => {}
                Ok(Some(())) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.watchdog = None;
        if let Some(group) = &self.group {
            group.abort("the server is stopping");
        }
        if let Err(e) = self.supervisor.shutdown(END_GRACE) {
            tracing::error!("{e}");
        }
        ended
    }

    async fn news(&mut self) -> News {
        let late = self.leave_at;
        let inbox = self.group.as_mut().and_then(|group| group.inbox.as_mut());
        let loading = async {
            match inbox {
                // Whatever cannot be read is no order of anybody's.
                Some(inbox) => drop(inbox.recv().await),
                None => std::future::pending().await,
            }
        };
        let concern = async {
            match &mut self.concerns {
                Some(concerns) => concerns.recv().await,
                None => std::future::pending().await,
            }
        };
        let far_off = Instant::now() + Duration::from_secs(3600);
        tokio::select! {
            order = self.head.next() => News::Order(order),
            event = self.events.recv() => News::Local(event),
            Some(concern) = concern => News::Concern(concern),
            () = loading => News::Loading,
            () = tokio::time::sleep_until(late.map_or(far_off, |(_, at)| at).into()), if late.is_some() => {
                News::Late(late.map(|(signal, _)| signal).unwrap_or_default())
            }
        }
    }

    /// Does what host 0 says. Gives something when all is over.
    fn obey(&mut self, order: ToHost) -> Result<Option<()>> {
        let internal = CliError::with::<lockstep_launch::LaunchError>(ExitCode::Internal);
        match order {
            ToHost::Welcome { .. } | ToHost::Beat => {}
            ToHost::Refused(why) => {
                let why = format!("host 0 at {} refuses this host: {why}", self.head.address);
                return Err(CliError::new(ExitCode::Flags, why));
            }
            ToHost::Start(order) => self.start(&order)?,
            ToHost::Serving => {
                self.supervisor.set_phase(Phase::Serving).map_err(internal)?;
                self.watch(Stage::Serving)?;
                tracing::info!("host 0 serves");
            }
            ToHost::Abort(cause) => {
                if let Some(group) = &self.group {
                    group.abort(&cause);
                }
            }
            ToHost::End(cause) => {
                tracing::warn!("host 0 ends the ranks: {cause}");
                self.is_ending = true;
                self.watchdog = None;
                if let Some(group) = &self.group {
                    group.abort(&cause);
                }
                self.supervisor.begin_shutdown(END_GRACE).map_err(internal)?;
            }
            ToHost::Draining => {
                self.watchdog = None;
                self.supervisor.set_phase(Phase::Draining).map_err(internal)?;
                self.head.drain_noted();
            }
            ToHost::Goodbye { code: ExitCode::Drained, .. } => {
                tracing::info!("host 0 has drained the server");
                return Ok(Some(()));
            }
            ToHost::Goodbye { code, why } => {
                return Err(CliError::new(code, format!("host 0 has ended the server: {why}")));
            }
        }
        Ok(None)
    }

    fn start(&mut self, order: &StartOrder) -> Result<()> {
        (0..self.page.marks()).for_each(|mark| self.page.reset(mark));
        let abroad = Abroad::of_other(self.hosts, &self.head, order)?;
        let with = (&self.supervisor, &self.page_fd);
        self.group = Some(Group::start(self.plan, with, (order.incarnation, Some(abroad)))?);
        self.is_ending = false;
        self.watch(Stage::Loading)
    }

    fn watch(&mut self, stage: Stage) -> Result<()> {
        let Some(group) = &self.group else { return Ok(()) };
        let limits = (stage, Limits::of(self.plan.collective_timeout));
        self.watchdog = None;
        let (watchdog, concerns) =
            Watchdog::start(self.page.clone(), group.loops.clone(), limits, self.stderr.clone())
                .map_err(CliError::with(ExitCode::Internal))?;
        (self.watchdog, self.concerns) = (Some(watchdog), Some(concerns));
        Ok(())
    }

    /// Tells host 0 what has happened here.
    fn tell(&mut self, event: Event) -> Result<Option<()>> {
        match event {
            Event::ChildDied { name, role, status } => {
                if let Some(group) = &self.group {
                    group.abort(&format!("{name} {status}"));
                }
                self.head.died(name, role, status);
            }
            Event::Failed(failure) => {
                tracing::error!("{}", failure.to_string().trim_start_matches("lockstep: "));
                self.head.failed(failure);
            }
            Event::AllExited => {
                self.group = None;
                self.head.ended();
            }
            Event::Signal(signal) if self.group.is_none() && !self.is_ending => {
                return Err(by_signal(signal));
            }
            Event::Signal(signal) => {
                tracing::info!("signal {signal}: host 0 is asked to drain the server");
                self.head.signalled(signal);
                self.leave_at = Some((signal, Instant::now() + self.plan.grace + GOODBYE_PATIENCE));
            }
            Event::ChildExited { .. } | Event::ReplicaEnded(_) => {}
        }
        Ok(None)
    }

    fn heed(&self, concern: Concern) -> Result<Option<()>> {
        if let Concern::Lost { process, why } = concern {
            self.supervisor.give_up(&process, why).map_err(CliError::with(ExitCode::Internal))?;
        }
        Ok(None)
    }

    fn lost(&self, why: &str) -> CliError {
        CliError::new(ExitCode::ChildDied, format!("host 0 ({}) was lost: {why}", self.head.address))
    }
}
