//! Bounded memory through which one remote read reaches several blocks (W11).
//!
//! A slot holds one layer of one object. It is taken when a read is planned and given back when the
//! copies have ended; with no slot free the object is read once per block instead, so nobody waits.

use std::sync::Arc;

use layercake_store::Range;
use layercake_transport::{
    Access, AllocateOptions, Batch, Direction, Endpoint, Engine, Kept, LocalSlice, Memory, Piece,
    RegionDescriptor, RemoteSlice,
};
use parking_lot::Mutex;

use super::caches::Caches;

/// The most bytes of all slots.
const STAGING_BYTES: u64 = 32 << 20;
/// The most slots.
const SLOTS: u64 = 64;

pub(crate) struct Staging {
    engine: Engine,
    /// This process, as a peer of itself.
    own: Arc<Endpoint>,
    memory: Memory,
    region: RegionDescriptor,
    slot_len: u64,
    free: Mutex<Vec<u64>>,
}

/// A slot. Dropping it gives it back.
pub(crate) struct Slot {
    staging: Arc<Staging>,
    offset: u64,
}

impl Staging {
    /// Room for layers of these caches. `None` where the engine has no transport to itself, or no memory.
    pub(crate) fn new(engine: &Engine, caches: &Caches) -> Option<Arc<Self>> {
        let own = Arc::new(engine.endpoint().clone());
        engine.transport_to(&own)?;
        let slot_len = caches.largest_layer().max(1);
        let slots = (STAGING_BYTES / slot_len).min(SLOTS);
        if slots == 0 {
            return None;
        }
        let options = AllocateOptions {
            access: Access::RemoteRead,
            ..AllocateOptions::default()
        };
        let memory = match engine.allocate(slot_len * slots, options) {
            Ok(memory) => memory,
            Err(error) => {
                tracing::warn!(%error, "no memory for local copies: shared objects are read once per block");
                return None;
            }
        };
        Some(Arc::new(Self {
            engine: engine.clone(),
            own,
            region: memory.region(),
            memory,
            slot_len,
            free: Mutex::new((0..slots).map(|slot| slot * slot_len).collect()),
        }))
    }

    pub(crate) fn slot(self: &Arc<Self>) -> Option<Slot> {
        let offset = self.free.lock().pop()?;
        Some(Slot {
            staging: Arc::clone(self),
            offset,
        })
    }
}

impl Slot {
    /// The ranges of a layer, with the slot as their local memory. `within`: where each lies in the layer, and how long it
    /// is.
    pub(crate) fn ranges(
        &self,
        ranges: impl Iterator<Item = Range>,
        within: &[(u64, u64)],
    ) -> Option<Vec<Range>> {
        let slot = self
            .staging
            .memory
            .slice(self.offset, self.staging.slot_len)
            .ok()?;
        let pieces = ranges.zip(within);
        pieces
            .map(|(range, (offset, len))| {
                Some(Range {
                    offset: range.offset,
                    local: slot.part(*offset, *len)?,
                })
            })
            .collect()
    }

    /// Copies the layer to these places, each a list of the layer's pieces. Whether all arrived. What is `kept` lives until
    /// nothing is copied any more.
    pub(crate) async fn copy(
        self,
        targets: Vec<Vec<LocalSlice>>,
        within: &[(u64, u64)],
        kept: Kept,
    ) -> bool {
        let staging = &self.staging;
        let pieces = targets.into_iter().flat_map(|target| {
            target
                .into_iter()
                .zip(within)
                .map(|(local, (offset, len))| Piece {
                    local,
                    remote: RemoteSlice {
                        region: staging.region.region,
                        capability: staging.region.capability,
                        offset: self.offset + offset,
                        len: *len,
                        generation: None,
                    },
                })
        });
        let batch = Batch {
            peer: Arc::clone(&staging.own),
            direction: Direction::Read,
            pieces: pieces.collect(),
            checksum: false,
            deadline: None,
        };
        let copied = staging.engine.submit_keeping(batch, Some(kept));
        copied.await.is_ok()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.staging.free.lock().push(self.offset);
    }
}
