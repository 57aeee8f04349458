//! Masters and nodes that go and come back while engines work.

use layercake_engine::run::{Engine, Progress};
use serde_json::json;

use crate::cluster::{Cluster, PATIENCE, config};
use crate::rig::{asks, loaded, on_store, reference, same, sorted, submit};

const POOL: u64 = 32 << 20;

#[test]
fn a_master_that_is_gone_is_a_store_that_has_nothing() {
    let mut cluster = Cluster::start(POOL);
    let expected = reference(&config(), &asks());
    let link = cluster.link(&json!({"lookup_timeout_ms": 200}));
    same(&on_store(&config(), &link, &asks()), &expected, "cold");
    cluster.stop_master();
    let all = on_store(&config(), &link, &asks());
    same(&all, &expected, "no master");
    assert_eq!(loaded(&all), 0);
}

/// The master goes at every step of a run in turn.
#[test]
fn a_master_that_goes_in_the_middle_changes_no_result() {
    let expected = reference(&config(), &asks());
    for at in [1, 3, 6] {
        let mut cluster = Cluster::start(POOL);
        let slow = json!({"lookup_timeout_ms": 200, "layerwise_prefetch_layers": 1});
        let small = layercake_engine::run::EngineConfig {
            step_tokens: 19,
            ..config()
        };
        same(
            &on_store(&small, &cluster.link(&slow), &asks()),
            &expected,
            "cold",
        );
        let mut engine = Engine::with_store(&small, &cluster.link(&slow)).expect("good");
        submit(&mut engine, &asks());
        let mut steps = 0;
        while steps < at {
            steps += usize::from(engine.step().expect("no rank is lost") == Progress::Computed);
        }
        cluster.stop_master();
        let all = sorted(engine.run().expect("no rank is lost"));
        same(&all, &expected, &format!("gone after step {at}"));
        engine.close(PATIENCE).expect("everything ends");
        cluster.start_master();
        cluster.eventually("the node is back", |cluster| {
            cluster.monitor.status().segments == 1
        });
        let again = || on_store(&small, &cluster.link(&json!({})), &asks());
        same(&again(), &expected, &format!("filled after step {at}"));
        let all = again();
        same(&all, &expected, &format!("read after step {at}"));
        assert!(loaded(&all) > 0, "read after step {at}");
    }
}

#[test]
fn a_master_that_starts_anew_is_filled_again() {
    let mut cluster = Cluster::start(POOL);
    let expected = reference(&config(), &asks());
    let link = cluster.link(&json!({}));
    same(&on_store(&config(), &link, &asks()), &expected, "cold");
    cluster.stop_master();
    cluster.start_master();
    cluster.eventually("the node is back", |cluster| {
        cluster.monitor.status().segments == 1
    });
    for _ in 0..2 {
        same(
            &on_store(&config(), &link, &asks()),
            &expected,
            "after the restart",
        );
    }
}

#[test]
fn a_node_that_leaves_takes_its_blocks_along_and_nothing_else() {
    let mut cluster = Cluster::with(&[POOL, POOL], None);
    let expected = reference(&config(), &asks());
    let link = cluster.link(&json!({}));
    same(&on_store(&config(), &link, &asks()), &expected, "cold");
    let mut engine = Engine::with_store(&config(), &link).expect("good");
    submit(&mut engine, &asks());
    while engine.step().expect("no rank is lost") != Progress::Computed {}
    drop(cluster.nodes.pop());
    let all = sorted(engine.run().expect("no rank is lost"));
    same(&all, &expected, "one node left");
    engine.close(PATIENCE).expect("everything ends");
    same(
        &on_store(&config(), &link, &asks()),
        &expected,
        "afterwards",
    );
}
