//! This side of a piece: bytes in this process.

use layercake_protocol::ids::RegionId;

use super::{Memory, Pins};
use crate::racy::{self, Copies, Source, Target};

/// Bytes in this process that a batch reads or writes. Keeps registered memory alive.
#[derive(Clone, Debug)]
pub struct LocalSlice {
    place: Place,
    len: u64,
}

#[derive(Clone, Debug)]
enum Place {
    Registered { memory: Memory, offset: u64 },
    Raw { addr: usize },
}

impl LocalSlice {
    pub(super) fn new(memory: Memory, offset: u64, len: u64) -> Self {
        Self {
            place: Place::Registered { memory, offset },
            len,
        }
    }

    /// Bytes that are not registered.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `addr` must be valid for reads (a writing batch) or for reads and writes
    /// (a reading one) until every transfer that was given this slice or a clone of it has resolved,
    /// and must not be accessed in a way that conflicts with that.
    #[expect(
        unsafe_code,
        reason = "the caller vouches for memory that the engine does not own"
    )]
    pub unsafe fn from_raw(addr: usize, len: u64) -> Self {
        Self {
            place: Place::Raw { addr },
            len,
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of it; `None` if that does not lie inside.
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        let place = match &self.place {
            Place::Registered {
                memory,
                offset: base,
            } => Place::Registered {
                memory: memory.clone(),
                offset: base + offset,
            },
            Place::Raw { addr } => Place::Raw {
                addr: addr.checked_add(usize::try_from(offset).ok()?)?,
            },
        };
        Some(Self { place, len })
    }

    /// Copies the bytes to `target`, and gives the CRC-32C of what was copied: for small objects, which are put
    /// together before they are sent. `None`, and nothing is copied: the lengths differ, or one of both was
    /// unregistered.
    pub fn copy_to(&self, target: &Self) -> Option<u32> {
        let mut pins = Pins::new();
        let usable = self.len == target.len;
        if !usable || !self.pin_into(&mut pins) || !target.pin_into(&mut pins) {
            return None;
        }
        let copies = Copies::of(self.len);
        Some(copies.copy_crc(target.target(), self.source(), None))
    }

    /// Copies bytes in that are as many. `false`, and nothing is copied: they are not, or the memory was
    /// unregistered.
    pub fn fill(&self, bytes: &[u8]) -> bool {
        let mut pins = Pins::new();
        let usable = self.len == bytes.len() as u64 && self.pin_into(&mut pins);
        if usable {
            racy::copy(self.target(), Source::from_slice(bytes));
        }
        usable
    }

    /// The region it lies in, if registered.
    pub fn region(&self) -> Option<RegionId> {
        match &self.place {
            Place::Registered { memory, .. } => Some(memory.id()),
            Place::Raw { .. } => None,
        }
    }

    /// First address. Valid for `len` bytes: registered ranges were checked when the slice was made.
    #[expect(
        clippy::missing_panics_doc,
        reason = "offsets inside of mapped memory fit"
    )]
    pub fn addr(&self) -> usize {
        match &self.place {
            Place::Registered { memory, offset } => {
                memory.addr()
                    + usize::try_from(*offset).expect("an offset inside mapped memory fits")
            }
            Place::Raw { addr } => *addr,
        }
    }

    /// The bytes, to copy from.
    #[expect(
        unsafe_code,
        reason = "a slice stands for memory that is kept as long as it is"
    )]
    pub(crate) fn source(&self) -> Source<'_> {
        let len = usize::try_from(self.len).expect("a length inside mapped memory fits");
        // SAFETY: registered bytes are kept by the slice's handle on their memory, raw ones by whoever
        // made the slice; no reference to either is ever made while transfers run.
        unsafe { Source::new(self.addr() as *const u8, len) }
    }

    /// The bytes, to copy to.
    #[expect(
        unsafe_code,
        reason = "a slice stands for memory that is kept as long as it is"
    )]
    pub(crate) fn target(&self) -> Target<'_> {
        let len = usize::try_from(self.len).expect("a length inside mapped memory fits");
        // SAFETY: as for `source`; memory is registered writable.
        unsafe { Target::new(self.addr() as *mut u8, len) }
    }

    /// Pins the region. `false` if it was withdrawn. Neighbouring pieces of one region share a pin.
    pub(crate) fn pin_into(&self, pins: &mut Pins) -> bool {
        let Place::Registered { memory, .. } = &self.place else {
            return true;
        };
        if pins.last().is_some_and(|pin| pin.id() == memory.id()) {
            return true;
        }
        match memory.entry().pin() {
            Some(pin) => {
                pins.push(pin);
                true
            }
            None => false,
        }
    }
}
