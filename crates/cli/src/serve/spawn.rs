//! Starts the children and holds what the launcher needs to talk to them and to end them.

use super::plan::ServePlan;
use crate::child::text::{self, Duties, TextConfig};
use crate::child::{ChildConfig, Part};
use crate::error::{CliError, Result};
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
    /// What they say; the dispatcher takes it when serving starts.
    pub inbox: Option<AsyncReceiver<ToApi>>,
    /// Sockets live in it.
    pub context: Context,
    /// Tokenizers' inboxes, by number.
    pub tokenizers: Vec<Endpoint>,
    /// Rank 0's inbox.
    pub scheduler: Endpoint,
    /// Where every loop stands.
    pub page: WatchPage,
    /// Whose mark is which; the launcher's own is the last.
    pub loops: Vec<WatchedLoop>,
    abort: AbortHandle,
}

/// Starts every process of the plan. On an error nothing is left running.
pub fn start(plan: &ServePlan, stderr: &StderrSink) -> Result<Server> {
    let internal = CliError::with(ExitCode::Internal);
    let names = Names { prefix: random_prefix(), endpoints: plan.topology.endpoints() };
    let context = Context::new();
    let api = names.endpoint(&names.endpoints.api);
    let inbox = Receiver::bind(&context, &api).map_err(CliError::with(ExitCode::Internal))?;
    let region = Arc::new(shared_memory(plan.topology.tp_size)?);
    let abort = AbortHandle::new(&region).map_err(CliError::with(ExitCode::Internal))?;
    let (supervisor, events) =
        Supervisor::start(stderr.clone()).map_err(CliError::with(ExitCode::Internal))?;
    let parts: Vec<_> = plan.topology.processes().into_iter().map(|p| part(plan, &names, p)).collect();
    let marks: usize = parts.iter().map(|part| part.labels().len()).sum();
    let (page_fd, page) = WatchPage::create(marks + 1).map_err(CliError::with(ExitCode::Internal))?;
    let page_fd = Arc::new(page_fd);
    let mut loops = Vec::with_capacity(marks + 1);
    for part in parts {
        let (process, mark) = (part.process.name.clone(), loops.len());
        let (labels, rank) = (part.labels(), part.process.parallel.map(|p| p.rank()));
        let spec = part.spec(plan, mark, (&page_fd, &region)).map_err(&internal)?;
        let pid = supervisor.spawn(spec).map_err(CliError::with(ExitCode::Internal))?;
        let watched =
            |(at, label)| WatchedLoop { process: process.clone(), pid, label, mark: mark + at, rank };
        loops.extend(labels.into_iter().enumerate().map(watched));
    }
    let (process, pid) = ("lockstep".to_owned(), std::process::id());
    loops.push(WatchedLoop { process, pid, label: "api".into(), mark: marks, rank: None });
    Ok(Server {
        supervisor,
        events,
        inbox: Some(AsyncReceiver::new(inbox).map_err(CliError::with(ExitCode::Internal))?),
        tokenizers: names.endpoints.tokenizers.iter().map(|n| names.endpoint(n)).collect(),
        scheduler: names.endpoint(&names.endpoints.schedulers[0]),
        context,
        page,
        loops,
        abort,
    })
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

/// A process and what it does.
struct Started {
    process: Process,
    part: Part,
}

fn part(plan: &ServePlan, names: &Names, process: Process) -> Started {
    let part = match (process.role, process.parallel) {
        (Role::Scheduler(_), Some(parallel)) => Part::Rank(Box::new(rank_config(plan, names, parallel))),
        (role, _) => Part::Text(Box::new(text_config(plan, names, role))),
    };
    Started { process, part }
}

impl Started {
    /// What its loops are called, one mark on the watch page each.
    fn labels(&self) -> Vec<String> {
        match &self.part {
            Part::Rank(rank) => vec![rank.parallel.label()],
            Part::Text(text) => {
                let number = if let Role::Tokenizer(i) = text.role { i } else { 0 };
                text::marks(&text.duties).iter().map(|name| format!("{name}-{number}")).collect()
            }
        }
    }

    /// How to start it; its loops' marks begin at `mark`.
    fn spec(
        self,
        plan: &ServePlan,
        mark: usize,
        (page, region): (&Arc<OwnedFd>, &Arc<OwnedFd>),
    ) -> serde_json::Result<ChildSpec> {
        let (label, inherited) = match &self.part {
            Part::Rank(rank) => (rank.parallel.label(), vec![page.clone(), region.clone()]),
            Part::Text(_) => (text_label(self.process.role), vec![page.clone()]),
        };
        let config = ChildConfig { label, log_level: plan.log_level.into(), mark, part: self.part };
        Ok(ChildSpec {
            role: self.process.role,
            name: self.process.name,
            config_json: serde_json::to_string(&config)?,
            inherited,
        })
    }
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
        self.abort.abort(cause);
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
