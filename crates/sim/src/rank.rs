//! One simulated rank: the server's own rank loop in a coroutine.
//!
//! The loop blocks in its links, its group and its device. Here each of these is a *call* to the simulation:
//! the coroutine is suspended with a [`Call`] and resumed, whenever the simulation likes, with a
//! [`Reply`]. So all ranks live in one thread, nothing happens that the seed did not decide, and a rank can be
//! delayed, stopped or killed at every call.

use corosensei::{Coroutine, Yielder};
use lockstep_comm::collective::CollectiveError;
use lockstep_comm::group::{self, Patience, ProcessGroup};
use lockstep_core::{PageId, StepId, TokenId};
use lockstep_engine::control::{ControlError, Follower, Outgoing, Primary, Result as ControlResult, Wait};
use lockstep_engine::flight::replay_bytes;
use lockstep_engine::rank_loop::{LoopSettings, RankLoop, Role};
use lockstep_engine::runner::Runner;
use lockstep_engine::{EngineError, Result};
use lockstep_scheduler::{Counters, Scheduler, SchedulerConfig, StepDigest, StepPlan};
use lockstep_wire::{Broadcast, EngineInfo, ToScheduler};
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

/// What a rank asks of the simulation.
pub enum Call {
    /// The clock.
    Now,
    /// Messages to rank 0.
    Receive(Wait),
    /// An encoded broadcast to all other ranks.
    Publish(Vec<u8>),
    /// Results to the outside.
    Deliver(Outgoing),
    /// The next broadcast.
    Take,
    /// A collective operation of the CPU group.
    Gather(Vec<u8>, Patience),
    /// A step for the device.
    Launch(Rc<StepPlan>),
    /// The oldest step, once it has run: its tokens, on the ranks that sample.
    Collect,
    /// Freed pages.
    Poison(Vec<PageId>),
    /// The loop has done one step; the integrity check's complaint, if any.
    Stepped(Box<StepReport>, Option<String>),
}

/// What the simulation answers.
pub enum Reply {
    /// Begin.
    Start,
    /// Done.
    Done,
    /// Milliseconds.
    Now(u64),
    /// Encoded messages.
    Messages(Vec<Vec<u8>>),
    /// One encoded broadcast.
    Broadcast(Vec<u8>),
    /// All ranks' contributions.
    Gathered(Vec<u8>),
    /// A step and its tokens.
    Collected(StepId, Vec<TokenId>),
    /// A link failed.
    LinkFailed(String),
    /// The group failed.
    GroupFailed(CollectiveError),
}

/// What must be equal on all ranks after each step of the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepReport {
    /// The scheduler's fingerprint.
    pub digest: StepDigest,
    /// Its gauges and totals.
    pub counters: Counters,
}

/// A rank that can be resumed; it ends with the loop's error as text.
pub type RankCoroutine = Coroutine<Reply, Call, std::result::Result<(), String>>;

/// What a rank is started with.
#[derive(Clone)]
pub struct RankSetup {
    /// Its number.
    pub rank: usize,
    /// Ranks of the replica.
    pub size: usize,
    /// Its scheduler's configuration.
    pub config: SchedulerConfig,
    /// Its loop's settings.
    pub settings: LoopSettings,
}

/// A rank that has not begun.
pub fn start(setup: RankSetup) -> RankCoroutine {
    Coroutine::new(move |yielder, _start| {
        let port = Port(NonNull::from(yielder));
        run(setup, port)
    })
}

fn run(setup: RankSetup, port: Port) -> std::result::Result<(), String> {
    let role = match setup.rank {
        0 => Role::Primary(SimPrimary { port, published: 0 }),
        _ => Role::Follower(SimFollower { port, taken: 0 }),
    };
    let group = Box::new(SimGroup { port, rank: setup.rank, size: setup.size });
    let scheduler = Scheduler::new(setup.config);
    let mut rank_loop =
        RankLoop::new(role, group, scheduler, SimRunner { port }, setup.settings, EngineInfo::default());
    let end = rank_loop.run_watched(|scheduler| {
        let report = StepReport { digest: scheduler.digest(), counters: scheduler.counters() };
        port.call(Call::Stepped(Box::new(report), scheduler.check().err()));
    });
    end.map_err(|error| error.to_string())?;
    let steps = rank_loop.scheduler().counters().steps;
    check_replay(&rank_loop.flight().bytes(), steps)
}

/// The flight recorder must be able to reproduce what it holds of the run, up to the end.
fn check_replay(recording: &[u8], steps: u64) -> std::result::Result<(), String> {
    let report = replay_bytes(recording).map_err(|error| error.to_string())?;
    if report.difference.is_some() || report.first_step + report.steps != steps {
        return Err(format!("the flight recorder does not reproduce {steps} steps: {report}"));
    }
    Ok(())
}

/// A rank's way into the simulation.
#[derive(Clone, Copy)]
struct Port(NonNull<Yielder<Reply, Call>>);

// SAFETY: `ProcessGroup` asks for `Send`, but no port ever leaves its thread: it exists only inside a
// coroutine's body, and a coroutine is not `Send`.
unsafe impl Send for Port {}

impl Port {
    /// Suspends this rank until the simulation answers.
    fn call(self, call: Call) -> Reply {
        // SAFETY: the yielder lives for as long as the coroutine's body runs; ports are made in that
        // body, moved only into values that it owns, and used only by code that it calls.
        unsafe { self.0.as_ref() }.suspend(call)
    }
}

fn unexpected(call: &str) -> ! {
    unreachable!("the simulation answered {call} with a reply of another kind")
}

struct SimPrimary {
    port: Port,
    published: u64,
}

impl Primary for SimPrimary {
    fn now(&self) -> Duration {
        match self.port.call(Call::Now) {
            Reply::Now(ms) => Duration::from_millis(ms),
            _ => unexpected("Now"),
        }
    }

    fn receive(&mut self, wait: Wait, into: &mut Vec<ToScheduler>) -> ControlResult<()> {
        match self.port.call(Call::Receive(wait)) {
            Reply::Messages(messages) => {
                for bytes in messages {
                    into.push(lockstep_wire::decode(&bytes).map_err(|e| ControlError(e.to_string()))?);
                }
                Ok(())
            }
            _ => unexpected("Receive"),
        }
    }

    fn publish(&mut self, stamp_ms: u64, message: &ToScheduler) -> ControlResult<()> {
        let broadcast = Broadcast { sequence: self.published, stamp_ms, message: message.clone() };
        self.published += 1;
        let bytes = lockstep_wire::encode(&broadcast).map_err(|e| ControlError(e.to_string()))?;
        match self.port.call(Call::Publish(bytes)) {
            Reply::Done => Ok(()),
            _ => unexpected("Publish"),
        }
    }

    fn deliver(&mut self, out: Outgoing) -> ControlResult<()> {
        match self.port.call(Call::Deliver(out)) {
            Reply::Done => Ok(()),
            _ => unexpected("Deliver"),
        }
    }
}

struct SimFollower {
    port: Port,
    taken: u64,
}

impl Follower for SimFollower {
    fn take(&mut self) -> ControlResult<Broadcast> {
        let bytes = match self.port.call(Call::Take) {
            Reply::Broadcast(bytes) => bytes,
            Reply::LinkFailed(what) => return Err(ControlError(what)),
            _ => unexpected("Take"),
        };
        let broadcast: Broadcast = lockstep_wire::decode(&bytes).map_err(|e| ControlError(e.to_string()))?;
        if broadcast.sequence != self.taken {
            let (got, want) = (broadcast.sequence, self.taken);
            return Err(ControlError(format!("broadcast {got} arrived where {want} was expected")));
        }
        self.taken += 1;
        Ok(broadcast)
    }
}

struct SimGroup {
    port: Port,
    rank: usize,
    size: usize,
}

impl ProcessGroup for SimGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn barrier(&mut self, patience: Patience) -> group::Result<()> {
        self.all_gather(&[], &mut [], patience)
    }

    fn all_gather(&mut self, send: &[u8], recv: &mut [u8], patience: Patience) -> group::Result<()> {
        match self.port.call(Call::Gather(send.to_vec(), patience)) {
            Reply::Gathered(bytes) => {
                recv.copy_from_slice(&bytes);
                Ok(())
            }
            Reply::GroupFailed(error) => Err(error),
            _ => unexpected("Gather"),
        }
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize, patience: Patience) -> group::Result<()> {
        let mut all = vec![0; data.len() * self.size];
        self.all_gather(data, &mut all, patience)?;
        data.copy_from_slice(&all[root * data.len()..][..data.len()]);
        Ok(())
    }
}

struct SimRunner {
    port: Port,
}

impl Runner for SimRunner {
    fn launch(&mut self, plan: &StepPlan) -> Result<()> {
        match self.port.call(Call::Launch(Rc::new(plan.clone()))) {
            Reply::Done => Ok(()),
            _ => unexpected("Launch"),
        }
    }

    fn collect(&mut self, tokens: &mut Vec<TokenId>) -> Result<StepId> {
        match self.port.call(Call::Collect) {
            Reply::Collected(step, collected) => {
                tokens.clone_from(&collected);
                Ok(step)
            }
            Reply::GroupFailed(error) => Err(EngineError::from(error)),
            _ => unexpected("Collect"),
        }
    }

    fn poison(&mut self, freed: &[PageId]) -> Result<()> {
        if !freed.is_empty() {
            self.port.call(Call::Poison(freed.to_vec()));
        }
        Ok(())
    }
}
