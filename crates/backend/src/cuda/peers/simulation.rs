//! The protocol of `peers.cu`, tried with random schedules: threads of blocks of ranks take their steps in any order, and
//! what is written to another rank arrives in any order too, at the latest when the writer's kernel ends.
//!
//! What must hold: nothing is overwritten before it was taken, nobody takes a word of another turn, and all ranks
//! end with the same sums. With one phase it does not hold, which shows that the test can tell.

use lockstep_core::random::splitmix64;
use std::collections::VecDeque;

/// A stream from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        (splitmix64(&mut self.0) % end as u64) as usize
    }
}

/// A value in flight or in a slot: whose, of which turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    turn: usize,
    source: usize,
    is_total: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    OneShot,
    TwoShot,
}

/// One kernel: turns of the one lane that is simulated, each of so many vectors.
#[derive(Clone)]
struct Launch {
    kind: Kind,
    widths: Vec<usize>,
}

/// What a thread still does in its turn, first first.
#[derive(Clone, Copy, Debug)]
enum Action {
    Put { to: usize, is_total: bool },
    Take { from: usize, is_total: bool },
}

const WIDTH_MAX: usize = 6;

/// One rank: where it is in its launches, and its inbox `[phase][source][vector]`.
struct Rank {
    inbox: Vec<Option<Word>>,
    launch: usize,
    turn_in_launch: usize,
    turn: usize,
    threads: Vec<VecDeque<Action>>,
    /// Own writes that have not arrived: (to, place, word).
    in_flight: Vec<(usize, usize, Word)>,
    taken: usize,
}

struct World {
    ranks: Vec<Rank>,
    launches: Vec<Launch>,
    phases: usize,
}

impl World {
    fn new(ranks: usize, phases: usize, launches: Vec<Launch>) -> Self {
        let rank = |_| Rank {
            inbox: vec![None; phases * ranks * WIDTH_MAX],
            launch: 0,
            turn_in_launch: 0,
            turn: 0,
            threads: Vec::new(),
            in_flight: Vec::new(),
            taken: 0,
        };
        let mut world = Self { ranks: (0..ranks).map(rank).collect(), launches, phases };
        (0..ranks).for_each(|rank| world.begin_turn(rank));
        world
    }

    fn place(&self, turn: usize, source: usize, vector: usize) -> usize {
        (turn % self.phases * self.ranks.len() + source) * WIDTH_MAX + vector
    }

    /// The steps of every thread of a rank in the turn it begins, as `one_shot` and `two_shot` take them.
    fn begin_turn(&mut self, rank: usize) {
        let ranks = self.ranks.len();
        let me = &mut self.ranks[rank];
        let Some(launch) = self.launches.get(me.launch) else { return };
        let width = launch.widths[me.turn_in_launch];
        let others = (0..ranks).filter(|r| *r != rank);
        let script = |vector: usize| {
            let owner = vector * ranks / width;
            let puts = |is_total| others.clone().map(move |to| Action::Put { to, is_total });
            let takes = others.clone().map(|from| Action::Take { from, is_total: false });
            match launch.kind {
                Kind::OneShot => puts(false).chain(takes).collect(),
                Kind::TwoShot if owner == rank => takes.chain(puts(true)).collect(),
                Kind::TwoShot => VecDeque::from([
                    Action::Put { to: owner, is_total: false },
                    Action::Take { from: owner, is_total: true },
                ]),
            }
        };
        me.threads = (0..width).map(script).collect();
    }

    fn is_done(&self, rank: usize) -> bool {
        self.ranks[rank].launch == self.launches.len()
    }

    /// Lets a random write of `rank` arrive. Errors when its place is not empty.
    fn deliver(&mut self, rank: usize, random: &mut Random) -> Result<(), String> {
        let me = &mut self.ranks[rank];
        if me.in_flight.is_empty() {
            return Ok(());
        }
        let (to, place, word) = me.in_flight.swap_remove(random.below(me.in_flight.len()));
        match self.ranks[to].inbox[place].replace(word) {
            None => Ok(()),
            Some(old) => Err(format!("rank {to}: {word:?} overwrites {old:?}")),
        }
    }

    /// One step of a random thread of `rank`.
    fn step(&mut self, rank: usize, random: &mut Random) -> Result<(), String> {
        if self.is_done(rank) {
            return Ok(());
        }
        let busy: Vec<usize> = (0..self.ranks[rank].threads.len())
            .filter(|t| !self.ranks[rank].threads[*t].is_empty())
            .collect();
        let turn = self.ranks[rank].turn;
        if busy.is_empty() {
            return self.end_turn(rank, random);
        }
        let vector = busy[random.below(busy.len())];
        match self.ranks[rank].threads[vector][0] {
            Action::Put { to, is_total } => {
                let place = self.place(turn, rank, vector);
                self.ranks[rank].in_flight.push((to, place, Word { turn, source: rank, is_total }));
            }
            Action::Take { from, is_total } => {
                let place = self.place(turn, from, vector);
                // Not there yet: the thread polls on.
                let Some(word) = self.ranks[rank].inbox[place] else { return Ok(()) };
                if word != (Word { turn, source: from, is_total }) {
                    return Err(format!("rank {rank} takes {word:?} in turn {turn}"));
                }
                self.ranks[rank].inbox[place] = None;
                self.ranks[rank].taken += 1;
            }
        }
        self.ranks[rank].threads[vector].pop_front();
        Ok(())
    }

    /// All threads are at the barrier between turns, or at the end of the kernel, where their writes have arrived.
    fn end_turn(&mut self, rank: usize, random: &mut Random) -> Result<(), String> {
        let me = &mut self.ranks[rank];
        me.turn += 1;
        me.turn_in_launch += 1;
        if me.turn_in_launch == self.launches[me.launch].widths.len() {
            (me.turn_in_launch, me.launch) = (0, me.launch + 1);
            while !self.ranks[rank].in_flight.is_empty() {
                self.deliver(rank, random)?;
            }
        }
        self.ranks[rank].threads.clear();
        self.begin_turn(rank);
        Ok(())
    }
}

/// Random launches on `ranks` ranks under a random schedule. Errors with the first thing that must not happen.
fn run(ranks: usize, phases: usize, seed: u64) -> Result<(), String> {
    let mut random = Random(seed);
    let launch = |random: &mut Random| Launch {
        kind: if random.below(2) == 0 { Kind::OneShot } else { Kind::TwoShot },
        widths: (0..1 + random.below(3)).map(|_| 1 + random.below(WIDTH_MAX)).collect(),
    };
    let launches: Vec<Launch> = (0..12).map(|_| launch(&mut random)).collect();
    let mut world = World::new(ranks, phases, launches);
    // Some ranks are slow for a while, which is where phases are needed.
    let mut slow = 0;
    for step in 0..4_000_000 {
        if (0..ranks).all(|rank| world.is_done(rank)) {
            let left = world.ranks.iter().any(|rank| rank.inbox.iter().any(Option::is_some));
            return if left { Err("something was not taken".into()) } else { Ok(()) };
        }
        if step % 200 == 0 {
            slow = random.below(ranks);
        }
        let rank = random.below(ranks);
        if rank == slow && random.below(20) != 0 {
            continue;
        }
        match random.below(3) {
            0 => world.deliver(rank, &mut random)?,
            _ => world.step(rank, &mut random)?,
        }
    }
    Err("the ranks wait for each other for ever".into())
}

#[test]
fn two_phases_are_enough_whatever_the_schedule() {
    for ranks in [2, 4, 8] {
        for seed in 0..60 {
            if let Err(problem) = run(ranks, super::PHASES, seed) {
                panic!("{ranks} ranks, seed {seed}: {problem}");
            }
        }
    }
}

#[test]
fn one_phase_is_not() {
    let failed = (0..60).filter(|seed| run(4, 1, *seed).is_err()).count();
    assert!(failed > 0, "the simulation finds no fault where there is one");
}
