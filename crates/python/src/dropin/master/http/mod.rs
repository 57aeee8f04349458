//! HTTP as operators and connectors know it: the port of metrics and administration, and the metadata server.
//!
//! | module | answers |
//! |---|---|
//! | [`state`] | health, role, metrics |
//! | [`queries`] | keys, segments, and what is known of them |
//! | [`metadata`] | the key-value store in which transfer engines find each other |
//!
//! Paths, parameters, field names and codes are Mooncake's. Methods that a path does not know are 404 there, not
//! 405, and so they are here. Answers are made from memory; a listing of all keys runs on a thread for
//! blocking work.

mod metadata;
mod queries;
mod state;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get};
use layercake_master::Monitor;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// The port of metrics and administration.
pub(super) fn admin(monitor: Monitor) -> Router {
    Router::new()
        .route("/health", get(state::health))
        .route("/role", get(state::role))
        .route("/ha_status", get(state::ha_status))
        .route("/leader", get(state::leader))
        .route("/get_all_keys", get(queries::all_keys))
        .route("/get_all_segments", get(queries::all_segments))
        .method_not_allowed_fallback(nowhere)
        .fallback(nowhere)
        .with_state(monitor)
}

/// The metadata server.
pub(super) fn metadata() -> Router {
    Router::new()
        .route("/health", get(async || text("OK")))
        .route(
            "/metadata",
            get(metadata::get)
                .put(metadata::put)
                .merge(delete(metadata::delete)),
        )
        .method_not_allowed_fallback(nowhere)
        .fallback(nowhere)
        .with_state(metadata::Table::default())
}

/// Serves until `stop`.
pub(super) async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    let serving = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = serving.await {
        tracing::error!(%error, "serving HTTP failed");
    }
}

async fn nowhere() -> Response {
    (StatusCode::NOT_FOUND, text("404 Not Found")).into_response()
}

fn text(body: impl Into<String>) -> Response {
    let plain = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
    (plain, body.into()).into_response()
}

fn json(status: StatusCode, body: &Value) -> Response {
    let media = [(header::CONTENT_TYPE, "application/json; charset=utf-8")];
    (status, media, body.to_string()).into_response()
}
