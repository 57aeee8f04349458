//! Transfers end, whatever happens around them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::batch::{Batch, Direction, Piece};
use crate::config::TransportKind;
use crate::error::{PieceError, Refusal};
use crate::memory::Access;
use crate::testing::eventually;
use crate::testing::pattern::{self, assert_same};

use super::{Pair, place, slice};

const LIMIT: Duration = Duration::from_secs(20);

// contract: transport-7
pub(super) fn unregistering_under_load_ends_all_access(pair: &Pair) {
    const THREADS: usize = 3;
    let len = 1 << 20;
    for round in 0..5 {
        let remote = pair.remote(len, Access::RemoteReadWrite);
        let whole = place(&remote, 0, len);
        let stop = AtomicBool::new(false);
        let (stop, done) = (&stop, &std::sync::atomic::AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || {
                    let local = pair.local(len);
                    pattern::fill(&local, thread as u64);
                    while !stop.load(Ordering::Relaxed) {
                        let piece = Piece {
                            local: slice(&local, 0, len),
                            remote: whole,
                        };
                        match pair.run(Direction::Write, vec![piece]).pieces[0] {
                            Ok(_) => done.fetch_add(1, Ordering::Relaxed),
                            Err(PieceError::Refused(Refusal::UnknownRegion)) => 0,
                            Err(other) => panic!("{other:?}"),
                        };
                    }
                });
            }
            let busy = || done.load(Ordering::Relaxed) > 3;
            assert!(eventually(LIMIT, busy), "writers get through");
            remote.unregister(LIMIT).expect("transfers in flight end");
            // The bytes are this test's alone now: nobody else changes them.
            let mine = pattern::fill(&remote, 1000 + round);
            let piece = Piece {
                local: slice(&pair.local(len), 0, len),
                remote: whole,
            };
            let outcome = pair.run(Direction::Write, vec![piece]);
            assert_eq!(
                outcome.first_error(),
                Some(PieceError::Refused(Refusal::UnknownRegion))
            );
            assert_same(
                &pattern::read(&remote),
                &mine,
                "memory after it was unregistered",
            );
            stop.store(true, Ordering::Relaxed);
        });
        remote
            .unregister(LIMIT)
            .expect("doing it again is harmless");
    }
}

// contract: transport-3, transport-14
pub(super) fn shutting_down_ends_every_transfer(pair: &Pair) {
    let len = 8 << 20;
    let remote = pair.remote(len, Access::RemoteReadWrite);
    let local = pair.local(len);
    let transfers: Vec<_> = (0..20)
        .map(|_| {
            let piece = |n: u64| {
                let at = n << 20;
                Piece {
                    local: slice(&local, at, 1 << 20),
                    remote: place(&remote, at, 1 << 20),
                }
            };
            pair.submit(Direction::Read, (0..8).map(piece).collect())
        })
        .collect();
    pair.near.shutdown(LIMIT);
    let outcomes: Vec<_> = transfers
        .iter()
        .map(|transfer| transfer.wait_timeout(LIMIT).expect("every transfer ends"))
        .collect();
    // No byte moves any more.
    let mine = pattern::fill(&local, 7);
    for outcome in &outcomes {
        for piece in &outcome.pieces {
            let known = [PieceError::ShutDown, PieceError::PeerGone];
            assert!(
                piece
                    .as_ref()
                    .err()
                    .is_none_or(|error| known.contains(error)),
                "{piece:?}"
            );
        }
    }
    let late = pair.submit(
        Direction::Read,
        vec![Piece {
            local: slice(&local, 0, 64),
            remote: place(&remote, 0, 64),
        }],
    );
    let late = late.wait_timeout(LIMIT).expect("ends at once");
    assert_eq!(late.first_error(), Some(PieceError::ShutDown));
    assert_same(
        &pattern::read(&local),
        &mine,
        "local memory after a shutdown",
    );
}

pub(super) fn a_dropped_handle_changes_nothing(pair: &Pair) {
    let len = 2 << 20;
    let remote = pair.remote(len, Access::RemoteReadWrite);
    let local = pair.local(len);
    let mine = pattern::fill(&local, 3);
    let piece = Piece {
        local: slice(&local, 0, len),
        remote: place(&remote, 0, len),
    };
    drop(pair.submit(Direction::Write, vec![piece]));
    // The handle on the memory may go too: what is under way keeps it.
    drop(local);
    assert!(
        eventually(LIMIT, || pattern::read(&remote) == mine),
        "it went through all the same"
    );
}

pub(super) fn a_cancelled_transfer_resolves(pair: &Pair) {
    let len = 16 << 20;
    let remote = pair.remote(len, Access::RemoteReadWrite);
    let local = pair.local(len);
    let pieces: Vec<_> = (0..len)
        .step_by(4096)
        .map(|at| Piece {
            local: slice(&local, at, 4096),
            remote: place(&remote, at, 4096),
        })
        .collect();
    let transfer = pair.submit(Direction::Write, pieces);
    transfer.cancel();
    let outcome = transfer.wait_timeout(LIMIT).expect("resolves");
    let allowed = |piece: &Result<_, PieceError>| {
        piece
            .as_ref()
            .err()
            .is_none_or(|e| *e == PieceError::Cancelled)
    };
    assert!(
        outcome.pieces.iter().all(allowed),
        "{:?}",
        outcome.first_error()
    );
    // And the engine goes on.
    let piece = Piece {
        local: slice(&local, 0, 64),
        remote: place(&remote, 0, 64),
    };
    pair.succeed(Direction::Write, vec![piece]);
}

pub(super) fn a_transfer_can_be_polled_waited_for_and_awaited(pair: &Pair) {
    let remote = pair.remote(4096, Access::RemoteReadWrite);
    let local = pair.local(4096);
    let submit = || {
        let piece = Piece {
            local: slice(&local, 0, 4096),
            remote: place(&remote, 0, 4096),
        };
        pair.submit(Direction::Write, vec![piece])
    };
    let polled = submit();
    assert!(eventually(LIMIT, || polled.poll().is_some()));
    assert_eq!(polled.poll(), Some(polled.wait()), "it stays the same");
    assert!(
        submit()
            .wait_timeout(LIMIT)
            .is_some_and(|outcome| outcome.is_ok())
    );
    let mut future = Box::pin(submit());
    let mut poll = || future.as_mut().poll(&mut Context::from_waker(&waker()));
    let woken = eventually(
        LIMIT,
        || matches!(poll(), Poll::Ready(outcome) if outcome.is_ok()),
    );
    assert!(woken);
}

pub(super) fn a_transfer_that_its_thread_waits_for_moves_the_same_bytes(pair: &Pair) {
    let len = 1 << 20;
    let remote = pair.remote(len, Access::RemoteReadWrite);
    let local = pair.local(len);
    let pieces = || {
        let half = |at| Piece {
            local: slice(&local, at, len / 2),
            remote: place(&remote, at, len / 2),
        };
        vec![half(0), half(len / 2)]
    };
    // From here on there is nothing more to do than to copy.
    pair.succeed(Direction::Write, pieces());
    let sent = pattern::fill(&local, 1);
    for direction in [Direction::Write, Direction::Read] {
        if direction == Direction::Read {
            pattern::fill(&local, 2);
        }
        let transfer = pair.near.submit_awaited(Batch {
            peer: pair.peer(),
            direction,
            pieces: pieces(),
            checksum: true,
            deadline: None,
        });
        if matches!(pair.kind, TransportKind::Local | TransportKind::Shm) {
            assert!(transfer.is_done(), "this thread has moved it");
        }
        assert!(transfer.wait().is_ok());
        assert_same(&pattern::read(&remote), &sent, direction.name());
        assert_same(&pattern::read(&local), &sent, direction.name());
    }
}

fn waker() -> Waker {
    Waker::noop().clone()
}
