//! Who owns which session (W3). Pure; the worker asks it before it acts, and tells it what came of it.
//!
//! It keeps two relations. *Puts*: objects that are being saved, each by one owner, from the moment
//! they are wanted until they are settled; other requests with the same block follow. *Committed*: what
//! of a request is known to be stored, by index in its table, so that a later chunk can load it again
//! into the blocks the request has *then*. Reads have no owners here: within a step they are shared by row
//! ([`plan`](crate::plan)), and none outlives its step.
//!
//! A put is cancelled when its owner loses its blocks or computed from void ones. Cancelling is a mark:
//! whoever holds the session sees it at the next step (`may_write`, `may_commit`), revokes, and
//! settles. A cancelled put is never committed unless its commit had begun, and that begins only when
//! every byte has been read. So once a request has no unsettled put, nothing reads its blocks. Whoever can't wait
//! for that goes on all the same: what is read from the blocks since the cancel comes from a source that was withdrawn
//! then, and the store neither counts nor publishes it.
//!
//! Where ranks compute together, a load that failed on one makes void what all compute from there on. So a
//! request that loads is *in doubt* until the results of all ranks for that step are known, and its puts
//! wait with their commit for that, and are not published before it ([`doubt`](Tracker::doubt),
//! [`confirm`](Tracker::confirm)).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

use layercake_protocol::ids::Epoch;
use layercake_store::Source;

use crate::contract::{BlockId, RequestId, TableUpdate};

/// What became of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// It is readable.
    Committed,
    /// Somebody else has stored it: readable, too.
    Elsewhere,
    /// It is not there, as far as is known.
    Lost,
}

/// How a request's part of a step begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// As the step before went on.
    Continues,
    /// With a new attempt; saves of the old one are cancelled.
    StartsOver,
    /// Not at all: a later attempt is known.
    Stale,
    /// Not at all: its attempt goes on from steps that are not known.
    Unknown,
}

/// Sessions of one worker by owner. `K` names an object.
#[derive(Debug)]
pub struct Tracker<K> {
    requests: HashMap<RequestId, Request<K>>,
    puts: HashMap<K, Put>,
    /// Unsettled puts by owner; outlives the request.
    unsettled: HashMap<RequestId, usize>,
    /// Under which a request's objects are reserved; kept as long as it is known or has unsettled puts.
    epochs: HashMap<RequestId, Epoch>,
    /// The results of all ranks are known for every step up to this one.
    confirmed: u64,
    /// Requests that were known so far: names come again.
    begun: u64,
}

#[derive(Debug)]
struct Request<K> {
    /// Which of those with its name it is.
    number: u64,
    attempt: u32,
    /// The last step in which it computed from blocks that were just loaded; 0: none.
    doubt: u64,
    /// What this attempt saves from: its blocks. Withdrawn when it computed from void ones, or lost them: nothing more
    /// of it is saved.
    source: Source,
    table: Vec<BlockId>,
    /// Objects of it that are being saved, by whomever.
    saved: usize,
    committed: BTreeMap<u32, K>,
}

#[derive(Debug)]
struct Put {
    owner: RequestId,
    /// Whose request has the object, the owner's first.
    of: Vec<Had>,
    state: PutState,
    source: Source,
    /// The step whose results it waits for; 0: none.
    awaits: u64,
}

/// A request that has an object at this index.
#[derive(Debug)]
struct Had {
    request: RequestId,
    number: u64,
    index: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PutState {
    Open,
    Cancelled,
    Committing,
}

impl<K> Default for Tracker<K> {
    fn default() -> Self {
        Self {
            requests: HashMap::new(),
            puts: HashMap::new(),
            unsettled: HashMap::new(),
            epochs: HashMap::new(),
            confirmed: 0,
            begun: 0,
        }
    }
}

impl<K: Clone + Eq + Hash + Ord> Tracker<K> {
    /// A request is part of a step.
    pub fn begin(&mut self, request: &RequestId, attempt: u32, table: &TableUpdate) -> Begun {
        let known = self.requests.get(request).map(|known| known.attempt);
        let begun = match known {
            Some(known) if known > attempt => return Begun::Stale,
            // A step that was missed told its beginning.
            None if !table.begins => return Begun::Unknown,
            Some(known) if known < attempt && !table.begins => return Begun::Unknown,
            Some(known) if known < attempt => {
                self.cancel(request);
                Begun::StartsOver
            }
            _ => Begun::Continues,
        };
        let number = self.begun + 1;
        let entry = self
            .requests
            .entry(request.clone())
            .or_insert_with(|| Request {
                number,
                attempt,
                doubt: 0,
                source: Source::new(),
                table: Vec::new(),
                saved: 0,
                committed: BTreeMap::new(),
            });
        if entry.attempt != attempt {
            entry.attempt = attempt;
            entry.source = Source::new();
        }
        if table.replace {
            entry.table.clear();
        }
        entry.table.extend_from_slice(&table.blocks);
        self.begun = number;
        begun
    }

    /// The block that a request has at this index now.
    pub fn block(&self, request: &RequestId, index: u32) -> Option<BlockId> {
        let table = &self.requests.get(request)?.table;
        table.get(index as usize).copied()
    }

    /// A request computes in this step from blocks that are loaded in it: what it saves from here on is not
    /// committed before the step is confirmed.
    pub fn doubt(&mut self, request: &RequestId, step: u64) {
        if let Some(entry) = self.requests.get_mut(request) {
            entry.doubt = step;
        }
    }

    /// The results of all ranks are known for every step up to this one, and what is void by them has been
    /// cancelled.
    pub fn confirm(&mut self, step: u64) {
        self.confirmed = step;
    }

    /// Whether a request has one of these blocks.
    pub fn uses(&self, request: &RequestId, blocks: &BTreeSet<BlockId>) -> bool {
        let entry = self.requests.get(request);
        entry.is_some_and(|entry| entry.table.iter().any(|block| blocks.contains(block)))
    }

    /// The epoch under which a request's objects were first reserved; unset before.
    pub fn epoch(&self, request: &RequestId) -> Epoch {
        self.epochs.get(request).copied().unwrap_or(Epoch::UNSET)
    }

    /// A request's objects were reserved under this epoch. The first one stays.
    pub fn note_epoch(&mut self, request: &RequestId, epoch: Epoch) {
        if self.is_known(request) {
            self.epochs.entry(request.clone()).or_insert(epoch);
        }
    }

    fn is_known(&self, request: &RequestId) -> bool {
        self.requests.contains_key(request) || self.unsettled.contains_key(request)
    }

    /// What a request has had committed of the block at this index: to be loaded again where the engine
    /// does not keep blocks.
    pub fn committed(&self, request: &RequestId, index: u32) -> Option<&K> {
        self.requests.get(request)?.committed.get(&index)
    }

    /// A request has an object to save from the block at this index. The block, if a put is to be opened: not
    /// if the object is being saved already, is known to be stored, or would be void.
    pub fn want_put(&mut self, request: &RequestId, index: u32, key: &K) -> Option<BlockId> {
        let entry = self.requests.get_mut(request)?;
        let block = *entry.table.get(index as usize)?;
        if entry.source.is_withdrawn() || entry.committed.get(&index) == Some(key) {
            return None;
        }
        let had = Had {
            request: request.clone(),
            number: entry.number,
            index,
        };
        entry.saved += 1;
        if let Some(put) = self.puts.get_mut(key) {
            put.of.push(had);
            return None;
        }
        let put = Put {
            owner: request.clone(),
            of: vec![had],
            state: PutState::Open,
            source: entry.source.clone(),
            awaits: entry.doubt,
        };
        self.puts.insert(key.clone(), put);
        *self.unsettled.entry(request.clone()).or_default() += 1;
        Some(block)
    }

    /// What a put is written from: withdrawn when the put is cancelled.
    pub fn source(&self, key: &K) -> Option<Source> {
        self.puts.get(key).map(|put| put.source.clone())
    }

    /// Whether bytes of a put may still be read from the engine's blocks; if not, it is to be revoked.
    pub fn may_write(&self, key: &K) -> bool {
        self.puts
            .get(key)
            .is_some_and(|put| put.state == PutState::Open)
    }

    /// Whether a put has to wait with its commit for the results of all ranks.
    pub fn must_wait(&self, key: &K) -> bool {
        self.puts
            .get(key)
            .is_some_and(|put| put.state == PutState::Open && put.awaits > self.confirmed)
    }

    /// Whether what is written of a put may be published at once: not if another rank may yet report that it was computed
    /// from void blocks. What this step loads on this rank is the caller's to know.
    pub fn may_publish(&self, key: &K) -> bool {
        self.puts
            .get(key)
            .is_some_and(|put| put.state == PutState::Open && put.awaits <= self.confirmed)
    }

    /// Whether a put whose bytes are all written may be committed; if not, and it need not
    /// [wait](Self::must_wait), it is to be revoked. From here on it can't be cancelled.
    pub fn may_commit(&mut self, key: &K) -> bool {
        match self.puts.get_mut(key) {
            Some(put) if put.state == PutState::Open && put.awaits <= self.confirmed => {
                put.state = PutState::Committing;
                true
            }
            _ => false,
        }
    }

    /// A put is over. `false`: it was before.
    pub fn settle(&mut self, key: &K, outcome: PutOutcome) -> bool {
        let Some(put) = self.puts.remove(key) else {
            return false;
        };
        if let Some(count) = self.unsettled.get_mut(&put.owner) {
            *count -= 1;
            if *count == 0 {
                self.unsettled.remove(&put.owner);
            }
        }
        if !self.is_known(&put.owner) {
            self.epochs.remove(&put.owner);
        }
        for had in put.of {
            let entry = self.requests.get_mut(&had.request);
            let Some(entry) = entry.filter(|entry| entry.number == had.number) else {
                continue;
            };
            entry.saved -= 1;
            if outcome != PutOutcome::Lost {
                entry.committed.insert(had.index, key.clone());
            }
        }
        true
    }

    /// Every put is over, without an object. How many there were.
    pub fn lose_all(&mut self) -> u64 {
        let keys: Vec<K> = self.puts.keys().cloned().collect();
        for key in &keys {
            self.settle(key, PutOutcome::Lost);
        }
        keys.len() as u64
    }

    /// What a request has computed in this attempt is void: nothing of it is to be committed.
    pub fn cancel(&mut self, request: &RequestId) {
        if let Some(entry) = self.requests.get_mut(request) {
            entry.source.withdraw();
        }
        if !self.unsettled.contains_key(request) {
            return;
        }
        let puts = self.puts.values_mut();
        for put in puts.filter(|put| put.owner == *request && put.state == PutState::Open) {
            put.state = PutState::Cancelled;
            put.source.withdraw();
        }
    }

    /// Cancels everybody in `requests` whose table has a void block, and forgets that these blocks were
    /// committed: what the store does not give back is saved again.
    pub fn cancel_users_of<'a>(
        &mut self,
        void: &BTreeSet<BlockId>,
        requests: impl IntoIterator<Item = &'a RequestId>,
    ) {
        if void.is_empty() {
            return;
        }
        for request in requests {
            if !self.uses(request, void) {
                continue;
            }
            self.cancel(request);
            if let Some(Request {
                table, committed, ..
            }) = self.requests.get_mut(request)
            {
                let block = |index: u32| table.get(index as usize);
                committed.retain(|index, _| block(*index).is_none_or(|b| !void.contains(b)));
            }
        }
    }

    /// A request lost its blocks: its puts are cancelled, and all else about it is forgotten.
    pub fn preempt(&mut self, request: &RequestId) {
        self.cancel(request);
        self.finish(request);
    }

    /// Steps were missed: every request may have lost its blocks. Which these are.
    pub fn forget_all(&mut self) -> Vec<RequestId> {
        // Also those that have ended: what is still saved of them may be void, or others' blocks by now.
        let all = self.requests.keys().chain(self.unsettled.keys());
        let all: BTreeSet<RequestId> = all.cloned().collect();
        for request in &all {
            self.preempt(request);
        }
        all.into_iter().collect()
    }

    /// A request has ended: its puts go on.
    pub fn finish(&mut self, request: &RequestId) {
        self.requests.remove(request);
        if !self.is_known(request) {
            self.epochs.remove(request);
        }
    }

    /// Puts of a request that are not settled: as long as there is one, its blocks may be read.
    pub fn unsettled(&self, request: &RequestId) -> usize {
        self.unsettled.get(request).copied().unwrap_or(0)
    }

    /// Whether an object of a request is being saved, by whomever.
    pub fn is_saved(&self, request: &RequestId) -> bool {
        let entry = self.requests.get(request);
        entry.is_some_and(|entry| entry.saved > 0)
    }

    /// Whether nothing is open and nobody is known.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.puts.is_empty() && self.epochs.is_empty()
    }

    /// Puts that are not settled.
    pub fn open_puts(&self) -> usize {
        self.puts.len()
    }
}

#[cfg(test)]
mod tests;
