//! Who relies on an entry's memory, and until when (requirements S5 and R6).
//!
//! Two kinds of leases protect an entry, and it is free of them when the later has ended. The *common* one
//! lies in the entry: probes and reads without a session grant it, and it runs out. *Readers* hold one each,
//! by client: a session renews it and gives it back. A client is a reader of an entry at most once, however
//! often it opens it: it counts its own sessions.
//!
//! Probes alone can't keep memory for ever. The first grants a full lease and starts a run; later ones of
//! the run extend the lease up to `probe_lease_factor` times its length after that start. A read ends the
//! run, and so does a time of one lease's length in which the entry was free: for so long it could be
//! evicted, and a scheduler that asks again long after gets a full lease again.
//!
//! A client that probes and then opens a session needs the probe's lease no longer. If nobody else rests on
//! the common lease, the session takes its place, so that all of it is given back at the session's end.

use hashbrown::hash_map::Entry;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{ClientId, Generation};

use super::entry::{ANYBODY, HAS_READERS, NO_PROBE, Phase, Queue};
use super::{Effects, Fate, Shard};
use crate::state::config::StateConfig;
use crate::state::moment::Moment;

/// One client that reads an entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader {
    pub(crate) client: ClientId,
    pub(crate) until: Moment,
}

/// The readers of one entry: nearly always one.
#[derive(Debug)]
pub(crate) struct Readers {
    first: Reader,
    more: Vec<Reader>,
}

impl Readers {
    fn iter(&self) -> impl Iterator<Item = &Reader> {
        std::iter::once(&self.first).chain(&self.more)
    }

    pub(crate) fn len(&self) -> usize {
        1 + self.more.len()
    }

    fn find(&mut self, client: ClientId) -> Option<&mut Reader> {
        std::iter::once(&mut self.first)
            .chain(&mut self.more)
            .find(|reader| reader.client == client)
    }

    fn until(&self) -> Moment {
        self.iter().map(|r| r.until).max().unwrap_or(Moment::START)
    }

    /// Keeps the readers that `keep` wants; false: none is left, and the value is of no use any more.
    fn retain(&mut self, keep: impl Fn(&Reader) -> bool) -> bool {
        self.more.retain(&keep);
        if keep(&self.first) {
            return true;
        }
        match self.more.pop() {
            Some(reader) => {
                self.first = reader;
                true
            }
            None => false,
        }
    }
}

/// Tells the clients that probe an entry apart, nearly always.
fn digest(client: ClientId) -> u32 {
    let folded = (client.0 >> 64) ^ client.0;
    let folded = ((folded >> 32) ^ folded) & u128::from(u32::MAX);
    u32::try_from(folded).unwrap_or(ANYBODY).min(ANYBODY - 1)
}

impl Shard {
    /// When the last lease of an entry ends.
    pub(crate) fn lease_end(&self, slot: u32) -> Moment {
        let entry = &self.slab[slot];
        if !entry.has(HAS_READERS) {
            return entry.lease;
        }
        let readers = self.readers.get(&slot);
        entry
            .lease
            .max(readers.map_or(Moment::START, Readers::until))
    }

    /// How many sessions have the entry open.
    pub(crate) fn open_readers(&self, now: Moment, slot: u32) -> usize {
        let readers = self.readers.get(&slot);
        readers.map_or(0, |r| r.iter().filter(|r| r.until > now).count())
    }

    /// A client's probe found the entry.
    pub(crate) fn grant_probe(
        &mut self,
        config: &StateConfig,
        now: Moment,
        slot: u32,
        client: ClientId,
    ) {
        let entry = &mut self.slab[slot];
        let full = now + config.lease;
        if entry.first_probe == NO_PROBE || now >= entry.lease + config.lease {
            let alone = entry.lease <= now;
            entry.prober = if alone { digest(client) } else { ANYBODY };
            entry.first_probe = now;
            entry.lease = entry.lease.max(full);
        } else {
            if entry.prober != digest(client) {
                entry.prober = ANYBODY;
            }
            let bound = entry.first_probe + config.lease * config.probe_lease_factor;
            entry.lease = entry.lease.max(full.min(bound));
        }
    }

    /// A read without a session found the entry.
    pub(crate) fn grant_read(&mut self, config: &StateConfig, now: Moment, slot: u32) {
        let entry = &mut self.slab[slot];
        entry.first_probe = NO_PROBE;
        entry.lease = entry.lease.max(now + config.lease);
        self.renew_pin(now, slot);
    }

    /// A session reads the entry, or goes on reading it.
    pub(crate) fn grant_session(
        &mut self,
        config: &StateConfig,
        now: Moment,
        slot: u32,
        client: ClientId,
    ) {
        let until = now + config.lease;
        let entry = &mut self.slab[slot];
        if entry.first_probe != NO_PROBE && entry.prober == digest(client) {
            entry.lease = Moment::START;
        }
        entry.first_probe = NO_PROBE;
        entry.flags |= HAS_READERS;
        let reader = Reader { client, until };
        match self.readers.entry(slot) {
            Entry::Vacant(none) => {
                none.insert(Readers {
                    first: reader,
                    more: Vec::new(),
                });
            }
            Entry::Occupied(mut readers) => match readers.get_mut().find(client) {
                Some(known) => known.until = known.until.max(until),
                None => readers.into_mut().more.push(reader),
            },
        }
        self.renew_pin(now, slot);
    }

    /// Renews a session's lease on one version of a key, whether it still has its name or not.
    ///
    /// A lease that ran out is granted anew while the version is still what the key names: its memory was
    /// not reused. Without a name, only a lease that holds can be renewed.
    pub(crate) fn renew(
        &mut self,
        config: &StateConfig,
        now: Moment,
        named: Option<u32>,
        generation: Generation,
        client: ClientId,
    ) -> Result<(), Refusal> {
        let named = named.filter(|slot| {
            let entry = &self.slab[*slot];
            entry.generation == generation && entry.phase == Phase::Complete
        });
        if let Some(slot) = named {
            let entry = &self.slab[slot];
            let leaving = entry.group.as_ref().is_some_and(|g| g.is_leaving());
            if leaving && !self.reads(now, slot, client) {
                return Err(Refusal::LeaseExpired);
            }
            self.grant_session(config, now, slot, client);
            return Ok(());
        }
        match self.removed.get(&generation.0).copied() {
            Some(slot) if self.reads(now, slot, client) => {
                self.grant_session(config, now, slot, client);
                Ok(())
            }
            _ => Err(Refusal::LeaseExpired),
        }
    }

    fn reads(&mut self, now: Moment, slot: u32, client: ClientId) -> bool {
        self.readers
            .get_mut(&slot)
            .and_then(|readers| readers.find(client))
            .is_some_and(|reader| reader.until > now)
    }

    /// Ends a session on one version of a key.
    pub(crate) fn end_session(
        &mut self,
        now: Moment,
        named: Option<u32>,
        generation: Generation,
        client: ClientId,
        effects: &mut Effects,
    ) {
        let named = named.filter(|slot| self.slab[*slot].generation == generation);
        let removed = || self.removed.get(&generation.0).copied();
        if let Some(slot) = named.or_else(removed) {
            self.forget_readers(now, slot, |reader| reader.client == client, effects);
        }
    }

    /// Takes readers off an entry, and lets it go where they held it.
    fn forget_readers(
        &mut self,
        now: Moment,
        slot: u32,
        forget: impl Fn(&Reader) -> bool,
        effects: &mut Effects,
    ) {
        let Some(readers) = self.readers.get_mut(&slot) else {
            return;
        };
        if !readers.retain(|reader| !forget(reader)) {
            self.readers.remove(&slot);
            self.slab[slot].flags &= !HAS_READERS;
        }
        let end = self.lease_end(slot);
        let entry = &self.slab[slot];
        if end > now {
            // What is left may end before what was given back would have.
            if entry.phase == Phase::Removed {
                self.removed_due = self.removed_due.min(end);
            }
            return;
        }
        if entry.phase == Phase::Removed {
            self.let_go(slot, effects);
            return;
        }
        if let Some(group) = &entry.group
            && group.unblock()
        {
            effects.unblocked.push(group.clone());
        }
        if entry.queue == Queue::Parked {
            self.unpark(slot);
        }
    }

    /// A removed version that nobody relies on any more.
    fn let_go(&mut self, slot: u32, effects: &mut Effects) {
        self.removed.remove(&self.slab[slot].generation.0);
        self.vacate(slot, Fate::Release, effects);
    }

    /// Ends all sessions of a client.
    pub(crate) fn forget_client(&mut self, now: Moment, client: ClientId, effects: &mut Effects) {
        let slots: Vec<u32> = self.readers.keys().copied().collect();
        for slot in slots {
            self.forget_readers(now, slot, |reader| reader.client == client, effects);
        }
    }

    /// Forgets sessions whose lease has ended: they were not renewed in time.
    pub(crate) fn forget_lapsed_readers(&mut self, now: Moment, effects: &mut Effects) {
        let slots: Vec<u32> = self.readers.keys().copied().collect();
        for slot in slots {
            self.forget_readers(now, slot, |reader| reader.until <= now, effects);
        }
    }

    /// Lets removed versions go whose last lease has ended.
    pub(crate) fn sweep_removed(&mut self, now: Moment, effects: &mut Effects) {
        if now < self.removed_due {
            return;
        }
        let mut due = Moment::END;
        let mut over = Vec::new();
        for slot in self.removed.values() {
            let end = self.lease_end(*slot);
            if end <= now {
                over.push(*slot);
            } else {
                due = due.min(end);
            }
        }
        self.removed_due = due;
        for slot in over {
            self.let_go(slot, effects);
        }
    }
}
