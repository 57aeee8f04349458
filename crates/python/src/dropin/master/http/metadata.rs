//! The metadata server: values by key, kept in memory.
//!
//! Values are what engines say of themselves: an address, and in Mooncake's own engines a line for each registered
//! buffer, some tens of KiB with many. What ended without a good-bye stays until its key is used again. So that nobody
//! can fill the master's memory from here, a value may be [`LARGEST_VALUE`] long, and all entries together
//! [`ROOM`]: a put beyond is answered with 413 and 507, and changes nothing.

use std::collections::HashMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use parking_lot::RwLock;
use serde::Deserialize;

/// What is kept under one key at most, in bytes.
pub(super) const LARGEST_VALUE: usize = 1 << 20;

/// What all entries may be charged together, in bytes.
const ROOM: usize = 128 << 20;

/// What an entry is charged besides its key and its value, in bytes: about what a table needs for it.
const ENTRY: usize = 128;

/// All values.
pub(super) type Table = Arc<RwLock<Values>>;

#[derive(Debug, Default)]
pub(super) struct Values {
    by_key: HashMap<String, Bytes>,
    /// Charged for all of them.
    used: usize,
}

/// There is no room for an entry.
struct Full;

fn charge(key: &str, value: &Bytes) -> usize {
    ENTRY + key.len() + value.len()
}

impl Values {
    fn insert(&mut self, key: String, value: &[u8]) -> Result<(), Full> {
        // A copy: what was received is a part of a larger buffer, which it would keep.
        let value = Bytes::copy_from_slice(value);
        let old = self.by_key.get(&key).map_or(0, |old| charge(&key, old));
        let used = self.used - old + charge(&key, &value);
        if used > ROOM {
            return Err(Full);
        }
        self.by_key.insert(key, value);
        self.used = used;
        Ok(())
    }

    fn remove(&mut self, key: &str) -> bool {
        let removed = self.by_key.remove(key);
        self.used -= removed.as_ref().map_or(0, |value| charge(key, value));
        removed.is_some()
    }
}

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
    let value = table.read().by_key.get(&wanted.key).cloned();
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
    match table.write().insert(wanted.key, &value) {
        Ok(()) => "metadata updated".into_response(),
        Err(Full) => (StatusCode::INSUFFICIENT_STORAGE, "no room for metadata").into_response(),
    }
}

pub(super) async fn delete(State(table): State<Table>, Query(wanted): Query<Wanted>) -> Response {
    if wanted.key.is_empty() {
        return missing();
    }
    if table.write().remove(&wanted.key) {
        "metadata deleted".into_response()
    } else {
        not_found()
    }
}
