//! A request whose grammar is still being prepared waits without holding up anyone else.
#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_comm::group::{self, Patience, ProcessGroup};
use lockstep_core::{Grammar, RequestId, SamplingParams, StepId, TokenId};
use lockstep_engine::control::{ControlError, Follower, Outgoing, Primary, Wait};
use lockstep_engine::rank_loop::{LoopSettings, RankLoop, Role};
use lockstep_engine::runner::Runner;
use lockstep_scheduler::{Scheduler, SchedulerConfig, StepPlan};
use lockstep_wire::{Broadcast, EngineInfo, SubmitRequest, TextParams, ToScheduler};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// What the test and the loop share.
#[derive(Default)]
struct Outside {
    inbox: RefCell<Vec<ToScheduler>>,
    waits: RefCell<Vec<Wait>>,
    /// Ids in the order in which the loop accepted them.
    begun: RefCell<Vec<u64>>,
    ordered: Cell<u64>,
    prepared: Cell<u64>,
}

struct Links(Rc<Outside>);

impl Primary for Links {
    fn now(&self) -> Duration {
        Duration::ZERO
    }
    fn receive(&mut self, wait: Wait, into: &mut Vec<ToScheduler>) -> Result<(), ControlError> {
        self.0.waits.borrow_mut().push(wait);
        into.append(&mut self.0.inbox.borrow_mut());
        Ok(())
    }
    fn publish(&mut self, _: u64, _: &ToScheduler) -> Result<(), ControlError> {
        Ok(())
    }
    fn deliver(&mut self, out: Outgoing) -> Result<(), ControlError> {
        if let Outgoing::Begin(list) = out {
            self.0.begun.borrow_mut().extend(list.iter().map(|begin| begin.id.0));
        }
        Ok(())
    }
}

struct NoFollower;

impl Follower for NoFollower {
    fn take(&mut self) -> Result<Broadcast, ControlError> {
        Err(ControlError("rank 0 takes nothing".into()))
    }
}

/// A group of one.
struct Alone;

impl ProcessGroup for Alone {
    fn rank(&self) -> usize {
        0
    }
    fn size(&self) -> usize {
        1
    }
    fn barrier(&mut self, _: Patience) -> group::Result<()> {
        Ok(())
    }
    fn all_gather(&mut self, send: &[u8], recv: &mut [u8], _: Patience) -> group::Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }
    fn broadcast(&mut self, _: &mut [u8], _: usize, _: Patience) -> group::Result<()> {
        Ok(())
    }
}

/// Every token is 9.
struct Nines {
    outside: Rc<Outside>,
    launched: VecDeque<(StepId, usize)>,
}

impl Runner for Nines {
    fn launch(&mut self, plan: &StepPlan) -> lockstep_engine::Result<()> {
        self.launched.push_back((plan.step, plan.sample_count()));
        Ok(())
    }
    fn collect(&mut self, tokens: &mut Vec<TokenId>) -> lockstep_engine::Result<StepId> {
        let (step, count) = self.launched.pop_front().unwrap();
        *tokens = vec![9; count];
        Ok(step)
    }
    fn prepare_grammar(&mut self, _: Grammar) {
        self.outside.ordered.set(self.outside.ordered.get() + 1);
    }
    fn grammars_prepared(&mut self) -> u64 {
        self.outside.prepared.get()
    }
}

fn submit(id: u64, grammar: Option<Grammar>) -> ToScheduler {
    ToScheduler::Submit(Box::new(SubmitRequest {
        id: RequestId(id),
        prompt: vec![1, 2],
        sampling: SamplingParams { max_tokens: Some(3), grammar, ..SamplingParams::default() },
        text: TextParams::default(),
        cache_salt: None,
        priority: 0,
    }))
}

#[test]
fn running_requests_go_on_while_a_grammar_is_prepared() {
    let outside = Rc::new(Outside::default());
    let settings = LoopSettings {
        token_source: None,
        collective_timeout: Duration::from_secs(1),
        request_timeout_ms: None,
        flight_segment_bytes: 1 << 16,
    };
    let runner = Nines { outside: outside.clone(), launched: VecDeque::new() };
    let role: Role<Links, NoFollower> = Role::Primary(Links(outside.clone()));
    let scheduler = Scheduler::new(SchedulerConfig { overlap: false, ..SchedulerConfig::default() });
    let mut rank_loop =
        RankLoop::new(role, Box::new(Alone), scheduler, runner, settings, EngineInfo::default());

    let grammar = || Some(Grammar::Choice(vec!["a".into()]));
    outside.inbox.borrow_mut().extend([submit(1, grammar()), submit(2, None)]);
    rank_loop.step().unwrap();
    assert_eq!((&outside.begun.borrow()[..], outside.ordered.get()), (&[2][..], 1));
    assert_eq!(rank_loop.info(0).waiting, 1, "the one at the gate");
    // The other request ends undisturbed; from then on the loop naps instead of sleeping till a message comes.
    while rank_loop.scheduler().has_work() {
        rank_loop.step().unwrap();
    }
    rank_loop.step().unwrap();
    assert_eq!(outside.waits.borrow().last(), Some(&Wait::Briefly));
    assert_eq!(rank_loop.scheduler().counters().generated_tokens, 3);
    // Ready on this rank; one agreement later it is let in.
    outside.prepared.set(1);
    rank_loop.step().unwrap();
    rank_loop.step().unwrap();
    assert_eq!(&outside.begun.borrow()[..], [2, 1]);
    outside.inbox.borrow_mut().push(submit(3, grammar()));
    rank_loop.step().unwrap();
    assert_eq!((&outside.begun.borrow()[..], outside.ordered.get()), (&[2, 1, 3][..], 1), "known: at once");
    outside.inbox.borrow_mut().push(ToScheduler::Shutdown);
    rank_loop.run().unwrap();
}
