//! Starts the children and holds what the launcher needs to talk to them and to end them.

use super::plan::ServePlan;
use crate::child::text::{Duties, TextConfig};
use crate::child::{ChildConfig, Part};
use crate::error::{CliError, Result};
use lockstep_comm::link::{AsyncReceiver, Context, Endpoint, Receiver, random_prefix};
use lockstep_comm::shm::{AbortHandle, SharedRegion, ShmLayout};
use lockstep_core::{ExitCode, ParallelInfo};
use lockstep_engine::RankConfig;
use lockstep_engine::links::RankLinks;
use lockstep_launch::{ChildSpec, Endpoints, Event, Events, Failure, Process, StderrSink, Supervisor};
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
    for process in plan.topology.processes() {
        let spec = child_spec(plan, &names, process, &region).map_err(&internal)?;
        supervisor.spawn(spec).map_err(CliError::with(ExitCode::Internal))?;
    }
    Ok(Server {
        supervisor,
        events,
        inbox: Some(AsyncReceiver::new(inbox).map_err(CliError::with(ExitCode::Internal))?),
        tokenizers: names.endpoints.tokenizers.iter().map(|n| names.endpoint(n)).collect(),
        scheduler: names.endpoint(&names.endpoints.schedulers[0]),
        context,
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

fn child_spec(
    plan: &ServePlan,
    names: &Names,
    process: Process,
    region: &Arc<OwnedFd>,
) -> serde_json::Result<ChildSpec> {
    let (label, part, inherited) = match (process.role, process.parallel) {
        (Role::Scheduler(_), Some(parallel)) => {
            (parallel.label(), Part::Rank(Box::new(rank_config(plan, names, parallel))), vec![region.clone()])
        }
        (role, _) => (text_label(role), Part::Text(Box::new(text_config(plan, names, role))), Vec::new()),
    };
    let config = ChildConfig { label, log_level: plan.log_level.into(), part };
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
