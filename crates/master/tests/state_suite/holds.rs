//! Places in advance: what is committed into them, and how they end.

use layercake_protocol::command::FenceId;

use crate::harness::*;

/// Granules of a segment: it may be held to a 64th, which is two holds.
pub(crate) const NODE: u64 = 128 * 64;
/// Of a hold.
pub(crate) const HOLD: u64 = 64;

pub(crate) fn slot(hold: &Hold, granule: u64, key: &ObjectKey, granules: u64) -> SlotPut {
    SlotPut {
        put: PutStart::new(key.clone(), crate::harness::granules(granules)),
        generation: hold.slot(granule),
    }
}

impl World {
    pub(crate) fn hold(&self, caller: &Caller) -> Option<Hold> {
        self.state.grant_hold(self.now(), caller, &[])
    }

    pub(crate) fn put_slot(&self, caller: &Caller, slot: &SlotPut) -> Result<(), Refusal> {
        let slots = std::slice::from_ref(slot);
        let (mut answers, _) = self
            .state
            .put_slots(self.now(), caller, slots, Recency::default());
        answers.remove(0)
    }

    pub(crate) fn give_back(&self, caller: &Caller, hold: &Hold) {
        let object = ObjectRef::of_hold(hold.generation);
        self.state.put_revoke(self.now(), caller, &[object]);
    }
}

pub(crate) fn scene() -> (World, Node, Caller) {
    let world = World::with(StateConfig::default());
    let node = world.node("n", NODE * GRANULE);
    let caller = world.client();
    (world, node, caller)
}

/// The commands that went out.
fn commands(world: &World) -> (Vec<FenceId>, Vec<(ClientId, FenceId)>) {
    let (mut fences, mut drops) = (Vec::new(), Vec::new());
    for event in world.state.take_events() {
        match event {
            Event::Fence { fence, .. } => fences.push(fence.id),
            Event::DropSessions { to, drop } => drops.push((to, drop.id)),
            _ => {}
        }
    }
    (fences, drops)
}

#[test]
fn an_object_in_a_slot_is_an_object_like_any_other() {
    let (world, _, caller) = scene();
    let hold = world.hold(&caller).unwrap();
    assert_eq!(hold.len, HOLD * GRANULE);
    assert_eq!(world.used(), HOLD * GRANULE);
    assert_eq!(world.state.gauges().hold_bytes, HOLD * GRANULE);
    let (a, b) = (key("a"), key("b"));
    assert_eq!(world.put_slot(&caller, &slot(&hold, 0, &a, 2)), Ok(()));
    assert_eq!(world.put_slot(&caller, &slot(&hold, 2, &b, 3)), Ok(()));
    assert_eq!(world.used(), HOLD * GRANULE);
    let gauges = world.state.gauges();
    assert_eq!(gauges.hold_bytes, (HOLD - 5) * GRANULE);
    assert_eq!((gauges.objects, gauges.put_sessions), (2, 0));
    let counters = world.state.counters();
    assert_eq!((counters.puts_started, counters.puts_committed), (2, 2));
    assert_eq!(world.state.segments(world.now())[0].objects, 2);
    let got = world.read(&caller, &b).unwrap();
    let place = got.replicas[0];
    assert_eq!(place.offset, hold.offset + 2 * GRANULE);
    assert_eq!(place.generation, hold.slot(2));
    assert_eq!(got.size, granules(3));
    world.give_back(&caller, &hold);
    assert_eq!(world.used(), 5 * GRANULE);
    world.pass(60 * SECOND);
    for name in [&a, &b] {
        assert_eq!(world.remove(name, false), Ok(()));
    }
    let gauges = world.state.gauges();
    assert_eq!((gauges.used_bytes, gauges.requested_bytes), (0, 0));
    assert_eq!(world.state.payloads()[0].1, 0);
}

#[test]
fn the_first_of_two_has_the_key_and_a_slot_is_used_once() {
    let (world, _, caller) = scene();
    let other = world.client();
    let (mine, theirs) = (world.hold(&caller).unwrap(), world.hold(&other).unwrap());
    let k = key("k");
    let first = slot(&mine, 0, &k, 2);
    assert_eq!(world.put_slot(&caller, &first), Ok(()));
    let second = slot(&theirs, 0, &k, 2);
    assert_eq!(world.put_slot(&other, &second), Err(Refusal::AlreadyExists));
    assert_eq!(world.put_slot(&caller, &first), Ok(()), "it is repeated");
    assert_eq!(world.state.counters().puts_committed, 1);
    // An object that is gone does not come back by a repetition, nor does its slot take another.
    assert_eq!(world.remove(&k, false), Ok(()));
    for again in [
        first,
        slot(&mine, 1, &key("x"), 1),
        slot(&mine, 0, &key("x"), 1),
    ] {
        assert_eq!(
            world.put_slot(&caller, &again),
            Err(Refusal::Superseded),
            "{again:?}"
        );
        assert_eq!(world.presence(&again.put.key), Presence::Absent);
    }
}

#[test]
fn only_its_owner_commits_into_a_hold_and_only_inside() {
    let (world, _, caller) = scene();
    let hold = world.hold(&caller).unwrap();
    let stranger = world.client();
    let outside = [
        slot(&hold, HOLD, &key("k"), 1),
        slot(&hold, HOLD - 1, &key("k"), 2),
        slot(&hold, 0, &key("k"), HOLD + 1),
        SlotPut {
            generation: hold.generation,
            ..slot(&hold, 0, &key("k"), 1)
        },
    ];
    for bad in outside {
        assert_eq!(world.put_slot(&caller, &bad), Err(Refusal::Superseded));
    }
    let good = slot(&hold, HOLD - 1, &key("k"), 1);
    assert_eq!(world.put_slot(&stranger, &good), Err(Refusal::Superseded));
    assert_eq!(
        world.put_slot(&nobody(), &good),
        Err(Refusal::UnknownMember)
    );
    assert_eq!(world.presence(&key("k")), Presence::Absent);
    assert_eq!(world.put_slot(&caller, &good), Ok(()));
}

#[test]
fn recency_is_that_of_the_commit() {
    let (world, _, caller) = scene();
    let hold = world.hold(&caller).unwrap();
    world.store(&caller, &key("between"), 100);
    let before = world.epoch();
    assert_eq!(
        world.put_slot(&caller, &slot(&hold, 0, &key("k"), 1)),
        Ok(())
    );
    let stat = |name| {
        world
            .state
            .stat(world.now(), &Tenant::default(), &key(name))
    };
    assert!(stat("k").unwrap().epoch > before && hold.epoch < before);
    assert!(stat("between").unwrap().epoch < before);
}

#[test]
fn a_client_has_two_and_a_segment_is_held_to_a_small_part() {
    let (world, _, caller) = scene();
    let first = world.hold(&caller).unwrap();
    let second = world.hold(&caller).unwrap();
    assert_eq!(world.hold(&caller), None);
    assert_eq!(world.hold(&world.client()), None, "the segment's part");
    world.node("m", NODE * GRANULE);
    assert_eq!(world.hold(&caller), None);
    assert!(world.hold(&world.client()).is_some());
    world.give_back(&caller, &first);
    assert!(world.hold(&caller).is_some());
    assert!(second.generation > first.slot(HOLD - 1));
    assert_eq!(world.hold(&nobody()), None);
}

#[test]
fn none_is_granted_where_room_is_short() {
    let (world, _, caller) = scene();
    let most = NODE * GRANULE / 10 * 9;
    world.store(&caller, &key("big"), most);
    world.store(&caller, &key("more"), 100);
    let used = world.used();
    assert_eq!(world.hold(&caller), None);
    assert_eq!(world.used(), used);
}

/// What ends a hold that its client may be writing into, and whether the client's word comes with it.
#[test]
fn a_hold_that_is_called_back_is_fenced_and_then_free() {
    type End = fn(&World, &Node, &Caller);
    let ends: [End; 4] = [
        |world, node, _| {
            let progress = world
                .state
                .unmount(world.now(), node.client, node.segment.id, true);
            assert_eq!(progress, Ok(UnmountProgress::Draining { pieces: 2 }));
        },
        |world, _, _| {
            world.pass(31 * SECOND);
            world.tick();
        },
        |world, node, _| {
            world.skip(11 * SECOND);
            world.state.heartbeat(world.now(), node.client, &[]);
            world.tick();
        },
        |world, _, other| {
            // Room for it is there only without the hold.
            let rest = (NODE - HOLD) * GRANULE + 1;
            let put = world.put(other, &key("big"), rest);
            assert!(matches!(put, Err(Refusal::NoSpace { .. })));
            assert!(world.state.awaits_holds());
        },
    ];
    for (index, end) in ends.into_iter().enumerate() {
        for attached in [false, true] {
            let (world, node, caller) = scene();
            let other = world.client();
            let hold = world.hold(&caller).unwrap();
            let late = slot(&hold, 0, &key("late"), 1);
            let early = slot(&hold, 7, &key("early"), 1);
            assert_eq!(world.put_slot(&caller, &early), Ok(()));
            let bytes = world.used();
            end(&world, &node, &other);
            let refused = world.put_slot(&caller, &late);
            assert!(refused.is_err(), "{index}: {refused:?}");
            let (fences, drops) = commands(&world);
            assert_eq!((fences.len(), drops.len()), (1, 1), "{index}");
            assert_eq!(drops[0].0, caller.client);
            let kept = world.quarantined();
            assert_eq!(kept, (HOLD - 1) * GRANULE, "{index}");
            assert_eq!(world.state.gauges().hold_bytes, 0);
            world
                .state
                .fence_done(world.now(), node.client, fences[0], attached);
            assert_eq!(world.quarantined() > 0, attached, "{index}");
            world
                .state
                .fence_done(world.now(), caller.client, drops[0].1, false);
            assert_eq!(world.quarantined(), 0, "{index}");
            assert!(world.used() < bytes && !world.state.awaits_holds());
        }
    }
}

#[test]
fn a_client_that_comes_back_as_a_new_member_has_none() {
    let (world, _, caller) = scene();
    let hold = world.hold(&caller).unwrap();
    // Silent for too long, and back before anybody looks.
    world.state.leave(world.now(), nobody().client);
    world.skip(11 * SECOND);
    world.tick();
    world.state.join(world.now(), caller.client, "again", None);
    let late = slot(&hold, 0, &key("late"), 1);
    assert_eq!(world.put_slot(&caller, &late), Err(Refusal::Superseded));
}

#[test]
fn a_client_that_leaves_frees_its_holds_unless_it_is_in_doubt() {
    for in_doubt in [false, true] {
        let (world, node, caller) = scene();
        let hold = world.hold(&caller).unwrap();
        if in_doubt {
            let object = ObjectRef::of_hold(hold.generation);
            world.state.put_abandon(world.now(), &caller, &[object]);
        }
        world.state.leave(world.now(), caller.client);
        assert_eq!(world.used() > 0, in_doubt);
        let (fences, drops) = commands(&world);
        assert!(drops.is_empty(), "its word does not count");
        for fence in fences {
            world
                .state
                .fence_done(world.now(), node.client, fence, true);
            assert!(world.used() > 0);
            world
                .state
                .fence_done(world.now(), node.client, fence, false);
        }
        assert_eq!(world.used(), 0);
    }
}

#[test]
fn a_segment_that_goes_takes_its_holds_along() {
    let (world, node, caller) = scene();
    let hold = world.hold(&caller).unwrap();
    world.state.leave(world.now(), node.client);
    let late = slot(&hold, 0, &key("late"), 1);
    assert!(world.put_slot(&caller, &late).is_err());
    assert_eq!(world.state.gauges().holds, 0);
    world.node("m", NODE * GRANULE);
    assert!(world.hold(&caller).is_some() && world.hold(&caller).is_some());
}
