//! What a change of the object table brings about elsewhere, collected under a shard's lock and carried
//! out after it was let go.

use std::sync::Arc;

use layercake_protocol::ids::{ClientId, EngineId, Generation};

use super::alloc::granule_bytes;
use super::api::Amount;
use super::groups::Group;
use super::shard::{Place, Places};

/// What happens to a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It can be used again.
    Free,
    /// It is nobody's any more, but readers rely on it.
    Hold,
    /// It was held, and can be used again.
    Release,
}

/// Why an object went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Watermark,
    Allocation,
    Removed,
    Replaced,
    Lost,
    Unmounted,
}

impl Reason {
    pub(crate) const COUNT: usize = 6;
}

/// A reservation that was taken from its writer, who may still be writing.
#[derive(Debug)]
pub(crate) struct Dropped {
    pub(crate) tenant: u32,
    pub(crate) key: Box<str>,
    pub(crate) generation: Generation,
    pub(crate) writer: ClientId,
    pub(crate) engine: Option<EngineId>,
    /// The writer gave it up itself, but can't say that nothing is in flight.
    pub(crate) in_doubt: bool,
    pub(crate) places: Places,
    /// Length of each place in bytes.
    pub(crate) len: u64,
}

/// See the module's description.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Places whose state changes, with their length in bytes.
    pub(crate) memory: Vec<(Place, u64, Fate)>,
    pub(crate) dropped: Vec<Dropped>,
    /// Watched reservations that ended.
    pub(crate) settled: Vec<(u32, Box<str>)>,
    /// Groups whose members may stand for eviction again.
    pub(crate) unblocked: Vec<Arc<Group>>,
    /// What went, by [`Reason`].
    pub(crate) gone: [Amount; Reason::COUNT],
    /// Bytes of the granules that came free, ever since this was made.
    pub(crate) freed_bytes: u64,
}

impl Effects {
    pub(crate) fn place(&mut self, place: Place, len: u64, fate: Fate) {
        self.memory.push((place, len, fate));
        if fate != Fate::Hold {
            self.freed_bytes += granule_bytes(len);
        }
    }

    pub(crate) fn places(&mut self, places: &Places, len: u64, fate: Fate) {
        for place in places.as_slice() {
            self.place(*place, len, fate);
        }
    }

    pub(crate) fn count(&mut self, reason: Reason, bytes: u64) {
        let amount = &mut self.gone[reason as usize];
        amount.objects += 1;
        amount.bytes += bytes;
    }
}
