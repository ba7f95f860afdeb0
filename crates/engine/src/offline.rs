//! Requests run through the ranks' own loop inside one process, without links, tokenizer or HTTP: for
//! benchmarks of the engine alone.
//!
//! Rank 0 submits a set of requests at once, the next one (after forgetting cached prefixes, unless it shall find
//! them) when the last of them has ended, and stops the group after the last set; the other ranks, threads of the same process, hear
//! of it through a channel each.

use crate::Result;
use crate::config::RankConfig;
use crate::control::{self, ControlError, Follower, Outgoing, Primary, Wait};
use crate::pipeline;
use crate::rank_loop::{RankLoop, Role};
use crate::runner::Runner;
use crate::start::{self, Prepared};
use lockstep_backend::Backend;
use lockstep_core::RequestId;
use lockstep_wire::{Broadcast, EngineInfo, StageWork, SubmitRequest, ToScheduler, TokenOut};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

/// Requests that are submitted at once.
#[derive(Clone, Debug, Default)]
pub struct OfflineSet {
    /// In the order of submission.
    pub requests: Vec<SubmitRequest>,
    /// Whether they find the prefixes that the sets before have left in the cache.
    pub keeps_cache: bool,
}

impl From<Vec<SubmitRequest>> for OfflineSet {
    /// A set that finds an empty cache.
    fn from(requests: Vec<SubmitRequest>) -> Self {
        Self { requests, keeps_cache: false }
    }
}

/// What came of a run.
#[derive(Clone, Debug, Default)]
pub struct OfflineReport {
    /// From the first submission to the last token.
    pub elapsed: Duration,
    /// Tokens generated.
    pub output_tokens: usize,
    /// Requests that were refused or ended without a token, and why the first one was.
    pub failed: Option<(usize, String)>,
    /// The steps that gave tokens, in order.
    pub steps: Vec<StepTokens>,
    /// In a pipeline: what each rank's device did meanwhile, by rank.
    pub stages: Vec<StageWork>,
}

/// The tokens of one step.
#[derive(Clone, Debug, Default)]
pub struct StepTokens {
    /// When they were known, since the first submission.
    pub at: Duration,
    /// Whose they are, an entry a token.
    pub requests: Vec<RequestId>,
}

/// Rank 0's side of the control plane.
struct OfflinePrimary {
    group_started: Instant,
    /// When the running set was submitted.
    started: Instant,
    /// Sets to come, the next one last.
    sets: Vec<OfflineSet>,
    open: usize,
    followers: Vec<Sender<Broadcast>>,
    sequence: u64,
    /// Of the sets so far, the running one last.
    reports: Vec<OfflineReport>,
    /// What each rank had done when the set before ended.
    done_before: Vec<StageWork>,
}

impl Primary for OfflinePrimary {
    fn now(&self) -> Duration {
        self.group_started.elapsed()
    }

    fn receive(&mut self, _: Wait, into: &mut Vec<ToScheduler>) -> control::Result<()> {
        if self.open > 0 {
            return Ok(());
        }
        // What the set that has ended came to, numbered from 1.
        into.push(ToScheduler::Info { query: self.reports.len() as u64 });
        match self.sets.pop() {
            None => into.push(ToScheduler::Shutdown),
            Some(set) => {
                self.open = set.requests.len();
                self.reports.push(OfflineReport::default());
                if !set.keeps_cache {
                    into.push(ToScheduler::FlushCache { query: 0 });
                }
                into.extend(set.requests.into_iter().map(|request| ToScheduler::Submit(Box::new(request))));
                self.started = Instant::now();
            }
        }
        Ok(())
    }

    fn publish(&mut self, stamp_ms: u64, message: &ToScheduler) -> control::Result<()> {
        for follower in &self.followers {
            let broadcast = Broadcast { sequence: self.sequence, stamp_ms, message: message.clone() };
            follower.send(broadcast).map_err(|_| ControlError("another rank has ended".into()))?;
        }
        self.sequence += 1;
        Ok(())
    }

    fn deliver(&mut self, out: Outgoing) -> control::Result<()> {
        if let Outgoing::Info(info) = out {
            self.note_stages(&info);
            return Ok(());
        }
        let Some(report) = self.reports.last_mut() else { return Ok(()) };
        match out {
            Outgoing::Step(tokens) => {
                let at = self.started.elapsed();
                let of_request = |out: &TokenOut| std::iter::repeat_n(out.id, out.tokens.len());
                let requests: Vec<RequestId> = tokens.iter().flat_map(of_request).collect();
                self.open -= tokens.iter().filter(|out| out.finish.is_some()).count();
                report.output_tokens += requests.len();
                report.steps.push(StepTokens { at, requests });
                report.elapsed = at;
            }
            Outgoing::Refused(_, refusal) => {
                self.open -= 1;
                report.failed.get_or_insert((0, refusal.message)).0 += 1;
            }
            Outgoing::Begin(_)
            | Outgoing::Info(_)
            | Outgoing::CacheFlushed(..)
            | Outgoing::FlightWritten(..) => {}
        }
        Ok(())
    }
}

impl OfflinePrimary {
    /// `info` answers the query with the number of a set.
    fn note_stages(&mut self, info: &EngineInfo) {
        let done: Vec<StageWork> = info.ranks.iter().map(|rank| rank.stage_work).collect();
        let before = self.done_before.iter().copied().chain(std::iter::repeat(StageWork::default()));
        let since = done.iter().zip(before).map(|(now, before)| now.since(&before)).collect();
        let set = usize::try_from(info.query).ok().and_then(|number| number.checked_sub(1));
        if let Some(report) = set.and_then(|set| self.reports.get_mut(set)) {
            report.stages = since;
        }
        self.done_before = done;
    }
}

/// Another rank's side.
struct OfflineFollower(Receiver<Broadcast>);

impl Follower for OfflineFollower {
    fn take(&mut self) -> control::Result<Broadcast> {
        self.0.recv().map_err(|_| ControlError("rank 0 has ended".into()))
    }
}

/// A rank's end of the control plane.
pub enum OfflineLink {
    /// Rank 0: a way to every other rank.
    Primary(Vec<Sender<Broadcast>>),
    /// Any other rank.
    Follower(Receiver<Broadcast>),
}

/// Runs rank 0's sets of requests one after the other; the reports are rank 0's, one a set.
/// **Collective: all ranks of the replica.**
pub fn run<B: Backend>(
    config: &RankConfig,
    prepared: Prepared<B>,
    link: OfflineLink,
    mut sets: Vec<OfflineSet>,
) -> Result<Vec<OfflineReport>> {
    sets.reverse();
    run_loop(config, prepared, link.role(sets)).map(|role| match role {
        Role::Primary(primary) => primary.reports,
        Role::Follower(_) => Vec::new(),
    })
}

/// Runs the loop of one rank between any links, until it is told to stop; gives them back.
/// **Collective: all ranks of the replica.**
pub fn run_loop<B: Backend, P: Primary + Send, F: Follower + Send>(
    config: &RankConfig,
    prepared: Prepared<B>,
    role: Role<P, F>,
) -> Result<Role<P, F>> {
    let Prepared { group, scheduler, runner, info } = prepared;
    let settings = start::loop_settings(config);
    match config.parallel.pp_size {
        1 => run_to_end(RankLoop::new(role, group, scheduler, runner, settings, info)),
        _ => pipeline::beside(runner, None, |runner| {
            run_to_end(RankLoop::new(role, group, scheduler, runner, settings, info))
        }),
    }
}

fn run_to_end<P: Primary, F: Follower, R: Runner>(mut rank_loop: RankLoop<P, F, R>) -> Result<Role<P, F>> {
    rank_loop.run()?;
    Ok(rank_loop.into_role())
}

impl OfflineLink {
    fn role(self, sets: Vec<OfflineSet>) -> Role<OfflinePrimary, OfflineFollower> {
        match self {
            OfflineLink::Follower(receiver) => Role::Follower(OfflineFollower(receiver)),
            OfflineLink::Primary(followers) => Role::Primary(OfflinePrimary {
                group_started: Instant::now(),
                started: Instant::now(),
                sets,
                open: 0,
                followers,
                sequence: 0,
                reports: Vec::new(),
                done_before: Vec::new(),
            }),
        }
    }
}

impl OfflineReport {
    /// Median time from one token of a request to its next while `batch` requests decode: each of them had a token before,
    /// and has got one meanwhile, in one step or shared out over the stages' steps in flight. `None` when they never did.
    pub fn token_time(&self, batch: usize) -> Option<Duration> {
        // The step of each request's latest token, and the first one after which all have one.
        let mut latest: BTreeMap<RequestId, usize> = BTreeMap::new();
        let mut all_begun = None;
        let mut gaps = Vec::new();
        for (index, step) in self.steps.iter().enumerate() {
            let before: Vec<usize> =
                step.requests.iter().filter_map(|request| latest.insert(*request, index)).collect();
            let decodes = |since: &usize| all_begun.is_some_and(|begun| begun <= *since) && *since < index;
            for since in before.into_iter().filter(decodes) {
                if latest.values().filter(|step| **step > since).count() >= batch {
                    gaps.push(step.at - self.steps[since].at);
                }
            }
            if latest.len() >= batch {
                all_begun.get_or_insert(index);
            }
        }
        gaps.sort_unstable();
        gaps.get(gaps.len() / 2).copied()
    }

    /// When each of `count` requests had a token.
    pub fn first_tokens(&self, count: usize) -> Option<Duration> {
        let mut begun: BTreeSet<RequestId> = BTreeSet::new();
        self.steps.iter().find_map(|step| {
            begun.extend(step.requests.iter().copied());
            (begun.len() >= count).then_some(step.at)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report of steps, each with its milliseconds and its requests.
    fn report(steps: &[(u64, &[u64])]) -> OfflineReport {
        let step = |(at, requests): &(u64, &[u64])| StepTokens {
            at: Duration::from_millis(*at),
            requests: requests.iter().copied().map(RequestId).collect(),
        };
        OfflineReport { steps: steps.iter().map(step).collect(), ..OfflineReport::default() }
    }

    fn ms(value: u64) -> Option<Duration> {
        Some(Duration::from_millis(value))
    }

    #[test]
    fn a_token_takes_what_lies_between_steps_of_all_requests() {
        let all: &[u64] = &[0, 1, 2];
        let report =
            report(&[(10, &[0]), (12, all), (15, all), (18, all), (30, all), (31, &[0, 1]), (32, &[0])]);
        assert_eq!(report.token_time(3), ms(3));
        assert_eq!(report.token_time(4), None);
    }

    #[test]
    fn steps_in_flight_share_the_requests_and_each_waits_for_its_own() {
        // Two stages: two requests a step, each of which is back after 8 ms.
        let (one, two): (&[u64], &[u64]) = (&[0, 1], &[2, 3]);
        let turns = report(&[(10, one), (15, two), (18, one), (23, two), (26, one), (31, two)]);
        assert_eq!(turns.token_time(4), ms(8));
        // While two of four are elsewhere, the others' tokens are not those of four at once.
        let alone = report(&[(10, one), (14, one), (18, one), (20, two), (25, two)]);
        assert_eq!(alone.token_time(4), None);
        assert_eq!(alone.token_time(2), ms(4));
    }

    #[test]
    fn prompts_are_done_when_each_request_has_a_token() {
        // The first prompts decode while the others are read.
        let report = report(&[(10, &[0, 1]), (12, &[0, 1, 2]), (15, &[0, 1, 2]), (18, &[2, 3])]);
        assert_eq!(report.first_tokens(1), ms(10));
        assert_eq!(report.first_tokens(3), ms(12));
        assert_eq!(report.first_tokens(4), ms(18));
        assert_eq!(report.first_tokens(5), None);
    }
}
