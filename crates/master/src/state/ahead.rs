//! Looks a call's keys up before their turn comes.
//!
//! The way to an entry leads through three places in memory: the line of the index, the entry, and the key's
//! text. In a large table none of them is in a cache, and one after the other they take most of a call's
//! time. So the keys of a batch take each of these steps together, a window at a time: the processor
//! fetches many lines at once, and the call proper finds all of them in its cache.
//!
//! After a pause the shards themselves are in no cache either, so a call's first window begins with them. For a call that adds
//! entries or ends put sessions, the steps also ask for what it is going to write: the next vacant places, and sessions.
//!
//! A step first looks where things lie, which reads only what the step before has fetched, and then asks for
//! all of them. Mixed, what is read would wait behind what is asked for.
//!
//! This is a hint only. Locks are held for one shard's keys and one step, what others hold is left out,
//! and what is found here may change before the call comes to it: the call looks again.

use super::State;
use super::prefetch::Span;
use super::shard::{KeyHash, Shard};

/// Keys that are looked ahead for at once. What is fetched for them stays well inside a core's own cache.
const WINDOW: usize = 256;

/// With fewer keys the call itself is as quick.
const FEWEST: usize = 4;

/// What a call is about to do with its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// It reads entries that are there, and changes them where they lie.
    Visit,
    /// It adds entries.
    Add,
    /// It ends put sessions.
    End,
}

/// "None" in a chain of keys.
const END: u16 = u16::MAX;

/// The hashes of a call's keys, in their order.
pub(super) struct Ahead<'a, K> {
    state: &'a State,
    purpose: Purpose,
    tenant: u32,
    keys: K,
    window: Vec<Hashed>,
    /// What comes next in the window.
    at: usize,
    /// The first key of each shard in the window.
    heads: Vec<u16>,
    /// The shards that have any.
    shards: Vec<usize>,
    /// What is to be fetched at the end of a step.
    wanted: Vec<Span>,
}

/// A key of the window.
struct Hashed {
    hash: KeyHash,
    /// Of the entry that it seems to name.
    slot: Option<u32>,
    /// The next key of the same shard.
    next: u16,
}

impl State {
    /// Hashes the keys of a call, and sees to it that their entries are at hand when their turn comes.
    pub(super) fn ahead<'a, K>(&'a self, purpose: Purpose, tenant: u32, keys: K) -> Ahead<'a, K>
    where
        K: ExactSizeIterator<Item = &'a str>,
    {
        Ahead {
            state: self,
            purpose,
            tenant,
            keys,
            window: Vec::new(),
            at: 0,
            heads: Vec::new(),
            shards: Vec::new(),
            wanted: Vec::new(),
        }
    }
}

impl<'a, K: ExactSizeIterator<Item = &'a str>> Iterator for Ahead<'a, K> {
    type Item = KeyHash;

    fn next(&mut self) -> Option<KeyHash> {
        if self.at == self.window.len() {
            if self.keys.len() < FEWEST {
                let key = self.keys.next()?;
                return Some(self.state.hasher.hash(self.tenant, key));
            }
            self.look();
        }
        self.at += 1;
        Some(self.window[self.at - 1].hash)
    }
}

impl<'a, K: ExactSizeIterator<Item = &'a str>> Ahead<'a, K> {
    /// Fills the window with the next keys and fetches what belongs to them.
    fn look(&mut self) {
        self.at = 0;
        let first = self.heads.is_empty();
        self.window.clear();
        self.window.reserve(self.keys.len().min(WINDOW));
        self.heads.resize(self.state.shards.len(), END);
        self.shards.reserve(self.heads.len());
        let mut len = 0;
        for (number, key) in (0..).zip(self.keys.by_ref().take(WINDOW)) {
            len = key.len();
            let hash = self.state.hasher.hash(self.tenant, key);
            let next = std::mem::replace(&mut self.heads[hash.shard], number);
            if next == END {
                self.shards.push(hash.shard);
                if first {
                    Span::of(&self.state.shards[hash.shard]).fetch();
                }
            }
            self.window.push(Hashed {
                hash,
                slot: None,
                next,
            });
        }
        let (adds, ends) = (self.purpose == Purpose::Add, self.purpose == Purpose::End);
        self.wanted
            .reserve(self.window.len() * if adds || ends { 4 } else { 1 });
        self.step(|shard, key, before, wanted| {
            wanted.push(shard.line(key.hash.tag));
            if adds && before == 0 {
                // The keys of a deployment have a few lengths.
                wanted.extend_from_slice(&shard.ways(len));
            }
        });
        self.step(|shard, key, before, wanted| {
            key.slot = shard.tagged(key.hash.tag);
            if let Some(slot) = key.slot {
                wanted.push(shard.place(slot));
            }
            if adds {
                wanted.extend_from_slice(&shard.vacancies(len, before));
            }
        });
        self.step(|shard, key, before, wanted| {
            if let Some(slot) = key.slot {
                wanted.push(shard.text(slot));
                if ends {
                    wanted.extend_from_slice(&shard.endings(slot, before));
                }
            }
        });
        for shard in self.shards.drain(..) {
            self.heads[shard] = END;
        }
    }

    /// Does one step of the way for all keys of the window. `look` is told how many keys of the shard come before.
    fn step(&mut self, look: impl Fn(&Shard, &mut Hashed, usize, &mut Vec<Span>)) {
        for number in &self.shards {
            let Some(shard) = self.state.shards[*number].try_lock() else {
                continue;
            };
            let mut at = self.heads[*number];
            let mut before = 0;
            while let Some(key) = self.window.get_mut(at as usize) {
                look(&shard, key, before, &mut self.wanted);
                at = key.next;
                before += 1;
            }
        }
        self.wanted.drain(..).for_each(Span::fetch);
    }
}
