//! The replicas as the api sees them: which take requests, how many each has open, and who is chosen.
//!
//! Part of the registry's table, under its lock. **Invariant:** `open` of a replica is the number of requests in the
//! table that are its.

use super::router::{Candidate, DpPolicy, REPLICAS_MAX, Reason, Router};
use lockstep_core::Refusal;
use lockstep_wire::{EngineInfo, Prompt};
use std::collections::BTreeMap;

/// How many replicas there are, and how requests are spread over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replication {
    /// Replicas, `1..=`[`REPLICAS_MAX`].
    pub replicas: usize,
    /// Requests that each may have open.
    pub requests_open_max: usize,
    /// Who gets a request.
    pub policy: DpPolicy,
    /// How many open requests a replica that is preferred for a prefix may be ahead of the least loaded one.
    pub load_bound: usize,
}

impl Replication {
    /// One replica.
    pub fn single(requests_open_max: usize) -> Self {
        Self { replicas: 1, requests_open_max, policy: DpPolicy::default(), load_bound: 0 }
    }

    /// Requests that all of them may have open.
    pub fn total_open_max(&self) -> usize {
        self.replicas * self.requests_open_max
    }
}

/// What somebody who asks after a replica is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReplicaStatus {
    /// Its number.
    pub(crate) replica: usize,
    /// What it does.
    pub(crate) state: ReplicaState,
    /// Its open requests.
    pub(crate) open: usize,
    /// Requests sent to it, by why.
    pub(crate) routed: BTreeMap<Reason, u64>,
    /// Requests that it was to answer and that were moved to another one when it died.
    pub(crate) moved_away: u64,
    /// Times it was started again.
    pub(crate) restarts: u64,
}

/// What a replica does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplicaState {
    /// It answers requests.
    Serving,
    /// Some rank of it does not answer; requests go elsewhere while there is an elsewhere.
    NotAnswering,
    /// It gets no requests and still answers some.
    Draining,
    /// It gets no requests and answers none.
    Drained,
    /// It has failed and is being started again.
    Restarting,
}

impl ReplicaState {
    /// All of them.
    pub(crate) const ALL: [ReplicaState; 5] =
        [Self::Serving, Self::NotAnswering, Self::Draining, Self::Drained, Self::Restarting];

    /// As answers and metrics write it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::NotAnswering => "not_answering",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Restarting => "restarting",
        }
    }
}

#[derive(Debug, Default)]
struct Replica {
    open: usize,
    is_draining: bool,
    is_suspect: bool,
    /// Why it has failed, until it is there again.
    lost: Option<Refusal>,
    routed: BTreeMap<Reason, u64>,
    moved_away: u64,
    restarts: u64,
}

impl Replica {
    fn state(&self) -> ReplicaState {
        match (self.lost.is_some(), self.is_draining, self.is_suspect) {
            (true, ..) => ReplicaState::Restarting,
            (_, true, _) if self.open > 0 => ReplicaState::Draining,
            (_, true, _) => ReplicaState::Drained,
            (.., true) => ReplicaState::NotAnswering,
            _ => ReplicaState::Serving,
        }
    }

    fn is_admitting(&self) -> bool {
        self.lost.is_none() && !self.is_draining
    }
}

/// All of them, and the router.
#[derive(Debug)]
pub(super) struct Replicas {
    settings: Replication,
    replicas: Vec<Replica>,
    router: Router,
}

impl Replicas {
    pub(super) fn new(settings: Replication) -> Self {
        assert!((1..=REPLICAS_MAX).contains(&settings.replicas), "{} replicas", settings.replicas);
        Self {
            settings,
            replicas: (0..settings.replicas).map(|_| Replica::default()).collect(),
            router: Router::new(settings.policy, settings.replicas, settings.load_bound),
        }
    }

    /// The replica for `count` choices of a prompt, which it has open from now on. Errors with the 503 for a client
    /// when none admits requests or all that do are full.
    pub(super) fn take(
        &mut self,
        prompt: &Prompt,
        namespace: Option<&str>,
        count: usize,
    ) -> Result<usize, Refusal> {
        if let Some(refusal) = self.refusing() {
            return Err(refusal);
        }
        let max = self.settings.requests_open_max;
        let admitting = self.replicas.iter().enumerate().filter(|(_, r)| r.is_admitting());
        let with_room = admitting.filter(|(_, r)| r.open + count <= max);
        let (suspect, sound): (Vec<_>, Vec<_>) = with_room.partition(|(_, r)| r.is_suspect);
        // Who does not answer may do so again: better a wait than a refusal.
        let offered = if sound.is_empty() { suspect } else { sound };
        let offered: Vec<Candidate> =
            offered.into_iter().map(|(replica, r)| Candidate { replica, load: r.open }).collect();
        let chosen = self.router.choose(prompt, namespace, &offered);
        let (chosen, reason) = chosen.ok_or_else(|| queue_full(self.settings.total_open_max()))?;
        let replica = &mut self.replicas[chosen];
        replica.open += count;
        *replica.routed.entry(reason).or_default() += count as u64;
        Ok(chosen)
    }

    /// `count` requests of a replica have ended, or were never sent.
    pub(super) fn release(&mut self, replica: usize, count: usize) {
        self.replicas[replica].open -= count;
    }

    /// Why no replica admits requests, if none does.
    pub(super) fn refusing(&self) -> Option<Refusal> {
        if self.replicas.iter().any(Replica::is_admitting) {
            return None;
        }
        let lost = self.replicas.iter().find_map(|replica| replica.lost.clone());
        Some(lost.unwrap_or_else(|| {
            let drained = "every replica of this server is drained; POST /resume_replica or try again later";
            Refusal::unavailable(drained).with_code("drained")
        }))
    }

    /// A replica has failed: it gets nothing until [`Self::rejoin`].
    pub(super) fn lose(&mut self, replica: usize, refusal: Refusal) {
        self.router.forget(replica);
        let replica = &mut self.replicas[replica];
        (replica.lost, replica.is_suspect) = (Some(refusal), false);
    }

    /// A request that was not begun goes elsewhere.
    pub(super) fn note_moved(&mut self, from: usize) {
        self.replicas[from].moved_away += 1;
    }

    /// A replica that had failed is there again.
    pub(super) fn rejoin(&mut self, replica: usize) {
        let replica = &mut self.replicas[replica];
        replica.lost = None;
        replica.restarts += 1;
    }

    /// All are new.
    pub(super) fn renew(&mut self) {
        self.router.forget_all();
        for replica in &mut self.replicas {
            (replica.lost, replica.is_suspect) = (None, false);
        }
    }

    /// The cached prefixes of every replica are gone.
    pub(super) fn forget_prefixes(&mut self) {
        self.router.forget_all();
    }

    /// Stops, or goes on with, sending requests to a replica.
    pub(super) fn set_draining(&mut self, replica: usize, is_draining: bool) {
        self.replicas[replica].is_draining = is_draining;
    }

    /// These do not answer at the moment, all others do.
    pub(super) fn set_suspects(&mut self, suspects: &[usize]) {
        for (number, replica) in self.replicas.iter_mut().enumerate() {
            replica.is_suspect = suspects.contains(&number);
        }
    }

    /// Whether some replica answers requests.
    pub(super) fn any_serving(&self) -> bool {
        self.replicas.iter().any(|replica| replica.state() == ReplicaState::Serving)
    }

    /// How requests are spread.
    pub(super) fn policy(&self) -> DpPolicy {
        self.router.policy()
    }

    /// All of them, in order.
    pub(super) fn status(&self) -> Vec<ReplicaStatus> {
        let status = |(replica, r): (usize, &Replica)| ReplicaStatus {
            replica,
            state: r.state(),
            open: r.open,
            routed: r.routed.clone(),
            moved_away: r.moved_away,
            restarts: r.restarts,
        };
        self.replicas.iter().enumerate().map(status).collect()
    }
}

/// The 503 of a full server.
pub(super) fn queue_full(requests_open_max: usize) -> Refusal {
    Refusal::unavailable(format!(
        "the server has {requests_open_max} requests open, its limit; try again later"
    ))
    .with_code("queue_full")
}

/// What several replicas are together: pages, requests and totals added up, ranks in order, the smallest context.
pub(crate) fn together(infos: &[(usize, EngineInfo)]) -> EngineInfo {
    let mut sum = EngineInfo::default();
    for (at, (_, info)) in infos.iter().enumerate() {
        sum.context_max = if at == 0 { info.context_max } else { sum.context_max.min(info.context_max) };
        sum.page_size = info.page_size;
        for (sum, of) in [
            (&mut sum.pages_total, info.pages_total),
            (&mut sum.pages_free, info.pages_free),
            (&mut sum.pages_cached, info.pages_cached),
            (&mut sum.pages_held, info.pages_held),
            (&mut sum.waiting, info.waiting),
            (&mut sum.running, info.running),
            (&mut sum.draining, info.draining),
        ] {
            *sum += of;
        }
        let (totals, of) = (&mut sum.totals, &info.totals);
        for (sum, of) in [
            (&mut totals.steps, of.steps),
            (&mut totals.prompt_tokens, of.prompt_tokens),
            (&mut totals.cached_tokens, of.cached_tokens),
            (&mut totals.generated_tokens, of.generated_tokens),
            (&mut totals.computed_tokens, of.computed_tokens),
            (&mut totals.retractions, of.retractions),
            (&mut totals.evicted_pages, of.evicted_pages),
            (&mut totals.prefix_waits, of.prefix_waits),
        ] {
            *sum += of;
        }
        sum.ranks.extend(info.ranks.iter().cloned());
        let news = info.notes.iter().filter(|note| !sum.notes.contains(note)).cloned().collect::<Vec<_>>();
        sum.notes.extend(news);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas(count: usize, requests_open_max: usize) -> Replicas {
        let policy = DpPolicy::LeastLoad;
        Replicas::new(Replication { replicas: count, requests_open_max, policy, load_bound: 0 })
    }

    fn take(replicas: &mut Replicas, count: usize) -> Result<usize, Option<String>> {
        replicas.take(&Prompt::Text("a".into()), None, count).map_err(|refusal| refusal.code)
    }

    #[test]
    fn each_replica_has_its_own_bound() {
        let mut replicas = replicas(2, 4);
        assert_eq!(take(&mut replicas, 3), Ok(0));
        assert_eq!(take(&mut replicas, 2), Ok(1), "three and two are too many for one");
        assert_eq!(take(&mut replicas, 3), Err(Some("queue_full".into())));
        assert_eq!(take(&mut replicas, 2), Ok(1));
        assert_eq!(take(&mut replicas, 1), Ok(0));
        assert_eq!(take(&mut replicas, 1), Err(Some("queue_full".into())));
        replicas.release(0, 3);
        assert_eq!(take(&mut replicas, 1), Ok(0));
    }

    #[test]
    fn who_is_lost_drained_or_suspect_gets_nothing_while_another_serves() {
        let mut replicas = replicas(3, 9);
        replicas.lose(0, Refusal::unavailable("gone").with_code("engine_restarting"));
        replicas.set_draining(1, true);
        assert_eq!((take(&mut replicas, 1), take(&mut replicas, 1)), (Ok(2), Ok(2)));
        replicas.set_suspects(&[2]);
        assert!(!replicas.any_serving());
        assert_eq!(take(&mut replicas, 1), Ok(2), "it may answer again");
        replicas.set_draining(2, true);
        assert_eq!(take(&mut replicas, 1), Err(Some("engine_restarting".into())));
        let states: Vec<_> = replicas.status().iter().map(|status| status.state.name()).collect();
        assert_eq!(states, ["restarting", "drained", "draining"]);
        replicas.rejoin(0);
        replicas.set_draining(0, true);
        assert_eq!(take(&mut replicas, 1), Err(Some("drained".into())));
        replicas.set_draining(0, false);
        assert_eq!((take(&mut replicas, 1), replicas.status()[0].restarts), (Ok(0), 1));
    }

    #[test]
    fn replicas_add_up() {
        let info = |context_max, pages_free| EngineInfo {
            context_max,
            pages_free,
            notes: vec!["slow".into()],
            ..EngineInfo::default()
        };
        let sum = together(&[(0, info(64, 3)), (1, info(32, 4))]);
        assert_eq!((sum.context_max, sum.pages_free, sum.notes.len()), (32, 7, 1));
    }
}
