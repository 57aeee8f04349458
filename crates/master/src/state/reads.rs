//! Probes, reads and their leases.

use std::sync::Arc;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{Epoch, SegmentId};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{GetStarted, Presence, Replica, Replicas};

use super::State;
use super::ahead::Purpose;
use super::api::{Caller, Exists, GetStart, Location, Probe, Version};
use super::effects::Effects;
use super::moment::Moment;
use super::segments::View;
use super::shard::{Entry, KeyHash, Phase, Shard};

/// Index in the prefix of the key at this position of a call.
pub(super) fn prefix_index(first: u32, position: usize) -> u32 {
    first.saturating_add(u32::try_from(position).unwrap_or(u32::MAX))
}

impl State {
    /// Probes keys. The answer is as long as the keys, or ends with the first miss where that was asked.
    /// Returns the epoch that was used, too.
    pub fn exists<K: AsRef<str>>(
        &self,
        now: Moment,
        caller: &Caller,
        query: &Exists<'_, K>,
    ) -> (Vec<Presence>, Epoch) {
        let epoch = self.epoch(query.recency.epoch);
        let view = self.pool.view();
        // What can't be served is not promised.
        let unreachable = view.slots_of_or_away(query.unreachable);
        let tenant = self.tenants.find(&caller.tenant);
        let mut answer = Vec::with_capacity(query.keys.len());
        let mut hashes = tenant.map(|tenant| self.ahead(Purpose::Visit, tenant, texts(query.keys)));
        for (position, key) in query.keys.iter().enumerate() {
            let hash = hashes.as_mut().and_then(Iterator::next);
            let presence = tenant.zip(hash).map_or(Presence::Absent, |(tenant, hash)| {
                let mut shard = self.shard(hash.shard);
                let Some(slot) = shard.find(hash.tag, tenant, key.as_ref()) else {
                    return Presence::Absent;
                };
                let entry = shard.entry_mut(slot);
                if entry.is_open() {
                    return match query.probe {
                        Probe::Readable if !has_memory(entry, &view) => Presence::Absent,
                        _ => Presence::Reserved,
                    };
                }
                if is_leaving(entry) || !counts(entry, query.probe, &view, &unreachable) {
                    return Presence::Absent;
                }
                if !query.peek {
                    entry.touch(epoch, prefix_index(query.recency.first_index, position));
                    shard.grant_probe(&self.config, now, slot, caller.client);
                }
                Presence::Complete
            });
            answer.push(presence);
            if query.stop_at_first_miss && presence != Presence::Complete {
                break;
            }
        }
        (answer, epoch)
    }

    /// Finds and leases objects, one answer per key. Sessions need a caller that has joined.
    pub fn get_start<K: AsRef<str>>(
        &self,
        now: Moment,
        caller: &Caller,
        query: &GetStart<'_, K>,
    ) -> (Vec<Result<GetStarted, Refusal>>, Epoch) {
        let epoch = self.epoch(query.recency.epoch);
        let (mut reading, is_member) = self.reading(now, caller, query.unreachable);
        reading.session = query.session;
        if query.session && !is_member {
            let refusals = query.keys.iter().map(|_| Err(Refusal::UnknownMember));
            return (refusals.collect(), epoch);
        }
        let tenant = self.tenants.find(&caller.tenant);
        let mut answers = Vec::with_capacity(query.keys.len());
        let mut hashes = tenant.map(|tenant| self.ahead(Purpose::Visit, tenant, texts(query.keys)));
        for (position, key) in query.keys.iter().enumerate() {
            let index = prefix_index(query.recency.first_index, position);
            let hash = hashes.as_mut().and_then(Iterator::next);
            answers.push(match tenant.zip(hash) {
                Some((tenant, hash)) => {
                    self.read(&mut reading, (tenant, hash), key.as_ref(), (epoch, index))
                }
                None => Err(Refusal::NotFound),
            });
        }
        let found = answers.iter().filter(|answer| answer.is_ok()).count();
        self.tally.reads_started.add_len(found);
        self.tally.read_misses.add_len(answers.len() - found);
        (answers, epoch)
    }

    /// What a call's reads have in common, and whether the caller is a member, of which this is a sign of life.
    fn reading<'a>(
        &self,
        now: Moment,
        caller: &'a Caller,
        unreachable: &'a [SegmentId],
    ) -> (Reading<'a>, bool) {
        let known = self.members.heard(now, caller.client);
        let view = self.pool.view();
        let reading = Reading {
            now,
            caller,
            location: caller.location.or_else(|| known.flatten()),
            session: false,
            unreachable_ids: unreachable,
            unreachable: view.slots_of(unreachable),
            view,
        };
        (reading, known.is_some())
    }

    fn read(
        &self,
        reading: &mut Reading<'_>,
        (tenant, hash): (u32, KeyHash),
        key: &str,
        (epoch, index): (Epoch, u32),
    ) -> Result<GetStarted, Refusal> {
        let mut shard = self.shard(hash.shard);
        let slot = shard.find(hash.tag, tenant, key).ok_or(Refusal::NotFound)?;
        let entry = shard.entry_mut(slot);
        if entry.is_open() {
            return Err(Refusal::NotReady);
        }
        if is_leaving(entry) {
            return Err(Refusal::NotFound);
        }
        let (replicas, left_out) = reading.live_replicas(self, entry)?;
        entry.touch(epoch, index);
        let size = entry.size;
        if reading.session {
            shard.grant_session(&self.config, reading.now, slot, reading.caller.client);
        } else {
            shard.grant_read(&self.config, reading.now, slot);
        }
        let (fingerprint, layout_id) = shard.origin(slot);
        Ok(GetStarted {
            size,
            replicas,
            left_out,
            fingerprint,
            layout_id,
            early: None,
        })
    }

    /// Finds objects that are being written by writers who publish what they have. Grants nothing: what readers rely on
    /// is the tags and checksums of what they read.
    ///
    /// [`Refusal::AlreadyExists`]: it is complete; [`Refusal::NotReady`]: it is being written, and nothing is
    /// published.
    pub fn unfinished<K: AsRef<str>>(
        &self,
        now: Moment,
        caller: &Caller,
        query: &GetStart<'_, K>,
    ) -> Vec<Result<GetStarted, Refusal>> {
        let (mut reading, _) = self.reading(now, caller, query.unreachable);
        let tenant = self.tenants.find(&caller.tenant);
        let mut hashes = tenant.map(|tenant| self.ahead(Purpose::Visit, tenant, texts(query.keys)));
        let keys = query.keys.iter();
        keys.map(|key| {
            let hash = hashes.as_mut().and_then(Iterator::next);
            let (tenant, hash) = tenant.zip(hash).ok_or(Refusal::NotFound)?;
            let shard = self.shard(hash.shard);
            let slot = shard.find(hash.tag, tenant, key.as_ref());
            let slot = slot.ok_or(Refusal::NotFound)?;
            let entry = shard.entry(slot);
            if !entry.is_open() {
                return Err(Refusal::AlreadyExists);
            }
            let early = Some(shard.early_table(slot).ok_or(Refusal::NotReady)?);
            let (replicas, left_out) = reading.live_replicas(self, entry)?;
            let size = entry.size;
            let (fingerprint, layout_id) = shard.origin(slot);
            Ok(GetStarted {
                size,
                replicas,
                left_out,
                fingerprint,
                layout_id,
                early,
            })
        })
        .collect()
    }

    /// Renews the leases of open get sessions, on the version they opened. A session whose version lost its
    /// name keeps it as long as it renews in time.
    pub fn renew<V: Version>(
        &self,
        now: Moment,
        caller: &Caller,
        objects: &[V],
    ) -> Vec<Result<(), Refusal>> {
        if self.members.heard(now, caller.client).is_none() {
            return objects
                .iter()
                .map(|_| Err(Refusal::UnknownMember))
                .collect();
        }
        let answers: Vec<_> = self
            .with_versions(Purpose::Visit, caller, objects, |shard, named, object| {
                shard.renew(&self.config, now, named, object.generation(), caller.client)
            })
            .map(|answer| answer.unwrap_or(Err(Refusal::LeaseExpired)))
            .collect();
        let lost = answers.iter().filter(|answer| answer.is_err()).count();
        self.tally.leases_lost.add_len(lost);
        answers
    }

    /// Ends get sessions and gives their leases back. Ending twice is harmless.
    pub fn get_end<V: Version>(&self, now: Moment, caller: &Caller, objects: &[V]) {
        self.members.heard(now, caller.client);
        let mut effects = Effects::default();
        self.with_versions(Purpose::Visit, caller, objects, |shard, named, object| {
            shard.end_session(now, named, object.generation(), caller.client, &mut effects);
        })
        .for_each(drop);
        self.carry_out(now, &mut effects);
    }

    /// What a key holds now. If it is reserved, [`Event::Settled`](super::Event::Settled) will tell when
    /// that ends. Grants no lease.
    pub fn watch(&self, tenant: &Tenant, key: &ObjectKey) -> Presence {
        let Some(tenant) = self.tenants.find(tenant) else {
            return Presence::Absent;
        };
        let hash = self.hasher.hash(tenant, key.as_str());
        let mut shard = self.shard(hash.shard);
        match shard.find(hash.tag, tenant, key.as_str()) {
            None => Presence::Absent,
            Some(slot) if shard.watch(slot) => Presence::Reserved,
            Some(_) => Presence::Complete,
        }
    }

    /// Calls `change` for each object under its shard's lock, with the slot that its key names. `None` in
    /// the outcome: nothing was ever stored in this namespace.
    pub(super) fn with_versions<'a, V: Version, T>(
        &'a self,
        purpose: Purpose,
        caller: &'a Caller,
        objects: &'a [V],
        mut change: impl FnMut(&mut Shard, Option<u32>, &V) -> T + 'a,
    ) -> impl Iterator<Item = Option<T>> + 'a {
        let tenant = self.tenants.find(&caller.tenant);
        let keys = objects.iter().map(Version::key);
        let mut hashes = tenant.map(|tenant| self.ahead(purpose, tenant, keys));
        objects.iter().map(move |object| {
            let (tenant, hash) = tenant.zip(hashes.as_mut()?.next())?;
            let key = object.key();
            let mut shard = self.shard(hash.shard);
            let named = shard.find(hash.tag, tenant, key);
            Some(change(&mut shard, named, object))
        })
    }
}

fn texts<K: AsRef<str>>(keys: &[K]) -> impl ExactSizeIterator<Item = &str> {
    keys.iter().map(AsRef::as_ref)
}

/// The group of the entry is being evicted: nobody may begin to rely on it.
fn is_leaving(entry: &Entry) -> bool {
    entry.group.as_ref().is_some_and(|group| group.is_leaving())
}

/// Whether a complete entry counts for a probe.
fn counts(entry: &Entry, probe: Probe, view: &View, unreachable: &[u32]) -> bool {
    debug_assert_eq!(
        entry.phase,
        Phase::Complete,
        "names stand for these or open ones"
    );
    let reachable = |segment: u32| !unreachable.contains(&segment);
    let mut places = entry.places.as_slice().iter();
    match probe {
        Probe::Exists => unreachable.is_empty() || places.any(|place| reachable(place.segment)),
        Probe::Readable => places.any(|p| reachable(p.segment) && view.is_alive(*p)),
    }
}

/// Whether a reservation has a place in a segment that there still is. Without, it can never be read.
fn has_memory(entry: &Entry, view: &View) -> bool {
    let mut places = entry.places.as_slice().iter();
    places.any(|place| view.cell(place.segment).is_some() || view.is_older_than(place.segment))
}

/// One call's reads.
struct Reading<'a> {
    now: Moment,
    caller: &'a Caller,
    location: Option<Location>,
    /// Reads are sessions, with leases that are renewed and ended.
    session: bool,
    unreachable_ids: &'a [SegmentId],
    /// The same as slots.
    unreachable: Vec<u32>,
    view: Arc<View>,
}

impl Reading<'_> {
    /// The replicas that the caller can read, the nearest first: at least one. And how many more there are.
    fn live_replicas(&mut self, state: &State, entry: &Entry) -> Result<(Replicas, u32), Refusal> {
        let places = entry.places.as_slice();
        if places.iter().any(|p| self.view.is_older_than(p.segment)) {
            self.view = state.pool.view();
            self.unreachable = self.view.slots_of(self.unreachable_ids);
        }
        let replicas = self.replicas(entry);
        if replicas.is_empty() {
            return Err(Refusal::Unreachable);
        }
        Ok((replicas, self.left_out(entry)))
    }

    /// Replicas that the caller does not want to hear of.
    fn left_out(&self, entry: &Entry) -> u32 {
        if self.unreachable.is_empty() {
            return 0;
        }
        let mounted = |segment| {
            let cell = self.view.cell(segment);
            cell.is_some_and(|cell| cell.is_mounted())
        };
        let places = entry.places.as_slice().iter();
        let left_out =
            places.filter(|p| self.unreachable.contains(&p.segment) && mounted(p.segment));
        u32::try_from(left_out.count()).unwrap_or(u32::MAX)
    }

    fn replicas(&self, entry: &Entry) -> Replicas {
        let places = entry.places.as_slice();
        let readable = places.iter().filter_map(|place| {
            let cell = self.view.cell(place.segment)?;
            let there = cell.is_mounted() && !self.unreachable.contains(&place.segment);
            let replica = Replica {
                segment: cell.info.id,
                offset: place.offset(),
                header_len: entry.header_len,
                generation: entry.generation,
            };
            there.then_some((cell, replica))
        });
        let replica = |(_, replica)| replica;
        if places.len() == 1 {
            return readable.map(replica).collect();
        }
        let mut readable: Vec<_> = readable.collect();
        readable.sort_by_key(|(cell, _)| self.distance(cell));
        readable.into_iter().map(replica).collect()
    }

    /// 0: the same process; 1: the same host; 2: elsewhere; 3: perhaps nowhere.
    fn distance(&self, cell: &super::segments::SegmentCell) -> u8 {
        if cell.is_away() {
            return 3;
        }
        let there = Location::from(&cell.info.endpoint);
        match self.location {
            Some(here) if here.engine == there.engine => 0,
            Some(here) if here.host == there.host => 1,
            _ => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::endpoint::{Endpoint, HostId};
    use layercake_protocol::ids::{
        Capability, ClientId, EngineId, Generation, MemoryKind, RegionId, SegmentId,
    };
    use layercake_protocol::replica::{ObjectRef, PutStart, Recency, ReplicateConfig, Segment};

    use super::super::{PutBatch, StateConfig};
    use super::*;

    /// Between the evictor's two looks at a group nobody may begin to rely on a member.
    #[test]
    fn no_lease_is_granted_on_a_group_that_is_leaving() {
        let state = State::new(StateConfig::default()).unwrap();
        let now = Moment::from_micros(1);
        let endpoint = Endpoint {
            engine: EngineId(1),
            tcp: String::new(),
            host: HostId([0; 16]),
            shm: None,
            pid: 1,
        };
        let caller = Caller {
            client: ClientId(1),
            tenant: Tenant::default(),
            location: None,
        };
        state.join(now, caller.client, "n", Some(endpoint.clone()));
        let segment = Segment {
            id: SegmentId(1),
            name: "n".to_owned(),
            endpoint,
            region: RegionId(1),
            capability: Capability([0; 16]),
            len: 1 << 20,
            kind: MemoryKind::Host,
        };
        let mounted = state.mount(now, caller.client, segment, Generation::NONE);
        assert_eq!(mounted, Ok(false));
        let key = ObjectKey::new("k").unwrap();
        let put = PutStart {
            group: Some("g".to_owned()),
            ..PutStart::new(key.clone(), 10)
        };
        let batch = PutBatch {
            puts: vec![put],
            config: &ReplicateConfig::default(),
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: false,
        };
        let (started, _) = state.put_start(now, &caller, batch);
        let object = [ObjectRef {
            key: key.clone(),
            generation: started[0].as_ref().unwrap().generation,
        }];
        assert_eq!(
            state.put_end(now, &caller, &object, state.draw_epoch()),
            [Ok(())]
        );

        let keys = [key];
        let probe = || {
            let query = Exists {
                probe: Probe::Exists,
                keys: &keys,
                recency: Recency::default(),
                stop_at_first_miss: false,
                unreachable: &[],
                peek: false,
            };
            state.exists(now, &caller, &query).0[0]
        };
        let get = |session| {
            let query = GetStart {
                keys: &keys,
                recency: Recency::default(),
                session,
                unreachable: &[],
            };
            state.get_start(now, &caller, &query).0.remove(0)
        };
        let group = state
            .groups
            .get(state.tenants.find(&caller.tenant).unwrap(), "g");
        group.set_leaving(true);
        assert_eq!(probe(), Presence::Absent);
        assert_eq!(get(true), Err(Refusal::NotFound));
        assert_eq!(get(false), Err(Refusal::NotFound));
        let renewed = state.renew(now, &caller, &object);
        assert_eq!(renewed, [Err(Refusal::LeaseExpired)]);
        group.set_leaving(false);
        assert_eq!(probe(), Presence::Complete);
        assert!(get(true).is_ok());
        // A reader that holds a lease already has stopped the eviction: it may go on.
        group.set_leaving(true);
        assert_eq!(state.renew(now, &caller, &object), [Ok(())]);
    }
}
