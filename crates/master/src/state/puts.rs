//! Reservations and their end, as calls.
//!
//! A batch is reserved in three steps, so that no lock is held while memory is found: first all names are
//! claimed, key by key; then memory is taken for each, with eviction where there is none; then it is filled
//! into the claim, or the claim is withdrawn.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{ClientId, Epoch, Generation};
use layercake_protocol::replica::{
    PutStart, PutStarted, Recency, Replica, ReplicateConfig, SlotPut,
};

use super::State;
use super::ahead::Purpose;
use super::api::{Caller, Location, PutBatch, Version};
use super::effects::{Effects, Extent, Fate};
use super::groups::Handle;
use super::moment::Moment;
use super::placement::{Placed, Placement};
use super::reads::prefix_index;
use super::segments::View;
use super::shard::{KeyHash, Place, Places, Reservation, Shard};

/// How an open session is given up by its writer.
type GiveUp =
    fn(&mut Shard, Option<u32>, Generation, ClientId, &mut Effects) -> Result<(), Refusal>;

/// A name that was claimed.
struct Claim {
    handle: Handle,
    /// What a replica asks of its segment.
    extent: Extent,
}

/// What the puts of one call have in common.
struct Batch<'a> {
    now: Moment,
    caller: &'a Caller,
    location: Option<Location>,
    tenant: u32,
    config: &'a ReplicateConfig,
    epoch: Epoch,
    first_index: u32,
    refresh_at_end: bool,
    upsert: bool,
    view: &'a View,
}

impl State {
    /// Reserves objects and their memory, one answer per put. Needs a caller that has joined.
    pub fn put_start(
        &self,
        now: Moment,
        caller: &Caller,
        batch: PutBatch<'_>,
    ) -> (Vec<Result<PutStarted, Refusal>>, Epoch) {
        let puts = batch.puts;
        let epoch = self.epoch(batch.recency.epoch);
        let refuse_all = |refusal: Refusal| (vec![Err(refusal); puts.len()], epoch);
        let Some(location) = self.members.heard(now, caller.client) else {
            return refuse_all(Refusal::UnknownMember);
        };
        if batch.config.replicas == 0 {
            return refuse_all(Refusal::invalid("replicas = 0: at least 1 is needed"));
        }
        let tenant = match self.tenants.admit(&caller.tenant) {
            Ok(tenant) => tenant,
            Err(refusal) => return refuse_all(refusal),
        };
        let view = self.pool.view();
        let unreachable = view.slots_of_or_away(batch.unreachable);
        let batch = Batch {
            now,
            caller,
            location: caller.location.or(location),
            tenant,
            config: batch.config,
            epoch,
            first_index: batch.recency.first_index,
            refresh_at_end: batch.refresh_at_end,
            upsert: batch.upsert,
            view: &view,
        };
        let placement = Placement::new(
            &view,
            batch.config,
            batch.location,
            &unreachable,
            (self.config.strategy, &self.dice),
        );
        let mut effects = Effects::default();
        let keys = puts.iter().map(|put| put.key.as_str());
        let claims: Vec<_> = puts
            .iter()
            .zip(self.ahead(Purpose::Add, tenant, keys))
            .enumerate()
            .map(|(position, (put, hash))| {
                self.claim_name(&batch, position, (put, hash), &mut effects)
            })
            .collect();
        self.carry_out(now, &mut effects);

        let lens = claims.iter().flatten().map(|claim| claim.extent.len());
        let mut wanted: u64 = lens.fold(0, u64::saturating_add);
        let answers: Vec<_> = claims
            .into_iter()
            .map(|claim| {
                let claim = claim?;
                let found = self.find_room(now, &placement, claim.extent, wanted);
                wanted = wanted.saturating_sub(claim.extent.len());
                self.fill_claim(&view, &placement, &claim, found, &mut effects)
            })
            .collect();
        self.carry_out(now, &mut effects);

        let count = |wanted: fn(&Result<PutStarted, Refusal>) -> bool| {
            answers.iter().filter(|answer| wanted(answer)).count()
        };
        self.tally.puts_started.add_len(count(Result::is_ok));
        let refused = count(|answer| matches!(answer, Err(Refusal::NoSpace { .. })));
        self.tally.refused_puts.add_len(refused);
        (answers, epoch)
    }

    fn claim_name(
        &self,
        batch: &Batch<'_>,
        position: usize,
        (put, hash): (&PutStart, KeyHash),
        effects: &mut Effects,
    ) -> Result<Claim, Refusal> {
        let extent = Extent {
            header_len: header_len(batch.caller, put)?,
            size: put.size,
        };
        if put.size.checked_add(extent.header_len.into()).is_none() {
            return Err(Refusal::invalid(format!("size = {}: too large", put.size)));
        }
        let index = put
            .prefix_index
            .unwrap_or_else(|| prefix_index(batch.first_index, position));
        let group = put.group.as_deref();
        let key = put.key.as_str();
        let charged = self.charged_replicas(batch.config);
        let reservation = || Reservation {
            tenant: batch.tenant,
            key,
            size: put.size,
            header_len: extent.header_len,
            group: group.map(|name| self.groups.get(batch.tenant, name)),
            origin: (put.fingerprint, put.layout_id),
            epoch: batch.epoch,
            index,
            // A block of a request keeps the epoch that its writer was told: its other calls name it.
            refresh_at_end: batch.refresh_at_end && put.prefix_index.is_none(),
            hard_pin: batch.config.hard_pin,
            soft_pin: self.soft_pin(batch.config),
            keep_soft_pin: batch.config.keep_soft_pin,
            writer: batch.caller.client,
            engine: batch.location.map(|location| location.engine),
            upsert: batch.upsert,
            copy_of: put.copy_of.filter(|_| batch.upsert),
            early: put.early_table(),
            claim: self.draw_generation(),
            charged,
            quotas: (charged > 0).then_some(&self.tenants),
        };
        let alive = |place| batch.view.is_alive(place);
        let charge = put.size.saturating_mul(charged.into());
        loop {
            let reserved = self.shard(hash.shard).reserve(
                &self.config,
                batch.now,
                hash.tag,
                reservation(),
                &alive,
                effects,
            );
            match reserved {
                Ok(handle) => return Ok(Claim { handle, extent }),
                Err(Refusal::QuotaExceeded) => {
                    // What was dropped on the way here is not charged any more.
                    self.carry_out(batch.now, effects);
                    if !self.evict_tenant(batch.now, batch.tenant, charge) {
                        self.tenants.count_refused(batch.tenant);
                        return Err(Refusal::QuotaExceeded);
                    }
                }
                Err(refusal) => return Err(refusal),
            }
        }
    }

    /// Replicas of an object that its tenant is charged for.
    fn charged_replicas(&self, config: &ReplicateConfig) -> u8 {
        if self.tenants.is_strict() {
            u8::try_from(config.replicas).unwrap_or(u8::MAX)
        } else {
            0
        }
    }

    fn soft_pin(&self, config: &ReplicateConfig) -> Option<Duration> {
        let wanted = config.soft_pin_ttl.unwrap_or(self.config.soft_pin_ttl);
        config
            .soft_pin
            .then(|| wanted.min(self.config.max_soft_pin_ttl))
    }

    /// Fills what was found into a claim.
    fn fill_claim(
        &self,
        view: &View,
        placement: &Placement<'_>,
        claim: &Claim,
        found: Placed,
        effects: &mut Effects,
    ) -> Result<PutStarted, Refusal> {
        let no_space = || Refusal::NoSpace {
            largest_free: placement.largest_free(),
        };
        let mut shard = self.shard(claim.handle.shard as usize);
        if found.places.is_empty() {
            shard.withdraw(claim.handle, effects);
            return Err(no_space());
        }
        // Drawn now: above everything that was ever written into these places.
        let generation = self.draw_generation();
        let alive = |place| view.is_alive(place);
        match shard.fill(claim.handle, generation, found.places, &alive, effects) {
            Ok(()) => {
                let places = shard.entry(claim.handle.slot).places.as_slice();
                let short = places.len() < placement.wanted();
                self.tally.short_puts.add(u64::from(short));
                let replica = |place: &Place| {
                    Some(Replica {
                        segment: view.cell(place.segment)?.info.id,
                        offset: place.offset(),
                        header_len: claim.extent.header_len,
                        generation,
                    })
                };
                Ok(PutStarted {
                    generation,
                    replicas: places.iter().filter_map(replica).collect(),
                })
            }
            Err((unused, refusal)) => {
                effects.places(&unused, claim.extent, Fate::Free);
                Err(match refusal {
                    Refusal::NoSpace { .. } => no_space(),
                    other => other,
                })
            }
        }
    }

    /// Commits objects that were written into slots of the caller's holds. Needs a caller that has joined. Repeating a
    /// commit is harmless: the number names the slot.
    ///
    /// [`Refusal::AlreadyExists`], [`Refusal::InProgress`]: somebody else has the key; [`Refusal::Superseded`]:
    /// there is no such hold (any more), or something lies in the slot.
    pub fn put_slots(
        &self,
        now: Moment,
        caller: &Caller,
        slots: &[SlotPut],
        recency: Recency,
    ) -> (Vec<Result<(), Refusal>>, Epoch) {
        let epoch = self.epoch(recency.epoch);
        let refuse_all = |refusal: Refusal| (vec![Err(refusal); slots.len()], epoch);
        let Some(location) = self.members.heard(now, caller.client) else {
            return refuse_all(Refusal::UnknownMember);
        };
        let tenant = match self.tenants.admit(&caller.tenant) {
            Ok(tenant) => tenant,
            Err(refusal) => return refuse_all(refusal),
        };
        let view = self.pool.view();
        let batch = Batch {
            now,
            caller,
            location: caller.location.or(location),
            tenant,
            config: &ReplicateConfig::default(),
            epoch,
            // The commit is the use.
            refresh_at_end: false,
            first_index: recency.first_index,
            upsert: false,
            view: &view,
        };
        let mut effects = Effects::default();
        let mut committed = 0;
        let keys = slots.iter().map(|slot| slot.put.key.as_str());
        let answers = slots
            .iter()
            .zip(self.ahead(Purpose::Add, tenant, keys))
            .enumerate()
            .map(|(position, named)| {
                let fresh = self.put_slot(&batch, position, named, &mut effects)?;
                committed += u64::from(fresh);
                Ok(())
            })
            .collect();
        self.carry_out(now, &mut effects);
        self.tally.puts_started.add(committed);
        self.tally.puts_committed.add(committed);
        (answers, epoch)
    }

    /// True: committed just now; false: it was before.
    fn put_slot(
        &self,
        batch: &Batch<'_>,
        position: usize,
        (slot, hash): (&SlotPut, KeyHash),
        effects: &mut Effects,
    ) -> Result<bool, Refusal> {
        let (now, client) = (batch.now, batch.caller.client);
        let generation = slot.generation;
        let Claim { handle, extent } =
            match self.claim_name(batch, position, (&slot.put, hash), effects) {
                Err(Refusal::AlreadyExists) => {
                    let shard = self.shard(hash.shard);
                    let named = shard.find(hash.tag, batch.tenant, slot.put.key.as_str());
                    let repeated = named.is_some_and(|n| shard.entry(n).generation == generation);
                    return if repeated {
                        Ok(false)
                    } else {
                        Err(Refusal::AlreadyExists)
                    };
                }
                claim => claim?,
            };
        let place = self.holds.lock().fill(now, client, generation, extent);
        let mut shard = self.shard(hash.shard);
        let Some(place) = place else {
            shard.withdraw(handle, effects);
            return Err(Refusal::Superseded);
        };
        let alive = |place| batch.view.is_alive(place);
        let places = Places::One(place);
        if let Err((unused, refusal)) = shard.fill(handle, generation, places, &alive, effects) {
            effects.places(&unused, extent, Fate::Free);
            return Err(match refusal {
                Refusal::NoSpace { .. } => Refusal::Unreachable,
                other => other,
            });
        }
        let when = (now, batch.epoch);
        shard.commit(when, Some(handle.slot), generation, client, &alive, effects)
    }

    /// Commits put sessions. Repeating a commit is harmless: the number names the session. `epoch` is
    /// [drawn](Self::draw_epoch) for the whole call however it is cut: objects
    /// that are refreshed at their end keep their order among each other.
    ///
    /// [`Refusal::Superseded`]: somebody else has the key; [`Refusal::NotFound`]: the session was dropped and
    /// nobody has it; [`Refusal::Unreachable`]: every segment that it wrote to is gone.
    pub fn put_end<V: Version>(
        &self,
        now: Moment,
        caller: &Caller,
        objects: &[V],
        epoch: Epoch,
    ) -> Vec<Result<(), Refusal>> {
        self.members.heard(now, caller.client);
        let view = self.pool.view();
        let mut effects = Effects::default();
        let mut committed = 0;
        let answers = self
            .with_versions(Purpose::End, caller, objects, |shard, named, object| {
                let alive = |place| view.is_alive(place);
                let generation = object.generation();
                let client = caller.client;
                let fresh = shard.commit(
                    (now, epoch),
                    named,
                    generation,
                    client,
                    &alive,
                    &mut effects,
                )?;
                committed += u64::from(fresh);
                Ok(())
            })
            .map(|answer| answer.unwrap_or(Err(Refusal::NotFound)))
            .collect();
        self.tally.puts_committed.add(committed);
        self.carry_out(now, &mut effects);
        answers
    }

    /// Gives put sessions up: the writer confirms that none of their transfers is in flight, so their memory
    /// can be used again at once, even where they were taken away before. Repeating it is harmless. An object
    /// whose generation is that of a hold gives that back, whatever its key.
    ///
    /// [`Refusal::AlreadyExists`]: it was committed; [`Refusal::Superseded`]: somebody else has the key.
    pub fn put_revoke<V: Version>(
        &self,
        now: Moment,
        caller: &Caller,
        objects: &[V],
    ) -> Vec<Result<(), Refusal>> {
        let answers = self.give_up(now, caller, objects, Shard::revoke);
        self.give_holds_back(caller.client, objects);
        let mut freed = Vec::new();
        let mut fences = self.fences.lock();
        for object in objects {
            fences.confirm(caller.client, object.generation(), &mut freed);
        }
        drop(fences);
        Self::release(freed);
        answers
    }

    /// As [`put_revoke`](Self::put_revoke), by a writer that can't know whether a transfer is in flight, since
    /// the owner of the memory did not answer: the memory is kept until the node has fenced it, whatever
    /// the writer says later.
    pub fn put_abandon<V: Version>(
        &self,
        now: Moment,
        caller: &Caller,
        objects: &[V],
    ) -> Vec<Result<(), Refusal>> {
        let answers = self.give_up(now, caller, objects, Shard::abandon);
        self.abandon_holds(now, caller.client, objects);
        let mut fences = self.fences.lock();
        for object in objects {
            fences.doubt(caller.client, object.generation());
        }
        answers
    }

    fn give_up<V: Version>(
        &self,
        now: Moment,
        caller: &Caller,
        objects: &[V],
        end: GiveUp,
    ) -> Vec<Result<(), Refusal>> {
        self.members.heard(now, caller.client);
        let mut effects = Effects::default();
        let mut revoked = 0;
        let answers: Vec<_> = self
            .with_versions(Purpose::End, caller, objects, |shard, named, object| {
                let (generation, client) = (object.generation(), caller.client);
                end(shard, named, generation, client, &mut effects)?;
                revoked += 1;
                Ok(())
            })
            .map(|answer| match answer {
                // Nobody has the key: it was revoked or dropped before.
                None | Some(Err(Refusal::NotFound)) => Ok(()),
                Some(answer) => answer,
            })
            .collect();
        self.tally.puts_revoked.add(revoked);
        self.carry_out(now, &mut effects);
        answers
    }
}

/// Bytes of the header in front of each replica.
fn header_len(caller: &Caller, put: &PutStart) -> Result<u32, Refusal> {
    if put.size == 0 {
        return Err(Refusal::invalid("size = 0: an object has at least 1 byte"));
    }
    put.header_len(&caller.tenant)
        .map_err(|error| Refusal::invalid(error.to_string()))
}
