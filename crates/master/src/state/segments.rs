//! The pool: mounted segments, their books, and a snapshot of which there are.
//!
//! A segment has a slot number, given out once in a master's life: entries name their segments by it, and
//! one that refers to a segment long gone never means another. Calls work on a [`View`], a snapshot; a
//! segment's own state is shared by all snapshots, so one that closes is closed for everybody at once.
//!
//! Closing comes before forgetting: `close` stops allocation under the books' lock; then the table of
//! objects is cleared of the segment. An allocation that came before is found by that, or finds the segment
//! closed itself when it fills its entry under the entry's lock.
//!
//! Locks: a segment's books and the view's pointer are leaves.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use layercake_protocol::ids::{ClientId, EngineId, SegmentId};
use layercake_protocol::replica::{GRANULE, Segment};
use parking_lot::{Mutex, RwLock};

use super::alloc::{Allocator, BinAllocator, Usage, granule_bytes};
use super::effects::{Extent, Fate};
use super::shard::Place;

const MOUNTED: u8 = 0;
const DRAINING: u8 = 1;
const CLOSED: u8 = 2;

/// One segment and its books.
#[derive(Debug)]
pub(crate) struct SegmentCell {
    pub(crate) slot: u32,
    pub(crate) info: Arc<Segment>,
    /// The node that lends it.
    pub(crate) owner: ClientId,
    state: AtomicU8,
    /// The node's stream is broken: it may be dead, or about to come back.
    away: AtomicBool,
    /// Copies of what the books say, for choosing a segment without their lock.
    largest_free: AtomicU64,
    used: AtomicU64,
    capacity: u64,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    allocator: Box<dyn Allocator>,
    /// Signed: of two threads, the one that releases a place may be here before the one that held it.
    held_bytes: i64,
    held_pieces: i64,
    /// Payload bytes of the places that are somebody's.
    payload: u64,
    /// Of clients that have them in advance, and the bytes in them that are no object's.
    holds: u64,
    hold_bytes: u64,
}

impl Books {
    /// Takes a piece of `len` bytes into the account of what is held (`sign` 1), or out of it (-1).
    fn hold(&mut self, len: u64, sign: i64) {
        let bytes = i64::try_from(granule_bytes(len)).unwrap_or(i64::MAX);
        self.held_bytes += sign * bytes;
        self.held_pieces += sign;
    }
}

/// Memory that is nobody's any more, but not free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// Bytes of its granules.
    pub(crate) bytes: u64,
    pub(crate) pieces: u64,
}

impl SegmentCell {
    /// `None`: the segment is too small or too large to be handed out in granules.
    fn new(slot: u32, info: Segment, owner: ClientId) -> Option<Self> {
        let allocator = BinAllocator::new(info.len)?;
        Some(Self {
            slot,
            owner,
            state: AtomicU8::new(MOUNTED),
            away: AtomicBool::new(false),
            largest_free: AtomicU64::new(allocator.largest_free()),
            used: AtomicU64::new(0),
            capacity: allocator.usage().capacity,
            info: Arc::new(info),
            books: Mutex::new(Books {
                allocator: Box::new(allocator),
                held_bytes: 0,
                held_pieces: 0,
                payload: 0,
                holds: 0,
                hold_bytes: 0,
            }),
        })
    }

    pub(crate) fn is_mounted(&self) -> bool {
        self.state.load(Ordering::SeqCst) == MOUNTED
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.state.load(Ordering::SeqCst) == DRAINING
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.load(Ordering::SeqCst) == CLOSED
    }

    pub(crate) fn is_away(&self) -> bool {
        self.away.load(Ordering::Relaxed)
    }

    pub(crate) fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::Relaxed);
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes of the granules in use, as of a moment ago.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The largest hole, as of a moment ago; zero if nothing is handed out any more.
    pub(crate) fn largest_free(&self) -> u64 {
        if self.is_mounted() {
            self.largest_free.load(Ordering::Relaxed)
        } else {
            0
        }
    }

    /// Takes a place.
    pub(crate) fn take(&self, extent: Extent) -> Option<Place> {
        let mut books = self.books.lock();
        if !self.is_mounted() {
            return None;
        }
        let offset = books.allocator.allocate(extent.len())?;
        books.payload += extent.size;
        self.publish(&books);
        Some(Place {
            segment: self.slot,
            granule: u32::try_from(offset / GRANULE)
                .expect("segments that can be mounted have fewer granules"),
        })
    }

    /// Frees, holds or releases a place.
    pub(crate) fn change(&self, place: Place, extent: Extent, fate: Fate) {
        let mut books = self.books.lock();
        match fate {
            Fate::Free => {
                books.payload -= extent.size;
                self.free(&mut books, place, extent.len());
            }
            Fate::Hold => {
                books.payload -= extent.size;
                books.hold(extent.len(), 1);
            }
            Fate::Release => {
                books.hold(extent.len(), -1);
                self.free(&mut books, place, extent.len());
            }
        }
    }

    /// Releases a place of `len` bytes that was held.
    pub(crate) fn release(&self, place: Place, len: u64) {
        let mut books = self.books.lock();
        books.hold(len, -1);
        self.free(&mut books, place, len);
    }

    /// Makes a hold of a place that was taken, if then no more than `full` bytes are in use and no more than `most`
    /// in holds; else it is free again.
    pub(crate) fn begin_hold(&self, place: Place, extent: Extent, full: u64, most: u64) -> bool {
        let mut books = self.books.lock();
        let bytes = extent.len();
        if books.allocator.usage().used > full || books.hold_bytes + bytes > most {
            self.free(&mut books, place, bytes);
            return false;
        }
        books.holds += 1;
        books.hold_bytes += bytes;
        true
    }

    /// Makes an object's place of a slot of a hold.
    pub(crate) fn fill_slot(&self, extent: Extent) {
        let mut books = self.books.lock();
        let bytes = granule_bytes(extent.len());
        books.hold_bytes -= bytes;
        books.payload += extent.size;
        books.allocator.split(2, bytes - extent.len());
    }

    /// Ends a hold. What is left of it, in runs of so many bytes, is free, or held back.
    pub(crate) fn end_hold(&self, rest: &[(Place, u64)], held_back: bool) {
        let mut books = self.books.lock();
        books.holds -= 1;
        books.hold_bytes -= rest.iter().map(|(_, len)| len).sum::<u64>();
        books.allocator.split(rest.len() as u64, 0);
        for (place, len) in rest {
            if held_back {
                books.hold(*len, 1);
            } else {
                self.free(&mut books, *place, *len);
            }
        }
    }

    /// How many holds there are, and their bytes that are no object's.
    pub(crate) fn holds(&self) -> (u64, u64) {
        let books = self.books.lock();
        (books.holds, books.hold_bytes)
    }

    fn free(&self, books: &mut Books, place: Place, len: u64) {
        if self.is_closed() {
            return;
        }
        books
            .allocator
            .free(place.offset(), len)
            .expect("a place is given back once, by the entry that took it");
        self.publish(books);
    }

    fn publish(&self, books: &Books) {
        self.largest_free
            .store(books.allocator.largest_free(), Ordering::Relaxed);
        self.used
            .store(books.allocator.usage().used, Ordering::Relaxed);
    }

    /// The account, and what of it is held back.
    pub(crate) fn account(&self) -> (Usage, Held) {
        let books = self.books.lock();
        let held = Held {
            bytes: u64::try_from(books.held_bytes).unwrap_or(0),
            pieces: u64::try_from(books.held_pieces).unwrap_or(0),
        };
        (books.allocator.usage(), held)
    }

    /// Payload bytes of objects and reservations that have a name, each replica counted.
    pub(crate) fn payload(&self) -> u64 {
        self.books.lock().payload
    }

    /// Takes no new objects from now on.
    pub(crate) fn drain(&self) {
        let _books = self.books.lock();
        if self.is_mounted() {
            self.state.store(DRAINING, Ordering::SeqCst);
        }
    }

    fn close(&self) {
        let _books = self.books.lock();
        self.state.store(CLOSED, Ordering::SeqCst);
    }
}

/// Which segments there are. Later views know more slots, and never fewer.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    slots: Vec<Option<Arc<SegmentCell>>>,
    by_id: HashMap<SegmentId, u32>,
    by_name: HashMap<String, Vec<u32>>,
}

impl View {
    pub(crate) fn cell(&self, slot: u32) -> Option<&Arc<SegmentCell>> {
        self.slots.get(slot as usize)?.as_ref()
    }

    /// Whether this view is older than the segment with this slot.
    pub(crate) fn is_older_than(&self, slot: u32) -> bool {
        slot as usize >= self.slots.len()
    }

    /// Whether readers may be sent to a place. What this view is too old to know counts as alive.
    pub(crate) fn is_alive(&self, place: Place) -> bool {
        match self.cell(place.segment) {
            Some(cell) => cell.is_mounted(),
            None => self.is_older_than(place.segment),
        }
    }

    pub(crate) fn by_id(&self, id: SegmentId) -> Option<&Arc<SegmentCell>> {
        self.cell(*self.by_id.get(&id)?)
    }

    /// The segments of a node's name.
    pub(crate) fn by_name(&self, name: &str) -> impl Iterator<Item = &Arc<SegmentCell>> {
        let slots = self.by_name.get(name).map_or(&[][..], Vec::as_slice);
        slots.iter().filter_map(|slot| self.cell(*slot))
    }

    /// All segments, the draining ones too.
    pub(crate) fn cells(&self) -> impl Iterator<Item = &Arc<SegmentCell>> {
        self.by_id.values().filter_map(|slot| self.cell(*slot))
    }

    /// Slots of the segments that are known by these ids, and of those whose nodes are away.
    pub(crate) fn slots_of_or_away(&self, ids: &[SegmentId]) -> Vec<u32> {
        let mut slots = self.slots_of(ids);
        let away = self.cells().filter(|cell| cell.is_away());
        slots.extend(away.map(|cell| cell.slot));
        slots
    }

    /// Slots of the segments that are known by these ids.
    pub(crate) fn slots_of(&self, ids: &[SegmentId]) -> Vec<u32> {
        ids.iter()
            .filter_map(|id| self.by_id.get(id).copied())
            .collect()
    }
}

/// A mount that can't be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MountError {
    /// It is mounted already, by the same node.
    Already,
    /// Another member has mounted a segment of this id.
    Taken(ClientId),
    /// Too small or too large.
    Size,
}

/// The pool of all segments.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    view: RwLock<Arc<View>>,
}

impl Pool {
    pub(crate) fn view(&self) -> Arc<View> {
        self.view.read().clone()
    }

    /// Adds a segment.
    pub(crate) fn mount(&self, owner: ClientId, segment: Segment) -> Result<(), MountError> {
        let mut current = self.view.write();
        if let Some(cell) = current.by_id(segment.id) {
            return Err(if cell.owner == owner {
                MountError::Already
            } else {
                MountError::Taken(cell.owner)
            });
        }
        let mut view = View::clone(&current);
        let slot = u32::try_from(view.slots.len()).map_err(|_| MountError::Size)?;
        let (id, name) = (segment.id, segment.name.clone());
        let cell = SegmentCell::new(slot, segment, owner).ok_or(MountError::Size)?;
        view.slots.push(Some(Arc::new(cell)));
        view.by_id.insert(id, slot);
        view.by_name.entry(name).or_default().push(slot);
        *current = Arc::new(view);
        Ok(())
    }

    /// Closes segments and takes them out of the view; those that were still in it are returned.
    pub(crate) fn close(&self, slots: &[u32]) -> Vec<Arc<SegmentCell>> {
        let mut current = self.view.write();
        let mut view = View::clone(&current);
        let mut closed = Vec::new();
        for slot in slots {
            let Some(cell) = view.slots.get_mut(*slot as usize).and_then(Option::take) else {
                continue;
            };
            cell.close();
            view.by_id.remove(&cell.info.id);
            if let Some(slots) = view.by_name.get_mut(&cell.info.name) {
                slots.retain(|other| other != slot);
                if slots.is_empty() {
                    view.by_name.remove(&cell.info.name);
                }
            }
            closed.push(cell);
        }
        *current = Arc::new(view);
        closed
    }

    /// Notes that the stream of a node broke, or is there again.
    pub(crate) fn set_away(&self, owner: ClientId, away: bool) {
        let view = self.view();
        let lent = view.cells().filter(|cell| cell.owner == owner);
        lent.for_each(|cell| cell.set_away(away));
    }

    /// Slots of the segments that a member lends.
    pub(crate) fn lent_by(&self, owner: ClientId) -> Vec<u32> {
        let view = self.view();
        let lent = view.cells().filter(|cell| cell.owner == owner);
        lent.map(|cell| cell.slot).collect()
    }

    /// Slots of the segments that carry a name, but belong to another engine than this.
    pub(crate) fn namesakes(&self, name: &str, engine: EngineId) -> Vec<u32> {
        let view = self.view();
        view.by_name(name)
            .filter(|cell| cell.info.endpoint.engine != engine)
            .map(|cell| cell.slot)
            .collect()
    }
}
