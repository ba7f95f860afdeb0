//! The main loop of every rank; the same code on the server and in the simulator.
//!
//! One step: (1) receive: rank 0 drains its queue, publishes, and the group agrees on the number
//! of messages; (2) apply them to the scheduler; (3) plan; (4) launch, then read the tokens of the oldest step, once as
//! many are in flight as may be (without overlap this one, with overlap the one before, in a pipeline as many as it has
//! stages) or when nothing could be planned without them; (5) send results outside (rank 0). The digest of each step rides
//! the next agreement.
//!
//! **Invariant:** everything between two agreements depends only on messages, plans and tokens,
//! which are equal on all ranks; `Role` is looked at only to move bytes.
//!
//! In a pipeline the ranks of the last stage have the tokens, and tell the others when the step is read
//! ([`TokenSource`]); launching there only queues ([`crate::pipeline`]), so that no agreement waits for a forward pass.

use crate::control::{Follower, Outgoing, Primary, Wait};
use crate::exchange::{Announcement, Exchange, StepShape, TokenSource};
use crate::flight::{FlightRecorder, request_of};
use crate::gate::GrammarGate;
use crate::runner::Runner;
use crate::timing::Timings;
use crate::{EngineError, Result};
use lockstep_comm::group::{Patience, ProcessGroup};
use lockstep_comm::watch::{Activity, Mark};
use lockstep_core::limits::PROMPT_LOGPROBS_MAX;
use lockstep_core::{PageId, RequestId, TokenId};
use lockstep_scheduler::{Event, PlanRow, Scheduler, StepPlan};
use lockstep_wire::{
    Begin, EngineInfo, EngineTotals, StepLogprobs, SubmitRequest, Timing, ToScheduler, TokenOut,
};
use std::collections::VecDeque;
use std::time::Duration;

/// Log-probabilities after which a step's results go out in another message.
const STEP_LOGPROBS_MAX: usize = PROMPT_LOGPROBS_MAX / 2;

/// How a rank takes part in the control plane.
pub enum Role<P, F> {
    /// Rank 0 of the replica.
    Primary(P),
    /// Any other rank.
    Follower(F),
}

/// Everything a rank's loop owns.
pub struct RankLoop<P, F, R> {
    role: Role<P, F>,
    group: Box<dyn ProcessGroup>,
    scheduler: Scheduler,
    runner: R,
    exchange: Exchange,
    flight: FlightRecorder,
    /// Stays empty on other ranks than 0.
    timings: Timings,
    settings: LoopSettings,
    /// Facts that do not change, completed with counters when asked.
    info: EngineInfo,
    /// Where others see what this rank does; nothing reads it here.
    mark: Option<Mark>,
    state: LoopState,
}

/// Choices of the loop, equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct LoopSettings {
    /// Which rank samples for all, where not each does.
    pub token_source: Option<TokenSource>,
    /// How long to wait for a rank that should be working.
    pub collective_timeout: Duration,
    /// Milliseconds after which a request is ended, from the stamp it arrived with.
    pub request_timeout_ms: Option<u64>,
    /// Bytes of one segment of the flight recorder; see [`crate::flight`].
    pub flight_segment_bytes: usize,
}

#[derive(Default)]
struct LoopState {
    inbox: Vec<ToScheduler>,
    plan: StepPlan,
    /// Steps launched and not read, oldest first: whether one has rows that want log-probabilities.
    in_flight: VecDeque<bool>,
    tokens: Vec<TokenId>,
    events: Vec<Event>,
    /// Of the steps read since results were last sent.
    logprobs: Vec<(RequestId, StepLogprobs)>,
    freed: Vec<PageId>,
    /// Looked at on rank 0 only.
    gate: GrammarGate,
    /// Grammars that all ranks had prepared at the last agreement.
    prepared: u64,
    stopping: bool,
}

impl<P: Primary, F: Follower, R: Runner> RankLoop<P, F, R> {
    /// A loop that has not taken a step.
    pub fn new(
        role: Role<P, F>,
        group: Box<dyn ProcessGroup>,
        scheduler: Scheduler,
        runner: R,
        settings: LoopSettings,
        info: EngineInfo,
    ) -> Self {
        let exchange = Exchange::new(group.size());
        let flight = FlightRecorder::new(settings.request_timeout_ms, settings.flight_segment_bytes);
        let (timings, state) = (Timings::default(), LoopState::default());
        Self { role, group, scheduler, runner, exchange, flight, timings, settings, info, mark: None, state }
    }

    /// Shows on the watch page what this rank does.
    pub fn watched(self, mark: Option<Mark>) -> Self {
        Self { mark, ..self }
    }

    /// Steps until a shutdown message has been applied, nothing is in flight and all results are sent.
    pub fn run(&mut self) -> Result<()> {
        self.run_watched(|_| ())
    }

    /// [`run`](Self::run), showing the scheduler to `watch` after every step: for the simulator's checks.
    pub fn run_watched(&mut self, mut watch: impl FnMut(&Scheduler)) -> Result<()> {
        while !self.state.stopping {
            self.step()?;
            watch(&self.scheduler);
        }
        while !self.state.in_flight.is_empty() {
            self.read_oldest()?;
        }
        self.send_results()?;
        self.enter(Activity::Ended);
        Ok(())
    }

    /// From here on this rank is at `activity`.
    fn enter(&self, activity: Activity) {
        if let Some(mark) = &self.mark {
            mark.enter(activity, self.state.plan.step);
        }
    }

    /// Gives the links back after the loop has ended.
    pub fn into_role(self) -> Role<P, F> {
        self.role
    }

    /// What the scheduler was told and decided lately.
    pub fn flight(&mut self) -> &mut FlightRecorder {
        &mut self.flight
    }

    /// The scheduler, for checks.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// One step; see the module documentation. **Collective: all ranks of the replica.**
    pub fn step(&mut self) -> Result<()> {
        self.receive()?;
        if self.state.stopping {
            return Ok(());
        }
        let launched = self.plan_and_launch()?;
        self.enter(Activity::Wait);
        let in_flight = self.state.in_flight.len();
        // Where nothing could be planned, the oldest step's tokens or pages may be what is missing.
        if in_flight > 0 && (!launched || in_flight == self.scheduler.config().steps_in_flight_max()) {
            self.read_oldest()?;
        }
        self.enter(Activity::Send);
        self.send_results()
    }

    /// Messages of this step, the same on every rank, applied in order.
    fn receive(&mut self) -> Result<()> {
        let idle = !self.scheduler.has_work() && self.state.in_flight.is_empty();
        // Rank 0 waits for work in its inbox; when it gets here, the others must be here or on their way.
        let may_wait_for_work = idle && matches!(self.role, Role::Follower(_));
        let patience = match may_wait_for_work {
            true => Patience::Idle,
            false => Patience::Deadline(self.settings.collective_timeout),
        };
        let mut inbox = std::mem::take(&mut self.state.inbox);
        let mut stamp_ms = 0;
        self.enter(if idle { Activity::Idle } else { Activity::Agree });
        if let Role::Primary(primary) = &mut self.role {
            let wait = match (idle, self.state.gate.len()) {
                (false, _) => Wait::No,
                (true, 0) => Wait::UntilMessage,
                (true, _) => Wait::Briefly,
            };
            primary.receive(wait, &mut inbox)?;
            self.state.gate.pass(self.state.prepared, &mut inbox);
            stamp_ms = primary.now().as_millis() as u64;
            inbox.iter().try_for_each(|message| primary.publish(stamp_ms, message))?;
        }
        let prepared = self.runner.grammars_prepared();
        let times = self.runner.stage_times().map(|times| times.work()).unwrap_or_default();
        let announced = Announcement { messages: inbox.len() as u32, stamp_ms, prepared, times };
        let agreed = self.exchange.agree(&mut *self.group, announced, &self.scheduler.digest(), patience)?;
        self.enter(Activity::Messages);
        self.state.prepared = agreed.prepared;
        if let Role::Follower(follower) = &mut self.role {
            for _ in 0..agreed.messages {
                inbox.push(follower.take()?.message);
            }
        }
        self.flight.step(agreed.stamp_ms, &self.scheduler);
        self.scheduler.advance(agreed.stamp_ms);
        for message in inbox.drain(..) {
            self.flight.message(&message);
            self.apply(message, agreed.stamp_ms)?;
        }
        self.state.inbox = inbox;
        Ok(())
    }

    fn apply(&mut self, message: ToScheduler, stamp_ms: u64) -> Result<()> {
        match message {
            ToScheduler::Submit(request) => self.submit(*request, stamp_ms)?,
            ToScheduler::Abort(id) => {
                tracing::debug!(request = %id, "aborted");
                self.scheduler.abort(id);
            }
            ToScheduler::FlushCache { query } => self.flush_cache(query)?,
            ToScheduler::Info { query } => {
                let info = self.info(query);
                self.deliver(|| Outgoing::Info(Box::new(info)))?;
            }
            ToScheduler::Vocabulary(vocabulary) => self.runner.set_vocabulary(*vocabulary),
            ToScheduler::Prepare(grammar) => self.runner.prepare_grammar(*grammar),
            ToScheduler::WriteFlight { query } => self.write_flight(query)?,
            ToScheduler::Shutdown => self.state.stopping = true,
        }
        Ok(())
    }

    /// Every rank flushes; rank 0 tells how many pages that freed, equal on all.
    fn flush_cache(&mut self, query: u64) -> Result<()> {
        let free_before = self.scheduler.counters().pages_free;
        self.scheduler.flush_cache();
        let pages = self.scheduler.counters().pages_free.saturating_sub(free_before);
        self.deliver(|| Outgoing::CacheFlushed(query, pages))
    }

    /// Every rank writes its own recording, of the same steps; rank 0 answers for all.
    fn write_flight(&mut self, query: u64) -> Result<()> {
        let written = self.flight.write();
        if let Err(error) = &written {
            tracing::warn!("the flight recorder was not written: {error}");
        }
        let files = match &written {
            Ok(_) => Ok(self.flight.paths(&self.info.ranks)),
            Err(error) => Err(error.to_string()),
        };
        self.deliver(|| Outgoing::FlightWritten(query, files))
    }

    /// Every rank submits; only rank 0 tells the outside what came of it.
    fn submit(&mut self, submitted: SubmitRequest, stamp_ms: u64) -> Result<()> {
        let id = submitted.id;
        let text = submitted.text.clone();
        let prompt = if text.reports_prompt() { submitted.prompt.clone() } else { Vec::new() };
        let prompt_tokens = submitted.prompt.len();
        let request = request_of(submitted, stamp_ms, self.settings.request_timeout_ms);
        match self.scheduler.submit(request, stamp_ms) {
            Ok(()) => {
                tracing::debug!(request = %id, prompt_tokens, "queued");
                if let Role::Primary(primary) = &self.role {
                    self.timings.begin(id, text.timing, primary.now());
                }
                self.deliver(|| Outgoing::Begin(vec![Begin { id, text, prompt }]))
            }
            Err(refusal) => {
                tracing::debug!(request = %id, refusal.status, refusal.message, "refused");
                self.deliver(|| Outgoing::Refused(id, refusal))
            }
        }
    }

    /// Whether a step was launched.
    fn plan_and_launch(&mut self) -> Result<bool> {
        self.enter(Activity::Plan);
        let planned = self.scheduler.plan_into(&mut self.state.plan);
        self.flight.plan(planned, self.scheduler.digest());
        if self.scheduler.config().track_freed {
            self.state.freed.clear();
            self.scheduler.take_freed_pages(&mut self.state.freed);
            self.runner.poison(&self.state.freed)?;
        }
        if !planned {
            return Ok(false);
        }
        if let Some(now) = self.timing_clock() {
            self.timings.launched(&self.state.plan, now);
        }
        self.enter(Activity::Launch);
        self.runner.launch(&self.state.plan)?;
        let wants = |row: &PlanRow| row.sampling.logprobs.is_some() || row.prompt_logits;
        let has_logprobs = self.settings.token_source.is_some() && self.state.plan.rows.iter().any(wants);
        self.state.in_flight.push_back(has_logprobs);
        Ok(true)
    }

    /// The time, if it matters to an open request where its own goes.
    fn timing_clock(&self) -> Option<Duration> {
        match &self.role {
            Role::Primary(primary) if !self.timings.is_empty() => Some(primary.now()),
            _ => None,
        }
    }

    fn read_oldest(&mut self) -> Result<()> {
        let step = self.runner.collect(&mut self.state.tokens)?;
        let has_logprobs = self.state.in_flight.pop_front().unwrap_or(false);
        match &self.settings.token_source {
            None => self.runner.take_logprobs(&mut self.state.logprobs),
            Some(source) => {
                let tokens = self.scheduler.in_flight().next().map_or(0, |(_, tokens)| tokens);
                let mut logprobs = Vec::new();
                self.runner.take_logprobs(&mut logprobs);
                let shape = StepShape { tokens, has_logprobs };
                source.share(&mut *self.group, shape, &mut self.state.tokens, &mut logprobs)?;
                self.state.logprobs.append(&mut logprobs);
            }
        }
        self.runner.step_is_over();
        self.flight.tokens(&self.state.tokens);
        self.scheduler.complete(step, &self.state.tokens);
        if let Some(mark) = &self.mark
            && !self.state.tokens.is_empty()
        {
            mark.token();
        }
        Ok(())
    }

    fn send_results(&mut self) -> Result<()> {
        let mut events = std::mem::take(&mut self.state.events);
        self.scheduler.take_events(&mut events);
        let mut logprobs = std::mem::take(&mut self.state.logprobs);
        if !events.is_empty()
            && let Role::Primary(primary) = &mut self.role
        {
            let timings = &mut self.timings;
            let now = (!timings.is_empty()).then(|| primary.now());
            let (mut outs, mut heavy) = (Vec::with_capacity(events.len()), 0);
            for event in &events {
                let timing = now.and_then(|now| timings.report(event, now));
                let out = token_out(event, timing, &mut logprobs);
                if let Some(reason) = out.finish {
                    let tokens = out.usage.completion_tokens;
                    tracing::debug!(request = %out.id, tokens, finish = reason.as_openai(), "ended");
                }
                heavy += out.logprobs.as_deref().map_or(0, StepLogprobs::count);
                outs.push(out);
                // A message that is too large would end the server; one request alone never makes one.
                if heavy > STEP_LOGPROBS_MAX {
                    primary.deliver(Outgoing::Step(std::mem::take(&mut outs)))?;
                    heavy = 0;
                }
            }
            if !outs.is_empty() {
                primary.deliver(Outgoing::Step(outs))?;
            }
        }
        // What is left belongs to rows whose request had ended.
        logprobs.clear();
        self.state.logprobs = logprobs;
        events.clear();
        self.state.events = events;
        Ok(())
    }

    /// Sends on rank 0, does nothing elsewhere.
    fn deliver(&mut self, out: impl FnOnce() -> Outgoing) -> Result<()> {
        match &mut self.role {
            Role::Primary(primary) => primary.deliver(out()).map_err(EngineError::from),
            Role::Follower(_) => Ok(()),
        }
    }

    /// The state of this replica now.
    pub fn info(&self, query: u64) -> EngineInfo {
        let counters = self.scheduler.counters();
        let mut ranks = self.info.ranks.clone();
        for (rank, work) in ranks.iter_mut().zip(self.exchange.stage_work()) {
            rank.stage_work = work;
        }
        EngineInfo {
            query,
            ranks,
            pages_total: counters.pages_total,
            pages_free: counters.pages_free,
            pages_cached: counters.pages_cached,
            pages_held: counters.pages_held,
            waiting: counters.waiting + self.state.gate.len(),
            running: counters.running,
            draining: counters.draining,
            totals: EngineTotals {
                steps: counters.steps,
                prompt_tokens: counters.prompt_tokens,
                cached_tokens: counters.hit_tokens,
                generated_tokens: counters.generated_tokens,
                computed_tokens: counters.computed_tokens,
                retractions: counters.retractions,
                evicted_pages: counters.evicted_pages,
                prefix_waits: counters.prefix_waits,
            },
            ..self.info.clone()
        }
    }
}

/// What the detokenizer is told of one event; takes what belongs to it out of `logprobs`, which is in step order.
fn token_out(
    event: &Event,
    timing: Option<Box<Timing>>,
    logprobs: &mut Vec<(RequestId, StepLogprobs)>,
) -> TokenOut {
    let mut take = |id| {
        let at = logprobs.iter().position(|(other, _)| *other == id)?;
        Some(Box::new(logprobs.remove(at).1))
    };
    let usage = |u: &lockstep_scheduler::Usage| lockstep_wire::Usage {
        prompt_tokens: u.prompt_tokens,
        cached_tokens: u.cached_tokens,
        completion_tokens: u.completion_tokens,
    };
    match event {
        Event::Token { id, token, is_eos, finish, usage: u } => TokenOut {
            id: *id,
            tokens: vec![*token],
            finish: *finish,
            ends_with_eos: *is_eos,
            usage: usage(u),
            logprobs: take(*id),
            timing,
        },
        Event::Finished { id, finish, usage: u } => TokenOut {
            id: *id,
            tokens: Vec::new(),
            finish: Some(*finish),
            ends_with_eos: false,
            usage: usage(u),
            logprobs: None,
            timing,
        },
    }
}
