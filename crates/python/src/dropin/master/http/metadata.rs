//! The metadata server: values by key, kept in memory.

use std::collections::HashMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use parking_lot::RwLock;
use serde::Deserialize;

/// All values. They are addresses of engines: small and few.
pub(super) type Table = Arc<RwLock<HashMap<String, Bytes>>>;

#[derive(Deserialize)]
pub(super) struct Wanted {
    #[serde(default)]
    key: String,
}

fn missing() -> Response {
    (StatusCode::BAD_REQUEST, "Missing key parameter").into_response()
}

fn not_found() -> Response {
    (StatusCode::NOT_FOUND, "metadata not found").into_response()
}

pub(super) async fn get(State(table): State<Table>, Query(wanted): Query<Wanted>) -> Response {
    if wanted.key.is_empty() {
        return missing();
    }
    let value = table.read().get(&wanted.key).cloned();
    let media = [(header::CONTENT_TYPE, "application/json")];
    value.map_or_else(not_found, |value| (media, value).into_response())
}

pub(super) async fn put(
    State(table): State<Table>,
    Query(wanted): Query<Wanted>,
    value: Bytes,
) -> Response {
    if wanted.key.is_empty() {
        return missing();
    }
    table.write().insert(wanted.key, value);
    "metadata updated".into_response()
}

pub(super) async fn delete(State(table): State<Table>, Query(wanted): Query<Wanted>) -> Response {
    if wanted.key.is_empty() {
        return missing();
    }
    match table.write().remove(&wanted.key) {
        Some(_) => "metadata deleted".into_response(),
        None => not_found(),
    }
}
