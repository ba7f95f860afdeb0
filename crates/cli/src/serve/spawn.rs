//! Starts the children and holds what the launcher needs to talk to them and to end them.

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
use lockstep_launch::{
    ChildSpec, Endpoints, Event, Events, Failure, Process, StderrSink, Supervisor, WatchedLoop,
};
use lockstep_wire::{Role, ToApi};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of one rank's slot in the shared memory; larger tensors pass in pieces.
const SLOT_BYTES: usize = 1 << 20;
/// How long children get to end before they are killed.
const END_GRACE: Duration = Duration::from_secs(2);
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

/// Starts every process of the plan. On an error nothing is left running.
pub fn start(plan: &ServePlan, stderr: &StderrSink) -> Result<Server> {
    let internal = CliError::with(ExitCode::Internal);
    let marks: usize = plan.layout.processes().iter().map(|p| labels(plan, p).len()).sum();
    let (page_fd, page) = WatchPage::create(marks + 1).map_err(CliError::with(ExitCode::Internal))?;
    let page_fd = Arc::new(page_fd);
    let (supervisor, events) = Supervisor::start(stderr.clone()).map_err(internal)?;
    let group = Group::start(plan, &supervisor, &page_fd)?;
    Ok(Server { supervisor, events, page, stderr: stderr.clone(), page_fd, group })
}

impl Group {
    fn start(plan: &ServePlan, supervisor: &Supervisor, page: &Arc<OwnedFd>) -> Result<Self> {
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
            let replica = group.start_replica(plan, (supervisor, page), (dp_rank, 0))?;
            group.replicas.push(replica);
        }
        for process in plan.layout.processes().into_iter().filter(|p| p.parallel.is_none()) {
            let config = Part::Text(Box::new(text_config(plan, &group, process.role)));
            group.spawn(plan, supervisor, process, (config, vec![page.clone()]))?;
        }
        let (process, pid) = ("lockstep".to_owned(), std::process::id());
        let (mark, label) = (group.loops.len(), "api".into());
        group.loops.push(WatchedLoop { process, pid, label, mark, rank: None, replica: None });
        Ok(group)
    }

    /// Starts the ranks of a replica, for the time that `incarnation` counts.
    fn start_replica(
        &mut self,
        plan: &ServePlan,
        (supervisor, page): (&Supervisor, &Arc<OwnedFd>),
        (dp_rank, incarnation): (usize, usize),
    ) -> Result<Replica> {
        let topology = plan.layout.topology;
        let region = Arc::new(shared_memory(plan)?);
        let abort = AbortHandle::new(&region).map_err(CliError::with(ExitCode::Internal))?;
        // Fresh names: nothing that was meant for ranks that have died reaches their successors.
        let links = rank_links(&self.names, dp_rank, incarnation);
        let inbox = links.inbox.clone();
        let mut processes = plan.layout.processes();
        // Processes of ranks come first, by rank.
        for (process, rank) in processes.drain(topology.ranks_of(dp_rank)).zip(topology.ranks_of(dp_rank)) {
            let config = rank_config(plan, topology.place(rank), links.clone());
            let part = Part::Rank(Box::new(config));
            self.spawn(plan, supervisor, process, (part, vec![page.clone(), region.clone()]))?;
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
    }
}

fn rank_config(plan: &ServePlan, parallel: ParallelInfo, links: RankLinks) -> RankConfig {
    RankConfig {
        parallel,
        stage: plan.stages[parallel.pp_rank],
        model: plan.model_path.clone(),
        eos_tokens: plan.eos_tokens.clone(),
        weights: plan.weights,
        device: plan.device.of_rank(&plan.layout.topology, parallel.rank()),
        dummy_weights: plan.dummy_weights.clone(),
        threads: plan.threads,
        memory_budget_bytes: plan.rank_budget_bytes,
        memory_budget_origin: plan.budget_origin.clone(),
        num_pages: plan.num_pages[parallel.replica_rank()],
        allow_imbalance: plan.allow_imbalance,
        batching: plan.batching.clone(),
        collective_timeout_ms: plan.collective_timeout.as_millis() as u64,
        flight_dir: plan.flight_dir.clone(),
        links,
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
        for replica in &self.group.replicas {
            replica.abort.abort(cause);
        }
    }

    /// Wakes every rank of one replica that waits for a dead one.
    pub fn abort_replica(&self, replica: usize, cause: &str) {
        self.group.replicas[replica].abort.abort(cause);
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
        self.group.replicas[replica] = self.group.start_replica(plan, with, (replica, incarnation))?;
        Ok(())
    }

    /// Ends what is left of the children; [`Event::AllExited`] follows.
    pub fn begin_end(&self, cause: &str) -> Result<()> {
        self.abort_group(cause);
        self.supervisor.begin_shutdown(END_GRACE).map_err(CliError::with(ExitCode::Internal))
    }

    /// Starts every process of the plan again, after all have ended.
    pub fn start_again(&mut self, plan: &ServePlan) -> Result<()> {
        (0..self.page.marks() - 1).for_each(|mark| self.page.reset(mark));
        self.group = Group::start(plan, &self.supervisor, &self.page_fd)?;
        Ok(())
    }

    /// Ends all children at once and returns `error` for the launcher to end with.
    pub fn end(&self, error: CliError) -> CliError {
        self.abort_group("the server is stopping");
        match self.supervisor.shutdown(Duration::ZERO) {
            Ok(report) if !report.left.is_empty() => {
                tracing::error!("processes that even SIGKILL did not end: {}", report.left.join(", "));
            }
            Ok(_) => {}
            Err(e) => tracing::error!("{e}"),
        }
        error
    }

    /// Ends all children, giving them a moment to leave by themselves.
    pub fn end_gently(&self) {
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
