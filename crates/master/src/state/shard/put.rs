//! Reservations: from the first claim of a name to commit, revoke or loss (requirements S2, S7, R8).
//!
//! A name is claimed first (`Reserved`), memory is found without the shard's lock, and then filled in
//! (`Writing`). The number under which the claim was made is replaced by a fresh one at that point: drawn
//! after the memory was taken, it is greater than every number that was ever written into that memory.
//!
//! A reservation ends once: its writer commits or revokes it, which says that no transfer is in flight, so
//! its memory is free at once where it is not kept; or it is taken away, and then its memory goes to
//! [`Dropped`] until late writes are ruled out.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::early::EarlyTable;
use layercake_protocol::error::Refusal;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::ids::{ClientId, EngineId, Epoch, Generation};

use super::entry::{
    ANYBODY, Entry, HARD_PINNED, NO_PROBE, Phase, Place, Places, Queue, REPLACEMENT, REPLACING,
    WATCHED,
};
use super::texts::Text;
use super::{Effects, Fate, Reason, Shard};
use crate::state::config::StateConfig;
use crate::state::effects::Dropped;
use crate::state::groups::{Group, Handle};
use crate::state::moment::Moment;
use crate::state::tenants::Tenants;

/// An open put session.
#[derive(Debug)]
pub(crate) struct Open {
    writer: ClientId,
    engine: Option<EngineId>,
    since: Moment,
    /// The soft pin that the object gets when it is committed.
    soft_pin: Option<Duration>,
    /// Or the one that the version has which this one replaces.
    keep_soft_pin: bool,
    /// Its commit is a use.
    refresh_at_end: bool,
    /// The version that this one will replace.
    pub(super) replaces: Option<u32>,
    /// It has the bytes of that version, and is of no use without it.
    copies: bool,
    /// Where the writer publishes what it has written.
    pub(super) early: Option<EarlyTable>,
}

/// What a writer wants to reserve.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each says one thing about the object, and none excludes another"
)]
pub(crate) struct Reservation<'a> {
    pub(crate) tenant: u32,
    pub(crate) key: &'a str,
    pub(crate) size: u64,
    pub(crate) header_len: u32,
    pub(crate) group: Option<Arc<Group>>,
    pub(crate) origin: (Option<Fingerprint>, u64),
    pub(crate) epoch: Epoch,
    pub(crate) index: u32,
    pub(crate) hard_pin: bool,
    pub(crate) soft_pin: Option<Duration>,
    pub(crate) keep_soft_pin: bool,
    pub(crate) refresh_at_end: bool,
    pub(crate) writer: ClientId,
    pub(crate) engine: Option<EngineId>,
    /// Replace a complete version; take an open reservation over.
    pub(crate) upsert: bool,
    /// The version whose bytes these are: only it is replaced, and nothing is taken over.
    pub(crate) copy_of: Option<Generation>,
    /// Where the writer publishes what it has written.
    pub(crate) early: Option<EarlyTable>,
    /// Names the claim until memory is found.
    pub(crate) claim: Generation,
    /// Replicas that the tenant is charged for.
    pub(crate) charged: u8,
    /// Who charges it, where quotas rule.
    pub(crate) quotas: Option<&'a Tenants>,
}

impl Reservation<'_> {
    /// Charges the tenant, or refuses to.
    fn charge(&self) -> Result<(), Refusal> {
        let bytes = self.size.saturating_mul(self.charged.into());
        match self.quotas {
            Some(tenants) => tenants.charge(self.tenant, bytes),
            None => Ok(()),
        }
    }
}

impl Shard {
    /// Claims a name. `alive` tells whether a place lies in a segment that is read from. The
    /// tenant is charged when nothing else is in the way.
    pub(crate) fn reserve(
        &mut self,
        config: &StateConfig,
        now: Moment,
        tag: u32,
        wanted: Reservation<'_>,
        alive: &dyn Fn(Place) -> bool,
        effects: &mut Effects,
    ) -> Result<Handle, Refusal> {
        if let Some(version) = wanted.copy_of {
            return self.reserve_copy(now, tag, version, wanted);
        }
        while let Some(slot) = self.find(tag, wanted.tenant, wanted.key) {
            let entry = &self.slab[slot];
            if entry.is_open() {
                let open = self.session_of(slot).expect("an open entry has a session");
                let lost = entry.phase == Phase::Writing && entry.places.is_empty();
                let overdue = now.since(open.since) >= config.discard_after;
                if !(wanted.upsert || overdue || lost) {
                    return Err(Refusal::InProgress);
                }
                self.drop_open(slot, effects);
                continue;
            }
            if !entry.places.as_slice().iter().any(|place| alive(*place)) {
                self.retire(now, slot, Reason::Lost, effects);
                continue;
            }
            let entry = &mut self.slab[slot];
            entry.touch(wanted.epoch, wanted.index);
            if !wanted.upsert {
                return Err(Refusal::AlreadyExists);
            }
            wanted.charge()?;
            if entry.has(REPLACING) {
                self.drop_open(self.replacements[&slot], effects);
            }
            return Ok(self.claim(now, tag, wanted, Some(slot)));
        }
        wanted.charge()?;
        Ok(self.claim(now, tag, wanted, None))
    }

    /// Claims the place beside a complete version for a copy of it.
    fn reserve_copy(
        &mut self,
        now: Moment,
        tag: u32,
        version: Generation,
        wanted: Reservation<'_>,
    ) -> Result<Handle, Refusal> {
        let slot = self.find(tag, wanted.tenant, wanted.key);
        let slot = slot.ok_or(Refusal::NotFound)?;
        let entry = &self.slab[slot];
        if entry.is_open() {
            return Err(Refusal::NotReady);
        }
        if entry.generation != version {
            return Err(Refusal::Superseded);
        }
        if entry.has(REPLACING) {
            return Err(Refusal::InProgress);
        }
        wanted.charge()?;
        Ok(self.claim(now, tag, wanted, Some(slot)))
    }

    fn claim(
        &mut self,
        now: Moment,
        tag: u32,
        wanted: Reservation<'_>,
        replaces: Option<u32>,
    ) -> Handle {
        let slot = self.slab.take();
        let mut flags = 0;
        if wanted.hard_pin {
            flags |= HARD_PINNED;
        }
        if replaces.is_some() {
            flags |= REPLACEMENT;
        }
        self.slab[slot] = Entry {
            key: if replaces.is_some() {
                Text::NONE
            } else {
                self.texts.store(wanted.key)
            },
            size: wanted.size,
            generation: wanted.claim,
            epoch: wanted.epoch,
            lease: Moment::START,
            first_probe: NO_PROBE,
            prober: ANYBODY,
            places: Places::None,
            group: wanted.group,
            header_len: wanted.header_len,
            index: wanted.index,
            position: 0,
            origin: self.origins.take(wanted.origin),
            tenant: wanted.tenant,
            phase: Phase::Reserved,
            queue: Queue::None,
            flags,
            charged: wanted.charged,
        };
        let open = Open {
            writer: wanted.writer,
            engine: wanted.engine,
            since: now,
            soft_pin: wanted.soft_pin,
            keep_soft_pin: wanted.keep_soft_pin,
            refresh_at_end: wanted.refresh_at_end,
            replaces,
            copies: wanted.copy_of.is_some(),
            early: wanted.early,
        };
        self.open.insert(&mut self.slab, slot, open);
        match replaces {
            Some(old) => {
                self.slab[old].flags |= REPLACING;
                self.replacements.insert(old, slot);
            }
            None => self.name(tag, slot),
        }
        self.handle(slot)
    }

    /// Fills memory into a claim; from now on the reservation has this generation. Places in segments that
    /// have gone meanwhile are left out. An error gives back what was not used: the claim was lost
    /// ([`Refusal::Superseded`]), or all of its segments are gone.
    pub(crate) fn fill(
        &mut self,
        claim: Handle,
        generation: Generation,
        places: Places,
        alive: &dyn Fn(Place) -> bool,
        effects: &mut Effects,
    ) -> Result<(), (Places, Refusal)> {
        if self.resolve(claim).is_none() {
            return Err((places, Refusal::Superseded));
        }
        let entry = &mut self.slab[claim.slot];
        entry.generation = generation;
        entry.phase = Phase::Writing;
        // With fewer replicas than wanted, the charge is less.
        let given = u8::try_from(places.as_slice().len()).unwrap_or(u8::MAX);
        let before = entry.charge();
        entry.charged = entry.charged.min(given);
        effects.discharge(entry.tenant, before - entry.charge());
        entry.places = places;
        self.prune(claim.slot, alive, effects);
        if self.slab[claim.slot].places.is_empty() {
            self.close_open(claim.slot, effects);
            return Err((Places::None, Refusal::NoSpace { largest_free: 0 }));
        }
        Ok(())
    }

    /// Gives up a claim for which there was no memory.
    pub(crate) fn withdraw(&mut self, claim: Handle, effects: &mut Effects) {
        if self.resolve(claim).is_some() {
            self.close_open(claim.slot, effects);
        }
    }

    /// Frees an entry's places in segments that are not read from.
    pub(super) fn prune(
        &mut self,
        slot: u32,
        alive: &dyn Fn(Place) -> bool,
        effects: &mut Effects,
    ) {
        let entry = &mut self.slab[slot];
        let extent = entry.extent();
        entry.places.retain(|place| {
            let keep = alive(place);
            if !keep {
                effects.place(place, extent, Fate::Free);
            }
            keep
        });
    }

    /// The slot of the reservation or version with this generation, among what a name stands for.
    fn version(&self, named: Option<u32>, generation: Generation) -> Option<u32> {
        let slot = named?;
        let entry = &self.slab[slot];
        let replacement = entry
            .has(REPLACING)
            .then(|| self.replacements.get(&slot).copied())
            .flatten();
        [Some(slot), replacement]
            .into_iter()
            .flatten()
            .find(|slot| self.slab[*slot].generation == generation)
    }

    /// The open session of this generation, if it is that client's.
    fn session(
        &self,
        named: Option<u32>,
        generation: Generation,
        client: ClientId,
    ) -> Result<u32, Refusal> {
        match self.version(named, generation) {
            Some(slot) if self.slab[slot].phase == Phase::Complete => Err(Refusal::AlreadyExists),
            Some(slot) if self.session_of(slot).is_some_and(|o| o.writer == client) => Ok(slot),
            None if named.is_none() => Err(Refusal::NotFound),
            _ => Err(Refusal::Superseded),
        }
    }

    /// Makes a reservation readable, in place of the version that it replaces. True: just now; false: it
    /// was before. `epoch` is that of the call, for those that are used by their end.
    pub(crate) fn commit(
        &mut self,
        (now, epoch): (Moment, Epoch),
        named: Option<u32>,
        generation: Generation,
        client: ClientId,
        alive: &dyn Fn(Place) -> bool,
        effects: &mut Effects,
    ) -> Result<bool, Refusal> {
        let slot = match self.session(named, generation, client) {
            Ok(slot) => slot,
            Err(Refusal::AlreadyExists) => return Ok(false),
            Err(refusal) => return Err(refusal),
        };
        self.prune(slot, alive, effects);
        if self.slab[slot].places.is_empty() {
            self.close_open(slot, effects);
            return Err(Refusal::Unreachable);
        }
        let is_orphan = |open: &Open| open.copies && open.replaces.is_none();
        if self.session_of(slot).is_some_and(is_orphan) {
            self.close_open(slot, effects);
            return Err(Refusal::NotFound);
        }
        let Some(open) = self.open.remove(&mut self.slab, slot) else {
            return Err(Refusal::Superseded);
        };
        let mut standing = None;
        let mut soft_pin = open.soft_pin;
        if let Some(old) = open.replaces {
            let before = self.standing(self.handle(old));
            if open.copies {
                standing = before;
                self.inherit(old, slot);
            } else if open.keep_soft_pin && soft_pin.is_none() {
                let until = before.and_then(|before| before.soft_pin);
                soft_pin = until
                    .filter(|until| *until > now)
                    .map(|until| until.since(now));
            }
            self.retire(now, old, Reason::Replaced, effects);
        }
        let handle = self.handle(slot);
        let entry = &mut self.slab[slot];
        entry.phase = Phase::Complete;
        if open.refresh_at_end {
            entry.touch(epoch, entry.index);
        }
        if entry.has(WATCHED) {
            entry.flags &= !WATCHED;
            let key = self.texts.get(entry.key).into();
            effects.settled.push((entry.tenant, key));
        }
        if let Some(group) = &entry.group {
            group.add(handle);
        }
        self.complete += 1;
        if let Some(ttl) = soft_pin {
            self.pin(now, slot, ttl);
        }
        self.join_queue(slot);
        if let Some(standing) = standing {
            self.lift(now, handle, standing);
        }
        Ok(true)
    }

    /// Gives a copy what protects the version that it replaces.
    fn inherit(&mut self, old: u32, copy: u32) {
        let lease = self.lease_end(old);
        let (first_probe, prober) = (self.slab[old].first_probe, self.slab[old].prober);
        let pinned = self.slab[old].flags & HARD_PINNED;
        let entry = &mut self.slab[copy];
        entry.lease = lease;
        entry.first_probe = first_probe;
        entry.prober = prober;
        entry.flags |= pinned;
    }

    /// Gives a reservation up on its writer's word that no transfer is in flight.
    pub(crate) fn revoke(
        &mut self,
        named: Option<u32>,
        generation: Generation,
        client: ClientId,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        let slot = self.session(named, generation, client)?;
        self.close_open(slot, effects);
        Ok(())
    }

    /// Gives a reservation up whose writer can't say that no transfer is in flight.
    pub(crate) fn abandon(
        &mut self,
        named: Option<u32>,
        generation: Generation,
        client: ClientId,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        let slot = self.session(named, generation, client)?;
        let known = effects.dropped.len();
        self.drop_open(slot, effects);
        for dropped in &mut effects.dropped[known..] {
            dropped.in_doubt = true;
        }
        Ok(())
    }

    /// Ends an open session whose writer has nothing in flight.
    fn close_open(&mut self, slot: u32, effects: &mut Effects) {
        self.detach_open(slot, effects);
        self.vacate(slot, Fate::Free, effects);
    }

    /// Takes an open session from its writer.
    fn drop_open(&mut self, slot: u32, effects: &mut Effects) {
        let (key, open) = self.detach_open(slot, effects);
        let entry = &mut self.slab[slot];
        if entry.phase == Phase::Writing {
            effects.dropped.push(Dropped {
                tenant: entry.tenant,
                key,
                generation: entry.generation,
                writer: open.writer,
                engine: open.engine,
                in_doubt: false,
                places: std::mem::take(&mut entry.places),
                extent: entry.extent(),
            });
        }
        self.vacate(slot, Fate::Free, effects);
    }

    /// Takes the name, or the claim to one, from an open session. Returns its key.
    fn detach_open(&mut self, slot: u32, effects: &mut Effects) -> (Box<str>, Open) {
        let open = self
            .open
            .remove(&mut self.slab, slot)
            .expect("an open entry has a session");
        let key: Box<str> = if let Some(old) = open.replaces {
            self.replacements.remove(&old);
            let old = &mut self.slab[old];
            old.flags &= !REPLACING;
            self.texts.get(old.key).into()
        } else {
            let key = self.key(&self.slab[slot]).into();
            self.unname(slot);
            key
        };
        let entry = &self.slab[slot];
        effects.discharge(entry.tenant, entry.charge());
        if entry.has(WATCHED) {
            effects.settled.push((entry.tenant, key.clone()));
        }
        (key, open)
    }

    /// Drops the sessions that are overdue, or whose writer is gone.
    pub(crate) fn drop_stale(
        &mut self,
        config: &StateConfig,
        now: Moment,
        is_member: &dyn Fn(ClientId) -> bool,
        effects: &mut Effects,
    ) {
        let stale =
            |open: &Open| now.since(open.since) >= config.release_after || !is_member(open.writer);
        for slot in self.open.slots(stale) {
            self.drop_open(slot, effects);
        }
    }

    /// Revokes all sessions of a client that has nothing in flight any more.
    pub(crate) fn close_sessions(&mut self, client: ClientId, effects: &mut Effects) -> u64 {
        let slots = self.open.slots(|open| open.writer == client);
        for slot in &slots {
            self.close_open(*slot, effects);
        }
        slots.len() as u64
    }
}
