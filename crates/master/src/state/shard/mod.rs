//! One part of the object table: entries, their names, sessions, leases and order of eviction, under one
//! lock.
//!
//! A shard knows nothing of segments, members or other shards. What a change means for them goes into
//! [`Effects`]; whether a segment is alive comes in as a function. Every name is in `index` at most
//! once, with the version that counts: a complete one, or an open reservation. A replacement under way
//! (upsert) is an entry without a name, linked from the version it will replace; when that one goes, by
//! commit or otherwise, the replacement inherits the name. A version that loses its name under a lease
//! stays as a `Removed` entry, found by its generation.
//!
//! By subject: [`lease`] has readers and probes, [`put`] the reservations, [`order`] the queues of
//! eviction, [`scan`] what visits all entries.

mod chunks;
mod entry;
mod index;
mod lease;
mod order;
mod put;
mod queue;
mod scan;
mod sessions;
mod slab;
mod texts;

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};

use layercake_protocol::early::EarlyTable;
use layercake_protocol::fingerprint::Fingerprint;

pub(crate) use super::effects::{Effects, Fate, Reason};
use super::groups::Handle;
use super::memory::TableMemory;
use super::moment::Moment;
use super::numbers::NumberMap;
use super::prefetch::Span;

pub(crate) use entry::{Entry, HARD_PINNED, Phase, Place, Places, SOFT_PINNED};
use entry::{HAS_READERS, REPLACEMENT, WATCHED};
use index::Index;
pub(crate) use order::{Standing, Victim};
pub(crate) use put::{Open, Reservation};
pub(crate) use queue::Key;
use queue::SlotHeap;
pub(crate) use scan::Departure;
use sessions::Sessions;
use slab::Slab;
use texts::{Text, Texts};

/// A key's place in the table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeyHash {
    pub(crate) shard: usize,
    /// Tells keys of a shard apart, nearly always.
    pub(crate) tag: u32,
}

/// Spreads keys over shards and within them, by a secret: keys come from outside.
#[derive(Clone, Debug)]
pub(crate) struct KeyHasher {
    state: RandomState,
    shards: usize,
}

impl KeyHasher {
    /// For a table of `shards` parts, a power of two.
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            state: RandomState::new(),
            shards,
        }
    }

    pub(crate) fn hash(&self, tenant: u32, key: &str) -> KeyHash {
        let hash = self.state.hash_one((tenant, key));
        KeyHash {
            shard: (hash >> 32) as usize & (self.shards - 1),
            tag: (hash & 0xFFFF_FFFF) as u32,
        }
    }
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Shard {
    number: u32,
    hasher: KeyHasher,
    slab: Slab,
    texts: Texts,
    index: Index,
    origins: Origins,
    normal: SlotHeap,
    soft: SlotHeap,
    parked: SlotHeap,
    pins: NumberMap<u32, order::Pin>,
    pin_ends: BTreeSet<(Moment, u32)>,
    readers: NumberMap<u32, lease::Readers>,
    open: Sessions<Open>,
    /// From a version to the one that will replace it.
    replacements: NumberMap<u32, u32>,
    /// Versions without a name by generation.
    removed: NumberMap<u64, u32>,
    /// No lease of a removed version ends before this.
    removed_due: Moment,
    complete: u64,
}

impl Shard {
    /// An empty one; what grows with it lies in `memory`.
    pub(crate) fn new(number: u32, hasher: KeyHasher, memory: &TableMemory) -> Self {
        Self {
            number,
            hasher,
            slab: Slab::new(memory.clone()),
            texts: Texts::new(memory.clone()),
            index: Index::new(memory.clone()),
            origins: Origins::default(),
            normal: SlotHeap::default(),
            soft: SlotHeap::default(),
            parked: SlotHeap::default(),
            pins: NumberMap::default(),
            pin_ends: BTreeSet::new(),
            readers: NumberMap::default(),
            open: Sessions::default(),
            replacements: NumberMap::default(),
            removed: NumberMap::default(),
            removed_due: Moment::END,
            complete: 0,
        }
    }

    /// The slot of the version that has this name.
    pub(crate) fn find(&self, tag: u32, tenant: u32, key: &str) -> Option<u32> {
        self.index.find(tag, |slot| {
            let entry = &self.slab[slot];
            entry.tenant == tenant && self.texts.bytes(entry.key) == key.as_bytes()
        })
    }

    /// What [`find`](Self::find) reads first.
    pub(crate) fn line(&self, tag: u32) -> Span {
        self.index.line(tag)
    }

    /// The slot that a key with this tag names, nearly always.
    pub(crate) fn tagged(&self, tag: u32) -> Option<u32> {
        self.index.find(tag, |_| true)
    }

    /// What [`find`](Self::find) reads next: the entry in this slot.
    pub(crate) fn place(&self, slot: u32) -> Span {
        Span::of(&self.slab[slot])
    }

    /// What it reads last: the text of the entry's key.
    pub(crate) fn text(&self, slot: u32) -> Span {
        Span::of(self.texts.bytes(self.slab[slot].key))
    }

    /// What leads to the places that the next new key, of so many bytes, takes.
    pub(crate) fn ways(&self, len: usize) -> [Span; 4] {
        let [runs, chunk] = self.texts.way(len);
        [self.slab.way(), runs, chunk, self.origins.last()]
    }

    /// What a new key of so many bytes takes after `before` others, besides a place in the index: that of its entry, its
    /// text, and its session.
    pub(crate) fn vacancies(&self, len: usize, before: usize) -> [Span; 3] {
        [
            self.slab.vacancy(before),
            self.texts.vacancy(len, before),
            self.open.vacancy(before),
        ]
    }

    /// What the end of the put session on this entry reads and writes besides, after `before` others: the session, and
    /// the end of the order of eviction.
    pub(crate) fn endings(&self, slot: u32, before: usize) -> [Span; 2] {
        let open = self.session_of(slot).map(Span::of);
        [open.unwrap_or_default(), self.normal.vacancy(before)]
    }

    fn session_of(&self, slot: u32) -> Option<&Open> {
        let is_open = self.slab[slot].is_open();
        is_open.then(|| self.open.get(&self.slab, slot)).flatten()
    }

    pub(crate) fn entry(&self, slot: u32) -> &Entry {
        &self.slab[slot]
    }

    /// Where the writer of this reservation publishes what it has written, if it does so.
    pub(crate) fn early_table(&self, slot: u32) -> Option<EarlyTable> {
        let writing = self.slab[slot].phase == Phase::Writing;
        self.session_of(slot)?.early.filter(|_| writing)
    }

    /// Asks to be told when this reservation ends. False: it is none.
    pub(crate) fn watch(&mut self, slot: u32) -> bool {
        let entry = &mut self.slab[slot];
        let open = entry.is_open();
        if open {
            entry.flags |= WATCHED;
        }
        open
    }

    pub(crate) fn entry_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.slab[slot]
    }

    /// The entry of a handle, if it is still the same.
    pub(crate) fn resolve(&self, handle: Handle) -> Option<&Entry> {
        let known = handle.slot < self.slab.bound();
        known
            .then(|| &self.slab[handle.slot])
            .filter(|entry| entry.generation == handle.generation)
    }

    /// The key of an entry; empty without a name.
    pub(crate) fn key(&self, entry: &Entry) -> &str {
        self.texts.get(entry.key)
    }

    /// Fingerprint and layout of an entry.
    pub(crate) fn origin(&self, slot: u32) -> (Option<Fingerprint>, u64) {
        self.origins.get(self.slab[slot].origin)
    }

    /// Complete objects.
    pub(crate) fn complete(&self) -> u64 {
        self.complete
    }

    pub(crate) fn put_sessions(&self) -> u64 {
        self.open.len() as u64
    }

    pub(crate) fn soft_pinned(&self) -> u64 {
        self.pins.len() as u64
    }

    pub(crate) fn removed_leased(&self) -> u64 {
        self.removed.len() as u64
    }

    pub(crate) fn get_sessions(&self) -> u64 {
        self.readers.values().map(|r| r.len() as u64).sum()
    }

    /// Names the entry in a slot.
    pub(crate) fn handle(&self, slot: u32) -> Handle {
        Handle {
            shard: self.number,
            slot,
            generation: self.slab[slot].generation,
        }
    }

    /// Gives a slot the name that its entry has; `tag` is the key's.
    fn name(&mut self, tag: u32, slot: u32) {
        self.index.insert(tag, slot);
    }

    /// Takes the name of a slot away, and gives it to the version that was to replace it, if there is one.
    fn unname(&mut self, slot: u32) {
        let entry = &mut self.slab[slot];
        let key = std::mem::replace(&mut entry.key, Text::NONE);
        let tag = self.hasher.hash(entry.tenant, self.texts.get(key)).tag;
        let Some(heir) = self.replacements.remove(&slot) else {
            self.index.remove(tag, slot);
            self.texts.release(key);
            return;
        };
        self.index.replace(tag, slot, heir);
        let entry = &mut self.slab[heir];
        entry.key = key;
        entry.flags &= !REPLACEMENT;
        if let Some(open) = self.open.get_mut(&self.slab, heir) {
            open.replaces = None;
        }
    }

    /// Ends a complete version: its name goes, and its memory unless somebody relies on it.
    pub(crate) fn retire(&mut self, now: Moment, slot: u32, reason: Reason, effects: &mut Effects) {
        self.leave_queue(slot);
        self.unpin(slot);
        self.unname(slot);
        let handle = self.handle(slot);
        let lease = self.lease_end(slot);
        let entry = &mut self.slab[slot];
        debug_assert_eq!(
            entry.phase,
            Phase::Complete,
            "only complete versions retire"
        );
        if let Some(group) = entry.group.take() {
            group.remove(handle);
        }
        effects.count(reason, entry.size);
        effects.discharge(entry.tenant, entry.charge());
        self.complete -= 1;
        if lease > now && !entry.places.is_empty() {
            entry.phase = Phase::Removed;
            entry.flags &= HAS_READERS;
            effects.places(&entry.places, entry.extent(), Fate::Hold);
            self.removed.insert(entry.generation.0, slot);
            self.removed_due = self.removed_due.min(lease);
        } else {
            self.vacate(slot, Fate::Free, effects);
        }
    }

    /// Makes a slot vacant whose entry has no name, queue or session of a writer any more.
    fn vacate(&mut self, slot: u32, fate: Fate, effects: &mut Effects) {
        let entry = self.slab.release(slot);
        debug_assert_eq!(entry.key, Text::NONE, "its name was taken away before");
        if entry.has(HAS_READERS) {
            self.readers.remove(&slot);
        }
        self.origins.release(entry.origin);
        effects.places(&entry.places, entry.extent(), fate);
    }
}

/// The pairs of fingerprint and layout in use: a deployment has one or a few, its objects millions.
#[derive(Debug, Default)]
struct Origins {
    numbers: HashMap<Origin, u32>,
    /// With the number of entries that name it.
    pairs: Vec<(Origin, u64)>,
    vacant: Vec<u32>,
    /// The one that was taken last, and nearly always is taken next.
    last: u32,
}

type Origin = (Option<Fingerprint>, u64);

impl Origins {
    fn take(&mut self, origin: Origin) -> u32 {
        if let Some((last, uses)) = self.pairs.get_mut(self.last as usize)
            && *last == origin
        {
            *uses += 1;
            return self.last;
        }
        let number = self.numbers.get(&origin).copied().unwrap_or_else(|| {
            let number = self.vacant.pop().unwrap_or_else(|| {
                self.pairs.push((origin, 0));
                u32::try_from(self.pairs.len() - 1).expect("no more of them than entries")
            });
            self.pairs[number as usize] = (origin, 0);
            self.numbers.insert(origin, number);
            number
        });
        self.pairs[number as usize].1 += 1;
        let before = std::mem::replace(&mut self.last, number);
        self.forget_unused(before);
        number
    }

    /// What is used nearly always is used again, so the one that was taken last is kept.
    fn forget_unused(&mut self, number: u32) {
        if number != self.last
            && let Some((origin, 0)) = self.pairs.get(number as usize)
            && self.numbers.remove(origin).is_some()
        {
            self.vacant.push(number);
        }
    }

    /// Where the one lies that was taken last.
    fn last(&self) -> Span {
        let last = self.pairs.get(self.last as usize);
        last.map(Span::of).unwrap_or_default()
    }

    fn get(&self, number: u32) -> Origin {
        self.pairs[number as usize].0
    }

    fn release(&mut self, number: u32) {
        self.pairs[number as usize].1 -= 1;
        self.forget_unused(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_that_was_taken_last_is_kept_and_others_as_long_as_they_are_used() {
        let mut origins = Origins::default();
        let [a, b, c] = [1, 2, 3].map(|layout| (None, layout));
        let first = origins.take(a);
        origins.release(first);
        assert_eq!((origins.take(a), origins.numbers.len()), (first, 1));
        let second = origins.take(b);
        assert_eq!(origins.get(first), a);
        origins.release(first);
        assert_eq!(origins.numbers.len(), 1, "nobody uses the first any more");
        origins.release(second);
        let third = origins.take(c);
        assert_eq!(origins.numbers.len(), 1, "nor the second");
        assert_eq!((origins.get(third), origins.take(c)), (c, third));
        let again = origins.take(a);
        assert_eq!((origins.get(again), origins.get(third)), (a, c));
        assert_eq!((origins.numbers.len(), origins.pairs.len()), (2, 2));
    }
}
