//! Tenants and their quotas, in a master that was started with them.
//!
//! Changes are written back to the file that the quotas came from, so that a restarted master has them.

use std::path::PathBuf;

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use layercake_master::Monitor;
use layercake_master::mooncake::{FileError, Quotas};
use layercake_master::state::TenantStat;
use layercake_protocol::code::ResultCode;
use layercake_protocol::error::Refusal;
use layercake_protocol::key::Tenant;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Admin;

/// There are no quotas here.
const OTHER_MODE: i32 = -1011;
/// The tenant stores something.
const NOT_EMPTY: i32 = -1702;
const INTERNAL_ERROR: i32 = -1;

/// The file that quotas came from. Locked while quotas are changed, so that changes reach it in order.
#[derive(Debug)]
pub(in super::super) struct QuotaFile(Mutex<Option<PathBuf>>);

impl QuotaFile {
    pub(in super::super) fn new(path: Option<PathBuf>) -> Self {
        Self(Mutex::new(path))
    }
}

#[derive(Deserialize)]
pub(super) struct Wanted {
    tenant_id: Option<String>,
}

#[derive(Deserialize)]
struct Change {
    #[serde(default)]
    requested_quota_bytes: u64,
}

fn invalid(message: &str) -> Response {
    let code = ResultCode::INVALID_ARGUMENT.value();
    super::error(StatusCode::BAD_REQUEST, code, message)
}

fn no_tenant() -> Response {
    invalid("Missing or invalid tenant_id")
}

fn other_mode() -> Response {
    super::error(
        StatusCode::CONFLICT,
        OTHER_MODE,
        "UNAVAILABLE_IN_CURRENT_MODE",
    )
}

fn unknown() -> Response {
    let code = ResultCode::NOT_FOUND.value();
    super::error(StatusCode::NOT_FOUND, code, "OBJECT_NOT_FOUND")
}

fn done(data: &Value) -> Response {
    super::json(StatusCode::OK, &json!({ "success": true, "data": data }))
}

/// What a tenant can fill: its quota, but no more than there is.
pub(super) fn effective(stat: &TenantStat, capacity: u64) -> u64 {
    stat.quota_bytes.min(capacity)
}

fn show(stat: &TenantStat, capacity: u64) -> Value {
    json!({
        "tenant_id": stat.tenant.as_str(),
        "requested_quota_bytes": stat.quota_bytes,
        "effective_quota_bytes": effective(stat, capacity),
        "charged_bytes": stat.charged_bytes,
        "admission_closed": false,
        "over_quota": stat.charged_bytes > stat.quota_bytes,
        "has_explicit_policy": true,
    })
}

fn find(monitor: &Monitor, tenant: &Tenant) -> Option<Value> {
    let stats = monitor.tenants().unwrap_or_default();
    let stat = stats.iter().find(|stat| stat.tenant == *tenant)?;
    Some(show(stat, monitor.gauges().capacity_bytes))
}

pub(super) async fn list(State(admin): State<Admin>, Query(wanted): Query<Wanted>) -> Response {
    let monitor = &admin.monitor;
    let Some(stats) = monitor.tenants() else {
        return other_mode();
    };
    if let Some(tenant) = wanted.tenant_id {
        let tenant = Tenant::new(&tenant).ok();
        let found = tenant.and_then(|tenant| find(monitor, &tenant));
        return found.map_or_else(unknown, |found| done(&found));
    }
    let capacity = monitor.gauges().capacity_bytes;
    done(&stats.iter().map(|stat| show(stat, capacity)).collect())
}

pub(super) async fn set(
    State(admin): State<Admin>,
    Query(wanted): Query<Wanted>,
    body: Bytes,
) -> Response {
    let Some(tenant) = wanted.tenant_id.and_then(|name| Tenant::new(&name).ok()) else {
        return no_tenant();
    };
    if admin.monitor.tenants().is_none() {
        return other_mode();
    }
    let quota = match serde_json::from_slice::<Change>(&body) {
        Ok(change) => change.requested_quota_bytes,
        Err(error) => return invalid(&format!("Invalid JSON body: {error}")),
    };
    if !Quotas::ACCEPTED.contains(&quota) {
        return invalid("Tenant quota must be in [1, 2^63 - 1] bytes");
    }
    change(admin, move |monitor| {
        monitor.set_quota(&tenant, quota)?;
        Ok(find(monitor, &tenant).unwrap_or_default())
    })
    .await
}

pub(super) async fn remove(State(admin): State<Admin>, Query(wanted): Query<Wanted>) -> Response {
    let Some(tenant) = wanted.tenant_id.and_then(|name| Tenant::new(&name).ok()) else {
        return no_tenant();
    };
    change(admin, move |monitor| {
        monitor.remove_quota(&tenant)?;
        Ok(Value::Null)
    })
    .await
}

/// Changes quotas, and the file with them, on a thread for blocking work.
async fn change(
    admin: Admin,
    change: impl FnOnce(&Monitor) -> Result<Value, Refusal> + Send + 'static,
) -> Response {
    let work = tokio::task::spawn_blocking(move || {
        let Admin {
            monitor, quotas, ..
        } = &admin;
        let path = quotas.0.lock();
        let data = match change(monitor) {
            Ok(data) => data,
            Err(Refusal::InvalidArgument { .. }) => return other_mode(),
            Err(Refusal::InProgress) => {
                return super::error(StatusCode::CONFLICT, NOT_EMPTY, "TENANT_NOT_EMPTY");
            }
            Err(_) => return unknown(),
        };
        match write(monitor, path.as_ref()) {
            Ok(()) => done(&data),
            Err(error) => {
                let message = format!("the change holds until a restart: {error}");
                super::error(StatusCode::INTERNAL_SERVER_ERROR, INTERNAL_ERROR, &message)
            }
        }
    });
    work.await.unwrap_or_else(|_| other_mode())
}

fn write(monitor: &Monitor, path: Option<&PathBuf>) -> Result<(), FileError> {
    let Some(path) = path else { return Ok(()) };
    let stats = monitor.tenants().unwrap_or_default().into_iter();
    let quotas = Quotas {
        tenants: stats.map(|stat| (stat.tenant, stat.quota_bytes)).collect(),
    };
    quotas.write(path)
}
