//! Registered memory, and what the cluster tells about itself.

use std::sync::Arc;

use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ObjectState;
use layercake_store::{ClientStats, StoreError};
use layercake_transport::Access;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::core::{EngineCore, StoreCore};
use crate::errors::{self, Kind};

/// A dict of these fields.
macro_rules! dict {
    ($py:expr, $($name:literal: $value:expr),* $(,)?) => {{
        let dict = PyDict::new($py);
        $(dict.set_item($name, $value)?;)*
        dict
    }};
}

pub(crate) fn register(
    py: Python<'_>,
    engine: &EngineCore,
    addr: u64,
    len: u64,
    access: Access,
) -> PyResult<()> {
    let registered = py.detach(|| engine.register(addr, len, access));
    registered.map_err(|error| Kind::InvalidArgument.err(error.to_string()))
}

pub(crate) fn unregister(py: Python<'_>, engine: &EngineCore, addr: u64) -> PyResult<()> {
    let done = py.detach(|| engine.unregister(addr));
    done.map_err(|error| Kind::InvalidArgument.err(error.to_string()))
}

/// Waits for an answer, or raises.
fn ask<T: Send>(
    py: Python<'_>,
    core: &Arc<StoreCore>,
    future: impl Future<Output = Result<T, StoreError>> + Send,
) -> PyResult<T> {
    py.detach(|| core.block(future))
        .map_err(|error| errors::raise(&error))
}

pub(super) fn stat<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
    key: &ObjectKey,
) -> PyResult<Bound<'py, PyDict>> {
    let detail = ask(py, core, core.client().stat(key))?;
    let object = &detail.object;
    let replicas = PyList::empty(py);
    for replica in &object.replicas {
        let segment = detail
            .segments
            .iter()
            .find(|segment| segment.id == replica.segment);
        replicas.append(dict!(py,
            "segment": replica.segment.to_string(),
            "name": segment.map(|segment| segment.name.as_str()),
            "address": segment.map(|segment| segment.endpoint.tcp.as_str()),
            "offset": replica.offset,
        ))?;
    }
    Ok(dict!(py,
        "key": object.key.as_str(),
        "size": object.size,
        "state": state(object.state),
        "replicas": replicas,
        "lease_seconds": object.lease_remaining.as_secs_f64(),
        "soft_pinned": object.soft_pinned,
        "hard_pinned": object.hard_pinned,
        "group": object.group.as_deref(),
        "open_readers": object.open_readers,
    ))
}

fn state(state: ObjectState) -> &'static str {
    match state {
        ObjectState::Initialized => "initialized",
        ObjectState::Processing => "processing",
        ObjectState::Complete => "complete",
        ObjectState::Failed => "failed",
        ObjectState::Removed => "removed",
        _ => "unknown",
    }
}

pub(super) fn keys(
    py: Python<'_>,
    core: &Arc<StoreCore>,
    prefix: &str,
    limit: u32,
    after: Option<&ObjectKey>,
) -> PyResult<Vec<String>> {
    if limit == 0 {
        return Ok(Vec::new());
    }
    let page = ask(py, core, core.client().link().list(prefix, limit, after))?;
    Ok(page
        .objects
        .iter()
        .map(|object| object.key.to_string())
        .collect())
}

pub(super) fn status<'py>(py: Python<'py>, core: &Arc<StoreCore>) -> PyResult<Bound<'py, PyDict>> {
    let status = ask(py, core, core.client().link().status())?;
    Ok(dict!(py,
        "term": status.term.0,
        "uptime_seconds": status.uptime.as_secs_f64(),
        "client_ttl_ms": status.client_ttl.as_millis(),
        "objects": status.objects,
        "reserved_objects": status.reserved_objects,
        "capacity_bytes": status.capacity_bytes,
        "used_bytes": status.used_bytes,
        "quarantined_bytes": status.quarantined_bytes,
        "segments": status.segments,
        "members": status.members,
        "evicted_objects": status.evicted_objects,
        "evicted_bytes": status.evicted_bytes,
        "refused_puts": status.refused_puts,
        "lost_nodes": status.lost_nodes,
        "discarded_puts": status.discarded_puts,
    ))
}

pub(super) fn segments<'py>(
    py: Python<'py>,
    core: &Arc<StoreCore>,
) -> PyResult<Bound<'py, PyList>> {
    let segments = ask(py, core, core.client().link().segments())?;
    let list = PyList::empty(py);
    for stat in segments {
        list.append(dict!(py,
            "segment": stat.segment.id.to_string(),
            "name": stat.segment.name.as_str(),
            "address": stat.segment.endpoint.tcp.as_str(),
            "size": stat.segment.len,
            "used_bytes": stat.used_bytes,
            "largest_free": stat.largest_free,
            "quarantined_bytes": stat.quarantined_bytes,
            "objects": stat.objects,
            "heartbeat_age_seconds": stat.heartbeat_age.as_secs_f64(),
        ))?;
    }
    Ok(list)
}

/// Bytes moved, by transport and direction.
pub(crate) fn transports<'py>(
    py: Python<'py>,
    engine: &EngineCore,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for operation in engine.engine().stats().operations {
        if operation.bytes > 0 {
            let name = format!("{} {}", operation.transport, operation.direction.name());
            dict.set_item(name, operation.bytes)?;
        }
    }
    Ok(dict)
}

pub(super) fn stats<'py>(py: Python<'py>, core: &Arc<StoreCore>) -> PyResult<Bound<'py, PyDict>> {
    let ClientStats {
        hits,
        misses,
        puts_started,
        puts_committed,
        puts_revoked,
        puts_superseded,
        gets_started,
        leases_renewed,
        leases_lost,
        bytes_written,
        bytes_read,
        bytes_verified,
        bytes_unverified,
        mismatches,
        failovers,
        guesses_right,
        guesses_wrong,
        open_gets,
        open_puts,
        suspect_segments,
        ..
    } = core.client().stats();
    let transports = transports(py, core.engine())?;
    Ok(dict!(py,
        "hits": hits,
        "misses": misses,
        "puts_started": puts_started,
        "puts_committed": puts_committed,
        "puts_revoked": puts_revoked,
        "puts_superseded": puts_superseded,
        "gets_started": gets_started,
        "leases_renewed": leases_renewed,
        "leases_lost": leases_lost,
        "bytes_written": bytes_written,
        "bytes_read": bytes_read,
        "bytes_verified": bytes_verified,
        "bytes_unverified": bytes_unverified,
        "mismatches": mismatches,
        "failovers": failovers,
        "guesses_right": guesses_right,
        "guesses_wrong": guesses_wrong,
        "open_gets": open_gets,
        "open_puts": open_puts,
        "suspect_segments": suspect_segments,
        "transports": transports,
    ))
}
