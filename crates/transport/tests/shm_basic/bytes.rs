//! Bytes arrive, whatever the pieces and the memory.

use layercake_transport::{
    Access, AllocateOptions, Direction, HostBuffer, Memory, PieceError, Refusal, TransportKind,
};

use super::{READ_WRITE, Scene, content, scene};
use crate::shm_support::*;

/// Cuts `len` bytes into pieces of very different sizes, and shuffles them.
fn cuts(len: u64, seed: u64) -> Vec<(u64, u64)> {
    let noise = pattern(seed, 8 * 4096);
    let mut noise = noise
        .chunks_exact(8)
        .map(|c| u64::from_le_bytes(c.try_into().expect("8")))
        .cycle();
    let mut next = move || noise.next().expect("endless");
    let (mut cuts, mut offset) = (Vec::new(), 0);
    while offset < len {
        let size = match next() % 8 {
            0 => next() % 700_000,
            1..4 => next() % 9000,
            _ => next() % 200,
        };
        let size = size.clamp(1, len - offset);
        cuts.push((offset, size));
        offset += size;
    }
    cuts.sort_by_key(|(offset, _)| offset.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    cuts
}

fn check_both_ways(scene: &Scene, expected: TransportKind) {
    let len = scene.theirs.len();
    let size = usize::try_from(len).expect("fits");
    let sent = pattern(1, size);
    scene.mine.copy_in(0, &sent).expect("inside");
    let pieces: Vec<_> = cuts(len, 2);
    let outcome = scene.write(pieces.iter().map(|(o, l)| scene.pair(*o, *l)).collect());
    assert_eq!(outcome.first_error(), None);
    assert_eq!(outcome.transport, Some(expected));
    assert!(content(&scene.theirs) == sent, "bytes differ after writing");
    for ((offset, len), done) in pieces.iter().zip(&outcome.pieces) {
        let place = |byte: u64| usize::try_from(byte).expect("fits");
        let bytes = &sent[place(*offset)..place(*offset + *len)];
        let crc = done.expect("done").crc32c;
        assert_eq!(crc, Some(crc32c::crc32c(bytes)));
    }
    let theirs = pattern(3, size);
    scene.theirs.copy_in(0, &theirs).expect("inside");
    let outcome = scene.read(
        cuts(len, 4)
            .into_iter()
            .map(|(o, l)| scene.pair(o, l))
            .collect(),
    );
    assert_eq!(outcome.first_error(), None);
    assert!(content(&scene.mine) == theirs, "bytes differ after reading");
}

#[test]
fn bytes_arrive_whatever_the_pieces() {
    let scene = scene(9_000_001, READ_WRITE);
    let endpoint = scene.owner.endpoint();
    assert_eq!(scene.peer.transport_to(endpoint), Some(TransportKind::Shm));
    check_both_ways(&scene, TransportKind::Shm);
}

#[test]
fn huge_pages_are_shared_like_others_where_there_are_any() {
    let options = AllocateOptions {
        huge_pages: true,
        ..READ_WRITE
    };
    check_both_ways(&scene(3_000_001, options), TransportKind::Shm);
}

#[test]
fn memory_that_was_not_allocated_here_is_reached_by_address() {
    let (owner, peer) = (engine(shm_only()), engine(shm_only()));
    let buffer = HostBuffer::from(vec![0; 3_000_001]);
    let theirs = owner
        .register(buffer, Access::RemoteReadWrite)
        .expect("registered");
    let mine = peer.register(HostBuffer::from(vec![0; 3_000_001]), Access::LocalOnly);
    let mine = mine.expect("registered");
    let remote = Remote::of(&owner, &theirs);
    let scene = Scene {
        owner,
        peer,
        theirs,
        mine,
        remote,
    };
    check_both_ways(&scene, TransportKind::Shm);
    // Such memory has no tags to check a generation against.
    let (local, remote) = scene.pair(0, 10);
    let outcome = scene.write(vec![(local, with_generation(remote, 5))]);
    assert_eq!(
        outcome.first_error(),
        Some(PieceError::Refused(Refusal::NoTags))
    );
}

#[test]
fn one_batch_may_name_many_regions_of_both_kinds() {
    let (owner, peer) = (engine(shm_only()), engine(shm_only()));
    let regions: Vec<Memory> = (0..40)
        .map(|i| {
            if i % 3 == 0 {
                let buffer = HostBuffer::from(vec![0; 5000]);
                owner
                    .register(buffer, Access::RemoteReadWrite)
                    .expect("registered")
            } else {
                owner.allocate(5000, READ_WRITE).expect("allocated")
            }
        })
        .collect();
    let mine = peer
        .allocate(40 * 5000, AllocateOptions::default())
        .expect("allocated");
    let sent = pattern(7, 40 * 5000);
    mine.copy_in(0, &sent).expect("inside");
    let pieces = regions
        .iter()
        .zip((0..).step_by(5000))
        .map(|(memory, offset)| {
            let remote = Remote::of(&owner, memory).slice(0, 5000);
            (mine.slice(offset, 5000).expect("inside"), remote)
        });
    let remote = Remote::of(&owner, &regions[0]);
    let outcome = transfer(&peer, &remote, Direction::Write, pieces.collect());
    assert_eq!(outcome.first_error(), None);
    for (memory, sent) in regions.iter().zip(sent.chunks(5000)) {
        assert!(content(memory) == sent);
    }
}

#[test]
fn a_large_batch_of_small_pieces_is_slow_at_most() {
    let scene = scene(64 * 100_000, READ_WRITE);
    let sent = pattern(1, 64 * 100_000);
    scene.mine.copy_in(0, &sent).expect("inside");
    let pieces = (0..100_000).map(|i| scene.pair(i * 64, 64)).collect();
    assert_eq!(scene.write(pieces).first_error(), None);
    assert!(content(&scene.theirs) == sent);
}

/// Faults of this thread so far that read nothing from a disk; pages that it brings in ahead count.
fn faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("a thread has one");
    let (_, fields) = stat.rsplit_once(')').expect("its name is in brackets");
    let faults = fields.split_whitespace().nth(7).expect("the tenth field");
    faults.parse().expect("a number")
}

#[test]
fn a_thread_that_submits_a_small_batch_brings_in_no_pages() {
    const STEP: u64 = 1 << 20;
    const COUNT: u64 = 48;
    let scene = scene(COUNT * STEP, READ_WRITE);
    scene.mine.copy_in(0, &pattern(1, 4096)).expect("inside");
    let piece = |offset| {
        let local = scene.mine.slice(0, 64).expect("inside");
        (local, scene.remote.slice(offset, 64))
    };
    // Opens the region, and the pages of the first piece.
    assert!(scene.write(vec![piece(0)]).is_ok());
    let pieces = (0..COUNT).map(|step| piece(step * STEP)).collect();
    let before = faults();
    let batch = submit(&scene.peer, &scene.remote, Direction::Write, pieces);
    // Not `wait`, which would take part.
    eventually("the batch ends", || batch.is_done());
    let fresh = faults() - before;
    assert!(batch.wait().is_ok());
    // A megabyte takes at least sixteen.
    assert!(fresh < 8 * COUNT, "{fresh} faults for {COUNT} pieces");
    let last = usize::try_from((COUNT - 1) * STEP).expect("fits");
    assert!(content(&scene.theirs)[last..].starts_with(&pattern(1, 64)));
}
