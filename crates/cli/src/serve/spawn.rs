//! Starts the children and holds what the launcher needs to talk to them and to end them.

use super::abroad::{self, Abroad};
use super::plan::ServePlan;
use crate::child::text::{Duties, TextConfig};
use crate::child::{ChildConfig, Part};
use crate::error::{CliError, Result};
use crate::logging::Speaker;
use lockstep_comm::link::{AsyncReceiver, Context, Endpoint, Receiver, random_prefix};
use lockstep_comm::shm::{AbortHandle, SharedRegion, ShmLayout};
use lockstep_comm::watch::WatchPage;
use lockstep_core::{ExitCode, ParallelInfo};
use lockstep_engine::RankConfig;
use lockstep_engine::links::RankLinks;
use lockstep_launch::hosts::Room;
use lockstep_launch::{
    ChildSpec, Endpoints, Event, Events, Failure, Phase, Process, StderrSink, Supervisor, WatchedLoop,
};
use lockstep_wire::{Role, ToApi};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of one rank's slot in the shared memory; larger tensors pass in pieces.
const SLOT_BYTES: usize = 1 << 20;
/// How long children get to end before they are killed.
pub(super) const END_GRACE: Duration = Duration::from_secs(2);
/// How long the launcher waits for the verdict about a death it has seen.
const VERDICT_PATIENCE: Duration = Duration::from_secs(3);

/// A started server, from the launcher's side.
pub struct Server {
    /// Watches and ends children.
    pub supervisor: Supervisor,
    /// What happens to them.
    pub events: Events,
    /// Where every loop stands, for the life of the server.
    pub page: WatchPage,
    /// Where the log goes.
    pub stderr: StderrSink,
    page_fd: Arc<OwnedFd>,
    /// The children of now.
    pub group: Group,
    /// The other hosts, if there are any.
    pub hosts: Option<Arc<Room>>,
    /// Counts the sets of children.
    times: usize,
}

/// What belongs to one set of children; a restart of all makes another.
pub struct Group {
    /// What they say; the dispatcher takes it when serving starts.
    pub inbox: Option<AsyncReceiver<ToApi>>,
    /// Sockets live in it.
    pub context: Context,
    /// Tokenizers' inboxes, by number.
    pub tokenizers: Vec<Endpoint>,
    /// In order.
    pub replicas: Vec<Replica>,
    /// Whose mark on the page is which: ranks first, the launcher's own last.
    pub loops: Vec<WatchedLoop>,
    names: Names,
}

/// What belongs to one set of a replica's ranks; a restart of the replica makes another.
pub struct Replica {
    /// The name of its primary's inbox.
    pub inbox: Endpoint,
    abort: AbortHandle,
    /// Counts the sets of this replica.
    incarnation: usize,
}

/// Starts every process of the plan, once all hosts are there. On an error nothing is left running.
pub async fn start(plan: &ServePlan, stderr: &StderrSink) -> Result<Server> {
    let internal = CliError::with(ExitCode::Internal);
    let marks: usize = plan.processes_here().iter().map(|(_, p)| labels(plan, p).len()).sum();
    let (page_fd, page) = WatchPage::create(marks + 1).map_err(CliError::with(ExitCode::Internal))?;
    let page_fd = Arc::new(page_fd);
    let (supervisor, mut events) = Supervisor::start(stderr.clone()).map_err(internal)?;
    let hosts = match &plan.hosts {
        None => None,
        Some(hosts) => Some(abroad::open_room(plan, hosts, (supervisor.reporter(), &mut events)).await?),
    };
    let abroad = abroad_of(plan, hosts.as_deref(), 0)?;
    let started = Group::start(plan, (&supervisor, &page_fd), (0, abroad));
    let group = started.inspect_err(|error| {
        if let Some(room) = &hosts {
            room.goodbye(error.code, &error.message);
        }
    })?;
    Ok(Server { supervisor, events, page, stderr: stderr.clone(), page_fd, group, hosts, times: 0 })
}

/// What ranks here are told about those of other hosts, which are started for set `incarnation`.
fn abroad_of(plan: &ServePlan, room: Option<&Room>, incarnation: usize) -> Result<Option<Abroad>> {
    match (&plan.hosts, room) {
        (Some(hosts), Some(room)) => Abroad::of_head(plan, hosts, room, incarnation).map(Some),
        _ => Ok(None),
    }
}

impl Group {
    /// Starts what belongs to this host. `incarnation` counts the sets of a server.
    pub(super) fn start(
        plan: &ServePlan,
        (supervisor, page): (&Supervisor, &Arc<OwnedFd>),
        (incarnation, abroad): (usize, Option<Abroad>),
    ) -> Result<Self> {
        let names = Names { prefix: random_prefix(), endpoints: plan.layout.endpoints() };
        let context = Context::new();
        let api = names.endpoint(&names.endpoints.api);
        let inbox = Receiver::bind(&context, &api).map_err(CliError::with(ExitCode::Internal))?;
        let mut group = Self {
            inbox: Some(AsyncReceiver::new(inbox).map_err(CliError::with(ExitCode::Internal))?),
            tokenizers: names.endpoints.tokenizers.iter().map(|n| names.endpoint(n)).collect(),
            replicas: Vec::new(),
            context,
            loops: Vec::new(),
            names,
        };
        for dp_rank in 0..plan.layout.topology.dp_size {
            let with = (supervisor, page);
            let replica = group.start_replica(plan, with, (dp_rank, incarnation, abroad.as_ref()))?;
            group.replicas.push(replica);
        }
        for (_, process) in plan.processes_here().into_iter().filter(|(rank, _)| rank.is_none()) {
            let config = Part::Text(Box::new(text_config(plan, &group, process.role)));
            group.spawn(plan, supervisor, process, (config, vec![page.clone()]))?;
        }
        if plan.has_api() {
            let (process, pid) = ("lockstep".to_owned(), std::process::id());
            let (mark, label) = (group.loops.len(), "api".into());
            group.loops.push(WatchedLoop { process, pid, label, mark, rank: None, replica: None });
        }
        Ok(group)
    }

    /// Wakes every rank of this host that waits for a dead one.
    pub(super) fn abort(&self, cause: &str) {
        for replica in &self.replicas {
            replica.abort.abort(cause);
        }
    }

    /// Starts the ranks of a replica that are on this host, for the time that `incarnation` counts.
    fn start_replica(
        &mut self,
        plan: &ServePlan,
        (supervisor, page): (&Supervisor, &Arc<OwnedFd>),
        (dp_rank, incarnation, abroad): (usize, usize, Option<&Abroad>),
    ) -> Result<Replica> {
        let topology = plan.layout.topology;
        let replica = topology.ranks_of(dp_rank);
        let is_of_replica = |rank: Option<usize>| rank.is_some_and(|rank| replica.contains(&rank));
        let here = plan.processes_here().into_iter().filter(|(rank, _)| is_of_replica(*rank));
        let here: Vec<_> = here.filter_map(|(rank, process)| Some((rank?, process))).collect();
        // With places for the ranks of other hosts, too, which nobody takes here: unused memory costs nothing.
        let region = Arc::new(shared_memory(plan)?);
        let abort = AbortHandle::new(&region).map_err(CliError::with(ExitCode::Internal))?;
        // Fresh names: nothing that was meant for ranks that have died reaches their successors.
        let links = rank_links(&self.names, dp_rank, incarnation);
        let inbox = links.inbox.clone();
        for (rank, process) in here {
            let place = ParallelInfo { local_rank: plan.host_map().local_rank(rank), ..topology.place(rank) };
            let config = rank_config(plan, place, links.clone(), abroad);
            let listener = abroad.filter(|_| place.is_primary()).and_then(|abroad| abroad.listener.clone());
            let inherited = [page.clone(), region.clone()].into_iter().chain(listener).collect();
            self.spawn(plan, supervisor, process, (Part::Rank(Box::new(config)), inherited))?;
        }
        Ok(Replica { inbox, abort, incarnation })
    }

    /// Starts a process and notes its loops, in place of those of an earlier process of that name.
    fn spawn(
        &mut self,
        plan: &ServePlan,
        supervisor: &Supervisor,
        process: Process,
        (part, inherited): (Part, Vec<Arc<OwnedFd>>),
    ) -> Result<()> {
        let labels = labels(plan, &process);
        let Process { role, name, parallel } = process;
        let earlier = self.loops.iter().position(|watched| watched.process == name);
        let mark = earlier.unwrap_or(self.loops.len());
        let label = labels.last().cloned().unwrap_or_default();
        let rank = parallel.map(|parallel| parallel.rank());
        let speaker = Speaker { label, role: role.name().into(), rank };
        let config = ChildConfig { speaker, log: plan.log, mark, part };
        let config_json = serde_json::to_string(&config).map_err(CliError::with(ExitCode::Internal))?;
        let replicas = plan.layout.topology.dp_size;
        let replica = parallel.filter(|_| replicas > 1).map(|parallel| parallel.dp_rank);
        let spec = ChildSpec { role, name: name.clone(), replica, config_json, inherited };
        let pid = supervisor.spawn(spec).map_err(CliError::with(ExitCode::Internal))?;
        for (at, label) in labels.into_iter().enumerate() {
            let (process, mark) = (name.clone(), mark + at);
            let watched = WatchedLoop { process, pid, label, mark, rank, replica };
            match self.loops.get_mut(mark) {
                Some(place) => *place = watched,
                None => self.loops.push(watched),
            }
        }
        Ok(())
    }
}

/// The memory that the ranks of a replica share; it has no name and ends with the processes.
fn shared_memory(plan: &ServePlan) -> Result<OwnedFd> {
    let topology = plan.layout.topology;
    let (ranks, batching) = (topology.replica_size(), &plan.batching);
    let layout = ShmLayout::new(ranks, SLOT_BYTES).map(|layout| match topology.pp_size {
        1 => layout,
        stages => layout.with_transfers(batching.transfer_bytes(plan.model.hidden_size, stages)),
    });
    layout.and_then(SharedRegion::create).map_err(|e| {
        CliError::new(ExitCode::Memory, format!("cannot create shared memory for {ranks} ranks: {e}"))
    })
}

/// Link names of this server.
struct Names {
    prefix: String,
    endpoints: Endpoints,
}

impl Names {
    fn endpoint(&self, name: &str) -> Endpoint {
        Endpoint::private(&self.prefix, name)
    }
}

/// What a process's loops are called, one mark on the watch page each.
fn labels(plan: &ServePlan, process: &Process) -> Vec<String> {
    match (process.role, process.parallel) {
        (Role::Scheduler(_), Some(parallel)) => vec![parallel.label()],
        (Role::Tokenizer(number), _) => vec![format!("tokenizer-{number}")],
        _ if plan.layout.num_tokenizer == 0 => vec!["tokenizer-0".into(), "detokenizer-0".into()],
        _ => vec!["detokenizer-0".into()],
    }
}

/// The links of a replica's ranks.
fn rank_links(names: &Names, replica: usize, incarnation: usize) -> RankLinks {
    let e = &names.endpoints;
    let of_this_time = |name: &str| names.endpoint(&format!("{name}-{incarnation}"));
    RankLinks {
        replica,
        inbox: of_this_time(&e.schedulers[replica]),
        broadcast: of_this_time(&e.broadcasts[replica]),
        detokenizer: names.endpoint(&e.detokenizer),
        api: names.endpoint(&e.api),
        remote: None,
    }
}

fn rank_config(
    plan: &ServePlan,
    parallel: ParallelInfo,
    links: RankLinks,
    abroad: Option<&Abroad>,
) -> RankConfig {
    // Rank 0 is told of the broadcast between hosts, and those whom it reaches through that.
    let remote = abroad.filter(|_| parallel.is_primary() || !plan.has_api()).map(|a| a.remote.clone());
    RankConfig {
        hosts: abroad.map(|abroad| abroad.hosts.clone()),
        parallel,
        stage: plan.stages[parallel.pp_rank],
        model: plan.model_path.clone(),
        eos_tokens: plan.eos_tokens.clone(),
        weights: plan.weights,
        device: plan.device.of_rank(&plan.layout.topology, parallel.rank()),
        packed_cache: plan.packed_cache.clone(),
        dummy_weights: plan.dummy_weights.clone(),
        threads: plan.threads,
        placement: plan.placement(parallel.rank()).cloned(),
        memory_budget_bytes: plan.rank_budget_bytes,
        memory_budget_origin: plan.budget_origin.clone(),
        num_pages: plan.num_pages[parallel.replica_rank()],
        allow_imbalance: plan.allow_imbalance,
        batching: plan.batching.clone(),
        collective_timeout_ms: plan.collective_timeout.as_millis() as u64,
        flight_dir: plan.flight_dir.clone(),
        links: RankLinks { remote, ..links },
    }
}

/// A tokenizer does one thing; the detokenizer does both when there are no tokenizers.
fn text_config(plan: &ServePlan, group: &Group, role: Role) -> TextConfig {
    let (names, e) = (&group.names, &group.names.endpoints);
    let tokenizer = |i: usize| names.endpoint(&e.tokenizers[i]);
    let detokenizer = names.endpoint(&e.detokenizer);
    let duties = match role {
        Role::Tokenizer(i) => Duties::Tokenize { inbox: tokenizer(i) },
        _ if plan.layout.num_tokenizer == 0 => Duties::Both { inbox: tokenizer(0), detokenizer },
        _ => Duties::Detokenize { detokenizer },
    };
    TextConfig {
        role,
        duties,
        model: plan.model_path.clone(),
        chat_template: plan.chat_template.clone(),
        context_max: plan.batching.context_max.unwrap_or(plan.model.max_position),
        vocab_size: plan.model.vocab_size,
        schedulers: group.replicas.iter().map(|replica| replica.inbox.clone()).collect(),
        api: names.endpoint(&e.api),
    }
}

impl Server {
    /// Wakes every rank that waits for a dead one.
    pub fn abort_group(&self, cause: &str) {
        self.group.abort(cause);
        if let Some(room) = &self.hosts {
            room.abort(cause);
        }
    }

    /// Wakes every rank of one replica that waits for a dead one.
    pub fn abort_replica(&self, replica: usize, cause: &str) {
        self.group.replicas[replica].abort.abort(cause);
        if let Some(room) = &self.hosts {
            room.abort(cause);
        }
    }

    /// What the server does from now on.
    pub fn set_phase(&self, phase: Phase) -> Result<()> {
        self.supervisor.set_phase(phase).map_err(CliError::with(ExitCode::Internal))?;
        if let Some(room) = &self.hosts {
            room.set_phase(phase);
        }
        Ok(())
    }

    /// Ends what is left of one replica; [`Event::ReplicaEnded`] follows.
    pub fn begin_end_of(&self, replica: usize, cause: &str) -> Result<()> {
        self.abort_replica(replica, cause);
        self.supervisor.end_replica(replica, END_GRACE).map_err(CliError::with(ExitCode::Internal))
    }

    /// Starts the ranks of one replica again, after those before have ended.
    pub fn start_replica(&mut self, plan: &ServePlan, replica: usize) -> Result<()> {
        plan.layout.topology.ranks_of(replica).for_each(|rank| self.page.reset(rank));
        let incarnation = self.group.replicas[replica].incarnation + 1;
        let with = (&self.supervisor, &self.page_fd);
        self.group.replicas[replica] = self.group.start_replica(plan, with, (replica, incarnation, None))?;
        Ok(())
    }

    /// Ends what is left of the children; [`Event::AllExited`] follows.
    pub fn begin_end(&self, cause: &str) -> Result<()> {
        self.abort_group(cause);
        if let Some(room) = &self.hosts {
            room.set_phase(Phase::Loading);
            room.end(cause);
        }
        self.supervisor.begin_shutdown(END_GRACE).map_err(CliError::with(ExitCode::Internal))
    }

    /// Starts every process of the plan again, after all have ended.
    pub fn start_again(&mut self, plan: &ServePlan) -> Result<()> {
        (0..self.page.marks() - 1).for_each(|mark| self.page.reset(mark));
        self.times += 1;
        let abroad = abroad_of(plan, self.hosts.as_deref(), self.times)?;
        self.group = Group::start(plan, (&self.supervisor, &self.page_fd), (self.times, abroad))?;
        Ok(())
    }

    /// Ends all children at once and returns `error` for the launcher to end with.
    pub fn end(&self, error: CliError) -> CliError {
        self.abort_group("the server is stopping");
        self.dismiss_hosts(error.code, &error.message);
        match self.supervisor.shutdown(Duration::ZERO) {
            Ok(report) if !report.left.is_empty() => {
                tracing::error!("processes that even SIGKILL did not end: {}", report.left.join(", "));
            }
            Ok(_) => {}
            Err(e) => tracing::error!("{e}"),
        }
        error
    }

    /// Ends the launchers of other hosts.
    fn dismiss_hosts(&self, code: ExitCode, why: &str) {
        if let Some(room) = &self.hosts {
            room.goodbye(code, why);
        }
    }

    /// Ends all children, giving them a moment to leave by themselves; other hosts end as this one will.
    pub fn end_gently(&self, end: &Result<()>) {
        match end {
            Ok(()) => self.dismiss_hosts(ExitCode::Drained, ""),
            Err(error) => self.dismiss_hosts(error.code, &error.message),
        }
        if let Err(e) = self.supervisor.shutdown(END_GRACE) {
            tracing::error!("{e}");
        }
    }

    /// After a death: waits for the verdict about the first cause, waking the other ranks so that
    /// they can end too.
    pub async fn verdict(&mut self, first: &str) -> Option<Failure> {
        self.abort_group(first);
        self.next_verdict().await
    }

    /// The verdict about the first cause, if it comes in time.
    pub async fn next_verdict(&mut self) -> Option<Failure> {
        let wait = async {
            while let Some(event) = self.events.recv().await {
                if let Event::Failed(failure) = event {
                    return Some(failure);
                }
            }
            None
        };
        tokio::time::timeout(VERDICT_PATIENCE, wait).await.ok().flatten()
    }
}
