//! Shared memory between real processes: bytes, and what happens when either side is killed or
//! stopped at any moment.

mod shm_support;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use layercake_protocol::ids::EngineId;
use layercake_transport::{
    Access, AllocateOptions, Direction, Engine, EngineConfig, Error, HostBuffer, Memory,
    PieceError, Refusal, TransportKind,
};
use rustix::thread::{CapabilitySet, CapabilitySets};

use shm_support::*;

const READ_WRITE: AllocateOptions = AllocateOptions {
    access: Access::RemoteReadWrite,
    generation_tags: true,
    pretouch: false,
    huge_pages: false,
};

/// What a child does; see `shm_support`.
#[test]
#[ignore = "the other side of the tests here, started by them"]
fn child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "owner" | "private-owner" => owner(&role),
        "writer" => writer(),
        other => panic!("no such role: {other}"),
    }
}

/// Serves regions as it is told to.
fn owner(role: &str) {
    if role == "private-owner" {
        // Nobody without special rights may reach this process's memory by address.
        let none = rustix::process::DumpableBehavior::NotDumpable;
        rustix::process::set_dumpable_behavior(none).expect("set");
    }
    let engine = engine(shm_and_tcp());
    let mut regions: HashMap<u64, Memory> = HashMap::new();
    while let Some(line) = listen() {
        let words: Vec<_> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<u64>().expect("a number");
        match words[0] {
            "allocate" | "register" => {
                let size = usize::try_from(number(1)).expect("fits");
                let bytes = pattern(number(2), size);
                let memory = if words[0] == "allocate" {
                    let memory = engine.allocate(number(1), READ_WRITE).expect("allocated");
                    memory.copy_in(0, &bytes).expect("inside");
                    memory
                } else {
                    let buffer = HostBuffer::from(bytes);
                    engine
                        .register(buffer, Access::RemoteReadWrite)
                        .expect("registered")
                };
                tell(&Remote::of(&engine, &memory).to_line());
                regions.insert(memory.id().0, memory);
            }
            "matches" => {
                let memory = &regions[&number(1)];
                let mut bytes = vec![0; usize::try_from(memory.len()).expect("fits")];
                memory.copy_out(0, &mut bytes).expect("inside");
                tell(&(bytes == pattern(number(2), bytes.len())).to_string());
            }
            // Another program in this process: it goes on, the engine does not.
            "become" => {
                let mut other = std::process::Command::new("sh");
                other.args(["-c", "echo; echo '@@ another'; read -r line"]);
                panic!("{}", std::os::unix::process::CommandExt::exec(&mut other));
            }
            "refusals" => tell(&engine.stats().security_refusals.to_string()),
            other => panic!("no such request: {other}"),
        }
    }
}

/// Writes to a region without pause, and reports each batch.
fn writer() {
    let engine = engine(shm_only());
    let remote = Remote::parse(&listen().expect("a region"));
    let mine = engine
        .allocate(remote.len, AllocateOptions::default())
        .expect("allocated");
    let bytes = pattern(1, usize::try_from(remote.len).expect("fits"));
    mine.copy_in(0, &bytes).expect("inside");
    tell(&format!("{:x}", engine.endpoint().engine.0));
    loop {
        let piece = (
            mine.slice(0, remote.len).expect("inside"),
            remote.slice(0, remote.len),
        );
        let outcome = transfer(&engine, &remote, Direction::Write, vec![piece]);
        match outcome.first_error() {
            None => {}
            Some(PieceError::Refused(Refusal::UnknownRegion)) => {
                tell("refused");
                return;
            }
            Some(other) => panic!("{other}"),
        }
    }
}

fn start_owner(role: &str, request: &str) -> (Child, Remote) {
    let mut owner = Child::spawn(role);
    let remote = Remote::parse(&owner.ask(request));
    (owner, remote)
}

fn all(
    remote: &Remote,
    mine: &Memory,
) -> Vec<(
    layercake_transport::LocalSlice,
    layercake_transport::RemoteSlice,
)> {
    let local = mine.slice(0, remote.len).expect("inside");
    vec![(local, remote.slice(0, remote.len))]
}

fn content(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.len()).expect("fits")];
    memory.copy_out(0, &mut bytes).expect("inside");
    bytes
}

/// Reads what the owner has, writes something else, and has it compare.
fn check_both_ways(
    engine: &Engine,
    (owner, remote): &mut (Child, Remote),
    seed: u64,
    expected: TransportKind,
) {
    let size = usize::try_from(remote.len).expect("fits");
    let mine = engine
        .allocate(remote.len, AllocateOptions::default())
        .expect("allocated");
    let outcome = transfer(engine, remote, Direction::Read, all(remote, &mine));
    assert_eq!(outcome.first_error(), None);
    assert_eq!(outcome.transport, Some(expected));
    assert!(
        content(&mine) == pattern(seed, size),
        "bytes differ after reading"
    );
    mine.copy_in(0, &pattern(seed + 1, size)).expect("inside");
    let outcome = transfer(engine, remote, Direction::Write, all(remote, &mine));
    assert_eq!(outcome.first_error(), None);
    let question = format!("matches {} {}", remote.region.0, seed + 1);
    assert_eq!(owner.ask(&question), "true", "bytes differ after writing");
}

#[test]
fn bytes_arrive_in_another_process_mapped_or_by_address() {
    let engine = engine(shm_only());
    for request in ["allocate 5000001 10", "register 5000001 10"] {
        let mut owner = start_owner("owner", request);
        let peer = &owner.1.endpoint;
        assert_eq!(engine.transport_to(peer), Some(TransportKind::Shm));
        check_both_ways(&engine, &mut owner, 10, TransportKind::Shm);
    }
}

#[test]
fn dev_08_a_forged_capability_or_range_is_refused_and_counted_in_the_owner_over_shm() {
    let engine = engine(shm_only());
    let (mut owner, remote) = start_owner("owner", "allocate 4096 10");
    let mine = engine
        .allocate(4096, AllocateOptions::default())
        .expect("allocated");
    let mut forged = remote.slice(0, 8);
    forged.capability.0[0] ^= 1;
    let beyond = remote.slice(4090, 8);
    for (slice, refusal) in [
        (forged, Refusal::BadCapability),
        (beyond, Refusal::OutOfBounds),
    ] {
        let piece = (mine.slice(0, 8).expect("inside"), slice);
        let outcome = transfer(&engine, &remote, Direction::Write, vec![piece]);
        assert_eq!(outcome.first_error(), Some(PieceError::Refused(refusal)));
    }
    let question = format!("matches {} 10", remote.region.0);
    assert_eq!(owner.ask(&question), "true", "nothing was written");
    eventually("the owner counts them", || owner.ask("refusals") == "2");
}

fn patient_engine() -> Engine {
    let mut config = EngineConfig {
        transports: shm_only(),
        ..EngineConfig::default()
    };
    config.deadlines.progress = LIMIT;
    config.deadlines.connect = LIMIT;
    Engine::start(config).expect("starts")
}

// contract: transport-8, transport-9
#[test]
fn dev_07_an_owner_killed_in_mid_traffic_ends_transfers_with_an_error_over_shm() {
    for request in ["allocate 3000000 1", "register 3000000 1"] {
        // No deadline tells what the owner's end tells.
        let engine = patient_engine();
        let (mut owner, remote) = start_owner("owner", request);
        let done = AtomicU64::new(0);
        let noticed = Mutex::new(Vec::new());
        let killed = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mine = engine.allocate(remote.len, AllocateOptions::default());
                    let mine = mine.expect("allocated");
                    loop {
                        let outcome =
                            transfer(&engine, &remote, Direction::Write, all(&remote, &mine));
                        match outcome.first_error() {
                            None => done.fetch_add(1, Ordering::Relaxed),
                            Some(PieceError::PeerGone) => break,
                            Some(other) => panic!("{other}"),
                        };
                    }
                    noticed.lock().expect("lock").push(Instant::now());
                });
            }
            eventually("batches arrive", || done.load(Ordering::Relaxed) > 10);
            owner.kill();
            Instant::now()
        });
        for noticed in noticed.into_inner().expect("lock") {
            let took = noticed.saturating_duration_since(killed);
            assert!(took < LIMIT / 3, "noticed after {took:?}");
        }
        // A later batch finds the name gone, and ends at once as well.
        let mine = engine
            .allocate(remote.len, AllocateOptions::default())
            .expect("allocated");
        let begun = Instant::now();
        let outcome = transfer(&engine, &remote, Direction::Read, all(&remote, &mine));
        assert_eq!(outcome.first_error(), Some(PieceError::PeerGone));
        assert!(begun.elapsed() < LIMIT / 3);
    }
}

// contract: transport-8
#[test]
fn dev_07_nothing_is_done_over_shm_once_its_owner_is_gone() {
    let engine = patient_engine();
    for request in ["allocate 100000 1", "register 100000 1"] {
        for ends in ["killed", "terminated", "another program"] {
            let (mut owner, remote) = start_owner("owner", request);
            let mine = engine
                .allocate(remote.len, AllocateOptions::default())
                .expect("allocated");
            let write = || transfer(&engine, &remote, Direction::Write, all(&remote, &mine));
            assert_eq!(write().first_error(), None);
            match ends {
                "killed" => owner.kill(),
                "terminated" => {
                    owner.signal(rustix::process::Signal::TERM);
                    owner.reap();
                }
                _ => assert_eq!(owner.ask("become"), "another"),
            }
            // At once: what has seen the owner's end by now is the kernel alone.
            for _ in 0..3 {
                assert_eq!(write().first_error(), Some(PieceError::PeerGone), "{ends}");
            }
        }
    }
}

// contract: transport-8
#[test]
fn dev_07_what_is_done_over_shm_is_applied_though_the_owner_stands_still() {
    let mut config = EngineConfig {
        transports: shm_only(),
        ..EngineConfig::default()
    };
    config.deadlines.progress = Duration::from_millis(300);
    config.deadlines.connect = Duration::from_millis(300);
    let engine = Engine::start(config).expect("starts");
    for request in ["allocate 100000 1", "register 100000 1"] {
        let (mut owner, remote) = start_owner("owner", request);
        let second = Remote::parse(&owner.ask("allocate 100000 2"));
        let mine = engine
            .allocate(remote.len, AllocateOptions::default())
            .expect("allocated");
        // A busy machine may need more than one try at these deadlines.
        let read = |engine: &Engine, remote: &Remote, mine: &Memory| {
            transfer(engine, remote, Direction::Read, all(remote, mine)).is_ok()
        };
        eventually("it is open", || read(&engine, &remote, &mine));
        owner.stop();
        let sent = pattern(5, 100_000);
        mine.copy_in(0, &sent).expect("inside");
        eventually("copies go on", || {
            transfer(&engine, &remote, Direction::Write, all(&remote, &mine)).is_ok()
        });
        // What it would have to open has to wait for it, and that has an end.
        let outcome = transfer(&engine, &second, Direction::Read, all(&second, &mine));
        assert_eq!(outcome.first_error(), Some(PieceError::Stalled));
        let mut config = EngineConfig {
            transports: shm_only(),
            ..EngineConfig::default()
        };
        config.deadlines.connect = Duration::from_millis(300);
        let stranger = Engine::start(config).expect("starts");
        let theirs = stranger
            .allocate(100_000, AllocateOptions::default())
            .expect("allocated");
        let outcome = transfer(&stranger, &remote, Direction::Read, all(&remote, &theirs));
        assert_eq!(outcome.first_error(), Some(PieceError::Unreachable));
        owner.resume();
        assert_eq!(owner.ask(&format!("matches {} 5", remote.region.0)), "true");
        for engine in [&engine, &stranger] {
            let mine = engine
                .allocate(100_000, AllocateOptions::default())
                .expect("allocated");
            eventually("it is back", || read(engine, &second, &mine));
            assert!(content(&mine) == pattern(2, 100_000));
        }
    }
}

/// A region in this process, and a child that writes to it without pause.
fn scene_with_writer(len: u64) -> (Engine, Memory, Child, EngineId) {
    let engine = engine(shm_only());
    let memory = engine.allocate(len, READ_WRITE).expect("allocated");
    let mut writer = Child::spawn("writer");
    let id = writer.ask(&Remote::of(&engine, &memory).to_line());
    let id = EngineId(u128::from_str_radix(&id, 16).expect("hexadecimal"));
    let bytes = pattern(1, usize::try_from(len).expect("fits"));
    eventually("the child's bytes are there", || content(&memory) == bytes);
    (engine, memory, writer, id)
}

// contract: transport-7
#[test]
fn unregistering_ends_another_process_s_copies() {
    let (_engine, memory, writer, _) = scene_with_writer(4 << 20);
    memory.unregister(LIMIT).expect("the copies end");
    memory.copy_in(0, &vec![0; 4 << 20]).expect("inside");
    assert_eq!(writer.hear(), "refused");
    assert!(content(&memory) == vec![0; 4 << 20], "a late write");
}

#[test]
fn a_writer_that_dies_in_a_copy_does_not_hold_memory_back() {
    // Wherever the signals fall, sooner or later one falls into a copy.
    for round in 0..6 {
        let (engine, memory, mut writer, id) = scene_with_writer(4 << 20);
        assert!(engine.holders(id).attached);
        if round % 2 == 0 {
            writer.stop();
            // Stopped in a copy, it may go on at any time: only then is there something to wait for.
            match memory.unregister(Duration::from_millis(20)) {
                Ok(()) | Err(Error::StillInFlight { .. }) => {}
                Err(other) => panic!("{other}"),
            }
            assert!(engine.holders(id).attached, "it merely stands still");
        }
        writer.kill();
        let begun = Instant::now();
        memory.unregister(LIMIT).expect("nobody copies any more");
        assert!(engine.wait_detached(id, LIMIT));
        assert!(engine.wait_quiet(Some(id), Duration::ZERO));
        assert!(begun.elapsed() < LIMIT / 3);
        let left = content(&memory);
        std::thread::yield_now();
        assert!(content(&memory) == left, "a late write");
    }
}

#[test]
fn waiting_for_a_writer_to_go_ends_when_it_does() {
    let (engine, _memory, mut writer, id) = scene_with_writer(4096);
    let gone = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let detached = engine.wait_detached(id, LIMIT);
            assert!(gone.load(Ordering::Acquire), "it was still there");
            detached
        });
        assert!(!engine.wait_detached(id, Duration::from_millis(50)));
        gone.store(true, Ordering::Release);
        writer.kill();
        assert!(waiter.join().expect("waits"));
    });
    assert!(!engine.holders(id).attached);
}

/// Where the kernel does not let processes reach each other's memory by address, such memory goes over
/// tcp, by itself; mapped memory of the same owner does not.
#[test]
fn memory_that_may_not_be_reached_by_address_takes_tcp() {
    let by_address = start_owner("private-owner", "register 3000000 20");
    let mut owner = by_address.0;
    let mapped = Remote::parse(&owner.ask("allocate 100000 30"));
    // Rights belong to threads, and threads inherit those of their makers.
    let without_rights = std::thread::spawn(move || {
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        rustix::thread::set_capabilities(None, none).expect("rights can be given up");
        let engine = engine(shm_and_tcp());
        let mut scene = (owner, by_address.1);
        check_both_ways(&engine, &mut scene, 20, TransportKind::Tcp);
        let mut scene = (scene.0, mapped);
        check_both_ways(&engine, &mut scene, 30, TransportKind::Shm);
    });
    without_rights.join().expect("both ways work");
}

// contract: transport-9
#[test]
fn a_stopped_peer_does_not_keep_others_from_attaching() {
    let engine = Arc::new(engine(shm_only()));
    let (stopped, silent) = start_owner("owner", "allocate 4096 1");
    stopped.stop();
    let mine = engine
        .allocate(4096, AllocateOptions::default())
        .expect("allocated");
    let waiting = submit(&engine, &silent, Direction::Read, all(&silent, &mine));
    let mut owner = start_owner("owner", "allocate 100000 10");
    check_both_ways(&engine, &mut owner, 10, TransportKind::Shm);
    assert!(!waiting.is_done());
    stopped.resume();
    let outcome = waiting.wait_timeout(LIMIT).expect("ends");
    assert_eq!(outcome.first_error(), None);
}
