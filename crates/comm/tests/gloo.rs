//! Gloo against the same tests as shared memory, over the loopback interface: same results, same failures.

// A failed unwrap is a failed test, in helper functions too.
#![allow(clippy::unwrap_used)]

mod conformance;

use conformance::{LONG, Random, Rank, scalar_tree, value};
use lockstep_comm::collective::CollectiveError;
use lockstep_comm::gloo::{self, GlooCollective, GlooGroup, Mesh, MeshPlace};
use lockstep_comm::meeting::{self, Invitation, MeetingRoom};
use lockstep_comm::secret::Key;
use lockstep_comm::trusted;
use lockstep_comm::{AbortHandle, Collective, Patience, ProcessGroup, SharedRegion, ShmLayout, StreamHandle};
use lockstep_core::DType;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Whether there is something to test; says so when not.
fn is_built() -> bool {
    if !gloo::IS_BUILT {
        eprintln!("skipped: built without the feature gloo");
    }
    gloo::IS_BUILT
}

fn key() -> Key {
    Key::of_secret("the secret of these tests").unwrap()
}

/// The abort word of one host.
fn abort_word() -> AbortHandle {
    AbortHandle::new(SharedRegion::create(ShmLayout::new(1, 16 << 10).unwrap()).unwrap()).unwrap()
}

/// A room for one meeting of `size` ranks, which ends with it.
fn room(size: usize) -> Invitation {
    let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let room = MeetingRoom::default();
        room.call("test", size);
        for _ in 0..size {
            let (_, reader, writer) = trusted::accept(listener.accept().unwrap().0, |_| Some(key())).unwrap();
            room.attend(reader, writer).unwrap();
        }
    });
    Invitation { address, key: key(), name: "test".into() }
}

/// Joins the mesh of `size` ranks as `rank`, each on a host of its own.
fn mesh(invitation: &Invitation, rank: usize, size: usize) -> Arc<Mesh> {
    let (place, abort) = (MeshPlace { rank, size, address: LOOPBACK }, abort_word());
    let meet = |message: &[u8]| meeting::meet(invitation, (rank, size), message, (&abort, LONG));
    Mesh::join(place, &invitation.key, (abort.clone(), LONG), meet).unwrap()
}

fn member(mesh: &Arc<Mesh>, deadline: Duration) -> Rank {
    let MeshPlace { rank, size, .. } = mesh.place();
    let all: Vec<usize> = (0..size).collect();
    let group = GlooGroup::new(mesh.clone(), all.clone(), 0).unwrap();
    let collective = GlooCollective::new(mesh.clone(), all, 1, deadline).unwrap();
    Rank { rank, size, group: Box::new(group), collective: Box::new(collective) }
}

/// Runs `body` for each of `size` ranks at once.
fn on_ranks<T: Send>(size: usize, body: impl Fn(Arc<Mesh>) -> T + Sync) -> Vec<T> {
    let invitation = room(size);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (invitation, body) = (&invitation, &body);
                scope.spawn(move || body(mesh(invitation, rank, size)))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn random_operations_agree_with_plain_arithmetic() {
    if !is_built() {
        return;
    }
    for (size, seed, rounds) in [(2, 0x6002, 60), (3, 0x6003, 40), (4, 0x6004, 30)] {
        on_ranks(size, |mesh| member(&mesh, LONG).run(seed, rounds));
    }
}

#[test]
fn large_sums_go_in_pieces_and_in_tree_order() {
    if !is_built() {
        return;
    }
    for size in [2, 3] {
        on_ranks(size, |mesh| {
            let rank = member(&mesh, LONG);
            // More than two pieces of 256 KiB, and a rest.
            let count = 150_001;
            let mut x: Vec<f32> = (0..count).map(|i| value(9, rank.rank, i)).collect();
            rank.collective.all_reduce_f32(&mut x).unwrap();
            for i in (0..count).step_by(97).chain([count - 1]) {
                let terms: Vec<f32> = (0..size).map(|rank| value(9, rank, i)).collect();
                assert_eq!(x[i].to_bits(), scalar_tree(&terms).to_bits(), "{size} ranks, element {i}");
            }
        });
    }
}

#[test]
fn groups_share_a_mesh_side_by_side() {
    if !is_built() {
        return;
    }
    // Two TP groups of two, and a pipeline pair between their first ranks, in one mesh of four.
    on_ranks(4, |mesh| {
        let rank = mesh.place().rank;
        let first = rank / 2 * 2;
        let tp = GlooCollective::new(mesh.clone(), vec![first, first + 1], 1, LONG).unwrap();
        let stages =
            [0, 2].contains(&rank).then(|| GlooCollective::new(mesh.clone(), vec![0, 2], 2, LONG).unwrap());
        let mut replica = GlooGroup::new(mesh, (0..4).collect(), 0).unwrap();
        let tp: &dyn Collective = &tp;
        let mut random = Random(77);
        for round in 0..20u8 {
            let mut sum = [rank as f32; 5];
            tp.all_reduce_f32(&mut sum).unwrap();
            assert_eq!(sum, [(2 * first + 1) as f32; 5]);
            let len = 1 + random.below(3000);
            let mut hidden = vec![f32::from(round); len];
            if let Some(stages) = &stages {
                let at = hidden.as_mut_ptr().cast();
                // SAFETY: `len` floats, alive during the calls.
                unsafe {
                    if rank == 0 {
                        stages.send(at, len, DType::F32, 1, StreamHandle::HOST).unwrap();
                    } else {
                        hidden.fill(-1.0);
                        stages.recv(at, len, DType::F32, 0, StreamHandle::HOST).unwrap();
                        assert!(hidden.iter().all(|x| *x == f32::from(round)));
                    }
                }
            }
            replica.barrier(Patience::Deadline(LONG)).unwrap();
        }
    });
}

#[test]
fn both_may_send_before_either_receives() {
    if !is_built() {
        return;
    }
    on_ranks(2, |mesh| {
        let rank = member(&mesh, LONG);
        let (mine, mut theirs) = ([rank.rank as f32; 1000], [9f32; 1000]);
        // SAFETY: a thousand floats each, alive during the calls.
        unsafe {
            let peer = 1 - rank.rank;
            rank.collective.send(mine.as_ptr().cast(), 1000, DType::F32, peer, StreamHandle::HOST).unwrap();
            rank.collective
                .recv(theirs.as_mut_ptr().cast(), 1000, DType::F32, peer, StreamHandle::HOST)
                .unwrap();
        }
        assert_eq!(theirs, [(1 - rank.rank) as f32; 1000]);
        member_barrier(rank);
    });
}

/// What was sent has arrived before the connections end.
fn member_barrier(mut rank: Rank) {
    rank.group.barrier(Patience::Deadline(LONG)).unwrap();
}

#[test]
fn a_missing_rank_is_named_in_time() {
    if !is_built() {
        return;
    }
    let (deadline, done) = (Duration::from_millis(300), Barrier::new(3));
    let errors = on_ranks(3, |mesh| {
        let rank = member(&mesh, deadline);
        let error = (rank.rank < 2).then(|| {
            let start = Instant::now();
            let error = rank.collective.all_reduce_f32(&mut [1.0; 8]).unwrap_err();
            assert!(start.elapsed() < Duration::from_secs(20), "{error}");
            error
        });
        done.wait();
        error
    });
    // Whoever gives up first closes its connections, so the other may have lost that one.
    let is_named = |error: &CollectiveError| {
        matches!(error, CollectiveError::Timeout { missing: 2, waited_ms: 300, .. })
    };
    assert!(errors.iter().flatten().any(is_named), "{errors:?}");
    let may_be = |e: &CollectiveError| is_named(e) || matches!(e, CollectiveError::Lost { .. });
    assert!(errors.iter().flatten().all(may_be), "{errors:?}");
}

#[test]
fn a_rank_that_ends_is_lost_and_an_abort_ends_every_wait() {
    if !is_built() {
        return;
    }
    let errors = on_ranks(2, |mesh| {
        let mut rank = member(&mesh, LONG);
        // Rank 1 leaves: its connections end with it.
        (rank.rank == 0).then(|| rank.group.barrier(Patience::Idle).unwrap_err())
    });
    assert!(matches!(errors[0], Some(CollectiveError::Lost { missing: 1, .. })), "{errors:?}");
    assert!(errors[0].as_ref().is_some_and(CollectiveError::is_consequence));

    let invitation = room(2);
    let done = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mesh = mesh(&invitation, 1, 2);
            done.wait();
            drop(mesh);
        });
        let (place, abort) = (MeshPlace { rank: 0, size: 2, address: LOOPBACK }, abort_word());
        let meet = |message: &[u8]| meeting::meet(&invitation, (0, 2), message, (&abort, LONG));
        let mesh = Mesh::join(place, &key(), (abort.clone(), LONG), meet).unwrap();
        let mut group = GlooGroup::new(mesh, vec![0, 1], 0).unwrap();
        let waiting = scope.spawn(move || group.barrier(Patience::Idle).unwrap_err());
        abort.abort("rank 1 was killed by signal 9");
        let error = waiting.join().unwrap();
        assert!(
            matches!(&error, CollectiveError::Aborted { cause, .. } if cause.contains("signal 9")),
            "{error}"
        );
        done.wait();
    });
}

#[test]
fn ranks_in_different_operations_notice() {
    if !is_built() {
        return;
    }
    let errors = on_ranks(2, |mesh| {
        let mut rank = member(&mesh, LONG);
        let patience = Patience::Deadline(LONG);
        match rank.rank {
            0 => rank.group.broadcast(&mut [0; 5], 1, patience).unwrap_err(),
            _ => rank.group.all_gather(&[0; 7], &mut [0; 14], patience).unwrap_err(),
        }
        .to_string()
    });
    let both = errors.join("\n");
    assert!(both.contains("broadcast of 5 bytes from rank 1"), "{both}");
    assert!(both.contains("all_gather of 7 bytes"), "{both}");
}

#[test]
fn a_stranger_in_a_place_of_the_mesh_is_found() {
    if !is_built() {
        return;
    }
    let invitation = room(2);
    let errors = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let invitation = &invitation;
            scope.spawn(move || {
                let (place, abort) = (MeshPlace { rank, size: 2, address: LOOPBACK }, abort_word());
                // They meet, but one has another key by the time they connect.
                let key = if rank == 0 { key() } else { key().derive("another") };
                let meet = |message: &[u8]| meeting::meet(invitation, (rank, 2), message, (&abort, LONG));
                Mesh::join(place, &key, (abort.clone(), LONG), meet).unwrap_err().to_string()
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    assert!(errors.iter().any(|error| error.contains("does not know this server's key")), "{errors:?}");
}

#[test]
fn a_build_without_it_says_how_to_get_it() {
    if gloo::IS_BUILT {
        return;
    }
    let place = MeshPlace { rank: 0, size: 2, address: LOOPBACK };
    let error = Mesh::join(place, &key(), (abort_word(), LONG), |_| unreachable!()).unwrap_err().to_string();
    assert!(error.contains("--features gloo") && error.contains("libgloo-dev"), "{error}");
}
