//! The rank loop of a pipeline stage beside its device.
//!
//! On a CPU a forward pass runs when it is launched. A loop that ran it would keep its rank from the next agreement
//! until the pass is done, and agreements are of all ranks: the stages would compute one after the other. So the loop
//! has a thread of its own here and hands its steps to the thread that has the device, which runs them in
//! order, as a GPU does by itself. All loops agree, plan and queue up to as many steps as there are stages;
//! each device waits for nothing but the activations that its step needs.
//!
//! **Invariants:** the device runs what it is given in that order and nothing else, so what the scheduler decides does not
//! depend on when it runs; it keeps no plan once it has run. A device that fails says so in the place of its step.
//!
//! The loop has the new thread: a backend stays on the thread that made it.

use crate::grammars::PreparedCount;
use crate::runner::{ModelRunner, Runner};
use crate::{EngineError, Result};
use lockstep_backend::Backend;
use lockstep_core::{Grammar, PageId, RequestId, StepId, TokenId};
use lockstep_scheduler::StepPlan;
use lockstep_wire::{StepLogprobs, Vocabulary};
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, channel};
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
}

/// The loop's end of the queue to its device.
pub struct StageQueue {
    orders: Sender<Order>,
    done: Receiver<Result<Done>>,
    logprobs: Vec<(RequestId, StepLogprobs)>,
    /// Grammars are for the stage that samples.
    prepared: Option<PreparedCount>,
}

/// Runs `body` on a thread of its own, with a queue to `runner`, which works on this one until the queue is gone.
pub(crate) fn beside<B: Backend, T: Send>(
    mut runner: ModelRunner<B>,
    body: impl FnOnce(StageQueue) -> Result<T> + Send,
) -> Result<T> {
    let (orders, inbox) = channel();
    let (outbox, done) = channel();
    let prepared = runner.prepared_count();
    let queue = StageQueue { orders, done, logprobs: Vec::new(), prepared };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("loop".into()).spawn_scoped(scope, move || body(queue));
        let thread = thread.map_err(|error| {
            EngineError::Internal(format!("cannot start the thread of the loop: {error}"))
        })?;
        let span = work(&mut runner, &inbox, &outbox);
        // Whoever waits for a step must hear that none will come.
        drop(outbox);
        tracing::info!("{}", span.report(runner.waited()));
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// The time of a device's steps.
#[derive(Debug, Default)]
struct Span {
    steps: u64,
    /// In steps, waiting for other ranks included.
    in_steps: Duration,
    /// When the first one began and the last one ended.
    ends: Option<(Instant, Instant)>,
}

impl Span {
    fn note(&mut self, from: Instant) {
        let now = Instant::now();
        self.steps += 1;
        self.in_steps += now - from;
        self.ends = Some((self.ends.map_or(from, |(first, _)| first), now));
    }

    /// One sentence, for the log; `waited` of the time in steps was for the stage before.
    fn report(&self, waited: Duration) -> String {
        let elapsed = self.ends.map_or(Duration::ZERO, |(first, last)| last - first).as_secs_f64();
        let computed = self.in_steps.saturating_sub(waited).as_secs_f64();
        let waits = 100.0 * (1.0 - computed / elapsed.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        format!(
            "computed {} steps in {computed:.2} s; from the first to the last took {elapsed:.2} s, of which it waited \
             {waits:.0} %",
            self.steps
        )
    }
}

/// Runs orders until there are no more, or one fails.
fn work(runner: &mut impl Runner, orders: &Receiver<Order>, done: &Sender<Result<Done>>) -> Span {
    let mut span = Span::default();
    for order in orders {
        match order {
            Order::Launch(plan) => {
                let from = Instant::now();
                let ran = run(runner, &plan);
                span.note(from);
                let failed = ran.is_err();
                // A loop that has ended does not want to know.
                if done.send(ran).is_err() || failed {
                    break;
                }
            }
            Order::Poison(pages) => {
                if let Err(error) = runner.poison(&pages) {
                    let _ = done.send(Err(error));
                    break;
                }
            }
            Order::Vocabulary(vocabulary) => runner.set_vocabulary(*vocabulary),
            Order::Prepare(grammar) => runner.prepare_grammar(*grammar),
        }
    }
    span
}

fn run(runner: &mut impl Runner, plan: &StepPlan) -> Result<Done> {
    runner.launch(plan)?;
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    let step = runner.collect(&mut tokens)?;
    runner.take_logprobs(&mut logprobs);
    Ok(Done { step, tokens, logprobs })
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
        self.order(Order::Launch(Box::new(plan.clone())));
        Ok(())
    }

    /// Waits for the device as long as that takes: its own waits for other ranks have an end.
    fn collect(&mut self, tokens: &mut Vec<TokenId>) -> Result<StepId> {
        let ended = |_| EngineError::Internal("the thread of the device has ended".into());
        let Done { step, tokens: sampled, logprobs } = self.done.recv().map_err(ended)??;
        *tokens = sampled;
        self.logprobs = logprobs;
        Ok(step)
    }

    fn take_logprobs(&mut self, into: &mut Vec<(RequestId, StepLogprobs)>) {
        into.append(&mut self.logprobs);
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
        let queue = StageQueue { orders, done, logprobs: Vec::new(), prepared: None };
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
            scope.spawn(move || work(&mut Counting::default(), &inbox, &outbox));
            let mut tokens = Vec::new();
            for step in 0..3 {
                assert_eq!(queue.collect(&mut tokens).unwrap(), step);
                assert_eq!(tokens, [step as TokenId]);
            }
            drop(queue);
        });
    }

    #[test]
    fn a_failure_is_told_in_the_place_of_its_step_and_then_nothing_runs() {
        let (mut queue, inbox, outbox) = queue();
        plans(3).iter().for_each(|plan| queue.launch(plan).unwrap());
        let mut runner = Counting { fails: Some(1), ..Counting::default() };
        work(&mut runner, &inbox, &outbox);
        drop((inbox, outbox));
        assert_eq!(runner.launched, [0, 1]);
        let mut tokens = Vec::new();
        assert_eq!(queue.collect(&mut tokens).unwrap(), 0);
        assert_eq!(queue.collect(&mut tokens).unwrap_err().to_string(), "on purpose");
        queue.launch(&plans(1)[0]).unwrap();
        assert!(queue.collect(&mut tokens).unwrap_err().to_string().contains("device has ended"));
    }
}
