//! Places that clients have in advance, and objects that were written into them.

use super::refusals::{decode_key_results, encode_key_results};
use super::{invalid, required};
use crate::error::{Refusal, WireError};
use crate::ids::{Epoch, Generation, SegmentId};
use crate::replica::{GRANULE, Hold, Segment, SlotPut};
use crate::wire;

impl From<&Hold> for wire::Hold {
    fn from(hold: &Hold) -> Self {
        Self {
            generation: hold.generation.0,
            segment_id: hold.segment.0,
            offset: hold.offset,
            len: hold.len,
            epoch: hold.epoch.0,
        }
    }
}

impl TryFrom<wire::Hold> for Hold {
    type Error = WireError;

    fn try_from(hold: wire::Hold) -> Result<Self, WireError> {
        let wire::Hold {
            generation,
            segment_id,
            offset,
            len,
            epoch,
        } = hold;
        if segment_id == 0 {
            return Err(WireError::Missing {
                field: "hold.segment_id",
            });
        }
        let granules = len / GRANULE;
        if generation == 0 || generation.checked_add(granules).is_none() {
            return Err(invalid(
                "hold.generation",
                format!("{generation}: at least 1, with {granules} numbers behind it, is needed"),
            ));
        }
        let whole = len > 0 && offset.is_multiple_of(GRANULE) && len.is_multiple_of(GRANULE);
        if !whole || offset.checked_add(len).is_none() {
            return Err(invalid(
                "hold.len",
                format!("{len} bytes at {offset}: whole granules of {GRANULE} are needed"),
            ));
        }
        Ok(Self {
            generation: Generation(generation),
            segment: SegmentId(segment_id),
            offset,
            len,
            epoch: Epoch(epoch),
        })
    }
}

impl From<&SlotPut> for wire::SlotPut {
    fn from(slot: &SlotPut) -> Self {
        Self {
            put: Some(slot.put.clone().into()),
            generation: slot.generation.0,
        }
    }
}

impl TryFrom<wire::SlotPut> for SlotPut {
    type Error = WireError;

    fn try_from(slot: wire::SlotPut) -> Result<Self, WireError> {
        if slot.generation == 0 {
            return Err(WireError::Missing {
                field: "slot.generation",
            });
        }
        Ok(Self {
            put: required("slot.put", slot.put)?.try_into()?,
            generation: Generation(slot.generation),
        })
    }
}

/// The answer to a commit of slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutSlotsAnswer {
    /// One result per slot, in order.
    pub results: Vec<Result<(), Refusal>>,
    /// A hold, if one was asked for and granted, and its segment.
    pub hold: Option<(Hold, Segment)>,
}

impl From<&PutSlotsAnswer> for wire::PutSlotsResponse {
    fn from(answer: &PutSlotsAnswer) -> Self {
        let hold = answer.hold.as_ref();
        Self {
            results: Some(encode_key_results(&answer.results)),
            hold: hold.map(|(hold, _)| hold.into()),
            segment: hold.map(|(_, segment)| segment.into()),
        }
    }
}

impl PutSlotsAnswer {
    /// Checks the answer to a call with `slots` slots.
    pub fn decode(response: wire::PutSlotsResponse, slots: usize) -> Result<Self, WireError> {
        let hold = response.hold.map(Hold::try_from).transpose()?;
        Ok(Self {
            results: decode_key_results(response.results.unwrap_or_default(), slots)?,
            hold: match hold {
                None => None,
                Some(hold) => {
                    let segment: Segment = required("segment", response.segment)?.try_into()?;
                    if segment.id != hold.segment {
                        return Err(invalid("segment", "another one than the hold's"));
                    }
                    Some((hold, segment))
                }
            },
        })
    }
}
