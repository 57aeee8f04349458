//! The writer's side: records of what has landed.
//!
//! The records of one call's end go to every replica in one batch, behind the bytes that they speak of, which have landed
//! by then. The call does not wait for them; ends and revokes of its sessions do. What can't be published is not: early
//! readers wait for the commit then, and the put goes on. But a record over TCP that nobody answered for leaves the
//! session in doubt like any other write, since it may still land when the memory is somebody else's.

use std::sync::Arc;

use layercake_transport::{Direction, PieceError};

use crate::client::core::Core;
use crate::client::fanout::{Failure, Fanout};
use crate::client::scratch::Scratch;
use crate::error::StoreError;
use crate::session::PutShared;
use crate::session::put_state::{Phase, Publish};

use layercake_protocol::early::{SLOT_LEN, SlotPlace};

/// A session, and what it publishes.
type Due = (Arc<PutShared>, Publish);

/// Publishes what calls that have ended wrote. The sessions are busy until it has landed.
pub(in crate::client) fn publish(core: &Arc<Core>, due: Vec<Due>) {
    if due.is_empty() {
        return;
    }
    let (scratch, fanout) = match stage(core, &due) {
        Ok(staged) => staged,
        Err(error) => {
            tracing::debug!(%error, count = due.len(), "ranges can't be published to early readers");
            for (put, _) in &due {
                ended(core, put);
            }
            return;
        }
    };
    let records = due.iter().map(|(_, publish)| publish.records.len() as u64);
    core.counters.ranges_published.add(records.sum());
    let flight = fanout.submit(&core.engine);
    let background = Arc::clone(core);
    core.background(async move {
        let core = background;
        let each = |(at, place): (usize, usize), result: Result<_, Failure>| {
            if let Err(failure) = result {
                failed(&core, &due[at].0, place, failure);
            }
        };
        flight.land_writes(each).await;
        for (put, _) in &due {
            ended(&core, put);
        }
        scratch.recycle();
    });
}

/// One piece for each session and replica.
fn stage(core: &Core, due: &[Due]) -> Result<(Scratch, Fanout<(usize, usize)>), StoreError> {
    let bytes = due
        .iter()
        .map(|(_, publish)| publish.records.len() * SLOT_LEN);
    let total: usize = bytes.sum();
    let mut scratch = core.scratch.take(total as u64)?;
    let mut fanout = Fanout::new(Direction::Write, false);
    let mut at = 0;
    for (index, (put, publish)) in due.iter().enumerate() {
        let Some(table) = put.early else { continue };
        let len = publish.records.len() * SLOT_LEN;
        let staged = scratch.stage(at, len).chunks_exact_mut(SLOT_LEN);
        for ((slot, record), bytes) in (publish.first_slot..).zip(&publish.records).zip(staged) {
            let place = SlotPlace {
                generation: put.object.generation,
                slot,
            };
            bytes.copy_from_slice(&table.encode(record, place));
        }
        for (place_at, place) in put.places.iter().enumerate() {
            let slot_at = table.slot_at(place.replica.header_len, publish.first_slot);
            let remote_at = slot_at.expect("a session has a table only where there is room");
            let local = scratch.slice(at as u64, len as u64)?;
            let remote = place.header_part(remote_at, len as u64);
            fanout.push(&place.target, local, remote, (index, place_at));
        }
        at += len;
    }
    scratch.copy_staged(total)?;
    Ok((scratch, fanout))
}

fn failed(core: &Core, put: &PutShared, place: usize, failure: Failure) {
    let Failure { error, in_doubt } = failure;
    if in_doubt {
        core.in_doubt(put);
    }
    if error == PieceError::Refused(layercake_transport::Refusal::StaleGeneration) {
        core.settled(put, Phase::Superseded);
    } else {
        core.suspects.failed(&put.places[place].target, error);
    }
}

fn ended(core: &Core, put: &Arc<PutShared>) {
    if put.end_publishing() {
        core.finisher.settle_later(Arc::clone(put));
    }
}
