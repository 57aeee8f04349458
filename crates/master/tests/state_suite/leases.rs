//! Leases: how long they protect, who renews them, and what removal does to them.

use std::time::Duration;

use crate::harness::*;

fn lease_left(world: &World, key: &ObjectKey) -> Duration {
    let stat = world.state.stat(world.now(), &Tenant::default(), key);
    stat.unwrap().lease_remaining
}

#[test]
fn writing_grants_no_lease_and_reading_a_full_one() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    world.store(&writer, &key, 10);
    assert_eq!(lease_left(&world, &key), Duration::ZERO);
    world.read(&writer, &key).unwrap();
    assert_eq!(lease_left(&world, &key), 10 * SECOND);
    assert_eq!(world.remove(&key, false), Err(Refusal::Leased));
    world.pass(10 * SECOND);
    assert_eq!(world.remove(&key, false), Ok(()));
}

#[test]
fn looking_without_a_trace_grants_nothing() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    world.store(&writer, &key, 10);
    assert_eq!(world.presence(&key), Presence::Complete);
    assert_eq!(lease_left(&world, &key), Duration::ZERO);
}

// contract: lease-4
#[test]
fn probes_alone_extend_a_lease_to_three_times_its_length() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    world.store(&writer, &key, 10);
    let probe = || {
        assert_eq!(
            world.probe(std::slice::from_ref(&key)),
            [Presence::Complete]
        );
    };
    probe();
    assert_eq!(lease_left(&world, &key), 10 * SECOND);
    for _ in 0..20 {
        world.pass(SECOND);
        probe();
        assert_eq!(lease_left(&world, &key), 10 * SECOND);
    }
    for left in (0..10).rev() {
        world.pass(SECOND);
        probe();
        assert_eq!(lease_left(&world, &key), left * SECOND);
    }
    // From now on the object can go, however often it is probed, for one lease's length.
    for _ in 0..9 {
        world.pass(SECOND);
        probe();
        assert_eq!(lease_left(&world, &key), Duration::ZERO);
    }
    world.pass(SECOND);
    probe();
    assert_eq!(lease_left(&world, &key), 10 * SECOND);
}

#[test]
fn a_read_lets_probes_begin_anew() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    world.store(&writer, &key, 10);
    for _ in 0..26 {
        world.probe(std::slice::from_ref(&key));
        world.pass(SECOND);
    }
    world.read(&writer, &key).unwrap();
    world.pass(9 * SECOND);
    world.probe(std::slice::from_ref(&key));
    assert_eq!(lease_left(&world, &key), 10 * SECOND);
}

#[test]
fn a_probe_long_after_the_last_grants_a_full_lease() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    world.store(&writer, &key, 10);
    world.probe(std::slice::from_ref(&key));
    world.pass(3600 * SECOND);
    world.probe(std::slice::from_ref(&key));
    assert_eq!(lease_left(&world, &key), 10 * SECOND);
}

#[test]
fn a_session_takes_its_own_client_s_probe_along() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let key = key("k");
    world.store(&a, &key, 10);
    let probe = |client| world.probe_as(client, std::slice::from_ref(&key));
    let read = |client| {
        let generation = world.get(client, &key).unwrap().generation();
        assert_eq!(lease_left(&world, &key), 10 * SECOND);
        world.end(client, &key, generation);
    };
    probe(&a);
    world.pass(SECOND);
    probe(&a);
    read(&a);
    assert_eq!(lease_left(&world, &key), Duration::ZERO);
    // What another client was promised stays.
    probe(&a);
    world.pass(SECOND);
    probe(&b);
    read(&a);
    assert_eq!(lease_left(&world, &key), 10 * SECOND);
    world.pass(20 * SECOND);
    probe(&b);
    read(&a);
    assert_eq!(lease_left(&world, &key), 10 * SECOND);
    // So does what a plain read was granted.
    world.pass(20 * SECOND);
    world.read(&b, &key).unwrap();
    world.pass(4 * SECOND);
    probe(&a);
    read(&a);
    assert_eq!(lease_left(&world, &key), 10 * SECOND);
}

#[test]
fn a_session_holds_its_lease_while_it_renews_and_gives_it_back() {
    let world = World::new();
    let (writer, reader) = (world.client(), world.client());
    let key = key("k");
    world.store(&writer, &key, 10);
    let generation = world.get(&reader, &key).unwrap().generation();
    for _ in 0..10 {
        world.pass(9 * SECOND);
        world.tick();
        assert_eq!(world.renew(&reader, &key, generation), Ok(()));
        assert_eq!(world.remove(&key, false), Err(Refusal::Leased));
    }
    world.end(&reader, &key, generation);
    world.end(&reader, &key, generation);
    assert_eq!(lease_left(&world, &key), Duration::ZERO);
    assert_eq!(world.remove(&key, false), Ok(()));
}

#[test]
fn each_client_holds_a_lease_of_its_own() {
    let world = World::new();
    let clients = [world.client(), world.client(), world.client()];
    let key = key("k");
    world.store(&clients[0], &key, 10);
    let generations = clients.each_ref().map(|client| {
        world.pass(SECOND);
        world.get(client, &key).unwrap().generation()
    });
    let stat = || {
        world
            .state
            .stat(world.now(), &Tenant::default(), &key)
            .unwrap()
    };
    assert_eq!(stat().open_readers, 3);
    world.end(&clients[1], &key, generations[1]);
    assert_eq!(stat().open_readers, 2);
    assert_eq!(world.remove(&key, false), Err(Refusal::Leased));
    // Opening again and again is one session of that client.
    world.get(&clients[0], &key).unwrap();
    world.end(&clients[0], &key, generations[0]);
    assert_eq!(stat().open_readers, 1);
    assert_eq!(stat().lease_remaining, 10 * SECOND);
    world.end(&clients[2], &key, generations[2]);
    assert_eq!(world.remove(&key, false), Ok(()));
}

#[test]
fn ending_an_object_of_another_version_or_key_is_harmless() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let key = key("k");
    world.store(&a, &key, 10);
    let generation = world.get(&a, &key).unwrap().generation();
    world.end(&b, &key, generation);
    world.end(&a, &key, Generation(generation.0 + 1));
    world.end(&a, &crate::harness::key("other"), generation);
    assert_eq!(world.remove(&key, false), Err(Refusal::Leased));
}

#[test]
fn a_lapsed_lease_can_be_renewed_only_while_the_version_is_there() {
    let world = World::new();
    let (writer, reader) = (world.client(), world.client());
    let key = key("k");
    world.store(&writer, &key, 10);
    let generation = world.get(&reader, &key).unwrap().generation();
    world.pass(60 * SECOND);
    world.tick();
    assert_eq!(
        world.renew(&reader, &key, generation),
        Ok(()),
        "nothing was reused"
    );
    world.pass(60 * SECOND);
    assert_eq!(world.remove(&key, false), Ok(()));
    let lost = Err(Refusal::LeaseExpired);
    assert_eq!(world.renew(&reader, &key, generation), lost);
    world.store(&writer, &key, 10);
    assert_eq!(
        world.renew(&reader, &key, generation),
        lost,
        "another version"
    );
    assert_eq!(world.state.counters().leases_lost, 2);
}

// contract: lease-5
#[test]
fn force_takes_the_name_and_keeps_the_memory() {
    let world = World::new();
    let (writer, reader) = (world.client(), world.client());
    let key = key("k");
    let old = world.store(&writer, &key, MIB);
    world.get(&reader, &key).unwrap();
    assert_eq!(world.remove(&key, false), Err(Refusal::Leased));
    assert_eq!(world.remove(&key, true), Ok(()));
    assert_eq!(world.get(&reader, &key), Err(Refusal::NotFound));
    let quarantined = world.quarantined();
    assert!(quarantined > MIB);
    // The name is free, the place is not.
    let new = world.store(&writer, &key, MIB);
    assert_ne!(new.replicas[0].offset, old.replicas[0].offset);
    assert_eq!(world.renew(&reader, &key, old.generation), Ok(()));
    world.end(&reader, &key, old.generation);
    assert_eq!(world.quarantined(), 0);
    assert_eq!(world.presence(&key), Presence::Complete);
}

#[test]
fn memory_of_a_removed_object_is_free_when_its_last_lease_runs_out() {
    let world = World::new();
    let (writer, reader) = (world.client(), world.client());
    let key = key("k");
    let generation = world.store(&writer, &key, MIB).generation;
    world.get(&reader, &key).unwrap();
    world.pass(4 * SECOND);
    world.read(&writer, &key).unwrap();
    world.remove(&key, true).unwrap();
    world.end(&reader, &key, generation);
    world.pass(9 * SECOND);
    world.tick();
    assert!(
        world.quarantined() > MIB,
        "the plain read's lease is not over"
    );
    world.pass(SECOND);
    world.tick();
    assert_eq!((world.quarantined(), world.used()), (0, 0));
}

#[test]
fn giving_back_the_longest_lease_of_a_removed_object_leaves_the_shorter_ones() {
    let world = World::new();
    let (writer, reader) = (world.client(), world.client());
    let key = key("k");
    let generation = world.store(&writer, &key, MIB).generation;
    world.read(&writer, &key).unwrap();
    world.pass(4 * SECOND);
    world.get(&reader, &key).unwrap();
    world.remove(&key, true).unwrap();
    world.tick();
    world.end(&reader, &key, generation);
    world.pass(5 * SECOND);
    world.tick();
    assert!(world.quarantined() > MIB);
    world.pass(SECOND);
    world.tick();
    assert_eq!((world.quarantined(), world.used()), (0, 0));
}

#[test]
fn a_reserved_key_is_not_removed_even_with_force() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    let started = world.put(&writer, &key, 10).unwrap();
    assert_eq!(world.remove(&key, false), Err(Refusal::NotReady));
    assert_eq!(world.remove(&key, true), Err(Refusal::NotReady));
    let all = |force| {
        let tenant = Tenant::default();
        world
            .state
            .remove_matching(world.now(), &tenant, &|_| true, force)
    };
    assert_eq!(all(true), 0);
    assert_eq!(world.commit(&writer, &key, &started), Ok(()));
    world.read(&writer, &key).unwrap();
    assert_eq!(all(false), 0, "leased");
    assert_eq!(all(true), 1);
}

#[test]
fn removal_by_match_takes_what_matches() {
    let world = World::new();
    let writer = world.client();
    for key in keys("a", 0..700).iter().chain(&keys("b", 0..300)) {
        world.store(&writer, key, 10);
    }
    let tenant = Tenant::default();
    let matches = |key: &str| key.starts_with('a');
    let removed = world
        .state
        .remove_matching(world.now(), &tenant, &matches, false);
    assert_eq!(removed, 700);
    assert_eq!(world.count(&keys("a", 0..700)), 0);
    assert_eq!(world.count(&keys("b", 0..300)), 300);
    assert_eq!(world.state.counters().removed.objects, 700);
}

#[test]
fn a_probe_stops_at_the_first_miss_where_that_is_asked() {
    let world = World::new();
    let writer = world.client();
    let keys = keys("k", 0..10);
    for key in &keys[..4] {
        world.store(&writer, key, 10);
    }
    world.store(&writer, &keys[6], 10);
    let query = Exists {
        probe: Probe::Exists,
        keys: &keys,
        recency: Recency::default(),
        stop_at_first_miss: true,
        unreachable: &[],
        peek: false,
    };
    let (found, _) = world.state.exists(world.now(), &writer, &query);
    let mut expected = vec![Presence::Complete; 4];
    expected.push(Presence::Absent);
    assert_eq!(found, expected);
    assert_eq!(
        lease_left(&world, &keys[6]),
        Duration::ZERO,
        "not looked at"
    );
    let all = world.probe(&keys);
    assert_eq!((all.len(), all[6]), (10, Presence::Complete));
}

#[test]
fn a_dead_client_s_lease_runs_out_like_any_other() {
    let world = World::new();
    let (writer, reader) = (world.client(), world.client());
    let key = key("k");
    world.store(&writer, &key, 10);
    world.get(&reader, &key).unwrap();
    for _ in 0..9 {
        world.skip(SECOND);
        world.state.heartbeat(world.now(), writer.client, &[]);
        world.state.heartbeat(world.now(), ClientId(1), &[]);
        world.tick();
        assert_eq!(world.remove(&key, false), Err(Refusal::Leased));
    }
    world.skip(SECOND);
    world.tick();
    assert_eq!(world.remove(&key, false), Ok(()));
}
