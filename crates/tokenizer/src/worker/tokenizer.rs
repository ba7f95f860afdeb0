//! One tokenizer: requests from the api to the primary of the replica they are meant for, in two lanes.
//!
//! A prompt of 100 KB keeps a core busy for tens of milliseconds, a short one for tens of microseconds. So jobs
//! of [`LONG_BYTES_MIN`] and more have a thread of their own, and short ones never wait behind them. The thread
//! of the loop takes messages in and does the short jobs; what both lanes send leaves through one lock.
//!
//! **Invariants**
//! - Each lane is first come, first served. The choices of one prompt are equally long, so they stay in order.
//! - A request is in [`Shared::open`] from its arrival to its submission. Its abort takes it out (rank 0 then
//!   never hears of it) or follows the submission through the same link; which of the two is decided under the
//!   lock, so an abort never overtakes its request, whatever the lane.
//! - A replica that was started again hears nothing that was meant for the one before: the api has aborted all of
//!   that before it announces the new one.

use super::encoder::Encoder;
use super::{Inbox, Outbox, Reconnect, TokenizerLinks};
use crate::error::TokenizerError;
use crate::model::TextModel;
use lockstep_core::{Refusal, RequestId};
use lockstep_wire::{GenerateRequest, Prompt, SubmitRequest, TextQuestion, ToApi, ToScheduler, ToTokenizer};
use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, mpsc};

/// Messages taken in before each short job, so that a flood of them cannot hold up the jobs.
const TAKE_IN_MAX: usize = 4096;
/// Text of a job that goes to the long lane, in bytes; about five milliseconds of work.
const LONG_BYTES_MIN: usize = 16 << 10;

/// What a tokenizer has to do.
enum Job {
    Generate(Box<GenerateRequest>),
    Ask { query: u64, question: Box<TextQuestion> },
}

impl Job {
    /// Bytes of text to be tokenized.
    fn text_bytes(&self) -> usize {
        match self {
            Job::Generate(request) => prompt_bytes(&request.prompt),
            Job::Ask { question, .. } => match &**question {
                TextQuestion::Tokenize { prompt, .. } => prompt_bytes(prompt),
                TextQuestion::Detokenize { tokens, .. } => tokens.len(),
            },
        }
    }
}

fn prompt_bytes(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Chat(chat) => chat.messages_json.len() + chat.tools_json.as_deref().map_or(0, str::len),
        // Only checked.
        Prompt::Tokens(_) => 0,
    }
}

/// What the lanes share: where their results go, and which requests are still wanted.
struct Shared<S, A> {
    /// By replica.
    schedulers: Vec<Way<S>>,
    reconnect: Reconnect<S>,
    api: A,
    /// Requests that no primary has heard of. Only ever asked for an id: its order is not stable.
    open: HashSet<RequestId>,
}

/// The way to a replica's primary.
struct Way<S> {
    scheduler: S,
    is_vocabulary_sent: bool,
}

impl<S> Way<S> {
    fn new(scheduler: S) -> Self {
        Self { scheduler, is_vocabulary_sent: false }
    }
}

impl<S: Outbox<ToScheduler>, A: Outbox<ToApi>> Shared<S, A> {
    /// Panics on a replica that there is not: the api knows how many there are.
    fn way(&mut self, replica: usize) -> &mut Way<S> {
        let replicas = self.schedulers.len();
        let way = self.schedulers.get_mut(replica);
        way.unwrap_or_else(|| panic!("invariant: replica {replica} is one of {replicas}"))
    }

    /// Sends what came of a request, unless it was aborted meanwhile.
    fn conclude(
        &mut self,
        model: &TextModel,
        (id, replica): (RequestId, usize),
        submission: Result<SubmitRequest, Refusal>,
    ) -> Result<(), TokenizerError> {
        if !self.open.remove(&id) {
            return Ok(());
        }
        match submission {
            Ok(submit) => {
                tracing::debug!(request = %id, replica, prompt_tokens = submit.prompt.len(), "tokenized");
                let way = self.way(replica);
                if submit.sampling.grammar.is_some() && !way.is_vocabulary_sent {
                    way.is_vocabulary_sent = true;
                    way.scheduler.send(&ToScheduler::Vocabulary(Box::new(model.vocabulary())))?;
                }
                way.scheduler.send(&ToScheduler::Submit(Box::new(submit)))
            }
            Err(refusal) => {
                tracing::debug!(request = %id, refusal.status, refusal.message, "refused");
                self.api.send(&ToApi::Refused { id, refusal })
            }
        }
    }

    /// Withdraws a request, or passes its abort on.
    fn abort(&mut self, id: RequestId, replica: usize) -> Result<(), TokenizerError> {
        tracing::debug!(request = %id, "aborted");
        match self.open.remove(&id) {
            true => Ok(()),
            false => self.way(replica).scheduler.send(&ToScheduler::Abort(id)),
        }
    }

    /// Turns to a replica's new primary.
    fn turn(&mut self, replica: usize, inbox: &str) -> Result<(), TokenizerError> {
        let scheduler = (self.reconnect)(inbox)?;
        *self.way(replica) = Way::new(scheduler);
        Ok(())
    }
}

/// One lane: an encoder and the way out.
struct Lane<'a, S, A> {
    model: &'a TextModel,
    encoder: Encoder<'a>,
    shared: &'a Mutex<Shared<S, A>>,
}

impl<'a, S: Outbox<ToScheduler>, A: Outbox<ToApi>> Lane<'a, S, A> {
    fn new(model: &'a TextModel, shared: &'a Mutex<Shared<S, A>>) -> Self {
        Self { model, encoder: Encoder::new(model), shared }
    }

    fn shared(&self) -> MutexGuard<'a, Shared<S, A>> {
        self.shared.lock().expect("invariant: nothing panics while holding it")
    }

    fn run(&mut self, job: Job) -> Result<(), TokenizerError> {
        match job {
            Job::Generate(request) => {
                let (id, replica) = (request.id, request.replica);
                if !self.shared().open.contains(&id) {
                    return Ok(());
                }
                let submission = self.encoder.submission(*request);
                self.shared().conclude(self.model, (id, replica), submission)
            }
            Job::Ask { query, question } => {
                let result = self.encoder.answer(&question);
                self.shared().api.send(&ToApi::TextAnswered { query, result })
            }
        }
    }
}

/// Tokenizes until `Shutdown`; then everything received before it is submitted, refused or answered.
pub fn run_tokenizer<I, S, A>(model: &TextModel, links: TokenizerLinks<I, S, A>) -> Result<(), TokenizerError>
where
    I: Inbox<ToTokenizer>,
    S: Outbox<ToScheduler> + Send,
    A: Outbox<ToApi> + Send,
{
    let TokenizerLinks { inbox, schedulers, reconnect, api } = links;
    let schedulers = schedulers.into_iter().map(Way::new).collect();
    let shared = Mutex::new(Shared { schedulers, reconnect, api, open: HashSet::new() });
    std::thread::scope(|scope| {
        let (long, jobs) = mpsc::channel::<Job>();
        let mut lane = Lane::new(model, &shared);
        let long_lane = std::thread::Builder::new()
            .name("tokenizer-long".into())
            .spawn_scoped(scope, move || jobs.into_iter().try_for_each(|job| lane.run(job)))
            .map_err(TokenizerError::Thread)?;
        let mut desk = Desk { short: VecDeque::new(), long, is_shutting_down: false };
        let mut lane = Lane::new(model, &shared);
        let outcome = loop {
            match desk.step(&inbox, &mut lane) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) => {
                    // The process ends: what still waits in the long lane is not worth its time.
                    lane.shared().open.clear();
                    break Err(error);
                }
            }
        };
        // Closes the long lane behind its last job.
        drop(desk);
        let long_outcome = long_lane.join().unwrap_or(Err(TokenizerError::Panicked("tokenizer-long")));
        outcome.and(long_outcome)
    })
}

/// Where messages come in: short jobs wait here, long ones go on.
struct Desk {
    short: VecDeque<Job>,
    long: mpsc::Sender<Job>,
    is_shutting_down: bool,
}

impl Desk {
    /// Takes in what has come, does one short job; waits when there is nothing. False when shut down and done.
    fn step<I, S, A>(&mut self, inbox: &I, lane: &mut Lane<'_, S, A>) -> Result<bool, TokenizerError>
    where
        I: Inbox<ToTokenizer>,
        S: Outbox<ToScheduler>,
        A: Outbox<ToApi>,
    {
        if self.short.is_empty() {
            if self.is_shutting_down {
                return Ok(false);
            }
            if !self.take_in(inbox.recv()?, lane)? {
                return Ok(false);
            }
        }
        for _ in 0..TAKE_IN_MAX {
            let Some(message) = inbox.try_recv()? else { break };
            if !self.take_in(message, lane)? {
                return Ok(false);
            }
        }
        if let Some(job) = self.short.pop_front() {
            lane.run(job)?;
        }
        Ok(true)
    }

    /// False when the long lane has ended; why, it says itself.
    fn take_in<S, A>(
        &mut self,
        message: ToTokenizer,
        lane: &mut Lane<'_, S, A>,
    ) -> Result<bool, TokenizerError>
    where
        S: Outbox<ToScheduler>,
        A: Outbox<ToApi>,
    {
        let job = match message {
            ToTokenizer::Generate(request) => {
                lane.shared().open.insert(request.id);
                Job::Generate(request)
            }
            ToTokenizer::AskText { query, question } => Job::Ask { query, question },
            ToTokenizer::Abort { id, replica } => {
                lane.shared().abort(id, replica)?;
                return Ok(true);
            }
            ToTokenizer::ReplicaStarted { replica, inbox } => {
                lane.shared().turn(replica, &inbox)?;
                return Ok(true);
            }
            ToTokenizer::Shutdown => {
                self.is_shutting_down = true;
                return Ok(true);
            }
        };
        if job.text_bytes() >= LONG_BYTES_MIN {
            return Ok(self.long.send(job).is_ok());
        }
        self.short.push_back(job);
        Ok(true)
    }
}
