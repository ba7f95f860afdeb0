//! `lockstep verify`: are the answers the same at every tp size, and however a prompt comes through?
//!
//! | file | holds |
//! |---|---|
//! | [`subject`] | what is verified: where each rank's weights come from |
//! | [`group`] | a rank group as threads over the same shared memory that rank processes use |
//! | [`forward`] | teacher-forced logits under different schedules, and the layers between |
//! | [`greedy`] | greedy text through the server's own scheduler, runner and sampler |
//! | [`compare`] | two runs side by side: errors, agreement, first difference, promise |
//! | [`report`] | the findings as text |
//!
//! **Invariants:** every run goes through the code that serves (loader, decoder, collectives, scheduler, sampler);
//! what is promised bit-equal in `docs/architecture.md`, "Numbers", is required bit-equal here; a run that fails is a
//! finding, not a crash.

pub mod compare;
pub mod forward;
pub mod greedy;
pub mod group;
pub mod report;
pub mod subject;

pub use compare::{Comparison, Promise};
pub use subject::{Subject, WholeSource};

use forward::{Forward, Logits, Schedule};
use greedy::Greedy;
use group::Group;
use lockstep_core::limits::K_LEAVES;
use lockstep_core::{DType, ParallelInfo, TokenId};
use serde::Serialize;

/// Why nothing could be verified, or one run failed.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// A model that cannot be loaded or cut.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] lockstep_backend::BackendError),
    /// The group failed.
    #[error(transparent)]
    Collective(#[from] lockstep_comm::collective::CollectiveError),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] lockstep_engine::EngineError),
    /// A rank thread panicked.
    #[error("rank {0} panicked")]
    Panicked(usize),
    /// What was asked for makes no sense.
    #[error("{0}")]
    Invalid(String),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, VerifyError>;

/// What to verify.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tp sizes; the first is the reference of the others.
    pub tp_sizes: Vec<usize>,
    /// Prompts, each of at least one token.
    pub prompts: Vec<Vec<TokenId>>,
    /// Greedy tokens after each prompt.
    pub tokens: usize,
    /// Threads of each rank.
    pub threads: usize,
    /// `--dtype`.
    pub dtype: Option<DType>,
    /// Look for the first layer that differs.
    pub bisect: bool,
}

/// Everything that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One per pair of runs, in the order they ran.
    pub comparisons: Vec<Comparison>,
    /// Where runs part, with `bisect`.
    pub first_layers: Vec<String>,
}

impl Report {
    /// Whether every promise was kept.
    pub fn passed(&self) -> bool {
        self.comparisons.iter().all(|c| c.passed)
    }
}

/// Most positions of a sequence whose logits are compared, the last ones included.
const POSITIONS_MAX: usize = 48;
/// Chunk of the chunked run: neither a divisor of pages nor of attention segments.
const CHUNK: usize = 7;
/// Page size of the run with odd pages.
const ODD_PAGE: usize = 3;

/// Runs all comparisons; `progress` hears what is about to run.
pub fn verify(subject: &dyn Subject, options: &Options, progress: &dyn Fn(&str)) -> Result<Report> {
    let &[reference, ref others @ ..] = options.tp_sizes.as_slice() else {
        return Err(VerifyError::Invalid("no tp size to verify".into()));
    };
    if options.prompts.iter().any(Vec::is_empty) || options.prompts.is_empty() {
        return Err(VerifyError::Invalid("verify needs prompts of at least one token each".into()));
    }
    let run = Run { subject, options, progress };
    let texts = run.greedy(reference, greedy::Variant::Alone)?;
    let sequences: Vec<Vec<TokenId>> =
        options.prompts.iter().zip(&texts).map(|(p, t)| [&p[..], t].concat()).collect();
    let base = run.logits(reference, &sequences, Schedule::whole())?;
    let mut report = Report { comparisons: Vec::new(), first_layers: Vec::new() };
    for &tp in others {
        let promise = promise_between(reference, tp);
        let what = format!("tp {tp} against tp {reference}");
        let logits = run.logits(tp, &sequences, Schedule::whole());
        let differs = report.add(compare::logits(&what, promise, &base, logits));
        if differs && options.bisect {
            report.first_layers.extend(run.first_layer(reference, tp, &sequences, promise));
        }
        let what = format!("text at tp {tp} against tp {reference}");
        let other = run.greedy(tp, greedy::Variant::Alone);
        report.add(compare::texts(&what, promise, &options.prompts, &base, &texts, other));
    }
    run.schedules(reference, &sequences, &base, &mut report)?;
    run.variants(reference, &texts, &base, &mut report)?;
    if let Some(&last) = others.last() {
        let whole = run.logits(last, &sequences, Schedule::whole())?;
        run.schedules(last, &sequences, &whole, &mut report)?;
        run.variants(last, &texts, &base, &mut report)?;
    }
    Ok(report)
}

/// What runs at two tp sizes must have in common.
fn promise_between(a: usize, b: usize) -> Promise {
    let tree = |tp: usize| K_LEAVES.is_multiple_of(tp);
    if tree(a) && tree(b) { Promise::BitEqual } else { Promise::Close }
}

struct Run<'a> {
    subject: &'a dyn Subject,
    options: &'a Options,
    progress: &'a dyn Fn(&str),
}

impl Run<'_> {
    fn group(&self, tp: usize) -> Group<'_> {
        Group { subject: self.subject, tp, threads: self.options.threads, dtype: self.options.dtype }
    }

    fn logits(&self, tp: usize, sequences: &[Vec<TokenId>], schedule: Schedule) -> Result<Logits> {
        (self.progress)(&format!("logits at tp {tp}, {}", schedule.words()));
        let forward = Forward { sequences, schedule, positions_max: POSITIONS_MAX };
        forward.logits(&self.group(tp))
    }

    fn greedy(&self, tp: usize, variant: greedy::Variant) -> Result<Vec<Vec<TokenId>>> {
        (self.progress)(&format!("text at tp {tp}, {}", variant.words()));
        let greedy = Greedy { prompts: &self.options.prompts, tokens: self.options.tokens, variant };
        greedy.texts(&self.group(tp))
    }

    /// Logits do not depend on chunks, pages, the batch or a cached prefix; `whole` are those without any.
    fn schedules(
        &self,
        tp: usize,
        sequences: &[Vec<TokenId>],
        whole: &Logits,
        report: &mut Report,
    ) -> Result<()> {
        let schedules = [
            Schedule { chunk: CHUNK, ..Schedule::whole() },
            Schedule { page_size: ODD_PAGE, ..Schedule::whole() },
            Schedule { batched: true, chunk: CHUNK, ..Schedule::whole() },
            Schedule { cached: true, ..Schedule::whole() },
        ];
        for schedule in schedules {
            let what = format!("tp {tp}, {} against whole prompts alone", schedule.words());
            let other = self.logits(tp, sequences, schedule);
            report.add(compare::logits(&what, Promise::BitEqual, whole, other));
        }
        Ok(())
    }

    /// Text does not depend on the batch, the prefix cache or a pool that is too small.
    fn variants(&self, tp: usize, texts: &[Vec<TokenId>], base: &Logits, report: &mut Report) -> Result<()> {
        let promise = promise_between(self.options.tp_sizes[0], tp);
        for variant in [greedy::Variant::Together, greedy::Variant::TwiceCached, greedy::Variant::SmallPool] {
            let what = format!("text at tp {tp}, {} against alone", variant.words());
            let other = self.greedy(tp, variant);
            report.add(compare::texts(&what, promise, &self.options.prompts, base, texts, other));
        }
        Ok(())
    }

    /// The first place where the residual streams of two tp sizes part, in words.
    fn first_layer(
        &self,
        a: usize,
        b: usize,
        sequences: &[Vec<TokenId>],
        promise: Promise,
    ) -> Option<String> {
        (self.progress)(&format!("layers at tp {a} and {b}"));
        let forward = Forward { sequences, schedule: Schedule::whole(), positions_max: POSITIONS_MAX };
        let layers = |tp| forward.layers(&self.group(tp));
        match (layers(a), layers(b)) {
            (Ok(left), Ok(right)) => compare::first_layer(b, promise, &left, &right),
            (Err(error), _) | (_, Err(error)) => Some(format!("the layers cannot be compared: {error}")),
        }
    }
}

impl Report {
    /// Whether the runs differed at all.
    fn add(&mut self, comparison: Comparison) -> bool {
        let differs = !comparison.passed || comparison.first_difference.is_some();
        self.comparisons.push(comparison);
        differs
    }
}

/// The rank at `rank` of a tp group.
fn parallel(rank: usize, tp: usize) -> ParallelInfo {
    ParallelInfo::tensor_parallel(rank, tp)
}
