//! What may not be touched is refused, piece by piece, and everything else goes on.

use std::time::Duration;

use layercake_protocol::ids::{Capability, Generation, RegionId};

use crate::batch::{Batch, Direction, Piece, RemoteSlice};
use crate::config::TransportKind;
use crate::error::{PieceError, Refusal};
use crate::memory::Access;
use crate::testing::pattern::{self, assert_same};
use crate::transfer::PieceDone;

use super::{CHUNK, Pair, place, slice, tagged};

// contract: transport-4, transport-5
#[expect(clippy::too_many_lines, reason = "a table and what is made of it")]
pub(super) fn a_refused_piece_leaves_its_neighbours_alone(pair: &Pair) {
    let len = 64 << 10;
    let size = 1000;
    let open = pair.remote(len, Access::RemoteReadWrite);
    let readable = pair.remote(len, Access::RemoteRead);
    let writable = pair.remote(len, Access::RemoteWrite);
    let private = pair.remote(len, Access::LocalOnly);
    let gone = pair.remote(len, Access::RemoteReadWrite);
    let gone_place = place(&gone, 0, size);
    gone.unregister(Duration::from_secs(5))
        .expect("nobody uses it");
    let untagged = pair
        .far
        .register(vec![7; 4096].into(), Access::RemoteReadWrite)
        .expect("a buffer");
    let local = pair.local(len);
    for direction in Direction::ALL {
        let denied = if direction == Direction::Read {
            &writable
        } else {
            &readable
        };
        let wrong: Vec<(RemoteSlice, Refusal)> = vec![
            (
                RemoteSlice {
                    region: RegionId(u64::MAX),
                    ..place(&open, 0, size)
                },
                Refusal::UnknownRegion,
            ),
            (gone_place, Refusal::UnknownRegion),
            (
                RemoteSlice {
                    capability: Capability::draw(),
                    ..place(&open, 0, size)
                },
                Refusal::BadCapability,
            ),
            (
                RemoteSlice {
                    capability: readable.region().capability,
                    ..place(&open, 0, size)
                },
                Refusal::BadCapability,
            ),
            (place(denied, 0, size), Refusal::AccessDenied),
            (place(&private, 0, size), Refusal::AccessDenied),
            (place(&open, len - size + 8, size), Refusal::OutOfBounds),
            (place(&open, len, size), Refusal::OutOfBounds),
            (place(&open, u64::MAX - 8, size), Refusal::OutOfBounds),
            (
                RemoteSlice {
                    generation: Some(Generation(3)),
                    ..place(&untagged, 0, size)
                },
                Refusal::NoTags,
            ),
        ];
        let before = [&open, &readable, &writable, &private]
            .map(|memory| pattern::fill(memory, memory.id().0));
        let mine = pattern::fill(&local, 99);
        let security = pair.far.stats().security_refusals;
        let mut pieces = Vec::new();
        for (number, (remote, _)) in (0..).zip(&wrong) {
            // A good piece before each bad one; all at places of their own.
            let at = number * 2 * size;
            pieces.push(Piece {
                local: slice(&local, at, size),
                remote: place(&open, at, size),
            });
            pieces.push(Piece {
                local: slice(&local, at + size, size),
                remote: *remote,
            });
        }
        let outcome = pair.run(direction, pieces);
        let mut expected_open = before[0].clone();
        let mut expected_local = mine.clone();
        for (number, (pieces, (_, refusal))) in outcome.pieces.chunks(2).zip(&wrong).enumerate() {
            let name = direction.name();
            assert!(
                pieces[0].is_ok(),
                "{name}: the neighbour of {refusal:?}: {:?}",
                pieces[0]
            );
            assert_eq!(
                pieces[1],
                Err(PieceError::Refused(*refusal)),
                "{name} {number}"
            );
            let at = number * 2000;
            match direction {
                Direction::Write => {
                    expected_open[at..at + 1000].copy_from_slice(&mine[at..at + 1000]);
                }
                Direction::Read => {
                    expected_local[at..at + 1000].copy_from_slice(&before[0][at..at + 1000]);
                }
            }
        }
        assert_same(
            &pattern::read(&open),
            &expected_open,
            "memory that some pieces may touch",
        );
        for (memory, before) in [&readable, &writable, &private]
            .into_iter()
            .zip(&before[1..])
        {
            assert_same(
                &pattern::read(memory),
                before,
                "memory that no piece may touch",
            );
        }
        assert_same(&pattern::read(&local), &expected_local, "local memory");
        let counted = || pair.far.stats().security_refusals - security;
        let wanted = wrong.len() as u64;
        let limit = Duration::from_secs(10);
        assert!(
            super::super::eventually(limit, || counted() >= wanted),
            "{} of {wanted}",
            counted()
        );
        assert_eq!(counted(), wanted, "each one is counted at the owner, once");
    }
}

// contract: transport-6
pub(super) fn a_late_writer_is_refused_and_a_reader_of_a_reused_place_too(pair: &Pair) {
    let len = 40_000;
    let remote = pair.remote(len, Access::RemoteReadWrite);
    let local = pair.local(len);
    let stale = Err(PieceError::Refused(Refusal::StaleGeneration));
    let one = |direction, generation: u64| {
        let piece = Piece {
            local: slice(&local, 0, 9000),
            remote: tagged(&remote, 100, 9000, generation),
        };
        pair.run(direction, vec![piece]).pieces[0].map(|_| ())
    };
    let security = pair.far.stats().security_refusals;
    assert_eq!(one(Direction::Read, 5), stale, "never written");
    let first = pattern::fill(&local, 1);
    assert_eq!(one(Direction::Write, 5), Ok(()));
    assert_eq!(one(Direction::Read, 5), Ok(()));
    assert_eq!(one(Direction::Read, 4), stale);
    assert_eq!(one(Direction::Read, 6), stale);
    pattern::fill(&local, 2);
    assert_eq!(one(Direction::Write, 4), stale, "a late writer");
    assert_same(
        &pattern::read(&remote)[100..9100],
        &first[..9000],
        "nothing of it landed",
    );
    let second = pattern::fill(&local, 3);
    assert_eq!(
        one(Direction::Write, 6),
        Ok(()),
        "the next owner of the place"
    );
    assert_eq!(
        one(Direction::Read, 5),
        stale,
        "a reader of what was there before"
    );
    assert_same(
        &pattern::read(&remote)[100..9100],
        &second[..9000],
        "the new bytes",
    );
    let tags = remote.tags(0, len).expect("tagged");
    let touched = tags.iter().map(|tag| tag.0).collect::<Vec<_>>();
    assert_eq!(touched[..3], [6, 6, 6], "the granules that were touched");
    assert!(
        touched[3..].iter().all(|tag| *tag == 0),
        "and no other: {touched:?}"
    );
    assert_eq!(
        pair.far.stats().security_refusals,
        security,
        "a race is no attack"
    );
}

// contract: transport-4
pub(super) fn results_of_a_long_batch_are_those_of_its_pieces(pair: &Pair) {
    const COUNT: u64 = 150;
    const SLOT: u64 = 4096;
    let generations = pair.remote(COUNT * SLOT, Access::RemoteReadWrite);
    let zeros = vec![0; generations.len().try_into().expect("small")];
    let plain = pair
        .far
        .register(zeros.into(), Access::RemoteReadWrite)
        .expect("a buffer");
    let local = pair.local(COUNT * SLOT);
    let mine = pattern::fill(&local, 1);
    let later = (0..COUNT).map(|at| Piece {
        local: slice(&local, 0, 1),
        remote: tagged(&generations, at * SLOT + SLOT - 1, 1, 6),
    });
    pair.succeed(Direction::Write, later.collect());
    // What each piece has to come to, in an order that does not repeat where parts are moved together.
    let expected = |at: u64| match at * at % 7 {
        0 => Err(Refusal::BadCapability),
        1 => Err(Refusal::StaleGeneration),
        2 if at.is_multiple_of(3) => Err(Refusal::NoTags),
        2 => Ok(&plain),
        _ => Ok(&generations),
    };
    let piece = |at: u64| {
        let (start, len) = (at * SLOT, 300 + at);
        let remote = match expected(at) {
            Ok(memory) if memory.id() == plain.id() => place(memory, start, len),
            Ok(memory) => tagged(memory, start, len, 6),
            Err(Refusal::NoTags) => tagged(&plain, start, len, 6),
            Err(Refusal::StaleGeneration) => tagged(&generations, start, len, 5),
            Err(_) => RemoteSlice {
                capability: Capability::draw(),
                ..place(&generations, start, len)
            },
        };
        let local = slice(&local, start, len);
        Piece { local, remote }
    };
    for direction in [Direction::Write, Direction::Read] {
        if direction == Direction::Read {
            pattern::fill(&local, 2);
        }
        let outcome = pair.run(direction, (0..COUNT).map(piece).collect());
        let (there, here) = (pattern::read(&generations), pattern::read(&local));
        let plainly = pattern::read(&plain);
        for (at, result) in (0..COUNT).zip(&outcome.pieces) {
            let case = format!("{} of piece {at}", direction.name());
            let bytes = usize::try_from(at * SLOT).expect("small");
            let bytes = bytes..bytes + usize::try_from(300 + at).expect("small");
            let sent = &mine[bytes.clone()];
            match expected(at) {
                Ok(memory) => {
                    let crc32c = Some(crc32c::crc32c(sent));
                    assert_eq!(*result, Ok(PieceDone { crc32c }), "{case}");
                    let tags = memory.id() == generations.id();
                    let arrived = if tags { &there } else { &plainly };
                    assert_same(&arrived[bytes.clone()], sent, &case);
                    assert_same(&here[bytes], sent, &case);
                }
                Err(refusal) => {
                    assert_eq!(*result, Err(PieceError::Refused(refusal)), "{case}");
                    assert!(there[bytes.clone()] != *sent && plainly[bytes.clone()] != *sent);
                    assert_eq!(here[bytes] == *sent, direction == Direction::Write);
                }
            }
        }
    }
}

// contract: transport-6
pub(super) fn a_piece_that_another_of_its_batch_overtakes_does_not_land_behind_it(pair: &Pair) {
    let remote = pair.remote(12_288, Access::RemoteReadWrite);
    let local = pair.local(20_000);
    let bytes = pattern::fill(&local, 1);
    for (first, generations) in [[5, 6], [8, 7]].into_iter().enumerate() {
        let before = pattern::fill(&remote, 2);
        // They share a granule, of which each has bytes that the other has not.
        let pieces = vec![
            Piece {
                local: slice(&local, 0, 9000),
                remote: tagged(&remote, 0, 9000, generations[0]),
            },
            Piece {
                local: slice(&local, 10_000, 1000),
                remote: tagged(&remote, 8192, 1000, generations[1]),
            },
        ];
        let spans = [
            (0..9000, &bytes[..9000]),
            (8192..9192, &bytes[10_000..11_000]),
        ];
        let outcome = pair.run(Direction::Write, pieces);
        let [later, earlier] = [1 - first, first];
        assert!(outcome.pieces[later].is_ok(), "{outcome:?}");
        let mut expected = before;
        for (at, (span, bytes)) in [earlier, later].map(|at| (at, spans[at].clone())) {
            match outcome.pieces[at] {
                Ok(_) => expected[span].copy_from_slice(bytes),
                Err(error) => assert_eq!(error, PieceError::Refused(Refusal::StaleGeneration)),
            }
        }
        let landed = pattern::read(&remote);
        let (span, _) = spans[later].clone();
        assert_same(&landed[span.clone()], &expected[span], "the later writer");
        // An owner that applies what comes over a connection claims for all of a frame before its bytes land.
        if pair.kind != TransportKind::Tcp {
            assert_same(&landed, &expected, "in either order");
        }
    }
}

pub(super) fn a_fenced_place_refuses_earlier_generations(pair: &Pair) {
    let remote = pair.remote(16_384, Access::RemoteReadWrite);
    let local = pair.local(16_384);
    let before = pattern::fill(&remote, 1);
    remote.fence(4096, 4096, Generation(10)).expect("tagged");
    let one = |direction, at, generation| {
        let piece = Piece {
            local: slice(&local, 0, 100),
            remote: tagged(&remote, at, 100, generation),
        };
        pair.run(direction, vec![piece]).pieces[0].map(|_| ())
    };
    let stale = Err(PieceError::Refused(Refusal::StaleGeneration));
    assert_eq!(one(Direction::Write, 4096, 9), stale);
    assert_eq!(one(Direction::Read, 8000, 9), stale);
    assert_same(&pattern::read(&remote), &before, "a fenced place");
    assert_eq!(one(Direction::Write, 0, 9), Ok(()), "a place beside it");
    assert_eq!(one(Direction::Write, 4096, 11), Ok(()), "a later writer");
}

pub(super) fn a_stale_part_fails_the_whole_piece(pair: &Pair) {
    // Split by whoever splits, and only its last granule belongs to somebody later.
    let len = 3 * CHUNK + 1;
    let remote = pair.remote(len, Access::RemoteReadWrite);
    let local = pair.local(len);
    remote.fence(len - 1, 1, Generation(9)).expect("tagged");
    let small = || Piece {
        local: slice(&local, 0, 64),
        remote: place(&remote, 0, 64),
    };
    let large = Piece {
        local: slice(&local, 0, len),
        remote: tagged(&remote, 0, len, 8),
    };
    let outcome = pair.run(Direction::Write, vec![small(), large, small()]);
    assert!(
        outcome.pieces[0].is_ok() && outcome.pieces[2].is_ok(),
        "{outcome:?}"
    );
    assert_eq!(
        outcome.pieces[1],
        Err(PieceError::Refused(Refusal::StaleGeneration))
    );
}

pub(super) fn local_memory_that_is_gone_fails_its_piece(pair: &Pair) {
    let remote = pair.remote(4096, Access::RemoteReadWrite);
    let (here, gone) = (pair.local(4096), pair.local(4096));
    let lost = slice(&gone, 0, 64);
    gone.unregister(Duration::from_secs(5))
        .expect("nobody uses it");
    let outcome = pair.run(
        Direction::Write,
        vec![
            Piece {
                local: slice(&here, 0, 64),
                remote: place(&remote, 0, 64),
            },
            Piece {
                local: lost,
                remote: place(&remote, 64, 64),
            },
            Piece {
                local: slice(&here, 0, 64),
                remote: place(&remote, 128, 63),
            },
        ],
    );
    assert!(outcome.pieces[0].is_ok());
    assert_eq!(outcome.pieces[1], Err(PieceError::LocalInvalid));
    assert_eq!(outcome.pieces[2], Err(PieceError::LengthMismatch));
}

pub(super) fn a_deadline_of_nothing_is_a_timeout(pair: &Pair) {
    let remote = pair.remote(4096, Access::RemoteReadWrite);
    let local = pair.local(4096);
    let before = pattern::fill(&remote, 1);
    pattern::fill(&local, 2);
    let outcome = pair
        .near
        .submit(Batch {
            peer: pair.peer(),
            direction: Direction::Write,
            pieces: vec![Piece {
                local: slice(&local, 0, 64),
                remote: place(&remote, 0, 64),
            }],
            checksum: false,
            deadline: Some(Duration::ZERO),
        })
        .wait();
    assert_eq!(outcome.first_error(), Some(PieceError::Timeout));
    assert_same(
        &pattern::read(&remote),
        &before,
        "what came too late to begin",
    );
}
