//! Questions to rank 0 and to the tokenizers that are no requests: numbered, answered once, with a time limit.
//!
//! A question to a process that died ends with the server's own failure, one to a process that is silent with a
//! 503. Nothing has to be taken back when nobody waits any more: the answer is then ignored.

use super::registry::Reply;
use super::{EngineClient, Outbound};
use lockstep_core::{Refusal, TokenId};
use lockstep_wire::{EngineInfo, Prompt, TextAnswer, TextQuestion, ToScheduler, ToTokenizer, Tokenized};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a question waits for rank 0; a step in progress delays the answer.
const SCHEDULER_PATIENCE: Duration = Duration::from_secs(5);
/// How long one waits for a tokenizer; the prompts before it delay the answer.
const TOKENIZER_PATIENCE: Duration = Duration::from_secs(60);

impl EngineClient {
    /// Asks rank 0 for its counters. Errors with a 503 when it does not answer in time.
    pub(crate) async fn info(&self) -> Result<EngineInfo, Refusal> {
        match self.ask_scheduler(|query| ToScheduler::Info { query }).await? {
            Reply::Info(info) => Ok(*info),
            _ => Err(other_question("rank 0")),
        }
    }

    /// Has every rank write its flight recorder; the files by rank. Errors with a 503 when rank 0 does not
    /// answer in time and with a 400 when it cannot write.
    pub(crate) async fn write_flight(&self) -> Result<Vec<String>, Refusal> {
        match self.ask_scheduler(|query| ToScheduler::WriteFlight { query }).await? {
            Reply::Flight(result) => result.map_err(Refusal::invalid),
            _ => Err(other_question("rank 0")),
        }
    }

    /// Has every rank forget the cached prefixes that no request holds; the pages freed by that, equal on every
    /// rank. Errors with a 503 when rank 0 does not answer in time.
    pub(crate) async fn flush_cache(&self) -> Result<usize, Refusal> {
        match self.ask_scheduler(|query| ToScheduler::FlushCache { query }).await? {
            Reply::Flushed(pages) => Ok(pages),
            _ => Err(other_question("rank 0")),
        }
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
        let asked = Asked { query, is_work: true, of: "the tokenizer", patience: TOKENIZER_PATIENCE };
        match self.ask(asked, Outbound::Tokenizer(tokenizer, message)).await? {
            Reply::Text(result) => result,
            _ => Err(other_question("the tokenizer")),
        }
    }

    async fn ask_scheduler(&self, question: impl FnOnce(u64) -> ToScheduler) -> Result<Reply, Refusal> {
        let query = self.next_query.fetch_add(1, Ordering::Relaxed);
        let asked = Asked { query, is_work: false, of: "rank 0", patience: SCHEDULER_PATIENCE };
        self.ask(asked, Outbound::Scheduler(question(query))).await
    }

    /// Sends a question and waits for its answer.
    async fn ask(&self, asked: Asked, message: Outbound) -> Result<Reply, Refusal> {
        let Asked { query, is_work, of, patience } = asked;
        let place = self.reserve()?;
        let answer = self.registry.expect_reply(query, is_work)?;
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

/// How a question is asked.
struct Asked {
    query: u64,
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
