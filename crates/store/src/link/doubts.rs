//! Reservations of which a write ended without an answer from the owner of the memory.
//!
//! Such a write may still be carried out, long after this side has given up on it, so this member can't
//! confirm that nothing of the reservation is in flight: neither by a revoke, nor by its answer to a
//! command, nor by leaving. What is noted here stays noted, whatever becomes of the session, since
//! the master may ask again later. The oldest entries that the master knows of are forgotten beyond
//! [`MOST_TOLD`]; then everything up to them counts as in doubt, which costs the master a fence.

use std::collections::{BTreeSet, HashMap};

use layercake_protocol::ids::Generation;
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::ObjectRef;
use parking_lot::Mutex;

const MOST_TOLD: usize = 65_536;

#[derive(Debug, Default)]
pub(super) struct Doubts(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// The master does not know yet.
    untold: HashMap<Generation, (Tenant, ObjectKey)>,
    told: BTreeSet<Generation>,
    /// The greatest that was forgotten.
    forgotten: Option<Generation>,
}

impl Doubts {
    pub(super) fn note(&self, tenant: &Tenant, object: &ObjectRef) {
        let mut inner = self.0.lock();
        if !inner.told.contains(&object.generation) {
            let named = || (tenant.clone(), object.key.clone());
            inner.untold.entry(object.generation).or_insert_with(named);
        }
    }

    /// The master has answered a revoke that says so.
    pub(super) fn told(&self, generation: Generation) {
        let mut inner = self.0.lock();
        if inner.untold.remove(&generation).is_some() {
            inner.told.insert(generation);
        }
        if inner.told.len() > MOST_TOLD {
            let oldest = inner.told.pop_first();
            inner.forgotten = inner.forgotten.max(oldest);
        }
    }

    pub(super) fn has(&self, generation: Generation) -> bool {
        let inner = self.0.lock();
        inner.untold.contains_key(&generation)
            || inner.told.contains(&generation)
            || inner.forgotten.is_some_and(|last| generation <= last)
    }

    /// What the master does not know yet, by tenant.
    pub(super) fn untold(&self) -> HashMap<Tenant, Vec<ObjectRef>> {
        let mut by_tenant: HashMap<Tenant, Vec<ObjectRef>> = HashMap::new();
        for (generation, (tenant, key)) in &self.0.lock().untold {
            let object = ObjectRef {
                key: key.clone(),
                generation: *generation,
            };
            by_tenant.entry(tenant.clone()).or_default().push(object);
        }
        by_tenant
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(generation: u64) -> ObjectRef {
        ObjectRef {
            key: ObjectKey::new("k").expect("a key"),
            generation: Generation(generation),
        }
    }

    #[test]
    fn a_doubt_outlives_what_the_master_was_told() {
        let (doubts, tenant) = (Doubts::default(), Tenant::default());
        doubts.note(&tenant, &object(7));
        assert!(doubts.has(Generation(7)) && !doubts.has(Generation(6)));
        assert_eq!(
            doubts.untold(),
            HashMap::from([(tenant.clone(), vec![object(7)])])
        );
        doubts.told(Generation(7));
        doubts.told(Generation(8));
        doubts.note(&tenant, &object(7));
        assert!(doubts.untold().is_empty(), "it knows");
        assert!(doubts.has(Generation(7)), "it may ask again");
        assert!(!doubts.has(Generation(8)), "nobody was in doubt about it");
    }

    #[test]
    fn what_was_forgotten_counts_as_in_doubt() {
        let (doubts, tenant) = (Doubts::default(), Tenant::default());
        for generation in 10..=MOST_TOLD as u64 + 10 {
            doubts.note(&tenant, &object(generation));
            doubts.told(Generation(generation));
        }
        assert!(doubts.has(Generation(10)), "the one that was forgotten");
        assert!(doubts.has(Generation(3)), "and all before it");
        assert!(!doubts.has(Generation(MOST_TOLD as u64 + 11)));
        assert_eq!(doubts.0.lock().told.len(), MOST_TOLD);
    }
}
