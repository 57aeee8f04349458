//! Several threads at once: clients that write and read, a node that answers commands, and time.
//!
//! The segments' memory is played by one number per granule, the generation of whoever wrote it last. A
//! writer finds its own number there until it ends its session, taken away or not; a reader finds the number
//! of what it reads for as long as its lease holds; and numbers only grow. Members answer truthfully: a
//! node says that writers are attached, a client that a session is dropped when it has nothing in flight.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use layercake_protocol::command::FenceId;

use crate::harness::*;

const CLIENTS: u64 = 4;
const ROUNDS: u64 = 4000;
const KEYS: u64 = 60;
const NODES: u64 = 3;
const SEGMENT_GRANULES: u64 = 96;
const LEASE: Duration = Duration::from_millis(500);
const DISCARD: Duration = Duration::from_millis(50);

/// The granules of one segment.
type Memory = Arc<Vec<AtomicU64>>;

struct Scene {
    state: State,
    micros: AtomicU64,
    memory: RwLock<HashMap<SegmentId, Memory>>,
    drops: Mutex<BTreeMap<ClientId, Vec<FenceId>>>,
    over: AtomicBool,
    /// Nobody moves time any more.
    stopped: AtomicBool,
}

/// Tells at the end of a thread, a panic too, that it is over.
struct OnEnd<'a>(&'a AtomicBool);

impl Drop for OnEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Repeatable choices of one thread.
struct Choices(u64);

impl Choices {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

impl Scene {
    fn new() -> Self {
        let config = StateConfig {
            lease: LEASE,
            discard_after: DISCARD,
            release_after: Duration::from_secs(1),
            client_ttl: Duration::from_hours(1),
            shards: 8,
            ..StateConfig::default()
        };
        Self {
            state: State::new(config).unwrap(),
            micros: AtomicU64::new(1),
            memory: RwLock::default(),
            drops: Mutex::default(),
            over: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        }
    }

    fn now(&self) -> Moment {
        Moment::from_micros(self.micros.load(Ordering::SeqCst))
    }

    fn mount(&self, node: u64, incarnation: u64) -> SegmentId {
        let client = ClientId(1000 + u128::from(node));
        let id = SegmentId(1 + node + incarnation * NODES);
        let endpoint = endpoint(client.0, 0);
        let granules = (0..SEGMENT_GRANULES).map(|_| AtomicU64::new(0)).collect();
        self.memory.write().unwrap().insert(id, Arc::new(granules));
        self.state
            .join(self.now(), client, "node", Some(endpoint.clone()));
        let segment = Segment {
            id,
            name: format!("n{node}"),
            endpoint,
            region: RegionId(1),
            capability: Capability([0; 16]),
            len: SEGMENT_GRANULES * GRANULE,
            kind: MemoryKind::Host,
        };
        let mounted = self
            .state
            .mount(self.now(), client, segment, Generation::NONE);
        assert_eq!(mounted, Ok(false));
        id
    }

    fn granules_of(
        &self,
        replicas: &[Replica],
        size: u64,
    ) -> Vec<(Memory, std::ops::Range<usize>)> {
        let memory = self.memory.read().unwrap();
        let spans = replicas.iter().map(|replica| {
            let first = replica.offset / GRANULE;
            let end = (replica.payload_offset() + size).div_ceil(GRANULE);
            let span = usize::try_from(first).unwrap()..usize::try_from(end).unwrap();
            (memory[&replica.segment].clone(), span)
        });
        spans.collect()
    }

    fn write(&self, started: &PutStarted, size: u64) {
        let number = started.generation.0;
        for (memory, span) in self.granules_of(&started.replicas, size) {
            for granule in &memory[span] {
                let before = granule.fetch_max(number, Ordering::SeqCst);
                assert!(before < number, "{before} was there before {number}");
            }
        }
    }

    fn holds(&self, replicas: &[Replica], size: u64, generation: Generation) -> bool {
        let mut spans = self.granules_of(replicas, size).into_iter();
        spans.all(|(memory, span)| {
            let mut granules = memory[span].iter();
            granules.all(|granule| granule.load(Ordering::SeqCst) == generation.0)
        })
    }

    /// Tells that this client, with nothing in flight, has dropped what was taken from it.
    fn answer_drops(&self, client: ClientId) {
        let ids = self.drops.lock().unwrap().remove(&client);
        for id in ids.unwrap_or_default() {
            self.state.fence_done(self.now(), client, id, false);
        }
    }

    fn run_client(&self, number: u64) {
        let client = ClientId(u128::from(number));
        let caller = Caller {
            client,
            tenant: Tenant::default(),
            location: Some(Location::from(&endpoint(client.0, 0))),
        };
        self.state.join(self.now(), client, "client", None);
        let mut choices = Choices(number);
        for _ in 0..ROUNDS {
            match choices.below(8) {
                0..3 => self.put(&caller, &mut choices),
                3..6 => self.get(&caller, &mut choices),
                6 => {
                    let first = choices.below(KEYS);
                    let keys: Vec<_> = (first..KEYS).map(name).collect();
                    let query = Exists {
                        probe: Probe::Readable,
                        keys: &keys,
                        recency: Recency::default(),
                        stop_at_first_miss: true,
                        unreachable: &[],
                        peek: choices.below(2) == 0,
                    };
                    self.state.exists(self.now(), &caller, &query);
                }
                _ => {
                    let keys = [name(choices.below(KEYS))];
                    let force = choices.below(4) == 0;
                    self.state.remove(self.now(), &caller.tenant, &keys, force);
                }
            }
            self.answer_drops(client);
        }
        self.state.leave(self.now(), client);
    }

    fn put(&self, caller: &Caller, choices: &mut Choices) {
        let first = choices.below(KEYS);
        let size = granules(1 + choices.below(9));
        let puts: Vec<_> = (first..KEYS.min(first + 1 + choices.below(4)))
            .map(|number| PutStart {
                group: (number % 5 == 0).then(|| format!("g{}", number / 10)),
                ..PutStart::new(name(number), size)
            })
            .collect();
        let keys: Vec<_> = puts.iter().map(|put| put.key.clone()).collect();
        let config = ReplicateConfig {
            replicas: 1 + u32::from(choices.below(4) == 0),
            soft_pin: choices.below(8) == 0,
            soft_pin_ttl: Some(Duration::from_millis(300)),
            ..ReplicateConfig::default()
        };
        let batch = PutBatch {
            puts,
            config: &config,
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: choices.below(3) == 0,
        };
        let (answers, _) = self.state.put_start(self.now(), caller, batch);
        let started: Vec<_> = keys
            .iter()
            .zip(answers.into_iter().filter_map(Result::ok))
            .collect();
        // Keys and answers may not belong together where some were refused: the numbers do.
        for (_, started) in &started {
            self.write(started, size);
        }
        if choices.below(6) == 0 {
            std::thread::yield_now();
        }
        if choices.below(80) == 0 {
            self.dawdle();
        }
        for (_, started) in &started {
            let replicas = &started.replicas;
            let own = self.holds(replicas, size, started.generation);
            assert!(
                own,
                "somebody else wrote where {} writes",
                started.generation
            );
        }
        let commit = choices.below(5) > 0;
        for (_, started) in started {
            for key in &keys {
                let object = [object(key, started.generation)];
                let _ = if commit {
                    self.state
                        .put_end(self.now(), caller, &object, self.state.draw_epoch())
                } else {
                    self.state.put_revoke(self.now(), caller, &object)
                };
            }
        }
    }

    /// Keeps a put open until others may take its keys.
    fn dawdle(&self) {
        let until = self.now() + DISCARD + DISCARD / 5;
        while self.now() < until && !self.stopped.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }

    fn get(&self, caller: &Caller, choices: &mut Choices) {
        let keys = [name(choices.below(KEYS))];
        let query = GetStart {
            keys: &keys,
            recency: Recency::default(),
            session: choices.below(4) > 0,
            unreachable: &[],
        };
        let until = self.now() + LEASE;
        let (answers, _) = self.state.get_start(self.now(), caller, &query);
        let Ok(got) = &answers[0] else { return };
        for _ in 0..3 {
            let same = self.holds(&got.replicas, got.size, got.generation());
            let in_time = self.now() < until;
            assert!(
                same || !in_time,
                "{} was overwritten under a lease",
                got.generation()
            );
        }
        let object = [object(&keys[0], got.generation())];
        if choices.below(3) == 0 {
            let until = self.now() + LEASE;
            let renewed = self.state.renew(self.now(), caller, &object);
            let same = self.holds(&got.replicas, got.size, got.generation());
            assert!(renewed[0].is_err() || same || self.now() >= until);
        }
        if choices.below(4) > 0 {
            self.state.get_end(self.now(), caller, &object);
        }
    }

    /// Moves time, carries commands out, and lets nodes come and go.
    fn run_nodes(&self) {
        let _end = OnEnd(&self.stopped);
        let mut choices = Choices(99);
        let mut incarnation = 0;
        let mut mounted: Vec<_> = (0..NODES).map(|node| self.mount(node, 0)).collect();
        while !self.over.load(Ordering::SeqCst) {
            self.micros
                .fetch_add(choices.below(20_000), Ordering::SeqCst);
            self.state.tick(self.now());
            for event in self.state.take_events() {
                match event {
                    Event::Fence { to, fence } => {
                        self.state.fence_done(self.now(), to, fence.id, true);
                    }
                    Event::DropSessions { to, drop } => {
                        let mut drops = self.drops.lock().unwrap();
                        drops.entry(to).or_default().push(drop.id);
                    }
                    _ => {}
                }
            }
            if choices.below(60) == 0 {
                incarnation += 1;
                let node = choices.below(NODES);
                let slot = &mut mounted[usize::try_from(node).unwrap()];
                let client = ClientId(1000 + u128::from(node));
                let drain = choices.below(2) == 0;
                let _ = self.state.unmount(self.now(), client, *slot, drain);
                *slot = self.mount(node, incarnation);
            }
            self.state.gauges();
            std::thread::yield_now();
        }
    }
}

fn name(number: u64) -> ObjectKey {
    key(&format!("k{number}"))
}

#[test]
fn nobody_s_memory_is_overwritten_and_nothing_is_left_behind() {
    let scene = Scene::new();
    std::thread::scope(|scope| {
        let nodes = scope.spawn(|| scene.run_nodes());
        let clients: Vec<_> = (1..=CLIENTS)
            .map(|number| {
                scope.spawn({
                    let scene = &scene;
                    move || scene.run_client(number)
                })
            })
            .collect();
        let ends: Vec<_> = clients
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        scene.over.store(true, Ordering::SeqCst);
        nodes.join().unwrap();
        ends.into_iter().for_each(Result::unwrap);
    });
    let state = &scene.state;
    let later = scene.now() + Duration::from_secs(10);
    state.remove_matching(later, &Tenant::default(), &|_| true, true);
    state.tick(later);
    let gauges = state.gauges();
    assert_eq!(
        (gauges.objects, gauges.put_sessions, gauges.get_sessions),
        (0, 0, 0)
    );
    assert_eq!(
        (gauges.fences, gauges.removed_leased, gauges.soft_pinned),
        (0, 0, 0)
    );
    assert_eq!((gauges.used_bytes, gauges.quarantined_bytes), (0, 0));
    let counters = state.counters();
    let objects = counters.puts_committed;
    let gone = [
        counters.evicted(),
        counters.removed,
        counters.replaced,
        counters.lost,
        counters.unmounted,
    ];
    assert_eq!(
        gone.iter().map(|amount| amount.objects).sum::<u64>(),
        objects
    );
    assert!(objects > 1000 && counters.discarded_puts > 10 && counters.evicted().objects > 100);
}

/// Whoever holds a lease on one member of a group finds all others there.
#[test]
fn a_group_goes_whole_or_not_at_all_while_members_are_read() {
    const MEMBERS: u64 = 8;
    const GROUP_ROUNDS: u64 = 500;
    let world = World::with(StateConfig {
        shards: 8,
        ..StateConfig::default()
    });
    world.node("n", 16 * GRANULE);
    let (writer, reader) = (world.client(), world.client());
    let now = world.now();
    let state = &world.state;
    // Odd while the group of that round may be looked at.
    let phase = AtomicU64::new(0);
    let (read_whole, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let members: Vec<_> = (0..MEMBERS).map(name).collect();
    let store = |puts: Vec<PutStart>| {
        let keys: Vec<_> = puts.iter().map(|put| put.key.clone()).collect();
        let config = ReplicateConfig::default();
        let batch = PutBatch {
            puts,
            config: &config,
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: false,
        };
        let (answers, _) = state.put_start(now, &writer, batch);
        for (key, started) in keys.iter().zip(answers) {
            if let Ok(started) = started {
                let objects = [object(key, started.generation)];
                assert_eq!(
                    state.put_end(now, &writer, &objects, state.draw_epoch()),
                    [Ok(())]
                );
            }
        }
    };
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let _end = OnEnd(&over);
            let mut choices = Choices(1);
            while !over.load(Ordering::SeqCst) {
                let before = phase.load(Ordering::SeqCst);
                if before.is_multiple_of(2) {
                    std::thread::yield_now();
                    continue;
                }
                let keys = [name(choices.below(MEMBERS))];
                let query = GetStart {
                    keys: &keys,
                    recency: Recency::default(),
                    session: true,
                    unreachable: &[],
                };
                let (answers, _) = state.get_start(now, &reader, &query);
                let Ok(got) = &answers[0] else { continue };
                let query = Exists {
                    probe: Probe::Readable,
                    keys: &members,
                    recency: Recency::default(),
                    stop_at_first_miss: true,
                    unreachable: &[],
                    peek: true,
                };
                // While the evictor looks at a group its members are absent; they come back.
                let patience = Instant::now() + Duration::from_mins(1);
                loop {
                    let (found, _) = state.exists(now, &reader, &query);
                    let miss = found.last().is_some_and(|p| *p != Presence::Complete);
                    if !miss || phase.load(Ordering::SeqCst) != before {
                        break;
                    }
                    let lost = Instant::now() > patience;
                    assert!(!lost, "a group lost some of its members");
                    std::thread::yield_now();
                }
                read_whole.fetch_add(1, Ordering::SeqCst);
                let objects = [object(&keys[0], got.generation())];
                state.get_end(now, &reader, &objects);
            }
        });
        let enough = || read_whole.load(Ordering::SeqCst) > 0;
        let mut rounds = 0..;
        while !over.load(Ordering::SeqCst) {
            let round = rounds.next().expect("endless");
            if round >= GROUP_ROUNDS && enough() {
                break;
            }
            state.remove_matching(now, &Tenant::default(), &|_| true, true);
            let grouped = members.iter().map(|key| PutStart {
                group: Some(format!("g{round}")),
                ..PutStart::new(key.clone(), granules(1))
            });
            store(grouped.collect());
            phase.fetch_add(1, Ordering::SeqCst);
            for n in 0..24 {
                store(vec![PutStart::new(key(&format!("x{n}")), granules(1))]);
            }
            phase.fetch_add(1, Ordering::SeqCst);
        }
        over.store(true, Ordering::SeqCst);
        reading.join().unwrap();
    });
}
