//! Where requests with a grammar wait, on rank 0, until every rank can make their masks.
//!
//! Preparing takes long: the vocabulary once (up to seconds), then each grammar (up to tens of milliseconds
//! if it is hostile). So such a request becomes an order to prepare its grammar, which goes to all ranks like
//! any message and is carried out on a thread of each. Ranks exchange how many orders they have carried out
//! ([`Announcement::prepared`](crate::exchange::Announcement)); once the order's number is reached on all of
//! them, the request itself is let in. Running requests notice nothing of it, and for the ranks it is a
//! request that arrived a little later: no decision needs to know of the wait.

use lockstep_core::{Grammar, RequestId};
use lockstep_wire::{SubmitRequest, ToScheduler};
use std::collections::VecDeque;

/// The gate of one replica, on its rank 0.
#[derive(Default)]
pub(crate) struct GrammarGate {
    /// Orders given so far.
    orders: u64,
    /// What the last order was for.
    last: Option<Grammar>,
    /// Requests and the number of orders they wait for, which never falls from one to the next.
    held: VecDeque<(u64, Box<SubmitRequest>)>,
}

impl GrammarGate {
    /// Requests that wait here.
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    /// Replaces what has arrived by what may go on now that all ranks have carried out `prepared` orders:
    /// requests that have waited long enough, then the new messages without those that must wait.
    pub(crate) fn pass(&mut self, prepared: u64, inbox: &mut Vec<ToScheduler>) {
        let arrived = std::mem::take(inbox);
        while let Some((_, request)) = self.held.pop_front_if(|(order, _)| *order <= prepared) {
            inbox.push(ToScheduler::Submit(request));
        }
        inbox.extend(arrived.into_iter().filter_map(|message| match message {
            ToScheduler::Submit(request) => self.submit(request, prepared),
            ToScheduler::Abort(id) if self.forget(id) => None,
            other => Some(other),
        }));
    }

    /// The request, the order to prepare its grammar, or nothing when that has been ordered before it.
    fn submit(&mut self, request: Box<SubmitRequest>, prepared: u64) -> Option<ToScheduler> {
        let Some(grammar) = &request.sampling.grammar else { return Some(ToScheduler::Submit(request)) };
        let is_ordered = self.last.as_ref() == Some(grammar);
        if is_ordered && self.held.is_empty() && self.orders <= prepared {
            return Some(ToScheduler::Submit(request));
        }
        let order = (!is_ordered).then(|| grammar.clone());
        if order.is_some() {
            self.orders += 1;
            self.last.clone_from(&order);
        }
        self.held.push_back((self.orders, request));
        order.map(|grammar| ToScheduler::Prepare(Box::new(grammar)))
    }

    /// Drops a request that waits here: the ranks have never heard of it, so they need no abort.
    fn forget(&mut self, id: RequestId) -> bool {
        let at = self.held.iter().position(|(_, request)| request.id == id);
        at.and_then(|at| self.held.remove(at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::SamplingParams;
    use lockstep_wire::TextParams;

    fn submit(id: u64, grammar: Option<&str>) -> ToScheduler {
        let grammar = grammar.map(|text| Grammar::Regex(text.into()));
        ToScheduler::Submit(Box::new(SubmitRequest {
            id: RequestId(id),
            prompt: vec![1],
            sampling: SamplingParams { grammar, ..SamplingParams::default() },
            text: TextParams::default(),
            cache_salt: None,
            priority: 0,
        }))
    }

    /// What goes on, in short: `s1` a request, `p(a)` an order, `a1` an abort.
    fn pass(gate: &mut GrammarGate, prepared: u64, mut inbox: Vec<ToScheduler>) -> String {
        gate.pass(prepared, &mut inbox);
        let short = |message: &ToScheduler| match message {
            ToScheduler::Submit(request) => format!("s{}", request.id.0),
            ToScheduler::Prepare(grammar) => match &**grammar {
                Grammar::Regex(text) => format!("p({text})"),
                other => panic!("unexpected {other:?}"),
            },
            ToScheduler::Abort(id) => format!("a{}", id.0),
            other => panic!("unexpected {other:?}"),
        };
        inbox.iter().map(short).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn requests_wait_for_their_grammar_only() {
        let mut gate = GrammarGate::default();
        let arrived = vec![submit(1, Some("a")), submit(2, None), submit(3, Some("a")), submit(4, Some("b"))];
        assert_eq!(pass(&mut gate, 0, arrived), "p(a) s2 p(b)");
        assert_eq!((pass(&mut gate, 0, vec![submit(5, None)]).as_str(), gate.len()), ("s5", 3));
        assert_eq!(pass(&mut gate, 1, vec![submit(6, None)]), "s1 s3 s6");
        assert_eq!(pass(&mut gate, 2, vec![submit(7, Some("b"))]), "s4 s7", "known and prepared: no wait");
        assert_eq!(gate.len(), 0);
        assert_eq!(pass(&mut gate, 2, vec![submit(8, Some("a"))]), "p(a)", "it may have been given up since");
        assert_eq!(pass(&mut gate, 3, vec![]), "s8");
    }

    #[test]
    fn an_abort_reaches_a_request_that_waits() {
        let mut gate = GrammarGate::default();
        let abort = |id| ToScheduler::Abort(RequestId(id));
        assert_eq!(pass(&mut gate, 0, vec![submit(1, Some("a")), abort(1), abort(9)]), "p(a) a9");
        assert_eq!(pass(&mut gate, 0, vec![submit(2, Some("a"))]), "");
        assert_eq!(pass(&mut gate, 1, vec![abort(2)]), "s2 a2", "let in and aborted, in this order");
    }
}
