//! Memory of writers that never finished: when it is used again.

use layercake_protocol::command::{DropSessions, Fence, FenceId};

use crate::harness::*;

struct Scene {
    world: World,
    node: Node,
    writer: Caller,
    /// Whoever took the key over.
    successor: ClientId,
    key: ObjectKey,
    lost: PutStarted,
    fence: Fence,
    drop: DropSessions,
}

/// The commands that went out, with their addressees.
type Commands = (Vec<(ClientId, Fence)>, Vec<(ClientId, DropSessions)>);

fn commands(world: &World) -> Commands {
    let (mut fences, mut drops) = (Vec::new(), Vec::new());
    for event in world.state.take_events() {
        match event {
            Event::Fence { to, fence } => fences.push((to, fence)),
            Event::DropSessions { to, drop } => drops.push((to, drop)),
            _ => {}
        }
    }
    (fences, drops)
}

/// A reservation was taken over; the commands are out.
fn scene() -> Scene {
    let world = World::with(StateConfig::default());
    let node = world.node("n", 64 * GRANULE);
    let (writer, other) = (world.client(), world.client());
    let key = key("k");
    let lost = world.put(&writer, &key, granules(8)).unwrap();
    world.pass(30 * SECOND);
    world.put(&other, &key, granules(8)).unwrap();
    let (mut fences, mut drops) = commands(&world);
    let (to, fence) = fences.pop().unwrap();
    assert_eq!(to, node.client);
    let (to, drop) = drops.pop().unwrap();
    assert_eq!(to, writer.client);
    assert!(fences.is_empty() && drops.is_empty());
    Scene {
        world,
        node,
        writer,
        successor: other.client,
        key,
        lost,
        fence,
        drop,
    }
}

impl Scene {
    fn node_done(&self, attached: bool) {
        self.answer(self.node.client, self.fence.id, attached);
    }

    fn writer_done(&self) {
        self.answer(self.writer.client, self.drop.id, false);
    }

    fn answer(&self, client: ClientId, id: FenceId, attached: bool) {
        let world = &self.world;
        world.state.fence_done(world.now(), client, id, attached);
    }

    fn is_held(&self) -> bool {
        let held = self.world.quarantined();
        assert!([0, 8 * GRANULE].contains(&held));
        assert_eq!(held > 0, self.world.state.gauges().fences > 0);
        held > 0
    }
}

#[test]
fn the_commands_name_what_is_meant() {
    let scene = scene();
    let replica = scene.lost.replicas[0];
    let fence = &scene.fence;
    assert_eq!(fence.segment, replica.segment);
    assert_eq!(fence.writer, scene.writer.client);
    assert_eq!(fence.engine, scene.writer.location.map(|l| l.engine));
    let [place] = fence.places[..] else {
        panic!("one place expected, not {:?}", fence.places);
    };
    assert_eq!(place.offset, replica.offset);
    assert_eq!(place.len, u64::from(replica.header_len) + granules(8));
    assert!(
        place.generation > scene.lost.generation,
        "the old writer is shut out"
    );
    assert_eq!(
        scene.drop.objects,
        [object(&scene.key, scene.lost.generation)]
    );
    // Whoever gets the place next may write: its number is above the barrier.
    let next = scene.world.store(&scene.writer, &key("next"), 10);
    assert!(next.generation > place.generation);
}

#[test]
fn the_node_frees_it_when_the_writer_is_not_attached() {
    let scene = scene();
    assert!(scene.is_held());
    scene.node_done(true);
    assert!(scene.is_held(), "a copy of the writer is under way");
    scene.node_done(false);
    assert!(!scene.is_held());
    scene.node_done(false);
    scene.writer_done();
}

#[test]
fn node_and_writer_together_free_it_in_either_order() {
    let first = scene();
    first.node_done(true);
    first.writer_done();
    assert!(!first.is_held());
    let second = scene();
    second.writer_done();
    assert!(
        second.is_held(),
        "writes through the owner are not shut out yet"
    );
    second.node_done(true);
    assert!(!second.is_held());
}

#[test]
fn answers_of_others_free_nothing() {
    let scene = scene();
    scene.answer(scene.writer.client, scene.fence.id, false);
    scene.answer(scene.node.client, scene.drop.id, false);
    scene.answer(ClientId(99), scene.fence.id, false);
    scene.answer(scene.node.client, 12345, false);
    assert!(scene.is_held());
    let other = scene.world.client();
    let forged = scene.world.revoke(&other, &scene.key, &scene.lost);
    assert_eq!(forged, Err(Refusal::Superseded));
    assert!(scene.is_held());
}

#[test]
fn the_writer_s_revoke_or_leave_frees_it() {
    let revoked = scene();
    let answer = revoked
        .world
        .revoke(&revoked.writer, &revoked.key, &revoked.lost);
    assert_eq!(answer, Err(Refusal::Superseded));
    assert!(!revoked.is_held());
    let left = scene();
    left.world.state.leave(left.world.now(), left.writer.client);
    assert!(!left.is_held());
    // It is never too late to say so.
    let dead = scene();
    for _ in 0..11 {
        dead.world.skip(SECOND);
        for alive in [dead.node.client, dead.successor] {
            dead.world.state.heartbeat(dead.world.now(), alive, &[]);
        }
        dead.world.tick();
    }
    assert!(dead.is_held());
    dead.world.state.leave(dead.world.now(), dead.writer.client);
    assert!(!dead.is_held());
}

/// A reservation that its writer gave up without knowing what became of a write.
fn in_doubt() -> (World, Node, Caller, PutStarted, Fence) {
    let world = World::with(StateConfig::default());
    let node = world.node("n", 64 * GRANULE);
    let writer = world.client();
    let lost = world.put(&writer, &key("k"), granules(8)).unwrap();
    let given_up =
        world
            .state
            .put_abandon(world.now(), &writer, &[object(&key("k"), lost.generation)]);
    assert_eq!(given_up, [Ok(())]);
    let (mut fences, drops) = commands(&world);
    assert_eq!(
        (fences.len(), drops),
        (1, vec![]),
        "the writer is not asked"
    );
    let (to, fence) = fences.pop().unwrap();
    assert_eq!(to, node.client);
    (world, node, writer, lost, fence)
}

// contract: session-14
#[test]
fn what_a_writer_gives_up_in_doubt_waits_for_the_node_alone() {
    let (world, node, writer, lost, fence) = in_doubt();
    let done = |attached| {
        world
            .state
            .fence_done(world.now(), node.client, fence.id, attached);
    };
    let held = || world.quarantined();
    assert_eq!(held(), 8 * GRANULE);
    // The key is free, its memory is not.
    let next = world.put(&writer, &key("k"), granules(8)).unwrap();
    assert_ne!(next.replicas[0].offset, lost.replicas[0].offset);
    // Whatever the writer says now, it can't know.
    assert_eq!(
        world.revoke(&writer, &key("k"), &lost),
        Err(Refusal::Superseded)
    );
    assert_eq!(held(), 8 * GRANULE);
    done(true);
    assert_eq!(held(), 8 * GRANULE, "a frame is under way at the owner");
    world.state.leave(world.now(), writer.client);
    assert_eq!(held(), 8 * GRANULE);
    done(false);
    assert_eq!(held(), 0);
}

// contract: session-14
#[test]
fn a_dropped_session_in_doubt_waits_for_the_node_alone() {
    type Doubt = fn(&Scene);
    let by_answer: Doubt = |scene| scene.answer(scene.writer.client, scene.drop.id, true);
    let by_revoke: Doubt = |scene| {
        let (world, lost) = (&scene.world, object(&scene.key, scene.lost.generation));
        let given_up = world.state.put_abandon(world.now(), &scene.writer, &[lost]);
        assert_eq!(given_up, [Err(Refusal::Superseded)]);
    };
    for doubt in [by_answer, by_revoke] {
        for node_first in [false, true] {
            let scene = scene();
            if node_first {
                scene.node_done(true);
            }
            doubt(&scene);
            scene.node_done(true);
            scene.writer_done();
            let revoked = scene.world.revoke(&scene.writer, &scene.key, &scene.lost);
            assert_eq!(revoked, Err(Refusal::Superseded));
            scene
                .world
                .state
                .leave(scene.world.now(), scene.writer.client);
            assert!(scene.is_held());
            scene.node_done(false);
            assert!(!scene.is_held());
        }
    }
}

// The number of a fence in doubt is no command's: nobody can answer for the writer.
#[test]
fn nobody_answers_for_a_writer_in_doubt() {
    let (world, node, writer, _, fence) = in_doubt();
    for client in [writer.client, node.client] {
        for id in (0..fence.id + 8).filter(|id| *id != fence.id) {
            world.state.fence_done(world.now(), client, id, false);
        }
    }
    assert_eq!(world.quarantined(), 8 * GRANULE);
}

#[test]
fn commands_are_sent_again_until_they_are_answered() {
    let scene = scene();
    let world = &scene.world;
    world.tick();
    assert_eq!(commands(world), (vec![], vec![]));
    world.pass(10 * SECOND);
    world.tick();
    let fence = (scene.node.client, scene.fence.clone());
    let drop = (scene.writer.client, scene.drop.clone());
    assert_eq!(commands(world), (vec![fence.clone()], vec![drop.clone()]));
    // A member that connects anew is told at once.
    let endpoint = scene.node.segment.endpoint.clone();
    let joined = world
        .state
        .join(world.now(), scene.node.client, "n", Some(endpoint));
    assert!(!joined.fresh);
    assert_eq!(commands(world), (vec![fence], vec![]));
    scene.node_done(true);
    world.pass(10 * SECOND);
    world.tick();
    assert_eq!(
        commands(world),
        (vec![], vec![drop]),
        "only what is not answered"
    );
    scene.writer_done();
    world.pass(100 * SECOND);
    world.tick();
    assert_eq!(commands(world), (vec![], vec![]));
}

#[test]
fn a_dead_writer_is_fenced_everywhere_at_once() {
    let world = World::with(StateConfig::default());
    let nodes: Vec<_> = (0..3)
        .map(|n| world.node(&format!("n{n}"), 256 * GRANULE))
        .collect();
    let writer = world.client();
    let two = ReplicateConfig {
        replicas: 2,
        ..ReplicateConfig::default()
    };
    for key in keys("k", 0..30) {
        let put = PutStart::new(key, granules(2));
        world.put_with(&writer, put, &two).unwrap();
    }
    for _ in 0..10 {
        world.skip(SECOND);
        for node in &nodes {
            world.state.heartbeat(world.now(), node.client, &[]);
        }
    }
    world.tick();
    let (fences, drops) = commands(&world);
    assert_eq!(fences.len(), 3, "one command a segment");
    let places: usize = fences.iter().map(|(_, fence)| fence.places.len()).sum();
    assert_eq!((places, drops.len()), (60, 1));
    assert_eq!(drops[0].1.objects.len(), 30);
    assert_eq!(world.quarantined(), world.used());
    assert_eq!(world.used(), 120 * GRANULE);
    for (to, fence) in fences {
        world.state.fence_done(world.now(), to, fence.id, false);
    }
    assert_eq!(world.used(), 0);
    assert_eq!(world.count(&keys("k", 0..30)), 0);
}

#[test]
fn many_sessions_make_commands_that_fit_a_message() {
    let world = World::with(StateConfig::default());
    let node = world.node("n", 8192 * GRANULE);
    let writer = world.client();
    let puts = keys("k", 0..5000)
        .into_iter()
        .map(|key| PutStart::new(key, granules(1)))
        .collect();
    let config = ReplicateConfig::default();
    let answers = world.put_batch(&writer, puts, &config, Recency::default());
    assert!(answers.iter().all(Result::is_ok));
    for _ in 0..10 {
        world.skip(SECOND);
        world.state.heartbeat(world.now(), node.client, &[]);
    }
    world.tick();
    let (fences, drops) = commands(&world);
    assert!(fences.iter().all(|(_, fence)| fence.places.len() <= 1024));
    assert!(drops.iter().all(|(_, drop)| drop.objects.len() <= 1024));
    let places: usize = fences.iter().map(|(_, fence)| fence.places.len()).sum();
    assert_eq!(places, 5000);
    for (to, fence) in fences {
        world.state.fence_done(world.now(), to, fence.id, false);
    }
    assert_eq!(world.used(), 0);
}

#[test]
fn a_segment_that_goes_takes_its_fences_along() {
    let scene = scene();
    scene
        .world
        .state
        .leave(scene.world.now(), scene.node.client);
    let gauges = scene.world.state.gauges();
    assert_eq!(
        (gauges.fences, gauges.segments, gauges.used_bytes),
        (0, 0, 0)
    );
    scene.node_done(false);
    scene.writer_done();
}
