//! Greedy text through the server's own scheduler, runner and sampler; only the control plane is missing, since every
//! rank knows all requests from the start.

use crate::Result;
use crate::VerifyError;
use crate::group::{Loaded, Rank, Sizes};
use crate::place::Form;
use lockstep_backend::Backend;
use lockstep_comm::group::{Patience, ProcessGroup};
use lockstep_core::{RequestId, SamplingParams, TokenId};
use lockstep_engine::exchange::{StepShape, TokenSource};
use lockstep_engine::runner::{ModelRunner, Runner, RunnerParts};
use lockstep_scheduler::{CachePolicy, Event, Request, Scheduler, SchedulerConfig, StepPlan};
use std::sync::Arc;
use std::time::Duration;

/// How requests meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// One after the other, without a prefix cache.
    Alone,
    /// All at once, without a prefix cache.
    Together,
    /// All at once, then all again: the second answers start from cached prefixes.
    TwiceCached,
    /// All at once in a pool that holds one of them: requests are retracted and go on later.
    SmallPool,
}

impl Variant {
    /// For people.
    pub const fn words(self) -> &'static str {
        match self {
            Variant::Alone => "one after the other",
            Variant::Together => "all at once",
            Variant::TwiceCached => "again with cached prefixes",
            Variant::SmallPool => "all at once in a pool that holds one",
        }
    }
}

/// One run.
#[derive(Clone)]
pub struct Greedy {
    /// Prompts, not empty.
    pub prompts: Arc<Vec<Vec<TokenId>>>,
    /// Tokens to generate after each; end tokens are ignored.
    pub tokens: usize,
    /// How they meet.
    pub variant: Variant,
    /// How the device runs a step.
    pub form: Form,
}

/// Tokens in a page.
const PAGE_SIZE: usize = 16;
/// Prefill tokens of a step: small enough that longer prompts are chunked.
pub(crate) const CHUNK: usize = 64;

impl Greedy {
    /// The tokens after each prompt. **Collective: all ranks of the group.**
    pub fn texts_on<B: Backend>(&self, rank: &mut Rank<B>) -> Result<Vec<Vec<TokenId>>> {
        let config = SchedulerConfig { stages: rank.parallel.pp_size, ..self.scheduler_config() };
        let tokens_max = config.step_tokens_max();
        let (work, cache) = rank.memory(Sizes {
            tokens_max,
            logits_max: config.step_rows_max(),
            page_size: PAGE_SIZE,
            num_pages: config.num_pages,
        })?;
        let vocab_size = rank.config.vocab_size;
        let (stages, steps_max) = (rank.parallel.pp_size, rank.steps_max);
        let Loaded { backend, decoder, mut replica, collective, pipeline } = rank.take()?;
        let mut runner = ModelRunner::new(RunnerParts {
            vocab_size,
            backend,
            collective,
            pipeline,
            decoder,
            cache,
            work,
            tokens_max,
            page_size: PAGE_SIZE,
            eos_tokens: Vec::new(),
            reports_logprobs: false,
        });
        match self.form {
            Form::Eager => runner.set_recording(false),
            Form::Recorded => runner.set_recording(true),
        }
        let source =
            TokenSource { rank: rank.parallel.topology().sampler(), patience: Duration::from_secs(60) };
        let told = (stages > 1).then_some((source, &mut *replica));
        let texts = self.generate(&mut Scheduler::new(config), &mut runner, (steps_max, told))?;
        let (backend, decoder, (collective, pipeline)) = runner.into_device();
        rank.put_back(Loaded { backend, decoder, replica, collective, pipeline });
        Ok(texts)
    }

    fn scheduler_config(&self) -> SchedulerConfig {
        let longest = self.prompts.iter().map(Vec::len).max().unwrap_or(1) + self.tokens + 1;
        let one = longest.div_ceil(PAGE_SIZE);
        let num_pages = match self.variant {
            Variant::SmallPool => one,
            _ => one * self.prompts.len().max(1) * 2,
        };
        SchedulerConfig {
            page_size: PAGE_SIZE,
            num_pages,
            max_running: self.prompts.len().max(1),
            token_budget: CHUNK,
            context_max: longest,
            cache: match self.variant {
                Variant::Alone | Variant::Together => CachePolicy::None,
                Variant::TwiceCached | Variant::SmallPool => CachePolicy::Radix,
            },
            reserve_percent: 0,
            ..SchedulerConfig::default()
        }
    }

    /// Which prompts are submitted before the scheduler runs dry, in order; the last round's answers count.
    fn rounds(&self) -> Vec<Vec<usize>> {
        let all: Vec<usize> = (0..self.prompts.len()).collect();
        match self.variant {
            Variant::Alone => all.into_iter().map(|i| vec![i]).collect(),
            Variant::Together | Variant::SmallPool => vec![all],
            Variant::TwiceCached => vec![all.clone(), all],
        }
    }

    fn generate<R: Runner>(
        &self,
        scheduler: &mut Scheduler,
        runner: &mut R,
        (steps_max, mut told): (usize, Option<Told<'_>>),
    ) -> Result<Vec<Vec<TokenId>>> {
        let mut texts = vec![Vec::new(); self.prompts.len()];
        let mut id = 0;
        for round in self.rounds() {
            let first = id;
            for &prompt in &round {
                let sampling = SamplingParams {
                    max_tokens: Some(self.tokens as u32),
                    ignore_eos: true,
                    ..SamplingParams::default()
                };
                let request = Request::new(RequestId(id), self.prompts[prompt].clone(), sampling);
                let refused = |refusal: lockstep_core::Refusal| VerifyError::Invalid(refusal.message);
                scheduler.submit(request, 0).map_err(refused)?;
                texts[prompt].clear();
                id += 1;
            }
            run_dry(scheduler, runner, (steps_max, told.as_mut()), |request, token| {
                texts[round[(request.0 - first) as usize]].push(token);
            })?;
        }
        Ok(texts)
    }
}

/// In a pipeline: who tells all ranks what was sampled, and through what.
type Told<'a> = (TokenSource, &'a mut (dyn ProcessGroup + 'static));

/// Steps until no request is left, with up to `steps_max` of them in flight. **Collective: all
/// ranks, same scheduler.**
fn run_dry<R: Runner>(
    scheduler: &mut Scheduler,
    runner: &mut R,
    (steps_max, mut told): (usize, Option<&mut Told<'_>>),
    mut take: impl FnMut(RequestId, TokenId),
) -> Result<()> {
    let (mut plan, mut tokens, mut events) = (StepPlan::new(), Vec::new(), Vec::new());
    let mut in_flight = 0;
    while scheduler.has_work() || in_flight > 0 {
        let planned = scheduler.plan_into(&mut plan);
        if planned {
            runner.launch(&plan)?;
            in_flight += 1;
        }
        if in_flight == 0 {
            return Err(VerifyError::Invalid("the scheduler has requests and plans no step".into()));
        }
        if planned && in_flight < steps_max {
            continue;
        }
        let step = runner.collect(&mut tokens)?;
        in_flight -= 1;
        if let Some((source, replica)) = told.as_deref_mut() {
            let sampled = scheduler.in_flight().next().map_or(0, |(_, tokens)| tokens);
            let shape = StepShape { tokens: sampled, has_logprobs: false };
            source.share(*replica, shape, &mut tokens, &mut Vec::new())?;
            // A step that samples nothing has ended everywhere, too.
            replica.barrier(Patience::Idle)?;
        }
        scheduler.complete(step, &tokens);
        scheduler.take_events(&mut events);
        for event in events.drain(..) {
            if let Event::Token { id, token, .. } = event {
                take(id, token);
            }
        }
    }
    Ok(())
}
