//! Random histories of one thread against a simple model.
//!
//! The model keeps every reservation ever made and who may rely on its places. It does not foretell where
//! objects are placed or what is evicted, but checks both: a new place must be free by its account, what was
//! evicted must have been free to go, and the bytes in use must be those that it can explain.

mod op;
mod steps;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::time::Duration;

use layercake_protocol::command::FenceId;
use proptest::prelude::*;

use self::op::{Op, op};
use crate::harness::*;

const LEASE: Duration = Duration::from_secs(2);
const DISCARD: Duration = Duration::from_secs(3);
const RELEASE: Duration = Duration::from_secs(10);
const KEYS: usize = 5;
const CLIENTS: usize = 3;
const NODES: usize = 2;
const NODE_GRANULES: u64 = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    Complete,
    /// Nameless, kept for its readers.
    Retired,
    /// Taken from its writer, who may still be writing.
    Suspect,
    Gone,
}

#[derive(Clone, Debug)]
struct Version {
    key: usize,
    writer: ClientId,
    size: u64,
    granules: u64,
    hard: bool,
    since: Moment,
    phase: Phase,
    places: Vec<Replica>,
    /// Replicas that it was given.
    charged: u64,
    readers: HashMap<ClientId, Moment>,
    lease: Moment,
    first_probe: Option<Moment>,
    /// Who alone made the run of probes.
    prober: Option<ClientId>,
}

impl Version {
    fn lease_end(&self) -> Moment {
        let readers = self.readers.values().copied();
        readers.fold(self.lease, Moment::max)
    }

    fn open_session(&mut self, now: Moment, client: ClientId) {
        if self.first_probe.take().is_some() && self.prober == Some(client) {
            self.lease = Moment::START;
        }
        self.readers.insert(client, now + LEASE);
    }

    fn spans(&self) -> impl Iterator<Item = (SegmentId, Range<u64>)> {
        self.places.iter().map(|place| {
            let first = place.offset / GRANULE;
            (place.segment, first..first + self.granules)
        })
    }
}

struct ModelFence {
    node: ClientId,
    segment: SegmentId,
    generations: BTreeSet<u64>,
    raised: bool,
}

struct Model {
    world: World,
    clients: Vec<Caller>,
    nodes: Vec<Node>,
    /// By generation, every one that was ever given out.
    versions: BTreeMap<u64, Version>,
    /// What each key's name stands for.
    complete: HashMap<usize, u64>,
    open: HashMap<usize, u64>,
    fences: BTreeMap<FenceId, ModelFence>,
    drops: BTreeMap<FenceId, (ClientId, BTreeSet<u64>)>,
    /// Reservations whose writer has said that nothing is in flight.
    confirmed: BTreeSet<u64>,
    /// The greatest number that was ever used on a granule.
    tags: HashMap<(SegmentId, u64), u64>,
}

fn name(index: usize) -> ObjectKey {
    key(&format!("k{index}"))
}

impl Model {
    fn new() -> Self {
        let world = World::with(StateConfig {
            lease: LEASE,
            discard_after: DISCARD,
            release_after: RELEASE,
            client_ttl: Duration::from_mins(1),
            shards: 2,
            // So that charges are kept.
            tenancy: Tenancy::Strict([(Tenant::default(), u64::MAX)].into()),
            ..StateConfig::default()
        });
        let nodes = (0..NODES).map(|n| world.node(&format!("n{n}"), NODE_GRANULES * GRANULE));
        Self {
            nodes: nodes.collect(),
            clients: (0..CLIENTS).map(|_| world.client()).collect(),
            world,
            versions: BTreeMap::new(),
            complete: HashMap::new(),
            open: HashMap::new(),
            fences: BTreeMap::new(),
            drops: BTreeMap::new(),
            confirmed: BTreeSet::new(),
            tags: HashMap::new(),
        }
    }

    fn now(&self) -> Moment {
        self.world.now()
    }

    fn version(&mut self, generation: u64) -> &mut Version {
        self.versions.get_mut(&generation).unwrap()
    }

    fn choose(&self, index: prop::sample::Index) -> Option<(u64, Version)> {
        // Mostly the recent ones: they are the interesting ones.
        let recent: Vec<_> = self.versions.iter().rev().take(8).collect();
        (!recent.is_empty()).then(|| {
            let (generation, version) = recent[index.index(recent.len())];
            (*generation, version.clone())
        })
    }

    /// Learns which complete objects were evicted, and that they were free to go.
    fn notice_evictions(&mut self) {
        for (key, generation) in self.complete.clone() {
            let stat = self
                .world
                .state
                .stat(self.now(), &Tenant::default(), &name(key));
            let there = stat
                .is_ok_and(|s| s.generation.0 == generation && s.state == ObjectState::Complete);
            if !there {
                let now = self.now();
                let version = self.version(generation);
                assert!(
                    version.lease_end() <= now,
                    "evicted under a lease: {version:?}"
                );
                assert!(!version.hard, "evicted in spite of a hard pin: {version:?}");
                version.phase = Phase::Gone;
                self.complete.remove(&key);
            }
        }
    }

    fn retire(&mut self, key: usize) {
        let now = self.now();
        if let Some(generation) = self.complete.remove(&key) {
            let version = self.version(generation);
            version.phase = if version.lease_end() > now {
                Phase::Retired
            } else {
                Phase::Gone
            };
        }
    }

    fn suspect(&mut self, key: usize) {
        if let Some(generation) = self.open.remove(&key) {
            let version = self.version(generation);
            version.phase = if version.places.is_empty() {
                Phase::Gone
            } else {
                Phase::Suspect
            };
        }
    }

    /// Learns which commands went out.
    fn read_events(&mut self) {
        for event in self.world.state.take_events() {
            match event {
                Event::Fence { to, fence } => {
                    let at: BTreeSet<_> = fence.places.iter().map(|p| p.offset).collect();
                    let generations = self.versions.iter().filter(|(_, version)| {
                        version.phase == Phase::Suspect
                            && version.writer == fence.writer
                            && version.places.iter().any(|place| {
                                place.segment == fence.segment && at.contains(&place.offset)
                            })
                    });
                    let generations: BTreeSet<_> = generations.map(|(g, _)| *g).collect();
                    assert_eq!(generations.len(), at.len(), "a fence of what is no suspect");
                    self.fences.entry(fence.id).or_insert(ModelFence {
                        node: to,
                        segment: fence.segment,
                        generations,
                        raised: false,
                    });
                }
                Event::DropSessions { to, drop } => {
                    let generations = drop.objects.iter().map(|o| o.generation.0).collect();
                    self.drops.insert(drop.id, (to, generations));
                }
                _ => {}
            }
        }
    }

    /// Frees the places of a fence.
    fn lift(&mut self, id: FenceId) {
        let fence = self.fences.remove(&id).unwrap();
        for generation in fence.generations {
            self.free_places(generation, |place| place.segment == fence.segment);
        }
    }

    fn free_places(&mut self, generation: u64, free: impl Fn(&Replica) -> bool) {
        let version = self.version(generation);
        version.places.retain(|place| !free(place));
        if version.places.is_empty() && version.phase != Phase::Open {
            let key = version.key;
            version.phase = Phase::Gone;
            if self.complete.get(&key) == Some(&generation) {
                self.complete.remove(&key);
            }
        }
    }

    fn confirm(&mut self, generation: u64) {
        self.confirmed.insert(generation);
        if self.version(generation).phase == Phase::Suspect {
            self.free_places(generation, |_| true);
            for fence in self.fences.values_mut() {
                fence.generations.remove(&generation);
            }
            self.fences.retain(|_, fence| !fence.generations.is_empty());
        }
    }

    fn run(&mut self, op: &Op) {
        self.notice_evictions();
        let by = |model: &Self, version: &Version, client: Option<usize>| match client {
            Some(client) => model.clients[client].clone(),
            None => Caller {
                client: version.writer,
                ..model.clients[0].clone()
            },
        };
        match *op {
            Op::Put { .. } => self.put(op),
            Op::Commit { version, client } => {
                if let Some((generation, version)) = self.choose(version) {
                    self.commit(generation, &version, &by(self, &version, client));
                }
            }
            Op::Revoke { version, client } => {
                if let Some((generation, version)) = self.choose(version) {
                    self.revoke(generation, &version, &by(self, &version, client));
                }
            }
            Op::Get {
                client,
                key,
                session,
            } => self.get(client, key, session),
            Op::Renew { version, client } => {
                if let Some((generation, version)) = self.choose(version) {
                    self.renew(generation, &version, client);
                }
            }
            Op::End { version, client } => {
                if let Some((generation, _)) = self.choose(version) {
                    self.end(generation, client);
                }
            }
            Op::Probe { client, first } => self.probe(client, first),
            Op::Remove { key, force } => self.remove(key, force),
            Op::RemoveVersion { version } => {
                if let Some((generation, version)) = self.choose(version) {
                    self.remove_version(generation, version.key);
                }
            }
            Op::Pass { millis } => self.pass(millis),
            Op::AnswerFence { fence, attached } => self.answer_fence(fence, attached),
            Op::AnswerDrop { drop } => self.answer_drop(drop),
            Op::Leave { client } => self.leave(client),
            Op::Restart { node } => self.restart(node),
        }
        self.read_events();
        self.check_account();
    }

    /// Every byte in use is explained by somebody who relies on it.
    fn check_account(&mut self) {
        self.pass(0);
        self.read_events();
        self.notice_evictions();
        let now = self.now();
        for version in self.versions.values_mut() {
            if version.phase == Phase::Retired && version.lease_end() <= now {
                version.phase = Phase::Gone;
            }
        }
        let bytes = |phases: &[Phase]| {
            let versions = self.versions.values().filter(|v| phases.contains(&v.phase));
            versions
                .map(|v| v.granules * v.places.len() as u64)
                .sum::<u64>()
                * GRANULE
        };
        let gauges = self.world.state.gauges();
        let held = bytes(&[Phase::Retired, Phase::Suspect]);
        assert_eq!(gauges.quarantined_bytes, held);
        assert_eq!(
            gauges.used_bytes,
            held + bytes(&[Phase::Open, Phase::Complete])
        );
        let named = || {
            let versions = self.versions.values();
            versions.filter(|v| matches!(v.phase, Phase::Open | Phase::Complete))
        };
        let payload: u64 = named().map(|v| v.size * v.places.len() as u64).sum();
        let payloads = self.world.state.payloads();
        assert_eq!(
            payloads.iter().map(|(_, bytes)| bytes).sum::<u64>(),
            payload
        );
        let charged: u64 = named().map(|v| v.size * v.charged).sum();
        let tenants = self.world.state.tenants().unwrap();
        assert_eq!(tenants[0].charged_bytes, charged);
        assert_eq!(gauges.objects, self.complete.len() as u64);
        assert_eq!(gauges.put_sessions, self.open.len() as u64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_place_is_reused_while_anybody_may_rely_on_it(ops in prop::collection::vec(op(), 1..120)) {
        let mut model = Model::new();
        for op in &ops {
            model.run(op);
        }
    }
}
