//! Behaviour of the link to the master.

mod batches;
mod greeting;
mod lifecycle;
mod reconnect;

use std::net::SocketAddr;
use std::time::Duration;

use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::PutStart;
use layercake_store::StoreError;
use layercake_store::link::{Backoff, LinkConfig, LinkState, MasterLink, Timeouts};

use crate::fake::PATIENCE;

/// A link that is quick to notice and to return.
fn config(master: SocketAddr) -> LinkConfig {
    LinkConfig {
        timeouts: Timeouts {
            connect: Duration::from_secs(5),
            call: Duration::from_secs(10),
            ..Timeouts::default()
        },
        backoff: Backoff {
            first: Duration::from_millis(5),
            most: Duration::from_millis(20),
        },
        ..LinkConfig::new(master.to_string(), "test")
    }
}

fn key(text: impl Into<Text>) -> ObjectKey {
    ObjectKey::new(&text.into().0).expect("a short key")
}

/// What makes a short key.
struct Text(String);

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<i32> for Text {
    fn from(number: i32) -> Self {
        Self(number.to_string())
    }
}

fn put(text: impl Into<Text>) -> PutStart {
    PutStart::new(key(text), 100)
}

/// Waits for a state of the link.
async fn state(link: &MasterLink, what: &str, wanted: impl FnMut(&LinkState) -> bool) -> LinkState {
    let mut watch = link.watch();
    let came = tokio::time::timeout(PATIENCE, watch.wait_for(wanted)).await;
    match came {
        Ok(Ok(state)) => state.clone(),
        _ => panic!("the link never came to be {what}: {:?}", link.state()),
    }
}

async fn up(link: &MasterLink) -> LinkState {
    state(link, "up", |state| matches!(state, LinkState::Up { .. })).await
}

async fn down(link: &MasterLink) -> StoreError {
    match state(link, "down", |state| matches!(state, LinkState::Down(_))).await {
        LinkState::Down(error) => error,
        other => panic!("{other:?} is not down"),
    }
}
