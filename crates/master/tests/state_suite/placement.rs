//! Where objects lie.

use crate::harness::*;

fn config(replicas: u32) -> ReplicateConfig {
    ReplicateConfig {
        replicas,
        ..ReplicateConfig::default()
    }
}

fn preferring(names: &[&str]) -> ReplicateConfig {
    ReplicateConfig {
        preferred_segments: names.iter().map(|&name| name.to_owned()).collect(),
        ..ReplicateConfig::default()
    }
}

fn segments(replicas: &[Replica]) -> Vec<SegmentId> {
    let mut ids: Vec<_> = replicas.iter().map(|replica| replica.segment).collect();
    ids.sort_unstable();
    ids
}

fn put(
    world: &World,
    client: &Caller,
    name: &str,
    size: u64,
    config: &ReplicateConfig,
) -> PutStarted {
    world.store_with(client, PutStart::new(key(name), size), config)
}

#[test]
fn replicas_lie_in_distinct_segments_of_one_generation() {
    let world = World::with(StateConfig::default());
    let nodes: Vec<_> = (0..3).map(|n| world.node(&format!("n{n}"), MIB)).collect();
    let client = world.client();
    for n in 0..20 {
        let started = put(&world, &client, &format!("k{n}"), 1000, &config(2));
        let [a, b] = started.replicas[..] else {
            panic!("two replicas expected, not {:?}", started.replicas);
        };
        assert_ne!(a.segment, b.segment);
        assert_eq!(a.generation, started.generation);
        assert_eq!(b.generation, started.generation);
    }
    let all = put(&world, &client, "all", 1000, &config(100));
    let ids: Vec<_> = nodes.iter().map(|node| node.segment.id).collect();
    assert_eq!(
        segments(&all.replicas),
        ids,
        "as many as there are segments"
    );
}

#[test]
fn replicas_prefer_distinct_nodes() {
    let world = World::with(StateConfig::default());
    let first = world.node("n0", MIB);
    let mut second = first.clone();
    second.segment.id = SegmentId(1000);
    assert_eq!(world.mount(&second), Ok(false));
    let other = world.node("n1", MIB);
    let client = world.client();
    for n in 0..20 {
        let started = put(&world, &client, &format!("k{n}"), 1000, &config(2));
        let ids = segments(&started.replicas);
        assert!(ids.contains(&other.segment.id), "both on one node: {ids:?}");
    }
}

#[test]
fn preferred_names_come_first_in_their_order_and_others_when_they_are_full() {
    let world = World::with(StateConfig::default());
    let nodes: Vec<_> = (0..4)
        .map(|n| world.node(&format!("n{n}"), 8 * GRANULE))
        .collect();
    let client = world.client();
    let wanted = preferring(&["unknown", "n2", "n1"]);
    let mut placed = Vec::new();
    for n in 0..6 {
        let started = put(&world, &client, &format!("k{n}"), granules(4), &wanted);
        placed.push(started.replicas[0].segment);
    }
    let id = |n: usize| nodes[n].segment.id;
    assert_eq!(placed[..4], [id(2), id(2), id(1), id(1)]);
    assert!(
        placed[4..].iter().all(|s| [id(0), id(3)].contains(s)),
        "{placed:?}"
    );
    let two = ReplicateConfig {
        replicas: 2,
        ..preferring(&["n3", "n0"])
    };
    world
        .state
        .remove_matching(world.now(), &Tenant::default(), &|_| true, true);
    let started = put(&world, &client, "two", granules(4), &two);
    let placed: Vec<_> = started.replicas.iter().map(|r| r.segment).collect();
    assert_eq!(placed, [id(3), id(0)]);
}

#[test]
fn the_same_process_then_the_same_host_is_preferred_where_that_is_asked() {
    let world = World::with(StateConfig::default());
    world.node_on("far", MIB, 9);
    let near = world.node_on("near", 8 * GRANULE, 3);
    let own = world.node_on("own", 8 * GRANULE, 3);
    let client = Caller {
        client: own.client,
        tenant: Tenant::default(),
        location: Some(Location::from(&own.segment.endpoint)),
    };
    let same = ReplicateConfig {
        prefer_same_node: true,
        ..ReplicateConfig::default()
    };
    let mut placed = Vec::new();
    for n in 0..3 {
        let started = put(&world, &client, &format!("k{n}"), granules(8), &same);
        placed.push(started.replicas[0].segment);
    }
    assert_eq!(placed[..2], [own.segment.id, near.segment.id]);
    // A process that has said where it runs when it joined needs not say it again.
    let silent = Caller {
        location: None,
        ..client
    };
    world.remove(&key("k0"), true).unwrap();
    let started = put(&world, &silent, "again", granules(8), &same);
    assert_eq!(started.replicas[0].segment, own.segment.id);
}

#[test]
fn readers_are_sent_to_the_nearest_replica_first() {
    let world = World::with(StateConfig::default());
    let far = world.node_on("far", MIB, 1);
    let near = world.node_on("near", MIB, 2);
    let own = world.node_on("own", MIB, 2);
    let writer = world.client_on(5);
    put(&world, &writer, "k", 1000, &config(3));
    let reader = Caller {
        client: own.client,
        tenant: Tenant::default(),
        location: Some(Location::from(&own.segment.endpoint)),
    };
    let got = world.get(&reader, &key("k")).unwrap();
    let order: Vec<_> = got.replicas.iter().map(|r| r.segment).collect();
    assert_eq!(order, [own.segment.id, near.segment.id, far.segment.id]);
}

#[test]
fn segments_that_the_caller_cannot_reach_are_neither_used_nor_counted() {
    let world = World::with(StateConfig::default());
    let gone = world.node("gone", MIB);
    let client = world.client();
    put(&world, &client, "only there", 1000, &config(1));
    let unreachable = [gone.segment.id];
    let exists = |probe| {
        let query = Exists {
            probe,
            keys: &[key("only there")],
            recency: Recency::default(),
            stop_at_first_miss: false,
            unreachable: &unreachable,
            peek: true,
        };
        world.state.exists(world.now(), &client, &query).0[0]
    };
    assert_eq!(exists(Probe::Exists), Presence::Absent);
    assert_eq!(exists(Probe::Readable), Presence::Absent);
    let query = GetStart {
        keys: &[key("only there")],
        recency: Recency::default(),
        session: false,
        unreachable: &unreachable,
    };
    let (got, _) = world.state.get_start(world.now(), &client, &query);
    assert_eq!(got, [Err(Refusal::Unreachable)]);
    let start = |name: &str| {
        let batch = PutBatch {
            puts: vec![PutStart::new(key(name), 1000)],
            config: &config(2),
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &unreachable,
            upsert: false,
        };
        world
            .state
            .put_start(world.now(), &client, batch)
            .0
            .remove(0)
    };
    assert_eq!(start("nowhere"), Err(Refusal::NoSpace { largest_free: 0 }));
    let there = world.node("there", MIB);
    let started = start("there").unwrap();
    assert_eq!(segments(&started.replicas), [there.segment.id]);
    assert_eq!(
        world
            .state
            .exists(
                world.now(),
                &client,
                &Exists {
                    probe: Probe::Readable,
                    keys: &[key("only there")],
                    recency: Recency::default(),
                    stop_at_first_miss: false,
                    unreachable: &[],
                    peek: true,
                }
            )
            .0,
        [Presence::Complete],
        "others can reach it"
    );
    // An object with a copy elsewhere is found, and that there is one more is said.
    put(&world, &client, "twice", 1000, &config(2));
    for (unreachable, left_out) in [(&[][..], 0), (&unreachable, 1)] {
        let query = GetStart {
            keys: &[key("twice")],
            recency: Recency::default(),
            session: false,
            unreachable,
        };
        let (mut got, _) = world.state.get_start(world.now(), &client, &query);
        let got = got.remove(0).unwrap();
        assert_eq!(got.left_out, left_out);
        assert_eq!(got.replicas.len(), 2 - left_out as usize);
    }
}

#[test]
fn without_segments_there_is_no_room() {
    let world = World::with(StateConfig::default());
    let client = world.client();
    let refused = world.put(&client, &key("k"), 1);
    assert_eq!(refused, Err(Refusal::NoSpace { largest_free: 0 }));
    assert_eq!(world.presence(&key("k")), Presence::Absent);
}

#[test]
fn segments_fill_evenly() {
    let world = World::with(StateConfig::default());
    for n in 0..8 {
        world.node(&format!("n{n}"), 1000 * GRANULE);
    }
    let client = world.client();
    for n in 0..4000 {
        put(&world, &client, &format!("k{n}"), granules(1), &config(1));
    }
    for stat in world.state.segments(world.now()) {
        let used = stat.used_bytes / GRANULE;
        assert!(
            (400..=600).contains(&used),
            "{} has {used}",
            stat.segment.name
        );
    }
}

/// Two sizes that a published sparse-attention model has: 3.12 MiB and 643 KiB.
#[test]
fn two_sizes_fill_a_fragmented_pool_and_the_refusal_names_the_largest_hole() {
    const LARGE: u64 = 3_271_557;
    const SMALL: u64 = 643 << 10;
    let hard = ReplicateConfig {
        hard_pin: true,
        ..ReplicateConfig::default()
    };
    for freed in [0, 1] {
        let world = World::with(StateConfig::default());
        for n in 0..8 {
            world.node(&format!("n{n}"), 152 * MIB);
        }
        let client = world.client();
        let mut names = Vec::new();
        for n in 0.. {
            let size = [LARGE, SMALL][n % 2];
            let name = key(&format!("k{n}"));
            let put = PutStart::new(name.clone(), size);
            let Ok(started) = world.put_with(&client, put, &hard) else {
                break;
            };
            world.commit(&client, &name, &started).unwrap();
            names.push(name);
        }
        for name in names.iter().skip(freed).step_by(2) {
            assert_eq!(world.remove(name, false), Ok(()));
        }
        let refusal = (0..).find_map(|n| {
            let put = PutStart::new(key(&format!("large{n}")), LARGE);
            world.put_with(&client, put, &hard).err()
        });
        let gauges = world.state.gauges();
        let share = gauges.requested_bytes as f64 / gauges.capacity_bytes as f64;
        assert!(share >= 0.95, "refused at {share:.3} in use");
        let largest_free = world
            .state
            .segments(world.now())
            .iter()
            .map(|stat| stat.largest_free)
            .max()
            .unwrap();
        assert_eq!(refusal, Some(Refusal::NoSpace { largest_free }));
        assert!(largest_free < LARGE + GRANULE);
    }
}

#[test]
fn mixed_sizes_churn_without_refusal() {
    let world = World::with(StateConfig::default());
    for n in 0..4 {
        world.node(&format!("n{n}"), 152 * MIB);
    }
    let client = world.client();
    let mut state = 12_345_u64;
    for n in 0..6000 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let size = [3_271_557, 643 << 10][usize::from(state >> 40 & 3 != 0)];
        put(&world, &client, &format!("k{n}"), size, &config(1));
    }
    let counters = world.state.counters();
    assert_eq!(counters.refused_puts, 0);
    // Not much more goes than must: what is left fills the pool.
    let gauges = world.state.gauges();
    let share = gauges.used_bytes as f64 / gauges.capacity_bytes as f64;
    assert!(share > 0.9, "only {share:.3} in use");
}

#[test]
fn what_there_is_no_room_for_twice_is_kept_once() {
    let world = World::with(StateConfig::default());
    let full = world.node("full", 4 * GRANULE);
    let hard = ReplicateConfig {
        hard_pin: true,
        ..preferring(&["full"])
    };
    let client = world.client();
    put(&world, &client, "pinned", granules(4), &hard);
    let roomy = world.node("roomy", 4096 * GRANULE);
    for n in 0..100 {
        put(&world, &client, &format!("k{n}"), granules(1), &config(1));
    }
    let started = put(&world, &client, "twice", granules(4), &config(2));
    assert_eq!(segments(&started.replicas), [roomy.segment.id]);
    let evicted = world.state.counters().evicted_allocation.objects;
    assert!(
        evicted <= 40,
        "{evicted} objects went for a replica that can't be"
    );
    let full = full.segment.id;
    assert!(
        started
            .replicas
            .iter()
            .all(|replica| replica.segment != full)
    );
}

/// In how many of the segments objects come to lie when there are many more objects than segments, and the
/// most in one.
fn spread(strategy: Strategy) -> (usize, usize) {
    let world = World::with(StateConfig {
        strategy,
        ..StateConfig::default()
    });
    for n in 0..4 {
        world.node_on(&format!("n{n}"), 16 * MIB, n);
    }
    let client = world.client_on(2);
    let mut objects = std::collections::HashMap::<SegmentId, usize>::new();
    for n in 0..200 {
        let started = put(&world, &client, &format!("k{n}"), 1000, &config(1));
        *objects.entry(started.replicas[0].segment).or_default() += 1;
    }
    (objects.len(), objects.into_values().max().unwrap())
}

#[test]
fn strategies_spread_objects_as_they_say() {
    assert_eq!(spread(Strategy::Roomiest), (4, 50), "in turn");
    assert_eq!(
        spread(Strategy::LocalFirst),
        (1, 200),
        "on the caller's host"
    );
    let (segments, most) = spread(Strategy::RoomierOfTwo);
    assert!(segments == 4 && most < 60, "{most} in one");
    let (segments, most) = spread(Strategy::Random);
    assert!(segments == 4 && (51..100).contains(&most), "{most} in one");
}
