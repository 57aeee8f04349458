//! A bounded table whose entries vanish when they are not used for a while.
//!
//! Two maps take turns: new and used entries are in the young one, and every so often the old one is
//! thrown away and the young one becomes it. So expiry and the bound cost nothing per entry: no timers,
//! no scan. An entry is kept for at least `keep` after its last use, at most twice that; when the
//! table is full, turns come early and the entries longest unused go first.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use crate::state::Moment;

#[derive(Debug)]
pub(crate) struct Expiring<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    turned: Moment,
    keep: Duration,
    /// Of each map.
    capacity: usize,
}

impl<K: Eq + Hash, V> Expiring<K, V> {
    /// A table of at most `capacity` entries (two at least).
    pub(crate) fn new(capacity: usize, keep: Duration) -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
            turned: Moment::START,
            keep,
            capacity: (capacity / 2).max(1),
        }
    }

    fn turn(&mut self, now: Moment) {
        let passed = now.since(self.turned);
        if passed < self.keep {
            return;
        }
        self.old = std::mem::take(&mut self.young);
        if passed >= self.keep * 2 {
            self.old.clear();
        }
        self.turned = now;
    }

    pub(crate) fn insert(&mut self, now: Moment, key: K, value: V) {
        self.turn(now);
        if self.young.len() >= self.capacity {
            self.old = std::mem::take(&mut self.young);
            self.turned = now;
        }
        self.young.insert(key, value);
    }

    /// Takes the entry out.
    pub(crate) fn take(&mut self, now: Moment, key: &K) -> Option<V> {
        self.turn(now);
        self.young.remove(key).or_else(|| self.old.remove(key))
    }

    /// Whether the entry is there; counts as a use of it.
    pub(crate) fn touch(&mut self, now: Moment, key: &K) -> bool {
        self.turn(now);
        if self.young.contains_key(key) {
            return true;
        }
        match self.old.remove_entry(key) {
            Some((key, value)) => {
                self.insert(now, key, value);
                true
            }
            None => false,
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::START + Duration::from_secs(seconds)
    }

    #[test]
    fn an_entry_lives_as_long_as_it_is_used() {
        let mut table = Expiring::new(100, Duration::from_secs(10));
        table.insert(at(0), "used", 1);
        table.insert(at(0), "unused", 2);
        for second in 1..100 {
            assert!(table.touch(at(second), &"used"), "at {second} s");
        }
        assert!(!table.touch(at(100), &"unused"));
        assert!(table.touch(at(105), &"used"));
        assert!(
            !table.touch(at(200), &"used"),
            "nothing outlives a long silence"
        );
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn an_entry_is_taken_once() {
        let mut table = Expiring::new(100, Duration::from_secs(10));
        table.insert(at(0), "k", 1);
        assert_eq!(table.take(at(11), &"k"), Some(1), "from the old map");
        assert_eq!(table.take(at(11), &"k"), None);
    }

    #[test]
    fn a_full_table_lets_the_longest_unused_go() {
        let mut table = Expiring::new(8, Duration::from_secs(10));
        for key in 0..1000 {
            table.insert(at(1), key, ());
            assert!(table.touch(at(1), &key));
            assert!(table.len() <= 8);
        }
        assert!(!table.touch(at(1), &0));
        assert!(table.touch(at(1), &997));
    }
}
