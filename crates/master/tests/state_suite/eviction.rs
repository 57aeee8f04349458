//! What goes when there is no room: in which order, and what never.

use std::collections::HashMap;

use proptest::prelude::*;

use crate::harness::*;

/// A pool of one segment of so many granules.
fn pool(granules: u64) -> (World, Caller) {
    let world = World::with(StateConfig {
        shards: 8,
        ..StateConfig::default()
    });
    world.node("n", granules * GRANULE);
    let client = world.client();
    (world, client)
}

/// Stores an object of one granule as the block of a prefix.
fn store_block(world: &World, client: &Caller, key: &ObjectKey, recency: Recency) {
    let put = PutStart::new(key.clone(), granules(1));
    let config = ReplicateConfig::default();
    let started = world
        .put_batch(client, vec![put], &config, recency)
        .remove(0)
        .unwrap();
    assert_eq!(world.commit(client, key, &started), Ok(()));
}

fn at(epoch: Epoch, first_index: u32) -> Recency {
    Recency { epoch, first_index }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the order of puts and touches, what is evicted is exactly what comes first in the order:
    /// so a prefix loses its tail and never its middle, across all shards.
    // contract: lease-8
    #[test]
    fn evicts_exactly_in_order_of_epoch_and_reversed_index(
        prefixes in prop::collection::vec(1_usize..20, 1..8),
        touches in prop::collection::vec((any::<prop::sample::Index>(), 1_usize..20, any::<bool>()), 0..12),
        wanted in 1_u64..60,
    ) {
        let blocks: usize = prefixes.iter().sum();
        let (world, client) = pool(blocks as u64);
        let mut order: HashMap<String, (Epoch, std::cmp::Reverse<u32>)> = HashMap::new();
        let mut names = Vec::new();
        for (number, len) in prefixes.iter().enumerate() {
            let epoch = world.epoch();
            let keys = keys(&format!("p{number}-"), 0..*len);
            for (index, key) in keys.iter().enumerate() {
                let index = u32::try_from(index).unwrap();
                store_block(&world, &client, key, at(epoch, index));
                order.insert(key.to_string(), (epoch, std::cmp::Reverse(index)));
            }
            names.push(keys);
        }
        for (prefix, len, read) in touches {
            let keys = &names[prefix.index(names.len())];
            let keys = &keys[..len.min(keys.len())];
            let epoch = world.epoch();
            if read {
                let query = GetStart { keys, recency: at(epoch, 0), session: false, unreachable: &[] };
                world.state.get_start(world.now(), &client, &query);
            } else {
                world.probe_at(keys, at(epoch, 0));
            }
            for (index, key) in keys.iter().enumerate() {
                let index = std::cmp::Reverse(u32::try_from(index).unwrap());
                order.insert(key.to_string(), (epoch, index));
            }
        }
        world.pass(60 * SECOND);
        let wanted = wanted.min(blocks as u64);
        for n in 0..wanted {
            world.store(&client, &key(&format!("new{n}")), granules(1));
        }
        let mut expected: Vec<_> = order.into_iter().collect();
        expected.sort_by_key(|(_, order)| *order);
        for (position, (name, _)) in expected.iter().enumerate() {
            let gone = world.presence(&key(name)) == Presence::Absent;
            prop_assert_eq!(gone, (position as u64) < wanted, "{} at {}", name, position);
        }
        prop_assert_eq!(world.state.counters().evicted_allocation.objects, wanted);
    }
}

/// Four objects in one start, open while ten others are stored; then committed in the order of `ends`,
/// each in a part of its own of one call.
fn commit_late(with_epoch: bool, ends: [usize; 4]) -> (World, Caller, Vec<ObjectKey>) {
    let (world, client) = pool(14);
    let recency = if with_epoch {
        at(world.epoch(), 0)
    } else {
        Recency::default()
    };
    let late = keys("late", 0..4);
    let puts = late
        .iter()
        .map(|key| PutStart::new(key.clone(), granules(1)));
    let started = world.put_batch(
        &client,
        puts.collect(),
        &ReplicateConfig::default(),
        recency,
    );
    for n in 0..10 {
        world.store(&client, &key(&format!("old{n}")), granules(1));
    }
    let epoch = world.state.draw_epoch();
    for end in ends {
        let generation = started[end].as_ref().unwrap().generation;
        let object = [object(&late[end], generation)];
        let ended = world.state.put_end(world.now(), &client, &object, epoch);
        assert_eq!(ended, [Ok(())]);
        // Other calls come in between.
        world.epoch();
    }
    world.pass(30 * SECOND);
    (world, client, late)
}

// contract: lease-8
#[test]
fn a_session_that_was_open_for_long_is_used_by_its_end() {
    let (world, client, late) = commit_late(false, [2, 0, 3, 1]);
    for n in 0..10 {
        world.store(&client, &key(&format!("new{n}")), granules(1));
        assert_eq!(world.count(&late), 4, "what was committed last goes last");
    }
    for left in (0..4).rev() {
        world.store(&client, &key(&format!("newer{left}")), granules(1));
        assert_eq!(
            (world.count(&late), world.count(&late[..left])),
            (left, left)
        );
    }
}

// contract: lease-8
#[test]
fn the_end_of_a_session_with_an_epoch_is_no_use_of_its_own() {
    let (world, client, late) = commit_late(true, [0, 1, 2, 3]);
    for left in (0..4).rev() {
        world.store(&client, &key(&format!("new{left}")), granules(1));
        assert_eq!(
            (world.count(&late), world.count(&late[..left])),
            (left, left)
        );
    }
}

// contract: lease-8
#[test]
fn a_prefix_is_shortened_from_its_tail_however_its_windows_came() {
    let (world, client) = pool(100);
    let epoch = world.epoch();
    let blocks = keys("b", 0..100);
    for (index, block) in blocks.iter().enumerate() {
        store_block(
            &world,
            &client,
            block,
            at(epoch, u32::try_from(index).unwrap()),
        );
    }
    // One later request probes the prefix in windows, out of order.
    let epoch = world.epoch();
    for window in [2, 0, 3, 1] {
        let first = window * 25;
        let recency = at(epoch, u32::try_from(first).unwrap());
        world.probe_at(&blocks[first..first + 25], recency);
    }
    world.pass(30 * SECOND);
    for n in 0..40 {
        world.store(&client, &key(&format!("new{n}")), granules(1));
        let left = world.count(&blocks);
        assert_eq!(world.count(&blocks[..left]), left, "the prefix has a hole");
        assert_eq!(left, 99 - n);
    }
}

#[test]
fn an_unset_epoch_is_drawn_and_a_future_one_is_clamped() {
    let (world, client) = pool(10);
    let before = world.epoch();
    let used = |epoch| {
        let query: GetStart<'_> = GetStart {
            keys: &[],
            recency: at(epoch, 0),
            session: false,
            unreachable: &[],
        };
        world.state.get_start(world.now(), &client, &query).1
    };
    let drawn = used(Epoch::UNSET);
    assert!(drawn > before);
    assert_eq!(used(before), before, "an epoch of the past stays");
    assert_eq!(used(Epoch(u64::MAX)), drawn);
}

// contract: lease-10
#[test]
fn a_burst_of_puts_succeeds_when_everything_can_go() {
    let (world, client) = pool(64);
    for n in 0..1000 {
        let size = granules(1 + n % 7);
        let key = key(&format!("k{n}"));
        let started = world.put(&client, &key, size);
        let started = started.unwrap_or_else(|refusal| panic!("put {n}: {refusal}"));
        world.commit(&client, &key, &started).unwrap();
    }
    assert_eq!(world.state.counters().refused_puts, 0);
}

// contract: lease-1, lease-9
#[test]
fn what_is_leased_reserved_or_hard_pinned_stays() {
    let (world, client) = pool(20);
    let pinned = keys("pinned", 0..5);
    let hard = ReplicateConfig {
        hard_pin: true,
        ..ReplicateConfig::default()
    };
    for key in &pinned {
        world.store_with(&client, PutStart::new(key.clone(), granules(1)), &hard);
    }
    let open = world.put(&client, &key("open"), granules(5)).unwrap();
    let leased = keys("leased", 0..5);
    for key in &leased {
        world.store(&client, key, granules(1));
        world.get(&client, key).unwrap();
    }
    let loose = keys("loose", 0..5);
    for key in &loose {
        world.store(&client, key, granules(1));
    }
    for n in 0..50 {
        world.store(&client, &key(&format!("new{n}")), granules(1));
    }
    assert_eq!((world.count(&pinned), world.count(&leased)), (5, 5));
    assert_eq!(world.count(&loose), 0);
    assert_eq!(world.commit(&client, &key("open"), &open), Ok(()));
    // Six granules can't be had: five are left to evict.
    let refused = world.put(&client, &key("large"), granules(11));
    assert!(
        matches!(refused, Err(Refusal::NoSpace { .. })),
        "{refused:?}"
    );
    assert_eq!(world.state.counters().refused_puts, 1);
    // Pins hold against eviction only.
    assert_eq!(world.remove(&pinned[0], false), Ok(()));
}

#[test]
fn a_lease_that_is_given_back_lets_its_object_go_at_once() {
    let (world, client) = pool(4);
    let key = key("leased");
    world.store(&client, &key, granules(4));
    let generation = world.get(&client, &key).unwrap().generation();
    let refused = world.put(&client, &crate::harness::key("new"), granules(2));
    assert_eq!(refused, Err(Refusal::NoSpace { largest_free: 0 }));
    world.end(&client, &key, generation);
    assert!(
        world
            .put(&client, &crate::harness::key("new"), granules(2))
            .is_ok()
    );
}

// contract: lease-9
#[test]
fn soft_pinned_objects_go_last_and_only_until_their_pin_ends() {
    let soft = ReplicateConfig {
        soft_pin: true,
        soft_pin_ttl: Some(100 * SECOND),
        ..ReplicateConfig::default()
    };
    let (world, client) = pool(10);
    for n in 0..4 {
        world.store(&client, &key(&format!("first{n}")), granules(1));
    }
    let pinned = keys("pinned", 0..6);
    for key in &pinned {
        world.store_with(&client, PutStart::new(key.clone(), granules(1)), &soft);
    }
    assert_eq!(world.state.gauges().soft_pinned, 6);
    for n in 0..30 {
        world.store(&client, &key(&format!("a{n}")), granules(1));
    }
    assert_eq!(world.count(&pinned), 6);
    // Nothing else is left for so much.
    world.store(&client, &key("large"), granules(6));
    assert_eq!(world.count(&pinned), 4);
    world.remove(&key("large"), true).unwrap();
    // A read renews the pin, a probe does not; without one they are like all others.
    world.pass(90 * SECOND);
    world.read(&client, &pinned[2]).unwrap();
    world.pass(15 * SECOND);
    for n in 0..30 {
        world.store(&client, &key(&format!("b{n}")), granules(1));
    }
    assert_eq!((world.count(&pinned[2..3]), world.count(&pinned)), (1, 1));
    assert_eq!(world.state.gauges().soft_pinned, 1);
}

#[test]
fn soft_pins_are_kept_where_the_rules_say_so() {
    let world = World::with(StateConfig {
        evict_soft_pinned: false,
        ..StateConfig::default()
    });
    world.node("n", 10 * GRANULE);
    let client = world.client();
    let soft = ReplicateConfig {
        soft_pin: true,
        ..ReplicateConfig::default()
    };
    for key in keys("pinned", 0..10) {
        world.store_with(&client, PutStart::new(key, granules(1)), &soft);
    }
    let refused = world.put(&client, &key("new"), granules(1));
    assert_eq!(refused, Err(Refusal::NoSpace { largest_free: 0 }));
    assert_eq!(world.count(&keys("pinned", 0..10)), 10);
}

fn grouped(key: &ObjectKey, group: &str) -> PutStart {
    PutStart {
        group: Some(group.to_owned()),
        ..PutStart::new(key.clone(), granules(1))
    }
}

// contract: lease-11
#[test]
fn a_group_goes_together() {
    let (world, client) = pool(20);
    let config = ReplicateConfig::default();
    for n in 0..5 {
        for key in keys(&format!("g{n}-"), 0..4) {
            world.store_with(&client, grouped(&key, &format!("g{n}")), &config);
        }
    }
    world.store(&client, &key("new"), granules(1));
    let left: Vec<_> = (0..5)
        .map(|n| world.count(&keys(&format!("g{n}-"), 0..4)))
        .collect();
    assert_eq!(left, [0, 4, 4, 4, 4]);
}

#[test]
fn a_group_is_as_recent_as_its_most_recent_member() {
    let (world, client) = pool(8);
    let config = ReplicateConfig::default();
    for key in keys("g", 0..4) {
        world.store_with(&client, grouped(&key, "g"), &config);
    }
    let others = keys("o", 0..4);
    for key in &others {
        world.store(&client, key, granules(1));
    }
    world.probe(&keys("g", 2..3));
    world.pass(30 * SECOND);
    for n in 0..4 {
        world.store(&client, &key(&format!("new{n}")), granules(1));
    }
    assert_eq!(world.count(&keys("g", 0..4)), 4);
    assert_eq!(world.count(&others), 0);
    world.store(&client, &key("one more"), granules(1));
    assert_eq!(world.count(&keys("g", 0..4)), 0);
}

#[test]
fn a_group_with_a_leased_or_pinned_member_stays_whole() {
    let (world, client) = pool(8);
    let config = ReplicateConfig::default();
    let hard = ReplicateConfig {
        hard_pin: true,
        ..ReplicateConfig::default()
    };
    world.store_with(&client, grouped(&key("pinned0"), "pinned"), &config);
    world.store_with(&client, grouped(&key("pinned1"), "pinned"), &hard);
    for key in keys("leased", 0..3) {
        world.store_with(&client, grouped(&key, "leased"), &config);
    }
    let generation = world.get(&client, &key("leased1")).unwrap().generation();
    for n in 0..20 {
        world.store(&client, &key(&format!("a{n}")), granules(1));
    }
    assert_eq!(world.count(&keys("leased", 0..3)), 3);
    assert_eq!(world.count(&keys("pinned", 0..2)), 2);
    let refused = world.put(&client, &key("large"), granules(4));
    assert!(matches!(refused, Err(Refusal::NoSpace { .. })));
    // The lease is given back: the whole group can go, at once.
    world.end(&client, &key("leased1"), generation);
    world.store(&client, &key("large"), granules(4));
    assert_eq!(world.count(&keys("leased", 0..3)), 0);
    assert_eq!(world.count(&keys("pinned", 0..2)), 2);
}

#[test]
fn a_group_with_a_soft_pinned_member_goes_last() {
    let (world, client) = pool(6);
    let soft = ReplicateConfig {
        soft_pin: true,
        ..ReplicateConfig::default()
    };
    world.store_with(
        &client,
        grouped(&key("g0"), "g"),
        &ReplicateConfig::default(),
    );
    world.store_with(&client, grouped(&key("g1"), "g"), &soft);
    for n in 0..20 {
        world.store(&client, &key(&format!("a{n}")), granules(1));
    }
    assert_eq!(world.count(&keys("g", 0..2)), 2);
    world.store(&client, &key("large"), granules(5));
    assert_eq!(world.count(&keys("g", 0..2)), 0);
}

#[test]
fn above_the_watermark_one_ratio_goes_in_the_background() {
    let (world, client) = pool(1000);
    let blocks = keys("b", 0..910);
    for block in &blocks[..900] {
        world.store(&client, block, granules(1));
    }
    world.tick();
    assert_eq!(
        world.count(&blocks),
        900,
        "at the watermark is not above it"
    );
    for block in &blocks[900..] {
        world.store(&client, block, granules(1));
    }
    world.tick();
    let evicted = world.state.counters().evicted_watermark.objects;
    // One per cent over: down to one ratio below the watermark, give or take a tenth.
    assert!((54..=66).contains(&evicted), "{evicted} evicted");
    assert_eq!(
        world.count(&blocks[usize::try_from(evicted).unwrap()..]),
        910 - 60
    );
    world.tick();
    assert_eq!(world.state.counters().evicted_watermark.objects, evicted);
}

#[test]
fn background_eviction_leaves_what_is_leased() {
    let (world, client) = pool(100);
    let blocks = keys("b", 0..100);
    for block in &blocks {
        world.store(&client, block, granules(1));
    }
    world.probe(&blocks);
    world.tick();
    assert_eq!(world.count(&blocks), 100);
    world.pass(10 * SECOND);
    world.tick();
    assert_eq!(world.count(&blocks), 85);
}

#[test]
fn one_allocation_evicts_within_bounds() {
    let (world, client) = pool(4096);
    for n in 0..4096 {
        let key = key(&format!("k{n}"));
        world.store(&client, &key, granules(1));
        // Every eighth stays, so that eight contiguous granules can't be had.
        if n % 8 == 0 {
            world.get(&client, &key).unwrap();
        }
    }
    let refused = world.put(&client, &key("large"), granules(8));
    assert!(
        matches!(refused, Err(Refusal::NoSpace { .. })),
        "{refused:?}"
    );
    let evicted = world.state.counters().evicted_allocation.objects;
    assert!(evicted <= 64 * 8 + 8, "{evicted} objects went for nothing");
}
