//! What a peer may do to memory: capabilities, bounds, generations, withdrawal.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::ids::{Capability, Generation, RegionId};
use layercake_transport::{
    Access, AllocateOptions, Direction, HostBuffer, PieceError, Refusal, RemoteSlice,
};

use super::{READ_WRITE, content, scene};
use crate::shm_support::*;

// contract: transport-5
#[test]
fn dev_08_what_a_peer_may_not_do_is_refused_and_counted_by_the_owner_over_shm() {
    let scene = scene(10_000, READ_WRITE);
    let before = content(&scene.theirs);
    scene.mine.copy_in(0, &pattern(9, 10_000)).expect("inside");
    let read_only = AllocateOptions {
        access: Access::RemoteRead,
        ..READ_WRITE
    };
    let read_only = scene.owner.allocate(4096, read_only).expect("allocated");
    let private = scene
        .owner
        .allocate(4096, AllocateOptions::default())
        .expect("allocated");
    let place = |memory| Remote::of(&scene.owner, memory).slice(0, 10);
    let whole = scene.remote.slice(0, 10);
    let wrong = Capability([7; 16]);
    let cases = [
        (
            RemoteSlice {
                capability: wrong,
                ..whole
            },
            Some(Refusal::BadCapability),
        ),
        (whole, None),
        // Again, now that the region is open.
        (
            RemoteSlice {
                capability: wrong,
                ..whole
            },
            Some(Refusal::BadCapability),
        ),
        (
            RemoteSlice {
                region: RegionId(999_999),
                ..whole
            },
            Some(Refusal::UnknownRegion),
        ),
        (
            RemoteSlice {
                offset: 9_991,
                ..whole
            },
            Some(Refusal::OutOfBounds),
        ),
        (
            RemoteSlice {
                offset: u64::MAX,
                ..whole
            },
            Some(Refusal::OutOfBounds),
        ),
        (place(&read_only), Some(Refusal::AccessDenied)),
        (place(&private), Some(Refusal::AccessDenied)),
    ];
    let mut refused = 0;
    for (remote, refusal) in cases {
        let local = scene.mine.slice(0, 10).expect("inside");
        let outcome = scene.write(vec![(local, remote)]);
        let expected = refusal.map(PieceError::Refused);
        assert_eq!(outcome.first_error(), expected, "{remote:?}");
        refused += u64::from(refusal.is_some());
    }
    // All in one batch: each fails or succeeds by itself.
    let local = || scene.mine.slice(0, 10).expect("inside");
    let outcome = scene.write(cases.iter().map(|(remote, _)| (local(), *remote)).collect());
    for ((_, refusal), piece) in cases.iter().zip(&outcome.pieces) {
        assert_eq!(
            piece.as_ref().err().copied(),
            refusal.map(PieceError::Refused)
        );
    }
    refused *= 2;
    eventually("the owner counts every refused piece", || {
        scene.owner.stats().security_refusals == refused
    });
    let after = content(&scene.theirs);
    assert!(
        after[10..] == before[10..],
        "only the allowed bytes changed"
    );
    assert!(content(&read_only) == vec![0; 4096] && content(&private) == vec![0; 4096]);
    let read = transfer(
        &scene.peer,
        &scene.remote,
        Direction::Read,
        vec![(
            scene.mine.slice(0, 10).expect("inside"),
            Remote::of(&scene.owner, &read_only).slice(0, 10),
        )],
    );
    assert_eq!(read.first_error(), None);
}

// contract: transport-6
#[test]
fn generations_order_the_writers_of_a_place() {
    let scene = scene(3 * 4096, READ_WRITE);
    let place = |generation| {
        let (local, remote) = scene.pair(4000, 200);
        (local, with_generation(remote, generation))
    };
    let stale = Some(PieceError::Refused(Refusal::StaleGeneration));
    assert_eq!(scene.write(vec![place(5)]).first_error(), None);
    assert_eq!(scene.write(vec![place(4)]).first_error(), stale);
    assert_eq!(scene.read(vec![place(5)]).first_error(), None);
    assert_eq!(scene.read(vec![place(4)]).first_error(), stale);
    assert_eq!(scene.read(vec![place(6)]).first_error(), stale);
    let tags = scene.theirs.tags(0, 3 * 4096).expect("it has tags");
    assert_eq!(tags, [Generation(5), Generation(5), Generation(0)]);
    scene.theirs.fence(4096, 1, Generation(9)).expect("inside");
    let before = content(&scene.theirs);
    scene
        .mine
        .copy_in(0, &pattern(3, 3 * 4096))
        .expect("inside");
    assert_eq!(scene.write(vec![place(8)]).first_error(), stale);
    assert!(content(&scene.theirs) == before, "a stale writer wrote");
    assert_eq!(scene.write(vec![place(9)]).first_error(), None);
    // A stale generation is an ordinary race, no attack.
    assert_eq!(scene.owner.stats().security_refusals, 0);
}

#[test]
fn withdrawn_memory_is_refused_from_then_on() {
    let scene = scene(4096, READ_WRITE);
    assert_eq!(scene.write(vec![scene.pair(0, 100)]).first_error(), None);
    scene
        .theirs
        .unregister(LIMIT)
        .expect("nothing is in flight");
    let unknown = Some(PieceError::Refused(Refusal::UnknownRegion));
    for _ in 0..2 {
        assert_eq!(scene.write(vec![scene.pair(0, 100)]).first_error(), unknown);
    }
    // Its place in the table is used again; the old region stays unknown.
    let next = scene.owner.allocate(4096, READ_WRITE).expect("allocated");
    let remote = Remote::of(&scene.owner, &next);
    let local = scene.mine.slice(0, 100).expect("inside");
    let outcome = scene.write(vec![(local, remote.slice(0, 100)), scene.pair(0, 100)]);
    assert!(outcome.pieces[0].is_ok());
    assert_eq!(outcome.first_error(), unknown);
}

// contract: transport-7
/// Threads write without pause while regions come and go under them: each piece arrives or is refused,
/// nothing crashes, and after `unregister` no byte changes any more.
#[test]
fn unregistering_under_load_is_prompt_and_final() {
    for by_address in [false, true] {
        let (owner, peer) = (engine(shm_only()), engine(shm_only()));
        let len = 2 << 20;
        let register = || {
            if by_address {
                let buffer = HostBuffer::from(vec![0; len]);
                owner
                    .register(buffer, Access::RemoteReadWrite)
                    .expect("registered")
            } else {
                owner.allocate(len as u64, READ_WRITE).expect("allocated")
            }
        };
        let current = std::sync::Mutex::new(register());
        let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 1..4_u8 {
                let (peer, owner) = (peer.clone(), &owner);
                let (current, stop, written) = (&current, &stop, &written);
                scope.spawn(move || {
                    let mine = peer.allocate(len as u64, AllocateOptions::default());
                    let mine = mine.expect("allocated");
                    mine.copy_in(0, &vec![thread; len]).expect("inside");
                    while !stop.load(Ordering::Relaxed) {
                        let remote = Remote::of(owner, &current.lock().expect("lock"));
                        let pieces = [(0, 300_000), (300_000, 64), (1 << 20, 1 << 20)];
                        let pieces = pieces.map(|(offset, len)| {
                            (
                                mine.slice(offset, len).expect("inside"),
                                remote.slice(offset, len),
                            )
                        });
                        let outcome = transfer(&peer, &remote, Direction::Write, pieces.into());
                        for piece in outcome.pieces {
                            match piece {
                                Ok(_) => {
                                    written.fetch_add(1, Ordering::Relaxed);
                                }
                                Err(PieceError::Refused(Refusal::UnknownRegion)) => {}
                                Err(other) => panic!("{other}"),
                            }
                        }
                    }
                });
            }
            for _ in 0..12 {
                let before = written.load(Ordering::Relaxed);
                eventually("pieces arrive", || {
                    written.load(Ordering::Relaxed) > before + 3
                });
                let old = std::mem::replace(&mut *current.lock().expect("lock"), register());
                old.unregister(LIMIT)
                    .expect("load does not keep it waiting");
                let then = content(&old);
                std::thread::yield_now();
                assert!(content(&old) == then, "a late write");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

/// Once tags are raised and the copies that had begun are over, an earlier generation writes nothing.
#[test]
fn raised_tags_and_quiet_end_a_writer_without_its_help() {
    let scene = scene(1 << 20, READ_WRITE);
    let stop = AtomicBool::new(false);
    let started = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut stale = 0;
            while !stop.load(Ordering::Relaxed) {
                let (local, remote) = scene.pair(0, 1 << 20);
                let outcome = scene.write(vec![(local, with_generation(remote, 5))]);
                match outcome.first_error() {
                    None => {
                        started.fetch_add(1, Ordering::Relaxed);
                    }
                    Some(PieceError::Refused(Refusal::StaleGeneration)) => stale += 1,
                    Some(other) => panic!("{other}"),
                }
            }
            stale
        });
        eventually("the writer writes", || started.load(Ordering::Relaxed) > 3);
        scene
            .theirs
            .fence(0, 1 << 20, Generation(6))
            .expect("inside");
        let peer = scene.peer.endpoint().engine;
        assert!(scene.owner.wait_quiet(Some(peer), LIMIT));
        let fresh = pattern(11, 1 << 20);
        scene.theirs.copy_in(0, &fresh).expect("inside");
        let until = Instant::now() + Duration::from_millis(50);
        while Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(content(&scene.theirs) == fresh, "a late write");
        stop.store(true, Ordering::Relaxed);
        assert!(writer.join().expect("writes") > 0, "the writer was refused");
    });
}
