//! What comes late: a write whose place was fenced meanwhile, the rest of a frame, a guest too many.

use layercake_protocol::ids::Generation;

use super::*;

// contract: transport-6, transport-15
#[test]
fn a_write_under_way_is_waited_for_after_its_place_was_fenced() {
    let owner = Engine::start(config()).expect("an engine");
    let memory = memory(&owner, 128 << 10, Access::RemoteReadWrite);
    let mut writer = Raw::open(&owner);
    let payload = pattern::bytes(5, 64 << 10);
    let (first, rest) = payload.split_at(payload.len() / 2);

    let region = memory.region();
    let region = WireRegion {
        region: region.region,
        capability: region.capability,
    };
    let op = WireOp {
        region: 0,
        offset: 0,
        len: payload.len() as u64,
        generation: Some(Generation(5)),
    };
    let len = u32::try_from(payload.len()).expect("small");
    writer.head(Kind::Write, region, op, len);
    writer.send(first);
    let admitted = || memory.tags(0, 1).expect("it has tags") == [Generation(5)];
    assert!(eventually(LIMIT, admitted), "the frame is admitted");

    memory
        .fence(0, payload.len() as u64, Generation(9))
        .expect("it has tags");
    assert!(
        !owner.wait_quiet(None, Duration::from_millis(50)),
        "half of the payload may still land"
    );
    writer.send(rest);
    assert_eq!(
        writer.answer(),
        Answer::Statuses(vec![Err(Refusal::StaleGeneration)])
    );
    assert!(owner.wait_quiet(None, LIMIT), "nothing is under way");

    // Nor does a write that stops for good keep the owner waiting for ever.
    writer.head(Kind::Write, region, op, len);
    drop(writer);
    assert!(owner.wait_quiet(None, LIMIT), "the connection is gone");
}

#[test]
fn a_write_that_trickles_ends_though_it_never_stops() {
    let owner = Engine::start(EngineConfig {
        deadlines: Deadlines {
            progress: Duration::from_secs(2),
            transfer: Duration::from_millis(100),
            ..Deadlines::default()
        },
        ..config()
    })
    .expect("an engine");
    let memory = memory(&owner, 64 << 10, Access::RemoteReadWrite);
    let mut writer = Raw::open(&owner);
    let region = memory.region();
    let region = WireRegion {
        region: region.region,
        capability: region.capability,
    };
    let op = WireOp {
        region: 0,
        offset: 0,
        len: 32 << 10,
        generation: Some(Generation(5)),
    };
    let payload = vec![7; 32 << 10];
    let (first, rest) = payload.split_at(1);
    writer.head(Kind::Write, region, op, 32 << 10);
    writer.send(first);
    let admitted = || memory.tags(0, 1).expect("it has tags") == [Generation(5)];
    assert!(eventually(LIMIT, admitted), "the frame is admitted");
    let mark = owner.quiet_mark(None);
    let mut trickle = rest.iter();
    let over = eventually(LIMIT, || {
        writer.send(&[*trickle.next().expect("fewer are sent in that time")]);
        owner.is_over(&mark)
    });
    assert!(over, "it was given up");
    memory.unregister(LIMIT).expect("nothing holds the region");
}

#[test]
fn peers_are_turned_away_when_there_is_no_room() {
    let places = |places| std::num::NonZero::new(places).expect("some");
    let owner = Engine::start(EngineConfig {
        max_connections: places(3),
        max_greetings: places(1),
        deadlines: Deadlines {
            connect: LIMIT,
            ..Deadlines::default()
        },
        ..config()
    })
    .expect("an engine");
    let turned_away = |count| eventually(LIMIT, || owner.stats().turned_away == count);
    let silent = Raw::connect(&owner);
    let mut second = Raw::connect(&owner);
    assert!(second.is_closed(), "another greets");
    assert!(turned_away(1));
    drop(silent);
    assert!(eventually(LIMIT, || owner.stats().tcp_connections == 0));
    let memory = memory(&owner, 4096, Access::RemoteReadWrite);
    let region = memory.region();
    let region = WireRegion {
        region: region.region,
        capability: region.capability,
    };
    // A place is free again a little after its connection has gone from the counts.
    let mut first = None;
    let free = eventually(LIMIT, || {
        let mut peer = Raw::connect(&owner);
        peer.send(&Raw::hello(&owner, false).encode());
        let welcome = peer.read(&mut [0; SERVER_HELLO_LEN]);
        first = welcome.then_some(peer);
        welcome
    });
    assert!(free, "the place of the silent one");
    let served = |mut peer: Raw| {
        // Who is served greets no more: there is room for the next one.
        let op = WireOp {
            region: 0,
            offset: 0,
            len: 8,
            generation: None,
        };
        peer.frame(Kind::Write, region, op, &[1; 8]);
        assert_eq!(peer.answer(), Answer::Statuses(vec![Ok(())]));
        peer
    };
    let first = served(first.expect("it was welcome"));
    let _open = [first, served(Raw::open(&owner)), served(Raw::open(&owner))];
    let before = owner.stats().turned_away;
    let mut fourth = Raw::connect(&owner);
    assert!(fourth.is_closed(), "three are connected");
    assert!(turned_away(before + 1));
}

#[test]
fn a_peer_that_stops_in_the_middle_keeps_nothing() {
    let deadlines = Deadlines {
        progress: Duration::from_millis(200),
        connect: Duration::from_millis(200),
        ..Deadlines::default()
    };
    let owner = Engine::start(EngineConfig {
        deadlines,
        ..config()
    })
    .expect("an engine");
    let open = memory(&owner, 4096, Access::RemoteReadWrite);
    let region = open.region();
    let region = WireRegion {
        region: region.region,
        capability: region.capability,
    };
    let mut silent = Raw::connect(&owner);
    let mut half = Raw::open(&owner);
    let mut bytes = Vec::new();
    Header {
        kind: Kind::Write,
        flags: 0,
        count: 1,
        regions: 1,
        seq: 0,
        payload: 4096,
    }
    .encode(&mut bytes);
    region.encode(&mut bytes);
    WireOp {
        region: 0,
        offset: 0,
        len: 4096,
        generation: None,
    }
    .encode(&mut bytes);
    bytes.extend_from_slice(&[1; 100]);
    half.send(&bytes);
    // Idle between frames is nothing to be closed for.
    let mut idle = Raw::open(&owner);
    open.unregister(LIMIT)
        .expect("a half frame holds the region for the progress deadline only");
    half.seq = 1;
    assert!(half.is_closed());
    assert!(
        silent.is_closed(),
        "a greeting is due within the connect deadline"
    );
    let op = WireOp {
        region: 0,
        offset: 0,
        len: 16,
        generation: None,
    };
    idle.frame(Kind::Read, region, op, &[]);
    assert_eq!(
        idle.answer(),
        Answer::Statuses(vec![Err(Refusal::UnknownRegion)])
    );
}
