//! Memory of writers that never finished, held back until no late write can land in it (requirement S7,
//! architecture decision 6).
//!
//! A reservation that was taken away leaves places that its writer may still be writing to. For each segment
//! a *fence* asks the node to raise the places' tags, so that writes through the owner are refused; and a
//! *withdrawal* tells the writer to give the sessions up. A fence's places are free again when
//!
//! - the node has raised the tags and no copy of the writer is under way (any more), or
//! - the node has raised the tags and the writer says that nothing is in flight, or
//! - the writer revokes the session after all, or leaves: it says by that that nothing is in flight.
//!
//! A writer whose write ended without an answer from the memory's owner can't say so, since the owner may
//! still have that write before it: such a place is *in doubt*, and only the first of these counts.
//!
//! Where the master does not know the writer's engine the node waits for every writer's copies. A segment that goes takes its fences along.
//!
//! Commands are sent again until they are answered. Pure data; the caller holds the lock, and carries out
//! what comes back.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::command::{DropSessions, Fence, FenceId, FencedPlace};
use layercake_protocol::ids::{ClientId, EngineId, Generation};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::ObjectRef;

use super::api::Event;
use super::moment::Moment;
use super::segments::SegmentCell;
use super::shard::Place;

/// One command names at most about this many sessions, with keys of about this many bytes: it must fit
/// a message.
const MOST_OBJECTS: usize = 1024;
const MOST_KEY_BYTES: usize = 1 << 20;

/// A reservation whose places are to be held back.
#[derive(Debug)]
pub(crate) struct Suspect {
    pub(crate) tenant: Tenant,
    pub(crate) key: ObjectKey,
    pub(crate) generation: Generation,
    pub(crate) writer: ClientId,
    pub(crate) engine: Option<EngineId>,
    /// The writer can't say that nothing is in flight.
    pub(crate) in_doubt: bool,
    /// It is a hold, known by its number alone.
    pub(crate) is_hold: bool,
    /// With their lengths in bytes.
    pub(crate) places: Vec<(Arc<SegmentCell>, Place, u64)>,
}

/// A place that is free again.
#[derive(Debug)]
pub(crate) struct Freed {
    pub(crate) cell: Arc<SegmentCell>,
    pub(crate) place: Place,
    pub(crate) len: u64,
}

#[derive(Debug)]
struct HeldPlace {
    /// The reservation that had it.
    generation: Generation,
    place: Place,
    len: u64,
}

#[derive(Debug)]
struct Pending {
    cell: Arc<SegmentCell>,
    places: Vec<HeldPlace>,
    /// Greater than any tag that the writer may use.
    barrier: Generation,
    writer: ClientId,
    engine: Option<EngineId>,
    withdrawal: FenceId,
    /// The writer's word does not count.
    in_doubt: bool,
    /// The tags are raised.
    raised: bool,
    sent: Moment,
}

/// Sessions that were taken from a writer.
#[derive(Debug)]
struct Withdrawal {
    writer: ClientId,
    tenant: Tenant,
    objects: Vec<ObjectRef>,
    key_bytes: usize,
    /// The writer has nothing in flight.
    confirmed: bool,
    /// The fences that wait for that.
    fences: BTreeSet<FenceId>,
    sent: Moment,
}

/// See the module's description.
#[derive(Debug, Default)]
pub(crate) struct Fences {
    last_id: FenceId,
    pending: HashMap<FenceId, Pending>,
    withdrawals: HashMap<FenceId, Withdrawal>,
    /// Fences by the reservations that they hold places of.
    reservations: HashMap<Generation, Vec<FenceId>>,
    /// Those of them that are holds.
    holds: HashSet<Generation>,
}

impl Fences {
    /// Reservations whose places are held.
    pub(crate) fn len(&self) -> usize {
        self.reservations.len()
    }

    /// Whether places of holds are held.
    pub(crate) fn awaits_holds(&self) -> bool {
        !self.holds.is_empty()
    }

    fn next_id(&mut self) -> FenceId {
        self.last_id += 1;
        self.last_id
    }

    /// Holds the places of these reservations back, and sends the commands. `barrier` is a number
    /// above those of all reservations so far, never given to one.
    pub(crate) fn hold(
        &mut self,
        now: Moment,
        barrier: Generation,
        suspects: Vec<Suspect>,
        events: &mut Vec<Event>,
    ) {
        let mut open: HashMap<(ClientId, Option<EngineId>, Tenant), FenceId> = HashMap::new();
        let mut fences: BTreeMap<(FenceId, u32), FenceId> = BTreeMap::new();
        let mut drops = Vec::new();
        for suspect in suspects {
            let whose = (suspect.writer, suspect.engine, suspect.tenant);
            let drop = if suspect.in_doubt {
                // The writer gave it up, and is not asked: this number is no command's.
                self.next_id()
            } else {
                self.withdrawal(now, &mut open, whose, &mut drops)
            };
            // A segment that closed meanwhile was, or will be, looked for here under the same lock.
            let places = suspect.places.into_iter();
            for (cell, place, len) in places.filter(|(cell, ..)| !cell.is_closed()) {
                let id = *fences
                    .entry((drop, cell.slot))
                    .or_insert_with(|| self.next_id());
                let held = HeldPlace {
                    generation: suspect.generation,
                    place,
                    len,
                };
                let fence = self.pending.entry(id).or_insert_with(|| Pending {
                    cell,
                    places: Vec::new(),
                    barrier,
                    writer: suspect.writer,
                    engine: suspect.engine,
                    withdrawal: drop,
                    in_doubt: suspect.in_doubt,
                    raised: false,
                    sent: now,
                });
                fence.places.push(held);
                let of_reservation = self.reservations.entry(suspect.generation).or_default();
                if of_reservation.last() != Some(&id) {
                    of_reservation.push(id);
                }
                if suspect.is_hold {
                    self.holds.insert(suspect.generation);
                }
            }
            if let Some(withdrawal) = self.withdrawals.get_mut(&drop) {
                withdrawal.key_bytes += suspect.key.as_str().len();
                withdrawal.objects.push(ObjectRef {
                    key: suspect.key,
                    generation: suspect.generation,
                });
            }
        }
        for ((drop, _), id) in fences {
            if let Some(withdrawal) = self.withdrawals.get_mut(&drop) {
                withdrawal.fences.insert(id);
            }
            events.push(self.pending[&id].command(id));
        }
        for id in drops {
            if self.withdrawals[&id].fences.is_empty() {
                self.withdrawals.remove(&id);
            } else {
                events.push(self.withdrawals[&id].command(id));
            }
        }
    }

    /// The command that names this writer's sessions: the one that is open, while it has room, or a new one.
    fn withdrawal(
        &mut self,
        now: Moment,
        open: &mut HashMap<(ClientId, Option<EngineId>, Tenant), FenceId>,
        whose: (ClientId, Option<EngineId>, Tenant),
        new: &mut Vec<FenceId>,
    ) -> FenceId {
        if let Some(id) = open.get(&whose) {
            let withdrawal = &self.withdrawals[id];
            if withdrawal.objects.len() < MOST_OBJECTS && withdrawal.key_bytes < MOST_KEY_BYTES {
                return *id;
            }
        }
        let id = self.next_id();
        let withdrawal = Withdrawal {
            writer: whose.0,
            tenant: whose.2.clone(),
            objects: Vec::new(),
            key_bytes: 0,
            confirmed: false,
            fences: BTreeSet::new(),
            sent: now,
        };
        self.withdrawals.insert(id, withdrawal);
        open.insert(whose, id);
        new.push(id);
        id
    }

    /// A member answers a command. `attached`, of a node: a copy of the writer is still under way; of a
    /// writer: it can't say that none is.
    pub(crate) fn done(
        &mut self,
        client: ClientId,
        id: FenceId,
        attached: bool,
        freed: &mut Vec<Freed>,
    ) {
        if let Some(withdrawal) = self.withdrawals.get_mut(&id)
            && withdrawal.writer == client
        {
            withdrawal.confirmed = true;
            if attached {
                for id in &withdrawal.fences {
                    if let Some(fence) = self.pending.get_mut(id) {
                        fence.in_doubt = true;
                    }
                }
                return;
            }
            let ready = |id: &&FenceId| self.pending.get(id).is_some_and(Pending::is_ready);
            let ready: Vec<_> = withdrawal.fences.iter().filter(ready).copied().collect();
            for id in ready {
                self.lift(id, freed);
            }
            return;
        }
        let Some(fence) = self.pending.get_mut(&id) else {
            return;
        };
        if fence.cell.owner != client {
            return;
        }
        fence.raised = true;
        let withdrawal = self.withdrawals.get(&fence.withdrawal);
        if !attached || fence.is_ready() && withdrawal.is_none_or(|w| w.confirmed) {
            self.lift(id, freed);
        }
    }

    /// Takes a fence out. A withdrawal that no fence waits for any more needs no answer.
    fn take(&mut self, id: FenceId) -> Option<Pending> {
        let fence = self.pending.remove(&id)?;
        if let Some(withdrawal) = self.withdrawals.get_mut(&fence.withdrawal) {
            withdrawal.fences.remove(&id);
            if withdrawal.fences.is_empty() {
                self.withdrawals.remove(&fence.withdrawal);
            }
        }
        Some(fence)
    }

    /// Frees all places of a fence.
    fn lift(&mut self, id: FenceId, freed: &mut Vec<Freed>) {
        let Some(fence) = self.take(id) else {
            return;
        };
        for held in fence.places {
            if let Some(ids) = self.reservations.get_mut(&held.generation) {
                ids.retain(|other| *other != id);
                if ids.is_empty() {
                    self.reservations.remove(&held.generation);
                    self.holds.remove(&held.generation);
                }
            }
            freed.push(Freed {
                cell: fence.cell.clone(),
                place: held.place,
                len: held.len,
            });
        }
    }

    /// A writer says that nothing of one reservation is in flight. True: its places were held.
    pub(crate) fn confirm(
        &mut self,
        client: ClientId,
        generation: Generation,
        freed: &mut Vec<Freed>,
    ) -> bool {
        let Some(ids) = self.reservations.get(&generation) else {
            return false;
        };
        let counts = |fence: &Pending| fence.writer == client && !fence.in_doubt;
        if !ids.iter().all(|id| counts(&self.pending[id])) {
            return false;
        }
        let ids = ids.clone();
        self.reservations.remove(&generation);
        self.holds.remove(&generation);
        for id in ids {
            let Some(fence) = self.pending.get_mut(&id) else {
                continue;
            };
            let cell = &fence.cell;
            let places = fence.places.extract_if(.., |h| h.generation == generation);
            freed.extend(places.map(|held| Freed {
                cell: cell.clone(),
                place: held.place,
                len: held.len,
            }));
            if fence.places.is_empty() {
                self.take(id);
            }
        }
        true
    }

    /// A writer says that it does not know whether something of one reservation is in flight.
    pub(crate) fn doubt(&mut self, client: ClientId, generation: Generation) {
        for id in self.reservations.get(&generation).into_iter().flatten() {
            if let Some(fence) = self.pending.get_mut(id)
                && fence.writer == client
            {
                fence.in_doubt = true;
            }
        }
    }

    /// A writer has left: nothing of it is in flight, but for what it was in doubt about.
    pub(crate) fn confirm_all(&mut self, client: ClientId, freed: &mut Vec<Freed>) {
        let counts = |fence: &Pending| fence.writer == client && !fence.in_doubt;
        let fences = self.pending.iter().filter(|(_, fence)| counts(fence));
        let ids: Vec<_> = fences.map(|(id, _)| *id).collect();
        for id in ids {
            self.lift(id, freed);
        }
    }

    /// Segments are gone, and their fences with them.
    pub(crate) fn forget_segments(&mut self, gone: &[Arc<SegmentCell>]) {
        let gone = |fence: &Pending| gone.iter().any(|cell| cell.slot == fence.cell.slot);
        let fences = self.pending.iter().filter(|(_, fence)| gone(fence));
        let ids: Vec<_> = fences.map(|(id, _)| *id).collect();
        let mut lost = Vec::new();
        for id in ids {
            self.lift(id, &mut lost);
        }
    }

    /// Sends commands again: those of one member that has just (re)connected, or those that nobody answered
    /// for `after`.
    pub(crate) fn send_again(
        &mut self,
        now: Moment,
        to: Option<ClientId>,
        after: Duration,
        events: &mut Vec<Event>,
    ) {
        let due = |member: ClientId, sent: Moment| match to {
            Some(client) => client == member,
            None => now.since(sent) >= after,
        };
        for (id, fence) in &mut self.pending {
            if !fence.raised && due(fence.cell.owner, fence.sent) {
                fence.sent = now;
                events.push(fence.command(*id));
            }
        }
        for (id, withdrawal) in &mut self.withdrawals {
            if !withdrawal.confirmed && due(withdrawal.writer, withdrawal.sent) {
                withdrawal.sent = now;
                events.push(withdrawal.command(*id));
            }
        }
    }
}

impl Pending {
    /// The writer's word is enough to free it.
    fn is_ready(&self) -> bool {
        self.raised && !self.in_doubt
    }

    fn command(&self, id: FenceId) -> Event {
        let places = self.places.iter().map(|held| FencedPlace {
            offset: held.place.offset(),
            len: held.len,
            generation: self.barrier,
        });
        Event::Fence {
            to: self.cell.owner,
            fence: Fence {
                id,
                segment: self.cell.info.id,
                places: places.collect(),
                writer: self.writer,
                engine: self.engine,
            },
        }
    }
}

impl Withdrawal {
    fn command(&self, id: FenceId) -> Event {
        Event::DropSessions {
            to: self.writer,
            drop: DropSessions {
                id,
                tenant: self.tenant.clone(),
                objects: self.objects.clone(),
            },
        }
    }
}
