//! What needs the inside of the region; whole sequences with processes are in `tests/ranks.rs`.

use super::layout::{ABORT_STATE, GROUP_SLOT_BYTES, LINE, Lane, PAIR_CHUNK_BYTES};
use super::*;
use crate::collective::{Collective, CollectiveError, StreamHandle};
use crate::group::{Patience, ProcessGroup};
use lockstep_core::{DType, Topology};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const SLOT: usize = 16 << 10;

fn region(size: usize) -> Arc<SharedRegion> {
    let fd = SharedRegion::create(ShmLayout::new(size, SLOT).unwrap()).unwrap();
    Arc::new(SharedRegion::map(fd).unwrap())
}

fn options(deadline_ms: u64) -> ShmOptions {
    ShmOptions { deadline: Duration::from_millis(deadline_ms), ranks_share_cores: true }
}

#[test]
fn no_two_things_share_a_byte() {
    for size in [1, 2, 3, 8, 64] {
        let layout = ShmLayout::new(size, SLOT).unwrap();
        let mut spans = vec![(0, 4096)];
        for rank in 0..size {
            let slots = [GROUP_SLOT_BYTES, SLOT, GROUP_SLOT_BYTES];
            for (lane, bytes) in Lane::ALL.into_iter().zip(slots) {
                spans.push((layout.flag(lane, rank), LINE));
                spans.extend([0, 1].map(|parity| (layout.slot(lane, rank, parity), bytes)));
            }
            for to in 0..size {
                spans.push((layout.pair_line(rank, to), 2 * LINE));
                let chunk = |c| (layout.pair_slot(rank, to, c), PAIR_CHUNK_BYTES);
                spans.extend((0..layout.pair_chunks()).map(chunk));
            }
        }
        spans.sort_unstable();
        assert!(spans.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "size {size}");
        let (start, len) = spans[spans.len() - 1];
        assert_eq!(start + len, ShmLayout::bytes(size, SLOT));
    }
}

#[test]
fn impossible_layouts_are_refused() {
    for (size, slot) in [(0, SLOT), (65, SLOT), (2, 4096), (2, SLOT + 1), (2, usize::MAX)] {
        assert!(matches!(ShmLayout::new(size, slot), Err(CollectiveError::Region { .. })), "{size} {slot}");
    }
}

#[test]
fn memory_that_is_no_rank_group_is_refused() {
    let memfd = |bytes: u64| {
        let fd = rustix::fs::memfd_create(c"other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        fd
    };
    let tiny = SharedRegion::map(memfd(100)).unwrap_err().to_string();
    assert!(tiny.contains("100 bytes"), "{tiny}");
    let zeros = SharedRegion::map(memfd(1 << 20)).unwrap_err().to_string();
    assert!(zeros.contains("not a rank group"), "{zeros}");
    // A header that claims more than the file holds.
    let fd = memfd(ShmLayout::bytes(2, SLOT) as u64);
    let good = SharedRegion::create(ShmLayout::new(3, SLOT).unwrap()).unwrap();
    let mut header = [0u8; 64];
    rustix::io::pread(&good, &mut header, 0).unwrap();
    rustix::io::pwrite(&fd, &header, 0).unwrap();
    let short = SharedRegion::map(fd).unwrap_err().to_string();
    assert!(short.contains("3 ranks"), "{short}");
}

#[test]
fn the_memory_cannot_be_cut_short() {
    let fd = SharedRegion::create(ShmLayout::new(2, SLOT).unwrap()).unwrap();
    assert!(rustix::fs::ftruncate(&fd, 4096).is_err());
}

#[test]
fn a_rank_joins_once() {
    let region = region(2);
    let _group = ShmGroup::new(region.clone(), 1, options(1000)).unwrap();
    let _collective = ShmCollective::new(region.clone(), 1, options(1000)).unwrap();
    assert!(matches!(ShmGroup::new(region.clone(), 1, options(1000)), Err(CollectiveError::Region { .. })));
    assert!(matches!(ShmCollective::new(region, 2, options(1000)), Err(CollectiveError::Region { .. })));
}

#[test]
fn the_first_cause_stays_and_is_cut_at_a_character() {
    let handle = AbortHandle::of(region(2));
    assert_eq!(handle.cause(), None);
    let long = "é".repeat(400);
    assert!(handle.abort(&format!("x{long}")));
    assert!(!handle.abort("second"));
    assert_eq!(handle.cause().unwrap(), format!("x{}", "é".repeat(255)), "511 bytes");
}

#[test]
fn a_writer_that_died_costs_the_cause_only() {
    let region = region(2);
    region.word(ABORT_STATE).store(1, Ordering::SeqCst);
    let mut group = ShmGroup::new(region.clone(), 0, options(60_000)).unwrap();
    assert!(matches!(group.barrier(Patience::Idle), Err(CollectiveError::Aborted { .. })));
    assert!(AbortHandle::of(region).cause().unwrap().contains("unknown"));
}

#[test]
fn stage_counters_survive_the_wrap() {
    let region = region(2);
    let near_the_end = u32::MAX - 5;
    let mut groups = [0, 1].map(|rank| {
        let group = ShmGroup::new(region.clone(), rank, options(60_000)).unwrap();
        group.start_at(near_the_end);
        group
    });
    std::thread::scope(|scope| {
        for (rank, group) in groups.iter_mut().enumerate() {
            scope.spawn(move || {
                let patience = Patience::Deadline(Duration::from_secs(60));
                for round in 0..20u8 {
                    let mut all = [0; 2];
                    group.all_gather(&[round * 2 + rank as u8], &mut all, patience).unwrap();
                    assert_eq!(all, [round * 2, round * 2 + 1]);
                }
            });
        }
    });
}

#[test]
fn a_missing_rank_is_named() {
    let region = region(3);
    let ranks = [0, 1].map(|rank| ShmCollective::new(region.clone(), rank, options(60)).unwrap());
    let errors = std::thread::scope(|scope| {
        let threads = ranks.map(|collective| {
            scope.spawn(move || {
                let collective: &dyn Collective = &collective;
                collective.all_reduce_f32(&mut [1.0; 8]).unwrap_err()
            })
        });
        threads.map(|t| t.join().unwrap())
    });
    // Whoever gives up first aborts the group, so the other may report that instead.
    let mut timeouts = 0;
    for error in errors {
        match error {
            CollectiveError::Timeout { missing, operation, sequence, waited_ms, .. } => {
                assert_eq!((missing, operation, sequence), (2, "all_reduce", 1));
                assert!(waited_ms >= 60);
                timeouts += 1;
            }
            CollectiveError::Aborted { cause, .. } => {
                assert!(cause.contains("rank 2") && cause.contains("all_reduce"), "{cause}");
            }
            other => panic!("{other}"),
        }
    }
    assert!(timeouts >= 1);
}

#[test]
fn ranks_in_different_operations_notice() {
    let region = region(2);
    let [mut first, mut second] =
        [0, 1].map(|rank| ShmGroup::new(region.clone(), rank, options(60_000)).unwrap());
    let patience = Patience::Deadline(Duration::from_secs(60));
    let errors = std::thread::scope(|scope| {
        let a = scope.spawn(move || first.broadcast(&mut [0; 5], 1, patience).unwrap_err());
        let b = scope.spawn(move || second.all_gather(&[0; 7], &mut [0; 14], patience).unwrap_err());
        [a.join().unwrap().to_string(), b.join().unwrap().to_string()]
    });
    let both = errors.join("\n");
    assert!(
        both.contains("broadcast of 5 bytes from rank 1") && both.contains("all_gather of 7 bytes"),
        "{both}"
    );
}

#[test]
fn a_transfer_of_another_size_is_refused_by_the_receiver() {
    let region = region(2);
    let [from, to] = [0, 1].map(|rank| ShmCollective::new(region.clone(), rank, options(60_000)).unwrap());
    let (sent, mut received) = ([1f32; 4], [0f32; 8]);
    // SAFETY: four readable and eight writable floats.
    let error = unsafe {
        from.send(sent.as_ptr().cast(), 4, DType::F32, 1, StreamHandle::HOST).unwrap();
        to.recv(received.as_mut_ptr().cast(), 8, DType::F32, 0, StreamHandle::HOST).unwrap_err()
    };
    assert!(matches!(&error, CollectiveError::Mismatch { rank: 1, peer: 0, .. }), "{error}");
    assert_eq!(received, [0.0; 8], "nothing was written");
}

#[test]
fn stages_sum_apart_and_pass_activations_on_without_waiting() {
    let topology = Topology { tp_size: 2, pp_size: 2, dp_size: 1 };
    const COUNT: usize = 40_000;
    const TRANSFERS: usize = 6;
    let layout = ShmLayout::new(4, SLOT).unwrap().with_transfers(TRANSFERS * COUNT * 4);
    let region = Arc::new(SharedRegion::map(SharedRegion::create(layout).unwrap()).unwrap());
    assert_eq!(region.layout(), layout);
    let join = |rank: usize| {
        let p = topology.place(rank);
        let stage = ShmCollective::of_stage(region.clone(), p, options(60_000)).unwrap();
        (stage, ShmCollective::of_pipeline(region.clone(), p, options(60_000)).unwrap())
    };
    let ranks: Vec<_> = (0..4).map(join).collect();
    let sent = |rank: usize, transfer: usize| vec![(rank * 10 + transfer) as f32; COUNT];
    // All that the first stage has to send fits the rings: it is done before the second one begins.
    for (rank, (_, pipeline)) in ranks[..2].iter().enumerate() {
        let pipeline: &dyn Collective = pipeline;
        (0..TRANSFERS).for_each(|transfer| pipeline.send_f32(&sent(rank, transfer), 1).unwrap());
    }
    std::thread::scope(|scope| {
        for (rank, (stage, pipeline)) in ranks.into_iter().enumerate() {
            scope.spawn(move || {
                let (stage, pipeline): (&dyn Collective, &dyn Collective) = (&stage, &pipeline);
                assert_eq!((stage.rank(), pipeline.rank()), (rank % 2, rank / 2));
                let mut sum = vec![rank as f32; 3];
                stage.all_reduce_f32(&mut sum).unwrap();
                assert_eq!(sum, [if rank < 2 { 1.0 } else { 5.0 }; 3], "of its stage only");
                let mut stages = [0.0; 2];
                pipeline.all_gather_f32(&[rank as f32], &mut stages).unwrap();
                assert_eq!(stages, [(rank % 2) as f32, (rank % 2 + 2) as f32]);
                let mut received = vec![0.0; COUNT];
                for transfer in (0..TRANSFERS).filter(|_| rank >= 2) {
                    pipeline.recv_f32(&mut received, 0).unwrap();
                    assert_eq!(received, sent(rank - 2, transfer));
                }
            });
        }
    });
}

#[test]
fn a_rank_missing_in_a_pipeline_is_named_by_its_number_in_the_replica() {
    let p = Topology { tp_size: 2, pp_size: 2, dp_size: 1 }.place(3);
    let last = ShmCollective::of_pipeline(region(4), p, options(60)).unwrap();
    let last: &dyn Collective = &last;
    let error = last.recv_f32(&mut [0.0; 4], 0).unwrap_err();
    assert!(matches!(error, CollectiveError::Timeout { rank: 3, missing: 1, .. }), "{error}");
}

#[test]
fn arguments_no_rank_may_pass_are_refused() {
    let mut group = ShmGroup::new(region(2), 0, options(60_000)).unwrap();
    let error = group.all_gather(&[0; 4], &mut [0; 9], Patience::Idle).unwrap_err();
    assert!(matches!(error, CollectiveError::Invalid { .. }), "{error}");
    assert!(
        matches!(group.barrier(Patience::Idle), Err(CollectiveError::Aborted { .. })),
        "and end the group"
    );
    let collective = ShmCollective::new(region(2), 0, options(60_000)).unwrap();
    // SAFETY: nothing is read: the peer is refused.
    let to_itself = unsafe { collective.send(std::ptr::null(), 0, DType::F32, 0, StreamHandle::HOST) };
    assert!(matches!(to_itself, Err(CollectiveError::Invalid { .. })));
}

#[test]
fn ranks_as_threads_meet_and_none_waits_for_one_that_failed() {
    let run = |fails: Option<usize>, panics: Option<usize>| {
        as_threads(3, options(30_000), |mut group, collective| {
            let rank = group.rank();
            assert_eq!(rank, collective.rank());
            assert_ne!(Some(rank), panics, "on purpose");
            if Some(rank) == fails {
                return Err(CollectiveError::Region { problem: "on purpose".into() });
            }
            group.barrier(Patience::Idle)?;
            Ok(rank)
        })
        .unwrap()
    };
    let ranks: Vec<usize> = run(None, None).into_iter().map(|end| end.unwrap().unwrap()).collect();
    assert_eq!(ranks, [0, 1, 2]);
    let ends: Vec<_> = run(Some(1), None).into_iter().map(|end| end.unwrap()).collect();
    assert!(matches!(ends[1], Err(CollectiveError::Region { .. })));
    for (other, cause) in [(0, "rank 1: "), (2, "rank 1: ")] {
        assert!(ends[other].as_ref().unwrap_err().to_string().contains(cause), "{:?}", ends[other]);
    }
    let ends = run(None, Some(2));
    assert!(ends[2].is_err() && ends[0].as_ref().unwrap().is_err());
    let cause = ends[1].as_ref().unwrap().as_ref().unwrap_err().to_string();
    assert!(cause.contains("rank 2 panicked"), "{cause}");
}
