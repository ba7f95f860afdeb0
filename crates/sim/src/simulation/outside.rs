//! What happens outside the replica: clients act and hear.

use super::{Action, Actor, Checked, Event, FAREWELL_US, Simulation};
use crate::client::Intent;
use crate::network::Link;
use crate::scenario::AbortAt;
use lockstep_wire::{ToApi, ToDetokenizer, ToScheduler};

impl Simulation {
    pub(super) fn hear(&mut self, link: Link, bytes: &[u8]) -> Checked {
        if link == Link::Api {
            let message: ToApi = lockstep_wire::decode(bytes).map_err(|e| e.to_string())?;
            self.client.hear_api(message, &self.oracle)?;
        } else {
            let message: ToDetokenizer = lockstep_wire::decode(bytes).map_err(|e| e.to_string())?;
            self.client.hear_detokenizer(message, &self.oracle)?;
        }
        self.note(Actor::Client, Action::Hear, bytes.len() as u64, self.client.heard.tokens);
        let all_done = self.scenario.fault.is_none() && self.client.is_satisfied();
        if all_done && !self.shutdown_sent && self.scenario.shutdown_us.is_none() {
            self.at(self.now_us + FAREWELL_US, Event::Client(Intent::Shutdown));
            self.shutdown_sent = true;
        }
        Ok(())
    }

    /// Aborts that clients decided on because of what they heard.
    pub(super) fn follow_wants(&mut self) {
        for intent in std::mem::take(&mut self.client.wants) {
            let delay_us = self.random.between(0, 100);
            self.at(self.now_us + delay_us, Event::Client(intent));
        }
    }

    pub(super) fn act(&mut self, intent: Intent) -> Checked {
        match intent {
            Intent::Submit(index) => self.submit(index)?,
            Intent::Abort(index) => self.abort(index)?,
            Intent::Flush => {
                let query = self.client.open_query();
                self.note(Actor::Client, Action::Flush, query, 0);
                self.tell_rank(Link::ApiToRank, &ToScheduler::FlushCache { query })?;
            }
            Intent::Query => {
                let query = self.client.open_query();
                self.note(Actor::Client, Action::Query, query, 0);
                self.tell_rank(Link::ApiToRank, &ToScheduler::Info { query })?;
            }
            Intent::Shutdown => {
                self.note(Actor::Client, Action::Shutdown, 0, 0);
                self.tell_rank(Link::ApiToRank, &ToScheduler::Shutdown)?;
            }
        }
        Ok(())
    }

    pub(super) fn submit(&mut self, index: usize) -> Checked {
        let planned = self.client.planned(index);
        let (link, abort) = (planned.link, planned.abort);
        let message = ToScheduler::Submit(Box::new(planned.request.clone()));
        self.note(Actor::Client, Action::Submit, index as u64, link as u64);
        self.tell_rank(Link::Tokenizer(link), &message)?;
        match abort {
            Some(AbortAt::Once) => self.abort(index),
            Some(AbortAt::After(us)) => {
                self.at(self.now_us + us, Event::Client(Intent::Abort(index)));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn abort(&mut self, index: usize) -> Checked {
        let planned = self.client.planned(index);
        let (link, times, id) = (planned.link, 1 + u64::from(planned.abort_twice), planned.request.id);
        self.client.abort_sent(index);
        self.note(Actor::Client, Action::Abort, index as u64, link as u64);
        (0..times).try_for_each(|_| self.tell_rank(Link::Tokenizer(link), &ToScheduler::Abort(id)))
    }

    pub(super) fn tell_rank(&mut self, link: Link, message: &ToScheduler) -> Checked {
        let bytes = lockstep_wire::encode(message).map_err(|e| e.to_string())?;
        self.send(link, bytes);
        Ok(())
    }
}
