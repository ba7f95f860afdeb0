//! Serves until a signal or a failure that ends it, then ends every process and says why.

use super::plan::ServePlan;
use super::ready::Facts;
use super::restart::Policy;
use super::revival::Revivals;
use super::spawn::Server;
use crate::error::{CliError, Result, code_of_signal};
use crate::flags::server::ServerFlags;
use lockstep_api::engine::dispatch::{self, LinkSockets, SchedulerSenders};
use lockstep_api::parsers::ParserChoice;
use lockstep_api::{
    ApiConfig, ApiError, Ended, EngineClient, EngineLink, ProcessInfo, ProcessList, SamplingDefaults,
    ServerControl, ServerHandle, Watched,
};
use lockstep_comm::link::{AsyncReceiver, LinkError, Sender};
use lockstep_comm::watch::{Activity, BEAT_INTERVAL, Mark};
use lockstep_core::ExitCode;
use lockstep_launch::hosts::Room;
use lockstep_launch::{ChildStatus, Concern, Concerns, Event, Failure, Limits, Phase, Stage, Watchdog};
use lockstep_wire::{Ready, Role, ToApi, ToScheduler};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::Mutex;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{JoinError, JoinHandle};

/// How long children may take to finish and exit by themselves after a drain.
const EXIT_PATIENCE: Duration = Duration::from_secs(3);

/// Listens and serves; returns how the launcher should end.
pub async fn run(mut plan: ServePlan, mut server: Server, facts: Facts, flags: &ServerFlags) -> Result<()> {
    let Some(port) = plan.port.take() else {
        return Err(server.end(CliError::new(ExitCode::Internal, "the reserved port is gone")));
    };
    let address = port.address;
    let listener = match port.listen() {
        Ok(listener) => listener,
        Err(error) => return Err(server.end(error)),
    };
    let mut service = match start((&plan, flags), &mut server, facts, listener) {
        Ok(service) => service,
        Err(error) => return Err(server.end(error)),
    };
    let scheme = if plan.connections.tls.is_some() { "https" } else { "http" };
    tracing::info!(
        "listening on {scheme}://{address} (model {}); Ctrl-C drains and stops",
        plan.served_model_name
    );
    let ended = service.watch(&plan, &mut server).await;
    service.end(server, ended).await
}

/// The running tasks and what has happened to them.
pub struct Service {
    pub(super) client: EngineClient,
    handle: ServerHandle,
    http: JoinHandle<Ended>,
    /// Of the engine of now, as the three that follow.
    dispatcher: JoinHandle<std::result::Result<(), ApiError>>,
    /// Ends with the service, before the children are asked to leave.
    watchdog: Option<Watchdog>,
    concerns: Option<Concerns>,
    link: Arc<Mutex<EngineLink>>,
    /// Shown by `/server_info`.
    processes: ProcessList,
    /// This loop's own place on the watch page.
    mark: Mark,
    /// Primaries that have become ready since the start.
    ready: Option<UnboundedReceiver<Ready>>,
    /// The api's ways to the primaries.
    pub(super) schedulers: SchedulerSenders,
    /// Replicas that have failed and are started again.
    pub(super) revivals: Revivals,
    pub(super) policy: Policy,
    pub(super) signal: Option<i32>,
    failure: Option<Failure>,
    /// Why there is no engine any more, when no process's end was the first cause.
    lost: Option<CliError>,
}

fn start(
    (plan, flags): (&ServePlan, &ServerFlags),
    server: &mut Server,
    facts: Facts,
    listener: tokio::net::TcpListener,
) -> Result<Service> {
    let config = api_config(plan, flags, server, facts)?;
    let (client, mut link) = EngineClient::with_replicas(server.group.tokenizers.len(), plan.replication);
    let ready = link.ready.take();
    let (handle, control) = ServerControl::new();
    let mark = server.page.mark(server.page.marks() - 1);
    mark.enter(Activity::Messages, 0);
    let mut service = Service {
        processes: config.processes.clone(),
        http: tokio::spawn(lockstep_api::serve(listener, config, client.clone(), control)),
        dispatcher: tokio::spawn(std::future::ready(Ok(()))),
        link: Arc::new(Mutex::new(link)),
        client,
        handle,
        watchdog: None,
        concerns: None,
        mark,
        ready,
        schedulers: SchedulerSenders::default(),
        revivals: Revivals::new(plan.replication.replicas, &Policy::new(flags, Instant::now())),
        policy: Policy::new(flags, Instant::now()),
        signal: None,
        failure: None,
        lost: None,
    };
    service.join_engine(plan, server)?;
    Ok(service)
}

/// The api's links to its children. They end when the children have: a dead one must not hold up the last word, nor
/// the start of the next engine.
fn connect(server: &Server, inbox: AsyncReceiver<ToApi>) -> std::result::Result<LinkSockets, LinkError> {
    let sender = |endpoint| Sender::connect(&server.group.context, endpoint, QUEUE_LEN_MAX)?.without_linger();
    let schedulers = (0..server.group.replicas.len()).map(|replica| connect_scheduler(server, replica));
    Ok(LinkSockets {
        tokenizers: server.group.tokenizers.iter().map(sender).collect::<std::result::Result<_, _>>()?,
        schedulers: SchedulerSenders::new(schedulers.collect::<std::result::Result<_, _>>()?),
        inbox,
    })
}

/// The api's way to a replica's primary of now.
pub(super) fn connect_scheduler(
    server: &Server,
    replica: usize,
) -> std::result::Result<Sender<ToScheduler>, LinkError> {
    let inbox = &server.group.replicas[replica].inbox;
    Sender::connect(&server.group.context, inbox, QUEUE_LEN_MAX)?.without_linger()
}

/// Messages that may wait in a socket; beyond it the api's own bounded queue fills.
const QUEUE_LEN_MAX: i32 = 1024;

impl Service {
    /// Joins the api to the engine that has just become ready, and watches it.
    pub(super) fn join_engine(&mut self, plan: &ServePlan, server: &mut Server) -> Result<()> {
        let internal = CliError::with::<LinkError>(ExitCode::Internal);
        let inbox = server.group.inbox.take();
        let inbox = inbox.ok_or_else(|| CliError::new(ExitCode::Internal, "the inbox is gone"))?;
        let sockets = connect(server, inbox).map_err(internal)?;
        self.schedulers = sockets.schedulers.clone();
        let link = self.link.clone();
        self.dispatcher =
            tokio::spawn(async move { dispatch::run_on(&mut *link.lock().await, sockets).await });
        self.revivals.forget();
        self.watch_loops(plan, server)?;
        self.show_processes(plan, server)?;
        server.set_phase(Phase::Serving)?;
        self.client.resume();
        Ok(())
    }

    /// Watches the loops of what serves; those of a replica that is ended or started show no signs of life.
    pub(super) fn watch_loops(&mut self, plan: &ServePlan, server: &Server) -> Result<()> {
        (self.watchdog, self.concerns) = (None, None);
        self.client.set_suspicion(None);
        let is_there = |replica: Option<usize>| replica.is_none_or(|r| self.revivals.is_serving(r));
        let loops = server.group.loops.iter().filter(|watched| is_there(watched.replica)).cloned().collect();
        let limits = (Stage::Serving, Limits::of(plan.collective_timeout));
        let (watchdog, concerns) = Watchdog::start(server.page.clone(), loops, limits, server.stderr.clone())
            .map_err(CliError::with(ExitCode::Internal))?;
        (self.watchdog, self.concerns) = (Some(watchdog), Some(concerns));
        Ok(())
    }

    /// Shows the processes of now.
    pub(super) fn show_processes(&self, plan: &ServePlan, server: &Server) -> Result<()> {
        self.processes.set(processes(plan, server)?);
        Ok(())
    }

    /// Parts the api from an engine that has failed: requests hear `cause`, what was on its way is thrown away.
    pub(super) async fn leave_engine(&mut self, cause: &str) {
        self.client.interrupt(cause);
        (self.watchdog, self.concerns) = (None, None);
        self.dispatcher.abort();
        // Until the task has let go of it; then nothing else holds the link.
        self.link.lock().await.forget_sent();
    }

    /// Follows events until the HTTP server has ended.
    async fn watch(&mut self, plan: &ServePlan, server: &mut Server) -> std::result::Result<Ended, String> {
        let mut dispatching = true;
        let mut beat = tokio::time::interval(BEAT_INTERVAL);
        loop {
            let due = self.revivals.due();
            tokio::select! {
                _ = beat.tick() => self.mark.beat(),
                Some(ready) = next(&mut self.ready) => self.on_ready(plan, server, &ready).await,
                () = tokio::time::sleep_until(due.unwrap_or_else(far_off).into()), if due.is_some() => {
                    self.on_due(plan, server);
                }
                Some(concern) = next(&mut self.concerns) => self.on_concern(server, concern),
                ended = &mut self.http => return ended.map_err(in_words),
                result = &mut self.dispatcher, if dispatching => {
                    dispatching = false;
                    if let Err(error) = flatten(result) {
                        self.fail(CliError::new(ExitCode::ChildDied, error));
                    }
                }
                event = server.events.recv() => match event {
                    Some(Event::Failed(failure)) if self.loses_one(&failure) => {
                        self.on_replica_failure(plan, server, &failure);
                    }
                    Some(Event::Failed(failure)) if self.signal.is_none() => {
                        dispatching = self.on_failure(plan, server, failure).await;
                    }
                    Some(event) => self.on_event(plan, server, event),
                    None => self.handle.fail("the supervising thread is gone"),
                },
            }
        }
    }

    /// Whether there is an engine again.
    async fn on_failure(&mut self, plan: &ServePlan, server: &mut Server, failure: Failure) -> bool {
        let error = last_word(&failure);
        // Open requests hear of the failure itself.
        match self.policy.restarts(error.code) {
            true => match self.restart(plan, server, for_clients(&failure), error).await {
                Ok(()) => return true,
                Err(error) => self.fail(error),
            },
            false => {
                self.handle.fail(for_clients(&failure));
                self.failure = Some(failure);
            }
        }
        false
    }

    /// There is no engine and there will be none.
    pub(super) fn fail(&mut self, error: CliError) {
        self.handle.fail(error.message.clone());
        self.lost = Some(error);
    }

    fn on_concern(&mut self, server: &Server, concern: Concern) {
        match concern {
            Concern::Suspect { text, replicas } => self.client.set_suspicion(Some((text, replicas))),
            Concern::Recovered => self.client.set_suspicion(None),
            Concern::Lost { process, why } => {
                if let Err(error) = server.supervisor.give_up(&process, why) {
                    self.handle.fail(error.to_string());
                }
            }
        }
    }

    fn on_event(&mut self, plan: &ServePlan, server: &Server, event: Event) {
        match event {
            Event::Signal(signal) => {
                let grace = plan.grace;
                tracing::info!("signal {signal}: draining for at most {:.1} s", grace.as_secs_f64());
                self.signal = Some(signal);
                self.handle.drain(grace);
            }
            Event::ChildDied { name, role, status } => {
                let cause = format!("{name} {status}");
                match role {
                    Role::Scheduler(rank) => {
                        server.abort_replica(plan.layout.topology.replica_of(rank), &cause);
                    }
                    Role::Tokenizer(_) | Role::Detokenizer => server.abort_group(&cause),
                }
            }
            Event::ReplicaEnded(replica) => self.on_replica_ended(replica),
            Event::Failed(failure) => {
                self.handle.fail(for_clients(&failure));
                self.failure = Some(failure);
            }
            Event::ChildExited { .. } | Event::AllExited => {}
        }
    }

    /// Ends every process; the result is the launcher's last word and exit code.
    async fn end(mut self, mut server: Server, ended: std::result::Result<Ended, String>) -> Result<()> {
        self.watchdog = None;
        if matches!(ended, Ok(Ended::Drained | Ended::Cut { .. })) && self.failure.is_none() {
            self.dismiss(&mut server).await;
        } else if self.failure.is_none() && self.lost.is_none() {
            self.failure = server.next_verdict().await;
        }
        let end = Self::outcome(self.failure, self.lost, self.signal, ended);
        server.end_gently(&end);
        if end.is_ok() {
            tracing::info!("drained; every process has ended");
        }
        end
    }

    /// The launcher's last word and exit code.
    fn outcome(
        failure: Option<Failure>,
        lost: Option<CliError>,
        signal: Option<i32>,
        ended: std::result::Result<Ended, String>,
    ) -> Result<()> {
        if let Some(failure) = failure {
            return Err(last_word(&failure));
        }
        match ended {
            Ok(Ended::Drained) => Ok(()),
            Ok(Ended::Cut { requests }) => {
                let code = code_of_signal(signal.unwrap_or_default());
                let text = format!("{requests} requests were ended with an error because the grace was over");
                Err(CliError::new(code, text))
            }
            Ok(Ended::Failed) => {
                Err(lost.unwrap_or_else(|| CliError::new(ExitCode::ChildDied, "the engine failed")))
            }
            Err(cause) => Err(CliError::new(ExitCode::Internal, cause)),
        }
    }

    /// Asks the children to leave and waits until they have, for a while.
    async fn dismiss(&mut self, server: &mut Server) {
        if server.set_phase(Phase::Draining).is_err() {
            return;
        }
        // Ranks of other hosts end, too; their launchers must know by then that they may.
        on_hosts(server, |room| room.wait_drain_noted(EXIT_PATIENCE)).await;
        self.client.shutdown_children().await;
        let all_gone = async {
            while let Some(event) = server.events.recv().await {
                match event {
                    Event::AllExited => return,
                    Event::Failed(failure) => self.failure = Some(failure),
                    _ => {}
                }
            }
        };
        if tokio::time::timeout(EXIT_PATIENCE, all_gone).await.is_err() {
            tracing::warn!("some processes did not leave within {} s and are ended", EXIT_PATIENCE.as_secs());
        }
        on_hosts(server, |room| {
            if !room.wait_ended(EXIT_PATIENCE) {
                tracing::warn!(
                    "some processes of other hosts did not leave within {} s",
                    EXIT_PATIENCE.as_secs()
                );
            }
        })
        .await;
    }
}

/// Waits for the other hosts, if there are any, beside this loop.
pub(super) async fn on_hosts(server: &Server, wait: impl FnOnce(&Room) + Send + 'static) {
    if let Some(room) = server.hosts.clone() {
        // A panic in there is the room's, and its hosts are found lost.
        let _ = tokio::task::spawn_blocking(move || wait(&room)).await;
    }
}

/// The next message; never comes while there is nobody to send it.
async fn next<T>(messages: &mut Option<UnboundedReceiver<T>>) -> Option<T> {
    match messages {
        Some(messages) => messages.recv().await,
        None => std::future::pending().await,
    }
}

/// For a branch that is not taken.
fn far_off() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// What the launcher says of a failure that ends it.
pub(super) fn last_word(failure: &Failure) -> CliError {
    CliError::new(failure.exit_code, failure.to_string().trim_start_matches("lockstep: "))
}

/// The launcher and its children of now.
fn processes(plan: &ServePlan, server: &Server) -> Result<Vec<ProcessInfo>> {
    let children = server.supervisor.processes().map_err(CliError::with(ExitCode::Internal))?;
    let planned = plan.layout.processes();
    let launcher =
        ProcessInfo { name: "lockstep".into(), pid: std::process::id(), role: "api".into(), rank: None };
    let children = children.into_iter().map(|(name, pid)| {
        let process = planned.iter().find(|process| process.name == name);
        let role = process.map(|process| process.role.name()).unwrap_or_default().into();
        let rank = process.and_then(|process| Some(process.parallel?.rank()));
        ProcessInfo { name, pid, role, rank }
    });
    Ok(std::iter::once(launcher).chain(children).collect())
}

/// Who died of what, with the error it logged (without time, level and role); the rest of its log
/// is not for clients.
pub(super) fn for_clients(failure: &Failure) -> String {
    if let Some(reason) = &failure.reason {
        return format!("{} was ended because {reason}", failure.process);
    }
    let ended = format!("{} {} while {}", failure.process, failure.status, failure.phase);
    let error = failure.last_lines.iter().rev().find_map(|line| line.split_once(" ERROR "));
    match error.and_then(|(_, text)| text.split_once(' ')) {
        Some((_role, text)) if matches!(failure.status, ChildStatus::Exit(_)) => format!("{ended}: {text}"),
        _ => ended,
    }
}

fn flatten<T, E: std::fmt::Display>(
    joined: std::result::Result<std::result::Result<T, E>, JoinError>,
) -> std::result::Result<T, String> {
    joined.map_err(in_words)?.map_err(|e| e.to_string())
}

fn in_words(error: JoinError) -> String {
    format!("a task of the api ended: {error}")
}

/// How the model writes calls and reasoning, as its chat template shows.
fn detected_parsers(plan: &ServePlan, template: Option<&str>) -> ParserChoice {
    // The folder's name and the served one: a server may call its model anything.
    let folder = plan.model_path.file_name().map(|name| name.to_string_lossy());
    let name = format!("{} {}", folder.unwrap_or_default(), plan.served_model_name);
    lockstep_api::parsers::detect(template.unwrap_or_default(), &name)
}

/// What the api reads off the watch page.
fn watched(plan: &ServePlan, server: &Server) -> Watched {
    let loops = server.group.loops.iter().map(|l| (l.label.clone(), l.mark)).collect();
    let ranks = server.group.loops.iter().filter(|l| l.rank.is_some()).map(|l| l.mark).collect();
    let (replicas, stages) = (server.group.replicas.len(), plan.stages.len());
    Watched { page: server.page.clone(), loops, ranks, replicas, stages }
}

fn api_config(plan: &ServePlan, flags: &ServerFlags, server: &Server, facts: Facts) -> Result<ApiConfig> {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let generation = &plan.generation;
    let template = lockstep_tokenizer::chat_template_text(&plan.model_path, plan.chat_template.as_deref())
        .map_err(CliError::with(ExitCode::ModelFiles))?;
    Ok(ApiConfig {
        running_max: plan.batching.running_max,
        topology: plan.layout.topology,
        default_sampling: SamplingDefaults {
            temperature: generation.temperature,
            top_k: generation.top_k,
            top_p: generation.top_p,
            min_p: generation.min_p,
        },
        model_path: plan.model_path.display().to_string(),
        architecture: plan.model.architecture.clone(),
        chat_error: facts.chat_error,
        parsers: flags.parsers(detected_parsers(plan, template.as_deref())),
        chat_template: template,
        model_digest: crate::pull::digest(&plan.model_path),
        api_keys: plan.api_keys.clone(),
        connections_max: plan.connections.connections_max,
        patience: plan.connections.patience,
        tls: plan.connections.tls.clone(),
        cors: plan.connections.cors.clone(),
        strict_api: plan.strict_api,
        created,
        watch: Some(watched(plan, server)),
        otlp: plan.otlp.clone(),
        ..ApiConfig::new(&plan.served_model_name, facts.engine.context_max, plan.model.vocab_size)
    })
}
