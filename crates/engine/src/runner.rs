//! Runs planned steps on a device: plan → forward → logits → tokens.
//!
//! Where the device chooses tokens itself ([`Backend::can_choose`]) a step is only queued: the next one finds
//! them there, the host fetches them later. Steps of one token a row are replayed from recordings where the
//! device has them ([`crate::recordings`]).

use crate::grammars::PreparedCount;
use crate::inputs::Inputs;
use crate::logits::{Chosen, LogitsReader, changes_logits, reports_nothing};
use crate::masks;
use crate::recordings::Recordings;
use crate::stage_times::StageTimes;
use crate::{EngineError, Result};
use lockstep_backend::{Backend, CHOSEN_BIT, RowChoice};
use lockstep_comm::collective::Collective;
use lockstep_comm::watch::{Activity, Mark};
use lockstep_core::{Grammar, NO_TOKEN, PageId, RequestId, StepId, TokenId};
use lockstep_model::{Decoder, Workspace};
use lockstep_scheduler::{PlanRow, StepPlan};
use lockstep_wire::{StepLogprobs, Vocabulary};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What the rank loop needs of a device. The simulator has its own.
pub trait Runner {
    /// Queues one planned step. Rows whose input is the token of an earlier step find it on the
    /// device. **Collective: all ranks, same plan.**
    fn launch(&mut self, plan: &StepPlan) -> Result<()>;
    /// Waits for the oldest launched step; its tokens replace `tokens`, one per sampling row. On a pipeline stage that does
    /// not sample they are none.
    fn collect(&mut self, tokens: &mut Vec<TokenId>) -> Result<StepId>;
    /// Whether steps run after [`launch`](Self::launch) has returned, so that a second one may be launched before the
    /// first has ended.
    fn runs_behind(&self) -> bool {
        false
    }
    /// Whether [`collect`](Self::collect) would not wait; asked of devices that run behind.
    fn step_has_ended(&mut self) -> bool {
        true
    }
    /// How long the device computed the step collected last, without what it waited for the stage before. Only stages of
    /// a pipeline ask.
    fn computed(&self) -> Duration {
        Duration::ZERO
    }
    /// All ranks know what the step collected last came to.
    fn step_is_over(&mut self) {}
    /// Where there are several stages: how long this one computed so far.
    fn stage_times(&self) -> Option<StageTimes> {
        None
    }
    /// Appends the log-probabilities of the step collected last, of requests that asked for them. Only the
    /// primary's runner need have any.
    fn take_logprobs(&mut self, _into: &mut Vec<(RequestId, StepLogprobs)>) {}
    /// The model's vocabulary, before the first request with a grammar.
    fn set_vocabulary(&mut self, _vocabulary: Vocabulary) {}
    /// Begins to prepare a grammar, beside the steps. Requests with it are planned only once all ranks have
    /// prepared it.
    fn prepare_grammar(&mut self, _grammar: Grammar) {}
    /// How many grammars are prepared, of those that [`prepare_grammar`](Self::prepare_grammar) was called with;
    /// the default has nothing to prepare.
    fn grammars_prepared(&mut self) -> u64 {
        u64::MAX
    }
    /// Makes the content of freed pages unusable, so that whoever still reads them is found out. Called
    /// between plan and launch, and only when the scheduler tracks freed pages; they may already belong to
    /// a row of the plan about to be launched. Does nothing unless implemented.
    fn poison(&mut self, _freed: &[PageId]) -> Result<()> {
        Ok(())
    }
}

/// The runner of one rank: a decoder shard, its KV pool and, on the last stage, the sampler.
pub struct ModelRunner<B: Backend> {
    model: Model<B>,
    recordings: Recordings<B>,
    logits: LogitsReader,
    inputs: Inputs,
    /// How the rows of the step being launched choose, where the device does.
    choices: Vec<RowChoice>,
    launched: VecDeque<Launched>,
    /// Tokens of the newest collected step, which a step planned before it was read may use.
    newest: Launched,
    spare: Vec<Chosen>,
    /// Where others see which part of a step it is at.
    mark: Option<Mark>,
    /// Of the step collected last.
    computed: Duration,
}

/// What a forward pass needs.
pub(crate) struct Model<B: Backend> {
    pub(crate) backend: B,
    pub(crate) collective: Box<dyn Collective>,
    /// Where there are several stages.
    pub(crate) pipeline: Option<Box<dyn Collective>>,
    pub(crate) decoder: Decoder<B>,
    pub(crate) cache: B::KvCache,
    pub(crate) work: Workspace<B>,
    pub(crate) tokens_max: usize,
    /// Time that calls took to have what the stage before passes on: on a CPU until it was there.
    pub(crate) waited: Duration,
}

/// Parts of a [`ModelRunner`] that the rank builds first.
pub struct RunnerParts<B: Backend> {
    /// The device.
    pub backend: B,
    /// The TP group's tensors.
    pub collective: Box<dyn Collective>,
    /// Where there are several stages: the ranks, one a stage, that pass activations on.
    pub pipeline: Option<Box<dyn Collective>>,
    /// This rank's shard.
    pub decoder: Decoder<B>,
    /// This rank's KV pool.
    pub cache: B::KvCache,
    /// Activations.
    pub work: Workspace<B>,
    /// Tokens of the largest step.
    pub tokens_max: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Rows of the vocabulary that exist.
    pub vocab_size: usize,
    /// Tokens masked while `min_tokens` is not reached.
    pub eos_tokens: Vec<TokenId>,
    /// Whether log-probabilities are computed for whoever asked; true on one rank of those that sample.
    pub reports_logprobs: bool,
}

/// A rank's TP group and, where there are several stages, its pipeline.
pub type DataPlane = (Box<dyn Collective>, Option<Box<dyn Collective>>);

/// What one launched step chose.
struct Launched {
    step: StepId,
    chosen: Chosen,
    /// Its tokens are on the device, and on their way from there.
    is_on_device: bool,
    /// Of those, rows whose next token may depend on this one, and the numbers of their tokens.
    followed: Vec<(usize, PlanRow)>,
    /// How long its launch took, without waiting: where operations run at once, all of it.
    took: Duration,
}

impl Launched {
    fn without_tokens(step: StepId) -> Self {
        Self {
            step,
            chosen: Chosen::default(),
            is_on_device: false,
            followed: Vec::new(),
            took: Duration::ZERO,
        }
    }

    /// Waits for the tokens, if the device has not given them yet.
    fn arrive<B: Backend>(&mut self, backend: &mut B, logits: &mut LogitsReader) -> Result<()> {
        if std::mem::take(&mut self.is_on_device) {
            backend.take_chosen(&mut self.chosen.tokens)?;
            logits.arrived(&std::mem::take(&mut self.followed), &mut self.chosen.tokens)?;
        }
        Ok(())
    }
}

impl<B: Backend> ModelRunner<B> {
    /// A runner over loaded parts.
    pub fn new(parts: RunnerParts<B>) -> Self {
        let shard = parts.decoder.vocab_shard();
        let logits = LogitsReader::new(shard, parts.vocab_size, parts.eos_tokens, parts.reports_logprobs);
        let RunnerParts {
            backend, collective, pipeline, decoder, cache, work, tokens_max, page_size, ..
        } = parts;
        Self {
            model: Model {
                backend,
                collective,
                pipeline,
                decoder,
                cache,
                work,
                tokens_max,
                waited: Duration::ZERO,
            },
            recordings: Recordings::default(),
            logits,
            inputs: Inputs::new(page_size),
            choices: Vec::new(),
            launched: VecDeque::with_capacity(2),
            newest: Launched::without_tokens(StepId::MAX),
            spare: Vec::new(),
            mark: None,
            computed: Duration::ZERO,
        }
    }

    /// Shows on the watch page, besides what the rank loop shows, when the host waits for logits and chooses from them.
    pub fn watched(self, mark: Option<Mark>) -> Self {
        Self { mark, ..self }
    }

    /// Gives back what was made once for all requests; pool and activations end here. For callers that run one
    /// model under several schedules.
    pub fn into_device(self) -> (B, Decoder<B>, DataPlane) {
        let Model { backend, decoder, collective, pipeline, .. } = self.model;
        (backend, decoder, (collective, pipeline))
    }

    /// Records decode steps of up to `rows_max` rows, where the device repeats recordings, so that none of
    /// them has to be recorded while requests wait; gives how many sizes there are. Meanwhile the device finds out how it
    /// is fastest at them and at steps of `prompt_rows` tokens. `on_progress` hears (done, total).
    /// **Collective: all ranks of the TP group.**
    pub fn record(
        &mut self,
        rows_max: usize,
        prompt_rows: usize,
        on_progress: &dyn Fn(usize, usize),
    ) -> Result<usize> {
        self.model.backend.tune(Some(prompt_rows)).map_err(EngineError::from)?;
        let recorded = self.recordings.prepare(&mut self.model, &mut self.inputs, rows_max, on_progress)?;
        self.model.backend.tune(None).map_err(EngineError::from)?;
        Ok(recorded)
    }

    /// The number of prepared grammars, for another thread; `None` on a stage that does not sample.
    pub(crate) fn prepared_count(&mut self) -> Option<PreparedCount> {
        self.model.samples().then(|| self.logits.grammars().count())
    }

    /// Whether decode steps are replayed from recordings, where the device has them; they are unless told.
    pub fn set_recording(&mut self, is_on: bool) {
        self.recordings.set(is_on);
    }

    /// Whether the device chooses all tokens of a step (not those with log-probabilities); if so, how, in `self.choices`.
    fn device_chooses(&mut self, plan: &StepPlan) -> bool {
        let Self { model, inputs, choices, .. } = self;
        choices.clear();
        for row in inputs.logit_rows().iter().map(|logits| &plan.rows[logits.row]) {
            let choice = RowChoice::new(&row.sampling, row.output_index);
            if !reports_nothing(row) || !model.backend.can_choose(&choice) {
                return false;
            }
            choices.push(choice);
        }
        !choices.is_empty()
    }
}

/// The token sampled at `index` of step `step`, if that step is launched or the newest collected. Where none could be
/// chosen its request is over, and what the row computes is thrown away: any token will do.
fn sampled(launched: &VecDeque<Launched>, newest: &Launched, step: StepId, index: u32) -> Option<TokenId> {
    let holder = launched.iter().find(|l| l.step == step).or((newest.step == step).then_some(newest))?;
    match holder.is_on_device {
        // The device keeps the tokens of the step it was given last only.
        true => launched.back().is_some_and(|last| last.step == step).then_some(CHOSEN_BIT | index),
        false => holder.chosen.tokens.get(index as usize).map(|&token| match token {
            NO_TOKEN => StepPlan::PLACEHOLDER,
            token => token,
        }),
    }
}

impl<B: Backend> Runner for ModelRunner<B> {
    fn launch(&mut self, plan: &StepPlan) -> Result<()> {
        // Only stages of a pipeline are asked how long they computed.
        if self.model.pipeline.is_none() {
            let launched = self.queue_step(plan)?;
            self.launched.push_back(launched);
            return Ok(());
        }
        let (from, waited) = (Instant::now(), self.model.waited);
        let mut launched = self.queue_step(plan)?;
        launched.took = from.elapsed().saturating_sub(self.model.waited - waited);
        self.launched.push_back(launched);
        self.model.backend.end_step().map_err(EngineError::from)
    }

    fn poison(&mut self, freed: &[PageId]) -> Result<()> {
        self.model.backend.poison(&mut self.model.cache, freed);
        Ok(())
    }

    fn collect(&mut self, tokens: &mut Vec<TokenId>) -> Result<StepId> {
        let mut oldest = self
            .launched
            .pop_front()
            .ok_or_else(|| EngineError::Internal("no step is in flight, so none can be collected".into()))?;
        oldest.arrive(&mut self.model.backend, &mut self.logits)?;
        if self.model.pipeline.is_some() {
            self.computed =
                self.model.backend.await_step().map_err(EngineError::from)?.unwrap_or(oldest.took);
        }
        tokens.clear();
        tokens.extend_from_slice(&oldest.chosen.tokens);
        let step = oldest.step;
        let previous = std::mem::replace(&mut self.newest, oldest);
        self.spare.push(previous.chosen);
        Ok(step)
    }

    fn runs_behind(&self) -> bool {
        self.model.backend.runs_behind()
    }

    fn step_has_ended(&mut self) -> bool {
        self.model.backend.step_has_ended()
    }

    fn computed(&self) -> Duration {
        self.computed
    }

    fn set_vocabulary(&mut self, vocabulary: Vocabulary) {
        self.logits.set_vocabulary(vocabulary);
    }

    fn prepare_grammar(&mut self, grammar: Grammar) {
        self.logits.grammars().prepare(grammar);
    }

    fn grammars_prepared(&mut self) -> u64 {
        self.logits.grammars().prepared()
    }

    fn take_logprobs(&mut self, into: &mut Vec<(RequestId, StepLogprobs)>) {
        into.append(&mut self.newest.chosen.logprobs);
    }
}

impl<B: Backend> ModelRunner<B> {
    /// Queues the step of `plan`, choice included.
    fn queue_step(&mut self, plan: &StepPlan) -> Result<Launched> {
        let (launched, newest) = (&self.launched, &self.newest);
        self.inputs.fill(plan, |step, index| sampled(launched, newest, step, index))?;
        if !self.model.samples() {
            self.recordings.step(&mut self.model, &mut self.inputs)?;
            return Ok(Launched::without_tokens(plan.step));
        }
        let is_on_device = self.device_chooses(plan);
        // What a row changes depends on the tokens before it. Those that the device still keeps to itself are there long
        // before this step's logits: they are taken once the forward pass is queued.
        let is_late = self.launched.iter().any(|step| step.is_on_device)
            && plan.rows.iter().any(|row| row.sampling.needs_history());
        if is_late {
            self.recordings.step(&mut self.model, &mut self.inputs)?;
            self.take_from_device()?;
        }
        let (grammars, masks) = self.logits.begin(plan);
        std::thread::scope(|scope| {
            masks::compute(scope, grammars, masks);
            if is_late { Ok(()) } else { self.recordings.step(&mut self.model, &mut self.inputs) }
        })?;
        let mut chosen = self.spare.pop().unwrap_or_default();
        chosen.clear();
        let followed = match is_on_device {
            true => self.choose_on_device(plan)?,
            false => {
                self.choose_on_host(plan, &mut chosen)?;
                Vec::new()
            }
        };
        Ok(Launched { chosen, is_on_device, followed, ..Launched::without_tokens(plan.step) })
    }

    /// Waits for the tokens of all steps in flight that the device chose.
    fn take_from_device(&mut self) -> Result<()> {
        let Self { launched, model, logits, .. } = self;
        launched.iter_mut().try_for_each(|step| step.arrive(&mut model.backend, logits))
    }

    /// Queues the choice by `self.choices`; gives the rows whose next token may depend on what is chosen.
    fn choose_on_device(&mut self, plan: &StepPlan) -> Result<Vec<(usize, PlanRow)>> {
        let rows = self.inputs.logit_rows();
        self.logits.prepare_changes(plan, rows)?;
        let changes = self.logits.changes(plan, rows)?;
        let choice = self.logits.choice(&self.choices, &changes);
        let Model { backend, collective, work, .. } = &mut self.model;
        backend.choose(&**collective, work.logits_mut(), &choice)?;
        let followed = rows.iter().map(|row| &plan.rows[row.row]).enumerate();
        Ok(followed.filter(|(_, row)| changes_logits(row)).map(|(at, row)| (at, row.clone())).collect())
    }

    /// Waits for the step's logits and chooses from them.
    fn choose_on_host(&mut self, plan: &StepPlan, chosen: &mut Chosen) -> Result<()> {
        let Model { backend, collective, work, .. } = &mut self.model;
        let (logits, rows, count) = (work.logits(), self.inputs.logit_rows(), self.inputs.logit_count());
        if count == 0 {
            return Ok(());
        }
        let enter = |activity| self.mark.iter().for_each(|mark| mark.enter(activity, plan.step));
        enter(Activity::Wait);
        let local = backend.read(logits, count)?;
        enter(Activity::Sample);
        let finite = count * self.logits.local_vocab();
        if cfg!(debug_assertions) && local.iter().take(finite).any(|l| l.is_nan()) {
            return Err(EngineError::Internal(format!(
                "logits of step {} are not numbers: a freed page was read, or the weights are broken",
                plan.step
            )));
        }
        self.logits.choose(&local, plan, rows, &**collective, chosen)
    }
}
