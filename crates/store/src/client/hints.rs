//! Where keys lie, as far as this client knows: those that it lately put or found.
//!
//! A hint is not the truth. It says what may be read *while* the master is asked (see `guess`); what was
//! read counts only if the master then names the same place and the same version. So nothing has to tell
//! a client that an object went, moved or was replaced: its hint is wrong from there on, and is replaced by what the master said.
//!
//! Only keys whose bytes take a round trip are noted. The table is made with the first of these, has a fixed number of places, and forgets what was
//! used least lately of [`WAYS`] that share a set. Keys are known by their hashes alone: if two had the same one, a
//! guess would be wrong.
//!
//! One lock, held for a few instructions a key.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use layercake_protocol::ids::SegmentId;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::Replica;
use layercake_transport::Engine;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::guess::FEW;
use super::places::{Place, Target};

/// How many hints share a set, and how many sets there are.
const WAYS: usize = 4;
const SETS: usize = 1024;

/// What may be found under a key.
#[derive(Clone, Debug)]
pub(super) struct Hint {
    pub(super) place: Place,
    /// Bytes of the payload.
    pub(super) size: u64,
}

/// The hints of a client.
#[derive(Debug, Default)]
pub(crate) struct Hints {
    /// Whether there are any, so that clients without don't take the lock.
    any: AtomicBool,
    hasher: RandomState,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// Set behind set, the one that was used last first. Empty until there is a first hint.
    entries: Vec<Option<Entry>>,
    /// One of each that entries name: an answer of the master's brings its own.
    targets: HashMap<SegmentId, Arc<Target>>,
}

#[derive(Debug)]
struct Entry {
    hash: u64,
    size: u64,
    replica: Replica,
    target: Arc<Target>,
}

impl Hints {
    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Relaxed)
    }

    /// Notes where complete objects lie, unless their bytes are there without a round trip.
    pub(super) fn note<'a>(
        &self,
        engine: &Engine,
        objects: impl IntoIterator<Item = (&'a ObjectKey, &'a Place, u64)>,
    ) {
        let far = |(_, place, _): &(_, &Place, _)| place.target.reads_ask(engine);
        let mut objects = objects.into_iter().filter(far).peekable();
        if objects.peek().is_none() {
            return;
        }
        let mut table = self.table.lock();
        for (key, place, size) in objects {
            let hash = self.hasher.hash_one(key);
            table.note(hash, place, size);
        }
        self.any.store(true, Ordering::Relaxed);
    }

    /// What is known of each key.
    pub(super) fn find(&self, keys: &[ObjectKey]) -> SmallVec<[Option<Hint>; FEW]> {
        let mut table = self.table.lock();
        let hints = keys.iter().map(|key| table.find(self.hasher.hash_one(key)));
        hints.collect()
    }

    /// Forgets a key that is not there.
    pub(super) fn forget(&self, key: &ObjectKey) {
        self.table.lock().forget(self.hasher.hash_one(key));
    }
}

impl Table {
    fn set(&mut self, hash: u64) -> &mut [Option<Entry>] {
        let sets = (self.entries.len() / WAYS) as u64;
        let first = hash.checked_rem(sets).unwrap_or_default();
        let first = usize::try_from(first).unwrap_or_default() * WAYS;
        let ways = WAYS.min(self.entries.len());
        &mut self.entries[first..first + ways]
    }

    /// Brings a hash's entry to the front of its set. `false`: it has none.
    fn use_now(set: &mut [Option<Entry>], hash: u64) -> bool {
        let known = |entry: &Option<Entry>| entry.as_ref().is_some_and(|it| it.hash == hash);
        let found = set.iter().position(known);
        if let Some(at) = found {
            set[..=at].rotate_right(1);
        }
        found.is_some()
    }

    fn note(&mut self, hash: u64, place: &Place, size: u64) {
        if self.entries.is_empty() {
            self.entries.resize_with(SETS * WAYS, || None);
        }
        let target = self.only(&place.target);
        let set = self.set(hash);
        if !Self::use_now(set, hash) {
            set.rotate_right(1);
        }
        set[0] = Some(Entry {
            hash,
            size,
            replica: place.replica,
            target,
        });
    }

    fn find(&mut self, hash: u64) -> Option<Hint> {
        let set = self.set(hash);
        if !Self::use_now(set, hash) {
            return None;
        }
        let entry = set[0].as_ref()?;
        Some(Hint {
            place: Place {
                target: Arc::clone(&entry.target),
                replica: entry.replica,
            },
            size: entry.size,
        })
    }

    fn forget(&mut self, hash: u64) {
        let set = self.set(hash);
        if Self::use_now(set, hash) {
            set[0] = None;
            set.rotate_left(1);
        }
    }

    /// The one that stands for all that are equal to it.
    fn only(&mut self, target: &Arc<Target>) -> Arc<Target> {
        if let Some(known) = self.targets.get(&target.segment)
            && known.is_same(target)
        {
            return Arc::clone(known);
        }
        if self.targets.len() == self.targets.capacity() {
            self.targets.retain(|_, it| Arc::strong_count(it) > 1);
        }
        self.targets.insert(target.segment, Arc::clone(target));
        Arc::clone(target)
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::endpoint::{Endpoint, HostId};
    use layercake_protocol::ids::{Capability, EngineId, Generation, MemoryKind, RegionId};
    use layercake_protocol::replica::Segment;
    use proptest::prelude::*;

    use super::super::places::Targets;
    use super::*;

    /// As each answer of the master's brings it.
    fn target(segment: u64) -> Arc<Target> {
        let segment = Segment {
            id: SegmentId(segment),
            name: "n".to_owned(),
            endpoint: Endpoint {
                engine: EngineId(segment.into()),
                tcp: "127.0.0.1:1".to_owned(),
                host: HostId([0; 16]),
                shm: None,
                pid: 1,
            },
            region: RegionId(1),
            capability: Capability([1; 16]),
            len: 1 << 30,
            kind: MemoryKind::Host,
        };
        Targets::new([&Arc::new(segment)]).first().expect("one")
    }

    fn place(segment: u64, generation: u64) -> Place {
        Place {
            target: target(segment),
            replica: Replica {
                segment: SegmentId(segment),
                offset: generation * 4096,
                header_len: 256,
                generation: Generation(generation),
            },
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Note(u64, u64, u64),
        Find(u64),
        Forget(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        // Few sets, so that they overflow.
        let hash = || (0..12_u64, 0..3_u64).prop_map(|(way, set)| way * SETS as u64 + set);
        let step = prop_oneof![
            3 => (hash(), 0..3_u64, 1..1000_u64).prop_map(|(h, s, g)| Step::Note(h, s, g)),
            3 => hash().prop_map(Step::Find),
            1 => hash().prop_map(Step::Forget),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Each set is a list of the keys that were used last.
        #[test]
        fn a_set_keeps_what_was_used_last(steps in steps()) {
            let mut table = Table::default();
            let mut model: Vec<(u64, Place)> = Vec::new();
            let of = |set: u64| move |(hash, _): &&(u64, Place)| hash % SETS as u64 == set;
            for step in steps {
                let (Step::Note(hash, ..) | Step::Find(hash) | Step::Forget(hash)) = step;
                let known = model.iter().position(|(it, _)| *it == hash);
                let before = known.map(|at| model.remove(at));
                match step {
                    Step::Note(hash, segment, generation) => {
                        table.note(hash, &place(segment, generation), generation);
                        model.insert(0, (hash, place(segment, generation)));
                        let mut kept: Vec<_> = model.iter().filter(of(hash % SETS as u64)).cloned().collect();
                        if kept.len() > WAYS {
                            let oldest = kept.pop().expect("some").0;
                            model.retain(|(it, _)| *it != oldest);
                        }
                    }
                    Step::Find(hash) => {
                        let found = table.find(hash);
                        let found = found.as_ref().map(|hint| (hint.place.replica, hint.size));
                        let expected = before.as_ref().map(|(_, at)| (at.replica, at.replica.generation.0));
                        prop_assert_eq!(found, expected);
                        model.splice(0..0, before);
                    }
                    Step::Forget(hash) => table.forget(hash),
                }
            }
            for (hash, at) in model {
                let hint = table.find(hash).expect("it was used lately");
                prop_assert_eq!(hint.place.replica, at.replica);
                prop_assert!(hint.place.target.is_same(&at.target));
            }
        }
    }

    #[test]
    fn segments_are_kept_once_and_only_as_long_as_hints_name_them() {
        let mut table = Table::default();
        for hash in 0..1000 {
            table.note(hash, &place(7, hash), 1);
        }
        assert_eq!(table.targets.len(), 1);
        // One key whose segment changes all the time.
        for segment in 0..10_000 {
            table.note(5, &place(segment, segment), 1);
        }
        assert!(table.targets.len() < 100, "{}", table.targets.len());
        let hint = table.find(5).expect("just noted");
        assert_eq!(hint.place.target.segment, SegmentId(9999));
    }
}
