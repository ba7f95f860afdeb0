//! Which runs, in which order: the reference, then every other place; at the first and at the last place of each device
//! also every schedule and every form.

use crate::compare;
use crate::forward::{Forward, Layers, Logits, POSITIONS_MAX, Schedule, Unsound};
use crate::greedy::{Greedy, Variant};
use crate::group::{Group, Spec};
use crate::memory::{self, RunSizes};
use crate::place::{Device, Form, Place};
use crate::{Comparison, Options, Promise, Report, Result, Subject, VerifyError};
use lockstep_core::{ModelConfig, ParallelInfo, TokenId};
use std::sync::Arc;

/// Chunk of the chunked run: neither a divisor of pages nor of attention segments.
const CHUNK: usize = 7;

/// Runs all comparisons; `progress` hears what is about to run.
///
/// Errors when nothing can be compared: no prompts, too little memory, or a reference that does not run.
pub fn verify(subject: &dyn Subject, options: &Options, progress: &dyn Fn(&str)) -> Result<Report> {
    let at = |device: Device, tp: usize| options.pp_sizes.iter().map(move |&pp| Place { device, tp, pp });
    let on = |&device: &Device| options.tp_sizes.iter().flat_map(move |&tp| at(device, tp));
    let places: Vec<Place> = options.devices.iter().flat_map(on).collect();
    let &[reference, ref others @ ..] = places.as_slice() else {
        return Err(VerifyError::Invalid("no device, tp size and number of stages to verify".into()));
    };
    if options.prompts.iter().any(Vec::is_empty) || options.prompts.is_empty() {
        return Err(VerifyError::Invalid("verify needs prompts of at least one token each".into()));
    }
    memory::check(subject, options, &places)?;
    let config = subject.source(ParallelInfo::SINGLE).config();
    let session = Session { subject, options, progress, config, prompts: Arc::new(options.prompts.clone()) };
    let mut report = Report::default();
    let reference = session.with(reference, |here| here.reference(&mut report))??;
    for (i, &place) in others.iter().enumerate() {
        let is_last_of_device = others.get(i + 1).is_none_or(|next| next.device != place.device);
        session.with(place, |here| match &reference {
            Some(reference) => here.compare(reference, is_last_of_device, &mut report),
            // Nothing can be held against what is no number; whether it is the same here is worth knowing.
            None => drop(here.is_sound(&session.prompts, &mut report)),
        })?;
    }
    Ok(report)
}

/// What all places share.
struct Session<'a> {
    subject: &'a dyn Subject,
    options: &'a Options,
    progress: &'a dyn Fn(&str),
    config: &'a ModelConfig,
    prompts: Arc<Vec<Vec<TokenId>>>,
}

/// What the first place came to.
struct Reference {
    place: Place,
    texts: Vec<Vec<TokenId>>,
    /// Prompts with their texts.
    sequences: Arc<Vec<Vec<TokenId>>>,
    logits: Logits,
    /// For the search for the first layer.
    layers: Option<Layers>,
}

impl Session<'_> {
    fn with<T>(&self, place: Place, body: impl FnOnce(&Here<'_>) -> T) -> Result<T> {
        let longest = self.prompts.iter().map(Vec::len).max().unwrap_or(1);
        let spec = Spec {
            subject: self.subject,
            place,
            threads: self.options.threads,
            gpus: &self.options.gpus,
            positions_max: longest + self.options.tokens + 1,
            sizes: RunSizes::of(self.options),
        };
        Group::with(spec, |group| body(&Here { session: self, place, group }))
    }
}

/// A session at one place, loaded.
struct Here<'a> {
    session: &'a Session<'a>,
    place: Place,
    group: &'a Group,
}

impl Here<'_> {
    /// What the others are held against; `None`, with a finding, when its values are no numbers.
    fn reference(&self, report: &mut Report) -> Result<Option<Reference>> {
        let found = self.unsound(&self.session.prompts)?;
        if let Some(finding) = compare::soundness(&self.place.words(), &Ok(found)) {
            report.comparisons.push(finding);
            return Ok(None);
        }
        let texts = self.texts(Variant::Alone, Form::Eager)?;
        let with_text = |(prompt, text): (&Vec<TokenId>, &Vec<TokenId>)| [&prompt[..], text].concat();
        let sequences = Arc::new(self.session.prompts.iter().zip(&texts).map(with_text).collect());
        let logits = self.logits(&sequences, Schedule::whole())?;
        let layers = self.session.options.bisect.then(|| self.layers(&sequences)).transpose()?;
        let reference = Reference { place: self.place, texts, sequences, logits, layers };
        self.schedules(&reference, &reference.logits, report);
        self.variants(&reference, report);
        self.forms(&reference, &reference.logits, report);
        Ok(Some(reference))
    }

    /// Everything at this place, `thoroughly` with schedules and forms, against the reference.
    fn compare(&self, reference: &Reference, thoroughly: bool, report: &mut Report) {
        if !self.is_sound(&reference.sequences, report) {
            return;
        }
        let promise = self.promise(reference);
        let (here, there) = (self.place.words(), reference.place.words());
        let logits = self.logits(&reference.sequences, Schedule::whole());
        let found = compare::logits(&format!("{here} against {there}"), promise, &reference.logits, &logits);
        // Where the promise was kept, or nothing ran, there is no layer to find.
        let differs = !found.passed && logits.is_ok();
        report.comparisons.push(found);
        if let Some(layers) = reference.layers.as_ref().filter(|_| differs) {
            report.first_layers.push(self.first_layer(&reference.sequences, layers, promise));
        }
        let texts = self.texts(Variant::Alone, Form::Eager);
        self.add_texts(report, &format!("text at {here} against {there}"), promise, reference, &texts);
        if let (true, Ok(logits)) = (thoroughly, &logits) {
            self.schedules(reference, logits, report);
            self.variants(reference, report);
            self.forms(reference, logits, report);
        }
    }

    /// Whether every logit and every residual stream of a run here is a number; if not, or if nothing runs here, that is
    /// a finding.
    fn is_sound(&self, sequences: &Arc<Vec<Vec<TokenId>>>, report: &mut Report) -> bool {
        let finding = compare::soundness(&self.place.words(), &self.unsound(sequences));
        let is_sound = finding.is_none();
        report.comparisons.extend(finding);
        is_sound
    }

    fn unsound(&self, sequences: &Arc<Vec<Vec<TokenId>>>) -> Result<Option<Unsound>> {
        self.say("values", &Schedule::whole().words());
        let forward = self.forward(sequences, Schedule::whole());
        self.group.run(move |rank| rank.unsound(&forward))
    }

    /// Logits do not depend on chunks, pages, the batch or a cached prefix; `whole` are those without any.
    fn schedules(&self, reference: &Reference, whole: &Logits, report: &mut Report) {
        let promise = self.place.promise(self.place, self.session.config);
        let schedules = [
            Schedule { chunk: CHUNK, ..Schedule::whole() },
            Schedule { page_size: self.place.device.unusual_page_size(), ..Schedule::whole() },
            Schedule { batched: true, chunk: CHUNK, ..Schedule::whole() },
            Schedule { cached: true, ..Schedule::whole() },
        ];
        for schedule in schedules {
            let what = format!("{}, {} against whole prompts alone", self.place.words(), schedule.words());
            let other = self.logits(&reference.sequences, schedule);
            report.comparisons.push(compare::logits(&what, promise, whole, &other));
        }
    }

    /// Text does not depend on the batch, the prefix cache or a pool that is too small.
    fn variants(&self, reference: &Reference, report: &mut Report) {
        for variant in [Variant::Together, Variant::TwiceCached, Variant::SmallPool] {
            let what = format!("text at {}, {} against alone", self.place.words(), variant.words());
            let texts = self.texts(variant, Form::Eager);
            self.add_texts(report, &what, self.promise(reference), reference, &texts);
        }
    }

    /// Neither depends on the form in which the device runs a step.
    fn forms(&self, reference: &Reference, whole: &Logits, report: &mut Report) {
        for &form in self.place.device.forms().iter().skip(1) {
            let promise = self.place.promise(self.place, self.session.config);
            let (here, words) = (self.place.words(), form.words());
            // A token a step, as when decoding.
            let schedule = Schedule { chunk: 1, form, ..Schedule::whole() };
            let logits = self.logits(&reference.sequences, schedule);
            let what = format!("{here}, {words} against {}", Form::Eager.words());
            report.comparisons.push(compare::logits(&what, promise, whole, &logits));
            let texts = self.texts(Variant::Together, form);
            let what = format!("text at {here}, {words} against {}", Form::Eager.words());
            self.add_texts(report, &what, self.promise(reference), reference, &texts);
        }
    }

    fn promise(&self, reference: &Reference) -> Promise {
        self.place.promise(reference.place, self.session.config)
    }

    fn add_texts(
        &self,
        report: &mut Report,
        what: &str,
        promise: Promise,
        reference: &Reference,
        texts: &Result<Vec<Vec<TokenId>>>,
    ) {
        let Reference { logits, texts: wanted, .. } = reference;
        let found: Comparison = compare::texts(what, promise, &self.session.prompts, logits, wanted, texts);
        report.comparisons.push(found);
    }

    fn logits(&self, sequences: &Arc<Vec<Vec<TokenId>>>, schedule: Schedule) -> Result<Logits> {
        self.say("logits", &schedule.words());
        let forward = self.forward(sequences, schedule);
        self.group.run(move |rank| rank.logits(&forward))
    }

    fn layers(&self, sequences: &Arc<Vec<Vec<TokenId>>>) -> Result<Layers> {
        self.say("layers", &Schedule::whole().words());
        let forward = self.forward(sequences, Schedule::whole());
        self.group.run(move |rank| rank.layers(&forward))
    }

    fn texts(&self, variant: Variant, form: Form) -> Result<Vec<Vec<TokenId>>> {
        self.say("text", variant.words());
        let greedy = Greedy {
            prompts: Arc::clone(&self.session.prompts),
            tokens: self.session.options.tokens,
            variant,
            form,
        };
        self.group.run(move |rank| rank.texts(&greedy))
    }

    fn forward(&self, sequences: &Arc<Vec<Vec<TokenId>>>, schedule: Schedule) -> Forward {
        // The position before an answer chooses its first token.
        let tail = self.session.options.tokens + 1;
        Forward { sequences: Arc::clone(sequences), schedule, positions_max: POSITIONS_MAX, tail }
    }

    fn say(&self, what: &str, how: &str) {
        (self.session.progress)(&format!("{what} at {}, {how}", self.place.words()));
    }

    /// The first place where the residual streams part from the reference's, in words.
    fn first_layer(&self, sequences: &Arc<Vec<Vec<TokenId>>>, wanted: &Layers, promise: Promise) -> String {
        match self.layers(sequences) {
            Ok(layers) => compare::first_layer(&self.place.words(), promise, wanted, &layers),
            Err(error) => format!("the layers cannot be compared: {error}"),
        }
    }
}
