//! Memory for the parts of the object table that grow with it, in huge pages where the system gives them.
//!
//! In ordinary pages a table of millions has more of them than the processor remembers the places of, and each
//! key costs several walks through the page tables. So the table's large pieces come from regions that the
//! system is asked to back by huge pages, and lie close together in them, whichever shard they belong to:
//! what is unused of a huge page is unused once, not once for each shard. Small pieces, which are all that a
//! small table has, come from the heap.
//!
//! A region is address space until it is written to, and is kept until the table goes. Pieces are whole
//! units, the first hole that is large enough gives them, and holes side by side become one.
//!
//! # Invariant
//!
//! A unit of a region belongs to one piece, or to one hole. A piece is what `allocate` returned and
//! `deallocate` has not taken back; it holds a clone of the [`TableMemory`], so its region is there.
//! Whether a piece comes from a region or from the heap follows from its layout alone.
#![expect(unsafe_code, reason = "an allocator's methods are unsafe")]

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use allocator_api2::alloc::{AllocError, Allocator, Global};
use parking_lot::Mutex;
use rustix::mm::Advice;

/// A vector in this memory.
pub(crate) type TableVec<T> = allocator_api2::vec::Vec<T, TableMemory>;

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// Bytes of a region: more than a heap would keep for itself.
const REGION: usize = 64 << 20;

/// Bytes that pieces of regions are multiples of.
const UNIT: usize = 16 << 10;

/// Pieces of fewer bytes come from the heap.
const LEAST: usize = 2 * UNIT;

/// See the module's description. Clones are the same memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct TableMemory(Arc<Mutex<Regions>>);

/// Places in regions: the region's number, and an offset in it in bytes.
type Start = (usize, usize);

#[derive(Debug, Default)]
struct Regions {
    regions: Vec<Region>,
    /// Bytes of each hole.
    holes: BTreeMap<Start, usize>,
}

impl Regions {
    /// Takes `len` bytes, whole units, out of the first hole that has them.
    fn take(&mut self, len: usize) -> Result<NonNull<u8>, AllocError> {
        if !self.holes.values().any(|hole| *hole >= len) {
            self.holes.insert((self.regions.len(), 0), REGION);
            self.regions.push(Region::new().inspect_err(|_| {
                self.holes.pop_last();
            })?);
        }
        let mut holes = self.holes.iter();
        let (start, hole) = holes.find(|(_, hole)| **hole >= len).ok_or(AllocError)?;
        let ((region, offset), hole) = (*start, *hole);
        self.holes.remove(&(region, offset));
        if hole > len {
            self.holes.insert((region, offset + len), hole - len);
        }
        Ok(self.regions[region].at(offset))
    }

    /// Makes a piece of `len` bytes a hole.
    fn give(&mut self, piece: NonNull<u8>, len: usize) {
        let place = |region: &Region| region.offset_of(piece);
        let mut numbered = self.regions.iter().map(place).enumerate();
        let (region, mut offset) = numbered
            .find_map(|(number, offset)| Some((number, offset?)))
            .expect("a piece lies in a region");
        let mut len = len;
        if let Some(behind) = self.holes.remove(&(region, offset + len)) {
            len += behind;
        }
        if let Some((&(before, start), &hole)) = self.holes.range(..(region, offset)).next_back()
            && before == region
            && start + hole == offset
        {
            offset = start;
            len += hole;
        }
        self.holes.insert((region, offset), len);
    }
}

/// Bytes that are nobody's but the regions'.
#[derive(Debug)]
struct Region(NonNull<u8>);

// SAFETY: it is the address of memory that no thread is bound to.
unsafe impl Send for Region {}

impl Region {
    const LAYOUT: Layout = match Layout::from_size_align(REGION, HUGE) {
        Ok(layout) => layout,
        Err(_) => panic!("both are powers of two"),
    };

    fn new() -> Result<Self, AllocError> {
        // SAFETY: the layout has a size.
        let start = unsafe { std::alloc::alloc(Self::LAYOUT) };
        let region = Self(NonNull::new(start).ok_or(AllocError)?);
        // SAFETY: the advice changes no byte, and the range is this region.
        let advised = unsafe { rustix::mm::madvise(start.cast(), REGION, Advice::LinuxHugepage) };
        if let Err(error) = advised {
            tracing::debug!(%error, "no huge pages for the object table");
        }
        Ok(region)
    }

    fn at(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset < REGION, "holes lie inside of their region");
        // SAFETY: the offset is one of a hole, so it lies in the region.
        unsafe { self.0.add(offset) }
    }

    fn offset_of(&self, piece: NonNull<u8>) -> Option<usize> {
        let offset = piece.addr().get().checked_sub(self.0.addr().get())?;
        (offset < REGION).then_some(offset)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and no piece of it is left: each would hold the regions.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), Self::LAYOUT) }
    }
}

/// Bytes that a piece takes of a region; `None`: it comes from the heap.
fn in_regions(layout: Layout) -> Option<usize> {
    let fits = (LEAST..=REGION).contains(&layout.size()) && layout.align() <= UNIT;
    fits.then(|| layout.size().next_multiple_of(UNIT))
}

// SAFETY: pieces of regions don't overlap and stay where they are until they are given back, see the module's
// invariant; clones share the regions. What comes from the heap is the heap's promise.
unsafe impl Allocator for TableMemory {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        match in_regions(layout) {
            Some(len) => {
                let start = self.0.lock().take(len)?;
                Ok(NonNull::slice_from_raw_parts(start, layout.size()))
            }
            None => Global.allocate(layout),
        }
    }

    unsafe fn deallocate(&self, piece: NonNull<u8>, layout: Layout) {
        match in_regions(layout) {
            Some(len) => self.0.lock().give(piece, len),
            // SAFETY: the layout's other pieces come from there.
            None => unsafe { Global.deallocate(piece, layout) },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The holes' bytes, and those of all regions.
    fn bytes(memory: &TableMemory) -> (usize, usize) {
        let regions = memory.0.lock();
        (regions.holes.values().sum(), regions.regions.len() * REGION)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn pieces_keep_what_is_in_them_and_leave_no_splinters(
            steps in prop::collection::vec(
                (any::<bool>(), 1_usize..(200 << 10), any::<prop::sample::Index>()), 1..80),
        ) {
            let memory = TableMemory::default();
            let mut pieces: Vec<(u64, TableVec<u64>)> = Vec::new();
            for (number, (release, len, chosen)) in (0_u64..).zip(steps) {
                if release && !pieces.is_empty() {
                    let (number, piece) = pieces.swap_remove(chosen.index(pieces.len()));
                    prop_assert!(piece.iter().all(|word| *word == number));
                } else {
                    let mut piece = TableVec::with_capacity_in(len, memory.clone());
                    piece.resize(len, number);
                    pieces.push((number, piece));
                }
            }
            for (number, piece) in &pieces {
                prop_assert!(piece.iter().all(|word| word == number));
            }
            let large = pieces.iter().map(|(_, piece)| size_of_val(piece.as_slice()));
            let taken = large.filter(|len| *len >= LEAST).map(|len| len.next_multiple_of(UNIT));
            let (free, all) = bytes(&memory);
            prop_assert_eq!(all - free, taken.sum::<usize>());
            pieces.clear();
            let regions = memory.0.lock();
            prop_assert_eq!(regions.holes.len(), regions.regions.len());
            prop_assert!(regions.holes.values().all(|hole| *hole == REGION));
        }
    }

    #[test]
    fn a_region_serves_until_it_is_full_and_outlives_its_owner() {
        let memory = TableMemory::default();
        let half = |fill: u8| {
            let mut piece = TableVec::with_capacity_in(REGION / 2, memory.clone());
            piece.push(fill);
            piece
        };
        let [first, second] = [half(1), half(2)];
        assert_eq!(bytes(&memory), (0, REGION));
        let third = half(3);
        assert_eq!(bytes(&memory), (REGION / 2, 2 * REGION));
        drop(second);
        let fourth = half(4);
        assert_eq!(bytes(&memory), (REGION / 2, 2 * REGION));
        drop(memory);
        assert_eq!([first[0], third[0], fourth[0]], [1, 3, 4]);
    }

    #[test]
    fn what_is_too_large_for_a_region_comes_from_the_heap() {
        let memory = TableMemory::default();
        let piece = TableVec::<u8>::with_capacity_in(REGION + 1, memory.clone());
        assert!(piece.capacity() > REGION);
        assert_eq!(bytes(&memory), (0, 0));
    }
}
