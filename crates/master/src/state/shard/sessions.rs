//! The open put sessions of a shard, one behind the other.
//!
//! An entry that is open stands in no queue, so its `position` says where its session lies here: a session is found,
//! added and taken out without a search, and the place of the next one is known ahead of time.

use super::slab::Slab;
use crate::state::prefetch::Span;

/// See the module's description. Every method is given the shard's entries.
#[derive(Debug)]
pub(crate) struct Sessions<T>(Vec<(u32, T)>);

impl<T> Default for Sessions<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Sessions<T> {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The session on the entry in this slot, if that is open.
    pub(crate) fn get(&self, slab: &Slab, slot: u32) -> Option<&T> {
        let (owner, open) = self.0.get(slab[slot].position as usize)?;
        (*owner == slot).then_some(open)
    }

    pub(crate) fn get_mut(&mut self, slab: &Slab, slot: u32) -> Option<&mut T> {
        let (owner, open) = self.0.get_mut(slab[slot].position as usize)?;
        (*owner == slot).then_some(open)
    }

    /// Opens a session on an entry that has none.
    pub(crate) fn insert(&mut self, slab: &mut Slab, slot: u32, open: T) {
        slab[slot].position = u32::try_from(self.0.len()).expect("no more of them than entries");
        self.0.push((slot, open));
    }

    /// Takes the session of an entry out; the last one moves into its place.
    pub(crate) fn remove(&mut self, slab: &mut Slab, slot: u32) -> Option<T> {
        self.get(slab, slot)?;
        let position = slab[slot].position;
        let (_, open) = self.0.swap_remove(position as usize);
        if let Some((moved, _)) = self.0.get(position as usize) {
            slab[*moved].position = position;
        }
        Some(open)
    }

    /// Slots of the entries whose session `is` accepts.
    pub(crate) fn slots(&self, is: impl Fn(&T) -> bool) -> Vec<u32> {
        let found = self.0.iter().filter(|(_, open)| is(open));
        found.map(|(slot, _)| *slot).collect()
    }

    /// Where the session will lie that is added after `before` others.
    pub(crate) fn vacancy(&self, before: usize) -> Span {
        Span::behind(&self.0, before)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::state::memory::TableMemory;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn holds_what_a_map_from_slots_holds(
            steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..200),
        ) {
            let mut slab = Slab::new(TableMemory::default());
            let mut sessions = Sessions::default();
            let mut model: BTreeMap<u32, usize> = BTreeMap::new();
            // Slots whose entry has no session; what their position says is no session's.
            let mut others: Vec<u32> = (0..5).map(|_| slab.take()).collect();
            for (number, (open, chosen)) in steps.into_iter().enumerate() {
                if open {
                    let slot = others.pop().unwrap_or_else(|| slab.take());
                    sessions.insert(&mut slab, slot, number);
                    model.insert(slot, number);
                } else if !model.is_empty() {
                    let slot = *model.keys().nth(chosen.index(model.len())).expect("one of them");
                    prop_assert_eq!(sessions.remove(&mut slab, slot), model.remove(&slot));
                    others.push(slot);
                }
                prop_assert_eq!(sessions.len(), model.len());
                for (slot, number) in &model {
                    prop_assert_eq!(sessions.get(&slab, *slot), Some(number));
                    prop_assert_eq!(sessions.get_mut(&slab, *slot).copied(), Some(*number));
                }
                for slot in &others {
                    prop_assert_eq!(sessions.get(&slab, *slot), None);
                    prop_assert_eq!(sessions.remove(&mut slab, *slot), None);
                }
                let mut even = sessions.slots(|number| number % 2 == 0);
                even.sort_unstable();
                let expected = model.iter().filter(|(_, number)| *number % 2 == 0);
                prop_assert_eq!(even, expected.map(|(slot, _)| *slot).collect::<Vec<_>>());
            }
        }
    }
}
