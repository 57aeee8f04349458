//! Random histories of one thread against a simple model.
//!
//! The model keeps every reservation ever made and who may rely on its places. It does not foretell where
//! objects are placed or what is evicted, but checks both: a new place must be free by its account, what was
//! evicted must have been free to go, and the bytes in use must be those that it can explain.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::time::Duration;

use layercake_protocol::command::FenceId;
use proptest::prelude::*;

use crate::harness::*;

const LEASE: Duration = Duration::from_secs(2);
const DISCARD: Duration = Duration::from_secs(3);
const RELEASE: Duration = Duration::from_secs(10);
const KEYS: usize = 5;
const CLIENTS: usize = 3;
const NODES: usize = 2;
const NODE_GRANULES: u64 = 40;

#[derive(Clone, Debug)]
enum Op {
    Put {
        client: usize,
        key: usize,
        granules: u64,
        replicas: u32,
        hard: bool,
        upsert: bool,
    },
    Commit {
        version: prop::sample::Index,
        client: Option<usize>,
    },
    Revoke {
        version: prop::sample::Index,
        client: Option<usize>,
    },
    Get {
        client: usize,
        key: usize,
        session: bool,
    },
    Renew {
        version: prop::sample::Index,
        client: usize,
    },
    End {
        version: prop::sample::Index,
        client: usize,
    },
    Probe {
        first: usize,
    },
    Remove {
        key: usize,
        force: bool,
    },
    Pass {
        millis: u64,
    },
    AnswerFence {
        fence: prop::sample::Index,
        attached: bool,
    },
    AnswerDrop {
        drop: prop::sample::Index,
    },
    Leave {
        client: usize,
    },
    Restart {
        node: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let (client, key) = (0..CLIENTS, 0..KEYS);
    let version = any::<prop::sample::Index>;
    let ender = prop_oneof![5 => Just(None), 1 => client.clone().prop_map(Some)];
    prop_oneof![
        8 => (client.clone(), key.clone(), 1_u64..14, 1_u32..3, prop::bool::weighted(0.05), prop::bool::weighted(0.3))
            .prop_map(|(client, key, granules, replicas, hard, upsert)| {
                Op::Put { client, key, granules, replicas, hard, upsert }
            }),
        8 => (version(), ender.clone()).prop_map(|(version, client)| Op::Commit { version, client }),
        2 => (version(), ender).prop_map(|(version, client)| Op::Revoke { version, client }),
        4 => (client.clone(), key.clone(), any::<bool>())
            .prop_map(|(client, key, session)| Op::Get { client, key, session }),
        2 => (version(), client.clone()).prop_map(|(version, client)| Op::Renew { version, client }),
        3 => (version(), client.clone()).prop_map(|(version, client)| Op::End { version, client }),
        2 => key.clone().prop_map(|first| Op::Probe { first }),
        2 => (key, any::<bool>()).prop_map(|(key, force)| Op::Remove { key, force }),
        4 => (1_u64..2500).prop_map(|millis| Op::Pass { millis }),
        2 => (any::<prop::sample::Index>(), any::<bool>())
            .prop_map(|(fence, attached)| Op::AnswerFence { fence, attached }),
        1 => any::<prop::sample::Index>().prop_map(|drop| Op::AnswerDrop { drop }),
        1 => client.prop_map(|client| Op::Leave { client }),
        1 => (0..NODES).prop_map(|node| Op::Restart { node }),
    ]
}

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
    readers: HashMap<ClientId, Moment>,
    lease: Moment,
    first_probe: Option<Moment>,
}

impl Version {
    fn lease_end(&self) -> Moment {
        let readers = self.readers.values().copied();
        readers.fold(self.lease, Moment::max)
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

    fn put(&mut self, op: &Op) {
        let &Op::Put {
            client,
            key,
            granules: wanted,
            replicas,
            hard,
            upsert,
        } = op
        else {
            return;
        };
        let now = self.now();
        let caller = self.clients[client].clone();
        let open = self
            .open
            .get(&key)
            .map(|generation| &self.versions[generation]);
        let expected = if self.complete.contains_key(&key) {
            (!upsert).then_some(Refusal::AlreadyExists)
        } else if let Some(open) = open {
            let overdue = now.since(open.since) >= DISCARD || open.places.is_empty();
            (!upsert && !overdue).then_some(Refusal::InProgress)
        } else {
            None
        };
        let config = ReplicateConfig {
            replicas,
            hard_pin: hard,
            ..ReplicateConfig::default()
        };
        let size = granules(wanted);
        let batch = PutBatch {
            puts: vec![PutStart::new(name(key), size)],
            config: &config,
            recency: Recency::default(),
            unreachable: &[],
            upsert,
        };
        let answer = self.world.state.put_start(now, &caller, batch).0.remove(0);
        if let Some(refusal) = expected {
            assert_eq!(answer, Err(refusal));
            return;
        }
        self.suspect(key);
        self.notice_evictions();
        match answer {
            Err(refusal) => assert!(matches!(refusal, Refusal::NoSpace { .. }), "{refusal:?}"),
            Ok(started) => {
                let version = Version {
                    key,
                    writer: caller.client,
                    size,
                    granules: wanted,
                    hard,
                    since: now,
                    phase: Phase::Open,
                    places: started.replicas,
                    readers: HashMap::new(),
                    lease: Moment::START,
                    first_probe: None,
                };
                self.check_new_places(started.generation, &version);
                self.open.insert(key, started.generation.0);
                let old = self.versions.insert(started.generation.0, version);
                assert!(old.is_none(), "a number was given out twice");
            }
        }
    }

    /// No place that somebody may rely on is given out again, and numbers order the writers of a place.
    fn check_new_places(&mut self, generation: Generation, version: &Version) {
        let now = self.now();
        assert!(!version.places.is_empty());
        let segments: BTreeSet<_> = version.places.iter().map(|p| p.segment).collect();
        assert_eq!(
            segments.len(),
            version.places.len(),
            "two replicas in one segment"
        );
        for (segment, span) in version.spans() {
            assert!(span.end <= NODE_GRANULES);
            for (number, other) in &self.versions {
                let relied_on = match other.phase {
                    Phase::Open | Phase::Complete | Phase::Suspect => true,
                    Phase::Retired => other.lease_end() > now,
                    Phase::Gone => false,
                };
                let overlaps = other
                    .spans()
                    .any(|(s, r)| s == segment && r.start < span.end && span.start < r.end);
                assert!(!(relied_on && overlaps), "reuses {number}: {other:?}");
            }
            for granule in span {
                let tag = self.tags.entry((segment, granule)).or_default();
                assert!(*tag < generation.0, "a later writer has a smaller number");
                *tag = generation.0;
            }
        }
    }

    /// What `commit` and `revoke` say of a session that is not this client's open one.
    fn no_session(&self, key: usize) -> Refusal {
        if self.complete.contains_key(&key) || self.open.contains_key(&key) {
            Refusal::Superseded
        } else {
            Refusal::NotFound
        }
    }

    fn commit(&mut self, generation: u64, version: &Version, caller: &Caller) {
        let key = version.key;
        let object = object(&name(key), Generation(generation));
        let answer = self
            .world
            .state
            .put_end(self.now(), caller, &[object])
            .remove(0);
        match version.phase {
            Phase::Open if version.writer != caller.client => {
                assert_eq!(answer, Err(Refusal::Superseded));
            }
            Phase::Open if version.places.is_empty() => {
                assert_eq!(answer, Err(Refusal::Unreachable));
                self.open.remove(&key);
                self.version(generation).phase = Phase::Gone;
            }
            Phase::Open => {
                assert_eq!(answer, Ok(()));
                self.open.remove(&key);
                self.retire(key);
                self.version(generation).phase = Phase::Complete;
                self.complete.insert(key, generation);
            }
            Phase::Complete => assert_eq!(answer, Ok(())),
            _ => assert_eq!(answer, Err(self.no_session(key))),
        }
    }

    fn revoke(&mut self, generation: u64, version: &Version, caller: &Caller) {
        let key = version.key;
        let object = object(&name(key), Generation(generation));
        let answer = self
            .world
            .state
            .put_revoke(self.now(), caller, &[object])
            .remove(0);
        let own = version.writer == caller.client;
        match version.phase {
            Phase::Open if own => {
                assert_eq!(answer, Ok(()));
                self.open.remove(&key);
                self.version(generation).phase = Phase::Gone;
            }
            Phase::Open => assert_eq!(answer, Err(Refusal::Superseded)),
            Phase::Complete => assert_eq!(answer, Err(Refusal::AlreadyExists)),
            _ => {
                let expected = match self.no_session(key) {
                    Refusal::NotFound => Ok(()),
                    refusal => Err(refusal),
                };
                assert_eq!(answer, expected);
                if own {
                    self.confirm(generation);
                }
            }
        }
    }

    fn get(&mut self, client: usize, key: usize, session: bool) {
        let now = self.now();
        let caller = self.clients[client].clone();
        let answer = if session {
            self.world.get(&caller, &name(key))
        } else {
            self.world.read(&caller, &name(key))
        };
        let Some(generation) = self.complete.get(&key).copied() else {
            let refusal = if self.open.contains_key(&key) {
                Refusal::NotReady
            } else {
                Refusal::NotFound
            };
            assert_eq!(answer, Err(refusal));
            return;
        };
        let got = answer.unwrap();
        let version = self.version(generation);
        assert_eq!(got.size, version.size);
        let sorted = |replicas: &[Replica]| {
            let places = replicas.iter().map(|r| (r.segment, r.offset, r.generation));
            places.collect::<BTreeSet<_>>()
        };
        assert_eq!(sorted(&got.replicas), sorted(&version.places));
        version.first_probe = None;
        if session {
            version.readers.insert(caller.client, now + LEASE);
        } else {
            version.lease = version.lease.max(now + LEASE);
        }
    }

    fn renew(&mut self, generation: u64, version: &Version, client: usize) {
        let now = self.now();
        let caller = self.clients[client].clone();
        let answer = self
            .world
            .renew(&caller, &name(version.key), Generation(generation));
        let current = self.complete.get(&version.key) == Some(&generation);
        let held = version.phase == Phase::Retired
            && version
                .readers
                .get(&caller.client)
                .is_some_and(|until| *until > now);
        if current || held {
            assert_eq!(answer, Ok(()));
            let version = self.version(generation);
            version.first_probe = None;
            version.readers.insert(caller.client, now + LEASE);
        } else {
            assert_eq!(answer, Err(Refusal::LeaseExpired));
        }
    }

    fn end(&mut self, generation: u64, client: usize) {
        let caller = self.clients[client].clone();
        let version = self.version(generation);
        version.readers.remove(&caller.client);
        let name = name(version.key);
        self.world.end(&caller, &name, Generation(generation));
    }

    fn probe(&mut self, first: usize) {
        let now = self.now();
        let names: Vec<_> = (first..KEYS).map(name).collect();
        let found = self.world.probe(&names);
        for (key, presence) in (first..KEYS).zip(found) {
            if let Some(generation) = self.complete.get(&key).copied() {
                assert_eq!(presence, Presence::Complete);
                let version = self.version(generation);
                match version.first_probe {
                    Some(start) if now < version.lease + LEASE => {
                        let end = (now + LEASE).min(start + LEASE * 3);
                        version.lease = version.lease.max(end);
                    }
                    _ => {
                        version.first_probe = Some(now);
                        version.lease = version.lease.max(now + LEASE);
                    }
                }
            } else if self.open.contains_key(&key) {
                assert_eq!(presence, Presence::Reserved);
            } else {
                assert_eq!(presence, Presence::Absent);
            }
        }
    }

    fn remove(&mut self, key: usize, force: bool) {
        let answer = self.world.remove(&name(key), force);
        let expected = match self.complete.get(&key) {
            Some(generation) => {
                let leased = self.versions[generation].lease_end() > self.now();
                if leased && !force {
                    Err(Refusal::Leased)
                } else {
                    Ok(())
                }
            }
            None if self.open.contains_key(&key) => Err(Refusal::NotReady),
            None => Err(Refusal::NotFound),
        };
        assert_eq!(answer, expected);
        if answer.is_ok() {
            self.retire(key);
        }
    }

    fn pass(&mut self, millis: u64) {
        self.world.pass(Duration::from_millis(millis));
        self.world.tick();
        let now = self.now();
        for key in 0..KEYS {
            let open = self
                .open
                .get(&key)
                .map(|generation| &self.versions[generation]);
            if open.is_some_and(|open| now.since(open.since) >= RELEASE) {
                self.suspect(key);
            }
        }
    }

    fn answer_fence(&mut self, index: prop::sample::Index, attached: bool) {
        if self.fences.is_empty() {
            return;
        }
        let ids: Vec<_> = self.fences.keys().copied().collect();
        let id = ids[index.index(ids.len())];
        let fence = self.fences.get_mut(&id).unwrap();
        fence.raised = true;
        let confirmed = fence.generations.is_subset(&self.confirmed);
        let node = fence.node;
        self.world.state.fence_done(self.now(), node, id, attached);
        if !attached || confirmed {
            self.lift(id);
        }
    }

    fn answer_drop(&mut self, index: prop::sample::Index) {
        if self.drops.is_empty() {
            return;
        }
        let ids: Vec<_> = self.drops.keys().copied().collect();
        let id = ids[index.index(ids.len())];
        let (client, generations) = self.drops.remove(&id).unwrap();
        self.world.state.fence_done(self.now(), client, id, false);
        self.confirmed.extend(&generations);
        let raised = self
            .fences
            .iter()
            .filter(|(_, fence)| fence.raised && fence.generations.is_subset(&generations));
        let raised: Vec<_> = raised.map(|(id, _)| *id).collect();
        for id in raised {
            self.lift(id);
        }
    }

    fn leave(&mut self, client: usize) {
        let now = self.now();
        let left = std::mem::replace(&mut self.clients[client], self.world.client());
        self.world.state.leave(now, left.client);
        let own: Vec<_> = self.versions.keys().copied().collect();
        for generation in own {
            let version = self.version(generation);
            version.readers.remove(&left.client);
            if version.writer != left.client {
                continue;
            }
            match version.phase {
                Phase::Open => {
                    version.phase = Phase::Gone;
                    let key = version.key;
                    self.open.remove(&key);
                }
                Phase::Suspect => self.confirm(generation),
                _ => {}
            }
        }
    }

    /// The node's process dies, and another one comes under its name.
    fn restart(&mut self, node: usize) {
        let name = format!("n{node}");
        let new = self.world.node(&name, NODE_GRANULES * GRANULE);
        let old = std::mem::replace(&mut self.nodes[node], new);
        let generations: Vec<_> = self.versions.keys().copied().collect();
        for generation in generations {
            self.free_places(generation, |place| place.segment == old.segment.id);
        }
        self.fences
            .retain(|_, fence| fence.segment != old.segment.id);
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
            Op::Probe { first } => self.probe(first),
            Op::Remove { key, force } => self.remove(key, force),
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
