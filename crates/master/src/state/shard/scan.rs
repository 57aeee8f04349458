//! What visits all entries of a shard, in steps, so that nobody waits for the lock for long.

use layercake_protocol::ids::Generation;

use super::entry::{Entry, Phase, Place, REPLACEMENT};
use super::{Effects, Fate, Reason, Shard};
use crate::state::moment::Moment;

/// Slots that are visited under one hold of the lock.
const STEP: u32 = 512;

/// What becomes of replicas in segments that go.
#[derive(Clone, Copy)]
pub(crate) struct Departure<'a> {
    /// Whether a place lies in a segment that goes.
    pub(crate) goes: &'a dyn Fn(Place) -> bool,
    /// The memory is there as long as somebody relies on it.
    pub(crate) drain: bool,
    pub(crate) reason: Reason,
}

impl Shard {
    /// The slots after `from` that one step visits; empty: all were visited.
    fn step(&self, from: u32) -> std::ops::Range<u32> {
        from..from.saturating_add(STEP).min(self.slab.bound())
    }

    /// Visits the entries that have names, a step at a time. Returns where to go on.
    pub(crate) fn visit(&self, from: u32, mut visit: impl FnMut(u32, &Entry)) -> Option<u32> {
        let step = self.step(from);
        for slot in step.clone() {
            let entry = &self.slab[slot];
            let named = matches!(
                entry.phase,
                Phase::Reserved | Phase::Writing | Phase::Complete
            ) && !entry.has(REPLACEMENT);
            if named {
                visit(slot, entry);
            }
        }
        (!step.is_empty()).then_some(step.end)
    }

    /// Removes the complete objects of a tenant whose keys match, a step at a time.
    pub(crate) fn remove_matching(
        &mut self,
        now: Moment,
        from: u32,
        tenant: u32,
        matches: &dyn Fn(&str) -> bool,
        force: bool,
        effects: &mut Effects,
    ) -> Option<u32> {
        let step = self.step(from);
        for slot in step.clone() {
            let entry = &self.slab[slot];
            if entry.phase == Phase::Complete
                && entry.tenant == tenant
                && (force || self.lease_end(slot) <= now)
                && matches(self.key(entry))
            {
                self.retire(now, slot, Reason::Removed, effects);
            }
        }
        (!step.is_empty()).then_some(step.end)
    }

    /// Takes the replicas of segments that go away from their objects, a step at a time.
    ///
    /// An object without another replica loses its name. While a segment is drained its memory stays valid:
    /// what is leased or being written keeps its place, and a later pass takes it.
    pub(crate) fn depart(
        &mut self,
        now: Moment,
        from: u32,
        departure: Departure<'_>,
        effects: &mut Effects,
    ) -> Option<u32> {
        let step = self.step(from);
        for slot in step.clone() {
            let entry = &self.slab[slot];
            let places = entry.places.as_slice();
            if !places.iter().any(|place| (departure.goes)(*place)) {
                continue;
            }
            let last = places.iter().all(|place| (departure.goes)(*place));
            match entry.phase {
                Phase::Complete if last => {
                    if !departure.drain {
                        self.slab[slot].places = super::Places::None;
                    }
                    self.retire(now, slot, departure.reason, effects);
                }
                Phase::Complete if !departure.drain || self.lease_end(slot) <= now => {
                    self.prune(slot, &|place| !(departure.goes)(place), effects);
                }
                Phase::Writing | Phase::Removed if !departure.drain => {
                    self.prune_lost(slot, departure, effects);
                }
                _ => {}
            }
        }
        (!step.is_empty()).then_some(step.end)
    }

    /// Takes lost places from an entry that is being written, or that only readers know. The writer learns
    /// at the end if nothing is left.
    fn prune_lost(&mut self, slot: u32, departure: Departure<'_>, effects: &mut Effects) {
        let entry = &mut self.slab[slot];
        entry.places.retain(|place| !(departure.goes)(place));
        if entry.phase == Phase::Removed && entry.places.is_empty() {
            let Generation(number) = entry.generation;
            self.removed.remove(&number);
            self.vacate(slot, Fate::Release, effects);
        }
    }
}
