//! Makes room (requirement S6).
//!
//! One order holds across all shards: of what may go, the earliest epoch first and within it the largest
//! prefix index; soft-pinned objects behind all others. The evictor merges the shards' queues by it: it
//! takes from the shard whose first entry comes first, until that shard's next one stands behind another
//! shard's. So prefixes are shortened from their tails, whatever shards their blocks hash to.
//!
//! It runs in the background above the watermark, down to one `eviction_ratio` below it and a bounded number
//! of objects a step; and at once inside an allocation that finds no room. The latter stops as soon as a
//! hole is large enough. Since the order is kept, contiguous room is not sought out but waited for, and
//! segments that the caller can't reach are not left out: what one allocation may evict is bounded, and after
//! that it is refused.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use super::State;
use super::alloc::granule_bytes;
use super::effects::{Effects, Extent, Reason};
use super::groups::{Group, Handle};
use super::moment::Moment;
use super::placement::{Placed, Placement};
use super::shard::{Key, Standing, Victim};

/// Objects that one background step evicts at most.
const STEP: u64 = 16_384;

/// Objects that are evicted under one hold of a shard's lock.
const RUN: usize = 64;

/// An allocation may evict this many times its own length, or one `eviction_ratio` of the pool if that is
/// more; and in any case no more objects than this.
const PATIENCE: u64 = 64;
const MOST_OBJECTS: u64 = 65_536;

/// For a further replica, when one has been placed, only this many times.
const PATIENCE_FOR_MORE: u64 = 8;

/// Background eviction goes on from step to step until it reached its goal.
#[derive(Debug, Default)]
pub(super) struct Pressure {
    over: bool,
}

/// What an eviction is to achieve, or has achieved. It stops at either.
#[derive(Clone, Copy, Debug, Default)]
struct Goal {
    /// Of the granules that come free.
    bytes: u64,
    objects: u64,
}

impl State {
    /// Finds places for one object, evicting others where there is no room. `wanted`: bytes that this call
    /// still needs in all, which are made room for at once. What comes back is empty if there is no room,
    /// and has fewer replicas than wanted where there is room for fewer only.
    pub(super) fn find_room(
        &self,
        now: Moment,
        placement: &Placement<'_>,
        extent: Extent,
        wanted: u64,
    ) -> Placed {
        let replicas = placement.replicas(extent.len());
        let mut placed = Placed::default();
        if placement.place(extent, replicas, &mut placed) {
            return placed;
        }
        let _pressure = self.evicting.lock();
        self.call_holds_back(now);
        self.sweep_removed(now);
        let need = granule_bytes(extent.len());
        let share = self.share(placement.capacity(), self.config.eviction_ratio);
        let mut step = need.max(wanted.min(share));
        let mut evicted = Goal::default();
        while !placement.place(extent, replicas, &mut placed) {
            let patience = if placed.places.is_empty() {
                share.max(need.saturating_mul(PATIENCE))
            } else {
                need.saturating_mul(PATIENCE_FOR_MORE)
            };
            if evicted.bytes >= patience || evicted.objects >= MOST_OBJECTS {
                break;
            }
            let goal = Goal {
                bytes: step,
                objects: MOST_OBJECTS - evicted.objects,
            };
            let reached = self.evict(now, goal, Reason::Allocation);
            if reached.bytes == 0 {
                break;
            }
            evicted.bytes += reached.bytes;
            evicted.objects += reached.objects;
            step = need;
        }
        placed
    }

    /// One step of background eviction, if the pool is fuller than its watermark or was and the goal is not
    /// reached yet.
    pub(super) fn relieve(&self, now: Moment) {
        // Whoever holds it makes room already.
        let Some(mut pressure) = self.evicting.try_lock() else {
            return;
        };
        let view = self.pool.view();
        let cells = || view.cells().filter(|cell| cell.is_mounted());
        let capacity = cells().map(|cell| cell.capacity()).sum();
        let used: u64 = cells().map(|cell| cell.used()).sum();
        let high = self.share(capacity, self.config.high_watermark);
        let low = high.saturating_sub(self.share(capacity, self.config.eviction_ratio));
        pressure.over = used > high || (pressure.over && used > low);
        if pressure.over {
            self.call_holds_back(now);
            let goal = Goal {
                bytes: used - low,
                objects: STEP,
            };
            let reached = self.evict(now, goal, Reason::Watermark);
            pressure.over = reached.bytes > 0 && reached.bytes < goal.bytes;
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::unused_self,
        reason = "a share of a size is not negative, and below it; a method reads better"
    )]
    pub(super) fn share(&self, bytes: u64, ratio: f64) -> u64 {
        (bytes as f64 * ratio) as u64
    }

    /// Evicts objects in order until the goal is reached, and returns how far that went. The caller holds
    /// `evicting`.
    fn evict(&self, now: Moment, goal: Goal, reason: Reason) -> Goal {
        let mut effects = Effects::default();
        for soft in [false, true] {
            if soft && !self.config.evict_soft_pinned {
                break;
            }
            if self.evict_in_order(now, soft, goal, reason, &mut effects) {
                break;
            }
        }
        let reached = Goal {
            bytes: effects.freed_bytes,
            objects: effects.gone[reason as usize].objects,
        };
        self.tally.count_eviction(reached.objects);
        self.carry_out(now, &mut effects);
        reached
    }

    /// True: the goal is reached.
    fn evict_in_order(
        &self,
        now: Moment,
        soft: bool,
        goal: Goal,
        reason: Reason,
        effects: &mut Effects,
    ) -> bool {
        // Stands before everything: the real key of such a shard is not known yet.
        let unknown: Key = (0, 0);
        let mut heads: BinaryHeap<_> = (0..self.shards.len())
            .map(|number| Reverse((unknown, number)))
            .collect();
        let done = |effects: &Effects| {
            let objects = effects.gone[reason as usize].objects;
            effects.freed_bytes >= goal.bytes || objects >= goal.objects
        };
        while let Some(Reverse((_, number))) = heads.pop() {
            let limit = heads.peek().map_or((u64::MAX, u32::MAX), |head| head.0.0);
            let mut shard = self.shard(number);
            for turn in 0.. {
                if done(effects) {
                    return true;
                }
                let victim = if turn < RUN {
                    shard.evict_next(now, soft, limit, reason, effects)
                } else {
                    Victim::Again
                };
                match victim {
                    Victim::Gone => continue,
                    Victim::Nobody => {}
                    Victim::Beyond(key) => heads.push(Reverse((key, number))),
                    Victim::Again => heads.push(Reverse((unknown, number))),
                    Victim::Member(member, group) => {
                        drop(shard);
                        self.evict_group(now, member, &group, reason, effects);
                        heads.push(Reverse((unknown, number)));
                    }
                }
                break;
            }
        }
        done(effects)
    }

    /// A member of a group has come first in the order: evicts the group, or puts the member where the best
    /// of the group stands.
    pub(super) fn evict_group(
        &self,
        now: Moment,
        first: Handle,
        group: &Arc<Group>,
        reason: Reason,
        effects: &mut Effects,
    ) {
        // Before the look, so that a lease that is given back meanwhile is not missed.
        group.block();
        let members = group.members();
        let best = self.best_standing(&members);
        let own = self.shard(first.shard as usize).standing(first);
        let Some(own) = own else {
            group.unblock();
            return;
        };
        let until = if best.hard_pinned {
            now + self.config.lease
        } else {
            best.lease
        };
        if until > now {
            let mut shard = self.shard(first.shard as usize);
            shard.stand_back(first, until);
            return;
        }
        group.unblock();
        let better_pin = own.soft_pin.is_none() && best.soft_pin.is_some_and(|end| end > now);
        if best.key > own.key || better_pin {
            self.shard(first.shard as usize).lift(now, first, best);
            return;
        }
        group.set_leaving(true);
        let best = self.best_standing(&members);
        if best.lease > now {
            group.block();
            let mut shard = self.shard(first.shard as usize);
            shard.stand_back(first, best.lease);
        } else {
            for member in members {
                let mut shard = self.shard(member.shard as usize);
                shard.evict_member(now, member, reason, effects);
            }
        }
        group.set_leaving(false);
    }

    fn best_standing(&self, members: &[Handle]) -> Standing {
        let standings = members
            .iter()
            .filter_map(|member| self.shard(member.shard as usize).standing(*member));
        standings.fold(Standing::default(), Standing::best)
    }

    /// Lets memory go whose last reader's lease has ended.
    pub(super) fn sweep_removed(&self, now: Moment) {
        let mut effects = Effects::default();
        for number in 0..self.shards.len() {
            self.shard(number).sweep_removed(now, &mut effects);
        }
        self.carry_out(now, &mut effects);
    }
}
