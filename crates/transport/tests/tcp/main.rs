//! What is particular to tcp: peers that are dead, restarted or not trusted, and what is left of them.

mod cut;
mod dead;
#[path = "../shm_support/mod.rs"]
mod shm_support;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::auth::SharedToken;
use layercake_protocol::ids::{Capability, EngineId, RegionId};
use layercake_transport::{
    Access, AllocateOptions, Deadlines, Direction, Endpoint, Engine, EngineConfig, Error, HostId,
    Memory, Outcome, PieceError, Transfer, TransportKind, TransportSet,
};

use layercake_transport::testing::pattern::bytes as pattern;
use shm_support::{LIMIT, Remote, eventually, submit, transfer};

fn config() -> EngineConfig {
    EngineConfig {
        transports: TransportSet::only(TransportKind::Tcp),
        ..EngineConfig::default()
    }
}

fn start(config: EngineConfig) -> Engine {
    Engine::start(config).expect("an engine")
}

fn shared(engine: &Engine, len: u64) -> (Memory, Remote) {
    let options = AllocateOptions {
        access: Access::RemoteReadWrite,
        ..AllocateOptions::default()
    };
    let memory = engine.allocate(len, options).expect("some memory");
    let remote = Remote::of(engine, &memory);
    (memory, remote)
}

/// A region of an engine that nobody answers for.
fn nobody(addr: SocketAddr) -> Remote {
    let endpoint = Endpoint {
        engine: EngineId::draw(),
        tcp: addr.to_string(),
        host: HostId([0; 16]),
        shm: None,
        pid: 0,
    };
    Remote {
        endpoint: Arc::new(endpoint),
        region: RegionId(1),
        capability: Capability::draw(),
        len: 1 << 30,
    }
}

fn write(engine: &Engine, local: &Memory, to: &Remote, len: u64) -> Transfer {
    let local = local.slice(0, len).expect("inside");
    submit(
        engine,
        to,
        Direction::Write,
        vec![(local, to.slice(0, len))],
    )
}

fn error_of(outcome: &Outcome) -> Option<PieceError> {
    outcome.first_error()
}

// contract: transport-10
#[test]
fn an_engine_that_was_started_anew_on_the_same_address_is_another_peer() {
    let engine = start(config());
    let (local, _) = shared(&engine, 4096);
    let first = start(config());
    let (_kept, old) = shared(&first, 4096);
    let listen: SocketAddr = first.endpoint().tcp.parse().expect("numeric");
    assert_eq!(error_of(&write(&engine, &local, &old, 64).wait()), None);
    first.shutdown(LIMIT);
    let second = start(EngineConfig { listen, ..config() });
    let (memory, new) = shared(&second, 4096);
    assert_eq!(old.region, new.region, "its regions have the same names");
    for _ in 0..3 {
        let outcome = write(&engine, &local, &old, 64)
            .wait_timeout(LIMIT)
            .expect("ends");
        assert_eq!(error_of(&outcome), Some(PieceError::PeerGone));
    }
    let mut bytes = vec![1; 64];
    memory.copy_out(0, &mut bytes).expect("inside");
    assert_eq!(
        bytes, [0; 64],
        "nothing that was meant for the old one reached the new one"
    );
    local.copy_in(0, &pattern(5, 64)).expect("inside");
    assert_eq!(
        error_of(&write(&engine, &local, &new, 64).wait()),
        None,
        "the new one is served"
    );
    memory.copy_out(0, &mut bytes).expect("inside");
    assert_eq!(bytes, pattern(5, 64));
}

#[test]
fn only_holders_of_the_same_token_work_together() {
    let token = |text: &str| SharedToken::new(text).ok();
    let ours = token("a token of this cluster");
    let owner = start(EngineConfig {
        token: ours.clone(),
        ..config()
    });
    let (_kept, remote) = shared(&owner, 4096);
    for (held, expected) in [
        (ours, None),
        (
            token("a token of another cluster"),
            Some(PieceError::NotTrusted),
        ),
        (None, Some(PieceError::NotTrusted)),
    ] {
        let engine = start(EngineConfig {
            token: held,
            ..config()
        });
        let (local, _) = shared(&engine, 4096);
        let outcome = write(&engine, &local, &remote, 64)
            .wait_timeout(LIMIT)
            .expect("ends");
        assert_eq!(error_of(&outcome), expected);
        let probe = engine
            .probe(&remote.endpoint, LIMIT)
            .wait_timeout(LIMIT)
            .expect("ends");
        assert_eq!(error_of(&probe), expected);
    }
}

#[test]
fn a_probe_tells_whether_the_peer_is_there() {
    let engine = start(config());
    let owner = start(config());
    let (_kept, remote) = shared(&owner, 4096);
    let probe = || {
        engine
            .probe(&remote.endpoint, LIMIT)
            .wait_timeout(LIMIT)
            .expect("ends")
    };
    assert_eq!(error_of(&probe()), None);
    owner.shutdown(LIMIT);
    assert!(matches!(
        error_of(&probe()),
        Some(PieceError::Unreachable | PieceError::PeerGone)
    ));
}

#[test]
fn both_sides_may_begin_at_the_same_moment() {
    for _ in 0..50 {
        let engines = [start(config()), start(config())];
        let sides: Vec<_> = engines.iter().map(|engine| shared(engine, 4096)).collect();
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for side in 0..2 {
                let (engines, sides, barrier) = (&engines, &sides, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let write = write(&engines[side], &sides[side].0, &sides[1 - side].1, 64);
                    assert_eq!(error_of(&write.wait_timeout(LIMIT).expect("ends")), None);
                });
            }
        });
    }
}

#[test]
fn many_engines_start_at_once_on_ports_of_their_own() {
    let engines: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..32).map(|_| scope.spawn(|| start(config()))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("started"))
            .collect()
    });
    let ports: std::collections::HashSet<_> = engines
        .iter()
        .map(|engine| &engine.endpoint().tcp)
        .collect();
    assert_eq!(ports.len(), engines.len());
}

#[test]
fn a_port_in_use_is_named() {
    let first = start(config());
    let listen = first.endpoint().tcp.parse().expect("numeric");
    match Engine::start(EngineConfig { listen, ..config() }) {
        Err(error @ Error::Listen { .. }) => {
            assert!(error.to_string().contains(&first.endpoint().tcp), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_other_address_family_works_too() {
    let listen = "[::1]:0".parse().expect("an address");
    let owner = start(EngineConfig { listen, ..config() });
    let (memory, remote) = shared(&owner, 100_000);
    assert!(
        remote.endpoint.tcp.starts_with("[::1]:"),
        "{}",
        remote.endpoint.tcp
    );
    let engine = start(config());
    let (local, _) = shared(&engine, 100_000);
    local.copy_in(0, &pattern(1, 100_000)).expect("inside");
    let pieces = vec![(
        local.slice(0, 100_000).expect("inside"),
        remote.slice(0, 100_000),
    )];
    assert!(transfer(&engine, &remote, Direction::Write, pieces).is_ok());
    let mut bytes = vec![0; 100_000];
    memory.copy_out(0, &mut bytes).expect("inside");
    assert!(bytes == pattern(1, 100_000));
}
