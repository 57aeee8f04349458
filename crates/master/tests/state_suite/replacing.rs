//! Versions that take the place of others: upserts, copies, and what becomes of the old ones.

use crate::harness::*;

#[test]
fn an_upsert_keeps_the_old_version_readable_until_it_commits() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    let old = world.store(&writer, &key, 1000);
    let new = world.upsert(&writer, &key, 2000).unwrap();
    assert_eq!(world.presence(&key), Presence::Complete);
    let got = world.read(&writer, &key).unwrap();
    assert_eq!((got.size, got.generation()), (1000, old.generation));
    assert_eq!(world.commit(&writer, &key, &new), Ok(()));
    let got = world.read(&writer, &key).unwrap();
    assert_eq!((got.size, got.generation()), (2000, new.generation));
    assert_eq!(world.commit(&writer, &key, &old), Err(Refusal::Superseded));
    assert_eq!(world.state.counters().replaced.objects, 1);
}

#[test]
fn a_revoked_upsert_leaves_the_old_version() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    let old = world.store(&writer, &key, 1000);
    let used = world.used();
    let new = world.upsert(&writer, &key, MIB).unwrap();
    assert_eq!(world.revoke(&writer, &key, &new), Ok(()));
    assert_eq!(world.used(), used);
    assert_eq!(
        world.read(&writer, &key).unwrap().generation(),
        old.generation
    );
    // The name can be upserted again.
    let newer = world.upsert(&writer, &key, MIB).unwrap();
    assert_eq!(world.commit(&writer, &key, &newer), Ok(()));
}

// contract: lease-13
#[test]
fn readers_of_a_replaced_version_keep_its_memory_until_they_end() {
    let world = World::new();
    let (writer, reader) = (world.client(), world.client());
    let key = key("k");
    let old = world.store(&writer, &key, MIB);
    world.get(&reader, &key).unwrap();
    let new = world.upsert(&writer, &key, MIB).unwrap();
    assert_eq!(world.commit(&writer, &key, &new), Ok(()));
    assert!(world.quarantined() > MIB);
    // The session goes on with its version for as long as it renews.
    for _ in 0..5 {
        world.pass(8 * SECOND);
        world.tick();
        assert_eq!(world.renew(&reader, &key, old.generation), Ok(()));
    }
    assert!(world.quarantined() > MIB);
    world.end(&reader, &key, old.generation);
    assert_eq!(world.quarantined(), 0);
    let answer = world.renew(&reader, &key, old.generation);
    assert_eq!(answer, Err(Refusal::LeaseExpired));
}

#[test]
fn an_upsert_takes_an_open_reservation_over() {
    let world = World::new();
    let (a, b) = (world.client(), world.client());
    let key = key("k");
    let first = world.put(&a, &key, MIB).unwrap();
    let second = world.upsert(&b, &key, MIB).unwrap();
    assert_eq!(world.commit(&a, &key, &first), Err(Refusal::Superseded));
    assert_eq!(world.commit(&b, &key, &second), Ok(()));
    // And an upsert takes over another one of the same key, whose old version stays.
    let third = world.upsert(&a, &key, MIB).unwrap();
    let fourth = world.upsert(&b, &key, MIB).unwrap();
    assert_eq!(world.commit(&a, &key, &third), Err(Refusal::Superseded));
    let got = world.read(&a, &key).unwrap();
    assert_eq!(got.generation(), second.generation);
    assert_eq!(world.commit(&b, &key, &fourth), Ok(()));
}

#[test]
fn an_upsert_survives_the_end_of_the_version_it_replaces() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    world.store(&writer, &key, 1000);
    let new = world.upsert(&writer, &key, 2000).unwrap();
    assert_eq!(world.remove(&key, false), Ok(()));
    assert_eq!(world.presence(&key), Presence::Reserved);
    assert_eq!(world.put(&writer, &key, 1), Err(Refusal::InProgress));
    assert_eq!(world.commit(&writer, &key, &new), Ok(()));
    assert_eq!(world.read(&writer, &key).unwrap().size, 2000);
}

/// A copy replaces the version that it was made of, and no other, and what protects that one protects it.
#[test]
fn a_copy_takes_the_place_of_its_version_alone() {
    let world = World::with(StateConfig::default());
    let (here, there) = (world.node("here", MIB), world.node("there", MIB));
    let (client, other) = (world.client(), world.client());
    let on = |names: &[&str], hard_pin: bool| ReplicateConfig {
        replicas: u32::try_from(names.len()).unwrap(),
        preferred_segments: names.iter().map(ToString::to_string).collect(),
        hard_pin,
        ..ReplicateConfig::default()
    };
    let k = key("k");
    let first = world.store_with(
        &client,
        PutStart::new(k.clone(), 1000),
        &on(&["here"], true),
    );
    let copy = |of: Generation| {
        let put = PutStart {
            copy_of: Some(of),
            ..PutStart::new(k.clone(), 1000)
        };
        let config = on(&["here", "there"], false);
        let batch = PutBatch {
            puts: vec![put],
            config: &config,
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: true,
        };
        world
            .state
            .put_start(world.now(), &client, batch)
            .0
            .remove(0)
    };
    assert_eq!(
        copy(Generation(first.generation.0 + 99)),
        Err(Refusal::Superseded)
    );
    let probed = world.probe(std::slice::from_ref(&k));
    assert_eq!(probed, [Presence::Complete]);
    assert_eq!(world.remove(&k, false), Err(Refusal::Leased));
    let begun = copy(first.generation).unwrap();
    assert_eq!(
        copy(first.generation),
        Err(Refusal::InProgress),
        "one at a time"
    );
    assert_eq!(world.commit(&client, &k, &begun), Ok(()));
    let got = world.get(&other, &k).unwrap();
    let segments: Vec<_> = got.replicas.iter().map(|replica| replica.segment).collect();
    assert!(segments.contains(&here.segment.id) && segments.contains(&there.segment.id));
    let stat = world
        .state
        .stat(world.now(), &Tenant::default(), &k)
        .unwrap();
    assert!(stat.hard_pinned);
    world.end(&other, &k, begun.generation);
    assert_eq!(
        world.remove(&k, false),
        Err(Refusal::Leased),
        "the probe's lease went over"
    );

    // A version that is replaced or removed meanwhile is not brought back.
    let begun = copy(begun.generation).unwrap();
    let newer = world.upsert(&other, &k, 10).unwrap();
    assert_eq!(world.commit(&client, &k, &begun), Err(Refusal::Superseded));
    assert_eq!(world.commit(&other, &k, &newer), Ok(()));
    let begun = copy(newer.generation).unwrap();
    assert_eq!(world.remove(&k, true), Ok(()));
    assert_eq!(world.commit(&client, &k, &begun), Err(Refusal::NotFound));
    assert_eq!(world.presence(&k), Presence::Absent);
    assert_eq!(copy(newer.generation), Err(Refusal::NotFound));
}

#[test]
fn a_removal_that_names_a_version_takes_no_other() {
    let world = World::new();
    let (client, reader) = (world.client(), world.client());
    let k = key("k");
    let version = |generation| ObjectRef {
        key: k.clone(),
        generation,
    };
    let begun = world.put(&client, &k, 10).unwrap();
    let first = version(begun.generation);
    assert_eq!(world.remove_version(&first), Err(Refusal::NotReady));
    assert_eq!(world.commit(&client, &k, &begun), Ok(()));
    let newer = world.upsert(&client, &k, 10).unwrap();
    let second = version(newer.generation);
    assert_eq!(world.remove_version(&second), Err(Refusal::NotFound));
    assert_eq!(world.commit(&client, &k, &newer), Ok(()));
    assert_eq!(world.remove_version(&first), Err(Refusal::NotFound));
    assert_eq!(world.presence(&k), Presence::Complete);
    // A reader keeps its memory, not its name.
    world.get(&reader, &k).unwrap();
    assert_eq!(world.remove_version(&second), Ok(()));
    assert_eq!(world.presence(&k), Presence::Absent);
    assert!(world.quarantined() > 0);
    assert_eq!(world.remove_version(&second), Err(Refusal::NotFound));
    world.end(&reader, &k, second.generation);
    world.tick();
    assert_eq!((world.quarantined(), world.used()), (0, 0));
}

#[test]
fn a_replacement_keeps_a_soft_pin_if_it_is_told_to() {
    let world = World::new();
    let client = world.client();
    let k = key("k");
    let pinned = ReplicateConfig {
        soft_pin: true,
        ..ReplicateConfig::default()
    };
    world.store_with(&client, PutStart::new(k.clone(), 10), &pinned);
    let replace = |keep_soft_pin| {
        let config = ReplicateConfig {
            keep_soft_pin,
            ..ReplicateConfig::default()
        };
        let batch = PutBatch {
            puts: vec![PutStart::new(k.clone(), 10)],
            config: &config,
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: true,
        };
        let put = world
            .state
            .put_start(world.now(), &client, batch)
            .0
            .remove(0);
        assert_eq!(world.commit(&client, &k, &put.unwrap()), Ok(()));
        let stat = world.state.stat(world.now(), &Tenant::default(), &k);
        stat.unwrap().soft_pinned
    };
    assert!(replace(true));
    assert!(replace(true), "again and again");
    assert!(!replace(false));
    assert!(!replace(true), "there is none to keep");
}
