//! Which region an address of a peer lies in. Pure.

use layercake_protocol::ids::{Capability, RegionId};
use layercake_transport::RemoteSlice;

/// A region that a peer shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    /// First address, in its owner.
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) id: RegionId,
    pub(super) capability: Capability,
}

/// The regions of a peer, by address. Registered regions never overlap.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    /// In ascending order.
    regions: Vec<Region>,
}

impl Table {
    pub(super) fn new(mut regions: Vec<Region>) -> Self {
        regions.sort_unstable_by_key(|region| region.address);
        Self { regions }
    }

    /// The address of what was registered first: ids ascend.
    pub(super) fn first(&self) -> Option<u64> {
        let first = self.regions.iter().min_by_key(|region| region.id.0);
        first.map(|region| region.address)
    }

    /// The place of `len` bytes at an address; `None` if they don't lie inside one region.
    pub(super) fn find(&self, address: u64, len: u64) -> Option<RemoteSlice> {
        let behind = self
            .regions
            .partition_point(|region| region.address <= address);
        let region = &self.regions[behind.checked_sub(1)?];
        let offset = address - region.address;
        let end = offset.checked_add(len)?;
        (end <= region.len).then_some(RemoteSlice {
            region: region.id,
            capability: region.capability,
            offset,
            len,
            generation: None,
        })
    }
}
