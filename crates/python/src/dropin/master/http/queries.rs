//! Keys and segments.
//!
//! Where tenants have key spaces of their own, `tenant_id` chooses one; without it the default tenant's is
//! meant, and all tenants' for removal and the list of keys.

use std::collections::{BTreeMap, BTreeSet};

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use layercake_master::Monitor;
use layercake_protocol::code::ResultCode;
use layercake_protocol::error::Refusal;
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::GetStarted;
use layercake_protocol::report::{SegmentStat, SegmentState};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Admin;

/// No segment of this name.
const SEGMENT_NOT_FOUND: i32 = -101;

/// Keys of a query that are looked up before other tasks get their turn.
const CHUNK: usize = 1024;

/// Parameters of all queries here; each uses its own.
#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
pub(super) struct Wanted {
    key: String,
    keys: String,
    segment: String,
    force: String,
    tenant_id: String,
}

impl Wanted {
    /// The tenant that is named, where tenants are apart.
    fn tenant(&self, monitor: &Monitor) -> Option<Tenant> {
        let named = Tenant::new(&self.tenant_id).ok();
        named.filter(|_| !monitor.shares_tenants())
    }
}

fn lines(names: impl IntoIterator<Item = impl AsRef<str>>) -> Response {
    let mut body = String::new();
    for name in names {
        body.push_str(name.as_ref());
        body.push('\n');
    }
    super::text(body)
}

pub(super) async fn all_keys(State(admin): State<Admin>, Query(wanted): Query<Wanted>) -> Response {
    let tenant = wanted.tenant(&admin.monitor);
    lines(admin.monitor.keys(tenant.as_ref()).await)
}

/// The names of segments that can be reached: whoever waits for a first one wants to use it.
pub(super) async fn all_segments(State(admin): State<Admin>) -> Response {
    let stats = admin.monitor.segments().into_iter();
    let names: BTreeSet<_> = stats
        .filter(|stat| admin.monitor.is_connected(stat.client))
        .map(|stat| stat.segment.name)
        .collect();
    lines(names)
}

/// What is known of the segments of one name: a client lends large memory in several.
#[derive(Default)]
pub(super) struct Named {
    pub(super) capacity: u64,
    /// Payload bytes of what has a name in them.
    pub(super) payload: u64,
}

/// The segments by name.
pub(super) fn by_name(monitor: &Monitor) -> BTreeMap<String, Named> {
    let mut all = BTreeMap::<String, Named>::new();
    for (segment, payload) in monitor.payloads() {
        let named = all.entry(segment.name.clone()).or_default();
        named.capacity += segment.len;
        named.payload += payload;
    }
    all
}

pub(super) async fn segment(State(admin): State<Admin>, Query(wanted): Query<Wanted>) -> Response {
    let found = by_name(&admin.monitor).remove(&wanted.segment);
    let Some(Named { capacity, payload }) = found else {
        let failed = super::text("Failed to query segment");
        return (StatusCode::INTERNAL_SERVER_ERROR, failed).into_response();
    };
    super::text(format!(
        "{}\nUsed(bytes): {payload}\nCapacity(bytes) : {capacity}\n",
        wanted.segment
    ))
}

/// A segment's state as a number and a name.
fn status(monitor: &Monitor, stat: &SegmentStat) -> (u32, &'static str) {
    match stat.state {
        // Its owner is about to come back, or to be given up.
        _ if !monitor.is_connected(stat.client) => (0, "DISCONNECTED"),
        SegmentState::Mounted => (1, "OK"),
        _ => (2, "UNMOUNTING"),
    }
}

pub(super) async fn segment_status(
    State(admin): State<Admin>,
    Query(wanted): Query<Wanted>,
) -> Response {
    if wanted.segment.is_empty() {
        let code = ResultCode::INVALID_ARGUMENT.value();
        return super::error(
            StatusCode::BAD_REQUEST,
            code,
            "Missing segment query parameter",
        );
    }
    let segments = admin.monitor.segments();
    let Some(stat) = segments
        .iter()
        .find(|stat| stat.segment.name == wanted.segment)
    else {
        return super::error(
            StatusCode::NOT_FOUND,
            SEGMENT_NOT_FOUND,
            "SEGMENT_NOT_FOUND",
        );
    };
    let (number, name) = status(&admin.monitor, stat);
    let body = json!({
        "success": true,
        "segment": wanted.segment,
        "status": number,
        "status_name": name,
        "error_code": 0,
        "error_message": "",
    });
    super::json(StatusCode::OK, &body)
}

pub(super) async fn segments_detail(State(admin): State<Admin>) -> Response {
    let payloads = admin.monitor.payloads();
    let payload = |stat: &SegmentStat| {
        let found = payloads
            .iter()
            .find(|(segment, _)| segment.id == stat.segment.id);
        found.map_or(0, |(_, payload)| *payload)
    };
    let stats = admin.monitor.segments();
    let segments: Vec<_> = stats
        .iter()
        .map(|stat| detail(&admin.monitor, stat, payload(stat)))
        .collect();
    let body = json!({ "total_segments": segments.len(), "segments": segments });
    super::json(StatusCode::OK, &body)
}

fn detail(monitor: &Monitor, stat: &SegmentStat, payload: u64) -> Value {
    let segment = &stat.segment;
    let len = segment.len;
    json!({
        "segment_name": segment.name,
        "segment_id": segment.id.to_string(),
        "client_id": stat.client.to_string(),
        // Objects are addressed by their offset in the segment.
        "base_address": "0x0",
        "size_bytes": len,
        "size_human": format!("{:.6} GiB", len as f64 / f64::from(1 << 30)),
        "te_endpoint": segment.endpoint.tcp,
        "protocol": "tcp",
        "status": status(monitor, stat).1,
        "allocator_used_bytes": payload,
        "allocator_capacity_bytes": len,
        "allocator_usage_percent": payload as f64 * 100.0 / len as f64,
    })
}

/// The replicas of an object that was found.
fn replicas(monitor: &Monitor, found: &GetStarted) -> Vec<Value> {
    let replicas = found.replicas.iter().filter_map(|replica| {
        let segment = monitor.segment(replica.segment)?;
        Some(json!({
            "size_": found.size,
            "buffer_address_": replica.offset + u64::from(replica.header_len),
            "protocol_": "tcp",
            "transport_endpoint_": segment.endpoint.tcp,
        }))
    });
    replicas.collect()
}

/// Looks keys up as a reader does, one answer for each.
async fn look_up(
    monitor: &Monitor,
    tenant: &Tenant,
    keys: &[&str],
) -> Vec<Result<GetStarted, Refusal>> {
    let mut found = Vec::with_capacity(keys.len());
    for chunk in keys.chunks(CHUNK) {
        let valid: Vec<_> = chunk
            .iter()
            .filter_map(|key| ObjectKey::new(key).ok())
            .collect();
        let mut answers = monitor.query(tenant, &valid).into_iter();
        for key in chunk {
            let answer = ObjectKey::new(key).ok().and_then(|_| answers.next());
            // Nothing can be stored under what is no key.
            found.push(answer.unwrap_or(Err(Refusal::NotFound)));
        }
        tokio::task::yield_now().await;
    }
    found
}

pub(super) async fn key(State(admin): State<Admin>, Query(wanted): Query<Wanted>) -> Response {
    let tenant = wanted.tenant(&admin.monitor).unwrap_or_default();
    let mut found = look_up(&admin.monitor, &tenant, &[&wanted.key]).await;
    match found.pop().unwrap_or(Err(Refusal::NotFound)) {
        Ok(found) => {
            let data = replicas(&admin.monitor, &found);
            super::json(StatusCode::OK, &json!({ "success": true, "data": data }))
        }
        Err(refusal) => {
            let (code, name) = super::refusal(&refusal);
            super::error(StatusCode::NOT_FOUND, code, name)
        }
    }
}

pub(super) async fn keys(State(admin): State<Admin>, Query(wanted): Query<Wanted>) -> Response {
    let keys: Vec<_> = wanted
        .keys
        .split(',')
        .filter(|key| !key.is_empty())
        .collect();
    if keys.is_empty() {
        let body = json!({
            "success": false,
            "error": "No keys provided. Use ?keys=key1,key2,...",
        });
        return super::json(StatusCode::BAD_REQUEST, &body);
    }
    let tenant = wanted.tenant(&admin.monitor).unwrap_or_default();
    let found = look_up(&admin.monitor, &tenant, &keys).await;
    let rows = keys.iter().zip(&found).map(|(key, found)| {
        let (error, values) = match found {
            Ok(found) => (None, Some(replicas(&admin.monitor, found))),
            Err(refusal) => (Some(super::refusal(refusal).1), None),
        };
        let row = json!({
            "ok": error.is_none(),
            "error": error,
            "values": values,
            // There are no such tiers.
            "disk_values": null,
            "local_disk_values": null,
            "nof_values": null,
        });
        ((*key).to_owned(), row)
    });
    let data: serde_json::Map<String, Value> = rows.collect();
    super::json(StatusCode::OK, &json!({ "success": true, "data": data }))
}

pub(super) async fn remove_all(
    State(admin): State<Admin>,
    Query(wanted): Query<Wanted>,
) -> Response {
    let monitor = &admin.monitor;
    let force = matches!(wanted.force.as_str(), "true" | "1");
    let tenants = match (wanted.tenant(monitor), monitor.tenants()) {
        (Some(tenant), _) => vec![tenant],
        (None, Some(strict)) => strict.into_iter().map(|stat| stat.tenant).collect(),
        (None, None) => vec![Tenant::default()],
    };
    let mut removed = 0;
    for tenant in tenants {
        removed += monitor.remove_all(&tenant, force).await;
    }
    super::json(
        StatusCode::OK,
        &json!({ "success": true, "removed_count": removed }),
    )
}
