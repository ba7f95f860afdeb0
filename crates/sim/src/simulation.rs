//! The simulated world: clock, events, and what a rank's calls do.

mod ending;
mod outside;
mod pipeline;

use crate::checks::{Fairness, Ranks};
use crate::client::{Client, Intent};
use crate::device::{Device, Oracle};
use crate::group::Group;
use crate::log::{Action, Actor, Entry, EventLog};
use crate::network::{Link, Network};
use crate::oracle::Expected;
use crate::random::Random;
use crate::rank::{self, Call, RankCoroutine, RankSetup, Reply, StepReport};
use crate::scenario::{FaultKind, Scenario};
use crate::{Totals, loop_steps_max};
use corosensei::CoroutineResult;
use lockstep_comm::group::Patience;
use lockstep_engine::control::{Outgoing, Wait};
use lockstep_engine::rank_loop::LoopSettings;
use lockstep_scheduler::StepPlan;
use lockstep_wire::{ToApi, ToDetokenizer};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

/// How long a rank waits for one that should be working; far above every simulated delay.
const PATIENCE_US: u64 = 10_000_000;
/// How long the launcher takes to notice that a process has died.
const NOTICE_US: u64 = 5_000;

/// From the last answer to the client's request for the end: every rank is idle by then.
const FAREWELL_US: u64 = 100_000;

/// Something that happens at a moment.
enum Event {
    Resume(usize, Reply),
    Arrive(Link, Vec<u8>),
    Client(Intent),
    Fault,
    /// The launcher aborts the group because of a rank's end.
    Abort(String),
}

struct Scheduled {
    /// Time, then order of scheduling.
    at: (u64, u64),
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

/// What a suspended rank waits for, other than a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    Message,
    Broadcast,
    Gather,
    /// What the stage before passes on.
    Activations,
}

/// How a rank's life ended.
#[derive(Debug)]
enum RankEnd {
    /// Its loop returned.
    Returned(Result<(), String>),
    /// It was killed or stopped.
    Faulted,
}

struct RankState {
    coroutine: Option<RankCoroutine>,
    inbox: VecDeque<Vec<u8>>,
    waiting: Option<Waiting>,
    /// When it stops waiting.
    deadline_us: Option<u64>,
    device: Device,
    /// Steps that have run, whose activations the next stage has.
    passed_on: usize,
    /// The running step of its loop has launched one.
    has_launched: bool,
    end: Option<RankEnd>,
    last_report: Option<StepReport>,
}

/// One run.
pub struct Simulation {
    scenario: Scenario,
    random: Random,
    now_us: u64,
    scheduled: u64,
    queue: BinaryHeap<Reverse<Scheduled>>,
    ranks: Vec<RankState>,
    group: Group,
    network: Network,
    client: Client,
    oracle: Oracle,
    agreement: Ranks,
    fairness: Fairness,
    /// The step rank 0 launched in its running loop step.
    launched: Option<Rc<StepPlan>>,
    shutdown_sent: bool,
    steps_max: usize,
    /// Its events.
    pub log: EventLog,
    /// What it came to so far.
    pub totals: Totals,
}

type Checked = Result<(), String>;

impl Simulation {
    /// A world before its first event.
    pub fn new(scenario: Scenario, random: Random, keep_log: bool) -> Self {
        let config = &scenario.config;
        let context_max = config.context_max.min(config.num_pages * config.page_size);
        let requests = &scenario.requests;
        let oracle: Oracle =
            requests.iter().map(|r| (r.request.id, Expected::of(&r.request, context_max))).collect();
        let patience = Duration::from_micros(PATIENCE_US);
        let settings = LoopSettings {
            token_source: pipeline::token_source(scenario.ranks, config.stages, patience),
            collective_timeout: patience,
            request_timeout_ms: scenario.request_timeout_ms,
            flight_segment_bytes: scenario.flight_segment_bytes,
        };
        let state = |rank| RankState {
            coroutine: Some(rank::start(RankSetup {
                rank,
                size: scenario.ranks,
                config: config.clone(),
                settings,
            })),
            inbox: VecDeque::new(),
            waiting: None,
            deadline_us: None,
            device: Device::new(config, scenario.lazy_devices),
            passed_on: 0,
            has_launched: false,
            end: None,
            last_report: None,
        };
        Self {
            ranks: (0..scenario.ranks).map(state).collect(),
            group: Group::new(scenario.ranks),
            network: Network::new(),
            client: Client::new(&scenario),
            steps_max: loop_steps_max(&oracle),
            oracle,
            agreement: Ranks::new(scenario.ranks),
            fairness: Fairness::new(config),
            launched: None,
            shutdown_sent: false,
            now_us: 0,
            scheduled: 0,
            queue: BinaryHeap::new(),
            random,
            log: EventLog::new(keep_log),
            totals: Totals::default(),
            scenario,
        }
    }

    /// Runs to the end. The error is a finding.
    pub fn run(&mut self) -> Checked {
        self.schedule_beginning();
        while let Some(at_us) = self.next_moment() {
            self.now_us = at_us;
            if self.expire()? {
                continue;
            }
            let Some(Reverse(next)) = self.queue.pop() else { break };
            self.handle(next.event)?;
            self.follow_wants();
        }
        self.check_end()?;
        self.count_totals();
        Ok(())
    }

    /// The loop step of rank 0, for messages.
    pub fn step(&self) -> usize {
        self.agreement.steps(0)
    }

    fn schedule_beginning(&mut self) {
        for rank in 0..self.ranks.len() {
            let delay_us = self.delay(rank, self.scenario.timing.wake_us);
            self.at(delay_us, Event::Resume(rank, Reply::Start));
        }
        for index in 0..self.scenario.requests.len() {
            self.at(self.scenario.requests[index].at_us, Event::Client(Intent::Submit(index)));
        }
        for (moments, intent) in [
            (self.scenario.flushes_us.clone(), Intent::Flush),
            (self.scenario.queries_us.clone(), Intent::Query),
            (self.scenario.shutdown_us.into_iter().collect(), Intent::Shutdown),
        ] {
            moments.into_iter().for_each(|at_us| self.at(at_us, Event::Client(intent)));
        }
        if let Some(fault) = self.scenario.fault {
            self.at(fault.at_us, Event::Fault);
            // Whoever waits for work needs some to notice; twice, because the rank may have arrived in the
            // group before it was struck.
            for times in 2..4 {
                self.at(fault.at_us + times * NOTICE_US, Event::Client(Intent::Query));
            }
        }
    }

    fn at(&mut self, at_us: u64, event: Event) {
        self.scheduled += 1;
        self.queue.push(Reverse(Scheduled { at: (at_us, self.scheduled), event }));
    }

    /// A random delay of a rank, up to about `scale_us`.
    fn delay(&mut self, rank: usize, scale_us: u64) -> u64 {
        let is_slow = self.scenario.timing.slow_rank == Some(rank);
        self.random.between(0, scale_us) * if is_slow { 20 } else { 1 }
    }

    fn next_moment(&self) -> Option<u64> {
        let deadline = self.ranks.iter().filter_map(|r| r.deadline_us).min();
        let event = self.queue.peek().map(|Reverse(next)| next.at.0);
        deadline.into_iter().chain(event).min()
    }

    /// Wakes ranks whose patience has come to an end; whether there were any.
    fn expire(&mut self) -> Result<bool, String> {
        let expired: Vec<usize> =
            (0..self.ranks.len()).filter(|&r| self.ranks[r].deadline_us == Some(self.now_us)).collect();
        for &rank in &expired {
            let reply = match self.wake(rank) {
                Some(Waiting::Gather) => Reply::GroupFailed(self.group.timeout(rank, PATIENCE_US / 1000)),
                Some(Waiting::Activations) => self.no_activations(rank),
                _ => Reply::LinkFailed(format!(
                    "rank 0 announced a broadcast that did not arrive within {} ms",
                    PATIENCE_US / 1000
                )),
            };
            self.resume(rank, reply)?;
        }
        Ok(!expired.is_empty())
    }

    /// Ends a rank's wait.
    fn wake(&mut self, rank: usize) -> Option<Waiting> {
        self.ranks[rank].deadline_us = None;
        self.ranks[rank].waiting.take()
    }

    fn wait(&mut self, rank: usize, waiting: Waiting, patience: Patience) {
        self.ranks[rank].waiting = Some(waiting);
        self.ranks[rank].deadline_us = match patience {
            Patience::Idle => None,
            Patience::Deadline(duration) => Some(self.now_us + duration.as_micros() as u64),
        };
    }

    fn note(&mut self, actor: Actor, action: Action, a: u64, b: u64) {
        self.log.push(Entry { time_us: self.now_us, actor, action, a, b });
    }

    fn handle(&mut self, event: Event) -> Checked {
        match event {
            Event::Resume(rank, reply) => {
                if matches!(reply, Reply::Collected(..)) {
                    self.pass_on(rank)?;
                }
                self.resume(rank, reply)
            }
            Event::Arrive(link, bytes) => self.arrive(link, bytes),
            Event::Client(intent) => self.act(intent),
            Event::Fault => self.strike(),
            Event::Abort(cause) => self.abort_group(cause),
        }
    }

    /// Lets a rank run until it waits for something.
    fn resume(&mut self, rank: usize, mut reply: Reply) -> Checked {
        while self.ranks[rank].end.is_none() {
            let Some(mut coroutine) = self.ranks[rank].coroutine.take() else { break };
            let outcome = catch_unwind(AssertUnwindSafe(|| coroutine.resume(reply)));
            let call = match outcome {
                Err(panic) => return Err(format!("rank {rank} panics: {}", panic_text(&*panic))),
                Ok(CoroutineResult::Return(result)) => {
                    return self.returned(rank, result);
                }
                Ok(CoroutineResult::Yield(call)) => call,
            };
            self.ranks[rank].coroutine = Some(coroutine);
            let Some(answer) = self.serve(rank, call)? else { break };
            if self.random.one_in(self.scenario.timing.preempt_one_in) {
                let delay_us = self.delay(rank, self.scenario.timing.wake_us);
                self.at(self.now_us + delay_us, Event::Resume(rank, answer));
                break;
            }
            reply = answer;
        }
        Ok(())
    }

    /// Does what a rank asks for; `None` when it has to wait.
    fn serve(&mut self, rank: usize, call: Call) -> Result<Option<Reply>, String> {
        match call {
            Call::Now => return Ok(Some(Reply::Now(self.now_us / 1000))),
            Call::Receive(wait) => return Ok(self.receive(wait)),
            Call::Take => return Ok(self.take(rank)),
            Call::Gather(send, patience) => return Ok(self.gather(rank, send, patience)),
            Call::Collect => return self.collect(rank),
            Call::Publish(bytes) => {
                for follower in 1..self.ranks.len() {
                    self.send(Link::Broadcast(follower), bytes.clone());
                }
                self.note(Actor::Rank(rank), Action::Publish, bytes.len() as u64, 0);
            }
            Call::Deliver(out) => self.deliver(out)?,
            Call::Launch(plan) => self.launch(rank, plan)?,
            Call::Poison(pages) => self.ranks[rank].device.poison(&pages),
            Call::Stepped(report, complaint) => self.stepped(rank, *report, complaint)?,
        }
        Ok(Some(Reply::Done))
    }

    fn send(&mut self, link: Link, bytes: Vec<u8>) {
        let timing = self.scenario.timing;
        let at_us = self.network.arrival_us(link, self.now_us, &timing, &mut self.random);
        self.at(at_us, Event::Arrive(link, bytes));
    }

    fn receive(&mut self, wait: Wait) -> Option<Reply> {
        let rank = &mut self.ranks[0];
        if rank.inbox.is_empty() && wait == Wait::UntilMessage {
            self.wait(0, Waiting::Message, Patience::Idle);
            return None;
        }
        let count = rank.inbox.len().min(self.scenario.messages_per_step_max);
        let messages: Vec<Vec<u8>> = rank.inbox.drain(..count).collect();
        self.note(Actor::Rank(0), Action::Receive, count as u64, 0);
        Some(Reply::Messages(messages))
    }

    fn take(&mut self, rank: usize) -> Option<Reply> {
        match self.ranks[rank].inbox.pop_front() {
            Some(bytes) => {
                self.note(Actor::Rank(rank), Action::Take, 0, 0);
                Some(Reply::Broadcast(bytes))
            }
            None => {
                let patience = Patience::Deadline(Duration::from_micros(PATIENCE_US));
                self.wait(rank, Waiting::Broadcast, patience);
                None
            }
        }
    }

    fn gather(&mut self, rank: usize, send: Vec<u8>, patience: Patience) -> Option<Reply> {
        self.note(Actor::Rank(rank), Action::Arrive, self.group.sequence(), 0);
        if let Some(error) = self.group.abort_error(rank) {
            return Some(Reply::GroupFailed(error));
        }
        match self.group.arrive(rank, send) {
            Err(mismatch) => Some(Reply::GroupFailed(mismatch)),
            Ok(None) => {
                self.wait(rank, Waiting::Gather, patience);
                None
            }
            Ok(Some(gathered)) => {
                for other in 0..self.ranks.len() {
                    self.wake(other);
                    let delay_us = self.delay(other, self.scenario.timing.wake_us);
                    self.at(self.now_us + delay_us, Event::Resume(other, Reply::Gathered(gathered.clone())));
                }
                None
            }
        }
    }

    fn launch(&mut self, rank: usize, plan: Rc<StepPlan>) -> Checked {
        self.note(Actor::Rank(rank), Action::Launch, plan.step, plan.rows.len() as u64);
        self.agreement.launched(rank, plan.clone())?;
        if rank == 0 {
            self.fairness.shares_evenly(&plan)?;
            self.launched = Some(plan.clone());
        }
        self.ranks[rank].has_launched = true;
        let launched = self.ranks[rank].device.launch(plan, &self.oracle);
        launched.and_then(|()| self.has_room(rank)).map_err(|what| format!("rank {rank}: {what}"))
    }

    fn stepped(&mut self, rank: usize, report: StepReport, complaint: Option<String>) -> Checked {
        if let Some(complaint) = complaint {
            return Err(format!("rank {rank} after step {}: {complaint}", report.digest.step));
        }
        let steps = self.agreement.steps(rank) as u64;
        self.note(Actor::Rank(rank), Action::Step, steps, report.digest.token_hash);
        self.agreement.stepped(rank, report.clone())?;
        self.totals.rank_steps += 1;
        if self.agreement.steps(rank) > self.steps_max {
            return Err(format!("no end after {} steps of the loop: {:?}", self.steps_max, report.counters));
        }
        if rank == 0
            && let Some(plan) = self.launched.take()
        {
            self.fairness.planned(&plan, &report)?;
        }
        self.ranks[rank].has_launched = false;
        self.ranks[rank].last_report = Some(report);
        Ok(())
    }

    /// As the server's links do it: each kind of result to its receiver.
    fn deliver(&mut self, out: Outgoing) -> Checked {
        let (link, bytes) = match out {
            Outgoing::Begin(begins) => {
                begins.iter().for_each(|begin| self.fairness.accepted(begin.id));
                (
                    Link::Detokenizer,
                    lockstep_wire::encode(&ToDetokenizer::Begin { replica: 0, requests: begins }),
                )
            }
            Outgoing::Step(outs) => {
                outs.iter().filter(|o| o.finish.is_some()).for_each(|o| self.fairness.ended(o.id));
                (Link::Detokenizer, lockstep_wire::encode(&ToDetokenizer::Step(outs)))
            }
            Outgoing::Refused(id, refusal) => {
                (Link::Api, lockstep_wire::encode(&ToApi::Refused { id, refusal }))
            }
            Outgoing::Info(info) => (Link::Api, lockstep_wire::encode(&ToApi::EngineInfo(info))),
            Outgoing::CacheFlushed(query, pages) => {
                (Link::Api, lockstep_wire::encode(&ToApi::CacheFlushed { query, pages }))
            }
            Outgoing::FlightWritten(query, result) => {
                (Link::Api, lockstep_wire::encode(&ToApi::FlightWritten { query, result }))
            }
        };
        self.send(link, bytes.map_err(|e| e.to_string())?);
        Ok(())
    }

    fn arrive(&mut self, link: Link, bytes: Vec<u8>) -> Checked {
        let rank = match link {
            Link::Detokenizer | Link::Api => return self.hear(link, &bytes),
            Link::Tokenizer(_) | Link::ApiToRank => 0,
            Link::Broadcast(follower) => follower,
        };
        if matches!(link, Link::Broadcast(_)) && self.was_killed(0) {
            return Ok(());
        }
        self.ranks[rank].inbox.push_back(bytes);
        let reply = match self.ranks[rank].waiting {
            Some(Waiting::Message) => self.receive(Wait::No),
            Some(Waiting::Broadcast) => self.take(rank),
            _ => None,
        };
        if let Some(reply) = reply {
            self.wake(rank);
            let delay_us = self.delay(rank, self.scenario.timing.wake_us);
            self.at(self.now_us + delay_us, Event::Resume(rank, reply));
        }
        Ok(())
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("(no text)").to_owned()
}
