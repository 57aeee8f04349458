//! What the state tells about itself.

use layercake_protocol::report::SegmentState;

use crate::harness::*;

#[test]
fn lists_come_by_key_in_pages() {
    let world = World::new();
    let client = world.client();
    let mut expected: Vec<String> = (0..150).map(|n| format!("a{n}")).collect();
    for name in &expected {
        world.store(&client, &key(name), 10);
    }
    world.store(&client, &key("b"), 10);
    world.put(&client, &key("a-open"), 10).unwrap();
    expected.push("a-open".to_owned());
    expected.sort_unstable();
    let mut found: Vec<String> = Vec::new();
    loop {
        let after = found.last().cloned().unwrap_or_default();
        let list = List {
            tenant: &Tenant::default(),
            prefix: "a",
            after: &after,
            limit: 40,
        };
        let page = world.state.list(world.now(), &list);
        assert_eq!(
            page.more,
            page.objects.len() == 40 && found.len() + 40 < 151
        );
        found.extend(page.objects.iter().map(|stat| stat.key.to_string()));
        if !page.more {
            break;
        }
    }
    assert_eq!(found, expected);
}

#[test]
fn an_object_s_state_is_told() {
    let world = World::new();
    let client = world.client();
    let put = PutStart {
        group: Some("g".to_owned()),
        prefix_index: Some(17),
        ..PutStart::new(key("k"), 5000)
    };
    let config = ReplicateConfig {
        soft_pin: true,
        hard_pin: true,
        ..ReplicateConfig::default()
    };
    let stat = || world.state.stat(world.now(), &Tenant::default(), &key("k"));
    assert_eq!(stat(), Err(Refusal::NotFound));
    let started = world.put_with(&client, put, &config).unwrap();
    assert_eq!(stat().unwrap().state, ObjectState::Processing);
    world.commit(&client, &key("k"), &started).unwrap();
    let found = stat().unwrap();
    assert_eq!(found.state, ObjectState::Complete);
    assert_eq!((found.size, found.prefix_index), (5000, 17));
    assert_eq!(found.group.as_deref(), Some("g"));
    assert_eq!(found.replicas[..], started.replicas[..]);
    assert!(found.soft_pinned && found.hard_pinned);
}

#[test]
fn the_pool_s_account_adds_up() {
    let world = World::with(StateConfig::default());
    world.node("a", 64 * GRANULE + 5);
    world.node("b", 32 * GRANULE);
    let client = world.client();
    world.store(&client, &key("k"), granules(3));
    world.put(&client, &key("open"), granules(2)).unwrap();
    let segments = world.state.segments(world.now());
    assert_eq!(segments.len(), 2);
    assert!(segments.iter().all(|s| s.state == SegmentState::Mounted));
    assert_eq!(segments.iter().map(|s| s.objects).sum::<u64>(), 2);
    assert_eq!(
        segments.iter().map(|s| s.used_bytes).sum::<u64>(),
        5 * GRANULE
    );
    // A tool joins as well, but has nothing to move bytes with.
    world.state.join(world.now(), ClientId(7), "a tool", None);
    let status = world.state.status(world.now(), Term(3));
    assert_eq!((status.objects, status.reserved_objects), (1, 1));
    assert_eq!(status.capacity_bytes, 96 * GRANULE);
    assert_eq!(status.used_bytes, 5 * GRANULE);
    assert_eq!(
        (status.segments, status.members, status.term),
        (2, 3, Term(3))
    );
    let gauges = world.state.gauges();
    assert!(gauges.requested_bytes > granules(3) + granules(2));
    assert!(gauges.requested_bytes < status.used_bytes);
}
