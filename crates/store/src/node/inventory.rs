//! What a segment holds, from its own bytes alone (architecture decision 7).
//!
//! Every granule carries the generation of its last writer, and every reservation has a generation of
//! its own. So the granules of one object are a run of equal tags, with its header at the start. A run
//! counts as a complete object if the header says so, is of the same generation, and takes exactly
//! that many granules: a place that was reused in part, fenced, or never finished fails one of these.
//!
//! Writers may be at work meanwhile: the tags are compared again after the header was copied. What was
//! evicted or removed, but not overwritten, still looks complete; only a master can tell.

use std::ops::Range;

use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::{HEAD_LEN, HeaderState, ObjectHeader, peek};
use layercake_protocol::ids::{Epoch, Generation, SegmentId};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{GRANULE, Replica};
use layercake_transport::Memory;

use crate::error::StoreError;

/// Bytes whose tags are looked at in one go, between turns for other tasks.
const STRIDE: u64 = 256 << 20;

/// One complete object in a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldObject {
    /// Where it lies.
    pub replica: Replica,
    /// Its namespace.
    pub tenant: Tenant,
    /// Its key.
    pub key: ObjectKey,
    /// Payload bytes.
    pub size: u64,
    /// What it is evicted together with.
    pub group: Option<String>,
    /// Whose bytes these are, if the writer said so.
    pub fingerprint: Option<Fingerprint>,
    /// The layout that the writer used; 0: none.
    pub layout_id: u64,
    /// The request that stored it.
    pub epoch: Epoch,
    /// The block's index in its prefix.
    pub prefix_index: u32,
}

/// What one segment holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inventory {
    /// The segment.
    pub segment: SegmentId,
    /// Complete objects, in the order of their places.
    pub objects: Vec<HeldObject>,
    /// The greatest tag: reservations must go on above it.
    pub max_generation: Generation,
}

/// Takes the inventory of a segment.
pub(super) async fn take(segment: SegmentId, memory: &Memory) -> Result<Inventory, StoreError> {
    let mut inventory = Inventory {
        segment,
        objects: Vec::new(),
        max_generation: Generation::NONE,
    };
    let mut runs = Runs::default();
    let mut offset = 0;
    while offset < memory.len() {
        let len = STRIDE.min(memory.len() - offset);
        for tag in memory.tags(offset, len)? {
            inventory.max_generation = inventory.max_generation.max(tag);
            if let Some(run) = runs.push(tag) {
                inventory.objects.extend(object(segment, memory, &run)?);
            }
        }
        offset += len;
        tokio::task::yield_now().await;
    }
    if let Some(run) = runs.finish() {
        inventory.objects.extend(object(segment, memory, &run)?);
    }
    Ok(inventory)
}

/// Neighbouring granules with one tag, as granule numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    granules: Range<u64>,
    generation: Generation,
}

/// Groups tags, one after the other, into runs of equal ones; untagged granules are no run.
#[derive(Debug, Default)]
struct Runs {
    at: u64,
    current: Option<Run>,
}

impl Runs {
    /// Takes the next granule's tag, and gives the run that it ends.
    fn push(&mut self, tag: Generation) -> Option<Run> {
        let at = self.at;
        self.at += 1;
        if let Some(run) = &mut self.current
            && run.generation == tag
        {
            run.granules.end = self.at;
            return None;
        }
        let next = (tag != Generation::NONE).then_some(Run {
            granules: at..self.at,
            generation: tag,
        });
        std::mem::replace(&mut self.current, next)
    }

    fn finish(self) -> Option<Run> {
        self.current
    }
}

/// The complete object that a run is, if it is one.
fn object(
    segment: SegmentId,
    memory: &Memory,
    run: &Run,
) -> Result<Option<HeldObject>, StoreError> {
    let offset = run.granules.start * GRANULE;
    let len = (run.granules.end * GRANULE).min(memory.len()) - offset;
    let mut head = [0; HEAD_LEN];
    if len < HEAD_LEN as u64 {
        return Ok(None);
    }
    memory.copy_out(offset, &mut head)?;
    let Ok(head) = peek(&head) else {
        return Ok(None);
    };
    let whole = u64::from(head.header_len)
        .checked_add(head.payload_len)
        .is_some_and(|place| place <= len && place.div_ceil(GRANULE) == len.div_ceil(GRANULE));
    if head.state != HeaderState::Sealed || head.generation != run.generation || !whole {
        return Ok(None);
    }
    let mut bytes = vec![0; head.header_len as usize];
    memory.copy_out(offset, &mut bytes)?;
    let Ok(header) = ObjectHeader::decode(&bytes) else {
        return Ok(None);
    };
    let still = memory.tags(offset, len)?;
    if header.generation != run.generation || still.iter().any(|tag| *tag != run.generation) {
        return Ok(None);
    }
    Ok(Some(HeldObject {
        replica: Replica {
            segment,
            offset,
            header_len: head.header_len,
            generation: run.generation,
        },
        tenant: header.tenant,
        key: header.key,
        size: header.payload_len,
        group: header.group,
        fingerprint: header.fingerprint,
        layout_id: header.layout_id,
        epoch: header.epoch,
        prefix_index: header.prefix_index,
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn runs_are_the_maximal_stretches_of_one_tag(tags in proptest::collection::vec(0_u64..4, 0..60)) {
            let mut runs = Runs::default();
            let mut found: Vec<Run> = tags.iter().filter_map(|tag| runs.push(Generation(*tag))).collect();
            found.extend(runs.finish());
            // Each granule with a tag lies in exactly one run, which has its tag.
            let mut seen = vec![0; tags.len()];
            for run in &found {
                for granule in run.granules.clone() {
                    let at = usize::try_from(granule).expect("small");
                    prop_assert_eq!(tags[at], run.generation.0);
                    seen[at] += 1;
                }
            }
            for (tag, seen) in tags.iter().zip(seen) {
                prop_assert_eq!(seen, i32::from(*tag != 0));
            }
            // Neighbours differ: no run could be longer.
            for pair in found.windows(2) {
                prop_assert!(pair[0].granules.end <= pair[1].granules.start);
                let touch = pair[0].granules.end == pair[1].granules.start;
                prop_assert!(!touch || pair[0].generation != pair[1].generation);
            }
        }
    }
}
