//! Chooses segments for new objects (requirement S4).
//!
//! The replicas of an object lie in distinct segments, of distinct nodes where that can be had. The first
//! comes into the first segment of this list that has a hole for it, the next into the next:
//! the preferred names in their order; with `prefer_same_node` the caller's own engine, then its host; and
//! then the one that the master's strategy chooses of those with a large enough hole: by default the one with
//! more room of two random ones. Looking at holes and not at free bytes keeps a fragmented segment from
//! being tried in vain, and two random choices keep the segments about equally full without a look at
//! all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use layercake_protocol::replica::ReplicateConfig;

use super::alloc::granule_bytes;
use super::api::Location;
use super::config::Strategy;
use super::effects::Extent;
use super::segments::{SegmentCell, View};
use super::shard::{Place, Places};

/// Repeatable randomness that needs no lock.
#[derive(Debug)]
pub(crate) struct Dice(AtomicU64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// A number below `bound`, which is at least 1.
    pub(crate) fn below(&self, bound: usize) -> usize {
        let step = 0x9E37_79B9_7F4A_7C15;
        let mut x = self.0.fetch_add(step, Ordering::Relaxed).wrapping_add(step);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        usize::try_from((u128::from(x) * bound as u128) >> 64).expect("less than the bound")
    }
}

/// The places of one object, as they are found.
#[derive(Debug, Default)]
pub(crate) struct Placed {
    pub(crate) places: Places,
    /// Where they lie, as long as more are looked for.
    cells: Vec<Arc<SegmentCell>>,
}

/// How the objects of one call are placed.
#[derive(Debug)]
pub(crate) struct Placement<'a> {
    config: &'a ReplicateConfig,
    location: Option<Location>,
    /// Segments that the caller can use.
    cells: Vec<&'a Arc<SegmentCell>>,
    preferred: Vec<&'a Arc<SegmentCell>>,
    strategy: Strategy,
    dice: &'a Dice,
}

impl<'a> Placement<'a> {
    pub(crate) fn new(
        view: &'a View,
        config: &'a ReplicateConfig,
        location: Option<Location>,
        unreachable: &[u32],
        (strategy, dice): (Strategy, &'a Dice),
    ) -> Self {
        let usable =
            |cell: &&Arc<SegmentCell>| cell.is_mounted() && !unreachable.contains(&cell.slot);
        let names = config.preferred_segments.iter();
        let mut cells: Vec<_> = view.cells().filter(usable).collect();
        cells.sort_unstable_by_key(|cell| cell.slot);
        Self {
            config,
            location,
            cells,
            preferred: names
                .flat_map(|name| view.by_name(name))
                .filter(usable)
                .collect(),
            strategy,
            dice,
        }
    }

    /// How many replicas of this length there can be at most: one per segment that is large enough.
    pub(crate) fn replicas(&self, len: u64) -> usize {
        let large_enough = self
            .cells
            .iter()
            .filter(|cell| cell.is_mounted() && cell.capacity() >= granule_bytes(len));
        large_enough.take(self.wanted()).count()
    }

    /// How many replicas are asked for.
    pub(crate) fn wanted(&self) -> usize {
        usize::try_from(self.config.replicas).unwrap_or(usize::MAX)
    }

    /// Bytes of all usable segments.
    pub(crate) fn capacity(&self) -> u64 {
        self.cells.iter().map(|cell| cell.capacity()).sum()
    }

    /// The largest hole that the caller can use.
    pub(crate) fn largest_free(&self) -> u64 {
        let holes = self.cells.iter().map(|cell| cell.largest_free());
        holes.max().unwrap_or(0)
    }

    /// Finds places until there are `replicas`; false: there is no room for so many now.
    pub(crate) fn place(&self, extent: Extent, replicas: usize, placed: &mut Placed) -> bool {
        let mut left = replicas - placed.places.as_slice().len().min(replicas);
        while left > 0 {
            let Some((cell, place)) = self.next(extent, placed) else {
                return false;
            };
            placed.places.push(place);
            left -= 1;
            if left > 0 {
                placed.cells.push(cell.clone());
            }
        }
        true
    }

    fn next(&self, extent: Extent, placed: &Placed) -> Option<(&'a Arc<SegmentCell>, Place)> {
        let need = granule_bytes(extent.len());
        let fits = |cell: &SegmentCell| {
            cell.largest_free() >= need && placed.cells.iter().all(|other| other.slot != cell.slot)
        };
        let first = |cells: &[&'a Arc<SegmentCell>], wanted: &dyn Fn(&SegmentCell) -> bool| {
            let mut cells = cells.iter().filter(|cell| wanted(cell) && fits(cell));
            cells.find_map(|cell| Some((*cell, cell.take(extent)?)))
        };
        if let Some(found) = first(&self.preferred, &|_| true) {
            return Some(found);
        }
        if (self.config.prefer_same_node || self.strategy == Strategy::LocalFirst)
            && let Some(here) = self.location
        {
            let endpoint = |cell: &SegmentCell| Location::from(&cell.info.endpoint);
            if let Some(found) = first(&self.cells, &|c| endpoint(c).engine == here.engine)
                .or_else(|| first(&self.cells, &|c| endpoint(c).host == here.host))
            {
                return Some(found);
            }
        }
        let elsewhere =
            |cell: &SegmentCell| placed.cells.iter().all(|other| other.owner != cell.owner);
        self.choose(extent, &|cell| fits(cell) && elsewhere(cell))
            .or_else(|| self.choose(extent, &fits))
            // What the books' copies promised was taken meanwhile: any that has room.
            .or_else(|| first(&self.cells, &|_| true))
    }

    /// The segment that the strategy chooses among those that are eligible.
    fn choose(
        &self,
        extent: Extent,
        eligible: &dyn Fn(&SegmentCell) -> bool,
    ) -> Option<(&'a Arc<SegmentCell>, Place)> {
        let free_share = |cell: &SegmentCell| 1.0 - cell.used() as f64 / cell.capacity() as f64;
        let take = |cell: &'a Arc<SegmentCell>| Some((cell, cell.take(extent)?));
        let draw = || {
            // Nearly always some try hits; a full look is for pools that are nearly full.
            let tries = (0..4).map(|_| self.cells[self.dice.below(self.cells.len())]);
            let mut hits = tries.filter(|cell| eligible(cell));
            hits.next().or_else(|| {
                let all: Vec<_> = self.cells.iter().filter(|cell| eligible(cell)).collect();
                (!all.is_empty()).then(|| *all[self.dice.below(all.len())])
            })
        };
        if self.cells.is_empty() {
            return None;
        }
        if self.strategy == Strategy::Random {
            return take(draw()?);
        }
        if self.strategy == Strategy::Roomiest {
            let eligible = self.cells.iter().filter(|cell| eligible(cell));
            let roomiest = eligible.max_by(|a, b| free_share(a).total_cmp(&free_share(b)));
            return take(roomiest?);
        }
        let (a, b) = (draw()?, draw()?);
        let (best, other) = if free_share(a) >= free_share(b) {
            (a, b)
        } else {
            (b, a)
        };
        take(best).or_else(|| take(other))
    }
}
