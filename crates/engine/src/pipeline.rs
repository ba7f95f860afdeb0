//! The rank loop of a pipeline stage beside its device.
//!
//! On a CPU a forward pass runs when it is launched. A loop that ran it would keep its rank from the next agreement
//! until the pass is done, and agreements are of all ranks: the stages would compute one after the other. So the loop
//! has a thread of its own here and hands its steps to the thread that has the device, which runs them in
//! order. All loops agree, plan and queue up to as many steps as there are stages;
//! each device waits for nothing but the activations that its step needs. A GPU is given the next step while it computes
//! one, so that it has no gap between them.
//!
//! **Invariants:** the device runs what it is given in that order and nothing else, so what the scheduler decides does not
//! depend on when it runs; it keeps no plan once it has run. A device that fails says so in the place of its step.
//!
//! The loop has the new thread: a backend stays on the thread that made it.

use crate::grammars::PreparedCount;
use crate::runner::{ModelRunner, Runner};
use crate::stage_times::{StageClock, StageTimes};
use crate::{EngineError, Result};
use lockstep_backend::Backend;
use lockstep_comm::watch::Mark;
use lockstep_core::{Grammar, PageId, RequestId, StepId, TokenId};
use lockstep_scheduler::StepPlan;
use lockstep_wire::{StepLogprobs, Vocabulary};
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

/// What the loop asks of its device.
enum Order {
    Launch(Box<StepPlan>),
    Poison(Vec<PageId>),
    Vocabulary(Box<Vocabulary>),
    Prepare(Box<Grammar>),
}

/// A step that has run.
struct Done {
    step: StepId,
    /// None on stages that do not sample.
    tokens: Vec<TokenId>,
    logprobs: Vec<(RequestId, StepLogprobs)>,
    /// How long the device took.
    computed: Duration,
}

/// The loop's end of the queue to its device.
pub struct StageQueue {
    orders: Sender<Order>,
    done: Receiver<Result<Done>>,
    logprobs: Vec<(RequestId, StepLogprobs)>,
    /// Grammars are for the stage that samples.
    prepared: Option<PreparedCount>,
    clock: StageClock,
}

/// Runs `body` on a thread of its own, with a queue to `runner`, which works on this one until the queue is gone; `mark`
/// shows the steps that it computes.
pub(crate) fn beside<B: Backend, T: Send>(
    mut runner: ModelRunner<B>,
    mark: Option<Mark>,
    body: impl FnOnce(StageQueue) -> Result<T> + Send,
) -> Result<T> {
    let (orders, inbox) = channel();
    let (outbox, done) = channel();
    let prepared = runner.prepared_count();
    let queue = StageQueue { orders, done, logprobs: Vec::new(), prepared, clock: StageClock::default() };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("loop".into()).spawn_scoped(scope, move || body(queue));
        let thread = thread.map_err(|error| {
            EngineError::Internal(format!("cannot start the thread of the loop: {error}"))
        })?;
        work(&mut runner, &inbox, &outbox, mark.as_ref());
        // Whoever waits for a step must hear that none will come.
        drop(outbox);
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Steps that a device has been given and that have not ended, where they run after they are launched.
const STEPS_AHEAD: usize = 2;

/// Runs orders until there are no more, or one fails. What failed comes in the place of its step.
fn work(
    runner: &mut impl Runner,
    orders: &Receiver<Order>,
    done: &Sender<Result<Done>>,
    mark: Option<&Mark>,
) {
    let steps_max = if runner.runs_behind() { STEPS_AHEAD } else { 1 };
    let mut open = 0;
    loop {
        let order = match next(runner, orders, (open, steps_max)) {
            Next::Order(order) => order,
            Next::StepEnded => {
                let ended = collected(runner);
                let failed = ended.is_err();
                if let (Ok(Done { step, computed, .. }), Some(mark)) = (&ended, mark) {
                    mark.computed(*step, *computed);
                }
                open -= 1;
                // A loop that has ended does not want to know.
                if done.send(ended).is_err() || failed {
                    return;
                }
                continue;
            }
            Next::NoMore => return,
        };
        let obeyed = match order {
            Order::Launch(plan) => {
                open += 1;
                runner.launch(&plan)
            }
            Order::Poison(pages) => runner.poison(&pages),
            Order::Vocabulary(vocabulary) => {
                runner.set_vocabulary(*vocabulary);
                Ok(())
            }
            Order::Prepare(grammar) => {
                runner.prepare_grammar(*grammar);
                Ok(())
            }
        };
        if let Err(error) = obeyed {
            let _ = done.send(Err(error));
            return;
        }
    }
}

/// What there is to do.
enum Next {
    Order(Order),
    /// The oldest step has ended, or will have when it is collected.
    StepEnded,
    NoMore,
}

/// The next thing to do, with `open` of at most `steps_max` steps on their way: orders first, so that the device has the
/// next step when one ends.
fn next(runner: &mut impl Runner, orders: &Receiver<Order>, (open, steps_max): (usize, usize)) -> Next {
    if open == 0 {
        return orders.recv().map_or(Next::NoMore, Next::Order);
    }
    if open == steps_max {
        return Next::StepEnded;
    }
    loop {
        match orders.try_recv() {
            Ok(order) => return Next::Order(order),
            Err(TryRecvError::Empty) if !runner.step_has_ended() => std::thread::yield_now(),
            Err(_) => return Next::StepEnded,
        }
    }
}

fn collected(runner: &mut impl Runner) -> Result<Done> {
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    let step = runner.collect(&mut tokens)?;
    runner.take_logprobs(&mut logprobs);
    Ok(Done { step, tokens, logprobs, computed: runner.computed() })
}

impl StageQueue {
    /// A device that has ended does not take it; `collect` says why, in the place of the step at which it did.
    fn order(&self, order: Order) {
        let _ = self.orders.send(order);
    }

    fn tell_sampler(&self, order: Order) {
        if self.prepared.is_some() {
            self.order(order);
        }
    }
}

impl Runner for StageQueue {
    fn launch(&mut self, plan: &StepPlan) -> Result<()> {
        self.clock.launched(Instant::now());
        self.order(Order::Launch(Box::new(plan.clone())));
        Ok(())
    }

    /// Waits for the device as long as that takes: its own waits for other ranks have an end.
    fn collect(&mut self, tokens: &mut Vec<TokenId>) -> Result<StepId> {
        let ended = |_| EngineError::Internal("the thread of the device has ended".into());
        let Done { step, tokens: sampled, logprobs, computed } = self.done.recv().map_err(ended)??;
        self.clock.computed(computed);
        *tokens = sampled;
        self.logprobs = logprobs;
        Ok(step)
    }

    fn take_logprobs(&mut self, into: &mut Vec<(RequestId, StepLogprobs)>) {
        into.append(&mut self.logprobs);
    }

    fn step_is_over(&mut self) {
        self.clock.ended(Instant::now());
    }

    fn stage_times(&self) -> Option<StageTimes> {
        Some(self.clock.times())
    }

    fn set_vocabulary(&mut self, vocabulary: Vocabulary) {
        self.tell_sampler(Order::Vocabulary(Box::new(vocabulary)));
    }

    fn prepare_grammar(&mut self, grammar: Grammar) {
        self.tell_sampler(Order::Prepare(Box::new(grammar)));
    }

    fn grammars_prepared(&mut self) -> u64 {
        self.prepared.as_ref().map_or(u64::MAX, PreparedCount::get)
    }

    fn poison(&mut self, freed: &[PageId]) -> Result<()> {
        if !freed.is_empty() {
            self.order(Order::Poison(freed.to_vec()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::SamplingParams;
    use lockstep_scheduler::{Request, Scheduler, SchedulerConfig};
    use std::collections::VecDeque;

    /// Says of each step that its token is the step's number; fails in step `fails`.
    #[derive(Default)]
    struct Counting {
        launched: Vec<StepId>,
        fails: Option<StepId>,
    }

    impl Runner for Counting {
        fn launch(&mut self, plan: &StepPlan) -> Result<()> {
            self.launched.push(plan.step);
            match self.fails == Some(plan.step) {
                true => Err(EngineError::Memory("on purpose".into())),
                false => Ok(()),
            }
        }

        fn collect(&mut self, tokens: &mut Vec<TokenId>) -> Result<StepId> {
            let step = self.launched[self.launched.len() - 1];
            *tokens = vec![step as TokenId];
            Ok(step)
        }
    }

    fn queue() -> (StageQueue, Receiver<Order>, Sender<Result<Done>>) {
        let (orders, inbox) = channel();
        let (outbox, done) = channel();
        let queue =
            StageQueue { orders, done, logprobs: Vec::new(), prepared: None, clock: StageClock::default() };
        (queue, inbox, outbox)
    }

    fn plans(count: usize) -> Vec<StepPlan> {
        let config = SchedulerConfig { stages: 8, token_budget: 2, ..SchedulerConfig::default() };
        let mut scheduler = Scheduler::new(config);
        let request = Request::new(RequestId(1), (0..100).collect(), SamplingParams::default());
        scheduler.submit(request, 0).unwrap();
        (0..count).map(|_| scheduler.plan().unwrap()).collect()
    }

    #[test]
    fn steps_run_in_order_while_the_loop_goes_on() {
        let (mut queue, inbox, outbox) = queue();
        plans(3).iter().for_each(|plan| queue.launch(plan).unwrap());
        assert_eq!(queue.grammars_prepared(), u64::MAX, "this stage does not sample");
        queue.prepare_grammar(Grammar::Regex("a".into()));
        std::thread::scope(|scope| {
            scope.spawn(move || work(&mut Counting::default(), &inbox, &outbox, None));
            let mut tokens = Vec::new();
            for step in 0..3 {
                assert_eq!(queue.collect(&mut tokens).unwrap(), step);
                assert_eq!(tokens, [step as TokenId]);
            }
            drop(queue);
        });
    }

    /// A device whose steps end when they are collected.
    #[derive(Default)]
    struct Behind {
        open: VecDeque<StepId>,
        log: Vec<String>,
    }

    impl Runner for Behind {
        fn launch(&mut self, plan: &StepPlan) -> Result<()> {
            self.open.push_back(plan.step);
            self.log.push(format!("launch {}", plan.step));
            Ok(())
        }

        fn collect(&mut self, _: &mut Vec<TokenId>) -> Result<StepId> {
            let step = self.open.pop_front().expect("a step is on its way");
            self.log.push(format!("collect {step}"));
            Ok(step)
        }

        fn runs_behind(&self) -> bool {
            true
        }

        fn step_has_ended(&mut self) -> bool {
            false
        }

        fn computed(&self) -> Duration {
            Duration::from_millis(1)
        }
    }

    #[test]
    fn a_device_that_runs_behind_has_the_next_step_before_one_ends() {
        let (mut queue, inbox, outbox) = queue();
        plans(3).iter().for_each(|plan| queue.launch(plan).unwrap());
        let StageQueue { orders, done, mut clock, .. } = queue;
        drop(orders);
        let mut runner = Behind::default();
        work(&mut runner, &inbox, &outbox, None);
        let log = ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"];
        assert_eq!(runner.log, log);
        drop(outbox);
        done.iter().for_each(|done| clock.computed(done.unwrap().computed));
        let times = clock.times();
        assert_eq!((times.steps, times.computed), (3, Duration::from_millis(3)));
    }

    #[test]
    fn a_failure_is_told_in_the_place_of_its_step_and_then_nothing_runs() {
        let (mut queue, inbox, outbox) = queue();
        plans(3).iter().for_each(|plan| queue.launch(plan).unwrap());
        let mut runner = Counting { fails: Some(1), ..Counting::default() };
        work(&mut runner, &inbox, &outbox, None);
        drop((inbox, outbox));
        assert_eq!(runner.launched, [0, 1]);
        let mut tokens = Vec::new();
        assert_eq!(queue.collect(&mut tokens).unwrap(), 0);
        assert_eq!(queue.collect(&mut tokens).unwrap_err().to_string(), "on purpose");
        queue.launch(&plans(1)[0]).unwrap();
        assert!(queue.collect(&mut tokens).unwrap_err().to_string().contains("device has ended"));
    }
}
