//! Events on their way from the dispatcher to an answer.
//!
//! **Invariant:** what waits is bounded. An answer whose client takes nothing is not read, while the engine goes on:
//! from [`WAITING_MAX`] events on, what comes for a choice is joined to what already waits for it. So there waits the
//! text that was generated, 4 bytes a token and the log-probabilities asked for, not one message per token.
//!
//! One receiver; senders are cloned per request. Neither end ever waits for the other.

use super::Event;
use lockstep_wire::Delta;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;

/// Events that wait as they came; never fewer than a few of each choice.
const WAITING_MAX: usize = 64;

#[derive(Debug)]
struct Shared {
    waiting: Mutex<VecDeque<(usize, Event)>>,
    waiting_max: usize,
    senders: AtomicUsize,
    /// Told of every event, and of every sender that goes.
    changed: Notify,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<(usize, Event)>> {
        self.waiting.lock().expect("invariant: nothing panics while holding it")
    }
}

/// The dispatcher's end.
#[derive(Debug)]
pub(super) struct EventSender(Arc<Shared>);

/// The answer's end.
#[derive(Debug)]
pub(super) struct EventReceiver(Arc<Shared>);

/// Both ends, for an answer of `choices` choices.
pub(super) fn channel(choices: usize) -> (EventSender, EventReceiver) {
    let shared = Arc::new(Shared {
        waiting: Mutex::default(),
        waiting_max: WAITING_MAX.max(4 * choices),
        senders: AtomicUsize::new(1),
        changed: Notify::new(),
    });
    (EventSender(shared.clone()), EventReceiver(shared))
}

impl EventSender {
    /// Queues an event of a choice. When nobody will read it, it goes with the queue.
    pub(super) fn send(&self, choice: usize, event: Event) {
        let mut waiting = self.0.waiting();
        let is_full = waiting.len() >= self.0.waiting_max;
        let last = if is_full { last_delta_of(choice, &mut waiting) } else { None };
        match (event, last) {
            (Event::Delta(delta), Some(last)) => join(last, delta),
            (event, _) => waiting.push_back((choice, event)),
        }
        drop(waiting);
        self.0.changed.notify_one();
    }
}

impl Clone for EventSender {
    fn clone(&self) -> Self {
        self.0.senders.fetch_add(1, Ordering::Relaxed);
        Self(self.0.clone())
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        self.0.senders.fetch_sub(1, Ordering::Release);
        self.0.changed.notify_one();
    }
}

impl EventReceiver {
    /// The next event; `None` when none waits and none will come. Cancel-safe.
    pub(super) async fn recv(&mut self) -> Option<(usize, Event)> {
        loop {
            // Before the look at the queue: a sender that sends and goes in between leaves word.
            let is_last = self.0.senders.load(Ordering::Acquire) == 0;
            if let Some(event) = self.0.waiting().pop_front() {
                return Some(event);
            }
            if is_last {
                return None;
            }
            self.0.changed.notified().await;
        }
    }
}

fn last_delta_of(choice: usize, waiting: &mut VecDeque<(usize, Event)>) -> Option<&mut Delta> {
    match waiting.iter_mut().rev().find(|(other, _)| *other == choice) {
        Some((_, Event::Delta(delta))) => Some(delta),
        _ => None,
    }
}

/// Adds to `last` what came after it.
fn join(last: &mut Delta, next: Delta) {
    let Delta { id: _, text, tokens, finish, stop_string, usage, logprobs, echo, timing } = next;
    last.text.push_str(&text);
    last.tokens.extend(tokens);
    match (&mut last.logprobs, logprobs) {
        (Some(before), Some(after)) => before.extend(*after),
        (before @ None, after) => *before = after,
        (Some(_), None) => {}
    }
    (last.finish, last.stop_string, last.usage) = (finish, stop_string, usage);
    last.echo = last.echo.take().or(echo);
    last.timing = timing;
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use lockstep_core::{FinishReason, Refusal, RequestId};
    use lockstep_wire::Usage;

    fn delta(token: u32, finish: Option<FinishReason>) -> Event {
        Event::Delta(Delta {
            id: RequestId(1),
            text: format!("{token},"),
            tokens: vec![token],
            finish,
            stop_string: None,
            usage: Usage { completion_tokens: token + 1, ..Usage::default() },
            logprobs: None,
            echo: None,
            timing: None,
        })
    }

    /// Texts and tokens of each choice, joined; and how many events they took.
    fn drain(receiver: &mut EventReceiver) -> (Vec<(String, Vec<u32>)>, usize) {
        let mut choices = vec![(String::new(), Vec::new()); 2];
        let mut events = 0;
        while let Some(Some((choice, event))) = receiver.recv().now_or_never() {
            events += 1;
            if let Event::Delta(delta) = event {
                choices[choice].0.push_str(&delta.text);
                choices[choice].1.extend(delta.tokens);
            }
        }
        (choices, events)
    }

    #[test]
    fn what_waits_is_joined_and_nothing_is_lost() {
        let (sender, mut receiver) = channel(2);
        for token in 0..10_000 {
            sender.send(token as usize % 2, delta(token, None));
        }
        sender.send(1, delta(10_001, Some(FinishReason::Length)));
        let (choices, events) = drain(&mut receiver);
        assert_eq!(events, WAITING_MAX);
        for (choice, (text, tokens)) in choices.iter().enumerate() {
            let expected: Vec<u32> = (0..10_002).filter(|token| *token as usize % 2 == choice).collect();
            let expected = &expected[..expected.len() - usize::from(choice == 0)];
            assert_eq!(tokens, expected);
            assert_eq!(*text, expected.iter().map(|token| format!("{token},")).collect::<String>());
        }
    }

    #[test]
    fn a_queue_that_is_read_keeps_events_apart_and_an_end_is_never_joined_away() {
        let (sender, mut receiver) = channel(1);
        for token in 0..10 {
            sender.send(0, delta(token, None));
        }
        assert_eq!(drain(&mut receiver).1, 10);
        for token in 0..200 {
            sender.send(0, delta(token, None));
        }
        sender.send(0, Event::Refused(Refusal::internal("gone")));
        let mut last = None;
        while let Some(Some((_, event))) = receiver.recv().now_or_never() {
            last = Some(event);
        }
        assert!(matches!(last, Some(Event::Refused(_))));
    }

    #[tokio::test]
    async fn the_last_sender_that_goes_ends_it() {
        let (sender, mut receiver) = channel(1);
        let other = sender.clone();
        sender.send(0, delta(0, None));
        drop(sender);
        assert!(receiver.recv().await.is_some());
        let waiting = tokio::spawn(async move { receiver.recv().await });
        tokio::task::yield_now().await;
        drop(other);
        assert!(waiting.await.unwrap().is_none());
    }
}
