//! Loads that don't come to an end: the connector's deadline passes, and the engine goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use layercake_engine::run::{Completion, Engine, EngineConfig};
use layercake_transport::mock::{MockNetwork, Pace};
use serde_json::json;

use crate::cluster::{Cluster, PATIENCE, config};
use crate::rig::{asks, on_store, reference, same, sorted, submit};

/// Lets a network's time pass as long as it flows.
struct Tide {
    flows: Arc<AtomicBool>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Tide {
    fn new(network: &MockNetwork) -> Self {
        let flows = Arc::new(AtomicBool::new(true));
        let ends = Arc::new(AtomicBool::new(false));
        let (network, flow, end) = (network.clone(), Arc::clone(&flows), Arc::clone(&ends));
        let thread = thread::spawn(move || {
            while !end.load(Ordering::SeqCst) {
                if flow.load(Ordering::SeqCst) {
                    network.run_until_idle();
                }
                thread::yield_now();
            }
        });
        Self {
            flows,
            ends,
            thread: Some(thread),
        }
    }

    fn flows(&self, flows: bool) {
        self.flows.store(flows, Ordering::SeqCst);
    }
}

impl Drop for Tide {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so already.
            drop(thread.join());
        }
    }
}

/// An engine whose loads stand still until the first deadline has passed. How its requests end.
fn late(ranks: u32, policy: &str) -> (Vec<Completion>, Vec<Completion>) {
    let config = EngineConfig { ranks, ..config() };
    let expected = reference(&config, &asks());
    let network = MockNetwork::new(5, Pace::Manual);
    let tide = Tide::new(&network);
    let cluster = Cluster::with(&[8 << 20], Some(network));
    let cold = on_store(&config, &cluster.link(&json!({})), &asks());
    same(&cold, &expected, "cold");

    let options = json!({
        "kv_role": "kv_consumer", "kv_load_failure_policy": policy, "layer_timeout_ms": 100,
    });
    let link = cluster.link(&options);
    let mut engine = Engine::with_store(&config, &link).expect("good");
    submit(&mut engine, &asks());
    tide.flows(false);
    let until = Instant::now() + PATIENCE;
    let given_up = |engine: &Engine| {
        let (scheduler, _) = engine.connector_stats().expect("it has a connector");
        scheduler.recomputed_requests + scheduler.failed_requests
    };
    while given_up(&engine) == 0 {
        assert!(Instant::now() < until, "the deadline passes");
        engine.step().expect("no rank is lost");
    }
    let held = config.blocks - engine.idle_blocks() as u64;
    assert!(held > 0, "what may still be read into is kept");
    tide.flows(true);
    let found = sorted(engine.run().expect("no rank is lost"));
    assert_eq!(engine.idle_blocks() as u64, config.blocks, "and comes back");
    engine.close(PATIENCE).expect("everything ends");
    (found, expected)
}

#[test]
fn a_load_that_stands_still_costs_its_requests_a_recomputation() {
    for ranks in [1, 2] {
        let (found, expected) = late(ranks, "recompute");
        same(&found, &expected, "recomputed");
        assert!(found.iter().any(|one| one.cuts > 0));
    }
}

#[test]
fn a_load_that_stands_still_fails_its_requests_and_no_others() {
    let (found, expected) = late(2, "fail");
    assert!(found.iter().any(|one| one.failed));
    for (found, expected) in found.iter().zip(&expected) {
        if found.failed {
            assert!(found.loaded_tokens > 0, "{} did not load", found.id);
        } else {
            assert_eq!(found.tokens, expected.tokens, "{}", found.id);
            assert_eq!(found.logits, expected.logits, "{}", found.id);
        }
    }
}
