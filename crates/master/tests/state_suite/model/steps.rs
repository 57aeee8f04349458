//! One step of a history: the call, the answer that the model expects, and what it makes of it.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use proptest::sample::Index;

use super::op::Op;
use super::{DISCARD, KEYS, LEASE, Model, NODE_GRANULES, Phase, RELEASE, Version, name};
use crate::harness::*;

impl Model {
    pub(super) fn put(&mut self, op: &Op) {
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
            refresh_at_end: true,
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
                    charged: started.replicas.len() as u64,
                    places: started.replicas.into_vec(),
                    readers: HashMap::new(),
                    lease: Moment::START,
                    first_probe: None,
                    prober: None,
                };
                self.check_new_places(started.generation, &version);
                self.open.insert(key, started.generation.0);
                let old = self.versions.insert(started.generation.0, version);
                assert!(old.is_none(), "a number was given out twice");
            }
        }
    }

    /// No place that somebody may rely on is given out again, and numbers order the writers of a place.
    pub(super) fn check_new_places(&mut self, generation: Generation, version: &Version) {
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
    pub(super) fn no_session(&self, key: usize) -> Refusal {
        if self.complete.contains_key(&key) || self.open.contains_key(&key) {
            Refusal::Superseded
        } else {
            Refusal::NotFound
        }
    }

    pub(super) fn commit(&mut self, generation: u64, version: &Version, caller: &Caller) {
        let key = version.key;
        let object = object(&name(key), Generation(generation));
        let state = &self.world.state;
        let epoch = state.draw_epoch();
        let answer = state
            .put_end(self.now(), caller, &[object], epoch)
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

    pub(super) fn revoke(&mut self, generation: u64, version: &Version, caller: &Caller) {
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

    pub(super) fn get(&mut self, client: usize, key: usize, session: bool) {
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
        if session {
            version.open_session(now, caller.client);
        } else {
            version.first_probe = None;
            version.lease = version.lease.max(now + LEASE);
        }
    }

    pub(super) fn renew(&mut self, generation: u64, version: &Version, client: usize) {
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
            self.version(generation).open_session(now, caller.client);
        } else {
            assert_eq!(answer, Err(Refusal::LeaseExpired));
        }
    }

    pub(super) fn end(&mut self, generation: u64, client: usize) {
        let caller = self.clients[client].clone();
        let version = self.version(generation);
        version.readers.remove(&caller.client);
        let name = name(version.key);
        self.world.end(&caller, &name, Generation(generation));
    }

    pub(super) fn probe(&mut self, client: usize, first: usize) {
        let now = self.now();
        let caller = self.clients[client].clone();
        let names: Vec<_> = (first..KEYS).map(name).collect();
        let found = self.world.probe_as(&caller, &names);
        for (key, presence) in (first..KEYS).zip(found) {
            if let Some(generation) = self.complete.get(&key).copied() {
                assert_eq!(presence, Presence::Complete);
                let version = self.version(generation);
                match version.first_probe {
                    Some(start) if now < version.lease + LEASE => {
                        let end = (now + LEASE).min(start + LEASE * 3);
                        version.lease = version.lease.max(end);
                        version.prober = version.prober.filter(|p| *p == caller.client);
                    }
                    _ => {
                        version.first_probe = Some(now);
                        version.prober = (version.lease <= now).then_some(caller.client);
                        version.lease = version.lease.max(now + LEASE);
                    }
                }
            } else {
                let open = self.open.get(&key).copied();
                // A reservation counts while it has memory.
                let has_memory = open.is_some_and(|open| !self.version(open).places.is_empty());
                let expected = if has_memory {
                    Presence::Reserved
                } else {
                    Presence::Absent
                };
                assert_eq!(presence, expected);
            }
        }
    }

    pub(super) fn remove(&mut self, key: usize, force: bool) {
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

    pub(super) fn remove_version(&mut self, generation: u64, key: usize) {
        let object = ObjectRef {
            key: name(key),
            generation: Generation(generation),
        };
        let answer = self.world.remove_version(&object);
        let expected = match self.complete.get(&key) {
            Some(complete) if *complete == generation => Ok(()),
            // Beside a complete version, what replaces it has no name yet.
            None if self.open.get(&key) == Some(&generation) => Err(Refusal::NotReady),
            _ => Err(Refusal::NotFound),
        };
        assert_eq!(answer, expected);
        if answer.is_ok() {
            self.retire(key);
        }
    }

    pub(super) fn pass(&mut self, millis: u64) {
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

    pub(super) fn answer_fence(&mut self, index: Index, attached: bool) {
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

    pub(super) fn answer_drop(&mut self, index: Index) {
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

    pub(super) fn leave(&mut self, client: usize) {
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
    pub(super) fn restart(&mut self, node: usize) {
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
}
