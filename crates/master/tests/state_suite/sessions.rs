//! Put sessions: who gets a name, who may end what, and what readers see meanwhile.

use std::time::Duration;

use crate::harness::*;

#[test]
fn an_object_is_readable_from_commit_to_removal() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    assert_eq!(world.presence(&key), Presence::Absent);
    let started = world.put(&writer, &key, 1000).unwrap();
    assert_eq!(world.presence(&key), Presence::Reserved);
    assert_eq!(world.get(&writer, &key), Err(Refusal::NotReady));
    assert_eq!(world.commit(&writer, &key, &started), Ok(()));
    assert_eq!(world.presence(&key), Presence::Complete);
    let got = world.get(&writer, &key).unwrap();
    assert_eq!((got.size, &got.replicas), (1000, &started.replicas));
    world.end(&writer, &key, got.generation());
    assert_eq!(world.remove(&key, false), Ok(()));
    assert_eq!(world.get(&writer, &key), Err(Refusal::NotFound));
    assert_eq!(world.remove(&key, false), Err(Refusal::NotFound));
    assert_eq!(world.used(), 0);
}

#[test]
fn attributes_of_the_writer_reach_the_reader() {
    let world = World::new();
    let writer = world.client();
    let fingerprint = Some(layercake_protocol::fingerprint::Fingerprint([9; 16]));
    let put = PutStart {
        fingerprint,
        layout_id: 77,
        ..PutStart::new(key("with"), 10)
    };
    world.store_with(&writer, put, &ReplicateConfig::default());
    world.store(&writer, &key("without"), 10);
    let got = world.read(&writer, &key("with")).unwrap();
    assert_eq!((got.fingerprint, got.layout_id), (fingerprint, 77));
    let got = world.read(&writer, &key("without")).unwrap();
    assert_eq!((got.fingerprint, got.layout_id), (None, 0));
}

#[test]
fn tenants_are_separate_namespaces() {
    let world = World::new();
    let a = world.client();
    let b = Caller {
        tenant: Tenant::new("other").unwrap(),
        ..world.client()
    };
    let key = key("k");
    world.store(&a, &key, 10);
    assert_eq!(world.read(&b, &key), Err(Refusal::NotFound));
    let started = world.put(&b, &key, 20).unwrap();
    assert_eq!(world.commit(&b, &key, &started), Ok(()));
    assert_eq!(world.read(&a, &key).unwrap().size, 10);
    assert_eq!(world.read(&b, &key).unwrap().size, 20);
    let removed = world
        .state
        .remove_matching(world.now(), &b.tenant, &|_| true, true);
    assert_eq!(removed, 1);
    assert_eq!(world.presence(&key), Presence::Complete);
}

#[test]
fn dev_01_a_key_whose_writer_died_is_free_after_a_bounded_time() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let key = key("k");
    let dead = world.put(&a, &key, MIB).unwrap();
    // Nothing is heard of A any more; before the time is over its key is in progress, and never readable.
    world.pass(29 * SECOND);
    assert_eq!(world.put(&b, &key, MIB), Err(Refusal::InProgress));
    assert_eq!(world.get(&b, &key), Err(Refusal::NotReady));
    world.pass(SECOND);
    let fresh = world.put(&b, &key, MIB).unwrap();
    assert_eq!(world.get(&b, &key), Err(Refusal::NotReady));
    assert_eq!(world.commit(&b, &key, &fresh), Ok(()));
    assert_eq!(world.get(&b, &key).unwrap().replicas, fresh.replicas);
    // A's memory is not B's, and nobody else's, as long as A's late writes are not ruled out.
    assert_ne!(dead.replicas[0].offset, fresh.replicas[0].offset);
    assert!(world.quarantined() > MIB);
    world.pass(3600 * SECOND);
    world.tick();
    assert!(world.quarantined() > MIB, "time alone rules nothing out");
    assert_eq!(world.state.counters().discarded_puts, 1);
}

#[test]
fn dev_01_a_key_is_free_at_once_when_its_writer_is_known_to_be_dead() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let key = key("k");
    let dead = world.put(&a, &key, MIB).unwrap();
    world.skip(9 * SECOND);
    world.state.heartbeat(world.now(), b.client, &[]);
    world.state.heartbeat(world.now(), ClientId(1), &[]);
    world.skip(2 * SECOND);
    world.tick();
    assert_eq!(world.presence(&key), Presence::Absent);
    let fresh = world.put(&b, &key, MIB).unwrap();
    assert_ne!(dead.replicas[0].offset, fresh.replicas[0].offset);
    assert_eq!(world.commit(&b, &key, &fresh), Ok(()));
    assert_eq!(world.commit(&a, &key, &dead), Err(Refusal::Superseded));
    assert_eq!(world.get(&b, &key).unwrap().replicas, fresh.replicas);
}

#[test]
fn dev_02_of_two_writers_of_a_key_exactly_one_wins_each_round() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let key = key("k");
    for round in 0_u64..1000 {
        let (first, second) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let won = world.put(first, &key, 4096 + round).unwrap();
        assert_eq!(world.put(second, &key, 9000), Err(Refusal::InProgress));
        // The loser has no number to end anything with; one that it makes up ends nothing.
        let forged = PutStarted {
            generation: won.generation,
            replicas: Replicas::new(),
        };
        assert_eq!(
            world.commit(second, &key, &forged),
            Err(Refusal::Superseded)
        );
        assert_eq!(
            world.revoke(second, &key, &forged),
            Err(Refusal::Superseded)
        );
        assert_eq!(world.get(second, &key), Err(Refusal::NotReady));
        assert_eq!(world.commit(first, &key, &won), Ok(()));
        assert_eq!(world.put(second, &key, 9000), Err(Refusal::AlreadyExists));
        let got = world.read(second, &key).unwrap();
        assert_eq!((got.size, got.generation()), (4096 + round, won.generation));
        assert_eq!(world.remove(&key, true), Ok(()));
        world.pass(11 * SECOND);
    }
    let counters = world.state.counters();
    assert_eq!(
        (counters.puts_committed, counters.discarded_puts),
        (1000, 0)
    );
    world.tick();
    assert_eq!(world.used(), 0);
}

#[test]
fn the_second_mention_in_a_batch_is_in_progress() {
    let world = World::new();
    let writer = world.client();
    let puts = vec![PutStart::new(key("k"), 10), PutStart::new(key("k"), 20)];
    let config = ReplicateConfig::default();
    let answers = world.put_batch(&writer, puts, &config, Recency::default());
    assert!(answers[0].is_ok());
    assert_eq!(answers[1], Err(Refusal::InProgress));
}

#[test]
fn one_bad_put_does_not_fail_its_neighbours() {
    let world = World::new();
    let writer = world.client();
    world.store(&writer, &key("there"), 10);
    let rows = PutStart {
        header_rows: u32::MAX,
        ..PutStart::new(key("rows"), 10)
    };
    let puts = vec![
        PutStart::new(key("a"), 10),
        PutStart::new(key("empty"), 0),
        PutStart::new(key("endless"), u64::MAX),
        rows,
        PutStart::new(key("huge"), 65 * MIB),
        PutStart::new(key("there"), 10),
        PutStart::new(key("z"), 10),
    ];
    let config = ReplicateConfig::default();
    let answers = world.put_batch(&writer, puts, &config, Recency::default());
    assert!(answers[0].is_ok() && answers[6].is_ok());
    for bad in [1, 2, 3] {
        let answer = &answers[bad];
        assert!(
            matches!(answer, Err(Refusal::InvalidArgument { .. })),
            "{answer:?}"
        );
    }
    assert!(matches!(answers[4], Err(Refusal::NoSpace { .. })));
    assert_eq!(answers[5], Err(Refusal::AlreadyExists));
    for key in ["empty", "endless", "rows", "huge"] {
        assert_eq!(world.presence(&crate::harness::key(key)), Presence::Absent);
    }
}

#[test]
fn sessions_need_a_member_and_plain_reads_do_not() {
    let world = World::new();
    let (writer, nobody) = (world.client(), nobody());
    let key = key("k");
    let started = world.store(&writer, &key, 10);
    let generation = started.generation;
    assert_eq!(world.put(&nobody, &key, 10), Err(Refusal::UnknownMember));
    assert_eq!(world.get(&nobody, &key), Err(Refusal::UnknownMember));
    assert_eq!(
        world.renew(&nobody, &key, generation),
        Err(Refusal::UnknownMember)
    );
    assert!(world.read(&nobody, &key).is_ok());
    assert_eq!(world.probe(&[key]), [Presence::Complete]);
}

#[test]
fn no_replica_wanted_is_refused() {
    let world = World::new();
    let writer = world.client();
    let config = ReplicateConfig {
        replicas: 0,
        ..ReplicateConfig::default()
    };
    let answer = world.put_with(&writer, PutStart::new(key("k"), 10), &config);
    assert!(matches!(answer, Err(Refusal::InvalidArgument { .. })));
}

#[test]
fn commit_and_revoke_can_be_repeated() {
    let world = World::new();
    let writer = world.client();
    let (kept, given_up) = (key("kept"), key("given up"));
    let started = world.put(&writer, &kept, 10).unwrap();
    for _ in 0..3 {
        assert_eq!(world.commit(&writer, &kept, &started), Ok(()));
    }
    let answer = world.revoke(&writer, &kept, &started);
    assert_eq!(answer, Err(Refusal::AlreadyExists), "committed for good");
    assert_eq!(world.presence(&kept), Presence::Complete);
    let used = world.used();
    let started = world.put(&writer, &given_up, MIB).unwrap();
    for _ in 0..3 {
        assert_eq!(world.revoke(&writer, &given_up, &started), Ok(()));
        assert_eq!(world.used(), used, "revoked memory is free at once");
    }
    let answer = world.commit(&writer, &given_up, &started);
    assert_eq!(answer, Err(Refusal::NotFound));
    let counters = world.state.counters();
    assert_eq!((counters.puts_committed, counters.puts_revoked), (1, 1));
}

#[test]
fn a_revoked_key_is_free_for_anybody() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let key = key("k");
    let first = world.put(&a, &key, MIB).unwrap();
    world.revoke(&a, &key, &first).unwrap();
    let second = world.put(&b, &key, MIB).unwrap();
    assert!(second.generation > first.generation);
    assert_eq!(world.revoke(&a, &key, &first), Err(Refusal::Superseded));
    assert_eq!(world.commit(&a, &key, &first), Err(Refusal::Superseded));
    assert_eq!(world.commit(&b, &key, &second), Ok(()));
}

#[test]
fn a_late_end_after_a_takeover_touches_nothing() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let key = key("k");
    let stalled = world.put(&a, &key, MIB).unwrap();
    world.pass(30 * SECOND);
    let fresh = world.put(&b, &key, MIB).unwrap();
    assert_eq!(world.commit(&a, &key, &stalled), Err(Refusal::Superseded));
    assert_eq!(world.presence(&key), Presence::Reserved);
    assert_eq!(world.revoke(&a, &key, &stalled), Err(Refusal::Superseded));
    assert_eq!(world.presence(&key), Presence::Reserved);
    assert_eq!(
        world.quarantined(),
        0,
        "A has said that nothing is in flight"
    );
    assert_eq!(world.commit(&b, &key, &fresh), Ok(()));
    assert_eq!(world.get(&a, &key).unwrap().replicas, fresh.replicas);
}

#[test]
fn a_put_that_nobody_wants_is_dropped_in_the_end() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    let started = world.put(&writer, &key, MIB).unwrap();
    world.pass(599 * SECOND);
    world.tick();
    assert_eq!(
        world.presence(&key),
        Presence::Reserved,
        "its writer may come back"
    );
    world.pass(SECOND);
    world.tick();
    assert_eq!(world.presence(&key), Presence::Absent);
    assert_eq!(
        world.commit(&writer, &key, &started),
        Err(Refusal::NotFound)
    );
    assert_eq!(world.state.counters().discarded_puts, 1);
    assert!(world.quarantined() > 0);
    assert_eq!(world.revoke(&writer, &key, &started), Ok(()));
    assert_eq!((world.quarantined(), world.used()), (0, 0));
}

#[test]
fn an_overdue_put_that_nobody_took_over_can_still_be_committed() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    let started = world.put(&writer, &key, MIB).unwrap();
    world.pass(100 * SECOND);
    world.tick();
    assert_eq!(world.commit(&writer, &key, &started), Ok(()));
}

#[test]
fn a_watched_reservation_tells_when_it_ends() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let tenant = Tenant::default();
    let settled = |world: &World| {
        let events = world.state.take_events().into_iter();
        let keys = events.filter_map(|event| match event {
            Event::Settled { key, .. } => Some(key.to_string()),
            _ => None,
        });
        keys.collect::<Vec<_>>()
    };
    assert_eq!(world.state.watch(&tenant, &key("none")), Presence::Absent);
    let committed = world.put(&a, &key("committed"), 10).unwrap();
    let revoked = world.put(&a, &key("revoked"), 10).unwrap();
    let unwatched = world.put(&a, &key("unwatched"), 10).unwrap();
    world.put(&a, &key("taken over"), 10).unwrap();
    for name in ["committed", "revoked", "taken over"] {
        assert_eq!(world.state.watch(&tenant, &key(name)), Presence::Reserved);
    }
    world.commit(&a, &key("committed"), &committed).unwrap();
    world.commit(&a, &key("unwatched"), &unwatched).unwrap();
    world.revoke(&a, &key("revoked"), &revoked).unwrap();
    assert_eq!(settled(&world), ["committed", "revoked"]);
    world.pass(30 * SECOND);
    world.put(&b, &key("taken over"), 10).unwrap();
    assert_eq!(settled(&world), ["taken over"]);
    let presence = world.state.watch(&tenant, &key("committed"));
    assert_eq!(presence, Presence::Complete);
    world.pass(601 * SECOND);
    world.tick();
    assert_eq!(
        settled(&world),
        Vec::<String>::new(),
        "a watch ends with its reservation"
    );
}

#[test]
fn numbers_grow_above_those_of_an_earlier_master() {
    let world = World::with(StateConfig {
        first_generation: Generation(1_000_000),
        first_epoch: Epoch(5000),
        ..StateConfig::default()
    });
    let node = world.node("n", MIB);
    let writer = world.client();
    let first = world.store(&writer, &key("a"), 10).generation;
    assert!(first >= Generation(1_000_000));
    assert!(world.epoch() > Epoch(5000));
    // A segment that comes with greater tags raises the numbers above them.
    let other = world.node_unmounted("m", MIB, 0);
    let mounted = world.state.mount(
        world.now(),
        other.client,
        other.segment,
        Generation(9_000_000),
    );
    assert_eq!(mounted, Ok(false));
    assert!(world.store(&writer, &key("b"), 10).generation > Generation(9_000_000));
    assert_eq!(world.mount(&node), Ok(true));
}

#[test]
fn a_client_that_leaves_has_given_everything_up() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let started = world.put(&a, &key("open"), MIB).unwrap();
    world.store(&b, &key("read"), MIB);
    world.get(&a, &key("read")).unwrap();
    world.put(&a, &key("taken over"), MIB).unwrap();
    world.pass(Duration::from_secs(31));
    world.put(&b, &key("taken over"), MIB).unwrap();
    assert!(world.quarantined() > 0);
    assert_eq!(world.state.gauges().get_sessions, 1);
    world.state.leave(world.now(), a.client);
    assert_eq!(world.presence(&key("open")), Presence::Absent);
    assert_eq!(world.remove(&key("read"), false), Ok(()));
    assert_eq!(world.quarantined(), 0);
    let gauges = world.state.gauges();
    assert_eq!((gauges.put_sessions, gauges.get_sessions), (1, 0));
    let answer = world.commit(&a, &key("open"), &started);
    assert_eq!(answer, Err(Refusal::NotFound));
    assert_eq!(world.put(&a, &key("open"), 1), Err(Refusal::UnknownMember));
}

/// Who opted in is read while it is written; nobody else, and not under a lease.
#[test]
fn an_unfinished_object_is_found_if_its_writer_wants_it() {
    let world = World::new();
    let (writer, reader) = (world.client(), world.client());
    let ask = |name: &str| world.unfinished(&reader, &key(name));
    assert_eq!(ask("early"), Err(Refusal::NotFound));
    let put = |name: &str| PutStart {
        header_rows: 5,
        ..PutStart::new(key(name), 1000)
    };
    let config = ReplicateConfig::default();
    let early = put("early").early_reads();
    let table = early.early_table();
    let started = world.put_with(&writer, early, &config).unwrap();
    let plain = world.put_with(&writer, put("plain"), &config).unwrap();
    assert_eq!(ask("plain"), Err(Refusal::NotReady));
    let found = ask("early").unwrap();
    assert!(table.is_some() && found.early == table);
    assert_eq!((found.size, &found.replicas), (1000, &started.replicas));
    let room = found.replicas[0].header_len - plain.replicas[0].header_len;
    assert_eq!(u64::from(room), table.unwrap().len());
    // An ordinary reader still waits for the commit.
    assert_eq!(world.get(&reader, &key("early")), Err(Refusal::NotReady));

    assert_eq!(world.revoke(&writer, &key("early"), &started), Ok(()));
    assert_eq!(ask("early"), Err(Refusal::NotFound));
    assert_eq!(world.used(), 4096, "the other reservation: nobody holds it");

    let again = put("early").early_reads();
    let started = world.put_with(&writer, again, &config).unwrap();
    assert_ne!(ask("early").unwrap().early, table, "another session");
    assert_eq!(world.commit(&writer, &key("early"), &started), Ok(()));
    assert_eq!(ask("early"), Err(Refusal::AlreadyExists));
    assert_eq!(world.get(&reader, &key("early")).unwrap().early, None);
}
