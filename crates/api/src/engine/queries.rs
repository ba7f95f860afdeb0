//! Questions to the primaries and to the tokenizers that are no requests: numbered, answered once, with a time limit.
//!
//! A question to a process that died ends with the server's own failure, one to a process that is silent with a
//! 503. Nothing has to be taken back when nobody waits any more: the answer is then ignored.

use super::registry::Reply;
use super::{EngineClient, Outbound, ReplicaState, ReplicaStatus, together};
use lockstep_core::{Refusal, TokenId};
use lockstep_wire::{EngineInfo, Prompt, TextAnswer, TextQuestion, ToScheduler, ToTokenizer, Tokenized};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a question waits for rank 0; a step in progress delays the answer.
const SCHEDULER_PATIENCE: Duration = Duration::from_secs(5);
/// How long one waits for a tokenizer; the prompts before it delay the answer.
const TOKENIZER_PATIENCE: Duration = Duration::from_secs(60);

impl EngineClient {
    /// Asks the primaries of all replicas for their counters, and adds them up. Errors as [`Self::infos`] does.
    pub(crate) async fn info(&self) -> Result<EngineInfo, Refusal> {
        let mut infos = self.infos().await?;
        Ok(if infos.len() == 1 { infos.remove(0).1 } else { together(&infos) })
    }

    /// Asks the primaries of all replicas that live for their counters; the answers with the replicas' numbers.
    /// Errors with a 503 when none answers in time.
    pub(crate) async fn infos(&self) -> Result<Vec<(usize, EngineInfo)>, Refusal> {
        let answers = self.ask_schedulers(Asking::WhoeverAnswers, |query| ToScheduler::Info { query }).await;
        let mut infos = Vec::new();
        let mut refusal = None;
        for (replica, answer) in answers {
            match answer {
                Ok(Reply::Info(info)) => infos.push((replica, *info)),
                Ok(_) => return Err(other_question("rank 0")),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        match refusal.or_else(|| self.refusing()) {
            Some(refusal) if infos.is_empty() => Err(refusal),
            _ => Ok(infos),
        }
    }

    /// Has every rank write its flight recorder; the files by rank. Errors with a 503 when some primary does not
    /// answer in time and with a 400 when it cannot write.
    pub(crate) async fn write_flight(&self) -> Result<Vec<String>, Refusal> {
        let mut files = Vec::new();
        for (_, answer) in self.ask_schedulers(Asking::All, |query| ToScheduler::WriteFlight { query }).await
        {
            match answer? {
                Reply::Flight(result) => files.extend(result.map_err(Refusal::invalid)?),
                _ => return Err(other_question("rank 0")),
            }
        }
        Ok(files)
    }

    /// Has every rank forget the cached prefixes that no request holds; the pages freed by that, equal on every
    /// rank of a replica, added up over the replicas. Errors with a 503 when some primary does not answer in time.
    pub(crate) async fn flush_cache(&self) -> Result<usize, Refusal> {
        self.registry.with_replicas(|replicas| replicas.forget_prefixes());
        let mut pages = 0;
        for (_, answer) in self.ask_schedulers(Asking::All, |query| ToScheduler::FlushCache { query }).await {
            match answer? {
                Reply::Flushed(freed) => pages += freed,
                _ => return Err(other_question("rank 0")),
            }
        }
        Ok(pages)
    }

    /// The tokens of `prompt`, which need not fit the context, and with `with_pieces` the vocabulary's spelling
    /// of each. `add_special_tokens` adds what the tokenizer's post-processor adds.
    ///
    /// Errors with the tokenizer's refusal, and with a 503 while the server takes no requests or when the
    /// tokenizer does not answer in time.
    pub(crate) async fn tokenize(
        &self,
        prompt: Prompt,
        add_special_tokens: bool,
        with_pieces: bool,
    ) -> Result<Tokenized, Refusal> {
        let question = TextQuestion::Tokenize { prompt, add_special_tokens, with_pieces };
        match self.ask_tokenizer(question).await? {
            TextAnswer::Tokens(tokenized) => Ok(tokenized),
            TextAnswer::Text(_) => Err(other_question("the tokenizer")),
        }
    }

    /// The text of `tokens`. Errors as [`Self::tokenize`] does.
    pub(crate) async fn detokenize(
        &self,
        tokens: Vec<TokenId>,
        skip_special_tokens: bool,
    ) -> Result<String, Refusal> {
        match self.ask_tokenizer(TextQuestion::Detokenize { tokens, skip_special_tokens }).await? {
            TextAnswer::Text(text) => Ok(text),
            TextAnswer::Tokens(_) => Err(other_question("the tokenizer")),
        }
    }

    /// Asks the tokenizers in turn.
    async fn ask_tokenizer(&self, question: TextQuestion) -> Result<TextAnswer, Refusal> {
        let query = self.next_query.fetch_add(1, Ordering::Relaxed);
        let tokenizer = (query % self.tokenizers as u64) as usize;
        let message = ToTokenizer::AskText { query, question: Box::new(question) };
        let (of, patience) = ("the tokenizer", TOKENIZER_PATIENCE);
        let asked = Asked { query, replica: None, is_work: true, of, patience };
        match self.ask(asked, Outbound::Tokenizer(tokenizer, message)).await? {
            Reply::Text(result) => result,
            _ => Err(other_question("the tokenizer")),
        }
    }

    /// Asks the primaries of the replicas that live, at the same time.
    async fn ask_schedulers(
        &self,
        asking: Asking,
        question: impl Fn(u64) -> ToScheduler,
    ) -> Vec<(usize, Result<Reply, Refusal>)> {
        let mut living = self.replica_status();
        living.retain(|status| status.state != ReplicaState::Restarting);
        let answers = |status: &ReplicaStatus| status.state != ReplicaState::NotAnswering;
        if asking == Asking::WhoeverAnswers && living.iter().any(answers) {
            living.retain(answers);
        }
        let asking = living.into_iter().map(|status| {
            let query = self.next_query.fetch_add(1, Ordering::Relaxed);
            let (of, patience, replica) = ("rank 0", SCHEDULER_PATIENCE, status.replica);
            let asked = Asked { query, replica: Some(replica), is_work: false, of, patience };
            let message = Outbound::Scheduler(replica, question(query));
            async move { (replica, self.ask(asked, message).await) }
        });
        futures::future::join_all(asking).await
    }

    /// Sends a question and waits for its answer.
    async fn ask(&self, asked: Asked, message: Outbound) -> Result<Reply, Refusal> {
        let Asked { query, replica, is_work, of, patience } = asked;
        let place = self.reserve()?;
        let answer = self.registry.expect_reply(query, replica, is_work)?;
        // Closes the question also when the client leaves and this future is dropped.
        let _open = Open { client: self, query, is_work };
        place.send(message);
        match tokio::time::timeout(patience, answer).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(_)) => Err(self.refusing().unwrap_or_else(|| Refusal::unavailable("the engine is gone"))),
            Err(_) => Err(Refusal::unavailable(format!(
                "{of} gave no answer within {} s; try again",
                patience.as_secs()
            ))),
        }
    }
}

/// Whom a question to the primaries is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asking {
    /// All that live.
    All,
    /// Those that answer at the moment: nobody waits for another.
    WhoeverAnswers,
}

/// How a question is asked.
struct Asked {
    query: u64,
    /// The replica that is asked, if it is one.
    replica: Option<usize>,
    /// Whether it costs work that the limits on requests concern.
    is_work: bool,
    of: &'static str,
    patience: Duration,
}

/// A question in the registry.
struct Open<'a> {
    client: &'a EngineClient,
    query: u64,
    is_work: bool,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.client.registry.forget_query(self.query, self.is_work);
    }
}

fn other_question(of: &str) -> Refusal {
    Refusal::internal(format!("{of} answered another question than it was asked"))
}
