//! Which replica answers a request; pure: no clock, no I/O, the same choices for the same calls.
//!
//! With [`DpPolicy::PrefixAffinity`] a request goes where most of its prompt has been before, since its KV is likely
//! to be cached there. What replicas hold is not asked but remembered: the prompts that were sent to them, cut into
//! pieces of [`PIECE_BYTES`], each known by the hash of everything up to its end. A prompt's longest known prefix is
//! then the first piece that is not known. Follows the cache-aware policy of SGLang's router (an approximate radix
//! tree of text for each worker, given up for the shortest queue when loads differ too much); differs: hashes of
//! prefixes in place of a tree, so that a look costs one probe a piece and no text is kept, and a bound on the
//! favourite's lead instead of two thresholds.
//!
//! **Invariants**
//! - Memory is bounded by [`KNOWN_MAX`] prefixes; the half that was not seen for longest is forgotten.
//! - A wrong guess (an evicted prefix, a collision of hashes) costs time, never an answer.
//! - No replica is chosen that the caller did not offer.
//!
//! Called by the registry, under its lock.

use lockstep_wire::{ChatMessages, Prompt};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};

/// Bytes of a prompt that are remembered or not as a whole: about a page of 16 tokens.
const PIECE_BYTES: usize = 64;
/// Pieces of one prompt that are looked at: the first 256 KiB tell where it belongs.
const PIECES_MAX: usize = 4096;
/// Prefixes that are remembered, over all replicas; about 10 MB.
const KNOWN_MAX: usize = 1 << 18;
/// A known prefix counts when it is at least one part in so many of the prompt; less saves too little to wait for.
const KNOWN_PART_MIN: usize = 4;
/// Most replicas: one bit each.
pub const REPLICAS_MAX: usize = 64;

/// How requests are spread over replicas (`--dp-policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DpPolicy {
    /// Where the longest prefix of the prompt was before, unless that replica's load is too far ahead.
    #[default]
    PrefixAffinity,
    /// Where the fewest requests are open.
    LeastLoad,
    /// One after the other.
    RoundRobin,
}

impl DpPolicy {
    /// As flags and `/server_info` write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PrefixAffinity => "prefix-affinity",
            Self::LeastLoad => "least-load",
            Self::RoundRobin => "round-robin",
        }
    }
}

/// Why a replica was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// There is no other.
    Only,
    /// It has seen the prompt's beginning.
    Prefix,
    /// It has the fewest open requests.
    Load,
    /// It was its turn.
    Turn,
}

impl Reason {
    /// All of them.
    pub const ALL: [Reason; 4] = [Reason::Only, Reason::Prefix, Reason::Load, Reason::Turn];

    /// As metrics write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Prefix => "prefix",
            Self::Load => "load",
            Self::Turn => "turn",
        }
    }
}

/// A replica that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its number, below [`REPLICAS_MAX`].
    pub replica: usize,
    /// Its open requests.
    pub load: usize,
}

/// The state behind the choices.
#[derive(Debug)]
pub struct Router {
    policy: DpPolicy,
    /// How many open requests a favourite may be ahead of the least loaded replica.
    load_bound: usize,
    /// Requests sent to each replica.
    routed: Vec<u64>,
    /// The replica whose turn it is.
    turn: usize,
    known: Known,
}

impl Router {
    /// A router over `replicas` replicas that knows nothing yet. A favourite may have `load_bound` more open requests
    /// than the least loaded replica.
    pub fn new(policy: DpPolicy, replicas: usize, load_bound: usize) -> Self {
        assert!((1..=REPLICAS_MAX).contains(&replicas), "{replicas} replicas");
        Self { policy, load_bound, routed: vec![0; replicas], turn: 0, known: Known::default() }
    }

    /// The policy.
    pub fn policy(&self) -> DpPolicy {
        self.policy
    }

    /// The replica for a prompt whose prefixes in this namespace are remembered from now on as being there; `None`
    /// without candidates.
    pub fn choose(
        &mut self,
        prompt: &Prompt,
        namespace: Option<&str>,
        candidates: &[Candidate],
    ) -> Option<(usize, Reason)> {
        let least = *candidates.iter().min_by_key(|c| (c.load, self.routed[c.replica], c.replica))?;
        if self.policy != DpPolicy::PrefixAffinity || self.routed.len() == 1 {
            let (replica, reason) = match self.policy {
                _ if candidates.len() == 1 => (least.replica, Reason::Only),
                DpPolicy::RoundRobin => (self.next_in_turn(candidates), Reason::Turn),
                _ => (least.replica, Reason::Load),
            };
            self.routed[replica] += 1;
            return Some((replica, reason));
        }
        let pieces = pieces(prompt, namespace);
        let matched = self.known.matched(&pieces);
        let favourite = candidates
            .iter()
            .filter(|c| matched[c.replica] > 0 && matched[c.replica] * KNOWN_PART_MIN >= pieces.len())
            .filter(|c| c.load <= least.load + self.load_bound)
            .min_by_key(|c| (usize::MAX - matched[c.replica], c.load, c.replica));
        let (replica, reason) = match favourite {
            _ if candidates.len() == 1 => (least.replica, Reason::Only),
            Some(favourite) => (favourite.replica, Reason::Prefix),
            None => (least.replica, Reason::Load),
        };
        self.known.remember(&pieces, replica);
        self.routed[replica] += 1;
        Some((replica, reason))
    }

    /// The candidate at or after the turn, which then passes on.
    fn next_in_turn(&mut self, candidates: &[Candidate]) -> usize {
        let replicas = self.routed.len();
        let away = |c: &Candidate| (c.replica + replicas - self.turn) % replicas;
        let next = candidates.iter().min_by_key(|c| away(c)).map_or(0, |c| c.replica);
        self.turn = (next + 1) % replicas;
        next
    }

    /// A replica's cache is empty.
    pub fn forget(&mut self, replica: usize) {
        self.known.forget(replica);
    }

    /// Every replica's cache is empty.
    pub fn forget_all(&mut self) {
        self.known = Known::default();
    }
}

/// Which prefixes were sent to which replicas (a bit each), in two generations: when the young one is full it
/// becomes the old one, whose members are forgotten unless they are seen again before that happens the next time.
#[derive(Debug, Default)]
struct Known {
    young: HashMap<u64, u64>,
    old: HashMap<u64, u64>,
}

impl Known {
    fn replicas(&self, piece: u64) -> u64 {
        let of = |generation: &HashMap<u64, u64>| generation.get(&piece).copied().unwrap_or_default();
        of(&self.young) | of(&self.old)
    }

    /// Leading pieces that each replica has seen.
    fn matched(&self, pieces: &[u64]) -> [usize; REPLICAS_MAX] {
        let mut matched = [0; REPLICAS_MAX];
        let mut alive = u64::MAX;
        for (count, piece) in pieces.iter().enumerate() {
            let still = alive & self.replicas(*piece);
            let mut lost = alive & !still;
            while lost != 0 {
                matched[lost.trailing_zeros() as usize] = count;
                lost &= lost - 1;
            }
            alive = still;
            if alive == 0 {
                return matched;
            }
        }
        for (replica, count) in matched.iter_mut().enumerate() {
            if alive >> replica & 1 == 1 {
                *count = pieces.len();
            }
        }
        matched
    }

    fn remember(&mut self, pieces: &[u64], replica: usize) {
        for piece in pieces {
            let seen = self.replicas(*piece) | 1 << replica;
            self.young.insert(*piece, seen);
            if self.young.len() >= KNOWN_MAX / 2 {
                self.old = std::mem::take(&mut self.young);
            }
        }
    }

    fn forget(&mut self, replica: usize) {
        for generation in [&mut self.young, &mut self.old] {
            generation.retain(|_, replicas| {
                *replicas &= !(1 << replica);
                *replicas != 0
            });
        }
    }
}

/// The hash of each prefix of a prompt that ends with a whole piece. Prompts of different namespaces, and text and
/// tokens, have none in common.
fn pieces(prompt: &Prompt, namespace: Option<&str>) -> Vec<u64> {
    let mut cut = Cut { hasher: DefaultHasher::new(), room: PIECE_BYTES, pieces: Vec::new() };
    let kind = match prompt {
        Prompt::Text(_) => 0,
        Prompt::Tokens(_) => 1,
        Prompt::Chat(_) => 2,
    };
    cut.hasher.write_u8(kind);
    cut.hasher.write(namespace.unwrap_or_default().as_bytes());
    match prompt {
        Prompt::Text(text) => cut.take(text.as_bytes()),
        Prompt::Tokens(tokens) => tokens.iter().for_each(|token| cut.take(&token.to_le_bytes())),
        // In the order in which templates write them: what is the same for a whole service comes first.
        Prompt::Chat(ChatMessages { messages_json, tools_json, template_kwargs_json, .. }) => {
            for part in [template_kwargs_json, tools_json].into_iter().flatten() {
                cut.take(part.as_bytes());
            }
            cut.take(messages_json.as_bytes());
        }
    }
    cut.pieces
}

/// Bytes being cut into pieces.
struct Cut {
    /// Over everything so far.
    hasher: DefaultHasher,
    /// Bytes that the open piece lacks.
    room: usize,
    pieces: Vec<u64>,
}

impl Cut {
    fn take(&mut self, mut bytes: &[u8]) {
        while self.pieces.len() < PIECES_MAX && !bytes.is_empty() {
            let (taken, rest) = bytes.split_at(self.room.min(bytes.len()));
            self.hasher.write(taken);
            self.room -= taken.len();
            bytes = rest;
            if self.room == 0 {
                self.pieces.push(self.hasher.finish());
                self.room = PIECE_BYTES;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    fn text(text: impl Into<String>) -> Prompt {
        Prompt::Text(text.into())
    }

    fn loads(loads: &[usize]) -> Vec<Candidate> {
        loads.iter().enumerate().map(|(replica, load)| Candidate { replica, load: *load }).collect()
    }

    fn router(policy: DpPolicy, replicas: usize) -> Router {
        Router::new(policy, replicas, 4)
    }

    #[test]
    fn a_prompt_goes_where_its_beginning_was() {
        let mut router = router(DpPolicy::PrefixAffinity, 3);
        let systems = ["a", "b", "c"].map(|letter| letter.repeat(640));
        let idle = loads(&[0, 0, 0]);
        // Unknown prompts spread although all loads are equal.
        for (replica, system) in systems.iter().enumerate() {
            let chosen = router.choose(&text(system.as_str()), None, &idle);
            assert_eq!(chosen, Some((replica, Reason::Load)));
        }
        for (replica, system) in systems.iter().enumerate().rev() {
            let chosen = router.choose(&text(format!("{system} and a question")), None, &idle);
            assert_eq!(chosen, Some((replica, Reason::Prefix)));
        }
        // The same text in another namespace or as tokens is another prompt.
        let other = router.choose(&text(systems[2].as_str()), Some("salt"), &idle);
        assert_eq!(other.map(|(_, reason)| reason), Some(Reason::Load));
        // A beginning that is a small part of the prompt is not worth waiting for.
        let long = text(format!("{}{}", systems[2], "z".repeat(64_000)));
        assert_eq!(router.choose(&long, None, &loads(&[0, 0, 1])).map(|c| c.1), Some(Reason::Load));
    }

    #[test]
    fn the_load_bound_spreads_a_prefix_that_everybody_has() {
        let mut router = router(DpPolicy::PrefixAffinity, 2);
        let prompt = text("s".repeat(640));
        assert_eq!(router.choose(&prompt, None, &loads(&[0, 0])), Some((0, Reason::Load)));
        assert_eq!(router.choose(&prompt, None, &loads(&[4, 0])), Some((0, Reason::Prefix)));
        assert_eq!(router.choose(&prompt, None, &loads(&[5, 0])), Some((1, Reason::Load)));
        // Both have it now: the less loaded one.
        assert_eq!(router.choose(&prompt, None, &loads(&[5, 1])), Some((1, Reason::Prefix)));
        // Only what is offered is chosen, and a restart forgets.
        let only = [Candidate { replica: 0, load: 90 }];
        assert_eq!(router.choose(&prompt, None, &only), Some((0, Reason::Only)));
        assert_eq!(router.choose(&prompt, None, &[]), None);
        router.forget(1);
        assert_eq!(router.choose(&prompt, None, &loads(&[3, 0])), Some((0, Reason::Prefix)));
        router.forget_all();
        assert_eq!(router.choose(&prompt, None, &loads(&[3, 0])), Some((1, Reason::Load)));
    }

    #[test]
    fn turns_pass_over_who_is_away() {
        let mut turns = router(DpPolicy::RoundRobin, 3);
        let prompt = text("x");
        let mut choose = |candidates: &[Candidate]| turns.choose(&prompt, None, candidates).map(|c| c.0);
        let all = loads(&[9, 0, 0]);
        assert_eq!([choose(&all), choose(&all), choose(&all)], [Some(0), Some(1), Some(2)]);
        let without_first = &all[1..];
        assert_eq!([choose(without_first), choose(&all), choose(&all)], [Some(1), Some(2), Some(0)]);
        let mut least = router(DpPolicy::LeastLoad, 3);
        assert_eq!(least.choose(&prompt, None, &all), Some((1, Reason::Load)));
        assert_eq!(least.choose(&prompt, None, &all), Some((2, Reason::Load)), "the one with fewer so far");
    }

    #[test]
    fn pieces_are_the_same_however_the_bytes_come() {
        let letters: String = ('a'..='z').cycle().take(1000).collect();
        let whole = pieces(&text(letters.as_str()), None);
        assert_eq!(whole.len(), 1000 / PIECE_BYTES);
        assert_eq!(pieces(&text(&letters[..200]), None), whole[..3]);
        let tokens: Vec<u32> = (0..100).collect();
        let of_tokens = pieces(&Prompt::Tokens(tokens.clone()), None);
        assert_eq!(of_tokens.len(), 400 / PIECE_BYTES);
        assert_eq!(pieces(&Prompt::Tokens(tokens[..50].to_vec()), None), of_tokens[..3]);
        let chat = |tools: Option<&str>| {
            let messages_json = letters.clone();
            Prompt::Chat(ChatMessages {
                messages_json,
                tools_json: tools.map(str::to_owned),
                template_kwargs_json: None,
                add_generation_prompt: true,
            })
        };
        assert_ne!(pieces(&chat(None), None)[0], whole[0]);
        assert_ne!(pieces(&chat(Some("[]")), None)[0], pieces(&chat(None), None)[0]);
        assert_eq!(pieces(&text("x".repeat(PIECE_BYTES * PIECES_MAX + 9)), None).len(), PIECES_MAX);
    }

    /// Sessions that grow by a turn at a time, with random loads: affinity finds their replica whenever the bound
    /// allows it, memory stays bounded, and the same calls make the same choices.
    #[test]
    fn random_sessions_stay_where_they_are() {
        let run = |seed: u64| {
            let mut random = Rng::new(seed);
            let mut router = Router::new(DpPolicy::PrefixAffinity, 4, 8);
            let mut sessions: Vec<(String, Option<usize>)> =
                (0..50).map(|n| (format!("session {n} ").repeat(20), None)).collect();
            let mut choices = Vec::new();
            for _ in 0..5_000 {
                let index = random.below(sessions.len());
                let candidates = loads(&[0; 4].map(|_: usize| random.below(9)));
                let (prompt, home) = &mut sessions[index];
                prompt.push_str("and another turn of some length; ");
                let (replica, reason) = router.choose(&text(prompt.as_str()), None, &candidates).unwrap();
                if let Some(home) = home {
                    assert_eq!((replica, reason), (*home, Reason::Prefix), "seed {seed}");
                }
                *home = Some(replica);
                choices.push(replica);
                if prompt.len() > 4_000 {
                    *prompt = format!("session {index} of {} ", random.below(1 << 20)).repeat(20);
                    *home = None;
                }
            }
            choices
        };
        for seed in 0..2 {
            assert_eq!(run(seed), run(seed), "seed {seed}");
        }
    }

    #[test]
    fn memory_is_bounded_and_what_is_used_stays() {
        let mut known = Known::default();
        let used: Vec<u64> = (0..100).collect();
        for round in 1..40u64 {
            known.remember(&used, 3);
            let fresh: Vec<u64> = (0..20_000).map(|n| round << 32 | n).collect();
            known.remember(&fresh, 1);
            assert!(known.young.len() + known.old.len() <= KNOWN_MAX);
            assert_eq!(known.matched(&used)[3], 100);
        }
        assert_eq!(known.matched(&[1 << 32])[1], 0, "not seen for long");
    }
}
