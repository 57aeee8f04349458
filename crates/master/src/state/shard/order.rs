//! The order in which a shard's entries are evicted (requirement S6).
//!
//! Complete entries that are not hard-pinned stand in one of two heaps, by recency; the soft-pinned ones
//! come behind all others. What turns out to be leased when its turn comes is parked until the lease ends or
//! is given back, so a pass over the table's tail never looks at a leased entry twice. The heaps hold
//! keys that may be behind (see `queue`): touching an entry costs nothing here.

use std::sync::Arc;
use std::time::Duration;

use super::entry::{HARD_PINNED, Phase, Queue, SOFT_PINNED};
use super::queue::Key;
use super::{Effects, Reason, Shard};
use crate::state::groups::{Group, Handle};
use crate::state::moment::Moment;

/// Entries that are moved between queues under one hold of the lock.
const MOVES: u32 = 256;

/// A soft pin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pin {
    /// When it ends.
    pub(super) until: Moment,
    /// How far a read renews it.
    pub(super) ttl: Duration,
}

/// What a shard has to offer to the evictor.
#[derive(Debug)]
pub(crate) enum Victim {
    /// Nothing.
    Nobody,
    /// Not known yet: so much had to be set aside that others should get the lock first.
    Again,
    /// The next one stands behind the limit, here.
    Beyond(Key),
    /// It went.
    Gone,
    /// It belongs to a group, which goes together.
    Member(Handle, Arc<Group>),
}

/// How a member of a group stands with the evictor.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Standing {
    /// Its place in the order.
    pub(crate) key: Key,
    /// End of its leases.
    pub(crate) lease: Moment,
    /// Never to be evicted.
    pub(crate) hard_pinned: bool,
    /// End of its soft pin, if it has one.
    pub(crate) soft_pin: Option<Moment>,
}

impl Shard {
    /// Lets a complete entry stand for eviction.
    pub(super) fn join_queue(&mut self, slot: u32) {
        let entry = &mut self.slab[slot];
        if entry.has(HARD_PINNED) {
            return;
        }
        let key = entry.order();
        let (queue, heap) = if entry.has(SOFT_PINNED) {
            (Queue::Soft, &mut self.soft)
        } else {
            (Queue::Normal, &mut self.normal)
        };
        entry.queue = queue;
        heap.push(key, slot, &mut self.slab);
    }

    pub(super) fn leave_queue(&mut self, slot: u32) {
        let entry = &mut self.slab[slot];
        let heap = match std::mem::take(&mut entry.queue) {
            Queue::None => return,
            Queue::Normal => &mut self.normal,
            Queue::Soft => &mut self.soft,
            Queue::Parked => &mut self.parked,
        };
        let position = entry.position;
        heap.remove(position, &mut self.slab);
    }

    fn park(&mut self, slot: u32, until: Moment) {
        self.leave_queue(slot);
        self.slab[slot].queue = Queue::Parked;
        self.parked
            .push((until.as_micros(), 0), slot, &mut self.slab);
    }

    pub(super) fn unpark(&mut self, slot: u32) {
        self.leave_queue(slot);
        self.join_queue(slot);
    }

    /// A member of a group whose eviction failed stands back until then.
    pub(crate) fn stand_back(&mut self, member: Handle, until: Moment) {
        if self
            .resolve(member)
            .is_some_and(|entry| matches!(entry.queue, Queue::Normal | Queue::Soft))
        {
            self.park(member.slot, until);
        }
    }

    /// A member of a group may stand for eviction again.
    pub(crate) fn stand_forth(&mut self, now: Moment, member: Handle) {
        if self
            .resolve(member)
            .is_some_and(|entry| entry.queue == Queue::Parked)
            && self.lease_end(member.slot) <= now
        {
            self.unpark(member.slot);
        }
    }

    /// Begins a soft pin, or makes one longer.
    pub(super) fn pin(&mut self, now: Moment, slot: u32, ttl: Duration) {
        self.pin_until(slot, now + ttl, ttl);
    }

    fn pin_until(&mut self, slot: u32, until: Moment, ttl: Duration) {
        self.slab[slot].flags |= SOFT_PINNED;
        let old = self.pins.insert(slot, Pin { until, ttl });
        if let Some(old) = old {
            self.pin_ends.remove(&(old.until, slot));
        }
        self.pin_ends.insert((until, slot));
    }

    /// A read renews the entry's soft pin, if it has one.
    pub(super) fn renew_pin(&mut self, now: Moment, slot: u32) {
        if self.slab[slot].has(SOFT_PINNED)
            && let Some(pin) = self.pins.get(&slot).copied()
        {
            self.pin_until(slot, pin.until.max(now + pin.ttl), pin.ttl);
        }
    }

    pub(super) fn unpin(&mut self, slot: u32) {
        if let Some(pin) = self.pins.remove(&slot) {
            self.pin_ends.remove(&(pin.until, slot));
        }
        self.slab[slot].flags &= !SOFT_PINNED;
    }

    /// Puts entries back whose pin or lease has ended, as far as `moves` goes.
    fn settle_queues(&mut self, now: Moment, moves: &mut u32) {
        while let Some((until, slot)) = self.pin_ends.first().copied()
            && until <= now
            && *moves > 0
        {
            *moves -= 1;
            self.unpin(slot);
            if self.slab[slot].queue == Queue::Soft {
                self.leave_queue(slot);
                self.join_queue(slot);
            }
        }
        while let Some(((due, _), slot)) = self.parked.first()
            && due <= now.as_micros()
            && *moves > 0
        {
            *moves -= 1;
            let end = self.lease_end(slot);
            if end > now {
                self.parked
                    .raise_first((end.as_micros(), 0), &mut self.slab);
            } else {
                self.unpark(slot);
            }
        }
    }

    /// Evicts the first entry of a queue (`soft`: of the soft-pinned ones) if nothing protects it and it
    /// does not stand behind `limit`.
    pub(crate) fn evict_next(
        &mut self,
        now: Moment,
        soft: bool,
        limit: Key,
        reason: Reason,
        effects: &mut Effects,
    ) -> Victim {
        let mut moves = MOVES;
        self.settle_queues(now, &mut moves);
        while moves > 0 {
            moves -= 1;
            let heap = if soft {
                &mut self.soft
            } else {
                &mut self.normal
            };
            let Some((key, slot)) = heap.first() else {
                return Victim::Nobody;
            };
            let entry = &self.slab[slot];
            debug_assert_eq!(entry.phase, Phase::Complete, "only these stand in queues");
            let actual = entry.order();
            if actual > key {
                heap.raise_first(actual, &mut self.slab);
                continue;
            }
            let lease = self.lease_end(slot);
            if lease > now {
                self.park(slot, lease);
                continue;
            }
            if key > limit {
                return Victim::Beyond(key);
            }
            if let Some(group) = &self.slab[slot].group {
                return Victim::Member(self.handle(slot), group.clone());
            }
            self.retire(now, slot, reason, effects);
            return Victim::Gone;
        }
        Victim::Again
    }

    /// How a member of a group stands; `None`: it is gone.
    pub(crate) fn standing(&self, member: Handle) -> Option<Standing> {
        let entry = self.resolve(member)?;
        (entry.phase == Phase::Complete).then(|| Standing {
            key: entry.order(),
            lease: self.lease_end(member.slot),
            hard_pinned: entry.has(HARD_PINNED),
            soft_pin: self.pins.get(&member.slot).map(|pin| pin.until),
        })
    }

    /// Makes a member of a group as recent and as well pinned as the best of the others.
    pub(crate) fn lift(&mut self, now: Moment, member: Handle, to: Standing) {
        let Some(own) = self.standing(member) else {
            return;
        };
        let slot = member.slot;
        if to.key > own.key {
            let entry = &mut self.slab[slot];
            (entry.epoch.0, entry.index) = (to.key.0, !to.key.1);
        }
        if let Some(until) = to.soft_pin.filter(|until| *until > now)
            && own.soft_pin.is_none()
            && !own.hard_pinned
        {
            self.pin_until(slot, until, until.since(now));
            if self.slab[slot].queue == Queue::Normal {
                self.leave_queue(slot);
                self.join_queue(slot);
            }
        }
    }

    /// Evicts a member of a group that is leaving.
    pub(crate) fn evict_member(
        &mut self,
        now: Moment,
        member: Handle,
        reason: Reason,
        effects: &mut Effects,
    ) {
        if self.standing(member).is_some() {
            self.retire(now, member.slot, reason, effects);
        }
    }
}

impl Standing {
    /// What protects either protects both.
    pub(crate) fn best(self, other: Self) -> Self {
        Self {
            key: self.key.max(other.key),
            lease: self.lease.max(other.lease),
            hard_pinned: self.hard_pinned || other.hard_pinned,
            soft_pin: self.soft_pin.max(other.soft_pin),
        }
    }
}
