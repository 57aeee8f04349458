//! The master's commands to its members.

use super::{invalid, required};
use crate::command::{DropSessions, Fence, FencedPlace};
use crate::error::WireError;
use crate::ids::{Generation, SegmentId};
use crate::key::Tenant;
use crate::wire;

impl From<FencedPlace> for wire::FencedPlace {
    fn from(place: FencedPlace) -> Self {
        Self {
            offset: place.offset,
            len: place.len,
            generation: place.generation.0,
        }
    }
}

impl TryFrom<wire::FencedPlace> for FencedPlace {
    type Error = WireError;

    fn try_from(place: wire::FencedPlace) -> Result<Self, WireError> {
        let wire::FencedPlace {
            offset,
            len,
            generation,
        } = place;
        if offset.checked_add(len).is_none() {
            return Err(invalid(
                "places.len",
                format!("{len} from offset {offset}: beyond 64 bits"),
            ));
        }
        if generation == 0 {
            return Err(WireError::Missing {
                field: "places.generation",
            });
        }
        Ok(Self {
            offset,
            len,
            generation: Generation(generation),
        })
    }
}

impl From<Fence> for wire::FenceCommand {
    fn from(fence: Fence) -> Self {
        Self {
            fence_id: fence.id,
            segment_id: fence.segment.0,
            places: fence.places.into_iter().map(Into::into).collect(),
            client_id: Some(fence.writer.into()),
            engine: fence.engine.map(Into::into),
        }
    }
}

impl TryFrom<wire::FenceCommand> for Fence {
    type Error = WireError;

    fn try_from(fence: wire::FenceCommand) -> Result<Self, WireError> {
        Ok(Self {
            id: fence.fence_id,
            segment: SegmentId(fence.segment_id),
            places: fence
                .places
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            writer: required("client_id", fence.client_id)?.into(),
            engine: fence.engine.map(Into::into),
        })
    }
}

impl From<&DropSessions> for wire::DropSessionsCommand {
    fn from(drop: &DropSessions) -> Self {
        Self {
            fence_id: drop.id,
            tenant: drop.tenant.as_str().to_owned(),
            objects: drop.objects.iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<wire::DropSessionsCommand> for DropSessions {
    type Error = WireError;

    fn try_from(drop: wire::DropSessionsCommand) -> Result<Self, WireError> {
        Ok(Self {
            id: drop.fence_id,
            tenant: Tenant::new(&drop.tenant)
                .map_err(|error| invalid("tenant", error.to_string()))?,
            objects: drop
                .objects
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
        })
    }
}
