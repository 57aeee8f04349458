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
    key: Option<String>,
}

impl Wanted {
    fn key(self) -> Result<String, Response> {
        let missing = || (StatusCode::BAD_REQUEST, "Missing key parameter").into_response();
        self.key.filter(|key| !key.is_empty()).ok_or_else(missing)
    }
}

fn not_found() -> Response {
    (StatusCode::NOT_FOUND, "metadata not found").into_response()
}

pub(super) async fn get(State(table): State<Table>, Query(wanted): Query<Wanted>) -> Response {
    let key = match wanted.key() {
        Ok(key) => key,
        Err(response) => return response,
    };
    let value = table.read().get(&key).cloned();
    let media = [(header::CONTENT_TYPE, "application/json")];
    value.map_or_else(not_found, |value| (media, value).into_response())
}

pub(super) async fn put(
    State(table): State<Table>,
    Query(wanted): Query<Wanted>,
    value: Bytes,
) -> Response {
    match wanted.key() {
        Ok(key) => {
            table.write().insert(key, value);
            "metadata updated".into_response()
        }
        Err(response) => response,
    }
}

pub(super) async fn delete(State(table): State<Table>, Query(wanted): Query<Wanted>) -> Response {
    match wanted.key() {
        Ok(key) => match table.write().remove(&key) {
            Some(_) => "metadata deleted".into_response(),
            None => not_found(),
        },
        Err(response) => response,
    }
}
