//! Places that clients have in advance (`docs/decisions/0013-small-puts-take-one-round-trip.md`).
//!
//! A *hold* is a piece of a segment and a range of numbers, reserved for one membership of one client. The client
//! cuts slots from it, of whole granules, writes objects into them, and names slot and key in one call, which
//! commits: [`State::put_slots`]. A slot's number follows from where in the hold it begins, so no two slots of
//! a hold have the same, and what was once committed is never taken for another.
//!
//! A hold ends once. Its client gives it back, which says that nothing is in flight, and its granules that hold no object
//! are free at once; or it is called back, and they are fenced as the places of a reservation that was
//! taken away are (see [`fences`](super::fences)). Holds are called back when room is short, when their
//! segment is drained, when nobody used them for `discard_after`, and with their client's membership. They are
//! granted where there is room to spare only, so they bring no eviction about.
//!
//! Lock: that of [`Holds`] is taken with no shard's lock held; a segment's books may follow it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use layercake_protocol::ids::{ClientId, EngineId, Epoch, Generation, SegmentId};
use layercake_protocol::key::Tenant;
use layercake_protocol::replica::{GRANULE, Hold, ObjectRef, ReplicateConfig};

use super::State;
use super::api::{Caller, Version};
use super::effects::Extent;
use super::fences::Suspect;
use super::moment::Moment;
use super::placement::{Placed, Placement};
use super::segments::{SegmentCell, View};
use super::shard::Place;

/// Granules of a hold: one bit each.
const GRANULES: u32 = u64::BITS;

/// What a hold takes of its segment. There is no payload in it yet.
const EXTENT: Extent = Extent {
    header_len: 256 << 10,
    size: 0,
};

const _: () = assert!(EXTENT.header_len as u64 == GRANULES as u64 * GRANULE);

/// The one that a client is at, and the next.
const MOST_PER_CLIENT: usize = 2;

/// Of a segment, at most one such part is in holds.
const SHARE: u64 = 64;

/// A hold that its client may commit slots of.
#[derive(Debug)]
struct Open {
    cell: Arc<SegmentCell>,
    /// Its first granule.
    first: Place,
    /// Names the hold; the numbers of its slots follow.
    generation: Generation,
    writer: ClientId,
    engine: Option<EngineId>,
    /// A bit for each granule that holds no object.
    unused: u64,
    last_used: Moment,
}

impl Open {
    /// The granule of the hold at which the slot of this number begins.
    fn slot(&self, generation: Generation) -> Option<u32> {
        let after = generation.0.checked_sub(self.generation.0 + 1)?;
        u32::try_from(after).ok().filter(|slot| *slot < GRANULES)
    }

    /// Takes a slot of `len` bytes.
    fn fill(&mut self, now: Moment, slot: u32, extent: Extent) -> Option<Place> {
        let granules = u32::try_from(extent.len().div_ceil(GRANULE)).ok()?;
        if granules > GRANULES - slot {
            return None;
        }
        let bits = (u64::MAX >> (GRANULES - granules)) << slot;
        if self.unused & bits != bits {
            return None;
        }
        self.unused &= !bits;
        self.last_used = now;
        self.cell.fill_slot(extent);
        Some(Place {
            granule: self.first.granule + slot,
            ..self.first
        })
    }

    /// The runs of granules that hold no object, with their lengths in bytes.
    fn rest(&self) -> Vec<(Place, u64)> {
        let mut runs = Vec::new();
        let mut bits = self.unused;
        while bits != 0 {
            let start = bits.trailing_zeros();
            let len = (!(bits >> start)).trailing_zeros();
            let place = Place {
                granule: self.first.granule + start,
                ..self.first
            };
            runs.push((place, u64::from(len) * GRANULE));
            bits &= !((u64::MAX >> (GRANULES - len)) << start);
        }
        runs
    }
}

/// See the module's description.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    by_client: HashMap<ClientId, Vec<Open>>,
}

impl Holds {
    fn of(&self, client: ClientId) -> usize {
        self.by_client.get(&client).map_or(0, Vec::len)
    }

    /// The place of the slot with this number, if its hold is this client's and nothing lies there yet.
    pub(super) fn fill(
        &mut self,
        now: Moment,
        client: ClientId,
        generation: Generation,
        extent: Extent,
    ) -> Option<Place> {
        let mut holds = self.by_client.get_mut(&client)?.iter_mut();
        let (hold, slot) = holds.find_map(|hold| {
            let slot = hold.slot(generation)?;
            Some((hold, slot))
        })?;
        hold.fill(now, slot, extent)
    }

    /// Takes holds out that are not to be used any more.
    fn take_out(&mut self, wanted: impl Fn(&Open) -> bool) -> Vec<Open> {
        let mut out = Vec::new();
        self.by_client.retain(|_, holds| {
            out.extend(holds.extract_if(.., |hold| wanted(hold)));
            !holds.is_empty()
        });
        out
    }
}

impl State {
    /// Grants a hold, where there is room to spare. Needs a caller that has joined.
    pub fn grant_hold(
        &self,
        now: Moment,
        caller: &Caller,
        unreachable: &[SegmentId],
    ) -> Option<Hold> {
        let location = caller.location.or(self.members.heard(now, caller.client)?);
        if self.holds.lock().of(caller.client) >= MOST_PER_CLIENT {
            return None;
        }
        let view = self.pool.view();
        if !self.has_room_to_spare(&view) {
            return None;
        }
        let config = ReplicateConfig::default();
        let unreachable = view.slots_of_or_away(unreachable);
        let strategy = (self.config.strategy, &self.dice);
        let placement = Placement::new(&view, &config, location, &unreachable, strategy);
        let mut placed = Placed::default();
        if !placement.place(EXTENT, 1, &mut placed) {
            return None;
        }
        let first = *placed.places.as_slice().first()?;
        let cell = view.cell(first.segment)?;
        let full = self.share(cell.capacity(), self.config.high_watermark);
        if !cell.begin_hold(first, EXTENT, full, cell.capacity() / SHARE) {
            return None;
        }
        // Drawn now: above everything that was ever written into this place.
        let generation = self.draw_generations(u64::from(GRANULES) + 1);
        let open = Open {
            cell: cell.clone(),
            first,
            generation,
            writer: caller.client,
            engine: location.map(|location| location.engine),
            unused: u64::MAX,
            last_used: now,
        };
        let hold = Hold {
            generation,
            segment: cell.info.id,
            offset: first.offset(),
            len: EXTENT.len(),
            epoch: Epoch(self.last_epoch.load(Ordering::Relaxed).max(1)),
        };
        let mut holds = self.holds.lock();
        let own = holds.by_client.entry(caller.client).or_default();
        if own.len() >= MOST_PER_CLIENT {
            end(&[open], false);
            return None;
        }
        own.push(open);
        Some(hold)
    }

    fn has_room_to_spare(&self, view: &View) -> bool {
        let cells = || view.cells().filter(|cell| cell.is_mounted());
        let capacity = cells().map(|cell| cell.capacity()).sum();
        let used: u64 = cells().map(|cell| cell.used()).sum();
        used <= self.share(capacity, self.config.high_watermark)
    }

    /// Its client gives holds up, by their numbers, and says that nothing of them is in flight.
    pub(super) fn give_holds_back<V: Version>(&self, client: ClientId, objects: &[V]) {
        let named = |hold: &Open| objects.iter().any(|o| o.generation() == hold.generation);
        let mut holds = self.holds.lock();
        if holds.of(client) > 0 {
            let wanted = |hold: &Open| hold.writer == client && named(hold);
            end(&holds.take_out(wanted), false);
        }
    }

    /// Its client gives holds up, and can't say that nothing of them is in flight.
    pub(super) fn abandon_holds<V: Version>(&self, now: Moment, client: ClientId, objects: &[V]) {
        let named = |hold: &Open| objects.iter().any(|o| o.generation() == hold.generation);
        if self.holds.lock().of(client) > 0 {
            let wanted = |hold: &Open| hold.writer == client && named(hold);
            self.take_holds(now, true, wanted);
        }
    }

    /// A client has left, and has nothing in flight.
    pub(super) fn free_holds(&self, client: ClientId) {
        let mut holds = self.holds.lock();
        if holds.of(client) > 0 {
            end(&holds.take_out(|hold| hold.writer == client), false);
        }
    }

    /// Segments are gone, and the holds in them with them.
    pub(super) fn forget_holds(&self, slots: &[u32]) {
        let gone = |hold: &Open| slots.contains(&hold.cell.slot);
        end(&self.holds.lock().take_out(gone), false);
    }

    /// Calls all holds back: room is short.
    pub(super) fn call_holds_back(&self, now: Moment) {
        self.take_holds(now, false, |_| true);
    }

    /// Calls the holds of one client back.
    pub(super) fn call_back_of(&self, now: Moment, client: ClientId) {
        self.take_holds(now, false, |hold| hold.writer == client);
    }

    /// Calls the holds in these segments back.
    pub(super) fn call_back_in(&self, now: Moment, slots: &[u32]) {
        self.take_holds(now, false, |hold| slots.contains(&hold.cell.slot));
    }

    /// Calls holds back that nobody used for long, that are no member's, or that lie in no segment of the pool.
    pub(super) fn sweep_holds(&self, now: Moment) {
        // Not under the table's lock: fences come after it.
        let members: HashSet<ClientId> = {
            let holds = self.holds.lock();
            let members = self.members.read();
            let clients = holds.by_client.keys().copied();
            clients
                .filter(|client| members.contains_key(client))
                .collect()
        };
        let idle = self.config.discard_after;
        self.take_holds(now, false, |hold| {
            now.since(hold.last_used) >= idle
                || !members.contains(&hold.writer)
                || !hold.cell.is_mounted()
        });
    }

    /// Takes holds away, whose clients may be writing into them.
    fn take_holds(&self, now: Moment, in_doubt: bool, wanted: impl Fn(&Open) -> bool) {
        let taken = {
            let mut holds = self.holds.lock();
            let taken = holds.take_out(wanted);
            end(&taken, true);
            taken
        };
        let suspects: Vec<_> = taken
            .into_iter()
            .map(|hold| Suspect {
                tenant: Tenant::default(),
                key: ObjectRef::of_hold(hold.generation).key,
                generation: hold.generation,
                writer: hold.writer,
                engine: hold.engine,
                in_doubt,
                is_hold: true,
                places: hold
                    .rest()
                    .into_iter()
                    .map(|(place, len)| (hold.cell.clone(), place, len))
                    .collect(),
            })
            .filter(|suspect| !suspect.places.is_empty())
            .collect();
        if suspects.is_empty() {
            return;
        }
        let places = suspects.iter().map(|suspect| suspect.places.len());
        self.tally.fenced_places.add_len(places.sum());
        let barrier = self.draw_generation();
        let mut fences = self.fences.lock();
        fences.hold(now, barrier, suspects, &mut self.events.lock());
    }

    /// Whether anybody has a hold, or memory of one that was called back is on its way.
    pub fn has_holds(&self) -> bool {
        !self.holds.lock().by_client.is_empty() || self.awaits_holds()
    }

    /// Whether memory of holds that were called back is on its way.
    pub fn awaits_holds(&self) -> bool {
        self.fences.lock().awaits_holds()
    }
}

/// Takes the rest of holds off the books as such: it is free, or held back.
fn end(holds: &[Open], held_back: bool) {
    for hold in holds {
        hold.cell.end_hold(&hold.rest(), held_back);
    }
}
