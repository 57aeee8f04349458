//! Behaviour of the segment host.

mod fences;
mod inventory;
mod segments;

use std::time::Duration;

use layercake_store::link::{Backoff, LinkConfig, MasterLink};
use layercake_store::node::{NodeConfig, SegmentSpec};
use layercake_transport::{Engine, EngineConfig};

use crate::fake::{PATIENCE, Served};

const MIB: u64 = 1 << 20;

fn engine() -> Engine {
    Engine::start(EngineConfig::default()).expect("an engine on loopback")
}

/// A link for a node with this engine.
async fn link(served: &Served, name: &str, engine: &Engine) -> MasterLink {
    let config = LinkConfig {
        endpoint: Some(engine.endpoint().clone()),
        backoff: Backoff {
            first: Duration::from_millis(5),
            most: Duration::from_millis(20),
        },
        ..LinkConfig::new(served.address.to_string(), name)
    };
    MasterLink::connect(config).await.expect("it is there")
}

fn lending(lens: &[u64]) -> NodeConfig {
    NodeConfig {
        segments: lens
            .iter()
            .map(|len| SegmentSpec {
                len: *len,
                huge_pages: false,
            })
            .collect(),
    }
}

/// Yields until a condition holds.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let met = async {
        while !condition() {
            // Something outside of this runtime has to happen.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let met = tokio::time::timeout(PATIENCE, met).await;
    assert!(met.is_ok(), "never happened: {what}");
}
