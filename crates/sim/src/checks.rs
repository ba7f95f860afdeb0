//! Checks across ranks, and of the bounds that `docs/scheduling.md` promises.

use crate::rank::StepReport;
use lockstep_core::RequestId;
use lockstep_scheduler::{OVERTAKEN_MAX, SchedulerConfig, StepOrder, StepPlan};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// A sequence of values that every rank produces, each at its own pace; all must be equal.
pub struct Agreement<T> {
    /// Values that not all ranks have produced yet, with the number of ranks that have.
    open: VecDeque<(T, usize)>,
    /// Values dropped from the front of `open`.
    closed: usize,
    /// Per rank: values produced.
    produced: Vec<usize>,
}

impl<T: PartialEq> Agreement<T> {
    /// For so many ranks.
    pub fn new(ranks: usize) -> Self {
        Self { open: VecDeque::new(), closed: 0, produced: vec![0; ranks] }
    }

    /// Takes a rank's next value; when another rank's differs, hands both to `describe` for the finding.
    pub fn add(
        &mut self,
        rank: usize,
        value: T,
        describe: impl FnOnce(usize, &T, &T) -> String,
    ) -> Result<(), String> {
        let index = self.produced[rank];
        self.produced[rank] += 1;
        match self.open.get_mut(index - self.closed) {
            None => self.open.push_back((value, 1)),
            Some((first, seen)) => {
                if *first != value {
                    return Err(describe(index, first, &value));
                }
                *seen += 1;
            }
        }
        while self.open.front().is_some_and(|(_, seen)| *seen == self.produced.len()) {
            self.open.pop_front();
            self.closed += 1;
        }
        Ok(())
    }

    /// Values this rank has produced.
    pub fn produced(&self, rank: usize) -> usize {
        self.produced[rank]
    }
}

/// What rank 0 has done for one accepted request.
#[derive(Default)]
struct Service {
    /// Position in the order of acceptance.
    order: u64,
    /// Whether a step has held a row of it.
    is_admitted: bool,
    /// Later requests admitted while it waited.
    overtaken: u32,
    /// Planned steps before the one that held its last row, if that row sampled.
    decoded_at: Option<u64>,
}

/// Nobody waits longer than the scheduler promises.
pub struct Fairness {
    requests: BTreeMap<RequestId, Service>,
    accepted: u64,
    planned: u64,
    retractions: u64,
    /// Planned steps without a row that a decoding request tolerates.
    decode_gap_max: u64,
    /// Pipeline stages.
    stages: usize,
}

impl Fairness {
    /// The bounds of a scheduler with this configuration.
    pub fn new(config: &SchedulerConfig) -> Self {
        let decode_gap_max = match (config.mixed, config.step_order) {
            (true, _) => 0,
            (false, StepOrder::PrefillFirst) => u64::from(SchedulerConfig::PREFILL_RUN_MAX),
            (false, StepOrder::DecodeFirst) => 1,
        };
        // In a pipeline a row waits for its token while the other stages have steps, and may then find one full.
        let turns = match config.stages as u64 {
            1 => 1,
            stages => 2 * stages,
        };
        let decode_gap_max = turns * (decode_gap_max + 1) - 1;
        let (requests, stages) = (BTreeMap::new(), config.stages);
        Self { requests, accepted: 0, planned: 0, retractions: 0, decode_gap_max, stages }
    }

    /// A request was accepted.
    pub fn accepted(&mut self, id: RequestId) {
        self.requests.insert(id, Service { order: self.accepted, ..Service::default() });
        self.accepted += 1;
    }

    /// A request ended.
    pub fn ended(&mut self, id: RequestId) {
        self.requests.remove(&id);
    }

    /// A step is launched: in a pipeline it decodes no more than an even part of the requests that can, so that the steps
    /// of other stages have theirs. Who has been admitted and has not ended may decode.
    pub fn shares_evenly(&self, plan: &StepPlan) -> Result<(), String> {
        let decoding = plan.rows.iter().filter(|row| !row.is_prefill).count();
        let admitted = self.requests.values().filter(|r| r.is_admitted).count();
        if self.stages > 1 && decoding > admitted.div_ceil(self.stages) {
            return Err(format!(
                "step {} decodes {decoding} of {admitted} requests that {} stages share",
                plan.step, self.stages
            ));
        }
        Ok(())
    }

    /// A step was planned; `report` is the scheduler's state at its end.
    pub fn planned(&mut self, plan: &StepPlan, report: &StepReport) -> Result<(), String> {
        if report.counters.retractions != self.retractions {
            // Who was retracted does not decode any more, and nobody outside knows who it was.
            self.retractions = report.counters.retractions;
            self.requests.values_mut().for_each(|r| r.decoded_at = None);
        }
        for row in &plan.rows {
            let Some(service) = self.requests.get_mut(&row.id) else { continue };
            if let Some(before) = service.decoded_at
                && self.planned - before > self.decode_gap_max
            {
                let gap = self.planned - before;
                return Err(format!(
                    "step {}: {} decodes after {gap} steps without it, at most {} are promised",
                    plan.step, row.id, self.decode_gap_max
                ));
            }
            service.decoded_at = row.samples.then_some(self.planned + 1);
            if !service.is_admitted {
                service.is_admitted = true;
                let order = service.order;
                self.overtake(row.id, order)?;
            }
        }
        self.planned += 1;
        Ok(())
    }

    fn overtake(&mut self, by: RequestId, order: u64) -> Result<(), String> {
        for (id, waiting) in self.requests.iter_mut().filter(|(_, r)| !r.is_admitted && r.order < order) {
            waiting.overtaken += 1;
            if waiting.overtaken > OVERTAKEN_MAX {
                return Err(format!(
                    "{id} waits while {by} is the {}th later arrival admitted",
                    waiting.overtaken
                ));
            }
        }
        Ok(())
    }
}

/// The plans, tokens and reports of all ranks.
pub struct Ranks {
    plans: Agreement<Rc<StepPlan>>,
    tokens: Agreement<Vec<u32>>,
    reports: Agreement<StepReport>,
}

impl Ranks {
    /// For so many ranks.
    pub fn new(ranks: usize) -> Self {
        Self { plans: Agreement::new(ranks), tokens: Agreement::new(ranks), reports: Agreement::new(ranks) }
    }

    /// A rank launches a step.
    pub fn launched(&mut self, rank: usize, plan: Rc<StepPlan>) -> Result<(), String> {
        self.plans.add(rank, plan, |_, first, mine| {
            format!("rank {rank} plans another step {}: {mine:?} where {first:?} was planned", first.step)
        })
    }

    /// A rank has the tokens of a step.
    pub fn collected(&mut self, rank: usize, tokens: Vec<u32>) -> Result<(), String> {
        self.tokens.add(rank, tokens, |step, first, mine| {
            format!("rank {rank} has tokens {mine:?} in step {step}, another one {first:?}")
        })
    }

    /// A rank has done a step of its loop.
    pub fn stepped(&mut self, rank: usize, report: StepReport) -> Result<(), String> {
        self.reports.add(rank, report, |step, first, mine| {
            format!("after loop step {step}, rank {rank} has {mine:?} and another one {first:?}")
        })
    }

    /// Steps a rank's loop has done.
    pub fn steps(&self, rank: usize) -> usize {
        self.reports.produced(rank)
    }
}
