//! One version of an object, as compactly as a table of millions needs.
//!
//! What only few entries have (open sessions, readers, soft pins, a replacement on its way) lies in maps
//! of the shard, with a flag here that saves the look-up. The segment of a replica is a slot number of the
//! segment table, never reused in a master's life; all replicas of an entry share its header length and
//! its generation.

use std::sync::Arc;

use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::replica::GRANULE;

use super::texts::Text;
use crate::state::effects::Extent;
use crate::state::groups::Group;
use crate::state::moment::Moment;

/// Where one replica lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Slot of the segment.
    pub(crate) segment: u32,
    /// First granule in it.
    pub(crate) granule: u32,
}

impl Place {
    /// Offset in the segment, in bytes.
    pub(crate) fn offset(self) -> u64 {
        u64::from(self.granule) * GRANULE
    }
}

/// The replicas of an entry: nearly always one, which then needs no memory of its own.
#[derive(Clone, Debug, Default)]
pub(crate) enum Places {
    #[default]
    None,
    One(Place),
    /// Boxed twice: so the common case stays as small as a pointer and a tag.
    Many(Box<Box<[Place]>>),
}

impl Places {
    pub(crate) fn as_slice(&self) -> &[Place] {
        match self {
            Self::None => &[],
            Self::One(place) => std::slice::from_ref(place),
            Self::Many(places) => places,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::None)
    }

    pub(crate) fn push(&mut self, place: Place) {
        *self = match std::mem::take(self) {
            Self::None => Self::One(place),
            Self::One(first) => vec![first, place].into(),
            Self::Many(places) => {
                let mut places = places.into_vec();
                places.push(place);
                places.into()
            }
        };
    }

    /// Keeps the places that `keep` wants and calls it once for each.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(Place) -> bool) {
        match self {
            Self::None => {}
            Self::One(place) => {
                if !keep(*place) {
                    *self = Self::None;
                }
            }
            Self::Many(places) => {
                let kept: Vec<_> = places.iter().copied().filter(|p| keep(*p)).collect();
                if kept.len() < places.len() {
                    *self = kept.into();
                }
            }
        }
    }
}

impl From<Vec<Place>> for Places {
    fn from(places: Vec<Place>) -> Self {
        match places[..] {
            [] => Self::None,
            [place] => Self::One(place),
            _ => Self::Many(Box::new(places.into_boxed_slice())),
        }
    }
}

/// Where an entry is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The slot is free.
    #[default]
    Vacant,
    /// The name is taken, memory is being found.
    Reserved,
    /// The writer has its places.
    Writing,
    /// Whole and readable.
    Complete,
    /// Nameless: readers still rely on its memory.
    Removed,
}

/// Which order of eviction an entry stands in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Queue {
    /// In none.
    #[default]
    None,
    /// By recency.
    Normal,
    /// By recency, behind all of `Normal`.
    Soft,
    /// Set aside until a lease ends.
    Parked,
}

/// The entry is never evicted.
pub(crate) const HARD_PINNED: u8 = 1;
/// The entry has a soft pin in the shard's map.
pub(crate) const SOFT_PINNED: u8 = 2;
/// The entry has readers in the shard's map.
pub(crate) const HAS_READERS: u8 = 4;
/// Somebody wants to know when this reservation ends.
pub(crate) const WATCHED: u8 = 8;
/// Another version is being written that will replace this one.
pub(crate) const REPLACING: u8 = 16;
/// The entry is itself such a version: it has no name yet.
pub(crate) const REPLACEMENT: u8 = 32;

/// No probe has been granted a lease since the last read.
pub(crate) const NO_PROBE: Moment = Moment::END;

/// Who probes an entry: nobody in particular.
pub(crate) const ANYBODY: u32 = u32::MAX;

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Entry {
    /// None without a name.
    pub(crate) key: Text,
    /// Payload bytes.
    pub(crate) size: u64,
    pub(crate) generation: Generation,
    /// Latest request that touched the entry; with `index` the order of eviction.
    pub(crate) epoch: Epoch,
    /// End of the lease that nobody can give back: of probes, and of reads without a session.
    pub(crate) lease: Moment,
    /// Start of the run of probes that the lease rests on.
    pub(crate) first_probe: Moment,
    /// A digest of the client that alone made that run of probes, or [`ANYBODY`].
    pub(crate) prober: u32,
    pub(crate) places: Places,
    pub(crate) group: Option<Arc<Group>>,
    pub(crate) header_len: u32,
    /// Index in the prefix of the latest request.
    pub(crate) index: u32,
    /// Where it stands in its queue, or, while it is open, where its session lies.
    pub(crate) position: u32,
    /// Fingerprint and layout, in the shard's table.
    pub(crate) origin: u32,
    pub(crate) tenant: u32,
    pub(crate) phase: Phase,
    pub(crate) queue: Queue,
    pub(crate) flags: u8,
    /// Replicas that the tenant is charged for; none where tenants have no quotas.
    pub(crate) charged: u8,
}

impl Entry {
    pub(crate) fn vacant() -> Self {
        Self {
            key: Text::NONE,
            size: 0,
            generation: Generation::NONE,
            epoch: Epoch::UNSET,
            lease: Moment::START,
            first_probe: NO_PROBE,
            prober: ANYBODY,
            places: Places::None,
            group: None,
            header_len: 0,
            index: 0,
            position: 0,
            origin: 0,
            tenant: 0,
            phase: Phase::Vacant,
            queue: Queue::None,
            flags: 0,
            charged: 0,
        }
    }

    pub(crate) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// A session is writing it, or about to.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Reserved | Phase::Writing)
    }

    /// What each replica asks of its segment.
    pub(crate) fn extent(&self) -> Extent {
        Extent {
            header_len: self.header_len,
            size: self.size,
        }
    }

    /// Bytes that the tenant is charged for.
    pub(crate) fn charge(&self) -> u64 {
        self.size.saturating_mul(self.charged.into())
    }

    /// Smaller goes first: an earlier request, and within one the later block of the prefix.
    pub(crate) fn order(&self) -> (u64, u32) {
        (self.epoch.0, !self.index)
    }

    /// Makes the entry as recent as this, if it isn't already. Never makes it less so.
    pub(crate) fn touch(&mut self, epoch: Epoch, index: u32) {
        if (epoch.0, !index) > self.order() {
            self.epoch = epoch;
            self.index = index;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_stays_small() {
        assert!(size_of::<Entry>() <= 104, "{} bytes", size_of::<Entry>());
    }

    #[test]
    fn touching_never_makes_an_entry_less_recent() {
        let mut entry = Entry::vacant();
        for (epoch, index, expected) in [
            (5, 7, (5, 7)),
            (4, 0, (5, 7)),
            (5, 9, (5, 7)),
            (5, 2, (5, 2)),
            (6, 9, (6, 9)),
        ] {
            entry.touch(Epoch(epoch), index);
            assert_eq!((entry.epoch.0, entry.index), expected);
        }
    }

    #[test]
    fn places_shrink_to_their_smallest_form() {
        let place = |segment| Place {
            segment,
            granule: 9,
        };
        let mut places: Places = vec![place(1), place(2), place(3)].into();
        places.retain(|p| p.segment != 2);
        assert_eq!(places.as_slice(), [place(1), place(3)]);
        places.retain(|p| p.segment == 3);
        assert!(matches!(places, Places::One(p) if p == place(3)));
        places.retain(|_| false);
        assert!(places.is_empty());
    }
}
