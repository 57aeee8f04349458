//! Shared memory between two engines of one process: bytes, checks, withdrawal, presence.

mod shm_support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use layercake_protocol::auth::SharedToken;
use layercake_protocol::ids::{Capability, EngineId, Generation, RegionId};
use layercake_transport::{
    Access, AllocateOptions, Direction, Engine, EngineConfig, HostBuffer, LocalSlice, Memory,
    Outcome, PieceError, Refusal, RemoteSlice, TransportKind, TransportSet,
};

use shm_support::*;

const READ_WRITE: AllocateOptions = AllocateOptions {
    access: Access::RemoteReadWrite,
    generation_tags: true,
    pretouch: false,
    huge_pages: false,
};

/// Two engines, and memory of each.
struct Scene {
    owner: Engine,
    peer: Engine,
    theirs: Memory,
    mine: Memory,
    remote: Remote,
}

fn scene(len: u64, options: AllocateOptions) -> Scene {
    scene_of(shm_only(), shm_only(), len, options)
}

fn scene_of(owner: TransportSet, peer: TransportSet, len: u64, options: AllocateOptions) -> Scene {
    let (owner, peer) = (engine(owner), engine(peer));
    let theirs = owner.allocate(len, options).expect("allocated");
    let mine = peer
        .allocate(len, AllocateOptions::default())
        .expect("allocated");
    let remote = Remote::of(&owner, &theirs);
    Scene {
        owner,
        peer,
        theirs,
        mine,
        remote,
    }
}

impl Scene {
    fn pair(&self, offset: u64, len: u64) -> (LocalSlice, RemoteSlice) {
        let local = self.mine.slice(offset, len).expect("inside");
        (local, self.remote.slice(offset, len))
    }

    fn write(&self, pieces: Vec<(LocalSlice, RemoteSlice)>) -> Outcome {
        transfer(&self.peer, &self.remote, Direction::Write, pieces)
    }

    fn read(&self, pieces: Vec<(LocalSlice, RemoteSlice)>) -> Outcome {
        transfer(&self.peer, &self.remote, Direction::Read, pieces)
    }
}

fn content(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.len()).expect("fits")];
    memory.copy_out(0, &mut bytes).expect("inside");
    bytes
}

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

// contract: transport-5
#[test]
fn what_a_peer_may_not_do_is_refused_and_counted_by_the_owner() {
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

#[test]
fn engines_that_share_nothing_but_the_process_reach_each_other_both_ways() {
    let engines: Vec<_> = (0..3).map(|_| engine(shm_only())).collect();
    let memories: Vec<_> = engines
        .iter()
        .map(|engine| engine.allocate(4096, READ_WRITE).expect("allocated"))
        .collect();
    for (i, from) in engines.iter().enumerate() {
        for (j, to) in engines.iter().enumerate().filter(|(j, _)| *j != i) {
            let bytes = pattern((i * 3 + j) as u64, 4096);
            memories[i].copy_in(0, &bytes).expect("inside");
            let remote = Remote::of(to, &memories[j]);
            let piece = (
                memories[i].slice(0, 4096).expect("inside"),
                remote.slice(0, 4096),
            );
            let outcome = transfer(from, &remote, Direction::Write, vec![piece]);
            assert_eq!(outcome.first_error(), None);
            assert!(content(&memories[j]) == bytes);
            assert!(to.holders(from.endpoint().engine).attached);
        }
    }
}

#[test]
fn another_host_is_not_reached_by_shared_memory() {
    let scene = scene(4096, READ_WRITE);
    let mut elsewhere = scene.owner.endpoint().clone();
    elsewhere.host.0[3] ^= 1;
    assert_eq!(scene.peer.transport_to(&elsewhere), None);
    let remote = Remote {
        endpoint: Arc::new(elsewhere),
        ..scene.remote.clone()
    };
    let outcome = transfer(
        &scene.peer,
        &remote,
        Direction::Write,
        vec![scene.pair(0, 1)],
    );
    assert_eq!(outcome.first_error(), Some(PieceError::NoTransport));
}

#[test]
fn an_engine_under_a_name_that_changed_hands_counts_as_gone() {
    let scene = scene(4096, READ_WRITE);
    let mut earlier = scene.owner.endpoint().clone();
    earlier.engine = EngineId::draw();
    let remote = Remote {
        endpoint: Arc::new(earlier),
        ..scene.remote.clone()
    };
    let outcome = transfer(
        &scene.peer,
        &remote,
        Direction::Write,
        vec![scene.pair(0, 1)],
    );
    assert_eq!(outcome.first_error(), Some(PieceError::PeerGone));
    let mut nobody = scene.owner.endpoint().clone();
    nobody.engine = EngineId::draw();
    nobody.shm = Some("layercake-nobody".to_owned());
    let remote = Remote {
        endpoint: Arc::new(nobody),
        ..scene.remote.clone()
    };
    let outcome = transfer(
        &scene.peer,
        &remote,
        Direction::Write,
        vec![scene.pair(0, 1)],
    );
    assert_eq!(outcome.first_error(), Some(PieceError::PeerGone));
}

// contract: transport-12
#[test]
fn only_holders_of_the_token_are_attached() {
    let with_token = |text: Option<&str>| {
        Engine::start(EngineConfig {
            transports: shm_only(),
            token: text.map(|text| SharedToken::new(text).expect("long enough")),
            ..EngineConfig::default()
        })
        .expect("starts")
    };
    let secret = Some("a secret that both know");
    for (owner, peer, trusted) in [
        (secret, secret, true),
        (secret, Some("another secret than that"), false),
        (secret, None, false),
        (None, secret, false),
    ] {
        let (owner, peer) = (with_token(owner), with_token(peer));
        let theirs = owner.allocate(4096, READ_WRITE).expect("allocated");
        let mine = peer
            .allocate(4096, AllocateOptions::default())
            .expect("allocated");
        let remote = Remote::of(&owner, &theirs);
        let piece = (mine.slice(0, 8).expect("inside"), remote.slice(0, 8));
        let outcome = transfer(&peer, &remote, Direction::Write, vec![piece]);
        let expected = (!trusted).then_some(PieceError::NotTrusted);
        assert_eq!(outcome.first_error(), expected);
        assert_eq!(owner.holders(peer.endpoint().engine).attached, trusted);
    }
}

#[test]
fn an_owner_that_was_shut_down_is_gone_and_its_memory_with_it() {
    let scene = scene(4096, READ_WRITE);
    assert_eq!(scene.write(vec![scene.pair(0, 100)]).first_error(), None);
    scene.owner.shutdown(LIMIT);
    let outcome = scene.write(vec![scene.pair(0, 100)]);
    let gone = [
        Some(PieceError::PeerGone),
        Some(PieceError::Refused(Refusal::UnknownRegion)),
    ];
    assert!(gone.contains(&outcome.first_error()), "{outcome:?}");
    eventually("later batches find nobody", || {
        scene.write(vec![scene.pair(0, 1)]).first_error() == Some(PieceError::PeerGone)
    });
}

#[test]
fn an_initiator_that_was_shut_down_holds_nothing_any_more() {
    let scene = scene(4096, READ_WRITE);
    let peer = scene.peer.endpoint().engine;
    assert!(!scene.owner.holders(peer).attached);
    assert_eq!(scene.write(vec![scene.pair(0, 100)]).first_error(), None);
    assert!(scene.owner.holders(peer).attached);
    assert!(!scene.owner.wait_detached(peer, Duration::from_millis(20)));
    scene.peer.shutdown(LIMIT);
    assert!(scene.owner.wait_detached(peer, LIMIT));
    assert!(!scene.owner.holders(peer).attached);
    let outcome = scene.write(vec![scene.pair(0, 100)]);
    assert_eq!(outcome.first_error(), Some(PieceError::ShutDown));
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

#[test]
fn a_parked_batch_ends_at_its_deadline() {
    // Somebody listens under the name and never answers.
    let name = format!("layercake-test-mute-{}", EngineId::draw());
    let address = rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        None,
    )
    .expect("a socket");
    rustix::net::bind(&socket, &address).expect("bound");
    rustix::net::listen(&socket, 8).expect("listens");
    let mut config = EngineConfig {
        transports: shm_only(),
        ..EngineConfig::default()
    };
    config.deadlines.connect = Duration::from_millis(300);
    let peer = Engine::start(config).expect("starts");
    let mine = peer
        .allocate(4096, AllocateOptions::default())
        .expect("allocated");
    let mut mute = peer.endpoint().clone();
    mute.engine = EngineId::draw();
    mute.shm = Some(name);
    let remote = Remote {
        endpoint: Arc::new(mute),
        region: RegionId(1),
        capability: Capability([0; 16]),
        len: 4096,
    };
    let piece = || vec![(mine.slice(0, 8).expect("inside"), remote.slice(0, 8))];
    let begun = Instant::now();
    let outcome = transfer(&peer, &remote, Direction::Write, piece());
    assert_eq!(outcome.first_error(), Some(PieceError::Unreachable));
    assert!(begun.elapsed() >= Duration::from_millis(300));
    let cancelled = submit(&peer, &remote, Direction::Write, piece());
    cancelled.cancel();
    let outcome = cancelled.wait_timeout(LIMIT).expect("ends");
    assert_eq!(outcome.first_error(), Some(PieceError::Cancelled));
}
