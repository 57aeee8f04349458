//! Who is reached and who is attached: hosts, names, tokens, and engines that are shut down or never answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::auth::SharedToken;
use layercake_protocol::ids::{Capability, EngineId, RegionId};
use layercake_transport::{AllocateOptions, Direction, Engine, EngineConfig, PieceError, Refusal};

use super::{READ_WRITE, content, scene};
use crate::shm_support::*;

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
