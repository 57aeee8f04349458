use layercake_protocol::ids::Capability;

use super::super::slots::PeerSlots;
use super::super::socket;
use super::*;
use crate::memory::{AllocateOptions, HostBuffer, Memory};

const SOON: Duration = Duration::from_secs(20);

fn later() -> Instant {
    Instant::now() + SOON
}

/// A registry that tells its exports, and a peer's socket.
struct Scene {
    registry: Arc<Registry>,
    exports: Arc<Exports>,
    listener: OwnedFd,
    name: String,
}

impl Scene {
    fn new() -> Self {
        let registry = Arc::new(Registry::new());
        let exports = Arc::new(Exports::create(None).expect("created"));
        registry.set_observer(Arc::clone(&exports) as Arc<dyn RegionObserver>);
        let name = format!("layercake-test-{}", EngineId::draw());
        let listener = socket::listen(&name).expect("listens");
        Self {
            registry,
            exports,
            listener,
            name,
        }
    }

    /// A peer with its slots, and its end of the socket.
    fn peer(&self, engine: EngineId) -> (PeerKey, PeerSlots, Channel) {
        let far = Channel::connect(&self.name).expect("connects");
        let near = Channel::accept(&self.listener).expect("accepts");
        let attached = self.exports.attach(engine, Arc::new(near));
        let (key, slots) = attached.expect("attached").expect("there is room");
        (key, PeerSlots::map(slots).expect("mapped"), far)
    }

    fn allocate(&self, access: Access) -> Memory {
        let options = AllocateOptions {
            access,
            ..AllocateOptions::default()
        };
        let entry = self.registry.allocate(4096, options).expect("allocated");
        Memory::new(entry, Arc::clone(&self.registry))
    }

    fn open(&self, key: PeerKey, memory: &Memory) -> Result<Opened, NotOpenedReason> {
        let region = memory.region();
        self.exports
            .open(&self.registry, key, region.region, &region.capability)
    }
}

fn quiet(scene: &Scene, engine: Option<EngineId>) -> bool {
    scene.exports.are_over(&scene.exports.under_way(engine))
}

#[test]
fn a_region_is_opened_to_who_names_its_capability_and_to_nobody_else() {
    let scene = Scene::new();
    let (key, _slots, _far) = scene.peer(EngineId(1));
    let memory = scene.allocate(Access::RemoteReadWrite);
    let opened = scene.open(key, &memory).expect("opened");
    assert_eq!(opened.descriptors.len(), 1);
    let refused = |region, capability: &Capability| {
        let opened = scene.exports.open(&scene.registry, key, region, capability);
        opened.expect_err("refused")
    };
    let right = memory.region().capability;
    assert_eq!(
        refused(memory.id(), &Capability([0; 16])),
        NotOpenedReason::Refused(Refusal::BadCapability)
    );
    assert_eq!(
        refused(RegionId(77), &right),
        NotOpenedReason::Refused(Refusal::UnknownRegion)
    );
    let private = scene.allocate(Access::LocalOnly);
    assert_eq!(
        scene.open(key, &private).expect_err("private"),
        NotOpenedReason::Refused(Refusal::AccessDenied)
    );
    memory.unregister(SOON).expect("nobody copies");
    assert_eq!(
        refused(memory.id(), &right),
        NotOpenedReason::Refused(Refusal::UnknownRegion)
    );
}

#[test]
fn what_may_only_be_read_is_shared_read_only() {
    let scene = Scene::new();
    let (key, _slots, _far) = scene.peer(EngineId(1));
    for (access, writable) in [
        (Access::RemoteRead, false),
        (Access::RemoteWrite, true),
        (Access::RemoteReadWrite, true),
    ] {
        let opened = scene.open(key, &scene.allocate(access)).expect("opened");
        let flags = rustix::fs::fcntl_getfl(&opened.descriptors[0]).expect("a descriptor");
        let mode = flags & rustix::fs::OFlags::RWMODE;
        assert_eq!(mode == rustix::fs::OFlags::RDWR, writable, "{access:?}");
    }
}

#[test]
fn a_full_table_leaves_the_region_to_other_transports() {
    let scene = Scene::new();
    let (key, _slots, _far) = scene.peer(EngineId(1));
    let buffer = || HostBuffer::from(vec![0; 8]);
    let entries: Vec<_> = (0..1 << 16)
        .map(|_| {
            let entry = scene.registry.register(buffer(), Access::RemoteRead);
            entry.expect("registered")
        })
        .collect();
    let memory = scene.allocate(Access::RemoteRead);
    assert_eq!(
        scene.open(key, &memory).expect_err("no room"),
        NotOpenedReason::NotShared
    );
    assert!(scene.registry.withdraw(&entries[5], later()));
    assert!(scene.open(key, &scene.allocate(Access::RemoteRead)).is_ok());
    memory.unregister(SOON).expect("it never was in the table");
}

#[test]
fn withdrawing_waits_for_peers_that_opened_the_region_only() {
    let scene = Scene::new();
    let memory = scene.allocate(Access::RemoteReadWrite);
    let (key, slots, _far) = scene.peer(EngineId(1));
    let (_, bystander, _other_far) = scene.peer(EngineId(2));
    let _busy_elsewhere = bystander.raise();
    let raised = slots.raise();
    let other = scene.allocate(Access::RemoteReadWrite);
    other.unregister(Duration::ZERO).expect("nobody opened it");
    scene.open(key, &memory).expect("opened");
    assert!(memory.unregister(Duration::from_millis(5)).is_err());
    drop(raised);
    memory.unregister(SOON).expect("the copy is over");
}

#[test]
fn asking_again_waits_for_no_copy_that_began_after_the_withdrawal() {
    let scene = Scene::new();
    let memory = scene.allocate(Access::RemoteReadWrite);
    let (key, slots, _far) = scene.peer(EngineId(1));
    scene.open(key, &memory).expect("opened");
    let before = slots.raise();
    assert!(memory.unregister(Duration::ZERO).is_err());
    // The peer copies elsewhere without a gap.
    let elsewhere = slots.raise();
    drop(before);
    memory
        .unregister(Duration::ZERO)
        .expect("the copy is over that had begun before");
    drop(elsewhere);
}

#[test]
fn a_peer_that_hangs_up_is_waited_for_no_longer() {
    let scene = Scene::new();
    let memory = scene.allocate(Access::RemoteReadWrite);
    let engine = EngineId(1);
    let (key, slots, far) = scene.peer(engine);
    scene.open(key, &memory).expect("opened");
    let raised = slots.raise();
    assert!(scene.exports.is_attached(engine));
    assert!(!quiet(&scene, Some(engine)));
    assert!(quiet(&scene, Some(EngineId(2))));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| memory.unregister(SOON));
        let gone = scope.spawn(|| scene.exports.wait_detached(engine, later()));
        drop(far);
        waiting.join().expect("waits").expect("nobody is left");
        assert!(gone.join().expect("waits"));
    });
    assert!(!scene.exports.is_attached(engine));
    assert!(quiet(&scene, None));
    drop(raised);
}

#[test]
fn two_attachments_of_one_engine_count_until_both_are_gone() {
    let scene = Scene::new();
    let engine = EngineId(1);
    let (_, _slots, first) = scene.peer(engine);
    let (key, _more_slots, _second) = scene.peer(engine);
    drop(first);
    assert!(scene.exports.is_attached(engine));
    scene.exports.detach(key);
    assert!(!scene.exports.is_attached(engine));
}

#[test]
fn closing_withdraws_all_and_says_so() {
    let scene = Scene::new();
    let memory = scene.allocate(Access::RemoteReadWrite);
    let (key, slots, far) = scene.peer(EngineId(1));
    scene.open(key, &memory).expect("opened");
    let raised = slots.raise();
    assert!(!scene.exports.close(Instant::now()), "it is still copying");
    assert!(!far.is_open(), "it was told");
    assert!(memory.unregister(Duration::ZERO).is_err());
    drop(raised);
    memory.unregister(SOON).expect("the copy is over");
    assert!(scene.exports.close(Instant::now()));
}
