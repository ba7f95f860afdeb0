//! Rank groups of 2, 3, 4 and 8 members, as threads and as real processes.
//!
//! A process is this test binary started again with one test selected and the shared memory as its
//! standard input.

// A failed unwrap is a failed test, in helper functions too.
#![allow(clippy::unwrap_used)]

mod conformance;

use conformance::{LONG, Rank, SLOT_BYTES};
use lockstep_comm::collective::CollectiveError;
use lockstep_comm::shm::Operation;
use lockstep_comm::watch::{Position, Track, WatchPage};
use lockstep_comm::{
    AbortHandle, Patience, ProcessGroup, SharedRegion, ShmCollective, ShmGroup, ShmLayout, ShmOptions,
    StreamHandle,
};
use lockstep_core::DType;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const ROLE: &str = "LOCKSTEP_TEST_ROLE";
const PAGE: &str = "LOCKSTEP_TEST_PAGE";

fn group_of(size: usize) -> OwnedFd {
    SharedRegion::create(ShmLayout::new(size, SLOT_BYTES).unwrap()).unwrap()
}

fn options(size: usize) -> ShmOptions {
    ShmOptions { deadline: LONG, ..ShmOptions::for_ranks(size) }
}

/// Joins as `rank`, showing what it does on `page`.
fn join(fd: impl AsFd, rank: usize, size: usize, page: Option<&WatchPage>) -> Rank {
    let region = Arc::new(SharedRegion::map(fd).unwrap());
    let mut group = ShmGroup::new(region.clone(), rank, options(size)).unwrap();
    let mut collective = ShmCollective::new(region, rank, options(size)).unwrap();
    if let Some(mark) = page.map(|page| page.mark(rank)) {
        (group, collective) = (group.watched(mark.clone()), collective.watched(mark));
    }
    Rank { rank, size, group: Box::new(group), collective: Box::new(collective) }
}

fn run_threads(size: usize, seed: u64, rounds: u64) {
    eprintln!("{size} threads, seed {seed:#x}");
    let fd = group_of(size);
    std::thread::scope(|scope| {
        for rank in 0..size {
            let fd = fd.as_fd();
            scope.spawn(move || join(fd, rank, size, None).run(seed, rounds));
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
    let page = std::env::var(PAGE).unwrap();
    let page = (!page.is_empty()).then(|| {
        let page = File::options().read(true).write(true).open(page).unwrap();
        WatchPage::map(page).unwrap()
    });
    let mut member = join(std::io::stdin(), rank, size, page.as_ref());
    match role {
        "random" => member.run(seed.parse().unwrap(), 120),
        "wait" => match member.group.barrier(Patience::Idle) {
            Err(CollectiveError::Aborted { cause, .. }) => assert_eq!(cause, "rank 1 was killed by signal 9"),
            other => panic!("{other:?}"),
        },
        "hang" => {
            let _ = member.collective.all_reduce_f32(&mut [0.0; 4]);
        }
        other => panic!("no role {other}"),
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
                let mut member = join(fd, rank, 2, Some(page));
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
        |member| member.collective.all_reduce_f32(&mut [0.0; 4]).unwrap_err(),
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
            let waiting = scope.spawn(|| wait(join(&fd, 0, 2, Some(&page))));
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
            let _member = join(first, 1, 2, None);
            panic!("on purpose");
        });
        let waits = scope.spawn(move || join(second, 0, 2, None).group.barrier(Patience::Idle).unwrap_err());
        assert!(panics.join().is_err());
        assert!(waits.join().unwrap().to_string().contains("rank 1 panicked"));
    });
}
