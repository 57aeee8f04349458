//! Bytes arrive where they belong, and nowhere else.

use crate::batch::{Direction, Piece};
use crate::memory::{Access, LocalSlice};
use crate::testing::pattern::{self, assert_same};

use super::{CHUNK, Pair, place, slice};

/// The size at which copies are cut.
const UNIT: u64 = 256 << 10;

// contract: transport-2
pub(super) fn pieces_of_all_sizes_and_offsets_are_bit_exact(pair: &Pair) {
    let mut cases = vec![
        (1, 0),
        (7, 3),
        (64, 1),
        (4095, 1),
        (4096, 4095),
        (4097, 4096),
    ];
    for around in [UNIT, CHUNK, 2 * CHUNK, 3 * CHUNK] {
        for (delta, offset) in [
            (-7_i64, 0_u64),
            (-1, 5),
            (0, 0),
            (0, 4097),
            (1, 1),
            (7, 4093),
        ] {
            cases.push((around.checked_add_signed(delta).expect("positive"), offset));
        }
    }
    let len = 3 * CHUNK + UNIT;
    let remote = pair.remote(len, Access::RemoteReadWrite);
    let local = pair.local(len);
    for (number, (size, offset)) in (0_u64..).zip(cases) {
        let theirs = pattern::fill(&remote, 2 * number);
        let mine = pattern::fill(&local, 2 * number + 1);
        let at = |n: u64| usize::try_from(n).expect("small");
        let from = offset / 2;
        let piece = || Piece {
            local: slice(&local, from, size),
            remote: place(&remote, offset, size),
        };
        let moved = &mine[at(from)..at(from + size)];
        let sum = Ok(Some(crc32c::crc32c(moved)));
        let check = |direction: Direction| {
            let outcome = pair.run(direction, vec![piece()]);
            let crc = outcome.pieces[0].map(|done| done.crc32c);
            assert_eq!(crc, sum, "{} of {size} bytes", direction.name());
        };
        check(Direction::Write);
        let mut expected = theirs;
        expected[at(offset)..at(offset + size)].copy_from_slice(moved);
        assert_same(
            &pattern::read(&remote),
            &expected,
            "remote memory after a write",
        );
        let other = pattern::fill(&local, 1_000_000 + number);
        check(Direction::Read);
        let mut back = other;
        back[at(from)..at(from + size)].copy_from_slice(&expected[at(offset)..at(offset + size)]);
        assert_same(&pattern::read(&local), &back, "local memory after a read");
        assert_same(
            &pattern::read(&remote),
            &expected,
            "remote memory after a read",
        );
    }
}

// contract: transport-1
pub(super) fn a_hundred_thousand_small_pieces_are_one_batch(pair: &Pair) {
    const COUNT: u64 = 100_000;
    const SIZE: u64 = 64;
    let remote = pair.remote(COUNT * SIZE, Access::RemoteReadWrite);
    let local = pair.local(COUNT * SIZE);
    let mine = pattern::fill(&local, 1);
    // Scattered: piece n goes to place n times an odd number, modulo their number (which is even).
    let target = |n: u64| (n * 48_271 % COUNT) * SIZE;
    let pieces = || {
        (0..COUNT)
            .map(|n| Piece {
                local: slice(&local, n * SIZE, SIZE),
                remote: place(&remote, target(n), SIZE),
            })
            .collect::<Vec<_>>()
    };
    pair.succeed(Direction::Write, pieces());
    let mut expected = vec![0; mine.len()];
    for n in 0..COUNT {
        let [from, to] = [n * SIZE, target(n)].map(|at| usize::try_from(at).expect("small"));
        expected[to..to + 64].copy_from_slice(&mine[from..from + 64]);
    }
    assert_same(&pattern::read(&remote), &expected, "scattered pieces");
    pattern::fill(&local, 2);
    pair.succeed(Direction::Read, pieces());
    assert_same(&pattern::read(&local), &mine, "gathered pieces");
}

pub(super) fn pieces_of_no_bytes_are_done(pair: &Pair) {
    let remote = pair.remote(4096, Access::RemoteReadWrite);
    let local = pair.local(4096);
    let before = pattern::fill(&remote, 1);
    assert!(pair.run(Direction::Write, Vec::new()).pieces.is_empty());
    let nothing = || Piece {
        local: slice(&local, 5, 0),
        remote: place(&remote, 9, 0),
    };
    let something = Piece {
        local: slice(&local, 0, 16),
        remote: place(&remote, 0, 16),
    };
    let outcome = pair.run(Direction::Write, vec![nothing(), something, nothing()]);
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(outcome.pieces[0].map(|done| done.crc32c), Ok(Some(0)));
    assert_same(
        &pattern::read(&remote)[16..],
        &before[16..],
        "what no piece named",
    );
}

pub(super) fn checksums_are_those_of_the_bytes(pair: &Pair) {
    let len = 3 * CHUNK + 77;
    let remote = pair.remote(len, Access::RemoteReadWrite);
    let local = pair.local(len);
    let mine = pattern::fill(&local, 1);
    let parts = [
        (0, len),
        (1, 1),
        (3, 4096),
        (CHUNK - 1, CHUNK + 2),
        (5, 2 * CHUNK),
        (6, 2 * CHUNK + 1),
    ];
    let pieces = || {
        parts
            .map(|(at, len)| Piece {
                local: slice(&local, at, len),
                remote: place(&remote, at, len),
            })
            .to_vec()
    };
    for direction in [Direction::Write, Direction::Read] {
        let outcome = pair.run(direction, pieces());
        for ((at, len), result) in parts.iter().zip(&outcome.pieces) {
            let [from, to] = [*at, at + len].map(|at| usize::try_from(at).expect("small"));
            let expected = crc32c::crc32c(&mine[from..to]);
            let crc = result.as_ref().map(|done| done.crc32c);
            assert_eq!(
                crc,
                Ok(Some(expected)),
                "{} of {len} bytes at {at}",
                direction.name()
            );
        }
    }
}

pub(super) fn memory_of_every_origin_can_be_moved(pair: &Pair) {
    let len = 300_000;
    let given = pattern::bytes(1, len);
    let owned = pair
        .far
        .register(given.clone().into(), Access::RemoteReadWrite)
        .expect("a buffer");
    let mut raw = vec![0_u8; len];
    let size = len as u64;
    // Out of a buffer that was given away, into memory that is not registered at all.
    let local = raw_slice(&mut raw);
    pair.succeed(
        Direction::Read,
        vec![Piece {
            local,
            remote: place(&owned, 0, size),
        }],
    );
    assert_same(&raw, &given, "from a registered buffer into plain memory");
    // And back into it, from a buffer of this side.
    let other = pattern::bytes(2, len);
    let mine = pair
        .near
        .register(other.clone().into(), Access::LocalOnly)
        .expect("a buffer");
    let piece = Piece {
        local: slice(&mine, 0, size),
        remote: place(&owned, 0, size),
    };
    pair.succeed(Direction::Write, vec![piece]);
    assert_same(
        &pattern::read(&owned),
        &other,
        "from a buffer into a registered buffer",
    );
}

#[expect(
    unsafe_code,
    reason = "the test owns the bytes and waits for the transfer"
)]
fn raw_slice(bytes: &mut [u8]) -> LocalSlice {
    // SAFETY: every caller waits for the transfer before it touches the bytes again.
    unsafe { LocalSlice::from_raw(bytes.as_mut_ptr() as usize, bytes.len() as u64) }
}

pub(super) fn batches_of_many_threads_do_not_mix(pair: &Pair) {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 40;
    let part = 200_000;
    let remote = pair.remote(THREADS * part, Access::RemoteReadWrite);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let remote = &remote;
            scope.spawn(move || {
                let local = pair.local(part);
                for round in 0..ROUNDS {
                    let bytes = pattern::fill(&local, thread * ROUNDS + round);
                    // From one piece of a few bytes to many, small and large together.
                    let step = 97 + round * 4999;
                    let pieces = || {
                        (0..part)
                            .step_by(usize::try_from(step).expect("small"))
                            .map(|at| {
                                let len = step.min(part - at);
                                let remote = place(remote, thread * part + at, len);
                                Piece {
                                    local: slice(&local, at, len),
                                    remote,
                                }
                            })
                            .collect()
                    };
                    pair.succeed(Direction::Write, pieces());
                    local.copy_in(0, &vec![0; bytes.len()]).expect("inside");
                    pair.succeed(Direction::Read, pieces());
                    assert_same(&pattern::read(&local), &bytes, "what this thread wrote");
                }
            });
        }
    });
}

pub(super) fn small_transfers_of_many_threads_do_not_mix(pair: &Pair) {
    const THREADS: u64 = 6;
    let remote = pair.remote(THREADS * 4096, Access::RemoteReadWrite);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let remote = &remote;
            scope.spawn(move || {
                let (here, back) = (pair.local(4096), pair.local(4096));
                for round in 0..200 {
                    let size = 1 + (round * 1237 + thread) % 4096;
                    let bytes = pattern::fill(&here, thread << 32 | round);
                    let place = || place(remote, thread * 4096, size);
                    pair.succeed(
                        Direction::Write,
                        vec![Piece {
                            local: slice(&here, 0, size),
                            remote: place(),
                        }],
                    );
                    pair.succeed(
                        Direction::Read,
                        vec![Piece {
                            local: slice(&back, 0, size),
                            remote: place(),
                        }],
                    );
                    let size = usize::try_from(size).expect("small");
                    assert_same(
                        &pattern::read(&back)[..size],
                        &bytes[..size],
                        "what this thread wrote",
                    );
                }
            });
        }
    });
}

// contract: transport-13
pub(super) fn the_outcome_and_the_counters_name_the_transport(pair: &Pair) {
    let remote = pair.remote(1 << 20, Access::RemoteReadWrite);
    let local = pair.local(1 << 20);
    assert_eq!(pair.near.transport_to(pair.far.endpoint()), Some(pair.kind));
    let before = pair.near.stats();
    let pieces = (0..4).map(|n| {
        let at = n * 100_000;
        Piece {
            local: slice(&local, at, 100_000),
            remote: place(&remote, at, 100_000),
        }
    });
    let outcome = pair.run(Direction::Write, pieces.collect());
    assert_eq!(outcome.transport, Some(pair.kind));
    let after = pair.near.stats();
    for direction in Direction::ALL {
        for transport in crate::TransportKind::ALL {
            let counters = |stats: &crate::Stats| {
                let entry = stats
                    .operation(transport, direction)
                    .expect("every one is listed");
                (entry.pieces, entry.bytes, entry.batches)
            };
            let (old, new) = (counters(&before), counters(&after));
            let grown = (new.0 - old.0, new.1 - old.1, new.2 - old.2);
            let used = transport == pair.kind && direction == Direction::Write;
            assert_eq!(
                grown,
                if used { (4, 400_000, 1) } else { (0, 0, 0) },
                "{transport} {direction:?}"
            );
        }
    }
    let entry = after
        .operation(pair.kind, Direction::Write)
        .expect("listed");
    assert!(entry.copy.as_nanos() > 0 && entry.queue.as_nanos() > 0);
}
