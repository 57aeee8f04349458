//! Nodes that come, go, die and return.

use crate::harness::*;

fn replicas(count: u32) -> ReplicateConfig {
    ReplicateConfig {
        replicas: count,
        ..ReplicateConfig::default()
    }
}

/// Lets time pass in which only these members are heard of.
fn silence(world: &World, seconds: u32, alive: &[ClientId]) {
    for _ in 0..seconds {
        world.skip(SECOND);
        for client in alive {
            world.state.heartbeat(world.now(), *client, &[]);
        }
        world.tick();
    }
}

fn lost(world: &World) -> Vec<(ClientId, usize)> {
    let events = world.state.take_events().into_iter();
    let lost = events.filter_map(|event| match event {
        Event::MemberLost {
            client, segments, ..
        } => Some((client, segments)),
        _ => None,
    });
    lost.collect()
}

// contract: lease-12
#[test]
fn a_silent_node_takes_its_replicas_along_and_others_go_on_serving() {
    let world = World::with(StateConfig::default());
    let (dies, lives) = (world.node("dies", MIB), world.node("lives", MIB));
    let client = world.client();
    let both = PutStart::new(key("both"), 1000);
    world.store_with(&client, both, &replicas(2));
    let only = |name: &str, node: &str| {
        let config = ReplicateConfig {
            preferred_segments: vec![node.to_owned()],
            ..ReplicateConfig::default()
        };
        world.store_with(&client, PutStart::new(key(name), 1000), &config)
    };
    only("there", "dies");
    only("here", "lives");
    silence(&world, 9, &[lives.client, client.client]);
    assert_eq!(world.presence(&key("there")), Presence::Complete);
    silence(&world, 1, &[lives.client, client.client]);
    assert_eq!(lost(&world), [(dies.client, 1)]);
    assert_eq!(world.presence(&key("there")), Presence::Absent);
    assert_eq!(world.presence(&key("here")), Presence::Complete);
    let got = world.get(&client, &key("both")).unwrap();
    assert_eq!(got.replicas.len(), 1);
    assert_eq!(got.replicas[0].segment, lives.segment.id);
    let counters = world.state.counters();
    assert_eq!((counters.lost_nodes, counters.lost.objects), (1, 1));
    assert_eq!(world.state.segments(world.now()).len(), 1);

    // Back again, it mounts and begins empty.
    let answer = world
        .state
        .heartbeat(world.now(), dies.client, &[dies.segment.id]);
    assert!(!answer.known);
    assert_eq!(answer.missing, [dies.segment.id]);
    assert_eq!(world.mount(&dies), Err(Refusal::UnknownMember));
    let endpoint = Some(dies.segment.endpoint.clone());
    let joined = world.state.join(world.now(), dies.client, "dies", endpoint);
    assert!(joined.fresh);
    assert_eq!(world.mount(&dies), Ok(false));
    assert_eq!(world.presence(&key("there")), Presence::Absent);
    let answer = world
        .state
        .heartbeat(world.now(), dies.client, &[dies.segment.id]);
    assert!(answer.known && answer.missing.is_empty());
    only("there", "dies");
    assert_eq!(world.presence(&key("there")), Presence::Complete);
}

#[test]
fn a_put_goes_on_with_the_replicas_that_are_left() {
    let world = World::with(StateConfig::default());
    let (dies, lives) = (world.node("dies", MIB), world.node("lives", MIB));
    let client = world.client();
    let put = |name: &str, config: &ReplicateConfig| {
        world
            .put_with(&client, PutStart::new(key(name), 1000), config)
            .unwrap()
    };
    let both = put("both", &replicas(2));
    let config = ReplicateConfig {
        preferred_segments: vec!["dies".to_owned()],
        ..ReplicateConfig::default()
    };
    let only = put("only", &config);
    let wanted = put("wanted", &config);
    silence(&world, 10, &[lives.client, client.client]);
    assert_eq!(world.commit(&client, &key("both"), &both), Ok(()));
    let got = world.get(&client, &key("both")).unwrap();
    assert_eq!(got.replicas.len(), 1);
    assert_eq!(got.replicas[0].segment, lives.segment.id);
    let answer = world.commit(&client, &key("only"), &only);
    assert_eq!(answer, Err(Refusal::Unreachable));
    assert_eq!(world.presence(&key("only")), Presence::Absent);
    // Another writer need not wait for a put that can't end well.
    let other = world.client();
    let fresh = world.put(&other, &key("wanted"), 1000).unwrap();
    assert_eq!(
        world.commit(&client, &key("wanted"), &wanted),
        Err(Refusal::Superseded)
    );
    assert_eq!(world.commit(&other, &key("wanted"), &fresh), Ok(()));
    let _ = dies;
}

#[test]
fn any_call_of_a_session_is_a_sign_of_life() {
    let world = World::new();
    let (writer, reader) = (world.client(), world.client());
    let key = key("k");
    let started = world.store(&writer, &key, 10);
    world.get(&reader, &key).unwrap();
    for _ in 0..10 {
        world.skip(5 * SECOND);
        world.state.heartbeat(world.now(), ClientId(1), &[]);
        assert_eq!(world.renew(&reader, &key, started.generation), Ok(()));
        world.tick();
    }
    assert_eq!(lost(&world), [(writer.client, 0)]);
    assert_eq!(world.state.counters().lost_nodes, 0, "it lent nothing");
}

#[test]
fn a_restarted_node_s_old_segment_goes_when_the_new_one_comes() {
    let world = World::with(StateConfig::default());
    let old = world.node("n", MIB);
    let client = world.client();
    world.store(&client, &key("k"), 1000);
    let new = world.node_unmounted("n", MIB, 0);
    assert_eq!(world.presence(&key("k")), Presence::Complete);
    assert_eq!(world.mount(&new), Ok(false));
    assert_eq!(world.presence(&key("k")), Presence::Absent);
    assert_eq!(world.state.counters().lost_nodes, 1);
    let events = world.state.take_events();
    let replaced = Event::SegmentReplaced {
        owner: old.client,
        segment: old.segment.id,
    };
    assert!(events.contains(&replaced));
    let ids: Vec<_> = world
        .state
        .segments(world.now())
        .iter()
        .map(|s| s.segment.id)
        .collect();
    assert_eq!(ids, [new.segment.id]);
    // The old process's silence is no second loss.
    silence(&world, 11, &[new.client, client.client]);
    assert_eq!(world.state.counters().lost_nodes, 1);
    // A second segment of the same process is no restart.
    let mut second = new.clone();
    second.segment.id = SegmentId(77);
    assert_eq!(world.mount(&second), Ok(false));
    assert_eq!(world.state.segments(world.now()).len(), 2);
}

#[test]
fn mounting_is_checked() {
    let world = World::with(StateConfig::default());
    let node = world.node("n", MIB);
    assert_eq!(world.mount(&node), Ok(true));
    let mut stranger = node.clone();
    stranger.client = ClientId(999);
    assert_eq!(world.mount(&stranger), Err(Refusal::UnknownMember));
    let mut thief = world.node_unmounted("other", MIB, 0);
    thief.segment.id = node.segment.id;
    assert!(matches!(
        world.mount(&thief),
        Err(Refusal::InvalidArgument { .. })
    ));
    for len in [0, GRANULE - 1, u64::MAX] {
        let bad = world.node_unmounted("bad", len, 0);
        let answer = world.mount(&bad);
        assert!(
            matches!(answer, Err(Refusal::InvalidArgument { .. })),
            "{len}: {answer:?}"
        );
    }
    let late = world.node_unmounted("late", MIB, 0);
    let (now, client) = (world.now(), late.client);
    let answer = world
        .state
        .mount(now, client, late.segment, Generation(u64::MAX));
    assert!(matches!(answer, Err(Refusal::InvalidArgument { .. })));
    assert_eq!(world.state.segments(world.now()).len(), 1);
}

#[test]
fn a_reservation_counts_as_long_as_it_has_memory() {
    let world = World::with(StateConfig::default());
    let client = world.client();
    let nodes = [world.node("a", MIB), world.node("b", MIB)];
    let both = world.put_with(&client, PutStart::new(key("k"), 1000), &replicas(2));
    assert_eq!(both.unwrap().replicas.len(), 2);
    for (node, left) in nodes.iter().zip([Presence::Reserved, Presence::Absent]) {
        let id = node.segment.id;
        let gone = world.state.unmount(world.now(), node.client, id, false);
        assert_eq!(gone, Ok(UnmountProgress::Done));
        assert_eq!(world.presence(&key("k")), left);
    }
}

#[test]
fn unmounting_at_once_takes_everything_along() {
    let world = World::with(StateConfig::default());
    let node = world.node("n", MIB);
    let client = world.client();
    world.store(&client, &key("k"), 1000);
    world.get(&client, &key("k")).unwrap();
    let unmount = |client, drain| {
        let id = node.segment.id;
        world.state.unmount(world.now(), client, id, drain)
    };
    assert_eq!(unmount(client.client, false), Err(Refusal::UnknownMember));
    assert_eq!(unmount(node.client, false), Ok(UnmountProgress::Done));
    assert_eq!(unmount(node.client, false), Err(Refusal::UnknownMember));
    assert_eq!(world.presence(&key("k")), Presence::Absent);
    let gauges = world.state.gauges();
    assert_eq!(
        (gauges.segments, gauges.used_bytes, gauges.removed_leased),
        (0, 0, 0)
    );
    assert_eq!(world.state.counters().unmounted.objects, 1);
    assert_eq!(world.state.counters().lost_nodes, 0);
}

#[test]
fn draining_waits_for_leases_and_writers() {
    let world = World::with(StateConfig::default());
    let node = world.node("n", MIB);
    let other = world.node("m", MIB);
    let client = world.client();
    let here = |name: &str| {
        let config = ReplicateConfig {
            preferred_segments: vec!["n".to_owned()],
            ..ReplicateConfig::default()
        };
        world
            .put_with(&client, PutStart::new(key(name), 1000), &config)
            .unwrap()
    };
    for name in ["idle", "leased"] {
        let started = here(name);
        world.commit(&client, &key(name), &started).unwrap();
    }
    world.store_with(&client, PutStart::new(key("both"), 1000), &replicas(2));
    let generation = world.get(&client, &key("leased")).unwrap().generation();
    let both = world.get(&client, &key("both")).unwrap().generation();
    let open = here("open");
    let drain = || {
        let id = node.segment.id;
        world
            .state
            .unmount(world.now(), node.client, id, true)
            .unwrap()
    };
    assert_eq!(drain(), UnmountProgress::Draining { pieces: 3 });
    // No new leases, no new objects.
    for name in ["idle", "leased"] {
        assert_eq!(world.presence(&key(name)), Presence::Absent);
    }
    assert_eq!(here("new").replicas[0].segment, other.segment.id);
    let got = world.get(&client, &key("both")).unwrap();
    assert_eq!(got.replicas.len(), 1);
    // The session on it goes on, as does the writer.
    world.pass(5 * SECOND);
    world.tick();
    assert_eq!(world.renew(&client, &key("leased"), generation), Ok(()));
    assert_eq!(drain(), UnmountProgress::Draining { pieces: 3 });
    world.end(&client, &key("leased"), generation);
    assert_eq!(drain(), UnmountProgress::Draining { pieces: 2 });
    let answer = world.commit(&client, &key("open"), &open);
    assert_eq!(answer, Err(Refusal::Unreachable));
    assert_eq!(drain(), UnmountProgress::Draining { pieces: 1 });
    world.end(&client, &key("both"), both);
    world.pass(SECOND);
    world.tick();
    world.tick();
    let drained = Event::SegmentDrained {
        owner: node.client,
        segment: node.segment.id,
    };
    assert!(world.state.take_events().contains(&drained));
    assert_eq!(world.state.segments(world.now()).len(), 1);
    assert_eq!(world.presence(&key("both")), Presence::Complete);
}

#[test]
fn draining_an_idle_segment_is_done_at_once() {
    let world = World::with(StateConfig::default());
    let node = world.node("n", MIB);
    let client = world.client();
    for key in keys("k", 0..100) {
        world.store(&client, &key, 1000);
    }
    let id = node.segment.id;
    let answer = world.state.unmount(world.now(), node.client, id, true);
    assert_eq!(answer, Ok(UnmountProgress::Done));
    assert_eq!(world.count(&keys("k", 0..100)), 0);
}

#[test]
fn a_node_that_leaves_is_not_lost() {
    let world = World::with(StateConfig::default());
    let node = world.node("n", MIB);
    let client = world.client();
    world.store(&client, &key("k"), 1000);
    world.state.leave(world.now(), node.client);
    assert_eq!(world.presence(&key("k")), Presence::Absent);
    assert_eq!(world.state.counters().lost_nodes, 0);
    world.state.leave(world.now(), node.client);
    silence(&world, 11, &[client.client]);
    assert!(lost(&world).is_empty());
}

/// Between the break of its stream and its end, or its return, a node's objects are not promised.
#[test]
fn what_a_node_without_a_stream_holds_is_not_promised() {
    let world = World::with(StateConfig::default());
    let (gone, stays) = (world.node("gone", MIB), world.node("stays", MIB));
    let client = world.client();
    let on = |name: &str| ReplicateConfig {
        preferred_segments: vec![name.to_owned()],
        ..ReplicateConfig::default()
    };
    world.store_with(&client, PutStart::new(key("there"), 1000), &on("gone"));
    world.store_with(&client, PutStart::new(key("both"), 1000), &replicas(2));
    world.state.away(gone.client);
    assert_eq!(world.presence(&key("there")), Presence::Absent);
    assert_eq!(world.presence(&key("both")), Presence::Complete);
    let got = world.get(&client, &key("both")).unwrap();
    assert_eq!(
        got.replicas[0].segment, stays.segment.id,
        "the other is the last resort"
    );
    assert_eq!(world.get(&client, &key("there")).unwrap().replicas.len(), 1);
    world.store_with(&client, PutStart::new(key("new"), 1000), &on("gone"));
    let placed = world.get(&client, &key("new")).unwrap();
    assert_eq!(placed.replicas[0].segment, stays.segment.id);

    world.state.back(gone.client);
    assert_eq!(world.presence(&key("there")), Presence::Complete);
    world.state.away(gone.client);
    let heard = world
        .state
        .heartbeat(world.now(), gone.client, &[gone.segment.id]);
    assert!(heard.missing.is_empty());
    assert_eq!(world.presence(&key("there")), Presence::Complete);
}
