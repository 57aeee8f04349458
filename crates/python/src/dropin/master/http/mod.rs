//! HTTP as operators and connectors know it: the port of metrics and administration, and the metadata server.
//!
//! | module | answers |
//! |---|---|
//! | [`state`] | health and role |
//! | [`metrics`] | `/metrics` and its summary, with Mooncake's names |
//! | [`queries`] | keys, segments, and what is known of them |
//! | [`quotas`] | tenants and their quotas |
//! | [`metadata`] | the key-value store in which transfer engines find each other |
//!
//! Paths, parameters, field names and codes are Mooncake's. Methods that a path does not know are 404 there, not
//! 405, and so they are here. Answers are made from memory; what looks at all keys runs on a thread for
//! blocking work.

mod metadata;
mod metrics;
mod queries;
mod quotas;
mod state;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use layercake_master::Monitor;
use layercake_protocol::code::ResultCode;
use layercake_protocol::error::Refusal;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub(super) use quotas::QuotaFile;

/// What the answers are made from.
#[derive(Clone)]
pub(super) struct Admin {
    monitor: Monitor,
    registry: Arc<Registry>,
    quotas: Arc<QuotaFile>,
}

impl Admin {
    pub(super) fn new(monitor: Monitor, registry: Registry, quotas: QuotaFile) -> Self {
        Self {
            monitor,
            registry: Arc::new(registry),
            quotas: Arc::new(quotas),
        }
    }

    /// The port of metrics and administration.
    pub(super) fn router(self) -> Router {
        Router::new()
            .route("/health", get(state::health))
            .route("/role", get(state::role))
            .route("/ha_status", get(state::ha_status))
            .route("/leader", get(state::leader))
            .route("/metrics", get(metrics::metrics))
            .route("/metrics/summary", get(metrics::summary))
            .route("/get_all_keys", get(queries::all_keys))
            .route("/get_all_segments", get(queries::all_segments))
            .route("/get_segments_detail", get(queries::segments_detail))
            .route("/query_segment", get(queries::segment))
            .route("/query_key", get(queries::key))
            .route("/batch_query_keys", get(queries::keys))
            .route("/api/v1/segments/status", get(queries::segment_status))
            .route("/api/v1/remove_all", post(queries::remove_all))
            .route(
                "/api/v1/tenant_quotas",
                get(quotas::list).put(quotas::set).delete(quotas::remove),
            )
            .method_not_allowed_fallback(nowhere)
            .fallback(nowhere)
            .with_state(self)
    }
}

/// The metadata server.
pub(super) fn metadata() -> Router {
    Router::new()
        .route("/health", get(async || text("OK")))
        .route(
            "/metadata",
            get(metadata::get)
                .put(metadata::put)
                .delete(metadata::delete),
        )
        .method_not_allowed_fallback(nowhere)
        .fallback(nowhere)
        .layer(DefaultBodyLimit::max(metadata::LARGEST_VALUE))
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

/// A refused request, with one of the codes of Mooncake's interface.
fn error(status: StatusCode, code: i32, message: &str) -> Response {
    let body = json!({ "success": false, "error_code": code, "error_message": message });
    json(status, &body)
}

/// What a key is refused with, as the codes and names of Mooncake's interface.
fn refusal(refusal: &Refusal) -> (i32, &'static str) {
    match refusal {
        Refusal::NotReady => (ResultCode::NOT_READY.value(), "REPLICA_IS_NOT_READY"),
        Refusal::InvalidArgument { .. } => (ResultCode::INVALID_ARGUMENT.value(), "INVALID_PARAMS"),
        _ => (ResultCode::NOT_FOUND.value(), "OBJECT_NOT_FOUND"),
    }
}
