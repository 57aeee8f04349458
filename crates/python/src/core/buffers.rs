//! Which registered buffer an address lies in.

use std::collections::BTreeMap;

use layercake_transport::{Access, LocalSlice, Memory, RegionDescriptor};
use parking_lot::RwLock;
use thiserror::Error;

use crate::memory::{self, Unusable, Use};

/// Registered buffers by their first address. They never overlap: the engine refuses that.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    by_start: RwLock<BTreeMap<u64, Buffer>>,
}

/// A registered buffer, and what peers may do with it.
#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub(super) memory: Memory,
    pub(super) access: Access,
}

/// Why a piece of local memory can't be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum Unresolved {
    #[error(transparent)]
    Unusable(#[from] Unusable),
    #[error("{len} bytes at {addr:#x} lie in no registered buffer")]
    Unregistered { addr: u64, len: u64 },
}

impl Buffers {
    pub(super) fn insert(&self, start: u64, buffer: Buffer) {
        self.by_start.write().insert(start, buffer);
    }

    /// Takes out the buffer that begins exactly there.
    pub(super) fn remove(&self, start: u64) -> Option<Buffer> {
        self.by_start.write().remove(&start)
    }

    /// Takes out all of them.
    pub(super) fn take_all(&self) -> Vec<Buffer> {
        let buffers = std::mem::take(&mut *self.by_start.write());
        buffers.into_values().collect()
    }

    /// The buffers that peers may touch, by first address.
    pub(super) fn shown(&self) -> Vec<(u64, RegionDescriptor)> {
        let buffers = self.by_start.read();
        let shown = buffers
            .iter()
            .filter(|(_, buffer)| buffer.access != Access::LocalOnly);
        shown
            .map(|(start, buffer)| (*start, buffer.memory.region()))
            .collect()
    }

    /// For the pieces of one call: a buffer taken out meanwhile may still be found, and its pieces fail.
    pub(crate) fn resolver(&self) -> Resolver<'_> {
        Resolver {
            buffers: self,
            last: None,
        }
    }
}

/// Turns addresses into slices. Neighbouring pieces mostly lie in one buffer, so the last one found is
/// tried first. No lock is held between two look-ups, nor while the pages of unregistered memory are made
/// present, which takes as long as there are pages.
pub(crate) struct Resolver<'a> {
    buffers: &'a Buffers,
    last: Option<(u64, Memory)>,
}

impl Resolver<'_> {
    /// Local memory of a call: inside a registered buffer or, checked here, anywhere else.
    pub(crate) fn any(&mut self, addr: u64, len: u64, of: Use) -> Result<LocalSlice, Unresolved> {
        match self.find(addr, len) {
            Some(slice) => Ok(slice),
            None => Ok(memory::unregistered(addr, len, of)?),
        }
    }

    /// Local memory that must lie inside a registered buffer.
    pub(crate) fn registered(&mut self, addr: u64, len: u64) -> Result<LocalSlice, Unresolved> {
        self.find(addr, len)
            .ok_or(Unresolved::Unregistered { addr, len })
    }

    fn find(&mut self, addr: u64, len: u64) -> Option<LocalSlice> {
        if let Some((start, memory)) = &self.last
            && let Some(slice) = slice_of(*start, memory, addr, len)
        {
            return Some(slice);
        }
        let buffers = self.buffers.by_start.read();
        let (start, buffer) = buffers.range(..=addr).next_back()?;
        let slice = slice_of(*start, &buffer.memory, addr, len)?;
        self.last = Some((*start, buffer.memory.clone()));
        Some(slice)
    }
}

fn slice_of(start: u64, memory: &Memory, addr: u64, len: u64) -> Option<LocalSlice> {
    memory.slice(addr.checked_sub(start)?, len).ok()
}
