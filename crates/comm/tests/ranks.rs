//! Rank groups of 2, 3, 4 and 8 members, as threads and as real processes.
//!
//! A process is this test binary started again with one test selected and the shared memory as its
//! standard input.

// A failed unwrap is a failed test, in helper functions too.
#![allow(clippy::unwrap_used)]

use lockstep_comm::collective::CollectiveError;
use lockstep_comm::shm::Operation;
use lockstep_comm::watch::{Position, Track, WatchPage};
use lockstep_comm::{
    AbortHandle, Collective, Patience, ProcessGroup, SharedRegion, ShmCollective, ShmGroup, ShmLayout,
    ShmOptions, StreamHandle,
};
use lockstep_core::DType;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SLOT_BYTES: usize = 16 << 10;
/// Long enough that only a hang reaches it.
const LONG: Duration = Duration::from_secs(120);
const ROLE: &str = "LOCKSTEP_TEST_ROLE";
const PAGE: &str = "LOCKSTEP_TEST_PAGE";

/// xorshift64*: the same numbers on every rank for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }
}

fn group_of(size: usize) -> OwnedFd {
    SharedRegion::create(ShmLayout::new(size, SLOT_BYTES).unwrap()).unwrap()
}

fn options(size: usize) -> ShmOptions {
    ShmOptions { deadline: LONG, ..ShmOptions::for_ranks(size) }
}

/// Element `i` of rank `rank` in round `round`: a float with a full mantissa.
fn value(round: u64, rank: usize, i: usize) -> f32 {
    let mut random = Random((round << 40) ^ ((rank as u64) << 32) ^ i as u64 ^ 0x9e37_79b9_7f4a_7c15);
    random.next();
    ((random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * (1 << (i % 7)) as f32
}

/// The sum that the design prescribes, one scalar at a time.
fn scalar_tree(terms: &[f32]) -> f32 {
    match terms {
        [one] => *one,
        _ => {
            let mut left = 1;
            while left * 2 < terms.len() {
                left *= 2;
            }
            scalar_tree(&terms[..left]) + scalar_tree(&terms[left..])
        }
    }
}

/// Sizes around every boundary: nothing, one, the one-shot limit, the slot, several slots.
fn count(random: &mut Random, element_bytes: usize) -> usize {
    let slot = SLOT_BYTES / element_bytes;
    match random.below(6) {
        0 => random.below(3),
        1 => random.below(300),
        2 => slot - 1 + random.below(3),
        3 => slot + random.below(slot),
        4 => slot * 2 - 1 + random.below(3),
        _ => slot + random.below(slot * 3),
    }
}

/// The members of one rank.
struct Rank {
    rank: usize,
    size: usize,
    group: ShmGroup,
    collective: ShmCollective,
}

impl Rank {
    fn join(fd: impl AsFd, rank: usize, size: usize) -> Self {
        let region = Arc::new(SharedRegion::map(fd).unwrap());
        let group = ShmGroup::new(region.clone(), rank, options(size)).unwrap();
        let collective = ShmCollective::new(region, rank, options(size)).unwrap();
        Self { rank, size, group, collective }
    }

    /// Shows what it does on `page`.
    fn watched(self, page: &WatchPage) -> Self {
        let mark = page.mark(self.rank);
        let Self { rank, size, group, collective } = self;
        Self { rank, size, group: group.watched(mark.clone()), collective: collective.watched(mark) }
    }

    /// Runs `rounds` random operations, the same on every rank, and checks every result.
    fn run(&mut self, seed: u64, rounds: u64) {
        let mut random = Random(seed);
        for round in 0..rounds {
            match random.below(8) {
                0 => self.group.barrier(Patience::Deadline(LONG)).unwrap(),
                1 => self.group_all_gather(round, &mut random),
                2 => self.group_broadcast(round, &mut random),
                3 => self.all_gather(round, &mut random),
                4 => self.send_recv(round, &mut random),
                5 => self.all_reduce_f32(round, &mut random),
                6 => self.all_reduce_half(round, &mut random, DType::Bf16),
                _ => self.all_reduce_half(round, &mut random, DType::F16),
            }
        }
    }

    fn group_all_gather(&mut self, round: u64, random: &mut Random) {
        let len = [0, 1, 8, 100, 64 << 10][random.below(5)];
        let mine = vec![(round as usize + self.rank) as u8; len];
        let mut all = vec![0; len * self.size];
        self.group.all_gather(&mine, &mut all, Patience::Deadline(LONG)).unwrap();
        for (i, byte) in all.iter().enumerate() {
            assert_eq!(*byte, (round as usize + i / len) as u8, "round {round}");
        }
    }

    fn group_broadcast(&mut self, round: u64, random: &mut Random) {
        let (len, root) = ([0, 1, 128, 70_000, 200_000][random.below(5)], random.below(self.size));
        let byte = |rank: usize, i: usize| (round as usize + rank * 31 + i) as u8;
        let mut data: Vec<u8> = (0..len).map(|i| byte(self.rank, i)).collect();
        self.group.broadcast(&mut data, root, Patience::Deadline(LONG)).unwrap();
        assert!(data.iter().enumerate().all(|(i, b)| *b == byte(root, i)), "round {round}");
    }

    fn all_gather(&mut self, round: u64, random: &mut Random) {
        let count = count(random, 4);
        let mine: Vec<f32> = (0..count).map(|i| value(round, self.rank, i)).collect();
        let mut all = vec![0f32; count * self.size];
        let collective: &dyn Collective = &self.collective;
        collective.all_gather_f32(&mine, &mut all).unwrap();
        for (i, got) in all.iter().enumerate() {
            assert_eq!(*got, value(round, i / count, i % count), "round {round}");
        }
    }

    fn send_recv(&mut self, round: u64, random: &mut Random) {
        let count = count(random, 4) * (1 + random.below(3));
        let from = random.below(self.size);
        let to = (from + 1 + random.below(self.size - 1)) % self.size;
        let mut data: Vec<f32> = (0..count).map(|i| value(round, self.rank, i)).collect();
        let at = data.as_mut_ptr().cast();
        // SAFETY: `count` floats, alive during the call.
        unsafe {
            if self.rank == from {
                self.collective.send(at, count, DType::F32, to, StreamHandle::HOST).unwrap();
            } else if self.rank == to {
                self.collective.recv(at, count, DType::F32, from, StreamHandle::HOST).unwrap();
                assert!(data.iter().enumerate().all(|(i, v)| *v == value(round, from, i)), "round {round}");
            }
        }
    }

    /// `size` terms of element `i`, in rank order.
    fn terms(&self, round: u64, i: usize) -> Vec<f32> {
        (0..self.size).map(|rank| value(round, rank, i)).collect()
    }

    fn all_reduce_f32(&mut self, round: u64, random: &mut Random) {
        let count = count(random, 4);
        let mut x: Vec<f32> = (0..count).map(|i| value(round, self.rank, i)).collect();
        let collective: &dyn Collective = &self.collective;
        collective.all_reduce_f32(&mut x).unwrap();
        for (i, got) in x.iter().enumerate() {
            let want = scalar_tree(&self.terms(round, i));
            assert_eq!(got.to_bits(), want.to_bits(), "round {round}, element {i} of {count}");
        }
    }

    fn all_reduce_half(&mut self, round: u64, random: &mut Random, dtype: DType) {
        let narrow = |x: f32| match dtype {
            DType::Bf16 => half::bf16::from_f32(x).to_bits(),
            _ => half::f16::from_f32(x).to_bits(),
        };
        let wide = |bits: u16| match dtype {
            DType::Bf16 => half::bf16::from_bits(bits).to_f32(),
            _ => half::f16::from_bits(bits).to_f32(),
        };
        let count = count(random, 2);
        let mut x: Vec<u16> = (0..count).map(|i| narrow(value(round, self.rank, i))).collect();
        // SAFETY: `count` elements of two bytes, alive during the call.
        unsafe {
            self.collective.all_reduce(x.as_mut_ptr().cast(), count, dtype, StreamHandle::HOST).unwrap()
        };
        for (i, got) in x.iter().enumerate() {
            let terms: Vec<f32> = self.terms(round, i).into_iter().map(|t| wide(narrow(t))).collect();
            assert_eq!(*got, narrow(scalar_tree(&terms)), "round {round}, element {i} of {count}");
        }
    }
}

fn run_threads(size: usize, seed: u64, rounds: u64) {
    eprintln!("{size} threads, seed {seed:#x}");
    let fd = group_of(size);
    std::thread::scope(|scope| {
        for rank in 0..size {
            let fd = fd.as_fd();
            scope.spawn(move || Rank::join(fd, rank, size).run(seed, rounds));
        }
    });
}

#[test]
fn threads_2() {
    run_threads(2, 0x2b99_2d01, 300);
}

#[test]
fn threads_3() {
    run_threads(3, 0x3a01_77f3, 200);
}

#[test]
fn threads_4() {
    run_threads(4, 0x4c11_9b05, 150);
}

#[test]
fn threads_8() {
    run_threads(8, 0x8f12_5307, 80);
}

/// Starts rank `rank` as a process with the given role.
fn spawn(fd: &OwnedFd, role: &str, rank: usize, size: usize, seed: u64) -> Child {
    spawn_watched(fd, None, role, (rank, size, seed))
}

/// The same with a watch page.
fn spawn_watched(
    fd: &OwnedFd,
    page: Option<&OwnedFd>,
    role: &str,
    (rank, size, seed): (usize, usize, u64),
) -> Child {
    let page = page.map(|fd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()));
    Command::new(std::env::current_exe().unwrap())
        .args(["rank_process", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, format!("{role} {rank} {size} {seed}"))
        .env(PAGE, page.unwrap_or_default())
        .stdin(Stdio::from(fd.try_clone().unwrap()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Does nothing in the test run itself; in a child it is the rank.
#[test]
fn rank_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [role, rank, size, seed] = words[..] else { panic!("{ROLE}={role}") };
    let (rank, size): (usize, usize) = (rank.parse().unwrap(), size.parse().unwrap());
    let mut member = Rank::join(std::io::stdin(), rank, size);
    let page = std::env::var(PAGE).unwrap();
    if !page.is_empty() {
        let page = File::options().read(true).write(true).open(page).unwrap();
        member = member.watched(&WatchPage::map(page).unwrap());
    }
    match role {
        "random" => member.run(seed.parse().unwrap(), 120),
        "wait" => match member.group.barrier(Patience::Idle) {
            Err(CollectiveError::Aborted { cause, .. }) => assert_eq!(cause, "rank 1 was killed by signal 9"),
            other => panic!("{other:?}"),
        },
        "hang" => {
            let _ = member.collective.all_reduce_f32_alone();
        }
        other => panic!("no role {other}"),
    }
}

trait AllReduceAlone {
    fn all_reduce_f32_alone(&self) -> Result<(), CollectiveError>;
}

impl AllReduceAlone for ShmCollective {
    /// An operation that the other ranks never join.
    fn all_reduce_f32_alone(&self) -> Result<(), CollectiveError> {
        let collective: &dyn Collective = self;
        collective.all_reduce_f32(&mut [0.0; 4])
    }
}

#[test]
fn processes_2_3_4_8() {
    for (size, seed) in [(2, 0x1002), (3, 0x1003), (4, 0x1004), (8, 0x1008)] {
        let fd = group_of(size);
        let children: Vec<Child> = (0..size).map(|rank| spawn(&fd, "random", rank, size, seed)).collect();
        for (rank, mut child) in children.into_iter().enumerate() {
            assert!(child.wait().unwrap().success(), "rank {rank} of {size}, seed {seed:#x}");
        }
    }
}

/// Polls `ready` until it holds.
fn until(what: &str, ready: impl Fn() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::yield_now();
    }
}

fn at(page: &WatchPage, rank: usize, track: Track) -> Position {
    *page.read(rank).track(track)
}

#[test]
fn a_killed_rank_releases_the_others_through_the_abort_word() {
    let fd = group_of(2);
    let (page_fd, page) = WatchPage::create(2).unwrap();
    let abort = AbortHandle::new(&fd).unwrap();
    let mut waiting = spawn_watched(&fd, Some(&page_fd), "wait", (0, 2, 0));
    let mut dying = spawn_watched(&fd, Some(&page_fd), "hang", (1, 2, 0));
    until("rank 0 waits in its barrier", || at(&page, 0, Track::Group).inside);
    until("rank 1 waits in its all_reduce", || at(&page, 1, Track::Tensors).inside);
    assert_eq!(at(&page, 0, Track::Group).operation(), Operation::Barrier);
    assert_eq!(at(&page, 1, Track::Tensors).operation(), Operation::AllReduce);
    assert_eq!(at(&page, 1, Track::Tensors).sequence, 1);
    let beat = page.read(0).beat_ns;
    until("a rank that waits beats", || page.read(0).beat_ns > beat);
    dying.kill().unwrap();
    dying.wait().unwrap();
    let start = Instant::now();
    assert!(abort.abort("rank 1 was killed by signal 9"));
    assert!(waiting.wait().unwrap().success(), "rank 0 leaves with the cause");
    // 50 ms are promised; the rest is for a busy machine and the end of the process.
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn the_page_tells_inside_from_left() {
    let fd = group_of(2);
    let (_, page) = WatchPage::create(2).unwrap();
    assert_eq!(at(&page, 0, Track::Group).operation(), Operation::None);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (fd, page) = (fd.as_fd(), &page);
            scope.spawn(move || {
                let mut member = Rank::join(fd, rank, 2).watched(page);
                for _ in 0..5 {
                    member.group.barrier(Patience::Idle).unwrap();
                }
            });
        }
    });
    let group = at(&page, 1, Track::Group);
    assert_eq!((group.sequence, group.operation(), group.inside), (5, Operation::Barrier, false));
    let mut events = Vec::new();
    assert_eq!(page.events(1, Track::Group, 0, &mut events), (10, 0));
    let seen: Vec<_> = events.iter().map(|e| (e.sequence, e.inside)).collect();
    assert_eq!(seen, (1..=5).flat_map(|n| [(n, true), (n, false)]).collect::<Vec<_>>());
}

/// CPU time of the calling thread.
fn thread_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn an_idle_wait_burns_no_core() {
    for ranks_share_cores in [false, true] {
        let fd = group_of(2);
        let region = Arc::new(SharedRegion::map(&fd).unwrap());
        let options = ShmOptions { deadline: LONG, ranks_share_cores };
        let [mut idle, mut late] = [0, 1].map(|rank| ShmGroup::new(region.clone(), rank, options).unwrap());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(move || {
                let (start, cpu) = (Instant::now(), thread_cpu());
                idle.barrier(Patience::Idle).unwrap();
                (start.elapsed(), thread_cpu() - cpu)
            });
            // Not synchronisation: the time over which the idle rank's CPU time is measured.
            std::thread::sleep(Duration::from_millis(400));
            late.barrier(Patience::Idle).unwrap();
            let (waited, cpu) = waiting.join().unwrap();
            assert!(cpu < Duration::from_millis(20), "{cpu:?} of CPU time in {waited:?}");
        });
    }
}

#[test]
fn an_abort_reaches_a_sleeping_thread_in_every_operation() {
    type Wait = fn(Rank) -> CollectiveError;
    let waits: [Wait; 4] = [
        |mut member| member.group.barrier(Patience::Idle).unwrap_err(),
        |mut member| member.group.broadcast(&mut [0; 9], 1, Patience::Deadline(LONG)).unwrap_err(),
        |member| member.collective.all_reduce_f32_alone().unwrap_err(),
        // SAFETY: four writable floats.
        |member| unsafe {
            let mut data = [0f32; 4];
            member
                .collective
                .recv(data.as_mut_ptr().cast(), 4, DType::F32, 1, StreamHandle::HOST)
                .unwrap_err()
        },
    ];
    for wait in waits {
        let fd = group_of(2);
        let ((_, page), abort) = (WatchPage::create(2).unwrap(), AbortHandle::new(&fd).unwrap());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wait(Rank::join(&fd, 0, 2).watched(&page)));
            until("the rank waits", || {
                at(&page, 0, Track::Group).inside || at(&page, 0, Track::Tensors).inside
            });
            abort.abort("stopping");
            let error = waiting.join().unwrap();
            assert!(
                matches!(&error, CollectiveError::Aborted { rank: 0, cause, .. } if cause == "stopping"),
                "{error}"
            );
        });
    }
}

#[test]
fn a_panicking_rank_releases_the_others() {
    let fd = group_of(2);
    std::thread::scope(|scope| {
        let (first, second) = (fd.as_fd(), fd.as_fd());
        let panics = scope.spawn(move || {
            let _member = Rank::join(first, 1, 2);
            panic!("on purpose");
        });
        let waits = scope.spawn(move || Rank::join(second, 0, 2).group.barrier(Patience::Idle).unwrap_err());
        assert!(panics.join().is_err());
        assert!(waits.join().unwrap().to_string().contains("rank 1 panicked"));
    });
}
