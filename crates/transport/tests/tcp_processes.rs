//! Tcp between real processes that are stopped and killed at any moment.

mod shm_support;

use std::time::Duration;

use layercake_transport::{
    Access, AllocateOptions, Deadlines, Direction, Engine, EngineConfig, Memory, Outcome,
    PieceError, Transfer, TransportKind, TransportSet,
};

use layercake_transport::testing::pattern::bytes as pattern;
use shm_support::{Child, LIMIT, ROLE, Remote, eventually, listen, submit, tell};

const SIZE: u64 = 64 << 20;

/// The owner of a region, in another process; see `shm_support`.
#[test]
#[ignore = "the other side of the tests here, started by them"]
fn child() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    // What the owner gives up is not the subject here.
    let engine = engine(patient());
    let options = AllocateOptions {
        access: Access::RemoteReadWrite,
        ..AllocateOptions::default()
    };
    let memory = engine.allocate(SIZE, options).expect("some memory");
    tell(&Remote::of(&engine, &memory).to_line());
    while let Some(line) = listen() {
        let seed = line.parse().expect("a seed");
        let mut bytes = vec![0; 64 << 20];
        memory.copy_out(0, &mut bytes).expect("inside");
        tell(&(bytes == pattern(seed, bytes.len())).to_string());
    }
}

fn engine(deadlines: Deadlines) -> Engine {
    Engine::start(EngineConfig {
        transports: TransportSet::only(TransportKind::Tcp),
        deadlines,
        ..EngineConfig::default()
    })
    .expect("an engine")
}

/// Deadlines that no test reaches.
fn patient() -> Deadlines {
    Deadlines {
        progress: LIMIT * 4,
        transfer: LIMIT * 4,
        connect: LIMIT * 4,
    }
}

fn owner() -> (Child, Remote) {
    let child = Child::spawn("owner");
    let remote = Remote::parse(&child.hear());
    (child, remote)
}

fn local(engine: &Engine, seed: u64) -> Memory {
    let bytes = pattern(seed, 64 << 20);
    engine
        .register(bytes.into(), Access::LocalOnly)
        .expect("a buffer")
}

fn write_all(engine: &Engine, local: &Memory, remote: &Remote) -> Transfer {
    let local = local.slice(0, SIZE).expect("inside");
    submit(
        engine,
        remote,
        Direction::Write,
        vec![(local, remote.slice(0, SIZE))],
    )
}

fn write_some(engine: &Engine, local: &Memory, remote: &Remote) -> Outcome {
    let local = local.slice(0, 4096).expect("inside");
    submit(
        engine,
        remote,
        Direction::Write,
        vec![(local, remote.slice(0, 4096))],
    )
    .wait_timeout(LIMIT)
    .expect("ends")
}

// contract: transport-2
#[test]
fn dev_07_a_write_is_done_when_all_of_it_is_applied_and_not_before() {
    let engine = engine(patient());
    let local = local(&engine, 7);
    for connected in [false, true] {
        let (mut child, remote) = owner();
        if connected {
            // Stopped right after it took the connection; else before it could.
            assert!(engine.probe(&remote.endpoint, LIMIT).wait().is_ok());
        }
        child.stop();
        let transfer = write_all(&engine, &local, &remote);
        assert!(
            transfer.wait_timeout(Duration::from_millis(500)).is_none(),
            "what the systems buffered is not done"
        );
        child.resume();
        let outcome = transfer.wait_timeout(LIMIT).expect("goes on");
        assert_eq!(outcome.first_error(), None);
        assert_eq!(child.ask("7"), "true", "the owner holds every byte");
    }
}

#[test]
fn dev_07_a_peer_that_is_killed_half_way_ends_the_write_with_an_error() {
    let engine = engine(patient());
    let local = local(&engine, 8);
    for round in 0..4 {
        let (mut child, remote) = owner();
        assert!(engine.probe(&remote.endpoint, LIMIT).wait().is_ok());
        child.stop();
        // Half a gigabyte: some of it is taken while the owner runs.
        let transfers: Vec<_> = (0..8)
            .map(|_| write_all(&engine, &local, &remote))
            .collect();
        let resumed = round % 2 == 0;
        if resumed {
            child.resume();
            let passed = write_some(&engine, &local, &remote);
            assert_eq!(
                passed.first_error(),
                None,
                "a small write does not wait for the large ones"
            );
        }
        child.kill();
        let outcomes: Vec<_> = transfers
            .iter()
            .map(|transfer| transfer.wait_timeout(LIMIT).expect("ends with an error"))
            .collect();
        assert!(
            resumed || !outcomes.iter().any(Outcome::is_ok),
            "nobody was there to take it"
        );
        for error in outcomes.iter().filter_map(Outcome::first_error) {
            assert!(
                matches!(error, PieceError::PeerGone | PieceError::Unreachable),
                "{error:?}"
            );
        }
        eventually("nothing is left of the peer", || {
            engine.stats().tcp_peers == 0
        });
    }
    let (_child, remote) = owner();
    assert_eq!(
        write_some(&engine, &local, &remote).first_error(),
        None,
        "the engine goes on"
    );
}

// contract: transport-8
#[test]
fn a_peer_that_stands_still_for_a_while_is_waited_for() {
    // Enough for the peer to be slow on a busy machine once it goes on.
    let progress = LIMIT / 2;
    let engine = engine(Deadlines {
        progress,
        ..patient()
    });
    let local = local(&engine, 9);
    let (mut child, remote) = owner();
    assert!(engine.probe(&remote.endpoint, LIMIT).wait().is_ok());
    child.stop();
    let transfer = write_all(&engine, &local, &remote);
    assert!(transfer.wait_timeout(progress / 10).is_none());
    child.resume();
    let outcome = transfer.wait_timeout(LIMIT).expect("goes on");
    assert_eq!(outcome.first_error(), None);
    assert_eq!(child.ask("9"), "true");
}

// contract: transport-8, transport-9
#[test]
fn a_peer_that_stands_still_for_too_long_is_given_up_and_served_again_later() {
    let progress = Duration::from_millis(300);
    let engine = engine(Deadlines {
        progress,
        connect: progress,
        ..patient()
    });
    let local = local(&engine, 10);
    let (mut child, remote) = owner();
    // A busy machine may need more than one try at these deadlines.
    let served = || write_some(&engine, &local, &remote).is_ok();
    eventually("it is served", served);
    child.stop();
    for transfer in [
        write_all(&engine, &local, &remote),
        write_all(&engine, &local, &remote),
    ] {
        let outcome = transfer.wait_timeout(LIMIT).expect("is given up");
        assert_eq!(outcome.first_error(), Some(PieceError::Stalled));
    }
    let small = write_some(&engine, &local, &remote);
    assert_eq!(
        small.first_error(),
        Some(PieceError::Unreachable),
        "it does not greet"
    );
    eventually("nothing is held for it", || {
        engine.stats().tcp_connections == 0
    });
    child.resume();
    eventually("it is back", served);
    eventually("all of it arrives", || {
        let transfer = write_all(&engine, &local, &remote);
        transfer.wait_timeout(LIMIT).expect("ends").is_ok()
    });
    assert_eq!(child.ask("10"), "true");
}

// contract: transport-8
#[test]
fn a_transfer_that_takes_too_long_is_a_timeout() {
    let progress = Duration::from_millis(1500);
    let engine = engine(Deadlines {
        transfer: Duration::from_millis(300),
        progress,
        connect: LIMIT,
    });
    let local = local(&engine, 11);
    let (child, remote) = owner();
    eventually("the peer answers in time", || {
        engine.probe(&remote.endpoint, LIMIT).wait().is_ok()
    });
    child.stop();
    // More pieces than may be in flight: those that were not sent time out, the others are given up.
    let pieces = (0..64).map(|n| {
        let local = local.slice(n << 20, 1 << 20).expect("inside");
        (local, remote.slice(n << 20, 1 << 20))
    });
    let transfer = submit(&engine, &remote, Direction::Write, pieces.collect());
    let outcome = transfer.wait_timeout(LIMIT).expect("ends");
    let count = |error| {
        outcome
            .pieces
            .iter()
            .filter(|piece| **piece == Err(error))
            .count()
    };
    let (late, stalled) = (count(PieceError::Timeout), count(PieceError::Stalled));
    assert!(late > 0 && late + stalled == 64, "{late} and {stalled}");
}
