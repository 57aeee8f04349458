//! What the state tells about itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{SegmentId, Term};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{ObjectState, Replica, Segment};
use layercake_protocol::report::{ObjectStat, SegmentStat, SegmentState, Status};
use layercake_protocol::version;

use super::api::{Gauges, List, Listing};
use super::members::Member;
use super::moment::Moment;
use super::segments::View;
use super::shard::{HARD_PINNED, Phase, SOFT_PINNED, Shard};
use super::{State, stored_key};

impl State {
    /// Lists objects by key. Looks at the whole table, in steps; what changes meanwhile may or may not be
    /// in the answer.
    pub fn list(&self, now: Moment, list: &List<'_>) -> Listing {
        let Some(tenant) = self.tenants.find(list.tenant) else {
            return Listing {
                objects: Vec::new(),
                more: false,
            };
        };
        let view = self.pool.view();
        let mut page: BTreeMap<Box<str>, ObjectStat> = BTreeMap::new();
        for number in 0..self.shards.len() {
            let mut next = Some(0);
            while let Some(from) = next {
                let shard = self.shard(number);
                next = shard.visit(from, |slot, entry| {
                    let key = shard.key(entry);
                    let wanted = entry.tenant == tenant
                        && key.starts_with(list.prefix)
                        && (list.after.is_empty() || key > list.after);
                    let full = page.len() > list.limit;
                    let greatest = || page.last_key_value().map(|(key, _)| &**key);
                    if !wanted || (full && greatest().is_none_or(|greatest| key >= greatest)) {
                        return;
                    }
                    page.insert(key.into(), object_stat(&shard, slot, now, &view));
                    if page.len() > list.limit.saturating_add(1) {
                        page.pop_last();
                    }
                });
            }
        }
        let more = page.len() > list.limit;
        if more {
            page.pop_last();
        }
        Listing {
            objects: page.into_values().collect(),
            more,
        }
    }

    /// The keys of all complete objects, of one tenant or of all, in no order. Looks at the whole table, in
    /// steps; what changes meanwhile may or may not be in the answer.
    pub fn keys(&self, tenant: Option<&Tenant>) -> Vec<ObjectKey> {
        let mut keys = Vec::new();
        let number = match tenant.map(|tenant| self.tenants.find(tenant)) {
            // It has never stored anything.
            Some(None) => return keys,
            Some(number) => number,
            None => None,
        };
        for part in 0..self.shards.len() {
            let mut next = Some(0);
            while let Some(from) = next {
                let shard = self.shard(part);
                next = shard.visit(from, |_, entry| {
                    let wanted = number.is_none_or(|number| number == entry.tenant);
                    if wanted && entry.phase == Phase::Complete {
                        keys.push(stored_key(shard.key(entry)));
                    }
                });
            }
        }
        keys
    }

    /// One object, reserved ones included.
    pub fn stat(
        &self,
        now: Moment,
        tenant: &Tenant,
        key: &ObjectKey,
    ) -> Result<ObjectStat, Refusal> {
        let tenant = self.tenants.find(tenant).ok_or(Refusal::NotFound)?;
        let view = self.pool.view();
        let hash = self.hasher.hash(tenant, key.as_str());
        let shard = self.shard(hash.shard);
        let slot = shard
            .find(hash.tag, tenant, key.as_str())
            .ok_or(Refusal::NotFound)?;
        Ok(object_stat(&shard, slot, now, &view))
    }

    /// All segments, by name and id.
    pub fn segments(&self, now: Moment) -> Vec<SegmentStat> {
        let view = self.pool.view();
        let members = self.members.read();
        let mut stats: Vec<_> = view
            .cells()
            .map(|cell| {
                let (usage, held) = cell.account();
                let (holds, _) = cell.holds();
                let owner = members.get(&cell.owner);
                SegmentStat {
                    segment: Segment::clone(&cell.info),
                    state: if cell.is_draining() {
                        SegmentState::Draining
                    } else {
                        SegmentState::Mounted
                    },
                    used_bytes: usage.used,
                    largest_free: cell.largest_free(),
                    objects: usage.pieces.saturating_sub(held.pieces + holds),
                    quarantined_bytes: held.bytes,
                    heartbeat_age: now.since(owner.map_or(now, Member::last_heard)),
                    client: cell.owner,
                }
            })
            .collect();
        stats.sort_by(|a, b| {
            let key = |stat: &SegmentStat| (stat.segment.name.clone(), stat.segment.id);
            key(a).cmp(&key(b))
        });
        stats
    }

    /// The segments with the payload bytes of what has a name in each, by name and id.
    pub fn payloads(&self) -> Vec<(Arc<Segment>, u64)> {
        let view = self.pool.view();
        let cells = view.cells();
        let mut payloads: Vec<_> = cells
            .map(|cell| (cell.info.clone(), cell.payload()))
            .collect();
        payloads.sort_by(|(a, _), (b, _)| (&a.name, a.id).cmp(&(&b.name, b.id)));
        payloads
    }

    /// One segment that is in the pool, as clients address it.
    pub fn segment(&self, id: SegmentId) -> Option<Arc<Segment>> {
        let view = self.pool.view();
        view.by_id(id).map(|cell| cell.info.clone())
    }

    /// What there is at the moment.
    pub fn gauges(&self) -> Gauges {
        let mut gauges = Gauges {
            fences: self.fences.lock().len() as u64,
            members: self.members.located(),
            ..Gauges::default()
        };
        for number in 0..self.shards.len() {
            let shard = self.shard(number);
            gauges.objects += shard.complete();
            gauges.put_sessions += shard.put_sessions();
            gauges.get_sessions += shard.get_sessions();
            gauges.soft_pinned += shard.soft_pinned();
            gauges.removed_leased += shard.removed_leased();
        }
        for cell in self.pool.view().cells() {
            let (usage, held) = cell.account();
            let (holds, hold_bytes) = cell.holds();
            gauges.holds += holds;
            gauges.hold_bytes += hold_bytes;
            gauges.segments += 1;
            gauges.capacity_bytes += usage.capacity;
            gauges.used_bytes += usage.used;
            gauges.requested_bytes += usage.requested;
            gauges.quarantined_bytes += held.bytes;
            gauges.largest_free = gauges.largest_free.max(cell.largest_free());
        }
        gauges
    }

    /// The whole, as tools ask for it.
    pub fn status(&self, now: Moment, term: Term) -> Status {
        let gauges = self.gauges();
        let counters = self.counters();
        let evicted = counters.evicted();
        Status {
            term,
            uptime: now.since_start(),
            objects: gauges.objects,
            reserved_objects: gauges.put_sessions,
            capacity_bytes: gauges.capacity_bytes,
            used_bytes: gauges.used_bytes,
            quarantined_bytes: gauges.quarantined_bytes,
            segments: gauges.segments,
            members: gauges.members,
            evicted_objects: evicted.objects,
            evicted_bytes: evicted.bytes,
            refused_puts: counters.refused_puts,
            lost_nodes: counters.lost_nodes,
            discarded_puts: counters.discarded_puts,
            client_ttl: self.config.client_ttl,
            version: version::CURRENT,
        }
    }
}

fn object_stat(shard: &Shard, slot: u32, now: Moment, view: &View) -> ObjectStat {
    let entry = shard.entry(slot);
    let places = entry.places.as_slice().iter();
    ObjectStat {
        key: stored_key(shard.key(entry)),
        size: entry.size,
        state: match entry.phase {
            Phase::Complete => ObjectState::Complete,
            Phase::Writing => ObjectState::Processing,
            Phase::Reserved => ObjectState::Initialized,
            Phase::Removed | Phase::Vacant => ObjectState::Removed,
        },
        replicas: places
            .filter_map(|place| {
                Some(Replica {
                    segment: view.cell(place.segment)?.info.id,
                    offset: place.offset(),
                    header_len: entry.header_len,
                    generation: entry.generation,
                })
            })
            .collect(),
        generation: entry.generation,
        lease_remaining: shard.lease_end(slot).since(now),
        soft_pinned: entry.has(SOFT_PINNED),
        hard_pinned: entry.has(HARD_PINNED),
        group: entry.group.as_ref().map(|group| group.name().to_owned()),
        epoch: entry.epoch,
        prefix_index: entry.index,
        open_readers: u32::try_from(shard.open_readers(now, slot)).unwrap_or(u32::MAX),
    }
}
