//! Objects, segments and totals as JSON and as words.

use std::time::Duration;

use layercake_protocol::replica::ObjectState;
use layercake_protocol::report::{ObjectStat, SegmentStat, SegmentState, Status};
use serde_json::{Value, json};

pub(crate) fn object_state(state: ObjectState) -> &'static str {
    match state {
        ObjectState::Initialized => "initialized",
        ObjectState::Processing => "processing",
        ObjectState::Complete => "complete",
        ObjectState::Failed => "failed",
        ObjectState::Removed => "removed",
        _ => "unknown",
    }
}

pub(crate) fn segment_state(state: SegmentState) -> &'static str {
    match state {
        SegmentState::Mounted => "mounted",
        SegmentState::Draining => "draining",
        _ => "unknown",
    }
}

/// What is left of a lease, for people.
pub(crate) fn lease(remaining: Duration) -> String {
    if remaining.is_zero() {
        "-".to_owned()
    } else {
        format!("{:.1} s", remaining.as_secs_f64())
    }
}

pub(crate) fn pins(object: &ObjectStat) -> String {
    match (object.hard_pinned, object.soft_pinned) {
        (true, _) => "hard".to_owned(),
        (false, true) => "soft".to_owned(),
        (false, false) => "-".to_owned(),
    }
}

pub(crate) fn plural(count: u64, noun: &str) -> String {
    if count == 1 {
        noun.to_owned()
    } else {
        format!("{noun}s")
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn object(object: &ObjectStat) -> Value {
    json!({
        "key": object.key.as_str(),
        "size": object.size,
        "state": object_state(object.state),
        "replicas": object.replicas.len(),
        "generation": object.generation.0,
        "lease_remaining_ms": millis(object.lease_remaining),
        "soft_pinned": object.soft_pinned,
        "hard_pinned": object.hard_pinned,
        "group": object.group,
        "epoch": object.epoch.0,
        "prefix_index": object.prefix_index,
        "open_readers": object.open_readers,
    })
}

pub(crate) fn segment(stat: &SegmentStat) -> Value {
    let segment = &stat.segment;
    json!({
        "segment": segment.id.to_string(),
        "node": segment.name,
        "address": segment.endpoint.tcp,
        "pid": segment.endpoint.pid,
        "memory": segment.kind.to_string(),
        "state": segment_state(stat.state),
        "size_bytes": segment.len,
        "used_bytes": stat.used_bytes,
        "largest_free_bytes": stat.largest_free,
        "quarantined_bytes": stat.quarantined_bytes,
        "objects": stat.objects,
        "heartbeat_age_ms": millis(stat.heartbeat_age),
    })
}

pub(crate) fn status(status: &Status) -> Value {
    json!({
        "term": status.term.0,
        "uptime_ms": millis(status.uptime),
        "version": status.version.to_string(),
        "members": status.members,
        "segments": status.segments,
        "capacity_bytes": status.capacity_bytes,
        "used_bytes": status.used_bytes,
        "quarantined_bytes": status.quarantined_bytes,
        "objects": status.objects,
        "reserved_objects": status.reserved_objects,
        "evicted_objects": status.evicted_objects,
        "evicted_bytes": status.evicted_bytes,
        "refused_puts": status.refused_puts,
        "lost_nodes": status.lost_nodes,
        "discarded_puts": status.discarded_puts,
        "client_ttl_ms": millis(status.client_ttl),
    })
}
