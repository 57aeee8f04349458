//! What a change of the object table brings about elsewhere, collected under a shard's lock and carried
//! out after it was let go.

use std::sync::Arc;

use layercake_protocol::ids::{ClientId, EngineId, Generation};

use super::alloc::granule_bytes;
use super::api::Amount;
use super::groups::Group;
use super::shard::{Place, Places};

/// What one replica asks of its segment: the payload, and the header in front of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) header_len: u32,
    /// Payload bytes.
    pub(crate) size: u64,
}

impl Extent {
    /// Bytes in all. The sum was checked when the object was reserved.
    pub(crate) fn len(self) -> u64 {
        u64::from(self.header_len) + self.size
    }
}

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
    /// Evicted for another object of a tenant whose quota is used up.
    Quota,
}

impl Reason {
    pub(crate) const COUNT: usize = 7;
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
    /// What each place holds.
    pub(crate) extent: Extent,
}

/// See the module's description.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Places whose state changes, with what they hold.
    pub(crate) memory: Vec<(Place, Extent, Fate)>,
    pub(crate) dropped: Vec<Dropped>,
    /// Watched reservations that ended.
    pub(crate) settled: Vec<(u32, Box<str>)>,
    /// What tenants are charged for no longer, in bytes.
    pub(crate) discharged: Vec<(u32, u64)>,
    /// Groups whose members may stand for eviction again.
    pub(crate) unblocked: Vec<Arc<Group>>,
    /// What went, by [`Reason`].
    pub(crate) gone: [Amount; Reason::COUNT],
    /// Bytes of the granules that came free, ever since this was made.
    pub(crate) freed_bytes: u64,
}

impl Effects {
    pub(crate) fn place(&mut self, place: Place, extent: Extent, fate: Fate) {
        self.memory.push((place, extent, fate));
        if fate != Fate::Hold {
            self.freed_bytes += granule_bytes(extent.len());
        }
    }

    pub(crate) fn places(&mut self, places: &Places, extent: Extent, fate: Fate) {
        for place in places.as_slice() {
            self.place(*place, extent, fate);
        }
    }

    pub(crate) fn discharge(&mut self, tenant: u32, bytes: u64) {
        match self.discharged.last_mut() {
            _ if bytes == 0 => {}
            Some((last, sum)) if *last == tenant => *sum += bytes,
            _ => self.discharged.push((tenant, bytes)),
        }
    }

    pub(crate) fn count(&mut self, reason: Reason, bytes: u64) {
        let amount = &mut self.gone[reason as usize];
        amount.objects += 1;
        amount.bytes += bytes;
    }
}
