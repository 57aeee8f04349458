//! Keys and segments.

use axum::extract::State;
use axum::response::Response;
use layercake_master::Monitor;

fn lines(names: impl IntoIterator<Item = impl AsRef<str>>) -> Response {
    let mut body = String::new();
    for name in names {
        body.push_str(name.as_ref());
        body.push('\n');
    }
    super::text(body)
}

pub(super) async fn all_keys(State(monitor): State<Monitor>) -> Response {
    lines(monitor.keys(None).await)
}

pub(super) async fn all_segments(State(monitor): State<Monitor>) -> Response {
    let segments = monitor.segments();
    lines(segments.iter().map(|stat| stat.segment.name.as_str()))
}
