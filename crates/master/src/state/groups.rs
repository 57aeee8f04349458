//! Objects that are evicted together.
//!
//! A group is as recent, and as well pinned, as the best of its members, and goes only when none of them
//! is leased. Its members lie in different shards, whose locks are never held together, so eviction takes
//! two passes. First `leaving` is set and every member is looked at; from then on a member's shard
//! grants no lease on it, since a lease and the look happen under the same lock. Only if none was
//! leased, the second pass removes them; otherwise `leaving` is taken back, and `blocked` asks whoever
//! gives a member's lease back to let the others stand for eviction again.
//!
//! What is reserved but not committed is no member yet: it doesn't keep its group, and stays when it goes.
//!
//! Locks: `members` and the registry are leaves; a shard's lock may be held.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use layercake_protocol::ids::Generation;
use parking_lot::Mutex;

/// An entry of the object table: good as long as the slot still holds that generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Handle {
    pub(crate) shard: u32,
    pub(crate) slot: u32,
    pub(crate) generation: Generation,
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Group {
    name: Box<str>,
    leaving: AtomicBool,
    blocked: AtomicBool,
    members: Mutex<BTreeSet<Handle>>,
}

impl Group {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the group is about to be evicted: nobody may begin to rely on a member.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::SeqCst)
    }

    pub(crate) fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, Ordering::SeqCst);
    }

    /// Remembers that members stand back because of others.
    pub(crate) fn block(&self) {
        self.blocked.store(true, Ordering::SeqCst);
    }

    /// Whether members stood back; they don't any more.
    pub(crate) fn unblock(&self) -> bool {
        self.blocked.load(Ordering::SeqCst) && self.blocked.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn add(&self, member: Handle) {
        self.members.lock().insert(member);
    }

    pub(crate) fn remove(&self, member: Handle) {
        self.members.lock().remove(&member);
    }

    pub(crate) fn members(&self) -> Vec<Handle> {
        self.members.lock().iter().copied().collect()
    }
}

/// The groups by tenant and name. A group lives as long as an entry names it.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    groups: HashMap<u32, HashMap<Box<str>, Weak<Group>>>,
    len: usize,
    sweep_at: usize,
}

impl Groups {
    /// The group of this name, made if there is none.
    pub(crate) fn get(&self, tenant: u32, name: &str) -> Arc<Group> {
        let mut table = self.table.lock();
        if let Some(group) = table
            .groups
            .get(&tenant)
            .and_then(|groups| groups.get(name))
            .and_then(Weak::upgrade)
        {
            return group;
        }
        if table.len >= table.sweep_at {
            table.sweep();
        }
        let group = Arc::new(Group {
            name: name.into(),
            leaving: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            members: Mutex::default(),
        });
        let groups = table.groups.entry(tenant).or_default();
        if groups.insert(name.into(), Arc::downgrade(&group)).is_none() {
            table.len += 1;
        }
        group
    }
}

impl Table {
    /// Forgets the names of groups that are gone; at most every other name is one then.
    fn sweep(&mut self) {
        for groups in self.groups.values_mut() {
            groups.retain(|_, group| group.strong_count() > 0);
        }
        self.groups.retain(|_, groups| !groups.is_empty());
        self.len = self.groups.values().map(HashMap::len).sum();
        self.sweep_at = (self.len * 2).max(1024);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_one_while_it_lives_and_its_name_is_forgotten_after() {
        let groups = Groups::default();
        let first = groups.get(0, "g");
        assert!(Arc::ptr_eq(&first, &groups.get(0, "g")));
        assert!(!Arc::ptr_eq(&first, &groups.get(1, "g")));
        for n in 0..10_000 {
            groups.get(0, &n.to_string());
        }
        assert!(groups.table.lock().len <= 2048);
        assert!(Arc::ptr_eq(&first, &groups.get(0, "g")));
    }
}
