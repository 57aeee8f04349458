//! Health and role.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

use super::Admin;

pub(super) async fn health(State(admin): State<Admin>) -> Response {
    let serving = admin.monitor.serving();
    let status = if serving {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let body = json!({
        "status": if serving { "ok" } else { "stopping" },
        "role": "leader",
        "ha_state": ha_state(serving),
        "service_ready": serving,
        // One master without a standby has no address in a view of leaders.
        "leader_address": null,
        "view_version": null,
    });
    super::json(status, &body)
}

pub(super) fn ha_state(serving: bool) -> &'static str {
    if serving { "serving" } else { "stopping" }
}

pub(super) async fn role() -> Response {
    super::text("leader")
}

pub(super) async fn ha_status(State(admin): State<Admin>) -> Response {
    super::text(ha_state(admin.monitor.serving()))
}

pub(super) async fn leader() -> Response {
    let body = json!({ "present": false, "leader_address": null, "view_version": null });
    super::json(StatusCode::OK, &body)
}
