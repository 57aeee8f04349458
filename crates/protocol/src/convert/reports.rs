//! What the master tells about objects, segments and itself.

use std::time::Duration;

use super::objects::encode_millis;
use super::{invalid, required};
use crate::error::WireError;
use crate::ids::{Epoch, Generation, Term};
use crate::key::ObjectKey;
use crate::replica::ObjectState;
use crate::report::{ObjectStat, SegmentStat, SegmentState, Status};
use crate::wire;

fn encode_state(state: ObjectState) -> wire::ObjectState {
    match state {
        ObjectState::Initialized => wire::ObjectState::Initialized,
        ObjectState::Processing => wire::ObjectState::Processing,
        ObjectState::Complete => wire::ObjectState::Complete,
        ObjectState::Failed => wire::ObjectState::Failed,
        ObjectState::Removed => wire::ObjectState::Removed,
    }
}

fn decode_state(state: i32) -> Result<ObjectState, WireError> {
    match wire::ObjectState::try_from(state) {
        Ok(wire::ObjectState::Initialized) => Ok(ObjectState::Initialized),
        Ok(wire::ObjectState::Processing) => Ok(ObjectState::Processing),
        Ok(wire::ObjectState::Complete) => Ok(ObjectState::Complete),
        Ok(wire::ObjectState::Failed) => Ok(ObjectState::Failed),
        Ok(wire::ObjectState::Removed) => Ok(ObjectState::Removed),
        Ok(wire::ObjectState::Unspecified) => Err(WireError::Missing { field: "state" }),
        Err(_) => Err(invalid(
            "state",
            format!("{state} is not a state of objects that this version knows"),
        )),
    }
}

impl From<ObjectStat> for wire::ObjectStat {
    fn from(stat: ObjectStat) -> Self {
        Self {
            key: stat.key.as_str().to_owned(),
            size: stat.size,
            state: encode_state(stat.state).into(),
            replicas: stat.replicas.into_iter().map(Into::into).collect(),
            generation: stat.generation.0,
            lease_remaining_ms: encode_millis(stat.lease_remaining),
            soft_pinned: stat.soft_pinned,
            hard_pinned: stat.hard_pinned,
            group: stat.group.unwrap_or_default(),
            epoch: stat.epoch.0,
            prefix_index: stat.prefix_index,
            open_readers: stat.open_readers,
        }
    }
}

impl TryFrom<wire::ObjectStat> for ObjectStat {
    type Error = WireError;

    fn try_from(stat: wire::ObjectStat) -> Result<Self, WireError> {
        Ok(Self {
            key: ObjectKey::new(&stat.key)?,
            size: stat.size,
            state: decode_state(stat.state)?,
            replicas: stat
                .replicas
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            generation: Generation(stat.generation),
            lease_remaining: Duration::from_millis(stat.lease_remaining_ms),
            soft_pinned: stat.soft_pinned,
            hard_pinned: stat.hard_pinned,
            group: Some(stat.group).filter(|group| !group.is_empty()),
            epoch: Epoch(stat.epoch),
            prefix_index: stat.prefix_index,
            open_readers: stat.open_readers,
        })
    }
}

impl From<SegmentStat> for wire::SegmentStat {
    fn from(stat: SegmentStat) -> Self {
        let state = match stat.state {
            SegmentState::Mounted => wire::SegmentState::Mounted,
            SegmentState::Draining => wire::SegmentState::Draining,
        };
        Self {
            segment: Some((&stat.segment).into()),
            state: state.into(),
            used_bytes: stat.used_bytes,
            largest_free: stat.largest_free,
            objects: stat.objects,
            quarantined_bytes: stat.quarantined_bytes,
            heartbeat_age_ms: encode_millis(stat.heartbeat_age),
            client_id: Some(stat.client.into()),
        }
    }
}

impl TryFrom<wire::SegmentStat> for SegmentStat {
    type Error = WireError;

    fn try_from(stat: wire::SegmentStat) -> Result<Self, WireError> {
        let state = match wire::SegmentState::try_from(stat.state) {
            Ok(wire::SegmentState::Mounted) => SegmentState::Mounted,
            Ok(wire::SegmentState::Draining) => SegmentState::Draining,
            Ok(wire::SegmentState::Unspecified) => {
                return Err(WireError::Missing { field: "state" });
            }
            Err(_) => {
                return Err(invalid(
                    "state",
                    format!(
                        "{} is not a state of segments that this version knows",
                        stat.state
                    ),
                ));
            }
        };
        Ok(Self {
            segment: required("segment", stat.segment)?.try_into()?,
            state,
            used_bytes: stat.used_bytes,
            largest_free: stat.largest_free,
            objects: stat.objects,
            quarantined_bytes: stat.quarantined_bytes,
            heartbeat_age: Duration::from_millis(stat.heartbeat_age_ms),
            client: required("client_id", stat.client_id)?.into(),
        })
    }
}

impl From<Status> for wire::StatusResponse {
    fn from(status: Status) -> Self {
        Self {
            term: status.term.0,
            uptime_ms: encode_millis(status.uptime),
            objects: status.objects,
            reserved_objects: status.reserved_objects,
            capacity_bytes: status.capacity_bytes,
            used_bytes: status.used_bytes,
            quarantined_bytes: status.quarantined_bytes,
            segments: status.segments,
            members: status.members,
            evicted_objects: status.evicted_objects,
            evicted_bytes: status.evicted_bytes,
            refused_puts: status.refused_puts,
            lost_nodes: status.lost_nodes,
            discarded_puts: status.discarded_puts,
            client_ttl_ms: encode_millis(status.client_ttl),
            version: Some(status.version.into()),
        }
    }
}

impl TryFrom<wire::StatusResponse> for Status {
    type Error = WireError;

    fn try_from(status: wire::StatusResponse) -> Result<Self, WireError> {
        Ok(Self {
            term: Term(status.term),
            uptime: Duration::from_millis(status.uptime_ms),
            objects: status.objects,
            reserved_objects: status.reserved_objects,
            capacity_bytes: status.capacity_bytes,
            used_bytes: status.used_bytes,
            quarantined_bytes: status.quarantined_bytes,
            segments: status.segments,
            members: status.members,
            evicted_objects: status.evicted_objects,
            evicted_bytes: status.evicted_bytes,
            refused_puts: status.refused_puts,
            lost_nodes: status.lost_nodes,
            discarded_puts: status.discarded_puts,
            client_ttl: Duration::from_millis(status.client_ttl_ms),
            version: required("version", status.version)?.into(),
        })
    }
}
