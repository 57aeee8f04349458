//! Looks at the tables of objects that are being written: one batch for all that wait.

use std::ops::Range;

use layercake_protocol::early::{SLOT_LEN, SlotPlace};
use layercake_transport::{Direction, PieceError};

use super::Stage;
use super::read::Entry;
use crate::client::core::Core;
use crate::client::fanout::Fanout;
use crate::client::places::Place;
use crate::error::StoreError;

/// Tables that are looked at in one batch.
const TABLES: usize = 4096;

/// What the transport says of memory whose tags are not the reader's.
pub(super) const STALE: PieceError =
    PieceError::Refused(layercake_transport::Refusal::StaleGeneration);

/// What a look at the tables brought.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// There are new records.
    pub(super) news: bool,
    /// A table that had records is somebody else's memory.
    pub(super) doubt: bool,
}

/// A part of a table that is looked at.
struct Window {
    entry: usize,
    place: Place,
    slots: Range<u32>,
    /// Where it lies in the scratch memory.
    at: u64,
    result: Result<(), PieceError>,
}

async fn look_at_some(core: &Core, entries: &mut [Entry]) -> Result<Look, StoreError> {
    let mut windows = Vec::with_capacity(entries.len());
    let mut total = 0;
    for (at, entry) in entries.iter().enumerate() {
        let Some((place, slots)) = entry.window() else {
            continue;
        };
        let len = slots.len() * SLOT_LEN;
        windows.push(Window {
            entry: at,
            place,
            slots,
            at: total,
            result: Ok(()),
        });
        total += len as u64;
    }
    if windows.is_empty() {
        return Ok(Look::default());
    }
    let scratch = core.scratch.take(total)?;
    let mut fanout = Fanout::new(Direction::Read, false);
    for (index, window) in windows.iter().enumerate() {
        let entry = &entries[window.entry];
        let len = (window.slots.len() * SLOT_LEN) as u64;
        let local = scratch.slice(window.at, len)?;
        if let Some(slot_at) = entry.slot_at(&window.place, window.slots.start) {
            let remote = window.place.header_part(slot_at, len);
            fanout.push(&window.place.target, local, remote, index);
        }
    }
    let flight = fanout.submit(&core.engine);
    flight
        .land(|index, result| windows[index].result = result.map(drop))
        .await;
    let mut look = Look::default();
    for window in &windows {
        let entry = &mut entries[window.entry];
        match window.result {
            Ok(()) => {
                core.suspects.clear(window.place.target.segment);
                let bytes = scratch.bytes(window.at, (window.slots.len() * SLOT_LEN) as u64)?;
                look.news |= entry.take(window, &bytes);
            }
            Err(error) => {
                core.suspects.failed(&window.place.target, error);
                look.doubt |= entry.not_seen(error);
            }
        }
    }
    scratch.recycle();
    Ok(look)
}

/// Looks at the tables of all entries that wait for more records.
pub(super) async fn look_at(core: &Core, entries: &mut [Entry]) -> Look {
    let mut look = Look::default();
    for entries in entries.chunks_mut(TABLES) {
        match look_at_some(core, entries).await {
            Ok(found) => {
                look.news |= found.news;
                look.doubt |= found.doubt;
            }
            Err(error) => tracing::debug!(%error, "tables of early ranges can't be looked at"),
        }
    }
    look
}

impl Entry {
    /// Which slots to look at, and where; `None`: there is nothing to wait for in the table.
    fn window(&self) -> Option<(Place, Range<u32>)> {
        match &*self.session.shared.stage.lock() {
            Stage::Writing(writing) => {
                let slots = writing.seen.window();
                let place = &writing.places[self.place % writing.places.len()];
                (!slots.is_empty() && !self.whole_only).then(|| (place.clone(), slots))
            }
            Stage::Complete(_) | Stage::Over(_) => None,
        }
    }

    fn slot_at(&self, place: &Place, slot: u32) -> Option<u64> {
        match &*self.session.shared.stage.lock() {
            Stage::Writing(writing) => writing.table.slot_at(place.replica.header_len, slot),
            Stage::Complete(_) | Stage::Over(_) => None,
        }
    }

    /// Takes the records of a window in. `true`: there is one that is news.
    fn take(&self, window: &Window, bytes: &[u8]) -> bool {
        let shared = &self.session.shared;
        let Stage::Writing(writing) = &mut *shared.stage.lock() else {
            return false;
        };
        let mut news = false;
        for (slot, bytes) in window.slots.clone().zip(bytes.chunks_exact(SLOT_LEN)) {
            let place = SlotPlace {
                generation: shared.generation,
                slot,
            };
            if let Some(record) = writing.table.decode(bytes, place, shared.size) {
                news |= writing.seen.take(slot, record);
            }
        }
        news
    }

    /// The table could not be looked at. `true`: the master should be asked.
    fn not_seen(&mut self, error: PieceError) -> bool {
        if error != STALE {
            self.place += 1;
            return false;
        }
        // Nobody has written there yet, or it was written to and is somebody else's.
        match &*self.session.shared.stage.lock() {
            Stage::Writing(writing) => writing.seen.any(),
            Stage::Complete(_) | Stage::Over(_) => false,
        }
    }
}
