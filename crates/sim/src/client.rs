//! The clients: they send what the scenario planned, abort, and check every word they hear.

use crate::device::Oracle;
use crate::scenario::{AbortAt, PlannedRequest, Scenario};
use lockstep_core::{FinishReason, Refusal, RequestId, TokenId};
use lockstep_wire::{EngineInfo, ToApi, ToDetokenizer, TokenOut, Usage};

/// Something a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Send the planned request of this number.
    Submit(usize),
    /// Abort it.
    Abort(usize),
    /// Ask to flush the cache.
    Flush,
    /// Ask for the state.
    Query,
    /// Ask for the end.
    Shutdown,
}

/// One request as its client sees it.
struct Conversation {
    planned: PlannedRequest,
    began: bool,
    tokens: Vec<TokenId>,
    cached_tokens: Option<u32>,
    end: Option<End>,
    abort_sent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished(FinishReason),
    Refused(u16),
}

/// Counts over all requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heard {
    /// Tokens.
    pub tokens: u64,
    /// Requests that ended by an abort.
    pub aborted: u64,
    /// Requests that were refused.
    pub refused: u64,
}

/// All clients. Request number `i` has the id `i`.
pub struct Client {
    conversations: Vec<Conversation>,
    ended: usize,
    queries_open: Vec<u64>,
    queries_sent: u64,
    pages_total: usize,
    page_size: usize,
    /// Requests may end without anybody having asked for it.
    have_deadlines: bool,
    /// What hearing something made a client want, to be done soon.
    pub wants: Vec<Intent>,
    /// Totals so far.
    pub heard: Heard,
}

impl Client {
    /// Clients that have sent nothing.
    pub fn new(scenario: &Scenario) -> Self {
        let conversation = |planned| Conversation {
            planned,
            began: false,
            tokens: Vec::new(),
            cached_tokens: None,
            end: None,
            abort_sent: false,
        };
        Self {
            conversations: scenario.requests.iter().cloned().map(conversation).collect(),
            ended: 0,
            queries_open: Vec::new(),
            queries_sent: 0,
            pages_total: scenario.config.num_pages,
            page_size: scenario.config.page_size,
            have_deadlines: scenario.request_timeout_ms.is_some(),
            wants: Vec::new(),
            heard: Heard::default(),
        }
    }

    /// What was planned for request number `index`.
    pub fn planned(&self, index: usize) -> &PlannedRequest {
        &self.conversations[index].planned
    }

    /// Whether every request has ended and every query was answered.
    pub fn is_satisfied(&self) -> bool {
        self.ended == self.conversations.len() && self.queries_open.is_empty()
    }

    /// The first request without an end, for messages.
    pub fn unanswered(&self) -> Option<RequestId> {
        self.conversations.iter().find(|c| c.end.is_none()).map(|c| c.planned.request.id)
    }

    /// Notes that an abort of request number `index` was sent.
    pub fn abort_sent(&mut self, index: usize) {
        self.conversations[index].abort_sent = true;
    }

    /// The number of the next query.
    pub fn open_query(&mut self) -> u64 {
        self.queries_sent += 1;
        self.queries_open.push(self.queries_sent);
        self.queries_sent
    }

    /// Takes a message that rank 0 sent to the detokenizer. The error is a finding.
    pub fn hear_detokenizer(&mut self, message: ToDetokenizer, oracle: &Oracle) -> Result<(), String> {
        match message {
            ToDetokenizer::Begin { requests, .. } => {
                requests.into_iter().try_for_each(|begin| self.begin(begin.id, oracle))
            }
            ToDetokenizer::Step(outs) => outs.into_iter().try_for_each(|out| self.token(out, oracle)),
            ToDetokenizer::ReplicaStarted { .. } | ToDetokenizer::Shutdown => Ok(()),
        }
    }

    /// Takes a message that rank 0 sent to the api. The error is a finding.
    pub fn hear_api(&mut self, message: ToApi, oracle: &Oracle) -> Result<(), String> {
        match message {
            ToApi::Refused { id, refusal } => self.refused(id, &refusal, oracle),
            ToApi::EngineInfo(info) => self.info(&info),
            ToApi::CacheFlushed { query, .. } => self.answered(query),
            other => Err(format!("rank 0 told the api {other:?} between two steps")),
        }
    }

    fn begin(&mut self, id: RequestId, oracle: &Oracle) -> Result<(), String> {
        let conversation = &mut self.conversations[id.0 as usize];
        if conversation.began || conversation.end.is_some() || oracle[&id].finish.is_none() {
            return Err(format!("{id} begins twice, after its end, or though it can never be served"));
        }
        conversation.began = true;
        self.want_abort(id, AbortAt::Begin);
        Ok(())
    }

    fn token(&mut self, out: TokenOut, oracle: &Oracle) -> Result<(), String> {
        let (id, expected) = (out.id, &oracle[&out.id]);
        let conversation = &mut self.conversations[id.0 as usize];
        if !conversation.began || conversation.end.is_some() {
            return Err(format!("{id} hears {out:?} before its begin or after its end"));
        }
        let heard = conversation.tokens.len();
        conversation.tokens.extend_from_slice(&out.tokens);
        if !expected.answer().starts_with(&conversation.tokens) {
            return Err(format!(
                "{id} hears {:?} after {heard} tokens, alone its answer is {:?}",
                out.tokens,
                expected.answer()
            ));
        }
        check_usage(conversation, &out.usage, self.page_size)
            .map_err(|what| format!("{id}: {what}: {out:?}"))?;
        let is_whole = conversation.tokens.len() == expected.answer().len();
        let may_end = match out.finish {
            None => !is_whole && !out.tokens.is_empty(),
            Some(FinishReason::Abort) => {
                (conversation.abort_sent || self.have_deadlines) && out.tokens.is_empty()
            }
            finish => is_whole && finish == expected.finish && !out.tokens.is_empty(),
        };
        if !may_end || out.ends_with_eos != (out.finish == Some(FinishReason::Stop)) {
            return Err(format!(
                "{id} hears {out:?} with {} tokens in all; alone it ends with {:?} after {}",
                conversation.tokens.len(),
                expected.finish,
                expected.answer().len()
            ));
        }
        self.heard.tokens += out.tokens.len() as u64;
        let count = conversation.tokens.len();
        self.want_abort(id, AbortAt::Tokens(count));
        if let Some(finish) = out.finish {
            self.end(id, End::Finished(finish))?;
        }
        Ok(())
    }

    fn refused(&mut self, id: RequestId, refusal: &Refusal, oracle: &Oracle) -> Result<(), String> {
        let is_right = match oracle[&id].finish {
            None => refusal.status == 400,
            Some(_) => refusal.status == 503,
        };
        if !is_right || self.conversations[id.0 as usize].began {
            return Err(format!("{id} is refused: {refusal:?}"));
        }
        self.end(id, End::Refused(refusal.status))
    }

    fn end(&mut self, id: RequestId, end: End) -> Result<(), String> {
        let conversation = &mut self.conversations[id.0 as usize];
        if let Some(before) = conversation.end.replace(end) {
            return Err(format!("{id} ends twice: {before:?}, then {end:?}"));
        }
        self.ended += 1;
        self.heard.aborted += u64::from(end == End::Finished(FinishReason::Abort));
        self.heard.refused += u64::from(matches!(end, End::Refused(_)));
        self.want_abort(id, AbortAt::End);
        Ok(())
    }

    fn info(&mut self, info: &EngineInfo) -> Result<(), String> {
        self.answered(info.query)?;
        let pages = info.pages_free + info.pages_cached + info.pages_held;
        if (pages, info.pages_total) != (self.pages_total, self.pages_total) {
            return Err(format!("pages do not add up to {}: {info:?}", self.pages_total));
        }
        Ok(())
    }

    fn answered(&mut self, query: u64) -> Result<(), String> {
        let Some(at) = self.queries_open.iter().position(|&open| open == query) else {
            return Err(format!("query {query} is answered twice or was never asked"));
        };
        self.queries_open.remove(at);
        Ok(())
    }

    fn want_abort(&mut self, id: RequestId, at: AbortAt) {
        let conversation = &self.conversations[id.0 as usize];
        if conversation.planned.abort == Some(at) {
            self.wants.push(Intent::Abort(id.0 as usize));
        }
    }
}

fn check_usage(conversation: &mut Conversation, usage: &Usage, page_size: usize) -> Result<(), &'static str> {
    let rules = [
        (usage.completion_tokens as usize == conversation.tokens.len(), "answer tokens are miscounted"),
        (
            usage.prompt_tokens as usize == conversation.planned.request.prompt.len(),
            "prompt tokens are miscounted",
        ),
        (usage.cached_tokens < usage.prompt_tokens, "the cache covers the whole prompt"),
        ((usage.cached_tokens as usize).is_multiple_of(page_size), "a part of a page is cached"),
        (
            conversation.cached_tokens.is_none_or(|cached| cached == usage.cached_tokens),
            "cached tokens changed after the first token",
        ),
    ];
    if !conversation.tokens.is_empty() {
        conversation.cached_tokens = Some(usage.cached_tokens);
    }
    rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
}
