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

/// What belongs to one set of children; a restart makes another.
pub struct Group {
    /// What they say; the dispatcher takes it when serving starts.
    pub inbox: Option<AsyncReceiver<ToApi>>,
    /// Sockets live in it.
    pub context: Context,
    /// Tokenizers' inboxes, by number.
    pub tokenizers: Vec<Endpoint>,
    /// Rank 0's inbox.
    pub scheduler: Endpoint,
    /// Whose mark on the page is which; the launcher's own is the last.
    pub loops: Vec<WatchedLoop>,
    abort: AbortHandle,
}

/// Starts every process of the plan. On an error nothing is left running.
pub fn start(plan: &ServePlan, stderr: &StderrSink) -> Result<Server> {
    let internal = CliError::with(ExitCode::Internal);
    let marks: usize = plan.topology.processes().iter().map(|p| labels(plan, p).len()).sum();
    let (page_fd, page) = WatchPage::create(marks + 1).map_err(CliError::with(ExitCode::Internal))?;
    let page_fd = Arc::new(page_fd);
    let (supervisor, events) = Supervisor::start(stderr.clone()).map_err(internal)?;
    let group = Group::start(plan, &supervisor, &page_fd)?;
    Ok(Server { supervisor, events, page, stderr: stderr.clone(), page_fd, group })
}

impl Group {
    fn start(plan: &ServePlan, supervisor: &Supervisor, page: &Arc<OwnedFd>) -> Result<Self> {
        let internal = CliError::with(ExitCode::Internal);
        let names = Names { prefix: random_prefix(), endpoints: plan.topology.endpoints() };
        let context = Context::new();
        let api = names.endpoint(&names.endpoints.api);
        let inbox = Receiver::bind(&context, &api).map_err(CliError::with(ExitCode::Internal))?;
        let region = Arc::new(shared_memory(plan.topology.tp_size)?);
        let abort = AbortHandle::new(&region).map_err(CliError::with(ExitCode::Internal))?;
        let mut loops = Vec::new();
        for process in plan.topology.processes() {
            let (name, mark, rank) = (process.name.clone(), loops.len(), process.parallel.map(|p| p.rank()));
            let labels = labels(plan, &process);
            let spec = child_spec(plan, &names, process, (mark, page, &region)).map_err(&internal)?;
            let pid = supervisor.spawn(spec).map_err(CliError::with(ExitCode::Internal))?;
            loops.extend(labels.into_iter().enumerate().map(|(at, label)| WatchedLoop {
                process: name.clone(),
                pid,
                label,
                mark: mark + at,
                rank,
            }));
        }
        let (process, pid) = ("lockstep".to_owned(), std::process::id());
        loops.push(WatchedLoop { process, pid, label: "api".into(), mark: loops.len(), rank: None });
        Ok(Self {
            inbox: Some(AsyncReceiver::new(inbox).map_err(CliError::with(ExitCode::Internal))?),
            tokenizers: names.endpoints.tokenizers.iter().map(|n| names.endpoint(n)).collect(),
            scheduler: names.endpoint(&names.endpoints.schedulers[0]),
            context,
            loops,
            abort,
        })
    }
}

/// The memory that the ranks of a replica share; it has no name and ends with the processes.
fn shared_memory(ranks: usize) -> Result<OwnedFd> {
    ShmLayout::new(ranks, SLOT_BYTES).and_then(SharedRegion::create).map_err(|e| {
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
        _ if plan.topology.num_tokenizer == 0 => vec!["tokenizer-0".into(), "detokenizer-0".into()],
        _ => vec!["detokenizer-0".into()],
    }
}

/// How to start a process whose loops' marks begin at `mark`.
fn child_spec(
    plan: &ServePlan,
    names: &Names,
    process: Process,
    (mark, page, region): (usize, &Arc<OwnedFd>, &Arc<OwnedFd>),
) -> serde_json::Result<ChildSpec> {
    let (label, part, inherited) = match (process.role, process.parallel) {
        (Role::Scheduler(_), Some(parallel)) => {
            let rank = Box::new(rank_config(plan, names, parallel));
            (parallel.label(), Part::Rank(rank), vec![page.clone(), region.clone()])
        }
        (role, _) => {
            (text_label(role), Part::Text(Box::new(text_config(plan, names, role))), vec![page.clone()])
        }
    };
    let (role, rank) = (process.role.name().into(), process.parallel.map(|parallel| parallel.rank()));
    let config = ChildConfig { speaker: Speaker { label, role, rank }, log: plan.log, mark, part };
    Ok(ChildSpec {
        role: process.role,
        name: process.name,
        config_json: serde_json::to_string(&config)?,
        inherited,
    })
}

fn text_label(role: Role) -> String {
    match role {
        Role::Tokenizer(i) => format!("tokenizer-{i}"),
        _ => "detokenizer-0".into(),
    }
}

fn rank_config(plan: &ServePlan, names: &Names, parallel: ParallelInfo) -> RankConfig {
    let e = &names.endpoints;
    RankConfig {
        parallel,
        model: plan.model_path.clone(),
        eos_tokens: plan.eos_tokens.clone(),
        dtype: plan.dtype,
        device: plan.device.clone(),
        dummy_weights: plan.dummy_weights.clone(),
        threads: plan.threads,
        memory_budget_bytes: plan.rank_budget_bytes,
        memory_budget_origin: plan.budget_origin.clone(),
        num_pages: plan.num_pages[parallel.tp_rank],
        allow_imbalance: plan.allow_imbalance,
        batching: plan.batching.clone(),
        collective_timeout_ms: plan.collective_timeout.as_millis() as u64,
        flight_dir: plan.flight_dir.clone(),
        links: RankLinks {
            inbox: names.endpoint(&e.schedulers[parallel.dp_rank]),
            broadcast: names.endpoint(&e.broadcasts[parallel.dp_rank]),
            detokenizer: names.endpoint(&e.detokenizer),
            api: names.endpoint(&e.api),
        },
    }
}

/// A tokenizer does one thing; the detokenizer does both when there are no tokenizers.
fn text_config(plan: &ServePlan, names: &Names, role: Role) -> TextConfig {
    let e = &names.endpoints;
    let tokenizer = |i: usize| names.endpoint(&e.tokenizers[i]);
    let detokenizer = names.endpoint(&e.detokenizer);
    let duties = match role {
        Role::Tokenizer(i) => Duties::Tokenize { inbox: tokenizer(i) },
        _ if plan.topology.num_tokenizer == 0 => Duties::Both { inbox: tokenizer(0), detokenizer },
        _ => Duties::Detokenize { detokenizer },
    };
    TextConfig {
        role,
        duties,
        model: plan.model_path.clone(),
        chat_template: plan.chat_template.clone(),
        context_max: plan.batching.context_max.unwrap_or(plan.model.max_position),
        vocab_size: plan.model.vocab_size,
        scheduler: names.endpoint(&e.schedulers[0]),
        api: names.endpoint(&e.api),
    }
}

impl Server {
    /// Wakes every rank that waits for a dead one.
    pub fn abort_group(&self, cause: &str) {
        self.group.abort.abort(cause);
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
